"""A run's state: copied, written where it is, and taken up on another runtime."""

from __future__ import annotations

import errno
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from helpers import full_beyond
from raising import raises
from run_helpers import Kill, assert_same_run, killed_by_ctrl_c, run, settings, weights
from stretto import runs
from stretto.config import Config, recipes
from stretto.errors import StateError, StorageError
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.runs import checkpoint
from stretto.runtime.learner_service import LearnerService
from stretto.runtime.process_messages import Ready
from stretto.runtime.state import Claim, copied, fit, write
from stretto.schedules.rollout import Rollout, restored
from stretto.training import shard_files
from stretto.types import Chunk, FinishReason, Prompt, Score, WeightsRef
from stretto.weights.channel import SharedChannel


def test_a_copy_does_not_change_with_what_was_copied() -> None:
    tensor, numbers = torch.arange(3.0, requires_grad=True), [1, {"a": (2, None)}]
    state = {"tensor": tensor, 7: numbers}
    copy = copied(state)
    with torch.no_grad():
        tensor += 1
    numbers.append(3)
    assert copy["tensor"].tolist() == [0.0, 1.0, 2.0]
    assert not copy["tensor"].requires_grad
    assert copy[7] == [1, {"a": (2, None)}]


def test_a_rollout_is_kept_as_tensors_and_comes_back_from_the_file(tmp_path: Path) -> None:
    """No number of it is an object of its own: 8 million in flight would stop the event loop."""
    rollout, values = Rollout(4, Prompt(2, (7,), ""), 4), np.array([0.5, -0.25, 3.0], np.float32)
    rollout.append(Chunk(4, 0, np.array([5, 6], np.int32), values[:2], 1))
    rollout.append(Chunk(4, 2, np.array([150_000], np.int32), values[2:], 2, FinishReason.STOP))
    rollout.scores = {"critic": Score(4, "critic", "values", values)}
    taken = copied([rollout.state_dict()])
    (state,) = taken
    arrays = (state["tokens"], state["logprobs"], state["versions"], state["scores"][0]["values"])
    assert [a.dtype for a in arrays] == [torch.int32, torch.float32, torch.int32, torch.float32]
    write(tmp_path / "x.pt", taken)
    (again,) = restored(torch.load(tmp_path / "x.pt", weights_only=True), lambda _: rollout.prompt)
    assert again.state_dict() == rollout.state_dict()
    assert again.tokens.tolist() == [5, 6, 150_000]


@pytest.mark.parametrize(
    ("copy", "available", "expected"),
    [(True, 8000, [0.0, 0.0]), (True, 15, [1.0, 1.0]), (False, 8000, [1.0, 1.0])],
)
def test_a_learner_writes_what_was_staged(
    copy: bool,
    available: int,
    expected: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy, where one is asked for and fits into half of the memory that is free."""
    tensor = torch.zeros(2)  # 8 bytes
    memory = SimpleNamespace(available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    service = learner_service({"w": tensor})
    live, size = service.stage(copy, []).value
    tensor += 1
    assert (live, size) == (expected == [1.0, 1.0], 8)
    name, told = service.write(tmp_path)
    (file,) = tmp_path.iterdir()
    assert (file.name, hashlib.sha256(file.read_bytes()).hexdigest()) == (name, told.sha256)
    assert load_file(file)["actor/masters/w"].tolist() == expected


def test_a_learner_writes_the_versions_that_others_work_with(tmp_path: Path) -> None:
    channel, refs = SharedChannel(), [WeightsRef("actor", v, "", "shared") for v in (2, 3)]
    service = learner_service({"w": torch.zeros(2)}, channel)
    for ref in refs:
        channel.put(ref, {"w": torch.full((2,), float(ref.version), dtype=torch.bfloat16)})
    assert service.stage(True, refs).value == (False, 16)  # 8 bytes, and 4 of each version
    name, _ = service.write(tmp_path)
    found = load_file(tmp_path / name)
    assert found["actor/published/2/w"].tolist() == [2.0, 2.0]
    assert found["actor/published/3/w"].tolist() == [3.0, 3.0]
    assert found["actor/published/3/w"].dtype == torch.bfloat16


def test_a_learner_tells_of_a_full_disk(tmp_path: Path) -> None:
    service = learner_service({"w": torch.zeros(4000)})
    service.stage(False, [])
    with full_beyond(1000), pytest.raises(StorageError, match=r"File too large; make room"):
        service.write(tmp_path)


def learner_service(state: dict[str, Any], channel: SharedChannel | None = None) -> LearnerService:
    model = {"masters": state, "moments": {}, "schedule": {}}
    actor = SimpleNamespace(pieces=lambda tensors: tensors)
    learner: Any = SimpleNamespace(
        state_dict=lambda: {"models": {"actor": model}}, trained={"actor": actor}
    )
    prompts: Any = None
    ready = Ready({}, "", (), torch.float32)
    return LearnerService(learner, channel or SharedChannel(), prompts, ready)


def test_copies_on_one_machine_share_its_memory() -> None:
    """Half of what is free may be taken, however many processes take it."""
    assert fit([Claim("a", 50, 100)])
    assert not fit([Claim("a", 51, 100)])
    assert fit([Claim("a", 25, 100), Claim("a", 25, 100), Claim("b", 50, 100)])
    assert not fit([Claim("a", 25, 100), Claim("a", 26, 100), Claim("b", 1, 100)])
    assert not fit([Claim("a", 25, 100), Claim("a", 25, 99)])


def test_the_systems_error_is_raised_not_torchs(tmp_path: Path) -> None:
    with full_beyond(1000), pytest.raises(OSError, match="File too large"):
        write(tmp_path / "x.pt", {"w": torch.zeros(4000)})


def test_a_file_leaves_room_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.zeros(1_000_000)}
    for free, fits in ((6_000_000, True), (5_999_999, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        if fits:
            write(tmp_path / "x.pt", state)
            continue
        with pytest.raises(OSError, match=r"x.pt takes 4.0 MB of the 6.0 MB that are free") as no:
            write(tmp_path / "x.pt", state)
        assert no.value.errno == errno.ENOSPC


def test_a_damaged_file_of_the_learner_makes_its_checkpoint_unusable(
    tiny_folder: Path, tmp_path: Path
) -> None:
    config = settings(tiny_folder, steps=1)
    run_dir, _ = run(config, tmp_path)
    (file,) = run_dir.checkpoints.glob("*/learner/*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    longer = config.model_copy(update={"steps": 2})
    with raises(StateError, "damaged-checkpoint", file.name, "SHA-256"):
        runs.train(longer, run_dir=run_dir, resume=True, progress=Progress())


# -- on another runtime --------------------------------------------------------------------------

LAGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"preset": "async", "score_on": "batch"},  # else what is scored together varies
    "carried": {"lag": 1, "overcommit": 3},
}


def of(config: Config, runtime: str) -> Config:
    return config.model_copy(update={"runtime": runtime})


@pytest.mark.parametrize("lag", ["sync", "async", pytest.param("carried", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("begun", "resumed"), [("inline", "local"), ("local", "inline")])
def test_a_run_goes_on_elsewhere_bit_for_bit(
    lag: str, begun: str, resumed: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """As one that was never killed, in one process."""
    config = settings(
        tiny_folder,
        steps=4,
        schedule=LAGS[lag],
        rollout={"batch": 4, "max_new_tokens": 12},
        observe={"checkpoint_every": 2},
    )
    whole, _ = run(config, tmp_path)
    killed = RunDirectory.create(tmp_path, "run", config)
    with killed_by_ctrl_c():
        runs.train(of(config, begun), run_dir=killed, progress=Kill(3))
    step, parts = checkpoint.load_latest(killed.checkpoints, print)
    assert step == 2
    held = shard_files.read(parts["learner"])["published"]
    assert {model for model, _ in held} == (set() if lag == "sync" else {"actor", "critic"})
    runs.train(of(config, resumed), run_dir=killed, resume=True, progress=Progress())
    assert_same_run(killed, whole)


@pytest.mark.slow
def test_adapters_go_on_elsewhere_bit_for_bit(tiny_folder: Path, tmp_path: Path) -> None:
    config = settings(
        tiny_folder,
        steps=4,
        model={"lora_rank": 2},
        schedule=LAGS["async"],
        observe={"checkpoint_every": 2},
    )
    whole, _ = run(config, tmp_path)
    killed = RunDirectory.create(tmp_path, "run", config)
    with killed_by_ctrl_c():
        runs.train(config, run_dir=killed, progress=Kill(3))
    runs.train(of(config, "local"), run_dir=killed, resume=True, progress=Progress())
    assert_same_run(killed, whole)


@pytest.mark.parametrize("runtime", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_a_run_killed_in_the_midst_of_everything_goes_on(
    runtime: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Checkpoints are written one after the other, so that the kill may strike one half-way."""
    config = of(
        settings(
            tiny_folder,
            steps=30,
            schedule={"lag": 1, "overcommit": 3},
            rollout={"batch": 4, "max_new_tokens": 20},
            observe={"checkpoint_minutes": 1e-4, "progress": "plain"},
            out=str(tmp_path),
        ),
        runtime,
    )
    (tmp_path / "killed.toml").write_text(recipes.dump(config))
    command = [sys.executable, "-m", "stretto", "train", str(tmp_path / "killed.toml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert any(b"step 7/" in line for line in process.stdout)  # until then, or to its end
        process.kill()
    killed = RunDirectory.open(tmp_path / "killed-001")
    assert 0 < checkpoint.newest(killed.checkpoints) < 30
    runs.train(config, run_dir=killed, resume=True, progress=Progress())
    whole, _ = run(of(config, "inline"), tmp_path)
    ours, theirs = weights(killed), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
