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
"""Smaller products have a multiple of this many rows, because few rows have kernels of their own.
"""

LARGEST = 1 << 25
"""Elements of the largest result of one product."""

KEYS = 64
"""Keys of a block. The cache's slots grow by as many positions."""

Kind = Literal["linear", "packed", "scores", "values"]


def pack(weight: Tensor, rows: int) -> Tensor:
    """Return a weight in the layout of oneDNN's kernel for so many rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    return torch.bmm(queries, keys.transpose(1, 2))


def _product(kind: Kind, x: Tensor, matrices: Tensor) -> Tensor:
    if kind == "scores":
        return _scores(x, matrices)
    if kind == "values":
        return torch.bmm(x, matrices)
    if kind == "packed":
        return packed_linear(x[0], pack(matrices[0], CANONICAL))[None]
    return F.linear(x[0], matrices[0])[None]


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    set_threads(1)
    try:
        yield
    finally:
        set_threads(threads)


@lru_cache(maxsize=1)
def _draws() -> Tensor:
    return torch.rand(65_521, generator=torch.Generator().manual_seed(0)) - 0.5


def _filled(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    count, draws = math.prod(shape), _draws()
    numbers = draws.repeat(ceil_div(count, len(draws)))[:count]
    return numbers.view(shape).to(device, dtype)


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
    canonical: Kind = "linear" if kind == "packed" else kind
    x = _filled(dtype, device, batch, ceil_div(rows, CANONICAL) * CANONICAL, inner)
    w = _filled(dtype, device, batch, *((inner, outer) if kind == "values" else (outer, inner)))
    result = _product(kind, x[:, :rows].contiguous(), w)
    with _one_thread(device):
        for i in range(batch):
            tiles = x[i : i + 1].split(CANONICAL, 1)
            exact = torch.cat([_product(canonical, tile, w[i : i + 1]) for tile in tiles], 1)
            if not torch.equal(result[i : i + 1], exact[:, :rows]):
                return False
    return True


def in_tiles(kind: Kind, x: Tensor, outer: int, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a product of rows [..., n, K], each with the bits of the canonical product."""
    n, inner = x.shape[-2:]
    batch = x.shape[0] if x.ndim == 3 else 1
    threads = torch.get_num_threads() if x.device.type == "cpu" else 1
    is_canonical = partial(
        _is_canonical,
        kind,
        shape=(batch, inner, outer),
        dtype=x.dtype,
        device=x.device,
        threads=threads,
    )
    grain = GRAIN if n <= CANONICAL else CANONICAL
    limit = max(LARGEST // outer // CANONICAL, 1) * CANONICAL
    rows = min(ceil_div(n, grain) * grain, limit)
    if not is_canonical(rows):
        rows = CANONICAL
    if not is_canonical(rows):
        with _one_thread(x.device):
            return _by_tiles(x, rows, product)
    return _by_tiles(x, rows, product)


def _by_tiles(x: Tensor, rows: int, product: Callable[[Tensor], Tensor]) -> Tensor:
    if x.shape[-2] == rows:
        return product(x.contiguous())
    parts = []
    for part in x.split(rows, -2):
        n = part.shape[-2]
        parts.append(product(F.pad(part, (0, 0, 0, rows - n)))[..., :n, :])
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None = None) -> Tensor:
    """Apply a linear layer to [..., H]. ``packed`` is its weight for up to CANONICAL rows."""
    flat = x.reshape(-1, x.shape[-1])
    if packed is not None and len(flat) <= CANONICAL:
        out = in_tiles("packed", flat, len(weight), partial(packed_linear, packed=packed))
    else:
        out = in_tiles("linear", flat, len(weight), partial(F.linear, weight=weight))
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
    def forward(
        ctx: Any,
        compute: Callable[..., Tensor],
        plain: Callable[..., Tensor],
        *tensors: Tensor,
    ) -> Tensor:
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


class RowActivation(nn.Module):
    """An activation that treats all elements of a tensor alike. On a CPU torch's own kernels round
    the last few elements in another way, in float32.
    """

    exact: Callable[[Tensor], Tensor]
    plain: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``exact`` if ``plain`` would not do. Gradients are those of ``plain``."""
        kind = type(self)
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return kind.plain(x)
        out: Tensor = _DifferentiatedAs.apply(  # type: ignore[no-untyped-call]
            kind.exact, kind.plain, x
        )
        return out


class RowSiLU(RowActivation):
    """``x / (1 + exp(-x))``."""

    exact = staticmethod(_silu)
    plain = staticmethod(F.silu)


class RowGELU(RowActivation):
    """``x * Phi(x)``, with the normal distribution's Phi."""

    exact = staticmethod(_gelu)
    plain = staticmethod(F.gelu)


class RowTanhGELU(RowActivation):
    """GELU with Phi approximated by a tanh."""

    exact = staticmethod(_gelu_tanh)
    plain = staticmethod(partial(F.gelu, approximate="tanh"))


ACTIVATIONS: Mapping[str, type[RowActivation] | None] = {
    "SiLU": RowSiLU,
    "SiLUActivation": RowSiLU,
    "GELUActivation": RowGELU,
    "GELUTanh": RowTanhGELU,
    "ReLU": None,
    "NewGELUActivation": None,
    "ReLUSquaredActivation": None,
}
"""Replacements by class. None: the class already treats all elements alike."""


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend from queries [b, g r, L, d] to keys and values [b, g, K, d], block by block of keys.

    Masked keys add exact zeros, so that neither their number nor their content has an effect.
    ``mask`` [b or 1, 1, L, K] is of bools. Without one, attention is causal.
    """
    b, g, keys, d = key.shape
    length = query.shape[2]
    if padding := -keys % KEYS:
        key, value = (F.pad(x, (0, 0, 0, padding)) for x in (key, value))
    laid = query.reshape(b * g, -1, length, d)
    out = laid.new_empty(laid.shape)
    for start in range(0, length, KEYS):
        stop = min(start + KEYS, length)
        if mask is None:
            seen = ceil_div(stop, KEYS)
            allowed = torch.ones(stop - start, seen * KEYS, dtype=torch.bool, device=key.device)
            allowed = allowed.tril(start)[None, None]
        else:
            seen = ceil_div(keys, KEYS)
            allowed = F.pad(mask[:, :, start:stop], (0, padding))
        allowed = allowed.expand(b, g, -1, -1).reshape(b * g, 1, stop - start, -1)
        out[:, :, start:stop] = _attend_to_blocks(
            laid[:, :, start:stop], key, value, allowed.unflatten(-1, (seen, KEYS)), scale
        )
    return out.view(query.shape)


def _attend_to_blocks(
    laid: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float
) -> Tensor:
    """Attend from [b g, r, L, d] with a mask [b g, 1, L, blocks, KEYS]."""
    rows = laid.flatten(1, 2)
    d = laid.shape[3]
    scores = []
    for i in range(allowed.shape[3]):
        block = key[:, :, i * KEYS : (i + 1) * KEYS].flatten(0, 1)
        products = in_tiles("scores", rows, KEYS, partial(_scores, keys=block))
        by_head = products.float().view(*laid.shape[:3], KEYS) * scale
        scores.append(by_head.masked_fill_(~allowed[:, :, :, i], -torch.inf))
    top = torch.stack([block.amax(-1) for block in scores]).amax(0)[..., None]
    total = torch.zeros_like(top)
    weighted = torch.zeros(laid.shape, dtype=torch.float32, device=laid.device)
    for i, block_scores in enumerate(scores):
        p = block_scores.sub_(top).exp_()
        total += p.sum(-1, keepdim=True)
        block = value[:, :, i * KEYS : (i + 1) * KEYS].flatten(0, 1)
        parts = p.to(laid.dtype).flatten(1, 2)
        weighted += in_tiles("values", parts, d, partial(torch.bmm, mat2=block)).view_as(weighted)
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

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention.short_attention(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )[0].transpose(1, 2)

    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    compute = partial(_attend, mask=attention_mask, scale=scale)
    out: Tensor = _DifferentiatedAs.apply(  # type: ignore[no-untyped-call]
        compute, plain, query, key, value
    )
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
    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", attention.NAME, attention.PACKED, NAME):
        raise _refusal(f"attention of the kind '{implementation}'")
    for name, module in decoder.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            matrices = [key for key, p in module.named_parameters(recurse=False) if p.ndim > 1]
            if matrices:
                raise _refusal(f"the product with '{name}.{matrices[0]}'")
    for name, module in model.named_modules():
        kind = type(module)
        if kind is nn.Linear:
            module.__class__ = RowLinear
        elif kind.__name__ in ACTIVATIONS:
            module.__class__ = ACTIVATIONS[kind.__name__] or kind
        elif kind.__module__ in ("transformers.activations", "torch.nn.modules.activation"):
            raise _refusal(f"the activation '{name}'")
    register()
    model.set_attn_implementation(NAME)


def register() -> None:
    """Make the attention known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    attention.register()
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def has_row_products(model: Any) -> bool:
    return bool(model.config._attn_implementation == NAME)
