"""The Python of the pages, run as it stands or with fewer steps, and runs of their settings."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

import stretto
from docs_helpers import blocks
from run_helpers import lines
from stretto.cli.main import main
from stretto.config import recipes
from stretto.models.tiny import make_tiny

SMALL = (
    *("--steps", "2", "--threads", "1", "--rollout.batch", "4", "--rollout.max-new-tokens", "6"),
    *("--observe.samples", "100", "--observe.checkpoint-minutes", "0"),
)
ASKED, ANSWER = "What is 3 + 4?", "7"
TURNS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def defined(code: str, **names: Any) -> dict[str, Any]:
    """What a block of Python defines."""
    exec(compile(code, "documentation", "exec"), names)
    return names


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """A tiny model that knows conversations."""
    folder = tmp_path / "chat"
    make_tiny(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(folder)
    return folder


def test_from_python_and_scripts_for_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order in which they are read, as each goes on with the runs before it."""
    monkeypatch.chdir(tmp_path)
    rows, watched, stages = blocks("python", "python")
    names = defined(rows)
    steps = [step["objective/scores"] for step in lines(Path("runs/run-001/metrics.jsonl"))]
    assert sum(steps[:3]) / 3 < 0.35
    assert sum(steps[-3:]) / 3 > 0.45
    assert f"{steps[-1]} runs/run-001/model" in capsys.readouterr().out
    result = defined(watched, **names)["result"]
    said = capsys.readouterr().out
    assert f"{result.best.step} {result.best.score} runs/run-002/model-best" in said
    assert [m["step"] for m in result.history if "eval/score" in m] == [0, 2, 4, 6]
    defined(stages)
    assert Path("report.html").is_file()

    grpo, ppo = blocks("coming-from-trl", "python")
    defined(grpo)
    assert recipes.load("grpo/grpo-001").schedule.preset == "oppo"
    scored = lines(Path("grpo/grpo-001/samples.jsonl"))
    for sample in scored:
        accuracy, brevity = (sample["scores"][name] for name in ("accuracy", "brevity"))
        assert brevity == pytest.approx(-len(sample["response"]) / 100)
        assert sample["reward"] == pytest.approx(accuracy + 0.5 * brevity)
    defined(ppo)
    assert Path("ppo/final/model.safetensors").is_file()
    assert recipes.load("ppo/ppo-001").schedule.preset == "oppo"
    assert "model response" in capsys.readouterr().out


def test_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").write_text(blocks("data", "json")[0])
    Path("sums.toml").write_text(blocks("data", "toml")[0])
    assert main(["train", "sums.toml", "--model.name", "tiny", *SMALL]) == 0
    samples = lines(Path("runs/sums-001/samples.jsonl"))
    assert {sample["prompt"] for sample in samples} == {ASKED}
    assert {*samples[0]["scores"]} == {"task"}

    def near(completions: list[str], label: list[int]) -> list[float]:
        return [float(str(right) in text) for text, right in zip(completions, label, strict=True)]

    few = partial(stretto.train, steps=2, rollout__batch=4, observe={"progress": "off"})
    shown = SimpleNamespace(train=few)
    defined(blocks("data", "python")[0], stretto=shown, near=near)
    by_file, by_rows = (recipes.load(f"runs/tiny-00{n}") for n in (1, 2))
    assert (by_file.task.columns["answer"], by_file.reward.sources) == ("answer", ("task",))
    assert by_rows.task.kind == "dataset"
    assert by_rows.warmup_examples == 0


def test_the_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows and settings, with a small model and two steps."""
    monkeypatch.chdir(tmp_path)
    defined(blocks("tutorial", "python")[0])
    text = Path("sums.jsonl").read_text()
    assert len(text.splitlines()) == 224
    assert text.startswith(blocks("tutorial", "json")[0])
    settings = blocks("tutorial", "toml")[0].replace("smollm2-135m", "tiny-chat")
    Path("sums.toml").write_text(settings)
    assert main(["train", "sums.toml", "--steps", "2", "--threads", "1"]) == 0
    assert (
        lines(Path("runs/sums-001/samples.jsonl"))[0]["prompt"].count("You are a calculator") == 1
    )
    assert main(["eval", "runs/sums-001", "--samples", "2"]) == 0
    assert "none of 2 prompts is asked in training" in capsys.readouterr().out


def test_reward_functions() -> None:
    own = defined(blocks("rewards", "python")[0])
    said = ["yes, please", "no"]
    assert asyncio.run(own["polite"](prompts=["?", "?"], completions=said)) == [1, 0]
    score = own["compute_score"]
    assert score("sums", "it is 7", "7") == {"score": 1}
    assert score("sums", "it is 8", "7") == {"score": 0}
    assert own["reward_func"](["3 + 4? 7", "3 + 4? 8"], ["3 + 4?"] * 2, ["7", "7"]) == [1, 0]


@pytest.mark.parametrize(
    ("page", "file", "settings"),
    [
        ("verl", "my_reward.py", "grpo.toml"),
        ("openrlhf", "reward_func.py", "rloo.toml"),
        ("prime-rl", "my_reward.py", "grpo.toml"),
    ],
)
def test_coming_from(
    page: str,
    file: str,
    settings: str,
    chat: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Row, function and settings of a page train together; the rewards are the function's."""
    monkeypatch.chdir(tmp_path)
    name = f"coming-from-{page}"
    (row,), (function,), (table,) = (blocks(name, kind) for kind in ("json", "python", "toml"))
    Path("train.jsonl").write_text(row * 4)
    Path(file).write_text(function)
    Path(settings).write_text(table)
    small = [*SMALL, "--rollout.samples-per-prompt", "2"]
    assert main(["train", settings, "--model.name", str(chat), *small]) == 0
    run = Path("runs") / f"{Path(settings).stem}-001"
    samples = lines(run / "samples.jsonl")
    assert len(samples) == 8
    for sample in samples:
        assert f"user: {ASKED}" in sample["prompt"] or sample["prompt"] == ASKED
        shown = sample["prompt"] if page == "openrlhf" else ""
        assert sample["reward"] == float(ANSWER in shown + sample["response"])
