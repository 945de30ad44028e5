"""Whether the memory that a run certainly takes is there, before anything is loaded."""

from __future__ import annotations

from stretto.config import Config
from stretto.errors import ConfigError, ModelError
from stretto.machine import free_memory, usable_gpus
from stretto.planner.states import plan_for
from stretto.saying import format_size


def check(config: Config) -> None:
    """Refuse a run in this process whose models do not fit into the memory that is free.

    Runs in processes are looked at device by device (``runtime/groups/fitting.py``).

    Raises:
        ConfigError: they do not.
    """
    if config.runtime == "inline" and (config.model.device == "cpu" or not usable_gpus()):
        require(config, free_memory(), "this machine")


def check_gpu(config: Config) -> None:
    """Refuse a run in this process whose models do not fit on its GPU; torch is imported for it.

    Raises:
        ConfigError: they do not.
    """
    import torch

    if config.runtime == "inline" and config.model.device != "cpu" and torch.cuda.is_available():
        require(config, torch.cuda.mem_get_info()[0], torch.cuda.get_device_name())


def require(config: Config, free: int, where: str) -> None:
    """Refuse a run whose weights, gradients and optimizer states exceed what is free.

    Args:
        free: bytes.
        where: they are free, as it stands in a message.

    Raises:
        ConfigError: see above; the message says what would take less, and how much that takes.
    """
    try:
        plan = plan_for(config)
    except ModelError:  # its files are not here to be counted
        return
    needed = plan.mixed.total_bytes
    if needed > free:
        parts = ", ".join(f"{r.role} {format_size(r.total_bytes)}" for r in plan.mixed.roles)
        raise ConfigError(
            f"'{config.model.name}' takes {format_size(needed)} for weights, gradients and "
            f"optimizer states ({parts}), and {where} has {format_size(free)} free. "
            f"Choose {_remedies(config)}"
        )


def _remedies(config: Config) -> str:
    """Return what takes less memory, and how much it takes."""
    lora = {"model": config.model.model_copy(update={"lora_rank": 16})}
    rloo = {"algorithm": config.algorithm.model_copy(update={"name": "rloo"})}
    found = ["a smaller model"]
    if not config.model.lora_rank:
        found.append(f"LoRA (--model.lora-rank 16: {_size(config.model_copy(update=lora))})")
    if config.algorithm.definition.critic:
        found.append(
            "an algorithm without a critic (--algorithm.name rloo --rollout.samples-per-prompt 2: "
            f"{_size(config.model_copy(update=rloo))})"
        )
    return ", or ".join(found)


def _size(config: Config) -> str:
    return format_size(plan_for(config).mixed.total_bytes)
