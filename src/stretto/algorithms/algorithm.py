"""The description of an algorithm: its needs of a run, its settings, and its functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.algorithms.experience import LossTerm, Part, Scored, Targets
    from stretto.algorithms.rewards import Rewards
    from stretto.config import AlgorithmConfig

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
"""The way losses of tokens become one; see :func:`~stretto.algorithms.reductions.token_weights`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An algorithm. docs/algorithms.md has the equations, the papers, and how to add one.

    b rows and T columns of a micro-batch.

    Attributes:
        name: ``algorithm.name`` in the settings.
        targets: a scored batch and its rewards to advantages, or to the rows to train on, and to
            further tensors that the losses take.
        policy_loss: log-probs [b, T] of the policy under training, and a part of the experience,
            to a loss. Entropy and a KL in the loss are terms of their own.
        value_loss: values [b, T] of the critic under training, and a part of the experience, to a
            loss; ``None`` for algorithms without a critic.
        settings: dotted names of the settings that this algorithm looks at and some others do not.
        group: responses to one prompt that it needs, at least.
        kl_in: where the KL to the reference enters; ``implicit``: its loss is made of it.
        aggregation: how losses of tokens become one where the settings say 'auto'; ``None`` for
            losses of whole responses.
        ratio: whether the gradient of its loss depends on the old policy.
        corrects: whether its loss can carry importance weights.
        per_group: whether it trains on one pair, or on one response, of each group.
    """

    name: str
    targets: Callable[[Scored, Rewards, AlgorithmConfig], Targets]
    policy_loss: Callable[[Tensor, Part, AlgorithmConfig], LossTerm]
    value_loss: Callable[[Tensor, Part, AlgorithmConfig], LossTerm] | None = None
    settings: Sequence[str] = ()
    group: int = 2
    kl_in: Literal["reward", "loss", "implicit"] = "reward"
    aggregation: Aggregation | None = "sequence_sum"
    ratio: bool = False
    corrects: bool = True
    per_group: bool = False

    @property
    def critic(self) -> bool:
        """Return whether it learns a value model."""
        return self.value_loss is not None
