"""Advantages: GAE, whitening, and comparisons among the responses to one prompt.

``groups`` is [B], with one number per prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from stretto.algorithms.reductions import masked_mean, masked_var
from stretto.errors import LearnerError

WHITEN_EPS = 1e-8
"""Added to the variance in :func:`whiten`, as TRL and verl do."""
STD_EPS = 1e-6
"""Added to a group's standard deviation, as verl does."""
GDPO_EPS = 1e-4
"""Added to the standard deviations of GDPO, as TRL does."""


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns (equations 11-16 of the paper), each [B, T], 0 outside the
    mask.

    ::

        delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
        A_t     = sum_l (gamma lam)^l delta_{t+l}
        R_t     = A_t + V(s_t)

    The state after the last response token is terminal, with value 0. The sum over l is a scan by
    doubling: after k rounds A_t holds its first 2^k terms, so it takes log2(T) rounds. Padding
    columns do not change a single bit of the result.
    """
    zero = values.new_zeros(())
    pad = torch.nn.functional.pad
    values = torch.where(mask, values, zero)
    next_values = pad(values[:, 1:], (0, 1))
    delta = torch.where(mask, rewards + gamma * next_values - values, zero)

    advantages = delta
    discount = gamma * lam
    terms = 1
    while terms < mask.shape[1]:
        advantages = advantages + discount * pad(advantages[:, terms:], (0, terms))
        discount, terms = discount * discount, 2 * terms
    return advantages, advantages + values


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """``(x - mean) / sqrt(var + 1e-8)`` of a full batch [B, T], and 0 outside the mask. Mean and
    Bessel-corrected variance are taken under the mask. With ``shift_mean`` false the mean is added
    back after scaling.
    """
    x = torch.where(mask, x, 0.0)
    mean = masked_mean(x, mask)
    whitened = (x - mean) * torch.rsqrt(masked_var(x, mask) + WHITEN_EPS)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, 0.0)


def require_several(groups: Tensor, algorithm: str) -> None:
    """Raise LearnerError if any prompt has a single response."""
    prompts, counts = groups.unique(return_counts=True)
    singles = prompts[counts < 2]
    if len(singles):
        raise LearnerError(
            f"'{algorithm}' compares the responses to one prompt and needs at least 2 of each; "
            f"{len(singles)} of {len(prompts)} prompts have one, the first is prompt "
            f"{int(singles[0])}. Raise rollout.samples_per_prompt",
            "one-response-to-prompt",
        )


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """``A_i = R_i - mean of the group's other R_j`` (RLOO, Ahmadian et al. 2024). All are [B]. Each
    group must have two or more rows.
    """
    total, count = _group_sums(rewards.double(), groups)
    return (rewards - (total - rewards) / (count - 1)).float()


def group_normalised(
    rewards: Tensor,
    groups: Tensor,
    scale: Literal["group", "batch", "none"],
    eps: float | None = None,
) -> Tensor:
    """``A_i = (R_i - mean) / std`` over the group (GRPO, Shao et al. 2024, section 4.1).

    All are [B]. Each group should have two or more rows. The Bessel-corrected deviation is that of
    the group's or the batch's rewards. Dr. GRPO (Liu et al. 2025) omits the division. A group whose
    rewards are all equal gets 0.
    """
    eps = STD_EPS if eps is None else eps
    # In double precision, because otherwise rounding would be divided by a deviation of almost 0.
    total, count = _group_sums(rewards.double(), groups)
    centred = rewards - total / count
    if scale == "batch":
        centred = centred / (rewards.double().std() + eps)
    elif scale == "group":
        squares, _ = _group_sums(centred.square(), groups)
        # A single row has no deviation, and is its own mean.
        centred = centred / ((squares / (count - 1).clamp(min=1)).sqrt() + eps)
    return centred.float()


def normalised_then_summed(sources: Tensor, weights: Tensor, groups: Tensor) -> Tensor:
    """``A_i = (Z_i - mean Z) / std Z`` over the batch (GDPO, arXiv 2601.05242).

    ``Z_i = sum_k w_k (r_ik - mean_k) / std_k``, with mean and deviation of source k over the group.
    1e-4 is added to each deviation. Maps rewards [B, S], weights [S] and groups [B] to [B]. A
    reward of NaN means that its source does not apply, and adds nothing.
    """
    total = torch.zeros(len(sources), dtype=torch.float64)
    for rewards, weight in zip(sources.T, weights, strict=True):
        applies = ~rewards.isnan()
        normalised = group_normalised(rewards[applies], groups[applies], "group", GDPO_EPS)
        total[applies] += weight * normalised.double()
    return ((total - total.mean()) / (total.std() + GDPO_EPS)).float()


def best_and_worst(scores: Tensor, groups: Tensor) -> list[tuple[int, int]]:
    """Return each group's first row with the highest and with the lowest score, in group order."""
    pairs = []
    for group in groups.unique().tolist():
        rows = (groups == group).nonzero()[:, 0]
        best, worst = scores[rows].argmax(), scores[rows].argmin()
        pairs.append((int(rows[best]), int(rows[worst])))
    return pairs


def group_stats(scores: Tensor, groups: Tensor) -> Mapping[str, float]:
    """Measure the spread of scores, before any KL cost, and the share of groups without one."""
    total, count = _group_sums(scores.double(), groups)
    squares, _ = _group_sums((scores - total / count).square(), groups)
    scores_by_group = [scores[groups == group] for group in groups.unique()]
    all_equal = [bool((of_group == of_group[0]).all()) for of_group in scores_by_group]
    return {
        "group/reward_std": (squares / (count - 1)).sqrt().mean().item(),
        "group/all_equal": fmean(all_equal),
    }


def _group_sums(x: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each row, the sum of x over its group and the group's size, both [B]."""
    _, index, counts = groups.unique(return_inverse=True, return_counts=True)
    sums = x.new_zeros(len(counts)).index_add(0, index, x)
    return sums[index], counts[index]
