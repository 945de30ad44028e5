"""Overlapped runs of a small model: equal to loops by hand, resumed exactly, ended promptly."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import check_trace_events, told, train_on
from loss_helpers import named
from run_helpers import (
    Kill,
    assert_same_run,
    killed_by_ctrl_c,
    run,
    scorers_of,
    settings,
    untimed,
    weights,
    worker_of,
)
from stretto import runs
from stretto.config import Config, recipes
from stretto.config.algorithm import ALGORITHMS
from stretto.config.knobs import PRESETS, RoundKnobs
from stretto.evaluation.generation import completed
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.runs import checkpoint
from stretto.runtime.run import Run
from stretto.runtime.run import start as start_run
from stretto.runtime.sim.tuning import AutoTuner
from stretto.schedules.rollout import Rollout, RolloutState
from stretto.workers.flight import read_flight
from stretto.workers.threads import WorkerThread

SIX: dict[str, Any] = {"steps": 6, "rollout": {"batch": 4, "max_new_tokens": 10}}


def responses(parts: Run, batch: int, first: int) -> list[Rollout]:
    """A batch generated and scored with plain calls, one after the other."""
    rollouts = [Rollout(first + i, parts.prompts.next(), first + i) for i in range(batch)]
    engine = worker_of(parts, "generator")
    by_id = {r.id: r for r in rollouts}
    list(completed(engine, rollouts, 100))
    for scorer in scorers_of(parts):
        scorer.admit(told(rollouts))
        for score in scorer.finish(list(by_id)):
            by_id[score.rollout_id].scores[scorer.info.name] = score
    for r in rollouts:
        r.state = RolloutState.SCORED
    return rollouts


def by_hand(config: Config, lag: int) -> dict[str, Tensor]:
    """The trained weights of a loop in which each step trains on what was generated before it."""
    with ExitStack() as stack:
        parts = start_run(config, stack, lambda _: None)
        size = config.rollout.batch
        ready = [responses(parts, size, i * size) for i in range(lag)]
        learner = worker_of(parts, "learner")
        for step in range(config.steps):
            if step + lag < config.steps:
                ready.append(responses(parts, size, (step + lag) * size))
            train_on(learner, ready.pop(0))
            new = learner.publish()
            worker_of(parts, "generator").load(new["actor"])
            worker_of(parts, "critic").load(new["critic"])
        actor = learner.trained["actor"].model
        return {n: p.detach().clone() for n, p in actor.named_parameters()}


def trained(config: Config, tmp_path: Path) -> dict[str, Tensor]:
    return weights(run(config, tmp_path)[0])


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_all_knobs_at_zero_is_the_plain_loop_bit_for_bit(tiny_folder: Path, tmp_path: Path) -> None:
    config = settings(tiny_folder, **SIX)
    assert_equal(trained(config, tmp_path), by_hand(config, lag=0))


@pytest.mark.parametrize("score_on", ["batch", "rollout"])
def test_lag_1_is_the_one_step_off_loop_bit_for_bit(
    score_on: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Batches are generated with the weights before last, while the last are being trained."""
    config = settings(tiny_folder, **SIX, schedule={"lag": 1, "score_on": "batch"})
    other = settings(tiny_folder, **SIX, schedule={"lag": 1, "score_on": score_on})
    expected = by_hand(config, lag=1)
    # Scored one by one or together, values differ by rounding: then so do the weights.
    close = torch.equal if score_on == "batch" else lambda a, b: torch.allclose(a, b, atol=2e-4)
    found = trained(other, tmp_path)
    assert all(close(found[name], expected[name]) for name in found)
    plain = trained(settings(tiny_folder, **SIX), tmp_path)
    assert not all(torch.allclose(found[n], plain[n], atol=2e-4) for n in found)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("lora", [0, 2])
def test_streaming_trains_the_same_but_for_rounding(
    chunk: int, lora: int, tiny_folder: Path, tmp_path: Path
) -> None:
    model = {"lora_rank": lora}
    plain, _ = run(settings(tiny_folder, **SIX, model=model), tmp_path)
    streamed, _ = run(
        settings(
            tiny_folder, **SIX, model=model, schedule={"score_on": "chunk", "chunk_tokens": chunk}
        ),
        tmp_path,
    )
    ours, theirs = (
        [json.loads(line) for line in r.rollouts_file.read_text().splitlines()]
        for r in (plain, streamed)
    )
    assert [(r["id"], r["tokens"], r["finish"]) for r in ours] == [
        (r["id"], r["tokens"], r["finish"]) for r in theirs
    ]
    a, b = weights(plain), weights(streamed)
    assert all(torch.allclose(a[name], b[name], atol=2e-4) for name in a)


OVERLAPS: dict[str, dict[str, Any]] = {
    "carry": {"overcommit": 3},
    "reuse": {"overcommit": 3, "carry": "reuse"},
    "stream": {"score_on": "chunk", "chunk_tokens": 3, "overcommit": "auto"},
    "lag": {"lag": 1, "overcommit": 3},
    "dial": {"weight_sync_interval": 2, "lag": 1, "overcommit": 3},
    "all": {"score_on": "chunk", "chunk_tokens": 4, "overcommit": 2, "lag": 1},
}
BESIDE = ("lag", "dial")
"""Decoding goes on while the checkpoint is taken: the machine's pace decides which tokens have
their keys and values from decoding, and which from prefilling after the resumption."""
UNEVEN: dict[str, Any] = {"max_new_tokens": 30, "stop": tuple(ascii_lowercase)}
"""Any letter ends a response, one byte in ten: some end at once, others are long."""


def resumed_and_whole(config: Config, tmp_path: Path) -> tuple[RunDirectory, RunDirectory]:
    """A run that was killed after its checkpoint and gone on with, and one that was not.

    The checkpoint holds half-decoded responses.
    """
    whole, _ = run(config, tmp_path)
    killed = RunDirectory.create(tmp_path, "run", config)
    with killed_by_ctrl_c():
        runs.train(config, run_dir=killed, progress=Kill(4))
    step, state = checkpoint.load_latest(killed.checkpoints, print)
    assert step == 3
    rollouts = [r for group in state["driver.pt"]["schedule"]["buffer"]["groups"] for r in group]
    assert any(len(r["tokens"]) and r["finish"] is None for r in rollouts)
    again = RunDirectory.open(killed.path)
    runs.train(config, run_dir=again, resume=True, progress=Progress())
    return again, whole


@pytest.mark.parametrize("name", OVERLAPS)
def test_a_killed_overlapped_run_resumes_as_if_nothing_had_happened(
    name: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Half-decoded rollouts, weights that wait to be loaded, and controllers come back."""
    config = settings(
        tiny_folder,
        steps=6,
        rollout={"batch": 4, **UNEVEN},
        schedule=OVERLAPS[name],
        observe={"checkpoint_every": 3},
    )
    again, whole = resumed_and_whole(config, tmp_path)
    apart = [(a - b).abs().max().item() for a, b in both(weights(again), weights(whole))]
    if name in ("stream", "all"):  # scored and prefilled in other pieces
        assert max(apart) < 2e-4
    elif name == "reuse":  # keys and values of older weights are gone: computed anew
        assert max(apart) > 2e-4
        assert [m["step"] for m in again.read_metrics()] == [1, 2, 3, 4, 5, 6]
        assert untimed(again.read_metrics())[:3] == untimed(whole.read_metrics())[:3]
    else:
        assert_same_run(again, whole, exact=name not in BESIDE)


def both(a: dict[str, Tensor], b: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    assert a.keys() == b.keys()
    return ((a[name], b[name]) for name in a)


@pytest.mark.parametrize("preset", PRESETS)
def test_spans_of_a_track_nest_or_are_disjoint(
    preset: str, tiny_folder: Path, tmp_path: Path
) -> None:
    config = settings(
        tiny_folder,
        steps=3,
        rollout={"batch": 6, "max_new_tokens": 12, "engines": 2 if preset == "rlhfuse" else 1},
        schedule={"preset": preset},
    )
    run_dir, _ = run(config, tmp_path)
    check_trace_events(json.loads(run_dir.trace.path.read_bytes()))
    steps = run_dir.trace.read().steps
    for step, metrics in zip(steps, run_dir.read_metrics(), strict=True):
        step_s = step.end_s - step.start_s
        for role in ("critic", "learner", "task"):
            idle_s = sum(v for k, v in metrics.items() if k.startswith(f"idle_s/{role}/"))
            busy_s = metrics[f"utilisation/{role}"] * step_s
            assert idle_s + busy_s == pytest.approx(step_s, rel=1e-3)


GROUPED: dict[str, Any] = {"batch": 4, "samples_per_prompt": 2, "max_new_tokens": 10}
QUICK = ("ppo", "grpo", "online-dpo")
"""Of each kind one: with a critic, of tokens, of pairs. The others run with the slow tests."""


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ALGORITHMS],
)
def test_every_algorithm_runs_with_every_knob_on(
    name: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Streams, over-commits and lags, on two engines that may migrate; groups arrive whole."""
    config = settings(
        tiny_folder,
        steps=3,
        rollout=GROUPED | {"engines": 2},
        algorithm=named(name) | ({"teacher": str(tiny_folder)} if name == "distill" else {}),
        schedule={"preset": "stretto", "chunk_tokens": 2, "migrate": 0.5},
    )
    run_dir, _ = run(config, tmp_path)
    rows = [asdict(record) for record in run_dir.read_rollouts()]
    assert len(rows) == 12
    for step in (1, 2, 3):
        groups = [r["group"] for r in rows if r["step"] == step]
        assert [groups.count(g) for g in set(groups)] == [2, 2]
    metrics = run_dir.read_metrics()
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert all(m["staleness/max"] <= 2 for m in metrics)
    spans = {s.name for s in run_dir.trace.read().spans}
    scorers = {"score/task", "score/teacher" if name == "distill" else "score/reference"}
    scorers |= {"score/critic"} if name == "ppo" else set()
    assert {name for name in spans if name.startswith("score/")} == scorers


@pytest.mark.parametrize(("name", "knob"), [("rloo", "carry"), ("online-dpo", "dial")])
def test_a_killed_run_without_a_critic_resumes_as_if_nothing_had_happened(
    name: str, knob: str, tiny_folder: Path, tmp_path: Path
) -> None:
    config = settings(
        tiny_folder,
        steps=6,
        rollout=GROUPED | UNEVEN,
        algorithm={"name": name},
        schedule=OVERLAPS[knob],
        observe={"checkpoint_every": 3},
    )
    assert_same_run(*resumed_and_whole(config, tmp_path), exact=knob not in BESIDE)


@pytest.mark.parametrize("name", ["grpo", "online-dpo"])
def test_streaming_trains_groups_the_same_but_for_rounding(
    name: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """When scorers look at responses does not matter to any algorithm.

    Where all advantages of GRPO are 0, its gradient is the rounding of the KL, which AdamW turns
    into steps of full size: so what the first step came to is compared, not the weights after it.
    """
    common: dict[str, Any] = {"steps": 1, "rollout": GROUPED, "algorithm": {"name": name}}
    plain, _ = run(settings(tiny_folder, **common), tmp_path)
    knobs = {"score_on": "chunk", "chunk_tokens": 3}
    streamed, _ = run(settings(tiny_folder, **common, schedule=knobs), tmp_path)
    (expected,), (found,) = (untimed(r.read_metrics()) for r in (plain, streamed))
    assert {k: found[k] for k in expected if not k.startswith("schedule/")} == pytest.approx(
        {k: v for k, v in expected.items() if not k.startswith("schedule/")}, abs=1e-5
    )
    if name == "online-dpo":
        pairs = both(weights(plain), weights(streamed))
        assert all(torch.allclose(a, b, atol=2e-4) for a, b in pairs)


def test_carried_rollouts_keep_their_versions(tiny_folder: Path, tmp_path: Path) -> None:
    config = settings(
        tiny_folder,
        steps=8,
        warmup_examples=100,
        rollout={"batch": 4, "max_new_tokens": 40},
        schedule={"overcommit": 4, "max_carries": 2},
    )
    run_dir, _ = run(config, tmp_path)
    rows = [asdict(record) for record in run_dir.read_rollouts()]
    assert len(rows) == 32
    carried = [r for r in rows if r["carries"]]
    assert carried
    for r in rows:
        assert r["carries"] <= 2
        assert r["step"] - 1 - r["carries"] <= r["oldest_version"] <= r["newest_version"]
        assert r["newest_version"] <= r["step"] - 1
    assert any(r["oldest_version"] < r["newest_version"] for r in carried)


@pytest.mark.parametrize(
    ("preset", "migrate"),
    [("sync", {}), ("rlhfuse", {"migrate": 0.75}), ("stretto", {"migrate": 0.75})],
)
def test_several_engines_share_the_work(
    preset: str, migrate: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    """Which engine decodes a rollout does not change its tokens.

    Long responses of unlike lengths: on a busy machine one engine may be done with its own before
    the other has ended its first, and then nothing is left to move in that step.
    """
    sizes = SIX["rollout"] | {"max_new_tokens": 40}
    one, _ = run(settings(tiny_folder, steps=6, rollout=sizes), tmp_path)
    sizes["engines"] = 2
    options = {"preset": preset, "chunk_tokens": 2, "lag": 0, "overcommit": 0, **migrate}
    two, _ = run(settings(tiny_folder, steps=6, rollout=sizes, schedule=options), tmp_path)
    a, b = weights(one), weights(two)
    assert all(torch.allclose(a[n], b[n], atol=2e-4) for n in a)
    moved = [s for s in two.trace.read().spans if s.name == "migrate"]
    assert bool(moved) == bool(migrate)


def test_a_run_in_a_notebook(tiny_folder: Path, tmp_path: Path) -> None:
    """Where an event loop is running already."""

    async def cell() -> RunDirectory:
        return run(settings(tiny_folder, steps=2), tmp_path)[0]

    assert [m["step"] for m in asyncio.run(cell()).read_metrics()] == [1, 2]


def test_each_worker_has_threads_of_its_own() -> None:
    """Whatever workers that started later, or worked in between, have set for themselves."""
    one, other = WorkerThread("one", 2), WorkerThread("other", 1)
    alone = WorkerThread("alone", lambda: 1 if one.busy else 3)

    begun, release = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert release.wait(60)

    async def numbers() -> list[int]:
        found = [await worker.run(torch.get_num_threads) for worker in (alone, one, other, one)]
        held = asyncio.create_task(one.run(hold))
        assert await asyncio.to_thread(begun.wait, 60)
        found.append(await alone.run(torch.get_num_threads))
        release.set()
        await held
        return found

    before = torch.get_num_threads()
    try:
        assert asyncio.run(numbers()) == [3, 2, 1, 2, 1]
    finally:
        release.set()
        for worker in (one, other, alone):
            worker.interrupt()
        torch.set_num_threads(before)


def call_threads(run_dir: RunDirectory) -> dict[str, set[int]]:
    """The CPU threads of each role's calls, without those of code."""
    (segment,) = read_flight(run_dir.flight_file)
    facts, threads = segment.facts["threads"], dict[str, set[int]]()
    for event in segment.events:
        role = event.name.rpartition(" ")[0]
        if role in ("generator", "reference", "critic", "learner"):
            threads.setdefault(role, set()).add(event.threads or facts[role])
    return threads


def test_auto_divides_the_cores_only_in_rounds_that_overlap(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rounds like those of ``sync``, each role has all of them, and the weights are equal."""
    common: dict[str, Any] = {**SIX, "steps": 4, "threads": 4}
    config = settings(
        tiny_folder, **common, schedule={"preset": "auto", "max_staleness": 1, "chunk_tokens": 5}
    )
    auto, _ = run(config, tmp_path)
    expected = {"generator": {4}, "reference": {4}, "critic": {4}, "learner": {4}}
    assert call_threads(auto) == expected
    assert_equal(weights(auto), trained(settings(tiny_folder, **common), tmp_path))
    knobs = RoundKnobs("rollout", lag=1, chunk_tokens=5)
    monkeypatch.setattr(AutoTuner, "knobs", property(lambda self: knobs))
    overlapped, _ = run(config, tmp_path)
    expected = {"generator": {1}, "reference": {1}, "critic": {1}, "learner": {2}}
    assert call_threads(overlapped) == expected


# -- the end of a run ----------------------------------------------------------------------------


def start(arguments: list[str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "stretto", "train", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("preset", "number"),
    [("sync", signal.SIGINT), ("stretto", signal.SIGTERM), ("async", signal.SIGHUP)],
)
def test_a_signal_ends_a_run_promptly_and_leaves_it_whole(
    preset: str, number: signal.Signals, tiny_folder: Path, tmp_path: Path
) -> None:
    config = settings(
        tiny_folder, steps=100_000, schedule={"preset": preset}, observe={"progress": "plain"}
    )
    (tmp_path / "endless.toml").write_text(recipes.dump(config))
    process = start(["endless.toml"], tmp_path)
    assert process.stdout is not None
    while "step 3/" not in process.stdout.readline():
        assert process.poll() is None, process.communicate()
    process.send_signal(number)
    out, err = process.communicate(timeout=240)  # many thousand steps are left

    assert process.returncode == 128 + number, err
    assert err.endswith("stretto: interrupted\n")
    assert "the model is saved in runs/endless-001/model\n" in out
    left = "stopped; what was done so far is in runs/endless-001"
    run_dir = RunDirectory.open(tmp_path / "runs" / "endless-001")
    command = "'stretto train --resume runs/endless-001' goes on after step"
    assert f"{left}; {command} {run_dir.last_step()}\n" in out
    assert len(run_dir.read_metrics()) >= 3
    assert (run_dir.model / "model.safetensors").is_file()
    assert len(run_dir.trace.read().steps) == len(run_dir.read_metrics())


@pytest.mark.parametrize("preset", ["sync", "oppo", "async"])
def test_a_reward_that_hangs_ends_the_run_and_names_what_it_waited_for(
    preset: str, tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(
        "import time\n"
        "def slow(completions, **_):\n"
        "    time.sleep(1000)\n"
        "    return [0.0] * len(completions)\n"
    )
    config = settings(
        tiny_folder,
        reward={"sources": ("rewards.py:slow",), "timeout_s": 500.0},
        schedule={"preset": preset, "deadline_s": 4.0},
        observe={"progress": "plain"},
    )
    (tmp_path / "hang.toml").write_text(recipes.dump(config))
    process = start(["hang.toml"], tmp_path)
    _, err = process.communicate(timeout=240)  # far less than the reward function may take
    assert process.returncode == 2, err
    assert "has not answered for 4 s" in err
    assert "rollout(s): 0" in err


# -- a learner that starts on groups -------------------------------------------------------------

OF_PROMPTS: dict[str, Any] = {
    "steps": 3,
    "rollout": {"batch": 8, "samples_per_prompt": 2, **UNEVEN},
    "algorithm": {"name": "grpo", "kl_coef": 0.05, "entropy_coef": 0.01},
}
ON_GROUPS = {"score_on": "rollout", "chunk_tokens": 2}


def steps_begun_early(run_dir: RunDirectory) -> int:
    return sum(m.get("timing_s/accumulate", 0.0) > 0 for m in run_dir.read_metrics())


@pytest.mark.parametrize(
    "name", ["over-committed", "checkpointing", pytest.param("local", marks=pytest.mark.slow)]
)
def test_training_on_groups_trains_the_same_but_for_rounding(
    name: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """The same responses, rewards and metrics, and weights that differ by sums in another order."""
    by_name: dict[str, dict[str, Any]] = {
        "over-committed": {"schedule": {"overcommit": 4}},
        "checkpointing": {"model": {"gradient_checkpointing": "on"}},
        "local": {"runtime": "local"},
    }
    sections = by_name[name]
    schedule = {**ON_GROUPS, **sections.pop("schedule", {})}
    ends = []
    for choice in ("batch", "group"):
        config = settings(
            tiny_folder, **OF_PROMPTS, schedule={**schedule, "train_on": choice}, **sections
        )
        ends.append(run(config, tmp_path)[0])
    plain, grouped = ends
    assert_same_run(plain, grouped, exact=False)
    assert steps_begun_early(plain) == 0
    assert steps_begun_early(grouped) >= 1
