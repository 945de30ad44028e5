"""The search: candidates by their lower bounds, simulated until no other can be among the best.

Candidates of each kind (what shares GPUs, the schedule, and whether ``stretto train`` can run it)
are simulated in the order of their bounds, kinds in turn. A candidate is left out when its bound is
no better than the best of its own kind, or than the best of enough other kinds. So what is found is
what simulating all of them would find, and each of the plans shown is of another kind.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from multiprocessing import active_children, get_context, parent_process
from statistics import fmean

from stretto.errors import ConfigError
from stretto.planner.bounds import Bounds
from stretto.planner.candidates import BASELINE, Candidate, Kind, Space, candidates, fits
from stretto.planner.clusters import PlanSpec, cluster_of
from stretto.runtime.sim.simulate import SimResult, simulate
from stretto.saying import Say, silent, working

WITHIN = 0.01
"""A candidate is left out when it could be quicker than what is known by this share at most."""
ROUNDS, WARM = 6, 2
"""Weight syncs that are simulated, and those that fill the pipeline and do not count."""


# -- a candidate -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A candidate and what the simulator says of it, once the pipeline is filled.

    Attributes:
        samples_per_s: responses trained on, over all GPUs together.
        staleness_mean, staleness_max: versions that responses are behind when they are trained on.
        busy: share of all GPUs' time in which a role worked.
        idle: shares of all GPUs' time by what a GPU waited for: data, scores, weights, stragglers.
            Together with ``busy`` they are 1.
    """

    candidate: Candidate
    step_s: float
    samples_per_s: float
    staleness_mean: float
    staleness_max: float
    busy: float
    idle: Mapping[str, float]


def result_of(spec: PlanSpec, candidate: Candidate) -> PlanResult:
    """Simulate a candidate.

    Raises ConfigError if keys and values have no room, StalledError if the schedule cannot go on.
    """
    layout, schedule = candidate.layout, candidate.schedule
    engines, bubble = candidate.engines, candidate.bubble
    cluster = cluster_of(spec, layout, schedule, engines=engines, bubble=bubble)
    interval = schedule.weight_sync_interval
    steps, warm = ROUNDS * interval, WARM * interval
    workload = spec.workload.model_copy(update={"steps": steps})
    result = simulate(cluster.model_copy(update={"workload": workload}))
    ends = list(accumulate(step["timing_s/step"] for step in result.steps))
    step_s = (ends[-1] - ends[warm - 1]) / (steps - warm)
    counted = result.steps[warm:]
    busy, idle = gpu_time(result, candidate)
    return PlanResult(
        candidate=candidate,
        step_s=step_s,
        samples_per_s=workload.batch / step_s,
        staleness_mean=fmean(step["staleness/mean"] for step in counted),
        staleness_max=max(step["staleness/max"] for step in counted),
        busy=busy,
        idle=idle,
    )


def gpu_time(result: SimResult, candidate: Candidate) -> tuple[float, dict[str, float]]:
    """Return the share of all GPUs' time that is worked, and the shares of waiting by cause.

    A GPU's waiting is divided by cause as that of its roles is. Copies of a generator that have
    nothing left to decode while others go on wait for stragglers.
    """
    devices = {role: set(numbers) for role, numbers in candidate.layout.devices.items()}
    generators, count = devices["generators"], len(result.device_utilisation)
    first, each = min(generators), len(generators) // candidate.engines
    uneven: dict[str, float] = defaultdict(float)
    for span in result.spans:
        uneven[span.role] += float(span.attributes.get("uneven_s", 0.0))
    idle: dict[str, float] = defaultdict(float)
    worked = 0.0
    for device, share in enumerate(result.device_utilisation):
        waited = 0.0
        if device in generators:
            at = (device - first) // each
            name = f"generator {at}" if candidate.engines > 1 else "generator"
            waited = uneven[name] / result.makespan_s
        worked += share - waited
        idle["stragglers"] += waited
        by_cause: dict[str, float] = defaultdict(float)
        for (role, cause), seconds in result.idle_s.items():
            if device in devices[_group(role)]:
                by_cause[cause] += seconds
        total = sum(by_cause.values())
        for cause, seconds in by_cause.items():
            idle[cause] += (1 - share) * seconds / total if total else 0.0
    return worked / count, {cause: share / count for cause, share in idle.items() if share > 0}


def _group(role: str) -> str:
    """Return where a layout has a role."""
    if role.startswith("generator"):
        return "generators"
    return role if role == "learner" else "scorers"


# -- all candidates --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """The best plans, and how far they can be trusted to be that.

    Attributes:
        best: the best of each kind, the quickest first, no more than asked for.
        baseline: the best with all roles on all GPUs, one after another; ``None`` if none fits.
        runnable: the best that ``stretto train`` can run; ``None`` if there is none.
        unfit: of the candidates, those that were looked at and do not fit into memory.
        bound_s: seconds of a step that no candidate left out can be below; infinite when none was
            left out for want of time.
        seconds: that the search took.
    """

    best: tuple[PlanResult, ...]
    baseline: PlanResult | None
    runnable: PlanResult | None
    candidates: int
    simulated: int
    unfit: int
    bound_s: float
    seconds: float


def search(
    spec: PlanSpec,
    space: Space,
    *,
    keep: int = 5,
    limit_s: float = inf,
    workers: int = 0,
    say: Say = silent,
) -> Found:
    """Find the plans with the shortest steps; raises ConfigError if nothing fits.

    Args:
        limit_s: seconds after which no further candidate is simulated.
        workers: processes that simulate; 0 takes one a core, 1 none but this one.
    """
    start_s = time.monotonic()
    with working(say, "listing plans"):
        kinds = _by_kind(spec, space)
    count = sum(map(len, kinds.values()))
    results: dict[Kind, PlanResult] = {}
    simulated, unfit, bound_s = 0, 0, inf
    with (
        working(say, "plans looked at or ruled out", count) as advance,
        _simulators(spec, workers or os.cpu_count() or 1) as (submit, room),
    ):
        running: set[Future[PlanResult]] = set()

        def collect(until: int) -> None:
            while len(running) > until:
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    running.remove(done)
                    result = done.result()
                    kind = result.candidate.kind
                    results[kind] = min(results.get(kind, result), result, key=_rank)

        # In turns, so that there is soon something of every kind to be measured against.
        while kinds:
            for kind, waiting in list(kinds.items()):
                collect(room - 1)
                ruled_out = not waiting or not _may_take(results, keep, kind, waiting[0][0])
                late = time.monotonic() - start_s > limit_s and (_can_run(results) or kind[2])
                if ruled_out or late:
                    if not ruled_out:
                        bound_s = min(bound_s, waiting[0][0])
                    del kinds[kind]  # all others of it have higher bounds
                    advance(len(waiting))
                    continue
                _, candidate = waiting.popleft()
                advance(1)
                if fits(spec, candidate):
                    running.add(submit(candidate))
                    simulated += 1
                else:
                    unfit += 1
        collect(0)
    if not results:
        raise ConfigError(
            f"nothing fits: no layout on {space.gpus} GPUs has memory for all phases; give more "
            "GPUs, or larger ones",
            "nothing-fits",
        )
    ranked = sorted(results.values(), key=_rank)
    return Found(
        best=tuple(ranked[:keep]),
        baseline=next((r for r in ranked if r.candidate.kind[:2] == BASELINE), None),
        runnable=next((r for r in ranked if not r.candidate.on_paper), None),
        candidates=count,
        simulated=simulated,
        unfit=unfit,
        bound_s=bound_s,
        seconds=time.monotonic() - start_s,
    )


def _rank(result: PlanResult) -> tuple[float, str]:
    return result.step_s, str(result.candidate.layout)


def _can_run(results: Mapping[Kind, PlanResult]) -> bool:
    """Return whether there is a plan that ``stretto train`` can run."""
    return any(not on_paper for *_, on_paper in results)


def _may_take(results: Mapping[Kind, PlanResult], keep: int, kind: Kind, bound: float) -> bool:
    """Return whether a candidate with this bound might still be among those shown."""
    bound *= 1 + WITHIN
    if (own := results.get(kind)) and bound >= own.step_s:
        return False
    if kind[:2] == BASELINE:
        return True
    others = sorted(r.step_s for k, r in results.items() if k != kind)
    would_run_first = not kind[2] and not _can_run(results)
    return len(others) < keep or bound < others[keep - 1] or would_run_first


def _by_kind(spec: PlanSpec, space: Space) -> dict[Kind, deque[tuple[float, Candidate]]]:
    """Return candidates with their bounds, the lowest first, by kind, the baseline's first."""
    bounds, bounded = Bounds(spec, WARM, ROUNDS), list[tuple[float, Candidate]]()
    for candidate in candidates(spec, space):
        with suppress(ConfigError):  # no room for keys and values
            bounded.append((bounds.of(candidate), candidate))
    found: dict[Kind, deque[tuple[float, Candidate]]] = {}
    for pair in sorted(bounded, key=lambda pair: pair[0]):
        found.setdefault(pair[1].kind, deque()).append(pair)
    return dict(sorted(found.items(), key=lambda item: item[0][:2] != BASELINE))


@contextmanager
def _simulators(
    spec: PlanSpec, workers: int
) -> Iterator[tuple[Callable[[Candidate], Future[PlanResult]], int]]:
    """Yield what starts a simulation, and how many may be under way."""
    if workers == 1:

        def here(candidate: Candidate) -> Future[PlanResult]:
            done: Future[PlanResult] = Future()
            done.set_result(result_of(spec, candidate))
            return done

        yield here, 1
        return
    # Spawned, as threads of the caller's libraries may hold locks that a fork would keep for ever.
    before = set(active_children())
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin_worker)
    try:
        yield (lambda candidate: pool.submit(result_of, spec, candidate)), workers
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(active_children()) - before:
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise ConfigError(
                f"one of {workers} processes that simulate was killed, maybe for want of memory; "
                "take fewer workers",
                "simulator-killed",
            ) from error
        raise
    finally:
        pool.shutdown()


def _begin_worker() -> None:
    """Leave Ctrl-C, which a terminal sends to all processes, to the parent; end when that does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
