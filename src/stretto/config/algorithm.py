"""Settings of the losses, and what each loss needs of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import model_validator

from stretto.config.base import Fraction, NonNegative, Positive, PositiveInt, Section

AlgorithmName = Literal["ppo", "rloo", "proximal-rloo", "copg", "grpo", "online-dpo", "best-of-n"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class Traits:
    """What an algorithm needs, and what its settings mean where they say 'auto'.

    Attributes:
        critic: whether it learns a value model.
        group: responses to one prompt that it takes at the least.
        kl_in: where the KL to the reference enters; ``implicit``: its loss is made of it.
        aggregation: how per-token losses become one; ``None`` for losses of whole responses.
        corrects: whether its loss can carry importance weights.
        per_group: what it trains on is one pair, or one response, of each group.
    """

    critic: bool = False
    group: int = 2
    kl_in: Literal["reward", "loss", "implicit"] = "reward"
    aggregation: Aggregation | None = "sequence_sum"
    corrects: bool = True
    per_group: bool = False


TRAITS: Mapping[AlgorithmName, Traits] = {
    "ppo": Traits(critic=True, group=1, aggregation="token_mean"),
    "rloo": Traits(),
    "proximal-rloo": Traits(aggregation=None),
    "copg": Traits(),
    "grpo": Traits(kl_in="loss", aggregation="sequence_mean"),
    "online-dpo": Traits(kl_in="implicit", aggregation=None, corrects=False, per_group=True),
    "best-of-n": Traits(aggregation="token_mean", corrects=False, per_group=True),
}
"""By name. docs/algorithms.md has the equations and the papers."""

_PPO: frozenset[AlgorithmName] = frozenset({"ppo"})
_CLIPPED: frozenset[AlgorithmName] = frozenset({"ppo", "grpo", "proximal-rloo"})

ONLY: Mapping[str, frozenset[AlgorithmName]] = {
    "algorithm.gamma": _PPO,
    "algorithm.lam": _PPO,
    "algorithm.value_clip": _PPO,
    "algorithm.whiten_advantages": _PPO,
    "algorithm.whiten_rewards": _PPO,
    "critic.init": _PPO,
    "training.critic_lr": _PPO,
    "algorithm.clip": _CLIPPED,
    "algorithm.clip_high": _CLIPPED,
    "algorithm.group_std": frozenset({"grpo"}),
}
"""Settings that some algorithms alone look at."""


class AlgorithmConfig(Section):
    """What is learned: the loss, its advantages, and how far it may go from the reference."""

    name: AlgorithmName = "ppo"
    """The loss. All but ppo compare the responses to one prompt and need rollout.samples_per_prompt of at least 2."""
    gamma: Fraction = 1.0
    """Discount of future rewards (ppo)."""
    lam: Fraction = 0.95
    """GAE's lambda (ppo)."""
    clip: Positive = 0.2
    """The policy ratio counts between 1 - clip and 1 + clip (ppo, grpo; proximal-rloo: the ratio of whole responses)."""
    clip_high: NonNegative = 0.0
    """Upper end of that range, 1 + clip_high, where it is to differ (DAPO's clip-higher); 0 takes clip."""
    value_clip: NonNegative = 0.2
    """Values count within this distance of the old ones; 0 is off (ppo)."""
    kl_coef: NonNegative = 0.05
    """beta: weight of the KL to the reference; 0 leaves the reference out. online-dpo: the beta of its loss."""
    kl_in: Literal["auto", "reward", "loss"] = "auto"
    """Where the KL enters: taken off the reward, token by token, or a term of the loss. auto: loss for grpo, else reward. online-dpo has it in its loss already."""
    kl_estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
    """k1 = log ratio, k2 = its square / 2, k3 = 1 / ratio - 1 + log ratio (Schulman 2020). auto: k1 in the reward; k3 in the loss, where k1's gradient has mean zero."""
    kl_target: NonNegative = 0.0
    """Adapt beta towards this KL (nats a response); 0 keeps beta fixed."""
    kl_horizon: PositiveInt = 10_000
    """Responses over which the adaptive beta moves."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    whiten_advantages: bool = True
    """Bring advantages to mean 0 and variance 1 over the batch's response tokens (ppo)."""
    whiten_rewards: bool = False
    """Bring per-token rewards to variance 1, keeping their mean (ppo)."""
    group_std: bool = True
    """Divide advantages by the standard deviation of their group's rewards (grpo); Dr. GRPO does not."""
    aggregation: Literal["auto", "token_mean", "sequence_mean", "sequence_sum", "fixed_length"] = (
        "auto"
    )
    """Average over all tokens; over each response, then over responses; sum over a response; or divide that sum by rollout.max_new_tokens (Dr. GRPO). auto: token_mean for ppo and best-of-n, sequence_mean for grpo, else sequence_sum."""
    old_policy: Literal["auto", "behaviour", "proximal"] = "auto"
    """The policy that ratios are taken to. behaviour: the one that sampled, token by token, with the engine's log-probs. proximal: the learner's own before the step (decoupled PPO; a forward pass more where a step is several updates). auto: behaviour, but in bfloat16 and where a step is one update, responses of the learner's present weights take the learner's own log-probs, which are free and make their ratio 1."""
    correction: Literal["off", "truncate", "mask"] = "off"
    """Importance weights, proximal over behaviour policy, on the advantages: cut off at correction_cap, or 0 outside 1 / cap to cap. Needs old_policy = proximal."""
    correction_level: Literal["token", "sequence"] = "token"
    """Importance weights of single tokens or of whole responses."""
    correction_cap: Positive = 2.0
    """Largest importance weight."""

    @property
    def traits(self) -> Traits:
        """What the algorithm needs."""
        return TRAITS[self.name]

    @property
    def kl_place(self) -> Literal["reward", "loss", "implicit"]:
        """Where the KL enters."""
        return self.traits.kl_in if self.kl_in == "auto" else self.kl_in

    @property
    def estimator(self) -> Estimator:
        """The KL's estimator."""
        if self.kl_estimator != "auto":
            return self.kl_estimator
        return "k3" if self.kl_place == "loss" else "k1"

    @property
    def averaging(self) -> Aggregation:
        """How per-token losses become one; for losses of whole responses, how the entropy does."""
        if self.aggregation != "auto":
            return self.aggregation
        return self.traits.aggregation or "sequence_mean"

    @property
    def has_reference(self) -> bool:
        """Whether the reference is loaded and scores."""
        return self.kl_coef > 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        traits = self.traits
        if self.kl_target and not self.kl_coef:
            raise ValueError(
                "algorithm.kl_target adapts kl_coef, which is 0; give kl_coef a starting value"
            )
        if self.correction != "off" and self.old_policy != "proximal":
            raise ValueError(
                f"algorithm.correction = '{self.correction}' weighs the learner's policy before the "
                f"step against the one that sampled, and old_policy = '{self.old_policy}' takes them "
                "for the same; set algorithm.old_policy = 'proximal'"
            )
        if self.correction_cap < 1:
            raise ValueError(
                f"algorithm.correction_cap = {self.correction_cap} would weigh down on-policy data, "
                "whose importance weights are 1; choose 1 or more"
            )
        if not traits.corrects and self.old_policy == "proximal":
            raise ValueError(
                f"algorithm.old_policy = 'proximal' has no effect on '{self.name}', whose loss has "
                "no ratio to an old policy; leave old_policy and correction out"
            )
        if traits.aggregation is None:
            self._check_whole_responses()
        if traits.kl_in == "implicit":
            self._check_implicit_kl()
        return self

    def _check_whole_responses(self) -> None:
        if self.aggregation != "auto":
            raise ValueError(
                f"algorithm.aggregation = '{self.aggregation}' averages losses of tokens, and "
                f"'{self.name}' has a loss of whole responses; leave aggregation out"
            )
        if self.correction != "off" and self.correction_level == "token":
            raise ValueError(
                f"'{self.name}' has a loss of whole responses, which importance weights of tokens "
                "do not fit; set algorithm.correction_level = 'sequence'"
            )

    def _check_implicit_kl(self) -> None:
        if not self.kl_coef:
            raise ValueError(
                f"algorithm.kl_coef is the beta of '{self.name}' and must be above 0; "
                "the papers use 0.03 to 0.1"
            )
        if self.kl_in != "auto" or self.kl_target:
            raise ValueError(
                f"the loss of '{self.name}' is made of the KL to the reference, with beta = "
                "kl_coef; leave algorithm.kl_in and kl_target out"
            )
