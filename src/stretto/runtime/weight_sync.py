"""Weight sync: sends weights from the learner to its followers and verifies them.

:mod:`stretto.runtime.transfer_steps` decides each next step of a transfer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal, cast

import torch

from stretto.errors import EngineError, RankError, RoleLostError, TransferError
from stretto.observe.spans import WEIGHT_SYNC
from stretto.protocols import Replaceable, Tracer
from stretto.runtime.clients import FollowerClient, Load
from stretto.runtime.learner_service import LearnerService
from stretto.runtime.process_messages import Loaded, Offer
from stretto.runtime.role_services import FollowerService
from stretto.runtime.transfer_steps import Action, Outcome, difference, proved, transfer_steps
from stretto.saying import Say
from stretto.training.agreement import FLOORS, LIMITS, is_coarse
from stretto.types import FloatArray, Reply, WeightsRef
from stretto.weights.transfer import Meeting, Route, Wire, choose_wires
from stretto.workers.threads import Executor, Method, Ts, WorkerThread

CONTROL_S = 30.0  # a process that answers no side call for so long is assumed to hang
SLOW = 10.0  # a transfer is aborted after so many times the median duration
LEAST_BYTES_PER_S: dict[Wire, float] = {"gloo": 50e6, "nccl": 500e6, "ipc": 500e6}
"""Assumed minimum speed of a wire before it is measured."""
ROUNDING = 4.0
"""Factor between the first sync's difference on the probe and the largest usual one. The probe's
few tokens are not sampled, and rounding grows as the model finds them less likely."""


@dataclass(frozen=True, slots=True)
class Routes:
    """Routes of a transfer: of the learner's ranks by wire, and of each follower's first rank."""

    sending: dict[Wire, list[Route]]
    taking: dict[str, Route]


class Tolerance:
    """The largest allowed difference on the probe, in nats, and the largest usual one.

    The usual one is :data:`ROUNDING` times the difference after the first sync, plus a floor. With
    "auto" the limit depends on the type of the weights.
    """

    def __init__(self, given: float | Literal["auto"], dtype: torch.dtype) -> None:
        self._coarse = is_coarse(dtype)
        self.limit = LIMITS[self._coarse] if given == "auto" else given
        self.usual = self.limit
        self._calibrated = False

    def calibrate(self, gaps: Collection[float]) -> None:
        """Set the usual difference once, from followers that passed after the first sync."""
        if gaps and not self._calibrated:
            self._calibrated = True
            self.usual = min(ROUNDING * max(gaps) + FLOORS[self._coarse], self.limit)


@dataclass(eq=False)
class WeightSync:
    """Syncs followers in the learner's ranks one by one, and all other followers at once."""

    learner: Executor
    meeting: Meeting | None  # None if all followers are in the learner's ranks
    tolerance: Tolerance
    tracer: Tracer
    say: Say = lambda _: None

    def __post_init__(self) -> None:
        self._followers: dict[str, Executor] = {}
        self._models: dict[str, str] = {}
        self._timeout_s = self.meeting.timeout_s if self.meeting else CONTROL_S
        self._control_s = min(CONTROL_S, self._timeout_s)
        self._thread = WorkerThread("weights", 0)
        self._epoch = 0
        # By model and wire: number and members of the group, and durations of the last transfers.
        self._groups: dict[tuple[str, Wire], tuple[int, list[tuple[str, int]]]] = {}
        self._times: dict[tuple[str, Wire], deque[float]] = {}
        self._by_gloo: set[str] = set()  # followers that cannot open the learner's GPU memory
        self._said: set[str] = set()
        self._probes: deque[tuple[int, FloatArray]] = deque(maxlen=2)  # of the last two versions
        self.metrics: dict[str, float] = {}  # of the last syncs

    def follow(self, name: str, follower: Executor, model: str) -> Load:
        self._followers[name], self._models[name] = follower, model
        return partial(self._load, name)

    def begin(
        self, ref: WeightsRef, roles: Sequence[Replaceable]
    ) -> list[Callable[[], Awaitable[None]]]:
        """Start sending new weights to all clients at once. Return a function that waits for each.

        Cancelling one wait does not affect the rest. Each raises RoleLostError if the follower
        has died or hangs, EngineError if it holds other weights, TransferError if none arrived.
        """
        clients = [cast(FollowerClient, role) for role in roles]
        waits = self._begin(ref, [client.member for client in clients])
        return [partial(client.loaded, load) for client, load in zip(clients, waits, strict=True)]

    def load_all(self, refs: Mapping[str, WeightsRef]) -> None:
        """Send weights to all followers. Blocks, and nothing else may run meanwhile."""
        for model, ref in refs.items():
            names = [name for name, follows in self._models.items() if follows == model]
            outcomes = self.transfer(ref, [name for name in names if not self._is_here(name)])
            for here in self._sharing_ranks(model):
                start_s = time.perf_counter()
                offers = self._offers(ref) if self.meeting else []
                first, *others = (self._followers[name] for name in here)
                replies = first.ask_jointly(others, FollowerService.load, ref)
                loaded = dict(zip(here, replies, strict=True))
                outcomes |= self._loaded_here(loaded, ref, offers, start_s)
            for outcome in outcomes.values():
                if isinstance(outcome, Exception):
                    raise outcome

    def close(self) -> None:
        self._thread.stop()

    def _begin(
        self, ref: WeightsRef, names: Sequence[str]
    ) -> list[Callable[[], Awaitable[Reply[Loaded]]]]:
        elsewhere = [name for name in names if not self._is_here(name)]

        async def transferred() -> dict[str, Outcome]:
            try:
                return await self._thread.run(lambda: self.transfer(ref, elsewhere))
            except Exception as error:  # the learner is lost
                return dict.fromkeys(elsewhere, error)

        tasks = dict[str, asyncio.Future[Mapping[str, Outcome]]]()
        if elsewhere:
            tasks |= dict.fromkeys(elsewhere, asyncio.ensure_future(transferred()))
        for here in self._sharing_ranks(ref.model):
            if not set(here).isdisjoint(names):
                tasks |= dict.fromkeys(here, asyncio.ensure_future(self._load_here(here, ref)))

        async def load(name: str) -> Reply[Loaded]:
            outcome = (await asyncio.shield(tasks[name]))[name]  # also waited for by others
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return [partial(load, name) for name in names]

    async def _load(self, name: str, ref: WeightsRef) -> Reply[Loaded]:
        (wait_for_it,) = self._begin(ref, [name])
        return await wait_for_it()

    # -- followers in the learner's ranks ------------------------------------------------------

    def _is_here(self, name: str) -> bool:
        return self._followers[name].shares_ranks(self.learner)

    def _sharing_ranks(self, model: str) -> list[list[str]]:
        """Return the followers in the learner's ranks, in lists of those that load at once: all
        that work in processes, because resharding is a collective of all ranks.
        """
        here = [name for name, follows in self._models.items() if follows == model]
        here = [name for name in here if self._is_here(name)]
        return [here] if here and self.meeting else [[name] for name in here]

    async def _load_here(self, names: Sequence[str], ref: WeightsRef) -> Mapping[str, Outcome]:
        start_s = time.perf_counter()
        offers = await asyncio.to_thread(self._offers, ref) if self.meeting else []
        first, *others = (self._followers[name] for name in names)
        replies = await first.call_jointly(others, FollowerService.load, ref)
        return self._loaded_here(dict(zip(names, replies, strict=True)), ref, offers, start_s)

    def _loaded_here(
        self,
        loaded: Mapping[str, Reply[Loaded]],
        ref: WeightsRef,
        offers: Sequence[Offer],
        start_s: float,
    ) -> Mapping[str, Outcome]:
        """Verify the loaded weights, unless followers read the learner's tensors in one process."""
        if not offers:
            return loaded
        self._record(ref, start_s, max(reply.value.moved for reply in loaded.values()))
        outcomes = {
            name: proved(name, reply, ref, offers[0], "", self.tolerance.limit)
            for name, reply in loaded.items()
        }
        return self._compared(ref, offers[0], outcomes)

    # -- followers elsewhere -------------------------------------------------------------------

    def transfer(self, ref: WeightsRef, names: Sequence[str]) -> dict[str, Outcome]:
        """Send a version to followers, which must get no other calls. Blocks."""
        if not names:
            return {}
        start_s, tries = time.perf_counter(), 0
        answer: Any = None
        offers = list[Offer]()
        routes = Routes({}, {})
        wires = dict[str, Wire]()
        steps = transfer_steps(ref, names, self.tolerance.limit)
        while True:
            try:
                action, targets = steps.send(answer)
            except StopIteration as end:
                outcomes: dict[str, Outcome] = end.value
                break
            match action:
                case Action.OFFER:
                    answer = offers = self._offers(ref)
                    current_wires = {
                        n: w for n, w in self._wires(ref.model).items() if n in targets
                    }
                    wires |= current_wires
                    routes, tries = self._routes(ref, offers[0].size, current_wires), tries + 1
                case Action.ANNOUNCE:
                    route = routes.taking[targets[0]]
                    answer = self._aside(
                        targets[0], FollowerService.expect, ref, offers[0].mark, route
                    )
                case Action.SEND:
                    answer = self._send(ref, routes, targets)
                case Action.ABORT:  # its group is broken, so the next transfer needs a new one
                    self._groups.pop((ref.model, wires[targets[0]]), None)
                    answer = self._aside(targets[0], FollowerService.abort)
        for name, outcome in outcomes.items():
            if isinstance(outcome, Exception):
                self._groups.pop((ref.model, wires[name]), None)
        outcomes = self._compared(ref, offers[0], outcomes)
        self._record(ref, start_s, offers[0].size)
        retries = self.metrics.get("weight_sync/retries", 0.0)
        self.metrics["weight_sync/retries"] = retries + tries - 1
        return outcomes

    def _offers(self, ref: WeightsRef) -> list[Offer]:
        offers = self.learner.aside_on_all(LearnerService.offer, ref, timeout_s=self._control_s)
        probe = offers[0].probe
        if probe is not None and ref.version not in [version for version, _ in self._probes]:
            self._probes.append((ref.version, probe))
        return offers

    def _aside(self, name: str, method: Method[*Ts, None], *args: *Ts) -> RankError | None:
        try:
            self._followers[name].aside_on_all(method, *args, timeout_s=self._control_s)
        except RankError as error:
            return error
        return None

    def _send(
        self, ref: WeightsRef, routes: Routes, names: Sequence[str]
    ) -> tuple[str, dict[str, Outcome]]:
        """Send and load concurrently. Return the mark and each follower's outcome."""
        patience_s = max(rank_routes[0].timeout_s for rank_routes in routes.sending.values())
        limit_s = patience_s + self._control_s
        pool = ThreadPoolExecutor(len(names) + len(routes.sending))

        def send(rank_routes: Sequence[Route]) -> tuple[str, float]:
            start_s = time.perf_counter()
            marks = self.learner.aside_on_all(
                LearnerService.send, ref, rank_routes, timeout_s=limit_s
            )
            return " ".join(marks), time.perf_counter() - start_s

        sending = {
            wire: pool.submit(send, rank_routes) for wire, rank_routes in routes.sending.items()
        }
        loading = {n: pool.submit(self._followers[n].ask, FollowerService.load, ref) for n in names}
        if late := wait(loading.values(), timeout=patience_s / 2).not_done:
            behind = ", ".join(name for name, future in loading.items() if future in late)
            self.say(
                f"version {ref.version} of the {ref.model} is on its way to {behind} for "
                f"{patience_s / 2:.0f} s; it is broken off after {patience_s:.0f} s"
            )
            wait(late, timeout=limit_s - patience_s / 2)
        pool.shutdown(wait=False)  # a thread waits for a hanging follower until that is killed
        mark = ""
        for wire, future in sending.items():
            failure = future.exception()
            if failure is not None and not isinstance(failure, TransferError):
                raise failure
            if failure is not None:
                self._groups.pop((ref.model, wire), None)
                continue
            mark, seconds = future.result()
            self._times.setdefault((ref.model, wire), deque(maxlen=9)).append(seconds)
        outcomes = {name: _outcome(name, future) for name, future in loading.items()}
        for name, outcome in outcomes.items():
            if isinstance(outcome, TransferError) and outcome.code == "memory-not-shared":
                self._by_gloo.add(name)
        return mark, outcomes

    def _patience_s(self, model: str, wire: Wire, size: int) -> float:
        """Return a transfer's time limit. Exceeds the setting if the model or wire needs more."""
        assert self.meeting is not None
        before = self._times.get((model, wire))
        enough_s = SLOW * median(before) if before else size / LEAST_BYTES_PER_S[wire]
        return max(self._timeout_s, min(enough_s, self.meeting.most_s))

    def _routes(self, ref: WeightsRef, size: int, wires: Mapping[str, Wire]) -> Routes:
        """Return the routes of the learner's ranks and of followers, with one group per wire."""
        assert self.meeting is not None
        sources, routes = self.learner.facts, Routes({}, {})
        by_wire: dict[Wire, list[str]] = {}
        for name, wire in wires.items():
            by_wire.setdefault(wire, []).append(name)
        for wire, group in by_wire.items():
            members = [(name, self._followers[name].generation) for name in group]
            epoch, before = self._groups.get((ref.model, wire), (0, []))
            if members != before:  # otherwise the group stays
                self._epoch += 1
                epoch = self._epoch
                self._groups[ref.model, wire] = epoch, members
            ranks = [len(self._followers[name].facts) for name in group]
            rank_routes = self.meeting.routes(
                f"weights/{ref.model}/{wire}",
                epoch,
                len(sources) + sum(ranks),
                wire,
                len(sources),
                self._patience_s(ref.model, wire, size),
            )
            first, read = len(sources), list[int]()
            gpus = [place.device_id for place in sources]
            for name, count in zip(group, ranks, strict=True):
                follower_gpus = [place.device_id for place in self._followers[name].facts]
                learner_ranks = (
                    tuple(gpus.index(gpu) for gpu in follower_gpus) if wire == "ipc" else ()
                )
                routes.taking[name] = replace(rank_routes[first], beside=learner_ranks)
                first += count
                read += learner_ranks
            sending = [replace(route, beside=tuple(read)) for route in rank_routes[: len(sources)]]
            routes.sending[wire] = sending
        return routes

    def _wires(self, model: str) -> dict[str, Wire]:
        """Choose the wire to each follower in another process. Logs choices that involve GPUs."""
        sources = self.learner.facts
        followers = {
            name: self._followers[name].facts
            for name, follows in self._models.items()
            if follows == model and not self._is_here(name)
        }
        choices = choose_wires(sources, followers)
        not_shared: tuple[Wire, str] = "gloo", "it cannot open memory of the learner's GPUs"
        choices |= dict.fromkeys(self._by_gloo & followers.keys(), not_shared)
        on_gpus = any(
            place.device_id for places in (sources, *followers.values()) for place in places
        )
        for name, (wire, why) in choices.items():
            line = f"weights of the {model} go to the {name} by {wire}: {why}"
            if on_gpus and line not in self._said:
                self._said.add(line)
                self.say(line)
        return {name: wire for name, (wire, _) in choices.items()}

    # -- metrics -------------------------------------------------------------------------------

    def _compared(
        self, ref: WeightsRef, offer: Offer, outcomes: Mapping[str, Outcome]
    ) -> dict[str, Outcome]:
        """Record how much followers' probes differ, and log unusual differences. Return the
        outcomes, with an error for a follower that still computes the last version.
        """
        verdicts, passed = dict(outcomes), list[float]()
        ours, before = offer.probe, self._probes[0][1] if len(self._probes) > 1 else None
        for name, outcome in outcomes.items():
            theirs = None if isinstance(outcome, Exception) else outcome.value.probe
            if ours is None or theirs is None:
                continue
            gap = self._measured(ours, theirs, before)
            unusual = (
                f"after the sync of version {ref.version} of the weights, the log-probs of {name} "
                f"and the learner differ by {gap:.2g} nats (root mean square) on the probe, and "
                f"{self.tolerance.usual:.2g} is usual"
            )
            if gap <= self.tolerance.usual:
                passed.append(gap)
            elif before is not None and difference(before, theirs) < gap:
                verdicts[name] = EngineError(
                    f"{unusual}; {name} is nearer to the version before: some of the new weights "
                    "are not in use there",
                    "probe-of-version-before",
                )
            else:
                self.say(unusual)
        self.tolerance.calibrate(passed)
        return verdicts

    def _measured(self, ours: FloatArray, theirs: FloatArray, before: FloatArray | None) -> float:
        gap = self.metrics["weight_sync/logprob_gap"] = difference(ours, theirs)
        self.metrics["weight_sync/logprob_gap_mean"] = float((ours - theirs).mean())
        self.metrics["weight_sync/logprob_gap_max"] = float(abs(ours - theirs).max())
        if before is not None and (update_gap := difference(before, ours)):
            self.metrics["weight_sync/logprob_gap_of_update"] = gap / update_gap
        return gap

    def _record(self, ref: WeightsRef, start_s: float, size: int) -> None:
        end_s = time.perf_counter()
        self.tracer.add(WEIGHT_SYNC, "send", start_s, end_s, model=ref.model, version=ref.version)
        self.metrics[f"weight_sync/{ref.model}_s"] = end_s - start_s
        self.metrics[f"weight_sync/{ref.model}_mb"] = size / 1e6


def _outcome(name: str, future: Future[Reply[Loaded]]) -> Outcome:
    if not future.done():
        return RoleLostError(name, f"{name} hangs in a weight sync", "hangs-in-weight-sync")
    match future.exception():
        case None:
            return future.result()
        case RankError() as died:
            return RoleLostError(name, str(died), died.code)
        case Exception() as raised:
            return raised
        case other:  # an interruption
            raise other
