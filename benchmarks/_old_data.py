"""Remedies for old data that were tried and did not become settings (docs/off-policy.md).

Patches of one process: they replace a function or a class of ``stretto`` while a run trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from stretto.algorithms import correction
from stretto.algorithms.experience import Experience
from stretto.algorithms.reductions import joined
from stretto.assembly import roles
from stretto.training.learner import PolicyLearner
from stretto.training.losses import MicroBatch
from stretto.types import Response, TrainBatch

PART = 16
"""Responses whose gradients are held at once."""


def geometric_mask(
    proximal: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    kind: str,
    level: str,
    cap: float,
    episodes: Tensor | None = None,
) -> Tensor:
    """Weights [B, T] of 1 if the geometric mean of a response's token ratios lies from 1 / cap to
    cap, otherwise 0: Geo-Mask (Liu and Li 2025, part 3), ``geo_mask`` of prime-rl,
    ``sequence_mask_metric = "geometric"`` of SkyRL, ``rollout_rs = "geometric"`` of verl.
    """
    log_ratio = joined(torch.where(mask, proximal - behaviour, 0.0).sum(dim=1), episodes)
    mean = (log_ratio / joined(mask.sum(dim=1), episodes).clamp_min(1)).exp()
    kept = (mean >= 1 / cap) & (mean <= cap)
    return (kept[:, None] & mask).to(proximal.dtype)


class OptimalBaselineLearner(PolicyLearner):
    """Replaces RLOO's baseline by VCPO's (Huang et al. 2026, arXiv 2602.17616) before each update.

    The baseline of a group weights each reward by the response's squared importance weight and the
    squared norm of its score function::

        b = sum_i w_i^2 |grad log pi(y_i)|^2 R_i / sum_i w_i^2 |grad log pi(y_i)|^2
    """

    groups: Tensor  # [B] of the batch

    def experience_of(self, batch: TrainBatch) -> Experience:
        self.groups = torch.from_numpy(batch.prompt_ids)
        return super().experience_of(batch)

    def microbatches(
        self,
        responses: Sequence[Response],
        units: Sequence[Sequence[int]],
        experience: Experience,
        *,
        counted: bool = True,
    ) -> list[MicroBatch]:
        model = self._actor.model
        assert experience.behaviour_logprobs is not None
        assert isinstance(model, PreTrainedModel)
        norms, logprobs = scores(model, responses, self.config.rollout.temperature)
        weights = (logprobs - experience.behaviour_logprobs.sum(dim=1)).exp().square() * norms
        advantages = optimal_advantages(experience.advantages[:, 0], weights, self.groups)
        changed = torch.where(experience.mask, advantages[:, None], 0.0)
        experience = replace(experience, advantages=changed)
        return super().microbatches(responses, units, experience, counted=counted)


def optimal_advantages(advantages: Tensor, weights: Tensor, groups: Tensor) -> Tensor:
    """``R_i - b`` from RLOO's advantages, all [B]. Those of a group of K are
    ``K / (K - 1) (R_i - mean R)``, and ``b`` moves with a constant added to its group's rewards.
    """
    results = torch.zeros_like(advantages)
    for group in groups.unique():
        rows = groups == group
        count = int(rows.sum())
        rewards = advantages[rows] * (count - 1) / count
        baseline = (weights[rows] * rewards).sum() / weights[rows].sum()
        results[rows] = rewards - baseline
    return results


def scores(
    model: PreTrainedModel, responses: Sequence[Response], temperature: float
) -> tuple[Tensor, Tensor]:
    """Squared norms of ``grad log pi(y)``, and ``log pi(y)``, of each response, [B] each."""
    rows = [torch.tensor([*r.prompt.tokens, *r.tokens.tolist()]) for r in responses]
    tokens = pad_sequence(rows, batch_first=True)
    places = torch.arange(tokens.shape[1] - 1)
    starts = torch.tensor([len(r.prompt.tokens) - 1 for r in responses])
    ends = torch.tensor([len(row) - 1 for row in rows])
    sampled = (places >= starts[:, None]) & (places < ends[:, None])
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def logprob(weights: dict[str, Tensor], tokens: Tensor, sampled: Tensor) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": tokens[None], "use_cache": False}
        logits = functional_call(model, weights, (), inputs).logits[0, :-1]
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        of_targets = logprobs.gather(1, tokens[1:, None])[:, 0]
        return torch.where(sampled, of_targets, 0.0).sum()

    def score(tokens: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
        gradients, value = grad_and_value(logprob)(weights, tokens, sampled)
        return sum((g.square().sum() for g in gradients.values()), torch.zeros(())), value

    ours = model.config._attn_implementation
    model.set_attn_implementation("sdpa")  # functorch cannot map over Stretto's own attention
    norms, logprobs = vmap(score, chunk_size=PART)(tokens, sampled)
    model.set_attn_implementation(ours)
    return norms, logprobs


def _masking() -> AbstractContextManager[Any]:
    return mock.patch.object(correction, "importance_weights", geometric_mask)


def _optimal() -> AbstractContextManager[Any]:
    return mock.patch.object(roles, "PolicyLearner", OptimalBaselineLearner)


REMEDIES: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "geometric mean": _masking,
    "optimal baseline": _optimal,
}
"""What to patch, by name."""
