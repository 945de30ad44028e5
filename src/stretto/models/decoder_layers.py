"""Decoder layers of Llama's kind for one token per row: transformers' operations, fewer calls.

On a CPU, a decode step of 30 layers takes about 20 ms even if its weights are tiny, because of some
1,000 small operations and the Python between them. These forward passes leave out calls without an
effect on the result. TorchScript runs a layer without Python.

Shapes: n rows, h heads, d head size, H hidden size, K key positions read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.attention import NAME, attend_from_last
from stretto.models.devices import MOST_ROWS, ReplacedForwards
from stretto.models.forward import decoder_layers, text_config

KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Layers of transformers with equal operations, except for norms of queries and keys. Code of a
model's own may use their names for other operations.
"""

Linear = tuple[Tensor, Tensor | None, Tensor | None]
"""Weight, bias and packed weight of a linear layer."""


class DecodeLayers(ReplacedForwards):
    """A model's decoder layers on a CPU, if all are of a known kind; none otherwise. As a context
    manager it puts forward passes with the same bits in the layers' places, for one token per row.
    """

    def __init__(self, model: nn.Module) -> None:
        layers, config = decoder_layers(model), text_config(model)
        is_short = getattr(config, "_attn_implementation", "") == NAME
        is_gated = getattr(config, "hidden_act", "") == "silu"
        on_cpu = next(model.parameters()).device.type == "cpu"
        usable = is_short and is_gated and on_cpu and all(_is_known(type(x)) for x in layers)
        self.layers: list[Any] = layers if usable else []

    def forwards(self) -> Sequence[Callable[..., Tensor]]:
        return [_one_token(layer) for layer in self.layers]


def _is_known(kind: type) -> bool:
    return kind.__name__ in KINDS and kind.__module__.startswith("transformers.models.")


def _one_token(layer: Any) -> Callable[..., Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears: list[Any] = [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    run: Callable[..., Tensor] = _layer
    if all(type(linear) is nn.Linear for linear in linears) and (script := _scripted()):
        run = script
        linears = [(x.weight, x.bias, getattr(x.forward, "packed", None)) for x in linears]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if hasattr(attention, "q_norm"):
        norms += [attention.q_norm, attention.k_norm]
    weights = [norm.weight for norm in norms]
    sizes = norms[0].variance_epsilon, attention.scaling, attention.head_dim

    def forward(hidden_states: Tensor, **options: Any) -> Tensor:
        mask = options.get("attention_mask")
        cache = options["cache" if "cache" in options else "past_key_values"]
        slots = None if mask is None else cache.slots_of_step(attention.layer_idx)
        if hidden_states.shape[1] != 1 or slots is None:
            unchanged: Tensor = type(layer).forward(layer, hidden_states, **options)
            return unchanged
        rotary = options["position_embeddings"]
        return run(hidden_states, linears, weights, *sizes, rotary, slots, mask)

    return forward


@lru_cache(maxsize=1)
def _scripted() -> Callable[..., Tensor] | None:
    """Return the layer in TorchScript, or nothing if this Python or torch does not support it."""
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore", DeprecationWarning)
        return cast(Callable[..., Tensor], torch.jit.script(_layer))
    return None


def _layer(
    x: Tensor,
    linears: list[Linear],
    norms: list[Tensor],
    eps: float,
    scale: float,
    head_size: int,
    rotary: tuple[Tensor, Tensor],
    slots: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    mask: Tensor,
) -> Tensor:
    """Return the output for x [n, 1, H], by products with query, key, value, output, gate, up and
    down. ``linears`` are modules if not in TorchScript. ``slots`` are of ``SlotCache``.
    """
    keys, values, read_keys, read_values, rows, positions = slots
    cos, sin = rotary[0][:, None], rotary[1][:, None]
    normed = _normed(x, norms[0], eps)
    query = _product(normed, linears[0]).view(len(x), -1, 1, head_size)
    key = _product(normed, linears[1]).view(len(x), -1, 1, head_size)
    value = _product(normed, linears[2]).view(len(x), -1, 1, head_size)
    if len(norms) > 2:
        query, key = _normed(query, norms[2], eps), _normed(key, norms[3], eps)
    query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
    keys.transpose(1, 2)[rows, positions] = key.transpose(1, 2)
    values.transpose(1, 2)[rows, positions] = value.transpose(1, 2)
    attended = attend_from_last(query, read_keys, read_values, mask, scale)
    x = x + _product(attended.view(len(x), 1, -1), linears[3])
    normed = _normed(x, norms[1], eps)
    gate, up = _product(normed, linears[4]), _product(normed, linears[5])
    return _product(F.silu(gate).mul_(up), linears[6]).add_(x)


def _product(x: Tensor, linear: Linear, most_rows: int = MOST_ROWS) -> Tensor:
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        weight, bias, packed = linear
        if packed is None or len(x) > most_rows:
            return F.linear(x, weight, bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out
    return cast(Tensor, linear(x))  # type: ignore[operator]


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [n, h, 1, d] after rotary embeddings [n, 1, 1, d], with transformers' bits."""
    half = x.shape[3] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return (x * cos).add_(turned.mul_(sin))
