"""README: its Python and its commands are run, small; what it lists is compared with the code."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.cli.main import main
from stretto.config import KNOBS, PRESETS, recipes
from stretto.config.algorithm import ALGORITHMS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LONGER = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
"""The page with README's longest tables."""
BADGES = re.findall(r"\((docs/images/badge-.*?\.svg)\)", README)
(PYTHON,) = re.findall(r"```python\n(.*?)```", README, re.S)


def section(title: str, page: str = README) -> str:
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


SLOW = ("stretto compare tiny",)  # a process for each run; tests/observe/test_compare.py has it
COMMANDS = [
    command
    for line in re.findall(r"^    (stretto .*?)(?:  +#.*)?$", section("Commands", LONGER), re.M)
    for command in line.split(" && ")
]

QUICK = "--steps 2 --rollout.batch 4 --rollout.max-new-tokens 4 --threads 1 --warmup-examples 0"
SMALL = {
    "train examples/own_data.toml": "--overrides examples/smoke.toml --threads 1",
    "train --resume": "--steps 3",
    "train calculator": "--dry-run",  # a real model
    "train tiny": QUICK,
    "train tiny --pipeline": QUICK + " --pipeline.seconds 1 --pipeline.micro-batches 2",
    "generate": "--max-new-tokens 4",
    "chat": "--max-new-tokens 4",
    "eval": "--samples 4",
    "report": "",
    "watch": "",
    "compare --sim": "--variants sync,oppo --seeds 0 --steps 3",
    "compare tiny": QUICK + " --variants sync --seeds 0",
    "plan": "--gpus 2 --model-shape qwen2.5-0.5b",
    "sft": "--steps 1 --batch 2 --data.size 8 --measure-every 0 --model.name tiny --threads 1",
    "reward": "--steps 1 --batch 2 --data.size 8 --model.name tiny --threads 1",
    "align": "--dry-run",  # tests/api/test_align.py runs it
    "recipes": "",
    "doctor": "",
}
"""Options behind a command of README that make it a matter of seconds."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder like a clone in which two runs of 'tiny' have ended."""
    folder, before = tmp_path_factory.mktemp("clone"), Path.cwd()
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    os.chdir(folder)
    try:
        for _ in range(2):
            assert main(["train", "tiny", *QUICK.split()]) == 0
        yield folder
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[pytest.mark.slow] * c.startswith(SLOW)) for c in COMMANDS],
)
def test_commands_run(command: str, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # tests/observe/test_report.py has what is served.
    monkeypatch.setattr("stretto.observe.report.RunServer.serve_forever", lambda _: None)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))  # what a chat reads
    _, *arguments = shlex.split(command)
    said = " ".join(arguments)
    options = SMALL[max((name for name in SMALL if said.startswith(name)), key=len)]
    assert main([*arguments, *options.split()]) == 0


def test_the_commands_are_those_that_there_are() -> None:
    from stretto.cli.main import COMMANDS as KNOWN

    assert {command.split()[1] for command in COMMANDS} <= set(KNOWN)
    assert len(COMMANDS) >= 18


def run_block(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The block's samples, and whether they have the scores that it gives."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    (run,) = (folder / "runs").iterdir()
    assert (run / "model" / "model.safetensors").is_file()
    answers = {row["prompt"]: row["answer"] for row in names["rows"]}
    samples = [json.loads(line) for line in (run / "samples.jsonl").open()]
    for sample in samples:
        (answer,) = [a for prompt, a in answers.items() if prompt in sample["prompt"]]
        right = answer in sample["response"]
        assert sample["reward"] == pytest.approx(right - len(sample["response"]) / 100)
    assert {sample["step"] for sample in samples} <= {1, 2, 3}
    return samples


def test_six_lines_train_ones_own_model_on_ones_own_rows(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As printed, but with an untrained model for chats."""
    from transformers import AutoModelForCausalLM

    from stretto.models.load import load_tokenizer

    assert len([line for line in PYTHON.splitlines() if line]) == 6
    auto: Any = AutoModelForCausalLM
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    for part in (auto.from_pretrained(tiny_folder), tokenizer):
        part.save_pretrained(tmp_path / "my-model")
    code = PYTHON.replace("smollm2-135m", "my-model")
    assert code != PYTHON
    assert run_block(code, tmp_path, monkeypatch)


@pytest.mark.slow
def test_six_lines_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_block(PYTHON, tmp_path, monkeypatch)


# -- what it says --------------------------------------------------------------------------------


def test_it_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.splitlines()) <= 200
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []
    titles = {title.lower() for title in re.findall(r"^#+ (.*)", README, re.M)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", README)) <= titles


def test_badges_are_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [c.rpartition(" ")[2] for c in project["classifiers"] if "Python :: 3." in c]
    shown = [re.findall(r">([^<>]+)</text>", (ROOT / badge).read_text()) for badge in BADGES]
    licence = project["license"].replace("-", " ")
    assert shown == [["licence", licence], ["Python", " | ".join(versions)]]


def test_the_first_run_is_the_default_recipe() -> None:
    shown = re.findall(r"^step \d+/(\d+) ", section("A first run"), re.M)
    assert {int(steps) for steps in shown} == {recipes.load("arithmetic").steps}
    assert "RECIPE ?= arithmetic" in (ROOT / "Makefile").read_text()


def test_the_installation_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = re.findall(r'pip install "(torch[^"]*)"', README)
    assert torch in project["dependencies"]
    named = section("Install").partition("Extras,")[2]
    extras = re.findall(r"`([\w-]+)`", named) + re.findall(r"\[(\w+)\]'", named)
    assert set(extras) <= project["optional-dependencies"].keys()


def test_features_are_those_of_the_code() -> None:
    rows = dict(re.findall(r"^\| ([\w, ]+?) \| (.*?) \|", section("Features", LONGER), re.M))
    listed = re.sub(r"\(.*?\)|\[.*", "", rows["algorithms"]).lower()
    found = {name.strip(" ;").replace(" ", "-") for name in listed.split(",")}
    assert found == set(ALGORITHMS)
    assert set(re.findall(r"`(\w+)`", rows["overlap"])) == set(KNOBS)
    assert set(re.findall(r"`(\w+)`", rows["runtimes"])) == {"inline", "local", "ray"}
    (presets,) = re.findall(r"# overlap: (.*)", LONGER)
    assert presets.split(", ") == list(PRESETS)


def test_the_number_of_model_types_is_that_of_the_models_page() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    counts = [int(n) for n in re.findall(r"^\| .*? \| (\d+) \| ", page, re.M)]
    (swept,) = re.findall(r"(\d+ of \d+) types of configs", section("Features", LONGER))
    assert swept == f"{counts[0]} of {sum(counts)}"
