"""TRL's PPO, GRPO, RLOO and Online DPO trainers, on this project's schedule."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DefaultFlowCallback,
    PreTrainedTokenizerBase,
    TrainerControl,
    TrainerState,
    trainer_pt_utils,
)
from transformers.trainer_callback import CallbackHandler

from stretto import api, files
from stretto.api.training import write_rows
from stretto.assembly.models import Overrides, made_ready
from stretto.assembly.roles import RoleFactory
from stretto.config import Config, recipes
from stretto.config.sections import ENVIRONMENT, MISSING_EOS, reward_source
from stretto.config.training import token_budget
from stretto.errors import ConfigError, StateError
from stretto.evaluation.answers import answer
from stretto.evaluation.gold import score_all
from stretto.models.backend import pick_device
from stretto.models.load import load_tokenizer, save_model
from stretto.models.resolve import resolve
from stretto.observe import RunDirectory, make_progress
from stretto.observe.progress import on_stderr
from stretto.runs import TrainResult
from stretto.runs.checkpoint import newest
from stretto.saying import silent
from stretto.scoring.functions import FunctionScorer
from stretto.scoring.models import RewardModelScorer
from stretto.tasks.prompts import render
from stretto.trl import arguments, objects
from stretto.trl.callbacks import after_step, never_called
from stretto.trl.config import GRPOConfig, OnlineDPOConfig, PPOConfig, RLOOConfig, TrlConfig
from stretto.trl.objects import Answering, PromptTask, Rewards, TokenTask

REWARD_MODEL = "model:reward_model"
"""Name of PPO's reward model among the reward sources."""


@dataclass(frozen=True, kw_only=True)
class TrainOutput(TrainResult):
    """The outcome of a run, with what transformers' ``TrainOutput`` has.

    Attributes:
        global_step: steps of the optimizer, as TRL counts them.
        training_loss: mean of the policy's loss over all steps.
        metrics: ``train_runtime`` (seconds), ``train_loss`` and ``train_steps_per_second``.
    """

    global_step: int
    training_loss: float
    metrics: Mapping[str, float]


class BaseTrainer:
    """What the trainers share. Models are trained in place. Every run has a folder of its own in
    ``args.output_dir``, with its settings, figures, samples and the trained model.

    Attributes:
        config: the run's settings.
        run_dir: the run's folder; ``None`` before :meth:`train`.
        state: ``log_history`` holds the figures of each step, by our names and TRL's.
        callback_handler: of transformers; it calls the callbacks, which get no optimizer.
    """

    hub_model_id: ClassVar[None] = None
    optimizer = lr_scheduler = None
    _held_out: PromptTask | None = None  # prompts of evaluations while it trains
    _answering = Answering()  # nothing

    log_metrics = trainer_pt_utils.log_metrics
    metrics_format = trainer_pt_utils.metrics_format
    save_metrics = trainer_pt_utils.save_metrics
    save_state = trainer_pt_utils.save_state

    def _set_up(
        self,
        args: Any,
        tokenizer: PreTrainedTokenizerBase,
        models: Mapping[str, Any],
        rewards: Rewards,
        task: PromptTask | TokenTask,
        sizes: arguments.Sizes,
        callbacks: Sequence[Any] | None,
        peft_config: Any,
    ) -> None:
        """Make the run's settings.

        Args:
            models: policy, reference, reward model and value model by TRL's names, as far as given.
        """
        self.args, self.processing_class, self._rewards = args, tokenizer, rewards
        self.model = self.policy_model = models["model"]
        self.ref_model, self.value_model = models.get("ref_model"), models.get("value_model")
        self._task, self.train_dataset, self.sizes = task, task, sizes
        dtype = objects.bring_to_dtype(models, args)
        data = arguments.settings(args, sizes, task.longest, dtype)
        data["task"]["chat"] = task.chat
        data["model"]["name"] = str(
            getattr(self.model, "name_or_path", "") or type(self.model).__name__
        )
        if peft_config is not None:
            data["model"] |= objects.lora_settings(peft_config, self.model)
        given = (ENVIRONMENT,) if self._answering.rewards else ()
        data["reward"] |= {"sources": (*rewards.sources, *given)}
        if weights := getattr(args, "reward_weights", None):
            data["reward"]["weights"] = (*weights, *(1.0 for _ in given))
        if sources := tuple(self._answering.objects):
            data["environment"] = {"sources": sources, "max_turns": arguments.max_turns(args)}
        if self._held_out:
            held_out = Path(args.output_dir) / "eval_dataset.jsonl"
            longest = max(task.longest, self._held_out.longest)
            data["task"] |= {"held_out": str(held_out), "max_prompt_tokens": longest}
            every = arguments.eval_every(args, sizes)
            data["observe"] |= {"eval_every": every, "eval_prompts": len(self._held_out)}
        self.config: Config = recipes.build(data, type(args).__name__)
        self.run_dir: RunDirectory | None = None
        self.state, self.control = TrainerState(), TrainerControl()
        self.state.max_steps = sizes.steps * sizes.updates
        self.callback_handler = CallbackHandler(  # type: ignore[no-untyped-call]
            [DefaultFlowCallback, *(callbacks or ())], self.model, tokenizer, None, None
        )
        self.add_callback = self.callback_handler.add_callback
        self.pop_callback = self.callback_handler.pop_callback
        self.remove_callback = self.callback_handler.remove_callback
        self.tell("on_init_end")

    @cached_property
    def accelerator(self) -> Any:
        """An ``accelerate.Accelerator`` of this one process, for what scripts ask of it."""
        from accelerate import Accelerator

        return Accelerator(cpu=self.config.model.device == "cpu")

    def is_world_process_zero(self) -> bool:
        """Return True: there is one process."""
        return True

    is_local_process_zero = is_world_process_zero

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train, or go on with the run of the same script in a folder, from its newest checkpoint.

        After Ctrl-C, what was learned is in the models, and saved.

        Args:
            resume_from_checkpoint: the run's folder; True for the newest one in ``output_dir``.
        """
        if self.run_dir is not None:
            raise StateError(
                "this trainer has trained already, and its models are no longer those that it "
                f"started from; make a new {type(self).__name__} to train on",
                "trained-already",
            )
        args, began_s = self.args, time.monotonic()
        name = Path(args.run_name or getattr(args, "exp_name", args.algorithm)).name
        resumed = resume_from_checkpoint or args.resume_from_checkpoint or ""
        if resumed is True:
            resumed = _newest(Path(self.config.out), name)
        if rows := self._held_out:
            file = Path(self.config.task.held_out_rows)
            with files.explained(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_rows((rows.row(i).data for i in range(len(rows))), file)
        run = api.begin(self.config, name, resume=resumed, overrides=self._overrides())
        self.run_dir = run.run_dir
        display = make_progress(self.config.observe.progress)
        for line in arguments.notes(args, self.sizes) + never_called(self.callback_handler):
            display.note(line)
        self.state.compute_steps(args, self.state.max_steps)  # type: ignore[no-untyped-call]
        self.tell("on_train_begin")
        self.tell("on_epoch_begin")
        result = api.execute(run, progress=display, on_step=partial(after_step, self))
        took_s, done = time.monotonic() - began_s, self.state.global_step
        losses = [row["loss"] for row in self.state.log_history if "loss" in row]
        loss = sum(losses) / len(losses) if losses else 0.0
        metrics = {
            "train_runtime": took_s,
            "train_steps_per_second": done / took_s,
            "train_loss": loss,
        }
        self.tell("on_train_end")
        of_run = {f.name: getattr(result, f.name) for f in fields(TrainResult)}
        return TrainOutput(**of_run, global_step=done, training_loss=loss, metrics=metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add figures to ``state.log_history`` and tell the callbacks."""
        logs = {**logs, "epoch": self.state.epoch or 0.0}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.tell("on_log", logs=logs)

    def evaluate(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ConfigError, as no evaluation runs within training."""
        raise ConfigError(
            "a trained model is measured afterwards: stretto.evaluate(trainer.config, "
            "model=trainer.run_dir.model)",
            "no-evaluation",
        )

    def end(self) -> None:
        """Do nothing: trackers are closed, and no process group is there, when training ends."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Say that none is written."""
        on_stderr("no model card is written; config.toml in the run's folder has all settings")

    def save_model(
        self, output_dir: str | Path | None = None, _internal_call: bool = False
    ) -> None:
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

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ConfigError, as nothing is uploaded."""
        raise ConfigError(
            "nothing is uploaded from here: save with trainer.save_model(folder), then "
            "'hf upload NAME folder', or model.push_to_hub(NAME) of transformers",
            "no-upload",
        )

    def _overrides(self) -> Overrides:
        return Overrides(
            actor=self.model,
            tokenizer=self.processing_class,
            reference=self.ref_model,
            critic=self.value_model,
            task=self._task,
            functions=self._rewards.functions,
            reward_models=self._rewards.models,
            environment=self._answering.objects,
        )

    def tell(self, event: str, **more: Any) -> None:
        """Tell the callbacks of an event; what they want then stands in ``control``."""
        call = getattr(self.callback_handler, event)
        self.control = call(self.args, self.state, self.control, **more)


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


class _PromptsTrainer(BaseTrainer):
    """A trainer that loads what is named, and reads prompts as they are written."""

    def _prepare(
        self,
        args: Any,
        kind: type[TrlConfig],
        model: Any,
        reward_funcs: Any,
        train_dataset: Any,
        eval_dataset: Any,
        processing_class: Any,
        reward_processing_classes: Any,
        *,
        ref_model: Any = None,
        callbacks: Sequence[Any] | None,
        peft_config: Any,
        tools: Any = None,
        environment_factory: Any = None,
    ) -> None:
        named = model if isinstance(model, str) else str(getattr(model, "name_or_path", ""))
        if args is None:
            name = type(self).__name__.removesuffix("Trainer")
            args = kind(f"{Path(named).name or 'trainer_output'}-{name}")
        objects.check_args(args, kind, type(self).__name__)
        arguments.check(args)
        if train_dataset is None:
            raise ConfigError(
                f"{type(self).__name__} needs train_dataset; give it", "argument-missing"
            )
        rows, sizes = train_dataset, None
        if not hasattr(rows, "__len__"):
            sizes = arguments.derive_sizes(args, 0)
            rows = objects.rows_of(rows, "train_dataset", arguments.prompts_of(args, sizes))
        sizes = sizes or arguments.derive_sizes(args, len(rows))
        torch.manual_seed(args.seed)
        if isinstance(model, str):
            model = objects.load(AutoModelForCausalLM, model, args)
        elif peft_config is not None and hasattr(model, "merge_and_unload"):
            model = model.merge_and_unload()
        tokenizer = processing_class
        if tokenizer is None:
            tokenizer = load_tokenizer(resolve(named, silent), args.trust_remote_code)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        rewards = objects.rewards_of(reward_funcs, reward_processing_classes, args)
        self.reward_funcs, self.reward_func_names = reward_funcs, list(rewards.sources)
        models = {"model": model, "ref_model": ref_model}
        models |= {source: judge for source, (judge, _) in rewards.models.items()}
        models = {name: each for name, each in models.items() if each is not None}
        objects.check_shared(models)
        answers = self._answering = objects.answering(tools, environment_factory, tokenizer)
        task = PromptTask(rows, tokenizer, "train_dataset", answers)
        self.eval_dataset = eval_dataset
        if arguments.evaluates(args):
            if eval_dataset is None:
                text = f"eval_strategy = '{args.eval_strategy}' needs eval_dataset; give it"
                raise ConfigError(text, "no-eval-dataset")
            held_out = objects.rows_of(eval_dataset, "eval_dataset", 0)
            self._held_out = PromptTask(held_out, tokenizer, "eval_dataset", answers)
        self._set_up(args, tokenizer, models, rewards, task, sizes, callbacks, peft_config)


class GRPOTrainer(_PromptsTrainer):
    """Trainer of a policy against reward functions and models, by GRPO and the losses related to
    it. The arguments are TRL's, in its order; see :class:`BaseTrainer`.

    Args:
        model: the policy, or its name, which is loaded with ``args.model_init_kwargs``.
        reward_funcs: one or a list: functions (async ones too) of ``prompts``, ``completions``,
            ``completion_ids`` and columns of the dataset; sequence classifiers with one label, or
            their names.
        train_dataset: rows with a column ``prompt``: texts, or lists of messages.
        processing_class: the policy's tokenizer; ``None``: the one beside the model.
        reward_processing_classes: tokenizers of the reward models, if not those beside them.
        callbacks, peft_config: as of :class:`PPOTrainer`.
        tools, environment_factory: answer the policy's turns (docs/episodes.md); an environment's
            rewards are one beside the others.
    """

    _config: ClassVar[type[TrlConfig]] = GRPOConfig

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
        refused = {"quantization_config": quantization_config, "rollout_func": rollout_func}
        objects.refuse(None, optimizers, **refused)
        self._prepare(
            args,
            self._config,
            model,
            reward_funcs,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks=callbacks,
            peft_config=peft_config,
            tools=tools,
            environment_factory=environment_factory,
        )


class RLOOTrainer(GRPOTrainer):
    """Trainer of a policy against reward functions and models, by RLOO with clipped ratios of whole
    responses. The arguments are those of :class:`GRPOTrainer`.
    """

    _config = RLOOConfig


class OnlineDPOTrainer(_PromptsTrainer):
    """Trainer of a policy on pairs of its responses, the better one by reward functions and models
    first. The arguments are TRL's, in its order; see :class:`GRPOTrainer`.

    Args:
        ref_model: what the loss is relative to; ``None``: the policy as it starts.
    """

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
        objects.refuse(
            data_collator,
            optimizers,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self._prepare(
            args,
            OnlineDPOConfig,
            model,
            reward_funcs,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            ref_model=ref_model,
            callbacks=callbacks,
            peft_config=peft_config,
        )


def _newest(out: Path, name: str) -> str:
    """Return the newest run in a folder that has a checkpoint; raises StateError without one."""
    named = re.compile(re.escape(name) + r"-\d+")
    found = (run for run in out.glob("*") if named.fullmatch(run.name))
    runs = [run for run in found if newest(run / "checkpoints")]
    if not runs:
        raise StateError(
            f"resume_from_checkpoint = True: no run in '{out}' is called '{name}' and has a "
            "checkpoint; start it anew, with save_steps for checkpoints",
            "no-checkpoint",
        )
    return str(max(runs, key=lambda run: (run / "checkpoints").stat().st_mtime))
