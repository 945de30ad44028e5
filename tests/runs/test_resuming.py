"""Runs that go on: without a second warm-up, and not at all where they have ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stretto
from run_helpers import Notes, assert_same_run, run, settings
from stretto import runs
from stretto.assembly import parts
from stretto.assembly.run_models import Overrides
from stretto.config import ClusterConfig, Config
from stretto.config.cluster_config import ProcessConfig
from stretto.observe import RunDirectory

DIVIDED = ClusterConfig(
    processes=(ProcessConfig(roles=("learner", "generator", "reference", "critic"), ranks=2),)
)


def never(*_: Any) -> float:
    raise AssertionError("the warm-up is done once more")


# -- the warm-up ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Three steps after a warm-up, without an interruption."""
    config = settings(tiny_folder, warmup_examples=40, steps=3)
    return run(config, tmp_path_factory.mktemp("whole"))[0]


@pytest.mark.parametrize(
    "model", [{}, {"dtype": "bfloat16"}, {"lora_rank": 2}], ids=["float32", "bfloat16", "lora"]
)
def test_a_resumed_run_has_its_warm_up_behind_it(
    model: dict[str, Any], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on from it bit for bit: it is the reference, and under LoRA what is frozen."""
    config = settings(tiny_folder, warmup_examples=40, steps=4, model=model)
    whole, _ = run(config, tmp_path)
    first, _ = run(config.model_copy(update={"steps": 2}), tmp_path)
    assert [path.name for path in first.checkpoints.iterdir()] == ["step-000002"]
    monkeypatch.setattr(parts, "warm_up", never)
    tolerant = config.training.model_copy(update={"ratio_tolerance": 0.5})  # which may change
    notes = Notes()
    changed = config.model_copy(update={"training": tolerant})
    runs.train(changed, run_dir=first, resume=True, progress=notes)
    assert_same_run(first, whole)
    (line,) = [note for note in notes.notes if note.startswith("warmed up already on 40 examples")]
    assert line.endswith(f": {first.path / 'warmup.safetensors'}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"runtime": "inline"}, {"runtime": "local"}),
        ({"runtime": "local"}, {"runtime": "inline"}),
        pytest.param(
            {"runtime": "inline"},
            {"runtime": "local", "cluster": DIVIDED},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["to processes", "from processes", "to shards"],
)
def test_also_on_another_runtime(
    before: dict[str, Any],
    after: dict[str, Any],
    whole: RunDirectory,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    config = settings(tiny_folder, warmup_examples=40, steps=3)
    first, _ = run(config.model_copy(update={**before, "steps": 2}), tmp_path)
    written = first.warmup.stat().st_mtime_ns
    runs.train(config.model_copy(update=after), run_dir=first, resume=True, progress=Notes())
    assert first.warmup.stat().st_mtime_ns == written
    if "cluster" in after:
        kl = [[step["objective/kl"] for step in r.read_metrics()] for r in (first, whole)]
        assert kl[0] == pytest.approx(kl[1], rel=1e-3, abs=1e-5)
    else:
        assert_same_run(first, whole)


def test_one_whose_file_is_gone_warms_up_again(
    whole: RunDirectory, tiny_folder: Path, tmp_path: Path
) -> None:
    """As one does that an earlier version has begun."""
    config = settings(tiny_folder, warmup_examples=40, steps=3)
    first, _ = run(config.model_copy(update={"steps": 2}), tmp_path)
    first.warmup.unlink()
    runs.train(config, run_dir=first, resume=True, progress=Notes())
    assert_same_run(first, whole)
    assert first.warmup.is_file()


def test_one_with_a_shared_file_keeps_it(
    whole: RunDirectory, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run needs neither the option nor the other name of the file."""
    config = settings(tiny_folder, warmup_examples=40, steps=3)
    shared = tmp_path / "shared.safetensors"
    first = RunDirectory.create(tmp_path, "run", config)
    short = config.model_copy(update={"steps": 2})
    runs.train(short, run_dir=first, progress=Notes(), overrides=Overrides(warmup=shared))
    assert first.warmup.samefile(shared)
    shared.unlink()
    monkeypatch.setattr(parts, "warm_up", never)
    runs.train(config, run_dir=first, resume=True, progress=Notes())
    assert_same_run(first, whole)


# -- runs that have ended ------------------------------------------------------------------------


def ended_run(out: Path, steps: int = 2) -> RunDirectory:
    """The folder of a run that has taken all its steps, without the run."""
    run_dir = RunDirectory.create(out, "run", Config.model_validate({"steps": steps}))
    for step in range(1, steps + 1):
        run_dir.append_metrics(step, {"objective/scores": 0.25 * step, "bad": float("nan")})
    run_dir.model.mkdir()
    (run_dir.model / "config.json").write_text("{}")
    return run_dir


def test_one_that_has_ended_says_so_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    """A torch that cannot be imported is in the way."""
    run_dir, lib = ended_run(tmp_path), tmp_path / "lib"
    lib.mkdir()
    (lib / "torch.py").write_text("raise ImportError('torch was imported')")
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "train", "--resume", str(run_dir.path)],
        env={**os.environ, "PYTHONPATH": str(lib)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"the run in {run_dir.path} has ended: all of its 2 steps are taken, and the trained model "
        f"is in {run_dir.model}. With more --steps it goes on from there\n"
    )


def test_its_outcome_is_returned(tmp_path: Path) -> None:
    run_dir, notes = ended_run(tmp_path), Notes()
    result = stretto.resume(run_dir.path, progress=notes)
    assert (result.steps, result.model) == (2, run_dir.model)
    assert result.stats["objective/scores"] == 0.5
    assert result.stats["bad"] != result.stats["bad"]  # not a number, which JSON has not
    assert len(notes.notes) == 1


def test_one_has_ended_with_its_last_step_and_the_model_after_it(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    assert run_dir.ended(2)
    assert run_dir.ended(1)
    assert run_dir.ended(3) is None
    with run_dir.metrics_file.open("a") as file:
        file.write('{"step": 3, "x"')  # as a kill leaves it
    os.utime(run_dir.model)
    assert run_dir.ended(3) is None
    assert run_dir.ended(2)
    with run_dir.metrics_file.open("a") as file:
        file.write(": 1}\n")
    os.utime(run_dir.model, ns=(0, 0))  # of an earlier step: it was killed before it saved one
    assert run_dir.ended(3) is None
    (run_dir.model / "config.json").unlink()
    os.utime(run_dir.model)
    assert run_dir.ended(3) is None
    assert RunDirectory.create(tmp_path, "new", Config()).ended(1) is None


def test_a_long_file_is_read_from_its_end(tmp_path: Path) -> None:
    run_dir = ended_run(tmp_path)
    lines = "".join(json.dumps({"step": n, "x": "y" * 9999}) + "\n" for n in range(1, 60))
    run_dir.metrics_file.write_text(lines)
    os.utime(run_dir.model)
    ended = run_dir.ended(59)
    assert ended
    assert ended.steps == 59


def test_a_folder_that_was_moved_goes_on(tmp_path: Path) -> None:
    """With the rows that it was given as objects, and its warm-up."""
    Path(tmp_path / "count.py").write_text(
        "def count(completions, **_): return [float(len(c)) for c in completions]\n"
    )
    rows = [{"prompt": f"{number} + 1 ="} for number in range(8)]
    first = stretto.train(
        "tiny",
        steps=1,
        warmup_examples=0,
        out=str(tmp_path / "here"),
        dataset=rows,
        reward=str(tmp_path / "count.py") + ":count",
        rollout__batch=4,
        observe__progress="off",
    )
    there = tmp_path / "there" / "moved"
    there.parent.mkdir()
    first.run_dir.rename(there)
    result = stretto.resume(there, steps=2)
    assert result.steps == 2
    assert result.run_dir == there
    assert stretto.load_recipe(there).task.name == str(there / "dataset.jsonl")
