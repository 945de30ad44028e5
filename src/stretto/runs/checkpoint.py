"""Checkpoints: the full state of a run between two steps, as plain data and tensors.

::

    checkpoints/step-000020/
    ├── driver.pt        prompts and schedule (runtime/state.py)
    ├── inputs.json      fingerprints of rows and models at the start (runs/training_loop.py)
    ├── learner/         trained models, optimizers and generation weights, one file per process
    │                    that holds a part of them (training/shard_files.py)
    └── manifest.json    length and SHA-256 of each other file

The writer of a file also computes its checksum. A checkpoint gets its name when all files are on
disk. Resuming compares all lengths and checksums first, and falls back to the older checkpoint if
one is damaged. Therefore two are kept during a run, and only one at the end of the run or if the
disk has no room for another.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import Any, Generic, TypeVar

import torch

from stretto import files
from stretto.config import ObserveConfig
from stretto.errors import StateError, StorageError, first_line
from stretto.files import FileSum
from stretto.observe.run_directory import KEPT
from stretto.observe.spans import CHECKPOINT
from stretto.protocols import Clock
from stretto.runtime.run import Run
from stretto.runtime.state import DRIVER, LEARNER, Staged, Writer
from stretto.saying import format_size

T = TypeVar("T")

INPUTS = "inputs.json"  # fingerprints of rows and models

FIRST_MINUTES = 1.0
"""Minutes until the first checkpoint is due, so that a run that is killed early can resume."""

EXPORT = "checkpoint/export"  # the staged model for Overrides.exports

_FORMAT = 5
_NAME = re.compile(r"step-(\d+)")
_MANIFEST = "manifest.json"


def save(folder: Path, step: int, parts: Mapping[str, Writer], keep: int = KEPT) -> Path:
    """Write ``<folder>/step-<N>``, then remove all but the ``keep`` newest checkpoints.

    Checkpoints of later steps are removed too, because the run was resumed before them. Remains of
    a killed run are removed first. If the disk lacks room, so are all but the newest checkpoint.
    Raises StorageError if the checkpoint cannot be written, and leaves nothing of it. ``parts``
    write the files and folders.
    """
    target = folder / f"step-{step:06d}"
    _remove(folder.glob("step-*.tmp"))
    with files.explained(target):
        _make_room(folder, step)
    with files.explained(target), files.new_folder(target) as scratch:
        entries = {
            (PurePosixPath(part) / name).as_posix(): {"bytes": entry.size, "sha256": entry.sha256}
            for part, write in parts.items()
            for name, entry in write(scratch / part).items()
        }
        manifest = {"format": _FORMAT, "step": step, "files": entries}
        (scratch / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    _remove(_superfluous(folder, step, keep))
    return target


def _make_room(folder: Path, step: int) -> None:
    path_by_step = _found(folder)
    if earlier_steps := [number for number in path_by_step if number <= step]:
        # The new checkpoint has about the same size.
        needed = (1 + files.SPARE) * files.size_of(path_by_step[max(earlier_steps)])
        free, superfluous = files.free(folder), _superfluous(folder, step, 1)
        if free < needed <= free + sum(map(files.size_of, superfluous)):
            _remove(superfluous)


def _remove(folders: Iterable[Path]) -> None:
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)


def _superfluous(folder: Path, step: int, keep: int) -> list[Path]:
    path_by_step = _found(folder)
    steps_to_keep = sorted(number for number in path_by_step if number <= step)[-keep:]
    return [path for number, path in path_by_step.items() if number not in steps_to_keep]


def load_latest(folder: Path, note: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
    """Load the newest undamaged checkpoint. Returns its step and state.

    The state has the contents of ``driver.pt`` and ``inputs.json`` and the path of the learner's
    folder. Loading never runs code from a checkpoint. ``note`` gets a line for each damaged
    checkpoint that is skipped. Raises StateError if none is left.
    """
    require(folder)
    path_by_step, damages = _found(folder), []
    for step in sorted(path_by_step, reverse=True):
        try:
            state = _load(path_by_step[step], step)
        except _DamagedError as damage:
            damages.append(f"'{path_by_step[step]}' cannot be used: {damage}")
            continue
        for line in damages:
            note(f"{line}; going on from step {step}, before it")
        return step, state
    raise StateError(
        f"{'; '.join(damages)}. There is no other checkpoint: start the run anew",
        "damaged-checkpoint",
    )


def require(folder: Path) -> None:
    """Raise StateError if there is no checkpoint, damaged or not."""
    if not newest(folder):
        raise StateError(
            f"'{folder}' holds no checkpoint to resume from; a run writes one after its first "
            "minute, every observe.checkpoint_minutes (10, unless set otherwise) and at its end, "
            "or every observe.checkpoint_every steps. Start the run anew",
            "no-checkpoint",
        )


def newest(folder: Path) -> int:
    return max(_found(folder), default=0)


class _DamagedError(Exception):
    """A checkpoint differs from what was written."""


def _found(folder: Path) -> dict[int, Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return {int(m[1]): path for path in paths if (m := _NAME.fullmatch(path.name))}


def _load(checkpoint: Path, step: int) -> dict[str, Any]:
    _verify(checkpoint, step)
    try:
        driver = torch.load(checkpoint / DRIVER, weights_only=True, map_location="cpu")
        inputs = dict(json.loads((checkpoint / INPUTS).read_bytes()))
    except UnpicklingError as error:
        raise _DamagedError(
            f"{DRIVER} holds other things than tensors and plain data: {first_line(error)}"
        ) from error
    except Exception as error:  # torch raises many kinds for files with a forged sum
        raise _DamagedError(f"{DRIVER} or {INPUTS} cannot be read: {first_line(error)}") from error
    return {DRIVER: driver, LEARNER: checkpoint / LEARNER, INPUTS: inputs}


def _verify(checkpoint: Path, step: int) -> None:
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_bytes())
        entries = manifest["files"].items()
        file_sums = {PurePosixPath(n): FileSum(int(f["bytes"]), f["sha256"]) for n, f in entries}
        file_format, file_step = int(manifest["format"]), int(manifest["step"])
    except FileNotFoundError:
        raise _DamagedError(
            f"it has no {_MANIFEST} (versions of Stretto before there was one wrote none)"
        ) from None
    except files.UNREADABLE as error:
        raise _DamagedError(f"{_MANIFEST} cannot be read: {error!r}") from error
    if file_format != _FORMAT:
        raise _DamagedError(
            f"{_MANIFEST} has the format {file_format}, and this version knows {_FORMAT} alone; go "
            "on with the version of Stretto that wrote it"
        )
    if file_step != step:
        raise _DamagedError(f"{_MANIFEST} is of step {file_step}, and the folder of {step}")
    parts = {name.as_posix() for name in file_sums} | {name.parent.name for name in file_sums}
    if missing := [name for name in (DRIVER, INPUTS, LEARNER) if name not in parts]:
        raise _DamagedError(f"{_MANIFEST} lists no {missing[0]}")
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        for comparison in [pool.submit(_compare, checkpoint / n, s) for n, s in file_sums.items()]:
            comparison.result()


def _compare(file: Path, expected: FileSum) -> None:
    try:
        if (size := file.stat().st_size) != expected.size:
            raise _DamagedError(
                f"{file.name} has {size} bytes of the {expected.size} that were written"
            )
        if files.sum_of(file) != expected:
            raise _DamagedError(f"{file.name} is not what was written: its SHA-256 differs")
    except OSError as error:
        raise _DamagedError(f"{file.name} cannot be read: {error.strerror}") from error


def _in_background(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` in a daemon thread, which does not keep the process alive."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # cancelling the wait does not stop it

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=CHECKPOINT, daemon=True).start()
    return future


# -- during a run --------------------------------------------------------------------------------


@dataclass(eq=False)
class BackgroundWriter(AbstractAsyncContextManager[Any], Generic[T]):
    """Writes files of a run by a thread during training, one write at a time.

    - A failed write (full disk) is reported and does not end the run. Earlier files stay.
    - Leave the context while the event loop runs, because it waits for the write in progress.
    """

    running: Run
    note: Callable[[str], None]
    _writing: asyncio.Task[T] | None = field(default=None, init=False)

    @property
    @abstractmethod
    def _missing(self) -> str:
        """A message after a failure that ends the run."""

    @abstractmethod
    def _failed(self, error: StorageError) -> None:
        """Report a failure that does not end the run."""

    def _done(self, written: T) -> None:
        """Do nothing more after a write."""

    def _begin(self, name: str, write: Callable[[], T]) -> None:
        """Start ``write``. Its end passes the gate, as later work depends on it."""
        writing = _in_background(write)
        work = self.running.gate.outcome(name, "write", lambda: asyncio.wrap_future(writing))
        self._writing = asyncio.create_task(work)

    async def _written(self) -> None:
        """Wait for the write in progress, if any, and report a failure."""
        if self._writing is None:
            return
        try:
            self._done(await asyncio.shield(self._writing))
        except StorageError as error:
            self._failed(error)
        finally:
            if self._writing.done():  # otherwise the wait was interrupted
                self._writing = None

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the write in progress. Its failure does not hide an earlier error."""
        try:
            await self._written()
        except Exception as failure:
            if error is None:
                raise
            self.note(f"{self._missing}: {failure}")


@dataclass(eq=False)
class Checkpointer(BackgroundWriter[Path]):
    """Writes a run's checkpoints, each staged between two steps.

    - Staging copies the state that training changes, so that training continues during the write.
      It waits for the write if memory is too short for a copy.
    - One checkpoint is written at a time. With ``observe.checkpoint_every`` the next one waits.
      With ``observe.checkpoint_minutes`` it moves to the first step after the write.
    - A run without a checkpoint takes one after :data:`FIRST_MINUTES`.
    - One follows the last step in either case, and replaces all earlier ones.
    """

    folder: Path
    inputs: Mapping[str, Mapping[str, str]]
    observe: ObserveConfig
    steps: int
    clock: Clock

    def __post_init__(self) -> None:
        self._taken_s = self.clock.now()
        self._any = newest(self.folder) > 0
        self._step = 0  # step of the current or last write

    async def after(self, step: int, *, last: bool = False, asked: bool = False) -> None:
        """Take a checkpoint if one is due or ``asked``. ``last``: no step follows. Raises a
        StrettoError if the process with the state is gone.
        """
        if last:
            self.steps = step
        if self._writing and self._writing.done():
            await self._written()
        if asked or self._is_due(step):
            await self._written()
            await self._take(step)
        if step == self.steps:
            await self._written()

    def lacks(self, step: int) -> bool:
        return self.observe.checkpoints and newest(self.folder) != step

    def write_last(self, step: int, staged: Staged) -> Path:
        return save(self.folder, step, {**staged.files, INPUTS: self._write_inputs})

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._writing and not self._writing.done():
            self.note(f"waiting until the checkpoint of step {self._step} is written")
        await super().__aexit__(kind, error, trace)

    def _is_due(self, step: int) -> bool:
        interval, minutes = self.observe.checkpoint_every, self.observe.checkpoint_minutes
        if step == self.steps:
            return self.observe.checkpoints
        if interval:
            return step % interval == 0
        wait_s = 60 * (minutes if self._any else min(minutes, FIRST_MINUTES))
        overdue = self.clock.now() - self._taken_s >= wait_s
        return minutes > 0 and overdue and self._writing is None

    async def _take(self, step: int) -> None:
        self._taken_s, self._step = self.clock.now(), step
        async with self.running.schedule.weights_lock:
            with self.running.spans.span(CHECKPOINT, "checkpoint/stage", step=step):
                # After the last step nothing changes the state any more.
                staged = await self.running.stage(copy=step < self.steps)
                if self.running.overrides.exports:
                    await self.running.stage_model(EXPORT, held=False)
            self._write(step, staged)
            if staged.live:
                await self._written()

    def _write(self, step: int, staged: Staged) -> None:
        keep = 1 if step == self.steps else KEPT
        parts = {**staged.files, INPUTS: self._write_inputs}

        def write() -> Path:
            with self.running.spans.span(CHECKPOINT, "checkpoint/write", step=step):
                path = save(self.folder, step, parts, keep)
                if exports := self.running.overrides.exports:
                    exports(step, path, partial(self.running.save_staged, EXPORT))
                return path

        self._begin(CHECKPOINT, write)

    def _write_inputs(self, file: Path) -> Mapping[str, FileSum]:
        file.write_text(json.dumps(self.inputs, indent=1) + "\n", "utf-8")
        return {"": files.sum_of(file)}

    @property
    def _missing(self) -> str:
        return f"the checkpoint of step {self._step} is not written"

    def _done(self, written: Path) -> None:
        if not self._any and self._step < self.steps:
            size = format_size(files.size_of(written))
            self.note(f"the first checkpoint, of step {self._step}, takes {size}: {written}")
        self._any = True

    def _failed(self, error: StorageError) -> None:
        last = newest(self.folder)
        newest_text = f"the newest is of step {last}" if last else "nor any other"
        self.note(f"{error}. There is no checkpoint of step {self._step}; {newest_text}")
