"""Decode steps of the torch engine: passes over its slots, and CUDA graphs of them.

Shapes: n rows, q tokens per row (newest and proposed), K key positions read, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.config import RolloutConfig
from stretto.errors import first_line
from stretto.models.backend import backend_of
from stretto.models.cached import CachedPass, SlotCache, check_cache
from stretto.models.devices import Backend
from stretto.models.forward import output_head, unwrapped
from stretto.rollout.sampling import sample, top_logprobs, uniform
from stretto.saying import Say
from stretto.types import Sampling, TopLogprobs

Graph = tuple[Any, list[Tensor], tuple[Tensor, ...]]
"""A CUDA graph with its input and output tensors."""

warn: Say = logging.getLogger(__name__).warning
"""The default log of engine messages."""


class StepInputs(NamedTuple):
    """Inputs of a decode step, all [n, q] int64.

    Attributes:
        ids: a row's newest token, not yet in the cache, and the tokens proposed after it.
        positions: their positions, or the cache's scratch position for padding and idle rows.
        seeds: the row's random stream.
        draws: index of the number to draw from the stream, which is the index of the next token.
    """

    ids: Tensor
    positions: Tensor
    seeds: Tensor
    draws: Tensor


class ModelPass(CachedPass):
    """A causal language model over a slot cache."""

    def __init__(self, model: nn.Module, cache: SlotCache, config: RolloutConfig) -> None:
        super().__init__(model, cache)
        self.config, self.head = config, output_head(model)
        self._output = unwrapped(model).get_output_embeddings()

    def decode(self, inputs: StepInputs, read: int) -> tuple[Tensor, Tensor]:
        """Sample the token after each one of slots 0..n. Return tokens and log-probs [n, q]."""
        logits = self.logits(inputs.ids, inputs.positions, read)
        config, u = self.config, uniform(inputs.seeds, inputs.draws).flatten()
        samples = sample(logits.flatten(0, 1), u, config.temperature, config.top_k, config.top_p)
        tokens, logprobs = (x.view_as(inputs.ids) for x in samples)
        return tokens, logprobs

    def next_logits(self, ids: Tensor, positions: Tensor, read: int) -> Tensor:
        """Return logits [n, V] after the newest token [n] of slots 0..n."""
        return self.logits(ids[:, None], positions[:, None], read)[:, 0]

    def logits(self, ids: Tensor, positions: Tensor, read: int) -> Tensor:
        """Return logits [n, q, V] after tokens [n, q] of slots 0..n."""
        read = self.reach(read)
        self.cache.aim(slice(0, len(ids)), positions, read)
        # The model has no scratch position.
        at = positions.masked_fill(positions == self.cache.capacity, 0)
        hidden = self._hidden(ids, at, self._masks(at, read))
        return self.head.finish(self._output(hidden))


def decode_several(
    steps: ModelPass | GraphedDecode, inputs: StepInputs, read: int, count: int
) -> tuple[Tensor, Tensor]:
    """Decode ``count`` tokens per row one after another, without waiting for the host.

    Takes the inputs [n, 1] of the first step, without idle rows. Returns tokens and
    log-probabilities [n, count].
    """
    step_outputs = []
    for step in range(count):
        newest, logprobs = steps.decode(inputs, read + step)
        step_outputs.append((newest.clone(), logprobs.clone()))  # because graph replays reuse both
        inputs = StepInputs(newest, inputs.positions + 1, inputs.seeds, inputs.draws + 1)
    tokens, token_logprobs = zip(*step_outputs, strict=True)
    return torch.cat(tokens, 1), torch.cat(token_logprobs, 1)


def until_ends(
    tokens: Sequence[Sequence[int]],
    end_tokens: Collection[int],
    goes_on: Sequence[bool],
    stop_after: int,
) -> list[int]:
    """Count each row's tokens up to its end token, or to the step in which ``stop_after`` rows have
    finished (0: no limit). Rows that continue after an end do not count as finished.
    """
    lengths, finishes = [], []
    for row, continues in zip(tokens, goes_on, strict=True):
        end = next((n for n, token in enumerate(row, 1) if token in end_tokens), None)
        lengths.append(len(row) if end is None else end)
        if end is not None and not continues:
            finishes.append(end)
    if 0 < stop_after <= len(finishes):
        last = sorted(finishes)[stop_after - 1]
        return [min(length, last) for length in lengths]
    return lengths


def decode_each(
    steps: ModelPass | GraphedDecode,
    inputs: StepInputs,
    read: int,
    samplings: Sequence[Sampling],
) -> tuple[list[list[int]], list[list[float]], list[TopLogprobs | None]]:
    """Decode a token per row, a list of one, with its own sampling. The third result is its top
    log-probs.
    """
    ids, positions, seeds, draws = (x[:, 0] for x in inputs)
    logits = steps.next_logits(ids, positions, read)
    u, tokens = uniform(seeds, draws), torch.empty_like(ids)
    logprobs = torch.empty(len(tokens), device=tokens.device)
    likeliest: list[TopLogprobs | None] = [None] * len(samplings)
    slots_by_distribution: dict[tuple[float, int, float], list[int]] = {}
    for slot, sampling in enumerate(samplings):
        slots_by_distribution.setdefault(sampling.distribution, []).append(slot)
    for distribution, slots in slots_by_distribution.items():
        at = torch.tensor(slots, device=tokens.device)
        if max_count := max(samplings[slot].top_logprobs for slot in slots):
            top_rows = top_logprobs(logits[at], max_count, *distribution)
            for slot, row in zip(slots, top_rows, strict=True):
                if count := samplings[slot].top_logprobs:
                    likeliest[slot] = row[:count]
        tokens[at], row_logprobs = sample(logits[at], u[at], *distribution)
        logprobs[at] = row_logprobs.float()
    return tokens[:, None].tolist(), logprobs[:, None].tolist(), likeliest


def decoder(
    model: nn.Module, cache: SlotCache, config: RolloutConfig
) -> tuple[ModelPass, ModelPass | GraphedDecode]:
    """Return a model's passes over a slot cache and its decode steps (CUDA graphs if enabled).
    Raises EngineError if the model computes other results over slots.
    """
    probe = ModelPass(model, SlotCache(2), config)
    with torch.inference_mode():
        check_cache(probe, probe.next_logits, probe.head.logits)
    passes = ModelPass(model, cache, config)
    backend = backend_of(passes.device)
    if config.cuda_graphs and backend.graphs:
        return passes, GraphedDecode(passes, backend)
    return passes, passes


SHORTEST = 256
"""Key positions of the smallest graph. Larger ones double, so that an engine has few graphs."""


class GraphedDecode:
    """Decode steps replayed as CUDA graphs, one for each shape and number of key positions, both
    rounded up. A failed capture is retried once. If it fails again, for example in the routing of
    most experts, that is logged and all steps run eagerly.

    Attributes:
        replays: number of replayed steps.
    """

    def __init__(self, model: ModelPass, backend: Backend, say: Say = warn) -> None:
        self._model = model
        self._backend = backend
        self._say = say
        self._graphs: dict[tuple[int, ...], Graph] = {}
        self._moves, self._eager = -1, False
        self._pool: Any = None
        self.replays = 0

    def decode(self, inputs: StepInputs, read: int) -> tuple[Tensor, Tensor]:
        tokens, logprobs = self._replayed(
            lambda *args: self._model.decode(StepInputs(*args[:4]), args[4]), inputs, read
        )
        return tokens, logprobs

    def next_logits(self, ids: Tensor, positions: Tensor, read: int) -> Tensor:
        return self._replayed(
            lambda *args: (self._model.next_logits(*args),), (ids, positions), read
        )[0]

    def _replayed(
        self, step: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], read: int
    ) -> tuple[Tensor, ...]:
        cache, (n, *width) = self._model.cache, inputs[0].shape
        if cache.moves != self._moves:  # old graphs write to freed memory
            self._graphs.clear()
            self._pool, self._moves = None, cache.moves
        rows = min(1 << (n - 1).bit_length(), cache.slots)
        reach = min(max(SHORTEST, 1 << (read - 1).bit_length()), cache.capacity)
        key = rows, *width, reach  # inputs of next_logits have no width
        if key not in self._graphs and not self._eager:
            static = [x.new_zeros(rows, *width) for x in inputs]
            static[1].fill_(cache.capacity)
            self._capture(key, static, lambda: step(*static, reach))
        if self._eager:
            return step(*inputs, read)
        graph, static, outputs = self._graphs[key]
        static[1].fill_(cache.capacity)  # rows beyond the first n are idle
        for target, source in zip(static, inputs, strict=True):
            target[:n].copy_(source)
        graph.replay()
        self.replays += 1
        return tuple(output[:n] for output in outputs)

    def _capture(
        self, key: tuple[int, ...], static: list[Tensor], run: Callable[[], tuple[Tensor, ...]]
    ) -> None:
        try:
            try:
                graph, outputs = self._backend.capture(run, self._pool)
            except RuntimeError:
                graph, outputs = self._backend.capture(run, self._pool)
        except RuntimeError as error:
            self._eager = True
            self._graphs.clear()
            self._say(
                f"decode steps run without CUDA graphs, as one could not be captured: "
                f"{first_line(error)}"
            )
            return
        self._pool = graph.pool()
        self._graphs[key] = graph, static, outputs
