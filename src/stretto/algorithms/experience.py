"""Inputs and outputs of losses, the same for all algorithms.

A schedule hands over a :class:`Scored` batch; an algorithm makes :class:`Targets` of it, which
become an :class:`Experience`; a loss takes :class:`LossInputs`, some rows of that, and gives a
:class:`LossTerm`. Terms of disjoint rows add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from stretto.algorithms.reductions import (
    Metrics,
    first_rows,
    joined,
    response_weights,
    token_weights,
)
from stretto.config.algorithm import Aggregation
from stretto.errors import LearnerError


@dataclass(frozen=True, slots=True)
class Scored:
    """A batch of scored responses, on the CPU in float32: one a row, or several rows an episode.

    Tokens are those that the policy drew; what an environment said stands nowhere here.
    """

    mask: Tensor  # [B, T] bool, true where there is a response token
    logprobs: Tensor  # [B, T] of the behaviour policy, as the engine stored them
    ref_logprobs: Tensor | None  # [B, T]; None without a reference
    values: Tensor | None  # [B, T] of the critic before the step; None without one
    scores: Tensor  # [B], the weighted sum of all reward sources
    ended: Tensor  # [B] bool, from the finish reason
    groups: Tensor  # [B] int64, the same for the responses to one prompt
    turn_rewards: Tensor | None = None  # [B, T], the part of the scores that is given for turns
    episodes: Tensor | None = None  # [B] int64, the same for the rows of an episode; None: no two
    sources: Tensor | None = None  # [B, S] float64, of each source; NaN if it does not apply
    weights: Tensor | None = None  # [S] of the sources

    def shared(self) -> Scored:
        """Return the batch with one score and one end an episode: the mean of its rows' scores,
        which only scorers that read rows apart can tell from each; the end only where all ended.
        """
        if self.episodes is None:
            return self
        rows = joined(torch.ones_like(self.episodes), self.episodes)
        scores = joined(self.scores.double(), self.episodes) / rows
        cut = joined((~self.ended).long(), self.episodes)
        return replace(self, scores=scores.to(self.scores.dtype), ended=cut == 0)

    def responses(self) -> tuple[Tensor, Tensor]:
        """Return a row for each response [E], to compare them by, and the place among these of the
        response that each row is of [B].
        """
        if self.episodes is None:
            every = torch.arange(len(self.mask))
            return every, every
        return first_rows(self.episodes)

    def rows(self) -> list[tuple[int, ...]]:
        """Return all rows of each response, in the order of :meth:`responses`."""
        first, place = self.responses()
        rows: list[list[int]] = [[] for _ in first]
        for row, response in enumerate(place.tolist()):
            rows[response].append(row)
        return [tuple(of_response) for of_response in rows]


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets that an algorithm makes of a scored batch.

    Advantages are constant along a response where the algorithm has one a response. Units are rows
    that are trained on together, in one micro-batch and in this order; rows in no unit are left
    out. By default each response is by itself.
    """

    advantages: Tensor  # [B, T], 0 outside the mask
    units: Sequence[Sequence[int]] | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # further [B, T] of its losses
    stats: Mapping[str, float] = field(default_factory=dict)  # of the batch, by metric name


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Rows of an experience: all that losses take besides the trained models; 0 outside the mask.

    ``fresh`` marks responses sampled by the very weights that are being trained: engine and learner
    should agree on their log-probs. ``own`` marks those whose old policy is the one under training,
    as it is now: the old log-probs are then its own, not ``old_logprobs``.
    """

    mask: Tensor  # [b, T] bool
    weights: Tensor  # [b, T] of each token in a loss of tokens; over the whole optimizer step
    means: Tensor  # [b, T] 1 / tokens, which turns sums into the means that are reported
    response_weights: Tensor  # [b] 1 / responses, of each in a loss of whole responses
    advantages: Tensor  # [b, T]
    old_logprobs: Tensor  # [b, T] of the policy that ratios are taken to
    ref_logprobs: Tensor | None = None  # [b, T]; None without a reference
    behaviour_logprobs: Tensor | None = None  # [b, T] as the engine stored them; None: the old ones
    fresh: Tensor | None = None  # [b] bool
    own: Tensor | None = None  # [b] bool
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # see Targets
    episodes: Tensor | None = None  # [b], as in Scored
    places: Tensor | None = None  # [N] of the response tokens among b * T; None: not looked for
    fresh_places: Tensor | None = None  # [n] of those in fresh rows

    def each(self, change: Callable[[Tensor], Tensor]) -> LossInputs:
        """Return the same inputs with each tensor changed."""

        def changed(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: change(tensor) for name, tensor in value.items()}
            return None if value is None else change(value)

        return LossInputs(**{f.name: changed(getattr(self, f.name)) for f in fields(LossInputs)})

    def pick(self, rows: Sequence[int] | slice) -> LossInputs:
        """Return some rows, with the weights that they have here."""
        bare = replace(self, places=None, fresh_places=None)
        return bare.each(lambda tensor: tensor[rows])

    def located(self) -> LossInputs:
        """Return the same inputs with the places of tokens. Where the mask is on a GPU, the host
        waits to learn how many there are: locate them on the CPU.
        """

        def places(mask: Tensor) -> Tensor:
            return mask.flatten().nonzero()[:, 0]

        fresh = None if self.fresh is None else places(self.mask & self.fresh[:, None])
        return replace(self, places=places(self.mask), fresh_places=fresh)

    def weighted(self, averaging: Aggregation, longest: int) -> LossInputs:
        """Return the same rows, weighted as all that an optimizer step trains on."""
        return replace(
            self,
            weights=token_weights(self.mask, averaging, longest, self.episodes),
            means=token_weights(self.mask, "token_mean"),
            response_weights=response_weights(self.mask, self.episodes),
        )

    def of_tokens(self, x: Tensor) -> Tensor:
        """Pick the entries of response tokens: [b, T] to [N], one response after another."""
        places = self.located().places if self.places is None else self.places
        assert places is not None
        return x.flatten().index_select(0, places)

    def of_response(self, per_token: Tensor) -> Tensor:
        """Sum over each response: [b, T] to [b]. The log-prob of a response is one such sum; all
        rows of an episode have that of the episode.
        """
        return joined(torch.where(self.mask, per_token, 0.0).sum(dim=1), self.episodes)

    @property
    def response_tokens(self) -> Tensor:
        """Tokens of each row's response, [b]."""
        return joined(self.mask.sum(dim=1), self.episodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience(LossInputs):
    """The inputs of a whole batch's losses; its rows have no weights yet."""

    units: Sequence[Sequence[int]]  # see Targets; every row accounted for
    apart: bool = False  # whether rows of a unit may be in several micro-batches of a mini-batch
    rewards: Tensor  # [B], the scores after the rule for missing ends
    stats: Mapping[str, float]  # by metric name


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A differentiable term [] of a loss, and its metrics; both add over disjoint rows."""

    loss: Tensor
    metrics: Metrics

    def __add__(self, other: LossTerm) -> LossTerm:
        return LossTerm(self.loss + other.loss, self.metrics + other.metrics)


def require_finite(name: str, tensor: Tensor) -> None:
    """Refuse numbers that would spoil the weights; raises LearnerError."""
    bad = tensor[~tensor.isfinite()]
    if bad.numel():
        raise LearnerError(
            f"every {name} must be finite; {bad.numel()} of {tensor.numel()} are not, the first is "
            f"{bad[0].item()}. Find where it comes from before training on: a reward source, or "
            "weights that have diverged (lower training.lr)",
            "numbers-not-finite",
        )


def check(data: Scored, kl_coef: float) -> None:
    """Refuse a batch that nothing can be learned from: there is no response token, an input is not
    finite inside the mask, or the reference is missing.
    """
    if not data.mask.any():
        raise LearnerError(
            "a batch must hold at least one response token; all "
            f"{len(data.mask)} responses are empty. "
            "Check the model's end-of-sequence tokens and rollout.stop",
            "no-response-tokens",
        )
    if data.ref_logprobs is None and kl_coef:
        raise LearnerError(
            f"the KL penalty of weight {kl_coef} needs the reference's log-probabilities, and "
            "there are none. Score with the reference, or set algorithm.kl_coef = 0",
            "reference-missing",
        )
    for name, values in (
        ("log-prob", data.logprobs),
        ("reference log-prob", data.ref_logprobs),
        ("value", data.values),
        ("turn reward", data.turn_rewards),
    ):
        if values is not None:
            require_finite(name, values[data.mask])
    require_finite("score", data.scores)
