"""A run of episodes, and what its folder, its display and its report have of them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stretto import runs
from stretto.config import Config, recipes
from stretto.models.load import load_tokenizer
from stretto.observe import RunDirectory
from stretto.observe.progress import PlainProgress
from stretto.observe.report import html_page, load
from stretto.types import CONTEXT
from template_helpers import chatty

WORLD = """
class World:
    def reset(self, **row):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        if self.turns == 2 and len(text) % 2:
            raise ValueError("odd <|im_end|> </script>")
        return f"turn {self.turns}", len(text) % 3 / 2, self.turns == 3, {}
"""


def settings(tiny_folder: Path, folder: Path, preset: str) -> Config:
    (folder / "world.py").write_text(WORLD)
    rows = "".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(16))
    (folder / "rows.jsonl").write_text(rows)
    asked = {"kind": "dataset", "name": str(folder / "rows.jsonl"), "max_prompt_tokens": 200}
    rollout: dict[str, Any] = {"batch": 4, "samples_per_prompt": 2, "max_new_tokens": 400}
    rollout["stop"] = [*"eiotan"]  # else a random policy seldom ends a turn
    sections: dict[str, Any] = {
        "model": {"name": str(chatty(tiny_folder, folder / "chatty")), "dtype": "float32"},
        "task": asked,
        "environment": {"sources": [f"{folder / 'world.py'}:World"], "max_turns": 4},
        "reward": {"sources": ["environment"], "missing_eos": "off"},
        "rollout": rollout,
        "schedule": {"preset": preset},
        "algorithm": {"name": "grpo"},
        "observe": {"samples": 4},
    }
    return recipes.build({"steps": 2, "threads": 1, **sections}, "here")


def lines(file: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("preset", ["sync", "stretto"])
def test_a_run_of_episodes_can_be_looked_at(preset: str, tiny_folder: Path, tmp_path: Path) -> None:
    config = settings(tiny_folder, tmp_path, preset)
    run, shown = RunDirectory.create(tmp_path / "runs", "turns", config), io.StringIO()
    runs.train(config, run_dir=run, progress=PlainProgress(shown))
    assert "  turns " in shown.getvalue()
    assert "  wait_s " in shown.getvalue()

    samples = lines(run.samples_file)
    assert len(samples) == 8
    for sample in samples:
        assert 1 <= len(sample["turns"]) <= 3
        read = sum(piece["tokens"] for piece in sample["pieces"])
        assert read == sample["tokens"] + sample["context"]
        drawn = sum(piece["tokens"] for piece in sample["pieces"] if piece["sampled"])
        assert drawn == sum(turn["tokens"] for turn in sample["turns"]) == sample["tokens"]
        assert all(turn["wait_s"] > 0 for turn in sample["turns"])
        total = sum(turn["reward"] for turn in sample["turns"])
        assert sample["scores"] == {"environment": pytest.approx(total)}
        for before, after in zip(sample["pieces"], sample["pieces"][1:], strict=False):
            assert before["sampled"] != after["sampled"]
            assert before["sampled"] or "turn " in before["text"] or "error" in before["text"]
    for record in lines(run.rollouts_file):
        assert record["oldest_version"] > CONTEXT

    metrics = run.read_metrics()[-1]
    assert metrics["episode/turns_max"] <= 3
    assert metrics["episode/wait_s_mean"] > 0
    assert metrics["timing_s/step"] != metrics["timing_s/environment/step"]
    spans = [span for span in run.trace.read().spans if span.role == "environment"]
    assert {span.name for span in spans} == {"open", "step"}
    assert {"rollout", "turn", "tool"} <= spans[0].attributes.keys()
    page = html_page(load([run.path]))
    assert "waits for the environment" in page
    assert page.count("</script>") == 2  # of the data and of the script


FORGETFUL = """\
{% for m in messages %}<bos>{{ m['role'] }}
{% if m['role'] != 'assistant' or loop.last %}{{ m['content'] }}{% endif %}<eos>
{% endfor %}{% if add_generation_prompt %}<bos>assistant
{% endif %}"""
"""A template that drops what the assistant said before, so that each turn begins a new sample."""

JUDGES = """
import json, pathlib

def note(kind, **seen):
    with open(pathlib.Path(__file__).parent / "seen.jsonl", "a") as file:
        print(json.dumps({"kind": kind, **seen}), file=file)

def trl(prompts, completions):
    for prompt, completion in zip(prompts, completions):
        note("trl", prompt=prompt, completion=completion)
    return [float(len(completion)) for completion in completions]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    note("verl", text=solution_str)
    return 1.0
"""


def test_functions_score_an_episode_of_several_samples_once(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """On the sample that ends it, with all of its turns; the others have no score of theirs."""
    config = settings(tiny_folder, tmp_path, "sync")
    tokenizer: Any = load_tokenizer(tmp_path / "chatty")
    tokenizer.chat_template = FORGETFUL
    tokenizer.save_pretrained(tmp_path / "chatty")
    (tmp_path / "judges.py").write_text(JUDGES)
    rows = [{"prompt": f"Say {n}.", "data_source": "x", "ground_truth": "1"} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trl, verl = (f"{tmp_path / 'judges.py'}:{name}" for name in ("trl", "verl"))
    changes = {
        "steps": 1,
        "reward": {"sources": ["environment", trl, verl], "missing_eos": "off"},
        "observe": {"samples": 99},
    }
    config = recipes.build({**config.model_dump(mode="json"), **changes}, "here")
    run = RunDirectory.create(tmp_path / "runs", "turns", config)
    runs.train(config, run_dir=run, progress=PlainProgress(io.StringIO()))

    episodes: dict[int, list[dict[str, Any]]] = {}
    for sample in lines(run.samples_file):
        episodes.setdefault(sample["episode"], []).append(sample)
    assert len(episodes) == 4
    assert max(map(len, episodes.values())) > 1
    seen = lines(tmp_path / "seen.jsonl")
    completions = [s["completion"] for s in seen if s["kind"] == "trl"]
    texts = [s["text"] for s in seen if s["kind"] == "verl"]
    assert len(completions) == len(texts) == 4
    prompts = [s["prompt"] for s in seen if s["kind"] == "trl"]
    assert {len(prompt) for prompt in prompts} <= {len("Say 1."), len("Say 11.")}
    # Each turn is behind the answer to the one before, and ends before its stop string.
    for completion, text in zip(completions, texts, strict=True):
        roles = [m["role"] for m in completion]
        assert roles[: len(roles) // 2 * 2] == ["assistant", "user"] * (len(roles) // 2)
        last = max(i for i, role in enumerate(roles) if role == "assistant")
        assert text == "\n".join(m["content"] for m in completion[: last + 1])
        said = [m["content"] for m in completion if m["role"] == "assistant"]
        assert not any(letter in turn for turn in said for letter in "eiotan")
    counts = sorted(sum(len(s["turns"]) for s in each) for each in episodes.values())
    assert counts == sorted(sum(m["role"] == "assistant" for m in c) for c in completions)
    lengths = []
    for each in episodes.values():
        *others, last_one = sorted(each, key=lambda s: len(s["prompt"]))
        assert all(s["scores"]["judges.py:trl"] is None for s in others)
        lengths.append(last_one["scores"]["judges.py:trl"])
        environment = last_one["scores"]["environment"]
        assert all(s["reward"] == environment + lengths[-1] + 1.0 for s in each)
    assert sorted(lengths) == sorted(map(len, completions))
    metrics = run.read_metrics()[-1]
    assert metrics["reward/judges.py:trl"] == pytest.approx(sum(lengths) / 4)
    assert metrics["reward/judges.py:verl"] == 1.0


@pytest.mark.parametrize("limits", [[], ["turns"]])
def test_the_reward_of_an_episode_that_used_up_its_turns(
    limits: list[str], tiny_folder: Path, tmp_path: Path
) -> None:
    """Stays by default, which penalises token limits alone; else the penalty is in its place."""
    config = settings(tiny_folder, tmp_path, "sync")
    changes = {
        "steps": 1,
        "environment": {"sources": [f"{tmp_path / 'world.py'}:World"], "max_turns": 2},
        "reward": {"sources": ["environment"], "missing_eos_limits": limits},
    }
    config = recipes.build({**config.model_dump(mode="json"), **changes}, "here")
    run = RunDirectory.create(tmp_path / "runs", "turns", config)
    runs.train(config, run_dir=run, progress=PlainProgress(io.StringIO()))
    samples = [s for s in lines(run.samples_file) if s["ended_by"] == "turns"]
    assert samples
    for sample in samples:
        assert sample["reward"] == (-1.0 if limits else sample["scores"]["environment"])
        assert sample["finish"] == ("length" if limits else "stop")
