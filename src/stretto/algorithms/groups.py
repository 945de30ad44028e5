"""Comparison of the responses to one prompt: baselines, normalisation, best and worst.

Groups are by prompt. Shapes: B responses; ``groups`` is [B], one number for each prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING

from stretto.errors import LearnerError

if TYPE_CHECKING:
    from torch import Tensor

STD_EPS = 1e-6
"""Added to a group's standard deviation, as verl does."""


def require_several(groups: Tensor, algorithm: str) -> None:
    """Refuse a prompt with a single response.

    Raises:
        LearnerError: there is such a prompt.
    """
    prompts, counts = groups.unique(return_counts=True)
    alone = prompts[counts < 2]
    if len(alone):
        raise LearnerError(
            f"'{algorithm}' compares the responses to one prompt and needs at least 2 of each; "
            f"{len(alone)} of {len(prompts)} prompts have one, the first is prompt "
            f"{int(alone[0])}. Raise rollout.samples_per_prompt"
        )


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """``A_i = R_i - mean of R_j over the others of the group`` (RLOO, Ahmadian et al. 2024).

    Args:
        rewards: [B].
        groups: [B], each at least twice.

    Returns:
        [B].
    """
    total, count = _group_sums(rewards.double(), groups)
    return (rewards - (total - rewards) / (count - 1)).float()


def group_normalised(rewards: Tensor, groups: Tensor, divide_by_std: bool) -> Tensor:
    """``A_i = (R_i - mean) / std`` over the group (GRPO, Shao et al. 2024, section 4.1).

    Args:
        rewards: [B].
        groups: [B], each at least twice.
        divide_by_std: Dr. GRPO (Liu et al. 2025) leaves the division out. The deviation is
            Bessel-corrected.

    Returns:
        [B]; 0 in a group whose rewards are all the same.
    """
    # In double precision, or rounding would be divided by a deviation of next to nothing.
    total, count = _group_sums(rewards.double(), groups)
    centred = rewards - total / count
    if divide_by_std:
        squares, _ = _group_sums(centred.square(), groups)
        centred = centred / ((squares / (count - 1)).sqrt() + STD_EPS)
    return centred.float()


def best_and_worst(scores: Tensor, groups: Tensor) -> list[tuple[int, int]]:
    """Rows with the highest and the lowest score of each group, in the order of their groups.

    Of equal scores the first row counts: a group of nothing but equal scores gives one row twice.
    """
    pairs = []
    for group in groups.unique().tolist():
        rows = (groups == group).nonzero()[:, 0]
        best, worst = scores[rows].argmax(), scores[rows].argmin()
        pairs.append((int(rows[best]), int(rows[worst])))
    return pairs


def group_stats(scores: Tensor, groups: Tensor) -> Mapping[str, float]:
    """Measure how much there is to compare: the scores' spread, the share of groups without any.

    It looks at scores alone: where a KL is taken off the reward, two rewards are hardly ever equal.
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
