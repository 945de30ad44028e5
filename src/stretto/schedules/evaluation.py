"""Evaluations of the policy during training."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from stretto.schedules.rollout import Rollout
from stretto.types import Prompt


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Prompts that the policy answers greedily from time to time during training.

    Answers have a separate ledger. Training's ledger and random numbers are the same without them.
    The initial weights, the last ones, and the first ones synced at or after each multiple of
    ``every`` steps are evaluated. Before generators load other weights, ``take`` gets the step, the
    scored answers and the seconds that these took.
    """

    every: int
    prompts: Sequence[Prompt]
    take: Callable[[int, Sequence[Rollout], float], Awaitable[None]]

    def is_due(self, step: int, before: int, last: int, late: int) -> bool:
        """Return whether the weights of a step must be evaluated.

        ``before`` is the step of the previous evaluation (negative: none), ``last`` that of the
        last weights. Metrics may arrive ``late`` steps later, but must not with those of the last.
        """
        if step <= before:
            return False
        between = step // self.every > before // self.every and step + late < last
        return step in (0, last) or between
