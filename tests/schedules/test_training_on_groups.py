"""Groups that the learner starts on while others are decoded, with scripted roles. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from schedule_helpers import Setting, schedule_of
from stretto.config.knobs import Settings
from stretto.runtime.sim.costs import TrainCost
from stretto.runtime.sim.loop import run
from stretto.schedules.schedule import Schedule
from stretto.testing import World
from stretto.types import Prompt

GROUPS = Settings(4, 2, 100, 1, score_on="rollout", train_on="group")
"""Two prompts with two responses each."""


def calls_of(
    setting: Setting, *, token_s: float = 0.0, world: World | None = None
) -> tuple[list[tuple[float, str, list[int]]], Schedule]:
    """The learner's calls of a run: when they ended, their names and ids. A call that accumulates
    takes so many seconds a token.
    """
    world = world or World(setting.lengths, setting.fails)

    async def main() -> Schedule:
        schedule = schedule_of(setting, world)
        schedule._learner._cost = TrainCost(step_s=setting.train_s, token_s=token_s)  # type: ignore[attr-defined]
        async with schedule:
            for _ in range(setting.settings.steps):
                await schedule.step()
        return schedule

    schedule = run(main())
    found = []
    for line in world.log:
        if match := re.fullmatch(r"(\S+) (accumulate|train) \[(.*)\]", line):
            seconds, name, ids = match.groups()
            found.append((float(seconds), name, [int(id_) for id_ in ids.split(",")]))
    return found, schedule


def accumulated(setting: Setting, **options: Any) -> list[list[int]]:
    return [ids for _, name, ids in calls_of(setting, **options)[0] if name == "accumulate"]


def test_a_group_is_handed_over_once_it_is_scored() -> None:
    """Responses 0 and 1 end after 3 and 4 s, and are scored in about a second. Response 3 ends
    after 17 s, and the step trains on its group.
    """
    calls, _ = calls_of(Setting(GROUPS, lengths=(3, 4, 9, 17), critic=False))
    (first_s, *first), (train_s, *train) = calls
    assert first == ["accumulate", [0, 1]]
    assert 4 < first_s < 6
    assert train == ["train", [0, 1, 2, 3]]
    assert train_s > 17


def test_one_call_takes_all_groups_that_are_ready_meanwhile() -> None:
    """The first takes 8 s, in which two others end, and the fourth outlasts all."""
    settings = replace(GROUPS, batch=8)
    setting = Setting(settings, lengths=(3, 3, 5, 5, 7, 7, 30, 60), critic=False)
    calls, _ = calls_of(setting, token_s=1.0)
    assert [(name, ids) for _, name, ids in calls[:2]] == [
        ("accumulate", [0, 1]),
        ("accumulate", [2, 3, 4, 5]),
    ]
    tokens = 5 + 5 + 7 + 7 + 2 * (2 + 3)  # those of the prompts, too
    assert calls[1][0] == calls[0][0] + tokens


def test_a_group_with_a_failure_waits_for_the_batch() -> None:
    settings = replace(GROUPS, batch=6, failures_allowed=0.5, group_at_least=2)
    setting = Setting(settings, lengths=(3, 4, 9, 10, 16, 17), critic=False, fails=(1,))
    calls, schedule = calls_of(setting)
    assert [(name, ids) for _, name, ids in calls] == [
        ("accumulate", [2, 3]),
        ("train", [2, 3, 4, 5]),
    ]
    assert schedule.ledger.rejected.total() == 2  # with the rest of its group


def test_a_prompt_that_is_in_the_batch_twice_waits_for_it() -> None:
    class Again(World):
        def next_prompt(self) -> Prompt:
            return replace(super().next_prompt(), id=(0, 1, 0)[(self.places - 1) % 3])

    settings = replace(GROUPS, batch=6)
    lengths = (3, 4, 5, 6, 7, 30)
    world = Again(lengths)
    assert accumulated(Setting(settings, lengths=lengths, critic=False), world=world) == [[2, 3]]


def test_groups_are_not_handed_over_while_the_learner_works() -> None:
    """Those that the carried responses of the second step complete wait for its weights."""
    settings = replace(GROUPS, steps=3)
    lengths = (3, 4, 9, 17, 30, 31)
    calls, _ = calls_of(Setting(settings, lengths=lengths, critic=False, delta=2, train_s=20.0))
    trained: set[int] = set()
    early: list[int] = []
    for _, name, ids in calls:
        if name == "train":
            assert set(early) <= set(ids)
            trained |= set(ids)
            early.clear()
        else:
            assert not trained & set(ids)
            assert not set(early) & set(ids)  # once
            early += ids
    assert len(trained) == 12


def test_nothing_is_handed_over_unless_asked_for() -> None:
    assert accumulated(Setting(replace(GROUPS, train_on="batch"), critic=False)) == []


def idle_of(role: str, spans: Sequence[tuple[str, str, float, float]]) -> float:
    return sum(end_s - start_s for who, _, start_s, end_s in spans if who == role)


def test_the_learner_is_not_idle_while_it_accumulates() -> None:
    lengths = (3, 4, 9, 17)
    setting = Setting(GROUPS, lengths=lengths, critic=False)
    waits = []
    for token_s in (0.0, 0.5):
        world = World(lengths)
        calls_of(setting, token_s=token_s, world=world)
        waits.append(idle_of("learner", world.spans))
    tokens = sum(lengths[:2]) + 2
    assert waits[0] - waits[1] == pytest.approx(0.5 * tokens)
