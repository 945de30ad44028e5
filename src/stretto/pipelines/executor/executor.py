"""One rank's part in a fused pipeline: its tasks in their order, tensors to and from other ranks.

It uses point-to-point transfers of ``torch.distributed`` and autograd directly. The stages of
``torch.distributed.pipelining`` settle on one static shape for all micro-batches, and here each has
its own. The schedules of that library order the stages of one model, and here tasks of two are
woven into each other: only its private parts, which change between versions, could be of use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from stretto.errors import ConfigError
from stretto.pipelines.executor.instructions import PipelineTask, Receive, Send, instructions
from stretto.pipelines.executor.layout import Name, StageLayout
from stretto.pipelines.executor.memory import saved_bytes
from stretto.pipelines.executor.stages import Stage
from stretto.pipelines.executor.timing import Stopwatch, Timings
from stretto.pipelines.executor.transfers import Groups, Outbox, connect
from stretto.pipelines.problem import Problem
from stretto.pipelines.schedule import PipelineSchedule

__all__ = ["Name", "PipelineExecutor", "StageLayout", "TaskWork", "Timings"]


@dataclass(frozen=True, slots=True)
class TaskWork:
    """One micro-batch of one model.

    Attributes:
        tokens: ids [b, L], padded on the right. Every stage reads the shape, the first the values.
        loss: from the last hidden states [b, L, H] to a scalar; called on the last stage's rank
            only, once, during the micro-batch's forward.
    """

    tokens: Tensor
    loss: Callable[[Tensor], Tensor]


class PipelineExecutor:
    """One rank of an initialised process group; made on all ranks at once.

    Args:
        actor: its stage on this rank, on ``device``.
        layout: which stages these are.

    Raises:
        ConfigError: the layout does not cover the ranks, or has other stages here.
    """

    def __init__(
        self, actor: Stage, critic: Stage, layout: StageLayout, device: torch.device
    ) -> None:
        self._rank, self._layout, self._device = dist.get_rank(), layout, device
        self._stages: Mapping[Name, Stage] = {"actor": actor, "critic": critic}
        if layout.ranks != dist.get_world_size():
            raise ConfigError(
                f"the layout is of {layout.ranks} ranks, but {dist.get_world_size()} run; start as "
                "many as it has"
            )
        for name, stage in self._stages.items():
            _, index = layout.place(name, self._rank)
            stages, _ = layout.of(name)
            if (stage.index, stage.stages) != (index, stages):
                raise ConfigError(
                    f"rank {self._rank} runs stage {index} of {stages} of the {name}, but got "
                    f"stage {stage.index} of {stage.stages}; cut the model as the layout says"
                )
        self._groups, self._outbox = Groups(layout, self._rank), Outbox()
        connect(layout, self._rank, device)

    def run(
        self,
        schedule: PipelineSchedule,
        actor: Sequence[TaskWork],
        critic: Sequence[TaskWork],
        problem: Problem | None = None,
    ) -> Timings:
        """All micro-batches of all pipelines; gradients add up in the parameters' ``.grad``.

        Args:
            actor: pipeline p takes the p-th consecutive part; the same shapes on all ranks.
            problem: what the schedule was made for: its latencies say in which order tensors are
                made. Without it a backward counts as two forwards.

        Raises:
            ConfigError: the micro-batches do not divide evenly among the pipelines, or the problem
                or the schedule is not of as many.
        """
        counts = len(actor), len(critic)
        problem = problem or self._layout.problem(*counts)
        self._layout.require(problem, *counts)
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
        """Sum in place over the model's pipelines, and a tied weight's over its two stages.

        Args:
            gradients: of this rank's stage, by names in the whole model. Ranks with the same stage
                give the same names.
        """
        self._groups.reduce(name, gradients, self._stages[name].tied)

    def norm(self, name: Name, gradients: Mapping[str, Tensor]) -> float:
        """Euclidean norm of the whole model's reduced gradients, each parameter counted once.

        The same number, to the bit, on all ranks.
        """
        pipeline, _ = self._layout.place(name, self._rank)
        stage = self._stages[name]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for key, gradient in gradients.items():
            if pipeline == 0 and (stage.first or key not in stage.tied):
                square += torch.linalg.vector_norm(gradient).double().square()
        dist.all_reduce(square)
        return math.sqrt(square.item())

    def saved_bytes(self, name: Name, work: TaskWork) -> int:
        """Bytes that this rank's stage keeps of a micro-batch from its forward to its backward.

        Bytes that the loss keeps on the last stage are not counted.
        """
        return saved_bytes(self._stages[name], work.tokens)

    def _pass(self, name: Name, works: Sequence[TaskWork]) -> _Pass:
        pipeline, _ = self._layout.place(name, self._rank)
        each = len(works) // self._layout.of(name)[1]
        mine = works[pipeline * each : (pipeline + 1) * each]
        return _Pass(self._stages[name], mine, self._device)


@dataclass(slots=True)
class _Pass:
    """A model's stage on this rank, and what it keeps of the micro-batches under way.

    Attributes:
        arriving: inputs asked for, by task.
        inputs: of micro-batches between forward and backward; their gradients end there.
        roots: where backward passes start: the loss, or the place of the output in the graph,
            which does not keep the output itself.
    """

    stage: Stage
    works: Sequence[TaskWork]
    device: torch.device
    arriving: dict[PipelineTask, tuple[Tensor, dist.Work]] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    roots: dict[int, Tensor | GradientEdge | None] = field(default_factory=dict)

    def ask(self, task: PipelineTask, peer: int) -> None:
        """Begin to receive the input of a task."""
        shape = (*self.works[task.micro_batch].tokens.shape, self.stage.hidden_size)
        buffer = torch.empty(shape, dtype=self.stage.dtype, device=self.device)
        work = dist.irecv(buffer, peer)
        assert work is not None
        self.arriving[task] = buffer, work

    def run(self, task: PipelineTask, watch: Stopwatch) -> Tensor | None:
        """Run a task as soon as its input is there; what the next stage on its way needs."""
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
        """Hidden states for the next stage; ``None`` on the last."""
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
        """The gradient for the stage before; ``None`` on the first."""
        x, root = self.inputs.pop(i), self.roots.pop(i)
        if isinstance(root, Tensor):
            root.backward()
        elif root is not None:  # else this is a first stage of frozen weights
            torch.autograd.backward([root], given)
        return x.grad
