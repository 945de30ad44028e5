"""Weight sync: every order of failures, and real transfers between threads that misbehave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stretto.errors import EngineError, RankError, RoleLostError, TransferError
from stretto.observe.spans import Spans
from stretto.protocols import RealClock
from stretto.runtime.messages import Loaded, Offer
from stretto.runtime.weight_sync import Step, Transfer, WeightSync, difference
from stretto.types import FloatArray, Reply, WeightsRef
from stretto.weights.broadcast import WeightReceiver, WeightSender
from stretto.weights.transfer import Meeting, open_store

CPU = torch.device("cpu")
REF = WeightsRef("actor", 1, "x", "broadcast")
NEW = {"w": torch.arange(1000.0), "b": torch.ones(7, dtype=torch.bfloat16)}
PROBE: FloatArray = np.array([[-1.0, -2.0]], np.float32)


class FakeLearner:
    """A learner's executor, in this process."""

    def __init__(self) -> None:
        self.sender = WeightSender(CPU, 1024, keep=2)
        self.sender.put(REF, NEW)
        self.sends = 0

    def aside_on_all(self, method: str, ref: WeightsRef, *rest: Any, timeout_s: float) -> list[Any]:
        if method == "offer":
            return [Offer(*self.sender.plan(ref), PROBE)]
        self.sends += 1
        (route,) = rest[0]
        return [self.sender.send(ref, route)]


class FakeFollower:
    """A follower's executor, in this process.

    Args:
        fault: what goes wrong: at a method, once.
        probe: its log-probs.
    """

    generation, size = 0, 1

    def shares_ranks(self, other: object) -> bool:
        return False

    def __init__(self, fault: str = "", probe: FloatArray = PROBE, other: bool = False) -> None:
        self.weights = {n: torch.zeros_like(t) for n, t in NEW.items() if not (other and n == "b")}
        self.receiver = WeightReceiver(self.weights, CPU, 1024)
        self.fault, self.probe = fault, probe
        self.asked, self.released = threading.Event(), threading.Event()

    def aside_on_all(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        if self.fault == "stopped":
            raise RankError(f"no answer to '{method}' within {timeout_s:g} s")
        return [getattr(self.receiver, method)(*args)]

    def ask(self, method: str, ref: WeightsRef) -> Reply[Loaded]:
        fault, self.fault = self.fault, "" if self.fault != "stopped" else self.fault
        if fault == "raises":
            raise ValueError("no memory")
        if fault == "dies":
            raise RankError("the process of the follower was killed by SIGKILL")
        self.asked.set()
        if fault in ("hangs", "waits"):
            self.released.wait(30)
        for name, part in self.receiver.get(ref).items():
            self.weights[name].copy_(part.tensor)
            if fault == "corrupts":
                part.tensor.add_(1)
        return Reply(Loaded("other" if fault == "corrupts" else self.receiver.mark, self.probe))


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> FakeLearner:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return FakeLearner()


@pytest.fixture
def sync(learner: FakeLearner) -> Iterator[WeightSync]:
    store, port = open_store("127.0.0.1")
    meeting = Meeting("127.0.0.1", port, "gloo", 1.5)
    made = WeightSync(learner, meeting, 1e-3, Spans(RealClock()))  # type: ignore[arg-type]
    yield made
    made.close()
    del store


def outcomes(sync: WeightSync, **followers: FakeFollower) -> Mapping[str, Any]:
    for name, follower in followers.items():
        sync.follow(name, follower, "actor")  # type: ignore[arg-type]
    return sync.transfer(REF, list(followers))


def has_them(follower: FakeFollower) -> bool:
    return all(follower.weights[n].equal(t) for n, t in NEW.items())


def test_followers_load_what_the_learner_offers_and_it_is_measured(sync: WeightSync) -> None:
    one, two = FakeFollower(), FakeFollower(probe=PROBE + np.float32(5e-4))
    got = outcomes(sync, one=one, two=two)
    assert all(isinstance(reply, Reply) for reply in got.values())
    assert has_them(one)
    assert has_them(two)
    assert sync.metrics["handover/actor_mb"] == pytest.approx(4016 / 1e6)
    assert sync.metrics["handover/retries"] == 0
    assert sync.metrics["handover/logprob_gap"] == pytest.approx(5e-4, rel=1e-3)
    assert sync.metrics["handover/logprob_gap_mean"] == pytest.approx(-5e-4, rel=1e-3)
    assert sync.metrics["handover/logprob_gap_max"] == pytest.approx(5e-4, rel=1e-3)


def test_another_plan_is_refused_before_anything_travels(
    sync: WeightSync, learner: FakeLearner
) -> None:
    with pytest.raises(EngineError, match="both sides must hold the same model"):
        outcomes(sync, one=FakeFollower(), two=FakeFollower(other=True))
    assert learner.sends == 0


@pytest.mark.parametrize("fault", ["dies", "stopped"])
def test_one_that_is_lost_does_not_keep_the_others_from_it(sync: WeightSync, fault: str) -> None:
    one, two = FakeFollower(), FakeFollower(fault)
    got = outcomes(sync, one=one, two=two)
    assert isinstance(got["one"], Reply)
    assert has_them(one)
    assert isinstance(got["two"], RoleLostError)
    assert sync.metrics["handover/retries"] == 1


def test_one_that_hangs_is_given_up(sync: WeightSync) -> None:
    one, two = FakeFollower(), FakeFollower("hangs")
    got = outcomes(sync, one=one, two=two)
    two.released.set()
    assert isinstance(got["one"], Reply)
    assert has_them(one)
    assert isinstance(got["two"], RoleLostError)


def test_one_that_raises_keeps_its_error_and_the_others_get_theirs(sync: WeightSync) -> None:
    one, two = FakeFollower(), FakeFollower("raises")
    got = outcomes(sync, one=one, two=two)
    assert isinstance(got["one"], Reply)
    assert isinstance(got["two"], ValueError)


def test_what_cannot_be_proved_is_refused(sync: WeightSync) -> None:
    got = outcomes(sync, one=FakeFollower("corrupts"))
    assert isinstance(got["one"], EngineError)
    assert "received other: what is between them changes data" in str(got["one"])
    got = outcomes(sync, one=FakeFollower(probe=PROBE - np.float32(0.01)))
    assert isinstance(got["one"], EngineError)
    assert "differ by 0.01 nats" in str(got["one"])


def test_a_learner_that_is_gone_is_nobody_else_s_fault(
    sync: WeightSync, learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(method: str, *args: Any, timeout_s: float) -> Any:
        raise RankError("the process of the learner was killed by SIGKILL")

    monkeypatch.setattr(learner, "aside_on_all", gone)
    with pytest.raises(RankError, match="of the learner was killed") as died:
        outcomes(sync, one=FakeFollower())
    assert not isinstance(died.value, RoleLostError)


def test_at_the_start_every_error_is_raised(sync: WeightSync) -> None:
    sync.follow("one", FakeFollower("raises"), "actor")  # type: ignore[arg-type]
    sync.follow("two", FakeFollower(), "critic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no memory"):
        sync.load_all({"actor": REF})
    sync.follow("one", FakeFollower(), "actor")  # type: ignore[arg-type]
    sync.load_all({"actor": REF})


# -- those that wait for it ----------------------------------------------------------------------


def test_all_that_were_begun_for_get_the_weights_of_one_transfer(
    sync: WeightSync, learner: FakeLearner
) -> None:
    followers = {name: FakeFollower() for name in ("one", "two", "three")}
    loads = {name: sync.follow(name, f, "actor") for name, f in followers.items()}  # type: ignore[arg-type]
    roles: Any = [SimpleNamespace(member=name) for name in ("one", "two")]

    async def body() -> None:
        sync.begin({"actor": REF}, roles)
        await asyncio.gather(*(loads[role.member](REF) for role in roles))
        assert learner.sends == 1
        await loads["three"](REF)  # one for which nothing was begun gets them by itself

    asyncio.run(body())
    assert learner.sends == 2
    assert all(map(has_them, followers.values()))


def test_one_that_stops_waiting_leaves_the_others_theirs(sync: WeightSync) -> None:
    """The first of three is cancelled while weights move; the other two get them."""
    followers = {name: FakeFollower() for name in ("one", "two", "three")}
    followers["one"].fault = "waits"
    loads = {name: sync.follow(name, f, "actor") for name, f in followers.items()}  # type: ignore[arg-type]
    roles: Any = [SimpleNamespace(member=name) for name in followers]

    async def body() -> None:
        sync.begin({"actor": REF}, roles)
        asked = [asyncio.create_task(load(REF)) for load in loads.values()]
        await asyncio.to_thread(followers["one"].asked.wait)
        asked[0].cancel()
        followers["one"].released.set()
        await asyncio.gather(*asked[1:])
        with pytest.raises(asyncio.CancelledError):
            await asked[0]

    asyncio.run(asyncio.wait_for(body(), 60))
    assert all(map(has_them, followers.values()))


def test_a_lost_learner_is_told_to_all_that_wait(
    sync: WeightSync, learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(method: str, *args: Any, timeout_s: float) -> Any:
        raise RankError("the process of the learner was killed by SIGKILL")

    monkeypatch.setattr(learner, "aside_on_all", gone)
    names = ("one", "two", "three")
    loads = [sync.follow(name, FakeFollower(), "actor") for name in names]  # type: ignore[arg-type]
    roles: Any = [SimpleNamespace(member=name) for name in names]

    async def body() -> list[Any]:
        sync.begin({"actor": REF}, roles)
        return await asyncio.gather(*(load(REF) for load in loads), return_exceptions=True)

    errors = asyncio.run(body())
    assert [str(e) for e in errors] == ["the process of the learner was killed by SIGKILL"] * 3


# -- the state machine ---------------------------------------------------------------------------


def test_no_order_of_failures_leaves_a_follower_without_an_outcome() -> None:
    """All of them, for up to three followers and two tries; each answer is one of these."""
    arrived, missed, died = Reply(Loaded("m")), TransferError("broken"), RoleLostError("x", "dead")
    answers: dict[Step, list[Any]] = {
        Step.ANNOUNCE: [None, RankError("gone")],
        Step.MOVE: [arrived, missed, died],
        Step.ABORT: [None, RankError("hangs")],
    }
    ends = 0

    def follow(names: list[str], said: list[Any]) -> None:
        """Replay what was said, then try all that may be said next."""
        nonlocal ends
        transfer, told, moving = Transfer(list(names)), list(said), list[Any]()
        while transfer.step is not Step.DONE:
            assert len(transfer.waiting) == len(set(transfer.waiting))
            assert set(transfer.queue) <= set(transfer.waiting)
            if transfer.step is Step.OFFER:
                transfer.offered()
                continue
            if not told:
                for answer in answers[transfer.step]:
                    follow(names, [*said, answer])
                return
            answer = told.pop(0)
            match transfer.step:
                case Step.ANNOUNCE:
                    transfer.announced(answer)
                case Step.ABORT:
                    transfer.aborted(answer)
                case Step.MOVE:
                    moving.append(answer)
                    if len(moving) == len(transfer.waiting):
                        transfer.moved(dict(zip(transfer.waiting, moving, strict=True)))
                        moving = []
        ends += 1
        assert transfer.outcomes.keys() == set(names)
        assert 1 <= transfer.tried <= 2
        for name, outcome in transfer.outcomes.items():
            assert not isinstance(outcome, TransferError) or transfer.tried == 2, name

    for count in (1, 2, 3):
        follow([f"follower {i}" for i in range(count)], [])
    assert ends > 500  # paths


def test_only_those_that_have_nothing_try_again() -> None:
    arrived = Reply(Loaded("m"))
    transfer = Transfer(["one", "two", "three"])
    transfer.offered()
    for _ in range(3):
        transfer.announced()
    transfer.moved({"one": arrived, "two": TransferError("x"), "three": TransferError("x")})
    assert (transfer.step, transfer.queue) == (Step.ABORT, ["two", "three"])
    transfer.aborted()
    transfer.aborted(RankError("no answer"))
    assert (transfer.step, transfer.waiting) == (Step.OFFER, ["two"])
    transfer.offered()
    transfer.announced()
    transfer.moved({"two": arrived})
    assert transfer.step is Step.DONE
    assert isinstance(transfer.outcomes["three"], RoleLostError)
    assert "three hangs in a hand-over: no answer" in str(transfer.outcomes["three"])
    with pytest.raises(AssertionError, match="whose next step is done was told of move"):
        transfer.moved({})


def test_the_difference_is_a_root_mean_square() -> None:
    assert difference(PROBE, PROBE + np.array([[0.3, 0.4]], np.float32)) == pytest.approx(
        np.sqrt(0.125), rel=1e-5
    )


def test_an_error_of_a_transfer_may_be_tried_again() -> None:
    assert not issubclass(TransferError, (RankError, EngineError))
