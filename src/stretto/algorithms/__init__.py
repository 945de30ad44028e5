"""Advantages, KL penalties, reductions and losses, as functions of tensors.

Nothing here depends on when or on which process it runs. Shapes, in every file of this package: B
responses, T response tokens. ``logprobs``, ``ref_logprobs``, ``values``, ``rewards``,
``advantages``, ``returns`` and ``mask`` are [B, T]. Responses are left-aligned: ``mask[b, t] = t <
length[b]``. ``logprobs[b, t]`` is of token t. ``values[b, t]`` is V(s_t), the value of the state
*before* token t.

Slots outside the mask may hold anything, including NaN and infinity. They are selected away before
any arithmetic, never multiplied by zero, so they affect neither results nor gradients.
"""

from stretto.algorithms.experience import LossInputs, LossTerm, Scored, Targets
from stretto.algorithms.policy import policy_term
from stretto.algorithms.registry import Algorithm
from stretto.algorithms.rewards import Rewards

__all__ = ["Algorithm", "LossInputs", "LossTerm", "Rewards", "Scored", "Targets", "policy_term"]
