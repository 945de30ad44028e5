"""One recipe = one typed object. Every setting of a run stands in this file, with its help.

The sections are handed to the components they belong to; nothing else reads settings. Contradictions
are refused here, at construction, before anything heavy is loaded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A group of settings: immutable, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class ModelConfig(Section):
    """The actor, and with it the reference."""

    name: str = "smollm2-135m"
    """A known name ('smollm2-135m', 'tiny'), a local folder in Hugging Face format, or a hub name."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. auto: bfloat16 where the hardware has it, else float32. Master weights are fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the models live. auto: cuda when there is one."""
    lora_rank: NonNegativeInt = 0
    """Rank of LoRA adapters for actor and critic; 0 trains all weights."""
    lora_alpha: NonNegative = 16.0
    """LoRA scale: the update is multiplied by alpha / rank."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Modules that get adapters, by the end of their name; 'all-linear' takes every linear layer but the head."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    trust_remote_code: bool = False
    """Allow a hub model to bring and run its own Python code."""


class CriticConfig(Section):
    """The value model of PPO."""

    init: str = "actor"
    """Backbone and head: 'actor' (the actor's weights, a zero head), 'reward' (from the reward model), or a model name."""
    freeze_steps: NonNegativeInt = 0
    """Train only the critic for this many first steps."""


class TaskConfig(Section):
    """Where prompts come from, and what the task's own judge makes of an answer."""

    kind: Literal["reasoning-gym", "dataset", "gsm8k"] = "reasoning-gym"
    """reasoning-gym: a procedural dataset with its verifier. dataset: rows of a file or of the hub. gsm8k: question / answer with '#### N'."""
    name: str = "chain_sum"
    """A reasoning-gym dataset, a .jsonl / .json / .parquet file, or a hub dataset."""
    settings: dict[str, JsonValue] = {}
    """Settings of the reasoning-gym dataset."""
    split: str = "train"
    """Split of a hub dataset."""
    size: NonNegativeInt = 0
    """Rows to use; 0 takes all of a file or the hub (reasoning-gym: 100,000)."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    answer_column: str = ""
    """Column with the reference answer, judged by the task's verifier; empty when only reward functions judge."""
    system: str = ""
    """System message put before the prompt; with it, or with chat = on, text prompts become conversations."""
    instruction: str = ""
    """Text put after the prompt, on a line of its own."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Apply the tokenizer's chat template. auto: where the tokenizer has one."""
    extract: Literal["full", "last_number", "answer_tag"] = "full"
    """What of the response the verifier sees: all, its last number, or what stands in <answer>...</answer>."""
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are left out, counted and reported."""


class RewardConfig(Section):
    """What a response is worth."""

    sources: tuple[str, ...] = ("task",)
    """Summed: 'task' (its verifier), 'file.py:name' (a function with TRL's or verl's signature), 'model:NAME' (a reward model)."""
    weights: tuple[float, ...] = ()
    """One factor a source; empty means 1 each."""
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that a function may take for one batch of responses."""
    on_failure: Literal["stop", "drop"] = "stop"
    """When a function fails on a sample: stop the run, or drop the sample and report it."""
    missing_eos: Literal["off", "replace", "subtract"] = "replace"
    """For a response that hit the token limit: keep the score, replace it by the penalty, or subtract the penalty."""
    missing_eos_penalty: float = -1.0
    """replace: the score it gets. subtract: its absolute value is taken off."""

    @property
    def factors(self) -> dict[str, float]:
        """The factor of each source, by name."""
        weights = self.weights or (1.0,) * len(self.sources)
        return dict(zip(self.sources, weights, strict=True))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.sources:
            raise ValueError("reward.sources is empty; name at least one, such as 'task'")
        if len(set(self.sources)) != len(self.sources):
            raise ValueError(f"reward.sources names one twice: {self.sources}; use weights instead")
        if self.weights and len(self.weights) != len(self.sources):
            raise ValueError(
                f"reward.weights has {len(self.weights)} numbers for {len(self.sources)} sources; "
                "give one a source, or none"
            )
        return self


class RolloutConfig(Section):
    """How the actor generates."""

    batch: PositiveInt = 32
    """Responses per step."""
    samples_per_prompt: PositiveInt = 1
    """Responses to each prompt; divides batch."""
    max_new_tokens: PositiveInt = 64
    """Token limit of a response."""
    temperature: NonNegative = 1.0
    """Softmax temperature; 0 is greedy (not for training)."""
    top_k: NonNegativeInt = 0
    """Sample among the k likeliest tokens; 0 is off. Refused in training, where the learner's distribution is the full one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the likeliest tokens that hold this much probability; 1 is off. Refused in training, as top_k."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the end-of-sequence token."""
    slots: NonNegativeInt = 0
    """Rollouts decoded together by an engine, each in a KV slot; 0 takes all that are in flight."""
    engines: PositiveInt = 1
    """Generation engines; rollouts are spread over them."""
    prefill_tokens: PositiveInt = 4096
    """Prompt tokens worked on between two decode steps, at most."""
    cuda_graphs: bool = True
    """Replay decode steps as CUDA graphs, on CUDA."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch % self.samples_per_prompt:
            raise ValueError(
                f"rollout.batch counts responses and must be a multiple of samples_per_prompt; "
                f"got {self.batch} and {self.samples_per_prompt}"
            )
        return self


PRESETS: dict[str, dict[str, Any]] = {
    "sync": {"score_on": "batch", "overcommit": 0, "lag": 0, "migrate": "off"},
    "oppo": {"score_on": "chunk", "overcommit": "auto", "lag": 0, "migrate": "off"},
    "async": {"score_on": "rollout", "overcommit": 0, "lag": 1, "migrate": "off"},
    "rlhfuse": {"score_on": "rollout", "overcommit": 0, "lag": 0, "migrate": "auto"},
    "stretto": {"score_on": "chunk", "overcommit": "auto", "lag": 1, "migrate": "auto"},
}
"""What each preset sets the four knobs of the schedule to."""


class ScheduleConfig(Section):
    """When each piece of work runs: four knobs, and how they are turned."""

    preset: Literal["sync", "oppo", "async", "rlhfuse", "stretto"] = "sync"
    """What the four knobs are where they say 'preset'. sync: each stage after the one before. oppo: stream to scorers, over-commit. async: one version behind. rlhfuse: gather stragglers. stretto: all of it."""
    score_on: Literal["preset", "batch", "rollout", "chunk"] = "preset"
    """When scorers see responses: once all have ended, each when it has ended, or chunk by chunk while they are decoded."""
    overcommit: Literal["preset", "auto"] | NonNegativeInt = "preset"
    """Responses in flight beyond the batch (delta); the first to end are trained on, the rest is carried into the next step. auto: adapted by overcommit_rule."""
    lag: Literal["preset"] | NonNegativeInt = "preset"
    """Versions of the weights that generation may be behind training; 1 generates for the next step while training on this one."""
    migrate: Literal["preset", "off", "auto"] | Fraction = "preset"
    """Gather the last responses on few engines when this share of the batch remains. auto: chosen by simulation. Needs rollout.engines > 1."""
    chunk_tokens: NonNegativeInt = 0
    """Tokens that each response gets between two looks at what has ended, and that are streamed at a time; 0 tries several sizes and keeps the best."""
    chunk_window: Annotated[int, Field(gt=3)] = 50
    """Steps between two trials of chunk sizes."""
    overcommit_rule: Literal["equation4", "algorithm1", "throughput"] = "equation4"
    """How 'auto' adapts delta. equation4: up by one while rewards rise, else down. algorithm1: by a quarter, the other way round. throughput: what the lengths and latencies seen predict to be fastest."""
    overcommit_start: NonNegativeInt = 0
    """Delta at the start of 'auto'; 0 takes half of overcommit_max."""
    overcommit_max: NonNegativeInt = 0
    """Largest delta of 'auto'; 0 takes the batch size."""
    overcommit_window: PositiveInt = 10
    """Steps over which equation4 and algorithm1 look at the reward."""
    max_carries: PositiveInt = 8
    """A response that was carried this often is waited for."""
    carry: Literal["recompute", "reuse"] = "recompute"
    """What happens to the keys and values of a carried response when the weights change: computed anew, or kept as they are."""
    batches_per_handover: PositiveInt = 1
    """Steps taken on what one version of the weights has generated (the off-policy dial N); for several updates on one batch see training.epochs."""
    threads: tuple[()] | tuple[PositiveInt, PositiveInt, PositiveInt] = ()
    """CPU threads of each engine, of scoring and of training where they overlap; empty shares the cores out."""
    deadline_s: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds that a role may take to answer one call; then the run ends and says who did not answer."""

    def knob(self, name: Literal["score_on", "overcommit", "lag", "migrate"]) -> Any:
        """The value of one of the four knobs, from the preset where that is left to it."""
        value = getattr(self, name)
        return PRESETS[self.preset][name] if value == "preset" else value


class AlgorithmConfig(Section):
    """PPO: Schulman et al. 2017, with the per-token KL penalty of Ziegler et al. 2019."""

    name: Literal["ppo"] = "ppo"
    """The loss."""
    gamma: Fraction = 1.0
    """Discount of future rewards."""
    lam: Fraction = 0.95
    """GAE's lambda."""
    clip: Annotated[float, Field(gt=0)] = 0.2
    """The policy ratio counts between 1 - clip and 1 + clip."""
    value_clip: NonNegative = 0.2
    """Values count within this distance of the old ones; 0 is off."""
    kl_coef: NonNegative = 0.05
    """beta: weight of the per-token KL to the reference in the reward; 0 leaves the reference out."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """k1 = log ratio, k2 = its square / 2, k3 = ratio - 1 - log ratio (Schulman 2020)."""
    kl_target: NonNegative = 0.0
    """Adapt beta towards this KL (nats a response); 0 keeps beta fixed."""
    kl_horizon: PositiveInt = 10_000
    """Responses over which the adaptive beta moves."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    whiten_advantages: bool = True
    """Bring advantages to mean 0 and variance 1 over the batch's response tokens."""
    whiten_rewards: bool = False
    """Bring per-token rewards to variance 1, keeping their mean."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Average over all response tokens, or over each response first and then over responses."""


class TrainingConfig(Section):
    """How the learner takes a step."""

    lr: Annotated[float, Field(gt=0)] = 3e-6
    """The actor's peak learning rate."""
    critic_lr: Annotated[float, Field(gt=0)] = 1e-5
    """The critic's."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to zero at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rates rise from zero."""
    weight_decay: NonNegative = 0.0
    """AdamW's."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's."""
    grad_clip: NonNegative = 1.0
    """Largest gradient norm, for actor and critic each; 0 is off."""
    epochs: PositiveInt = 1
    """Passes over a batch."""
    minibatches: PositiveInt = 1
    """Optimizer updates in one pass."""
    microbatch_tokens: NonNegativeInt = 0
    """Tokens (padding counted) in one pass of a training or scoring model; no effect on the gradient. 0 takes 1,024 on a CPU, 16,384 on a GPU."""
    ratio_tolerance: NonNegative = 0.0
    """Largest root mean square log ratio on the first mini-batch of on-policy data; 0 takes 0.001 in float32, 0.2 in bfloat16."""


class ObserveConfig(Section):
    """What a run shows and keeps."""

    progress: Literal["auto", "rich", "plain", "off"] = "auto"
    """Live display. auto: rich on a terminal, else plain lines."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go besides metrics.jsonl."""
    samples: NonNegativeInt = 4
    """Responses per step written to samples.jsonl."""
    checkpoint_every: NonNegativeInt = 0
    """Steps between checkpoints to resume from; 0 writes none but the model at the end."""


class Config(Section):
    """Everything a training run is made of."""

    seed: int = 0
    """Of data order, sampling and initialisation."""
    steps: PositiveInt = 100
    """Batches to train on."""
    out: str = "runs"
    """Folder in which the run gets a folder of its own."""
    threads: NonNegativeInt = 0
    """CPU threads for tensor work; 0 leaves torch's choice."""
    warmup_examples: NonNegativeInt = 0
    """Supervised examples trained on before RL, made from the task's own answers (for models from scratch)."""
    warmup_lr: Annotated[float, Field(gt=0)] = 1e-3
    """Learning rate of that warm-up."""
    model: ModelConfig = ModelConfig()
    critic: CriticConfig = CriticConfig()
    task: TaskConfig = TaskConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        r, t = self.rollout, self.training
        if r.temperature == 0:
            raise ValueError(
                "rollout.temperature is 0: greedy decoding has no log-probabilities to train on; "
                "use a temperature above 0 (greedy is what 'stretto eval' does)"
            )
        if r.top_k or r.top_p < 1:
            raise ValueError(
                f"rollout.top_k = {r.top_k} and top_p = {r.top_p}: truncated sampling is refused in "
                "training, as the learner's log-probabilities are of the full distribution; "
                "set top_k = 0 and top_p = 1"
            )
        start, high = self.schedule.overcommit_start, self.schedule.overcommit_max or r.batch
        if start > high:
            raise ValueError(
                f"schedule.overcommit_start = {start} is above the largest delta, {high} "
                "(schedule.overcommit_max, or else rollout.batch); lower it"
            )
        if self.schedule.migrate not in ("preset", "off", 0) and r.engines == 1:
            raise ValueError(
                f"schedule.migrate = {self.schedule.migrate!r} moves responses between engines, and "
                "rollout.engines is 1; raise that, or set migrate = 'off'"
            )
        if r.batch % t.minibatches:
            raise ValueError(
                f"rollout.batch = {r.batch} does not split into training.minibatches = "
                f"{t.minibatches} equal parts; choose a divisor"
            )
        if self.critic.init == "reward" and not any(
            s.startswith("model:") for s in self.reward.sources
        ):
            raise ValueError(
                "critic.init = 'reward' needs a reward model, and reward.sources has none; "
                "add 'model:NAME' to reward.sources, or set critic.init = 'actor'"
            )
        if self.algorithm.kl_target and not self.algorithm.kl_coef:
            raise ValueError(
                "algorithm.kl_target adapts kl_coef, which is 0; give kl_coef a starting value"
            )
        return self
