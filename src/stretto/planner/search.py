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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from multiprocessing import active_children, get_context, parent_process

from stretto.errors import ConfigError
from stretto.planner.bounds import Bounds
from stretto.planner.candidates import BASELINE, Candidate, Space, candidates, fits
from stretto.planner.layouts import Setting
from stretto.planner.outcome import ROUNDS, WARM, Outcome, outcome_of
from stretto.saying import Say, silent, working

Kind = tuple[str, str, bool]
WITHIN = 0.01
"""A candidate is left out when it could be quicker than what is known by this share at most."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best plans, and how far they can be trusted to be that.

    Attributes:
        best: of each kind the best, the quickest first, no more than asked for.
        baseline: the best with all roles on all GPUs, one after another; ``None`` if none fits.
        runnable: the best that ``stretto train`` can run; ``None`` if there is none.
        candidates: how many there were.
        simulated: how many of them were simulated.
        unfit: those that were looked at and do not fit into memory.
        bound_s: seconds of a step that no candidate left out can be below; infinite when none was
            left out for want of time.
        seconds: that the search took.
    """

    best: tuple[Outcome, ...]
    baseline: Outcome | None
    runnable: Outcome | None
    candidates: int
    simulated: int
    unfit: int
    bound_s: float
    seconds: float


def search(
    setting: Setting,
    space: Space,
    *,
    keep: int = 5,
    limit_s: float = inf,
    workers: int = 0,
    say: Say = silent,
) -> Found:
    """Find the plans with the shortest steps.

    Args:
        limit_s: seconds after which no further candidate is simulated.
        workers: processes that simulate; 0 takes one a core, 1 none but this one.

    Raises:
        ConfigError: nothing fits.
    """
    start_s = time.monotonic()
    bounds = Bounds(setting, WARM, ROUNDS)
    with working(say, "listing plans"):
        kinds = _by_kind(_bounded(candidates(setting, space), bounds))
    count = sum(map(len, kinds.values()))
    board, unfit, bound_s = _Board(keep), 0, inf
    with (
        working(say, "plans looked at or ruled out", count) as advance,
        _simulators(setting, workers or os.cpu_count() or 1) as (simulate, room),
    ):
        running: set[Future[Outcome]] = set()

        def collect(until: int) -> None:
            while len(running) > until:
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    running.remove(done)
                    board.add(done.result())

        # In turns, so that there is soon something of every kind to be measured against.
        while kinds:
            for kind, waiting in list(kinds.items()):
                collect(room - 1)
                if not waiting or not board.may_take(kind, waiting[0][0]):
                    del kinds[kind]  # all others of it have higher bounds
                    advance(len(waiting))
                    continue
                if time.monotonic() - start_s > limit_s and (board.runnable or kind[2]):
                    bound_s = min(bound_s, waiting[0][0])
                    del kinds[kind]
                    advance(len(waiting))
                    continue
                _, candidate = waiting.popleft()
                advance(1)
                if fits(setting, candidate):
                    running.add(simulate(candidate))
                else:
                    unfit += 1
        collect(0)
    if not board.outcomes:
        raise ConfigError(
            f"nothing fits: no layout on {space.gpus} GPUs has memory for all phases; give more "
            "GPUs, or larger ones"
        )
    return Found(
        best=tuple(board.best()),
        baseline=min(board.baselines, key=_rank, default=None),
        runnable=min(board.runnable, key=_rank, default=None),
        candidates=count,
        simulated=board.simulated,
        unfit=unfit,
        bound_s=bound_s,
        seconds=time.monotonic() - start_s,
    )


class _Board:
    """The best outcome of each kind."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self.outcomes: dict[Kind, Outcome] = {}
        self.simulated = 0

    def add(self, outcome: Outcome) -> None:
        """Take a candidate's outcome."""
        self.simulated += 1
        kind = _kind(outcome.candidate)
        known = self.outcomes.get(kind)
        if known is None or _rank(outcome) < _rank(known):
            self.outcomes[kind] = outcome

    @property
    def runnable(self) -> list[Outcome]:
        """Plans that ``stretto train`` can run."""
        return [outcome for outcome in self.outcomes.values() if not outcome.candidate.on_paper]

    @property
    def baselines(self) -> list[Outcome]:
        """Plans with all roles on all GPUs, one after another."""
        return [o for o in self.outcomes.values() if o.candidate.kind == BASELINE]

    def best(self) -> list[Outcome]:
        """The best of the best kinds."""
        return sorted(self.outcomes.values(), key=_rank)[: self._keep]

    def may_take(self, kind: Kind, bound: float) -> bool:
        """Return whether a candidate with this bound might still be among those shown."""
        bound *= 1 + WITHIN
        if (own := self.outcomes.get(kind)) and bound >= own.step_s:
            return False
        if kind[:2] == BASELINE:
            return True
        others = sorted(o.step_s for k, o in self.outcomes.items() if k != kind)
        would_run_first = not kind[2] and not self.runnable
        return len(others) < self._keep or bound < others[self._keep - 1] or would_run_first


def _kind(candidate: Candidate) -> Kind:
    return (*candidate.kind, bool(candidate.on_paper))


def _by_kind(
    bounded: Iterable[tuple[float, Candidate]],
) -> dict[Kind, deque[tuple[float, Candidate]]]:
    found: dict[Kind, deque[tuple[float, Candidate]]] = {}
    for pair in sorted(bounded, key=lambda pair: pair[0]):
        found.setdefault(_kind(pair[1]), deque()).append(pair)
    return dict(sorted(found.items(), key=lambda item: item[0][:2] != BASELINE))


def _rank(outcome: Outcome) -> tuple[float, str]:
    return outcome.step_s, str(outcome.candidate.layout)


def _bounded(found: Iterable[Candidate], bounds: Bounds) -> Iterator[tuple[float, Candidate]]:
    for candidate in found:
        try:
            yield bounds.of(candidate), candidate
        except ConfigError:  # no room for keys and values
            continue


@contextmanager
def _simulators(
    setting: Setting, workers: int
) -> Iterator[tuple[Callable[[Candidate], Future[Outcome]], int]]:
    """Yield what starts a simulation, and how many may be under way."""
    if workers == 1:

        def here(candidate: Candidate) -> Future[Outcome]:
            done: Future[Outcome] = Future()
            done.set_result(outcome_of(setting, candidate))
            return done

        yield here, 1
        return
    # Spawned, as threads of the caller's libraries may hold locks that a fork would keep for ever.
    before = set(active_children())
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin_worker)

    def there(candidate: Candidate) -> Future[Outcome]:
        return pool.submit(outcome_of, setting, candidate)

    try:
        yield there, workers
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(active_children()) - before:
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise ConfigError(
                f"one of {workers} processes that simulate was killed, maybe for want of memory; "
                "take fewer workers"
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
