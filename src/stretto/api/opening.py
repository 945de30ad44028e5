"""What is said of a run before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.config import Config, RewardModelConfig, SftConfig
from stretto.observe import RunDirectory
from stretto.observe.progress import headline
from stretto.saying import Say

if TYPE_CHECKING:
    from torch import nn


def opening(
    config: Config | SftConfig | RewardModelConfig,
    run_dir: RunDirectory,
    actor: nn.Module | None,
    say: Say,
    *,
    resuming: bool,
) -> str:
    """Say in three lines what will run, on what, and where its results go.

    Args:
        config: of the run, with the type of the model decided.
        run_dir: where the results go.
        actor: the model, where the caller brings it; ``None`` where settings name it.
        say: told what takes time.
        resuming: whether the run goes on from a checkpoint.

    Raises:
        ModelError: the model's architecture cannot be read.
        ConfigError: CUDA is asked for and missing, or the model takes no such adapters.
    """
    from stretto.models.load import pick_device
    from stretto.models.memory import format_count, measure

    if actor is None:
        parameters, adapters = measure(config.model, say)
        dtype, device = str(config.model.dtype), pick_device(config.model.device).type
    else:
        weight = next(actor.parameters())
        parameters, adapters = sum(p.numel() for p in actor.parameters()), None
        dtype, device = str(weight.dtype).removeprefix("torch."), weight.device.type
    learned = "" if adapters is None else f", of which adapters train {format_count(adapters)}"
    model = f"{format_count(parameters)} parameters{learned}, {dtype} on {device}"
    where = f"{'goes on' if resuming else 'results'} in {run_dir.path}"
    return headline(config, model, where)
