"""How good the pipeline schedules are, and how fast they are found.

    python benchmarks/pipelines.py latency    # Table 3 without a capacity, until the bound
    python benchmarks/pipelines.py memory     # ... with the lower of paper's and trace's memory
    python benchmarks/pipelines.py lowest     # ... as little memory as can be found in the time
    python benchmarks/pipelines.py random     # 50 random problems, until the bound
    python benchmarks/pipelines.py large      # 64 devices, 256 micro-batches
    python benchmarks/pipelines.py peer       # Table 3 by the published search
    python benchmarks/pipelines.py prove      # CP-SAT on the instances up to 1,600 tasks

Seconds are those of the search; processor seconds are of all its threads, and tell how much of the
machine it got. Compilation is apart from both.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np

from _shared import parse
from stretto.pipelines.baselines import serial_1f1b
from stretto.pipelines.problem import Problem, Side
from stretto.pipelines.solve import Solution, solve
from stretto.pipelines.table3 import ROWS

ENOUGH = 1e9
"""Memory that is always enough: the search stops at the bound."""
PROVABLE_TASKS = 1600


def timed(problem: Problem, **options: Any) -> tuple[Solution, float]:
    """A solution, and the processor seconds that it took."""
    start_s = time.process_time()
    solution = solve(problem, **options)
    return solution, time.process_time() - start_s


def tasks(problem: Problem) -> int:
    return sum(2 * side.devices * side.micro_batches for side in problem.sides)


def table(args: argparse.Namespace) -> None:
    """Table 3 in one of several ways."""
    print("| row | tasks | bound | latency | at | peak to serial | paper | trace "
          "| seconds | processor seconds | status |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    total_s = 0.0
    for number, row in enumerate(ROWS, start=1):
        if args.what == "prove" and tasks(row.problem) > PROVABLE_TASKS:
            continue
        problem, enough, method = row.problem, 0.0, "stretto"
        if args.what == "latency":
            enough = ENOUGH
        elif args.what == "memory":
            enough = row.least_memory
            problem = replace(problem, capacity=enough)
        elif args.what == "peer":
            method, enough = "annealing", row.least_memory
        elif args.what == "prove":
            method = "cp-sat"
        solution, processor_s = timed(
            problem,
            seconds=args.seconds,
            seed=args.seed,
            threads=args.threads,
            method=method,
            memory=enough,
        )
        total_s += solution.seconds
        serial = serial_1f1b(problem)
        first = next(i.seconds for i in solution.trace if i.latency == solution.makespan)
        status = solution.status + (", least memory" if solution.memory_proved else "")
        print(
            f"| {number} | {tasks(problem):,} | {solution.bound} | {solution.makespan} "
            f"| {first:.2f} s | {solution.peak / serial.peak:.4f} | {row.memory:.2f} "
            f"| {row.traced_peak / serial.peak:.4f} | {solution.seconds:.1f} | {processor_s:.1f} "
            f"| {status} |",
            flush=True,
        )
    print(f"\nall rows: {total_s:.1f} s")


def random_problem(seed: int) -> Problem:
    """4 to 32 devices, all four pairs of pipelines, any latencies, with communication."""
    chance = np.random.default_rng(seed)
    pair = ((1, 1), (1, 2), (1, 3), (2, 3))[seed % 4]
    unit = math.lcm(*pair)
    devices = unit * int(chance.integers(-(-4 // unit), 32 // unit + 1))
    batches = unit * int(chance.integers(max(1, devices // 2 // unit), 3 * devices // unit + 1))
    sides: list[Side] = []
    for pipelines in pair:
        stages = devices // pipelines
        forward = chance.integers(2, 11) * np.ones(stages, int)
        if chance.random() < 0.5:
            forward += chance.integers(0, 3, size=stages)
        backward = np.rint(forward * chance.uniform(1.2, 3.0)).astype(int)
        sides.append(
            Side.of(
                stages,
                pipelines,
                batches // pipelines,
                forward=forward.tolist(),
                backward=backward.tolist(),
                activation=int(chance.integers(10, 30)) / 10,
                communication=int(chance.integers(0, 4)),
            )
        )
    actor, critic = sides
    return Problem(actor, critic)


def random_problems(args: argparse.Namespace) -> None:
    """Share at the bound, gaps and times."""
    gaps: list[float] = []
    seconds, worst = [], ""
    for seed in range(args.problems):
        problem = random_problem(seed)
        solution = solve(
            problem, seconds=args.seconds, seed=args.seed, threads=args.threads, memory=ENOUGH
        )
        gap = solution.makespan / solution.bound - 1
        if gap >= max(gaps, default=0.0):
            worst = (
                f"problem {seed}: {problem.devices} devices, {problem.actor.pipelines} and "
                f"{problem.critic.pipelines} pipelines, {tasks(problem):,} tasks"
            )
        gaps.append(gap)
        seconds.append(solution.seconds)
        print(
            f"{seed} {problem.devices} devices {tasks(problem)} tasks {solution.makespan} "
            f"{solution.bound} {gap:.4%} {solution.seconds:.2f} s",
            flush=True,
        )
    at_bound = sum(gap == 0 for gap in gaps)
    print(
        f"at the bound: {at_bound} of {len(gaps)}; worst gap {max(gaps):.2%} ({worst}); mean gap "
        f"{np.mean(gaps):.3%}; seconds: median {np.median(seconds):.2f}, all {sum(seconds):.0f}"
    )


def large(args: argparse.Namespace) -> None:
    """64 devices and 256 micro-batches."""
    for pair in ((1, 1), (1, 2)):
        actor, critic = (
            Side.of(64 // k, k, 256 // k, forward=f, backward=2 * f, activation=a, communication=c)
            for k, f, a, c in ((pair[0], 3, 1.0, 1), (pair[1], 2, 0.6, 1))
        )
        problem = Problem(actor, critic)
        solution, processor_s = timed(
            problem, seconds=args.seconds, threads=args.threads, memory=ENOUGH
        )
        serial = serial_1f1b(problem)
        print(
            f"K = {pair}: {tasks(problem):,} tasks, latency {solution.makespan}, bound "
            f"{solution.bound}, {solution.status}, "
            f"speed-up {serial.latency / solution.makespan:.3f},"
            f" peak {solution.peak / serial.peak:.2f} of serial 1F1B's, {solution.seconds:.2f} s "
            f"({processor_s:.2f} of the processor)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = {"random": random_problems, "large": large}
    tables = ("latency", "memory", "lowest", "peer", "prove")
    parser.add_argument("what", choices=[*tables, *ways])
    parser.add_argument("--seconds", type=float, default=60.0, help="to search, each problem")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=50, help="random ones")
    args = parse(parser, {"what": "", "seconds": 0.1, "threads": 1, "problems": 2})
    for what in [*tables, *ways] if args.smoke else [args.what]:
        args.what = what
        ways.get(what, table)(args)


if __name__ == "__main__":
    main()
