"""How well virtual time predicts a real run: runs of 'stretto train', against themselves.

python benchmarks/simulated.py --replay RUN ...
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _shared import parse
from stretto.config import recipes
from stretto.planner.replay import LEAST_STEPS, WARM_STEPS, predict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replay", nargs="+", type=Path, metavar="RUN", required=True)
    args = parse(parser, {"replay": []})
    if not args.smoke:
        replay(args.replay)
        return
    with tempfile.TemporaryDirectory() as scratch:
        replay([recorded(Path(scratch))])


def recorded(out: Path) -> Path:
    """The folder of a short run, for ``--smoke``."""
    from stretto.api import train

    small: dict[str, Any] = {
        "steps": WARM_STEPS + LEAST_STEPS,
        "warmup_examples": 0,
        "rollout__batch": 4,
        "out": str(out),
    }
    return train("tiny", observe__progress="off", **small).model.parent


def replay(runs: Sequence[Path]) -> None:
    """Seconds a step as measured, and as the simulator has them after calibration; by phase."""
    found = [(path, predict(path)) for path in runs]
    print("| run | schedule | measured | predicted | ratio |")
    print("|---|---|---|---|---|")
    for path, prediction in found:
        preset, step = recipes.load(path).schedule.preset, prediction.phases[-1]
        print(
            f"| {path.name} | {preset} | {step.measured_s:.4f} s "
            f"| {step.predicted_s:.4f} s | {step.ratio or 0:.2f} |",
            flush=True,
        )
    for path, prediction in found:
        print(f"\n{path.name}: {prediction.title}\n{prediction.table()}")


if __name__ == "__main__":
    main()
