"""``stretto pipeline``: one schedule for actor and critic over the same pipeline stages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from tyro.conf import arg

from stretto import files
from stretto.cli.parsing import takes
from stretto.config.sections import Positive, Seconds, Seed, Workers
from stretto.errors import ConfigError
from stretto.interfaces import option
from stretto.observe.progress import on_stderr
from stretto.saying import working

if TYPE_CHECKING:
    from stretto.pipelines.problem import Problem, Units
    from stretto.pipelines.solve import Solution

_NEEDED_SIZES = ("actor", "critic", "actor_stages", "critic_stages", "micro_batches")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of the two models of a problem, and their parallelism.

    Attributes:
        actor: The actor's size: 7B, 13B, 33B or 65B (LLaMA), or layers and width, such as 40x5120.
        critic: The critic's size.
        actor_stages: Pipeline stages of the actor.
        critic_stages: Pipeline stages of the critic.
        actor_tp: Tensor parallelism of the actor. Stages of the model with less of it are merged.
        critic_tp: Tensor parallelism of the critic.
        micro_batches: Total of micro-batches in all pipelines of a model.
        tokens: Tokens in a micro-batch.
        teraflops: Teraflops that a device achieves.
        communication_us: Microseconds from one stage to the next.
    """

    actor: str = ""
    critic: str = ""
    actor_stages: int = 0
    critic_stages: int = 0
    actor_tp: int = 1
    critic_tp: int = 1
    micro_batches: int = 0
    tokens: int = 2048
    teraflops: Annotated[float, Field(le=10**9)] = 200.0
    communication_us: int = 0


@takes(ModelSizes)
def command_pipeline(
    problem: Annotated[str, arg(metavar="[FILE]")] = "",
    /,
    *,
    capacity: Positive | None = None,
    seconds: Seconds = 60.0,
    seed: Seed = 0,
    threads: Workers = 1,
    schedule: str = "",
    draw: str = "",
    **sizes: Any,
) -> int:
    """Plan one pipeline schedule for actor and critic, which run in opposite directions.

    The problem is a JSON file, or derived from the sizes of two models and their parallelism.

    Args:
        problem: A problem as JSON (docs/pipelines.md shows one), or a file of --schedule for its
            problem. Without it, give sizes.
        capacity: Hard limit of each device's activation memory, in GiB, or in a file's own unit.
        seconds: Longest search, in seconds.
        seed: Seed of the search's random numbers.
        threads: Searches at the same time.
        schedule: File for the schedule as JSON, with its problem.
        draw: File for a picture: timeline and memory, as .svg, .png or .html.
    """
    _check_files(schedule, draw)
    posed, units = _problem(problem, ModelSizes(**sizes), capacity)
    with working(on_stderr, f"compiling, then searching for {seconds:g} s at most"):
        from stretto.pipelines.solve import solve

        options: Any = {"seconds": seconds, "seed": seed, "threads": threads}
        solution = solve(posed, **options, keep_interrupted=True)
    lines = _lines(posed, solution, units)
    print("\n".join(lines))
    with ExitStack() as stack:  # writes both files, even if one fails
        if draw:
            stack.callback(_draw, posed, solution, units, lines, Path(draw))
        if schedule:
            stack.callback(_write_schedule, posed, solution, Path(schedule))
    return 130 if solution.interrupted else 0


def _flags(names: Iterable[str]) -> str:
    return ", ".join(map(option, names))


def _check_files(schedule: str, draw: str) -> None:
    for name in filter(None, (schedule, draw)):
        files.require_writable(Path(name))
    if draw and Path(draw).suffix not in (".svg", ".png", ".html"):
        raise ConfigError(f"--draw {draw}: must end in .svg, .png or .html")
    if draw.endswith(".png"):
        from stretto.pipelines.draw import require_png

        require_png()


def _problem(file: str, sizes: ModelSizes, capacity: float | None) -> tuple[Problem, Units]:
    from stretto.pipelines.problem import UNITS, Parallel, Problem, Units, make_problem

    if file:
        size_names = [f.name for f in fields(ModelSizes) if getattr(sizes, f.name) != f.default]
        if size_names:
            raise ConfigError(f"a file says all of the problem: leave out {_flags(size_names)}")
        problem = Problem.read(file)
        return problem if capacity is None else replace(problem, capacity=capacity), Units()
    missing = [name for name in _NEEDED_SIZES if not getattr(sizes, name)]
    if missing:
        raise ConfigError(
            f"a problem needs a file or sizes; of these {_flags(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing"
        )
    problem = make_problem(
        Parallel.of(sizes.actor, sizes.actor_stages, sizes.actor_tp),
        Parallel.of(sizes.critic, sizes.critic_stages, sizes.critic_tp),
        micro_batches=sizes.micro_batches,
        tokens=sizes.tokens,
        teraflops=sizes.teraflops,
        communication_us=sizes.communication_us,
        capacity_gib=capacity,
    )
    return problem, UNITS


def _lines(problem: Problem, solution: Solution, units: Units) -> list[str]:
    from stretto.pipelines.baselines import interleaved_1f1b, one_f_one_b_plus, serial_1f1b

    serial, plus = serial_1f1b(problem), one_f_one_b_plus(problem)
    interleaved = interleaved_1f1b(problem)
    latency = solution.makespan
    gap = latency / solution.bound - 1
    peers = [("serial 1F1B", serial), ("interleaved 1F1B", interleaved)]
    peers += [("1F1B+", plus)] if plus else []
    status: str = solution.status + (f", {gap:.2%} over it" if gap else "")
    ratio = f", {solution.peak / serial.peak:.2f} of" if serial.peak else ", as"
    verb = "interrupted after" if solution.interrupted else "searched"
    proved = "; no schedule of this latency needs less" if solution.memory_proved else ""
    return [
        f"latency {latency:,} {units.time} (bound {solution.bound:,}): {status}",
        "speed-up "
        + ", ".join(f"{b.latency / latency:.2f} over {name} ({b.latency:,})" for name, b in peers),
        f"peak activation memory {units.of_memory(solution.peak)}{ratio} serial 1F1B's "
        f"{units.of_memory(serial.peak)}{proved}",
        f"devices idle {solution.evaluation.bubble_share:.1%} of the time",
        f"{verb} {solution.seconds:.1f} s",
    ]


def _write_schedule(problem: Problem, solution: Solution, file: Path) -> None:
    data: dict[str, Any] = {
        "problem": problem.to_json(),
        **solution.schedule.to_json(),
        "latency": solution.makespan,
        "peak": solution.peak,
        "bound": solution.bound,
        "status": solution.status,
    }
    with files.explained(file):
        file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {file}")


def _draw(problem: Problem, solution: Solution, units: Units, lines: list[str], file: Path) -> None:
    from stretto.pipelines import draw

    title = f"Fused actor and critic pipelines on {problem.devices} devices, {lines[0]}"
    of = (problem, solution.evaluation, title, units)
    with files.explained(file):
        if file.suffix == ".png":
            draw.save_png(*of, file)
        else:
            text = draw.timeline_svg(*of) if file.suffix == ".svg" else draw.page_html(*of, lines)
            file.write_text(text, encoding="utf-8")
    print(f"wrote {file}")
