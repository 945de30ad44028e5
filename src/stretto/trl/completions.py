"""Answers to held-out prompts, with their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stretto.assembly.models import Overrides, made_ready
from stretto.assembly.roles import make_engine
from stretto.config import Config
from stretto.config.training import token_budget
from stretto.evaluation.answers import completed
from stretto.schedules.rollout import Rollout
from stretto.scoring.models import RewardModelScorer
from stretto.tasks.prompts import render
from stretto.trl.arguments import REWARD_MODEL
from stretto.trl.prompts import TokenTask


def complete(config: Config, given: Overrides, task: TokenTask, most: int) -> list[dict[str, Any]]:
    """Greedy answers to the first prompts, scored.

    Stretto's own engine answers, over the policy where it is: others would have to start first.

    Args:
        given: holds the policy, its tokenizer and the reward model.
        most: prompts answered, at most.
    """
    assert given.actor is not None
    assert given.tokenizer is not None
    tokenizer = given.tokenizer
    own = {"temperature": 0.0, "engine": "torch", "engine_args": {}}
    greedy = config.rollout.model_copy(update=own)
    config = config.model_copy(update={"rollout": greedy})
    actor = made_ready(given.actor, config.model.device)
    model, _ = given.reward_models[REWARD_MODEL]
    budget = token_budget(config.training.microbatch_tokens, next(actor.parameters()).device)
    scorer = RewardModelScorer(
        REWARD_MODEL, made_ready(model, config.model.device), tokenizer, tokenizer, budget
    )
    rollouts = [
        Rollout(i, render(task.row(i), config.task, tokenizer, i), i)
        for i in range(min(most, len(task)))
    ]
    engine = make_engine(config, actor, tokenizer, config.rollout.batch, given.end_tokens)
    list(completed(engine, rollouts))
    scorer.admit([r.response() for r in rollouts])
    scores = scorer.finish([r.id for r in rollouts])
    return [
        {
            "query": r.prompt.text,
            "model response": str(tokenizer.decode(r.tokens)),
            "score": score.scalar,
        }
        for r, score in zip(rollouts, scores, strict=True)
    ]


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*rows[0], show_lines=True)
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row.values()))
    Console().print(table)
