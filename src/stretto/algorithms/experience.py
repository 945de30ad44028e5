"""Inputs and outputs of losses, the same for all algorithms.

A schedule hands over a :class:`Scored` batch. An algorithm computes :class:`Targets`, from which an
:class:`Experience` is built. A loss takes :class:`LossInputs`, some rows of the experience, and
returns a :class:`LossTerm`. Terms of disjoint rows add up.
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
    """A batch of scored responses, on the CPU in float32: one per row, or several rows per episode.
    Only tokens that the policy sampled appear here. The text of environments does not.
    """

    mask: Tensor  # [B, T] bool, true for response tokens
    logprobs: Tensor  # [B, T] of the behaviour policy, as reported by the engine
    ref_logprobs: Tensor | None  # [B, T]; None without a reference
    values: Tensor | None  # [B, T] of the critic before the step; None without one
    scores: Tensor  # [B], the weighted sum of all reward sources
    ended: Tensor  # [B] bool, from the finish reason
    groups: Tensor  # [B] int64, the same for the responses to one prompt
    turn_rewards: Tensor | None = None  # [B, T], the part of the scores that turns earned
    episodes: Tensor | None = None  # [B] int64, equal for an episode's rows; None: one row each
    sources: Tensor | None = None  # [B, S] float64, one column per source; NaN if it does not apply
    weights: Tensor | None = None  # [S] of the sources
    span_tokens: Tensor | None = None  # [B, T] tokens of each token's span; None: 1 each

    def shared(self) -> Scored:
        """Return the batch with one score and one ``ended`` flag per episode. The score is the mean
        over the rows. They differ only for scorers that read rows separately. An episode has ended
        only if all its rows have.
        """
        if self.episodes is None:
            return self
        rows = joined(torch.ones_like(self.episodes), self.episodes)
        scores = joined(self.scores.double(), self.episodes) / rows
        cut = joined((~self.ended).long(), self.episodes)
        return replace(self, scores=scores.to(self.scores.dtype), ended=cut == 0)

    def responses(self) -> tuple[Tensor, Tensor]:
        """Return one row per response [E], to compare, and each row's index among them [B]."""
        if self.episodes is None:
            indices = torch.arange(len(self.mask))
            return indices, indices
        return first_rows(self.episodes)

    def rows(self) -> list[tuple[int, ...]]:
        """Return the rows of each response, in the order of :meth:`responses`."""
        first, place = self.responses()
        rows: list[list[int]] = [[] for _ in first]
        for row, response in enumerate(place.tolist()):
            rows[response].append(row)
        return [tuple(of_response) for of_response in rows]


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets that an algorithm computes from a scored batch.

    Algorithms with one advantage per response repeat it along the response. A unit is a list of
    rows to train on together, in one micro-batch and in this order. Rows in no unit are not
    trained on. By default each response is a unit.
    """

    advantages: Tensor  # [B, T], 0 outside the mask
    units: Sequence[Sequence[int]] | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # [B, T] each, for its losses
    stats: Mapping[str, float] = field(default_factory=dict)  # of the batch, by metric name


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Rows of an experience: all that losses take besides the trained models. 0 outside the mask.

    ``fresh`` marks responses sampled by exactly the weights under training, for which the log-probs
    of engine and learner should agree. ``own`` marks rows whose old policy is the current policy,
    so that its log-probs replace ``old_logprobs``.
    """

    mask: Tensor  # [b, T] bool
    weights: Tensor  # [b, T], per-token loss weights over the full optimizer step
    means: Tensor  # [b, T] 1 / tokens, to turn sums into the reported means
    response_weights: Tensor  # [b] 1 / responses, weights of per-response losses
    advantages: Tensor  # [b, T]
    old_logprobs: Tensor  # [b, T] of the policy in the ratio's denominator
    ref_logprobs: Tensor | None = None  # [b, T]; None without a reference
    behaviour_logprobs: Tensor | None = None  # [b, T] from the engine; None: old_logprobs
    fresh: Tensor | None = None  # [b] bool
    own: Tensor | None = None  # [b] bool
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # see Targets
    episodes: Tensor | None = None  # [b], as in Scored
    groups: Tensor | None = None  # [b], as in Scored; only for an optimal baseline
    places: Tensor | None = None  # [N] indices of response tokens in b * T; None: not computed yet
    fresh_places: Tensor | None = None  # [n] the same for fresh rows

    def each(self, change: Callable[[Tensor], Tensor]) -> LossInputs:
        """Return the same inputs with ``change`` applied to each tensor."""

        def changed(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: change(tensor) for name, tensor in value.items()}
            return None if value is None else change(value)

        return LossInputs(**{f.name: changed(getattr(self, f.name)) for f in fields(LossInputs)})

    def pick(self, rows: Sequence[int] | slice) -> LossInputs:
        """Return some rows, with their weights unchanged."""
        bare = replace(self, places=None, fresh_places=None)
        return bare.each(lambda tensor: tensor[rows])

    def located(self) -> LossInputs:
        """Return the same inputs with ``places`` filled in. Do this on the CPU: if the mask is on a
        GPU, the host waits to learn the number of tokens.
        """

        def places(mask: Tensor) -> Tensor:
            return mask.flatten().nonzero()[:, 0]

        fresh = None if self.fresh is None else places(self.mask & self.fresh[:, None])
        return replace(self, places=places(self.mask), fresh_places=fresh)

    def weighted(self, averaging: Aggregation, longest: int, *, counted: bool = True) -> LossInputs:
        """Return the same rows with weights, as the full set that an optimizer step trains on, or
        a part of it (not ``counted``).
        """
        episodes = self.episodes
        return replace(
            self,
            weights=token_weights(self.mask, averaging, longest, episodes, counted=counted),
            means=token_weights(self.mask, "token_mean", counted=counted),
            response_weights=response_weights(self.mask, episodes, counted=counted),
        )

    def of_tokens(self, x: Tensor) -> Tensor:
        """Select the entries of response tokens: [b, T] to [N], one response after another."""
        places = self.located().places if self.places is None else self.places
        assert places is not None
        return x.flatten().index_select(0, places)

    def of_response(self, per_token: Tensor) -> Tensor:
        """Sum over each response: [b, T] to [b], for example to get a response's log-prob. All rows
        of an episode get the episode's sum.
        """
        return joined(torch.where(self.mask, per_token, 0.0).sum(dim=1), self.episodes)

    @property
    def response_tokens(self) -> Tensor:
        """Tokens of each row's response, [b]."""
        return joined(self.mask.sum(dim=1), self.episodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience(LossInputs):
    """Loss inputs of a full batch. The rows have no weights yet."""

    units: Sequence[Sequence[int]]  # see Targets; all rows to train on
    apart: bool = False  # whether rows of a unit may be in several micro-batches of a mini-batch
    rewards: Tensor  # [B], the scores after the missing-EOS rule
    stats: Mapping[str, float]  # by metric name


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A differentiable loss term [] and its metrics. Both add up over disjoint rows."""

    loss: Tensor
    metrics: Metrics

    def __add__(self, other: LossTerm) -> LossTerm:
        return LossTerm(self.loss + other.loss, self.metrics + other.metrics)


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise LearnerError for numbers that would corrupt the weights."""
    bad = tensor[~tensor.isfinite()]
    if bad.numel():
        raise LearnerError(
            f"every {name} must be finite; {bad.numel()} of {tensor.numel()} are not, the first is "
            f"{bad[0].item()}. Find where it comes from before training on: a reward source, or "
            "weights that have diverged (lower training.lr)",
            "numbers-not-finite",
        )


def check(data: Scored, kl_coef: float) -> None:
    """Raise LearnerError for a batch that cannot be trained on. That is one without a response
    token, with an input that is not finite inside the mask, or without the reference that the KL
    penalty needs.
    """
    if not data.mask.any():
        raise LearnerError(
            f"a batch must hold at least one response token; all {len(data.mask)} responses are "
            "empty. Check the model's end-of-sequence tokens and rollout.stop",
            "no-response-tokens",
        )
    if data.ref_logprobs is None and kl_coef:
        raise LearnerError(
            f"the KL of weight {kl_coef} needs log-probabilities of the reference or teacher, and "
            "there are none. Score with that model, or set algorithm.kl_coef = 0",
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
