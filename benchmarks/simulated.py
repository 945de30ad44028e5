"""How well virtual time predicts a real run: runs of 'stretto train', against themselves.

python benchmarks/simulated.py --replay RUN ...
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from _shared import parse
from stretto.observe import RunDirectory
from stretto.runtime.sim.replay import Recording
from stretto.runtime.sim.simulate import simulate

SKIPPED = 3
"""First steps left out: they warm up."""


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
        "steps": SKIPPED + 2,
        "warmup_examples": 0,
        "rollout__batch": 4,
        "out": str(out),
    }
    return train("tiny", observe__progress="off", **small).model.parent


def replay(runs: Sequence[Path]) -> None:
    """Seconds a step as measured, and as the simulator has them after calibration."""
    print("| run | schedule | measured | predicted | ratio |")
    print("|---|---|---|---|---|")
    for path in runs:
        run = Recording.read(path, warm_steps=SKIPPED)
        metrics = RunDirectory.open(path).read_metrics()
        steps = [m["timing_s/step"] for m in metrics][SKIPPED:]
        predicted = [s["timing_s/step"] for s in simulate(run.cluster()).steps][SKIPPED:]
        ratio = fmean(predicted) / fmean(steps)
        print(
            f"| {path.name} | {run.config.schedule.preset} | {fmean(steps):.4f} s "
            f"| {fmean(predicted):.4f} s | {ratio:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
