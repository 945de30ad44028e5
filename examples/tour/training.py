"""Part 3: a few iterations of PPO, by the trainer and a recipe that everyone has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from examples.tour import heading, onward, paragraph
from stretto.api import begin, execute, load_recipe
from stretto.config import recipes
from stretto.observe import Progress, RunDirectory
from stretto.observe.progress import on_stderr
from stretto.saying import Advance, aligned, working

RECIPE = "tiny"
EPOCHS = 4
"""Passes over each batch: with the recipe's one there would be nothing to clip."""

COLUMNS = (
    ("reward", "objective/scores", ".3f"),
    ("policy loss", "loss/policy_avg", ".4f"),
    ("value loss", "loss/value_avg", ".4f"),
    ("KL", "objective/kl", ".3f"),
    ("clipped", "policy/clipfrac_avg", ".1%"),
    ("entropy", "policy/entropy_avg", ".3f"),
    ("seconds", "timing_s/step", ".2f"),
)
"""Label, metric and format of the table's columns; docs/reference/metrics.md explains them."""

JUDGED = ("reward", "KL", "value loss", "entropy")
"""Columns whose rise or fall is summarised."""


class _Steps(Progress):
    """A display that counts steps."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance

    def step(self, *_: object) -> None:
        self._advance(1)


def train(out: Path, steps: int) -> RunDirectory:
    """Train, and return the run's folder in ``out``."""
    config = load_recipe(
        RECIPE,
        steps=steps,
        out=str(out),
        model__device="cpu",
        training__epochs=EPOCHS,
        observe__checkpoint_minutes=0.0,
    )
    begun = begin(config, recipes.name_of(RECIPE))
    with working(on_stderr, "training", steps) as advance:
        execute(begun, progress=_Steps(advance))
    return begun.run_dir


def page(run: RunDirectory) -> Iterator[str]:
    """Yield the text of the part."""
    config, metrics = recipes.load(run.path), run.read_metrics()
    yield heading("3. A few iterations of PPO")
    yield paragraph(
        f"The recipe '{RECIPE}': a model from scratch learns to spell {config.task.size} short "
        f"words backward, first from {config.warmup_examples:,} examples, then by PPO on "
        f"{config.rollout.batch} responses a step, each batch {EPOCHS} times. "
        "The reward is the task's own verifier, partial credit counted. KL: nats a response, to "
        "the model before PPO. Clipped: share of tokens. Entropy: nats a token."
    )
    rows = [["step", *(label for label, _, _ in COLUMNS)]]
    for step in metrics:
        cells = (f"{step[metric]:{form}}" for _, metric, form in COLUMNS)
        rows.append([f"{step['step']}/{config.steps}", *cells])
    yield "\n" + aligned(rows, left=0)
    yield "\n" + paragraph(verdict(metrics))
    yield onward("ppo", f"stretto train {RECIPE} --training.epochs {EPOCHS}")


def verdict(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Summarise what rose and what fell from the first third of the steps to the last."""
    third = max(1, len(metrics) // 3)
    moves = []
    for label, metric, form in (column for column in COLUMNS if column[0] in JUDGED):
        values = [step[metric] for step in metrics]
        first, last = fmean(values[:third]), fmean(values[-third:])
        moved = "rose" if last > first else "fell" if last < first else "stayed"
        moves.append(f"{label} {moved} from {first:{form}} to {last:{form}}")
    steps = f"{third} steps" if third > 1 else "step"
    return f"Means of the first and the last {steps}: {', '.join(moves)}."
