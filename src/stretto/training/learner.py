"""The learner: one step on a batch of scored rollouts, with any of the algorithms.

Shapes: B responses, T tokens of a batch; b and T of one micro-batch; N its response tokens,
flattened.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.algorithms.experience import Experience, Part, Scored
from stretto.algorithms.kl import AdaptiveKL
from stretto.algorithms.reductions import Tally, response_weights, token_weights
from stretto.algorithms.registry import prepare
from stretto.config import Config
from stretto.errors import LearnerError, nearest
from stretto.models.forward import (
    microbatches,
    output_head,
    response_hidden,
    response_tokens,
    token_budget,
)
from stretto.models.weights import fingerprint
from stretto.training.collate import collate, describe, staleness
from stretto.training.losses import Losses, MicroBatch
from stretto.training.passes import LocalPasses, Passes, Trained
from stretto.types import Batch, Weights

RATIO_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Root mean square log ratio on on-policy data that rounding alone explains, by compute type."""


class PolicyLearner:
    """Trains the actor, and the critic where the algorithm has one, and publishes both.

    Unless the ratio is asked to be to the proximal policy, the old log-probabilities are the
    engine's own, of the distribution it sampled from: no forward pass is spent on making them
    again, and the ratio tells the truth about the behaviour policy. That engine and learner agree
    is checked on the first mini-batch after a hand-over, if all its batch is of the version that
    was handed over.

    State: the models, beta, the version, whether the actor has moved since it was published, and
    the count of steps (which orders the mini-batches).

    Args:
        actor: the policy.
        critic: the value model, or ``None`` for algorithms without one.
        config: of the run.
        reward_weights: factor of each reward source, by name.
        snapshots: the models, of ``actor`` and ``critic``, whose weights are copied when they are
            published. Needed for one that is generated or scored with while training goes on.
        passes: makes the passes of mini-batches; without one they are made in this process.

    Raises:
        LearnerError: ``snapshots`` names another model.
    """

    def __init__(
        self,
        actor: Trained,
        critic: Trained | None,
        config: Config,
        reward_weights: Mapping[str, float],
        *,
        snapshots: Collection[str] = (),
        passes: Passes | None = None,
    ) -> None:
        self._actor, self._critic, self._config = actor, critic, config
        self._trained = {"actor": actor} | ({"critic": critic} if critic else {})
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
        self._losses = Losses(a, config.rollout.temperature)
        self._passes = passes or LocalPasses(
            actor.model, critic.model if critic else None, self._head, self._losses, self._budget
        )
        self._kl = AdaptiveKL(a.kl_coef, a.kl_target, a.kl_horizon)
        self._version, self._steps, self._moved = 0, 0, False

    def train(self, batch: Batch) -> dict[str, float]:
        """Take one step.

        Raises:
            LearnerError: the batch is too small for its mini-batches, its numbers are not finite,
                or engine and learner disagree about on-policy data.
        """
        data = collate(batch, self._reward_weights)
        age = staleness(batch, self._version)
        on_policy = age["staleness/off_policy_tokens"] == 0
        proximal = None
        if self._config.algorithm.old_policy == "proximal":
            proximal = self._logprobs(batch, data.mask)
        experience = self._prepare(data, proximal)
        if proximal is not None and on_policy and not self._moved:
            self._check_ratio((proximal - data.logprobs)[data.mask].square().mean().item())
        tally, norms = Tally(), dict.fromkeys(self._trained, 0.0)
        lr = {"lr": self._actor.lr} | ({"critic/lr": self._critic.lr} if self._critic else {})
        parts = list(self._minibatches(len(batch), experience.units))
        for units in parts:
            check_ratio = on_policy and not self._moved
            tally += self._train_minibatch(batch, units, experience, norms, check_ratio)
        t = self._config.training
        for _ in range(t.epochs * t.minibatches - len(parts)):
            self._actor.skip()  # fewer units than mini-batches: the schedule counts those planned
        figures = self._passes.finish()
        self._steps += 1
        thawed = self._steps > self._config.critic.freeze_steps
        if thawed and "objective/kl" in experience.stats:
            self._kl.update(experience.stats["objective/kl"], len(batch))
        names = {"actor": "policy", "critic": "critic"}
        return {
            **describe(batch),
            **age,
            **experience.stats,
            **_averages(tally, len(parts)),
            **figures,
            **{f"{names[m]}/grad_norm": norm / max(len(parts), 1) for m, norm in norms.items()},
            **lr,
        }

    def publish(self) -> dict[str, Weights]:
        """The next version of ``actor`` and, where there is one, ``critic``.

        The fingerprint is of all parameters of a model, frozen ones too: so under LoRA it proves
        that the adapters have come to lie on the same weights. Tensors travel for ``snapshots``
        alone, and of these only what is trained; otherwise both sides share the module.
        """
        self._version, self._moved = self._version + 1, False
        return {name: self._publish(name, trained) for name, trained in self._trained.items()}

    def _publish(self, name: str, trained: Trained) -> Weights:
        # The fingerprint comes last, as it waits for the device: then the copies are there too.
        tensors = trained.snapshot() if name in self._snapshots else None
        return Weights(self._version, fingerprint(trained.model.named_parameters()), tensors)

    def state_dict(self) -> dict[str, Any]:
        """See the class."""
        return {
            "models": {name: trained.state_dict() for name, trained in self._trained.items()},
            "kl": self._kl.state_dict(),
            "version": self._version,
            "steps": self._steps,
            "moved": self._moved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for name, trained in self._trained.items():
            trained.load_state_dict(state["models"][name])
        self._kl.load_state_dict(state["kl"])
        self._version, self._steps = state["version"], state["steps"]
        self._moved = state["moved"]

    def _prepare(self, data: Scored, proximal: Tensor | None) -> Experience:
        c = self._config
        return prepare(data, c.algorithm, c.reward, self._kl.coef, proximal)

    @torch.no_grad()
    def _logprobs(self, batch: Batch, mask: Tensor) -> Tensor:
        """Log-probs [B, T] of the policy as it is now."""
        logprobs = torch.zeros(mask.shape)
        for rows in microbatches(batch, self._budget):
            rollouts = [batch[row] for row in rows]
            hidden = response_hidden(self._actor.model, rollouts)
            targets = response_tokens(rollouts, hidden.device)
            here = mask[rows].to(hidden.device)
            chosen, _ = self._losses.logprobs(self._head, hidden, targets, here)
            logprobs[rows] = chosen.float().cpu()
        return logprobs

    def _minibatches(
        self, size: int, units: Sequence[Sequence[int]]
    ) -> Iterator[list[Sequence[int]]]:
        """Units of each mini-batch, shuffled anew for every epoch.

        With dropped responses they may not divide evenly: parts then differ by one unit. Where
        units are fewer than mini-batches, each makes one; no unit, as when all scores of an
        algorithm of pairs are equal, makes no update.
        """
        count = self._config.training.minibatches
        if size < count:
            raise LearnerError(
                f"{size} responses were left of the batch, fewer than training.minibatches = "
                f"{count}; see why responses were dropped, or lower minibatches"
            )
        order = torch.Generator().manual_seed((self._config.seed * 1_000_003 + self._steps) % 2**63)
        for _ in range(self._config.training.epochs if units else 0):
            shuffled = torch.randperm(len(units), generator=order)
            for part in shuffled.tensor_split(min(count, len(units))):
                yield [units[int(i)] for i in part]

    def _train_minibatch(
        self,
        batch: Batch,
        units: Sequence[Sequence[int]],
        experience: Experience,
        norms: dict[str, float],
        check_ratio: bool,
    ) -> Tally:
        parts = self._microbatches(batch, units, experience)
        thawed = self._steps >= self._config.critic.freeze_steps
        tallies = self._passes.run(parts, self._kl.coef, trains_actor=thawed)
        if self._critic:
            norms["critic"] += self._critic.update()
        if thawed:
            if check_ratio:
                self._check_ratio(2 * tallies["actor"].sums["policy/approxkl_avg"].item())
            norms["actor"] += self._actor.update()
            self._moved = True
        return sum(tallies.values(), Tally())

    def _microbatches(
        self, batch: Batch, units: Sequence[Sequence[int]], experience: Experience
    ) -> list[MicroBatch]:
        """Split a mini-batch as the passes ask, units whole; weights count over all of it."""
        e, a = experience, self._config.algorithm
        rows = [row for unit in units for row in unit]
        place = {row: i for i, row in enumerate(rows)}
        mask = e.mask[rows]
        weights = token_weights(mask, a.averaging, self._config.rollout.max_new_tokens)
        means, of_responses = token_weights(mask, "token_mean"), response_weights(mask)
        longest = [max(batch[row].total_tokens for row in unit) * len(unit) for unit in units]
        parts = []
        for chosen in self._passes.divide(longest):
            rows = [row for i in chosen for row in units[i]]
            at = [place[row] for row in rows]
            part = Part(
                mask=e.mask[rows],
                weights=weights[at],
                means=means[at],
                response_weights=of_responses[at],
                advantages=e.advantages[rows],
                old_logprobs=e.old_logprobs[rows],
                ref_logprobs=None if e.ref_logprobs is None else e.ref_logprobs[rows],
                returns=None if e.returns is None else e.returns[rows],
                old_values=None if e.old_values is None else e.old_values[rows],
            )
            parts.append(MicroBatch([batch[row] for row in rows], part))
        return parts

    def _check_ratio(self, mean_square: float) -> None:
        """Refuse on-policy data whose log ratios are not 0 within rounding."""
        rms = math.sqrt(mean_square)
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
    whole = Tally({k: v / max(parts, 1) for k, v in tally.sums.items()}, tally.minima, tally.maxima)
    return whole.floats()
