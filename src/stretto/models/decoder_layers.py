"""Layers of Llama's kind on a CPU: transformers' operations in fewer calls, or in less memory.

A decode step of 30 layers takes about 20 ms even if its weights are tiny, because of some 1,000
small operations and the Python between them. :class:`DecodeLayers` leave out calls without an
effect on the result, and TorchScript runs a layer without Python.

Shapes: n rows, h heads, d head size, H hidden size, I MLP size, K key positions read, b sequences
of L tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.attention import NAME, attend_from_last
from stretto.models.devices import MOST_ROWS, ReplacedForwards
from stretto.models.forward import decoder_layers, text_config

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Families of transformers whose layers, MLPs and norms have equal operations, except for norms of
queries and keys. Code of a model's own may use their names for other operations.
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
        usable = is_short and is_gated and on_cpu and all(_is(x, "DecoderLayer") for x in layers)
        self.layers: list[Any] = layers if usable else []

    def forwards(self) -> Sequence[Callable[..., Tensor]]:
        return [_one_token(layer) for layer in self.layers]


def _is(module: nn.Module, part: str) -> bool:
    kind = type(module)
    is_known = kind.__name__ in [family + part for family in FAMILIES]
    return is_known and kind.__module__.startswith("transformers.models.")


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
            return cast(Tensor, type(layer).forward(layer, hidden_states, **options))
        rotary = options["position_embeddings"]
        return run(hidden_states, linears, weights, sizes, rotary, slots, mask)

    return forward


@lru_cache(maxsize=1)
def _scripted() -> Callable[..., Tensor] | None:
    """Return the layer in TorchScript, or nothing if this Python or torch does not support it."""
    script: object = None
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.script(_layer)  # the function itself with PYTORCH_JIT=0
    return script if isinstance(script, torch.jit.ScriptFunction) else None


def _layer(
    x: Tensor,
    linears: list[Linear],
    norms: list[Tensor],
    sizes: tuple[float, float, int],
    rotary: tuple[Tensor, Tensor],
    slots: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    mask: Tensor,
) -> Tensor:
    """Return the output for x [n, 1, H], by products with query, key, value, output, gate, up and
    down. ``linears`` are modules if not in TorchScript. ``slots`` are of ``SlotCache``.
    """
    eps, scale, head_size = sizes
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
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [n, h, 1, d] after rotary embeddings [n, 1, 1, d], with transformers' bits."""
    half = x.shape[3] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return (x * cos).add_(turned.mul_(sin))


class RecomputingLayers(ReplacedForwards):
    """The norms and MLPs of known kinds in a bfloat16 model on a CPU. As a context manager it has
    backward passes recompute elementwise results, such as float32 inputs of norms. All results and
    gradients keep their bits. For SmolLM2, 29 instead of 48 bytes per token and unit of hidden size
    are kept.
    """

    def __init__(self, model: nn.Module) -> None:
        weight = next(model.parameters())
        is_half = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
        modules = model.modules() if is_half else iter(())
        self.layers = [module for module in modules if _is(module, "RMSNorm") or _is_gated(module)]

    def forwards(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return [partial(_gate if _is_gated(layer) else _normalize, layer) for layer in self.layers]


def _is_gated(module: Any) -> bool:
    if not _is(module, "MLP") or module.config.hidden_act != "silu":
        return False
    return type(module.down_proj) is nn.Linear and module.down_proj.bias is None


def _normalize(norm: Any, hidden: Tensor) -> Tensor:
    out: Tensor = _RMSNorm.apply(hidden, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return out


def _gate(mlp: Any, x: Tensor) -> Tensor:
    out: Tensor = _GatedProjection.apply(mlp.gate_proj(x), mlp.up_proj(x), mlp.down_proj.weight)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    """``weight * (h * r)`` with r = rsqrt(mean(h^2) + eps), and h [..., H] in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        h = hidden.float()
        r = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(hidden, weight, r)
        return weight * h.mul_(r).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, r = ctx.saved_tensors
        h, d_weight = hidden.float(), None
        if ctx.needs_input_grad[1]:  # not with LoRA
            d_weight = (grads[0] * (h * r).to(hidden.dtype)).sum(tuple(range(h.dim() - 1)))
        d_normal = (grads[0] * weight).float()
        d_mean = (d_normal * h).sum(-1, keepdim=True).mul_(-0.5).mul_(r.pow(3)).div_(h.shape[-1])
        d_h = d_normal.mul_(r).add_(h.mul_(2).mul_(d_mean))
        return d_h.to(hidden.dtype), d_weight, None


class _GatedProjection(torch.autograd.Function):
    """``(silu(gate) * up) W^T`` with gate and up [b, L, I], W [H, I]."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(F.silu(gate).mul_(up), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        rows, active = grads[0].flatten(0, -2), F.silu(gate)
        d_weight = None
        if ctx.needs_input_grad[2]:  # not with LoRA
            d_weight = ((active * up).flatten(0, -2).T @ rows).T
        d_product = (rows @ weight).view(gate.shape)
        d_gate = torch.ops.aten.silu_backward(d_product * up, gate)
        return d_gate, d_product.mul_(active), d_weight
