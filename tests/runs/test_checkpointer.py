"""When checkpoints are taken, and what becomes of training while they are written."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers import ManualClock
from run_helpers import Notes, lines, run, settings
from stretto import files, runs
from stretto.assembly.run_models import NO_OVERRIDES
from stretto.config import ObserveConfig
from stretto.errors import RankError
from stretto.files import FileSum
from stretto.observe import RunDirectory
from stretto.observe.spans import CHECKPOINT, Spans
from stretto.runs import checkpoint
from stretto.runs.checkpoint import Checkpointer
from stretto.runtime import state
from stretto.runtime.run import Run
from stretto.runtime.state import Staged
from stretto.workers.gate import EventGate

STEPS = 100


class Fake:
    """A run whose checkpoints are written when the test says so.

    Attributes:
        go_on: set for files to be written.
        staged: whether each staging was to copy.
        raises: by whatever writes.
    """

    def __init__(self, live: bool = False) -> None:
        self.schedule = SimpleNamespace(weights_lock=asyncio.Lock())
        self.overrides = NO_OVERRIDES
        self.gate = EventGate()
        self.spans = Spans(ManualClock())
        self.go_on, self.staged, self.live = threading.Event(), list[bool](), live
        self.raises: Exception | None = None

    async def stage(self, *, copy: bool = True) -> Staged:
        assert self.schedule.weights_lock.locked()
        self.staged.append(copy)
        return Staged({"driver.pt": self.write}, self.live)

    def write(self, file: Path) -> dict[str, FileSum]:
        assert self.go_on.wait(10)
        if self.raises:
            raise self.raises
        file.write_bytes(b"state")
        return {"": files.sum_of(file)}


class Case:
    """A checkpointer of a fake run."""

    def __init__(self, folder: Path, *, live: bool = False, **observe: Any) -> None:
        self.fake, self.clock, self.notes = Fake(live), ManualClock(), list[str]()
        self.folder = folder
        self.checkpointer = Checkpointer(
            cast(Run, self.fake),
            self.notes.append,
            folder,
            {"task": {"number of rows": "5"}},
            ObserveConfig(**observe),
            STEPS,
            self.clock,
        )

    async def settle(self) -> None:
        """Wait until nothing is being written."""
        self.fake.go_on.set()
        for thread in [t for t in threading.enumerate() if t.name == CHECKPOINT]:
            await asyncio.to_thread(thread.join)
        for _ in range(10):  # until the end of the write has passed the gate
            await asyncio.sleep(0)
        self.fake.go_on.clear()

    @property
    def steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.iterdir())


def driven(work: Callable[[Case], Any], case: Case) -> Case:
    async def main() -> None:
        async with case.checkpointer:
            await work(case)
            case.fake.go_on.set()

    asyncio.run(main())
    return case


def test_the_first_comes_after_a_minute_and_others_after_minutes_from_the_last(
    tmp_path: Path,
) -> None:
    async def work(case: Case) -> None:
        taken = []
        for step, minutes in ((1, 0.9), (2, 0.1), (3, 9.9), (4, 25), (5, 9.9), (6, 0.1)):
            case.clock.advance(60 * minutes)
            await case.checkpointer.after(step)
            await case.settle()
            taken.append(len(case.fake.staged))
        assert taken == [0, 1, 1, 2, 2, 3]

    case = driven(work, Case(tmp_path))
    assert case.steps == [4, 6]
    assert case.fake.staged == [True, True, True]
    size = sum(file.stat().st_size for file in (tmp_path / "step-000004").iterdir())
    where = tmp_path / "step-000002"
    assert case.notes == [f"the first checkpoint, of step 2, takes {size} B: {where}"]
    assert json.loads((tmp_path / "step-000006" / "inputs.json").read_text()) == {
        "task": {"number of rows": "5"}
    }


@pytest.mark.parametrize(
    ("minutes", "every", "before", "taken"),
    [
        (10, 3600.0, False, [1, 2]),  # steps of an hour
        (0.5, 30.0, False, [1, 2]),
        (10, 61.0, True, []),  # a resumed run has one
        (0, 3600.0, False, []),
    ],
)
def test_a_run_that_has_none_gets_one_early(
    minutes: float, every: float, before: bool, taken: list[int], tmp_path: Path
) -> None:
    if before:
        checkpoint.save(tmp_path, 1, {})

    async def work(case: Case) -> None:
        found = []
        for step in (1, 2):
            case.clock.advance(every)
            await case.checkpointer.after(step)
            found += [step] * (len(case.fake.staged) > len(found))
            await case.settle()
        assert found == taken

    driven(work, Case(tmp_path, checkpoint_minutes=minutes))


def test_steps_are_counted_where_they_are_set(tmp_path: Path) -> None:
    async def work(case: Case) -> None:
        for step in range(1, 8):
            case.clock.advance(3600)
            await case.checkpointer.after(step)
            await case.settle()
        assert len(case.fake.staged) == 2

    assert driven(work, Case(tmp_path, checkpoint_every=3)).steps == [3, 6]


@pytest.mark.parametrize(
    ("observe", "taken"),
    [({}, [100]), ({"checkpoint_every": 30}, [100]), ({"checkpoint_minutes": 0}, [])],
)
def test_there_is_one_at_the_end_unless_there_are_none(
    observe: dict[str, Any], taken: list[int], tmp_path: Path
) -> None:
    async def work(case: Case) -> None:
        case.fake.go_on.set()
        case.clock.advance(1)
        await case.checkpointer.after(STEPS - 1)
        await case.checkpointer.after(STEPS)

    case = driven(work, Case(tmp_path, **observe))
    assert case.steps == taken
    assert case.fake.staged == [False] * len(taken)  # nothing changes any more


def test_at_the_end_the_last_one_stays(tmp_path: Path) -> None:
    async def work(case: Case) -> None:
        for step in (STEPS - 2, STEPS - 1, STEPS):
            case.fake.go_on.set()
            await case.checkpointer.after(step)
            if step < STEPS:
                await case.settle()

    case = driven(work, Case(tmp_path, checkpoint_every=1))
    assert case.steps == [STEPS]
    assert case.fake.staged == [True, True, False]


def test_by_time_the_next_one_is_put_off_while_one_is_written(tmp_path: Path) -> None:
    async def work(case: Case) -> None:
        for step in (1, 2, 3):
            case.clock.advance(600)
            await case.checkpointer.after(step)  # which does not wait
        assert case.fake.staged == [True]
        await case.settle()
        await case.checkpointer.after(4)
        assert case.fake.staged == [True, True]

    assert driven(work, Case(tmp_path)).steps == [1, 4]


def test_by_steps_the_next_one_waits_while_one_is_written(tmp_path: Path) -> None:
    async def work(case: Case) -> None:
        await case.checkpointer.after(2)
        await case.checkpointer.after(3)
        waiting = asyncio.create_task(case.checkpointer.after(4))
        await asyncio.sleep(0)  # as far as it comes
        assert (case.fake.staged, waiting.done()) == ([True], False)
        case.fake.go_on.set()
        await waiting
        assert case.fake.staged == [True, True]

    assert driven(work, Case(tmp_path, checkpoint_every=2)).steps == [2, 4]


def test_without_a_copy_training_waits_and_weights_stay(tmp_path: Path) -> None:
    async def work(case: Case) -> None:
        waiting = asyncio.create_task(case.checkpointer.after(1))
        await asyncio.sleep(0)  # as far as it comes
        assert not waiting.done()
        assert case.fake.schedule.weights_lock.locked()
        case.fake.go_on.set()
        await waiting
        assert not case.fake.schedule.weights_lock.locked()

    assert driven(work, Case(tmp_path, live=True, checkpoint_every=1)).steps == [1]


def test_a_full_disk_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    async def work(case: Case) -> None:
        case.fake.raises = OSError(errno.ENOSPC, "No space left on device")
        for step in (1, 2, 3):
            await case.checkpointer.after(step)
            await case.settle()
            if step == 2:
                case.fake.raises = None
        case.fake.raises = OSError(errno.EIO, "Input/output error")
        await case.checkpointer.after(4)

    case = driven(work, Case(tmp_path, checkpoint_every=1))
    assert case.steps == [3]
    full = "No space left on device; make room there. There is no checkpoint of step"
    assert [note.partition("': ")[2] for note in case.notes if "cannot write" in note] == [
        f"{full} 1; nor any other",
        f"{full} 2; nor any other",
        "Input/output error; see that the disk is there and can be written to. There is no "
        "checkpoint of step 4; the newest is of step 3",
    ]


def test_what_else_fails_ends_the_run(tmp_path: Path) -> None:
    async def work(case: Case) -> None:
        case.fake.raises = RankError("the process of the learner was killed")
        await case.checkpointer.after(1)
        await case.settle()
        await case.checkpointer.after(2)

    with pytest.raises(RankError, match="was killed"):
        driven(work, Case(tmp_path, checkpoint_every=1))


def test_an_end_of_another_kind_waits_and_is_not_hidden(tmp_path: Path) -> None:
    def ending(case: Case, raises: Exception | None) -> None:
        async def main() -> None:
            async with case.checkpointer:
                await case.checkpointer.after(7)
                case.fake.raises = raises
                asyncio.get_running_loop().call_soon(case.fake.go_on.set)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            asyncio.run(main())
        assert case.notes[0] == "waiting until the checkpoint of step 7 is written"

    case = Case(tmp_path / "whole", checkpoint_every=7)
    ending(case, None)
    assert case.steps == [7]
    case = Case(tmp_path / "failed", checkpoint_every=7)
    ending(case, RankError("gone"))
    assert case.notes[1:] == ["the checkpoint of step 7 is not written: gone"]


# -- of whole runs -------------------------------------------------------------------------------


def test_writing_is_seen_in_the_trace_and_is_nobodys_idle_time(
    tiny_folder: Path, tmp_path: Path
) -> None:
    run_dir, _ = run(settings(tiny_folder, steps=3, observe={"checkpoint_every": 1}), tmp_path)
    spans = [s for s in run_dir.trace.read().spans if s.role == "checkpoint"]
    assert {"checkpoint/stage", "checkpoint/write"} == {s.name for s in spans}
    names = {name for metrics in lines(run_dir.metrics_file) for name in metrics}
    assert {"timing_s/checkpoint/stage", "timing_s/checkpoint/write"} <= names
    assert not [n for n in names if n.startswith(("utilisation/check", "idle_s/check"))]


def test_a_run_on_a_full_disk_goes_on_and_says_at_its_end_what_there_is(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the fourth step on there is no room for a checkpoint."""
    write = state.write

    def while_there_is_room(file: Path, state: Any) -> FileSum:
        if int(file.parent.name[5:11]) >= 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, state)

    monkeypatch.setattr("stretto.runtime.run.write", while_there_is_room)
    config = settings(tiny_folder, steps=6, observe={"checkpoint_every": 2})
    run_dir, notes = RunDirectory.create(tmp_path, "run", config), Notes()
    runs.train(config, run_dir=run_dir, progress=notes)
    assert [m["step"] for m in run_dir.read_metrics()] == [1, 2, 3, 4, 5, 6]
    said = [note for note in notes.notes if "cannot write" in note]
    assert len(said) == 2
    assert said[-1].endswith(
        "step-000006': No space left on device; make room there. There is no checkpoint of step 6; "
        "the newest is of step 2"
    )
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step-000002"]
    assert checkpoint.load_latest(run_dir.checkpoints, print)[0] == 2
