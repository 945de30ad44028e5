"""Comparison, reports and simulation of runs from Python, and named variants of the schedule."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from stretto import signals
from stretto.api.settings import Settings, changed, config_of
from stretto.api.training import begin, execute
from stretto.config import KNOBS, PRESETS, Config, ScheduleConfig, recipes
from stretto.config.sections import NonNegativeInt, Number, Seed
from stretto.errors import ConfigError
from stretto.interfaces import in_python
from stretto.observe import records
from stretto.observe.comparison import Comparison, VariantResult
from stretto.observe.display import repeated
from stretto.observe.report import MAX_RUNS, html_page, load
from stretto.observe.run_directory import METRICS
from stretto.saying import Advance, unseen

if TYPE_CHECKING:
    from stretto.runtime.sim.cluster import Cluster
    from stretto.runtime.sim.simulate import SimResult

STOP_S, LOOK_S = 30.0, 0.5
"""Seconds for an interrupted run to save its model, and between checks of a run's progress."""

WARMUP = "warmup.safetensors"
"""File with the warmed-up weights of a seed, kept until its last run."""


def _variants(*, several_engines: bool) -> dict[str, dict[str, object]]:
    """Return presets, each preceded by its ablations: the preset without one of its parts."""
    variants: dict[str, dict[str, object]] = {}
    for name, preset in PRESETS.items():
        if preset.several_engines == several_engines and name != "auto":  # which tries many
            for part, knob in preset.parts.items():
                variants[f"{name}-no-{part}"] = {"preset": name, knob: KNOBS[knob].off[0]}
            variants[name] = {"preset": name}
    return variants


ONE_ENGINE = _variants(several_engines=False)
"""Variants for a single engine."""

OVERCOMMIT_RULES: dict[str, dict[str, object]] = {
    "oppo-algorithm1": {"preset": "oppo", "overcommit_rule": "algorithm1"},
    "oppo-throughput": {"preset": "oppo", "overcommit_rule": "throughput"},
    "oppo-delta4": {"preset": "oppo", "overcommit": 4},
    "oppo-delta8": {"preset": "oppo", "overcommit": 8},
}
"""Rules for the delta of 'oppo' other than its default 'equation4'."""

VARIANTS: Mapping[str, Mapping[str, object]] = (
    ONE_ENGINE | _variants(several_engines=True) | OVERCOMMIT_RULES | {"auto": {"preset": "auto"}}
)
"""Schedule settings by name."""

REPLACED = ("preset", *KNOBS)
"""Settings of the recipe that every variant replaces, with the default if it names no value."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a comparison."""

    variant: str
    seed: int


def config_of_job(config: Config, job: Job, out: str) -> Config:
    """Return the settings of one run. It only writes checkpoints that a recipe counts in steps."""
    data = config.model_dump()
    data |= {"seed": job.seed, "out": out, "schedule": schedule_of(config.schedule, job.variant)}
    data["observe"] |= {"progress": "plain", "checkpoint_minutes": 0.0}
    return recipes.build(data, f"variant '{job.variant}'")


def schedule_of(
    schedule: ScheduleConfig, variant: str, variants: Mapping[str, Mapping[str, object]] = VARIANTS
) -> dict[str, Any]:
    defaults = ScheduleConfig().model_dump()
    knobs = {name: defaults[name] for name in REPLACED}
    return {**schedule.model_dump(), **knobs, **variants[variant]}


def outcome_of(job: Job, folder: Path) -> VariantResult:
    return VariantResult.of(job.variant, job.seed, load([folder])[0])


@in_python
def report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    step: NonNegativeInt = 0,
) -> Path:
    """Write an HTML page of runs and return its file, like ``stretto report``.

    The first run is compared with the rest. Up to six runs are also predicted from their own
    records.

    Args:
        step: Step whose timeline is shown. Default: one from the middle.
    """
    from stretto.planner.replay import predicted

    folders = [runs] if isinstance(runs, str | Path) else list(runs)
    file, loaded = Path(out), load(folders)
    predictions = predicted(folders) if len(folders) <= MAX_RUNS else ()
    page = html_page(loaded, step or None, [prediction.data() for prediction in predictions])
    file.write_text(page, encoding="utf-8")
    return file


@in_python
def compare(
    settings: Settings,
    variants: Sequence[str] | Mapping[str, Mapping[str, Any]] = ("sync", "oppo"),
    *,
    seeds: Sequence[Seed] = (0,),
    target: Number | None = None,
    **changes: Any,
) -> Comparison:
    """Run the same training under several schedules, one run after the other in this process.
    ``stretto compare`` does so in separate processes. The result has ``table()`` and ``data()``.

    Args:
        settings, changes: as in :func:`train`.
        variants: presets of the schedule, or schedule settings by name.
        seeds: seeds that each variant runs with.
        target: Reward to reach, smoothed over 10 steps. Default: 95 % of the way from sync's first
            reward to its last.
    """
    from stretto.assembly.run_models import Overrides

    base = changed(config_of(settings), changes)
    if not isinstance(variants, Mapping):
        variants = {name: {"preset": name} for name in variants}
    runs = {
        Job(name, seed): changed(base, {"seed": seed, "schedule": dict(variants[name])})
        for seed in seeds
        for name in variants
    }  # all are checked before the first one starts
    outcomes = []
    Path(base.out).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="warmup-", dir=base.out) as warm:
        for job, config in runs.items():
            overrides = Overrides(warmup=Path(warm, f"seed{job.seed}.safetensors"))
            run = begin(config, f"{job.variant}-seed{job.seed}", overrides=overrides)
            execute(run)
            outcomes.append(outcome_of(job, run.run_dir.path))
    return Comparison(outcomes, target)


@in_python
def simulate(cluster: Cluster, *, seed: Seed = 0) -> SimResult:
    """Run a schedule on a cluster in virtual time, like ``stretto compare --sim``."""
    from stretto.planner.formulas import priced
    from stretto.runtime.sim.cluster import Cluster
    from stretto.runtime.sim.simulate import simulate as run

    if not isinstance(cluster, Cluster):
        message = f"simulate takes a Cluster; got {cluster!r}. Cluster.read(FILE) makes one"
        raise ConfigError(message, "not-a-cluster")
    return run(priced(cluster), seed=seed)


class Trainings:
    """Runs the trainings of a comparison, each as ``stretto train`` in its own process.

    Runs of one seed have a folder in ``folder`` and share a warm-up.

    Attributes:
        folders: folders of the complete runs.
    """

    def __init__(self, config: Config, jobs: Iterable[Job], folder: Path) -> None:
        self.folders: dict[Job, Path] = {}
        self._config, self._folder = config, folder
        self._last = {job.seed: job for job in jobs}

    def run(self, job: Job, advance: Advance = unseen) -> VariantResult | str:
        """Train to the end. Return a message if the run failed.

        Its output goes into a log next to its folder, because an early failure leaves no folder. A
        KeyboardInterrupt of this process stops the run in order, or kills it.
        """
        out = self._folder / f"seed{job.seed}"
        out.mkdir(exist_ok=True)
        config = config_of_job(self._config, job, str(out))
        recipe, log = out / f"{job.variant}.toml", out / f"{job.variant}.log"
        recipe.write_text(recipes.dump(config), encoding="utf-8")
        command = [sys.executable, "-m", "stretto", "train", str(recipe)]
        if config.warmup_examples:
            command += ["--warmup-file", str(out / WARMUP)]
        folders, seen = f"{job.variant}-[0-9]*", 0

        def look() -> float:
            nonlocal seen
            for file in out.glob(f"{folders}/{METRICS}"):
                last = records.last(file)
                steps = last["step"] if last else 0
                advance(steps - seen)
                seen = steps
            return LOOK_S

        with repeated(look, LOOK_S):
            status = run_command(command, log)
        if job == self._last[job.seed]:
            (out / WARMUP).unlink(missing_ok=True)
        if status:
            with log.open(encoding="utf-8", errors="replace") as lines:
                end = "".join(f"    {line}" for line in deque(lines, 12))
            return f"exit status {status}; the end of {log}:\n{end.rstrip()}"
        (self.folders[job],) = out.glob(f"{folders}/")
        (self.folders[job] / WARMUP).unlink(missing_ok=True)  # a link to the shared file
        return outcome_of(job, self.folders[job])


def run_command(command: Sequence[str], log: Path) -> int:
    """Run a command and return its exit status. Ctrl-C and ending signals stop it and are raised.
    The command also ends with this process, however that ends.
    """
    ours, theirs = os.pipe()  # never written to: it closes when this process ends
    with os.fdopen(ours, "rb") as read, os.fdopen(theirs, "wb"), log.open("wb") as stream:
        # In its own process group, because the terminal would send Ctrl-C to both, and the second
        # one, from here, would abort the run's orderly end.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=[read.fileno()],
            env={**os.environ, signals.PARENT: str(read.fileno())},
        )
        read.close()
        try:
            return process.wait()
        except BaseException:
            _stop(process)
            raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
