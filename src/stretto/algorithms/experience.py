"""Inputs and outputs of losses, the same for all algorithms.

:class:`Scored` is a batch as the schedule hands it over; an algorithm makes :class:`Targets` of it,
which become an :class:`Experience`; its loss sees a :class:`Part` of that at a time and gives a
:class:`LossTerm`. Parts add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from stretto.algorithms.reductions import Metrics
from stretto.errors import LearnerError


@dataclass(frozen=True, slots=True)
class Scored:
    """A batch of scored responses, on the CPU in float32.

    Attributes:
        mask: [B, T] bool, true where there is a response token.
        logprobs: [B, T] of the behaviour policy, as the engine stored them.
        ref_logprobs: [B, T], or ``None`` without a reference.
        values: [B, T] of the critic before the step, or ``None`` without one.
        scores: [B], the weighted sum of all reward sources.
        ended: [B] bool, from the finish reason.
        groups: [B] int64, the same for the responses to one prompt.
    """

    mask: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor | None
    values: Tensor | None
    scores: Tensor
    ended: Tensor
    groups: Tensor


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets that an algorithm makes of a scored batch.

    Attributes:
        advantages: [B, T], 0 outside the mask; constant along a response where the algorithm has
            one advantage a response.
        units: rows that are trained on together, in one micro-batch and in this order; rows in no
            unit are left out. ``None``: each row by itself.
        tensors: further [B, T] that its losses take, by names of its own. What stands outside the
            mask is set to 0.
        stats: figures of the batch, by metric name.
    """

    advantages: Tensor
    units: Sequence[Sequence[int]] | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    stats: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Experience:
    """The inputs of a batch's losses besides the trained models; 0 outside the mask.

    Attributes:
        mask: [B, T] bool.
        advantages: [B, T].
        old_logprobs: [B, T], of the policy that ratios are taken to, where it is not the policy
            under training itself.
        behaviour_logprobs: [B, T], of the policy that sampled, as the engine stored them.
        ref_logprobs: [B, T], or ``None`` without a reference.
        tensors: [B, T], those of the algorithm's own, by name.
        units: as in :class:`Targets`, every row accounted for.
        rewards: [B], the scores after the rule for missing ends.
        stats: figures of the batch, by metric name.
    """

    mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor
    behaviour_logprobs: Tensor
    ref_logprobs: Tensor | None
    tensors: Mapping[str, Tensor]
    units: Sequence[Sequence[int]]
    rewards: Tensor
    stats: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of an experience and their weights, which count over the whole optimizer step.

    b rows, T columns.

    Attributes:
        mask: [b, T] bool.
        weights: [b, T], of each token in a loss of tokens.
        means: [b, T], 1 / tokens: what turns sums into the means that are reported.
        response_weights: [b], 1 / responses: of each in a loss of whole responses.
        advantages, old_logprobs: [b, T].
        ref_logprobs: [b, T], or ``None`` without a reference.
        behaviour_logprobs: [b, T]; ``None`` where they are the old ones.
        fresh: [b] bool, true for responses sampled by the very weights that are being trained:
            engine and learner should agree on their log-probs; ``None`` for none.
        own: [b] bool, true where the old policy is the one under training, as it is now: the old
            log-probs are then its own, not ``old_logprobs``; ``None`` for none.
        tensors: [b, T], those of the algorithm's own, by name; see :class:`Targets`.
    """

    mask: Tensor
    weights: Tensor
    means: Tensor
    response_weights: Tensor
    advantages: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    behaviour_logprobs: Tensor | None = None
    fresh: Tensor | None = None
    own: Tensor | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Part:
        """Return the same part on another device."""
        return self.each(lambda tensor: tensor.to(device))

    def each(self, change: Callable[[Tensor], Tensor]) -> Part:
        """Return the same part with each of its tensors changed."""
        changed: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Mapping):
                changed[f.name] = {name: change(tensor) for name, tensor in value.items()}
            else:
                changed[f.name] = None if value is None else change(value)
        return Part(**changed)

    def of_response(self, per_token: Tensor) -> Tensor:
        """Sums over each response: [b, T] to [b]. The log-prob of a response is one such."""
        return torch.where(self.mask, per_token, 0.0).sum(dim=1)


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A loss over some rows of a batch, and what to report of it.

    Attributes:
        loss: [], differentiable; adds over the parts of a batch.
        metrics: adds over parts.
    """

    loss: Tensor
    metrics: Metrics

    def __add__(self, other: LossTerm) -> LossTerm:
        return LossTerm(self.loss + other.loss, self.metrics + other.metrics)


def require_finite(name: str, tensor: Tensor) -> None:
    """Refuse numbers that would spoil the weights.

    Raises:
        LearnerError: one is NaN or infinite.
    """
    bad = tensor[~tensor.isfinite()]
    if bad.numel():
        raise LearnerError(
            f"every {name} must be finite; {bad.numel()} of {tensor.numel()} are not, the first is "
            f"{bad[0].item()}. Find where it comes from before training on: a reward source, or "
            "weights that have diverged (lower training.lr)"
        )


def check(data: Scored, kl_coef: float) -> None:
    """Refuse a batch that nothing can be learned from.

    Raises:
        LearnerError: there is no response token, an input is not finite inside the mask, or the
            reference is missing.
    """
    if not data.mask.any():
        raise LearnerError(
            "a batch must hold at least one response token; all "
            f"{len(data.mask)} responses are empty. "
            "Check the model's end-of-sequence tokens and rollout.stop"
        )
    if data.ref_logprobs is None and kl_coef:
        raise LearnerError(
            f"the KL penalty of weight {kl_coef} needs the reference's log-probabilities, and "
            "there are none. Score with the reference, or set algorithm.kl_coef = 0"
        )
    require_finite("log-prob", data.logprobs[data.mask])
    if data.ref_logprobs is not None:
        require_finite("reference log-prob", data.ref_logprobs[data.mask])
    if data.values is not None:
        require_finite("value", data.values[data.mask])
    require_finite("score", data.scores)
