"""One rank's part in a fused pipeline: its tasks in their order, tensors to and from other ranks.

It uses point-to-point transfers of ``torch.distributed`` and autograd directly: the stages of
``torch.distributed.pipelining`` settle on one static shape for all micro-batches, and its schedules
order the stages of one model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from stretto.errors import ConfigError
from stretto.pipelines.executor.instructions import (
    PipelineTask,
    Receive,
    Send,
    Timings,
    instructions,
)
from stretto.pipelines.executor.stages import NAMES, Name, Stage, StageLayout
from stretto.pipelines.problem import Problem
from stretto.pipelines.schedule import PipelineSchedule


@dataclass(frozen=True, slots=True)
class TaskWork:
    """One micro-batch of one model: token ids [b, L], padded on the right, and the loss of its last
    hidden states [b, L, H]; every stage reads the shape of the ids, the last calls the loss once.
    """

    tokens: Tensor
    loss: Callable[[Tensor], Tensor]


class PipelineExecutor:
    """One rank of an initialised process group, with its stages; made on all ranks at once. Raises
    ConfigError if the layout does not cover the ranks, or has other stages here.
    """

    def __init__(
        self, actor: Stage, critic: Stage, layout: StageLayout, device: torch.device
    ) -> None:
        self._rank, self._layout, self._device = dist.get_rank(), layout, device
        self._stages: Mapping[Name, Stage] = {"actor": actor, "critic": critic}
        if layout.ranks != dist.get_world_size():
            raise ConfigError(
                f"the layout is of {layout.ranks} ranks, but {dist.get_world_size()} run; start as "
                "many as it has",
                "other-ranks",
            )
        for name, stage in self._stages.items():
            _, index = layout.place(name, self._rank)
            stages, _ = layout.of(name)
            if (stage.index, stage.stages) != (index, stages):
                raise ConfigError(
                    f"rank {self._rank} runs stage {index} of {stages} of the {name}, but got "
                    f"stage {stage.index} of {stage.stages}; cut the model as the layout says",
                    "other-stage",
                )
        self._same, self._ends = _groups(layout, self._rank)
        self._outbox = Outbox()
        connect(layout, self._rank, device)

    def run(
        self,
        schedule: PipelineSchedule,
        problem: Problem,
        actor: Sequence[TaskWork],
        critic: Sequence[TaskWork],
    ) -> Timings:
        """Run all micro-batches of all pipelines; gradients add up in the parameters' ``.grad``.

        The schedule was made for the problem, whose latencies say in which order tensors are made.
        Pipeline p takes the p-th consecutive part of a model's works, of the same shapes on all
        ranks.
        """
        self._layout.require(problem, len(actor), len(critic))
        program = instructions(problem, schedule)[self._rank]
        passes = self._pass("actor", actor), self._pass("critic", critic)
        word, result = [], None
        watch = Stopwatch(self._device)
        for step in program:
            task = step if isinstance(step, PipelineTask) else step.task
            of = passes[task.pipeline >= self._layout.actor_pipelines]
            if isinstance(step, Receive):
                of.ask(task, step.peer)
            elif isinstance(step, Send):
                assert result is not None
                self._outbox.send(result, step.peer)
                result = None  # the outbox lets go of it when it has left
            else:
                word.append(task)
                result = of.run(task, watch)
        self._outbox.flush()
        return watch.timings(word)

    def reduce(self, name: Name, gradients: Mapping[str, Tensor]) -> None:
        """Sum gradients in place over a model's pipelines, a tied weight's over its stages."""
        under_way, tied = [], self._stages[name].tied
        for groups, of_tied in ((self._same, False), (self._ends, True)):
            for key in sorted(gradients):
                if (key in tied) == of_tied and name in groups:
                    work = dist.all_reduce(gradients[key], group=groups[name], async_op=True)
                    under_way.append(_posted(work))
        for work in under_way:
            work.wait()

    def norm(self, name: Name, gradients: Mapping[str, Tensor]) -> float:
        """Return the norm of the model's reduced gradients, equal to the bit on all ranks."""
        pipeline, _ = self._layout.place(name, self._rank)
        stage = self._stages[name]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for key, gradient in gradients.items():
            if pipeline == 0 and (stage.first or key not in stage.tied):
                square += torch.linalg.vector_norm(gradient).double().square()
        dist.all_reduce(square)
        return math.sqrt(square.item())

    def _pass(self, name: Name, works: Sequence[TaskWork]) -> _Pass:
        pipeline, _ = self._layout.place(name, self._rank)
        each = len(works) // self._layout.of(name)[1]
        mine = works[pipeline * each : (pipeline + 1) * each]
        return _Pass(self._stages[name], mine, self._device)


@dataclass(slots=True)
class _Pass:
    """A model's stage on this rank, and the tensors of the micro-batches under way."""

    stage: Stage
    works: Sequence[TaskWork]
    device: torch.device
    # Inputs asked for, by task; and by micro-batch, from its forward to its backward: the input,
    # where gradients end, and where they start: the loss, or the output's place in the graph.
    arriving: dict[PipelineTask, tuple[Tensor, dist.Work]] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    roots: dict[int, Tensor | GradientEdge | None] = field(default_factory=dict)

    def ask(self, task: PipelineTask, peer: int) -> None:
        shape = (*self.works[task.micro_batch].tokens.shape, self.stage.hidden_size)
        buffer = torch.empty(shape, dtype=self.stage.dtype, device=self.device)
        self.arriving[task] = buffer, _posted(dist.irecv(buffer, peer))

    def run(self, task: PipelineTask, watch: Stopwatch) -> Tensor | None:
        watch.mark()
        given = None
        if task in self.arriving:
            given, work = self.arriving.pop(task)
            work.wait()
        watch.mark()
        act = self._forward if task.kind == "F" else self._backward
        result = act(task.micro_batch, given)
        watch.mark()
        return result

    def _forward(self, i: int, given: Tensor | None) -> Tensor | None:
        work = self.works[i]
        x = work.tokens if given is None else given.requires_grad_()
        y: Tensor = self.stage(x)
        self.inputs[i] = x
        if self.stage.last:
            self.roots[i] = work.loss(y)
            return None
        self.roots[i] = get_gradient_edge(y) if y.requires_grad else None
        return y.detach()

    def _backward(self, i: int, given: Tensor | None) -> Tensor | None:
        x, root = self.inputs.pop(i), self.roots.pop(i)
        if isinstance(root, Tensor):
            root.backward()
        elif root is not None:  # else this is a first stage of frozen weights
            torch.autograd.backward([root], given)
        return x.grad


class Stopwatch:
    """A recorder of this rank's moments; made on all ranks at once, which is their common start.

    Ranks share the machine's clock. On a GPU the moments are those of its stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        latest = torch.tensor(time.monotonic(), dtype=torch.float64, device=device)
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        self._zero, self._begin_s = latest.item(), 0.0
        self._moments: list[float] = []
        self._events: list[torch.cuda.Event] = []
        if self._cuda:
            torch.cuda.synchronize(device)
            self.mark()
            self._begin_s = time.monotonic() - self._zero

    def mark(self) -> None:
        """Mark this moment."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._moments.append(time.monotonic() - self._zero)

    def timings(self, word: Sequence[PipelineTask]) -> Timings:
        """Make the timings from three marks a task: free for it, input there, done."""
        if self._cuda:
            begin, *others = self._events
            others[-1].synchronize()
            self._moments = [self._begin_s + begin.elapsed_time(event) / 1000 for event in others]
        asked, start, end = (tuple(self._moments[k::3]) for k in range(3))
        return Timings(tuple(word), asked, start, end)


class Outbox:
    """Sends under way; a tensor is kept until it has left, and no longer. A thread waits for
    gloo's, which tells only then that a send is done.
    """

    def __init__(self) -> None:
        self._waits = ThreadPoolExecutor(1) if dist.get_backend() == "gloo" else None
        self._waited: list[Future[None]] = []
        self._under_way: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, peer: int) -> None:
        """Begin to send; the tensor must not be changed any more."""
        tensor = tensor.contiguous()
        work = _posted(dist.isend(tensor, peer))
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


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None  # as this rank is in the group
    return work


def connect(layout: StageLayout, rank: int, device: torch.device) -> None:
    """Have the two ranks of each pair that will exchange tensors meet once; on all ranks at once.

    NCCL makes a pair's connection in its first transfer, and both sides wait for that. Here they do
    so in one order of the pairs; in the middle of a run, where a rank asks for a tensor long before
    it is made, they could wait for each other in a circle.
    """
    for low, high in pairwise(range(layout.ranks)):
        if all(layout.place(name, low)[0] != layout.place(name, high)[0] for name in NAMES):
            continue  # they hold stages of different pipelines alone
        if rank == low:
            dist.send(torch.zeros(1, device=device), high)
        elif rank == high:
            dist.recv(torch.zeros(1, device=device), low)


_Groups = dict[Name, dist.ProcessGroup]


def _groups(layout: StageLayout, rank: int) -> tuple[_Groups, _Groups]:
    """Make the groups in which gradients are summed, on all ranks at once: those of the ranks with
    one stage of a model, and those of the ranks with its first and last, for a tied weight.
    """
    same, ends = _Groups(), _Groups()
    for name in NAMES:
        stages, pipelines = layout.of(name)
        for stage in range(stages):
            _join(same, name, [layout.rank(name, p, stage) for p in range(pipelines)], rank)
        tied = [layout.rank(name, p, s) for p in range(pipelines) for s in {0, stages - 1}]
        _join(ends, name, sorted(tied), rank)
    return same, ends


def _join(groups: _Groups, name: Name, ranks: list[int], rank: int) -> None:
    if len(ranks) > 1:
        group = dist.new_group(ranks)
        if rank in ranks:
            groups[name] = group


def saved_bytes(stage: Stage, tokens: Tensor) -> int:
    """Return the bytes that autograd saves in a stage's forward pass of token ids [b, L].

    It runs once, in the mode that it is in: a checkpointed layer saves its input alone. Stages
    after the first get noise of the same shape. Memory that several tensors share counts once,
    parameters and buffers not at all.
    """
    weight = next(stage.parameters())
    x = tokens
    if not stage.first:
        shape = (*tokens.shape, stage.hidden_size)
        x = torch.randn(shape, device=weight.device).to(stage.dtype).requires_grad_()
    own = {t.untyped_storage().data_ptr() for t in chain(stage.parameters(), stage.buffers())}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    # While the output lives, so does all that was saved, and no two have one address.
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage(x)
    del output
    return sum(saved.values())
