"""Forward passes of Stretto's own engine: prefill, and a decode step (eager or a CUDA graph).

Shapes: n rows, q tokens a row, K key positions read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.config import RolloutConfig
from stretto.models.cached import CachedPass, SlotCache
from stretto.models.devices import Backend
from stretto.models.forward import output_head, unwrapped
from stretto.rollout.sampling import sample, uniform


class StepInputs(NamedTuple):
    """Inputs of a decode step, one entry a row; all [n] int64.

    Attributes:
        ids: the newest token, not yet in the cache.
        positions: its position; the cache's scratch position for a row that sits out.
        draws: which number of the row's stream to draw: the index of the response token.
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
        """Decode a token a row for slots 0..n: tokens [n], and log-probabilities [n] as sampled."""
        logits = self.next_logits(inputs.ids, inputs.positions, read)
        config, u = self.config, uniform(inputs.seeds, inputs.draws)
        return sample(logits, u, config.temperature, config.top_k, config.top_p)

    def next_logits(self, ids: Tensor, positions: Tensor, read: int) -> Tensor:
        """Return logits [n, V] after the newest token of slots 0..n."""
        at = positions[:, None]
        self.cache.aim(slice(0, len(ids)), at, read)
        at = at.masked_fill(at == self.cache.capacity, 0)  # the model has no scratch position
        hidden = self._hidden(ids[:, None], at, self._masks(at, read))
        return self.head.finish(self._output(hidden[:, 0]))


class GraphedDecode:
    """Decode steps replayed as CUDA graphs, one for each (rows, read) rounded up."""

    def __init__(self, model: ModelPass, backend: Backend) -> None:
        self._model, self._backend = model, backend
        self._graphs: dict[tuple[int, int], tuple[Any, StepInputs, tuple[Tensor, ...]]] = {}
        self._capacity = -1
        self._pool: Any = None

    def __call__(self, inputs: StepInputs, read: int) -> tuple[Tensor, Tensor]:
        """Decode as :meth:`ModelPass.decode` does."""
        cache = self._model.cache
        if cache.capacity != self._capacity:  # the cache moved: old graphs write to freed memory
            self._graphs.clear()
            self._pool, self._capacity = None, cache.capacity
        n = len(inputs.ids)
        rows = min(1 << (n - 1).bit_length(), cache.slots)
        width = min(-(-read // 256) * 256, cache.capacity)
        if (rows, width) not in self._graphs:
            self._graphs[rows, width] = self._build(rows, width)
        graph, static, (tokens, logprobs) = self._graphs[rows, width]
        static.positions.fill_(cache.capacity)
        for target, source in zip(static, inputs, strict=True):
            target[:n].copy_(source)
        graph.replay()
        return tokens[:n], logprobs[:n]

    def _build(self, rows: int, width: int) -> tuple[Any, StepInputs, tuple[Tensor, ...]]:
        device = self._model.device
        static = StepInputs(*(torch.zeros(rows, dtype=torch.long, device=device) for _ in range(4)))
        static.positions.fill_(self._model.cache.capacity)
        graph, outputs = self._backend.capture(
            lambda: self._model.decode(static, width), self._pool
        )
        self._pool = graph.pool()
        return graph, static, outputs
