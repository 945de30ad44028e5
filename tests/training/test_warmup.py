"""One warm-up for several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raising import raises
from run_helpers import Notes, assert_same_run, length, settings
from stretto import runs
from stretto.assembly import parts
from stretto.assembly.run_models import Overrides
from stretto.errors import ConfigError, StateError
from stretto.observe import RunDirectory
from stretto.training import warmup


def reinforce(
    tiny_folder: Path, out: Path, warm: Path | None = None, **changes: Any
) -> tuple[RunDirectory, Notes]:
    """A run that warms up, or takes what is in the file."""
    small = {"warmup_examples": 40, "reward": {"sources": ("length",)}}
    config = settings(tiny_folder, **{**small, **changes})
    run_dir, notes = RunDirectory.create(out, "run", config), Notes()
    given = Overrides(functions={"length": length}, warmup=warm)
    runs.train(config, run_dir=run_dir, progress=notes, overrides=given)
    return run_dir, notes


@pytest.mark.parametrize(
    "model", [{}, {"dtype": "bfloat16"}, {"lora_rank": 2}], ids=["float32", "bfloat16", "lora"]
)
def test_runs_are_the_same_with_a_shared_warm_up_as_with_their_own(
    model: dict[str, Any], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a warm-up draws random numbers, which adapters are initialised with after it."""
    own, warmed = warmup.warm_up, list[int]()

    def drawing(*args: Any) -> float:
        warmed.append(1)
        torch.rand(3)
        return own(*args)

    monkeypatch.setattr(parts, "warm_up", drawing)
    file = tmp_path / "warmup.safetensors"
    alone, said = reinforce(tiny_folder, tmp_path, model=model)
    first, _ = reinforce(tiny_folder, tmp_path, file, model=model)
    assert len(warmed) == 2
    second, says = reinforce(tiny_folder, tmp_path, file, model=model)
    assert len(warmed) == 2
    assert_same_run(first, alone)
    assert_same_run(second, alone)
    (line,) = [note for note in said.notes if note.startswith("warmed up on 40 examples: ")]
    loss = line.rpartition(": ")[2]
    assert f"warmed up already on 40 examples ({loss}): {file}" in says.notes


def test_variants_of_a_schedule_share_a_warm_up_and_others_do_not(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "warmup.safetensors"
    overlap: dict[str, Any] = {"schedule": {"preset": "async"}}
    reinforce(tiny_folder, tmp_path, file)
    shared, _ = reinforce(tiny_folder, tmp_path, file, **overlap)
    own, _ = reinforce(tiny_folder, tmp_path, **overlap)
    assert_same_run(shared, own)
    for other in ({"seed": 5}, {"warmup_examples": 41}, {"warmup_lr": 0.5}):
        with raises(ConfigError, "other-warmup", "warmup.safetensors"):
            reinforce(tiny_folder, tmp_path, file, **other)
    whole = file.read_bytes()
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])  # a block that was lost
    with raises(StateError, "damaged-file", "warmup.safetensors", "SHA-256"):
        reinforce(tiny_folder, tmp_path, file)
    file.write_bytes(whole[:-10])
    with raises(StateError, "damaged-file", "warmup.safetensors"):
        reinforce(tiny_folder, tmp_path, file)
