"""Replays of recorded runs: equal weights whatever the order of events was, and named faults."""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

from run_helpers import run, settings, weights
from stretto.config import Config
from stretto.observe import RunDirectory
from stretto.observe.flight import read_flight
from stretto.observe.progress import NoProgress
from stretto.runs import replaying

UNEVEN: dict[str, Any] = {"batch": 4, "max_new_tokens": 24, "stop": tuple(ascii_lowercase)}
"""Any letter ends a response: some end at once, others are long."""


def replayed(recorded: RunDirectory, to: int = 0, **options: Any) -> RunDirectory:
    legs = replaying.legs_of(read_flight(recorded.flight_file), to)
    config = Config.model_validate(legs[0].segment.head["config"])
    target = RunDirectory.create(recorded.path.parent, "replay", config)
    replaying.replay(recorded, target, legs, progress=NoProgress(), **options)
    return target


def assert_replayed(recorded: RunDirectory, replay: RunDirectory) -> None:
    ours, theirs = weights(recorded), weights(replay)
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert recorded.read_rollouts() == replay.read_rollouts()
    events = [read_flight(r.flight_file)[-1].events for r in (recorded, replay)]
    assert events[0][: len(events[1])] == events[1][: len(events[0])]


SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {},
    "oppo": {"preset": "oppo", "chunk_tokens": 4},
    "async": {"preset": "async"},
    "rlhfuse": {"preset": "rlhfuse"},
    "stretto": {"preset": "stretto", "chunk_tokens": 3},
}


@pytest.mark.parametrize("preset", SCHEDULES)
def test_a_replay_has_the_same_weights(preset: str, tiny_folder: Path, tmp_path: Path) -> None:
    engines = 2 if preset in ("rlhfuse", "stretto") else 1
    rollout = {**UNEVEN, "engines": engines}
    config = settings(tiny_folder, steps=4, rollout=rollout, schedule=SCHEDULES[preset])
    recorded, _ = run(config, tmp_path)
    assert_replayed(recorded, replayed(recorded))
