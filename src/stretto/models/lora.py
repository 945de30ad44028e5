"""LoRA adapters, through peft."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from stretto.config import ModelConfig
from stretto.errors import ConfigError, first_line
from stretto.models.info import require_targets


def add_lora(
    model: nn.Module, config: ModelConfig, kind: Literal["CAUSAL_LM", "SEQ_CLS"]
) -> nn.Module:
    """Wrap a model in adapters of ``config.lora_rank`` (Hu et al. 2021); the rest is frozen.

    Adapters are float32 whatever the model's type. A fresh adapter changes nothing: its B matrix
    is zero. The model's own modules are replaced; :func:`merge_lora` puts them back.

    Raises ConfigError if a target is no layer of the model or one that takes no adapter, or the
    adapters could not be merged; the model is left as it was.
    """
    from peft import LoraConfig, get_peft_model

    check_lora(model, config)
    targets = config.lora_targets
    lora = LoraConfig(
        task_type=kind,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # peft divides by it: a float is fine
        lora_dropout=0.0,
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
            wrapped: nn.Module = get_peft_model(model, lora)
    except ValueError as error:
        raise ConfigError(
            f"model.lora_targets = {', '.join(targets)}: peft puts no adapters on "
            f"{type(model).__name__}: {first_line(error)}. Name other layers",
            "no-adapters-there",
        ) from error
    return wrapped


def check_lora(model: nn.Module, config: ModelConfig) -> None:
    """Raise ConfigError if a model cannot be wrapped in the adapters that the settings ask for."""
    if config.lora_rank and hasattr(model, "peft_config"):
        raise ConfigError(
            f"model.lora_rank = {config.lora_rank}, and the model has adapters of its own already; "
            "set model.lora_rank = 0 to train those, or merge them first (merge_and_unload)",
            "adapters-already",
        )
    if config.lora_rank and config.lora_targets != ("all-linear",):
        _check_targets(model, config.lora_targets)


def trained_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that are trained."""
    return frozenset(name for name, p in model.named_parameters() if p.requires_grad)


def merge_lora(wrapped: nn.Module, trained: frozenset[str]) -> None:
    """Merge adapters into the weights of the model that was given to :func:`add_lora`.

    It has its own modules again, and trains what it did before: the names in ``trained``.
    """
    adapted: Any = wrapped
    model: nn.Module = adapted.merge_and_unload()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def _check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    """Check that every target is there, takes an adapter, and shares its weight with no other."""
    modules = dict(model.named_modules())
    chosen: dict[str, nn.Module] = {}
    layers = [name for name, module in modules.items() if _takes_adapter(module)]
    require_targets(targets, modules, type(model).__name__, layers)
    for target in targets:
        found = {n: m for n, m in modules.items() if n == target or n.endswith(f".{target}")}
        for name, module in found.items():
            if not _takes_adapter(module):
                raise ConfigError(
                    f"model.lora_targets = '{target}': {name} is a {type(module).__name__}; "
                    "adapters go on linear layers and embeddings",
                    "no-adapters-there",
                )
        chosen |= found
    _check_tied(modules, chosen)


def _takes_adapter(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | nn.Embedding | Conv1D)


def _check_tied(modules: Mapping[str, nn.Module], chosen: Mapping[str, nn.Module]) -> None:
    """Refuse an adapter of a weight that two layers share: merged, it would change both."""
    weights = {id(module.weight): name for name, module in chosen.items()}
    for name, module in modules.items():
        other = weights.get(id(getattr(module, "weight", None)))
        if other is not None and other != name:
            raise ConfigError(
                f"model.lora_targets: {other} and {name} are one weight (tied), so that an adapter "
                "on the one could not be merged without changing the other; leave them out",
                "adapter-on-tied",
            )
