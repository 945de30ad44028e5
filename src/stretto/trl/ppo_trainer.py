"""TRL's PPO trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto.assembly.run_models import Overrides
from stretto.config.sections import MISSING_EOS
from stretto.errors import ConfigError
from stretto.trl import arguments, trainer_inputs
from stretto.trl.base_trainer import BaseTrainer, in_script
from stretto.trl.config import PPOConfig
from stretto.trl.trainer_inputs import RewardSources, TokenTask

REWARD_MODEL = "model:reward_model"
"""PPO's reward model among the reward sources."""


class PPOTrainer(BaseTrainer):
    """Trains a policy against a reward model with PPO.

    The arguments are TRL's, in its order. See :class:`BaseTrainer`. Raises a StrettoError if an
    argument is refused or arguments conflict, a model has no scalar head or lacks the tokenizer's
    tokens, or the dataset has no tokenized prompts.

    Args:
        processing_class: the tokenizer of all models.
        ref_model: reference of the KL. ``None`` is the policy before training.
        reward_model: a sequence classifier with one label, or a reward function as for GRPO.
        train_dataset: tokenized prompts, in a column ``input_ids``.
        value_model: a sequence classifier with one label, trained as the critic. ``None`` is the
            policy's backbone with a zero head.
        data_collator: ``None`` or a collator that only pads. It is not used.
        eval_dataset: prompts for :meth:`generate_completions`.
        optimizers: must be unset. See :class:`PPOConfig`.
        callbacks: ``TrainerCallback`` objects or classes of transformers, called at the start,
            after each step with its metrics, and at the end.
        peft_config: a ``LoraConfig``. Policy and critic get adapters, which are merged into them
            when training ends. Adapters that the policy already has are merged first.
    """

    config_class = PPOConfig

    @in_script
    def __init__(
        self,
        args: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        model: nn.Module | None = None,
        ref_model: nn.Module | None = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: nn.Module | None = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
    ) -> None:
        required: dict[str, Any] = {
            "args": args,
            "processing_class": processing_class,
            "model": model,
            "reward_model": reward_model,
            "train_dataset": train_dataset,
        }
        if missing := [name for name, value in required.items() if value is None]:
            message = f"PPOTrainer needs {missing[0]}; give it"
            raise ConfigError(message, "argument-missing")
        trainer_inputs.check_args(args, PPOConfig, "PPOTrainer")
        tokenizer: Any = processing_class
        policy: Any = model
        arguments.check(args)
        trainer_inputs.refuse(data_collator, optimizers)
        if peft_config is not None and hasattr(policy, "merge_and_unload"):
            policy = policy.merge_and_unload()
            self._base_is_named = False
        self.reward_model = reward_model
        scored = isinstance(self.reward_model, nn.Module)
        models = {
            "model": policy,
            "ref_model": ref_model,
            "reward_model": self.reward_model if scored else None,
            "value_model": value_model,
        }
        models = {name: model for name, model in models.items() if model is not None}
        self.eval_dataset = eval_dataset
        self.processing_class = tokenizer
        self._vocabulary = trainer_inputs.check_models(models, tokenizer)
        task = self._read_prompts(train_dataset, "train_dataset")
        if eval_dataset is not None:
            self._read_prompts(eval_dataset, "eval_dataset")
        if scored:
            rewards = RewardSources(
                [REWARD_MODEL], {}, {REWARD_MODEL: (self.reward_model, tokenizer)}
            )
        else:
            rewards = trainer_inputs.rewards_of(self.reward_model, None, args)
        if args.missing_eos_penalty is not None and not arguments.stops(args):
            # Without a stop token no response ends by itself, so that a reward source must look for
            # it.
            judge = trainer_inputs.missing_eos(tokenizer.eos_token_id, args.missing_eos_penalty)
            functions = {**rewards.functions, MISSING_EOS: judge}
            rewards = RewardSources([*rewards.sources, MISSING_EOS], functions, rewards.models)
        sizes = arguments.fill_in_sizes(args, len(task))
        self._set_up(args, tokenizer, models, rewards, task, sizes, callbacks, peft_config)

    def generate_completions(self, sampling: bool = False) -> list[dict[str, Any]]:
        """Return greedy answers to the prompts of ``eval_dataset``, scored by the reward model.

        As in TRL, rows have ``query``, ``model response`` and ``score``, and five are printed.

        Args:
            sampling: answer only one batch of ``args.per_device_eval_batch_size``.
        """
        rows = self._require_rows(self.eval_dataset)
        count = self.args.per_device_eval_batch_size if sampling else len(rows)
        task = self._read_prompts([rows[i] for i in range(min(count, len(rows)))], "eval_dataset")
        source = self._rewards.sources[0]
        rows = [
            {
                "query": r.prompt.text,
                "model response": str(self.processing_class.decode(r.tokens.tolist())),
                "score": next(s.scalar for s in r.scores.values() if s.source == source),
            }
            for r in self._answers_to(task)
        ]
        table = Table(*rows[0], show_lines=True)
        for row in rows[:5]:
            table.add_row(*(Text(str(value)) for value in row.values()))
        Console().print(table)
        return rows

    def _read_prompts(self, rows: Any, name: str) -> TokenTask:
        return TokenTask(rows, self.processing_class, name, self._vocabulary)

    def _overrides(self) -> Overrides:
        stop = self.args.stop_token_id
        if stop is None and self.args.stop_token:
            stop = int(self.processing_class.eos_token_id)
        ends = frozenset(() if stop is None else (stop,))
        return replace(super()._overrides(), end_tokens=ends)
