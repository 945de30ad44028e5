"""The recipe 'tiny-turns': its environment, and a run of a few steps that repeats itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stretto import api
from stretto.recipes.tiny_turns import Boxes

SHORT: dict[str, Any] = {
    "steps": 1,
    "warmup_examples": 2000,
    "rollout__batch": 32,
    "observe__samples": 32,
    "observe__progress": "off",
    "algorithm__name": "grpo",
    "rollout__samples_per_prompt": 4,
}


def test_a_box_is_opened_by_its_number_and_what_it_holds_is_said() -> None:
    boxes = Boxes()
    boxes.reset(options={"answer": "3", "holds": "7"})
    assert boxes.step("3") == ("7", 0.5, False, {})
    assert boxes.step("7") == ("", 0.5, True, {})
    boxes.reset(options={"answer": "3", "holds": "7"})
    assert boxes.step("4") == ("?", 0.0, True, {})


def test_a_run_of_episodes_repeats_itself(tmp_path: Path) -> None:
    runs = []
    for out in ("a", "b"):
        result = api.train("tiny-turns", out=str(tmp_path / out), **SHORT)
        file = result.run_dir / "samples.jsonl"
        runs.append([json.loads(line) for line in file.read_text().splitlines()])
    texts = [[(sample["response"], sample["reward"]) for sample in run] for run in runs]
    assert texts[0] == texts[1]
    assert any(len(sample["turns"]) > 1 for sample in runs[0])
