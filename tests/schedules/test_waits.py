"""Schedules that stand still: the error says at once which part waits for what. No torch."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import stretto.schedules
from raising import raises
from schedule_helpers import Setting, schedule_of
from stretto.config.knobs import Settings
from stretto.errors import StalledError
from stretto.runtime.sim import loop
from stretto.schedules.engines import Place
from stretto.schedules.rollout import Rollout
from stretto.schedules.schedule import Schedule
from stretto.schedules.scoring import ReplicaQueue
from stretto.testing import World
from stretto.types import Prompt

PLAIN = Settings(4, 1, 100, 1)
SHORT = [1, 2, 1, 3]


def real(main: Coroutine[Any, Any, None]) -> None:
    """Run in real time. A schedule that stood still for ever would be interrupted."""

    async def limited() -> None:
        async with asyncio.timeout(60):
            await main

    asyncio.run(limited())


@pytest.fixture(params=[loop.run, real], ids=["virtual", "real"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Virtual time; or real time, in which roles are a thousand times as fast."""
    if request.param is real:
        sleep = asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(seconds / 1000))
    return request.param  # type: ignore[no-any-return]


def stall(
    run: Callable[..., None],
    setting: Setting,
    work: Callable[[Schedule], Awaitable[object]] = Schedule.step,
) -> tuple[set[str], set[int]]:
    """The account of a schedule that stands still: its lines, and the rollouts."""

    async def main() -> None:
        async with schedule_of(setting, World(SHORT)) as schedule:
            await work(schedule)

    with raises(StalledError, "all-parts-wait") as caught:
        run(main())
    _, *lines, last = str(caught.value).splitlines()
    assert last.startswith("This is a fault of the schedule, and of no role; please report it")
    return {line.removeprefix("  ") for line in lines}, set(caught.value.rollout_ids)


def training(done: int = 0, begun: int = 1) -> str:
    steps = f"{done} of 1 steps are done, {begun} of 1 rounds begun"
    return f"training waits for a batch with all its scores ({steps})"


SCORERS = {"judge waits for something to score", "model waits for something to score"}
FOUR = "4 rollout(s): 0, 1, 2, 3"


def test_scorers_whose_devices_are_never_free(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReplicaQueue, "free", property(lambda queue: queue.host is None))
    setting = Setting(PLAIN, engines=2, hosted=True, critic=False)
    to_be = "beside which it sits, to have nothing left to decode"
    assert stall(run, setting) == (
        {
            training(),
            f"scoring waits for the last scores of a round; {FOUR}",
            "judge waits for something to score",
            f"model waits for generator 0, {to_be}; {FOUR}",
            f"model waits for generator 1, {to_be}; {FOUR}",
        },
        {0, 1, 2, 3},
    )


def test_a_scorer_that_gets_no_weights(run: Callable[..., None]) -> None:
    async def work(schedule: Schedule) -> None:
        await schedule._scoring.pause_followers()
        await schedule.step()

    assert stall(run, Setting(PLAIN), work) == (
        {
            training(),
            f"scoring waits for the last scores of a round; {FOUR}",
            *SCORERS,
            f"critic waits for its next weights; {FOUR}",
        },
        {0, 1, 2, 3},
    )


def test_more_steps_than_there_are(run: Callable[..., None]) -> None:
    async def work(schedule: Schedule) -> None:
        await schedule.step()
        await schedule.step()

    setting = Setting(Settings(4, 1, 100, 1, restarts=1), critic=False)
    idle = {"scoring waits for a round", "the keeper of generator waits for its loss", *SCORERS}
    assert stall(run, setting, work) == ({training(done=1), *idle}, set())


def test_weights_that_never_come(run: Callable[..., None]) -> None:
    async def work(schedule: Schedule) -> None:
        schedule._version = -1
        await schedule.step()

    lines, _ = stall(run, Setting(PLAIN, critic=False), work)
    weights = "generation waits for version 0 of the weights (-1 is published)"
    assert lines == {training(begun=0), weights, "scoring waits for a round", *SCORERS}


def test_a_lock_that_the_caller_of_the_step_holds(run: Callable[..., None]) -> None:
    async def work(schedule: Schedule) -> None:
        async with schedule.weights_lock:
            await schedule.step()

    lines, _ = stall(run, Setting(PLAIN, critic=False), work)
    lock = "generation waits for the checkpoint"
    assert lines == {training(begun=0), lock, "scoring waits for a round", *SCORERS}


def test_responses_that_never_arrive(run: Callable[..., None]) -> None:
    """Generator 1 has nothing, and is told that a response is on its way."""

    async def work(schedule: Schedule) -> None:
        locations, lost = schedule._pool._locations, Rollout(99, Prompt(0, (1,), ""), 99)
        for place, engine in ((Place.WAITING, 0), (Place.DECODING, 0), (Place.MOVING, 1)):
            locations.put(lost, place, engine)
        await schedule.step()

    lines, _ = stall(run, Setting(Settings(1, 1, 100, 1), engines=2, critic=False), work)
    assert lines == {
        training(),
        "generation waits for the round to be complete, 0 responses short",
        "generator 1 waits for responses to decode",
        "scoring waits for a round",
        *SCORERS,
    }


def test_no_part_of_a_schedule_waits_outside_the_account() -> None:
    """But for answers of roles, which have a deadline."""
    waiting = re.compile(
        r"\.(?:wait|wait_for|acquire)\(|asyncio\.(?:sleep|gather)|with self\.\w*lock"
    )
    folder = Path(stretto.schedules.__path__[0])
    found = {file.name for file in folder.glob("*.py") if waiting.search(file.read_text())}
    assert found == {"waits.py"}
