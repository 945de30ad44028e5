"""Objects that ``PPOTrainer`` is given: their names, models, adapters, and tokenised prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from peft import LoraConfig
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as BY_TYPE
from transformers import PreTrainedTokenizerBase

from stretto.errors import ConfigError, ModelError, TaskError, nearest
from stretto.models.heads import scalar_head
from stretto.tasks import Task, TaskRow
from stretto.trl.config import PPOConfig

COLUMN, MASK = "input_ids", "attention_mask"

_NAMES = (
    *("args", "processing_class", "model", "ref_model", "reward_model", "train_dataset"),
    *("value_model", "data_collator", "eval_dataset", "optimizers", "callbacks", "peft_config"),
)
_OLD_NAMES = {
    "config": "args",
    "policy": "model",
    "ref_policy": "ref_model",
    "tokenizer": "processing_class",
}
"""Names of arguments in TRL 0.12 and before, with their present names."""

_LORA_TAKEN = ("r", "lora_alpha", "target_modules")
_LORA_FREE = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_type"),
    *("peft_version", "revision", "runtime_config", "task_type"),
)
"""Arguments of a LoraConfig that change nothing here: there is no dropout, as in TRL's trainer."""


def by_present_names(arguments: Mapping[str, Any], old_names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names that they have now, those needed by every run among them;
    ``args`` is a PPOConfig.
    """
    named = dict(arguments)
    for old, value in old_names.items():
        if old not in _OLD_NAMES:
            raise ConfigError(
                f"PPOTrainer has no argument '{old}'. {nearest(old, _NAMES)}", "unknown-argument"
            )
        if named[_OLD_NAMES[old]] is not None:
            raise ConfigError(
                f"'{old}' is the old name of '{_OLD_NAMES[old]}'; give one of the two",
                "argument-twice",
            )
        named[_OLD_NAMES[old]] = value
    for name, value in named.items():
        if value is None and name != "ref_model":
            raise ConfigError(f"PPOTrainer needs {name}; give it", "argument-missing")
    args = named["args"]
    if not isinstance(args, PPOConfig):
        raise ConfigError(
            f"args must be a PPOConfig of stretto; got a {type(args).__module__}."
            f"{type(args).__qualname__}. Import both: from stretto import PPOConfig, PPOTrainer",
            "args-not-ppo-config",
        )
    return named


def refuse(collator: Any, optimizers: tuple[Any, Any]) -> None:
    """Refuse a collator that does more than pad, and optimizers."""
    if collator is not None and type(collator).__name__ != "DataCollatorWithPadding":
        raise ConfigError(
            f"data_collator = {type(collator).__name__}: prompts are read one at a time and never "
            "padded; leave it out, and do what it does to a row by dataset.map",
            "argument-refused",
        )
    if any(part is not None for part in optimizers or ()):
        raise ConfigError(
            "optimizers: policy and critic each have an AdamW of their own on float32 masters; "
            "leave it out, and set learning_rate, lr_scheduler_type, warmup_steps, weight_decay, "
            "adam_beta1 and adam_beta2 in PPOConfig",
            "argument-refused",
        )


def check_models(models: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> int:
    """Refuse models that cannot work together: that share weights, lack a scalar head or tokens of
    the tokenizer. Returns the number of token ids that all know.
    """
    owners: dict[int, str] = {}
    for name, model in models.items():
        for parameter in model.parameters():
            other = owners.setdefault(id(parameter), name)
            if other != name:
                raise ConfigError(
                    f"{name} and {other} share weights, and each is trained or kept for itself; "
                    "load one model for each (ref_model=None makes the copy by itself)",
                    "models-share-weights",
                )
    for name in ("reward_model", "value_model"):
        if name in models:
            labels = getattr(models[name].config, "num_labels", 1)
            if labels != 1:
                raise ModelError(
                    f"{name} must give one score (num_labels = 1); it has num_labels = {labels}. "
                    "Load it with AutoModelForSequenceClassification.from_pretrained(NAME, "
                    "num_labels=1)",
                    "head-not-scalar",
                )
            try:
                scalar_head(models[name])
            except ModelError as error:
                raise ModelError(f"{name}: {error}", "head-not-scalar") from error
    pad = tokenizer.pad_token_id
    needed = 1 + max(i for i in tokenizer.get_vocab().values() if i != pad)
    rows = {name: model.get_input_embeddings().weight.shape[0] for name, model in models.items()}
    for name, count in rows.items():
        if count < needed:
            raise ModelError(
                f"{name} knows {count} token ids, and processing_class has {needed}: another "
                "tokenizer than the model's? All models must read the same tokens",
                "model-lacks-tokens",
            )
    return int(min(rows.values()))


def lora_settings(peft_config: Any, policy: Any) -> dict[str, Any]:
    """Return the settings of the section ``model`` that ask for a policy's adapters."""
    if type(peft_config) is not LoraConfig:
        raise ConfigError(
            f"peft_config = {type(peft_config).__name__}: the adapters here are LoRA's; give a "
            "LoraConfig",
            "peft-not-lora",
        )
    plain = LoraConfig()
    for field in fields(peft_config):
        value, default = getattr(peft_config, field.name), getattr(plain, field.name)
        if field.name not in (*_LORA_TAKEN, *_LORA_FREE) and value != default:
            raise ConfigError(
                f"peft_config: {field.name} = {value!r} is not supported; LoRA here has r, "
                "lora_alpha and target_modules. Leave it out",
                "lora-argument-refused",
            )
    return {
        "lora_rank": peft_config.r,
        "lora_alpha": float(peft_config.lora_alpha),
        "lora_targets": _targets(peft_config.target_modules, policy),
    }


def _targets(targets: Any, policy: Any) -> tuple[str, ...]:
    if targets is None:
        kind = policy.config.model_type
        if kind not in BY_TYPE:
            raise ConfigError(
                f"peft_config: peft has no target_modules of its own for '{kind}'; name them, or "
                "set target_modules='all-linear'"
            )
        targets = BY_TYPE[kind]
    if isinstance(targets, str) and targets != "all-linear":
        raise ConfigError(
            f"peft_config: target_modules = '{targets}' is a pattern; give a list of names, or "
            "'all-linear'",
            "lora-targets-pattern",
        )
    return (targets,) if isinstance(targets, str) else tuple(sorted(targets))


class TokenTask(Task):
    """Prompts from a column ``input_ids``, which the actor reads as they are.

    Padding is left out: what ``attention_mask`` marks where the dataset has that column, else pad
    tokens at either end. Every row is checked at construction.

    Args:
        rows: a ``datasets.Dataset``, or any sequence of mappings; read again whenever it is asked.
        vocabulary: token ids that the models know are below this.

    Attributes:
        longest: tokens of the longest prompt.
    """

    has_verifier = False

    def __init__(
        self, rows: Any, tokenizer: PreTrainedTokenizerBase, name: str, vocabulary: int
    ) -> None:
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise TaskError(
                f"{name} must have a length and rows by number; got {type(rows).__name__}. Give a "
                "datasets.Dataset (one split of a DatasetDict), or a list of rows",
                "dataset-not-sequence",
            )
        if isinstance(rows, Mapping):
            names = ", ".join(map(str, rows))
            raise TaskError(f"{name} is several datasets ({names}); give one", "several-datasets")
        if not len(rows):
            raise TaskError(f"{name} holds no rows; it needs at least one", "no-rows")
        self._rows, self._tokenizer, self._name = rows, tokenizer, name
        self.longest = 0
        for index in range(len(rows)):
            tokens = self._tokens(index)
            if max(tokens) >= vocabulary or min(tokens) < 0:
                raise TaskError(
                    f"{name}, row {index}: a token id is {max(tokens)}, and the models know ids "
                    f"below {vocabulary}; tokenise the prompts with the processing_class that "
                    "belongs to the models",
                    "token-out-of-range",
                )
            self.longest = max(self.longest, len(tokens))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def row(self, index: int) -> TaskRow:
        """The row at ``index``, with its prompt as tokens and as text."""
        tokens = self._tokens(index)
        return TaskRow(prompt=str(self._tokenizer.decode(list(tokens))), tokens=tokens, index=index)

    def verify(self, index: int, response: str) -> float:
        """Raise TaskError, as there is no verifier."""
        self.require_verifier()
        raise AssertionError

    def _tokens(self, index: int) -> tuple[int, ...]:
        row = self._rows[index]
        if not isinstance(row, Mapping) or COLUMN not in row:
            columns = f"its columns: {', '.join(row)}" if isinstance(row, Mapping) else repr(row)
            raise TaskError(
                f"{self._name}, row {index} has no column '{COLUMN}' ({columns[:200]}). Tokenise "
                "the prompts first, as for TRL: dataset.map(lambda row: "
                "{'input_ids': tokenizer(row['prompt'])['input_ids']})",
                "missing-column",
            )
        tokens = [int(token) for token in row[COLUMN]]
        if MASK in row:
            tokens = [t for t, seen in zip(tokens, row[MASK], strict=True) if seen]
        else:
            pad = self._tokenizer.pad_token_id
            kept = [i for i, token in enumerate(tokens) if token != pad]
            tokens = tokens[kept[0] : kept[-1] + 1] if kept else []
        if not tokens:
            raise TaskError(
                f"{self._name}, row {index} has no tokens in '{COLUMN}'; drop the row, or see why "
                "its prompt is empty",
                "no-tokens",
            )
        return tuple(tokens)
