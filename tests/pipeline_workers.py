"""What the ranks of pipeline tests run; in a file of its own, as they import it."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline_helpers import problem_of
from stretto.models.heads import apply_scalar_head
from stretto.models.logits import OutputHead, token_logprobs
from stretto.models.tensor_parallel import Cuts
from stretto.pipelines.executor.executor import (
    Outbox,
    PipelineExecutor,
    TaskWork,
    join_slices,
)
from stretto.pipelines.executor.instructions import Timings
from stretto.pipelines.executor.stages import NAMES, Stage, StageLayout, StageOwners, slice_stage
from stretto.pipelines.pipeline_schedule import PipelineSchedule
from stretto.pipelines.problem import Problem


@dataclass(frozen=True)
class Batch:
    """A micro-batch: token ids [b, L] padded on the right, and the tokens of each row."""

    tokens: Tensor
    lengths: tuple[int, ...]

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.tokens.shape[1]) < torch.tensor(self.lengths)[:, None]


def lm_loss(head: OutputHead, hidden: Tensor, batch: Batch) -> Tensor:
    """Negative log-likelihood of each next token, summed."""
    here = batch.mask[:, 1:]
    logprobs, entropy = token_logprobs(head, hidden[:, :-1][here], batch.tokens[:, 1:][here])
    return -(logprobs + 0.1 * entropy).sum() / 64


def value_loss(model: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
    """Squared distance to a made-up return at each token, summed."""
    values = apply_scalar_head(model, hidden[batch.mask])
    return (values - torch.cos(batch.tokens[batch.mask].float())).square().sum() / 64


class Trainer:
    """A rank that runs schedules, and says what gradients came of it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.doomed = False

    def load(
        self,
        actor: Stage,
        critic: Stage,
        layout: StageLayout,
        cuts: tuple[Cuts, Cuts] = (Cuts(), Cuts()),
        owners: tuple[StageOwners, ...] = (),
    ) -> None:
        for name, stage, of_model in zip(NAMES, (actor, critic), cuts, strict=True):
            slice_stage(stage, of_model, join_slices(layout, name, self.rank))
        self.stages = {"actor": Watched(actor), "critic": Watched(critic)}
        self.layout = layout
        self.owners = dict(zip(NAMES, owners, strict=False))
        self.executor = PipelineExecutor(actor, critic, layout, torch.device("cpu"))

    def step(
        self,
        schedule: PipelineSchedule,
        actor: Sequence[Batch],
        critic: Sequence[Batch],
        problem: Problem | None = None,
    ) -> Timings:
        return self.executor.run(
            schedule,
            problem or problem_of(self.layout, len(actor), len(critic)),
            [TaskWork(b.tokens, self._loss("actor", b)) for b in actor],
            [TaskWork(b.tokens, self._loss("critic", b)) for b in critic],
        )

    def _loss(self, name: str, batch: Batch) -> Callable[[Tensor], Tensor]:
        stage = self.stages[name].stage
        if name == "critic":
            return lambda hidden: value_loss(stage, hidden, batch)

        def loss(hidden: Tensor) -> Tensor:
            if self.doomed:
                os.kill(os.getpid(), signal.SIGKILL)
            return lm_loss(stage.head, hidden, batch)

        return loss

    def train(self) -> None:
        for watched in self.stages.values():
            watched.stage.train()

    def doom(self, rank: int) -> None:
        self.doomed = self.rank == rank

    def gradients(self) -> dict[str, tuple[dict[str, Tensor], float]]:
        """By model: reduced gradients that this rank owns, by names in the whole model, and the
        norm of all.
        """
        out = {}
        for name in NAMES:
            stage = self.stages[name].stage
            parameters = dict(stage.named_parameters())
            own = {stage.names[k]: p.grad for k, p in parameters.items() if p.grad is not None}
            owner, column = self.owners[name].rank_of, self.layout.column(name, self.rank)
            self.executor.reduce(name, own, owner)
            norm = self.executor.norm(name, own, owner)
            out[name] = {k: g for k, g in own.items() if owner(k, column) == self.rank}, norm
            stage.zero_grad()
        return out

    def held(self) -> dict[str, tuple[int, int]]:
        """By model: most micro-batches alive at once since the last look, and those alive now."""
        return {name: watched.look() for name, watched in self.stages.items()}

    def post(self) -> tuple[bool, bool]:
        """Whether a tensor is there until it has been sent, and afterwards."""
        if self.rank == 1:
            time.sleep(0.3)
            dist.recv(torch.zeros(1000), 0)
            return True, False
        tensor, outbox = torch.ones(1000), Outbox()
        held = weakref.ref(tensor)
        outbox.send(tensor, 1)
        del tensor
        before = held() is not None
        deadline = time.monotonic() + 5
        while held() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        return before, held() is not None


class Token:
    """Lives as long as the graph that it was put into."""


class Mark(torch.autograd.Function):
    """Passes a tensor through; its node in the graph holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Watched:
    """Counts the micro-batches of which a stage's graph is alive."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.most = stage, 0
        self.alive: weakref.WeakSet[Token] = weakref.WeakSet()
        stage.register_forward_hook(self.count)

    def count(self, stage: nn.Module, given: tuple[Tensor], output: Tensor) -> Tensor:
        token = Token()
        self.alive.add(token)
        self.most = max(self.most, len(self.alive))
        return Mark.apply(output, token)

    def look(self) -> tuple[int, int]:
        most, self.most = self.most, 0
        return most, len(self.alive)
