"""Forward passes of Stretto's own engine: prefill, a decode step (eager or a CUDA graph), a probe.

Shapes: n rows, q tokens a row, K key positions read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.config import RolloutConfig
from stretto.models.cached import CHECKED, CachedPass, SlotCache, check_cache
from stretto.models.forward import output_head, unwrapped
from stretto.rollout.packed import PackedLinears
from stretto.rollout.sampling import sample, uniform
from stretto.types import FloatArray, IntArray


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a decode step, one entry a row; all [n] int64.

    Attributes:
        ids: the newest token, not yet in the cache.
        positions: its position; the cache's scratch position for a row that sits out.
        seeds: of the row's random stream.
        index: which number of the stream to draw: the index of the response token.
    """

    ids: Tensor
    positions: Tensor
    seeds: Tensor
    index: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four tensors, in order."""
        return self.ids, self.positions, self.seeds, self.index


class ModelPass(CachedPass):
    """A causal language model over a slot cache."""

    def __init__(self, model: nn.Module, cache: SlotCache, config: RolloutConfig) -> None:
        super().__init__(model, cache)
        self.config = config
        self._head = output_head(model)
        self._output = unwrapped(model).get_output_embeddings()

    def decode(self, inputs: StepInputs, read: int) -> tuple[Tensor, Tensor]:
        """Decode a token a row for slots 0..n: tokens [n], and log-probabilities [n] as sampled."""
        logits = self.next_logits(inputs.ids, inputs.positions, read)
        config = self.config
        u = uniform(inputs.seeds, inputs.index)
        return sample(logits, u, config.temperature, config.top_k, config.top_p)

    def next_logits(self, ids: Tensor, positions: Tensor, read: int) -> Tensor:
        """Logits [n, V] after the newest token of slots 0..n."""
        at = positions[:, None]
        self.cache.aim(slice(0, len(ids)), at, read)
        at = at.masked_fill(at == self.cache.capacity, 0)  # the model has no scratch position
        hidden = self._hidden(ids[:, None], at, self._masks(at, read))
        return self._head.finish(self._output(hidden[:, 0]))


class GraphedDecode:
    """Decode steps replayed as CUDA graphs, one for each (rows, read) rounded up.

    With ``capture=False`` the same rounding and static buffers run eagerly, on any device, so that
    tests can compare them.
    """

    def __init__(self, model: ModelPass, capture: bool = True) -> None:
        self._model, self._capture = model, capture
        self._graphs: dict[tuple[int, int], tuple[Any, StepInputs, tuple[Tensor, Tensor]]] = {}
        self._capacity = -1
        self._pool: Any = None

    def __call__(self, inputs: StepInputs, read: int) -> tuple[Tensor, Tensor]:
        """Decode as :meth:`ModelPass.decode` does."""
        cache = self._model.cache
        if cache.capacity != self._capacity:  # the cache moved: old graphs write to freed memory
            self._graphs.clear()
            self._pool = None
            self._capacity = cache.capacity
        n = len(inputs.ids)
        rows = min(1 << (n - 1).bit_length(), cache.slots)
        width = min(-(-read // 256) * 256, cache.capacity)
        if (rows, width) not in self._graphs:
            self._graphs[rows, width] = self._build(rows, width)
        graph, static, outputs = self._graphs[rows, width]
        static.positions.fill_(cache.capacity)
        for target, source in zip(static.tensors(), inputs.tensors(), strict=True):
            target[:n].copy_(source)
        if graph is None:
            outputs = self._model.decode(static, width)
        else:
            graph.replay()
        return outputs[0][:n], outputs[1][:n]

    def _build(self, rows: int, width: int) -> tuple[Any, StepInputs, tuple[Tensor, Tensor]]:
        device = self._model.device
        static = StepInputs(*(torch.zeros(rows, dtype=torch.long, device=device) for _ in range(4)))
        static.positions.fill_(self._model.cache.capacity)
        nothing = torch.empty(0)
        if not self._capture:
            return None, static, (nothing, nothing)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # lazy allocations and library handles come before capture
            for _ in range(2):
                self._model.decode(static, width)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self._model.decode(static, width)
        self._pool = graph.pool()
        return graph, static, outputs


class Probe:
    """Fixed token sequences, read by the decode steps of an engine, with the model as it is then.

    Args:
        packed: its layers as the engine decodes with them.
        sequences: token ids [n, t]; all but the first of each are looked at.
    """

    def __init__(
        self, model: nn.Module, packed: PackedLinears, config: RolloutConfig, sequences: IntArray
    ) -> None:
        self.sequences = sequences
        self._packed, self._temperature = packed, config.temperature
        self.cache = SlotCache(len(sequences))
        self._pass = ModelPass(model, self.cache, config)
        self.cache.reserve(sequences.shape[1])
        self._ids = torch.from_numpy(sequences.astype(np.int64)).to(self._pass.device)

    @torch.inference_mode()
    def logprobs(self) -> FloatArray:
        """Return the log-probs [n, t - 1], under the distribution that the engine samples from."""
        ids, found = self._ids, []
        with self._packed:
            for at in range(ids.shape[1] - 1):
                positions = torch.full_like(ids[:, at], at)
                logits = self._pass.next_logits(ids[:, at], positions, at + 1)
                logprobs = (logits.float() / self._temperature).log_softmax(-1)
                found.append(logprobs.gather(1, ids[:, at + 1, None])[:, 0])
        together: FloatArray = torch.stack(found, 1).cpu().numpy()
        return together


@torch.inference_mode()
def check_cached_pass(model: nn.Module, config: RolloutConfig) -> None:
    """Refuse a model whose prefill, continued prefill or decode step differs from the plain pass.

    Raises:
        EngineError: one of them differs.
    """
    own = ModelPass(model, SlotCache(2), config)
    own.cache.reserve(CHECKED)
    check_cache(own, own.next_logits, own._head.logits)
