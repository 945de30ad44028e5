"""Services that share a device: which is called next, and which tensors it finds."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from stretto.errors import EngineError
from stretto.models.offload import CopyStream, OffloadedTensors
from stretto.types import Reply
from stretto.workers.services import CallPredictor, Makes, RankServices, Remote, Service


def test_the_order_is_that_of_the_last_time() -> None:
    order = CallPredictor()
    step = [("gen", "load"), ("gen", "decode"), ("gen", "decode"), ("rm", "finish"), ("l", "train")]
    assert [order.called(call) for call in step] == ["", "", "", "", ""]
    # The first of two calls in a row is not the last of its turn.
    assert [order.called(call) for call in step] == ["gen", "", "rm", "l", "gen"]
    # One decodes no more often than this time: nothing is known of more calls than before.
    fewer = [call for i, call in enumerate(step) if i != 1]
    assert [order.called(call) for call in fewer] == ["gen", "", "l", "gen"]
    assert [order.called(call) for call in step] == ["gen", "rm", "rm", "l", "gen"]


class Owner(Service):
    """A service with a tensor that rests while others work."""

    def __init__(self, name: str, number: float, copies: CopyStream) -> None:
        super().__init__(None)
        self.tensor = torch.full((4,), number)
        self.offloaded = OffloadedTensors(name, lambda: [self.tensor], copies)

    @Remote(reads=True)
    def value(self) -> Reply[float]:
        return Reply(self.tensor.sum().item())

    def add(self, number: float) -> Reply[None]:
        self.tensor += number
        return Reply(None)

    @Remote(light=True)
    def peek(self) -> Tensor:
        return self.tensor.clone()

    @Remote(reads=True)
    def refuse(self) -> Reply[None]:
        raise EngineError("not so")

    @Remote(reads=True)
    def watch(self, began: threading.Event) -> Reply[bool]:
        """Work until a copy has begun beside it."""
        return Reply(began.wait(60))


class Plain(Service):
    """A service whose tensors stay."""

    def work(self) -> Reply[int]:
        return Reply(1)


class Watched(CopyStream):
    """A copies that tells when it has copied a service's tensors in."""

    def __init__(self, owner: str) -> None:
        super().__init__(torch.device("cpu"))
        self.owner, self.copied = owner, threading.Event()

    def _copy(self, copies, begun, owner, direction) -> None:  # type: ignore[no-untyped-def]
        super()._copy(copies, begun, owner, direction)
        if (owner, direction) == (self.owner, "in"):
            self.copied.set()


def host(copies: CopyStream) -> RankServices:
    makes: Makes = {
        "one": (Owner, ("one", 1.0, copies)),
        "two": (Owner, ("two", 2.0, copies)),
        "plain": (Plain, (None,)),
    }
    return RankServices(0, makes)


def value(host: RankServices, service: str) -> float:
    reply = host.answer(service, "value", ())
    assert isinstance(reply, Reply)
    return float(reply.value)


def away(host: RankServices) -> list[str]:
    names = ["one", "two"]
    return [name for name in names if host.answer(name, "peek", ()).isnan().all()]  # type: ignore[attr-defined]


def test_each_call_finds_its_tensors_and_others_are_away() -> None:
    services = host(CopyStream(torch.device("cpu")))
    assert away(services) == ["one", "two"]  # before anybody has worked
    assert value(services, "one") == 4.0
    assert away(services) == ["two"]
    assert value(services, "two") == 8.0
    assert away(services) == ["one"]
    services.answer("two", "add", (1.0,))
    services.answer("plain", "work", ())
    assert away(services) == ["one", "two"]
    assert value(services, "two") == 12.0


def test_the_next_role_is_brought_while_the_one_before_works() -> None:
    copies = Watched("two")
    services = host(copies)
    began = copies.copied
    began.set()
    services.answer("one", "watch", (began,))  # the order, once
    services.answer("two", "value", ())
    services.answer("one", "value", ())
    copies.drain()
    began.clear()
    reply = services.answer("one", "watch", (began,))
    assert isinstance(reply, Reply)
    assert reply.value  # it was copied before this call had ended
    assert away(services) == ["two"]  # and is only there for its own call
    assert value(services, "two") == 8.0


def test_replies_tell_of_copies_and_errors_come_through() -> None:
    copies = CopyStream(torch.device("cpu"))
    services = host(copies)
    copies.drain()
    refused = services.answer("one", "refuse", ())
    assert isinstance(refused, EngineError)
    copies.drain()
    reply = services.answer("two", "value", ())
    assert isinstance(reply, Reply)
    told = [
        (w.attributes["owner"], w.attributes["direction"]) for w in reply.work if w.name == "swap"
    ]
    assert told == [("one", "out"), ("two", "out"), ("one", "in"), ("two", "in")]
    assert all(w.beside for w in reply.work if w.name == "swap")


def test_services_without_shelves_are_left_alone() -> None:
    services = RankServices(0, {"plain": (Plain, (None,))})
    assert services.answer("plain", "work", ()) == Reply(1)


class Gpu:
    """A GPU of one stream, which works through what it was given, and its host's clock."""

    def __init__(self) -> None:
        self.now_s, self.free_s = 0.0, 0.0

    def now(self) -> float:
        return self.now_s

    def launch(self, seconds: float) -> None:
        self.now_s += 0.25  # what a launch takes the host
        self.free_s = max(self.now_s, self.free_s) + seconds


def test_a_gpus_span_is_its_work_and_not_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another role's work comes first on the stream, and the call returns at once."""
    gpu = Gpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Gpu) -> None:
            self.at_s = max(stream.now_s, stream.free_s)

        def synchronize(self) -> None:
            gpu.now_s = max(gpu.now_s, self.at_s)

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.at_s - self.at_s)

    class Worker:
        device = torch.device("cuda", 0)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu)

    def prefilled(seconds: float) -> list[tuple[float, float]]:
        with Service(Worker(), clock=gpu)._timed("prefill") as timed:
            gpu.launch(seconds)
        return [(w.start_s, w.end_s) for w in timed.work]

    gpu.launch(2.0)  # until 2.25
    assert prefilled(3.0) == [(2.25, 5.25)]
    gpu.now_s = 8.0  # the GPU has nothing to do
    assert prefilled(3.0) == [(8.0, 11.25)]
    Worker.device = torch.device("cpu")
    assert prefilled(0.0) == [(11.25, 11.5)]
