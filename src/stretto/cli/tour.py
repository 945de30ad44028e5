"""``stretto tour``: PPO and what it costs, in four parts that run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro

from stretto.errors import ConfigError, nearest
from stretto.observe.progress import on_stderr
from stretto.saying import LOADING, working

PARTS = ("models", "rollout", "training", "placements")
"""The parts by name; their numbers count from 1."""

LEAST_STEPS = 3
"""Fewer steps leave nothing once the first, which warms up, is left out."""


def command(
    parts: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PART")] = (),
    /,
    steps: int = 30,
    out: str = "",
) -> None:
    """Show PPO and its cost in four parts that run on a CPU, in about a minute.

    1 models: the four models, and their memory at production scales. 2 rollout: one rollout phase,
    with shapes. 3 training: a few iterations. 4 placements: data flow, compute and placements of
    that run.

    Args:
        parts: Numbers or names of the parts to show; all without any.
        steps: Batches that parts 3 and 4 train on.
        out: Folder that keeps the run of parts 3 and 4; without one it is removed at the end.
    """
    if steps < LEAST_STEPS:
        raise ConfigError(
            f"--steps {steps}: the tour needs {LEAST_STEPS} or more, to leave the first one out"
        )
    chosen = [_part(word) for word in parts] or list(PARTS)
    with working(on_stderr, LOADING):
        importlib.import_module("stretto.runs")
        from stretto.tour import analysis, models, rollout, training
    with TemporaryDirectory(prefix="stretto-tour-") as scratch:
        runs = Path(out or scratch)
        if "models" in chosen:
            _print(models.page())
        if "rollout" in chosen:
            _print(rollout.page(Path(scratch, "model")))
        if "training" not in chosen and "placements" in chosen:
            _say(f"Part 4 looks at a run of part 3, which is made first: {steps} steps ...\n")
        if "training" in chosen or "placements" in chosen:
            run = training.train(runs, steps)
            if "training" in chosen:
                _print(training.page(run))
            if "placements" in chosen:
                _print(analysis.page(run, kept=bool(out)))


def _part(word: str) -> str:
    """Return the name of a part.

    Raises:
        ConfigError: there is none of this number or name.
    """
    numbers = {str(number): name for number, name in enumerate(PARTS, 1)}
    name = numbers.get(word, word)
    if name not in PARTS:
        raise ConfigError(
            f"there is no part '{word}'. {nearest(word, PARTS)} Or give a number from 1 to "
            f"{len(PARTS)}"
        )
    return name


def _print(texts: Iterator[str]) -> None:
    for text in texts:
        _say(text)


def _say(text: str) -> None:
    print(text, flush=True)
