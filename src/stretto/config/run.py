"""All settings of a training run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from stretto.config.algorithm import ALGORITHMS, AlgorithmConfig
from stretto.config.cluster import LEARNER, ClusterConfig
from stretto.config.schedule import ScheduleConfig
from stretto.config.sections import (
    CriticConfig,
    ModelConfig,
    NonNegativeInt,
    ObserveConfig,
    Positive,
    PositiveInt,
    RewardConfig,
    RolloutConfig,
    Section,
    Seed,
    TaskConfig,
)
from stretto.config.training import PipelineConfig, TrainingConfig
from stretto.errors import ConfigError, RuleError


class Config(Section):
    """All settings of a training run."""

    seed: Seed = 0
    """Seed of data order, sampling and initialisation."""
    steps: PositiveInt = 100
    """Batches to train on."""
    out: str = "runs"
    """Folder in which the run gets a folder of its own."""
    threads: NonNegativeInt = 0
    """CPU threads for tensor work; 0 leaves torch's choice."""
    runtime: Literal["inline", "local", "ray"] = "inline"
    """Place of the roles. inline: threads of this process. local: processes on this machine. ray: processes on a Ray cluster. The section cluster says which roles share one."""
    warmup_examples: NonNegativeInt = 0
    """Supervised examples trained on before RL, made from the task's own answers (for models from scratch)."""
    warmup_lr: Positive = 1e-3
    """Learning rate of that warm-up."""
    model: ModelConfig = ModelConfig()
    critic: CriticConfig = CriticConfig()
    task: TaskConfig = TaskConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    pipeline: PipelineConfig = PipelineConfig()
    cluster: ClusterConfig = ClusterConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def remarks(self) -> list[str]:
        """Remarks on settings that are valid, but have no effect or not the expected one."""
        a, remarks = self.algorithm, []
        known = dict.fromkeys(name for spec in ALGORITHMS.values() for name in spec.settings)
        idle = [n for n in known if n not in a.definition.settings and self._is_set(n)]
        if idle:
            remarks.append(f"without effect on '{a.name}': {', '.join(idle)}")
        if a.kl_coef and a.kl_place == "loss" and a.estimator == "k1":
            remarks.append(
                "the KL holds nothing back: k1's gradient in the loss has mean zero "
                "(algorithm.kl_estimator = 'k2' or 'k3' has not)"
            )
        if a.old_policy == "proximal" and a.correction == "off" and not a.definition.ratio:
            cost = " and costs a forward pass" if self.training.updates > 1 else ""
            remarks.append(
                f"algorithm.old_policy = 'proximal' changes no gradient of '{a.name}' without a "
                f"correction{cost}"
            )
        unused = [f"pipeline.{k}" for k in PipelineConfig.model_fields if self.pipeline.is_set(k)]
        if unused and not self.pipeline.ranks:
            remarks.append(f"without effect while pipeline.ranks is 0: {', '.join(unused)}")
        knobs = self.schedule.knobs
        if knobs.migrate == "auto" and self.rollout.engines > 1 and knobs.streams:
            remarks.append(
                "schedule.migrate = 'auto' moves nothing while schedule.score_on is 'chunk': scorers "
                "that stream have a worker of their own, and a freed engine would have nothing to do"
            )
        return [*remarks, *self.schedule.remarks]

    def _is_set(self, name: str) -> bool:
        section, _, key = name.partition(".")
        part: Section = getattr(self, section)
        return part.is_set(key)

    @property
    def most_in_flight(self) -> int:
        """The most rollouts that are decoded at one time."""
        return self.schedule.most_in_flight(self.rollout.batch, self.rollout.samples_per_prompt)

    @property
    def longest(self) -> int:
        """Most tokens of a prompt with its response."""
        return self.task.max_prompt_tokens + self.rollout.max_new_tokens

    def require_positions(self, what: str, limit: int | None) -> None:
        """Refuse a model that cannot read a prompt with its response, both at their limits.

        Args:
            what: the model, as the subject of a message.
            limit: tokens that it can read; ``None`` for any number.

        Raises ConfigError if they are more.
        """
        if limit is not None and self.longest > limit:
            raise ConfigError(
                f"{what} has positions for {limit} tokens, and a prompt with its response may have "
                f"{self.longest} (task.max_prompt_tokens = {self.task.max_prompt_tokens}, "
                f"rollout.max_new_tokens = {self.rollout.max_new_tokens}); lower these, or choose "
                "another model",
                "too-few-positions",
            )

    @model_validator(mode="after")
    def _check(self) -> Self:
        r = self.rollout
        if r.temperature == 0:
            raise RuleError(
                "rollout.temperature is 0: greedy decoding has no log-probabilities to train on; "
                "use a temperature above 0 (greedy is what 'stretto eval' does)",
                "greedy-training",
            )
        if r.top_k or r.top_p < 1:
            raise RuleError(
                f"rollout.top_k = {r.top_k} and top_p = {r.top_p}: truncated sampling is refused in "
                "training, as the learner's log-probabilities are of the full distribution; "
                "set top_k = 0 and top_p = 1",
                "truncated-sampling",
            )
        self.schedule.check(r.batch)
        if self.schedule.asks_to_migrate and r.engines == 1:
            raise RuleError(
                f"schedule.migrate = {self.schedule.migrate!r} moves responses between engines, and "
                "rollout.engines is 1; raise that, or set migrate = 'off'",
                "migrate-with-one-engine",
            )
        if self.critic.init == "reward" and not self.reward.models:
            raise RuleError(
                "critic.init = 'reward' needs a reward model, and reward.sources has none; "
                "add 'model:NAME' to reward.sources, or set critic.init = 'actor'",
                "critic-without-reward-model",
            )
        several = [p for p in self.cluster.processes if p.ranks > 1]
        if several and self.runtime == "inline":
            raise RuleError(
                f"cluster.processes: fsdp = {several[0].fsdp} and tp = {several[0].tp} ask for "
                "processes, and runtime = 'inline' has none; set runtime = 'local' or 'ray'",
                "ranks-without-processes",
            )
        if r.engine == "vllm":
            self._check_vllm()
        self._check_algorithm()
        if self.pipeline.ranks:
            self._check_pipeline()
        return self

    def _check_vllm(self) -> None:
        if self.runtime == "inline":
            raise RuleError(
                "rollout.engine = 'vllm' needs processes of its own, as vLLM decides about the "
                "threads of the one it is in, and runtime = 'inline' has none; set runtime = "
                "'local' (--runtime local)",
                "vllm-without-processes",
            )
        beside = [p for p in self.cluster.processes if LEARNER in p.roles and len(p.roles) > 1]
        if any(role.startswith("generator") for p in beside for role in p.roles):
            raise RuleError(
                "cluster.processes: generators in the learner's processes read its weights where "
                "they are, and vLLM has weights of its own; give it processes of its own, on the "
                "same devices where they are to share them",
                "vllm-beside-learner",
            )

    def _check_algorithm(self) -> None:
        a, r, minibatches = self.algorithm, self.rollout, self.training.minibatches
        if a.kl_target and r.batch >= 5 * a.kl_horizon:
            raise RuleError(
                f"algorithm.kl_horizon = {a.kl_horizon} is for steps of less than "
                f"{5 * a.kl_horizon} responses: the adaptive beta moves by up to a fifth of itself "
                f"a horizon, and rollout.batch = {r.batch} would take it to zero or below; raise "
                "kl_horizon",
                "kl-horizon-too-short",
            )
        if r.batch % minibatches:
            raise RuleError(
                f"rollout.batch = {r.batch} does not split into training.minibatches = "
                f"{minibatches} equal parts; choose a divisor",
                "minibatches-not-divisor",
            )
        if r.samples_per_prompt < a.definition.group:
            raise RuleError(
                f"algorithm.name = '{a.name}' compares the responses to one prompt and needs "
                f"rollout.samples_per_prompt of at least {a.definition.group}; got "
                f"{r.samples_per_prompt}",
                "group-too-small",
            )
        groups = r.batch // r.samples_per_prompt
        if a.definition.per_group and minibatches > groups:
            raise RuleError(
                f"'{a.name}' trains on one of each prompt's responses, or on one pair, and "
                f"training.minibatches = {minibatches} splits {groups} prompts; lower it to "
                f"{groups} or less",
                "minibatches-beyond-groups",
            )
        if self.critic.freeze_steps and not a.definition.critic:
            raise RuleError(
                f"critic.freeze_steps = {self.critic.freeze_steps} trains the critic alone, and "
                f"'{a.name}' has none; set it to 0",
                "freeze-without-critic",
            )

    def _check_pipeline(self) -> None:
        p, minibatches = self.pipeline, self.training.minibatches
        if not self.algorithm.definition.critic:
            raise RuleError(
                f"pipeline.ranks = {p.ranks} trains an actor and a critic in pipelines that fill "
                f"each other's bubbles, and '{self.algorithm.name}' has no critic; set "
                "pipeline.ranks = 0, or algorithm.name = 'ppo'",
                "pipeline-without-critic",
            )
        if self.model.trust_remote_code:
            raise RuleError(
                f"pipeline.ranks = {p.ranks} sends stages of the model to other processes, which "
                "cannot be done with model.trust_remote_code, as its code is known to this one "
                "alone; set one of them to 0 or false",
                "pipeline-with-remote-code",
            )
        needed, responses = p.micro_batches or p.multiple, self.rollout.batch // minibatches
        if responses < needed:
            raise RuleError(
                f"a mini-batch has {responses} responses (rollout.batch / training.minibatches), "
                f"and the pipelines ask for {needed} micro-batches; raise rollout.batch, or lower "
                "training.minibatches or pipeline.micro_batches",
                "fewer-responses-than-micro-batches",
            )
