"""The schedule in virtual time: OPPO's setting, and how well a real run is predicted.

python benchmarks/simulated.py                      # OPPO's ablation on described clusters
python benchmarks/simulated.py --replay RUN ...     # runs of 'stretto train', against themselves
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _shared import parse
from stretto.config import ScheduleConfig, recipes
from stretto.runtime.sim.cluster import Cluster
from stretto.runtime.sim.prediction import LEAST_STEPS, WARM_STEPS, predict
from stretto.runtime.sim.simulate import simulate

CLUSTERS = Path(__file__).parent / "clusters"
EAGER_S_A_LAYER = 0.0008
"""Launching the kernels of a decode step from Python, as the trainers do that generate without
CUDA graphs."""
LAYERS = {"oppo-7b-h200": 28, "oppo-3b-a100": 36}
KNOBS: dict[str, dict[str, Any]] = {
    "intra": {"score_on": "chunk"},
    "inter": {"overcommit": "auto"},
    "both": {"score_on": "chunk", "overcommit": "auto"},
    "inter, throughput rule": {"overcommit": "auto", "overcommit_rule": "throughput"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replay", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--steps", type=int, default=60)
    args = parse(parser, {"steps": 1})
    if args.replay:
        replay(args.replay)
    else:
        ablation(args.steps)
    if args.smoke:
        with tempfile.TemporaryDirectory() as scratch:
            replay([recorded(Path(scratch))])


def ablation(steps: int) -> None:
    """Samples a second of each knob, as multiples of the plain schedule's."""
    print("| cluster | epochs | sync step | of it scoring, training | " + " | ".join(KNOBS) + " |")
    print("|---|---|---|---|" + "---|" * len(KNOBS))
    for name in LAYERS:
        for eager in (False, True):
            for epochs in (4, 1):
                cluster = described(name, eager, epochs, steps)
                plain = simulate(cluster)
                gains = [
                    simulate(
                        cluster.model_copy(update={"schedule": ScheduleConfig.model_validate(k)})
                    ).samples_per_s
                    / plain.samples_per_s
                    for k in KNOBS.values()
                ]
                busy = plain.utilisation
                scoring = sum(busy[s.name] for s in cluster.scorers)
                print(
                    f"| {name}{', eager' if eager else ''} | {epochs} "
                    f"| {plain.makespan_s / steps:.0f} s "
                    f"| {100 * scoring:.0f} %, {100 * busy['learner']:.0f} % | "
                    + " | ".join(f"{gain:.2f}" for gain in gains)
                    + " |",
                    flush=True,
                )


def described(name: str, eager: bool, epochs: int, steps: int) -> Cluster:
    cluster = Cluster.read(CLUSTERS / f"{name}.toml")
    step_s = EAGER_S_A_LAYER * LAYERS[name] if eager else cluster.efficiency.step_s
    return cluster.model_copy(
        update={
            "efficiency": cluster.efficiency.model_copy(update={"step_s": step_s}),
            "learner": cluster.learner.model_copy(update={"epochs": epochs, "updates": epochs}),
            "workload": cluster.workload.model_copy(update={"steps": steps}),
        }
    )


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
        preset, step = recipes.load(path).schedule.preset, prediction.step
        print(
            f"| {path.name} | {preset} | {step.measured_s:.4f} s "
            f"| {step.predicted_s:.4f} s | {step.ratio or 0:.2f} |",
            flush=True,
        )
    for path, prediction in found:
        print(f"\n{path.name}: {prediction.title}\n{prediction.table()}")


if __name__ == "__main__":
    main()
