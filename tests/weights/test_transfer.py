"""Transfers over gloo, each side in a thread of this process."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from raising import raises
from stretto.errors import EngineError, TransferError
from stretto.layout import FullParameter, Layout
from stretto.models.shards import index
from stretto.types import WeightsRef
from stretto.weights import transfer
from stretto.weights.broadcast import WeightReceiver, WeightSender
from stretto.weights.transfer import Meeting, Route, choose_wires, open_store
from stretto.workers.rank import Facts

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
    return Meeting("127.0.0.1", port, timeout_s).routes("weights/actor", epoch, size)


def taken(receiver: WeightReceiver, ref: WeightsRef = REF) -> dict[str, Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors(0.0).items()}
    for name, part in receiver.get(ref).items():
        found[name][part.to] = part.tensor
    return found


def test_followers_get_what_was_sent_and_can_prove_it() -> None:
    store, port = open_store("127.0.0.1")
    sender = WeightSender(CPU, 64, keep=2)
    receivers = [WeightReceiver(tensors(0.0), CPU, 64) for _ in range(2)]
    for factor in (1.0, -2.0):  # the second time over the same group
        ref = replace(REF, version=int(factor))
        sender.put(ref, tensors(factor))
        plan = sender.plan(ref)
        assert plan.size == 32 + 32 + 160  # 28, 24 and 160 bytes, rounded up to 16
        ways = routes(port, 3)
        for receiver, way in zip(receivers, ways[1:], strict=True):
            receiver.expect(ref, plan.mark, way)
        got = run(
            {
                "send": lambda ref=ref, way=ways[0]: sender.send(ref, way),
                "one": lambda ref=ref: taken(receivers[0], ref),
                "two": lambda ref=ref: taken(receivers[1], ref),
            }
        )
        for name in ("one", "two"):
            assert all(got[name][n].equal(t) for n, t in tensors(factor).items())
        assert receivers[0].mark == receivers[1].mark == got["send"] != ""
    del store


def test_a_group_stays_while_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups take longer to make than small models take to travel."""
    store, port = open_store("127.0.0.1")
    meeting, made = Meeting("127.0.0.1", port, 20.0), list[str]()

    def join(group: Any) -> None:
        made.append(f"{group.route.prefix} {group.route.rank}")
        joined(group)

    joined = transfer._TransferGroup._join
    monkeypatch.setattr(transfer._TransferGroup, "_join", join)
    sender = WeightSender(CPU, 64, keep=2)
    models = {
        "actor": WeightReceiver(tensors(0.0), CPU, 64),
        "critic": WeightReceiver(tensors(0.0), CPU, 64),
    }
    for epoch in (1, 1, 2):
        for model, receiver in models.items():
            ref = replace(REF, model=model)
            sender.put(ref, tensors(3.0))
            ways = meeting.routes(model, 1 if model == "actor" else epoch, 2)
            receiver.expect(ref, sender.plan(ref).mark, ways[1])
            got = run(
                {
                    "send": lambda ref=ref, way=ways[0]: sender.send(ref, way),
                    "one": lambda ref=ref, receiver=receiver: taken(receiver, ref),
                }
            )
            assert got["one"]["c"].equal(tensors(3.0)["c"])
    names = ("actor/1", "critic/1", "critic/2")
    assert sorted(made) == [f"{name} {rank}" for name in names for rank in (0, 1)]
    del store


def test_a_follower_that_has_vanished_costs_no_more_than_the_deadline() -> None:
    store, port = open_store("127.0.0.1")
    sender, receiver = WeightSender(CPU, 64, keep=2), WeightReceiver(tensors(0.0), CPU, 64)
    sender.put(REF, tensors(1.0))
    mark = sender.plan(REF).mark
    ways = routes(port, 3, timeout_s=1.0)  # the third member never comes
    receiver.expect(REF, mark, ways[1])
    start_s = time.monotonic()
    got = run({"send": lambda: sender.send(REF, ways[0]), "one": lambda: taken(receiver)})
    assert isinstance(got["send"], TransferError)
    assert isinstance(got["one"], TransferError)
    assert time.monotonic() - start_s < 15
    ways = routes(port, 2, epoch=2)  # once more, without it
    receiver.expect(REF, mark, ways[1])
    got = run({"send": lambda: sender.send(REF, ways[0]), "one": lambda: taken(receiver)})
    assert got["one"]["a"].equal(tensors(1.0)["a"])
    del store


def test_a_follower_that_raises_in_the_middle_is_waited_for_until_the_deadline() -> None:
    store, port = open_store("127.0.0.1")
    size = 16 << 20  # bytes, more than a socket holds
    large = {name: torch.ones(size // 4) for name in "abcd"}
    sender, receiver = WeightSender(CPU, size, keep=2), WeightReceiver(large, CPU, size)
    sender.put(REF, large)
    mark = sender.plan(REF).mark
    ways = routes(port, 2, timeout_s=2.0)
    receiver.expect(REF, mark, ways[1])

    def fails() -> None:
        for name, _ in receiver.get(REF).items():
            if name == "b":
                receiver.abort()
                raise ValueError("no memory")

    got = run({"send": lambda: sender.send(REF, ways[0]), "one": fails})
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
    sender = WeightSender(CPU, 64, keep=2)
    sender.put(REF, tensors(1.0))
    way, other = routes(port, 2, timeout_s=4.0)
    command = [sys.executable, "-c", STUCK, str(port), other.prefix]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stuck:
        assert stuck.stdout
        stuck.stdout.readline()
        time.sleep(1.0)  # it publishes its address
        stuck.send_signal(signal.SIGSTOP)
        start_s = time.monotonic()
        with raises(TransferError, "transfer-broken-off"):
            sender.send(REF, way)
        assert time.monotonic() - start_s < 12  # and not 20
        stuck.kill()
    del store


def test_an_abort_ends_a_wait_at_once() -> None:
    store, port = open_store("127.0.0.1")
    sender, receiver = WeightSender(CPU, 64, keep=2), WeightReceiver(tensors(0.0), CPU, 64)
    sender.put(REF, tensors(1.0))
    mark = sender.plan(REF).mark
    (_, way) = routes(port, 2, timeout_s=60.0)
    receiver.expect(REF, mark, way)
    threading.Timer(0.5, receiver.abort).start()
    start_s = time.monotonic()
    got = run({"one": lambda: taken(receiver)})
    assert isinstance(got["one"], TransferError)
    assert time.monotonic() - start_s < 30
    del store


def test_nothing_is_sent_before_all_that_receive_have_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a group that is there already, of which one member is late."""
    store, port = open_store("127.0.0.1")
    sender, receiver = WeightSender(CPU, 64, keep=1), WeightReceiver(tensors(0.0), CPU, 64)
    way, other = routes(port, 2)
    waiting = threading.Event()
    exchange, await_ = transfer._TransferGroup.exchange, transfer._TransferGroup._await
    sent: list[int] = []

    def noted(group: Any, *args: Any) -> Any:
        sent.append(group.route.rank)
        return exchange(group, *args)

    def waits(group: Any, keys: list[str]) -> None:
        if keys == ["begun/2/1"]:
            waiting.set()
        await_(group, keys)

    monkeypatch.setattr(transfer._TransferGroup, "exchange", noted)
    monkeypatch.setattr(transfer._TransferGroup, "_await", waits)
    for version in (1, 2):
        ref = replace(REF, version=version)
        sender.put(ref, tensors(float(version)))
        receiver.expect(ref, sender.plan(ref).mark, other)
        sent.clear()
        sending = threading.Thread(target=partial(sender.send, ref, way))
        sending.start()
        if version == 2:
            assert waiting.wait(20)
            assert not sent
        assert taken(receiver, ref)["a"].equal(tensors(float(version))["a"])
        sending.join()
        assert set(sent) == {0, 1}
    del store


def test_control_comes_before_any_tensor() -> None:
    sender, receiver = WeightSender(CPU, 64, keep=2), WeightReceiver(tensors(0.0), CPU, 64)
    way = routes(1, 2)[1]
    with raises(EngineError, "other-plan", "other"):
        receiver.expect(REF, "other", way)
    with raises(EngineError, "version-not-announced", "version 3 of the actor"):
        receiver.get(REF)
    for version in range(3):
        sender.put(replace(REF, version=version), tensors(1.0))
    with raises(EngineError, "version-not-kept", "version 0", [1, 2]):
        sender.plan(replace(REF, version=0))


# -- several sources ------------------------------------------------------------------------------

FULL = {
    "rows": FullParameter((7, 3), torch.float32),
    "norm": FullParameter((5,), torch.bfloat16),
    "large": FullParameter((40, 4), torch.float32),
}
LAYOUT = Layout(fsdp=3)


def whole(factor: float) -> dict[str, Tensor]:
    sizes = {name: math.prod(full.shape) for name, full in FULL.items()}
    return {
        name: (torch.arange(sizes[name]) * factor).view(full.shape).to(full.dtype)
        for name, full in FULL.items()
    }


def sources(factor: float, bucket: int) -> list[WeightSender]:
    """A sender for each rank of the layout, with a version of the weights."""
    found, values = [], whole(factor)
    for rank in range(LAYOUT.ranks):
        sender = WeightSender(CPU, bucket, keep=2)
        sender.divide("actor", FULL, LAYOUT)
        own = LAYOUT.own(FULL, rank)
        sender.put(REF, {name: values[name][index(bounds)] for name, bounds in own.items()})
        found.append(sender)
    return found


def receiver_of(bucket: int) -> WeightReceiver:
    own = [LAYOUT.own(FULL, rank) for rank in range(LAYOUT.ranks)]
    return WeightReceiver(whole(0.0), CPU, bucket, own)


def filled(receiver: WeightReceiver) -> dict[str, Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in whole(0.0).items()}
    for name, part in receiver.get(REF).items():
        found[name][part.to] = part.tensor
    return found


def synced(
    ways: list[Route], senders: list[WeightSender], receivers: list[WeightReceiver]
) -> list[dict[str, Tensor]]:
    """Send over a group to all its other members; return what each received."""
    for receiver, way in zip(receivers, ways[len(senders) :], strict=True):
        receiver.expect(REF, senders[0].plan(REF).mark, way)
    sends = {f"send {i}": partial(sender.send, REF, ways[i]) for i, sender in enumerate(senders)}
    takes = {f"take {i}": partial(filled, receiver) for i, receiver in enumerate(receivers)}
    got = run({**sends, **takes})
    assert {r.mark for r in receivers} == {" ".join(got[name] for name in sends)}
    return [got[name] for name in takes]


@pytest.mark.parametrize("bucket", [64, 1 << 20])
def test_several_sources_send_their_parts_over_one_group(
    monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    made, joined = list[int](), transfer._TransferGroup._join

    def join(group: Any) -> None:
        made.append(group.route.rank)
        joined(group)

    monkeypatch.setattr(transfer._TransferGroup, "_join", join)
    store, port = open_store("127.0.0.1")
    ways = Meeting("127.0.0.1", port, 20.0).routes("weights/actor", 1, 5, sources=3)
    senders, receivers = sources(3.0, bucket), [receiver_of(bucket) for _ in range(2)]
    for _ in range(2):
        for values in synced(ways, senders, receivers):
            assert all(values[name].equal(tensor) for name, tensor in whole(3.0).items())
    assert sorted(made) == [0, 1, 2, 3, 4]  # and none for each source
    del store


# -- wires ----------------------------------------------------------------------------------------


def place(gpu: str) -> Facts:
    return Facts("node", 1, {}, 1, gpu)


def test_each_follower_gets_the_fastest_wire_that_works() -> None:
    learner = [place("a"), place("b")]
    chosen = choose_wires(
        learner,
        {
            "own": [place("c"), place("d")],
            "shared": [place("b")],
            "other": [place("d")],  # which the first has in the group already
            "split": [place("a"), place("e")],
            "twice": [place("f"), place("f")],
            "cpu": [place("")],
        },
    )
    assert {name: wire for name, (wire, _) in chosen.items()} == {
        "own": "nccl",
        "shared": "ipc",
        "other": "gloo",
        "split": "gloo",
        "twice": "gloo",
        "cpu": "gloo",
    }
    assert chosen["cpu"][1] == "it works on a CPU"
    assert choose_wires([place("")], {"one": [place("c")]})["one"][0] == "gloo"
    assert choose_wires([place("a"), place("a")], {"one": [place("c")]})["one"][0] == "gloo"


class Recorder:
    """A device's backend that notes what happens on which stream, and in which order."""

    def __init__(self) -> None:
        self.events, self.current = list[str](), "main"

    def new_stream(self) -> str:
        return "weights"

    def begun(self) -> str:
        return f"{self.current} had begun"

    @contextmanager
    def on(self, stream: str, begun: str) -> Iterator[None]:
        self.events.append(f"{stream} waits until {begun}")
        before, self.current = self.current, stream
        yield
        self.current = before

    def read_on(self, stream: str, tensor: Tensor) -> Tensor:
        self.events.append(f"{self.current} reads, kept for {stream}")
        return tensor

    def synchronize(self) -> None:
        self.events.append(f"{self.current} done")


def test_weights_are_read_and_sent_on_a_stream_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for the work that made them, and none waits for it."""
    recorder = Recorder()
    monkeypatch.setattr(transfer, "backend_of", lambda _: recorder)
    store, port = open_store("127.0.0.1")
    sender, receiver = WeightSender(CPU, 64, keep=1), WeightReceiver(tensors(0.0), CPU, 64)
    sender.put(REF, tensors(1.0))
    exchange = transfer._TransferGroup.exchange

    def noted(group: Any, *args: Any) -> Any:
        if threading.current_thread() is sending:
            recorder.events.append(f"{recorder.current} sends")
        return exchange(group, *args)

    monkeypatch.setattr(transfer._TransferGroup, "exchange", noted)
    ways = routes(port, 2)
    receiver.expect(REF, sender.plan(REF).mark, ways[1])
    sending = threading.Thread(target=lambda: sender.send(REF, ways[0]))
    sending.start()
    assert taken(receiver)["a"].equal(tensors(1.0)["a"])
    sending.join()
    first, *others = recorder.events
    assert first == "weights waits until main had begun"
    assert set(others) == {"weights reads, kept for weights", "weights sends"}
    del store


class FakeNccl:
    """NCCL as gloo does it: what is done is asked for, and waits are for a stream."""

    made: ClassVar[list[tuple[int, int, torch.device]]] = []

    class Options:
        _timeout = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self._given = store, rank, size
        assert os.environ[transfer.BLOCKING] == "1"

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._group: Any = torch.distributed.ProcessGroupGloo(*self._given, timedelta(seconds=9))
        self.made.append((*self._given[1:], device))

    def _set_sequence_number_for_group(self) -> None:
        self._group._set_sequence_number_for_group()

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        return self._group.broadcast(tensors, options)

    def abort(self) -> None:
        self._group.abort()


def test_nccl_is_asked_on_the_rank_s_own_device_and_fills_up_what_is_read_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three sources share their buckets by NCCL; each of two followers reads those of the source
    on its GPU, which it opens by a ticket.
    """
    memory = dict[str, Tensor]()

    def export(buffer: Tensor) -> str:
        memory[str(buffer.data_ptr())] = buffer
        return str(buffer.data_ptr())

    FakeNccl.made.clear()
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(transfer, "exported", export)
    monkeypatch.setattr(transfer, "opened", lambda ticket, _: memory[ticket.decode()])
    store, port = open_store("127.0.0.1")
    ways = Meeting("127.0.0.1", port, 20.0).routes("weights/actor", 1, 5, "ipc", 3)
    ways[:3] = [replace(way, beside=(2, 0)) for way in ways[:3]]
    ways[3:] = [replace(ways[3], beside=(2,)), replace(ways[4], beside=(0,))]
    for values in synced(ways, sources(3.0, 64), [receiver_of(64), receiver_of(64)]):
        assert all(values[name].equal(tensor) for name, tensor in whole(3.0).items())
    assert sorted(FakeNccl.made, key=str) == [(rank, 3, CPU) for rank in range(3)]
    assert len(memory) == 4  # two buffers of each source that is read
    FakeNccl.made.clear()
    ways = Meeting("127.0.0.1", port, 20.0).routes("weights/actor", 2, 5, "nccl", 3)
    for values in synced(ways, sources(5.0, 64), [receiver_of(64), receiver_of(64)]):
        assert all(values[name].equal(tensor) for name, tensor in whole(5.0).items())
    assert sorted(FakeNccl.made, key=str) == [(rank, 5, CPU) for rank in range(5)]
    assert transfer.BLOCKING not in os.environ
    del store


def test_memory_that_cannot_be_opened_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the next try goes another way; the source has nothing to wait for, either."""

    def refused(*_: Any) -> Tensor:
        raise RuntimeError("pidfd_getfd: Operation not permitted")

    monkeypatch.setattr(transfer, "exported", lambda _: "ticket")
    monkeypatch.setattr(transfer, "opened", refused)
    store, port = open_store("127.0.0.1")
    sender, receiver = WeightSender(CPU, 64, keep=1), WeightReceiver(tensors(0.0), CPU, 64)
    sender.put(REF, tensors(1.0))
    way, other = Meeting("127.0.0.1", port, 3.0).routes("weights/actor", 1, 2, "ipc")
    receiver.expect(REF, sender.plan(REF).mark, replace(other, beside=(0,)))
    got = run(
        {
            "send": lambda: sender.send(REF, replace(way, beside=(0,))),
            "take": lambda: taken(receiver),
        }
    )
    assert got["take"].code == "memory-not-shared"
    assert "Operation not permitted" in str(got["take"])
    assert got["send"].code == "transfer-broken-off"
    del store
