"""Groups that the learner may start on before their batch is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stretto.config.knobs import Settings
from stretto.schedules.buffer import Buffer
from stretto.schedules.rollout import Rollout, without_reward
from stretto.schedules.scoring import Scoring


class Accumulation:
    """With ``train_on = "group"``, the groups whose gradients the learner accumulates while others
    are decoded.

    - A group is chosen for the batch. None of its rollouts lacks a score or has failed, because it
      might be rejected otherwise, and some have tokens.
    - No other group that may join the batch has its prompt, whose responses are all compared.
    - It is handed over once.
    """

    def __init__(self, settings: Settings, buffer: Buffer, scoring: Scoring) -> None:
        self.on = settings.train_on == "group"  # in the current round
        self.running = False  # whether the learner works on groups
        self._weights = settings.reward_weights
        self._buffer = buffer
        self._scoring = scoring
        self._groups: set[int] = set()  # handed over since the last step

    def ready(self, generated: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts of groups to hand over, of a round that has been generated or of the
        open one (no rollout). Once all are scored, the step trains on the rest itself.
        """
        chosen, candidates = generated or self._buffer.chosen, generated or [*self._buffer]
        scored = {r.id for r in chosen if self._scoring.is_scored(r)}
        if len(scored) == len(generated):
            return []
        draws = Counter(prompt for prompt, _ in {(r.prompt.id, r.group) for r in candidates})
        groups: dict[int, list[Rollout]] = {}
        for rollout in chosen:
            if rollout.group not in self._groups and draws[rollout.prompt.id] == 1:
                groups.setdefault(rollout.group, []).append(rollout)
        return [
            rollout
            for group in groups.values()
            if all(r.id in scored for r in group)
            and any(r.sampled_tokens for r in group)
            and not without_reward(group, self._weights)
            for rollout in group
        ]

    def begin(self, rollouts: Sequence[Rollout]) -> None:
        self._groups.update(r.group for r in rollouts)
        self.running = True

    def end_step(self) -> None:
        self._groups.clear()
