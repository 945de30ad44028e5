"""Forward passes that give a row the same bits, whatever rows are computed with it.

A kernel's order of summation may depend on the shapes of its operands, and on the number of CPU
threads, but never on values. Each product therefore takes a number of rows at which the kernel was
seen to sum as in one canonical shape. Rows are padded with zeros to that number.

Shapes: n rows, b sequences, g key-value heads, r query heads to each, L queries, K keys, d head
size, R rows of a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.bounds import ceil_div
from stretto.errors import EngineError
from stretto.models import attention
from stretto.models.cpu_threads import set_threads

NAME = "stretto_rows"
"""Name of the attention in a model's config."""

CANONICAL = 64
"""Rows of the canonical product."""

GRAIN = 8
"""Smaller products have a multiple of these rows, because few rows have kernels of their own."""

LARGEST = 1 << 25
"""Elements of the largest result of one product."""

KEYS = 64
"""Keys of a block. The cache's slots grow by as many positions."""

Kind = Literal["linear", "packed", "scores", "values"]
Elementwise = Callable[[Tensor], Tensor]


def pack(weight: Tensor) -> Tensor:
    """Return a weight in the layout of oneDNN's kernel for up to :data:`CANONICAL` rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), CANONICAL)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


KERNELS: Mapping[Kind, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "packed": packed_linear,
    "scores": lambda queries, keys: torch.bmm(queries, keys.transpose(1, 2)),
    "values": torch.bmm,
}


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    threads = torch.get_num_threads()
    set_threads(1 if device.type == "cpu" else threads)
    try:
        yield
    finally:
        set_threads(threads)


def _filled(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    count = math.prod(shape)
    draws = torch.rand(65_521, generator=torch.Generator().manual_seed(0)) - 0.5
    return draws.repeat(ceil_div(count, len(draws)))[:count].view(shape).to(device, dtype)


@lru_cache(maxsize=4096)
def _is_canonical(
    kind: Kind,
    rows: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
) -> bool:
    """Return whether a product with so many rows sums as the canonical one does: by one thread, for
    one pair of matrices, with :data:`CANONICAL` rows. Random numbers decide it, because the order
    of sums does not depend on values.

    Args:
        shape: pairs of matrices, inner size, outer size.
        threads: the caller's CPU threads.
    """
    batch, inner, outer = shape
    x = _filled(dtype, device, batch, ceil_div(rows, CANONICAL) * CANONICAL, inner)
    w = _filled(dtype, device, batch, *((inner, outer) if kind == "values" else (outer, inner)))
    is_layer = kind in ("linear", "packed")
    weight = pack(w[0]) if kind == "packed" else w[0] if is_layer else w
    result = KERNELS[kind](x[:, :rows].contiguous(), weight)
    canonical = F.linear if is_layer else KERNELS[kind]
    with _one_thread(device):
        for i in range(batch):
            matrix = w[0] if is_layer else w[i : i + 1]
            tiles = [canonical(tile, matrix) for tile in x[i : i + 1].split(CANONICAL, 1)]
            if not torch.equal(result[i : i + 1], torch.cat(tiles, 1)[:, :rows]):
                return False
    return True


def in_tiles(kind: Kind, x: Tensor, matrices: Tensor, outer: int) -> Tensor:
    """Return a product of rows [b, n, inner], each with the bits of the canonical product."""
    batch, n, inner = x.shape
    threads = torch.get_num_threads() if x.device.type == "cpu" else 1
    key = (batch, inner, outer), x.dtype, x.device, threads
    grain = GRAIN if n <= CANONICAL else CANONICAL
    limit = max(LARGEST // outer // CANONICAL, 1) * CANONICAL
    rows = min(ceil_div(n, grain) * grain, limit)
    if _is_canonical(kind, rows, *key) or _is_canonical(kind, rows := CANONICAL, *key):
        return _by_tiles(kind, x, matrices, rows)
    with _one_thread(x.device):
        return _by_tiles(kind, x, matrices, CANONICAL)


def _by_tiles(kind: Kind, x: Tensor, matrices: Tensor, rows: int) -> Tensor:
    n = x.shape[1]
    if padding := -n % rows:
        x = F.pad(x, (0, 0, 0, padding))
    tiles = [KERNELS[kind](tile.contiguous(), matrices) for tile in x.split(rows, 1)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles, 1))[:, :n]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None = None) -> Tensor:
    """Apply a linear layer to [..., H]. ``packed`` is its weight for up to CANONICAL rows."""
    flat = x.reshape(1, -1, x.shape[-1])
    if packed is not None and flat.shape[1] <= CANONICAL:
        out = in_tiles("packed", flat, packed, len(weight))
    else:
        out = in_tiles("linear", flat, weight, len(weight))
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], -1)


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(weight))
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            (grad @ weight).view(x.shape) if for_x else None,
            grad.T @ x.reshape(-1, x.shape[-1]) if for_weight else None,
            grad.sum(0) if for_bias else None,
        )


class RowLinear(nn.Linear):
    """A linear layer whose rows do not depend on each other's number."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # its name in torch
        out: Tensor = _RowProduct.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


class _DifferentiatedAs(torch.autograd.Function):
    """Computes one function, and differentiates another that is the same up to rounding."""

    @staticmethod
    def forward(ctx: Any, compute: Any, plain: Any, *tensors: Tensor) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.plain = plain
        return compute(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            out = ctx.plain(*inputs)
        return (None, None, *torch.autograd.grad(out, inputs, grads[0]))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


EXACT: Mapping[str, tuple[Elementwise, Elementwise] | None] = {
    "SiLU": (_silu, F.silu),
    "SiLUActivation": (_silu, F.silu),
    "GELUActivation": (_gelu, F.gelu),
    "GELUTanh": (_gelu_tanh, partial(F.gelu, approximate="tanh")),
    "ReLU": None,
    "NewGELUActivation": None,
    "ReLUSquaredActivation": None,
}
"""Activations by class, as operations that treat all elements of a tensor alike, and as torch has
them. None: the class already does.
"""


class RowActivation(nn.Module):
    """An activation that treats all elements of a tensor alike. On a CPU torch's own kernels round
    the last few elements in another way, in float32.
    """

    def __init__(self, exact: Elementwise, plain: Elementwise) -> None:
        super().__init__()
        self._functions = exact, plain

    def forward(self, x: Tensor) -> Tensor:
        """Compute exactly if torch does not. Gradients are torch's."""
        exact, plain = self._functions
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return plain(x)
        out: Tensor = _DifferentiatedAs.apply(exact, plain, x)  # type: ignore[no-untyped-call]
        return out


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend from queries [b, g r, L, d] to keys and values [b, g, K, d], block by block of keys.

    Masked keys add exact zeros, so that neither their number nor their content has an effect.
    ``mask`` [b or 1, 1, L, K] is of bools. Without one, attention is causal.
    """
    b, g, keys, d = key.shape
    length, causal = query.shape[2], mask is None
    if mask is None:
        mask = torch.ones(1, 1, length, keys, dtype=torch.bool, device=key.device).tril()
    if padding := -keys % KEYS:
        key, value = (F.pad(x, (0, 0, 0, padding)) for x in (key, value))
        mask = F.pad(mask, (0, padding))
    allowed = mask[:, :, None].unflatten(-1, (-1, KEYS))
    laid = query.reshape(b, g, -1, length, d)
    parts = []
    for start in range(0, length, KEYS):
        end = min(start + KEYS, length)
        blocks = ceil_div(end, KEYS) if causal else allowed.shape[4]
        seen = allowed[:, :, :, start:end, :blocks]
        parts.append(_attend_to_blocks(laid[:, :, :, start:end], key, value, seen, scale))
    return torch.cat(parts, 3).view(query.shape)


def _attend_to_blocks(
    laid: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float
) -> Tensor:
    """Attend from [b, g, r, L, d] with a mask [b or 1, 1, 1, L, blocks, KEYS]."""
    rows, d = laid.flatten(2, 3).flatten(0, 1), laid.shape[4]
    scores = []
    for i in range(allowed.shape[4]):
        block = key[:, :, i * KEYS : (i + 1) * KEYS].flatten(0, 1)
        products = in_tiles("scores", rows, block, KEYS).float()
        scaled = products.view(*laid.shape[:4], KEYS) * scale
        scores.append(scaled.masked_fill_(~allowed[:, :, :, :, i], -torch.inf))
    top = torch.stack([block.amax(-1) for block in scores]).amax(0)[..., None]
    total = torch.zeros_like(top)
    weighted = torch.zeros(laid.shape, dtype=torch.float32, device=laid.device)
    for i, block_scores in enumerate(scores):
        p = block_scores.sub_(top).exp_()
        total += p.sum(-1, keepdim=True)
        block = value[:, :, i * KEYS : (i + 1) * KEYS].flatten(0, 1)
        parts = p.to(laid.dtype).flatten(2, 3).flatten(0, 1)
        weighted += in_tiles("values", parts, block, d).view_as(weighted)
    return (weighted / total).to(laid.dtype)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if not attention.is_plain(module, query, key, value, kwargs):
        raise _refusal("attention with soft caps, sinks, biases or values of another size")

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = attention.short_attention(module, q, k, v, attention_mask, scaling, **kwargs)
        return out.transpose(1, 2)

    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    compute = partial(_attend, mask=attention_mask, scale=scale)
    out = _DifferentiatedAs.apply(compute, plain, query, key, value)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous(), None


def _refusal(reason: str) -> EngineError:
    return EngineError(
        f"training.match_engine = true cannot hold for this model: {reason} may round by the "
        "number of rows; leave it out, or choose a dense model such as Llama, Qwen 2 or SmolLM2",
        "match-engine-model",
    )


def use_row_products(model: Any, decoder: nn.Module) -> None:
    """Give a transformers model, in place, passes whose rows do not depend on each other's number.
    Raises EngineError if its text decoder has parts for which that does not hold.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", attention.NAME, attention.PACKED, NAME):
        raise _refusal(f"attention of the kind '{implementation}'")
    for name, module in decoder.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            matrices = [key for key, p in module.named_parameters(recurse=False) if p.ndim > 1]
            if matrices:
                raise _refusal(f"the product with '{name}.{matrices[0]}'")
    for name, module in [*model.named_modules()]:
        kind = type(module)
        if kind is nn.Linear:
            module.__class__ = RowLinear
        elif kind.__name__ in EXACT:
            if functions := EXACT[kind.__name__]:
                model.set_submodule(name, RowActivation(*functions))
        elif kind.__module__ in ("transformers.activations", "torch.nn.modules.activation"):
            raise _refusal(f"the activation '{name}'")
    attention.register()
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
