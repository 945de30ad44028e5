"""Decoder layers of Llama's kind for one token per row: transformers' operations, fewer calls.

On a CPU, a decode step of 30 layers takes about 20 ms even if its weights are tiny, because of some
1,000 small operations and the Python between them. These forward passes leave out calls without an
effect on the result.

Shapes: n rows, h heads, d head size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.models.attention import NAME, attend_from_last
from stretto.models.devices import ReplacedForwards
from stretto.models.forward import decoder_layers, text_config

KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Layers of transformers with equal operations, except for norms of queries and keys. Code of a
model's own may use their names for other operations.
"""


class DecodeLayers(ReplacedForwards):
    """A model's decoder layers on a CPU, if all are of a known kind; none otherwise. As a context
    manager it puts forward passes with the same bits in the layers' places, for one token per row.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = decoder_layers(model)
        all_covered = all(_is_covered(type(layer)) for layer in layers)
        is_short = getattr(text_config(model), "_attn_implementation", "") == NAME
        on_cpu = next(model.parameters()).device.type == "cpu"
        self.layers: list[Any] = layers if all_covered and is_short and on_cpu else []
        self._forwards = [_one_token(layer) for layer in self.layers]

    def forwards(self) -> Sequence[Callable[..., Tensor]]:
        return self._forwards


def _is_covered(kind: type) -> bool:
    return kind.__name__ in KINDS and kind.__module__.startswith("transformers.models.")


def _one_token(layer: Any) -> Callable[..., Tensor]:
    attention, plain = layer.self_attn, type(layer).forward
    has_norms = hasattr(attention, "q_norm")

    def forward(hidden_states: Tensor, **options: Any) -> Tensor:
        mask = options.get("attention_mask")
        if hidden_states.shape[1] != 1 or mask is None:
            unchanged: Tensor = plain(layer, hidden_states, **options)
            return unchanged
        cos, sin = (x[:, None] for x in options["position_embeddings"])
        cache = options["cache" if "cache" in options else "past_key_values"]
        heads = len(hidden_states), -1, 1, attention.head_dim
        x = layer.input_layernorm(hidden_states)
        query = attention.q_proj(x).view(heads)
        key = attention.k_proj(x).view(heads)
        if has_norms:
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        value = attention.v_proj(x).view(heads)
        keys, values = cache.update(key, value, attention.layer_idx)
        attended = attend_from_last(query, keys, values, mask, attention.scaling)
        x = hidden_states + attention.o_proj(attended.view(len(hidden_states), 1, -1))
        out: Tensor = layer.mlp(layer.post_attention_layernorm(x))
        return out.add_(x)

    return forward


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [n, h, 1, d] after rotary embeddings [n, 1, 1, d], with transformers' bits."""
    half = x.shape[3] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return (x * cos).add_(turned.mul_(sin))
