"""``stretto eval``: pass@1, greedy, on a task's held-out rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from stretto import recipes
from stretto.cli.settings import (
    RECIPE_HELP,
    Option,
    check_recipe_is_first,
    check_task,
    leading_recipe,
    parse_with_config,
    trained_model,
)
from stretto.errors import ConfigError

SETTINGS = (
    "seed",
    "threads",
    "task",
    "model.dtype",
    "model.device",
    "model.trust_remote_code",
    "rollout.batch",
    "rollout.max_new_tokens",
    "rollout.stop",
    "rollout.slots",
    "rollout.prefill_tokens",
    "rollout.cuda_graphs",
)
"""What an evaluation depends on, besides the model."""

_DESCRIPTION = (
    "Measure pass@1: the share of greedy answers that the task's own verifier takes for right. "
    "Procedural tasks draw rows with another seed than training; for a file or a hub dataset, name "
    "one (--task.name) or a split (--task.split) that training does not see. Options come after "
    "the recipe."
)


def run(arguments: Sequence[str]) -> int:
    """Evaluate, print the figures, and write them where asked."""
    recipe = leading_recipe(arguments)
    # Without a recipe the parser answers: with the help, or by what it misses.
    start = recipes.load(recipe or "arithmetic")
    config, own = parse_with_config("eval", _DESCRIPTION, arguments, start, _options(), SETTINGS)
    check_recipe_is_first(arguments, own["recipe"])
    check_task(config, own["recipe"])
    if own["samples"] < 1:
        raise ConfigError(f"--samples {own['samples']}: must be 1 or more")
    model = _model(own["model"], own["recipe"], config.model.name)

    from stretto.runtime import inline

    result = inline.evaluate(config, model=model, samples=own["samples"])
    figures = {
        "accuracy": result.accuracy,
        "mean_tokens": result.mean_tokens,
        "ended": result.ended,
        "samples": result.samples,
        "skipped": result.skipped,
    }
    print(f"model        {model}")
    print(f"task         {config.task.kind} {config.task.name}")
    print(f"samples      {result.samples}")
    if result.skipped:
        print(f"left out     {result.skipped} rows with longer prompts than task.max_prompt_tokens")
    if config.task.kind != "reasoning-gym":
        print("rows         as named; whether training saw them is not known here")
    print(f"accuracy     {result.accuracy:.4f}")
    print(f"mean tokens  {result.mean_tokens:.1f}")
    print(f"ended        {result.ended:.4f}")
    if own["out"]:
        record = {"model": model, **figures, "settings": config.model_dump()}
        _write(Path(own["out"]), record)
    return 0


def _options() -> dict[str, Option]:
    return {
        "recipe": Option(tyro.conf.Positional[str], tyro.MISSING, RECIPE_HELP, "RECIPE_OR_RUN"),
        "model": Option(
            str,
            "",
            "What to measure: a known name, a local folder, a hub name, or a run's folder. "
            "Without it: the run's trained model, or the recipe's model before training.",
            "MODEL",
        ),
        "samples": Option(int, 200, "Rows to answer.", "INT"),
        "out": Option(str, "", "Write the figures and settings to this JSON file.", "FILE"),
    }


def _model(asked: str, recipe: str, otherwise: str) -> str:
    if asked:
        return trained_model(asked)
    is_run = recipe not in recipes.names() and Path(recipe).is_dir()
    return trained_model(recipe) if is_run else otherwise


def _write(file: Path, record: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write '{file}': {error}; choose another with --out") from error
