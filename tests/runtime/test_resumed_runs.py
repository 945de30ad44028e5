"""Runs of a small model that are resumed from each of their checkpoints, whatever the settings."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from run_helpers import lines, settings
from stretto import runs
from stretto.assembly.run_models import NO_OVERRIDES, Overrides
from stretto.config import Config
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.runs import checkpoint
from stretto.scoring.model_scorers import TokenScorer
from stretto.types import Score


def flaky(completions: Sequence[str], **_: Any) -> list[float | None]:
    """A reward function that fails on one response in seven."""
    return [None if len(c) % 7 == 3 else float(len(c)) for c in completions]


FLAKY = Overrides(functions={"flaky": flaky})


def slowed(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the reference and the critic take so much longer for a call, in this process."""
    finish = TokenScorer.finish

    def slow(self: TokenScorer, rollout_ids: Sequence[int]) -> list[Score]:
        time.sleep(seconds)
        return finish(self, rollout_ids)

    monkeypatch.setattr(TokenScorer, "finish", slow)


def ended(run_dir: RunDirectory) -> list[tuple[Any, ...]]:
    """What came of each response, in the order of the steps."""
    return sorted(
        (r["step"], r["id"], r["tokens"], r["finish"], r["state"], r["reward"])
        for r in lines(run_dir.rollouts_file)
        if r["state"] in ("trained", "rejected")
    )


def books(run_dir: RunDirectory) -> dict[str, Any]:
    state = checkpoint.load_latest(run_dir.checkpoints, print)[1]["driver.pt"]
    ledger: dict[str, Any] = state["schedule"]["ledger"]
    return ledger


def resumed_from_everywhere(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Overrides = NO_OVERRIDES
) -> tuple[int, int]:
    """Resume a run from all its checkpoints; the same books and rewards come out.

    Returns:
        the checkpoints, and those of them in which a round waits for its scores.
    """
    monkeypatch.setattr(checkpoint, "_superfluous", lambda *_: [])  # all stay
    whole = RunDirectory.create(tmp_path, "whole", config)
    runs.train(config, run_dir=whole, progress=Progress(), overrides=given)
    same, waiting = _is_timeless(config), 0
    for step in range(1, config.steps):
        again = RunDirectory.open(shutil.copytree(whole.path, tmp_path / f"from-{step}"))
        for later in range(step + 1, config.steps + 1):
            shutil.rmtree(again.checkpoints / f"step-{later:06d}")
        found, state = checkpoint.load_latest(again.checkpoints, print)
        assert found == step
        waiting += bool(state["driver.pt"]["schedule"]["generated"])
        runs.train(config, run_dir=again, resume=True, progress=Progress(), overrides=given)
        ids = [row[1] for row in ended(again)]
        assert len(set(ids)) == len(ids) == config.steps * config.rollout.batch
        if same:
            assert ended(again) == ended(whole)
            assert books(again) == books(whole)
        else:  # another may end first
            assert books(again)["dispatched"] == books(whole)["dispatched"]
            assert len(books(again)["in_flight"]) == len(books(whole)["in_flight"])
        shutil.rmtree(again.path)
    return config.steps - 1, waiting


def _is_timeless(config: Config) -> bool:
    """Whether time decides nothing of what is trained on, as no engines race."""
    return not config.schedule.overcommit or config.rollout.engines == 1


@pytest.mark.parametrize("score_on", ["batch", "rollout"])
def test_a_round_that_waits_for_scores_gets_them_after_a_restart(
    score_on: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is decoded at first: devices are free for the scorers all the same."""
    slowed(0.2, monkeypatch)
    config = settings(
        tiny_folder,
        steps=2,
        rollout={"batch": 4, "engines": 2, "max_new_tokens": 10},
        schedule={"score_on": score_on, "lag": 1, "migrate": 0.5},
        observe={"checkpoint_every": 1},
    )
    assert resumed_from_everywhere(config, tmp_path, monkeypatch) == (1, 1)


def random_settings(seed: int, folder: Path) -> tuple[Config, Overrides, float]:
    """A short run whose settings, reward function and slowness are drawn from the seed."""
    r = random.Random(seed)
    name = r.choice(["ppo", "ppo", "rloo", "grpo", "online-dpo"])
    group = 2 if name in ("rloo", "grpo", "online-dpo") else 1
    engines, drops = r.choice([1, 2, 2]), r.random() < 0.4
    config = settings(
        folder,
        steps=4,
        model={"lora_rank": r.choice([0, 0, 2])},
        rollout={
            "batch": 8,
            "engines": engines,
            "samples_per_prompt": group,
            "max_new_tokens": r.choice([6, 24]),
        },
        algorithm={"name": name},
        reward={"sources": ["flaky"] if drops else ["task"], "on_failure": "drop"},
        schedule={
            "score_on": r.choice(["batch", "rollout", "chunk"]),
            "lag": r.choice([0, 1, 1]),
            "migrate": r.choice(["off", 0.5, 0.5]) if engines > 1 else "off",
            "overcommit": r.choice([0, 0, 4]),
            "weight_sync_interval": r.choice([1, 1, 2]),
            "chunk_tokens": r.choice([1, 4, 16]),
        },
        observe={"checkpoint_every": 1},
    )
    return config, FLAKY if drops else NO_OVERRIDES, r.choice([0.0, 0.0, 0.4])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_a_run_of_any_settings_goes_on_from_each_of_its_checkpoints(
    seed: int, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, given, slow_s = random_settings(seed, tiny_folder)
    if slow_s:
        slowed(slow_s, monkeypatch)
    assert resumed_from_everywhere(config, tmp_path, monkeypatch, given)[0] == 3


@pytest.mark.slow
@pytest.mark.parametrize("score_on", ["batch", "rollout"])
def test_a_run_over_processes_goes_on_from_each_of_its_checkpoints(
    score_on: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scorers sit with the generators, of which there are one or two."""
    for engines in (1, 2):
        config = settings(
            tiny_folder,
            steps=4,
            runtime="local",
            rollout={"batch": 4, "engines": engines, "max_new_tokens": 24},
            schedule={"score_on": score_on, "lag": 1, "migrate": 0.5 if engines > 1 else "off"},
            cluster={"scorers": "generators"},
            observe={"checkpoint_every": 1},
        )
        folder = tmp_path / str(engines)
        assert resumed_from_everywhere(config, folder, monkeypatch)[0] == 3
