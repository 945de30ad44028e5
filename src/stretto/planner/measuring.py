"""Seconds of forward passes, decode steps, training passes and updates."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from stretto.algorithms.experience import LossInputs
from stretto.config import AlgorithmConfig, RolloutConfig
from stretto.models.forward import positions
from stretto.planner import work as compute
from stretto.planner.layout import Mesh
from stretto.planner.points import Point
from stretto.planner.subject import Subject
from stretto.rollout.base import Engine
from stretto.rollout.engine import TorchEngine
from stretto.training.backprop import LocalBackprop
from stretto.training.losses import Losses, MicroBatch
from stretto.training.trained import LearningRate, TrainedModel, WholeModel
from stretto.types import Prompt, Response

ENOUGH_S, PATIENCE_S = 0.3, 5.0
"""Seconds up to which a point gets further repeats, and after which it gets none."""


DECODED = 3
"""Repeats of decode points for each one of others: they are short, and cannot go on for longer."""
ADMITTED = 64
"""Tokens that a row may get while others of its point are prefilled."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        length: tokens of a sequence in prefills and training.
        prefill: tokens of each forward pass.
        decode: rows, and tokens of each at the start, of each decode point.
        steps: decode steps that are timed together.
        training: tokens of each micro-batch.
        product: rows and columns of the matrices that are multiplied for the peak.
        copies: MB of each copy within the device.
        moves: MB of each broadcast and swap.
        repeats: of each point; the median counts. Short calls are repeated more often, and long
            ones less.
    """

    length: int = 128
    prefill: tuple[int, ...] = (128, 512, 1024)
    decode: tuple[tuple[int, int], ...] = ((4, 32), (4, 256), (16, 32), (16, 128), (48, 64))
    steps: int = 8
    training: tuple[int, ...] = (256, 1024)
    product: int = 2048
    copies: tuple[int, ...] = (1, 256)
    moves: tuple[int, ...] = (16, 128)
    repeats: int = 5

    @classmethod
    def of(cls, device: torch.device) -> Sizes:
        """Return what suits a device: a GPU needs more to be full."""
        if device.type == "cpu":
            return cls()
        return cls(
            length=512,
            prefill=(1024, 4096, 16_384),
            decode=((8, 128), (8, 1024), (64, 128), (64, 1024), (256, 256)),
            steps=32,
            training=(2048, 8192),
            product=8192,
            copies=(1024,),
            moves=(64, 512),
        )


def prefills(subject: Subject, sizes: Sizes) -> Iterator[Point]:
    """Yield log-probs of known tokens, as a reference model computes them."""
    whole = WholeModel(subject.model)
    for tokens in sizes.prefill:
        responses = _responses(subject, tokens, sizes.length)
        mask = _mask(responses)
        length = len(responses[0]) + 1
        seconds = timed(
            partial(whole.logprobs, responses, mask, 1.0, 2 * tokens),
            subject.device,
            sizes.repeats,
        )
        total = length * len(responses)
        flops = compute.forward_flops(subject.shape, total, length, 1)
        yield Point("prefill", f"{len(responses)} x {length} tokens", seconds, flops=flops)


def decodes(subject: Subject, sizes: Sizes) -> Iterator[Point]:
    """Yield decode steps of Stretto's own engine, sampling as a run does."""
    rollout = subject.config.rollout
    room = positions(subject.model, generating=True) or 10**9
    budget = _decoded(sizes)
    for rows, context in sizes.decode:
        context = max(1, min(context, room - budget))
        config = RolloutConfig(
            batch=rows,
            max_new_tokens=budget,
            temperature=rollout.temperature,
            engine_args=rollout.engine_args if rollout.engine == "torch" else {},
        )
        engine = TorchEngine(subject.model, config, end_tokens=frozenset(), seed=0, slots=rows)
        prompts = [Prompt(i, tuple(_ids(subject, context, i).tolist()), "") for i in range(rows)]
        engine.admit([Response(p.id, p.id, p, np.zeros(0, np.int32)) for p in prompts])
        while len(engine.decode(1).chunks) < rows:  # until all prompts are in the cache
            pass
        seconds, read = _steps(engine, subject.device, sizes)
        shape, each = subject.shape, read / rows
        yield Point(
            "decode",
            f"{rows} rows, {each:.0f} tokens each",
            seconds,
            flops=compute.decode_flops(shape, rows, each, 1),
            size=compute.decode_read_bytes(shape, rows, each, 1),
        )


def trainings(subject: Subject, sizes: Sizes) -> Iterator[Point]:
    """Yield forward and backward passes of micro-batches, and then an update of the weights."""
    training, temperature = subject.config.training, subject.config.rollout.temperature
    trained = TrainedModel(subject.model, LearningRate(1e-6, 10**6), training)
    losses = Losses(AlgorithmConfig(), temperature)
    passes = LocalBackprop(subject.model, None, losses, training.microbatch_tokens)
    for tokens in sizes.training:
        responses = _responses(subject, tokens, sizes.length)
        batch = _micro_batch(subject, responses)
        seconds = timed(
            partial(passes.run, [batch], 0.0, trains_actor=True), subject.device, sizes.repeats
        )
        rows, length = len(responses), len(responses[0]) + 1
        flops = compute.training_flops(subject.shape, rows * length, length, 1, checkpointing=False)
        yield Point("training", f"{rows} x {length} tokens", seconds, flops=flops)
    seconds = timed(trained.update, subject.device, sizes.repeats)
    size = compute.optimizer_bytes(subject.shape, Mesh(1))
    yield Point("update", f"{subject.shape.parameters:,.0f} weights", seconds, size=size)
    trained.close()


def timed(
    work: Callable[[], object],
    device: torch.device,
    repeats: int,
    *,
    enough_s: float = ENOUGH_S,
    patience_s: float = PATIENCE_S,
    pick: Callable[[Sequence[float]], float] = statistics.median,
) -> float:
    """Return the seconds of a call, after one that warms up.

    Args:
        work: is called.
        device: that it uses; waited for.
        repeats: calls that count, at least.
        enough_s: before which there are more.
        patience_s: after which there are none, however few there were.
        pick: which of the calls' seconds; by default their median.
    """
    found: list[float] = []
    began_s = time.perf_counter()
    while True:
        start_s = time.perf_counter()
        work()
        _wait_for(device)
        end_s = time.perf_counter()
        found.append(end_s - start_s)
        enough = len(found) > repeats and end_s - began_s > enough_s
        if len(found) > 1 and (enough or end_s - began_s > patience_s):
            break
    return pick(found[1:])


def _decoded(sizes: Sizes) -> int:
    return sizes.steps * (DECODED * sizes.repeats + 1) + ADMITTED


def _steps(engine: Engine, device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """Return seconds of a step, and cache positions that it reads, those of the median repeat."""
    found: list[tuple[float, float]] = []

    def some() -> None:
        before, start_s = engine.context_tokens, time.perf_counter()
        engine.decode(sizes.steps)
        _wait_for(device)
        seconds, read = time.perf_counter() - start_s, engine.context_tokens - before
        found.append((seconds / sizes.steps, read / sizes.steps))

    timed(some, device, DECODED * sizes.repeats, enough_s=0.0)
    return sorted(found[1:])[(len(found) - 1) // 2]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _responses(subject: Subject, tokens: int, length: int) -> list[Response]:
    length = max(2, min(length, tokens, positions(subject.model) or length))
    return [
        Response(i, i, Prompt(i, (1,), ""), _ids(subject, length - 1, i))
        for i in range(max(1, tokens // length))
    ]


def _ids(subject: Subject, count: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Random token ids [count]."""
    rng = np.random.default_rng(seed)
    return rng.integers(subject.shape.vocabulary, size=count, dtype=np.int32)


def _mask(responses: Sequence[Response]) -> torch.Tensor:
    return torch.ones(len(responses), len(responses[0]), dtype=torch.bool)


def _micro_batch(subject: Subject, responses: Sequence[Response]) -> MicroBatch:
    """Make a micro-batch as of an update of its own; its old policy is the one under training."""
    mask = _mask(responses)
    rows = len(responses)
    even = mask / mask.sum()
    inputs = LossInputs(
        mask=mask,
        weights=even,
        means=even,
        response_weights=torch.full((rows,), 1 / rows),
        advantages=torch.linspace(-1.0, 1.0, rows)[:, None].expand(mask.shape).contiguous(),
        old_logprobs=torch.full(mask.shape, -math.log(subject.shape.vocabulary)),
        own=torch.ones(rows, dtype=torch.bool),
    )
    return MicroBatch.of(responses, inputs)
