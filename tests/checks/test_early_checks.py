"""What is found before torch is imported, where it is not a matter of the command line alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from raising import raises
from stretto.checks import check_run, preflight, user_functions
from stretto.config import Config, changes, recipes
from stretto.config.sections import reward_source
from stretto.errors import ConfigError
from stretto.machine import free_memory
from stretto.planner.fitting import RunMemory, plan_for

ROWS = '{"prompt": "a", "answer": "b"}\n' * 3


def tiny(**settings: object) -> Config:
    return changes.changed(recipes.load("tiny"), settings, "a test")


def test_what_is_checked_is_opened_once(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(ROWS)
    config = tiny(task={"kind": "dataset", "name": str(file), "columns": {"answer": "answer"}})
    task = check_run(config)
    assert task is not None
    assert [row.reference for row in map(task.row, range(len(task)))] == ["b"] * 3


WHOLE = [
    "def f(completions): ...",
    "async def f(completions, **columns): ...",
    "def f(prompts, completions, answer): ...",
    "def f(completions, answer=None, solution=None): ...",
    # What only running the file can tell is left to its process.
    "from functools import partial\nf = partial(print)",
    "from json import dumps as f",
    "from json import *",
    "globals()['f'] = print",
    "def wrapped(g): ...\n@wrapped\ndef f(x): ...",
    "class f:\n    def __call__(self, completions): ...",
    "if True:\n    def f(completions): ...",
    "import beside\ndef f(completions): ...",
]
WRONG: list[tuple[str, str | None, str]] = [
    ("def f(completions, *, solution): ...", None, "dataset: solution"),
    ("def f(data_source, solution_str, ground_truth): ...", None, "dataset: data_source"),
    ("def f(queries, prompts, labels): ...", None, "dataset: label"),
    ("def f(completions, /): ...", None, "signature"),
    ("try:\n    import nosuch\nexcept ImportError:\n    def f(x, y): ...", None, "signature"),
    ("def g():\n    import nosuch\n    def f(): ...", None, "'f'"),
    ("import nosuch.inner\ndef f(completions): ...", "reward-import-missing", "'nosuch'"),
    ("def f(completions)", "reward-file-syntax", "line 1"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("")
    return tmp_path / "rewards.py"


@pytest.mark.parametrize("text", WHOLE)
def test_reward_functions_are_read_without_running_them(file: Path, text: str) -> None:
    file.write_text(f"{text}\nraise SystemExit('it ran')\n")
    user_functions.check(reward_source(f"{file}:f"), ["prompt", "answer"])


@pytest.mark.parametrize(("text", "code", "fact"), WRONG)
def test_wrong_reward_functions_are_refused_without_running_them(
    file: Path, text: str, code: str | None, fact: str
) -> None:
    file.write_text(f"{text}\nraise SystemExit('it ran')\n")
    with raises(ConfigError, code, fact):
        user_functions.check(reward_source(f"{file}:f"), ["prompt", "answer"])


def test_a_run_that_fits_is_not_refused_and_one_that_does_not_says_what_takes_less() -> None:
    config = tiny()
    needed = plan_for(config.model, config.algorithm, config.reward).mixed.total()
    RunMemory(config).require(needed, "here")
    # Actor and critic 16 bytes a parameter, the reference 4; without a critic, and with adapters.
    facts = ("'tiny' takes 4.147 MB", "actor 1.843 MB", "here has 4.147 MB free", "rloo")
    with raises(ConfigError, None, *facts):
        RunMemory(config).require(needed - 1, "here")
    rloo = tiny(algorithm={"name": "rloo"}, rollout={"samples_per_prompt": 2})
    assert "rloo" not in str(refusal(rloo))
    assert "lora" not in str(refusal(tiny(model={"lora_rank": 2})))


def refusal(config: Config) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        RunMemory(config).require(0, "here")
    return caught.value


def test_free_memory_is_the_machines_or_less() -> None:
    import psutil

    assert 0 < free_memory() <= psutil.virtual_memory().total


def test_a_dataset_that_was_fetched_needs_no_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "datasets--owner--rows").mkdir()
    preflight.check_dataset("owner/rows")
