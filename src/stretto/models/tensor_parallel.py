"""Tensor parallelism: every rank of a group holds and computes with a slice of the linear layers
(Shoeybi et al. 2019, "Megatron-LM", section 3).

Of two consecutive linear layers the first is cut by its outputs, the second by its inputs. Between
them each rank has its own heads or features, and after them the ranks' partial outputs are summed.
transformers' plan for the model names these layers. All others are full on every rank. All ranks
get the same calls with the same inputs, and return the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.errors import ModelError
from stretto.layout import Layout
from stretto.models.forward import backbone, text_config
from stretto.models.mapped import final, final_dtype
from stretto.models.shards import PartialLayer, Peers

BY_OUTPUTS = "colwise"
BY_INPUTS = "rowwise"
OF_HEADS = "replicated_with_grad_allreduce"
"""Entries of transformers' plans: layers cut by outputs, by inputs, and norms of single heads."""

REMEDY = "set tp = 1, and fsdp for the learner"


class Slices(Peers):
    """The ranks that hold slices of a model and its copies."""

    _shared: tuple[Tensor, Tensor] | None = None

    def shared(self, x: Tensor) -> Tensor:
        """Return x as an input common to all ranks. Its gradient is summed once for all layers."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._shared is None or self._shared[0] is not x:
            shared_input: Tensor = _Shared.apply(x, self)  # type: ignore[no-untyped-call]
            self._shared = x, shared_input
        return self._shared[1]

    def forget(self) -> None:
        self._shared = None

    def slice(self, weight: Tensor, dim: int) -> Tensor:
        part = weight.detach().chunk(self.size, dim)[self.rank]
        return part.to(final_dtype(weight), copy=True)


@dataclass(frozen=True)
class Cuts:
    """Dimensions along which parameters are cut, by name. ``partial`` are undivided parameters
    whose gradients must be summed over the ranks.
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()


class _Linear(PartialLayer, nn.Linear):
    """A slice that replaces a linear layer."""

    peers: Slices

    def __init__(self, whole: nn.Linear, slices: Slices) -> None:
        nn.Module.__init__(self)
        self.peers = slices
        self.in_features, self.out_features = whole.in_features, whole.out_features
        for name, parameter in whole.named_parameters(recurse=False):
            dim = self.DIMS.get(name)
            weight = final(parameter) if dim is None else slices.slice(parameter, dim)
            self.register_parameter(name, nn.Parameter(weight, parameter.requires_grad))
        if whole.bias is None:
            self.register_parameter("bias", None)
        self.train(whole.training)


class ByOutputs(_Linear):
    """A linear layer of which each rank has some outputs."""

    DIMS: ClassVar = {"weight": 0, "bias": 0}

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs [..., out / ranks] for inputs [..., in]."""
        return F.linear(self.peers.shared(x), self.weight, self.bias)


class ByInputs(_Linear):
    """A linear layer of which each rank has some inputs. Outputs are summed over the ranks."""

    DIMS: ClassVar = {"weight": 1}

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs [..., out] for this rank's inputs [..., in / ranks]. A collective."""
        parts = F.linear(x, self.weight)
        summed: Tensor = _Sum.apply(parts, self.peers)  # type: ignore[no-untyped-call]
        return summed if self.bias is None else summed + self.bias


class _Shared(torch.autograd.Function):
    """The identity, whose gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: Slices) -> Tensor:
        ctx.slices = slices
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.slices.forget()
        return ctx.slices.sum_(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Sum(torch.autograd.Function):
    """The sum over the ranks, whose gradient each rank already has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: Slices) -> Tensor:
        ctx.mark_dirty(x)  # a linear output, not needed for its gradient
        return slices.sum_(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def plan_cuts(model: nn.Module, size: int) -> Cuts:
    """Plan the cuts of a full model, with or without adapters, for ``size`` ranks. No cuts for 1.
    Raises ModelError if transformers has no plan or one with unknown entries, or if heads or
    features cannot be divided evenly.
    """
    if size == 1:
        return Cuts()
    decoder = backbone(model)
    config, kind = text_config(decoder), type(decoder).__name__
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    layout = Layout(tp=size)
    layout.require_divisor(heads, f"attention heads of {kind}")
    layout.require_divisor(kv_heads, f"key-value heads of {kind}")
    names = {id(module): name for name, module in model.named_modules()}
    dims: dict[str, int] = {}
    partial = set[str]()
    planned = list(_planned(decoder))
    _check_between(model, [names[id(module)] for module, _ in planned])
    for module, style in planned:
        name = names[id(module)]
        if style == OF_HEADS:
            partial.update(key for key, _ in module.named_parameters(name))
            continue
        for linear in _linears(module, style, name):
            width = linear.out_features if style == BY_OUTPUTS else linear.in_features
            layout.require_divisor(width, f"features of '{name}'")
            cut = ByOutputs if style == BY_OUTPUTS else ByInputs
            keys = [key for key, _ in linear.named_parameters(recurse=False) if key in cut.DIMS]
            dims |= {f"{names[id(linear)]}.{key}": cut.DIMS[key] for key in keys}
    return Cuts(dims, frozenset(partial))


def cut_linears(model: nn.Module, cuts: Cuts, slices: Slices, within: str = "") -> None:
    """Replace full linear layers whose names start with ``within`` by slices."""
    for parameter, dim in cuts.dims.items():
        name, _, kind = parameter.rpartition(".")
        linear: Any = model.get_submodule(name)
        if kind == "weight" and name.startswith(within) and not isinstance(linear, _Linear):
            parent, _, key = name.rpartition(".")
            cut = ByInputs(linear, slices) if dim else ByOutputs(linear, slices)
            model.get_submodule(parent)._modules[key] = cut


def _check_between(model: nn.Module, planned: Sequence[str]) -> None:
    """Refuse weights between cuts that the plan does not name: their gradients would be partial."""
    inside = tuple(f"{name}." for name in planned)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in planned):
        for name, _ in model.get_submodule(parent).named_parameters(parent):
            if not name.startswith(inside):
                raise ModelError(
                    f"the plan for tensor parallelism does not name '{name}', which stands between "
                    f"layers that it cuts; {REMEDY}",
                    "no-tp-plan",
                )


def _planned(decoder: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    kind = type(decoder).__name__
    plan = getattr(text_config(decoder), "base_model_tp_plan", None)
    if not plan:
        raise ModelError(
            f"transformers has no plan for tensor parallelism of {kind}; {REMEDY}", "no-tp-plan"
        )
    for pattern, style in plan.items():
        if style.startswith("embedding"):  # in transformers 5.17, but ranks keep all token ids
            continue
        if style not in (BY_OUTPUTS, BY_INPUTS, OF_HEADS):
            raise ModelError(
                f"the plan for tensor parallelism of {kind} has '{style}' for '{pattern}', which "
                f"is not supported; {REMEDY}",
                "no-tp-plan",
            )
        matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
        yield from ((m, style) for name, m in decoder.named_modules() if matches(name))


def _linears(layer: Any, style: str, name: str) -> Iterator[nn.Linear]:
    """Yield the linear layers to cut for a planned layer: itself, or its parts under LoRA. Adapters
    of a layer cut by outputs produce some outputs (B). Otherwise they read some inputs (A).
    """
    parts = [layer]
    if hasattr(layer, "base_layer"):
        if layer.lora_magnitude_vector:
            raise ModelError(
                f"'{name}' has an adapter of DoRA, which reads the magnitude of whole weights, and "
                "tensor parallelism cuts these; set model.lora_kind to 'lora' or 'rslora', or tp "
                "to 1",
                "dora-in-slices",
            )
        adapters = layer.lora_B if style == BY_OUTPUTS else layer.lora_A
        parts = [layer.base_layer, *adapters.values()]
    for part in parts:
        if not isinstance(part, nn.Linear):
            raise ModelError(
                f"'{name}' is a {type(part).__name__}, and tensor parallelism cuts linear layers; "
                f"{REMEDY}",
                "no-tp-plan",
            )
        yield part
