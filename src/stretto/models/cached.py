"""Forward passes over a key-value cache in slots, for the engine and the streamed scorers.

Shapes: S slots, C positions per slot, n rows, q tokens per row, K key positions read, H hidden
size, h key-value heads, d head size, c cached tokens of one row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from stretto.bounds import ceil_div
from stretto.errors import EngineError, first_line
from stretto.models.attention import NAME as SHORT
from stretto.models.devices import cpu_has_bfloat16
from stretto.models.forward import backbone, pad_right, plain_states
from stretto.models.forward import positions as positions_of
from stretto.models.row_products import NAME as BY_ROWS

Masks = Tensor | Mapping[str, Tensor]

WINDOWS = ("sliding_window", "attention_chunk_size")
"""Config settings of windowed layers, of which a model has at most one. The first is the number of
last tokens that a layer attends to. The second is the size of a chunk, whose earlier tokens a layer
attends to (Llama 4).
"""

GRAIN = 64
"""Slots grow by multiples of this many positions."""

KERNEL_GRAIN = 32
"""Products read keys by multiples of this many positions, because oneDNN compiles a kernel for each
shape in about 1 ms.
"""

CHECKED = 24
"""Tokens of the longest sequence in the check of a model."""

_NARROW = 4
"""Window width during the check."""

ADVICE = "Choose a decoder-only model with plain full or sliding-window attention"


class CachedPass:
    """A causal model without its head, whose entire state is keys and values, over a slot cache."""

    def __init__(self, model: nn.Module, cache: SlotCache) -> None:
        self.cache = cache
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.backbone = backbone(model)
        self.config_of_model: Any = self.backbone.config
        attention = getattr(self.config_of_model, "_attn_implementation", "")
        self.by_rows = attention == BY_ROWS
        is_short = attention == SHORT and self.device.type == "cpu"
        cache.transposed = is_short and self.dtype == torch.bfloat16 and cpu_has_bfloat16()
        additive = is_short or attention == "eager"
        self._masks = LayerMasks(self.config_of_model, self.dtype, additive=additive)
        takes = inspect.signature(self.backbone.forward).parameters
        self._cache_name = "cache" if "cache" in takes else "past_key_values"  # transformers < 5.24

    def prefill(
        self, slots: Sequence[int], starts: Sequence[int], rows: Sequence[Sequence[int]]
    ) -> Tensor:
        """Put tokens of rows into the cache at their start positions. Returns hidden states [n, q,
        H].
        """
        ids = pad_right(rows, self.device)
        width, index = ids.shape[1], torch.tensor(slots, device=self.device)
        steps = torch.arange(width, device=self.device)
        at = torch.tensor(starts, device=self.device)[:, None] + steps
        if not any(starts):
            self.cache.aim(index, None, self.reach(width))
            return self._hidden(ids, at, None)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        padding = steps >= lengths[:, None]
        read = self.reach(max(s + len(row) for s, row in zip(starts, rows, strict=True)))
        self.cache.aim(index, at.masked_fill(padding, self.cache.capacity), read)
        at = at.masked_fill(padding, 0)  # learned positions have none for padding
        return self._hidden(ids, at, self._masks(at, read))

    def reach(self, read: int) -> int:
        """Return the key positions to read: complete slots if products read them, and complete
        blocks if attention works in blocks.
        """
        if self.cache.transposed:
            return self.cache.length_for(read)
        return _grained(read) if self.by_rows else read

    def _hidden(self, ids: Tensor, positions: Tensor, mask: Masks | None) -> Tensor:
        inputs = {"position_ids": positions, "attention_mask": mask, self._cache_name: self.cache}
        hidden: Tensor = self.backbone(input_ids=ids, use_cache=True, **inputs).last_hidden_state
        return hidden


def check_cache(
    own: CachedPass,
    newest: Callable[[Tensor, Tensor, int], Tensor],
    head: Callable[[Tensor], Tensor],
) -> None:
    """Raise EngineError if passes over a cache of two slots differ from a plain pass.

    Checks prefill, continued prefill and a last token, over rows of two lengths. In low precision
    the median of five draws of tokens counts. Row products must give equal bits. Sliding windows
    are narrowed to a few tokens, so that the check reaches beyond them. Other effects that begin
    late in a sequence are not detected.

    Args:
        newest: computes the output of the newest tokens from ids [2], positions [2] and the number
            of key positions read.
        head: computes the same from the hidden states [2, H] of a plain pass.
    """
    model: Any = own.backbone
    own.cache.reserve(CHECKED)
    with _explained(model):
        vocabulary = len(model.get_input_embeddings().weight)
    generator = torch.Generator().manual_seed(0)

    def gap() -> tuple[float, float]:
        rows = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in (7, 3)]
        own.prefill([0, 1], [0, 0], [rows[0][:3], rows[1][:1]])
        own.prefill([1, 0], [1, 3], [rows[1][1:2], rows[0][3:6]])
        ids = torch.tensor([row[-1] for row in rows], device=own.device)
        at = torch.tensor([len(row) - 1 for row in rows], device=own.device)
        cached = newest(ids, at, 7)
        plain = torch.cat([head(_plain(own, row)[-1:]) for row in rows])
        if own.by_rows:  # with training.match_engine
            return (cached - plain).abs().nan_to_num(torch.inf).max().item(), 0.0
        scale = 1e-3 if own.dtype == torch.float32 else 0.1
        allowed = scale * plain.abs().max().item() + 1e-4
        return (cached - plain).abs().nan_to_num(torch.inf).max().item(), allowed

    with _explained(model):
        worst, allowed = gap()
        if not worst <= allowed and own.dtype != torch.float32 and not own.by_rows:
            # Rounding is large on some tokens, for example control tokens without surrounding text.
            gaps = sorted([(worst, allowed), *(gap() for _ in range(4))], key=lambda g: g[0] / g[1])
            worst, allowed = gaps[2]
    if not worst <= allowed:
        advice = "Leave training.match_engine out" if own.by_rows else ADVICE
        raise EngineError(
            f"{type(model).__name__} computes something else over a key-value cache in slots than "
            f"without one (its outputs differ by {worst:.3g}). {advice}",
            "cache-differs",
        )
    _check_windows(own, vocabulary)


def _check_windows(cached_pass: CachedPass, vocabulary: int) -> None:
    """Check hidden states beyond narrowed windows by their median, as rounding may be large."""
    configs = {
        id(m.config): m.config for m in cached_pass.backbone.modules() if hasattr(m, "config")
    }
    settings = ((c, name, getattr(c, name, None)) for c in configs.values() for name in WINDOWS)
    windows = [(config, name, width) for config, name, width in settings if width]
    if not windows:
        return
    length = min(CHECKED, positions_of(cached_pass.backbone, generating=True) or CHECKED)
    generator = torch.Generator().manual_seed(0)
    lengths, first = (length, length - 5), (6, 2)
    rows = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]
    prefixes = [row[:n] for row, n in zip(rows, first, strict=True)]
    suffixes = [row[n:] for row, n in zip(rows, first, strict=True)]
    with _explained(cached_pass.backbone):
        wide = [_plain(cached_pass, row) for row in rows]
        try:  # transformers reads window widths from the config in each pass
            for config, name, _ in windows:
                setattr(config, name, _NARROW)
            cached_pass.prefill([0, 1], [0, 0], prefixes)
            hidden = cached_pass.prefill([1, 0], first[::-1], suffixes[::-1]).flip(0)
            plain = [_plain(cached_pass, row) for row in rows]
        finally:
            for config, name, before in windows:
                setattr(config, name, before)

    def beyond(states: Sequence[Tensor]) -> Tensor:
        return torch.cat([h[n:] for h, n in zip(states, first, strict=True)]).float()

    cached = torch.cat([h[: len(row)] for h, row in zip(hidden, suffixes, strict=True)]).float()
    expected, unwindowed = beyond(plain), beyond(wide)
    difference, effect, size = (
        x.norm(dim=-1).median().item() for x in (cached - expected, unwindowed - expected, expected)
    )
    share, floor = (0.02, 1e-4) if cached_pass.dtype == torch.float32 else (0.25, 0.1)
    if not difference <= max(share * effect, floor * size):
        raise EngineError(
            f"{type(cached_pass.backbone).__name__} sees other tokens through its sliding window "
            f"over a key-value cache in slots than without one (its hidden states differ by "
            f"{difference / size:.0%}). {ADVICE}",
            "window-differs",
        )


def _plain(cached_pass: CachedPass, row: Sequence[int]) -> Tensor:
    ids = torch.tensor([row], device=cached_pass.device)
    return plain_states(cached_pass.backbone, input_ids=ids)[0]


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        reason = first_line(error)
        if hasattr(model, "build_alibi_tensor") or getattr(model.config, "alibi", False):
            reason = "its positions (ALiBi) come from a mask of tokens, which leaves no gaps"
        raise EngineError(
            f"{type(model).__name__} does not run over a key-value cache in slots, with positions "
            f"and a mask for each row: {reason}. {ADVICE}",
            "no-slots",
        ) from error


@torch.no_grad()
def slots_within(model: nn.Module, positions: int, budget_bytes: int) -> int:
    """Return how many cache slots fit into memory, from a measured token."""
    cached_pass = CachedPass(model, SlotCache(1))
    cached_pass.cache.reserve(1)
    with _explained(cached_pass.backbone):
        cached_pass.prefill([0], [0], [[0]])
    slot_positions = _grained(positions) + 1
    return int(budget_bytes // (slot_positions * cached_pass.cache.token_bytes))


class LayerMasks:
    """Attention masks [n, 1, q, K] from positions, boolean or additive, one per kind of layer. The
    window width of the text decoder's config is reread for each mask, as in transformers.
    """

    def __init__(self, config: Any, dtype: torch.dtype, *, additive: bool) -> None:
        self._config, self._dtype = config, dtype
        self._additive = additive
        kinds = set(getattr(config, "layer_types", None) or ())
        kinds |= {f"{k} (GPT-Neo)" for k in getattr(config, "attention_layers", ()) if k == "local"}
        near = kinds - {"full_attention"}
        if unknown := near - {"sliding_attention", "chunked_attention"}:
            raise EngineError(
                f"layers of type {', '.join(sorted(unknown))} keep no plain key-value cache; slots "
                "are for full, sliding-window and chunked attention only. Choose another model",
                "no-slots",
            )
        self._near = next(iter(near), "")
        self._setting = WINDOWS[self._near == "chunked_attention"]
        try:
            getattr(config, self._setting, None)
        except RuntimeError as error:  # if layers of a config differ in it
            raise EngineError(
                "layers have windows of different sizes; slots are for full attention and windows "
                "of one size. Choose another model",
                "no-slots",
            ) from error
        self._windowed = bool(near) or not kinds

    def __call__(self, positions: Tensor, read: int) -> Masks:
        """Return masks for queries at ``positions`` [n, q] over key positions below ``read``."""
        keys = torch.arange(read, device=positions.device)
        at = positions[:, None, :, None]
        full = keys <= at
        width = int(getattr(self._config, self._setting, None) or 0) if self._windowed else 0
        if not width or read <= width:
            return self._form(full)
        first = at - width + 1 if self._setting == WINDOWS[0] else at // width * width
        near, full = self._form(full & (keys >= first)), self._form(full)
        return {"full_attention": full, self._near: near} if self._near else near

    def _form(self, mask: Tensor) -> Tensor:
        if not self._additive:
            return mask
        low = torch.finfo(self._dtype).min
        return torch.zeros_like(mask, dtype=self._dtype).masked_fill(~mask, low)


@dataclass(frozen=True, slots=True)
class RowCache:
    """Copies of a row's keys and values, [h, c, d] each. ``version`` is of its first weights."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    version: int

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    def to(self, device: torch.device) -> RowCache:
        keys, values = (tuple(x.to(device) for x in of) for of in (self.keys, self.values))
        return RowCache(keys, values, self.version)


class SlotCache(Cache):
    """Keys and values of every layer, [S, h, C + 1, d] each, allocated at first use. The last
    position of a slot is scratch for padding, and never attended to. ``moves`` counts
    reallocations. If ``transposed``, the memory of keys is laid out as [S, h, d, C + 1], which
    products read fastest, and slots are as long as the longest row, as products copy parts first.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.capacity = 0
        self._length = 1
        self.moves = 0
        self.transposed = False
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows: slice | Tensor = slice(0, 0)
        self._index: Any = None
        self._positions: Tensor | None = None
        self._read = 0

    def reserve(self, positions: int) -> None:
        """Make every slot hold at least ``positions`` tokens, keeping the contents."""
        if positions > self.capacity:
            self.capacity = _grained(positions)
            self._fit(self._length if self.transposed else self.capacity + 1)

    def length_for(self, positions: int) -> int:
        """Return the length of transposed slots for so many tokens, with their scratch position."""
        return min(ceil_div(positions + 1, KERNEL_GRAIN) * KERNEL_GRAIN, self.capacity + 1)

    def trim(self, positions: int) -> None:
        """Shorten transposed slots if the longest row has so many tokens."""
        if self.transposed:
            self._fit(min(self.length_for(positions), self._length))

    def _fit(self, length: int) -> None:
        if length != self._length:
            self._resize(self.slots, length)

    def hold(self, rows: int, most: int) -> None:
        """Provide at least ``rows`` slots, limited by ``most``, keeping the contents."""
        if rows > self.slots:
            self._resize(min(most, max(rows, self.slots * 3 // 2)), self._length)

    def _resize(self, slots: int, length: int) -> None:
        self.slots, self._length = slots, length
        self.moves += 1
        for store in (self._keys, self._values):
            for layer, old in enumerate(store):
                store[layer] = self._zeros(store, old, old.device)
                end = min(old.shape[2], length) - 1
                store[layer][: len(old), :, :end] = old[:, :, :end]

    def _zeros(self, store: list[Tensor], like: Tensor, device: torch.device) -> Tensor:
        """Return zeros for a layer of a store, with the heads and the type of a tensor [..., h, c,
        d].
        """
        heads, _, size = like.shape[-3:]
        shape = self.slots, heads, self._length, size
        if self.transposed and store is self._keys:
            return like.new_zeros(*shape[:2], size, shape[2], device=device).transpose(2, 3)
        return like.new_zeros(shape, device=device)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers. 0 before the first pass."""
        return sum(t.shape[1] * t.shape[3] * t.itemsize for t in (*self._keys, *self._values))

    def aim(self, rows: slice | Tensor, positions: Tensor | None, read: int) -> None:
        """Set the targets of the next forward pass.

        Args:
            rows: its slots. A slice avoids a copy when reading.
            positions: [n, q] of its tokens, with padding at ``capacity``. ``None`` if every row
                starts at position 0 (attention is then within the pass).
            read: attend to positions up to this one, exclusive.
        """
        self._fit(max(read, self._length))
        self._rows = rows
        self._positions = positions
        self._read = read
        if positions is not None:
            if isinstance(rows, slice):
                rows = torch.arange(rows.start, rows.stop, device=positions.device)
            self._index = rows[:, None]
            self._positions = positions.clamp_max(self._length - 1)  # scratch

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [n, h, q, d]. Return those to attend to."""
        if layer_idx == len(self._keys):
            self._keys.append(self._zeros(self._keys, key_states, key_states.device))
            self._values.append(self._zeros(self._values, value_states, value_states.device))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        rows, at = self._rows, self._positions
        if at is None:
            width = key_states.shape[2]
            keys[rows, :, :width], values[rows, :, :width] = key_states, value_states
            return key_states, value_states
        keys[self._index, :, at] = key_states.transpose(1, 2)
        values[self._index, :, at] = value_states.transpose(1, 2)
        return keys[rows, :, : self._read], values[rows, :, : self._read]

    def slots_of_step(self, layer: int) -> tuple[Tensor, ...] | None:
        """Return a layer's keys and values, their part to read [n, h, K, d], and the indices [n, 1]
        and [n, q] of newest tokens. None without a mask, and before the layer has memory.
        """
        rows, at = self._rows, self._positions
        if at is None or isinstance(rows, Tensor) or layer >= len(self._values):
            return None
        keys, values = self._keys[layer], self._values[layer]
        parts = keys[rows, :, : self._read], values[rows, :, : self._read]
        return keys, values, *parts, self._index, at

    def copy_row(self, source: int, target: int, length: int) -> None:
        for store in (self._keys, self._values):
            for layer in store:
                layer[target, :, :length] = layer[source, :, :length]

    def take(self, slot: int, length: int, version: int) -> RowCache:
        """Return a copy of the first ``length`` positions of a slot."""
        keys, values = (
            tuple(x[slot, :, :length].clone(memory_format=torch.contiguous_format) for x in store)
            for store in (self._keys, self._values)
        )
        return RowCache(keys, values, version)

    def put(self, slot: int, row: RowCache, device: torch.device) -> None:
        """Write a row into a slot. EngineError if it is from a model with other layers."""
        self._fit(max(self.length_for(row.keys[0].shape[1]), self._length))
        for store, layers in ((self._keys, row.keys), (self._values, row.values)):
            if not store:
                store += [self._zeros(store, x, device) for x in layers]
            slot_shapes, row_shapes = (
                [(x.shape[-3], x.shape[-1]) for x in y] for y in (store, layers)
            )
            if slot_shapes != row_shapes:
                raise EngineError(
                    "a rollout can only move between engines of one model: its cache has layers of "
                    f"(heads, head size) {row_shapes}, and the slots here are for {slot_shapes}",
                    "other-model",
                )
            for target, source in zip(store, layers, strict=True):
                target[slot, :, : source.shape[1]] = source

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: nothing depends on it, as positions are always passed."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return key length and offset of a pass that starts at position 0."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the first query of a pass that starts at position 0."""
        return 0


def _grained(positions: int) -> int:
    return ceil_div(positions, GRAIN) * GRAIN
