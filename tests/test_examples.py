"""The examples, each run as its first lines say, with small sizes."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from stretto.cli.main import main
from stretto.config import recipes
from stretto.planner.choices import fitted_run
from stretto.planner.fitting import RunMemory, known_shapes
from stretto.planner.memory_model import CACHE, PHASES
from stretto.rollout.vllm.llm import installed
from stretto.runtime.placement import places

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SMOKE = EXAMPLES / "smoke.toml"
VLLM = os.environ.get("STRETTO_VLLM_PYTHON") or (sys.executable if installed() else "")


def train(name: str, out: Path, overrides: Path = SMOKE, *more: str) -> Path:
    """Run a ``.toml`` example with small sizes; the run's folder."""
    options = ["--overrides", str(overrides), "--out", str(out), "--threads", "1", *more]
    assert main(["train", f"examples/{name}.toml", *options]) == 0
    return out / f"{name}-001"


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.open(encoding="utf-8")]


def rewards(run: Path) -> list[float]:
    """The mean reward of each step."""
    return [step["objective/scores"] for step in lines(run / "metrics.jsonl")]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_all_are_listed_fit_on_a_screen_and_say_what_they_need() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for file in (f for f in EXAMPLES.iterdir() if f.is_file() and f.name != "README.md"):
        text = file.read_text()
        assert file.name in listed
        assert len(text.splitlines()) <= 50 or file.suffix == ".ipynb"
        if file.suffix in {".toml", ".py"} and file.name not in {"smoke.toml", "rewards.py"}:
            assert [w for w in ("Shows:", "Needs:", "Run: ") if w not in text] == []


FILES = re.findall(r"\]\(([\w.-]+\.toml)\)", (EXAMPLES / "README.md").read_text())


@pytest.mark.parametrize("file", FILES)
def test_rows_of_the_table_resolve_from_any_folder(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if file == "gpu-16gb-4bit.toml":
        pytest.importorskip("bitsandbytes")
    for folder, at in ((ROOT, "examples/"), (EXAMPLES, ""), (tmp_path, f"{EXAMPLES}/")):
        monkeypatch.chdir(folder)
        options = ["--overrides", f"{at}smoke.toml", "--dry-run"]
        assert main(["train", f"{at}{file}", *options]) == 0


def test_own_rows_and_own_function_in_a_file(tmp_path: Path) -> None:
    run = train("own_data", tmp_path)
    answers = {row["question"]: row["answer"] for row in lines(EXAMPLES / "sums.jsonl")}
    samples = lines(run / "samples.jsonl")
    assert samples
    for sample in samples:
        answer = next(a for question, a in answers.items() if question in sample["prompt"])
        right = re.findall(r"\d+", sample["response"])[-1:] == [answer]
        brief = 1 / (1 + len(sample["response"].split()))
        assert sample["reward"] == pytest.approx(right + 0.5 * brief)


def test_mathematics(tmp_path: Path) -> None:
    run = train("gsm8k", tmp_path)
    questions = {row["question"] for row in lines(EXAMPLES / "word_problems.jsonl")}
    instruction = "Answer in one short sentence."
    for sample in lines(run / "samples.jsonl"):
        assert instruction in sample["prompt"]
        assert any(question in sample["prompt"] for question in questions)
    assert rewards(run) == [0, 0]  # what knows nothing solves nothing


def test_adapters(tmp_path: Path) -> None:
    run = train("lora", tmp_path)
    settings = json.loads((run / "model" / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (16, 32)
    assert (run / "model" / "model.safetensors").is_file()
    assert [step["step"] for step in lines(run / "metrics.jsonl")] == [1, 2]


def test_processes(tmp_path: Path) -> None:
    run = train("processes", tmp_path)
    assert {"learner", "generator"} <= {log.stem for log in (run / "logs").iterdir()}
    staleness = [step["staleness/max"] for step in lines(run / "metrics.jsonl")]
    assert staleness == [0, 1]


def test_a_program(tmp_path: Path) -> None:
    for library in ("openai", "starlette", "uvicorn"):
        pytest.importorskip(library)
    assert len(rewards(train("program", tmp_path / "as-printed"))) == 2
    sizes = SMOKE.read_text().replace("max_new_tokens = 8", "max_new_tokens = 400")
    overrides = tmp_path / "sizes.toml"
    overrides.write_text(sizes + "[environment]\nmax_turn_tokens = 150\n")
    run = train("program", tmp_path, overrides)
    ended = Counter[str]()
    for episode in lines(run / "rollouts.jsonl"):
        ended[episode["ended_by"]] += 1
        turns = episode["turns"]
        assert sum(turn["tokens"] + turn["context"] for turn in turns) == episode["tokens"]
        if episode["ended_by"] == "environment":  # right, by chance, or two tries
            assert episode["reward"] == (0 if len(turns) == 2 else 1)
        if len(turns) == 2:
            asked = "\n*user\nThat is wrong. Try again.*\n*assistant\n"  # *: a mark of ChatML
            assert turns[0]["context"] == len(asked)
    assert set(ended) == {"environment", "turn_tokens"}


@pytest.mark.skipif(not VLLM, reason="vLLM is not installed")
def test_vllm(tmp_path: Path) -> None:
    file = tmp_path / "smoke.toml"
    process = f'[[cluster.processes]]\nroles = ["generator"]\npython = "{VLLM}"\n'
    file.write_text(SMOKE.read_text() + process)
    assert len(rewards(train("vllm", tmp_path, file, "--model.name", "tiny-2-heads"))) == 2


def test_vllms_settings_are_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "examples/vllm.toml", "--dry-run"]) == 0
    assert re.search(r"^ +generator +cpu", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("size", "kind", "parameters"),  # as the models' cards count them
    [(16, "", 494e6), (16, "-4bit", 7616e6), (24, "", 1544e6), (80, "", 7616e6)],
)
def test_settings_for_one_gpu_fit_it_by_the_memory_plan(
    size: int, kind: str, parameters: float, tmp_path: Path
) -> None:
    """By a model's true shape; and they run, with small sizes."""
    name = f"gpu-{size}gb{kind}"
    config = recipes.load(f"examples/{name}.toml")
    shapes, adapters = known_shapes(config)
    assert shapes["actor"].parameters == pytest.approx(parameters, rel=0.001)
    assert (adapters is None) == (name == "gpu-16gb")
    found = places(config, 8, 1)
    fitted = fitted_run(config, found, shapes, 2, adapters, lambda _: size * 10**9)
    (load,) = RunMemory(fitted).loads(found, shapes, 2, adapters)
    assert load.device == "cuda:0"
    assert all(load.phase(name).total() <= 0.9 * size * 10**9 for name in PHASES)
    assert load.held[CACHE] >= config.rollout.slots * config.longest * 10**4
    if config.model.load_in_4bit:
        pytest.importorskip("bitsandbytes")
    assert len(rewards(train(name, tmp_path))) == 2


def script(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a ``.py`` example with small sizes, somewhere else; its names."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, "--smoke"])
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_own_rows_and_own_function_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = script("own_data.py", tmp_path, monkeypatch)
    assert names["brief"](["It is cold.", "warm"], ["cold", "dark"]) == [0.75, 0.5]
    last = rewards(tmp_path / "runs" / "run-001")[-1]
    assert names["result"].stats["objective/scores"] == last
    assert f"reward of the last step: {last}" in capsys.readouterr().out


def test_preferences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = script("preferences.py", tmp_path, monkeypatch)
    run = names["result"].model.parent
    assert f"model:{names['learned'].model}" in (run / "config.toml").read_text()
    assert {tuple(sample["scores"]) for sample in lines(run / "samples.jsonl")} == {("model",)}
    shown = capsys.readouterr().out
    assert f"left out: {names['learned'].held_out.accuracy:.2f}" in shown
    assert "\nbefore [" in shown
    assert "\nafter [" in shown


def test_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells one after another, as a kernel runs them."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert notebook["nbformat"] == 4
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            code = "".join(cell["source"]).replace("SMOKE = False", "SMOKE = True")
            exec(compile(code, "notebook.ipynb", "exec"), names)
    assert (tmp_path / "report.html").is_file()
    assert f"  2  reward {fmean(rewards(names['run'])[1:]):6.3f}" in capsys.readouterr().out
