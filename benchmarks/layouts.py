"""The same recipe with its roles over one process each, in shards, in slices, colocated and apart.

For each layout: the reward of some steps and how far all rewards are from those of the first
layout, seconds a step, and bytes and seconds of the actor's hand-over.

    python benchmarks/layouts.py
    python benchmarks/layouts.py --steps 60 --layouts plain tp2 colocated
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from _shared import parse
from stretto import runs
from stretto.config import ClusterConfig, Config, recipes
from stretto.config.cluster_config import ProcessConfig
from stretto.layout import Layout
from stretto.observe import RunDirectory
from stretto.observe.display import Progress

ALL = ("learner", "generator", "reference", "critic")
LAYOUTS: Mapping[str, tuple[ProcessConfig, ...]] = {
    "plain": (),
    "fsdp2": (ProcessConfig(roles=("learner",), ranks=2),),
    "tp2": (ProcessConfig(roles=("learner",), ranks=2, layout={"learner": Layout(tp=2)}),),
    "fsdp2-tp2": (
        ProcessConfig(roles=("learner",), ranks=4, layout={"learner": Layout(fsdp=2, tp=2)}),
    ),
    "all-tp2": tuple(
        ProcessConfig(roles=(role,), ranks=2, layout={role: Layout(tp=2)}) for role in ALL
    ),
    "colocated": (ProcessConfig(roles=ALL, ranks=2),),
    "colocated-tp2": (ProcessConfig(roles=ALL, ranks=2, layout={"learner": Layout(tp=2)}),),
    "half": (
        ProcessConfig(roles=("learner", "critic"), ranks=2),
        ProcessConfig(roles=("generator", "reference"), ranks=2),
    ),
}
"""``half``: the actor generates on ranks of its own; the critic scores where it is trained."""


def trained(config: Config, processes: tuple[ProcessConfig, ...]) -> list[Mapping[str, Any]]:
    """Run, and return the metrics of all steps."""
    placed = {"runtime": "local", "cluster": ClusterConfig(processes=processes)}
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.create(Path(folder), "run", config)
        runs.train(config.model_copy(update=placed), run_dir=run, progress=Progress())
        return list(run.read_metrics())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--examples", type=int, default=4500, help="of the warm-up")
    args = parse(parser, {"layouts": ["plain", "colocated"], "steps": 2, "examples": 64})
    config = recipes.load(args.recipe)
    model = config.model.model_copy(update={"dtype": "float32", "device": "cpu"})
    small = {"steps": args.steps, "warmup_examples": args.examples, "threads": 1, "model": model}
    config = config.model_copy(update=small)
    shown = sorted({0, args.steps // 4, args.steps // 2, 3 * args.steps // 4, args.steps - 1})
    heads = "".join(f" reward {step + 1} |" for step in shown)
    print(f"| layout |{heads} mean | furthest | s a step | hand-over, s | MB |")
    print("|---|" + "---|" * (len(shown) + 5))
    first: list[float] = []
    for name in args.layouts:
        metrics = trained(config, LAYOUTS[name])
        rewards = [m["objective/scores"] for m in metrics]
        first = first or rewards
        furthest = max(abs(a - b) for a, b in zip(rewards, first, strict=True))
        cells = "".join(f" {rewards[step]:.4f} |" for step in shown)
        seconds = median(m["timing_s/step"] for m in metrics[1:])
        handover = median(m["weight_sync/actor_s"] for m in metrics[1:])
        print(
            f"| {name} |{cells} {fmean(rewards):.4f} | {furthest:.4f} | {seconds:.2f} "
            f"| {handover:.3f} | {metrics[-1]['weight_sync/actor_mb']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
