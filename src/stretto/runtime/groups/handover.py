"""The hand-over of weights: from the learner's process to all that follow it, and its proof.

First the control calls, which may raise: the learner's plan goes to each follower, who compares it
with its own. Then the tensors, bucket by bucket, on a group of their own, with a deadline: who does
not take part in time is found out, and the others try once more on a new group. Then the proof:
marks of what was received, the model's fingerprint (which the follower computes), and log-probs of
a fixed probe from engine and learner side by side.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np

from stretto.errors import EngineError, RankError, RoleLostError, TransferError
from stretto.observe.spans import HANDOVER
from stretto.protocols import Tracer
from stretto.runtime.groups.messages import Loaded, Offer
from stretto.types import FloatArray, Reply, WeightsRef
from stretto.weights.transfer import Meeting, Route
from stretto.workers.executor import DivertingExecutor, Executor
from stretto.workers.group import GroupExecutor
from stretto.workers.threads import WorkerThread

WINDOW_S = 0.001
"""Seconds in which followers that ask for the same weights join one transfer."""

CONTROL_S = 30.0
"""Seconds in which a process answers on the side, at most; whoever does not is taken to hang."""


class Handover:
    """The hand-over, driven from the schedule's process.

    Args:
        meeting: where the groups of transfers meet.
        tolerance: largest difference on the probe: root mean square, in nats.

    Attributes:
        metrics: of the last hand-overs: seconds, bytes, retries, difference on the probe.
    """

    def __init__(
        self, learner: GroupExecutor, meeting: Meeting, tolerance: float, tracer: Tracer
    ) -> None:
        self._learner, self._meeting, self._tolerance = learner, meeting, tolerance
        self._tracer = tracer
        self._asking: list[tuple[str, GroupExecutor, WeightsRef, asyncio.Future[Any]]] = []
        self._control_s = min(CONTROL_S, meeting.timeout_s)
        self._worker = WorkerThread("weights", 0)
        self._epoch = 0
        self._groups: dict[str, tuple[int, list[tuple[str, int]]]] = {}  # epoch, members; by model
        self.metrics: dict[str, float] = {}

    def follow(self, name: str, follower: GroupExecutor) -> Executor:
        """Return an executor of a follower, whose calls to load weights are hand-overs."""
        return DivertingExecutor(follower, "load", partial(self.load, name, follower))

    async def load(self, name: str, follower: GroupExecutor, ref: WeightsRef) -> Reply[Any]:
        """Have a follower load weights, together with all that ask for the same at this time.

        Raises:
            RoleLostError: the follower's process has died or hangs.
            RankError: the learner's has.
            EngineError: the follower holds other weights afterwards than the learner.
            TransferError: weights have not arrived, twice.
        """
        if follower.with_(self._learner):
            return await self._reshard(name, follower, ref)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply[Any]] = loop.create_future()
        self._asking.append((name, follower, ref, future))
        if len(self._asking) == 1:
            await asyncio.sleep(WINDOW_S)
            asking, self._asking = self._asking, []
            await self._serve(asking)
        return await future

    def all_at_once(
        self, ref: WeightsRef, followers: Mapping[str, GroupExecutor]
    ) -> dict[str, Reply[Loaded] | Exception]:
        """Hand a version over to followers, wherever they are, while nothing else is under way."""
        here = {n: f for n, f in followers.items() if f.with_(self._learner)}
        elsewhere = {n: f for n, f in followers.items() if n not in here}
        outcomes = self.transfer(ref, elsewhere) if elsewhere else {}
        for name, follower in here.items():
            start_s, offer = time.perf_counter(), self._offers(ref)[0]
            outcomes[name] = self._resharded(name, ref, offer, follower.ask("load", ref), start_s)
        return outcomes

    async def _reshard(self, name: str, follower: GroupExecutor, ref: WeightsRef) -> Reply[Loaded]:
        """Have a follower in the learner's own ranks load weights, in its turn."""
        start_s = time.perf_counter()
        offers = await asyncio.to_thread(self._offers, ref)
        loaded = await follower.call("load", ref)
        proved = self._resharded(name, ref, offers[0], loaded, start_s)
        if isinstance(proved, Exception):
            raise proved
        return proved

    def _resharded(
        self, name: str, ref: WeightsRef, offer: Offer, loaded: Reply[Loaded], start_s: float
    ) -> Reply[Loaded] | Exception:
        self._took(ref, start_s, loaded.value.moved)
        return self._proved(name, loaded, ref, offer, "")

    def _offers(self, ref: WeightsRef) -> list[Offer]:
        return self._learner.aside_on_all("offer", ref, timeout_s=self._control_s)

    def _took(self, ref: WeightsRef, start_s: float, size: int) -> None:
        """Take note of a hand-over's seconds and bytes."""
        end_s = time.perf_counter()
        self._tracer.add(HANDOVER, "send", start_s, end_s, model=ref.model, version=ref.version)
        self.metrics |= {
            f"handover/{ref.model}_s": end_s - start_s,
            f"handover/{ref.model}_mb": size / 1e6,
        }

    def close(self) -> None:
        """Take no more calls."""
        self._worker.stop()

    async def _serve(
        self, asking: Sequence[tuple[str, GroupExecutor, WeightsRef, asyncio.Future[Any]]]
    ) -> None:
        by_ref: dict[WeightsRef, dict[str, tuple[GroupExecutor, asyncio.Future[Any]]]]
        by_ref = defaultdict(dict)
        for name, follower, ref, future in asking:
            by_ref[ref][name] = follower, future
        for ref, members in by_ref.items():
            followers = {name: follower for name, (follower, _) in members.items()}
            try:
                outcomes = await self._worker.run(lambda r=ref, f=followers: self.transfer(r, f))  # type: ignore[misc]
            except Exception as error:
                outcomes = dict.fromkeys(followers, error)
            for name, (_, future) in members.items():
                outcome = outcomes[name]
                if future.done():
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    def transfer(
        self, ref: WeightsRef, followers: Mapping[str, GroupExecutor]
    ) -> dict[str, Reply[Loaded] | Exception]:
        """Hand a version over to followers; return each one's reply, or its error.

        Blocks; while none of the followers is called otherwise.
        """
        start_s = time.perf_counter()
        outcomes: dict[str, Reply[Loaded] | Exception] = {}
        left, tries = dict(followers), 0
        while left and tries < 2:
            tries += 1
            offers = self._offers(ref)
            found = self._try(ref, offers, left)
            outcomes.update(found)
            left = {n: left[n] for n, o in found.items() if isinstance(o, TransferError)}
            if left:
                self._suspect(left, outcomes)
        self._took(ref, start_s, sum(offer.size for offer in offers))
        retries = self.metrics.get("handover/retries", 0.0)
        self.metrics["handover/retries"] = retries + tries - 1
        return outcomes

    def _try(
        self, ref: WeightsRef, offers: Sequence[Offer], followers: Mapping[str, GroupExecutor]
    ) -> dict[str, Reply[Loaded] | Exception]:
        """Try once. Control calls come first: no collective is begun that somebody refuses."""
        size = 1 + sum(follower.size for follower in followers.values())
        groups = self._groups_for(ref, len(offers), size, followers)
        marks, member = [offer.mark for offer in offers], 1
        for name, follower in followers.items():
            routes = [group[member] for group in groups]  # of the first of its ranks
            member += follower.size
            try:
                follower.aside_on_all("expect", ref, marks, routes, timeout_s=self._control_s)
            except RankError as error:
                rest = dict.fromkeys(followers, TransferError(f"{name} is gone: {error}"))
                self._groups.pop(ref.model, None)
                return {**rest, name: RoleLostError(name, str(error))}
        limit_s = self._meeting.timeout_s + self._control_s
        pool = ThreadPoolExecutor(len(followers) + 1)
        first = [group[0] for group in groups]
        sending = pool.submit(self._learner.aside_on_all, "send", ref, first, timeout_s=limit_s)
        loading = {n: pool.submit(f.ask, "load", ref) for n, f in followers.items()}
        wait(loading.values(), timeout=limit_s)
        pool.shutdown(wait=False)  # who hangs is waited for by a thread until it is ended
        failure = sending.exception()
        outcomes = {n: _outcome(n, future) for n, future in loading.items()}
        if failure is not None and not isinstance(failure, TransferError):
            raise failure
        sent = "" if failure else " ".join(sending.result())
        proved = {n: self._proved(n, o, ref, offers[0], sent) for n, o in outcomes.items()}
        if failure is not None or any(isinstance(o, Exception) for o in proved.values()):
            self._groups.pop(ref.model, None)  # it is broken: the next one is another
        return proved

    def _proved(
        self,
        name: str,
        outcome: Reply[Loaded] | Exception,
        ref: WeightsRef,
        offer: Offer,
        sent: str,
    ) -> Reply[Loaded] | Exception:
        """Return the outcome, or an error where it holds other weights than were sent."""
        if isinstance(outcome, Exception):
            return outcome
        loaded = outcome.value
        if sent and loaded.mark != sent:
            return EngineError(
                f"version {ref.version} of the {ref.model} was sent with the mark {sent}, and "
                f"{name} received {loaded.mark}: what is between them changes data"
            )
        if offer.probe is not None and loaded.probe is not None:
            gap = difference(offer.probe, loaded.probe)
            self.metrics["handover/logprob_gap"] = gap
            self.metrics["handover/logprob_gap_mean"] = float((offer.probe - loaded.probe).mean())
            self.metrics["handover/logprob_gap_max"] = float(abs(offer.probe - loaded.probe).max())
            if not gap <= self._tolerance:
                return EngineError(
                    f"after the hand-over of version {ref.version}, {name} and the learner differ "
                    f"by {gap:.4g} nats (root mean square) on the log-probs of the probe; "
                    f"{self._tolerance:g} is allowed. Their kernels or types differ: look at "
                    "model.dtype and the devices, or raise cluster.probe_tolerance"
                )
        return outcome

    def _suspect(
        self,
        left: dict[str, GroupExecutor],
        outcomes: dict[str, Reply[Loaded] | Exception],
    ) -> None:
        """Take out of ``left`` who does not answer on the side: it is why the transfer failed."""
        for name, follower in list(left.items()):
            try:
                follower.aside_on_all("abort", timeout_s=self._control_s)
            except RankError as error:
                del left[name]
                outcomes[name] = RoleLostError(name, f"{name} hangs in a hand-over: {error}")

    def _groups_for(
        self, ref: WeightsRef, senders: int, size: int, followers: Mapping[str, GroupExecutor]
    ) -> list[list[Route]]:
        """Return each member's way to the group of each rank of the learner, that rank's first.

        They are new groups, if others took part last time.
        """
        members = [(n, f.generation) for n, f in followers.items()]
        epoch, before = self._groups.get(ref.model, (0, []))
        if members != before:
            self._epoch += 1
            epoch = self._epoch
            self._groups[ref.model] = epoch, members
        return [
            self._meeting.routes(f"weights/{ref.model}/{rank}", epoch, size)
            for rank in range(senders)
        ]


def _outcome(name: str, future: Future[Reply[Loaded]]) -> Reply[Loaded] | Exception:
    """Return what came of a follower's loading."""
    if not future.done():
        return RoleLostError(name, f"{name} hangs in a hand-over")
    match future.exception():
        case None:
            return future.result()
        case RankError() as died:
            return RoleLostError(name, str(died))
        case Exception() as raised:
            return raised
        case other:  # an interruption
            raise other


def hand_over(
    handover: Handover,
    followers: Mapping[str, tuple[GroupExecutor, str]],
    refs: Mapping[str, WeightsRef],
) -> None:
    """Hand weights over to all followers of each model, before or between steps.

    Raises:
        StrettoError: one of them has not got them.
    """
    for model, ref in refs.items():
        members = {n: executor for n, (executor, follows) in followers.items() if follows == model}
        for outcome in handover.all_at_once(ref, members).values():
            if isinstance(outcome, Exception):
                raise outcome


def difference(one: FloatArray, two: FloatArray) -> float:
    """Root mean square of the differences of two arrays."""
    squares = (one.astype(np.float64) - two.astype(np.float64)) ** 2
    return math.sqrt(squares.mean())
