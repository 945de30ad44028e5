"""The base class of settings, and those of models, task, reward, generation and observation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from stretto import outside
from stretto.config.capabilities import (
    ENGINES,
    FUNCTION,
    OBJECT,
    SOURCES,
    Capabilities,
    EngineName,
    SourceKind,
)
from stretto.errors import RuleError

# Bounds are far above every use. They refuse numbers that would fill the memory or overflow.
_LARGEST = 1e18
PositiveInt = Annotated[int, Field(gt=0, le=10**9)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**9)]
Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]
Positive = Annotated[float, Field(gt=0, le=_LARGEST)]
NonNegative = Annotated[float, Field(ge=0, le=_LARGEST)]
Rows = Annotated[int, Field(gt=0, le=10**7)]
"""Rollouts, prompts or examples that are in memory together."""
RowsOrNone = Annotated[int, Field(ge=0, le=10**7)]
Workers = Annotated[int, Field(gt=0, le=2**12)]
"""Processes or threads."""
WorkersOrAuto = Annotated[int, Field(ge=0, le=2**12)]
Seconds = Annotated[float, Field(gt=0, le=10**6)]
"""A time limit. poll(2) takes up to 24 days."""
SecondsOrNone = Annotated[float, Field(ge=0, le=10**6)]
Gpus = Annotated[int, Field(ge=0, le=2**17)]
Port = Annotated[int, Field(ge=0, le=65535)]
"""A port to listen on. 0 takes a free one."""
Minutes = Annotated[float, Field(ge=0, le=525_600)]
LEAST_TEMPERATURE = 1e-4
"""Smallest temperature above 0. Dividing logits by less may overflow."""


def _greedy_or_enough(temperature: float) -> float:
    if 0 < temperature < LEAST_TEMPERATURE:
        least = f"must be 0, which is greedy, or {LEAST_TEMPERATURE} at least"
        raise ValueError(f"`temperature = {temperature}`: {least}")
    return temperature


Temperature = Annotated[NonNegative, AfterValidator(_greedy_or_enough)]
Fraction = Annotated[float, Field(ge=0, le=1)]
TopP = Annotated[float, Field(gt=0, le=1)]

LARGEST_SEED = 2**63 - 1
"""TOML's largest integer, which torch and numpy accept too."""
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]

Rules = dict[str, object]
"""Rules between settings by code: the message if broken, otherwise something false."""


UNCHECKED = "rules are checked later"
"""Context of a validation that leaves the rules between settings to a later one."""


def one_of(*names: str) -> Any:
    """Return the type of a setting with these names as values, or a name of the user's code."""

    def check(value: Any) -> Any:
        if value in names or (isinstance(value, str) and outside.parts(value)):
            return value
        listed = f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"
        expected = f"{listed}, or code of yours as file.py:name or package.module:name"
        raise PydanticKnownError("literal_error", {"expected": expected})

    return Annotated[Literal[names] | str, PlainValidator(check)]


class Section(BaseModel):
    """An immutable group of settings that refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        for field in cls.model_fields.values():
            if field.description:
                field.description = " ".join(field.description.split())

    def is_set(self, key: str) -> bool:
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    def changed_in(self, section: str, **values: object) -> Self:
        part = getattr(self, section).model_copy(update=values)
        return self.model_copy(update={section: part})

    def rules(self, broken: Rules) -> None:
        """Add the rules between settings by code, with the message of each broken one."""

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        if info.context == UNCHECKED:
            return self
        broken: Rules = {}
        self.rules(broken)
        refuse(broken)
        return self


def refuse(broken: Rules) -> None:
    for code, message in broken.items():
        if message:
            raise RuleError(str(message), code)


def subsection(section: type[Section], key: str) -> type[Section] | None:
    field = section.model_fields.get(key)
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


ARGUMENTS = "chat_template_kwargs"
"""Name for arguments of the chat template in TRL, vLLM and their data sets."""

RESERVED_ARGUMENTS = frozenset(
    {
        *("self", "conversation", "messages", "tools", "chat_template", "tokenize", "padding"),
        *("add_generation_prompt", "continue_final_message", "sanitize_control_tokens"),
        *("truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "bos_token", "eos_token", "unk_token", "sep_token"),
        *("pad_token", "cls_token", "mask_token", "additional_special_tokens"),
    }
)
"""Arguments that every rendering of a chat template passes itself."""


def wrong_arguments(arguments: Mapping[str, object]) -> str:
    """Return why a chat template cannot be given these arguments, or an empty string."""
    if reserved := sorted(RESERVED_ARGUMENTS & arguments.keys()):
        return (
            f"'{reserved[0]}' is not an argument to choose: each conversation has its own; leave "
            "it out, and give messages and tools in the rows, and another template as "
            "chat_template.jinja in the model's folder"
        )
    if empty := [name for name, value in arguments.items() if value is None]:
        return f"'{empty[0]}' is null; leave out arguments without a value"
    return ""


def _can_be_given(arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if why := wrong_arguments(arguments):
        raise RuleError(f"template_arguments: {why}", "template-argument-reserved")
    return arguments


ChatArguments = Annotated[dict[str, JsonValue], AfterValidator(_can_be_given)]
TemplateArguments = Annotated[
    ChatArguments, Field(validation_alias=AliasChoices("template_arguments", ARGUMENTS))
]


class ModelConfig(Section):
    """The actor, and the reference derived from it."""

    name: str = "smollm2-135m"
    """A known name ('smollm2-135m', 'tiny', 'tiny-2-heads', 'tiny-chat'), a local folder in Hugging
    Face format or of a PEFT adapter, or a hub name."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type. auto: bfloat16 if the hardware has it, else float32. Master weights are
    fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models. auto: cuda if there is one."""
    lora_rank: NonNegativeInt = 0
    """Rank of LoRA adapters for actor and critic; 0 trains all weights, or the adapter if name is a
    PEFT adapter."""
    lora_alpha: NonNegative = 16.0
    """LoRA scale: the update is multiplied by alpha / rank, with rslora by alpha / sqrt(rank)."""
    lora_kind: Literal["lora", "rslora", "dora"] = "lora"
    """Kind of adapters: lora, rslora (scaled for high ranks), or dora (learns magnitude and
    direction of weights separately; not with load_in_4bit or slices)."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Modules that get adapters, by the end of their name; 'all-linear' takes every linear layer
    but the head."""
    load_in_4bit: bool = False
    """Load the actor in 4 bits (QLoRA: NF4 with double quantization, extra bitsandbytes); needs
    lora_rank. The reference, and the critic with critic.init = 'actor', share these weights.
    Embeddings, norms and head keep their type."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Recompute activations in the backward pass: less memory, about a third more time. auto: on a
    GPU if the memory plan finds that they would not fit, even in passes of few tokens; off on a
    CPU."""
    use_liger_kernel: bool = False
    """Use Liger's kernels (extra liger) for norms, rotary positions and MLPs in actor and critic
    training, and in Stretto's own engine: fewer kernels and smaller activations. Experimental. For
    GPUs, and model families that Liger supports."""
    cudnn_attention: bool = False
    """Let torch choose cuDNN's attention on GPUs. It takes some 30 ms to prepare for each new shape
    of its inputs, and nearly all shapes are new here."""
    torch_compile: bool = False
    """Compile layers for training with torch.compile: fewer kernels; the first passes take minutes.
    Experimental. For GPUs, with engines in other processes."""
    trust_remote_code: bool = False
    """Allow a hub model to bring and run its own Python code."""

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    def rules(self, broken: Rules) -> None:
        """Check that weights in 4 bits have adapters, because only these are trained, and can be
        merged."""
        broken["4bit-without-adapters"] = (self.load_in_4bit and not self.lora_rank) and (
            "model.load_in_4bit = true keeps weights that cannot be trained, and model.lora_rank = "
            "0 trains them; set model.lora_rank, to 32 for example, or to that of a PEFT adapter "
            "in model.name; or leave load_in_4bit out"
        )
        broken["4bit-with-dora"] = (self.load_in_4bit and self.lora_kind == "dora") and (
            "model.load_in_4bit = true with adapters of kind 'dora' is not supported; set "
            "model.lora_kind to 'lora' or 'rslora', or leave load_in_4bit out"
        )


class CriticConfig(Section):
    """The value model of PPO."""

    init: str = "actor"
    """Backbone and head: 'actor' (the actor's weights, a zero head), 'reward' (from the reward
    model), or a model name."""
    freeze_steps: NonNegativeInt = 0
    """Train only the critic for this many first steps."""

    @property
    def model(self) -> str:
        return "" if self.init in ("actor", "reward") else self.init


class TaskConfig(Section):
    """The task: its prompts, and the verifier of their answers."""

    kind: Literal["procedural", "reasoning-gym", "dataset", "gsm8k"] = "procedural"
    """procedural: problems generated from the seed, with a verifier. reasoning-gym: the same, from
    that library. dataset: rows of a file or of the hub. gsm8k: question / answer with '#### N'."""
    name: str = "chain_sum"
    """A procedural task ('chain_sum', 'spell_backward'), a reasoning-gym dataset, a file (.jsonl,
    .json, .csv, also with .gz; .parquet), a folder of such files or of save_to_disk, or a hub
    dataset."""
    settings: dict[str, JsonValue] = {}
    """Settings of the procedural task or of the reasoning-gym dataset."""
    split: str = "train"
    """Split of a hub dataset, or of a folder."""
    held_out: float | str = 0.0
    """Prompts for evaluation. A share from 0 to 1: this share of all different prompts, chosen by
    their content and excluded from training. A file, or another split of the same hub dataset: its
    rows. 0 holds none out."""
    size: RowsOrNone = 0
    """Rows to use; 0 takes all of a file or the hub (100,000 generated problems)."""
    shuffle: bool = True
    """Shuffle the rows again in each epoch. false: keep their order, for a curriculum."""
    columns: dict[str, str] = {}
    """Columns of the data by role. prompt: text, or a list of chat messages (default: 'prompt').
    answer: the verifier's reference (default: a column 'answer', 'ground_truth' or 'solution' if
    every row has one); without it only reward functions score. Dots in a name lead into nested
    objects. demonstration: the target of warmup_examples instead of the answer: a turn as text, or
    messages that follow the prompt. Other keys: parameter names of reward functions, for example
    label."""
    system: str = ""
    """System message put before the prompt; with it, or with chat = on, text prompts become
    conversations."""
    instruction: str = ""
    """Text put after the prompt, on its own line."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Apply the tokenizer's chat template. auto: if the tokenizer has one."""
    template_arguments: TemplateArguments = {}
    """Arguments of the chat template for every conversation, for example { enable_thinking = false
    }. A row's own, in the column chat_template_kwargs, take precedence. That is also an alias of
    this setting."""
    extract: Literal["full", "last_number", "answer_tag"] = "full"
    """Part of the response that the verifier sees. full: all of it. last_number: its last number.
    answer_tag: the text in <answer>...</answer>."""
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are skipped, counted and reported."""

    def rules(self, broken: Rules) -> None:
        """Check that a share of the prompts leaves some to train on."""
        broken["held-out-share"] = not 0 <= self.held_out_share < 1 and (
            f"task.held_out = {self.held_out}: a share of the prompts must be 0 or more and less "
            "than 1, as training needs the rest; for rows of their own, name a file or a split"
        )

    @property
    def is_procedural(self) -> bool:
        return self.kind in ("procedural", "reasoning-gym")

    @property
    def held_out_share(self) -> float:
        return 0.0 if isinstance(self.held_out, str) else self.held_out

    @property
    def held_out_rows(self) -> str:
        return self.held_out if isinstance(self.held_out, str) else ""


MISSING_EOS = "missing_eos"
"""Reward source that subtracts a penalty from responses without an end token, instead of the rule.
"""


@dataclass(frozen=True)
class RewardSource:
    """A source in ``reward.sources``."""

    name: str
    kind: SourceKind = OBJECT

    @property
    def model(self) -> str:
        """NAME of 'model:NAME', or the import path of a scorer."""
        return self.name.partition(":")[2]


def reward_source(name: str) -> RewardSource:
    key = next((key for key in SOURCES if ":" in key and name.startswith(key)), name)
    return RewardSource(name, SOURCES.get(key, FUNCTION if outside.parts(name) else OBJECT))


class RewardConfig(Section):
    """The score of a response: its sources and their weights."""

    sources: tuple[str, ...] = ("task",)
    """Sources of the score, summed: 'task' (its verifier), 'file.py:name' or 'package.module:name'
    (a function with TRL's, verl's or OpenRLHF's signature), 'http://127.0.0.1:PORT/...' (a reward
    server), 'model:NAME' (a reward model), 'scorer:file.py:name' (a class that scores chunk by
    chunk). Empty: a teacher alone (algorithm.name = 'distill')."""
    weights: tuple[Number, ...] = ()
    """Factor of each source; empty means 1 each."""
    timeout_s: Seconds = 30.0
    """Time limit of a function for one batch of responses, in seconds."""
    on_failure: Literal["stop", "drop"] | Annotated[float, Field(gt=0, lt=1)] = "stop"
    """Reaction to a function that fails on a sample. stop: end the run. drop: drop the sample and
    report it. A share between 0 and 1, for example 0.05: the same, but end the run if more than
    this share of a step's samples fail."""
    missing_eos: Literal["off", "replace", "subtract"] = "replace"
    """Score of a response that a token limit cut. off: unchanged. replace: the penalty instead.
    subtract: reduced by the penalty."""
    missing_eos_limits: tuple[Literal["turns", "seconds"], ...] = ()
    """Further limits of episodes to which missing_eos applies: turns (environment.max_turns),
    seconds (environment.max_seconds). Empty: an episode that reached these keeps its score."""
    missing_eos_penalty: Number = -1.0
    """The penalty. replace: the score itself. subtract: its absolute value is subtracted."""

    @property
    def parsed(self) -> tuple[RewardSource, ...]:
        return tuple(map(reward_source, self.sources))

    @property
    def models(self) -> list[RewardSource]:
        return [source for source in self.parsed if source.kind.is_model]

    @property
    def failures_allowed(self) -> float:
        shares = {"stop": 0.0, "drop": 1.0}
        return shares[self.on_failure] if isinstance(self.on_failure, str) else self.on_failure

    @property
    def factors(self) -> dict[str, float]:
        weights = self.weights or (1.0,) * len(self.sources)
        return dict(zip(self.sources, weights, strict=True))

    def rules(self, broken: Rules) -> None:
        """Check the sources and their weights."""
        broken["reward-source-twice"] = len(set(self.sources)) != len(self.sources) and (
            f"reward.sources names one twice: {self.sources}; use weights instead"
        )
        weights, sources = len(self.weights), len(self.sources)
        broken["reward-weights-count"] = weights not in (0, sources) and (
            f"reward.weights has {weights} numbers for {sources} sources; give one a source, or "
            "none"
        )


class RolloutConfig(Section):
    """Generation by the actor."""

    engine: Literal["auto", EngineName] = Field(
        default="auto",
        description=" ".join(["Engine.", *(f"{n}: {kind.help}" for n, kind in ENGINES.items())]),
    )
    engine_args: dict[str, JsonValue] = Field(
        default={},
        description=" ".join(
            ["Arguments of the engine.", *(f"{n}: {kind.arguments}" for n, kind in ENGINES.items())]
        ),
    )
    batch: Rows = 32
    """Responses per step."""
    samples_per_prompt: Rows = 1
    """Responses to each prompt; divides batch."""
    skip_equal_groups: bool = False
    """Leave out prompts whose responses all have the same score, which teach nothing, and draw
    others in their place until the batch is full (dynamic sampling; DAPO, Yu et al. 2025, section
    3.2). Scores are compared before the learner shapes them."""
    max_skipped: PositiveInt = 10
    """Batches of responses that skip_equal_groups may leave out between two weight syncs. Further
    groups with equal scores are trained on."""
    max_new_tokens: PositiveInt = 64
    """Token limit of a response."""
    temperature: Temperature = 1.0
    """Softmax temperature, 0 (greedy, not for training) or at least 0.0001."""
    top_k: NonNegativeInt = 0
    """Sample among the k likeliest tokens; 0 is off. Refused in training, because the learner's
    distribution is the full one."""
    top_p: TopP = 1.0
    """Sample among the likeliest tokens that hold this much probability; 1 is off. Refused in
    training, as top_k."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, in addition to the end-of-sequence token."""
    slots: NonNegativeInt = 0
    """Rollouts decoded together by an engine, each in a KV slot; 0 takes all in flight, or for
    Stretto's own engine on a GPU as many as fit by the memory plan."""
    engines: Workers = 1
    """Generation engines; rollouts are spread over them."""
    prefill_tokens: PositiveInt = 4096
    """Limit of prompt tokens processed between two decode steps."""

    @property
    def most_skipped(self) -> int:
        return self.max_skipped * self.batch if self.skip_equal_groups else 0

    @property
    def engine_name(self) -> EngineName:
        """The engine, which is Stretto's own until ``auto`` is decided."""
        return "torch" if self.engine == "auto" else self.engine

    @property
    def capabilities(self) -> Capabilities:
        return ENGINES[self.engine_name]

    @property
    def known_args(self) -> dict[str, JsonValue]:
        """The engine arguments of Stretto's own engine, whose names are known."""
        return {} if self.capabilities.checks_arguments else self.engine_args

    @property
    def memory_share(self) -> float:
        """Share of a GPU's memory taken by an engine that sizes its cache."""
        able = self.capabilities
        return float(self.engine_args.get(able.share_argument, able.default_share))  # type: ignore[arg-type]

    @property
    def sleeps(self) -> bool:
        return bool(self.engine_args.get(self.capabilities.sleep_argument))

    @property
    def cuda_graphs(self) -> bool:
        return bool(self.engine_args.get("cuda_graphs", True))

    @property
    def speculative_tokens(self) -> int:
        return self._count("speculative_tokens", 0)

    @property
    def speculative_rows(self) -> int:
        return self._count("speculative_rows", 8)

    @property
    def speculative_model(self) -> str:
        return str(self.engine_args.get("speculative_model", ""))

    def _count(self, name: str, default: int) -> int:
        count = self.engine_args.get(name, default)
        return count if type(count) is int and count >= 0 else -1

    def rules(self, broken: Rules) -> None:
        """Check the rules of generation alone."""
        broken["batch-not-groups"] = self.batch % self.samples_per_prompt and (
            f"rollout.batch counts responses and must be a multiple of samples_per_prompt; "
            f"got {self.batch} and {self.samples_per_prompt}"
        )
        args, counts = self.known_args, {"speculative_tokens", "speculative_rows"}
        known_names = {"cuda_graphs", "speculative_model", *counts}
        unknown = args.keys() - known_names
        broken["unknown-engine-argument"] = unknown and (
            f"rollout.engine_args names '{min(unknown)}', and Stretto's own engine knows "
            f"{', '.join(sorted(known_names))}; leave it out, or set rollout.engine = 'vllm'"
        )
        wrong = [name for name in sorted(counts & args.keys()) if self._count(name, 0) < 0]
        broken["engine-argument-no-count"] = wrong and (
            f"rollout.engine_args: {wrong[0]} = {args[wrong[0]]!r} must be a whole number, 0 "
            "or more"
        )
        drafts = "speculative_model" in args
        broken["draft-without-tokens"] = (drafts and not self.speculative_tokens) and (
            "rollout.engine_args has a speculative_model, and no speculative_tokens that it may "
            "propose; set that, to 4 say"
        )
        broken["empty-stop-string"] = "" in self.stop and (
            "an empty string in `rollout.stop` would end every response at once; leave it out"
        )


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
"""Trackers with a built-in name."""


class ObserveConfig(Section):
    """Display, metrics and files of a run."""

    progress: Literal["auto", "rich", "plain", "off"] = "auto"
    """Live display. auto: rich on a terminal, else plain lines."""
    trackers: tuple[one_of(*TRACKERS), ...] = ()  # type: ignore[valid-type]
    """Trackers that get the metrics, in addition to metrics.jsonl. 'file.py:name' or
    'package.module:name' is your own (docs/observing.md)."""
    prometheus_port: Port = 0
    """Port on the loopback at which a Prometheus server can read the newest metrics; 0 for none."""
    samples: NonNegativeInt = 4
    """Responses per step written to samples.jsonl."""
    flight: bool = True
    """Write flight.log, with which 'stretto replay' repeats the run bit for bit."""
    checkpoint_minutes: Minutes = 10.0
    """Minutes between checkpoints to resume from. The first comes after a minute, the last at the
    end of the run. 0 writes none, only the model at the end."""
    checkpoint_every: NonNegativeInt = 0
    """Steps between checkpoints, instead of checkpoint_minutes; 0 uses those."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations on held-out prompts (task.held_out), with one before the first step
    and one after the last; 0 for none. The best one's model is kept."""
    eval_prompts: Rows = 200
    """Limit of prompts in an evaluation; each gets one greedy answer."""
    eval_patience: NonNegativeInt = 0
    """Consecutive evaluations without a better mean score after which the run ends; 0 never ends it
    early."""

    @property
    def checkpoints(self) -> bool:
        return self.checkpoint_every > 0 or self.checkpoint_minutes > 0

    def rules(self, broken: Rules) -> None:
        """Check that patience has evaluations to count."""
        broken["patience-without-evaluations"] = (self.eval_patience and not self.eval_every) and (
            f"observe.eval_patience = {self.eval_patience} counts evaluations, and "
            "observe.eval_every = 0 makes none; set it to a number of steps"
        )
