"""Checks of the arguments of ``PPOTrainer``, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stretto.errors import ConfigError, ModelError, nearest
from stretto.trl.config import PPOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAMES = (
    "args",
    "processing_class",
    "model",
    "ref_model",
    "reward_model",
    "train_dataset",
    "value_model",
    "data_collator",
    "eval_dataset",
    "optimizers",
    "callbacks",
    "peft_config",
)

_OLD_NAMES = {
    "config": "args",
    "policy": "model",
    "ref_policy": "ref_model",
    "tokenizer": "processing_class",
}
"""Names of arguments in TRL 0.12 and before, with their present names."""


def by_present_names(given: Mapping[str, Any], old_names: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the names that they have now; all that a run cannot do without is there."""
    named = dict(given)
    for old, value in old_names.items():
        if old not in _OLD_NAMES:
            raise ConfigError(f"PPOTrainer has no argument '{old}'. {nearest(old, _NAMES)}")
        if named[_OLD_NAMES[old]] is not None:
            raise ConfigError(
                f"'{old}' is the old name of '{_OLD_NAMES[old]}'; give one of the two"
            )
        named[_OLD_NAMES[old]] = value
    for name, value in named.items():
        if value is None and name != "ref_model":
            raise ConfigError(f"PPOTrainer needs {name}; give it")
    return named


def arguments_of(value: Any) -> PPOConfig:
    """Return ``args``, or refuse them unless they are a ``PPOConfig``."""
    if not isinstance(value, PPOConfig):
        raise ConfigError(
            f"args must be a PPOConfig of stretto; got a {type(value).__module__}."
            f"{type(value).__qualname__}. Import both: from stretto import PPOConfig, PPOTrainer"
        )
    return value


def refuse_objects(collator: Any, optimizers: tuple[Any, Any]) -> None:
    """Refuse a collator that does more than pad, and optimizers."""
    if collator is not None and type(collator).__name__ != "DataCollatorWithPadding":
        raise ConfigError(
            f"data_collator = {type(collator).__name__}: prompts are read one at a time and never "
            "padded; leave it out, and do what it does to a row by dataset.map"
        )
    if any(part is not None for part in optimizers or ()):
        raise ConfigError(
            "optimizers: policy and critic each have an AdamW of their own on float32 masters; "
            "leave it out, and set learning_rate, lr_scheduler_type, warmup_steps, weight_decay, "
            "adam_beta1 and adam_beta2 in PPOConfig"
        )


def check_models(models: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> int:
    """Refuse models that cannot work together; returns the number of token ids that all know.

    Raises:
        ConfigError: two models are one object, or share weights that are trained.
        ModelError: a scalar model has no scalar head, or a model lacks tokens of the tokenizer.
    """
    from stretto.models.heads import scalar_head

    there = {name: model for name, model in models.items() if model is not None}
    owners: dict[int, str] = {}
    for name, model in there.items():
        for parameter in model.parameters():
            other = owners.setdefault(id(parameter), name)
            if other != name:
                raise ConfigError(
                    f"{name} and {other} share weights, and each is trained or kept for itself; "
                    "load one model for each (ref_model=None makes the copy by itself)"
                )
    for name in ("reward_model", "value_model"):
        if name in there:
            labels = getattr(there[name].config, "num_labels", 1)
            if labels != 1:
                raise ModelError(
                    f"{name} must give one score (num_labels = 1); it has num_labels = {labels}. "
                    "Load it with AutoModelForSequenceClassification.from_pretrained(NAME, "
                    "num_labels=1)"
                )
            try:
                scalar_head(there[name])
            except ModelError as error:
                raise ModelError(f"{name}: {error}") from error
    pad = tokenizer.pad_token_id
    needed = 1 + max(i for i in tokenizer.get_vocab().values() if i != pad)
    rows = {name: model.get_input_embeddings().weight.shape[0] for name, model in there.items()}
    for name, count in rows.items():
        if count < needed:
            raise ModelError(
                f"{name} knows {count} token ids, and processing_class has {needed}: another "
                "tokenizer than the model's? All models must read the same tokens"
            )
    return int(min(rows.values()))
