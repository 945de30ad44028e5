"""A ``LoraConfig`` of peft as settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from stretto.errors import ConfigError

_TAKEN = frozenset({"r", "lora_alpha", "target_modules"})
_FREE = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "lora_dropout",
        "peft_type",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Arguments that change nothing here: there is no dropout, as there was none in TRL's trainer."""


def settings(peft_config: Any, policy: Any) -> dict[str, Any]:
    """The settings of the section ``model`` that ask for the same adapters.

    Args:
        peft_config: a ``LoraConfig``.
        policy: the model that gets them.

    Raises:
        ConfigError: it asks for more than rank, alpha and target modules.
    """
    from peft import LoraConfig

    if type(peft_config) is not LoraConfig:
        raise ConfigError(
            f"peft_config = {type(peft_config).__name__}: the adapters here are LoRA's; give a "
            "LoraConfig"
        )
    plain = LoraConfig()
    for field in fields(peft_config):
        value, default = getattr(peft_config, field.name), getattr(plain, field.name)
        if field.name not in _TAKEN | _FREE and value != default:
            raise ConfigError(
                f"peft_config: {field.name} = {value!r} is not supported; LoRA here has r, "
                "lora_alpha and target_modules. Leave it out"
            )
    return {
        "lora_rank": peft_config.r,
        "lora_alpha": float(peft_config.lora_alpha),
        "lora_targets": _targets(peft_config.target_modules, policy),
    }


def without_own(policy: Any, peft_config: Any) -> Any:
    """The policy that gets new adapters: as in TRL's trainer, with those merged that it has."""
    merges = peft_config is not None and hasattr(policy, "merge_and_unload")
    return policy.merge_and_unload() if merges else policy


def _targets(given: Any, policy: Any) -> tuple[str, ...]:
    if given is None:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as BY_TYPE

        kind = policy.config.model_type
        if kind not in BY_TYPE:
            raise ConfigError(
                f"peft_config: peft has no target_modules of its own for '{kind}'; name them, or "
                "set target_modules='all-linear'"
            )
        return tuple(sorted(BY_TYPE[kind]))
    if isinstance(given, str):
        if given != "all-linear":
            raise ConfigError(
                f"peft_config: target_modules = '{given}' is a pattern; give a list of names, or "
                "'all-linear'"
            )
        return (given,)
    return tuple(sorted(given))
