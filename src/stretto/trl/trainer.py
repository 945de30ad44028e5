"""``PPOTrainer``: TRL's PPO trainer, on this project's schedule."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerControl, TrainerState

from stretto import api, files
from stretto.assembly.models import Overrides, made_ready
from stretto.assembly.roles import RoleFactory
from stretto.config import Config, recipes
from stretto.config.sections import MISSING_EOS
from stretto.config.training import token_budget
from stretto.errors import ConfigError, StateError, StrettoError
from stretto.evaluation.answers import answer
from stretto.evaluation.gold import score_all
from stretto.models.load import save_model
from stretto.models.weights import require_trainable
from stretto.observe import Progress, RunDirectory, Sample, make_progress
from stretto.observe.progress import on_stderr
from stretto.runs import TrainResult
from stretto.scoring.models import RewardModelScorer
from stretto.tasks.prompts import render
from stretto.trl import arguments, objects
from stretto.trl.arguments import REWARD_MODEL
from stretto.trl.config import PPOConfig
from stretto.trl.objects import TokenTask


class PPOTrainer:
    """Trainer of a policy against a reward model, by PPO.

    The arguments are TRL's, in its order. Models are trained in place. Every run has a folder of
    its own in ``args.output_dir``, with its settings, figures, samples and the trained model.

    Raises a StrettoError where an argument is refused or arguments do not fit together, a model has
    no scalar head or lacks the tokenizer's tokens, or the dataset has no tokenised prompts.

    Args:
        processing_class: the tokenizer that all models share.
        ref_model: what the KL is measured to; ``None``: the policy as it starts.
        train_dataset: tokenised prompts, in a column ``input_ids``.
        value_model: a sequence classifier with one label, which becomes the critic; ``None``: the
            policy's backbone with a zero head.
        data_collator: one that only pads, or ``None``; nothing is padded here.
        eval_dataset: prompts for :meth:`generate_completions`.
        optimizers: not taken; see :class:`PPOConfig`.
        callbacks: ``TrainerCallback`` objects of transformers; told of the beginning, of each step
            and its figures, and of the end.
        peft_config: a ``LoraConfig``; policy and critic then get adapters, which are merged into
            them when training ends. Adapters that the policy has before are merged first.

    Attributes:
        config: the run's settings.
        run_dir: the run's folder; ``None`` before :meth:`train`.
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
        self.args: PPOConfig = named["args"]
        arguments.check(self.args)
        objects.refuse(data_collator, optimizers)
        self.processing_class: PreTrainedTokenizerBase = named["processing_class"]
        policy = named["model"]
        if peft_config is not None and hasattr(policy, "merge_and_unload"):
            policy = policy.merge_and_unload()
        self.model = self.policy_model = policy
        self.ref_model, self.reward_model = named["ref_model"], named["reward_model"]
        self.value_model, self.callbacks = value_model, list(callbacks or ())
        models = {
            "model": policy,
            "ref_model": self.ref_model,
            "reward_model": self.reward_model,
            "value_model": value_model,
        }
        models = {name: model for name, model in models.items() if model is not None}
        vocabulary = objects.check_models(models, self.processing_class)

        def tokenised(rows: Any, name: str) -> TokenTask:
            return TokenTask(rows, self.processing_class, name, vocabulary)

        self._task = tokenised(named["train_dataset"], "train_dataset")
        self._eval_task = None if eval_dataset is None else tokenised(eval_dataset, "eval_dataset")
        arguments.derive_sizes(self.args, len(self._task))
        task, dtype = self._task, _dtype(models, bf16=self.args.bf16)
        data = arguments.settings(self.args, len(task), task.longest, dtype)
        data["model"]["name"] = str(getattr(policy, "name_or_path", "") or type(policy).__name__)
        if peft_config is not None:
            data["model"] |= objects.lora_settings(peft_config, policy)
        self.config: Config = recipes.build(data, "PPOConfig")
        self.run_dir: RunDirectory | None = None

    def train(self, resume_from_checkpoint: str | None = None) -> TrainResult | None:
        """Train, or go on with the run of the same script in a folder, from its newest checkpoint.
        Return the number of steps, the last one's figures and the model's folder, and ``None``
        where a callback ended it. After Ctrl-C, what was learned is in the models, and saved.
        """
        if self.run_dir is not None:
            raise StateError(
                "this trainer has trained already, and its models are no longer those that it "
                "started from; make a new PPOTrainer to train on",
                "trained-already",
            )
        name = Path(self.args.run_name or self.args.exp_name).name
        resumed = resume_from_checkpoint or self.args.resume_from_checkpoint
        run = api.begin(self.config, name, resume=resumed or "", overrides=self._overrides())
        self.run_dir = run.run_dir
        display = CallbackProgress(make_progress(self.config.observe.progress), self)
        for line in arguments.notes(self.args):
            display.note(line)
        try:
            result = api.execute(run, progress=display)
        except StopTrainingError:
            result = None
        display.end()
        return result

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Save policy and tokenizer in Hugging Face format, adapters merged, into a folder (without
        one ``args.output_dir``), whose other files stay. Raises StorageError where it cannot be
        written to; nothing of the model is in it then.
        """
        folder = Path(output_dir or self.args.output_dir)
        with files.explained(folder), files.added_to(folder) as scratch:
            if self.run_dir is not None and self.run_dir.model.is_dir():
                shutil.copytree(self.run_dir.model, scratch, dirs_exist_ok=True)
            else:
                save_model(self.policy_model, self.processing_class, scratch)

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
        reward_model = made_ready(self.reward_model, device)
        budget = token_budget(config.training.microbatch_tokens, next(actor.parameters()).device)
        scorer = RewardModelScorer(REWARD_MODEL, reward_model, tokenizer, tokenizer, budget)
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

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ConfigError, as nothing is uploaded."""
        raise ConfigError(
            "nothing is uploaded from here: save with trainer.save_model(folder), then "
            "'hf upload NAME folder', or model.push_to_hub(NAME) of transformers",
            "no-upload",
        )

    def _overrides(self) -> Overrides:
        end: Any = self.processing_class.eos_token_id
        stop = self.args.stop_token_id
        if stop is None and self.args.stop_token:
            stop = int(end)
        judge = missing_eos(end, self.args.missing_eos_penalty or 0.0)
        return Overrides(
            actor=self.policy_model,
            tokenizer=self.processing_class,
            reference=self.ref_model,
            critic=self.value_model,
            task=self._task,
            functions={MISSING_EOS: judge},
            reward_models={REWARD_MODEL: (self.reward_model, self.processing_class)},
            end_tokens=frozenset(() if stop is None else (stop,)),
        )


def _dtype(models: Mapping[str, Any], *, bf16: bool) -> Literal["float32", "bfloat16"]:
    """Return the type that the policy computes in; ``bf16`` brings all models to bfloat16."""
    if bf16:
        for model in models.values():
            model.to(torch.bfloat16)
    for name in ("model", "value_model"):
        if name in models:
            require_trainable(models[name], name)
    dtype = next(models["model"].parameters()).dtype
    return "bfloat16" if dtype is torch.bfloat16 else "float32"


def missing_eos(end: int | None, penalty: float) -> Callable[..., list[float]]:
    """Make TRL's penalty for responses without the end token anywhere in them.

    The settings' rule for missing ends does not fit: without a stop token no response ends.
    """

    def judge(completion_ids: list[list[int]]) -> list[float]:
        return [0.0 if end in tokens else -penalty for tokens in completion_ids]

    return judge


class StopTrainingError(StrettoError):
    """Error that ends training, as a callback has asked for it."""


class CallbackProgress(Progress):
    """A display that also tells a trainer's callbacks of the beginning, of each step, and of the
    end. A callback that sets ``control.should_training_stop`` ends the run after the step.
    """

    def __init__(self, display: Progress, trainer: PPOTrainer) -> None:
        self._display, self._trainer = display, trainer
        for name in ("note", "working", "close"):  # as the display does them
            setattr(self, name, getattr(display, name))
        self.state, self._control = TrainerState(), TrainerControl()
        self.state.max_steps = trainer.config.steps

    def start(self, headline: str) -> None:
        """Show what will run."""
        self._display.start(headline)
        self._call("on_train_begin")

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Show a step and tell the callbacks; raise StopTrainingError if one wants no more."""
        self._display.step(step, total, stats, samples)
        self.state.global_step = step
        logs = {**stats, "episode": step * self._trainer.config.rollout.batch}
        self.state.log_history.append({**logs, "step": step})
        self._call("on_log", logs=logs)
        self._call("on_step_end")
        if self._control.should_training_stop:
            raise StopTrainingError(f"a callback ended training after step {step}")

    def end(self) -> None:
        """Tell the callbacks that training has ended."""
        self._call("on_train_end")

    def _call(self, event: str, **more: Any) -> None:
        t = self._trainer
        more |= {"model": t.policy_model, "processing_class": t.processing_class}
        for callback in t.callbacks:
            answer = getattr(callback, event)(t.args, self.state, self._control, **more)
            self._control = answer or self._control
