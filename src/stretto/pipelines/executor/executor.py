"""One rank's part of a fused pipeline: its tasks in order, and transfers with other ranks. It uses
``torch.distributed`` point-to-point transfers and autograd directly, because the stages of
``torch.distributed.pipelining`` require one static shape for all micro-batches, and its schedules
order the stages of one model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stretto.bounds import shares
from stretto.errors import ConfigError
from stretto.pipelines.executor.instructions import (
    PipelineTask,
    Receive,
    Send,
    Timings,
    instructions,
    of_rank,
)
from stretto.pipelines.executor.stages import NAMES, Name, Stage, StageLayout
from stretto.pipelines.pipeline_schedule import PipelineSchedule
from stretto.pipelines.problem import Problem

OwnerOf = Callable[[str, int], int]
"""The rank that updates a slice of a parameter, by name and number of the slice."""

CLOCKS_APART_S = 1.0
"""Clocks that differ by more are taken to be of different machines."""


@dataclass(frozen=True, slots=True)
class TaskWork:
    """One micro-batch of one model: right-padded token ids [b, L], and a loss of its last hidden
    states [b, L, H]. Every stage reads the shape of the ids. The last one calls the loss once."""

    tokens: Tensor
    loss: Callable[[Tensor], Tensor]


class PipelineExecutor:
    """One rank of an initialized process group, with its stages. Must be made on all ranks at once.
    Raises ConfigError if the layout does not cover the ranks, or has other stages here."""

    def __init__(
        self, actor: Stage, critic: Stage, layout: StageLayout, device: torch.device
    ) -> None:
        self.rank = dist.get_rank()
        self.layout = layout
        self._device = device
        self._stages: Mapping[Name, Stage] = {"actor": actor, "critic": critic}
        if layout.ranks != dist.get_world_size():
            raise ConfigError(
                f"the layout is of {layout.ranks} ranks, but {dist.get_world_size()} run; start as "
                "many as it has",
                "other-ranks",
            )
        for name, stage in self._stages.items():
            _, index = layout.place(name, self.rank)
            stages, _ = layout.of(name)
            if (stage.index, stage.stages) != (index, stages):
                raise ConfigError(
                    f"rank {self.rank} runs stage {index} of {stages} of the {name}, but got "
                    f"stage {stage.index} of {stage.stages}; cut the model as the layout says",
                    "other-stage",
                )
        self._same, self._ends = _groups(layout, self.rank)
        self._outbox = Outbox()
        connect(layout, self.rank, device)

    def run(
        self,
        schedule: PipelineSchedule,
        problem: Problem,
        actor: Sequence[TaskWork],
        critic: Sequence[TaskWork],
    ) -> Timings:
        """Run all micro-batches of all pipelines. Gradients add up in the parameters' ``.grad``.
        The schedule must be made for the problem, whose latencies determine the order of tensors.
        Pipeline p takes the p-th consecutive part of a model's works, with the same shapes on all
        ranks."""
        self.layout.require(problem, len(actor), len(critic))
        program = instructions(problem, schedule)[self.layout.slot(self.rank)]
        passes = self._pass("actor", actor), self._pass("critic", critic)
        word, result = [], None
        watch = Stopwatch(self._device)
        for step in of_rank(self.layout, self.rank, program):
            task = step if isinstance(step, PipelineTask) else step.task
            model_pass = passes[task.pipeline >= self.layout.actor_pipelines]
            if isinstance(step, Receive):
                model_pass.ask(task, step.peer)
            elif isinstance(step, Send):
                assert result is not None
                self._outbox.send(result, step.peer)
                result = None  # the outbox releases it once it is sent
            else:
                word.append(task)
                result = model_pass.run(task, watch)
        self._outbox.flush()
        return watch.timings(word)

    @torch.no_grad()
    def read(
        self, name: Name, tokens: Sequence[Tensor], take: Callable[[int, Tensor], None]
    ) -> None:
        """Run forward passes of one model on the micro-batches [b, L] of this rank's pipeline. On
        the last stage ``take`` gets the number of each, and its hidden states.
        """
        stage = self._stages[name]
        source, target = (self.layout.neighbour(name, self.rank, step) for step in (-1, 1))
        for number, ids in enumerate(tokens):
            x = ids.to(self._device)
            if source is not None:
                x = torch.empty((*ids.shape, stage.hidden_size), dtype=stage.dtype, device=x.device)
                dist.recv(x, source)
            states = stage(x)
            if target is None:
                take(number, states)
            else:
                self._outbox.send(states, target)
        self._outbox.flush()

    def reduce(self, name: Name, gradients: Mapping[str, Tensor], owner: OwnerOf) -> None:
        """Sum gradients in place over a model's pipelines, a tied weight's over its stages. Only
        the owner of a slice gets the sum. The others' values are undefined afterwards.
        """
        stage, column = self._stages[name], self.layout.column(name, self.rank)
        if stage.slices:
            for key in sorted(gradients.keys() & stage.cuts.partial):
                stage.slices.sum_(gradients[key])
        works = [
            dist.reduce(gradients[key], owner(key, column), group=group, async_op=True)
            for key, group in self._held_alike(name, gradients)
        ]
        for work in works:
            cast(dist.Work, work).wait()  # None outside of the group

    @torch.no_grad()
    def spread(self, name: Name, weights: Mapping[str, Tensor], owner: OwnerOf) -> None:
        """Copy weights in place from their owners to all other copies of the stage, a tied one to
        both of its stages."""
        column = self.layout.column(name, self.rank)
        works = [
            dist.broadcast(weights[key], owner(key, column), group, async_op=True)
            for key, group in self._held_alike(name, weights)
        ]
        for work in works:
            cast(dist.Work, work).wait()

    def _held_alike(
        self, name: Name, keys: Iterable[str]
    ) -> Iterator[tuple[str, dist.ProcessGroup]]:
        """Yield the parameters that several ranks hold, each with their group, in one order on all
        ranks: those of other copies of the stage, for a tied one of both of its stages."""
        tied = self._stages[name].tied
        for groups, is_tied in ((self._same, False), (self._ends, True)):
            if name in groups:
                yield from ((k, groups[name]) for k in sorted(keys) if (k in tied) == is_tied)

    def norm(self, name: Name, gradients: Mapping[str, Tensor], owner: OwnerOf) -> float:
        """Return the norm of the model's reduced gradients, bit-identical on all ranks."""
        stage, column = self._stages[name], self.layout.column(name, self.rank)
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for key, gradient in gradients.items():
            is_first_slice = not column or key in stage.cuts.dims
            if owner(key, column) == self.rank and is_first_slice:
                square += torch.linalg.vector_norm(gradient).double().square()
        dist.all_reduce(square)
        return math.sqrt(square.item())

    def _pass(self, name: Name, works: Sequence[TaskWork]) -> _Pass:
        pipeline, _ = self.layout.place(name, self.rank)
        pipeline_works = shares(works, self.layout.of(name)[1])[pipeline]
        return _Pass(self._stages[name], pipeline_works, self._device)


@dataclass(slots=True)
class _Pass:
    """A model's stage on this rank, and the tensors of the micro-batches in progress."""

    stage: Stage
    works: Sequence[TaskWork]
    device: torch.device
    # Requested inputs by task. By micro-batch, from its forward to its backward: the input, where
    # gradients end, and their start, which is the loss or the output's graph edge.
    arriving: dict[PipelineTask, tuple[Tensor, dist.Work]] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    roots: dict[int, Tensor | GradientEdge | None] = field(default_factory=dict)

    def ask(self, task: PipelineTask, peer: int) -> None:
        shape = (*self.works[task.micro_batch].tokens.shape, self.stage.hidden_size)
        buffer = torch.empty(shape, dtype=self.stage.dtype, device=self.device)
        self.arriving[task] = buffer, cast(dist.Work, dist.irecv(buffer, peer))

    def run(self, task: PipelineTask, watch: Stopwatch) -> Tensor | None:
        watch.mark()
        tensor = None
        if task in self.arriving:
            tensor, work = self.arriving.pop(task)
            work.wait()
        watch.mark()
        act = self._forward if task.kind == "F" else self._backward
        result = act(task.micro_batch, tensor)
        watch.mark()
        return result

    def _forward(self, i: int, states: Tensor | None) -> Tensor | None:
        work = self.works[i]
        x = work.tokens if states is None else states.requires_grad_()
        y: Tensor = self.stage(x)
        self.inputs[i] = x
        if self.stage.last:
            self.roots[i] = work.loss(y)
            return None
        self.roots[i] = get_gradient_edge(y) if y.requires_grad else None
        return y.detach()

    def _backward(self, i: int, gradient: Tensor | None) -> Tensor | None:
        x, root = self.inputs.pop(i), self.roots.pop(i)
        if isinstance(root, Tensor):
            root.backward()
        elif root is not None:  # None: a first stage of frozen weights
            torch.autograd.backward([root], gradient)
        return x.grad


class Stopwatch:
    """A recorder of this rank's times since a common start. Must be made on all ranks at once.
    Ranks of one machine share its clock. On a GPU the times are those of its stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        latest = torch.tensor(time.monotonic(), dtype=torch.float64, device=device)
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        # All ranks go on at about the same time, which clocks of several machines do not tell.
        now = time.monotonic()
        one_clock = abs(now - latest.item()) < CLOCKS_APART_S
        self._zero, self._begin_s = latest.item() if one_clock else now, 0.0
        self._moments: list[float] = []
        self._events: list[torch.cuda.Event] = []
        if self._cuda:
            torch.cuda.synchronize(device)
            self.mark()
            self._begin_s = time.monotonic() - self._zero

    def mark(self) -> None:
        """Record the current time."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._moments.append(time.monotonic() - self._zero)

    def timings(self, word: Sequence[PipelineTask]) -> Timings:
        """Make the timings from three marks a task: ready for it, input arrived, done."""
        if self._cuda:
            first, *marks = self._events
            marks[-1].synchronize()
            self._moments = [self._begin_s + first.elapsed_time(event) / 1000 for event in marks]
        wait_start, start, end = (tuple(self._moments[k::3]) for k in range(3))
        return Timings(tuple(word), wait_start, start, end)


class Outbox:
    """Sends in progress. A tensor is kept until it is sent, and no longer. For gloo a thread waits
    for each send, because only waiting shows its completion."""

    def __init__(self) -> None:
        self._waits = ThreadPoolExecutor(1) if dist.get_backend() == "gloo" else None
        self._waited: list[Future[None]] = []
        self._under_way: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, peer: int) -> None:
        """Start to send. The tensor must not be changed afterwards."""
        tensor = tensor.contiguous()
        work = cast(dist.Work, dist.isend(tensor, peer))
        if self._waits:
            self._waited.append(self._waits.submit(_wait, work, tensor))
        else:
            self._under_way = [entry for entry in self._under_way if not entry[0].is_completed()]
            self._under_way.append((work, tensor))

    def flush(self) -> None:
        """Wait until all tensors are sent."""
        for future in self._waited:
            future.result()
        for work, _ in self._under_way:
            work.wait()
        self._waited, self._under_way = [], []


def _wait(work: dist.Work, tensor: Tensor) -> None:
    work.wait()


def connect(layout: StageLayout, rank: int, device: torch.device) -> None:
    """Connect each pair of ranks that will exchange tensors. Must be called on all ranks at once.
    NCCL connects a pair in its first transfer, and both ranks wait for that. Here they do so in one
    order of the pairs. In a run, where a rank asks for a tensor long before it is computed, they
    could deadlock."""
    steps = ((r, layout.neighbour(name, r, 1)) for name in NAMES for r in range(layout.ranks))
    pairs = {(min(one, other), max(one, other)) for one, other in steps if other is not None}
    for low, high in sorted(pairs):
        if rank == low:
            dist.send(torch.zeros(1, device=device), high)
        elif rank == high:
            dist.recv(torch.zeros(1, device=device), low)


_Groups = dict[Name, dist.ProcessGroup]


def _groups(layout: StageLayout, rank: int) -> tuple[_Groups, _Groups]:
    """Make the groups in which gradients are summed, on all ranks at once: ranks with one slice of
    a model's stage, and ranks with one of its first and last stage, for a tied weight."""
    same, ends = _Groups(), _Groups()
    for name in NAMES:
        stages, _ = layout.of(name)
        for stage in range(stages):
            for ranks in layout.alike(name, {stage}):
                _join(same, name, ranks, rank)
        for ranks in layout.alike(name, {0, stages - 1}):
            _join(ends, name, ranks, rank)
    return same, ends


def join_slices(layout: StageLayout, name: Name, rank: int) -> dist.ProcessGroup | None:
    """Make the groups of ranks that hold the slices of a stage, on all ranks at once. Return this
    rank's, or ``None`` if a model is not sliced."""
    groups = _Groups()
    for ranks in layout.sliced_over(name):
        _join(groups, name, ranks, rank)
    return groups.get(name)


def _join(groups: _Groups, name: Name, ranks: list[int], rank: int) -> None:
    if len(ranks) > 1:
        group = dist.new_group(ranks)
        if rank in ranks:
            groups[name] = group
