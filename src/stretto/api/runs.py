"""Runs compared, shown and simulated, from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from stretto.api.execution import begin, execute
from stretto.api.settings import Settings, changed, config_of

if TYPE_CHECKING:
    from stretto.observe.compare import Comparison
    from stretto.runtime.sim.cluster import Cluster
    from stretto.runtime.sim.simulate import SimResult


def report(
    runs: str | Path | Sequence[str | Path], out: str | Path = "report.html", *, step: int = 0
) -> Path:
    """One page of runs, to be opened in a browser; what ``stretto report`` writes.

    Runs that can be told apart on it are also predicted from their own records.

    Args:
        runs: folders of runs; the first is what the others are compared with.
        out: file for the page.
        step: whose timeline is shown; without it, one from the middle.

    Returns:
        the page's file.
    """
    from stretto.api.predicted import predicted
    from stretto.observe.report import MAX_RUNS, html_page, load

    folders = [runs] if isinstance(runs, str | Path) else list(runs)
    file, loaded = Path(out), load(folders)
    found = predicted(folders) if len(folders) <= MAX_RUNS else ()
    page = html_page(loaded, step or None, [each.data() for each in found])
    file.write_text(page, encoding="utf-8")
    return file


def compare(
    settings: Settings,
    variants: Sequence[str] | Mapping[str, Mapping[str, Any]] = ("sync", "oppo"),
    *,
    seeds: Sequence[int] = (0,),
    target: float | None = None,
    **changes: Any,
) -> Comparison:
    """The same training under several schedules, one run after the other in this process; what
    ``stretto compare`` does in processes of their own.

    Args:
        settings: as in :func:`train`.
        variants: presets of the schedule, or settings of the schedule by a name for them.
        seeds: each variant runs with each.
        target: reward to be reached; without it, most of the way that the first variant goes.
        changes: as in :func:`train`.

    Returns:
        its ``table()`` is for people, its ``data()`` for programs.
    """
    from stretto.api.variants import Job, outcome_of
    from stretto.assembly.models import Given
    from stretto.observe.compare import Comparison

    base = changed(config_of(settings), changes)
    if not isinstance(variants, Mapping):
        variants = {name: {"preset": name} for name in variants}
    runs = {
        Job(name, seed): changed(base, {"seed": seed, "schedule": dict(variants[name])})
        for seed in seeds
        for name in variants
    }  # all of them are checked before the first one starts
    outcomes = []
    Path(base.out).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="warmup-", dir=base.out) as warm:
        for job, config in runs.items():
            run = begin(config, f"{job.variant}-seed{job.seed}")
            execute(run, given=Given(warmup=Path(warm, f"seed{job.seed}.safetensors")))
            outcomes.append(outcome_of(job, run.run_dir.path))
    return Comparison(outcomes, target)


def simulate(cluster: Cluster, *, seed: int = 0) -> SimResult:
    """A schedule on a described cluster, in virtual time; what ``stretto compare --sim`` runs.

    Args:
        cluster: see :class:`stretto.runtime.sim.cluster.Cluster`.
    """
    from stretto.planner.formulas import priced
    from stretto.runtime.sim.simulate import simulate as run

    return run(priced(cluster), seed=seed)
