"""``stretto memory``: what the four models of PPO take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import tyro

from stretto.config import ModelConfig
from stretto.errors import ConfigError
from stretto.models.memory import format_plan, measure, memory_plan, parse_parameters


def run(arguments: Sequence[str]) -> int:
    """Print the memory plan."""
    tyro.cli(_plan, prog="stretto memory", args=list(arguments))
    return 0


def _plan(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL_OR_PARAMETERS")],
    /,
    lora_rank: int = 0,
    lora_targets: tuple[str, ...] = ("all-linear",),
) -> None:
    """Plan the memory of actor, critic, reference and reward model, all of one size.

    Args:
        model: A number of parameters (7B, 135M), or a model's name or folder.
        lora_rank: Rank of LoRA adapters for actor and critic; 0 trains all weights.
        lora_targets: Modules that get adapters; 'all-linear' takes all but the head.
    """
    if lora_rank < 0:
        raise ConfigError(f"--lora-rank {lora_rank}: must be 0 or more")
    parameters = parse_parameters(model)
    trained = None
    if parameters is None:
        chosen = ModelConfig(name=model, lora_rank=lora_rank, lora_targets=lora_targets)
        parameters, trained = measure(chosen)
    elif lora_rank:
        raise ConfigError(
            f"--lora-rank {lora_rank} needs the shapes of a model's layers, which '{model}' does "
            "not tell; name a model instead"
        )
    print(format_plan(memory_plan(parameters, trained=trained)))
