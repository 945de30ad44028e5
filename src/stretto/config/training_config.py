"""Settings of training: the optimizer, the learner, actor-critic pipelines, and supervised
training."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from stretto.config.sections import (
    ModelConfig,
    NonNegative,
    NonNegativeInt,
    ObserveConfig,
    Positive,
    PositiveInt,
    Rows,
    Rules,
    Seconds,
    Section,
    Seed,
    TemplateArguments,
    Workers,
    WorkersOrAuto,
)
from stretto.layout import Layout

Beta = Annotated[float, Field(ge=0, lt=1)]
Trained = Literal["actor", "critic"]
MODELS: tuple[Trained, Trained] = ("actor", "critic")


class OptimizerConfig(Section):
    """Optimizer: AdamW on fp32 masters."""

    optim: Literal["adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"] = (
        "adamw_torch_fused"
    )
    """Optimizer, by transformers' names. All but the default are bitsandbytes' (extra
    bitsandbytes), for learners in one process. 8bit: moments in 8 bits, a quarter of the memory.
    paged: moments move to the host's memory if a GPU's is full."""
    lr: Positive = 3e-6
    """Peak learning rate (of the actor)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to zero at the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rates rise from zero."""
    weight_decay: NonNegative = 0.0
    """Weight decay of AdamW, for all weights except norms and biases."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Betas of AdamW."""
    grad_clip: NonNegative = 1.0
    """Largest gradient norm of each model; 0 is off."""
    epochs: PositiveInt = 1
    """Passes over a batch; in supervised training, over the data."""
    microbatch_tokens: NonNegativeInt = 0
    """Tokens (including padding) in one pass of a training or scoring model; no effect on the
    gradient. 0 takes 1,024 on a CPU, 512 if it trains actor and critic at the same time, and on a
    GPU up to 16,384 as the memory plan allows."""


def token_budget(setting: int, device: object, passes: int = 1) -> int:
    """Return the tokens of one pass: the setting, or if 0 a default for the device.

    A CPU is fastest if its caches hold a pass, and small passes pad less. ``passes`` at the same
    time share its caches and memory. A GPU needs more to be fully used. ``device`` is torch's, or
    its name.
    """
    return setting or (1024 // passes if str(device).startswith("cpu") else 16_384)


class TrainingConfig(OptimizerConfig):
    """Steps of the learner."""

    critic_lr: Positive = 1e-5
    """The critic's peak learning rate."""
    minibatches: PositiveInt = 1
    """Optimizer updates in one pass."""
    ratio_tolerance: NonNegative = 0.0
    """Largest root mean square difference between the log-probs of engine and learner, on responses
    of the same weights. 0 measures the effect of rounding at the start, and allows twice that
    (docs/ppo.md)."""

    match_engine: bool = False
    """Compute log-probs of engine and learner by the same sums, with equal bits on responses of the
    same weights (docs/ppo.md). For Stretto's engine, whole models in one process each, and dense
    decoders. Slower."""

    @property
    def updates(self) -> int:
        return self.epochs * self.minibatches


class PipelineConfig(Section):
    """Training of actor and critic in this process, or cut into stages on several ranks."""

    ranks: WorkersOrAuto = 0
    """Processes that train, each with a stage of the actor and one of the critic, on CPUs (sharing
    their threads) or a GPU each; 0 trains in this process."""
    stage_counts: tuple[WorkersOrAuto, WorkersOrAuto] = (0, 0)
    """Pipeline stages of the actor and of the critic. Ranks left over by one pipeline hold further
    ones, which share the micro-batches (data parallelism). 0 takes as many as there are ranks."""
    stage_slices: tuple[Workers, Workers] = (1, 1)
    """Slices of the linear layers in each stage of the actor and of the critic (tensor
    parallelism), on a rank each. They divide the model's heads, and one number the other. The model
    with fewer slices has several stages beside one of the other's."""
    schedule: Literal["fused", "serial"] = "fused"
    """fused: both models at once, in opposite directions, so that each fills the other's bubbles,
    by a schedule that is searched for. serial: 1F1B of the actor, then of the critic."""
    micro_batches: NonNegativeInt = 0
    """Micro-batches of a mini-batch, over all pipelines; fewer if responses were dropped and too
    few are left. 0 follows training.microbatch_tokens, rounded up until every pipeline gets the
    same number, or down if a mini-batch has too few responses for that."""
    seconds: Seconds = 2.0
    """Time limit of a search for a fused schedule, in seconds. Searches run for each new number of
    micro-batches, and again once latencies are measured."""

    def slices_of(self, model: Trained) -> int:
        return self.stage_slices[model == "critic"]

    def merged(self, model: Trained) -> int:
        """Return the stages of a model beside one of the model with more slices."""
        return max(self.stage_slices) // self.slices_of(model)

    def stages_of(self, model: Trained) -> int:
        return self.stage_counts[model == "critic"] or self.ranks // self.slices_of(model)

    def describe_stages(self, model: Trained) -> str:
        derived = "" if self.stage_counts[model == "critic"] else ", as many as ranks"
        return f"pipeline.stage_counts of the {model} ({self.stages_of(model)}{derived})"

    @property
    def _slots(self) -> int:
        """The smallest number of stages side by side that pipelines of both models fill."""
        wide = (self.stages_of(model) // self.merged(model) for model in MODELS)
        return max(math.lcm(*wide), 1)

    @property
    def replicas(self) -> int:
        """How often the smallest block of pipelines of both models is repeated."""
        return self.ranks // max(self.stage_slices) // self._slots

    def pipelines(self, model: Trained) -> int:
        """Return the pipelines of a model in each replica."""
        return self._slots * self.merged(model) // self.stages_of(model)

    def layout_of(self, model: Trained) -> Layout:
        copies = self.replicas * self.pipelines(model)
        return Layout(dp=copies, pp=self.stages_of(model), tp=self.slices_of(model))

    @staticmethod
    def settings_of(layout: Layout) -> dict[str, Any]:
        """Return the settings by which both models have a layout."""
        counts, slices = (layout.pp, layout.pp), (layout.tp, layout.tp)
        return {"ranks": layout.ranks, "stage_counts": counts, "stage_slices": slices}

    @property
    def multiple(self) -> int:
        return self.replicas * math.lcm(self.pipelines("actor"), self.pipelines("critic"))

    def rules(self, broken: Rules) -> None:
        """Check that stages and micro-batches divide evenly."""
        broken["one-pipeline-rank"] = self.ranks == 1 and (
            "pipeline.ranks = 1 makes one stage of a model, which is no pipeline; set it to 2 or "
            "more, or to 0 to train in this process"
        )
        fewer, more = sorted(self.stage_slices)
        uneven_slices = more % fewer or self.ranks % more
        broken["slices-not-divisor"] = (self.ranks and uneven_slices) and (
            f"pipeline.stage_slices = {list(self.stage_slices)}: one number must divide the other, "
            f"and the larger one pipeline.ranks = {self.ranks}"
        )
        if broken["slices-not-divisor"]:
            return
        uneven = [m for m in MODELS if self.ranks and self._is_uneven(m)]
        broken["stages-not-divisor"] = uneven and (
            f"{self.describe_stages(uneven[0])}: pipelines of so many stages do not fill "
            f"pipeline.ranks = {self.ranks} with pipeline.stage_slices = "
            f"{list(self.stage_slices)}; choose a divisor, or 0 for as many as ranks"
        )
        shares = self.ranks and not uneven
        broken["micro-batches-not-multiple"] = (shares and self.micro_batches % self.multiple) and (
            f"pipeline.micro_batches = {self.micro_batches} cannot be shared evenly by "
            f"{self.pipelines('actor')} pipelines of the actor and {self.pipelines('critic')} "
            f"of the critic; choose a multiple of {self.multiple}, or 0"
        )

    def _is_uneven(self, model: Trained) -> bool:
        """Whether stages of a model do not fill the ranks."""
        stages, merged = self.stages_of(model), self.merged(model)
        slots = self.ranks // max(self.stage_slices)
        return bool(stages % merged or slots % (stages // merged))


WITHOUT_EFFECT = (
    *("samples", "flight", "checkpoint_minutes", "checkpoint_every"),
    *("eval_every", "eval_prompts", "eval_patience"),
)
"""Settings of observation that supervised training refuses, because they have no effect on it."""


class RowsConfig(Section):
    """Rows of a file or of the hub, and how they become tokens."""

    name: str = ""
    """A file (.jsonl, .json, .csv, also with .gz; .parquet), a folder of such files or of
    save_to_disk, or a hub dataset."""
    split: str = "train"
    """Split of a hub dataset, or of a folder."""
    size: NonNegativeInt = 0
    """Rows to use; 0 takes all."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the rows, rounded up, used for measurement instead of training; rows with one prompt
    stay together. 0 holds none out."""
    max_tokens: PositiveInt = 1024
    """Longer sequences, including the prompt, are skipped, counted and reported."""
    on_error: Literal["stop", "drop"] = "stop"
    """Reaction to an unusable row (empty, malformed, two equal sides). stop: end the run. drop:
    skip it and report the number."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Apply the tokenizer's chat template to text. auto: if the tokenizer has one, but not for
    pairs without a prompt column, whose texts are taken unchanged."""
    template_arguments: TemplateArguments = {}
    """Arguments of the chat template for every conversation, for example { enable_thinking = false
    }. A row's own, in the column chat_template_kwargs, take precedence. That is also an alias of
    this setting."""
    system: str = ""
    """System message put before the prompt; text prompts then become conversations."""

    def rules(self, broken: Rules) -> None:
        """Check that a system message can be put before prompts."""
        broken["system-without-chat"] = (self.system and self.chat == "off") and (
            "data.system is set, and data.chat = 'off': a system message takes a chat "
            "template; set data.chat to 'auto', or data.system to ''"
        )


class DemonstrationsConfig(RowsConfig):
    """Demonstrations for supervised fine-tuning."""

    messages_column: str = "messages"
    """Column with conversations, whose assistant turns are all trained on. If the data lacks it, or
    with '', the next two columns are read. If all three are the defaults, 'conversations',
    'instruction' and 'output', or 'text' also work."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    completion_column: str = "completion"
    """Column with the completion, which is trained on: text, or a list of chat messages."""


class PairsConfig(RowsConfig):
    """Pairs of responses for a reward model."""

    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the pairs, rounded up, used for measurement instead of training; pairs with one
    prompt stay together. 0 holds none out."""
    prompt_column: str = "prompt"
    """Column with the prompt: text or messages. If the data lacks it, the two sides must begin
    alike: the messages, turns or words that they share are the prompt. With '', no column is
    read."""
    chosen_column: str = "chosen"
    """Column with the preferred response: text or messages."""
    rejected_column: str = "rejected"
    """Column with the other response: text or messages."""


class SupervisedTrainingConfig(OptimizerConfig):
    """Optimizer of supervised training: AdamW on fp32 masters."""

    lr: Positive = 1e-5
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Learning rate after the warm-up: constant, or falling to zero at the last update."""


class SupervisedConfig(Section):
    """Settings that both kinds of supervised training share."""

    seed: Seed = 0
    """Seed of data order, of the held-out part and of initialisation."""
    steps: NonNegativeInt = 0
    """Updates to take, over as many epochs as necessary; 0 takes training.epochs of them."""
    batch: Rows = 32
    """Rows in one update."""
    out: str = "runs"
    """Folder in which the run gets its own folder."""
    threads: WorkersOrAuto = 0
    """CPU threads for tensor work; 0 leaves torch's choice."""
    measure_every: NonNegativeInt = 0
    """Updates between measurements on the held-out part; 0 measures only at the start and at the
    end."""
    model: ModelConfig = ModelConfig()
    data: RowsConfig = RowsConfig()
    training: SupervisedTrainingConfig = SupervisedTrainingConfig()
    observe: ObserveConfig = ObserveConfig()

    def rules(self, broken: Rules) -> None:
        """Check that only one setting determines the length of training, and that all have an
        effect."""
        broken["steps-and-epochs"] = (self.steps and self.training.epochs != 1) and (
            f"steps = {self.steps} and training.epochs = {self.training.epochs} both say how "
            "long to train; set one of them (steps = 0 takes whole epochs)"
        )
        idle = next(filter(self.observe.is_set, WITHOUT_EFFECT), "")
        broken["setting-without-effect"] = idle and (
            f"observe.{idle} = {getattr(self.observe, idle)} has no effect in supervised "
            "training, which draws no samples and writes no checkpoints; leave it out"
        )


class SftConfig(SupervisedConfig):
    """All settings of supervised fine-tuning."""

    packing: bool = False
    """Pack several sequences into one row of up to data.max_tokens, without attention between them:
    less padding, for GPUs (on a CPU it costs more than it saves). No effect on the gradient."""
    data: DemonstrationsConfig = DemonstrationsConfig()


class RewardModelConfig(SupervisedConfig):
    """All settings of reward model training."""

    center_coef: NonNegative = 0.01
    """Weight of (r_chosen + r_rejected)^2 in the loss, which keeps rewards around zero; 0 is
    off."""
    data: PairsConfig = PairsConfig()
