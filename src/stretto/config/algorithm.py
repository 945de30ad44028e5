"""Algorithms with their requirements, and settings of the losses. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stretto import outside
from stretto.config.sections import (
    Fraction,
    NonNegative,
    Positive,
    PositiveInt,
    Rules,
    Section,
    one_of,
)

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
"""Reductions of token losses: :func:`~stretto.algorithms.reductions.token_weights`."""
Estimator = Literal["k1", "k2", "k3"]
"""Estimators of the KL from samples: :func:`~stretto.algorithms.kl.kl_estimate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """Requirements and settings of an algorithm.

    Attributes:
        settings: dotted names of the settings that this algorithm reads and some others do not.
        critic: whether it trains a value model.
        group: minimum number of responses per prompt.
        kl_in: where the KL to the reference enters. ``implicit``: its loss consists of it.
        aggregation: reduction of token losses for 'auto'. ``None`` for losses of full responses.
        ratio: whether the gradient of its loss depends on the old policy.
        corrects: whether its loss supports importance weights.
        per_group: whether it trains on one pair, or on one response, of each group.
        teacher: whether its KL is to a teacher, with weight 1, instead of the reference.
    """

    settings: Sequence[str] = ()
    critic: bool = False
    group: int = 2
    kl_in: Literal["reward", "loss", "implicit"] = "reward"
    aggregation: Aggregation | None = "sequence_sum"
    ratio: bool = False
    corrects: bool = True
    per_group: bool = False
    teacher: bool = False


_CLIP = ("algorithm.clip", "algorithm.clip_high")
_GROUPED = (
    "algorithm.scale_rewards",
    "algorithm.importance_sampling_level",
    "algorithm.multi_objective_aggregation",
)
_VALUES = ("algorithm.gamma", "algorithm.lam", "algorithm.value_clip")
_WHITENING = ("algorithm.whiten_advantages", "algorithm.whiten_rewards")
_CRITIC = ("critic.init", "training.critic_lr")

TEACHER = "teacher"
"""The teacher's role and the name of its scores."""

ALGORITHMS: Mapping[str, AlgorithmSpec] = {
    "ppo": AlgorithmSpec(
        settings=(*_VALUES, *_WHITENING, *_CRITIC, *_CLIP, "algorithm.dual_clip"),
        critic=True,
        group=1,
        aggregation="token_mean",
        ratio=True,
    ),
    "rloo": AlgorithmSpec(settings=("algorithm.baseline",)),
    "proximal-rloo": AlgorithmSpec(settings=_CLIP, aggregation=None, ratio=True),
    "copg": AlgorithmSpec(settings=("algorithm.baseline",)),
    "grpo": AlgorithmSpec(
        settings=(*_CLIP, *_GROUPED, "algorithm.dual_clip"),
        kl_in="loss",
        aggregation="sequence_mean",
        ratio=True,
    ),
    "cispo": AlgorithmSpec(
        settings=(*_CLIP, *_GROUPED), kl_in="loss", aggregation="token_mean", ratio=True
    ),
    "online-dpo": AlgorithmSpec(kl_in="implicit", aggregation=None, corrects=False, per_group=True),
    "distill": AlgorithmSpec(
        settings=(
            *_CLIP,
            "algorithm.dual_clip",
            "algorithm.teacher",
            "algorithm.teachers",
            "algorithm.reward_coef",
            "algorithm.scale_rewards",
        ),
        group=1,
        kl_in="implicit",
        aggregation="token_mean",
        ratio=True,
        teacher=True,
    ),
    "best-of-n": AlgorithmSpec(aggregation="token_mean", corrects=False, per_group=True),
}
"""All algorithms, in the order of the help."""


class AlgorithmConfig(Section):
    """The algorithm: its loss, its advantages, and the KL between actor and reference."""

    name: one_of(*ALGORITHMS) = "ppo"  # type: ignore[valid-type]
    """The loss (docs/algorithms.md). 'file.py:name' or 'package.module:name' is an algorithm of
    your own."""
    teacher: str = ""
    """Model whose log-probabilities the policy learns: a folder or a hub name. It reads the
    policy's own responses, with another tokenizer than the actor's as text."""
    teachers: dict[str, str] = {}
    """Several such models by name, in place of one. Each reads the responses to the prompts whose
    column 'teacher' (task.columns) has its name."""
    reward_coef: NonNegative = 0.0
    """Weight of the advantages of rewards, compared within the group, beside the teacher's. 0: the
    rewards are only measured."""
    gamma: Fraction = 1.0
    """Discount of future rewards."""
    lam: Fraction = 0.95
    """GAE's lambda."""
    clip: Positive = 0.2
    """Clip the policy ratio to the range from 1 - clip to 1 + clip. Losses of full responses clip
    the ratio of full responses."""
    clip_high: NonNegative = 0.0
    """Upper end of that range, 1 + clip_high, if different from 1 + clip (DAPO's clip-higher); 0
    takes clip."""
    dual_clip: NonNegative = 0.0
    """Largest policy ratio for negative advantages (dual-clip PPO: verl's clip_ratio_c, TRL's
    delta), above 1 + clip_high; 0 is off."""
    value_clip: NonNegative = 0.2
    """Clip values to this distance from the old ones; 0 is off."""
    kl_coef: NonNegative = 0.05
    """beta: weight of the KL to the reference; 0 disables the reference. In losses that consist of
    the KL, their beta."""
    kl_in: Literal["auto", "reward", "loss"] = "auto"
    """Place of the KL. reward: subtracted from the reward of each token. loss: a term of the loss.
    auto: the algorithm's own (for some, the loss consists of the KL)."""
    kl_estimator: Literal["auto", Estimator] = "auto"
    """k1 = log ratio, k2 = its square / 2, k3 = 1 / ratio - 1 + log ratio (Schulman 2020). auto: k1
    in the reward, k3 in the loss, because k1's gradient has mean zero there."""
    use_bias_correction_kl: bool = False
    """Multiply the KL in the loss by the policy ratio, which makes its gradient unbiased
    (DeepSeek-V3.2)."""
    kl_target: NonNegative = 0.0
    """Adapt beta towards this KL (nats a response); 0 keeps beta fixed."""
    kl_horizon: PositiveInt = 10_000
    """Number of responses over which beta adapts."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    entropy_aggregation: Literal["auto", "token_mean"] = "auto"
    """Averaging of the entropy bonus. auto: like the policy loss (verl). token_mean: over all
    tokens, whatever the loss averages (TRL)."""
    whiten_advantages: bool = True
    """Normalise advantages to mean 0 and variance 1 over the batch's response tokens."""
    whiten_rewards: bool = False
    """Scale per-token rewards to variance 1, keeping their mean."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the rewards in their group or batch. none: Dr.
    GRPO."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = (
        "sum_then_normalize"
    )
    """How several reward sources become advantages. sum_then_normalize: compare their weighted sum
    within the group. normalize_then_sum: normalise each source in its group, and then their
    weighted sum over the batch (GDPO)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Policy ratios of tokens, or of responses: the geometric mean of their tokens' ratios
    (GSPO)."""
    mask_truncated_completions: bool = False
    """Exclude responses that hit the token limit from the losses and their means. They still count
    in their group's mean reward."""
    aggregation: Literal["auto", Aggregation] = "auto"
    """Aggregation of per-token losses. token_mean: mean over all tokens. sequence_mean: mean over
    each response, then over responses. sequence_sum: sum over each response, then mean over
    responses. fixed_length: that sum divided by rollout.max_new_tokens (Dr. GRPO). auto: the
    algorithm's own."""
    old_policy: Literal["auto", "behaviour", "proximal"] = "auto"
    """The old policy of the ratios. behaviour: the one that sampled each token, with the engine's
    log-probs. proximal: the learner's own before the step (decoupled PPO; an additional forward
    pass if a step has several updates). auto: behaviour, but in bfloat16 with one update per step,
    responses of the learner's current weights take the learner's own log-probs, which are free and
    make their ratio 1."""
    correction: Literal["off", "truncate", "mask"] = "off"
    """Importance weights, proximal over behaviour policy, on the advantages: cut off at
    correction_cap, or 0 outside 1 / cap to cap. Needs old_policy = proximal."""
    correction_level: Literal["token", "sequence"] = "token"
    """Importance weights of tokens or of full responses."""
    correction_cap: Positive = 2.0
    """Largest importance weight."""
    ess_scaling: Literal["off", "sqrt", "linear"] = "off"
    """Multiply the actor's learning rate in each update by the effective sample size of the
    responses' importance weights, as a share of the responses (staleness/ess), or by its square
    root (VCPO: sqrt)."""
    baseline: Literal["mean", "optimal"] = "mean"
    """Baseline that advantages subtract from rewards. mean: the mean reward of the group's other
    responses. optimal: the mean reward of the group, each weighted by the squared norm of its
    response's gradient, which gives the gradient its least variance (VCPO). Each response is a
    micro-batch of its own, and the learner holds two more copies of the gradients."""

    @property
    def is_outside(self) -> bool:
        """Whether the name is an import path instead of one of ALGORITHMS."""
        return self.name not in ALGORITHMS

    @property
    def definition(self) -> AlgorithmSpec:
        """The algorithm's requirements. Imports the user's own code, and with it torch."""
        if self.is_outside:
            algorithm: AlgorithmSpec = outside.load(self.name, "algorithm.name", AlgorithmSpec)
            return algorithm
        return ALGORITHMS[self.name]

    @property
    def kl_place(self) -> Literal["reward", "loss", "implicit"]:
        return self.definition.kl_in if self.kl_in == "auto" else self.kl_in

    @property
    def normalizes_sources(self) -> bool:
        return self.multi_objective_aggregation == "normalize_then_sum"

    @property
    def estimator(self) -> Estimator:
        if self.kl_estimator != "auto":
            return self.kl_estimator
        return "k3" if self.kl_place == "loss" else "k1"

    @property
    def averaging(self) -> Aggregation:
        if self.aggregation != "auto":
            return self.aggregation
        return self.definition.aggregation or "sequence_mean"

    @property
    def of_whole_responses(self) -> bool:
        """Whether the loss uses the ratio of a full response (for an episode: of all samples)."""
        levels = self.importance_sampling_level, self.correction != "off" and self.correction_level
        return self.definition.aggregation is None or "sequence" in levels

    @property
    def has_optimal_baseline(self) -> bool:
        return self.baseline == "optimal" and "algorithm.baseline" in self.definition.settings

    @property
    def by_group(self) -> bool:
        """Whether the responses to a prompt determine their part of the gradient, up to the number
        of tokens or responses of the batch.
        """
        scaled = "algorithm.scale_rewards" in self.definition.settings
        of_batch = self.normalizes_sources or (scaled and self.scale_rewards == "batch")
        compares = self.definition.group > 1 and not self.definition.critic
        return compares and not of_batch and not self.is_outside

    @property
    def has_reference(self) -> bool:
        return self.kl_coef > 0 and not self.teacher_models

    @property
    def teacher_models(self) -> dict[str, str]:
        """Names of teachers' models by the names of their scorers."""
        if self.teacher:
            return {TEACHER: self.teacher}
        return {f"{TEACHER}-{name}": model for name, model in self.teachers.items()}

    @property
    def group(self) -> int:
        """Minimum number of responses per prompt."""
        return max(self.definition.group, 2 if self.teacher_models and self.reward_coef else 1)

    @property
    def beta(self) -> float:
        """First weight of the KL to the reference or the teacher."""
        return 1.0 if self.teacher_models else self.kl_coef

    def rules(self, broken: Rules) -> None:
        """Check the settings, except for the user's own algorithm, which must be imported first."""
        if not self.is_outside:
            self.algorithm_rules(broken)

    def algorithm_rules(self, broken: Rules) -> None:
        """Check that the settings of the losses fit each other and the algorithm."""
        algorithm, corrects = self.definition, self.correction != "off"
        broken["kl-target-without-coef"] = (self.kl_target and not self.kl_coef) and (
            "algorithm.kl_target adapts kl_coef, which is 0; give kl_coef a starting value"
        )
        broken["correction-without-proximal"] = (corrects and self.old_policy != "proximal") and (
            f"algorithm.correction = '{self.correction}' weighs the learner's policy against the "
            f"one that sampled, and algorithm.old_policy = '{self.old_policy}' takes them for the "
            "same; set algorithm.old_policy = 'proximal'"
        )
        broken["correction-cap-below-one"] = self.correction_cap < 1 and (
            f"algorithm.correction_cap = {self.correction_cap} would weigh down on-policy data, "
            "whose importance weights are 1; choose 1 or more"
        )
        idle = not algorithm.corrects and self.old_policy == "proximal"
        broken["old-policy-without-ratio"] = idle and (
            f"algorithm.old_policy = 'proximal' has no effect on '{self.name}', whose loss has "
            "no ratio to an old policy; leave old_policy and correction out"
        )
        scales = self.ess_scaling != "off"
        broken["ess-scaling-without-weights"] = (scales and not algorithm.corrects) and (
            f"algorithm.ess_scaling = '{self.ess_scaling}' scales steps by the importance weights "
            f"of responses, and the loss of '{self.name}' is none that such weights fit; leave "
            "ess_scaling out"
        )
        per_source = self.normalizes_sources
        unfit = "algorithm.multi_objective_aggregation" not in algorithm.settings
        broken["sources-apart-without-groups"] = (per_source and unfit) and (
            "algorithm.multi_objective_aggregation = 'normalize_then_sum' is for grpo and cispo, "
            f"and '{self.name}' takes one reward a response; leave it out"
        )
        broken["sources-apart-with-kl"] = (per_source and self.kl_place == "reward") and (
            "algorithm.multi_objective_aggregation = 'normalize_then_sum' makes advantages of the "
            "sources alone, without a KL in the reward; set algorithm.kl_in = 'loss'"
        )
        broken["sources-apart-scaled"] = (per_source and self.scale_rewards != "group") and (
            "algorithm.multi_objective_aggregation = 'normalize_then_sum' divides by deviations of "
            "the group and of the batch; leave out algorithm.scale_rewards = "
            f"'{self.scale_rewards}'"
        )
        per_response = algorithm.aggregation is None
        broken["aggregation-of-responses"] = (per_response and self.aggregation != "auto") and (
            f"algorithm.aggregation = '{self.aggregation}' averages losses of tokens, and "
            f"'{self.name}' has a loss of whole responses; leave aggregation out"
        )
        of_tokens = corrects and self.correction_level == "token"
        broken["token-correction-of-responses"] = (per_response and of_tokens) and (
            f"'{self.name}' has a loss of whole responses, which importance weights of tokens "
            "do not fit; set algorithm.correction_level = 'sequence'"
        )
        low = 1 + (self.clip_high or self.clip)
        broken["dual-clip-inside-clip"] = 0 < self.dual_clip <= low and (
            f"algorithm.dual_clip = {self.dual_clip} lies within the range that ratios are clipped "
            f"to, which ends at {low}; raise it, to 3 for example, or set it to 0"
        )
        self._teacher_rules(broken, algorithm)
        implicit = algorithm.kl_in == "implicit" and not algorithm.teacher
        broken["implicit-kl-without-beta"] = (implicit and not self.kl_coef) and (
            f"algorithm.kl_coef is the beta of '{self.name}'; set it above 0, as 0.03 to 0.1"
        )
        placed = self.kl_in != "auto" or self.kl_target
        broken["implicit-kl-placed"] = (implicit and placed) and (
            f"the loss of '{self.name}' is made of the KL to the reference, with beta = "
            "kl_coef; leave algorithm.kl_in and kl_target out"
        )

    def _teacher_rules(self, broken: Rules, algorithm: AlgorithmSpec) -> None:
        models = self.teacher_models
        broken["teacher-missing"] = (algorithm.teacher and not models) and (
            f"'{self.name}' learns from a teacher, and algorithm.teacher and teachers are empty; "
            "give the folder or hub name of a model with the actor's tokenizer"
        )
        broken["teacher-without-distill"] = (models and not algorithm.teacher) and (
            f"algorithm.{'teacher' if self.teacher else 'teachers'} has no effect on "
            f"'{self.name}'; set algorithm.name = 'distill', or leave the teacher out"
        )
        broken["teacher-and-teachers"] = (self.teacher and self.teachers) and (
            f"algorithm.teacher = '{self.teacher}' reads all responses, and algorithm.teachers "
            "divides them; set one of the two"
        )
        spaced = next((n for n in self.teachers if not n or re.search(r"\s", n)), None)
        broken["teacher-name"] = spaced is not None and (
            f"algorithm.teachers: '{spaced}' is part of a role's name, which has no space; choose "
            "another name, also in the data"
        )
        placed = self.kl_in != "auto" or self.kl_target
        broken["teacher-kl-placed"] = (algorithm.teacher and placed) and (
            f"the advantages of '{self.name}' are the KL to the teacher, with weight 1; leave "
            "algorithm.kl_in and kl_target out"
        )


def _add_algorithms_to_help() -> None:
    """Add to the help which algorithms read a setting, and their meaning of 'auto'."""
    differing = {
        "name": ("rollout.samples_per_prompt: at least", "group"),
        "kl_in": ("That is", "kl_in"),
        "aggregation": ("That is", "aggregation"),
    }
    for key, field in AlgorithmConfig.model_fields.items():
        if key in differing:
            start, attribute = differing[key]
            names: dict[str, list[str]] = {}
            for name, spec in ALGORITHMS.items():
                if (value := getattr(spec, attribute)) is not None:
                    names.setdefault(str(value), []).append(name)
            listing = "; ".join(f"{value} for {', '.join(of)}" for value, of in names.items())
            field.description = f"{field.description} {start} {listing}."
        elif users := [n for n, s in ALGORITHMS.items() if f"algorithm.{key}" in s.settings]:
            field.description = f"{field.description} Only for {', '.join(users)}."


_add_algorithms_to_help()
