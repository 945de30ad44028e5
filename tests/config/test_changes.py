"""One rule for settings that a file, an option or an argument changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import stretto
from raising import raises
from stretto.cli.train import parse
from stretto.config import Config, changes, recipes
from stretto.errors import ConfigError

Change = Callable[..., Config]

ROWS = {"kind": "dataset", "name": "mine.jsonl"}


def by_file(recipe: str, task: dict[str, Any], folder: Path) -> Config:
    file = folder / "changes.toml"
    file.write_text(tomli_w.dumps({"task": task}))
    return parse([recipe, "--overrides", str(file)])[0]


def by_options(recipe: str, task: dict[str, Any], folder: Path) -> Config:
    tables = {key: value if isinstance(value, dict) else {} for key, value in task.items()}
    options = [
        [f"--task.{key}", *([f"{k}={v}" for k, v in tables[key].items()] or [str(value)])]
        for key, value in task.items()
    ]
    return parse([recipe, *chain(*options)])[0]


def by_arguments(recipe: str, task: dict[str, Any], folder: Path) -> Config:
    return stretto.load_recipe(recipe, **{f"task__{key}": value for key, value in task.items()})


@pytest.fixture(params=[by_file, by_options, by_arguments])
def change(request: pytest.FixtureRequest, tmp_path: Path) -> Change:
    return lambda recipe, **task: request.param(recipe, task, tmp_path)


def test_a_task_of_another_kind_drops_the_rest_of_its_section(change: Change) -> None:
    before = recipes.load("arithmetic").task
    assert before.settings
    assert before.held_out
    assert before.system
    task = change("arithmetic", **ROWS).task
    fresh = type(task)(**ROWS, chat=before.chat, max_prompt_tokens=before.max_prompt_tokens)
    assert task == fresh
    kept = change("arithmetic", **ROWS, size=7, extract="last_number").task
    assert (kept.size, kept.extract, kept.settings) == (7, "last_number", {})


def test_a_warm_up_on_the_former_tasks_answers_goes_with_it(change: Change) -> None:
    assert change("tiny", **ROWS).warmup_examples == 0
    assert change("tiny", **ROWS, columns={"answer": "answer"}).warmup_examples == 4500
    assert change("tiny", **ROWS, columns={"demonstration": "shown"}).warmup_examples == 4500
    assert change("tiny", size=100).warmup_examples == 4500


def test_other_rows_drop_what_belonged_to_the_former_ones(change: Change) -> None:
    before = recipes.load("posts").task
    task = change("posts", name="mine.jsonl").task
    assert (task.held_out, task.size, task.split) == (0, 0, "train")
    assert task.columns == before.columns
    assert change("posts", name="mine.jsonl", held_out=0.5).task.held_out == 0.5
    assert change("posts", name=before.name).task == before


def test_the_command_line_comes_after_the_file(tmp_path: Path) -> None:
    file = tmp_path / "changes.toml"
    file.write_text('steps = 7\n[rollout]\nengine = "vllm"\nbatch = 8\n')
    config, _ = parse(["tiny", "--overrides", str(file), "--runtime", "local", "--steps", "3"])
    assert (config.steps, config.rollout.batch, config.runtime) == (3, 8, "local")


def test_tables_that_are_values_are_replaced_and_sections_merged() -> None:
    base = {"task": {"settings": {"a": 1}, "size": 3}, "steps": 1}
    given = {"task": {"settings": {"b": 2}}}
    assert changes.merged(base, given) == {"task": {"settings": {"b": 2}, "size": 3}, "steps": 1}


def test_a_difference_is_what_makes_one_of_the_other() -> None:
    one = recipes.load("tiny")
    other = changes.changed(one, {"steps": 9, "training": {"lr": 1.0}}, "a test")
    before, after = one.model_dump(), other.model_dump()
    assert changes.difference(before, after) == {"steps": 9, "training": {"lr": 1.0}}
    assert changes.difference(before, before) == {}


def test_a_file_is_checked_together_with_the_options_behind_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[reward]\nsources = ["environment"]\n')
    config, _ = parse([str(file), "--environment.sources", "envs.py:Guess"])
    assert config.environment.sources == ("envs.py:Guess",)
    assert stretto.load_recipe(file, environment__sources=["envs.py:Guess"]) == config
    with raises(ConfigError, "environment-without-source", f"{file}: "):
        parse([str(file)])
    options = ["--environment.sources", "envs.py:Guess", "--rollout.top-k", "3"]
    with raises(ConfigError, "truncated-sampling", "command line: rollout.top_k = 3"):
        parse([str(file), *options])


def test_a_list_is_given_once() -> None:
    config, _ = parse(["arithmetic", "--environment.sources", "a.py:f", "b.py:g"])
    assert config.environment.sources == ("a.py:f", "b.py:g")
    again = ["--environment.sources", "a.py:f", "--environment.sources=b.py:g"]
    with raises(ConfigError, "option-repeated", "--environment.sources A B"):
        parse(["arithmetic", *again])
