"""What a run writes, and whether the disk has room for it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raising import raises
from stretto.api.training import begin
from stretto.checks import disk
from stretto.checks.disk import written
from stretto.cli.main import main
from stretto.config import Config, SftConfig, changes, recipes
from stretto.errors import StorageError

PARAMETERS = 115_200  # of the model "tiny"


def tiny(**settings: object) -> Config:
    started = {"model": {"device": "cpu"}, "warmup_examples": 0, **settings}
    return changes.changed(recipes.load("tiny"), started, "a test")


def free_bytes(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(free)))


@pytest.mark.parametrize(
    ("settings", "checkpoint", "model"),
    [
        ({}, 24, 4),  # of actor and critic: masters and both moments
        ({"warmup_examples": 8}, 24, 8),  # and what the warm-up keeps
        ({"algorithm": {"name": "rloo"}, "rollout": {"samples_per_prompt": 2}}, 12, 4),
        ({"schedule": {"preset": "async"}}, 28, 4),  # and what generation works with
        ({"observe": {"checkpoint_minutes": 0}}, 0, 4),
        ({"observe": {"eval_every": 1}}, 24, 12),  # the last, the best and a better one
        ({"model": {"device": "cpu", "dtype": "bfloat16"}}, 24, 2),
    ],
    ids=["ppo", "warm-up", "rloo", "lag", "none", "evaluated", "bfloat16"],
)
def test_what_a_run_writes_follows_from_its_settings(
    settings: dict[str, Any], checkpoint: int, model: int
) -> None:
    """In bytes a parameter of the actor."""
    assert written(tiny(**settings)) == (checkpoint * PARAMETERS, model * PARAMETERS)


def test_supervised_training_writes_a_model_and_others_are_not_counted() -> None:
    sft = SftConfig.model_validate({"model": {"name": "tiny", "device": "cpu"}})
    assert written(sft) == (0, 4 * PARAMETERS)
    assert written(tiny(model={"name": "owner/not-fetched"})) is None


def test_a_run_that_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With half of the checkpoint to spare, which the model is less than."""
    needed = 36 * PARAMETERS
    free_bytes(monkeypatch, needed)
    disk.check(written(tiny()), tmp_path / "runs")
    free_bytes(monkeypatch, needed - 1)
    sizes = ("4.147 MB free", "needs 4.147 MB", "460.8 kB for its model", "2.765 MB")
    remedies = ("`out`", "`observe.checkpoint_minutes = 0`")
    with raises(StorageError, "disk-too-small", *sizes, *remedies):
        disk.check(written(tiny()), tmp_path / "runs")
    alone = 4 * PARAMETERS
    for config, resuming in ((tiny(observe={"checkpoint_minutes": 0}), False), (tiny(), True)):
        free_bytes(monkeypatch, alone)
        disk.check(written(config), tmp_path, resuming=resuming)
        free_bytes(monkeypatch, alone - 1)
        with raises(StorageError, "disk-too-small", "460.8 kB for its model. Make room"):
            disk.check(written(config), tmp_path, resuming=resuming)


def test_one_that_does_not_fit_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free_bytes(monkeypatch, 1000)
    out = tmp_path / "runs"
    with raises(StorageError, "disk-too-small", "1 kB free"):
        begin(tiny(out=str(out)))
    assert main(["train", "tiny", "--out", str(out)]) == 2
    assert main(["sft", "--model.name", "tiny", "--data.name", "x.jsonl", "--out", str(out)]) == 2
    assert "1 kB free" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("room", "held", "said"),
    [
        (3.5, 0, "2.765 MB each, at most 2 kept"),
        (3.4, 0, "2.765 MB each, 1 kept, as 9.4 MB are free"),
        (2.5, 0, "2.765 MB each, 1 kept, as 6.912 MB are free"),
        (2.4, 0, "2.765 MB each, and only the first is written, as 6.636 MB are free: make room"),
        (1.5, 2, "2.765 MB each, at most 2 kept"),  # as when the run began
    ],
)
def test_a_start_says_what_checkpoints_take_and_how_many_are_kept(
    room: float, held: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    size = 24 * PARAMETERS
    free_bytes(monkeypatch, room * size + 1)
    for step in range(held):
        file = tmp_path / "checkpoints" / f"step-{step}" / "learner" / "rank"
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(size))
    assert disk.said(written(tiny()), tmp_path) == f"checkpoints: {said}"
    assert disk.said(written(tiny(observe={"checkpoint_minutes": 0})), tmp_path) == ""


def test_so_does_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny", "--dry-run"]) == 0
    assert "checkpoints: 2.765 MB each, " in capsys.readouterr().out
