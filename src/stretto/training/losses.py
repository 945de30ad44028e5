"""The losses of a micro-batch and their metrics, from a model's last hidden states.

They are the same wherever the passes are made: in one process, or on the last stage of a pipeline.

Shapes: b responses and T columns of a micro-batch; N its response tokens, flattened; H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from stretto.algorithms import policy
from stretto.algorithms.correction import settled
from stretto.algorithms.experience import LossTerm, Part
from stretto.algorithms.registry import FUNCTIONS
from stretto.config import AlgorithmConfig
from stretto.models.heads import apply_scalar_head
from stretto.models.logits import OutputHead, token_logprobs
from stretto.types import Prompt, Response


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch: responses of a mini-batch, and the losses' inputs in the same order."""

    responses: Sequence[Response]
    part: Part

    @classmethod
    def blank(cls, like: Part) -> MicroBatch:
        """Make one of a prompt of one token and no response; its losses and gradients are zero.

        Args:
            like: the part of another, for the kinds of tensors that losses take.
        """
        nothing = Response(0, 0, Prompt(0, (0,), ""), np.zeros(0, np.int32))
        return cls([nothing], like.each(lambda tensor: torch.zeros_like(tensor[:1])))


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a run.

    Attributes:
        algorithm: its settings.
        temperature: that responses are sampled at.
    """

    algorithm: AlgorithmConfig
    temperature: float

    def logprobs(
        self, head: OutputHead, hidden: Tensor, targets: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of response tokens.

        Args:
            hidden: [N, H], at the positions that predict the response tokens.
            targets: [N], the response tokens.
            mask: [b, T] bool, true where there is a response token.

        Returns:
            each [b, T], 0 outside the mask.
        """
        both = token_logprobs(head, hidden, targets, self.temperature)
        logprobs, entropy = (_at_responses(flat, mask) for flat in both)
        return logprobs, entropy

    def of_actor(
        self, head: OutputHead, hidden: Tensor, targets: Tensor, part: Part, kl_coef: float
    ) -> LossTerm:
        """Return the algorithm's loss, the entropy bonus, and the KL where it is in the loss.
            head, hidden, targets: as in :meth:`logprobs`.

        Returns:
            the loss; among its metrics, how far the policy is from the old one, and the engine from
            the learner.
        """
        a = self.algorithm
        logprobs, entropy = self.logprobs(head, hidden, targets, part.mask)
        part, metrics = settled(part, logprobs.detach(), a)
        metrics += policy.drift(logprobs, part) + policy.disagreement(logprobs, part)
        term = FUNCTIONS[a.name].policy_loss(logprobs, part, a)
        term += policy.entropy_bonus(entropy, part, a.entropy_coef)
        if a.kl_place == "loss" and a.kl_coef:
            term += policy.kl_penalty(logprobs, part, kl_coef, a.estimator)
        return LossTerm(term.loss, term.metrics + metrics)

    def of_critic(self, critic: nn.Module, hidden: Tensor, part: Part) -> LossTerm:
        """Return the algorithm's value loss.

        Args:
            hidden: [N, H], of the states before each response token.
        """
        value_loss = FUNCTIONS[self.algorithm.name].value_loss
        assert value_loss is not None
        values = _at_responses(apply_scalar_head(critic, hidden), part.mask)
        return value_loss(values, part, self.algorithm)


def _at_responses(flat: Tensor, mask: Tensor) -> Tensor:
    """Lay out a number of each response token, [N], as [b, T], 0 outside the mask."""
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat)
