"""The learner of PPO: one step on a batch of scored rollouts.

Shapes: B responses, T tokens; N response tokens of one micro-batch, flattened.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.algorithms import ppo
from stretto.algorithms.kl import AdaptiveKL
from stretto.algorithms.reductions import Tally, token_weights
from stretto.config import Config
from stretto.errors import LearnerError, nearest
from stretto.models.forward import (
    microbatches,
    output_head,
    response_hidden,
    response_tokens,
    token_budget,
)
from stretto.models.heads import apply_scalar_head
from stretto.models.logits import token_logprobs
from stretto.models.weights import fingerprint
from stretto.training.collate import Collated, collate, describe, staleness
from stretto.training.trained import TrainedModel
from stretto.types import Batch, Rollout, Weights

RATIO_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Root mean square log ratio on on-policy data that rounding alone explains, by compute type."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rollouts of a mini-batch, and what the loss needs of their tokens, all [N]."""

    rollouts: Sequence[Rollout]
    old_logprobs: Tensor
    advantages: Tensor
    old_values: Tensor
    returns: Tensor
    weights: Tensor


class PPOLearner:
    """Trains actor and critic, and publishes both.

    The old log-probabilities are the engine's own, of the distribution it sampled from: no forward
    pass is spent on making them again, and the ratio tells the truth about the behaviour policy.
    That engine and learner agree is checked on the first mini-batch after a hand-over, if all its
    batch is of the version that was handed over.

    State: both models, beta, the version, whether the actor has moved since it was published, and
    the count of steps (which orders the mini-batches).

    Args:
        actor: the policy.
        critic: the value model.
        config: of the run.
        reward_weights: factor of each reward source, by name.
        snapshots: the models, of ``actor`` and ``critic``, whose weights are copied when they are
            published. Needed for one that is generated or scored with while training goes on.

    Raises:
        LearnerError: ``snapshots`` names another model.
    """

    def __init__(
        self,
        actor: TrainedModel,
        critic: TrainedModel,
        config: Config,
        reward_weights: Mapping[str, float],
        *,
        snapshots: Collection[str] = (),
    ) -> None:
        self._actor, self._critic, self._config = actor, critic, config
        self._trained = {"actor": actor, "critic": critic}
        for name in snapshots:
            if name not in self._trained:
                raise LearnerError(
                    f"snapshots are taken of trained models; got '{name}'. "
                    f"{nearest(name, self._trained)}"
                )
        self._snapshots = frozenset(snapshots)
        self._reward_weights = reward_weights
        self._head = output_head(actor.model)
        self._budget = token_budget(config.training.microbatch_tokens, actor.device)
        a = config.algorithm
        self._kl = AdaptiveKL(a.kl_coef, a.kl_target, a.kl_horizon)
        self._version, self._steps, self._moved = 0, 0, False

    def train(self, batch: Batch) -> dict[str, float]:
        """Take one step.

        Raises:
            LearnerError: the batch is too small for its mini-batches, its numbers are not finite,
                or engine and learner disagree about on-policy data.
        """
        data = collate(batch, self._reward_weights)
        experience = self._prepare(data)
        age = staleness(batch, self._version)
        on_policy = age["staleness/off_policy_tokens"] == 0
        tally, norms = Tally(), {"policy": 0.0, "critic": 0.0}
        lr = {"lr": self._actor.lr, "critic/lr": self._critic.lr}
        parts = list(self._minibatches(len(batch)))
        for rows in parts:
            check_ratio = on_policy and not self._moved
            tally += self._train_minibatch(batch, rows, experience, norms, check_ratio)
        self._steps += 1
        thawed = self._steps > self._config.critic.freeze_steps
        if thawed and "objective/kl" in experience.stats:
            self._kl.update(experience.stats["objective/kl"], len(batch))
        return {
            **describe(batch),
            **age,
            **experience.stats,
            **_averages(tally, len(parts)),
            **{f"{name}/grad_norm": norm / len(parts) for name, norm in norms.items()},
            **lr,
        }

    def publish(self) -> dict[str, Weights]:
        """The next version of ``actor`` and ``critic``.

        The fingerprint is of all parameters of a model, frozen ones too: so under LoRA it proves
        that the adapters have come to lie on the same weights. Tensors travel for ``snapshots``
        alone, and of these only what is trained; otherwise both sides share the module.
        """
        self._version, self._moved = self._version + 1, False
        return {name: self._publish(name, trained) for name, trained in self._trained.items()}

    def _publish(self, name: str, trained: TrainedModel) -> Weights:
        # The fingerprint comes last, as it waits for the device: then the copies are there too.
        tensors = trained.snapshot() if name in self._snapshots else None
        return Weights(self._version, fingerprint(trained.model.named_parameters()), tensors)

    def state_dict(self) -> dict[str, Any]:
        """See the class."""
        return {
            "actor": self._actor.state_dict(),
            "critic": self._critic.state_dict(),
            "kl": self._kl.state_dict(),
            "version": self._version,
            "steps": self._steps,
            "moved": self._moved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._actor.load_state_dict(state["actor"])
        self._critic.load_state_dict(state["critic"])
        self._kl.load_state_dict(state["kl"])
        self._version, self._steps = state["version"], state["steps"]
        self._moved = state["moved"]

    def _prepare(self, data: Collated) -> ppo.Experience:
        return ppo.prepare(
            old_logprobs=data.logprobs,
            ref_logprobs=data.ref_logprobs,
            old_values=data.values,
            scores=data.scores,
            mask=data.mask,
            ended=data.ended,
            algorithm=self._config.algorithm,
            reward=self._config.reward,
            kl_coef=self._kl.coef,
        )

    def _minibatches(self, size: int) -> Iterator[list[int]]:
        """Rows of each mini-batch, shuffled anew for every epoch.

        With dropped responses the batch may not divide evenly: parts then differ by one response.
        """
        count = self._config.training.minibatches
        if size < count:
            raise LearnerError(
                f"{size} responses were left of the batch, fewer than training.minibatches = "
                f"{count}; see why responses were dropped, or lower minibatches"
            )
        order = torch.Generator().manual_seed((self._config.seed * 1_000_003 + self._steps) % 2**63)
        for _ in range(self._config.training.epochs):
            shuffled = torch.randperm(size, generator=order)
            yield from ([*map(int, part)] for part in shuffled.tensor_split(count))

    def _train_minibatch(
        self,
        batch: Batch,
        rows: Sequence[int],
        experience: ppo.Experience,
        norms: dict[str, float],
        check_ratio: bool,
    ) -> Tally:
        parts = self._microbatches(batch, rows, experience)
        tally = self._critic_pass(parts)
        norms["critic"] += self._critic.update()
        if self._steps >= self._config.critic.freeze_steps:
            actor_tally = self._actor_pass(parts)
            if check_ratio:
                self._check_ratio(actor_tally)
            norms["policy"] += self._actor.update()
            self._moved = True
            tally += actor_tally
        return tally

    def _microbatches(
        self, batch: Batch, rows: Sequence[int], experience: ppo.Experience
    ) -> list[MicroBatch]:
        """Split a mini-batch by token budget; weights count over the whole of it."""
        rollouts = [batch[row] for row in rows]
        masks = experience.mask[rows]
        weights = token_weights(masks, self._config.algorithm.aggregation)
        parts = []
        for chosen in microbatches(rollouts, self._budget):
            at, mask = [rows[i] for i in chosen], masks[chosen]
            columns = (
                experience.old_logprobs[at],
                experience.advantages[at],
                experience.old_values[at],
                experience.returns[at],
                weights[chosen],
            )
            flat = (c[mask].to(self._actor.device) for c in columns)
            parts.append(MicroBatch([rollouts[i] for i in chosen], *flat))
        return parts

    def _actor_pass(self, parts: Sequence[MicroBatch]) -> Tally:
        """Gradients of the policy loss, summed over micro-batches."""
        a, tally = self._config.algorithm, Tally()
        with self._actor.training():
            for p in parts:
                hidden = response_hidden(self._actor.model, p.rollouts)
                targets = response_tokens(p.rollouts, hidden.device)
                temperature = self._config.rollout.temperature
                logprobs, entropy = token_logprobs(self._head, hidden, targets, temperature)
                policy = ppo.policy_loss(logprobs, p.old_logprobs, p.advantages, p.weights, a.clip)
                bonus = ppo.entropy_bonus(entropy, p.weights, a.entropy_coef)
                (policy.loss + bonus.loss).backward()
                tally += policy.tally + bonus.tally
        return tally

    def _critic_pass(self, parts: Sequence[MicroBatch]) -> Tally:
        """Gradients of the value loss, summed over micro-batches."""
        a, tally = self._config.algorithm, Tally()
        with self._critic.training():
            for p in parts:
                hidden = response_hidden(self._critic.model, p.rollouts)
                values = apply_scalar_head(self._critic.model, hidden)
                term = ppo.value_loss(values, p.old_values, p.returns, p.weights, a.value_clip)
                term.loss.backward()
                tally += term.tally
        return tally

    def _check_ratio(self, tally: Tally) -> None:
        rms = math.sqrt(2 * tally.sums["policy/approxkl_avg"].item())
        dtype = next(self._actor.model.parameters()).dtype
        tolerance = self._config.training.ratio_tolerance or RATIO_TOLERANCE[dtype]
        if not rms <= tolerance:
            raise LearnerError(
                f"on the first mini-batch of on-policy data every ratio should be 1, but the root "
                f"mean square log ratio is {rms:.4g} (tolerance {tolerance}): engine and learner "
                "disagree about the policy. If it is rounding of a low-precision model, raise "
                "training.ratio_tolerance or set model.dtype = 'float32'"
            )


def _averages(tally: Tally, parts: int) -> dict[str, float]:
    """Figures of the whole step: sums are means within a mini-batch, so they average over them."""
    whole = Tally({k: v / parts for k, v in tally.sums.items()}, tally.minima, tally.maxima)
    return whole.floats()
