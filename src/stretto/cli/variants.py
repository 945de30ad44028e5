"""Jobs and table of ``stretto compare``, for real and simulated runs alike."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from stretto.api.runs import ONE_ENGINE, OVERCOMMIT_RULES, VARIANTS, Failure, Job
from stretto.errors import ConfigError, nearest
from stretto.observe import make_progress
from stretto.observe.compare import Comparison, VariantResult
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


@dataclass(slots=True)
class Collected:
    """Outcomes of the runs.

    Attributes:
        outcomes: of the runs that took all their steps.
        failed: the runs that did not.
        interrupted: whether the user stopped before the last run.
    """

    outcomes: list[VariantResult] = field(default_factory=list)
    failed: list[Job] = field(default_factory=list)
    interrupted: bool = False


def plan(variants: str, seeds: str) -> list[Job]:
    """The runs, in their order.

    Args:
        variants: names, separated by commas.
        seeds: numbers, separated by commas.

    Raises:
        ConfigError: an unknown variant, a seed that is no number, or one of them twice.
    """
    names = _once((word.strip() for word in variants.split(",")), "--variants")
    for name in names:
        if name not in VARIANTS:
            raise ConfigError(f"--variants: there is no '{name}'. {nearest(name, VARIANTS)}")
    numbers = _once((_whole(word.strip()) for word in seeds.split(",")), "--seeds")
    return [Job(name, number) for number in numbers for name in names]


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError as error:
        raise ConfigError(f"--seeds: '{word}' is no whole number; write 0,1,2") from error


def _once(given: Iterable[T], option: str) -> list[T]:
    values = list(given)
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{option} names '{value}' twice; name each once")
    return values


def collect(
    jobs: Sequence[Job],
    execute: Callable[[Job, Advance], VariantResult | Failure],
    steps: int,
    *,
    simulated: bool = False,
) -> Collected:
    """Do the runs one after the other; failed ones are left out, Ctrl-C ends with what there is.

    Args:
        execute: does one, and tells of its steps.
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
        if isinstance(outcome, Failure):
            display.note(f"{name}: failed, {outcome.text}")
            collected.failed.append(job)
            continue
        collected.outcomes.append(outcome)
        took = f"{len(outcome.times_s)} steps in {outcome.times_s[-1]:.1f} s"
        if simulated:
            took += f" of simulated time ({time.monotonic() - since_s:.1f} s here)"
        display.note(f"{name}: {took}")
    return collected


def new_folder(out: str, name: str) -> Path:
    """Make ``<out>/<name>-<NNN>`` with the first number that is free.

    Raises:
        ConfigError: it cannot be made.
    """
    number = 0
    while True:
        number += 1
        path = Path(out) / f"{name}-{number:03d}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"cannot make a folder in '{out}': {error}; choose another with --out"
            ) from error
        return path


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
    text = "\n".join(
        [comparison.table(), "", *(f"- {note}" for note in notes), f"- Ran on: {where}."]
    )
    print(f"\n{text}\n")
    command = shlex.join(["stretto", "compare", *arguments])
    markdown = f"# {folder.name}\n\n```\n{command}\n```\n\n{text}\n"
    (folder / "compare.md").write_text(markdown, encoding="utf-8")
    data = {"command": command, "ran_on": where, "failed": missing, **comparison.data()}
    (folder / "compare.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {folder / 'compare.md'} and {folder / 'compare.json'}")


def exit_status(collected: Collected) -> int:
    """1 when a run failed.

    Raises:
        KeyboardInterrupt: the user stopped the comparison; passed on now that all is written.
    """
    if collected.interrupted:
        raise KeyboardInterrupt
    return 1 if collected.failed else 0
