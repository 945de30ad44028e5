"""Prompts of an evaluation, and the share of them that training asks too.

Rows are told apart by what they ask (:mod:`stretto.tasks.base`), never by seed or place.
"""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

from stretto.assembly.models import Overrides
from stretto.assembly.parts import open_prompts
from stretto.config import Config
from stretto.errors import TaskError
from stretto.saying import silent
from stretto.tasks.base import content, is_held_out
from stretto.tasks.prompts import PromptSource, all_too_long
from stretto.tasks.tables import SUFFIXES
from stretto.types import Prompt

SEED = 1000
"""Added to the seed of a procedural task for evaluation, which draws rows of its own. They may ask
what training's rows ask: what holds a prompt out is ``task.held_out``."""

PATIENCE = 2000
"""Rows of a procedural task (over the share held out) without a new prompt, after which it is taken
to have no others. One of 200 equally frequent prompts is missed with a probability of 4e-5."""


def measured_on(config: Config) -> Config:
    """Return settings under which a task gives the rows that an evaluation reads."""
    task = config.task
    if task.is_procedural:
        changes = {"task": task.model_copy(update={"size": 0}), "seed": config.seed + SEED}
        return config.model_copy(update=changes)
    if not task.held_out_rows:
        return config
    is_file = Path(task.held_out_rows).suffix in SUFFIXES
    rows = {"name" if is_file else "split": task.held_out_rows, "size": 0, "held_out": 0.0}
    if is_file:
        rows["split"] = "train"
    return config.model_copy(update={"task": task.model_copy(update=rows)})


def describe_rows(read: Config) -> str:
    """Describe, for people, the rows that settings from :func:`measured_on` read."""
    task = read.task
    if task.is_procedural:
        where = f"{task.name}, seed {read.seed}"
    elif Path(task.name).suffix in SUFFIXES:
        where = task.name
    else:
        where = f"{task.name}, split '{task.split}'"
    share = task.held_out_share
    return f"{where}; the {share:.0%} of its prompts that are held out" if share else where


def questions(
    read: Config, source: PromptSource, count: int, trained: Config
) -> tuple[list[Prompt], dict[str, Any]]:
    """Return the first prompts of an evaluation, at most ``count``, in its seeded order.

    A procedural task gives each prompt once, other tasks as often as it is there. Beside them are
    the facts about them that an evaluation's result has. Raises TaskError if no row is held out, or
    all prompts are longer than ``task.max_prompt_tokens``.

    Args:
        read: settings from :func:`measured_on`.
        source: their prompts.
        trained: settings of what the policy is, or is to be, trained on.
    """
    limit, share = read.task.max_prompt_tokens, read.task.held_out_share
    procedural, rows = read.task.is_procedural, len(source.task)
    prompts, contents, too_long = list[Prompt](), list[str](), list[int]()
    known, found_at, patience = set[str](), 0, PATIENCE / (share or 1)
    for place in range(rows):
        if len(prompts) == count or (procedural and place - found_at > patience):
            break
        row = source.row_by_id(place)
        asks = content(row)
        if (share and not is_held_out(row, share)) or (procedural and asks in known):
            continue
        known.add(asks)
        found_at = place
        prompt = source.prompt_by_id(place)
        if len(prompt.tokens) > limit:
            too_long.append(len(prompt.tokens))
        else:
            prompts.append(prompt)
            contents.append(asks)
    if too_long and not prompts:
        raise all_too_long(len(too_long), min(too_long), limit)
    if not prompts:
        raise TaskError(
            f"task.held_out = {share} holds out none of the {rows} rows of '{read.task.name}': too "
            "few prompts are different. Raise it, or name rows of their own",
            "none-held-out",
        )
    facts = {"rows": describe_rows(read), "skipped": len(too_long), "distinct": len(set(contents))}
    try:
        seen = _asked_in_training(trained, Overrides(tokenizer=source.tokenizer))
    except TaskError as error:
        return prompts, {**facts, "overlap": None, "seen": f"not known: {error}"}
    both, every = sum(asks in seen for asks in contents), len(contents)
    said = f"{both} of {every} prompts ({both / every:.1%}) are asked in training"
    none = f"none of {every} prompts is asked in training"
    return prompts, {**facts, "overlap": both / every, "seen": said if both else none}


def _asked_in_training(config: Config, overrides: Overrides) -> set[str]:
    """Return the contents of the prompts that training asks, too long ones included."""
    if not config.task.name:
        raise TaskError("the settings name no rows to train on")
    r = config.rollout
    responses = config.steps * r.batch + config.most_in_flight
    source = open_prompts(config, overrides, silent)
    drawn = islice(source.ids(), -(-responses // r.samples_per_prompt))
    warmed_up = islice(source.ids(backwards=True), config.warmup_examples)
    return {content(source.row_by_id(i)) for i in chain(drawn, warmed_up)}
