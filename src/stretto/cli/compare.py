"""``stretto compare``: the same training under several schedules, side by side; ``report``: runs as
a page to explore, or a step of theirs as a picture; ``watch``: the page of runs that go on.

Each run of a comparison is a ``stretto train`` in a process of its own. Runs go seed by seed, with
the variants in turn within a seed, so that whatever drifts on the machine hits all of them alike.
"""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import arg

from stretto.api.runs import (
    ONE_ENGINE,
    OVERCOMMIT_RULES,
    REPLACED,
    VARIANTS,
    Job,
    Trainings,
    config_of_job,
    report,
)
from stretto.api.settings import settled
from stretto.checks import check_run
from stretto.cli.parsing import arguments_of, takes
from stretto.cli.settings import Recipe, leading_recipe, parse_with_config, value_of
from stretto.config import recipes
from stretto.config.sections import NonNegativeInt, Number, Port
from stretto.errors import ConfigError, nearest
from stretto.interfaces import worded
from stretto.machine import Machine
from stretto.observe import make_progress
from stretto.observe import report as reports
from stretto.observe.compare import Comparison, VariantResult
from stretto.observe.lock import locked
from stretto.observe.progress import on_stderr
from stretto.observe.run_directory import claim
from stretto.planner.replay import predicted
from stretto.saying import CHECKING, LOADING, Advance, working

DEFAULT_VARIANTS = ",".join(ONE_ENGINE)
DEFAULT_SEEDS = "0,1,2"

VARIANTS_HELP = (
    "Schedules to compare, separated by commas; known: "
    f"{', '.join(name for name in VARIANTS if name not in OVERCOMMIT_RULES)}, and oppo with other "
    f"rules for over-commitment: {', '.join(OVERCOMMIT_RULES)}."
)


@dataclass
class Options:
    """Train with several schedules, on the same recipe, seeds and data order, and compare them in
    one table. Settings come from the recipe and from options, which come after it, and hold for all
    runs; a variant replaces the recipe's schedule.preset and its five knobs. The runs, with their
    trained models, and the table go into a new folder in --out. With --sim and no recipe: the same
    in virtual time ('stretto compare --sim CLUSTER.toml --help').

    Attributes:
        seeds: Seeds, separated by commas.
        target: Reward to be reached, after smoothing over 10 steps; without it, 95 % of the way
            from sync's first to its last.
    """

    recipe: Recipe = tyro.MISSING
    variants: Annotated[str, arg(help=VARIANTS_HELP, metavar="NAME,...")] = DEFAULT_VARIANTS
    seeds: Annotated[str, arg(metavar="INT,...")] = DEFAULT_SEEDS
    target: Annotated[Number | None, arg(metavar="REWARD")] = None


def run_compare(arguments: Sequence[str]) -> int:
    """Compare, print the table and write it; status 1 when a run failed."""
    if value_of("--sim", arguments) is not None:
        if recipe := leading_recipe(arguments):
            raise ConfigError(
                f"--sim describes what is compared, and so does the recipe '{recipe}'; leave one "
                "of them out"
            )
        return _run_simulated(arguments)
    kept = {"seed", "observe.progress", *(f"schedule.{knob}" for knob in REPLACED)}
    offered = [name for name in recipes.setting_names() if name not in kept]
    config, options = parse_with_config(Options, "compare", arguments, offered)
    own = Options(**options)
    with working(on_stderr, CHECKING):
        check_run(config)
    jobs = plan(own.variants, own.seeds)
    for job in jobs:  # what is wrong with any of them is said before the first one starts
        config_of_job(config, job, "")

    with working(on_stderr, LOADING):
        config = settled(config, print)  # once, as runs that decide for themselves may differ
    folder = new_folder(config.out, f"{recipes.name_of(own.recipe)}-compare")
    print(f"{len(jobs)} runs of {config.steps} steps, in {folder}", flush=True)
    with locked(folder, print):
        trainings = Trainings(config, jobs, folder)
        collected = collect(jobs, trainings.run, config.steps)
        publish(collected, own.target, folder, arguments, str(Machine.here()))
        first = [path for job, path in trainings.folders.items() if job.seed == jobs[0].seed]
        if shown := first[: reports.MAX_RUNS]:
            page = report(shown, folder / "report.html")
            print(f"wrote {page}: the runs of seed {jobs[0].seed} ({len(shown)} of them)")
        return exit_status(collected)


@takes(Options, "variants", "target")
@dataclass(frozen=True, slots=True)
class SimOptions:
    """Compare schedules in virtual time: no model is loaded, and no accelerator needed.

    Attributes:
        sim: A cluster's description, a .toml file; or the folder of a run, whose costs, response
            lengths and placement are then taken.
        placement: With a run's folder: a recipe, or a .toml file, whose runtime, [cluster] and
            rollout.engines take the place of the run's.
        seeds: Seeds of lengths and rewards, separated by commas; without them: 0,1,2, and for a
            run's folder its own seed, as its lengths are what they were.
        steps: Batches to train on; 0 leaves it to the description.
        out: Folder in which the comparison gets a folder of its own.
    """

    sim: str
    placement: Annotated[str, arg(metavar="RECIPE")] = ""
    variants: str = ""
    seeds: Annotated[str, arg(metavar="INT,...")] = ""
    steps: NonNegativeInt = 0
    target: float | None = None
    out: str = "runs"


def _run_simulated(arguments: Sequence[str]) -> int:
    """Compare in virtual time, print the table and write it."""
    from stretto.api import simulated

    options = SimOptions(**arguments_of(SimOptions, "compare", arguments))
    sim, placement = options.sim, options.placement
    replayed = Path(sim).is_dir()
    if replayed and options.seeds:
        problem = f"--seeds {options.seeds}: lengths of '{sim}' depend on no seed; leave it out"
        raise ConfigError(problem, "seeds-of-replay")
    if placement and not replayed:
        problem = f"--placement {placement}: leave it out, or give a run's folder as --sim"
        raise ConfigError(problem, "placement-of-description")
    where = f"virtual time, with costs and lengths of {sim}"
    if replayed:
        simulation = simulated.recorded(sim, placement)
        jobs = plan(options.variants, str(simulation.seed))
        where += "; rewards are those of the run's responses, whatever trains on them"
    else:
        simulation = simulated.described(sim)
        jobs = plan(options.variants, options.seeds or DEFAULT_SEEDS)
    # What is wrong with any of them is said before the first one starts.
    clusters = {job: simulation.asked(job, options.steps) for job in jobs}
    collected = collect(
        jobs,
        lambda job, advance: simulation.run(job, clusters[job], advance),
        clusters[jobs[0]].workload.steps,
        simulated=True,
    )
    folder = new_folder(options.out, f"{recipes.name_of(sim)}-compare")
    publish(collected, options.target, folder, arguments, where)
    return exit_status(collected)


def plan(variants: str, seeds: str) -> list[Job]:
    """Return the runs in their order, of variants' names and seeds with commas between."""
    names, numbers = ([word.strip() for word in text.split(",")] for text in (variants, seeds))
    for name in names:
        if name not in VARIANTS:
            message = f"--variants: there is no '{name}'. {nearest(name, VARIANTS)}"
            raise ConfigError(message, "unknown-variant")
    for number in numbers:
        if not number.removeprefix("-").isdecimal():
            message = f"--seeds: '{number}' is no whole number; write 0,1,2"
            raise ConfigError(message, "seed-not-whole")
    whole = [int(number) for number in numbers]
    for option, values in (("--variants", names), ("--seeds", map(str, whole))):
        (value, times), *_ = Counter(values).most_common(1)
        if times > 1:
            raise ConfigError(f"{option} names '{value}' twice; name each once", "named-twice")
    return [Job(name, number) for number in whole for name in names]


@dataclass(slots=True)
class Collected:
    """Outcomes of the runs that took all their steps, and the jobs of those that did not."""

    outcomes: list[VariantResult] = field(default_factory=list)
    failed: list[Job] = field(default_factory=list)
    interrupted: bool = False


def collect(
    jobs: Sequence[Job],
    execute: Callable[[Job, Advance], VariantResult | str],
    steps: int,
    *,
    simulated: bool = False,
) -> Collected:
    """Do the runs of so many steps one after the other, up to the last one or to Ctrl-C.

    Args:
        execute: does a run and tells of its steps; returns a message about one that failed.
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
    notes = [worded(note) for note in comparison.notes()]
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
    if collected.interrupted:
        raise KeyboardInterrupt
    return 1 if collected.failed else 0


def command_report(
    runs: Annotated[tuple[str, ...], arg(metavar="RUN...")],
    /,
    out: str = "",
    step: NonNegativeInt = 0,
    timeline: str = "",
) -> None:
    """Make one HTML page of one run or several: curves, timelines, utilisation, samples, settings;
    win-rate against KL, and what became of rewards with the off-policyness N. Of up to six runs the
    page, and a table here, also show each phase of a step as measured and as the simulator predicts
    it from the run's own records.

    The page holds all it needs and opens without a network. Runs that are still going can be
    reported too.

    Args:
        runs: Run directories; the first is what the others are compared with.
        out: File for the page. Without it: report.html, unless --timeline asks for a picture alone.
        step: Step whose timeline is shown; without it, one from the middle.
        timeline: File for an SVG picture of the step, the runs one below the other over the same
            time axis.
    """
    with working(on_stderr, "reading the runs"):
        loaded = reports.load(runs)
    if out or not timeline:
        with working(on_stderr, "predicting the runs from their own records"):
            found = predicted(runs) if len(runs) <= reports.MAX_RUNS else []
        data = [each.data() for each in found]
        _write(out or "report.html", reports.html_page(loaded, step or None, data))
        for run, each in zip(loaded, found, strict=False):
            print(each.text(run.name))
    if timeline:
        _write(timeline, reports.timeline_svg(loaded, step or None))


def command_watch(
    runs: Annotated[tuple[str, ...], arg(metavar="RUN...")],
    /,
    port: Port = 0,
) -> None:
    """Show one run or several as they go on: serve the page of ``stretto report`` to this machine,
    on the loopback. Its curves and samples are kept up to date until Ctrl-C.

    Args:
        runs: Run directories, at most six. A run may have ended.
        port: Port to listen on; without it, a free one.
    """
    for run in runs:
        if not Path(run).is_dir():
            message = f"there is no folder '{run}' (looked for from {Path.cwd()})"
            raise ConfigError(f"{message}; name a run's folder", "no-run-directory")
    with reports.RunServer(runs, port) as server:
        print(f"watching {', '.join(runs)} at {server.url} (Ctrl-C ends)", flush=True)
        server.serve_forever()


def _write(name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write '{name}': {error}; choose another file") from error
    print(f"wrote {Path(name)}")
