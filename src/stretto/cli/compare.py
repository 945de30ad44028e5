"""``stretto compare`` (the same training under several schedules), ``report`` and ``watch``.

Each run of a comparison is a ``stretto train`` in its own process. Runs go seed by seed, with all
variants of a seed in turn, so that drift of the machine affects all variants alike.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from stretto import files
from stretto.api.runs import (
    ONE_ENGINE,
    OVERCOMMIT_RULES,
    REPLACED,
    VARIANTS,
    Job,
    Trainings,
    compare,
    config_of_job,
    report,
)
from stretto.api.settings import settled
from stretto.checks import check_run
from stretto.cli.options import Recipe, call_with_config, leading_recipe, value_of
from stretto.cli.parsing import call, takes
from stretto.config import Config, recipes
from stretto.config.sections import NonNegativeInt, Number, Port
from stretto.errors import ConfigError, nearest
from stretto.interfaces import command_line, worded
from stretto.machine import Machine
from stretto.observe import make_progress
from stretto.observe import report as reports
from stretto.observe.comparison import Comparison, VariantResult
from stretto.observe.lock import locked
from stretto.observe.progress import on_stderr
from stretto.observe.run_directory import new_folder
from stretto.planner.replay import predicted
from stretto.saying import CHECKING, LOADING, Advance, working

DEFAULT_VARIANTS = ",".join(ONE_ENGINE)
DEFAULT_SEEDS = "0,1,2"

VARIANTS_HELP = (
    "Schedules to compare, separated by commas; known: "
    f"{', '.join(name for name in VARIANTS if name not in OVERCOMMIT_RULES)}, and oppo with other "
    f"rules for over-commitment: {', '.join(OVERCOMMIT_RULES)}."
)


@takes(compare, "target")
def command_compare(
    config: Config,
    recipe: Recipe,
    /,
    *,
    variants: Annotated[str, arg(help=VARIANTS_HELP, metavar="NAME,...")] = DEFAULT_VARIANTS,
    seeds: Annotated[str, arg(metavar="INT,...")] = DEFAULT_SEEDS,
    target: Annotated[Number | None, arg(metavar="REWARD")] = None,
) -> int:
    """Train with several schedules, on the same recipe, seeds and data order, and compare them in
    one table. Settings come from the recipe and from options after it, and apply to all runs. Each
    variant replaces the recipe's schedule.preset and its six knobs. The runs, with their trained
    models, and the table go into a new folder in --out. With --sim and no recipe: the same in
    virtual time ('stretto compare --sim CLUSTER.toml --help').

    Args:
        seeds: Seeds, separated by commas.
    """
    with working(on_stderr, CHECKING):
        check_run(config)
    jobs = plan(variants, seeds)
    for job in jobs:  # report faults of any job before the first one starts
        config_of_job(config, job, "")

    with working(on_stderr, LOADING):
        config = settled(config, print)  # once, because runs that decide separately may differ
    folder = new_folder(Path(config.out), f"{recipes.name_of(recipe)}-compare")
    print(f"{len(jobs)} runs of {config.steps} steps, in {folder}", flush=True)
    with locked(folder, print):
        trainings = Trainings(config, jobs, folder)
        collected = collect(jobs, trainings.run, config.steps)
        publish(collected, target, folder, str(Machine.here()))
        first = [path for job, path in trainings.folders.items() if job.seed == jobs[0].seed]
        if run_folders := first[: reports.MAX_RUNS]:
            page = report(run_folders, folder / "report.html")
            print(f"wrote {page}: the runs of seed {jobs[0].seed} ({len(run_folders)} of them)")
        return exit_status(collected)


@takes(command_compare, "variants", "target")
def command_compare_simulated(
    *,
    sim: str,
    placement: Annotated[str, arg(metavar="RECIPE")] = "",
    variants: str,
    seeds: Annotated[str, arg(metavar="INT,...")] = "",
    steps: NonNegativeInt = 0,
    target: float | None,
    out: str = "runs",
) -> int:
    """Compare schedules in virtual time. This loads no model and needs no accelerator.

    Args:
        sim: A cluster's description (a .toml file), or the folder of a run, whose costs, response
            lengths and placement are used.
        placement: With a run's folder: a recipe or a .toml file whose runtime, [cluster] and
            rollout.engines replace those of the run.
        seeds: Seeds of lengths and rewards, separated by commas. Default: 0,1,2, or for a run's
            folder its own seed, because its lengths are fixed.
        steps: Batches to train on. 0 uses the description's number.
        out: Folder in which the comparison gets its own folder.
    """
    from stretto.api import simulated

    replayed = Path(sim).is_dir()
    if replayed and seeds:
        problem = f"--seeds {seeds}: lengths of '{sim}' depend on no seed; leave it out"
        raise ConfigError(problem, "seeds-of-replay")
    if placement and not replayed:
        problem = f"--placement {placement}: leave it out, or give a run's folder as --sim"
        raise ConfigError(problem, "placement-of-description")
    where = f"virtual time, with costs and lengths of {sim}"
    if replayed:
        simulation = simulated.recorded(sim, placement)
        seeds = str(simulation.seed)
        where += "; rewards are those of the run's responses, whatever trains on them"
    else:
        simulation = simulated.described(sim)
    jobs = plan(variants, seeds or DEFAULT_SEEDS)
    # Report faults of any job before the first one starts.
    clusters = {job: simulation.asked(job, steps) for job in jobs}

    def run(job: Job, advance: Advance) -> VariantResult:
        return simulation.run(job, clusters[job], advance)

    collected = collect(jobs, run, clusters[jobs[0]].workload.steps, simulated=True)
    folder = new_folder(Path(out), f"{recipes.name_of(sim)}-compare")
    publish(collected, target, folder, where)
    return exit_status(collected)


def run_compare(arguments: Sequence[str]) -> int:
    """Compare trainings, or with ``--sim`` simulations. Returns status 1 if a run failed."""
    if value_of("--sim", arguments) is None:
        fixed_settings = {"seed", "observe.progress", *(f"schedule.{knob}" for knob in REPLACED)}
        offered = [name for name in recipes.setting_names() if name not in fixed_settings]
        return call_with_config(command_compare, "compare", arguments, offered)
    if recipe := leading_recipe(arguments):
        raise ConfigError(
            f"--sim describes what is compared, and so does the recipe '{recipe}'; leave one of "
            "them out"
        )
    return call(command_compare_simulated, "compare", arguments)


def plan(variants: str, seeds: str) -> list[Job]:
    """Return the runs in order, from comma-separated variants and seeds."""
    names, numbers = ([word.strip() for word in text.split(",")] for text in (variants, seeds))
    for name in names:
        if name not in VARIANTS:
            message = f"--variants: there is no '{name}'. {nearest(name, VARIANTS)}"
            raise ConfigError(message, "unknown-variant")
    for number in numbers:
        if not number.removeprefix("-").isdecimal():
            message = f"--seeds: '{number}' is no whole number; write 0,1,2"
            raise ConfigError(message, "seed-not-whole")
    seed_values = [int(number) for number in numbers]
    for option, values in (("--variants", names), ("--seeds", map(str, seed_values))):
        (value, times), *_ = Counter(values).most_common(1)
        if times > 1:
            raise ConfigError(f"{option} names '{value}' twice; name each once", "named-twice")
    return [Job(name, number) for number in seed_values for name in names]


@dataclass(slots=True)
class Collected:
    """Outcomes of the complete runs, and the jobs of failed ones."""

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
    """Execute the jobs one after the other, until the last one or Ctrl-C.

    Args:
        execute: runs a job and reports its steps. Returns a message if the job failed.
        steps: steps of each run.
        simulated: whether the outcomes' seconds are virtual time.
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


def publish(collected: Collected, target: float | None, folder: Path, where: str) -> None:
    """Print the table, and write it with its data and notes."""
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
    command = command_line().line
    data = {"command": command, "ran_on": where, "failed": missing, **comparison.data()}
    page = f"# {folder.name}\n\n```\n{command}\n```\n\n{text}\n"
    (folder / "compare.md").write_text(page, encoding="utf-8")
    (folder / "compare.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {folder / 'compare.md'} and {folder / 'compare.json'}")


def exit_status(collected: Collected) -> int:
    if collected.interrupted:
        raise KeyboardInterrupt
    return 1 if collected.failed else 0


@takes(report, "step")
def command_report(
    runs: Annotated[tuple[str, ...], arg(metavar="RUN...")],
    /,
    out: str = "report.html",
    *,
    step: int,
) -> None:
    """Make one HTML page of one run or several: curves, timelines, utilisation, samples, settings,
    win-rate against KL, and the effect of off-policyness N on rewards. For up to six runs the page,
    and a table printed here, also compare each phase of a step as measured and as the simulator
    predicts it from the run's own records.

    The page is self-contained and opens without a network. Runs can be reported while they train.

    Args:
        runs: Run directories. The others are compared with the first.
        out: File for the page.
    """
    with working(on_stderr, "reading the runs"):
        loaded = reports.load(runs)
    with working(on_stderr, "predicting the runs from their own records"):
        predictions = predicted(runs) if len(runs) <= reports.MAX_RUNS else []
    data, file = [prediction.data() for prediction in predictions], Path(out)
    with files.explained(file):
        file.write_text(reports.html_page(loaded, step or None, data), encoding="utf-8")
    print(f"wrote {file}")
    for run, prediction in zip(loaded, predictions, strict=False):
        print(prediction.text(run.name))


def command_watch(
    runs: Annotated[tuple[str, ...], arg(metavar="RUN...")], /, port: Port = 0
) -> None:
    """Serve the page of ``stretto report`` for running or finished runs on the loopback interface.
    Curves and samples are updated until Ctrl-C.

    Args:
        runs: Run directories, up to six.
        port: Port to listen on. Default: a free one.
    """
    for run in runs:
        if not Path(run).is_dir():
            message = f"there is no folder '{run}' (looked for from {Path.cwd()})"
            raise ConfigError(f"{message}; name a run's folder", "no-run-directory")
    with reports.RunServer(runs, port) as server:
        print(f"watching {', '.join(runs)} at {server.url} (Ctrl-C ends)", flush=True)
        server.serve_forever()
