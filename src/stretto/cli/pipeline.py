"""``stretto pipeline``: one schedule for actor and critic over the same pipeline stages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from stretto.pipelines.problem import Problem
    from stretto.pipelines.solve import Solution

TABLE = "table3"


@dataclass(frozen=True, slots=True)
class Options:
    """Plan one pipeline schedule for actor and critic, which run in opposite directions.

    The problem is a JSON file, or is made of the sizes of two models and how they are parallelised;
    'table3' stands for the twelve instances of RLHFuse's Table 3.
    """

    problem: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[FILE|table3]")] = ""
    """A problem as JSON (docs/pipelines.md shows one), or 'table3'. Without it, give sizes."""
    actor: str = ""
    """The actor's size: 7B, 13B, 33B or 65B (LLaMA), or layers and width, such as 40x5120."""
    critic: str = ""
    """The critic's size."""
    actor_stages: int = 0
    """Pipeline stages of the actor."""
    critic_stages: int = 0
    """Pipeline stages of the critic."""
    actor_tp: int = 1
    """Tensor parallelism of the actor; stages of the model with less of it are merged."""
    critic_tp: int = 1
    """Tensor parallelism of the critic."""
    micro_batches: int = 0
    """Micro-batches of all pipelines of a model together."""
    tokens: int = 2048
    """Tokens of a micro-batch."""
    teraflops: float = 200.0
    """That a device achieves."""
    communication_us: int = 0
    """Microseconds from one stage to the next."""
    capacity: float | None = None
    """Activation memory of each device, a hard limit: in GiB for sizes, in its own unit for a
    file."""
    seconds: float = 60.0
    """To search at most; for 'table3', of each instance."""
    seed: int = 0
    """Of the search's random numbers."""
    threads: int = 1
    """Searches at the same time."""
    method: Literal["stretto", "annealing", "cp-sat"] = "stretto"
    """The search; 'annealing' is RLHFuse's, 'cp-sat' adds proofs by OR-tools."""
    schedule: str = ""
    """File for the schedule as JSON, with its problem."""
    draw: str = ""
    """File for a picture: timeline and memory, as .svg, .png or .html."""


def run(arguments: Sequence[str]) -> int:
    """Solve, say how good it is, and write what was asked for."""
    options = tyro.cli(Options, prog="stretto pipeline", args=list(arguments))
    if options.draw and Path(options.draw).suffix not in (".svg", ".png", ".html"):
        raise ConfigError(f"--draw {options.draw}: must end in .svg, .png or .html")
    if options.problem == TABLE:
        if options.capacity is not None or options.schedule or options.draw:
            raise ConfigError(
                "table3 solves twelve instances: --capacity, --schedule and --draw are for one"
            )
        _table(options)
        return 0
    problem, unit = _problem(options)
    solution = _solve(problem, options)
    lines = _lines(problem, solution, unit)
    print("\n".join(lines))
    _write(problem, solution, lines, options)
    return 0


def _problem(options: Options) -> tuple[Problem, str]:
    """The problem, and what a tick is."""
    from dataclasses import replace

    from stretto.pipelines.problem import Problem

    sizes = {
        "--actor": options.actor,
        "--critic": options.critic,
        "--actor-stages": options.actor_stages,
        "--critic-stages": options.critic_stages,
        "--micro-batches": options.micro_batches,
    }
    if options.problem:
        given = [name for name, value in sizes.items() if value]
        if given:
            raise ConfigError(f"a file says all of the problem: leave out {', '.join(given)}")
        problem = Problem.read(options.problem)
        if options.capacity is not None:
            problem = replace(problem, capacity=options.capacity)
        return problem, "ticks"
    missing = [name for name, value in sizes.items() if not value]
    if missing:
        raise ConfigError(
            f"a problem needs a file, 'table3', or sizes; of these {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing"
        )
    return _from_sizes(options), "µs"


def _from_sizes(options: Options) -> Problem:
    from stretto.pipelines.sizes import ModelShape, Parallel, make_problem

    return make_problem(
        Parallel(ModelShape.parse(options.actor), options.actor_stages, options.actor_tp),
        Parallel(ModelShape.parse(options.critic), options.critic_stages, options.critic_tp),
        micro_batches=options.micro_batches,
        tokens=options.tokens,
        teraflops=options.teraflops,
        communication_us=options.communication_us,
        capacity_gib=options.capacity,
    )


def _solve(problem: Problem, options: Options, memory: float = 0.0) -> Solution:
    from stretto.pipelines.solve import solve

    return solve(
        problem,
        seconds=options.seconds,
        seed=options.seed,
        method=options.method,
        threads=options.threads,
        memory=memory,
    )


def _lines(problem: Problem, solution: Solution, unit: str) -> list[str]:
    """What is to be said of a solution."""
    from stretto.pipelines.baselines import interleaved_1f1b, one_f_one_b_plus, serial_1f1b

    serial, plus = serial_1f1b(problem), one_f_one_b_plus(problem)
    interleaved = interleaved_1f1b(problem)
    latency = solution.makespan
    gap = latency / solution.bound - 1
    peers = [("serial 1F1B", serial), ("interleaved 1F1B", interleaved)]
    peers += [("1F1B+", plus)] if plus else []
    status: str = solution.status + (f", {gap:.2%} over it" if gap else "")
    proved = "; no schedule of this latency needs less" if solution.memory_proved else ""
    return [
        f"latency {latency:,} {unit} (bound {solution.bound:,}): {status}",
        "speed-up "
        + ", ".join(f"{b.latency / latency:.2f} over {name} ({b.latency:,})" for name, b in peers),
        f"peak activation memory {solution.peak:g}, {solution.peak / serial.peak:.2f} of serial "
        f"1F1B's {serial.peak:g}{proved}",
        f"devices idle {solution.evaluation.bubble_share:.1%} of the time",
        f"searched {solution.seconds:.1f} s",
    ]


def _write(problem: Problem, solution: Solution, lines: list[str], options: Options) -> None:
    if options.schedule:
        data: dict[str, Any] = {
            "problem": problem.to_json(),
            **solution.schedule.to_json(),
            "latency": solution.makespan,
            "peak": solution.peak,
            "bound": solution.bound,
            "status": solution.status,
        }
        _save(options.schedule, json.dumps(data, indent=1) + "\n")
    if not options.draw:
        return
    from stretto.pipelines import draw

    title = f"Fused actor and critic pipelines on {problem.devices} devices, {lines[0]}"
    if options.draw.endswith(".png"):
        try:
            draw.save_png(problem, solution.evaluation, title, Path(options.draw))
        except OSError as error:
            raise _unwritable(options.draw, error) from error
        print(f"wrote {options.draw}")
    elif options.draw.endswith(".svg"):
        _save(options.draw, draw.timeline_svg(problem, solution.evaluation, title))
    else:
        _save(options.draw, draw.page_html(problem, solution.evaluation, title, lines))


def _save(name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(name, error) from error
    print(f"wrote {name}")


def _unwritable(name: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write '{name}': {error.strerror or error}; choose another file")


def _table(options: Options) -> None:
    """Solve the twelve instances, each beside what was printed and published of it."""
    from dataclasses import replace

    from stretto.pipelines.baselines import one_f_one_b_plus, serial_1f1b
    from stretto.pipelines.table3 import ROWS

    print("| models | stages | batch | 1F1B+ | speed-up: ours | paper | trace | bound "
          "| memory: ours | paper | trace | seconds | status |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        serial, plus = serial_1f1b(row.problem), one_f_one_b_plus(row.problem)
        assert plus is not None
        least = min(row.memory * serial.peak, row.traced_peak)
        problem = replace(row.problem, capacity=least)
        if options.method == "annealing":
            problem = row.problem
        solution = _solve(problem, options, memory=least)
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
    print("\nSpeed-ups and memory are to serial 1F1B. Each instance has the lower of the paper's "
          "and the trace's memory as its capacity.")  # fmt: skip
