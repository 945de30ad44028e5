"""Rows and models that a run was started with: a resumed one has the same, or is refused."""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raising import raises
from run_helpers import Notes, lines, run, settings
from stretto import runs
from stretto.errors import StateError
from stretto.models import info
from stretto.models.info import identity
from stretto.models.load import load_causal_lm
from stretto.models.tiny import byte_tokenizer, make_tiny
from stretto.runs.training_loop import Inputs
from stretto.schedules.rollout import Rollout
from stretto.tasks.task import fingerprints
from stretto.types import Prompt


def write_rows(file: Path, **others: str) -> None:
    """Eight rows, of which some may be other ones: ``r3="..."``."""
    rows = [{"prompt": others.get(f"r{i}", f"{i} + 1 ="), "answer": str(i + 1)} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def of_rows(folder: Path, file: Path, **sections: Any) -> Any:
    task = {"kind": "dataset", "name": str(file), "settings": {}, "columns": {"answer": "answer"}}
    return settings(folder, task=task, **sections)


@pytest.mark.parametrize("preset", ["sync", "oppo"])
def test_a_run_whose_rows_were_edited_is_refused(
    preset: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """With oppo, rollouts have tokens already when the run is stopped."""
    file = tmp_path / "sums.jsonl"
    write_rows(file)
    config = of_rows(tiny_folder, file, schedule={"preset": preset})
    run_dir, _ = run(config, tmp_path)
    longer = config.model_copy(update={"steps": 4})
    write_rows(file, r3="3 + 3 =", r6="6 + 6 =")
    with raises(StateError, "other-inputs", f"task.name = '{file}'", ": row 3, row 6. "):
        runs.train(longer, run_dir=run_dir, resume=True, progress=Notes())
    with file.open("a") as added:
        added.write('{"prompt": "8 + 1 =", "answer": "9"}\n')
    with raises(StateError, "other-inputs", ": number of rows (8 then, 9 now). "):
        runs.train(longer, run_dir=run_dir, resume=True, progress=Notes())
    write_rows(file)
    runs.train(longer, run_dir=run_dir, resume=True, progress=Notes())
    assert [m["step"] for m in lines(run_dir.metrics_file)] == [1, 2, 3, 4]


def other_weights(folder: Path) -> None:
    make_tiny(folder, seed=7)


def other_config(folder: Path) -> None:
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, "rms_norm_eps": 0.5}))


def classifier(tiny_folder: Path, folder: Path) -> Path:
    """A reward model, which a critic may start from, too."""
    import torch

    from stretto.models.heads import reward_model_from

    lm = load_causal_lm(tiny_folder, torch.float32, torch.device("cpu"))
    model: Any = reward_model_from(lm, seed=3)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("which", "change", "said"),
    [
        ("model.name", other_weights, "model.safetensors"),
        ("model.name", other_config, "config.json"),
        ("critic.init", other_config, "config.json"),
        ("reward.sources", other_config, "config.json"),
    ],
)
def test_a_run_whose_model_is_another_is_refused(
    which: str, change: Callable[[Path], None], said: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """KL to another reference, rewards of another model: without a word before."""
    named: dict[str, Any]
    if which == "model.name":
        folder = Path(shutil.copytree(tiny_folder, tmp_path / "m"))
        named, name = {"model": {"name": str(folder)}}, str(folder)
    else:
        folder = classifier(tiny_folder, tmp_path / "m")
        critic = which == "critic.init"
        named = {"critic": {"init": str(folder)}} if critic else {}
        named |= {} if critic else {"reward": {"sources": (f"model:{folder}",)}}
        name = str(folder) if critic else f"model:{folder}"
    config = settings(tiny_folder, steps=1, **named)
    run_dir, _ = run(config, tmp_path)
    change(folder)
    longer = config.model_copy(update={"steps": 2})
    with raises(StateError, "other-inputs", f"{which} = '{name}'", f": {said}. "):
        runs.train(longer, run_dir=run_dir, resume=True, progress=Notes())


def test_plain_facts_are_told_with_both_values() -> None:
    before = {"task": {"number of rows": "5", "reasoning-gym": "0.1.19", "row 0": "sha256:1"}}
    now = {"number of rows": "5", "reasoning-gym": "0.1.20", "row 0": "sha256:2"}
    with raises(StateError, "other-inputs", ": reasoning-gym (0.1.19 then, 0.1.20 now). "):
        Inputs(before).take("task", now)
    marks = {f"row {i}": f"sha256:{i}" for i in range(9)}
    others = {name: f"{mark}0" for name, mark in marks.items()}
    with raises(StateError, "other-inputs", ": row 0, row 1, row 2, row 3 and 5 more. "):
        Inputs({"task": marks}).take("task", others)


# -- fingerprints --------------------------------------------------------------------------------


def test_long_files_are_known_by_size_beginning_end_and_blocks_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("WHOLE", 1000), ("HEAD", 100), ("BLOCKS", 4), ("BLOCK", 10)):
        monkeypatch.setattr(info, name, size)
    (tmp_path / "config.json").write_text('{"a": 1, "transformers_version": "5.1"}')
    file, content = tmp_path / "model.safetensors", bytes(range(256)) * 16

    def mark(**changed: int) -> str:
        new = bytearray(content)
        for at in changed.values():
            new[at] ^= 1
        file.write_bytes(new)
        return identity(str(tmp_path), False, print)["model.safetensors"]

    known = mark()
    assert mark() == known
    for seen in (0, 99, 100 + 3996 // 4 - 10, 100 + 3996 // 4 - 1, 100 + 3996 // 2 - 1, 4095):
        assert mark(at=seen) != known, seen
    assert mark(at=2000) == known  # between two blocks
    file.write_bytes(content[:1000])
    whole = identity(str(tmp_path), False, print)["model.safetensors"]
    file.write_bytes(content[:500] + b"x" + content[501:1000])
    assert identity(str(tmp_path), False, print)["model.safetensors"] != whole


def test_a_config_is_the_same_whoever_wrote_it(tmp_path: Path) -> None:
    marks = []
    for text in ('{"a": 1, "transformers_version": "5.1"}', '{ "a": 1 }', '{"a": 2}'):
        (tmp_path / "config.json").write_text(text)
        marks.append(identity(str(tmp_path), False, print)["config.json"])
    assert marks[0] == marks[1] != marks[2]


def test_a_model_of_the_hub_is_known_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = {"owner/name": SimpleNamespace(_commit_hash="93efa2f")}
    monkeypatch.setattr(info, "load_config", lambda name, trust: loaded[name])
    assert identity("owner/name", False, print) == {"commit": "93efa2f"}


def test_rows_have_a_fingerprint_each_or_one_a_block() -> None:
    def named(rows: int, **others: int) -> dict[str, str]:
        return fingerprints(({"n": others.get(f"r{i}", i)} for i in range(rows)), rows)

    assert [*named(3)] == ["row 0", "row 1", "row 2"]
    blocks = named(1000)
    assert len(blocks) == 250
    assert [*blocks][:2] == ["rows 0 to 3", "rows 4 to 7"]
    changed = named(1000, r5=0, r999=1)
    assert [n for n in blocks if blocks[n] != changed[n]] == ["rows 4 to 7", "rows 996 to 999"]
    assert [*named(257)][-1] == "row 256"


def test_a_rollout_goes_on_with_its_own_prompt_alone() -> None:
    rollout = Rollout(4, Prompt(2, (7, 8), "7 8"), 4, tokens=array("i", [1, 2]))
    state = rollout.state_dict()
    assert Rollout.from_state(state, Prompt(2, (7, 8), "7 8")).tokens.tolist() == [1, 2]
    with pytest.raises(StateError, match=r"rollout 4 has 2 tokens of .* another prompt than '7 9'"):
        Rollout.from_state(state, Prompt(2, (7, 9), "7 9"))
    del state["prompt_mark"]  # as an earlier version wrote it
    assert Rollout.from_state(state, Prompt(2, (7, 9), "7 9")).tokens.tolist() == [1, 2]
