"""A stopped run goes on after its last complete step, whatever stopped it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stretto
from raising import raises
from run_helpers import Notes, assert_same_run, run, settings
from stretto.errors import LearnerError
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.rollout.engine import TorchEngine
from stretto.runs.checkpoint import newest
from stretto.runs.training_loop import _TrainingLoop
from stretto.training.learner import PolicyLearner
from stretto.training.trained import TrainedModel
from stretto.types import WeightsRef

PLACES = {  # a signal that comes there after two steps, and the last complete step then
    "decoding": (TorchEngine, "decode", signal.SIGINT, 2),
    "training": (PolicyLearner, "train", signal.SIGTERM, 3),
    "updating": (TrainedModel, "update", signal.SIGINT, 3),
    "publishing": (PolicyLearner, "publish", signal.SIGUSR1, 3),
}


@pytest.fixture(scope="module")
def complete(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Four steps without an interruption."""
    return run(settings(tiny_folder, steps=4), tmp_path_factory.mktemp("complete"))[0]


class AfterTwoSteps(Notes):
    """Acts once, in place of a method's first call after two steps."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self._done, self._act = 0, act

    def step(self, step: int, *_: Any) -> None:
        self._done = step

    def before(self, owner: type, name: str, patch: pytest.MonkeyPatch) -> None:
        method = getattr(owner, name)

        def acting(*args: Any, **more: Any) -> Any:
            if self._done == 2 and self._act:
                act, self._act = self._act, None
                act()
            return method(*args, **more)

        patch.setattr(owner, name, acting)


def signalling(number: signal.Signals) -> Any:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("place", PLACES)
def test_a_signal_leaves_a_checkpoint_of_the_last_complete_step(
    place: str,
    complete: RunDirectory,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The resumed run equals the uninterrupted one bit for bit, and takes no step twice."""
    owner, name, number, done = PLACES[place]
    config = settings(tiny_folder, steps=4, out=str(tmp_path))
    display = AfterTwoSteps(signalling(number))
    with monkeypatch.context() as patch:
        display.before(owner, name, patch)
        with pytest.raises(KeyboardInterrupt):
            stretto.train(config, progress=display)
    stopped = RunDirectory.open(tmp_path / "run-001")
    assert newest(stopped.checkpoints) == stopped.last_step() == done
    assert display.notes[-1] == (
        f"stopped; what was done so far is in {stopped.path}; "
        f"stretto.resume('{stopped.path}') goes on after step {done}"
    )
    stretto.resume(stopped.path, progress=display)
    assert f"goes on after step {done}" in display.notes
    assert_same_run(stopped, complete)


def test_a_time_limit_ends_before_a_step_that_would_not_fit(
    complete: RunDirectory, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a minute a step, 3 steps fit into 3.5 minutes."""
    minutes = count()
    clock = SimpleNamespace(monotonic=lambda: 60.0 * next(minutes), thread_time=lambda: 0.0)
    display = Notes()
    with monkeypatch.context() as patch:
        patch.setattr("stretto.runs.training_loop.time", clock)
        result = stretto.train(
            settings(tiny_folder, steps=4, out=str(tmp_path), minutes=3.5), progress=display
        )
    assert result.steps == newest(result.run_dir / "checkpoints") == 3
    assert result.stopped == "another step would not fit into minutes = 3.5"
    assert result.stats["timing_s/left"] == 30.0
    assert display.notes[-1] == (f"stretto.resume('{result.run_dir}') goes on after step 3")
    resumed = stretto.resume(result.run_dir, minutes=0.0, progress=display)
    assert resumed.steps == 4
    assert_same_run(RunDirectory.open(result.run_dir), complete)


@pytest.mark.parametrize("preset", ["async", "stretto"])
@pytest.mark.parametrize("place", ["decoding", "training"])
def test_a_signal_where_stages_overlap(
    place: str, preset: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rollout is trained on once; those in flight at the signal are, too."""
    owner, name, _, done = PLACES[place]
    config = settings(tiny_folder, steps=6, out=str(tmp_path), schedule={"preset": preset})
    display = AfterTwoSteps(signalling(signal.SIGTERM))
    with monkeypatch.context() as patch:
        display.before(owner, name, patch)
        with pytest.raises(KeyboardInterrupt):
            stretto.train(config, progress=display)
    stopped = RunDirectory.open(tmp_path / "run-001")
    assert newest(stopped.checkpoints) == stopped.last_step() >= done
    stretto.resume(stopped.path, progress=display)
    trained = [r.id for r in stopped.read_rollouts() if r.state == "trained"]
    assert sorted(set(trained)) == sorted(trained)
    assert len(trained) == config.steps * config.rollout.batch
    assert [record["step"] for record in stopped.read_metrics()] == [1, 2, 3, 4, 5, 6]


def test_an_exit_in_on_step_while_weights_are_loaded_changes_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth round loads version 2, of one step before, also in the resumed run."""
    changes = {"steps": 4, "schedule": {"preset": "async"}}
    expected, _ = run(settings(tiny_folder, **changes), tmp_path / "complete")
    load, taken = TorchEngine.load, threading.Event()

    def late(engine: TorchEngine, weights: WeightsRef) -> None:
        if weights.version == 2:
            assert taken.wait(60)
        load(engine, weights)

    def on_step(step: int, _: object) -> None:
        if step == 3:
            taken.set()
            sys.exit("enough")

    config = settings(tiny_folder, out=str(tmp_path), **changes)
    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "load", late)
        with pytest.raises(SystemExit, match="enough"):
            stretto.train(config, on_step=on_step, progress=Progress())
    stopped = RunDirectory.open(tmp_path / "run-001")
    assert newest(stopped.checkpoints) == 3
    stretto.resume(stopped.path, progress=Progress())
    assert [record["staleness/max"] for record in stopped.read_metrics()] == [0, 1, 1, 1]
    assert_same_run(stopped, expected)


def test_an_update_that_begins_while_the_state_is_awaited_is_finished() -> None:
    """The signal comes while weights are loaded, and the state can be kept only after that."""

    async def stop() -> None:
        schedule: Any = SimpleNamespace(
            updating=False, weights_lock=asyncio.Lock(), end_after_update=lambda: None
        )
        running: Any = SimpleNamespace(lags=True, driver_state=lambda: "after the update")
        recorder: Any = SimpleNamespace(note=notes.append)
        nothing: Any = None
        loop = _TrainingLoop(
            nothing, running, recorder, nothing, nothing, nothing, nothing, 2, nothing, nothing
        )
        scored = asyncio.Event()

        async def step() -> None:
            await scored.wait()
            schedule.updating = True
            for _ in range(5):
                await asyncio.sleep(0)
            schedule.updating = False
            notes.append("updated")

        async with schedule.weights_lock:
            task = asyncio.create_task(loop._complete(schedule, step()))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            scored.set()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert loop.last == "after the update"

    notes: list[str] = []
    asyncio.run(stop())
    assert notes == ["stopping; finishing the update of step 3 first", "updated"]


def fail() -> None:
    raise LearnerError("made to fail", "made-to-fail")


def test_an_error_after_complete_steps_leaves_a_checkpoint_too(
    complete: RunDirectory, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tiny_folder, steps=4, out=str(tmp_path))
    display = AfterTwoSteps(fail)
    with monkeypatch.context() as patch, raises(LearnerError, "made-to-fail"):
        display.before(TorchEngine, "decode", patch)
        stretto.train(config, progress=display)
    stopped = RunDirectory.open(tmp_path / "run-001")
    assert newest(stopped.checkpoints) == 2
    stretto.resume(stopped.path, progress=display)
    assert_same_run(stopped, complete)


def test_steps_that_an_update_lost_are_named(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner that fails half-way through a step has no state of a complete one."""
    config = settings(tiny_folder, steps=4, out=str(tmp_path), observe={"checkpoint_every": 1})
    display = AfterTwoSteps(fail)
    with monkeypatch.context() as patch, raises(LearnerError, "made-to-fail"):
        display.before(TrainedModel, "update", patch)
        stretto.train(config, progress=display)
    stopped = RunDirectory.open(tmp_path / "run-001")
    assert newest(stopped.checkpoints) == 2
    (stopped.checkpoints / "step-000002" / "manifest.json").unlink()
    stretto.resume(stopped.path, progress=display)
    assert "goes on after step 1; step 2 is taken again" in display.notes
