"""``stretto tour``: PPO and what it costs, in four parts that run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import tyro

from stretto.errors import ConfigError, nearest
from stretto.observe.progress import on_stderr
from stretto.saying import LOADING, silent, working

if TYPE_CHECKING:
    from stretto.observe import RunDirectory

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
    with _folder(out) as (scratch, runs):
        _show(chosen, scratch, runs, steps, kept=bool(out))


def _show(chosen: Sequence[str], scratch: Path, runs: Path, steps: int, *, kept: bool) -> None:
    trained: RunDirectory | None = None
    for name in PARTS:
        if name not in chosen:
            continue
        if name == "models":
            from stretto.tour import models

            _print(models.page())
        elif name == "rollout":
            from stretto.tour import rollout

            _print(rollout.page(scratch / "model"))
        elif name == "training":
            from stretto.tour import training

            trained = training.page(runs, steps, _say)
        else:
            from stretto.tour import analysis

            _print(analysis.page(trained or _recorded(runs, steps), kept))


def _recorded(runs: Path, steps: int) -> RunDirectory:
    from stretto.tour import training

    _say(f"Part 4 looks at a run of part 3, which is made first: {steps} steps ...\n")
    return training.train(runs, steps, training.Lines(silent))


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


@contextmanager
def _folder(out: str) -> Iterator[tuple[Path, Path]]:
    with TemporaryDirectory(prefix="stretto-tour-") as scratch:
        yield Path(scratch), Path(out or scratch)


def _print(texts: Iterator[str]) -> None:
    for text in texts:
        _say(text)


def _say(text: str) -> None:
    print(text, flush=True)
