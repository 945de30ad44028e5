"""LoRA adapters, through peft."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from torch import nn

from stretto.config import ModelConfig
from stretto.errors import ConfigError, ModelError, first_line
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
    return frozenset(name for name, p in model.named_parameters() if p.requires_grad)


def merge_lora(wrapped: Any, trained: frozenset[str]) -> None:
    """Merge adapters into the wrapped model and restore which of its parameters are trained."""
    for name, parameter in wrapped.merge_and_unload().named_parameters():
        parameter.requires_grad_(name in trained)


def _check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    from transformers.pytorch_utils import Conv1D

    kinds = nn.Linear, nn.Embedding, Conv1D
    modules = dict(model.named_modules())
    layers = [name for name, module in modules.items() if isinstance(module, kinds)]
    require_targets(targets, modules, type(model).__name__, layers)
    chosen: dict[int, str] = {}  # names by their weights
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
            chosen[id(module.weight)] = name
    for name, module in modules.items():
        other = chosen.get(id(getattr(module, "weight", None)))
        if other and other != name:
            raise tied_error(other, name)
