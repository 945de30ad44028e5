"""Weight sync: weights travel from the learner to all that follow it, and the proof of it.

:class:`Transfer` says what comes next, and is pure: no processes, no clock. First the control
calls, which may raise: the learner offers a version, and its plan is announced to each follower,
which compares it with its own. Then the tensors move, bucket by bucket, on a group of their own,
with a deadline. Then the proof: marks of what was received, the model's fingerprint (which the
follower computes), and log-probs of a fixed probe from engine and learner side by side. Followers
that have nothing because another one failed are asked to break off, which finds out those that
hang, and the rest tries once more on a new group.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np

from stretto.errors import EngineError, RankError, RoleLostError, TransferError
from stretto.observe.spans import WEIGHT_SYNC
from stretto.protocols import Replaceable, Tracer
from stretto.runtime.messages import Loaded, Offer
from stretto.types import FloatArray, Reply, WeightsRef
from stretto.weights.transfer import Meeting, Route
from stretto.workers.executor import Executor
from stretto.workers.threads import WorkerThread

CONTROL_S = 30.0
"""Seconds in which a process answers on the side, at most; one that does not is taken to hang."""

Outcome = Reply[Loaded] | Exception
"""What came of a follower's part in a transfer."""


class Step(StrEnum):
    """The next step of a transfer."""

    OFFER = "offer"
    ANNOUNCE = "announce"
    MOVE = "move"
    ABORT = "abort"
    DONE = "done"


@dataclass
class Transfer:
    """One version on its way to its followers, as a state machine.

    ::

        OFFER -> ANNOUNCE (each follower) -> MOVE -> DONE
                     |                         |
                     +---------> ABORT <-------+     (each follower that has nothing)
                                   |
                                   +-> OFFER, while tries are left, or DONE

    Attributes:
        waiting: followers that have no outcome yet, or one that another try may mend.
        tries: attempts, at most.
        step: what comes next.
        queue: followers that the step is still due for.
        outcomes: of each follower, at the end.
        tried: attempts so far.
    """

    waiting: list[str]
    tries: int = 2
    step: Step = Step.OFFER
    queue: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    tried: int = 0

    def offered(self) -> None:
        """The learner has offered the version."""
        self._expect(Step.OFFER)
        self.tried += 1
        self.step, self.queue = Step.ANNOUNCE, list(self.waiting)

    def announced(self, error: Exception | None = None) -> None:
        """The next follower has the plan, or is gone."""
        self._expect(Step.ANNOUNCE)
        name = self.queue.pop(0)
        if error is not None:
            self._lost(name, error)
            gone = TransferError(f"{name} is gone: {error}")
            self._ended(dict.fromkeys(self.waiting, gone))
        elif not self.queue:
            self.step = Step.MOVE

    def moved(self, outcomes: Mapping[str, Outcome]) -> None:
        """Tensors have moved, or not; outcomes are proved."""
        self._expect(Step.MOVE)
        self._ended(outcomes)

    def aborted(self, error: Exception | None = None) -> None:
        """The next follower has broken off, or hangs: it is why the transfer failed."""
        self._expect(Step.ABORT)
        name = self.queue.pop(0)
        if error is not None:
            self._lost(name, error)
        self._retry()

    def _ended(self, outcomes: Mapping[str, Outcome]) -> None:
        self.outcomes |= outcomes
        self.waiting = [n for n, o in outcomes.items() if isinstance(o, TransferError)]
        self.step, self.queue = Step.ABORT, list(self.waiting)
        self._retry()

    def _retry(self) -> None:
        if not self.queue:
            again = self.waiting and self.tried < self.tries
            self.step = Step.OFFER if again else Step.DONE

    def _lost(self, name: str, error: Exception) -> None:
        self.waiting.remove(name)
        hangs = f"{name} hangs in a hand-over: {error}" if self.step is Step.ABORT else str(error)
        self.outcomes[name] = RoleLostError(name, hangs)

    def _expect(self, step: Step) -> None:
        if self.step is not step:
            raise AssertionError(f"a transfer whose next step is {self.step} was told of {step}")


class WeightSync:
    """The sync of weights, driven from the schedule's process.

    Followers in the learner's own ranks take the weights in their turn; all others at once, by one
    :class:`Transfer` on a thread.

    Args:
        meeting: where the groups of transfers meet; ``None`` where all followers are in the
            learner's ranks.
        tolerance: largest difference on the probe: root mean square, in nats.

    Attributes:
        metrics: of the last syncs: seconds, bytes, retries, difference on the probe.
    """

    def __init__(
        self, learner: Executor, meeting: Meeting | None, tolerance: float, tracer: Tracer
    ) -> None:
        self._learner, self._meeting, self._tolerance = learner, meeting, tolerance
        self._tracer = tracer
        self._followers: dict[str, Executor] = {}
        self._models: dict[str, str] = {}
        self._transfers: dict[str, tuple[WeightsRef, asyncio.Task[dict[str, Outcome]]]] = {}
        self._timeout_s = meeting.timeout_s if meeting else CONTROL_S
        self._control_s = min(CONTROL_S, self._timeout_s)
        self._thread = WorkerThread("weights", 0)
        self._epoch = 0
        self._groups: dict[str, tuple[int, list[tuple[str, int]]]] = {}  # epoch, members; by model
        self.metrics: dict[str, float] = {}

    def follow(self, name: str, follower: Executor, model: str) -> partial[Any]:
        """Take up a follower of a model; return the call by which it loads weights."""
        self._followers[name], self._models[name] = follower, model
        return partial(self.load, name)

    def begin(self, refs: Mapping[str, WeightsRef], roles: Sequence[Replaceable]) -> None:
        """Begin to bring new weights to all these roles; their calls to load will wait for it."""
        names = [getattr(role, "member", "") for role in roles]
        for model, ref in refs.items():
            followers = [n for n in names if self._models.get(n) == model and not self._here(n)]
            if followers:
                self._begin(ref, followers)

    async def load(self, name: str, ref: WeightsRef) -> Reply[Loaded]:
        """Have a follower load weights; one for which nothing was begun gets them by itself.

        Raises:
            RoleLostError: the follower's process has died or hangs.
            RankError: the learner's has.
            EngineError: the follower holds other weights afterwards than the learner.
            TransferError: weights have not arrived, twice.
        """
        if self._here(name):
            return await self._load_here(name, ref)
        begun, task = self._transfers.pop(name, (None, None))
        if task is None or begun != ref:
            task = self._begin(ref, [name])
            del self._transfers[name]
        outcome = (await asyncio.shield(task))[name]  # others may wait for it, too
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def load_all(self, refs: Mapping[str, WeightsRef]) -> None:
        """Bring weights to all followers, while nothing else is under way. Blocks.

        Raises:
            StrettoError: one of them has not got them.
        """
        for model, ref in refs.items():
            names = [name for name, follows in self._models.items() if follows == model]
            outcomes = self.transfer(ref, elsewhere := [n for n in names if not self._here(n)])
            for name in names:
                if name not in elsewhere:
                    start_s, offer = time.perf_counter(), self._offer_here(ref)
                    loaded = self._followers[name].ask("load", ref)
                    outcomes[name] = self._loaded_here(name, ref, offer, loaded, start_s)
            for outcome in outcomes.values():
                if isinstance(outcome, Exception):
                    raise outcome

    def close(self) -> None:
        """Take no more calls."""
        self._thread.stop()

    # -- followers in the learner's ranks ------------------------------------------------------

    def _here(self, name: str) -> bool:
        return self._followers[name].shares_ranks(self._learner)

    async def _load_here(self, name: str, ref: WeightsRef) -> Reply[Loaded]:
        start_s = time.perf_counter()
        offer = await asyncio.to_thread(self._offer_here, ref)
        loaded = await self._followers[name].call("load", ref)
        proved = self._loaded_here(name, ref, offer, loaded, start_s)
        if isinstance(proved, Exception):
            raise proved
        return proved

    def _offer_here(self, ref: WeightsRef) -> Offer | None:
        """Return the learner's offer; in one process, followers read the learner's own tensors."""
        return self._offers(ref)[0] if self._meeting else None

    def _loaded_here(
        self, name: str, ref: WeightsRef, offer: Offer | None, loaded: Reply[Loaded], start_s: float
    ) -> Outcome:
        if offer is None:
            return loaded
        self._took(ref, start_s, loaded.value.moved)
        return self._proved(name, loaded, ref, offer, "")

    # -- followers elsewhere -------------------------------------------------------------------

    def _begin(self, ref: WeightsRef, names: Sequence[str]) -> asyncio.Task[dict[str, Outcome]]:
        async def run() -> dict[str, Outcome]:
            try:
                return await self._thread.run(lambda: self.transfer(ref, names))
            except Exception as error:  # the learner is lost
                return dict.fromkeys(names, error)

        task = asyncio.get_running_loop().create_task(run())
        self._transfers |= dict.fromkeys(names, (ref, task))
        return task

    def transfer(self, ref: WeightsRef, names: Sequence[str]) -> dict[str, Outcome]:
        """Bring a version to followers; return each one's reply, or its error.

        Blocks; while none of the followers is called otherwise.

        Raises:
            RankError: the learner is lost.
        """
        if not names:
            return {}
        start_s, offers = time.perf_counter(), list[Offer]()
        transfer, groups = Transfer(list(names)), list[list[Route]]()
        while transfer.step is not Step.DONE:
            match transfer.step:
                case Step.OFFER:
                    offers = self._offers(ref)
                    groups = self._groups_for(ref, len(offers), transfer.waiting)
                    transfer.offered()
                case Step.ANNOUNCE:
                    transfer.announced(self._announce(ref, offers, groups, transfer))
                case Step.MOVE:
                    transfer.moved(self._move(ref, offers, groups, transfer.waiting))
                case Step.ABORT:
                    transfer.aborted(self._aside(transfer.queue[0], "abort"))
            if transfer.step in (Step.ABORT, Step.OFFER) or _failed(transfer):
                self._groups.pop(ref.model, None)  # it is broken: the next one is another
        self._took(ref, start_s, sum(offer.size for offer in offers))
        retries = self.metrics.get("handover/retries", 0.0)
        self.metrics["handover/retries"] = retries + transfer.tried - 1
        return transfer.outcomes

    def _offers(self, ref: WeightsRef) -> list[Offer]:
        return self._learner.aside_on_all("offer", ref, timeout_s=self._control_s)

    def _announce(
        self,
        ref: WeightsRef,
        offers: Sequence[Offer],
        groups: Sequence[Sequence[Route]],
        transfer: Transfer,
    ) -> Exception | None:
        name = transfer.queue[0]
        before = transfer.waiting[: transfer.waiting.index(name)]
        first = 1 + sum(self._followers[n].size for n in before)  # of its ranks, in each group
        marks, routes = [offer.mark for offer in offers], [group[first] for group in groups]
        return self._aside(name, "expect", ref, marks, routes)

    def _aside(self, name: str, method: str, *args: Any) -> Exception | None:
        try:
            self._followers[name].aside_on_all(method, *args, timeout_s=self._control_s)
        except RankError as error:
            return error
        return None

    def _move(
        self,
        ref: WeightsRef,
        offers: Sequence[Offer],
        groups: Sequence[Sequence[Route]],
        names: Sequence[str],
    ) -> dict[str, Outcome]:
        """Have the learner send and followers load, at once; prove what they have."""
        limit_s, first = self._timeout_s + self._control_s, [group[0] for group in groups]
        pool = ThreadPoolExecutor(len(names) + 1)
        sending = pool.submit(self._learner.aside_on_all, "send", ref, first, timeout_s=limit_s)
        loading = {n: pool.submit(self._followers[n].ask, "load", ref) for n in names}
        wait(loading.values(), timeout=limit_s)
        pool.shutdown(wait=False)  # a thread waits for one that hangs until that one is ended
        failure = sending.exception()
        if failure is not None and not isinstance(failure, TransferError):
            raise failure
        sent = "" if failure else " ".join(sending.result())
        outcomes = {n: _outcome(n, future) for n, future in loading.items()}
        if failure is not None:
            self._groups.pop(ref.model, None)
        return {n: self._proved(n, o, ref, offers[0], sent) for n, o in outcomes.items()}

    def _groups_for(self, ref: WeightsRef, senders: int, names: Sequence[str]) -> list[list[Route]]:
        """Return each member's way to the group of each rank of the learner, that rank's first.

        They are new groups, if others took part last time.
        """
        members = [(name, self._followers[name].generation) for name in names]
        epoch, before = self._groups.get(ref.model, (0, []))
        if members != before:
            self._epoch += 1
            epoch = self._epoch
            self._groups[ref.model] = epoch, members
        assert self._meeting is not None
        size = 1 + sum(self._followers[name].size for name in names)
        return [
            self._meeting.routes(f"weights/{ref.model}/{rank}", epoch, size)
            for rank in range(senders)
        ]

    # -- proof ---------------------------------------------------------------------------------

    def _proved(
        self, name: str, outcome: Outcome, ref: WeightsRef, offer: Offer, sent: str
    ) -> Outcome:
        """Return the outcome, or an error where the follower holds other weights than were sent."""
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

    def _took(self, ref: WeightsRef, start_s: float, size: int) -> None:
        """Record the seconds and bytes of a transfer."""
        end_s = time.perf_counter()
        self._tracer.add(WEIGHT_SYNC, "send", start_s, end_s, model=ref.model, version=ref.version)
        self.metrics |= {
            f"handover/{ref.model}_s": end_s - start_s,
            f"handover/{ref.model}_mb": size / 1e6,
        }


def _failed(transfer: Transfer) -> bool:
    return any(isinstance(outcome, Exception) for outcome in transfer.outcomes.values())


def _outcome(name: str, future: Future[Reply[Loaded]]) -> Outcome:
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


def difference(one: FloatArray, two: FloatArray) -> float:
    """Root mean square of the differences of two arrays."""
    squares = (one.astype(np.float64) - two.astype(np.float64)) ** 2
    return math.sqrt(squares.mean())
