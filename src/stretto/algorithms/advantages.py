"""Advantages: GAE, whitening, and the comparison of the responses to one prompt.

Groups are by prompt: ``groups`` is [B], one number for each prompt.
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

    The state after the last response token is terminal: its value is 0. The sum over l is a scan by
    doubling: after k rounds A_t holds its first 2^k terms, so it takes log2(T) rounds. Padding
    columns change no bit.
    """
    zero = values.new_zeros(())
    pad = torch.nn.functional.pad
    values = torch.where(mask, values, zero)
    next_values = pad(values[:, 1:], (0, 1))
    delta = torch.where(mask, rewards + gamma * next_values - values, zero)

    advantages, discount, terms = delta, gamma * lam, 1
    while terms < mask.shape[1]:
        advantages = advantages + discount * pad(advantages[:, terms:], (0, terms))
        discount, terms = discount * discount, 2 * terms
    return advantages, advantages + values


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """``(x - mean) / sqrt(var + 1e-8)`` of a whole batch [B, T], mean and Bessel-corrected variance
    under the mask, 0 outside; unless the mean is to be shifted to 0, it is put back after scaling.
    """
    x = torch.where(mask, x, 0.0)
    mean = masked_mean(x, mask)
    whitened = (x - mean) * torch.rsqrt(masked_var(x, mask) + WHITEN_EPS)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, 0.0)


def require_several(groups: Tensor, algorithm: str) -> None:
    """Refuse a prompt with a single response; raises LearnerError."""
    prompts, counts = groups.unique(return_counts=True)
    alone = prompts[counts < 2]
    if len(alone):
        raise LearnerError(
            f"'{algorithm}' compares the responses to one prompt and needs at least 2 of each; "
            f"{len(alone)} of {len(prompts)} prompts have one, the first is prompt "
            f"{int(alone[0])}. Raise rollout.samples_per_prompt",
            "one-response-to-prompt",
        )


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """``A_i = R_i - mean of R_j over the others of the group`` (RLOO, Ahmadian et al. 2024); all
    are [B], and each group has two rows or more.
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

    All are [B]; each group has two rows or more. The deviation is Bessel-corrected, and of the
    rewards of the group or of the batch; Dr. GRPO (Liu et al. 2025) leaves the division out. A
    group whose rewards are all the same gets 0.
    """
    eps = STD_EPS if eps is None else eps
    # In double precision, or rounding would be divided by a deviation of next to nothing.
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
    """``A_i = (Z_i - mean Z) / std Z`` over the batch, of ``Z_i = sum_k w_k (r_ik - mean_k) /
    std_k`` with mean and deviation of source k over the group (GDPO, arXiv 2601.05242), with 1e-4
    added to each deviation.

    Of rewards [B, S], NaN if a source does not apply, which then adds nothing, weights [S] and
    groups [B] to [B].
    """
    total = torch.zeros(len(sources), dtype=torch.float64)
    for rewards, weight in zip(sources.T, weights, strict=True):
        applies = ~rewards.isnan()
        each = group_normalised(rewards[applies], groups[applies], "group", GDPO_EPS)
        total[applies] += weight * each.double()
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
    """Measure how much there is to compare: the spread of scores, which no KL is taken off yet, and
    the share of groups without any.
    """
    total, count = _group_sums(scores.double(), groups)
    squares, _ = _group_sums((scores - total / count).square(), groups)
    each = [scores[groups == group] for group in groups.unique()]
    all_equal = [bool((of_group == of_group[0]).all()) for of_group in each]
    return {
        "group/reward_std": (squares / (count - 1)).sqrt().mean().item(),
        "group/all_equal": fmean(all_equal),
    }


def _group_sums(x: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row the sum of x over its group, and the group's size; each [B]."""
    _, index, counts = groups.unique(return_inverse=True, return_counts=True)
    sums = x.new_zeros(len(counts)).index_add(0, index, x)
    return sums[index], counts[index]
