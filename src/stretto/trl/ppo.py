"""TRL's PPO trainer, on this project's schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto.assembly.models import Overrides, made_ready
from stretto.assembly.roles import RoleFactory
from stretto.config.sections import MISSING_EOS, reward_source
from stretto.config.training import token_budget
from stretto.errors import ConfigError
from stretto.evaluation.answers import answer
from stretto.evaluation.gold import score_all
from stretto.models.backend import pick_device
from stretto.observe.progress import on_stderr
from stretto.scoring.functions import FunctionScorer
from stretto.scoring.models import RewardModelScorer
from stretto.tasks.prompts import render
from stretto.trl import arguments, objects
from stretto.trl.base import BaseTrainer
from stretto.trl.config import PPOConfig
from stretto.trl.objects import Rewards, TokenTask

REWARD_MODEL = "model:reward_model"
"""Name of PPO's reward model among the reward sources."""


class PPOTrainer(BaseTrainer):
    """Trainer of a policy against a reward model, by PPO.

    The arguments are TRL's, in its order; see :class:`BaseTrainer`.

    Raises a StrettoError where an argument is refused or arguments do not fit together, a model has
    no scalar head or lacks the tokenizer's tokens, or the dataset has no tokenised prompts.

    Args:
        processing_class: the tokenizer that all models share.
        ref_model: what the KL is measured to; ``None``: the policy as it starts.
        reward_model: a sequence classifier with one label, or a reward function, as of GRPO.
        train_dataset: tokenised prompts, in a column ``input_ids``.
        value_model: a sequence classifier with one label, which becomes the critic; ``None``: the
            policy's backbone with a zero head.
        data_collator: one that only pads, or ``None``; nothing is padded here.
        eval_dataset: prompts for :meth:`generate_completions`.
        optimizers: not taken; see :class:`PPOConfig`.
        callbacks: ``TrainerCallback`` objects or classes of transformers; told of the beginning, of
            each step and its figures, and of the end.
        peft_config: a ``LoraConfig``; policy and critic then get adapters, which are merged into
            them when training ends. Adapters that the policy has before are merged first.
    """

    def __init__(
        self,
        args: PPOConfig | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        model: nn.Module | None = None,
        ref_model: nn.Module | None = None,
        reward_model: nn.Module | None = None,
        train_dataset: Any = None,
        value_model: nn.Module | None = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        **old_names: Any,
    ) -> None:
        named = objects.by_present_names(
            {
                "args": args,
                "processing_class": processing_class,
                "model": model,
                "ref_model": ref_model,
                "reward_model": reward_model,
                "train_dataset": train_dataset,
            },
            old_names,
        )
        args, tokenizer, policy = (named[n] for n in ("args", "processing_class", "model"))
        arguments.check(args)
        objects.refuse(data_collator, optimizers)
        if peft_config is not None and hasattr(policy, "merge_and_unload"):
            policy = policy.merge_and_unload()
        self.reward_model = named["reward_model"]
        scored = isinstance(self.reward_model, nn.Module)
        models = {
            "model": policy,
            "ref_model": named["ref_model"],
            "reward_model": self.reward_model if scored else None,
            "value_model": value_model,
        }
        models = {name: model for name, model in models.items() if model is not None}
        vocabulary = objects.check_models(models, tokenizer)

        def tokenised(rows: Any, name: str) -> TokenTask:
            return TokenTask(rows, tokenizer, name, vocabulary)

        task = tokenised(named["train_dataset"], "train_dataset")
        self._eval_task = None if eval_dataset is None else tokenised(eval_dataset, "eval_dataset")
        self.eval_dataset = eval_dataset
        if scored:
            rewards = Rewards([REWARD_MODEL], {}, {REWARD_MODEL: (self.reward_model, tokenizer)})
        else:
            rewards = objects.rewards_of(self.reward_model, None, args)
        if args.missing_eos_penalty is not None and not arguments.stops(args):
            # Without a token that ends responses none ends by itself: a source looks for it.
            judge = objects.missing_eos(tokenizer.eos_token_id, args.missing_eos_penalty)
            functions = {**rewards.functions, MISSING_EOS: judge}
            rewards = Rewards([*rewards.sources, MISSING_EOS], functions, rewards.models)
        sizes = arguments.derive_sizes(args, len(task))
        self._set_up(args, tokenizer, models, rewards, task, sizes, callbacks, peft_config)

    def generate_completions(self, sampling: bool = False) -> list[dict[str, Any]]:
        """Return greedy answers to the prompts of ``eval_dataset``, scored by the reward model: a
        row for each, with ``query``, ``model response`` and ``score``, as TRL called them. The
        first five are shown.

        Args:
            sampling: answer one batch of ``args.per_device_eval_batch_size`` only.
        """
        if self._eval_task is None:
            raise ConfigError(
                "generate_completions answers the prompts of eval_dataset, and there is none; give "
                "one to PPOTrainer",
                "no-eval-dataset",
            )
        most = self.args.per_device_eval_batch_size if sampling else len(self._eval_task)
        rows = self._complete(self._eval_task, most)
        table = Table(*rows[0], show_lines=True)
        for row in rows[:5]:
            table.add_row(*(Text(str(value)) for value in row.values()))
        Console().print(table)
        return rows

    def _complete(self, task: TokenTask, most: int) -> list[dict[str, Any]]:
        """Answer the first ``most`` prompts with Stretto's own engine, over the policy where it is:
        others would have to start first.
        """
        tokenizer, device = self.processing_class, self.config.model.device
        own = {"temperature": 0.0, "engine": "torch", "engine_args": {}}
        rollout = self.config.rollout.model_copy(update=own)
        config = self.config.model_copy(update={"rollout": rollout})
        actor = made_ready(self.policy_model, device)
        source = reward_source(self._rewards.sources[0])
        scorer: RewardModelScorer | FunctionScorer
        if source.name in self._rewards.models:
            judge = made_ready(self.reward_model, device)
            budget = token_budget(config.training.microbatch_tokens, pick_device(device))
            scorer = RewardModelScorer(source.name, judge, tokenizer, tokenizer, budget)
        else:
            scorer = FunctionScorer(
                source, config.task, config.seed, tokenizer, function=self.reward_model
            )
        rows = range(min(most, len(task)))
        prompts = [render(task.row(i), config.task, tokenizer, i) for i in rows]
        ends = self._overrides().end_tokens
        engine = RoleFactory(config, on_stderr).make_engine(actor, tokenizer, rollout.batch, ends)
        answers = answer(engine, prompts)
        scores = score_all(scorer, answers, rollout.batch)
        return [
            {
                "query": r.prompt.text,
                "model response": str(tokenizer.decode(r.tokens.tolist())),
                "score": score,
            }
            for r, score in zip(answers, scores, strict=True)
        ]

    def _overrides(self) -> Overrides:
        stop = self.args.stop_token_id
        if stop is None and self.args.stop_token:
            stop = int(self.processing_class.eos_token_id)
        ends = frozenset(() if stop is None else (stop,))
        return replace(super()._overrides(), end_tokens=ends)
