"""The search: simulates candidates by their lower bounds until no other can be among the best.

Candidates of each kind (sharing of GPUs and schedule) are simulated in the order of their bounds,
kinds in turn. A candidate is skipped if its bound is no
better than the best of its own kind, or than the best of enough other kinds. So the result is the
same as from simulating all candidates, and each plan shown is of another kind.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import inf
from multiprocessing import active_children, get_context, parent_process
from statistics import fmean
from typing import NamedTuple

from stretto.config import ScheduleConfig
from stretto.errors import ConfigError
from stretto.planner.candidates import (
    BASELINE,
    Candidate,
    Kind,
    PlanSpec,
    candidates,
    cluster_of,
    cost_of_generator,
    cost_of_learner,
    fits,
    scorers_of,
)
from stretto.planner.run_layout import RunLayout
from stretto.runtime.sim.cluster import Cluster, GeneratorRole, LearnerRole, Workload
from stretto.runtime.sim.costs import DecodeCost, GeneratorCost, PrefillCost, TrainCost
from stretto.runtime.sim.simulate import SimResult, simulate
from stretto.saying import Say, silent, working

CARRIED = 0.95
"""Share of the work that counts if responses are carried over. Copies of a generator do not quite
keep step, so other responses may end first."""


class StepWork(NamedTuple):
    """The work of an average step: decode steps, and tokens, prompts included."""

    steps: float
    decoded: float
    read: float
    prefilled: float
    trained: float


def work_of(workload: Workload, schedule: ScheduleConfig, first: int, last: int) -> StepWork:
    """Return the work of a step, on average between two weight syncs. Only decode steps take time,
    with one token for each row in flight. Turns of episodes are answered at once."""
    interval = schedule.weight_sync_interval
    if workload.episodes:
        workload = workload.model_copy(update={"episodes": workload.episodes.at_once()})
    cluster = Cluster(
        generators=(GeneratorRole(cost=GeneratorCost(decode=DecodeCost(step_s=1.0))),),
        learner=LearnerRole(devices=(1,), cost=TrainCost()),
        workload=workload.model_copy(update={"steps": last * interval}),
        schedule=schedule,
    )
    spans = simulate(cluster).spans
    updates = [span for span in spans if span.name == "update"]
    began_s = updates[(first - 1) * interval].start_s
    calls = [span for span in spans if span.name == "gen" and span.end_s > began_s]
    names = ("steps", "tokens", "context", "prefilled")
    sums = [sum(span.attributes[name] for span in calls) for name in names]
    trained = sum(span.attributes["tokens"] for span in updates[first * interval :])
    return StepWork(*(total / (last - first) / interval for total in (*sums, trained)))


class Bounds:
    """Lower bounds on the step time of a plan's candidates."""

    def __init__(self, spec: PlanSpec, first: int, last: int) -> None:
        self._spec, self._last = spec, last
        self._generator = cache(lambda layout: cost_of_generator(spec, layout))
        self._learner = cache(lambda layout: cost_of_learner(spec, layout))
        self._scorers = cache(self._scorers_of)
        self._work = cache(lambda schedule: work_of(spec.workload, schedule, first, last))

    def of(self, candidate: Candidate) -> float:
        """Return a step's least seconds. Raises ConfigError if keys and values do not fit."""
        layout = candidate.layout
        schedule = candidate.schedule
        knobs = candidate.schedule.knobs
        generator, learner = self._generator(layout), self._learner(layout)
        token_s, load_s = self._scorers(layout)
        work = self._work(self._lockstep(schedule))
        share = CARRIED if knobs.on("overcommit") else 1.0
        generating = share * self._generating(candidate, generator, work)
        generating += generator.load_s / schedule.weight_sync_interval
        training = share * learner.seconds(int(work.trained))
        scoring = share * token_s * work.trained
        scorers = scoring + load_s / schedule.weight_sync_interval
        produced = generating + (scoring if knobs.score_on == "batch" else 0.0)
        if not knobs.streams and not knobs.on("overcommit"):
            produced = max(produced, scoring)  # scorers cannot score a batch while it is trained on
        # The training of lag + 1 steps ago must end before this generation begins.
        left = learner.seconds(0) if knobs.on("train_on") else training
        in_turn = (produced + left) / (knobs.lag + 1)
        if not knobs.lag:
            return max(in_turn, scorers, training)
        on_learner = training + (scorers if layout.sharing == "learner" else 0.0)
        on_generators = generating + (scoring if layout.sharing == "generators" else 0.0)
        return max(in_turn, on_learner, on_generators, scorers)

    def _generating(self, candidate: Candidate, cost: GeneratorCost, work: StepWork) -> float:
        """Return the seconds of generating: the average copy's or the longest response's."""
        copies = candidate.layout.generator.dp
        decode = cost.decode
        schedule = candidate.schedule
        tokens, context = work.decoded / copies, work.read / copies
        prefill_s = cost.prefill.token_s * work.prefilled / copies
        if schedule.knobs.on("overcommit"):
            return decode.at_least(work.steps, tokens, context) + prefill_s
        # The copy with the longest response may have few others.
        rows = self._spec.workload.batch * schedule.weight_sync_interval  # decoded together
        average_s = decode.at_least(work.decoded / rows, tokens, context)
        return max(average_s + prefill_s, decode.seconds(1, 0, int(work.steps)))

    def _lockstep(self, schedule: ScheduleConfig) -> ScheduleConfig:
        """Return a schedule of only the largest overcommit delta in the simulated steps."""
        w, interval = self._spec.workload, schedule.weight_sync_interval
        extra = schedule.largest_overcommit(w.batch)
        looks_back = schedule.overcommit_rule != "throughput"
        unseen = 2 * schedule.overcommit_window >= self._last * interval
        if schedule.knobs.overcommit == "auto" and looks_back and unseen:
            extra = schedule.first_overcommit(w.batch)  # no reward has been seen yet
        extra += -extra % w.samples_per_prompt
        return ScheduleConfig(
            score_on="rollout",
            overcommit=extra,
            weight_sync_interval=interval,
            carry=schedule.carry,
        )

    def _scorers_of(self, layout: RunLayout) -> tuple[float, float]:
        """Return the seconds per token of all scorers in turn, and the seconds to load weights. Of
        teachers, the fastest one counts for all prompts.
        """
        scorers = scorers_of(self._spec, layout)
        costs = [(s, s.cost.token_s) for s in scorers if isinstance(s.cost, PrefillCost)]
        teachers_s = [token_s for scorer, token_s in costs if scorer.share < 1.0]
        token_s = sum(token_s for scorer, token_s in costs if scorer.share == 1.0)
        return token_s + min(teachers_s, default=0.0), sum(scorer.load_s for scorer in scorers)


WITHIN = 0.01
"""A candidate is skipped if it could be faster than the best so far by at most this share."""
ROUNDS, WARM = 6, 2  # simulated weight syncs, and how many of them only fill the pipeline


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A candidate's simulated results, once the pipeline is filled. ``busy`` and the values of
    ``idle`` (by cause) are shares of all GPUs' time and add up to 1."""

    candidate: Candidate
    step_s: float
    samples_per_s: float
    staleness_mean: float
    staleness_max: float
    busy: float
    idle: Mapping[str, float]


def result_of(spec: PlanSpec, candidate: Candidate) -> PlanResult:
    """Simulate a candidate. Raises ConfigError if keys and values have no room, or StalledError."""
    cluster, interval = cluster_of(spec, candidate), candidate.schedule.weight_sync_interval
    steps, warm = ROUNDS * interval, WARM * interval
    workload = spec.workload.model_copy(update={"steps": steps})
    result = simulate(cluster.model_copy(update={"workload": workload}))
    ends = list(accumulate(step["timing_s/step"] for step in result.steps))
    step_s = (ends[-1] - ends[warm - 1]) / (steps - warm)
    mean = fmean(step["staleness/mean"] for step in result.steps[warm:])
    staleness_max = max(step["staleness/max"] for step in result.steps[warm:])
    busy, idle = gpu_time(result, candidate)
    return PlanResult(candidate, step_s, workload.batch / step_s, mean, staleness_max, busy, idle)


def gpu_time(result: SimResult, candidate: Candidate) -> tuple[float, dict[str, float]]:
    """Return the busy share of all GPUs' time, and the idle shares by cause. A GPU's idle time is
    divided by cause like that of its roles. Copies of a generator that have nothing left to decode
    while others go on wait for stragglers."""
    devices = {role: set(numbers) for role, numbers in candidate.layout.devices.items()}
    generators, count = devices["generators"], len(result.device_utilisation)
    first, per_engine = min(generators), len(generators) // candidate.engines
    uneven: dict[str, float] = defaultdict(float)
    for span in result.spans:
        uneven[span.role] += float(span.attributes.get("uneven_s", 0.0))
    idle: dict[str, float] = defaultdict(float)
    worked = 0.0
    for device, share in enumerate(result.device_utilisation):
        waited = 0.0
        if device in generators:
            at = (device - first) // per_engine
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
    if role.startswith("generator"):
        return "generators"
    return role if role == "learner" else "scorers"


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The best plans of each kind, and how complete the search was."""

    best: tuple[PlanResult, ...]
    baseline: PlanResult | None  # the best with all roles on all GPUs, in turns, if one fits
    candidates: int
    simulated: int
    unfit: int  # examined candidates that do not fit into memory
    bound_s: float  # lower bound on the steps of candidates skipped for lack of time
    seconds: float


def search(
    spec: PlanSpec, *, keep: int = 5, limit_s: float = inf, workers: int = 0, say: Say = silent
) -> SearchOutcome:
    """Find the plans with the shortest steps. Raises ConfigError if nothing fits. No simulation
    starts after ``limit_s``. ``workers = 0`` is one a core, 1 is this process."""
    start_s = time.monotonic()
    with working(say, "listing plans"):
        kinds = _by_kind(spec)
    count = sum(map(len, kinds.values()))
    results: dict[Kind, PlanResult] = {}
    simulated = 0
    unfit = 0
    bound_s = inf
    with (
        working(say, "plans looked at or ruled out", count, limit_s) as advance,
        _simulators(spec, workers or os.cpu_count() or 1) as (submit, room),
    ):
        running: set[futures.Future[PlanResult]] = set()

        def collect(until: int) -> None:
            while len(running) > until:
                for done in futures.wait(running, return_when=futures.FIRST_COMPLETED).done:
                    running.remove(done)
                    result = done.result()
                    kind = result.candidate.kind
                    results[kind] = min(results.get(kind, result), result, key=_rank)

        # Kinds take turns, so that bounds are soon compared with a result of every kind.
        while kinds:
            for kind, waiting in list(kinds.items()):
                collect(room - 1)
                ruled_out = not waiting or not _may_take(results, keep, kind, waiting[0][0])
                late = time.monotonic() - start_s > limit_s and results
                if ruled_out or late:
                    if not ruled_out:
                        bound_s = min(bound_s, waiting[0][0])
                    del kinds[kind]  # all its others have higher bounds
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
        problem = (
            f"no layout on {spec.gpus} GPUs has memory for all phases; give more or larger ones"
        )
        raise ConfigError(problem, "nothing-fits")
    ranked = sorted(results.values(), key=_rank)
    return SearchOutcome(
        best=tuple(ranked[:keep]),
        baseline=results.get(BASELINE),
        candidates=count,
        simulated=simulated,
        unfit=unfit,
        bound_s=bound_s,
        seconds=time.monotonic() - start_s,
    )


def _rank(result: PlanResult) -> tuple[float, str]:
    return result.step_s, str(result.candidate.layout)


def _may_take(results: Mapping[Kind, PlanResult], keep: int, kind: Kind, bound: float) -> bool:
    """Return whether a candidate with this bound might still be among those shown."""
    bound *= 1 + WITHIN
    if (best_of_kind := results.get(kind)) and bound >= best_of_kind.step_s:
        return False
    if kind == BASELINE:
        return True
    other_steps_s = sorted(r.step_s for k, r in results.items() if k != kind)
    return len(other_steps_s) < keep or bound < other_steps_s[keep - 1]


def _by_kind(spec: PlanSpec) -> dict[Kind, deque[tuple[float, Candidate]]]:
    bounds, bounded = Bounds(spec, WARM, ROUNDS), list[tuple[float, Candidate]]()
    for candidate in candidates(spec):
        with suppress(ConfigError):  # no room for keys and values
            bounded.append((bounds.of(candidate), candidate))
    by_kind: dict[Kind, deque[tuple[float, Candidate]]] = {}
    for pair in sorted(bounded, key=lambda pair: pair[0]):
        by_kind.setdefault(pair[1].kind, deque()).append(pair)
    return dict(sorted(by_kind.items(), key=lambda item: item[0] != BASELINE))


@contextmanager
def _simulators(
    spec: PlanSpec, workers: int
) -> Iterator[tuple[Callable[[Candidate], futures.Future[PlanResult]], int]]:
    if workers == 1:
        with futures.ThreadPoolExecutor(1) as thread:
            yield (lambda candidate: thread.submit(result_of, spec, candidate)), 1
        return
    # Spawned, because a fork would keep locks held by the caller's library threads for ever.
    before = set(active_children())
    pool = futures.ProcessPoolExecutor(workers, get_context("spawn"), _begin_worker)
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
    """Ignore Ctrl-C, which a terminal sends to all processes, and exit with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
