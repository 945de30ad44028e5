"""All settings of a training run."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field

from stretto.bounds import ceil_div
from stretto.config.algorithm import ALGORITHMS, AlgorithmConfig
from stretto.config.capabilities import ENVIRONMENT, RUNTIMES, RuntimeKind, RuntimeName
from stretto.config.cluster_config import GENERATOR, LEARNER, ClusterConfig
from stretto.config.environment import EnvironmentConfig
from stretto.config.knobs import ScheduleConfig
from stretto.config.sections import (
    CriticConfig,
    Minutes,
    ModelConfig,
    ObserveConfig,
    Positive,
    PositiveInt,
    RewardConfig,
    RolloutConfig,
    RowsOrNone,
    Rules,
    Section,
    Seed,
    TaskConfig,
    WorkersOrAuto,
)
from stretto.config.training_config import PipelineConfig, Trained, TrainingConfig
from stretto.errors import ConfigError
from stretto.layout import INDEPENDENT, Layout


class Config(Section):
    """All settings of a training run."""

    seed: Seed = 0
    """Seed of data order, sampling and initialisation."""
    steps: PositiveInt = 100
    """Batches to train on."""
    minutes: Minutes = 0.0
    """Time limit: the run ends with a checkpoint before a step that would probably end later than
    this many minutes after its start or resumption. 0 sets no limit. At least one step is taken."""
    out: str = "runs"
    """Folder in which the run gets its own folder."""
    threads: WorkersOrAuto = 0
    """CPU threads for tensor work; 0 leaves torch's choice."""
    runtime: RuntimeName = Field(
        default="inline",
        description=(
            f"Place of the roles. {' '.join(f'{n}: {kind.help}' for n, kind in RUNTIMES.items())} "
            "The section cluster determines which roles share one."
        ),
    )
    warmup_examples: RowsOrNone = 0
    """Supervised examples trained on before RL, made from the task's own answers (for models from
    scratch)."""
    warmup_lr: Positive = 1e-3
    """Learning rate of that warm-up."""
    model: ModelConfig = ModelConfig()
    critic: CriticConfig = CriticConfig()
    task: TaskConfig = TaskConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    pipeline: PipelineConfig = PipelineConfig()
    cluster: ClusterConfig = ClusterConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def runtime_kind(self) -> RuntimeKind:
        """Pipelines need processes: with 'inline' the learner's ranks, and one for other roles."""
        return RUNTIMES["local" if self.has_stages_inline else self.runtime]

    @property
    def has_stages_inline(self) -> bool:
        return self.runtime == "inline" and self.pipeline.ranks > 0

    @property
    def learner_layout(self) -> Layout:
        """The layout of the learner's ranks. If pipelines divide its models, that of the actor, or
        of the critic if it has more slices.
        """
        p = self.pipeline
        if p.ranks:
            model: Trained = "critic" if p.stage_slices[1] > p.stage_slices[0] else "actor"
            return p.layout_of(model)
        return self.cluster.learner_layout

    def uses_learner(self, scorer: str, layout: Layout | None) -> bool:
        """Return whether a scorer in the learner's ranks can use the learner's weights: a reference
        those without adapters, the critic the shards, if it does not lag. ``layout`` is the
        scorer's, ``None`` if open. Stages run no passes of a full model.
        """
        able = self.model.lora_rank > 0
        if scorer == "critic":
            able = self.learner_layout.ranks > 1 and not self.schedule.knobs.lag
        fits = layout in (None, self.learner_layout) and not self.pipeline.ranks
        return able and fits and scorer in ("reference", "critic")

    @property
    def is_elsewhere(self) -> bool:
        """Whether the processes run on a cluster that exists already."""
        return self.runtime_kind.several_machines and self.cluster.address != ""

    @property
    def remarks(self) -> list[str]:
        """Notes on valid settings that have no effect, or not the expected one."""
        a, remarks = self.algorithm, []
        names = dict.fromkeys(name for spec in ALGORITHMS.values() for name in spec.settings)
        idle = [n for n in names if n not in a.definition.settings and self._is_set(n)]
        no_reference = a.teacher_models and self._is_set("algorithm.kl_coef")
        idle += ["algorithm.kl_coef"] if no_reference else []
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
        if typed := [text for text in self.rollout.stop if re.search(r"\\[nrt]", text)]:
            remarks.append(
                f"rollout.stop has a backslash and a letter in {' and '.join(typed)}, and neither "
                "a "
                r"line break nor a tab; in a shell $'\n' is a line break"
            )
        knobs = self.schedule.knobs
        if knobs.migrate == "auto" and self.rollout.engines > 1 and knobs.streams:
            remarks.append(
                "schedule.migrate = 'auto' moves nothing while schedule.score_on is 'chunk': "
                "scorers that stream have a worker of their own, and a freed engine would have "
                "nothing to do"
            )
        return [*remarks, *self.schedule.remarks]

    def _is_set(self, name: str) -> bool:
        section, _, key = name.partition(".")
        part: Section = getattr(self, section)
        return part.is_set(key)

    @property
    def most_in_flight(self) -> int:
        return self.schedule.most_in_flight(self.rollout.batch, self.rollout.samples_per_prompt)

    @property
    def open_engines(self) -> bool:
        """Whether engines in several ranks may be more than ``rollout.engines``, left at 1."""
        return self.rollout.engines == 1 and not self.rollout.capabilities.own_weights

    @property
    def generator_layouts(self) -> list[Layout]:
        """Layouts of generators in the processes that are named, if known."""
        engines = 0 if self.open_engines else self.rollout.engines
        return self.cluster.layouts(GENERATOR, engines)

    def with_model(self, name: str) -> Self:
        return self.changed_in("model", name=name)

    @property
    def engine_rows(self) -> int:
        """Rollouts that an engine decodes at a time."""
        return self.rollout.slots or ceil_div(self.most_in_flight, self.rollout.engines)

    @property
    def cached_rows(self) -> int:
        """Rollouts whose KV cache an engine has room for: as many again if episodes may wait."""
        keeps_waiting = self.environment.sources and self.schedule.knobs.keeps_waiting
        return 2 * self.engine_rows if keeps_waiting else self.engine_rows

    @property
    def longest(self) -> int:
        return self.task.max_prompt_tokens + self.rollout.max_new_tokens

    def require_positions(self, what: str, limit: int | None) -> None:
        """Raise ConfigError if a model (``what``) cannot read the longest prompt and response. It
        has ``limit`` positions (``None``: any number).
        """
        if limit is not None and self.longest > limit:
            raise ConfigError(
                f"{what} has positions for {limit} tokens, and task.max_prompt_tokens = "
                f"{self.task.max_prompt_tokens} and rollout.max_new_tokens = "
                f"{self.rollout.max_new_tokens} allow {self.longest}; lower these, or choose "
                "another model",
                "too-few-positions",
            )

    def rules(self, broken: Rules) -> None:
        """Check that the sections fit each other."""
        r = self.rollout
        broken["greedy-training"] = r.temperature == 0 and (
            "rollout.temperature is 0: greedy decoding has no log-probabilities to train on; "
            "use a temperature above 0 (an evaluation is greedy)"
        )
        broken["truncated-sampling"] = (r.top_k or r.top_p < 1) and (
            f"rollout.top_k = {r.top_k} and rollout.top_p = {r.top_p} truncate sampling, and the "
            "learner's log-probabilities are of the full distribution; set rollout.top_k = 0 and "
            "rollout.top_p = 1"
        )
        no_environment = ENVIRONMENT in self.reward.sources and not self.environment.sources
        broken["environment-without-source"] = no_environment and (
            "reward.sources has 'environment', and environment.sources is empty; name the "
            "environment there"
        )
        broken |= self.schedule.overcommit_rules(r.batch)
        broken["migrate-with-one-engine"] = (self.schedule.asks_to_migrate and r.engines == 1) and (
            f"schedule.migrate = {self.schedule.migrate!r} moves responses between engines, and "
            "rollout.engines is 1; raise that, or set schedule.migrate = 'off'"
        )
        unrewarded = self.critic.init == "reward" and not self.reward.models
        broken["critic-without-reward-model"] = unrewarded and (
            "critic.init = 'reward' needs a reward model, and reward.sources has none; "
            "add 'model:NAME' to reward.sources, or set critic.init = 'actor'"
        )
        self._learner_rules(broken)
        self._process_rules(broken)
        self._engine_rules(broken)
        if self.training.match_engine:
            self._match_rules(broken)
        if not self.algorithm.is_outside:
            self.algorithm_rules(broken)

    def _learner_rules(self, broken: Rules) -> None:
        process = self.cluster.process_of(LEARNER)
        one_process = process.ranks == 1 and not process.offload and not self.pipeline.ranks
        of_responses = self.algorithm.has_optimal_baseline
        broken["optimal-baseline-in-parts"] = (of_responses and not one_process) and (
            "algorithm.baseline = 'optimal' needs the gradient of each response, which a learner "
            "in one process has; leave it out, or leave out ranks, offload and pipeline.ranks"
        )
        optim = self.training.optim
        broken["optimizer-of-one-process"] = (
            optim != "adamw_torch_fused" and not one_process
        ) and (
            f"training.optim = '{optim}' is for a learner in one process, whose moments stay where "
            "they are; leave it out, or leave out ranks, offload and pipeline.ranks"
        )
        has_processes = self.runtime_kind.has_processes
        broken["compile-inline"] = (self.model.torch_compile and not has_processes) and (
            "model.torch_compile compiles layers for training, and with "
            f"runtime = '{self.runtime}' the engine may decode with the same ones; set runtime = "
            "'local' or 'ray'"
        )
        kernels = self.model.use_liger_kernel or self.model.torch_compile
        broken["kernels-in-pipelines"] = (kernels and self.pipeline.ranks) and (
            "model.use_liger_kernel and model.torch_compile change whole models, and "
            f"pipeline.ranks = {self.pipeline.ranks} cuts them into stages; leave one of them out"
        )
        divided = any(p.ranks > 1 or p.offload for p in self.cluster.processes)
        cut = divided or self.pipeline.ranks
        broken["4bit-with-warmup"] = (self.model.load_in_4bit and self.warmup_examples) and (
            f"warmup_examples = {self.warmup_examples} trains all weights, and those of "
            "model.load_in_4bit = true cannot be trained; leave one of them out"
        )
        broken["4bit-in-parts"] = (self.model.load_in_4bit and cut) and (
            "model.load_in_4bit = true is for models that are whole on one device; leave it out, "
            "or leave out ranks, offload and pipeline.ranks"
        )

    def _match_rules(self, broken: Rules) -> None:
        """Check that nothing computes in another way than the row products of one process."""
        model, r = self.model, self.rollout
        processes = self.cluster.processes
        parts = any(p.offload or (p.ranks > 1 and LEARNER in p.roles) for p in processes)
        obstacles = {
            f"rollout.engine = '{r.engine}'": not r.capabilities.matches_learner,
            "ranks and offload": parts,
            "layout.generator": any(x.per_copy.ranks > 1 for x in self.generator_layouts),
            "pipeline.ranks": self.pipeline.ranks,
            "model.load_in_4bit": model.load_in_4bit,
            "model.use_liger_kernel": model.use_liger_kernel,
            "model.torch_compile": model.torch_compile,
            "model.lora_kind = 'dora'": model.lora_rank and model.lora_kind == "dora",
        }
        obstacle = next(filter(obstacles.__getitem__, obstacles), "")
        broken["match-engine-with-others"] = obstacle and (
            "training.match_engine = true computes with kernels of its own, in Stretto's engine "
            f"and a learner that each are whole in one process; leave out {obstacle}, or "
            "match_engine"
        )

    def _process_rules(self, broken: Rules) -> None:
        multi_rank = [p for p in self.cluster.processes if p.ranks > 1]
        sliced = [layout for layout in self.generator_layouts if layout.per_copy.ranks > 1]
        broken["draft-in-slices"] = (sliced and self.rollout.speculative_model) and (
            "rollout.engine_args: speculative_model proposes tokens to an engine that is whole on "
            f"one device, and cluster.processes cuts it by layout.generator = {sliced[0]}; leave "
            "one of them out"
        )
        on_threads = not self.runtime_kind.has_processes
        broken["ranks-without-processes"] = (multi_rank and on_threads) and (
            f"cluster.processes: ranks = {multi_rank[0].ranks} asks for processes, and runtime = "
            f"'{self.runtime}' has none; set runtime = 'local' or 'ray'"
        )
        layout, process = self.cluster.learner_layout, self.cluster.process_of(LEARNER)
        stages = self.pipeline.ranks
        by_hand = layout.ranks > 1 and (LEARNER in process.layout or process.ranks != stages)
        broken["stages-and-shards"] = (stages and by_hand) and (
            f"pipeline.ranks = {stages} trains through stages, and cluster.processes divides the "
            f"learner's {process.ranks} ranks by layout.learner = {layout}; set one or the other, "
            "with one number of ranks"
        )
        self._critic_rules(broken)
        numbered = [p.device for p in self.cluster.processes if p.device.startswith("cuda:")]
        giver = self.runtime_kind.assigns_gpus
        broken["device-number-on-ray"] = (numbered and giver) and (
            f"cluster.processes: device = '{numbered[0]}' names a GPU of this machine, and with "
            f"runtime = '{self.runtime}' {giver} gives each rank its own; leave device out, or set "
            "it to 'cpu'"
        )

    def _critic_rules(self, broken: Rules) -> None:
        """Check shards of the critic as a scorer, which only the learner's own critic has."""
        for process in self.cluster.processes:
            layout = process.layout.get("critic", Layout())
            is_learners = LEARNER in process.roles and self.uses_learner("critic", layout)
            broken["critic-in-shards"] = (layout.gathers and not is_learners) and (
                f"cluster.processes: layout.critic = {layout} has shards, which the critic as a "
                "scorer has only in the learner's ranks, in the learner's layout, with "
                f"schedule.lag = 0 and without pipeline.ranks; set {INDEPENDENT} instead"
            )
            if broken["critic-in-shards"]:
                return

    def _engine_rules(self, broken: Rules) -> None:
        able, engine = self.rollout.capabilities, self.rollout.engine
        on_threads = not self.runtime_kind.has_processes
        broken["vllm-without-processes"] = (able.needs_processes and on_threads) and (
            f"rollout.engine = '{engine}' needs processes of its own, whose threads {able.title} "
            f"sets, and runtime = '{self.runtime}' has none; set `runtime = local`"
        )
        broken["4bit-with-vllm"] = (able.own_weights and self.model.load_in_4bit) and (
            "model.load_in_4bit = true trains beside weights in 4 bits, and rollout.engine = "
            f"'{engine}' would sample from others; leave one of them out"
        )
        colocated = [p for p in self.cluster.processes if LEARNER in p.roles and p.generates]
        several = any(p.ranks > 1 and GENERATOR in p.roles for p in self.cluster.processes)
        joint = several and self.rollout.engines > 1
        broken["vllm-in-one-group"] = (able.own_weights and joint) and (
            f"cluster.processes: several engines of {able.title} in the ranks of one process; give "
            "each a process of its own, with roles 'generator 0', 'generator 1' ..."
        )
        broken["vllm-beside-learner"] = (able.own_weights and colocated) and (
            "cluster.processes: generators in the learner's processes read its weights, and "
            f"{able.title} has weights of its own; give it processes of its own, on the same "
            "devices if need be"
        )

    def algorithm_rules(self, broken: Rules) -> None:
        """Check that the sections fit the algorithm, after import if it is the user's own code."""
        a = self.algorithm
        r = self.rollout
        minibatches = self.training.minibatches
        broken["kl-horizon-too-short"] = (a.kl_target and r.batch >= 5 * a.kl_horizon) and (
            f"algorithm.kl_horizon = {a.kl_horizon} is for steps of less than {5 * a.kl_horizon} "
            "responses: the adaptive beta moves by up to a fifth of itself a horizon, and "
            f"rollout.batch = {r.batch} would take it to zero or below; raise kl_horizon"
        )
        broken["minibatches-not-divisor"] = r.batch % minibatches and (
            f"rollout.batch = {r.batch} does not split into training.minibatches = "
            f"{minibatches} equal parts; choose a divisor"
        )
        needs = a.definition
        broken["group-too-small"] = r.samples_per_prompt < a.group and (
            f"algorithm.name = '{a.name}' compares the responses to one prompt and needs "
            f"rollout.samples_per_prompt of at least {a.group}; got {r.samples_per_prompt}"
        )
        unrewarded = not self.reward.sources and (a.reward_coef or not needs.teacher)
        broken["no-reward-source"] = unrewarded and (
            "reward.sources is empty; name at least one, such as 'task'"
        )
        broken["skip-without-groups"] = (r.skip_equal_groups and a.group < 2) and (
            "rollout.skip_equal_groups compares the scores of a prompt's responses, and "
            f"algorithm.name = '{a.name}' does not; leave it out, or choose one such as grpo"
        )
        groups = r.batch // r.samples_per_prompt
        broken["minibatches-beyond-groups"] = (needs.per_group and minibatches > groups) and (
            f"'{a.name}' trains on one response or pair of each prompt, and training.minibatches "
            f"= {minibatches} splits {groups} prompts; lower it to {groups} or less"
        )
        splits = a.has_optimal_baseline and minibatches > 1
        broken["optimal-baseline-among-minibatches"] = splits and (
            "algorithm.baseline = 'optimal' compares the gradients of a prompt's responses, which "
            f"training.minibatches = {minibatches} divides at random; set it to 1"
        )
        missing = self.reward.missing_eos
        broken["sources-apart-with-missing-eos"] = (a.normalizes_sources and missing != "off") and (
            "algorithm.multi_objective_aggregation = 'normalize_then_sum' has no sum of scores "
            f"that reward.missing_eos = '{missing}' could change; set reward.missing_eos = 'off', "
            "and score responses that were cut in a function"
        )
        frozen = self.critic.freeze_steps
        broken["freeze-without-critic"] = (frozen and not needs.critic) and (
            f"critic.freeze_steps = {frozen}, and '{a.name}' has no critic; set it to 0"
        )
        if self.schedule.knobs.on("train_on"):
            self._group_rules(broken)
        if self.pipeline.ranks:
            self._pipeline_rules(broken)

    def _group_rules(self, broken: Rules) -> None:
        a, minibatches = self.algorithm, self.training.minibatches
        broken["group-among-minibatches"] = minibatches > 1 and (
            "schedule.train_on = 'group' takes prompts in the order in which they are done, and "
            f"training.minibatches = {minibatches} divides a batch at random; set it to 1"
        )
        broken["group-needs-others"] = not a.by_group and (
            "schedule.train_on = 'group' needs gradients of a prompt that do not depend on others, "
            f"as those of '{a.name}' do with these settings; choose an algorithm such as grpo, "
            "without algorithm.scale_rewards = 'batch' and algorithm.multi_objective_aggregation "
            "= 'normalize_then_sum'"
        )
        of_tokens = a.entropy_coef and a.entropy_aggregation == "token_mean"
        broken["group-with-two-means"] = (of_tokens and a.averaging != "token_mean") and (
            "schedule.train_on = 'group' divides the loss by one number, and the entropy bonus "
            f"counts tokens while algorithm.aggregation = '{a.averaging}' counts responses; set "
            "algorithm.entropy_aggregation = 'auto'"
        )

    def _pipeline_rules(self, broken: Rules) -> None:
        p, minibatches = self.pipeline, self.training.minibatches
        broken["pipeline-without-critic"] = not self.algorithm.definition.critic and (
            f"pipeline.ranks = {p.ranks} trains an actor and a critic, and '{self.algorithm.name}' "
            "has no critic; set pipeline.ranks = 0, or algorithm.name = 'ppo'"
        )
        broken["pipeline-with-remote-code"] = self.model.trust_remote_code and (
            f"pipeline.ranks = {p.ranks} cuts models by transformers' plan of their parts, which "
            "code of model.trust_remote_code lacks; set one of them to 0 or false"
        )
        needed, responses = p.micro_batches or p.multiple, self.rollout.batch // minibatches
        broken["fewer-responses-than-micro-batches"] = responses < needed and (
            f"a mini-batch has {responses} responses (rollout.batch / training.minibatches), "
            f"and the pipelines ask for {needed} micro-batches; raise rollout.batch, or lower "
            "training.minibatches or pipeline.micro_batches"
        )
