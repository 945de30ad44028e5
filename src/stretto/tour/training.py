"""Part 3: a few iterations of PPO, by the trainer and a recipe that everyone has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

from stretto.api import begin, execute, load_recipe
from stretto.config import Config, recipes
from stretto.observe import RunDirectory, Sample
from stretto.observe.progress import NoProgress, on_stderr
from stretto.saying import Advance, working
from stretto.tour.page import heading, onward, paragraph

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
"""Columns of which is said whether they rose."""


def settings(out: Path, steps: int) -> Config:
    """Return the settings of the run.

    Args:
        out: where it gets its folder.

    Raises:
        ConfigError: there are none.
    """
    return load_recipe(
        RECIPE,
        steps=steps,
        out=str(out),
        model__device="cpu",
        training__epochs=EPOCHS,
        observe__checkpoint_minutes=0.0,
    )


def command() -> str:
    """Return the command that trains as the tour does, for as long as the recipe says."""
    return f"stretto train {RECIPE} --training.epochs {EPOCHS}"


class Lines(NoProgress):
    """A display of one line a step."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def working(self, what: str, total: int = 0) -> AbstractContextManager[Advance]:
        """Tell of work on standard error."""
        return working(on_stderr, what, total)

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Write one line; before the first one the names of the columns."""
        if step == 1:
            self._say(_line("step", [label for label, _, _ in COLUMNS]))
        cells = [f"{stats[metric]:{form}}" for _, metric, form in COLUMNS]
        self._say(_line(f"{step}/{total}", cells))


def train(out: Path, steps: int, progress: NoProgress) -> RunDirectory:
    """Train, and return the run's folder.

    Args:
        out: where it is made.

    Raises:
        ConfigError: there are no steps, or the folder cannot be made.
    """
    begun = begin(settings(out, steps), recipes.name_of(RECIPE))
    execute(begun, progress=progress)
    return begun.run_dir


def page(out: Path, steps: int, say: Callable[[str], None]) -> RunDirectory:
    """Say the part's text while the run goes on, and return the run's folder.

    Args:
        out: where it is made.
        say: gets the text, line by line.
    """
    config = settings(out, steps)
    say(heading("3. A few iterations of PPO"))
    say(
        paragraph(
            f"The recipe '{RECIPE}': a model from scratch learns to spell {config.task.size} short "
            f"words backward, first from {config.warmup_examples:,} examples, then by PPO on "
            f"{config.rollout.batch} responses a step, each batch {config.training.epochs} times. "
            "The reward is the task's own verifier, partial credit counted. KL: nats a response, "
            "to the model before PPO. Clipped: share of tokens at which the ratio was clipped. "
            "Entropy: nats a token."
        )
    )
    say("")
    run = train(out, steps, Lines(say))
    say("\n" + paragraph(verdict(run.read_metrics())))
    say("\n" + onward("ppo", command()))
    return run


def verdict(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Say what rose and what fell from the first third of the steps to the last.

    Args:
        metrics: of each step.
    """
    third = max(1, len(metrics) // 3)
    said = []
    for label, metric, form in COLUMNS:
        if label in JUDGED:
            first = _mean(metrics[:third], metric)
            last = _mean(metrics[-third:], metric)
            moved = "rose" if last > first else "fell" if last < first else "stayed"
            said.append(f"{label} {moved} from {first:{form}} to {last:{form}}")
    steps = f"{third} steps" if third > 1 else "step"
    return f"Means of the first and the last {steps}: {', '.join(said)}."


def _mean(metrics: Iterable[Mapping[str, Any]], name: str) -> float:
    return fmean(step[name] for step in metrics)


def _line(step: str, cells: Sequence[str]) -> str:
    widths = [max(len(label), 7) for label, _, _ in COLUMNS]
    return f"  {step:>6}  " + "  ".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
