"""Remarks on a step's rewards: responses that were cut, and batches that teach nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto.config import RewardConfig
from stretto.config.sections import MISSING_EOS
from stretto.schedules.rollout import Rollout
from stretto.types import FinishReason, short_name

AGAIN = 10
"""Steps after which a remark that still holds is made again; then twice as many, and so on."""


class Remarks:
    """Remarks on what the mean reward of a step hides. To be called after every step."""

    def __init__(self, reward: RewardConfig, max_new_tokens: int) -> None:
        self._reward, self._limit = reward, max_new_tokens
        self._first = True
        self._next = {"cut": 0, "one reward": 0}
        self._pause = dict.fromkeys(self._next, AGAIN)

    def of(self, step: int, batch: Sequence[Rollout], rewards: Mapping[int, float]) -> list[str]:
        """Return remarks to show after a step.

        Responses that were cut are counted at the first step, and later when they are at least half
        of the batch. ``rewards`` are by rollout id, after the rule for missing ends.
        """
        cut = [r for r in batch if r.finish is FinishReason.LENGTH]
        first, self._first = self._first, False
        if len(batch) > 1 and len({rewards[r.id] for r in batch}) == 1:
            if not self._due("one reward", step):
                return []
            if cut:
                self._due("cut", step)  # is said with it
            return [f"step {step}: {self._one_reward(batch, cut, rewards[batch[0].id])}"]
        if cut and (first or 2 * len(cut) >= len(batch)) and self._due("cut", step):
            return [f"step {step}: {self._cut(len(cut), len(batch))}"]
        return []

    def _due(self, what: str, step: int) -> bool:
        if step < self._next[what]:
            return False
        self._next[what] = step + self._pause[what]
        self._pause[what] *= 2
        return True

    def _cut(self, cut: int, of: int) -> str:
        rule, limit = self._reward, self._limit
        said = f"{cut} of {of} responses were cut at rollout.max_new_tokens = {limit}"
        if rule.missing_eos == "off" and MISSING_EOS in rule.sources:
            return f"{said}; the source '{MISSING_EOS}' takes the penalty off those without an end"
        if rule.missing_eos == "off":
            return f"{said} and scored as they stood (reward.missing_eos = 'off')"
        does = (
            f"gives each of them {rule.missing_eos_penalty:g} in place of its score"
            if rule.missing_eos == "replace"
            else f"takes {abs(rule.missing_eos_penalty):g} off the score of each of them"
        )
        return (
            f"{said}, and reward.missing_eos = '{rule.missing_eos}' {does}. Where they had more to "
            "say, raise that limit, or name what ends an answer in rollout.stop; 'off' keeps their "
            "scores"
        )

    def _one_reward(self, batch: Sequence[Rollout], cut: Sequence[Rollout], reward: float) -> str:
        said = f"all {len(batch)} rewards are {reward:g}: a batch with one reward teaches nothing"
        parts = [self._cut(len(cut), len(batch))] if cut else []
        if len(cut) < len(batch):
            ended = [scores_by_source(r) for r in batch if r.finish is not FinishReason.LENGTH]
            same = {n: x for n, x in ended[0].items() if all(scores[n] == x for scores in ended)}
            told = (f"{n} does not apply" if x is None else f"{n} {x:g}" for n, x in same.items())
            those = "the others" if cut else "They"
            finds = ", or no answer is found where task.extract looks" if "task" in same else ""
            parts.append(
                f"{those} have one score ({', '.join(told) or 'in sum'}): the task may be too hard "
                f"or too easy for this model{finds}. See samples.jsonl"
            )
        return f"{said}. {'; '.join(parts)}"


def scores_by_source(rollout: Rollout) -> dict[str, float | None]:
    """Return a rollout's score from each reward source, by the name that its metric has; ``None``
    where a source does not apply to it."""
    return {short_name(s.source): s.scalar for s in rollout.scores.values() if s.kind == "reward"}
