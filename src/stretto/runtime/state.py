"""The state of a run in a form that is the same on every runtime, copied and written to files.

``driver.pt`` has what the schedule and whoever drives it hold::

    {
        "prompts": of the prompt source,
        "schedule": of the schedule,
        "weights": {
            "followers": {model: {name: tensor}},
            "offered": {model: {version: {name: tensor}}},
        },
    }

``followers`` are the trained weights that generators (``actor``) and the critic as a scorer
(``critic``) work with, ``offered`` those that are published and not loaded yet. Both are there only
where generation lags behind the learner. Without lag followers have the learner's weights before
anything is decoded, so that a runtime takes them from there.

The folder ``learner`` has the learner's own state: models, optimizers, counters. Every process that
holds a part of it writes that, and reads what it needs; see :mod:`stretto.training.shard_files`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil
import torch
from torch import Tensor

from stretto import files
from stretto.schedules.schedule import Schedule
from stretto.training import shard_files
from stretto.weights.channel import WeightChannel

DRIVER, LEARNER = "driver.pt", "learner"
"""The file and the folder of a checkpoint."""

Writer = Callable[[Path], None]
"""Writes a file or a folder, once, on any thread; raises ``OSError`` or ``StorageError`` if it
cannot."""

ROOM = 0.5
"""Share of the memory that is free which a copy of the state may take."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The state of a run between two steps, to be written.

    Attributes:
        files: and folders of the checkpoint, with what writes each.
        live: whether they are written from what training changes, as there is no copy: training
            then has to wait until they are written.
    """

    files: Mapping[str, Writer]
    live: bool


def staged(
    prompts: Mapping[str, Any],
    schedule: Mapping[str, Any],
    weights: Mapping[str, Any],
    learner: Mapping[str, Any],
    *,
    copy: bool,
) -> Staged:
    """Stage the state of a run whose parts are all in this process; see the top of this file.

    Args:
        prompts, schedule: of ``driver.pt``, copied already, as they may change at any time.
        weights: of ``driver.pt``.
        copy: these two, if there is room for that.
    """
    state = (weights, shard_files.packed(learner))
    (weights, learner), live = copied_if_room(state, copy=copy)
    driver = {"prompts": prompts, "schedule": schedule, "weights": weights}

    def write_learner(folder: Path) -> None:
        files.leave_room(folder, size_of(learner))
        folder.mkdir()
        shard_files.write(folder / shard_files.file_name(), learner)

    return Staged({DRIVER: partial(write, state=driver), LEARNER: write_learner}, live)


def offered(schedule: Schedule, channel: WeightChannel) -> dict[str, Any]:
    """Return the weights that are published and not loaded, by model, version and name."""
    return {model: {ref.version: dict(channel.get(ref))} for model, ref in schedule.pending.items()}


def offer(schedule: Schedule, weights: Mapping[str, Any], channel: WeightChannel) -> None:
    """The inverse of :func:`offered`, once the schedule has its state."""
    for model, ref in schedule.pending.items():
        channel.put(ref, weights[model][ref.version])


# -- copies --------------------------------------------------------------------------------------


def copied(state: Any) -> Any:
    """Copy tensors to this machine's memory, and all that is around them to plain data."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, Mapping):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value) for value in state)
    return state


def copied_if_room(state: Any, *, copy: bool = True) -> tuple[Any, bool]:
    """Copy a state, where that leaves enough memory for others.

    Returns:
        The copy and ``False``; or the state itself and ``True``.
    """
    if copy and fit([claim_of(state)]):
        return copied(state), False
    return state, True


class Claim(NamedTuple):
    """The memory that a process would take for a copy.

    Attributes:
        machine: where it is.
        size: of the copy in bytes.
        free: bytes that are free there.
    """

    machine: str
    size: int
    free: int


def claim_of(state: Any) -> Claim:
    """Return what this process would take to copy a state."""
    return Claim(socket.gethostname(), size_of(state), psutil.virtual_memory().available)


def fit(claims: Sequence[Claim]) -> bool:
    """Return whether copies leave enough memory for others, on each of their machines."""
    taken = dict.fromkeys((c.machine for c in claims), 0)
    for claim in claims:
        taken[claim.machine] += claim.size
    return all(taken[c.machine] <= ROOM * c.free for c in claims)


def size_of(state: Any) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in _tensors(state))


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors(value)


# -- files ---------------------------------------------------------------------------------------


def write(file: Path, state: Any) -> None:
    """Write tensors and plain data.

    Raises:
        OSError: the system refuses, or too little room would be left for others.
    """
    files.leave_room(file, size_of(state))
    with file.open("wb") as raw:
        stream = _Stream(raw)
        try:
            torch.save(state, stream)  # type: ignore[arg-type]  # it needs no more of a file
        except RuntimeError as error:
            raise stream.error or error from error


class _Stream:
    """A file that is written to.

    Attributes:
        error: the system's error, which torch hides behind one of its own.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self.error: OSError | None = None
        self._raw = raw

    def write(self, data: memoryview) -> int:
        try:
            return self._raw.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._raw.flush()


class BackgroundWriter:
    """A writer of what one rank has of the learner, on a thread beside the rank's own work."""

    def __init__(self) -> None:
        self._state: Any = None
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def stage(self, state: Mapping[str, Any], *, copy: bool) -> None:
        """Keep a state, or a copy, as :func:`~stretto.training.shard_files.write` takes it."""
        self._state = copied(state) if copy else state

    def begin(self, file: Path) -> None:
        """Begin to write the state that was staged last."""
        state, self._state = self._state, None
        self._writing = self._pool.submit(_write_explained, file, state)

    @property
    def ended(self) -> bool:
        """Whether the writing has ended, well or not."""
        return self._writing is not None and self._writing.done()

    def finish(self) -> None:
        """Take note of the end of the writing.

        Raises:
            StorageError: the file could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def _write_explained(file: Path, state: Mapping[str, Any]) -> None:
    with files.explained(file):
        shard_files.write(file, state)
