"""Exchange between ranks: tensors sent, gradients summed."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.pipelines.executor.layout import NAMES, Name, StageLayout


class Outbox:
    """Sends under way; a tensor is kept until it has left, and no longer.

    gloo tells that a send is done only to those who wait for it, so a thread does.
    """

    def __init__(self) -> None:
        self._waits = ThreadPoolExecutor(1) if dist.get_backend() == "gloo" else None
        self._waited: list[Future[None]] = []
        self._under_way: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, peer: int) -> None:
        """Begin to send; the tensor must not be changed any more."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, peer)
        assert work is not None
        if self._waits:
            self._waited.append(self._waits.submit(_wait, work, tensor))
        else:
            self._under_way = [each for each in self._under_way if not each[0].is_completed()]
            self._under_way.append((work, tensor))

    def flush(self) -> None:
        """Wait until all has left."""
        for future in self._waited:
            future.result()
        for work, _ in self._under_way:
            work.wait()
        self._waited, self._under_way = [], []


def _wait(work: dist.Work, tensor: Tensor) -> None:
    work.wait()


def connect(layout: StageLayout, rank: int, device: torch.device) -> None:
    """Have the two ranks of each pair that will exchange tensors meet once; on all ranks at once.

    NCCL makes a pair's connection in its first transfer, and both sides wait for that. Here they do
    so in one order of the pairs; in the middle of a run, where a rank asks for a tensor long before
    it is made, they could wait for each other in a circle.
    """
    pairs = set()
    for name in NAMES:
        stages, pipelines = layout.of(name)
        for p, s in product(range(pipelines), range(stages - 1)):
            pairs.add(tuple(sorted(layout.rank(name, p, each) for each in (s, s + 1))))
    for low, high in sorted(pairs):
        if rank == low:
            dist.send(torch.zeros(1, device=device), high)
        elif rank == high:
            dist.recv(torch.zeros(1, device=device), low)


class Groups:
    """Process groups in which a model's gradients are summed; made on all ranks at once.

    Ranks with one stage of a model sum its gradients over the pipelines. Those with the first and
    the last stage sum a tied weight's over both, in one go.
    """

    def __init__(self, layout: StageLayout, rank: int) -> None:
        self._same: dict[Name, dist.ProcessGroup] = {}
        self._ends: dict[Name, dist.ProcessGroup] = {}
        for name in NAMES:
            stages, pipelines = layout.of(name)
            for stage in range(stages):
                _join(
                    self._same, name, [layout.rank(name, p, stage) for p in range(pipelines)], rank
                )
            ends = [layout.rank(name, p, s) for p in range(pipelines) for s in {0, stages - 1}]
            _join(self._ends, name, sorted(ends), rank)

    def reduce(self, name: Name, gradients: Mapping[str, Tensor], tied: frozenset[str]) -> None:
        """Sum in place; see
        :meth:`~stretto.pipelines.executor.executor.PipelineExecutor.reduce`."""
        under_way = []
        for groups, of_tied in ((self._same, False), (self._ends, True)):
            for key in sorted(gradients):
                if (key in tied) == of_tied and name in groups:
                    under_way.append(
                        dist.all_reduce(gradients[key], group=groups[name], async_op=True)
                    )
        for work in under_way:
            assert work is not None
            work.wait()


def _join(groups: dict[Name, dist.ProcessGroup], name: Name, ranks: list[int], rank: int) -> None:
    if len(ranks) < 2:
        return
    group = dist.new_group(ranks)
    if rank in ranks:
        groups[name] = group
