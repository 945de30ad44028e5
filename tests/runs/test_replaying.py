"""Replays of recorded runs: equal weights whatever the order of events was, and named faults."""

from __future__ import annotations

import json
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import torch

import stretto
from raising import raises
from run_helpers import (
    Kill,
    Killer,
    assert_same_run,
    killed_by_ctrl_c,
    run,
    settings,
    weights,
    write_rows,
)
from stretto import runs
from stretto.cli.main import main
from stretto.config import Config, recipes
from stretto.errors import (
    ConfigError,
    MissingExtraError,
    StateError,
    StrettoError,
    TaskError,
)
from stretto.observe import RunDirectory, report
from stretto.observe.display import Progress
from stretto.runs import replaying
from stretto.training.learner import PolicyLearner
from stretto.types import TrainBatch, TrainStepOutput, WeightsRef
from stretto.workers.flight import Segment, _restored, read_flight
from template_helpers import chatty

UNEVEN: dict[str, Any] = {"batch": 4, "max_new_tokens": 24, "stop": tuple(ascii_lowercase)}
"""Any letter ends a response: some end at once, others are long."""


def replayed(recorded: RunDirectory, to: int = 0, **options: Any) -> RunDirectory:
    legs = replaying.legs_of(read_flight(recorded.flight_file), to)
    config = Config.model_validate(legs[0].segment.head["config"])
    target = RunDirectory.create(recorded.path.parent, "replay", config)
    replaying.replay(recorded, target, legs, progress=Progress(), **options)
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


def test_a_replay_stops_at_a_step(tiny_folder: Path, tmp_path: Path) -> None:
    config = settings(tiny_folder, steps=4, rollout=UNEVEN, schedule={"preset": "async"})
    recorded, _ = run(config, tmp_path)
    short = replayed(recorded, 2)
    assert short.last_step() == 2
    rollouts = [[r for r in x.read_rollouts() if r.step <= 2] for x in (recorded, short)]
    assert rollouts[0] == rollouts[1]


def test_a_bit_that_changes_is_found_at_its_step(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tiny_folder, steps=4, rollout=UNEVEN, schedule={"preset": "async"})
    recorded, _ = run(config, tmp_path)
    publish = PolicyLearner.publish

    def planting(learner: PolicyLearner) -> dict[str, WeightsRef]:
        if learner._version == 2:
            name, weight = next(iter(learner.trained["actor"].model.named_parameters()))
            assert name == "model.embed_tokens.weight"
            weight.data.view(torch.int32).flatten()[5] ^= 1
        return publish(learner)

    monkeypatch.setattr(PolicyLearner, "publish", planting)
    with raises(StateError, "replay-differs", "step 3, call") as error:
        replayed(recorded)
    assert "'learner publish'" in str(error.value)
    assert "actor: model.embed_tokens.weight" in str(error.value)


@pytest.mark.parametrize("preset", ["oppo", "async"])
def test_a_run_that_was_resumed_is_replayed_through_its_checkpoint(
    preset: str, tiny_folder: Path, tmp_path: Path
) -> None:
    schedule = {"preset": preset, "overcommit": 2}
    observe = {"checkpoint_every": 2}
    config = settings(tiny_folder, steps=4, rollout=UNEVEN, schedule=schedule, observe=observe)
    recorded = RunDirectory.create(tmp_path, "run", config)
    with killed_by_ctrl_c():
        runs.train(config, run_dir=recorded, progress=Kill(3))
    runs.train(config, run_dir=recorded, resume=True, progress=Progress())
    assert [s.first for s in read_flight(recorded.flight_file)] == [0, 2]
    assert_replayed(recorded, replayed(recorded))


WORLD = """
import random

class World:
    def reset(self, **row):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        reward = random.SystemRandom().random()
        return f"turn {reward}", reward, self.turns == 3, {}
"""


@pytest.mark.parametrize(
    ("preset", "runtime"),
    [
        ("sync", "inline"),
        ("stretto", "inline"),
        *(pytest.param(p, "inline", marks=pytest.mark.slow) for p in ("oppo", "async", "rlhfuse")),
        *(pytest.param(p, "local", marks=pytest.mark.slow) for p in SCHEDULES),
    ],
)
def test_episodes_are_replayed_with_the_recorded_answers(
    preset: str, runtime: str, tiny_folder: Path, tmp_path: Path
) -> None:
    engines = 2 if preset in ("rlhfuse", "stretto") else 1
    (tmp_path / "world.py").write_text(WORLD)
    rows = write_rows(tmp_path, [{"prompt": f"Say {n}."} for n in range(16)])
    config = settings(
        chatty(tiny_folder, tmp_path / "chatty"),
        steps=3,
        task={"kind": "dataset", "name": rows, "max_prompt_tokens": 200, "settings": {}},
        environment={"sources": [f"{tmp_path / 'world.py'}:World"], "max_turns": 4},
        reward={"sources": ["environment"], "missing_eos": "off"},
        rollout={"batch": 4, "max_new_tokens": 400, "stop": tuple("eiotan"), "engines": engines},
        schedule={"preset": preset},
        runtime=runtime,
    )
    recorded, _ = run(config, tmp_path)
    assert_replayed(recorded, replayed(recorded))


def test_an_evaluation_is_replayed(tiny_folder: Path, tmp_path: Path) -> None:
    observe = {"eval_every": 2, "eval_prompts": 3}
    config = settings(
        tiny_folder, steps=4, rollout=UNEVEN, schedule={"preset": "async"}, observe=observe
    )
    recorded, _ = run(config, tmp_path)
    replay = replayed(recorded)
    assert_replayed(recorded, replay)
    ours, theirs = recorded.best(), replay.best()
    assert ours
    assert theirs
    assert (ours.step, ours.score) == (theirs.step, theirs.score)


@pytest.mark.parametrize(
    ("preset", "runtime"),
    [
        *((preset, "local") for preset in SCHEDULES),
        pytest.param("stretto", "ray", marks=pytest.mark.slow),
    ],
)
def test_a_run_over_processes_is_replayed_on_threads(
    preset: str, runtime: str, tiny_folder: Path, tmp_path: Path
) -> None:
    if runtime == "ray":
        pytest.importorskip("ray")
    engines = 2 if preset in ("rlhfuse", "stretto") else 1
    config = settings(
        tiny_folder,
        runtime=runtime,
        steps=3,
        rollout={**UNEVEN, "engines": engines},
        schedule=SCHEDULES[preset],
    )
    recorded, _ = run(config, tmp_path)
    assert replaying.config_of_replay(read_flight(recorded.flight_file)[0]).runtime == "inline"
    assert_replayed(recorded, replayed(recorded))


def test_a_lost_role_is_lost_in_the_replay(tiny_folder: Path, tmp_path: Path) -> None:
    config = settings(
        tiny_folder,
        runtime="local",
        steps=3,
        rollout=UNEVEN,
        schedule={"preset": "async", "overcommit": 2},
    )
    killer = Killer("generator")
    recorded, _ = run(config, tmp_path, killer)
    assert killer.done
    events = read_flight(recorded.flight_file)[0].events
    assert any(e.error and e.error[0] == "RoleLostError" for e in events)
    replay = replayed(recorded)
    assert_replayed(recorded, replay)
    reported = report.load([recorded.path, replay.path])
    assert [r.settings["runtime"] for r in reported] == ["local", "inline"]


def test_ranks_that_divide_sums_are_replayed_by_ranks(tiny_folder: Path, tmp_path: Path) -> None:
    process = {"roles": ["learner", "generator"], "ranks": 2}
    config = settings(
        tiny_folder,
        runtime="local",
        cluster={"processes": [process]},
        rollout={**UNEVEN, "engines": 2},
        schedule={"preset": "oppo", "chunk_tokens": 4},
    )
    recorded, _ = run(config, tmp_path)
    (segment,) = read_flight(recorded.flight_file)
    assert replaying.config_of_replay(segment).runtime == "local"
    assert_replayed(recorded, replayed(recorded))


def test_an_unfinished_line_is_ignored_and_a_damaged_one_named(
    tiny_folder: Path, tmp_path: Path
) -> None:
    recorded, _ = run(settings(tiny_folder, steps=2), tmp_path)
    events = read_flight(recorded.flight_file)[0].events
    content = recorded.flight_file.read_bytes()
    recorded.flight_file.write_bytes(content + content[:20])
    assert read_flight(recorded.flight_file)[0].events == events
    recorded.flight_file.write_bytes(content[:30] + b"\n" + content)
    with raises(StateError, "damaged-record", "line 1", "delete this line"):
        read_flight(recorded.flight_file)
    for start in (b"", content[:20]):  # of a run that was killed in its first step
        recorded.flight_file.write_bytes(start)
        with raises(StateError, "no-flight-record", "before its first step"):
            read_flight(recorded.flight_file)


def test_replays_that_cannot_be_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    recorded, _ = run(settings(tiny_folder, steps=2, observe={"flight": False}), tmp_path)
    assert not recorded.flight_file.exists()
    with raises(StateError, "no-flight-record"):
        read_flight(recorded.flight_file)
    recorded, _ = run(settings(tiny_folder, steps=2), tmp_path)
    (segment,) = read_flight(recorded.flight_file)
    with raises(StateError, "step-not-recorded", "steps 1 to 2"):
        replaying.legs_of([segment], 3)
    with raises(ConfigError, "extra_forbidden", "flight record, written by Stretto", "'beam'"):
        Segment({**segment.head, "config": {**segment.head["config"], "beam": 4}}).config  # noqa: B018
    segment.given_up = 0
    with raises(StateError, "call-given-up"):
        replaying.legs_of([segment], 0)


def test_a_resumption_in_the_middle_of_a_step_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """With lag, Ctrl-C leaves a checkpoint with responses of the next step."""
    config = settings(tiny_folder, steps=4, rollout=UNEVEN, schedule={"preset": "async"})
    recorded = RunDirectory.create(tmp_path, "run", config)
    with pytest.raises(KeyboardInterrupt):
        runs.train(config, run_dir=recorded, progress=Kill(2))
    runs.train(config, run_dir=recorded, resume=True, progress=Progress())
    with raises(StateError, "interrupted-in-a-step", "step 2"):
        replayed(recorded)
    replayed(recorded, 2)


def test_the_command_replays_into_a_folder_of_its_own_which_can_go_on(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(tiny_folder, steps=3, rollout=UNEVEN, schedule={"preset": "async"})
    recorded, _ = run(config, tmp_path)
    assert main(["replay", str(recorded.path), "--to", "2"]) == 0
    replay = RunDirectory.open(tmp_path / "run-001-replay-001")
    assert replay.last_step() == 2
    rollouts = [[r for r in x.read_rollouts() if r.step <= 2] for x in (recorded, replay)]
    assert rollouts[0] == rollouts[1]
    assert main(["train", "--resume", str(replay.path), "--observe.progress", "off"]) == 0
    assert replay.last_step() == 3
    assert main(["replay", str(recorded.path), "--to", "7"]) == 2
    assert "steps 1 to 3" in capsys.readouterr().err


def test_objects_of_the_caller_are_missing_in_a_replay(tiny_folder: Path, tmp_path: Path) -> None:
    def length(completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    config = settings(tiny_folder, steps=1).model_copy(update={"out": str(tmp_path)})
    result = stretto.train(config, reward=length, progress=Progress())
    with raises(StateError, "objects-not-recorded", "(length)", "file.py:name"):
        stretto.replay(result.run_dir, progress=Progress())


def test_a_replay_that_goes_on_has_the_settings_of_the_run(
    tiny_folder: Path, tmp_path: Path
) -> None:
    observe = {"trackers": ("tensorboard",)}
    config = settings(
        *(tiny_folder,), steps=1, minutes=5, observe=observe, schedule={"deadline_s": 77.0}
    )
    recorded, _ = run(config, tmp_path)
    replay = replayed(recorded)
    assert recipes.load(replay.config_file) == config
    assert (recorded.path / "tensorboard").exists()
    assert not (replay.path / "tensorboard").exists()


def branched(recorded: RunDirectory, step: int, **options: Any) -> RunDirectory:
    result = stretto.replay(recorded.path, from_=step, progress=Progress(), **options)
    return RunDirectory.open(result.run_dir)


def test_a_branch_without_changes_is_the_run(tiny_folder: Path, tmp_path: Path) -> None:
    recorded, _ = run(settings(tiny_folder, steps=4, rollout=UNEVEN), tmp_path)
    branch = branched(recorded, 2)
    assert branch.name == "run-001-branch-001"
    origin = {"run": str(recorded.path.absolute()), "step": 2, "changes": {}}
    assert json.loads(branch.branch_file.read_text()) == origin
    assert_same_run(recorded, branch)
    assert [s.first for s in read_flight(branch.flight_file)] == [0, 2]


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_branch_has_the_learning_rate_that_it_is_given(
    schedule: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It equals a run whose optimizer is given another learning rate by hand after step 2."""
    training = {"lr": 1e-3, "critic_lr": 2e-3, "lr_schedule": schedule}
    config = settings(tiny_folder, steps=4, rollout=UNEVEN, training=training)
    recorded, _ = run(config, tmp_path)
    branch = branched(recorded, 2, training__lr=4e-3)
    train = PolicyLearner.train

    def changing(learner: PolicyLearner, batch: TrainBatch) -> TrainStepOutput:
        actor = learner.trained["actor"]
        if learner._steps == 2:
            actor._schedule.base_lrs = [4e-3]
            (group,) = actor._optimizer.param_groups
            group["lr"] = group["lr"] * 4
        return train(learner, batch)

    monkeypatch.setattr(PolicyLearner, "train", changing)
    by_hand, _ = run(config, tmp_path)
    assert_same_run(by_hand, branch)
    ours, theirs = weights(recorded), weights(branch)
    assert not all(ours[name].equal(theirs[name]) for name in ours)
    monkeypatch.undo()
    again = RunDirectory.open(stretto.replay(branch.path, progress=Progress()).run_dir)
    assert_replayed(branch, again)


def test_a_branch_goes_to_a_step_with_other_losses(tiny_folder: Path, tmp_path: Path) -> None:
    schedule = {"preset": "async"}
    config = settings(tiny_folder, steps=4, rollout=UNEVEN, schedule=schedule)
    recorded, _ = run(config, tmp_path)
    changes = ["--set", "algorithm.kl_coef=0.5", "--set", "training.betas=[0.5, 0.5]"]
    assert main(["replay", str(recorded.path), "--from", "2", "--to", "3", *changes]) == 0
    branch = RunDirectory.open(tmp_path / "run-001-branch-001")
    assert branch.last_step() == 3
    config = recipes.load(branch.config_file)
    assert (config.algorithm.kl_coef, config.training.betas) == (0.5, (0.5, 0.5))
    betas = [metrics["objective/kl_coef"] for metrics in branch.read_metrics()]
    assert betas == [0.05, 0.05, 0.5]


def test_a_bit_that_changes_before_a_branch_is_found(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, _ = run(settings(tiny_folder, steps=3), tmp_path)
    train = PolicyLearner.train

    def planting(learner: PolicyLearner, batch: TrainBatch) -> TrainStepOutput:
        output = train(learner, batch)
        output.rewards.view("i4")[0] ^= 1
        return output

    monkeypatch.setattr(PolicyLearner, "train", planting)
    with raises(StateError, "replay-differs", "step 1, call", "rewards"):
        branched(recorded, 2, training__lr=1e-4)


def test_changes_that_no_branch_can_have_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    config = settings(tiny_folder, steps=2, rollout={"samples_per_prompt": 2})
    recorded, _ = run(config, tmp_path)
    with raises(ConfigError, "changes-without-branch", "training__lr", "from_="):
        stretto.replay(recorded.path, training__lr=1e-4, progress=Progress())
    with raises(ConfigError, "branch-empty", "to=1"):
        branched(recorded, 1, to=1)
    with raises(ConfigError, "branch-empty", "last of the run's 2 steps", "steps=3"):
        branched(recorded, 2)
    with raises(ConfigError, "resumed-differs", "seed"):
        branched(recorded, 1, seed=5)
    for change in ({"algorithm__kl_coef": 0.0}, {"algorithm__name": "rloo"}):
        with raises(ConfigError, "resumed-roles-differ"):
            branched(recorded, 1, **change)
    with raises(ConfigError, "resumed-differs", "training"):
        stretto.resume(recorded.path, training__lr=1e-4)
    assert [folder.name for folder in tmp_path.glob("run-*")] == [recorded.name]


class OwnError(StrettoError):
    """An error of a user's own code."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TaskError("no rows", "no-rows"), TaskError),
        (OwnError("a fault", "own"), StrettoError),
        (MissingExtraError("vllm", "vllm", "this"), StrettoError),
    ],
)
def test_a_recorded_error_is_raised_again(error: StrettoError, kind: type[StrettoError]) -> None:
    restored = _restored([type(error).__name__, error.code, str(error)])
    assert type(restored) is kind
    assert (restored.code, str(restored)) == (error.code, str(error))
