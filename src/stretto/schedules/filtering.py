"""The choice of the scored rollouts that go to the learner. A pure function of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stretto.errors import RewardError
from stretto.schedules.rollout import Rollout, of_kind, total_reward
from stretto.types import is_finite

FUNCTION_FAILED = "reward function failed"
NOTHING_APPLIES = "no reward source applies"
NOT_FINITE = "reward not finite"
GROUP_TOO_SMALL = "group too small"
"""The reason of a rollout that has its scores, but too few others to its prompt have theirs."""


def reasons_to_reject(
    rollouts: Sequence[Rollout],
    *,
    drop_failures: bool,
    group_at_least: int,
    weights: Mapping[str, float] | None = None,
) -> Mapping[int, str]:
    """Return why rollouts are to be left out, by their ids.

    A rollout is left out if it has no reward, or if too few others to its prompt have one for a
    comparison.

    It has no reward if a reward function failed on it, if no source applies to it, or if the
    weighted sum is not finite as float32.

    Args:
        group_at_least: responses to one prompt that the learner needs.
        weights: factor of each reward source, by name; without them each counts once.

    Raises:
        RewardError: a response has no reward and such are not to be dropped, or nothing is left
            without them.
    """
    bad = {r.id: why for r in rollouts if (why := _no_reward(r, weights)) is not None}
    if not bad:
        return {}
    left = Counter(r.prompt.id for r in rollouts if r.id not in bad)
    alone = [r for r in rollouts if r.id not in bad and left[r.prompt.id] < group_at_least]
    if len(bad) + len(alone) < len(rollouts) and drop_failures:
        return {i: reason for i, (reason, _) in bad.items()} | dict.fromkeys(
            (r.id for r in alone), GROUP_TOO_SMALL
        )
    nothing_left = remedy = ""
    if not drop_failures:
        remedy = (
            ", or set reward.on_failure = 'drop' to leave such responses out (they are reported)"
        )
    elif alone:
        nothing_left = f", and no prompt has the {group_at_least} left that the algorithm compares"
    raise RewardError(
        f"{len(bad)} of {len(rollouts)} responses could not be scored{nothing_left}. The first:\n"
        f"{next(iter(bad.values()))[1]}\n"
        f"Mend the reward function{remedy}",
        list(bad),
    )


def _no_reward(rollout: Rollout, weights: Mapping[str, float] | None) -> tuple[str, str] | None:
    """Return why a rollout has no reward, in short and in full; ``None`` if it has one."""
    if failures := [s.failure for s in rollout.scores.values() if s.failure]:
        return FUNCTION_FAILED, "; ".join(failures)
    rewards = of_kind(rollout, "reward")
    if rewards and all(s.scalar is None for s in rewards):
        return NOTHING_APPLIES, (
            f"no reward source applies to rollout {rollout.id}: "
            f"{', '.join(s.source for s in rewards)} gave None\n"
            f"  prompt: {rollout.prompt.text[:400]!r}"
        )
    total = total_reward(rollout, weights)
    if is_finite(total):
        return None
    terms = [(s.scalar, 1.0 if weights is None else weights[s.source], s.source) for s in rewards]
    return NOT_FINITE, (
        f"the reward of rollout {rollout.id} is {total}, not finite as float32: "
        + " + ".join(f"{weight:g} x {score} ({source})" for score, weight, source in terms)
    )
