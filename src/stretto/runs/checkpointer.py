"""When the checkpoints of a run are taken, and their writing while training goes on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

from stretto import files
from stretto.clock import Clock, RealClock
from stretto.config import ObserveConfig
from stretto.errors import StorageError
from stretto.observe.run_directory import KEPT
from stretto.observe.spans import CHECKPOINT
from stretto.runs import checkpoint
from stretto.runs.inputs import Identities
from stretto.runtime.run import Run
from stretto.runtime.state import Staged
from stretto.saying import format_size

FIRST_MINUTES = 1.0
"""Minutes after which a run has its first checkpoint, at the latest with the first step after them:
a run that is killed early can be resumed, too."""


class Checkpointer:
    """Whoever takes the checkpoints of a run: staged between two steps, written by a thread.

    Staging copies what training changes, and the copy is written while training goes on. Where
    memory is too short for a copy, training waits for the writing.

    One checkpoint is written at a time. With ``observe.checkpoint_every`` the next one waits for
    that; with ``observe.checkpoint_minutes`` it is put off to the first step after that, and a run
    that has none yet gets one after :data:`FIRST_MINUTES`. After the last step there is one in
    either case, and those before it go. One that cannot be written, as on a full disk, does not end
    the run: a line says so, and the ones before it stay.

    A context manager, to be left while the event loop runs: it waits for what is being written, so
    that this is whole.

    Args:
        clock: in seconds.
    """

    def __init__(
        self,
        running: Run,
        folder: Path,
        inputs: Identities,
        observe: ObserveConfig,
        steps: int,
        note: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        self._running, self._folder, self._observe = running, folder, observe
        self._inputs = json.dumps(inputs, indent=1) + "\n"
        self._steps, self._note, self._clock = steps, note, clock or RealClock()
        self._taken_s = self._clock.now()
        self._any = checkpoint.newest(folder) > 0
        self._writing: Future[Path] | None = None
        self._step = 0  # of the one that is being written, or was last

    async def after(self, step: int) -> None:
        """Take a checkpoint after a step, if one is due.

        Raises:
            StrettoError: the state cannot be had, as the process that has it is gone.
        """
        if self._writing and self._writing.done():
            await self._written()
        if self._is_due(step):
            await self._written()
            await self._take(step)
        if step == self._steps:
            await self._written()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what is being written; an error of that does not hide another one."""
        if self._writing and not self._writing.done():
            self._note(f"waiting until the checkpoint of step {self._step} is written")
        try:
            await self._written()
        except Exception as failure:
            if error is None:
                raise
            self._note(f"the checkpoint of step {self._step} is not written: {failure}")

    def _is_due(self, step: int) -> bool:
        every, minutes = self._observe.checkpoint_every, self._observe.checkpoint_minutes
        if step == self._steps:
            return self._observe.checkpoints
        if every:
            return step % every == 0
        wait_s = 60 * (minutes if self._any else min(minutes, FIRST_MINUTES))
        late = self._clock.now() - self._taken_s >= wait_s
        return minutes > 0 and late and self._writing is None

    async def _take(self, step: int) -> None:
        spans, schedule = self._running.spans, self._running.schedule
        self._taken_s, self._step = self._clock.now(), step
        async with schedule.weights_lock:
            with spans.span(CHECKPOINT, "checkpoint/stage", step=step):
                # After the last step nothing changes any more.
                staged = await self._running.stage(copy=step < self._steps)
            self._writing = self._begin(step, staged)
            if staged.live:
                await self._written()

    def _begin(self, step: int, staged: Staged) -> Future[Path]:
        """Have a thread write, which does not keep the process alive."""
        future: Future[Path] = Future()
        keep = 1 if step == self._steps else KEPT
        parts = {**staged.files, checkpoint.INPUTS: self._write_inputs}
        future.set_running_or_notify_cancel()  # whoever stops waiting does not stop the thread

        def work() -> None:
            try:
                with self._running.spans.span(CHECKPOINT, "checkpoint/write", step=step):
                    path = checkpoint.save(self._folder, step, parts, keep)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(path)

        threading.Thread(target=work, name=CHECKPOINT, daemon=True).start()
        return future

    def _write_inputs(self, file: Path) -> None:
        file.write_text(self._inputs, encoding="utf-8")

    async def _written(self) -> None:
        """Wait for what is being written, if anything is, and say what has failed."""
        if self._writing is None:
            return
        try:
            path = await asyncio.wrap_future(self._writing)
            if not self._any and self._step < self._steps:
                size = format_size(files.size_of(path))
                self._note(f"the first checkpoint, of step {self._step}, takes {size}: {path}")
            self._any = True
        except StorageError as error:
            self._note(f"{error}. There is no checkpoint of step {self._step}; {self._there_is()}")
        finally:
            if self._writing.done():  # else the waiting was interrupted
                self._writing = None

    def _there_is(self) -> str:
        newest = checkpoint.newest(self._folder)
        return f"the newest is of step {newest}" if newest else "nor any other"
