"""Forward and backward passes of a mini-batch, behind one small interface.

The learner divides a mini-batch as its passes ask, has them leave gradients in the models, and
updates the models. It does not know whether the passes are made in this process
(:class:`LocalPasses`) or by ranks that hold stages of the models
(:class:`~stretto.training.pipelined.PipelinedPasses`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from stretto.algorithms.experience import LossTerm
from stretto.algorithms.reductions import Metrics
from stretto.config.training import token_budget
from stretto.models.forward import (
    by_token_budget,
    output_head,
    response_hidden,
    response_tokens,
)
from stretto.models.logits import OutputHead
from stretto.training.losses import Losses, MicroBatch
from stretto.training.trained import training_mode
from stretto.types import Response, Stats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Trained(Protocol):
    """A model under training, as the learner sees it, wherever it is."""

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        ...

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in."""
        ...

    def logprobs(
        self, responses: Sequence[Response], mask: Tensor, temperature: float, budget: int = 0
    ) -> Tensor:
        """Return log-probs [B, T]; see :meth:`stretto.training.trained.WholeModel.logprobs`."""
        ...

    def fingerprint(self) -> str:
        """A short hash of all parameters, frozen ones too."""
        ...

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write model and tokenizer in Hugging Face format, whole or not at all."""
        ...

    def end_updates(self) -> bool:
        """End the updates; return whether the weights are whole, and stay as they are."""
        ...

    def update(self) -> float:
        """Take an optimizer step on the gradients collected since the last; return their norm.

        Raises:
            LearnerError: the norm is not finite; the weights are left as they were.
        """
        ...

    def skip(self) -> None:
        """Let an update go by without a gradient: the learning rate moves on, nothing else does."""
        ...

    def snapshot(self) -> Mapping[str, Tensor]:
        """Copies of the trained weights by name; of this rank's parts, and lent if so agreed."""
        ...

    def gathered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the whole of a snapshot, on the first rank; a collective of all ranks."""
        ...

    def divided(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this rank's parts of what :meth:`gathered` has returned."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Masters, AdamW's moments and the schedule's position; tensors, or this rank's pieces."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the state of a whole model, whose tensors may be in files."""
        ...


class Passes(Protocol):
    """The maker of the passes of mini-batches."""

    def divide(self, tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        """Divide a mini-batch into micro-batches.

        Args:
            tokens: of each unit, padding within it counted.

        Returns:
            Indices into ``tokens``, each once.
        """
        ...

    def run(
        self, parts: Sequence[MicroBatch], kl_coef: float, *, trains_actor: bool
    ) -> Mapping[str, Metrics]:
        """Leave the gradients of the losses, summed over micro-batches, in the models.

        Args:
            trains_actor: whether the actor gets gradients, too.

        Returns:
            Metrics by the name of the model.
        """
        ...

    def finish(self) -> Stats:
        """Bring the new weights into the whole models, after the step's last update.

        Returns:
            Metrics of the step's passes.
        """
        ...


class LocalPasses:
    """Passes in this process, a micro-batch after the other, critic before actor.

    Args:
        actor, critic: the models; ``None`` for algorithms without a critic.
        microbatch_tokens: as in ``training.microbatch_tokens``.
        head: of the actor, where it cannot be found in a model that is not whole.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        losses: Losses,
        microbatch_tokens: int,
        head: OutputHead | None = None,
    ) -> None:
        self._actor, self._critic = actor, critic
        self._head = head or output_head(actor)
        self._losses = losses
        self._device = next(actor.parameters()).device
        self._budget = token_budget(microbatch_tokens, self._device)

    def divide(self, tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        """Divide by token budget; see :class:`Passes`."""
        return by_token_budget(tokens, self._budget)

    def run(
        self, parts: Sequence[MicroBatch], kl_coef: float, *, trains_actor: bool
    ) -> Mapping[str, Metrics]:
        """Run the passes in this process; see :class:`Passes`."""
        parts = [replace(p, part=p.part.to(self._device)) for p in parts]
        by_model = {}
        if self._critic is not None:
            by_model["critic"] = self._critic_pass(self._critic, parts)
        if trains_actor:
            by_model["actor"] = self._actor_pass(parts, kl_coef)
        return by_model

    def finish(self) -> Stats:
        """Do nothing: the models are the ones that were updated. There are no metrics."""
        return {}

    def _actor_pass(self, parts: Sequence[MicroBatch], kl_coef: float) -> Metrics:
        metrics = Metrics()
        with training_mode(self._actor):
            for p in parts:
                term = self._term(self._actor, partial(self._actor_term, p, kl_coef))
                term.loss.backward()
                metrics += term.metrics
        return metrics

    def _critic_pass(self, critic: nn.Module, parts: Sequence[MicroBatch]) -> Metrics:
        metrics = Metrics()
        with training_mode(critic):
            for p in parts:
                term = self._term(critic, partial(self._critic_term, critic, p))
                term.loss.backward()
                metrics += term.metrics
        return metrics

    def _actor_term(self, p: MicroBatch, kl_coef: float) -> LossTerm:
        hidden = response_hidden(self._actor, p.responses)
        targets = response_tokens(p.responses, hidden.device)
        return self._losses.of_actor(self._output, hidden, targets, p.part, kl_coef)

    def _critic_term(self, critic: nn.Module, p: MicroBatch) -> LossTerm:
        hidden = response_hidden(critic, p.responses)
        return self._losses.of_critic(critic, hidden, p.part)

    def _term(self, model: nn.Module, compute: Callable[[], LossTerm]) -> LossTerm:
        return compute()

    @property
    def _output(self) -> OutputHead:
        return self._head
