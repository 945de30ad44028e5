"""Which scored rollouts go to the learner, and which are left out. A pure function of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stretto.errors import JudgeError
from stretto.types import Rollout

JUDGE_FAILED = "judge failed"
GROUP_TOO_SMALL = "group too small"
"""The rollout has its scores, but too few others to its prompt have theirs."""


def reasons_to_reject(
    rollouts: Sequence[Rollout], *, drop_failures: bool, group_at_least: int
) -> Mapping[int, str]:
    """Why rollouts are to be left out, by their ids: a judge failed on them, or on so many others
    to their prompt that there is nothing to compare them with.

    Args:
        rollouts: a scored batch, with whole groups.
        drop_failures: leave failures out, instead of stopping.
        group_at_least: responses to one prompt that the learner needs.

    Raises:
        JudgeError: a judge failed on a response and failures are not to be dropped, or nothing is
            left without them.
    """
    failures = {
        r.id: "; ".join(s.failure for s in r.scores.values() if s.failure) for r in rollouts
    }
    bad = [r for r in rollouts if failures[r.id]]
    if not bad:
        return {}
    left = Counter(r.prompt.id for r in rollouts if not failures[r.id])
    alone = [r for r in rollouts if not failures[r.id] and left[r.prompt.id] < group_at_least]
    if len(bad) + len(alone) < len(rollouts) and drop_failures:
        return dict.fromkeys((r.id for r in bad), JUDGE_FAILED) | dict.fromkeys(
            (r.id for r in alone), GROUP_TOO_SMALL
        )
    nothing_left = remedy = ""
    if not drop_failures:
        remedy = (
            ", or set reward.on_failure = 'drop' to leave such responses out (they are reported)"
        )
    elif alone:
        nothing_left = f", and no prompt has the {group_at_least} left that the algorithm compares"
    raise JudgeError(
        f"{len(bad)} of {len(rollouts)} responses could not be judged{nothing_left}. The first:\n"
        f"{failures[bad[0].id]}\n"
        f"Mend the reward function{remedy}",
        [r.id for r in bad],
    )
