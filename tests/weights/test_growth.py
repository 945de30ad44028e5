"""Memory of two processes between which weights travel thousands of times."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from stretto.types import WeightsRef
from stretto.weights.broadcast import WeightReceiver, WeightSender
from stretto.weights.transfer import Meeting, open_store

WARM, TRANSFERS = 500, 2000
CPU = torch.device("cpu")


def private_kb() -> int:
    """Memory that only this process has, after free memory went back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def take_part(sends: bool, port: int, pipe: Connection) -> None:
    """Send or receive; report the memory after :data:`WARM` transfers and at the end."""
    torch.set_num_threads(1)
    tensors = {f"layer.{i}": torch.randn(64, 64) for i in range(20)}
    route = Meeting("127.0.0.1", port, 60.0).routes("weights/actor", 1, 2)[0 if sends else 1]
    sender, receiver = WeightSender(CPU, 1 << 20, keep=2), WeightReceiver(tensors, CPU, 1 << 20)

    def refs() -> Iterator[WeightsRef]:
        for version in range(1, WARM + TRANSFERS + 1):
            yield WeightsRef("actor", version, "x", "broadcast")
            if version in (WARM, WARM + TRANSFERS):
                pipe.send(private_kb())

    for ref in refs():
        sender.put(ref, {name: tensor.clone() for name, tensor in tensors.items()})
        if sends:
            sender.send(ref, route)
        else:
            receiver.expect(ref, sender.plan(ref).mark, route)
            for name, part in receiver.get(ref).items():
                tensors[name][part.to] = part.tensor


@pytest.mark.slow
def test_memory_levels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flight recorder keeps the last operations of a process: 2,000 take about 2 MB. Here
    it keeps 100, so that the ring is full before memory is first compared."""
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.setenv(name, "100")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, port = open_store("127.0.0.1")
    context = get_context("spawn")
    pipes = []
    processes = []
    for sends in (True, False):
        ours, theirs = context.Pipe()
        process = context.Process(target=take_part, args=(sends, port, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        before, after = pipe.recv(), pipe.recv()
        assert after - before < 0.25 * TRANSFERS, (before, after)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    del store
