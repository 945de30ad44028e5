"""Checkpoints: the whole state of a run between two steps, as plain data and tensors."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch

from stretto.errors import StateError

_NAME = re.compile(r"step-(\d+)")


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write ``<folder>/step-<N>`` and remove older ones once it is whole.

    A run that is killed in between leaves the older checkpoint as it was.
    """
    target = folder / f"step-{step:06d}"
    scratch = folder / f"{target.name}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    torch.save(state, scratch / "state.pt")
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
    for other in folder.iterdir():
        if other != target and _NAME.match(other.name):
            shutil.rmtree(other)
    return target


def load_latest(folder: Path) -> tuple[int, dict[str, Any]]:
    """The newest checkpoint: its step and its state. Holds nothing that could run code.

    Raises:
        StateError: there is none.
    """
    found = {int(m[1]): path for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))}
    if not found:
        raise StateError(
            f"'{folder}' holds no checkpoint to resume from; runs write them with "
            "--observe.checkpoint-every N"
        )
    step = max(found)
    state: dict[str, Any] = torch.load(
        found[step] / "state.pt", weights_only=True, map_location="cpu"
    )
    return step, state
