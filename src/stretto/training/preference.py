"""Reward models from preferences (Bradley and Terry 1952; Stiennon et al. 2020, section 3.4).

Shapes: b pairs of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.config import RewardModelConfig
from stretto.config.training import token_budget
from stretto.models.forward import by_token_budget, hidden_states
from stretto.models.heads import apply_scalar_head
from stretto.tasks.pairs import PairTokens
from stretto.training.epochs import After, batches, fit, optimizer_of
from stretto.types import Stats


@dataclass(frozen=True, slots=True)
class Preferences:
    """Metrics of a reward model on pairs.

    Attributes:
        loss: mean -log sigmoid(r_chosen - r_rejected), in nats a pair.
        accuracy: share of the pairs whose chosen response has the higher reward; a tie counts half.
        margin: mean r_chosen - r_rejected.
        reward_mean: mean reward of all responses, chosen and rejected.
        reward_std: standard deviation of the same.
        pairs: number of pairs.
    """

    loss: float
    accuracy: float
    margin: float
    reward_mean: float
    reward_std: float
    pairs: int

    @classmethod
    def of(cls, chosen: Tensor, rejected: Tensor) -> Preferences:
        """Compute the metrics from the rewards [pairs] of both sides."""
        chosen, rejected = chosen.detach().double(), rejected.detach().double()
        margin = chosen - rejected
        both = torch.cat([chosen, rejected])
        return cls(
            loss=-F.logsigmoid(margin).mean().item(),
            accuracy=((margin > 0).double() + 0.5 * (margin == 0)).mean().item(),
            margin=margin.mean().item(),
            reward_mean=both.mean().item(),
            reward_std=both.std(correction=0).item(),
            pairs=len(margin),
        )

    def stats(self, prefix: str) -> dict[str, float]:
        """Return them as metrics."""
        return {
            f"{prefix}/loss": self.loss,
            f"{prefix}/accuracy": self.accuracy,
            f"{prefix}/margin": self.margin,
            f"{prefix}/reward_mean": self.reward_mean,
            f"{prefix}/reward_std": self.reward_std,
        }


def train(
    model: nn.Module, pairs: Sequence[PairTokens], config: RewardModelConfig, after: After
) -> None:
    """Train a sequence classifier with one label in place.

    Args:
        model: a causal backbone with a scalar head; with adapters where only those and the head
            are to be trained.
        pairs: at least one.
        after: told of each update; what it raises ends the training after a whole update.

    Raises:
        LearnerError: a gradient is not finite.
    """
    objective = objective_of(model, config)
    trained = optimizer_of(model, config, len(pairs))
    try:
        fit(trained, batches(pairs, config), objective, after)
    finally:
        trained.close()


def objective_of(model: nn.Module, config: RewardModelConfig) -> BradleyTerry:
    """Return the loss, as the settings say."""
    device = next(model.parameters()).device
    budget = token_budget(config.training.microbatch_tokens, device)
    return BradleyTerry(model, budget, config.center_coef)


class BradleyTerry:
    """Mean over the pairs of -log sigmoid(r_c - r_r) + center_coef (r_c + r_r)^2.

    The second term fixes the constant that the first leaves free, at zero (Eisenstein et al. 2023,
    section 2). Subtracting the mean reward after the training would need a bias in the head, which
    sequence classifiers of most architectures have not; and there is no other weight that shifts
    all rewards by the same.

    Args:
        model: a causal backbone with a scalar head.
        center_coef: 0 leaves the second term out.
    """

    def __init__(self, model: nn.Module, token_budget: int, center_coef: float) -> None:
        self._model, self._budget, self._center_coef = model, token_budget, center_coef

    def learn(self, batch: Sequence[PairTokens]) -> Stats:
        """Add the gradient of the batch's loss; return metrics from before the update."""
        seen = []
        for part in self._passes(batch):
            chosen, rejected = self._rewards(part)
            loss = -F.logsigmoid(chosen - rejected)
            if self._center_coef:
                loss = loss + self._center_coef * (chosen + rejected).square()
            (loss.sum() / len(batch)).backward()
            seen.append(torch.stack([chosen, rejected]).detach().cpu())
        tokens = sum(2 * len(p.prompt) + len(p.chosen) + len(p.rejected) for p in batch)
        return {**Preferences.of(*torch.cat(seen, 1)).stats("train"), "data/tokens": float(tokens)}

    @torch.no_grad()
    def measure(self, pairs: Sequence[PairTokens]) -> Preferences:
        """Return the model's metrics on all of the pairs."""
        seen = [torch.stack(self._rewards(part)).cpu() for part in self._passes(pairs)]
        return Preferences.of(*torch.cat(seen, 1))

    def _passes(self, pairs: Sequence[PairTokens]) -> Iterator[list[PairTokens]]:
        for part in by_token_budget([2 * p.longest for p in pairs], self._budget):
            yield [pairs[i] for i in part]

    def _rewards(self, pairs: Sequence[PairTokens]) -> tuple[Tensor, Tensor]:
        """Rewards [b] of the chosen and of the rejected responses, read at the end token."""
        rows = [[*p.prompt, *p.chosen] for p in pairs]
        rows += [[*p.prompt, *p.rejected] for p in pairs]
        hidden = hidden_states(self._model, rows)
        last = torch.stack([h[len(row) - 1] for h, row in zip(hidden, rows, strict=True)])
        rewards = apply_scalar_head(self._model, last)
        return cast(tuple[Tensor, Tensor], rewards.split(len(pairs)))
