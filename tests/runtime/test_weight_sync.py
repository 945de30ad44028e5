"""Weight sync: every order of failures, and real transfers between threads that misbehave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from raising import raises
from stretto.errors import EngineError, RankError, RoleLostError, TransferError
from stretto.observe.spans import Spans
from stretto.protocols import RealClock
from stretto.runtime.clients import GeneratorClient
from stretto.runtime.learner_service import LearnerService
from stretto.runtime.process_messages import Loaded, Offer
from stretto.runtime.transfer_steps import TRIES, Action, difference, proved, transfer_steps
from stretto.runtime.weight_sync import Tolerance, WeightSync
from stretto.types import FloatArray, Reply, WeightsRef
from stretto.weights import transfer
from stretto.weights.broadcast import WeightReceiver, WeightSender
from stretto.weights.transfer import Meeting, open_store
from stretto.workers.rank import Facts

CPU = torch.device("cpu")
Method = Callable[..., Any]
REF = WeightsRef("actor", 1, "x", "broadcast")
NEW = {"w": torch.arange(1000.0), "b": torch.ones(7, dtype=torch.bfloat16)}
PROBE: FloatArray = np.array([[-1.0, -2.0]], np.float32)


def place(gpu: str) -> Facts:
    return Facts("here", 1, {}, 1, gpu)


class FakeLearner:
    """A learner's executor, in this process."""

    facts: tuple[Facts, ...] = (place(""),)

    def __init__(self) -> None:
        self.sender = WeightSender(CPU, 1024, keep=2)
        self.sender.put(REF, NEW)
        self.probe, self.sends = PROBE, 0

    def aside_on_all(
        self, method: Method, ref: WeightsRef, *rest: Any, timeout_s: float
    ) -> list[Any]:
        if method == LearnerService.offer:
            plan = self.sender.plan(ref)
            return [Offer(plan.mark, plan.size, self.probe)]
        self.sends += 1
        (route,) = rest[0]
        return [self.sender.send(ref, route)]


class FakeFollower:
    """A follower's executor, in this process.

    Args:
        fault: what goes wrong: at a method, once.
        probe: its log-probs.
    """

    generation: int = 0
    facts: tuple[Facts, ...] = (place(""),)

    def shares_ranks(self, other: object) -> bool:
        return False

    def __init__(self, fault: str = "", probe: FloatArray = PROBE, other: bool = False) -> None:
        self.weights = {n: torch.zeros_like(t) for n, t in NEW.items() if not (other and n == "b")}
        self.receiver = WeightReceiver(self.weights, CPU, 1024)
        self.fault, self.probe = fault, probe
        self.asked, self.released = threading.Event(), threading.Event()
        self.ended = threading.Event()

    def aside_on_all(self, method: Method, *args: Any, timeout_s: float) -> list[Any]:
        if self.fault == "stopped":
            raise RankError(f"no answer to '{method.__name__}' within {timeout_s:g} s")
        return [getattr(self.receiver, method.__name__)(*args)]

    async def call(self, method: Method, *args: Any) -> Reply[Any]:
        raise AssertionError(f"weights go past the call of {method}")

    def ask(self, method: Method, ref: WeightsRef) -> Reply[Loaded]:
        fault, self.fault = self.fault, "" if self.fault != "stopped" else self.fault
        if fault == "raises":
            raise ValueError("no memory")
        if fault == "dies":
            raise RankError("the process of the follower was killed by SIGKILL")
        self.asked.set()
        if fault in ("hangs", "waits"):
            self.released.wait(30)
        try:
            for name, part in self.receiver.get(ref).items():
                self.weights[name][part.to].copy_(part.tensor)
                if fault == "corrupts":
                    part.tensor.add_(1)
        finally:
            self.ended.set()
        return Reply(Loaded("other" if fault == "corrupts" else self.receiver.mark, self.probe))


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> FakeLearner:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return FakeLearner()


@pytest.fixture
def sync(learner: FakeLearner) -> Iterator[WeightSync]:
    store, port = open_store("127.0.0.1")
    meeting, tolerance = Meeting("127.0.0.1", port, 1.5), Tolerance("auto", torch.float32)
    made = WeightSync(learner, meeting, tolerance, Spans(RealClock()))  # type: ignore[arg-type]
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
    assert sync.metrics["weight_sync/actor_mb"] == pytest.approx(4016 / 1e6)
    assert sync.metrics["weight_sync/retries"] == 0
    assert sync.metrics["weight_sync/logprob_gap"] == pytest.approx(5e-4, rel=1e-3)
    assert sync.metrics["weight_sync/logprob_gap_mean"] == pytest.approx(-5e-4, rel=1e-3)
    assert sync.metrics["weight_sync/logprob_gap_max"] == pytest.approx(5e-4, rel=1e-3)


def test_another_plan_is_refused_before_anything_travels(
    sync: WeightSync, learner: FakeLearner
) -> None:
    with raises(EngineError, "other-plan"):
        outcomes(sync, one=FakeFollower(), two=FakeFollower(other=True))
    assert learner.sends == 0


@pytest.mark.parametrize("fault", ["dies", "stopped"])
def test_one_that_is_lost_does_not_keep_the_others_from_it(sync: WeightSync, fault: str) -> None:
    one, two = FakeFollower(), FakeFollower(fault)
    got = outcomes(sync, one=one, two=two)
    assert isinstance(got["one"], Reply)
    assert has_them(one)
    assert isinstance(got["two"], RoleLostError)
    assert sync.metrics["weight_sync/retries"] == 1


def test_one_that_hangs_is_given_up(sync: WeightSync) -> None:
    one, two = FakeFollower(), FakeFollower("hangs")
    got = outcomes(sync, one=one, two=two)
    two.released.set()
    assert two.ended.wait(30)  # otherwise it would ask a store that is gone
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
    assert got["one"].code == "weights-changed-on-the-way"
    got = outcomes(sync, one=FakeFollower(probe=PROBE - np.float32(0.01)))
    assert got["one"].code == "probe-differs"
    assert "0.01 nats" in str(got["one"])


def test_a_learner_that_is_gone_is_nobody_else_s_fault(
    sync: WeightSync, learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(method: str, *args: Any, timeout_s: float) -> Any:
        raise RankError("the process of the learner was killed by SIGKILL", code="killed")

    monkeypatch.setattr(learner, "aside_on_all", gone)
    with raises(RankError, "killed") as died:
        outcomes(sync, one=FakeFollower())
    assert not isinstance(died.value, RoleLostError)


def test_at_the_start_every_error_is_raised(sync: WeightSync) -> None:
    sync.follow("one", FakeFollower("raises"), "actor")  # type: ignore[arg-type]
    sync.follow("two", FakeFollower(), "critic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no memory"):
        sync.load_all({"actor": REF})
    sync.follow("one", FakeFollower(), "actor")  # type: ignore[arg-type]
    sync.load_all({"actor": REF})


def test_a_group_lasts_until_one_of_its_members_is_another(sync: WeightSync) -> None:
    """Groups are numbered: the same for the same members, and for another wire one of its own."""
    one, two = FakeFollower(), FakeFollower()
    for _ in range(2):
        outcomes(sync, one=one, two=two)
        assert sync._groups["actor", "gloo"] == (1, [("one", 0), ("two", 0)])
    two.generation = 1
    two.receiver = WeightReceiver(two.weights, CPU, 1024)
    got = outcomes(sync, one=one, two=two)
    assert all(isinstance(reply, Reply) for reply in got.values())
    assert sync._groups["actor", "gloo"] == (2, [("one", 0), ("two", 1)])


def test_followers_on_gpus_have_a_group_for_each_wire(
    learner: FakeLearner, sync: WeightSync
) -> None:
    """And each choice is said once. A follower's rank reads beside the learner's on its GPU."""
    said: list[str] = []
    sync.say = said.append
    learner.facts = (place("a"), place("b"))
    others = {"shared": place("b"), "own": place("c"), "cpu": place("")}
    for name, found in others.items():
        follower = FakeFollower()
        follower.facts = (found,)
        sync.follow(name, follower, "actor")  # type: ignore[arg-type]
    wires = sync._wires("actor")
    assert wires == {"shared": "ipc", "own": "nccl", "cpu": "gloo"}
    assert sync._wires("actor") == wires
    assert said == [
        "weights of the actor go to the shared by ipc: it shares the learner's GPUs",
        "weights of the actor go to the own by nccl: it has GPUs of its own",
        "weights of the actor go to the cpu by gloo: it works on a CPU",
    ]
    routes = sync._routes(REF, 1000, wires)
    assert {wire: len(ways) for wire, ways in routes.sending.items()} == dict.fromkeys(
        ("ipc", "nccl", "gloo"), 2
    )
    assert {name: way.beside for name, way in routes.taking.items()} == {
        "shared": (1,),
        "own": (),
        "cpu": (),
    }
    assert {(way.rank, way.size, way.sources) for way in routes.taking.values()} == {(2, 3, 2)}


def test_many_bytes_have_longer_and_as_long_as_they_usually_take(sync: WeightSync) -> None:
    """The setting is 1.5 s; before it is measured, gloo is taken to bring 50 MB/s at least."""
    assert sync.meeting
    sync.meeting = replace(sync.meeting, most_s=450.0)
    assert sync._patience_s("actor", "gloo", 1000) == 1.5
    assert sync._patience_s("actor", "gloo", 10**9) == 20.0
    assert sync._patience_s("actor", "gloo", 64 * 10**9) == 450.0  # what the schedule allows
    outcomes(sync, one=FakeFollower())
    times = sync._times["actor", "gloo"]
    assert len(times) == 1
    times.extend([7.0, 7.0])
    assert sync._patience_s("actor", "gloo", 1000) == 70.0
    assert sync._patience_s("critic", "gloo", 1000) == 1.5


def test_one_that_is_late_is_spoken_of_at_half_the_time(sync: WeightSync) -> None:
    said: list[str] = []
    sync.say = said.append
    follower = FakeFollower("waits")
    threading.Timer(1.0, follower.released.set).start()  # of 1.5 s
    got = outcomes(sync, one=follower)
    assert isinstance(got["one"], Reply)
    assert len(said) == 1
    assert "version 1 of the actor is on its way to one" in said[0]


def test_the_first_sync_shows_what_is_rounding() -> None:
    """In float32 at most 1e-3 passes; then four times the first difference, and 1e-4, is usual."""
    tolerance = Tolerance("auto", torch.float32)
    tolerance.calibrate([])
    assert tolerance.usual == tolerance.limit == 1e-3
    tolerance.calibrate([1e-6, 2e-6])
    assert tolerance.usual == pytest.approx(8e-6 + 1e-4)
    tolerance.calibrate([1.0])
    assert (tolerance.usual, tolerance.limit) == (pytest.approx(8e-6 + 1e-4), 1e-3)
    for gap, usual in ((0.02, 0.09), (0.15, 0.2)):
        coarse = Tolerance("auto", torch.bfloat16)
        coarse.calibrate([gap])
        assert coarse.usual == pytest.approx(usual)
    assert Tolerance(0.5, torch.float32).limit == 0.5


def synced(sync: WeightSync, learner: FakeLearner, version: int, ours: float, theirs: float) -> Any:
    """What comes of a sync of another version, whose log-probs have moved by so much from the
    probe's, the learner's and the follower's.
    """
    ref = replace(REF, version=version)
    learner.sender.put(ref, NEW)
    learner.probe = PROBE + np.float32(ours)
    follower: Any = FakeFollower(probe=PROBE + np.float32(theirs))
    follower.generation = version
    sync.follow("one", follower, "actor")
    return sync.transfer(ref, ["one"])["one"]


def test_the_difference_is_told_relative_to_what_the_update_changed(
    learner: FakeLearner, sync: WeightSync
) -> None:
    said: list[str] = []
    sync.say = said.append
    assert isinstance(synced(sync, learner, 2, 0.0, 0.0), Reply)
    assert "weight_sync/logprob_gap_of_update" not in sync.metrics
    assert isinstance(synced(sync, learner, 3, 0.1, 0.1 + 5e-5), Reply)
    assert sync.metrics["weight_sync/logprob_gap_of_update"] == pytest.approx(5e-4, rel=1e-2)
    # What is beyond rounding, and within the limit, is said; it is nearer to what was sent.
    assert isinstance(synced(sync, learner, 4, 0.2, 0.2 + 5e-4), Reply)
    assert len(said) == 1
    assert "differ by 0.0005 nats" in said[0]
    # It moved by 5e-4 and the follower did not: it computes the version before.
    assert synced(sync, learner, 5, 0.2 + 5e-4, 0.2).code == "probe-of-version-before"
    assert synced(sync, learner, 6, 0.3, 0.2).code == "probe-differs"


def test_one_that_cannot_open_memory_gets_its_weights_by_gloo(
    learner: FakeLearner, sync: WeightSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second try; from then on the first."""
    said: list[str] = []
    sync.say = said.append

    def refused(*_: Any) -> Any:
        raise RuntimeError("not permitted")

    monkeypatch.setattr(transfer, "exported", lambda _: "ticket")
    monkeypatch.setattr(transfer, "opened", refused)
    follower = FakeFollower()
    learner.facts = follower.facts = (place("a"),)
    assert isinstance(outcomes(sync, one=follower)["one"], Reply)
    assert has_them(follower)
    assert [line.partition(" by ")[2] for line in said if " by " in line] == [
        "ipc: it shares the learner's GPUs",
        "gloo: it cannot open memory of the learner's GPUs",
    ]
    assert sync._wires("actor") == {"one": "gloo"}


# -- those that wait for it ----------------------------------------------------------------------


def clients(sync: WeightSync, followers: Mapping[str, FakeFollower]) -> list[Any]:
    """The roles of a schedule that these followers stand behind."""
    spans = Spans(RealClock())
    made: list[Any] = []
    for name, follower in followers.items():
        executor: Any = follower
        load = sync.follow(name, executor, "actor")
        made.append(GeneratorClient(name, name, executor, spans, sync=load))
    return made


def test_all_that_are_asked_for_get_the_weights_of_one_transfer(
    sync: WeightSync, learner: FakeLearner
) -> None:
    followers = {name: FakeFollower() for name in ("one", "two", "three")}
    *two, third = clients(sync, followers)

    async def body() -> None:
        await asyncio.gather(*(wait() for wait in sync.begin(REF, two)))
        assert learner.sends == 1
        await third.load(REF)  # one for which nothing was begun gets them by itself

    asyncio.run(body())
    assert learner.sends == 2
    assert all(map(has_them, followers.values()))


def test_one_that_stops_waiting_leaves_the_others_theirs(sync: WeightSync) -> None:
    """The first of three is cancelled while weights move; the other two get them."""
    followers = {name: FakeFollower() for name in ("one", "two", "three")}
    followers["one"].fault = "waits"
    roles = clients(sync, followers)

    async def body() -> None:
        asked = [asyncio.ensure_future(wait()) for wait in sync.begin(REF, roles)]
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
    roles = clients(sync, {name: FakeFollower() for name in ("one", "two", "three")})

    async def body() -> list[Any]:
        waits = sync.begin(REF, roles)
        return await asyncio.gather(*(wait() for wait in waits), return_exceptions=True)

    errors = asyncio.run(body())
    assert [str(e) for e in errors] == ["the process of the learner was killed by SIGKILL"] * 3


# -- the state machine ---------------------------------------------------------------------------

ARRIVED = Reply(Loaded("m"))
OFFERS = [Offer("plan", 1, None)]


def followed(names: list[str], answers: list[Any]) -> tuple[Action | None, Any]:
    """Play a transfer with these answers; the next action and its followers, or the outcomes.

    A sending is answered by one outcome for each follower.
    """
    steps = transfer_steps(REF, names, 1e-3)
    action, asked, told = *next(steps), list(answers)
    try:
        while True:
            if action is Action.OFFER:
                action, asked = steps.send(OFFERS)
                continue
            wanted = len(asked) if action is Action.SEND else 1
            if len(told) < wanted:
                return action, asked
            given, told = told[:wanted], told[wanted:]
            answer = ("m", dict(zip(asked, given, strict=True)))
            action, asked = steps.send(answer if action is Action.SEND else given[0])
    except StopIteration as end:
        return None, end.value


def test_no_order_of_failures_leaves_a_follower_without_an_outcome() -> None:
    """All of them, for up to three followers and two tries; each answer is one of these."""
    missed, died = TransferError("broken"), RoleLostError("x", "dead")
    may_be: dict[Action, list[Any]] = {
        Action.ANNOUNCE: [None, RankError("gone")],
        Action.SEND: [ARRIVED, missed, died],
        Action.ABORT: [None, RankError("hangs")],
    }
    ends = 0

    def follow(names: list[str], answers: list[Any]) -> None:
        """Try all that may be answered next."""
        nonlocal ends
        action, found = followed(names, answers)
        if action is None:
            ends += 1
            assert found.keys() == set(names)
            return
        assert len(found) == len(set(found)) > 0
        assert set(found) <= set(names)
        for answer in may_be[action]:
            follow(names, [*answers, answer])

    for count in (1, 2, 3):
        follow([f"follower {i}" for i in range(count)], [])
    assert ends > 500  # paths


def test_only_those_that_have_nothing_try_again() -> None:
    names, missed = ["one", "two", "three"], TransferError("x")
    told: list[Any] = [None, None, None, ARRIVED, missed, missed]
    assert followed(names, told[:3]) == (Action.SEND, ("one", "two", "three"))
    assert followed(names, told) == (Action.ABORT, ("two",))
    told += [None, RankError("no answer")]
    assert followed(names, told) == (Action.ANNOUNCE, ("two",))
    assert followed(names, [*told, None]) == (Action.SEND, ("two",))
    action, outcomes = followed(names, [*told, None, ARRIVED])
    assert (action, outcomes["one"], outcomes["two"]) == (None, ARRIVED, ARRIVED)
    assert outcomes["three"].code == "hangs-in-weight-sync"
    assert "no answer" in str(outcomes["three"])


def test_after_the_last_try_what_is_missing_is_an_error() -> None:
    told: list[Any] = [None, TransferError("x"), None] * TRIES
    action, outcomes = followed(["one"], told)
    assert action is None
    assert isinstance(outcomes["one"], TransferError)


def test_a_follower_proves_what_it_has() -> None:
    """Marks of what was sent and received, and log-probs of the probe."""
    offer, other = Offer("plan", 1, PROBE), PROBE + np.float32(0.01)
    reply, error = Reply(Loaded("m", PROBE)), ValueError("x")
    assert proved("one", reply, REF, offer, "m", 1e-3) is reply
    assert proved("one", error, REF, offer, "m", 1e-3) is error
    for loaded, tolerance, code in (
        (Loaded("n", PROBE), 1e-3, "weights-changed-on-the-way"),
        (Loaded("m", other), 1e-3, "probe-differs"),
        (Loaded("m", PROBE * np.float32("nan")), 1e-3, "probe-differs"),
        (Loaded("m", other), 0.1, None),
        (Loaded("m"), 1e-3, None),
    ):
        outcome = proved("one", Reply(loaded), REF, offer, "m", tolerance)
        assert getattr(outcome, "code", None) == code


def test_the_difference_is_a_root_mean_square() -> None:
    assert difference(PROBE, PROBE + np.array([[0.3, 0.4]], np.float32)) == pytest.approx(
        np.sqrt(0.125), rel=1e-5
    )


def test_an_error_of_a_transfer_may_be_tried_again() -> None:
    assert not issubclass(TransferError, (RankError, EngineError))
