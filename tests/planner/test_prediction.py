"""Runs beside what the simulator makes of their own records."""

from __future__ import annotations

import dataclasses
import re
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers import ended_records
from raising import raises
from stretto.config import Config, RolloutConfig, ScheduleConfig
from stretto.errors import ConfigError, StateError
from stretto.machine import Machine
from stretto.observe import RunDirectory, Window, records
from stretto.observe.spans import WEIGHT_SYNC, Span
from stretto.planner import replay
from stretto.planner.memory_model import SYNC
from stretto.planner.replay import (
    CPU_TOKEN_BUDGET,
    PhaseTime,
    Prediction,
    phases_of,
    predict,
    predicted,
)
from stretto.runtime.sim.cluster import Cluster, GeneratorRole, LearnerRole, ScorerRole, Workload
from stretto.runtime.sim.costs import (
    DecodeCost,
    DriverCost,
    GeneratorCost,
    PrefillCost,
    SampleCost,
    TrainCost,
)
from stretto.runtime.sim.lengths import Bimodal, LearningCurve, Uniform
from stretto.runtime.sim.simulate import simulate
from stretto.scoring.response_buffer import worthwhile_tokens

STEPS = 20


def test_phases_by_hand() -> None:
    """Two steps of 10 s, from 10 to 30 s; two generators, two replicas of the critic."""
    spans = [
        Span("generator 0", "gen", 5.0, 14.0, {}),  # 4 s of it
        Span("generator 1", "gen", 10.0, 16.0, {}),
        Span("generator 1", "wait", 16.0, 20.0, {"cause": "data"}),
        Span("critic 0", "prefill/critic", 14.0, 15.0, {}),
        Span("critic 0", "score/critic", 16.0, 18.0, {}),
        Span("critic 1", "score/critic", 16.0, 17.0, {}),
        Span("learner", "update", 18.0, 22.0, {}),
        Span("learner", "publish", 22.0, 23.0, {}),
        Span(WEIGHT_SYNC, "send", 23.0, 25.0, {}),
        Span("generator 0", "load", 24.0, 25.0, {}),  # within the send
        Span("driver", "driver/fill", 25.0, 25.5, {"items": 4}),
        Span("checkpoint", "checkpoint/write", 10.0, 30.0, {}),  # beside the steps
        Span("learner", "update", 28.0, 40.0, {}),  # 2 s of it
    ]
    assert phases_of(spans, 10.0, 30.0, 2) == {
        "generation": 5.0,
        "scoring: critic": 2.0,
        "training": 3.0,
        SYNC: 1.5,
        "the driver itself": 0.25,
        "generators waiting": (16.0 + 14.0) / 2,
        "learner waiting": 7.0,
        "no role at work": 2.5 / 2,  # from 25.5 to 28
        "whole step": 10.0,
    }


def test_a_table_has_a_line_a_phase() -> None:
    phases = [PhaseTime("training", 0.5, 0.45), PhaseTime("moving responses", 0.0, 0.1)]
    found = Prediction([*phases, PhaseTime("whole step", 2.0, 2.1)], 4, 203, 1500)
    assert found.title == "seconds a step, means of steps 4 to 203 of 1,500"
    assert found.table().splitlines() == [
        "                    measured  predicted  ratio",
        "  training            0.5000     0.4500   0.90",
        "  moving responses    0.0000     0.1000      -",
        "  whole step          2.0000     2.1000   1.05",
    ]
    assert found.data()["phases"][0] == ["training", 0.5, 0.45]
    assert found.text("a").startswith("a, measured and as the simulator predicts it")


# -- runs -------------------------------------------------------------------------------------


def cluster(schedule: ScheduleConfig) -> Cluster:
    """The roles as those of a run in one process, each with a worker or all on one."""
    apart = schedule.knobs.overlaps(1)
    generator, scoring, learner = (((i,) if apart else (0,)) for i in range(3))
    cost = GeneratorCost(
        decode=DecodeCost(step_s=0.1, row_s=0.01, context_s=1e-4),
        prefill=PrefillCost(call_s=0.1),
        padded=True,
    )
    return Cluster(
        call_s=0.02,
        driver={
            "driver/fill": DriverCost(call_s=0.05, item_s=0.01),
            "driver/chunks": DriverCost(call_s=0.01, item_s=0.002),
            "driver/batch": DriverCost(call_s=0.1),
            "driver/records": DriverCost(call_s=0.25),
        },
        generators=(GeneratorRole(devices=generator, cost=cost),),
        scorers=(
            ScorerRole(
                name="reference",
                kind="logprobs",
                devices=scoring,
                cost=PrefillCost(call_s=0.1, token_s=0.01),
                worthwhile_tokens=worthwhile_tokens(
                    CPU_TOKEN_BUDGET, streaming=schedule.knobs.streams
                ),
            ),
            ScorerRole(name="right", cost=SampleCost(sample_s=0.01)),
        ),
        learner=LearnerRole(
            devices=learner, cost=TrainCost(step_s=0.5, token_s=0.005, publish_s=0.1)
        ),
        workload=Workload(
            batch=8,
            steps=STEPS,
            max_new_tokens=30,
            learning=LearningCurve(first=0.5, last=0.5, spread=0),
            response_tokens=Bimodal(short=6, long=24, spread=0.5),
            prompt_tokens=Uniform(low=2, high=9),
        ),
        schedule=schedule,
    )


def recorded(folder: Path, preset: Any, steps: int = STEPS) -> RunDirectory:
    """A folder of a run that took just what the simulator says, so many steps of it."""
    schedule = ScheduleConfig(preset=preset, chunk_tokens=8)
    config = Config(
        steps=STEPS, rollout=RolloutConfig(batch=8, max_new_tokens=30), schedule=schedule
    )
    run = RunDirectory.create(folder, "run", config)
    run.save_machine(Machine("a CPU", 8, 8, (), "2.0"))
    described = cluster(schedule)
    result = simulate(described)
    ends_s = [0.0, *accumulate(step["timing_s/step"] for step in result.steps)]
    for step, (start_s, end_s) in enumerate(pairwise(ends_s[: steps + 1]), 1):
        ended = tuple(s for s in result.spans if start_s < s.end_s <= end_s)
        run.trace.append(step, Window(start_s, end_s, ended), start_s)
        run.append_metrics(step, result.steps[step - 1])
    rows = ended_records(described.workload, STEPS + 3)
    records.append(run.rollouts_file, [dataclasses.asdict(row) for row in rows])
    return run


@pytest.mark.parametrize("preset", ["sync", "async", "oppo", "stretto"])
def test_a_run_predicts_each_of_its_phases(tmp_path: Path, preset: Any) -> None:
    found = predict(recorded(tmp_path, preset).path)
    assert (found.first, found.last, found.taken) == (4, STEPS, STEPS)
    assert found.phases[-1].ratio == pytest.approx(1.0, abs=0.02)
    by_name = {phase.name: phase.ratio for phase in found.phases}
    for name in ("generation", "scoring: reference", "training", SYNC, "the driver itself"):
        assert by_name[name] == pytest.approx(1.0, abs=0.04), name


def test_the_driver_is_part_of_a_step(tmp_path: Path) -> None:
    """Filling 8 places takes 0.13 s, the only call's 8 chunks 0.026 s, the rest 0.35 s."""
    found = predict(recorded(tmp_path, "sync").path)
    (driver,) = (p for p in found.phases if p.name == "the driver itself")
    expected = 0.13 + 0.026 + 0.35
    assert (driver.measured_s, driver.predicted_s) == pytest.approx((expected, expected))


def test_of_a_long_run_the_first_steps_are_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MOST_STEPS", 12)
    found = predict(recorded(tmp_path, "oppo").path)
    assert found.title == "seconds a step, means of steps 4 to 12 of 20"
    assert found.phases[-1].ratio == pytest.approx(1.0, abs=0.02)


def test_a_run_with_too_little_says_why(tmp_path: Path) -> None:
    short = recorded(tmp_path / "short", "sync", steps=7)
    with raises(StateError, "too-few-steps", 8, 3, 7):
        predict(short.path)
    empty = recorded(tmp_path / "empty", "sync")
    empty.rollouts_file.unlink()
    with raises(StateError, "no-rollouts"):
        predict(empty.path)
    bare = RunDirectory.create(tmp_path / "bare", "run", Config())
    with raises(StateError, "no-trace", "trace.json"):
        predict(bare.path)
    with pytest.raises(ConfigError):
        predict(tmp_path)
    told = predicted([bare.path, tmp_path])
    assert told[0].text("bare") == f"bare: no prediction: {told[0].data()['why']}"
    assert all(not each.phases and re.fullmatch(".+", each.why) for each in told)
