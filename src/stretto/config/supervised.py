"""Settings of supervised training: of a language model on demonstrations, of a reward model on pairs."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stretto.config.base import (
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Section,
    Seed,
)
from stretto.config.sections import ModelConfig, ObserveConfig
from stretto.config.training import OptimizerConfig

_WITHOUT_EFFECT = ("samples", "checkpoint_minutes", "checkpoint_every")
"""Settings of observation without effect on supervised training, which refuses them."""


class RowsConfig(Section):
    """Rows of a file or of the hub, and how they become tokens."""

    name: str = ""
    """A .jsonl / .json / .parquet file, or a hub dataset."""
    split: str = "train"
    """Split of a hub dataset."""
    size: NonNegativeInt = 0
    """Rows to use; 0 takes all."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the rows, rounded up, that is measured on and not trained on; rows with one prompt stay together. 0 holds none out."""
    max_tokens: PositiveInt = 1024
    """Longer sequences, prompt counted, are left out whole, counted and reported."""
    on_error: Literal["stop", "drop"] = "stop"
    """Reaction to a row that cannot be used (empty, malformed, two equal sides). stop: end the run. drop: leave it out and report the number."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Apply the tokenizer's chat template to text. auto: where the tokenizer has one, but for pairs without a prompt of their own, whose texts are taken as they are."""
    system: str = ""
    """System message put before the prompt; text prompts then become conversations."""

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.system and self.chat == "off":
            raise ValueError(
                "data.system is set, and data.chat = 'off': a system message takes a chat "
                "template; set data.chat to 'auto', or data.system to ''"
            )
        return self


class DemonstrationsConfig(RowsConfig):
    """Demonstrations that supervised fine-tuning learns from."""

    messages_column: str = "messages"
    """Column with conversations, whose assistant turns are all trained on. Without it in the data, or with '', the next two columns are read."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    completion_column: str = "completion"
    """Column with the completion, which is trained on: text, or a list of chat messages."""


class PairsConfig(RowsConfig):
    """Pairs of responses that a reward model learns from."""

    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the pairs, rounded up, that is measured on and not trained on; pairs with one prompt stay together. 0 holds none out."""
    prompt_column: str = "prompt"
    """Column with the prompt: text or messages. Without it in the data, the two sides must share their first turns or messages, which are then the prompt. With '', the prompt is the text that both begin with."""
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
    """Settings that both kinds of supervised training have."""

    seed: Seed = 0
    """Seed of data order, of the held-out part and of initialisation."""
    steps: NonNegativeInt = 0
    """Updates to take, over as many epochs as that needs; 0 takes training.epochs of them."""
    batch: PositiveInt = 32
    """Rows in one update."""
    out: str = "runs"
    """Folder in which the run gets a folder of its own."""
    threads: NonNegativeInt = 0
    """CPU threads for tensor work; 0 leaves torch's choice."""
    measure_every: NonNegativeInt = 0
    """Updates between measurements on the held-out part; 0 measures at the start and at the end only."""
    model: ModelConfig = ModelConfig()
    data: RowsConfig = RowsConfig()
    training: SupervisedTrainingConfig = SupervisedTrainingConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.steps and self.training.epochs != 1:
            raise ValueError(
                f"steps = {self.steps} and training.epochs = {self.training.epochs} both say how "
                "long to train; set one of them (steps = 0 takes whole epochs)"
            )
        for key in _WITHOUT_EFFECT:
            value = getattr(self.observe, key)
            if value != ObserveConfig.model_fields[key].default:
                raise ValueError(
                    f"observe.{key} = {value} has no effect in supervised training, which draws no "
                    "samples and writes no checkpoints; leave it out"
                )
        return self


class SftConfig(SupervisedConfig):
    """Everything that supervised fine-tuning is made of."""

    packing: bool = False
    """Lay several sequences into one row of at most data.max_tokens, none of which sees another: less padding, for GPUs (on a CPU it costs more than it saves). No effect on the gradient."""
    data: DemonstrationsConfig = DemonstrationsConfig()


class RewardModelConfig(SupervisedConfig):
    """Everything that the training of a reward model is made of."""

    center_coef: NonNegative = 0.01
    """Weight of (r_chosen + r_rejected)^2 in the loss, which keeps rewards around zero; 0 is off."""
    data: PairsConfig = PairsConfig()
