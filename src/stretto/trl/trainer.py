"""TRL's GRPO, RLOO and Online DPO trainers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from stretto.config import ENVIRONMENT
from stretto.errors import ConfigError
from stretto.models.forward import positions
from stretto.models.load import load_tokenizer
from stretto.models.resolve import resolve
from stretto.saying import silent
from stretto.trl import arguments, trainer_inputs
from stretto.trl.base_trainer import BaseTrainer, in_script
from stretto.trl.config import GRPOConfig, OnlineDPOConfig, RLOOConfig, TrlConfig
from stretto.trl.trainer_inputs import PromptTask

LONGEST_OPENING = 2048
"""Token limit of an environment's prompts for rows without one, if the model has enough positions.
"""


class _PromptsTrainer(BaseTrainer):
    """Base of trainers that load models by name and read text or chat prompts."""

    aux_loss_enabled: ClassVar[bool] = False  # routers of experts get no auxiliary loss
    _reference: nn.Module | None = None

    @in_script
    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        trainer_inputs.refuse(None, optimizers, rollout_func=rollout_func)
        model_name = model if isinstance(model, str) else str(getattr(model, "name_or_path", ""))
        kind = self.config_class
        if args is None:
            name = type(self).__name__.removesuffix("Trainer")
            args = kind(f"{Path(model_name).name or 'trainer_output'}-{name}")
        trainer_inputs.check_args(args, kind, type(self).__name__)
        arguments.check(args)
        trainer_inputs.check_objects(model, processing_class, callbacks)
        rows, sizes = self._rows_and_sizes(args, train_dataset, environment_factory)
        torch.manual_seed(args.seed)
        policy: Any = model
        if isinstance(policy, str):
            quantized = {"quantization_config": quantization_config} if quantization_config else {}
            policy = trainer_inputs.load(AutoModelForCausalLM, policy, args, **quantized)
        elif quantization_config is not None:
            raise ConfigError(
                "quantization_config is for a model that is loaded by its name, and this one is "
                "loaded; leave it out, or give the name",
                "4bit-of-loaded",
            )
        elif peft_config is not None and hasattr(policy, "merge_and_unload"):
            policy = policy.merge_and_unload()
            self._base_is_named = False
        tokenizer = processing_class
        if tokenizer is None:
            tokenizer = load_tokenizer(resolve(model_name, silent), args.trust_remote_code)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        template_arguments = arguments.template_arguments(args)
        max_environments = arguments.environments(args, sizes)
        answers = trainer_inputs.answering(
            tools, environment_factory, tokenizer, template_arguments, max_environments
        )
        if environment_factory is not None:
            context_length = positions(policy, generating=True) or math.inf
            opening = max(1, int(min(LONGEST_OPENING, context_length - args.max_completion_length)))
            answers = replace(answers, opening=opening)
        self._answering = answers
        rewards = trainer_inputs.RewardSources()
        if reward_funcs is not None or not answers.rewards:
            rewards = trainer_inputs.rewards_of(reward_funcs, reward_processing_classes, args)
        models = {"model": policy, "ref_model": self._reference}
        models |= {source: judge for source, (judge, _) in rewards.models.items()}
        models = {name: module for name, module in models.items() if module is not None}
        trainer_inputs.check_shared(models)
        task = PromptTask(rows, tokenizer, "train_dataset", answers, template_arguments)
        self.eval_dataset = eval_dataset
        if arguments.evaluates(args):
            if eval_dataset is None:
                text = f"eval_strategy = '{args.eval_strategy}' needs eval_dataset; give it"
                raise ConfigError(text, "no-eval-dataset")
            held_out = trainer_inputs.rows_of(eval_dataset, "eval_dataset", 0)
            self._held_out = PromptTask(
                held_out, tokenizer, "eval_dataset", answers, template_arguments
            )
        self._set_up(args, tokenizer, models, rewards, task, sizes, callbacks, peft_config)
        self._describe_rewards(rewards)

    def _rows_and_sizes(
        self, args: Any, rows: Any, environment_factory: Any
    ) -> tuple[Any, arguments.RunSizes]:
        """Return rows and sizes. Without rows, empty prompts of a batch for the environment."""
        if rows is not None and hasattr(rows, "__len__"):
            return rows, arguments.fill_in_sizes(args, len(rows))
        if rows is None and (
            environment_factory is None or isinstance(environment_factory, Mapping)
        ):
            raise ConfigError(
                f"{type(self).__name__} needs train_dataset; give it, or an environment_factory "
                "that makes environments of one class, whose reset returns the prompt",
                "argument-missing",
            )
        sizes = arguments.fill_in_sizes(args, 0)
        if rows is None:
            count = max(sizes.batch // args.num_generations, 1)
            return [{trainer_inputs.PROMPT: [trainer_inputs.EMPTY]}] * count, sizes
        count = arguments.prompts_of(args, sizes)
        return trainer_inputs.rows_of(rows, "train_dataset", count), sizes

    def _describe_rewards(self, rewards: trainer_inputs.RewardSources) -> None:
        """Set the attributes that TRL's scripts read. The environment's reward comes last."""
        judges: Any = [
            rewards.models.get(s, (rewards.functions.get(s), None)) for s in rewards.sources
        ]
        self.reward_funcs = [judge for judge, _ in judges]
        self.reward_processing_classes = [tokenizer for _, tokenizer in judges]
        factory: Any = next(iter(self._answering.objects.values()), None)
        if self._answering.rewards and not isinstance(factory, Mapping):
            self.source_names = {ENVIRONMENT: getattr(factory, "makes", factory).__name__}
        sources = self.config.reward.sources
        self.reward_func_names = [
            self.source_names.get(s, s.removeprefix("model:")) for s in sources
        ]
        self.reward_weights = torch.tensor(self.config.reward.weights or [1.0] * len(sources))


class GRPOTrainer(_PromptsTrainer):
    """Trains a policy against reward functions and models with GRPO and related losses. The
    arguments are TRL's, in its order. See :class:`BaseTrainer`.

    Args:
        model: the policy, or a name to load with ``args.model_init_kwargs``.
        reward_funcs: one or a list of functions (also async) of ``prompts``, ``completions``,
            ``completion_ids`` and dataset columns, or (names of) one-label sequence classifiers.
        train_dataset: rows with a column ``prompt``: texts, or lists of messages.
        processing_class: the policy's tokenizer. ``None`` loads it from the model's folder.
        reward_processing_classes: tokenizers of the reward models, if not in the models' folders.
        callbacks, peft_config: as in :class:`PPOTrainer`.
        quantization_config: a ``BitsAndBytesConfig`` with ``load_in_4bit``, for a model that is
            loaded by name and trained with adapters.
        tools, environment_factory: answer the policy's turns (docs/episodes.md). An environment's
            rewards are one more reward source.
    """

    config_class: ClassVar[type[TrlConfig]] = GRPOConfig


class RLOOTrainer(GRPOTrainer):
    """Like :class:`GRPOTrainer`, with RLOO and ratios clipped per response. Same arguments."""

    config_class = RLOOConfig


class OnlineDPOTrainer(_PromptsTrainer):
    """Trains a policy on pairs of its responses, ranked by reward functions and models. The
    arguments are TRL's, in its order. See :class:`GRPOTrainer`.

    Args:
        ref_model: reference of the loss. ``None`` is the policy before training.
    """

    config_class = OnlineDPOConfig

    def __init__(
        self,
        model: str | nn.Module,
        ref_model: nn.Module | None = None,
        reward_funcs: Any = None,
        args: OnlineDPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        compute_metrics: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
    ) -> None:
        trainer_inputs.refuse(
            data_collator,
            optimizers,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self._reference = ref_model
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            peft_config=peft_config,
        )
