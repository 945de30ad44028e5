"""``stretto memory``: plans the memory of PPO's four models."""

from __future__ import annotations

import re
from typing import Annotated, Any

from tyro.conf import arg

from stretto.cli.parsing import takes
from stretto.config import ModelConfig
from stretto.config.sections import NonNegativeInt
from stretto.errors import ConfigError
from stretto.models.info import described, measure
from stretto.models.shapes import LLAMAS, Shape
from stretto.planner.fitting import format_plan, memory_plan
from stretto.planner.on_gpus import GpuOptions, memory_table
from stretto.planner.run_layout import ModelShapes

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@takes(GpuOptions)
def command_memory(
    model: Annotated[str, arg(metavar="MODEL_OR_PARAMETERS")],
    /,
    lora_rank: NonNegativeInt = 0,
    lora_targets: tuple[str, ...] = ("all-linear",),
    **on_gpus: Any,
) -> None:
    """Plan the memory of actor, critic, reference and reward model, all of one size.

    Args:
        model: A number of parameters (7B, 135M), or a model's name or folder.
        lora_rank: Rank of LoRA adapters for actor and critic. 0 trains all weights.
        lora_targets: Modules that get adapters. 'all-linear' takes all but the head.
    """
    options = GpuOptions(**on_gpus)
    if not options.gpus:
        if options_of_gpus := options.beyond(GpuOptions()):
            raise ConfigError(f"{options_of_gpus} needs GPUs: add --gpus", "gpus-missing")
        print(format_plan(memory_plan(*_parameters(model, lora_rank, lora_targets))))
        return
    if lora_rank:
        raise ConfigError(f"--lora-rank {lora_rank}: all weights are trained here", "lora-on-gpus")
    shapes = ModelShapes.of_one_size(_shape(model))
    table, problem = memory_table(shapes, options)
    print(table)
    if problem:
        raise ConfigError(problem, "memory-exceeded")


def _parameters(model: str, rank: int, targets: tuple[str, ...]) -> tuple[int, int | None]:
    if (counted := parse_parameters(model)) is None:
        return measure(ModelConfig(name=model, lora_rank=rank, lora_targets=targets))
    if rank:
        raise ConfigError(
            f"--lora-rank {rank} needs the shapes of a model's layers, which '{model}' does not "
            "tell; name a model instead",
            "layers-unknown",
        )
    return counted, None


def parse_parameters(text: str) -> int | None:
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)\s*([KMBT]?)", text.strip(), re.IGNORECASE)
    return round(float(match[1]) * _UNITS[match[2].upper()]) if match else None


def _shape(model: str) -> Shape:
    if model.upper() in LLAMAS:
        return LLAMAS[model.upper()]
    if parse_parameters(model) is not None:
        raise ConfigError(
            f"'{model}' does not tell the sizes of a model's layers, which a GPU's memory depends "
            f"on; give a model's name, or one of {', '.join(LLAMAS)} (Llama)",
            "layers-unknown",
        )
    return described(model).shape
