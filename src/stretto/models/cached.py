"""Forward passes over a key-value cache in slots: what the engine and the streamed scorers share.

Shapes: n rows, q tokens a row, K key positions read, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import EngineError, first_line
from stretto.models.forward import backbone
from stretto.models.masks import WINDOW, LayerMasks, Masks
from stretto.models.positions import positions as positions_of
from stretto.models.slots import SlotCache


class CachedPass:
    """A causal model without its head, over a slot cache.

    Raises:
        EngineError: its layers keep other state than keys and values.
    """

    def __init__(self, model: nn.Module, cache: SlotCache) -> None:
        self.cache = cache
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.backbone = backbone(model)
        self.config_of_model: Any = self.backbone.config
        self._masks = LayerMasks(self.config_of_model, self.dtype)

    def prefill(
        self, slots: Sequence[int], starts: Sequence[int], rows: Sequence[Sequence[int]]
    ) -> Tensor:
        """Put tokens of several rows into the cache, each from its own start position.

        Returns:
            Last hidden states [n, q, H]; entries past a row's end are garbage.
        """
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
        index = torch.tensor(slots, device=self.device)
        at = torch.tensor(starts, device=self.device)[:, None] + torch.arange(
            width, device=self.device
        )
        if not any(starts):
            self.cache.aim(index, None, 0)
            return self._hidden(ids, at, None)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        padding = torch.arange(width, device=self.device) >= lengths[:, None]
        read = max(s + len(row) for s, row in zip(starts, rows, strict=True))
        self.cache.aim(index, at.masked_fill(padding, self.cache.capacity), read)
        at = at.masked_fill(padding, 0)  # a model with learned positions has none for padding
        return self._hidden(ids, at, self._masks(at, read))

    def _hidden(self, ids: Tensor, positions: Tensor, mask: Masks | None) -> Tensor:
        output = self.backbone(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


ADVICE = "Choose a decoder-only model with plain full or sliding-window attention"


def check_cache(
    own: CachedPass,
    newest: Callable[[Tensor, Tensor, int], Tensor],
    head: Callable[[Tensor], Tensor],
) -> None:
    """Check that passes over the cache give what a plain pass gives.

    Prefill, continued prefill and a last token are checked, over rows of two lengths, through all
    layers; in low precision the median of five draws of tokens counts. Sliding windows are narrowed
    to a few tokens, to look beyond them. Other effects that begin late in a sequence are not seen.

    Args:
        own: over a cache of its own, with 2 slots and :data:`CHECKED` positions.
        newest: what the newest tokens give, out of ids [2], positions [2] and key positions read.
        head: the same of the hidden states [2, H] of a plain pass.

    Raises:
        EngineError: they differ: the model keeps state besides keys and values, or takes no masks.
    """
    model: Any = own.backbone
    with _explained(model):
        vocabulary = len(model.get_input_embeddings().weight)
    seeded = torch.Generator().manual_seed(0)

    def gap() -> tuple[float, float]:
        """The largest difference over random tokens, and what is allowed of it."""
        rows = [torch.randint(vocabulary, (n,), generator=seeded).tolist() for n in (7, 3)]
        own.prefill([0, 1], [0, 0], [rows[0][:3], rows[1][:1]])
        own.prefill([1, 0], [1, 3], [rows[1][1:2], rows[0][3:6]])
        ids = torch.tensor([row[-1] for row in rows], device=own.device)
        at = torch.tensor([len(row) - 1 for row in rows], device=own.device)
        cached = newest(ids, at, 7)
        plain = torch.cat([head(_plain(own, row)[-1:]) for row in rows])
        scale = 1e-3 if own.dtype == torch.float32 else 0.1
        allowed = scale * plain.abs().max().item() + 1e-4
        return (cached - plain).abs().nan_to_num(torch.inf).max().item(), allowed

    with _explained(model):
        worst, allowed = gap()
        if not worst <= allowed and own.dtype != torch.float32:
            # Rounding is large on some tokens, as on control tokens without a text around them.
            gaps = sorted([(worst, allowed), *(gap() for _ in range(4))], key=lambda g: g[0] / g[1])
            worst, allowed = gaps[2]
    if not worst <= allowed:
        raise EngineError(
            f"{type(model).__name__} computes something else over a key-value cache in slots than "
            f"without one (its outputs differ by {worst:.3g}). {ADVICE}"
        )
    _check_windows(own, vocabulary)


CHECKED = 24
"""Tokens of the longest sequence that a model is checked on."""

_NARROW = 4
"""Tokens that layers with a window see during the check."""


def _check_windows(own: CachedPass, vocabulary: int) -> None:
    """Check that hidden states beyond narrowed windows are the plain pass's.

    A model that was never trained with such windows may answer to them with hidden states in which
    rounding is large at some positions. So what counts is the median position, and how much of the
    difference that the windows make is missed.
    """
    configs = [m.config for m in own.backbone.modules() if hasattr(m, "config")]
    if not any(getattr(config, WINDOW, None) for config in configs):
        return
    length = min(CHECKED, positions_of(own.backbone, generating=True) or CHECKED)
    seeded = torch.Generator().manual_seed(0)
    lengths = (length, length - 5)
    rows = [torch.randint(vocabulary, (n,), generator=seeded).tolist() for n in lengths]
    first = [6, 2]
    with _explained(own.backbone):
        wide = [_plain(own, row) for row in rows]
        with _windows_of(_NARROW, configs):
            own.prefill([0, 1], [0, 0], [row[:n] for row, n in zip(rows, first, strict=True)])
            hidden = own.prefill(
                [1, 0], first[::-1], [rows[1][first[1] :], rows[0][first[0] :]]
            ).flip(0)
            plain = [_plain(own, row) for row in rows]

    def beyond(states: Sequence[Tensor]) -> Tensor:
        return torch.cat([h[n:] for h, n in zip(states, first, strict=True)]).float()

    got = torch.cat([h[: len(r) - n] for h, r, n in zip(hidden, rows, first, strict=True)]).float()
    right, other = beyond(plain), beyond(wide)
    off, effect, size = (
        x.norm(dim=-1).median().item() for x in (got - right, other - right, right)
    )
    share, floor = (0.02, 1e-4) if own.dtype == torch.float32 else (0.25, 0.1)
    if not off <= max(share * effect, floor * size):
        raise EngineError(
            f"{type(own.backbone).__name__} sees other tokens through its sliding window over a "
            f"key-value cache in slots than without one (its hidden states differ by "
            f"{off / size:.0%}). {ADVICE}"
        )


@contextmanager
def _windows_of(width: int, configs: Sequence[Any]) -> Iterator[None]:
    """Change the width of the sliding windows of a model at rest.

    transformers reads it from the config in each pass. So what a window of thousands of tokens
    leaves out can be seen on a few.
    """
    own = [(c, w) for c in {id(c): c for c in configs}.values() if (w := getattr(c, WINDOW, None))]
    try:
        for config, _ in own:
            setattr(config, WINDOW, width)
        yield
    finally:
        for config, before in own:
            setattr(config, WINDOW, before)


def _plain(own: CachedPass, row: Sequence[int]) -> Tensor:
    """Hidden states [q, H] of one row by a plain pass."""
    ids = torch.tensor([row], device=own.device)
    hidden: Tensor = own.backbone(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[0]


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Turn errors of a model that cannot run over slots into one with a remedy."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(
            f"{type(model).__name__} does not run over a key-value cache in slots, with positions "
            f"and a mask for each row: {first_line(error)}. {ADVICE}"
        ) from error


@torch.no_grad()
def slots_within(model: nn.Module, positions: int, budget_bytes: int) -> int:
    """Count the slots of a model's cache that fit into so much memory; 0 if not even one does.

    The bytes of a token are measured, on one token: layers may differ in them, share them, or keep
    them in a latent form. A slot takes the bytes that :meth:`SlotCache.reserve` allocates for
    ``positions``.

    Args:
        budget_bytes: memory for the cache.

    Raises:
        EngineError: the model does not run over a cache in slots.
        ModelError: its decoder cannot be found.
    """
    own = CachedPass(model, SlotCache(1))
    own.cache.reserve(1)
    with _explained(own.backbone):
        own.prefill([0], [0], [[0]])
    return int(budget_bytes // own.cache.slot_bytes(positions))
