"""Timed pieces of a run's work on this machine, to which rates are fitted. They are passes of a
model with random weights, products and copies on the device, and transfers between processes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import psutil
import torch
import torch.distributed as dist

from stretto.algorithms.experience import LossInputs
from stretto.config import AlgorithmConfig, Config, RolloutConfig
from stretto.errors import ModelError
from stretto.layout import Layout
from stretto.machine import Machine, usable_cores
from stretto.models.backend import backend_of, pick_device, pick_dtype
from stretto.models.forward import positions
from stretto.models.info import described
from stretto.models.load import architecture
from stretto.models.resolve import is_known
from stretto.models.shapes import Shape, known_config
from stretto.planner import formulas
from stretto.planner.calibration import MeasuredDevice, Point
from stretto.planner.memory_model import BUCKET, HALF, activation_bytes, logits_bytes
from stretto.rollout.base import Engine, EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.training.backprop import LocalBackprop
from stretto.training.losses import Losses, MicroBatch
from stretto.training.trained import LearningRate, TrainedModel, WholeModel
from stretto.types import Prompt, Response, WeightsRef
from stretto.weights.broadcast import WeightReceiver, WeightSender
from stretto.weights.transfer import Meeting, Route, Wire, open_store
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STAND_INS = (
    *("Qwen/Qwen2.5-3B-Instruct", "microsoft/rho-math-1b-v0.1", "EleutherAI/pythia-410m-deduped"),
    *("smollm2-135m", "tiny"),
)
"""Models of known shapes, largest first, to replace one that is too large or not at hand."""
CPU_PARAMETERS = 2e8
BYTES = 20
FREE_SHARE = 0.7
"""Most parameters to measure on a CPU, as more take minutes; bytes of each in training (weight,
gradient, 16 of float32 states); and the share of the free memory that these may take."""
ENOUGH_S, PATIENCE_S = 0.3, 5.0
"""Seconds up to which a point is repeated further, and after which it is not repeated."""
DECODED, ADMITTED = 3, 64
"""Repeats of a (short) decode point for each repeat of another, and tokens that a row may get while
other rows of its point are prefilled."""
TENSOR, REDUCTIONS = 1 << 20, 20
"""Elements of a sent tensor, and all-reduces that are timed together."""
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class WorkSizes:
    """Sizes of the measured work: tokens of passes, rows of a matrix, and MB of copies. A
    ``decode`` point has a number of rows, and initial tokens of each row."""

    length: int = 128  # of a sequence in prefills and training
    prefill: tuple[int, ...] = (128, 512, 1024)
    decode: tuple[tuple[int, int], ...] = ((4, 32), (4, 256), (16, 32), (16, 128), (48, 64))
    steps: int = 8  # decode steps timed together
    training: tuple[int, ...] = (256, 1024)
    product: int = 2048
    copies: tuple[int, ...] = (1, 256)
    moves: tuple[int, ...] = (16, 128)  # of broadcasts, and of swaps with the host
    repeats: int = 5  # minimum for each short point

    @classmethod
    def of(cls, device: torch.device) -> WorkSizes:
        """Return the sizes for a device. A GPU needs more work to be full."""
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

    @property
    def decoded(self) -> int:
        """Most tokens that a row gets in a decode point."""
        return self.steps * (DECODED * self.repeats + 1) + ADMITTED


@dataclass(frozen=True)
class MeasuredModel:
    """A randomly initialized model of the named model's shape, on a run's device."""

    name: str
    config: Config
    device: torch.device
    dtype: torch.dtype

    @cached_property
    def shape(self) -> Shape:
        return described(self.name).shape

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model as if loaded. Making it leaves torch's random state as it was."""
        from transformers import AutoModelForCausalLM

        auto_class: Any = AutoModelForCausalLM
        trust = self.config.model.trust_remote_code
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), self.device:
            torch.manual_seed(0)
            model: Any = auto_class.from_config(
                architecture(self.name, trust), dtype=self.dtype, trust_remote_code=trust
            )
        backend_of(self.device).use_fastest_attention(model.eval())
        return cast("PreTrainedModel", model)


def model_to_measure(config: Config, tokens: int, say: Callable[[str], None]) -> MeasuredModel:
    """Return a model of the run's shape, or of the largest that fits here with its micro-batches.
    ``say`` gets a note on a replacement. Nothing is downloaded. Raises ModelError if none fits."""
    device = pick_device(config.model.device)
    dtype = pick_dtype(config.model.dtype, device)
    run_model, reason = config.model.name, ""
    for name in dict.fromkeys((run_model, *STAND_INS)):
        model = MeasuredModel(name, config, device, dtype)
        if fault := _fault(model, tokens):
            reason = reason or fault
            continue
        if reason:
            say(
                f"'{run_model}' {reason}; '{name}' stands in for it. Rates carry over better than "
                "seconds beside them, which grow with the number of layers"
            )
        return model
    raise ModelError(f"no model fits here to measure with: '{run_model}' {reason}", "nothing-fits")


def _fault(model: MeasuredModel, tokens: int) -> str:
    name = model.name
    if known_config(name) is None and not is_known(name) and not Path(name).expanduser().is_dir():
        return "would have to be fetched"
    try:
        shape = model.shape
    except ModelError as error:
        return f"has no shape that plans know ({error})"
    if model.device.type == "cpu" and shape.parameters > CPU_PARAMETERS:
        return f"has {shape.parameters / 1e9:.1f} billion parameters, too many for a CPU"
    needed = BYTES * shape.parameters + logits_bytes(shape, tokens, gradients=True)
    needed += activation_bytes(shape, tokens, 1, checkpointing=False)
    free = FREE_SHARE * free_bytes(model.device)
    if needed > free:
        return f"needs {needed / 1e9:.0f} GB to be trained, of {free / 1e9:.0f} that may be taken"
    return ""


def free_bytes(device: torch.device) -> int:
    return backend_of(device).free_bytes()


def device_of(model: MeasuredModel) -> MeasuredDevice:
    """Return the device, and the memory that a process may fill on it."""
    if model.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(model.device)
        return MeasuredDevice(gpu.name, float(gpu.total_memory), torch.cuda.device_count())
    threads = torch.get_num_threads()
    processes = max(1, usable_cores() // threads)
    share = psutil.virtual_memory().total / processes
    cores = f"{threads} core{'s' if threads > 1 else ''}"
    return MeasuredDevice(f"{Machine.here().cpu} ({cores})", float(share), processes)


def measured(model: MeasuredModel, sizes: WorkSizes) -> Iterator[Point]:
    """Yield points of every kind."""
    yield from peaks(model.device, model.dtype, sizes)
    yield from prefills(model, sizes)
    yield from decodes(model, sizes)
    yield from trainings(model, sizes)
    yield from swaps(model.device, sizes)
    # Processes of a run share the cores. Each has as many as this process now.
    yield from broadcasts(model.device, model.dtype, torch.get_num_threads(), sizes)


def timed(
    work: Callable[[], object],
    device: torch.device,
    repeats: int,
    *,
    enough_s: float = ENOUGH_S,
    patience_s: float = PATIENCE_S,
    pick: Callable[[Sequence[float]], float] = statistics.median,
) -> float:
    """Return the seconds of a call, by default the median, after a call that warms up. It is
    timed at least ``repeats`` times and for ``enough_s``, but not after ``patience_s``."""
    durations_s: list[float] = []
    began_s = time.perf_counter()
    while True:
        start_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        end_s = time.perf_counter()
        durations_s.append(end_s - start_s)
        enough = len(durations_s) > repeats and end_s - began_s > enough_s
        if len(durations_s) > 1 and (enough or end_s - began_s > patience_s):
            break
    return pick(durations_s[1:])


def prefills(model: MeasuredModel, sizes: WorkSizes) -> Iterator[Point]:
    """Yield log-probs of known tokens, as a reference model computes them."""
    reference = WholeModel(model.model)
    for tokens in sizes.prefill:
        responses = _responses(model, tokens, sizes.length)
        length = len(responses[0]) + 1
        compute = partial(reference.logprobs, responses, _mask(responses), 1.0, 2 * tokens)
        seconds = timed(compute, model.device, sizes.repeats)
        flops = formulas.forward_flops(model.shape, length * len(responses), length, 1)
        yield Point("prefill", f"{len(responses)} x {length} tokens", seconds, flops=flops)


def decodes(model: MeasuredModel, sizes: WorkSizes) -> Iterator[Point]:
    """Yield decode steps of Stretto's own engine, sampling as a run does."""
    room = positions(model.model, generating=True) or 10**9
    for rows, context in sizes.decode:
        context = max(1, min(context, room - sizes.decoded))
        config = RolloutConfig(
            batch=rows,
            max_new_tokens=sizes.decoded,
            temperature=model.config.rollout.temperature,
            engine_args=model.config.rollout.known_args,
        )
        engine = TorchEngine(model.model, EngineSettings(rollout=config, rows=rows))
        prompts = [Prompt(i, tuple(_ids(model, context, i).tolist()), "") for i in range(rows)]
        engine.admit([Response(p.id, p.id, p, np.zeros(0, np.int32)) for p in prompts])
        while len(engine.decode(1).chunks) < rows:  # until all prompts are in the cache
            pass
        seconds, read = _steps(engine, model.device, sizes)
        shape, row_tokens = model.shape, read / rows
        yield Point(
            "decode",
            f"{rows} rows, {row_tokens:.0f} tokens each",
            seconds,
            flops=formulas.decode_flops(shape, rows, row_tokens, 1),
            size=formulas.decode_read_bytes(shape, rows, row_tokens, 1),
        )


def trainings(model: MeasuredModel, sizes: WorkSizes) -> Iterator[Point]:
    """Yield forward and backward passes of micro-batches, and then a weight update."""
    training, shape = model.config.training, model.shape
    trained = TrainedModel(model.model, LearningRate(1e-6, 10**6), training)
    losses = Losses(AlgorithmConfig(), model.config.rollout.temperature)
    passes = LocalBackprop(trained, None, losses, training.microbatch_tokens)
    for tokens in sizes.training:
        responses = _responses(model, tokens, sizes.length)
        run = partial(passes.run, [_micro_batch(model, responses)], 0.0, trains_actor=True)
        seconds = timed(run, model.device, sizes.repeats)
        rows, length = len(responses), len(responses[0]) + 1
        flops = formulas.training_flops(shape, rows * length, length, 1, checkpointing=False)
        yield Point("training", f"{rows} x {length} tokens", seconds, flops=flops)
    seconds = timed(trained.update, model.device, sizes.repeats)
    size = formulas.optimizer_bytes(shape, Layout())
    yield Point("update", f"{shape.parameters:,.0f} weights", seconds, size=size)
    trained.close()


def _steps(engine: Engine, device: torch.device, sizes: WorkSizes) -> tuple[float, float]:
    """Return the seconds and the cache positions read of a step, in the median repeat."""
    step_costs: list[tuple[float, float]] = []

    def some() -> None:
        before, start_s = engine.context_tokens, time.perf_counter()
        engine.decode(sizes.steps)
        seconds, read = time.perf_counter() - start_s, engine.context_tokens - before
        step_costs.append((seconds / sizes.steps, read / sizes.steps))

    timed(some, device, DECODED * sizes.repeats, enough_s=0.0)
    return sorted(step_costs[1:])[(len(step_costs) - 1) // 2]


def _responses(model: MeasuredModel, tokens: int, length: int) -> list[Response]:
    length = max(2, min(length, tokens, positions(model.model) or length))
    return [
        Response(i, i, Prompt(i, (1,), ""), _ids(model, length - 1, i))
        for i in range(max(1, tokens // length))
    ]


def _ids(model: MeasuredModel, count: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    rng = np.random.default_rng(seed)
    return rng.integers(model.shape.vocabulary, size=count, dtype=np.int32)


def _mask(responses: Sequence[Response]) -> torch.Tensor:
    return torch.ones(len(responses), len(responses[0]), dtype=torch.bool)


def _micro_batch(model: MeasuredModel, responses: Sequence[Response]) -> MicroBatch:
    mask, rows = _mask(responses), len(responses)
    even = mask / mask.sum()
    inputs = LossInputs(
        mask=mask,
        weights=even,
        means=even,
        response_weights=torch.full((rows,), 1 / rows),
        advantages=torch.linspace(-1.0, 1.0, rows)[:, None].expand(mask.shape).contiguous(),
        old_logprobs=torch.full(mask.shape, -math.log(model.shape.vocabulary)),
        own=torch.ones(rows, dtype=torch.bool),
    )
    return MicroBatch.of(responses, inputs)


def peaks(device: torch.device, dtype: torch.dtype, sizes: WorkSizes) -> Iterator[Point]:
    """Yield a product of square matrices, and copies within the device's memory."""
    n = sizes.product
    x, w = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    seconds = timed(lambda: torch.nn.functional.linear(x, w), device, sizes.repeats, pick=min)
    yield Point("product", f"{n} x {n} matrices", seconds, flops=2.0 * n**3)
    for megabytes in sizes.copies:
        source = torch.ones(megabytes * 10**6, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        seconds = timed(partial(target.copy_, source), device, sizes.repeats, pick=min)
        yield Point("copy", f"{megabytes} MB", seconds, size=2e6 * megabytes)  # read and written


def swaps(device: torch.device, sizes: WorkSizes) -> Iterator[Point]:
    """Yield copies from pinned host memory to a GPU, or on a CPU within its memory."""
    gpu = device.type == "cuda"
    for megabytes in sizes.moves:
        source = torch.ones(megabytes * 10**6, dtype=torch.uint8, pin_memory=gpu)
        target = torch.zeros_like(source, device=device)
        seconds = timed(partial(target.copy_, source), device, sizes.repeats)
        where = "from the host" if gpu else "within memory"
        yield Point("swap", f"{megabytes} MB {where}", seconds, size=1e6 * megabytes)


def broadcasts(
    device: torch.device, dtype: torch.dtype, threads: int, sizes: WorkSizes
) -> Iterator[Point]:
    """Yield weight syncs (two bytes a weight) and all-reduces, by NCCL on two GPUs, else gloo."""
    multi_gpu = device.type == "cuda" and torch.cuda.device_count() > 1
    wire: Wire = "nccl" if multi_gpu else "gloo"
    devices = ["cpu"] * 2
    if device.type == "cuda":
        devices = ["cuda:0", "cuda:1" if multi_gpu else "cuda:0"]
    store, port = open_store("127.0.0.1")
    meeting = Meeting("127.0.0.1", port, TIMEOUT_S)
    backend = "cpu:gloo,cuda:nccl" if multi_gpu else "gloo"
    spec = GroupSpec(2, backend, threads, devices, timeout_s=TIMEOUT_S)
    ranks = RankGroup(spec, SyncPeer, (device.type, dtype))
    try:
        ranks.start()
        for number, megabytes in enumerate(sizes.moves):
            count = max(1, megabytes * 10**6 // HALF // TENSOR)
            routes = meeting.routes("weights", number, 2, wire)
            seconds = max(ranks.call(SyncPeer.sync, count, routes, number, sizes.repeats))
            size = float(HALF * count * TENSOR)
            yield Point("broadcast", f"{size / 1e6:.0f} MB by {wire}", seconds, size=size)
        (seconds, _) = ranks.call(SyncPeer.reduce, sizes.repeats)
        yield Point("reduce", f"4 kB by {wire}", seconds)
    finally:
        ranks.close()
        del store


class SyncPeer:
    """One of two processes: rank 0 sends weights, rank 1 receives them."""

    def __init__(self, rank: int, device: str, dtype: torch.dtype) -> None:
        self._rank, self._dtype = rank, dtype
        self._device = torch.device(device)
        if device == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())

    def sync(self, count: int, routes: list[Route], version: int, repeats: int) -> float:
        """Send ``count`` tensors ``repeats`` times. Return the median seconds."""
        tensors = {
            f"layer {i}": torch.full((TENSOR,), float(i), dtype=self._dtype, device=self._device)
            for i in range(count)
        }
        sender = WeightSender(self._device, BUCKET, 1)
        receiver = WeightReceiver(tensors, self._device, BUCKET)
        ref = WeightsRef("actor", version, "", "broadcast")
        sender.put(ref, tensors)
        mark, route = sender.plan(ref).mark, routes[self._rank]

        def once() -> None:
            if self._rank == 0:
                sender.send(ref, route)
            else:
                receiver.expect(ref, mark, route)
                for name, part in receiver.get(ref).items():
                    tensors[name][part.to].copy_(part.tensor)

        return self._timed(once, repeats)

    def reduce(self, repeats: int) -> float:
        """Sum a small tensor over both processes. Return the seconds of one all-reduce."""
        small = torch.ones(1024, device=self._device)

        def some() -> None:
            for _ in range(REDUCTIONS):
                dist.all_reduce(small)
                small.fill_(1.0)

        return self._timed(some, repeats) / REDUCTIONS

    def _timed(self, work: Callable[[], None], repeats: int) -> float:
        return timed(work, self._device, repeats, enough_s=0.0, patience_s=math.inf)
