"""Attention where transformers' use of torch's fused kernel is slow, or impossible.

On a CPU: to differentiate. On any device: with a mask. On a GPU: sequences laid end to end.

Shapes: b sequences, g key-value heads, r query heads to each, L tokens, K keys, d head size.

Query heads of a key-value head are laid one after another, so that grouped heads need no copies of
keys and values: scores are one product of [r L, d] and [d, K]. For whole sequences on a CPU, which
may be trained on, these are plain products, and only the probabilities are kept for the backward
pass, in the model's own type. Tokens after a cache take torch's kernel, which transformers calls
with copies of keys and values where there is a mask. Sequences laid end to end take
:func:`torch.nn.attention.varlen.varlen_attn`, which no package but torch is needed for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

NAME, PACKED = "stretto", "stretto_packed"
"""Names in a model's config: of the attention, and of that over sequences laid end to end."""

LONGEST = {torch.bfloat16: 512, torch.float32: 64}
"""Tokens of whole sequences up to which plain products win; measured (docs/performance.md)."""

FEW = 16
"""Tokens of a row after a cache up to which products may hold all scores in memory."""

_unpacked: ContextVar[bool] = ContextVar("unpacked", default=False)


@contextmanager
def unpacked() -> Iterator[None]:
    """Say that each row of a forward pass is one sequence, without positions of the caller's own.

    Otherwise transformers looks for several sequences in a row, for which the host waits until the
    GPU has done all of its work so far.
    """
    _let_passes_skip_the_search()
    before = _unpacked.set(True)
    try:
        yield
    finally:
        _unpacked.reset(before)


@lru_cache(maxsize=1)
def _let_passes_skip_the_search() -> None:
    from transformers import masking_utils

    search = masking_utils.find_packed_sequence_indices

    def searched(position_ids: Tensor) -> Tensor | None:
        return None if _unpacked.get() else search(position_ids)

    masking_utils.find_packed_sequence_indices = searched


def use_attention(model: Any, name: str = NAME) -> None:
    """Let a model use this attention where it used torch's, for calls that it covers. With
    :data:`PACKED`, a model that only trains attends within sequences laid end to end.
    """
    if model.config._attn_implementation in ("sdpa", NAME):
        register()
        model.set_attn_implementation(name)


def register() -> None:
    """Make the attention known to transformers here, for a model that came from another process."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, short_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    AttentionInterface.register(PACKED, _packed)  # without masks, for which the host would wait


def is_plain(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Any) -> bool:
    """Return whether attention is causal, without dropout, soft caps or biases."""
    return (
        query.shape[3] == key.shape[3] == value.shape[3]
        and getattr(module, "is_causal", False)
        and not options.get("dropout")
        and all(options.get(k) is None for k in ("softcap", "position_bias", "is_causal"))
    )


def short_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend by plain products if they are faster, otherwise as transformers does."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    max_length = LONGEST.get(query.dtype, 0) if query.device.type == "cpu" else 0
    is_short_causal = attention_mask is None and 1 < query.shape[2] == key.shape[2] <= max_length
    is_masked = (
        attention_mask is not None
        and attention_mask.shape[1] == 1  # for all heads
        and not torch.is_grad_enabled()
    )
    if not (is_short_causal or is_masked) or not is_plain(module, query, key, value, kwargs):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if attention_mask is None:
        out: Tensor = _CausalAttention.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    else:
        out = attend_from_last(query, key, value, attention_mask, scale)
    return out.transpose(1, 2).contiguous(), None  # as torch's own, which models call view() on


@lru_cache(maxsize=1)
def _varlen_attention() -> Callable[..., Tensor]:
    # Imported late, as it brings torch's compiler.
    from torch.nn.attention.varlen import varlen_attn

    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters  # 2.11 needs no argument
    attention: Callable[..., Any] = varlen_attn
    return partial(attention, enable_gqa=True) if grouped else attention


def _packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within sequences [1, heads, M, d] laid end to end, or within rows [b, heads, L, d].

    Raises ValueError for a family whose attention is another one.
    """
    if attention_mask is not None or kwargs.get("s_aux") is not None:
        raise ValueError("attention over sequences laid end to end knows no masks and no sinks")
    if not is_plain(module, query, key, value, kwargs):
        raise ValueError("attention over sequences laid end to end is plain and causal")
    if (ends := cu_seq_lens_q) is None:
        max_length_q = query.shape[2]
        ends = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device) * max_length_q
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    before = -1 if sliding_window is None else sliding_window - 1
    out = _varlen_attention()(
        *(q, k, v, ends, ends, max_length_q, max_length_q), scale=scaling, window_size=(before, 0)
    )
    return out.view(len(query), query.shape[2], *out.shape[1:]), None


def attend_from_last(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, few: int = FEW
) -> Tensor:
    """Attend from the last tokens [b, g r, L, d] of sequences to keys [b, g, K, d] without copies
    of keys and values. Uses products if keys are transposed in memory, which takes an additive
    mask, otherwise torch's fused kernel.
    """
    length, d = query.shape[2:]
    laid = query.reshape(len(query), key.shape[1], -1, d)
    r = laid.shape[2] // length
    if key.stride(3) != 1 and length <= few:
        scores = torch.bmm((laid * scale).flatten(0, 1), key.transpose(2, 3).flatten(0, 1))
        scores.view(len(query), key.shape[1], r, length, -1).add_(mask[:, :, None])
        return torch.bmm(torch.softmax(scores, -1), value.flatten(0, 1)).view(query.shape)
    if key.stride(3) != 1:
        key = key.contiguous()
    masks = mask.expand(-1, -1, r, -1) if length == 1 else mask.repeat(1, 1, r, 1)
    out = scaled_dot_product_attention(laid, key, value, attn_mask=masks, scale=scale)
    return out.reshape(query.shape)


@lru_cache(maxsize=32)
def _causal_bias(length: int, dtype: torch.dtype) -> Tensor:
    return torch.full((length, length), -torch.inf, dtype=dtype).triu(1)


class _CausalAttention(torch.autograd.Function):
    """``softmax(scale Q K^T + causal) V`` with P kept: dS = P * (dP - sum(dP * P))."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        b, heads, length, d = query.shape
        groups = key.shape[1]
        q = query.reshape(b, groups, -1, d) * scale
        scores = torch.matmul(q, key.transpose(-1, -2))
        scores.view(b, groups, -1, length, length).add_(_causal_bias(length, query.dtype))
        p = torch.softmax(scores, -1)  # which torch computes in float32
        ctx.save_for_backward(q, key, value, p)
        ctx.scale = scale
        return torch.matmul(p, value).view(b, heads, length, d)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, key, value, p = ctx.saved_tensors
        b, heads, length, d = grads[0].shape
        d_out = grads[0].reshape(b, key.shape[1], -1, d)
        d_value = torch.matmul(p.transpose(-1, -2), d_out)
        d_p = torch.matmul(d_out, value.transpose(-1, -2))
        d_scores = torch._softmax_backward_data(d_p, p, -1, q.dtype)
        d_query = (torch.matmul(d_scores, key) * ctx.scale).view(b, heads, length, d)
        d_key = torch.matmul(d_scores.transpose(-1, -2), q)
        return d_query, d_key, d_value, None
