"""Seconds of products and copies on a device, and of what travels between processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from stretto.planner.measuring import Sizes, timed
from stretto.planner.memory import BUCKET, HALF
from stretto.planner.points import Point
from stretto.types import WeightsRef
from stretto.weights.broadcast import WeightReceiver, WeightSender
from stretto.weights.transfer import Backend, Meeting, Route, open_store
from stretto.workers.ranks import Ranks

TENSOR = 1 << 20
"""Elements of a tensor that travels."""
TIMEOUT_S = 60.0
REDUCTIONS = 20
"""All-reduces that are timed together."""


def peaks(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[Point]:
    """Yield a product of square matrices, and copies within the device's memory."""
    n = sizes.product
    x, w = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    seconds = timed(lambda: torch.nn.functional.linear(x, w), device, sizes.repeats, pick=min)
    yield Point("product", f"{n} x {n} matrices", seconds, flops=2.0 * n**3)
    for megabytes in sizes.copies:
        source = torch.ones(megabytes * 10**6, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        seconds = timed(partial(target.copy_, source), device, sizes.repeats, pick=min)
        yield Point("copy", f"{megabytes} MB", seconds, size=2e6 * megabytes)  # read and written


def swaps(device: torch.device, sizes: Sizes) -> Iterator[Point]:
    """Yield copies from the host's pinned memory to a GPU; for a CPU these stay in its memory."""
    gpu = device.type == "cuda"
    for megabytes in sizes.moves:
        source = torch.ones(megabytes * 10**6, dtype=torch.uint8, pin_memory=gpu)
        target = torch.zeros_like(source, device=device)
        seconds = timed(partial(target.copy_, source), device, sizes.repeats)
        where = "from the host" if gpu else "within memory"
        yield Point("swap", f"{megabytes} MB {where}", seconds, size=1e6 * megabytes)


def broadcasts(
    device: torch.device, dtype: torch.dtype, threads: int, sizes: Sizes
) -> Iterator[Point]:
    """Yield hand-overs of weights between two processes, and all-reduces among them.

    They use NCCL where there is a GPU for each, as runs do; else gloo. Bytes are counted at two for
    a weight, as by the formulas, whatever their type here.
    """
    several = device.type == "cuda" and torch.cuda.device_count() > 1
    backend: Backend = "nccl" if several else "gloo"
    places = ["cpu"] * 2
    if device.type == "cuda":
        places = ["cuda:0", "cuda:1" if several else "cuda:0"]
    store, port = open_store("127.0.0.1")
    meeting = Meeting("127.0.0.1", port, backend, TIMEOUT_S)
    ranks = Ranks(
        2,
        Side,
        (device.type, dtype),
        backend="cpu:gloo,cuda:nccl" if several else "gloo",
        threads=threads,
        devices=places,
        timeout_s=TIMEOUT_S,
    )
    try:
        for number, megabytes in enumerate(sizes.moves):
            count = max(1, megabytes * 10**6 // HALF // TENSOR)
            routes = meeting.routes("weights", number, 2)
            seconds = max(ranks.call("move", count, routes, number, sizes.repeats))
            size = float(HALF * count * TENSOR)
            yield Point("broadcast", f"{size / 1e6:.0f} MB by {backend}", seconds, size=size)
        (seconds, _) = ranks.call("reduce", sizes.repeats)
        yield Point("reduce", f"4 kB by {backend}", seconds)
    finally:
        ranks.close()
        del store


class Side:
    """One of two processes: the sender of weights, or who takes them over.

    Args:
        rank: 0 for the sender.
        device: the kind of device that they are on; of GPUs the process's own.
    """

    def __init__(self, rank: int, device: str, dtype: torch.dtype) -> None:
        self._rank, self._dtype = rank, dtype
        self._device = torch.device(device)
        if device == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())

    def move(self, count: int, routes: list[Route], version: int, repeats: int) -> float:
        """Hand over so many tensors as often as asked; return the median seconds."""
        tensors = {
            f"layer {i}": torch.full((TENSOR,), float(i), dtype=self._dtype, device=self._device)
            for i in range(count)
        }
        sender, receiver = (
            WeightSender(self._device, BUCKET, 1),
            WeightReceiver(tensors, self._device, BUCKET),
        )
        ref = WeightsRef("actor", version, "", "broadcast")
        sender.put(ref, tensors)
        mark, route = sender.plan(ref)[0], routes[self._rank]

        def once() -> None:
            if self._rank == 0:
                sender.send(ref, route)
            else:
                receiver.expect(ref, [mark], [route])
                for name, part in receiver.get(ref).items():
                    tensors[name][part.to].copy_(part.tensor)

        return _together(once, self._device, repeats)

    def reduce(self, repeats: int) -> float:
        """Sum a small tensor over both; return the seconds of one time."""
        small = torch.ones(1024, device=self._device)

        def some() -> None:
            for _ in range(REDUCTIONS):
                dist.all_reduce(small)
                small.fill_(1.0)

        return _together(some, self._device, repeats) / REDUCTIONS


def _together(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    return timed(work, device, repeats, enough_s=0.0, patience_s=math.inf)
