"""Forward passes of the engine: prefill, and one decode step, eager or as CUDA graphs.

Shapes: n rows, q tokens a row, K key positions read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.config import RolloutConfig
from stretto.errors import EngineError
from stretto.models.forward import backbone, output_head, unwrapped
from stretto.rollout.cache import SlotCache
from stretto.rollout.sampling import sample, uniform

Masks = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class StepInputs:
    """What one decode step needs of each row, all [n] int64.

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
        """All four, in order."""
        return self.ids, self.positions, self.seeds, self.index


class ModelPass:
    """A causal language model over a slot cache."""

    def __init__(self, model: nn.Module, cache: SlotCache, config: RolloutConfig) -> None:
        self.cache, self.config = cache, config
        self.device = next(model.parameters()).device
        self._backbone = backbone(model)
        self.config_of_model: Any = self._backbone.config
        self._head = output_head(model)
        self._output = unwrapped(model).get_output_embeddings()
        self._masks = LayerMasks(self.config_of_model, next(model.parameters()).dtype)

    def prefill(self, slots: Sequence[int], starts: Sequence[int], rows: Sequence[Any]) -> None:
        """Put tokens of several rows into the cache, each from its own start position."""
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
        index = torch.tensor(slots, device=self.device)
        at = torch.tensor(starts, device=self.device)[:, None] + torch.arange(
            width, device=self.device
        )
        if not any(starts):
            self.cache.aim(index, None, 0)
            self._hidden(ids, at, None)
            return
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        padding = torch.arange(width, device=self.device) >= lengths[:, None]
        read = max(s + len(row) for s, row in zip(starts, rows, strict=True))
        self.cache.aim(index, at.masked_fill(padding, self.cache.capacity), read)
        at = at.masked_fill(padding, 0)  # a model with learned positions has none for padding
        self._hidden(ids, at, self._masks(at, read))

    def decode(self, inputs: StepInputs, read: int) -> tuple[Tensor, Tensor]:
        """One token a row for slots 0..n: tokens [n] and log-probabilities [n] as sampled."""
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

    def _hidden(self, ids: Tensor, positions: Tensor, mask: Masks | None) -> Tensor:
        output = self._backbone(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


class LayerMasks:
    """Boolean attention masks [n, 1, q, K] out of positions, one a kind of layer."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._additive = config._attn_implementation == "eager"
        kinds = set(getattr(config, "layer_types", None) or ())
        kinds |= {f"{k} (GPT-Neo)" for k in getattr(config, "attention_layers", ()) if k == "local"}
        if unknown := kinds - {"full_attention", "sliding_attention"}:
            raise EngineError(
                f"layers of type {', '.join(sorted(unknown))} keep no plain key-value cache; the "
                "engine drives full and sliding-window attention only. Choose another model"
            )
        self._window = int(getattr(config, "sliding_window", None) or 0)
        self._mixed = "sliding_attention" in kinds
        if kinds and not self._mixed:
            self._window = 0

    def __call__(self, positions: Tensor, read: int) -> Masks:
        """Masks for queries at ``positions`` [n, q] over key positions below ``read``."""
        keys = torch.arange(read, device=positions.device)
        at = positions[:, None, :, None]
        full = keys <= at
        if not self._window or read <= self._window:
            return self._form(full)
        near = self._form(full & (keys > at - self._window))
        full = self._form(full)
        return {"full_attention": full, "sliding_attention": near} if self._mixed else near

    def _form(self, mask: Tensor) -> Tensor:
        """Eager attention adds its mask to the scores."""
        if not self._additive:
            return mask
        low = torch.finfo(self._dtype).min
        return torch.zeros_like(mask, dtype=self._dtype).masked_fill(~mask, low)


class GraphedDecode:
    """Decode steps replayed as CUDA graphs, one for each (rows, read) rounded up.

    With ``capture=False`` the same rounding and static buffers run eagerly, on any device: what the
    tests compare.
    """

    def __init__(self, model: ModelPass, capture: bool = True) -> None:
        self._model, self._capture = model, capture
        self._graphs: dict[tuple[int, int], tuple[Any, StepInputs, tuple[Tensor, Tensor]]] = {}
        self._capacity = -1
        self._pool: Any = None

    def __call__(self, inputs: StepInputs, read: int) -> tuple[Tensor, Tensor]:
        """As :meth:`ModelPass.decode`."""
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


@torch.inference_mode()
def check_cached_pass(model: nn.Module, config: RolloutConfig) -> None:
    """Prefill, continued prefill and a decode step over rows of two lengths must be the plain pass.

    Raises:
        EngineError: they are not: the model keeps state besides keys and values, or takes no masks.
    """
    name = type(model).__name__
    advice = "Choose a decoder-only model with plain full or sliding-window attention"
    own = ModelPass(model, SlotCache(2), config)
    own.cache.reserve(8)
    vocabulary = own._head.weight.shape[0]
    rows = [[(3 * i + k) % vocabulary for i in range(n)] for k, n in ((0, 7), (1, 3))]
    try:
        own.prefill([0, 1], [0, 0], [rows[0][:3], rows[1][:1]])
        own.prefill([1, 0], [1, 3], [rows[1][1:2], rows[0][3:6]])
        newest = torch.tensor([row[-1] for row in rows], device=own.device)
        at = torch.tensor([len(row) - 1 for row in rows], device=own.device)
        cached = own.next_logits(newest, at, 7)
        plain = torch.cat(
            [
                own._head.logits(
                    own._backbone(input_ids=ids, use_cache=False).last_hidden_state[:, -1]
                )
                for ids in (torch.tensor([row], device=own.device) for row in rows)
            ]
        )
    except Exception as error:
        raise EngineError(
            f"{name} does not run over a key-value cache in slots: {error}. {advice}"
        ) from error
    worst = (cached - plain).abs().max().item()
    scale = 1e-3 if own._head.weight.dtype == torch.float32 else 0.1
    if not worst <= scale * plain.abs().max().item() + 1e-4:
        raise EngineError(
            f"{name} gives other logits over a key-value cache in slots than without one (they "
            f"differ by {worst:.3g}). {advice}"
        )
