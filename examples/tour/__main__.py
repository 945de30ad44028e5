"""PPO and its costs, in four parts that run: ``python -m examples.tour`` in the root of a clone.

1 models: the four models, and their memory at production scales. 2 rollout: one rollout phase, with
shapes. 3 training: a few iterations. 4 placements: data flow, compute and placements of that run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from examples.tour import analysis, models, rollout, training

PARTS = ("models", "rollout", "training", "placements")
"""The parts by name; their numbers count from 1."""

LEAST_STEPS = 3
"""The first step warms up and is left out, so at least two must follow it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Show the parts that the command line asks for."""
    parser = argparse.ArgumentParser("python -m examples.tour", description=__doc__)
    names = {str(number): name for number, name in enumerate(PARTS, 1)}
    parser.add_argument("parts", nargs="*", metavar="PART", help="number or name; default: all")
    parser.add_argument("--steps", type=int, default=30, help="steps of parts 3 and 4 (default 30)")
    parser.add_argument("--out", default="", help="folder that keeps the run of parts 3 and 4")
    options = parser.parse_args(arguments)
    chosen = [names.get(part, part) for part in options.parts] or PARTS
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"unknown part {min(unknown)!r}; the parts are {', '.join(PARTS)}, or 1 to 4")
    if options.steps < LEAST_STEPS:
        parser.error(f"--steps must be at least {LEAST_STEPS}, because the first step is left out")
    with TemporaryDirectory(prefix="stretto-tour-") as scratch:
        if "models" in chosen:
            _print(models.page())
        if "rollout" in chosen:
            _print(rollout.page(Path(scratch, "model")))
        if "training" in chosen or "placements" in chosen:
            if "training" not in chosen:
                _print([f"Part 4 needs a run of part 3: {options.steps} steps ...\n"])
            run = training.train(Path(options.out or scratch), options.steps)
            if "training" in chosen:
                _print(training.page(run))
            if "placements" in chosen:
                _print(analysis.page(run, kept=bool(options.out)))


def _print(texts: Iterator[str] | Sequence[str]) -> None:
    for text in texts:
        print(text, flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
