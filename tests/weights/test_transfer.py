"""Transfers over gloo, each side in a thread of this process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.errors import EngineError, TransferError
from stretto.types import WeightsRef
from stretto.weights import transfer
from stretto.weights.broadcast import Inbox, Outbox
from stretto.weights.transfer import Meeting, Route, open_store

CPU = torch.device("cpu")
REF = WeightsRef("actor", 3, "x", "broadcast")


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def tensors(factor: float) -> dict[str, Tensor]:
    return {
        "a": torch.arange(7.0) * factor,
        "b": (torch.arange(12.0).view(3, 4) * factor).bfloat16(),
        "c": torch.arange(40.0) * factor,
    }


def run(calls: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Make all calls at once; return each one's result or error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = {name: pool.submit(call) for name, call in calls.items()}
        return {name: f.exception() or f.result() for name, f in futures.items()}


def routes(port: int, size: int, timeout_s: float = 20.0, epoch: int = 1) -> list[Route]:
    return Meeting("127.0.0.1", port, "gloo", timeout_s).routes("weights/actor", epoch, size)


def taken(inbox: Inbox, ref: WeightsRef = REF) -> dict[str, Tensor]:
    return {name: part.tensor.clone() for name, part in inbox.get(ref).items()}


def test_followers_get_what_was_sent_and_can_prove_it() -> None:
    store, port = open_store("127.0.0.1")
    outbox = Outbox(CPU, 64, keep=2)
    inboxes = [Inbox(tensors(0.0), CPU, 64) for _ in range(2)]
    for factor in (1.0, -2.0):  # the second time over the same group
        ref = replace(REF, version=int(factor))
        outbox.put(ref, tensors(factor))
        mark, size = outbox.plan(ref)
        assert size == 32 + 32 + 160  # 28, 24 and 160 bytes, rounded up to 16
        ways = routes(port, 3)
        for inbox, way in zip(inboxes, ways[1:], strict=True):
            inbox.expect(ref, [mark], [way])
        got = run(
            {
                "send": lambda ref=ref, way=ways[0]: outbox.send(ref, way),
                "one": lambda ref=ref: taken(inboxes[0], ref),
                "two": lambda ref=ref: taken(inboxes[1], ref),
            }
        )
        for name in ("one", "two"):
            assert all(got[name][n].equal(t) for n, t in tensors(factor).items())
        assert inboxes[0].mark == inboxes[1].mark == got["send"] != ""
    del store


def test_a_group_stays_while_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups take longer to make than small models take to travel."""
    store, port = open_store("127.0.0.1")
    meeting, made = Meeting("127.0.0.1", port, "gloo", 20.0), list[str]()

    def join(route: Route, *rest: Any) -> Any:
        made.append(f"{route.prefix} {route.rank}")
        return joined(route, *rest)

    joined = transfer._join
    monkeypatch.setattr(transfer, "_join", join)
    outbox = Outbox(CPU, 64, keep=2)
    models = {"actor": Inbox(tensors(0.0), CPU, 64), "critic": Inbox(tensors(0.0), CPU, 64)}
    for epoch in (1, 1, 2):
        for model, inbox in models.items():
            ref = replace(REF, model=model)
            outbox.put(ref, tensors(3.0))
            ways = meeting.routes(model, 1 if model == "actor" else epoch, 2)
            inbox.expect(ref, [outbox.plan(ref)[0]], [ways[1]])
            got = run(
                {
                    "send": lambda ref=ref, way=ways[0]: outbox.send(ref, way),
                    "one": lambda ref=ref, inbox=inbox: taken(inbox, ref),
                }
            )
            assert got["one"]["c"].equal(tensors(3.0)["c"])
    names = ("actor/1", "critic/1", "critic/2")
    assert sorted(made) == [f"{name} {rank}" for name in names for rank in (0, 1)]
    del store


def test_a_follower_that_has_vanished_costs_no_more_than_the_deadline() -> None:
    store, port = open_store("127.0.0.1")
    outbox, inbox = Outbox(CPU, 64, keep=2), Inbox(tensors(0.0), CPU, 64)
    outbox.put(REF, tensors(1.0))
    mark, _ = outbox.plan(REF)
    ways = routes(port, 3, timeout_s=1.0)  # the third member never comes
    inbox.expect(REF, [mark], [ways[1]])
    start_s = time.monotonic()
    got = run({"send": lambda: outbox.send(REF, ways[0]), "one": lambda: taken(inbox)})
    assert isinstance(got["send"], TransferError)
    assert isinstance(got["one"], TransferError)
    assert time.monotonic() - start_s < 15
    ways = routes(port, 2, epoch=2)  # once more, without it
    inbox.expect(REF, [mark], [ways[1]])
    got = run({"send": lambda: outbox.send(REF, ways[0]), "one": lambda: taken(inbox)})
    assert got["one"]["a"].equal(tensors(1.0)["a"])
    del store


def test_a_follower_that_raises_in_the_middle_is_waited_for_until_the_deadline() -> None:
    store, port = open_store("127.0.0.1")
    large = {name: torch.ones(4 << 20) for name in "abcd"}  # more than a socket holds
    outbox, inbox = Outbox(CPU, 64, keep=2), Inbox(large, CPU, 64)
    outbox.put(REF, large)
    mark, _ = outbox.plan(REF)
    ways = routes(port, 2, timeout_s=2.0)
    inbox.expect(REF, [mark], [ways[1]])

    def fails() -> None:
        for name, _ in inbox.get(REF).items():
            if name == "b":
                inbox.abort()
                raise ValueError("no memory")

    got = run({"send": lambda: outbox.send(REF, ways[0]), "one": fails})
    assert isinstance(got["one"], ValueError)
    assert isinstance(got["send"], TransferError)
    del store


STUCK = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
port, prefix = int(sys.argv[1]), sys.argv[2]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
own = dist.PrefixStore(prefix, store)
own.set("here/1", "")
print("here", flush=True)
dist.ProcessGroupGloo(own, 1, 2, timedelta(seconds=60))
"""
"""A follower that has come, and is stopped before it connects."""


def test_a_follower_that_is_stopped_while_they_meet_holds_nobody_up_beyond_the_deadline() -> None:
    """gloo tries five times; the learner would be taken to hang."""
    store, port = open_store("127.0.0.1")
    outbox = Outbox(CPU, 64, keep=2)
    outbox.put(REF, tensors(1.0))
    way, other = routes(port, 2, timeout_s=4.0)
    command = [sys.executable, "-c", STUCK, str(port), other.prefix]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stuck:
        assert stuck.stdout
        stuck.stdout.readline()
        time.sleep(1.0)  # it publishes its address
        stuck.send_signal(signal.SIGSTOP)
        start_s = time.monotonic()
        with pytest.raises(TransferError, match="was broken off"):
            outbox.send(REF, way)
        assert time.monotonic() - start_s < 12  # and not 20
        stuck.kill()
    del store


def test_an_abort_ends_a_wait_at_once() -> None:
    store, port = open_store("127.0.0.1")
    outbox, inbox = Outbox(CPU, 64, keep=2), Inbox(tensors(0.0), CPU, 64)
    outbox.put(REF, tensors(1.0))
    mark, _ = outbox.plan(REF)
    (_, way) = routes(port, 2, timeout_s=3.0)
    inbox.expect(REF, [mark], [way])
    threading.Timer(0.5, inbox.abort).start()
    got = run({"one": lambda: taken(inbox)})
    assert isinstance(got["one"], TransferError)
    del store


def test_control_comes_before_any_tensor() -> None:
    outbox, inbox = Outbox(CPU, 64, keep=2), Inbox(tensors(0.0), CPU, 64)
    way = routes(1, 2)[1]
    with pytest.raises(EngineError, match="travels by the plan other, and who is to load it has"):
        inbox.expect(REF, ["other"], [way])
    with pytest.raises(EngineError, match="version 3 of the actor was not announced"):
        inbox.get(REF)
    with pytest.raises(EngineError, match="a follower publishes no weights"):
        inbox.put(REF, {})
    for version in range(3):
        outbox.put(replace(REF, version=version), tensors(1.0))
    with pytest.raises(EngineError, match=r"version 0 of the actor is not in .*\[1, 2\]"):
        outbox.plan(replace(REF, version=0))
