"""Part 3: a few iterations of PPO, by the trainer and a recipe that everyone has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

from stretto.api import begin, execute, load_recipe
from stretto.config import recipes
from stretto.observe import Progress, RunDirectory, Sample
from stretto.observe.progress import on_stderr
from stretto.saying import Advance, working
from stretto.tour import heading, onward, paragraph

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
"""Columns whose rise or fall is told."""


class Lines(Progress):
    """A display of one line a step."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def working(self, what: str, total: int = 0) -> AbstractContextManager[Advance]:
        """Show work on standard error."""
        return working(on_stderr, what, total)

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Write one line; before the first one the names of the columns."""
        labels = [label for label, _, _ in COLUMNS]
        rows = [[f"{step}/{total}", *(f"{stats[name]:{form}}" for _, name, form in COLUMNS)]]
        for first, *cells in ([["step", *labels]] if step == 1 else []) + rows:
            padded = (
                f"{cell:>{max(len(label), 7)}}" for cell, label in zip(cells, labels, strict=True)
            )
            self._say(f"  {first:>6}  " + "  ".join(padded))


def train(out: Path, steps: int, progress: Progress) -> RunDirectory:
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
    execute(begun, progress=progress)
    return begun.run_dir


def page(out: Path, steps: int, say: Callable[[str], None]) -> RunDirectory:
    """Say the part's text line by line while the run goes on; return its folder in ``out``."""
    config = load_recipe(RECIPE)
    say(heading("3. A few iterations of PPO"))
    say(
        paragraph(
            f"The recipe '{RECIPE}': a model from scratch learns to spell {config.task.size} short "
            f"words backward, first from {config.warmup_examples:,} examples, then by PPO on "
            f"{config.rollout.batch} responses a step, each batch {EPOCHS} times. "
            "The reward is the task's own verifier, partial credit counted. KL: nats a response, "
            "to the model before PPO. Clipped: share of tokens. Entropy: nats a token."
        )
    )
    say("")
    run = train(out, steps, Lines(say))
    say("\n" + paragraph(verdict(run.read_metrics())))
    say(onward("ppo", f"stretto train {RECIPE} --training.epochs {EPOCHS}"))
    return run


def verdict(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Say what rose and what fell from the first third of the steps to the last."""
    third = max(1, len(metrics) // 3)
    told = []
    for label, metric, form in (column for column in COLUMNS if column[0] in JUDGED):
        first, last = (
            fmean(step[metric] for step in part) for part in (metrics[:third], metrics[-third:])
        )
        moved = "rose" if last > first else "fell" if last < first else "stayed"
        told.append(f"{label} {moved} from {first:{form}} to {last:{form}}")
    steps = f"{third} steps" if third > 1 else "step"
    return f"Means of the first and the last {steps}: {', '.join(told)}."
