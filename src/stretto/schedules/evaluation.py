"""Evaluations of the policy while it is trained, and when one is due."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from stretto.schedules.rollout import Rollout
from stretto.types import Prompt


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation of the policy while it is trained: prompts that it answers now and then.

    Answers are greedy, and in a ledger of their own. Random numbers and the ledger of training are
    as without them.

    Attributes:
        every: steps between two evaluations, at the least: the weights of a weight sync are
            evaluated. Those that training starts from and the last ones are, too.
        take: called with the step, the scored answers and the seconds that they took, before
            generators get other weights.
    """

    every: int
    prompts: Sequence[Prompt]
    take: Callable[[int, Sequence[Rollout], float], Awaitable[None]]

    def is_due(self, step: int, before: int, last: int, late: int) -> bool:
        """Return whether the weights of a step are to be evaluated.

        Args:
            before: step of the evaluation before; below 0 for none.
            last: step of the last weights.
            late: steps by which figures come later, where the learner goes on meanwhile: they must
                not come with those of the last.
        """
        if step <= before:
            return False
        between = step // self.every > before // self.every and step + late < last
        return step in (0, last) or between
