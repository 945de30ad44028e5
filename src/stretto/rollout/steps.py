"""Decode steps of Stretto's own engine: passes over its slots, and CUDA graphs of them.

Shapes: n rows, q tokens a row (its newest, and proposed ones), K key positions read, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
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

Graph = tuple[Any, "StepInputs", tuple[Tensor, ...]]
"""A CUDA graph, the tensors that it reads, and those that it writes: tokens, log-probabilities."""

warn: Say = logging.getLogger(__name__).warning
"""Logs an engine's message, if nothing else shows it."""


class StepInputs(NamedTuple):
    """Inputs of a decode step, all [n, q] int64.

    Attributes:
        ids: a row's newest token, not yet in the cache, and those that are proposed to follow it.
        positions: theirs; the cache's scratch position where there is none, or a row sits out.
        draws: which number of the row's stream to draw: the index of the token that follows.
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
        """Sample what follows each token of slots 0..n: tokens and log-probabilities [n, q]."""
        logits = self.logits(inputs.ids, inputs.positions, read)
        config, u = self.config, uniform(inputs.seeds, inputs.draws).flatten()
        found = sample(logits.flatten(0, 1), u, config.temperature, config.top_k, config.top_p)
        tokens, logprobs = (x.view_as(inputs.ids) for x in found)
        return tokens, logprobs

    def decode_each(
        self, inputs: StepInputs, read: int, samplings: Sequence[Sampling]
    ) -> tuple[list[int], list[float], list[TopLogprobs | None]]:
        """Decode a token a row, each sampled in its own way; the third are what rows ask for."""
        ids, positions, seeds, draws = (x[:, 0] for x in inputs)
        logits = self.next_logits(ids, positions, read)
        u, tokens = uniform(seeds, draws), torch.empty_like(ids)
        logprobs = torch.empty(len(tokens), device=tokens.device)
        likeliest: list[TopLogprobs | None] = [None] * len(samplings)
        alike: dict[tuple[float, int, float], list[int]] = {}
        for slot, sampling in enumerate(samplings):
            alike.setdefault(sampling.distribution, []).append(slot)
        for distribution, slots in alike.items():
            at = torch.tensor(slots, device=tokens.device)
            if most := max(samplings[slot].top_logprobs for slot in slots):
                found = top_logprobs(logits[at], most, *distribution)
                for slot, row in zip(slots, found, strict=True):
                    if asked := samplings[slot].top_logprobs:
                        likeliest[slot] = row[:asked]
            tokens[at], sampled = sample(logits[at], u[at], *distribution)
            logprobs[at] = sampled.float()
        return tokens.tolist(), logprobs.tolist(), likeliest

    def next_logits(self, ids: Tensor, positions: Tensor, read: int) -> Tensor:
        """Return logits [n, V] after the newest token [n] of slots 0..n."""
        return self.logits(ids[:, None], positions[:, None], read)[:, 0]

    def logits(self, ids: Tensor, positions: Tensor, read: int) -> Tensor:
        """Return logits [n, q, V] after tokens [n, q] of slots 0..n."""
        self.cache.aim(slice(0, len(ids)), positions, read)
        # The model has no scratch position.
        at = positions.masked_fill(positions == self.cache.capacity, 0)
        hidden = self._hidden(ids, at, self._masks(at, read))
        return self.head.finish(self._output(hidden))


Step = Callable[[StepInputs, int], tuple[Tensor, Tensor]]
"""A decode step over key positions below a number; see :meth:`ModelPass.decode`."""


def decoder(model: nn.Module, cache: SlotCache, config: RolloutConfig) -> tuple[ModelPass, Step]:
    """Return a model's passes over a slot cache, and its decode steps, by CUDA graphs where those
    are wanted and can be. Raises EngineError if the model computes something else over slots.
    """
    own = ModelPass(model, SlotCache(2), config)
    with torch.inference_mode():
        check_cache(own, own.next_logits, own.head.logits)
    passes = ModelPass(model, cache, config)
    backend = backend_of(passes.device)
    if config.cuda_graphs and backend.graphs:
        return passes, GraphedDecode(passes, backend)
    return passes, passes.decode


MOST_GRAPHS = 32
"""CUDA graphs of an engine at a time; the one that was replayed longest ago goes first."""


class GraphedDecode:
    """Decode steps replayed as CUDA graphs, one for each (rows, q, read), rounded up. Where a step
    cannot be captured, as the routing of most experts, that is said, and all steps run eagerly.
    """

    def __init__(self, model: ModelPass, backend: Backend, say: Say = warn) -> None:
        self._model, self._backend, self._say = model, backend, say
        self._graphs: OrderedDict[tuple[int, int, int], Graph] = OrderedDict()
        self._moves, self._eager = -1, False
        self._pool: Any = None

    def __call__(self, inputs: StepInputs, read: int) -> tuple[Tensor, Tensor]:
        """Decode as :meth:`ModelPass.decode` does."""
        cache = self._model.cache
        if cache.moves != self._moves:  # graphs so far write to freed memory
            self._graphs.clear()
            self._pool, self._moves = None, cache.moves
        n, q = inputs.ids.shape
        key = (
            min(1 << (n - 1).bit_length(), cache.slots),
            q,
            min(-(-read // 256) * 256, cache.capacity),
        )
        if key not in self._graphs and not self._eager:
            self._capture(key)
        if self._eager:
            return self._model.decode(inputs, read)
        self._graphs.move_to_end(key)
        graph, static, (tokens, logprobs) = self._graphs[key]
        static.positions.fill_(cache.capacity)
        for target, source in zip(static, inputs, strict=True):
            target[:n].copy_(source)
        graph.replay()
        return tokens[:n], logprobs[:n]

    def _capture(self, key: tuple[int, int, int]) -> None:
        *shape, read = key
        device = self._model.device
        static = StepInputs(
            *(torch.zeros(shape, dtype=torch.long, device=device) for _ in range(4))
        )
        static.positions.fill_(self._model.cache.capacity)
        try:
            graph, outputs = self._backend.capture(
                lambda: self._model.decode(static, read), self._pool
            )
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
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
