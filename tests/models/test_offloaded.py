"""Tensors that rest in the host's memory: what they are before, meanwhile and after."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import held_bytes
from stretto.models import offload
from stretto.models.offload import ALIGNED, CopyStream, OffloadedTensors


class Small(nn.Module):
    """Tied weights, two types, a scalar, a tensor that is not contiguous, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 4)
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.embed.weight
        self.narrow = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.none = nn.Parameter(torch.empty(0, 4))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.out(self.embed(ids)) * self.scale
        return logits


@pytest.fixture
def copies() -> CopyStream:
    return CopyStream(torch.device("cpu"))


@pytest.fixture(params=[offload.BUFFER_BYTES, 300])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """All tensors in one bucket, or several buckets."""
    monkeypatch.setattr(offload, "BUFFER_BYTES", request.param)
    return Small()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_tensors_come_back_as_they_were(model: Small, copies: CopyStream) -> None:
    before, objects = values(model), dict(model.named_parameters())
    strides = {name: p.stride() for name, p in objects.items()}
    expected = model(torch.arange(10))
    seen: list[Tensor] = []
    model.scale.register_hook(seen.append)
    offloaded = OffloadedTensors("model", model.parameters, copies)
    for _ in range(3):
        offloaded.offload()
        assert model.embed.weight.isnan().all()
        assert {n: p.shape for n, p in objects.items()} == {n: t.shape for n, t in before.items()}
        offloaded.wait()
        assert all(p is objects[name] for name, p in model.named_parameters())
        assert model.out.weight is model.embed.weight
        for name, p in model.named_parameters():
            assert p.detach().equal(before[name]), name
            assert (p.stride(), p.dtype) == (strides[name], before[name].dtype)
        assert model(torch.arange(10)).equal(expected)
    model(torch.arange(10)).sum().backward()
    assert len(seen) == 1


def device_bytes(offloaded: OffloadedTensors) -> int:
    return sum(buffer.device.nbytes for buffer in offloaded._buffers)


def test_nothing_is_held_on_the_device_while_tensors_are_away(
    model: Small, copies: CopyStream
) -> None:
    parameters = list(model.parameters())
    # Tied weights count once, and a tensor takes a multiple of ALIGNED bytes.
    sizes = [10 * 4 * 4, 4 * 4 * 2, 4 * 2, 4, 15 * 4]
    assert held_bytes(parameters) == sum(sizes)
    offloaded = OffloadedTensors("model", model.parameters, copies)
    offloaded.offload()
    copies.drain()
    assert device_bytes(offloaded) == 0
    assert held_bytes(parameters) == 4 + 2 + 2 + 4 + 4  # an element each
    offloaded.wait()
    assert device_bytes(offloaded) == held_bytes(parameters) == len(sizes) * ALIGNED
    offloaded.offload()
    offloaded.load()
    assert device_bytes(offloaded) == len(sizes) * ALIGNED
    assert held_bytes(parameters) == 4 + 2 + 2 + 4 + 4


def test_only_what_has_changed_is_written_back(copies: CopyStream) -> None:
    model = Small()
    offloaded = OffloadedTensors("model", model.parameters, copies)
    offloaded.offload()
    offloaded.wait()
    offloaded.offload()
    offloaded.wait()
    offloaded.changed = True
    with torch.no_grad():
        model.scale.fill_(5.0)
    offloaded.offload()
    offloaded.wait()
    assert model.scale.item() == 5.0
    swaps = [work for work in copies.take() if work.name == "swap"]
    assert [work.attributes["direction"] for work in swaps] == ["out", "in", "in", "out", "in"]
    assert {work.attributes["bytes"] for work in swaps} == {5 * ALIGNED}
    assert {work.attributes["owner"] for work in swaps} == {"model"}
    assert all(work.beside and work.start_s <= work.end_s for work in swaps)
    assert not copies.take()


def test_copies_go_on_beside_the_work_in_the_order_in_which_they_were_asked_for(
    copies: CopyStream,
) -> None:
    one, two = Small(), Small()
    before = values(two)
    first, second = (
        OffloadedTensors("one", one.parameters, copies),
        OffloadedTensors("two", two.parameters, copies),
    )
    second.offload()
    copies.drain()
    copies.take()
    gate = threading.Event()
    copies._pool.submit(gate.wait)
    second.load()
    one(torch.arange(10))  # works while the copy waits
    first.offload()
    assert two.embed.weight.isnan().all()  # not there before somebody has waited
    assert not copies.take()
    gate.set()
    second.wait()
    first.wait()
    assert all(p.detach().equal(before[name]) for name, p in two.named_parameters())
    swaps = [work.attributes for work in copies.take() if work.name == "swap"]
    assert [(s["owner"], s["direction"]) for s in swaps] == [
        ("two", "in"), ("one", "out"), ("one", "in"),
    ]  # fmt: skip


def test_waiting_for_tensors_is_noted(copies: CopyStream) -> None:
    offloaded = OffloadedTensors("model", Small().parameters, copies)
    offloaded.offload()
    gate = threading.Event()
    copies._pool.submit(gate.wait)
    offloaded.load()
    threading.Timer(0.05, gate.set).start()
    offloaded.wait()
    (wait,) = (work for work in copies.take() if work.name == "wait")
    assert wait.attributes == {"cause": "swap", "owner": "model"}
    assert not wait.beside


def test_tensors_that_are_put_away_on_their_way_lose_nothing(copies: CopyStream) -> None:
    model = Small()
    before, offloaded = values(model), OffloadedTensors("model", model.parameters, copies)
    offloaded.offload()
    gate = threading.Event()
    copies._pool.submit(gate.wait)
    offloaded.load()
    offloaded.offload()
    assert device_bytes(offloaded) == 0
    gate.set()
    offloaded.wait()
    assert all(p.detach().equal(before[name]) for name, p in model.named_parameters())


def test_who_comes_early_leaves_it_where_there_is_no_room(
    copies: CopyStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Small()
    before, offloaded = values(model), OffloadedTensors("model", model.parameters, copies)
    offloaded.offload()
    empty, asked = torch.empty, list[bool]()

    def no_room_at_first(*args: Any, **kwargs: Any) -> Tensor:
        asked.append(True)
        if len(asked) in (1, 2):
            raise torch.OutOfMemoryError
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", no_room_at_first)
    offloaded.load(early=True)
    assert device_bytes(offloaded) == 0
    offloaded.wait()  # waits for what is put away, and tries again
    assert len(asked) == 3
    assert all(p.detach().equal(before[name]) for name, p in model.named_parameters())


def test_states_of_an_optimizer_are_found_when_they_are_there(copies: CopyStream) -> None:
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    optimizer, other = (
        torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (model, plain)
    )

    def moments() -> list[Tensor]:
        held = [optimizer.state.get(p, {}) for p in model.parameters()]
        return [value for state in held for value in state.values()]

    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        model(torch.full((1, 3), float(number))).sum().backward()
        optimizer.step()

    offloaded = OffloadedTensors("learner", moments, copies)
    offloaded.offload()
    for number in range(5):
        offloaded.wait()
        offloaded.changed = True
        step(model, optimizer, number)
        step(plain, other, number)
        if number == 2:  # makes other tensors
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        offloaded.offload()
        assert all(tensor.isnan().all() for tensor in moments())
    offloaded.wait()
    assert len(moments()) == 6
    theirs = [value for p in plain.parameters() for value in other.state[p].values()]
    assert all(a.equal(b) for a, b in zip(moments(), theirs, strict=True))
    assert model.weight.equal(plain.weight)
