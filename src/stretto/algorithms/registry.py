"""The list of all algorithms. All other lists of their names are derived from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto.algorithms.algorithm import Algorithm
from stretto.algorithms.best_of_n import BEST_OF_N
from stretto.algorithms.copg import COPG
from stretto.algorithms.grpo import GRPO
from stretto.algorithms.online_dpo import ONLINE_DPO
from stretto.algorithms.ppo import PPO
from stretto.algorithms.proximal_rloo import PROXIMAL_RLOO
from stretto.algorithms.rloo import RLOO

ALGORITHMS: Mapping[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        PPO,
        RLOO,
        PROXIMAL_RLOO,
        COPG,
        GRPO,
        ONLINE_DPO,
        BEST_OF_N,
    )
}
"""All algorithms by name, in the order in which the help lists them."""


def own_settings() -> Sequence[str]:
    """Dotted names of the settings that some algorithms look at, and not all."""
    return list(dict.fromkeys(name for a in ALGORITHMS.values() for name in a.settings))
