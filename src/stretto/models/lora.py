"""LoRA adapters, through peft."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.config import ModelConfig
from stretto.errors import ConfigError, ModelError, first_line
from stretto.models.devices import ReplacedForwards
from stretto.models.forward import unwrapped
from stretto.models.info import require_targets, tied_error
from stretto.models.weights import require_finite, with_own_weights


def add_lora(
    model: nn.Module,
    config: ModelConfig,
    kind: Literal["CAUSAL_LM", "SEQ_CLS"],
    start: Path | None = None,
) -> nn.Module:
    """Wrap a model in adapters of ``config.lora_rank`` and freeze the rest.

    ``config.lora_kind`` selects LoRA (Hu et al. 2021), rsLoRA (Kalajdzievski 2023) or DoRA (Liu et
    al. 2024). Adapters are float32 whatever the model's type. A fresh adapter changes nothing: its
    B matrix is zero, and DoRA's magnitudes are those of the weights. Adapters of a PEFT folder
    ``start`` are loaded as saved, without dropout. Raises ConfigError like :func:`check_lora`,
    leaving the model unchanged, or ModelError for saved adapters that do not fit.
    """
    from peft import LoraConfig, get_peft_model

    if start:
        return load_lora(model, start)

    check_lora(model, config)
    targets = config.lora_targets
    lora = LoraConfig(
        task_type=kind,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # a float is fine
        lora_dropout=0.0,
        use_rslora=config.lora_kind == "rslora",
        use_dora=config.lora_kind == "dora",
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses an old name of transformers
            wrapped: nn.Module = get_peft_model(model, lora)
    except ValueError as error:
        raise ConfigError(
            f"model.lora_targets = {', '.join(targets)}: peft puts no adapters on "
            f"{type(model).__name__}: {first_line(error)}. Name other layers",
            "no-adapters-there",
        ) from error
    return wrapped


def load_lora(model: nn.Module, folder: Path) -> nn.Module:
    """Wrap a model in the trainable adapters of a PEFT folder. See :func:`add_lora`."""
    from peft import PeftConfig, PeftModel

    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
        config.lora_dropout = 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # as above
            warnings.simplefilter("error", UserWarning)  # about adapters missing in the file
            wrapped: nn.Module = PeftModel.from_pretrained(
                cast(Any, model), str(folder), config=config, is_trainable=True
            )
    except (OSError, ValueError, RuntimeError, TypeError, UserWarning) as error:
        raise ModelError(
            f"cannot put the adapters of '{folder}' on {type(model).__name__}: "
            f"{first_line(error)}. Give the adapter's own model in base_model_name_or_path",
            "adapter-not-loaded",
        ) from error
    require_finite(wrapped, f"'{folder}'")
    return wrapped


def starting_policy(adapted: nn.Module) -> nn.Module:
    """Return a frozen copy that is not a PEFT model, so that a reference keeps its adapters on."""
    model: nn.Module = unwrapped(with_own_weights(adapted))
    vars(model).pop("peft_config", None)
    return model


def check_lora(model: nn.Module, config: ModelConfig) -> None:
    """Raise ConfigError if the configured adapters cannot be added or merged."""
    if config.lora_rank and hasattr(model, "peft_config"):
        raise ConfigError(
            f"model.lora_rank = {config.lora_rank}, and the model has adapters of its own already; "
            "set model.lora_rank = 0 to train those, or merge them first (merge_and_unload)",
            "adapters-already",
        )
    if config.lora_rank and config.lora_targets != ("all-linear",):
        _check_targets(model, config.lora_targets)


def trained_names(model: nn.Module) -> frozenset[str]:
    return frozenset(trained_tensors(model))


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def merge_lora(wrapped: Any, trained: frozenset[str]) -> None:
    """Merge adapters into the wrapped model and restore which of its parameters are trained."""
    for name, parameter in wrapped.merge_and_unload().named_parameters():
        parameter.requires_grad_(name in trained)


class ReferenceAdapters(ReplacedForwards):
    """A model's adapted layers. While entered, they compute as in the reference: without adapters,
    or, if it ``starts_adapted``, with full copies of the adapters that the model has now. Making
    copies of shards is a collective.
    """

    def __init__(self, model: nn.Module, *, starts_adapted: bool) -> None:
        self.layers: list[Any] = [m for m in model.modules() if hasattr(m, "base_layer")]
        self._forwards = [_reference_forward(layer, starts_adapted) for layer in self.layers]

    def forwards(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return self._forwards


@torch.no_grad()
def _reference_forward(layer: Any, starts_adapted: bool) -> Callable[..., Tensor]:
    base: nn.Module = layer.get_base_layer()
    if not starts_adapted:
        return base.__call__
    copies: dict[int, Any] = {id(base): base}  # which is shared
    for name, p in layer.named_parameters():
        if not name.startswith("base_layer."):
            full = p.full_tensor() if isinstance(p, DTensor) else p
            copies[id(p)] = nn.Parameter(full.clone(), requires_grad=False)
    frozen: nn.Module = copy.deepcopy(layer, copies)
    return frozen.__call__


class FusedAdapters(ReplacedForwards):
    """A model's LoRA layers, each of whose adapters take two kernels in place of peft's six.

    ``W x + s B (A x)`` is computed in the model's type: in float32 as by peft, but for the order of
    roundings. In bfloat16 A, B and A x are rounded, too, each by up to 2^-9 of itself. Small
    updates are not lost, as they are if adapters are merged into bfloat16 weights.

    As a context manager it brings copies of the adapters up to date, in the same memory, as CUDA
    graphs hold addresses, and puts its forward passes in place of peft's. Layers with DoRA, several
    adapters or biases stay as they are, and all layers if it is not ``on``.
    """

    def __init__(self, model: nn.Module, *, on: bool = True) -> None:
        self.layers: list[Any] = [m for m in model.modules() if on and _is_plain_lora(m)]
        self._copied: list[nn.Linear] = []
        self._copies: list[Tensor] = []
        self._forwards = [self._fused(layer) for layer in self.layers]

    @torch.no_grad()
    def forwards(self) -> Sequence[Callable[[Tensor], Tensor]]:
        if self._copies:
            torch._foreach_copy_(self._copies, [part.weight for part in self._copied])
        return self._forwards

    def _fused(self, layer: Any) -> Callable[[Tensor], Tensor]:
        base, (name,) = layer.get_base_layer(), layer.active_adapters
        down, up = (self._reader(p[name], base.weight.dtype) for p in (layer.lora_A, layer.lora_B))
        scaling = layer.scaling[name]

        def forward(x: Tensor) -> Tensor:
            out: Tensor = base(x)
            low = x.reshape(-1, x.shape[-1]) @ down().T
            out.view(-1, out.shape[-1]).addmm_(low, up().T, alpha=scaling)
            return out

        return forward

    def _reader(self, part: nn.Linear, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Return a function that gives an adapter's matrix in a type."""
        if part.weight.dtype == dtype:
            return lambda: part.weight
        copy = torch.empty_like(part.weight, dtype=dtype, requires_grad=False)
        self._copied.append(part)
        self._copies.append(copy)
        return lambda: copy


def _is_plain_lora(module: Any) -> bool:
    if not hasattr(module, "lora_A"):
        return False
    from peft.tuners.lora.layer import Linear

    if type(module) is not Linear or type(module.get_base_layer()) is not nn.Linear:
        return False
    if module.merged or module.disable_adapters or len(module.active_adapters) != 1:
        return False
    (name,) = module.active_adapters
    parts = [part[name] for part in (module.lora_A, module.lora_B) if name in part]
    plain = [type(part) is nn.Linear and part.bias is None for part in parts]
    return len(plain) == 2 and all(plain) and name not in module.lora_variant


def _check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    from transformers.pytorch_utils import Conv1D

    kinds = nn.Linear, nn.Embedding, Conv1D
    modules = dict(model.named_modules())
    layers = [name for name, module in modules.items() if isinstance(module, kinds)]
    require_targets(targets, modules, type(model).__name__, layers)
    layer_names: dict[int, str] = {}  # by the ids of their weights
    for target in targets:
        for name, module in modules.items():
            if name != target and not name.endswith(f".{target}"):
                continue
            if not isinstance(module, kinds):
                raise ConfigError(
                    f"model.lora_targets = '{target}': {name} is a {type(module).__name__}; "
                    "adapters go on linear layers and embeddings",
                    "no-adapters-there",
                )
            layer_names[id(module.weight)] = name
    for name, module in modules.items():
        other = layer_names.get(id(getattr(module, "weight", None)))
        if other and other != name:
            raise tied_error(other, name)
