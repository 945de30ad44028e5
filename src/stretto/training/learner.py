"""The learner: one training step on a batch of scored rollouts, with any of the algorithms.

Shapes: B responses and T tokens of a batch; b, T of a micro-batch; N response tokens, flattened.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stretto.algorithms.experience import Experience
from stretto.algorithms.kl import AdaptiveKL
from stretto.algorithms.policy import ESS, SQUARES, SUM, TOKENS, with_effective_sample_size
from stretto.algorithms.reductions import Metrics
from stretto.algorithms.registry import prepare
from stretto.config import Config
from stretto.errors import LearnerError, nearest
from stretto.stateful import Stateful
from stretto.training.accumulation import Accumulated, divided_sums
from stretto.training.agreement import Agreement, differences, is_coarse
from stretto.training.backprop import Backprop
from stretto.training.collate import collate, describe, staleness
from stretto.training.losses import MicroBatch
from stretto.training.trained import TrainedModel
from stretto.types import FloatArray, Response, TrainBatch, TrainStepOutput, WeightsRef
from stretto.weights.channel import SharedChannel

_LR = {"actor": "lr", "critic": "critic/lr"}
_NORM = {"actor": "policy/grad_norm", "critic": "critic/grad_norm"}
"""Metric names, by model."""


@dataclass(eq=False)
class PolicyLearner(Stateful):
    """Trains and publishes the actor, and the critic if there is one.

    - The old log-probabilities are the engine's, from the distribution it sampled.
    - If a step is one update and the settings say so, they are those of the policy under training
      at that update. Neither choice costs a forward pass.
    - Proximal log-probs of a step of several updates cost one.
    - With ``schedule.train_on = 'group'``, passes of the first update may precede the step.
    - Before the actor moves from the synced version, engine and learner are checked to agree, on
      responses sampled entirely by that version (:class:`Agreement`).

    ``reward_weights`` are by source. Models named in ``snapshots`` are copied when they are
    published, as is needed if they generate or score during training. The channel, by default one
    in this process, carries the copies to the roles that follow. Raises LearnerError if there is no
    such model.
    """

    saved = ("_kl", "_version", "_steps", "_moved", "_agreement")

    actor: TrainedModel
    critic: TrainedModel | None
    backprop: Backprop
    config: Config
    reward_weights: Mapping[str, float]
    snapshots: Collection[str] = ()
    channel: SharedChannel = field(default_factory=SharedChannel)

    def __post_init__(self) -> None:
        self.trained: Mapping[str, TrainedModel] = {"actor": self.actor}
        if self.critic:
            self.trained = {"actor": self.actor, "critic": self.critic}
        for name in self.snapshots:
            if name not in self.trained:
                raise LearnerError(
                    f"snapshots are taken of trained models; got '{name}'. "
                    f"{nearest(name, self.trained)}",
                    "unknown-model",
                )
        a = self.config.algorithm
        self._kl = AdaptiveKL(a.beta, a.kl_target, a.kl_horizon)
        exact, tolerance = self.config.training.match_engine, self.config.training.ratio_tolerance
        self._agreement = Agreement(self.actor.dtype, tolerance, exact=exact)
        self._coarse = is_coarse(self.actor.dtype) and not exact
        self._version = 0
        self._steps = 0
        self._moved = False
        self._accumulated = Accumulated()

    @property
    def device(self) -> torch.device:
        return self.actor.device

    def accumulate(self, batch: TrainBatch) -> None:
        """Add the gradients of complete groups, before the rest of their step's batch is known.
        They are only used if the batch holds the groups as they are here.
        """
        responses, experience = batch.responses(), self.experience_of(batch)
        units = experience.units
        self._accumulated.add(batch, self._passes(responses, units, experience, counted=False))

    def train(self, batch: TrainBatch) -> TrainStepOutput:
        """Take one step. Raises LearnerError if the batch is too small for its mini-batches,
        contains non-finite numbers, or engine and learner disagree about on-policy data.
        """
        t, responses = self.config.training, batch.responses()
        age = staleness(batch, self._version)
        experience = self.experience_of(batch)
        metrics, norms = Metrics(), dict.fromkeys(self.trained, 0.0)
        lr = {_LR[name]: model.lr for name, model in self.trained.items()}
        minibatches = list(self.minibatches(len(batch), experience.units))
        accumulated, self._accumulated = self._accumulated, Accumulated()
        if accumulated and not accumulated.fit(batch):
            self.actor.discard()
            accumulated = Accumulated()
        for i, units in enumerate(minibatches):
            if accumulated and i == 0:
                rest = accumulated.others(batch, units)
                sums = accumulated.sums + self._passes(responses, rest, experience, counted=False)
                factor, result = divided_sums(sums, experience, self.config.algorithm)
                self.actor.scale_gradients(factor)
            else:
                result = self._passes(responses, units, experience)
            metrics += self._update(result, norms)
        for _ in range(t.updates - len(minibatches)):
            # With fewer units than mini-batches, advance the schedules as if all updates had run.
            for name in self._updated:
                self.trained[name].skip()
        of_passes = self.backprop.finish()
        self._steps += 1
        thawed = self._steps > self.config.critic.freeze_steps
        if thawed and "objective/kl" in experience.stats:
            self._kl.update(experience.stats["objective/kl"], batch.response_count)
        updates = max(len(minibatches), 1)
        # Means over mini-batches of means within one. Sums of the disagreement exist in one only.
        once = (SUM, SQUARES, TOKENS)
        means = {k: v / updates for k, v in metrics.sums.items() if k not in once}
        stats = {
            **describe(batch),
            **age,
            **experience.stats,
            **Metrics(means, metrics.minima, metrics.maxima).floats(),
            **differences(metrics),
            **of_passes,
            **{_NORM[model]: norm / updates for model, norm in norms.items()},
            **lr,
        }
        return TrainStepOutput(stats, experience.rewards.numpy())

    @property
    def _updated(self) -> list[str]:
        """The models that this step updates. Excludes the actor during ``critic.freeze_steps``."""
        frozen = self._steps < self.config.critic.freeze_steps
        return [name for name in self.trained if name != "actor" or not frozen]

    def publish(self) -> dict[str, WeightsRef]:
        """Publish the next version of ``actor`` and, if there is one, ``critic``. Fingerprints
        cover all parameters including frozen ones, so that under LoRA they also prove that the
        adapters are applied to the same base weights. Only tensors of models in ``snapshots``
        travel, and only trained ones.
        """
        self._version, self._moved = self._version + 1, False
        return self.offer()

    def offer(self) -> dict[str, WeightsRef]:
        """Offer the current weights under the version that was published last."""
        refs = {}
        for name, trained in self.trained.items():
            # Fingerprint last: it waits for the device, so the copies are complete too.
            tensors = trained.snapshot() if name in self.snapshots else None
            mark = trained.fingerprint()
            sums = trained.sums() if self.config.observe.flight else {}
            channel = self.channel.name if tensors is not None else ""
            refs[name] = WeightsRef(name, self._version, mark, channel, sums)
            if tensors is not None:
                self.channel.put(refs[name], tensors)
        return refs

    def logprobs(self, responses: Sequence[Response]) -> FloatArray:
        mask = torch.ones(len(responses), len(responses[0]), dtype=torch.bool)
        return self._logprobs(responses, mask).numpy()

    def _logprobs(self, responses: Sequence[Response], mask: Tensor) -> Tensor:
        temperature, budget = self.config.rollout.temperature, self.config.training
        return self.actor.logprobs(responses, mask, temperature, budget.microbatch_tokens)

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the trained weights, by model and name. If ranks hold parts of them,
        this is a collective and only the first rank gets the weights.
        """
        trained = self.trained.items()
        return {name: dict(model.gathered(model.snapshot())) for name, model in trained}

    def state_dict(self) -> dict[str, Any]:
        """Return models, beta, version and counts, with tensors or this rank's pieces."""
        return {
            "models": {name: trained.state_dict() for name, trained in self.trained.items()},
            **super().state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the full learner; see :mod:`stretto.training.shard_files`."""
        for name, trained in self.trained.items():
            trained.load_state_dict(state["models"][name])
        super().load_state_dict(state)

    def experience_of(self, batch: TrainBatch) -> Experience:
        """Return a batch's loss inputs, computed with the current actor and beta. ``fresh`` marks
        the responses sampled entirely by the weights of the last sync.
        """
        c, proximal = self.config, None
        data = collate(batch, self.reward_weights)
        if c.algorithm.old_policy == "proximal" and c.training.updates > 1:
            proximal = self._logprobs(batch.responses(), data.mask)
        experience = prepare(data, c.algorithm, c.reward, self._kl.coef, proximal)
        versions = batch.split_sampled(batch.versions)
        fresh = torch.tensor([bool((row == self._version).all()) for row in versions])
        return replace(experience, fresh=fresh)

    def minibatches(
        self, size: int, units: Sequence[Sequence[int]]
    ) -> Iterator[list[Sequence[int]]]:
        """Yield the units of each mini-batch, reshuffled every epoch. Units may not divide evenly
        after responses were dropped: parts then differ by one unit. With fewer units than
        mini-batches, each unit is a mini-batch. Without units there is no update.
        """
        count = self.config.training.minibatches
        if size < count:
            raise LearnerError(
                f"{size} responses were left of the batch, fewer than training.minibatches = "
                f"{count}; see why responses were dropped, or lower minibatches",
                "fewer-responses-than-minibatches",
            )
        order = torch.Generator().manual_seed((self.config.seed * 1_000_003 + self._steps) % 2**63)
        for _ in range(self.config.training.epochs if units else 0):
            shuffled = torch.randperm(len(units), generator=order)
            for part in shuffled.tensor_split(min(count, len(units))):
                yield [units[int(i)] for i in part]

    def _passes(
        self,
        responses: Sequence[Response],
        units: Sequence[Sequence[int]],
        experience: Experience,
        *,
        counted: bool = True,
    ) -> Metrics:
        """Add the gradients of units. Those that are not ``counted``, and their metrics, are to be
        completed by :func:`divided_sums`.
        """
        if not units:
            return Metrics()
        batches = self.microbatches(responses, units, experience, counted=counted)
        thawed = "actor" in self._updated
        by_model = self.backprop.run(batches, self._kl.coef, trains_actor=thawed)
        return sum(by_model.values(), Metrics())

    def _update(self, metrics: Metrics, norms: dict[str, float]) -> Metrics:
        if self.critic:
            norms["critic"] += self.critic.update()
        metrics = with_effective_sample_size(metrics)
        if "actor" in self._updated:
            self._agreement.check(metrics)
            norms["actor"] += self.actor.update(scale=self._step_scale(metrics))
            self._moved = True
        return metrics

    def _step_scale(self, metrics: Metrics) -> float:
        """The factor of the actor's learning rate, by ``algorithm.ess_scaling`` (VCPO, Huang et al.
        2026)."""
        scaling = self.config.algorithm.ess_scaling
        if scaling == "off":
            return 1.0
        share = metrics.sums[ESS].item()
        return math.sqrt(share) if scaling == "sqrt" else share

    def microbatches(
        self,
        responses: Sequence[Response],
        units: Sequence[Sequence[int]],
        experience: Experience,
        *,
        counted: bool = True,
    ) -> list[MicroBatch]:
        """Split a mini-batch as the backprop asks, keeping units together. Loss weights count over
        the full mini-batch, if ``counted``.
        """
        rows = [row for unit in units for row in unit]
        place = {row: i for i, row in enumerate(rows)}
        c = self.config
        inputs = experience.pick(rows).weighted(
            c.algorithm.averaging, c.rollout.max_new_tokens, counted=counted
        )
        assert inputs.fresh is not None
        fresh = torch.zeros_like(inputs.fresh) if self._moved else inputs.fresh
        inputs = replace(inputs, fresh=fresh, own=self._own(fresh))
        if experience.apart:
            units = [(row,) for row in rows]
        tokens = [max(responses[row].total_tokens for row in unit) * len(unit) for unit in units]
        batches = []
        for indices in self.backprop.divide(tokens):
            rows = [row for i in indices for row in units[i]]
            part = inputs.pick([place[row] for row in rows])
            batches.append(MicroBatch.of([responses[row] for row in rows], part))
        return batches

    def _own(self, fresh: Tensor) -> Tensor | None:
        """Mark the rows whose old policy is the current actor. ``None`` means no row. Under
        ``auto``, responses of older weights keep the policy that sampled them.
        """
        old_policy = self.config.algorithm.old_policy
        if self.config.training.updates > 1 or old_policy == "behaviour":
            return None
        if old_policy == "proximal":
            return torch.ones_like(fresh)
        return fresh if self._coarse else None
