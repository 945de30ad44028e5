"""How good the pipeline schedules are, and how fast they are found.

    python benchmarks/pipelines.py table3     # RLHFuse's Table 3, with the lower of the paper's
                                              # and the published trace's memory as capacity
    python benchmarks/pipelines.py memory     # the same: ticks, and how long they took
    python benchmarks/pipelines.py latency    # ... without a capacity, until the bound
    python benchmarks/pipelines.py lowest     # ... as little memory as can be found in the time
    python benchmarks/pipelines.py prove      # ... by CP-SAT, instances up to 1,600 tasks
    python benchmarks/pipelines.py random     # 50 random problems, until the bound
    python benchmarks/pipelines.py large      # 64 devices, 256 micro-batches

``--method annealing`` solves Table 3 by the search as published, for comparison.

Seconds are those of the search; processor seconds are of all its threads, and tell how much of the
machine it got. Compilation is apart from both.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from _certify import by_cp_sat
from _published import as_published
from _shared import parse
from _table3 import ROWS, Row
from stretto.pipelines.baselines import one_f_one_b_plus, serial_1f1b
from stretto.pipelines.graph import latency_bound
from stretto.pipelines.problem import ModelPipelines, Problem
from stretto.pipelines.solve import Solution, descend, solve

ENOUGH = 1e9
"""Memory that is always enough: the search stops at the bound."""
PROVABLE_TASKS = 1600
METHODS = {"stretto": descend, "annealing": as_published}


def timed(problem: Problem, **options: Any) -> tuple[Solution, float]:
    """A solution, and the processor seconds that it took."""
    start_s = time.process_time()
    solution = solve(problem, **options)
    return solution, time.process_time() - start_s


def tasks(problem: Problem) -> int:
    return sum(2 * side.devices * side.micro_batches for side in problem.models)


def rows(args: argparse.Namespace) -> Iterator[tuple[int, Row, Solution, float]]:
    """The instances of Table 3, numbered, solved as asked; with the processor seconds of each.

    Ctrl-C ends a search; the instance then is the last one.
    """
    for number, row in enumerate(ROWS, start=1):
        if args.what == "prove" and tasks(row.problem) > PROVABLE_TASKS:
            continue
        problem, enough = row.problem, ENOUGH if args.what == "latency" else 0.0
        if args.what in ("memory", "table3"):
            enough = row.least_memory
            if args.method != "annealing":
                problem = replace(problem, capacity=enough)
        solution, processor_s = timed(
            problem,
            seconds=args.seconds,
            seed=args.seed,
            threads=args.threads,
            search=by_cp_sat if args.what == "prove" else METHODS[args.method],
            memory=enough,
            keep_interrupted=True,
        )
        yield number, row, solution, processor_s
        if solution.interrupted:
            raise SystemExit(130)


def table(args: argparse.Namespace) -> None:
    """The search itself: ticks, and when they were reached."""
    print("| row | tasks | bound | latency | at | peak to serial | paper | trace "
          "| seconds | processor seconds | status |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    total_s = 0.0
    for number, row, solution, processor_s in rows(args):
        total_s += solution.seconds
        serial = serial_1f1b(row.problem)
        first = next(i.seconds for i in solution.trace if i.latency == solution.makespan)
        proved = solution.bound > latency_bound(row.problem)
        status = "proved optimal" if proved else solution.status
        status += ", least memory" if solution.memory_proved else ""
        print(
            f"| {number} | {tasks(row.problem):,} | {solution.bound} | {solution.makespan} "
            f"| {first:.2f} s | {solution.peak / serial.peak:.4f} | {row.memory:.2f} "
            f"| {row.traced_peak / serial.peak:.4f} | {solution.seconds:.1f} | {processor_s:.1f} "
            f"| {status} |",
            flush=True,
        )
    print(f"\nall rows: {total_s:.1f} s")


def table3(args: argparse.Namespace) -> None:
    """Each instance beside what was printed and published of it, as ratios to serial 1F1B."""
    print("| models | stages | batch | 1F1B+ | speed-up: ours | paper | trace | bound "
          "| memory: ours | paper | trace | seconds | status |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for _, row, solution, _ in rows(args):
        serial, plus = serial_1f1b(row.problem), one_f_one_b_plus(row.problem)
        assert plus is not None
        print(
            f"| {row.models} | {row.stages[0]}, {row.stages[1]} | {row.global_batch} "
            f"| {serial.latency / plus.latency:.2f} "
            f"| {serial.latency / solution.makespan:.3f} | {row.speedup:.2f} "
            f"| {serial.latency / row.traced_latency:.3f} "
            f"| {serial.latency / solution.bound:.3f} "
            f"| {solution.peak / serial.peak:.3f} | {row.memory:.2f} "
            f"| {row.traced_peak / serial.peak:.3f} "
            f"| {solution.seconds:.1f} | {solution.status} |",
            flush=True,
        )
    memory = "the lower of the paper's and the trace's memory"
    last = (
        f"The published annealing knows no capacity: it only stops at {memory}."
        if args.method == "annealing"
        else f"Each instance has {memory} as its capacity."
    )
    print(f"\nSpeed-ups and memory are to serial 1F1B. {last}")


def random_problem(seed: int) -> Problem:
    """4 to 32 devices, all four pairs of pipelines, any latencies, with communication."""
    chance = np.random.default_rng(seed)
    pair = ((1, 1), (1, 2), (1, 3), (2, 3))[seed % 4]
    unit = math.lcm(*pair)
    devices = unit * int(chance.integers(-(-4 // unit), 32 // unit + 1))
    batches = unit * int(chance.integers(max(1, devices // 2 // unit), 3 * devices // unit + 1))
    sides: list[ModelPipelines] = []
    for pipelines in pair:
        stages = devices // pipelines
        forward = chance.integers(2, 11) * np.ones(stages, int)
        if chance.random() < 0.5:
            forward += chance.integers(0, 3, size=stages)
        backward = np.rint(forward * chance.uniform(1.2, 3.0)).astype(int)
        sides.append(
            ModelPipelines.of(
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
            ModelPipelines.of(
                64 // k, k, 256 // k, forward=f, backward=2 * f, activation=a, communication=c
            )
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
    ways = {"table3": table3, "random": random_problems, "large": large}
    ways |= dict.fromkeys(("memory", "latency", "lowest", "prove"), table)
    parser.add_argument("what", choices=ways)
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="stretto",
        help="of the tables, but for prove's, which is CP-SAT",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="to search, each problem")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=50, help="random ones")
    args = parse(parser, {"what": "", "seconds": 0.1, "threads": 1, "problems": 2})
    for what in ways if args.smoke else [args.what]:
        args.what = what
        ways[what](args)
    if args.smoke:
        args.what, args.method = "table3", "annealing"
        table3(args)


if __name__ == "__main__":
    main()
