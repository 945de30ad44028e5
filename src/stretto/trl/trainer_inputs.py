"""Validates and converts objects passed to trainers: models, adapters, rewards and prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers, check_target_module_exists
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as BY_TYPE
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from stretto.config import ENVIRONMENT, EnvironmentConfig, TaskConfig
from stretto.environments.adapters import is_trl
from stretto.environments.executors import LocalEnvironment, settings_of
from stretto.environments.objects import ENVIRONMENTS, named_objects
from stretto.environments.renderer import open_bridge
from stretto.errors import ConfigError, ModelError, TaskError, require
from stretto.models.backend import pick_device, pick_dtype
from stretto.models.heads import scalar_head
from stretto.models.info import explained
from stretto.models.load import load_tokenizer
from stretto.models.resolve import resolve
from stretto.models.weights import require_trainable
from stretto.saying import silent
from stretto.tasks import Task, TaskRow
from stretto.tasks.encode import Encoder
from stretto.tasks.messages import as_prompt
from stretto.tasks.prompts import Render, refuse_templated, render
from stretto.tasks.tables import of_row
from stretto.trl.arguments import device, mapping

COLUMN, MASK = "input_ids", "attention_mask"
PROMPT = "prompt"
EMPTY = {"role": "user", "content": ""}
"""Prompt of rows without one. The environment provides the prompt when it is reset."""

IMAGES = ("image", "images")
"""Image columns of TRL's vision-language training, which is not supported."""

_NOT_HERE = {
    "rollout_func": "responses are made by the engine, and answered by tools or an environment; "
    "give these as tools or environment_factory",
    **dict.fromkeys(
        ("compute_metrics", "preprocess_logits_for_metrics"),
        "nothing computes metrics of logits here; leave it out",
    ),
}
"""Refused arguments of trainers, with the reason and the remedy."""

_LORA_TAKEN = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "use_rslora", "use_dora"),
)
_LORA_FREE = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_type"),
    *("peft_version", "revision", "runtime_config", "task_type"),
)
"""Arguments of a LoraConfig that have no effect here."""


def check_args(args: Any, kind: type, trainer: str) -> None:
    """Raise ConfigError if ``args`` is not of the trainer's own config class."""
    if not isinstance(args, kind):
        name = kind.__name__
        raise ConfigError(
            f"args must be a {name} of stretto; got a {type(args).__module__}."
            f"{type(args).__qualname__}. Import both: from stretto import {name}, {trainer}",
            "args-of-other-class",
        )


def refuse(collator: Any, optimizers: tuple[Any, Any], **others: Any) -> None:
    """Raise ConfigError for optimizers, other set arguments and collators that do not just pad."""
    for name, value in others.items():
        if value:
            raise ConfigError(f"{name} = {value!r:.80}: {_NOT_HERE[name]}", "argument-refused")
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
            "adam_beta1 and adam_beta2 in args",
            "argument-refused",
        )


def bring_to_dtype(models: Mapping[str, Any], args: Any) -> Literal["float32", "bfloat16"]:
    """Return the policy's dtype. ``bf16`` converts all models to bfloat16. As in TRL, ``bf16=None``
    means True on a GPU that supports bfloat16.
    """
    place = pick_device(device(args))
    bf16 = args.bf16
    if bf16 is None:
        bf16 = place.type == "cuda" and pick_dtype("auto", place) is torch.bfloat16
    if bf16:
        for model in models.values():
            if not is_quantized(model):
                model.to(torch.bfloat16)
    for name in ("model", "value_model"):
        if name in models:
            require_trainable(models[name], name)
    dtype = next(models["model"].parameters()).dtype
    return "bfloat16" if dtype is torch.bfloat16 else "float32"


def check_shared(models: Mapping[str, Any]) -> None:
    """Raise ConfigError for models that share weights."""
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


def check_models(models: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of token ids that all models have embeddings for. Raises StrettoError if
    models share weights, lack a scalar head or lack tokens.
    """
    check_shared(models)
    for name in ("reward_model", "value_model"):
        if name in models:
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
    """Return the settings of the section ``model`` for the policy's adapters."""
    if type(peft_config) is not LoraConfig:
        raise ConfigError(
            f"peft_config = {type(peft_config).__name__}: the adapters here are LoRA's; give a "
            "LoraConfig",
            "peft-not-lora",
        )
    plain = LoraConfig()
    for name in (lora_field.name for lora_field in fields(peft_config)):
        value, default = getattr(peft_config, name), getattr(plain, name)
        if name not in (*_LORA_TAKEN, *_LORA_FREE) and value != default:
            raise ConfigError(
                f"peft_config: {name} = {value!r} is not supported; LoRA here has "
                f"{', '.join(_LORA_TAKEN)}. Leave it out",
                "lora-argument-refused",
            )
    kinds = [kind for kind in ("rslora", "dora") if getattr(peft_config, f"use_{kind}")]
    if len(kinds) > 1:
        raise ConfigError(
            "peft_config: use_rslora and use_dora are not supported together; leave one out",
            "lora-argument-refused",
        )
    return {
        "lora_rank": peft_config.r,
        "lora_alpha": float(peft_config.lora_alpha),
        "lora_kind": kinds[0] if kinds else "lora",
        "lora_targets": _targets(peft_config, policy),
        "load_in_4bit": is_quantized(policy),
    }


def lora_notes(peft_config: Any) -> list[str]:
    dropout = getattr(peft_config, "lora_dropout", 0.0)
    why = "adapters have no dropout, so that the policy that samples is the one that is trained"
    return [f"without effect: lora_dropout = {dropout} ({why})"] if dropout else []


def is_quantized(model: Any) -> bool:
    """Return whether the weights are in 4 bits. Raises ConfigError for other quantizations."""
    method = getattr(model, "quantization_method", None)
    if method is not None and not getattr(model, "is_loaded_in_4bit", False):
        raise ConfigError(
            f"the model is quantized by {method}, and adapters are trained here beside weights in "
            "4 bits of bitsandbytes; load it with BitsAndBytesConfig(load_in_4bit=True)",
            "quantization-refused",
        )
    return method is not None


def _targets(peft_config: Any, policy: Any) -> tuple[str, ...]:
    """Return peft's target layers by the ends of their names, or in full if ambiguous."""
    targets = peft_config.target_modules
    if targets is None:
        kind = policy.config.model_type
        if kind not in BY_TYPE:
            raise ConfigError(
                f"peft_config: peft has no target_modules of its own for '{kind}'; name them, or "
                "set target_modules='all-linear'"
            )
        targets = BY_TYPE[kind]
    if not peft_config.exclude_modules and peft_config.layers_to_transform is None:
        if targets == "all-linear":
            return (targets,)
        if not isinstance(targets, str):
            return tuple(sorted(targets))
    config = replace(peft_config, target_modules=targets)
    _maybe_include_all_linear_layers(config, policy)
    modules = [name for name, _ in policy.named_modules()]
    names = {name for name in modules if name and check_target_module_exists(config, name)}
    if not names:
        raise ConfigError(
            f"peft_config: target_modules = {targets!r} fits no layer of {type(policy).__name__}, "
            "after exclude_modules and layers_to_transform; such a name is "
            f"'{modules[-1]}', which a pattern has to match as a whole",
            "no-adapters-there",
        )
    ends = {name.rpartition(".")[2] for name in names}
    clashes = {name for name in modules if name.rpartition(".")[2] in ends} - names
    return tuple(sorted(names if clashes else ends))


@dataclass(frozen=True)
class RewardSources:
    """Reward sources of a run, with functions and (model, tokenizer) pairs by name."""

    sources: Sequence[str] = ()
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    models: Mapping[str, tuple[nn.Module, PreTrainedTokenizerBase]] = field(default_factory=dict)


def rewards_of(given: Any, tokenizers: Any, args: Any) -> RewardSources:
    """Name reward functions and models (one or a list) by their name or its last part. A string
    names a model to load.
    """
    listed = list(given) if isinstance(given, list | tuple) else [given]
    if not listed or None in listed:
        raise ConfigError("reward_funcs says what scores, and is missing; give it", "no-rewards")
    classes = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
    classes = classes * len(listed) if classes == [None] else classes
    if len(classes) != len(listed):
        raise ConfigError(
            f"reward_processing_classes has {len(classes)} entries for {len(listed)} reward "
            "functions; give one for each, None for a function",
            "reward-classes-count",
        )
    functions: dict[str, Callable[..., Any]] = {}
    models: dict[str, tuple[nn.Module, PreTrainedTokenizerBase]] = {}
    sources: list[str] = []
    for reward, tokenizer in zip(listed, classes, strict=True):
        function = not isinstance(reward, str | nn.Module)
        name = _name_of(reward)
        source = name if function else f"model:{name}"
        while source in (*sources, "task"):
            source += "_"
        sources.append(source)
        if function:
            functions[source] = reward
        else:
            models[source] = _reward_model(reward, tokenizer, args)
    return RewardSources(sources, functions, models)


def missing_eos(end: int | None, penalty: float) -> Callable[..., list[float]]:
    """Return TRL's penalty for responses without the end token, as a reward function.

    The setting ``reward.missing_eos`` cannot do it: without a stop token, no response ends.
    """

    def judge(completion_ids: list[list[int]]) -> list[float]:
        return [0.0 if end in tokens else -penalty for tokens in completion_ids]

    return judge


def _name_of(reward: Any) -> str:
    if isinstance(reward, str | nn.Module):
        config: Any = getattr(reward, "config", None)
        name = reward if isinstance(reward, str) else str(getattr(config, "name_or_path", ""))
        return Path(name).name or "reward_model"
    if isinstance(reward, partial):
        return _name_of(reward.func)
    return str(getattr(reward, "__name__", type(reward).__name__))


def _reward_model(reward: Any, tokenizer: Any, args: Any) -> tuple[nn.Module, Any]:
    model = reward
    if isinstance(reward, str):
        model = load(AutoModelForSequenceClassification, reward, args, num_labels=1)
    if tokenizer is None:
        name = str(getattr(model.config, "name_or_path", ""))
        if not name:
            raise ConfigError(
                f"nothing names the tokenizer of the reward model {type(model).__name__}; give it "
                "in reward_processing_classes",
                "tokenizer-of-object",
            )
        tokenizer = load_tokenizer(resolve(name, silent), args.trust_remote_code)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def load(kind: Any, name: str, args: Any, **more: Any) -> Any:
    """Load a model with an Auto class and ``args.model_init_kwargs``, in float32 by default."""
    model_kwargs = mapping(args.model_init_kwargs, "model_init_kwargs")
    if model_kwargs.get("device_map") in (None, "auto"):
        model_kwargs.pop("device_map", None)  # the run places the model
    how = {"dtype": "float32", "trust_remote_code": args.trust_remote_code, **model_kwargs, **more}
    if how.get("quantization_config"):
        require("bitsandbytes", "bitsandbytes", "quantization_config")
        how["device_map"] = {"": pick_device(device(args))}
        if args.bf16:
            how = {**how, "dtype": "bfloat16", **model_kwargs}
    path = resolve(name, silent)
    with explained(path, "the model"):
        return kind.from_pretrained(str(path), **how)


def check_objects(model: Any, tokenizer: Any, callbacks: Any) -> None:
    """Raise ConfigError for arguments that are not the transformers objects TRL expects."""
    rule = ""
    if not isinstance(model, nn.Module | str):
        rule = f"model is a model or its name; got {model!r}"
    elif tokenizer is not None and not hasattr(tokenizer, "pad_token"):
        rule = f"processing_class is a tokenizer; got {tokenizer!r}. AutoTokenizer loads one"
    for callback in callbacks or ():
        if not hasattr(callback, "on_init_end"):
            rule = f"callbacks are objects of subclasses of TrainerCallback; got {callback!r}"
    if rule:
        raise ConfigError(rule, "argument-value")


def rows_of(dataset: Any, name: str, count: int) -> Any:
    """Return a dataset, or the first ``count`` rows (0: all) of one without a length."""
    if isinstance(dataset, str):
        raise TaskError(
            f"{name} is a dataset or a list of rows; got '{dataset}'. datasets.load_dataset loads "
            "one by its name",
            "dataset-not-rows",
        )
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, dataset))
        raise TaskError(f"{name} is several datasets ({names}); give one", "several-datasets")
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return dataset
    return list(islice(iter(dataset), count or None))


class _Rows(Task):
    """Prompts of a script's dataset, without a verifier.

    Args:
        rows: a ``datasets.Dataset`` or a sequence of mappings, which is read on every access.

    Attributes:
        longest: tokens in the longest prompt.
    """

    has_verifier = False
    longest: int

    def __init__(self, rows: Any, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise TaskError(
                f"{name} must have a length and rows by number; got {type(rows).__name__}. Give a "
                "datasets.Dataset (one split of a DatasetDict), or a list of rows",
                "dataset-not-sequence",
            )
        rows = rows_of(rows, name, 0)
        if not len(rows):
            raise TaskError(f"{name} holds no rows; it needs at least one", "no-rows")
        self._rows = rows
        self._tokenizer = tokenizer
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def verify(self, index: int, response: str) -> float:
        """Raise TaskError: there is no verifier."""
        self.require_verifier()
        raise AssertionError

    def _row(self, index: int, column: str, remedy: str) -> Mapping[str, Any]:
        row = self._rows[index]
        if not isinstance(row, Mapping) or column not in row:
            columns = f"its columns: {', '.join(row)}" if isinstance(row, Mapping) else repr(row)
            raise TaskError(
                f"{self._name}, row {index} has no column '{column}' ({columns[:200]}). {remedy}",
                "missing-column",
            )
        return row


OPENING = 256
"""Tokens that an environment may add to a prompt when it is reset."""


@dataclass(frozen=True)
class Answering:
    """The tools or environments that answer a policy's turns.

    Attributes:
        objects: tools or an environment, by their names in ``environment.sources``.
        render: renders prompts with the tools' descriptions.
        rewards: whether the environment gives rewards.
        opening: token limit of an environment's prompt for an empty row, 0 if there is none.
        most: how many environments of one kind may be alive, 0 for no limit.
    """

    objects: Mapping[str, Any] = field(default_factory=dict)
    render: Render | None = None
    rewards: bool = False
    opening: int = 0
    most: int = 0

    def require_environment(self, row: TaskRow, name: str) -> None:
        """Raise TaskError if the row names none of several environments."""
        factories = self.objects.get(ENVIRONMENTS)
        environment = row.data.get(ENVIRONMENT)
        if isinstance(factories, Mapping) and str(environment) not in map(str, factories):
            raise TaskError(
                f"{name}, row {row.index}: the column '{ENVIRONMENT}' is {environment!r}, and "
                f"environment_factory has {', '.join(map(repr, factories))}; correct the row, or "
                "drop it with dataset.filter",
                "unknown-environment",
            )


def answering(
    tools: Any,
    factory: Any,
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any] = MappingProxyType({}),
    most: int = 0,
) -> Answering:
    """Check a trainer's tools or environment. Up to ``most`` environments of one kind (0: any
    number) are alive at a time.

    Raises ConfigError for unknown objects, or if the chat template cannot render their answers.
    """
    objects = named_objects(tools, factory, most)
    if not objects:
        return Answering()
    tools_of = LocalEnvironment(objects, settings_of(EnvironmentConfig())).ready["tools"]
    bridge = open_bridge(Encoder(tokenizer, template_arguments), tools_of)
    source = next(iter(objects.values())) if factory is not None else None
    kinds = source.values() if isinstance(source, Mapping) else [source]
    rewards = source is not None and any(map(_gives_rewards, kinds))

    def render(messages: Any, rows: Any, own: Any) -> tuple[list[int], str]:
        return bridge.of(own).prompt(messages, [*tools_of, *rows])

    return Answering(objects, render, rewards, most=most if factory is not None else 0)


def _gives_rewards(factory: Any) -> bool:
    """Return whether an environment gives rewards. TRL's do only if they have ``get_reward``."""
    kind = getattr(factory, "makes", factory)
    return hasattr(kind, "get_reward") or not is_trl(kind)


class PromptTask(_Rows):
    """Prompts from a column ``prompt``, with the other columns for reward functions.

    Text prompts are not templated. Lists of messages use the tokenizer's chat template. With an
    environment, rows may lack the column. Every row is checked at construction.

    Attributes:
        chat: the value of ``task.chat`` for these prompts.
    """

    def __init__(
        self,
        rows: Any,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        answers: Answering | None = None,
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(rows, tokenizer, name)
        self._opening = answers.opening if answers else 0
        encoder = Encoder(tokenizer, template_arguments)
        task_rows = [self.row(index) for index in range(len(self))]
        self.chat = "off" if all(isinstance(row.prompt, str) for row in task_rows) else "auto"
        task_settings = {"name": name, "chat": self.chat, "columns": {"system": ""}}
        config = TaskConfig.model_validate({"kind": "dataset", **task_settings})
        refuse_templated(task_rows, encoder)
        how: Any = {"encoder": encoder, "render": answers.render if answers else None}
        read = (render(row, config, tokenizer, **how) for row in task_rows)
        self.longest = max(len(prompt.tokens) for prompt in read)
        if answers and answers.objects:
            for task_row in task_rows:
                answers.require_environment(task_row, name)
            opens = self._opening and any(row.prompt == (EMPTY,) for row in task_rows)
            self.longest = max(self.longest, self._opening) if opens else self.longest + OPENING
            if self.chat == "off":
                raise ConfigError(
                    f"{name} has texts as prompts, and tools and environments answer in a "
                    "conversation; give lists of messages",
                    "environment-without-chat",
                )

    def row(self, index: int) -> TaskRow:
        """Return the row at ``index``."""
        row = self._rows[index]
        if not self._opening or not isinstance(row, Mapping):
            row = self._row(index, PROMPT, "Name the column with the prompts so")
        with of_row(f"{self._name}, row {index}"):
            for column in IMAGES:
                if row.get(column):
                    message = f"the column '{column}' holds images; models read text alone here"
                    raise TaskError(message, "images")
            prompt = as_prompt(row.get(PROMPT, [EMPTY]))
        return TaskRow(prompt, dict(row), index=index)


class TokenTask(_Rows):
    """Prompts from a column ``input_ids``, which the actor reads unchanged.

    Padding is removed by ``attention_mask`` if the dataset has it, else pad tokens are stripped at
    both ends. Every row is checked at construction.

    Args:
        vocabulary: number of token ids that the models know.
    """

    chat = "off"

    def __init__(
        self, rows: Any, tokenizer: PreTrainedTokenizerBase, name: str, vocabulary: int
    ) -> None:
        super().__init__(rows, tokenizer, name)
        self.longest = 0
        for index in range(len(self)):
            tokens = self._tokens(index)
            if max(tokens) >= vocabulary or min(tokens) < 0:
                raise TaskError(
                    f"{name}, row {index}: a token id is {max(tokens)}, and the models know ids "
                    f"below {vocabulary}; tokenise the prompts with the processing_class that "
                    "belongs to the models",
                    "token-out-of-range",
                )
            self.longest = max(self.longest, len(tokens))

    def row(self, index: int) -> TaskRow:
        tokens = self._tokens(index)
        return TaskRow(prompt=str(self._tokenizer.decode(list(tokens))), tokens=tokens, index=index)

    def _tokens(self, index: int) -> tuple[int, ...]:
        row = self._row(
            index,
            COLUMN,
            "Tokenise the prompts first, as for TRL: dataset.map(lambda row: "
            "{'input_ids': tokenizer(row['prompt'])['input_ids']})",
        )
        tokens = [int(token) for token in row[COLUMN]]
        if MASK in row:
            tokens = [t for t, seen in zip(tokens, row[MASK], strict=True) if seen]
        else:
            pad = self._tokenizer.pad_token_id
            indices = [i for i, token in enumerate(tokens) if token != pad]
            tokens = tokens[indices[0] : indices[-1] + 1] if indices else []
        if not tokens:
            raise TaskError(
                f"{self._name}, row {index} has no tokens in '{COLUMN}'; drop the row, or see why "
                "its prompt is empty",
                "no-tokens",
            )
        return tuple(tokens)
