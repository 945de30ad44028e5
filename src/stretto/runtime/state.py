"""Copies a run's state and writes it to files, in one format for all runtimes.

``driver.pt`` has the state of the schedule's process::

    {"prompts": of the prompt source, "schedule": of the schedule}

The folder ``learner`` has models, optimizers and counters. If generation lags behind the learner,
it also has the weights in use by generators and by the critic as a scorer, and weights that are
published but not loaded yet. Without lag a runtime takes the learner's weights. Every process
writes its part and reads the parts it needs (:mod:`stretto.training.shard_files`).
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from stretto import files
from stretto.files import FileSum

DRIVER, LEARNER = "driver.pt", "learner"
"""The file and the folder of a checkpoint."""

Writer = Callable[[Path], Mapping[str, FileSum]]
"""Writes a file or a folder, once, on any thread. Returns checksums by file name, with ``""`` for a
single file. Raises ``OSError`` or ``StorageError`` if it cannot."""

ROOM = 0.5
"""Share of the free memory that copies of the state may take."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The state of a run between two steps, ready to be written."""

    files: Mapping[str, Writer]  # a writer for each file or folder
    live: bool  # no copy was made, so training must wait until it is written


def copied(state: Any) -> Any:
    """Copy tensors and arrays to CPU tensors. All other data is kept."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, array):
        return torch.from_numpy(np.array(state))
    if isinstance(state, Mapping):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value) for value in state)
    return state


class Claim(NamedTuple):
    """Bytes that a process needs for a copy, and bytes free on its machine."""

    machine: str
    size: int
    free: int


def claim_of(state: Any) -> Claim:
    return Claim(socket.gethostname(), size_of(state), psutil.virtual_memory().available)


def fit(claims: Sequence[Claim]) -> bool:
    """Return whether copies take at most :data:`ROOM` of the free memory of each machine."""
    bytes_by_machine = dict.fromkeys((c.machine for c in claims), 0)
    for claim in claims:
        bytes_by_machine[claim.machine] += claim.size
    return all(bytes_by_machine[c.machine] <= ROOM * c.free for c in claims)


def size_of(state: Any) -> int:
    """Return the bytes of all tensors in a state."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return size_of(list(state.values()))
    return sum(map(size_of, state)) if isinstance(state, list | tuple) else 0


def write(file: Path, state: Any) -> FileSum:
    """Write tensors and plain data. Raises OSError if the disk is full or the system refuses."""
    files.leave_room(file, size_of(state))
    with file.open("wb") as raw:
        try:
            torch.save(state, raw)
        except RuntimeError as error:
            raise _system_error(error) or error from error
    return files.sum_of(file)


def _system_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
