"""What is said of a run before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.checks import disk
from stretto.config import Config, SupervisedConfig
from stretto.models.info import measure, model_info
from stretto.observe import RunDirectory
from stretto.observe.progress import headline
from stretto.saying import format_count

if TYPE_CHECKING:
    from torch import nn


def opening(
    config: Config | SupervisedConfig,
    run_dir: RunDirectory,
    actor: nn.Module | None,
    *,
    resuming: bool,
) -> str:
    """Say in three lines what will run, on what, and where its results go.

    Args:
        config: of the run, with the type of the model decided.
        run_dir: where the results go.
        actor: the model, where the caller brings it; ``None`` where settings name it.
        resuming: whether the run goes on from a checkpoint.

    Raises:
        ModelError: there is no such model.
        ConfigError: CUDA is asked for and missing, or the model takes no such adapters.
    """
    from stretto.models.backend import pick_device

    if actor is None:
        size = _size(config)
        dtype, device = str(config.model.dtype), pick_device(config.model.device).type
    else:
        weight = next(actor.parameters())
        size = f"{format_count(sum(p.numel() for p in actor.parameters()))} parameters"
        dtype, device = str(weight.dtype).removeprefix("torch."), weight.device.type
    model = ", ".join(filter(None, (size, f"{dtype} on {device}")))
    where = f"{'goes on' if resuming else 'results'} in {run_dir.path}"
    if actor is None and (taken := disk.said(config, run_dir.path)):
        where = f"{where}; {taken}"
    return headline(config, model, where)


def _size(config: Config | SupervisedConfig) -> str:
    if model_info(config.model.name) is None:
        return ""
    parameters, adapters = measure(config.model)
    learned = "" if adapters is None else f", of which adapters train {format_count(adapters)}"
    return f"{format_count(parameters)} parameters{learned}"
