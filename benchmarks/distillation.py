"""On-policy distillation against the RL that trained its teacher: minutes, CPU time and pass@1.

For each seed the recipe trains a teacher by RL, and then teaches a fresh copy of its model by
distillation. Minutes depend on other programs of the machine, CPU minutes hardly. Both count the
steps, without loading models and warm-ups. Rewards are means of ten steps, measured alike in both.

    python benchmarks/distillation.py                          # arithmetic, seeds 0, 1 and 2
    python benchmarks/distillation.py --recipe tiny --lr 1e-3 --steps 250
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from stretto.models.backend import keep_freed_memory

keep_freed_memory()  # before torch is imported, as the command line does

from _shared import parse
from stretto import api
from stretto.machine import Machine
from stretto.observe.display import Progress

SMOKE = {
    "recipe": "tiny",
    "seeds": [0],
    "steps": 1,
    "rl_steps": 1,
    "samples": 2,
    "small": True,
}
SMALL = {"warmup_examples": 8, "rollout__batch": 4}
TEN = 10  # steps of a mean


class Trained(NamedTuple):
    """A run's model and its cost."""

    model: Path
    steps: int
    minutes: float  # of the steps
    cpu_minutes: float  # of the same
    first: float  # mean reward of the first ten steps
    last: float  # ... of the last ten


def train(recipe: str, folder: Path, changes: Mapping[str, Any]) -> Trained:
    """Train in this process. The costs of the first step, which warms up, are those of the mean."""
    rewards, times = list[float](), list[tuple[float, float]]()

    def note(step: int, metrics: Mapping[str, float]) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        times.append((time.perf_counter() / 60, (used.ru_utime + used.ru_stime) / 60))
        rewards.append(metrics["objective/scores"])

    quiet = Progress()
    model = api.train(recipe, out=str(folder), progress=quiet, on_step=note, **changes).model
    share = len(times) / max(len(times) - 1, 1)
    minutes, cpu_minutes = (share * (b - a) for a, b in zip(times[0], times[-1], strict=True))
    ends = fmean(rewards[:TEN]), fmean(rewards[-TEN:])
    return Trained(model, len(rewards), minutes, cpu_minutes, *ends)


def apart(function: Any, *given: Any, here: bool) -> Any:
    """Call a function in a new process, or ``here`` to save the time of its imports."""
    if here:
        return function(*given)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *given).result()


def pass_at_1(recipe: str, model: str, samples: int, changes: Mapping[str, Any]) -> float:
    return api.evaluate(recipe, model=model, samples=samples, **changes).pass_at_1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recipe", default="arithmetic")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=24, help="of distillation")
    parser.add_argument("--rl-steps", type=int, default=0, help="of RL; 0 for the recipe's own")
    parser.add_argument("--lr", type=float, default=2e-5, help="of distillation")
    parser.add_argument("--samples", type=int, default=50, help="prompts of an evaluation")
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    return parse(parser, SMOKE)


def both(args: argparse.Namespace, seed: int, folder: Path) -> Iterator[tuple[str, Trained, float]]:
    """Train the teacher, and then the student. Yields each run with its pass@1."""
    changes: dict[str, Any] = {"seed": seed, **(SMALL if args.small else {})}
    of_rl = {"steps": args.rl_steps} if args.rl_steps else {}
    teacher = apart(train, args.recipe, folder, {**changes, **of_rl}, here=args.small)
    measured = args.recipe, str(teacher.model), args.samples, changes
    yield "RL, the teacher", teacher, apart(pass_at_1, *measured, here=args.small)
    of_distillation = {
        "algorithm__name": "distill",
        "algorithm__teacher": str(teacher.model),
        "algorithm__entropy_coef": 0.0,
        "training__lr": args.lr,
        "steps": args.steps,
    }
    student = apart(train, args.recipe, folder, {**changes, **of_distillation}, here=args.small)
    measured = args.recipe, str(student.model), args.samples, changes
    yield "distillation, the student", student, apart(pass_at_1, *measured, here=args.small)


def main() -> None:
    args = arguments()
    print(f"{Machine.here()}\n")
    print("| seed | run | steps | minutes | CPU minutes | first reward | last reward | pass@1 |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            for name, run, share in both(args, seed, Path(folder)):
                costs = f"{run.steps} | {run.minutes:.1f} | {run.cpu_minutes:.1f}"
                rewards = f"{run.first:.2f} | {run.last:.2f}"
                print(f"| {seed} | {name} | {costs} | {rewards} | {share:.2f} |", flush=True)
    if not args.small:
        before = apart(pass_at_1, args.recipe, "", args.samples, {}, here=False)
        print(f"\npass@1 before training: {before:.2f}")


if __name__ == "__main__":
    main()
