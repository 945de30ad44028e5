"""Jobs and table of ``stretto compare``, for real and simulated runs alike."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from stretto.api.runs import ONE_ENGINE, OVERCOMMIT_RULES, VARIANTS, Job
from stretto.errors import ConfigError, nearest
from stretto.observe import make_progress
from stretto.observe.compare import Comparison, Outcome
from stretto.observe.run_directory import claim
from stretto.saying import Advance

T = TypeVar("T", str, int)

DEFAULT_VARIANTS = ",".join(ONE_ENGINE)
DEFAULT_SEEDS = "0,1,2"

VARIANTS_HELP = (
    "Schedules to compare, separated by commas; known: "
    f"{', '.join(name for name in VARIANTS if name not in OVERCOMMIT_RULES)}, and oppo with other "
    f"rules for over-commitment: {', '.join(OVERCOMMIT_RULES)}."
)
TARGET_HELP = (
    "Reward to be reached, after smoothing over 10 steps; without it, 95 % of the way from sync's "
    "first to its last."
)
Names = Annotated[str, tyro.conf.arg(help=VARIANTS_HELP, metavar="NAME,...")]
Target = Annotated[float | None, tyro.conf.arg(help=TARGET_HELP, metavar="REWARD")]


@dataclass(slots=True)
class Collected:
    """Outcomes of the runs that took all their steps, and the jobs of those that did not."""

    outcomes: list[Outcome] = field(default_factory=list)
    failed: list[Job] = field(default_factory=list)
    interrupted: bool = False


def plan(variants: str, seeds: str) -> list[Job]:
    """Return the runs in their order, of variants' names and seeds with commas between."""
    names = _once((word.strip() for word in variants.split(",")), "--variants")
    for name in names:
        if name not in VARIANTS:
            raise ConfigError(
                f"--variants: there is no '{name}'. {nearest(name, VARIANTS)}", "unknown-variant"
            )
    numbers = _once((_whole(word.strip()) for word in seeds.split(",")), "--seeds")
    return [Job(name, number) for number in numbers for name in names]


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError as error:
        message = f"--seeds: '{word}' is no whole number; write 0,1,2"
        raise ConfigError(message, "seed-not-whole") from error


def _once(given: Iterable[T], option: str) -> list[T]:
    values = list(given)
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{option} names '{value}' twice; name each once", "named-twice")
    return values


def collect(
    jobs: Sequence[Job],
    execute: Callable[[Job, Advance], Outcome | str],
    steps: int,
    *,
    simulated: bool = False,
) -> Collected:
    """Do the runs one after the other, up to the last one or to Ctrl-C.

    Args:
        execute: does a run and tells of its steps; returns a message about one that failed.
        steps: of each.
        simulated: whether their seconds are of virtual time.
    """
    collected, display = Collected(), make_progress("auto")
    for number, job in enumerate(jobs, 1):
        name = f"[{number}/{len(jobs)}] {job.variant}, seed {job.seed}"
        since_s = time.monotonic()
        try:
            with display.working(f"{name}, steps", steps) as advance:
                outcome = execute(job, advance)
        except KeyboardInterrupt:
            display.note(f"{name}: interrupted")
            collected.interrupted = True
            break
        if isinstance(outcome, str):
            display.note(f"{name}: failed, {outcome}")
            collected.failed.append(job)
            continue
        collected.outcomes.append(outcome)
        took = f"{len(outcome.times_s)} steps in {outcome.times_s[-1]:.1f} s"
        if simulated:
            took += f" of simulated time ({time.monotonic() - since_s:.1f} s here)"
        display.note(f"{name}: {took}")
    return collected


def new_folder(out: str, name: str) -> Path:
    """Make ``<out>/<name>-<NNN>`` with the number after the highest there is."""
    root = Path(out)
    try:
        root.mkdir(parents=True, exist_ok=True)
        return claim(root, name)
    except OSError as error:
        raise ConfigError(
            f"cannot make a folder in '{out}': {error}; choose another with --out"
        ) from error


def publish(
    collected: Collected,
    target: float | None,
    folder: Path,
    arguments: Sequence[str],
    where: str,
) -> None:
    """Print the table, and write it with all that belongs to it."""
    if not collected.outcomes:
        print("no run has finished, so there is nothing to compare")
        return
    comparison = Comparison(collected.outcomes, target)
    missing = [f"{job.variant} with seed {job.seed}" for job in collected.failed]
    notes = comparison.notes()
    if missing:
        notes.append(f"Failed and left out: {', '.join(missing)}.")
    if collected.interrupted:
        notes.append("Interrupted: what had not finished is left out.")
    notes.append(f"Ran on: {where}.")
    text = "\n".join([comparison.table(), "", *(f"- {note}" for note in notes)])
    print(f"\n{text}\n")
    command = shlex.join(["stretto", "compare", *arguments])
    data = {"command": command, "ran_on": where, "failed": missing, **comparison.data()}
    page = f"# {folder.name}\n\n```\n{command}\n```\n\n{text}\n"
    (folder / "compare.md").write_text(page, encoding="utf-8")
    (folder / "compare.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {folder / 'compare.md'} and {folder / 'compare.json'}")


def exit_status(collected: Collected) -> int:
    """Return 1 where a run failed; raise KeyboardInterrupt where the user stopped the comparison,
    now that all is written."""
    if collected.interrupted:
        raise KeyboardInterrupt
    return 1 if collected.failed else 0
