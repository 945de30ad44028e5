"""Hand-overs between threads: real transfers, and followers that misbehave."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from stretto.clock import RealClock
from stretto.errors import EngineError, RankError, RoleLostError, TransferError
from stretto.observe.spans import Spans
from stretto.runtime.groups.handover import Handover, difference, hand_over
from stretto.runtime.groups.messages import Loaded, Offer
from stretto.types import FloatArray, Reply, WeightsRef
from stretto.weights.broadcast import Inbox, Outbox
from stretto.weights.transfer import Meeting, open_store

CPU = torch.device("cpu")
REF = WeightsRef("actor", 1, "x", "broadcast")
NEW = {"w": torch.arange(1000.0), "b": torch.ones(7, dtype=torch.bfloat16)}
PROBE: FloatArray = np.array([[-1.0, -2.0]], np.float32)


class FakeLearner:
    """A learner's executor, in this process."""

    def __init__(self) -> None:
        self.outbox = Outbox(CPU, 1024, keep=2)
        self.outbox.put(REF, NEW)
        self.sends = 0

    def aside_on_all(self, method: str, ref: WeightsRef, *rest: Any, timeout_s: float) -> list[Any]:
        if method == "offer":
            return [Offer(*self.outbox.plan(ref), PROBE)]
        self.sends += 1
        (route,) = rest[0]
        return [self.outbox.send(ref, route)]


class FakeFollower:
    """A follower's executor, in this process.

    Args:
        fault: what goes wrong: at a method, once.
        probe: its log-probs.
    """

    generation, size = 0, 1

    def with_(self, other: object) -> bool:
        return False

    def __init__(self, fault: str = "", probe: FloatArray = PROBE, other: bool = False) -> None:
        self.weights = {n: torch.zeros_like(t) for n, t in NEW.items() if not (other and n == "b")}
        self.inbox = Inbox(self.weights, CPU, 1024)
        self.fault, self.probe, self.released = fault, probe, threading.Event()

    def aside_on_all(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        if self.fault == "stopped":
            raise RankError(f"no answer to '{method}' within {timeout_s:g} s")
        return [getattr(self.inbox, method)(*args)]

    def ask(self, method: str, ref: WeightsRef) -> Reply[Loaded]:
        fault, self.fault = self.fault, "" if self.fault != "stopped" else self.fault
        if fault == "raises":
            raise ValueError("no memory")
        if fault == "dies":
            raise RankError("the process of the follower was killed by SIGKILL")
        if fault == "hangs":
            self.released.wait(30)
        for name, part in self.inbox.get(ref).items():
            self.weights[name].copy_(part.tensor)
            if fault == "corrupts":
                part.tensor.add_(1)
        return Reply(Loaded("other" if fault == "corrupts" else self.inbox.mark, self.probe))


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> FakeLearner:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return FakeLearner()


@pytest.fixture
def handover(learner: FakeLearner) -> Iterator[Handover]:
    store, port = open_store("127.0.0.1")
    meeting = Meeting("127.0.0.1", port, "gloo", 1.5)
    made = Handover(learner, meeting, 1e-3, Spans(RealClock()))  # type: ignore[arg-type]
    yield made
    made.close()
    del store


def outcomes(handover: Handover, **followers: FakeFollower) -> Mapping[str, Any]:
    return handover.transfer(REF, followers)  # type: ignore[arg-type]


def has_them(follower: FakeFollower) -> bool:
    return all(follower.weights[n].equal(t) for n, t in NEW.items())


def test_followers_load_what_the_learner_offers_and_it_is_measured(handover: Handover) -> None:
    one, two = FakeFollower(), FakeFollower(probe=PROBE + np.float32(5e-4))
    got = outcomes(handover, one=one, two=two)
    assert all(isinstance(reply, Reply) for reply in got.values())
    assert has_them(one)
    assert has_them(two)
    assert handover.metrics["handover/actor_mb"] == pytest.approx(4016 / 1e6)
    assert handover.metrics["handover/retries"] == 0
    assert handover.metrics["handover/logprob_gap"] == pytest.approx(5e-4, rel=1e-3)
    assert handover.metrics["handover/logprob_gap_mean"] == pytest.approx(-5e-4, rel=1e-3)
    assert handover.metrics["handover/logprob_gap_max"] == pytest.approx(5e-4, rel=1e-3)


def test_another_plan_is_refused_before_anything_travels(
    handover: Handover, learner: FakeLearner
) -> None:
    with pytest.raises(EngineError, match="both sides must hold the same model"):
        outcomes(handover, one=FakeFollower(), two=FakeFollower(other=True))
    assert learner.sends == 0


@pytest.mark.parametrize("fault", ["dies", "stopped"])
def test_one_that_is_lost_does_not_keep_the_others_from_it(handover: Handover, fault: str) -> None:
    one, two = FakeFollower(), FakeFollower(fault)
    got = outcomes(handover, one=one, two=two)
    assert isinstance(got["one"], Reply)
    assert has_them(one)
    assert isinstance(got["two"], RoleLostError)
    assert handover.metrics["handover/retries"] == 1


def test_one_that_hangs_is_given_up(handover: Handover) -> None:
    one, two = FakeFollower(), FakeFollower("hangs")
    got = outcomes(handover, one=one, two=two)
    two.released.set()
    assert isinstance(got["one"], Reply)
    assert has_them(one)
    assert isinstance(got["two"], RoleLostError)


def test_one_that_raises_keeps_its_error_and_the_others_get_theirs(handover: Handover) -> None:
    one, two = FakeFollower(), FakeFollower("raises")
    got = outcomes(handover, one=one, two=two)
    assert isinstance(got["one"], Reply)
    assert isinstance(got["two"], ValueError)


def test_what_cannot_be_proved_is_refused(handover: Handover) -> None:
    got = outcomes(handover, one=FakeFollower("corrupts"))
    assert isinstance(got["one"], EngineError)
    assert "received other: what is between them changes data" in str(got["one"])
    got = outcomes(handover, one=FakeFollower(probe=PROBE - np.float32(0.01)))
    assert isinstance(got["one"], EngineError)
    assert "differ by 0.01 nats" in str(got["one"])


def test_a_learner_that_is_gone_is_nobody_else_s_fault(
    handover: Handover, learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(method: str, *args: Any, timeout_s: float) -> Any:
        raise RankError("the process of the learner was killed by SIGKILL")

    monkeypatch.setattr(learner, "aside_on_all", gone)
    with pytest.raises(RankError, match="of the learner was killed") as died:
        outcomes(handover, one=FakeFollower())
    assert not isinstance(died.value, RoleLostError)


def test_at_the_start_every_error_is_raised(handover: Handover) -> None:
    followers = {"one": (FakeFollower("raises"), "actor"), "two": (FakeFollower(), "critic")}
    with pytest.raises(ValueError, match="no memory"):
        hand_over(handover, followers, {"actor": REF})  # type: ignore[arg-type]
    hand_over(handover, {"one": (FakeFollower(), "actor")}, {"actor": REF})  # type: ignore[dict-item]


def test_the_difference_is_a_root_mean_square() -> None:
    assert difference(PROBE, PROBE + np.array([[0.3, 0.4]], np.float32)) == pytest.approx(
        np.sqrt(0.125), rel=1e-5
    )


def test_an_error_of_a_transfer_may_be_tried_again() -> None:
    assert not issubclass(TransferError, (RankError, EngineError))
