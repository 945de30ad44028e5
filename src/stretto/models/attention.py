"""Attention on a CPU where torch's fused kernel is slow: to differentiate, and with a mask.

Shapes: b sequences, g key-value heads, r query heads to each, L tokens, K keys, d head size.

Query heads of a key-value head are laid one after another, so that grouped heads need no copies of
keys and values: scores are one product of [r L, d] and [d, K]. For whole sequences, which may be
trained on, these are plain products, and only the probabilities are kept for the backward pass, in
the model's own type. Tokens after a cache take torch's kernel, which transformers calls with copies
of keys and values where there is a mask.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

NAME = "stretto"
"""Name of the attention in a model's config."""

LONGEST = {torch.bfloat16: 512, torch.float32: 64}
"""Tokens of whole sequences up to which plain products win; measured (docs/performance.md)."""


def use_short_attention(model: Any) -> None:
    """Let a model on a CPU use this attention where it used torch's, for calls that it covers."""
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        register()
        model.set_attn_implementation(NAME)


def register() -> None:
    """Make the attention known to transformers here, for a model that came from another process."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    plain = (
        query.device.type == "cpu"  # a model may be loaded there for another device
        and query.shape[3] == key.shape[3] == value.shape[3]
        and getattr(module, "is_causal", False)
        and not kwargs.get("dropout")
        and all(kwargs.get(k) is None for k in ("softcap", "position_bias", "is_causal"))
    )
    most = LONGEST.get(query.dtype, 0)
    whole = attention_mask is None and 1 < query.shape[2] == key.shape[2] <= most
    after = (
        attention_mask is not None
        and attention_mask.shape[1] == 1  # for all heads
        and not torch.is_grad_enabled()
    )
    if not plain or not (whole or after):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if attention_mask is None:
        out: Tensor = _CausalAttention.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
    else:
        out = _masked(query, key, value, attention_mask, scale)
    return out.transpose(1, 2).contiguous(), None  # as torch's own, which models call view() on


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend from the last tokens [b, g r, L, d] of sequences to keys [b, g, K, d] by torch's fused
    kernel, without copies of keys and values.
    """
    laid = query.reshape(len(query), key.shape[1], -1, query.shape[3])
    masks = mask.repeat(1, 1, laid.shape[2] // query.shape[2], 1)
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
