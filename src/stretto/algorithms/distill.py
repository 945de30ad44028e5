"""On-policy distillation: the reverse KL to a teacher on the student's own tokens.

A teacher with another tokenizer gives log-probabilities of spans of tokens
(:mod:`stretto.scoring.cross_tokenizer`). A span is one action then, the product of its tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.algorithms.advantages import group_normalised, group_stats
from stretto.algorithms.experience import Scored, Targets
from stretto.algorithms.reductions import masked_mean
from stretto.algorithms.rewards import Rewards
from stretto.config import AlgorithmConfig
from stretto.types import INSIDE_SPAN


def targets(data: Scored, rewards: Rewards, settings: AlgorithmConfig) -> Targets:
    """``A_t = log pi_teacher(a_t) - log pi_behave(a_t)``, plus ``reward_coef`` times GRPO's
    advantage of the response.

    A token is credited with its own log ratio only, so future tokens are discounted by 0. Of a span
    of several tokens each is credited with the log ratio of the span, which all of them made. With
    PPO's surrogate the gradient on fresh samples is that of the reverse KL at each sampled prefix
    (Agarwal et al. 2023, GKD with student samples; Thinking Machines Lab 2025).
    """
    assert data.ref_logprobs is not None  # the teacher's, checked with the weight of the KL
    gap = torch.where(data.mask, data.logprobs - data.ref_logprobs, 0.0)
    stats = {"distill/reverse_kl": masked_mean(gap, data.mask).item()}
    advantages = -gap
    if data.span_tokens is not None:
        advantages = advantages * data.span_tokens
        spans = (1 / data.span_tokens[data.mask]).sum().item()
        stats["distill/span_tokens"] = data.mask.sum().item() / spans
    if settings.reward_coef:
        first, place = data.responses()
        totals, groups = rewards.totals[first], data.groups[first]
        per_response = group_normalised(totals, groups, settings.scale_rewards)[place]
        of_rewards = settings.reward_coef * per_response[:, None]
        advantages = torch.where(data.mask, advantages + of_rewards, 0.0)
        stats |= group_stats(rewards.scores[first], groups)
    return Targets(advantages=advantages, stats=stats)


def divided(reference: Tensor, logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Divide log-probabilities of spans among their tokens, so that each token of a span has the
    same log ratio. All inputs are [B, T].

    Args:
        reference: of each span at its last token. INSIDE_SPAN: the token is part of a later one's
            span, or, at the end of a response, of none. Its log ratio is 0 then.

    Returns:
        Log-probabilities of tokens, and how many tokens their spans have. ``None``: 1 each.
    """
    part = (reference == INSIDE_SPAN) & mask
    if not part.any():
        return reference, None
    length = reference.shape[1]
    # The index of the token that ends the span. Beyond the last: there is none.
    ends = torch.where(mask & ~part, torch.arange(length), length)
    ends = ends.flip(1).cummin(1).values.flip(1)
    sums = logprobs.new_zeros(len(reference), length + 1)
    totals = sums.scatter_add(1, ends, torch.where(mask, logprobs, 0.0)).gather(1, ends)
    tokens = sums.scatter_add(1, ends, mask.to(sums.dtype)).gather(1, ends)
    of_spans = reference.gather(1, ends.clamp_max(length - 1))
    shares = torch.where(tokens == 1, of_spans, logprobs - (totals - of_spans) / tokens)
    return torch.where(ends < length, shares, logprobs), tokens
