"""The base of TRL's PPO, GRPO, RLOO and Online DPO trainers: runs training through our API."""

from __future__ import annotations

import functools
import inspect
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, ParamSpec, Self, TypeVar

from transformers import (
    DefaultFlowCallback,
    PreTrainedTokenizerBase,
    TrainerControl,
    TrainerState,
    trainer_pt_utils,
)
from transformers.trainer_callback import CallbackHandler

from stretto import api, files
from stretto.api.training import rows_in, write_rows
from stretto.assembly.run_models import Overrides
from stretto.config import Config, recipes
from stretto.config.capabilities import ENVIRONMENT
from stretto.errors import ConfigError, StateError, TaskError
from stretto.interfaces import Python, through
from stretto.models.load import save_model
from stretto.observe import RunDirectory, card, make_progress
from stretto.observe.progress import on_stderr
from stretto.runs import TrainResult
from stretto.runs.checkpoint import newest
from stretto.runs.evaluating import answer_all, figures
from stretto.schedules.rollout import Rollout
from stretto.trl import arguments, checkpoints, trainer_inputs
from stretto.trl.callbacks import after_step, evaluated, means_of, never_called
from stretto.trl.compat import require_called, require_named
from stretto.trl.config import IN_SCRIPTS, SETS, TrlConfig
from stretto.trl.trainer_inputs import Answering, PromptTask, RewardSources, TokenTask

P = ParamSpec("P")
R = TypeVar("R")

_CALLS = {"train --resume ": "trainer.train(resume_from_checkpoint={})"}
"""Calls in scripts, by the prefix of the command line that they replace."""


def words_of(trainer: Any) -> Python:
    """Return how messages name settings for a trainer: by arguments of it and its config."""
    names = [field.name for field in fields(trainer.config_class)]
    equal = {setting: name for name, setting in SETS.items() if name in names}
    names += inspect.signature(trainer.__init__).parameters
    return Python(names, False, _CALLS, equal | IN_SCRIPTS)


def in_script(method: Callable[P, R]) -> Callable[P, R]:
    """Make errors of a trainer's method name the script's arguments."""

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with through(words_of(type(args[0]))):
            return method(*args, **kwargs)

    return called


@dataclass(frozen=True, kw_only=True)
class TrainOutput(TrainResult):
    """Outcome of a run, with the fields of transformers' ``TrainOutput``.

    Attributes:
        global_step: optimizer steps, as TRL counts them.
        training_loss: mean policy loss over all steps, with the entropy bonus.
        metrics: ``train_loss``, ``train_runtime`` (seconds), ``train_samples_per_second``,
            ``train_steps_per_second``, ``epoch`` and the means over the steps since the last
            multiple of ``logging_steps``. They are also the last row of ``log_history``.
    """

    global_step: int
    training_loss: float
    metrics: Mapping[str, float]


class BaseTrainer:
    """Base of the trainers. Trains models in place. Each run has its own folder in
    ``args.output_dir`` with its settings, metrics, samples and trained model.

    Attributes:
        config: the run's settings.
        run_dir: the run's folder, ``None`` before :meth:`train`.
        state: ``log_history`` has a row of metrics per step, under our names and TRL's, and a last
            row with ``train_loss``.
        unlogged: TRL's metrics of the steps since the last multiple of ``logging_steps``.
        source_names: TRL's names of reward sources, if they differ from ours.
        callback_handler: transformers' handler. Callbacks get no optimizer.
    """

    config_class: ClassVar[type[TrlConfig]]
    hub_model_id: ClassVar[None] = None
    optimizer = lr_scheduler = None
    eval_dataset: Any = None
    _training = False
    _base_is_named = True  # whether the base of an adapter can be loaded by its name
    _held_out: PromptTask | None = None  # prompts of evaluations during training
    _answering = Answering()  # no tools and no environments
    source_names: Mapping[str, str] = {}

    log_metrics = trainer_pt_utils.log_metrics
    metrics_format = trainer_pt_utils.metrics_format
    save_metrics = trainer_pt_utils.save_metrics
    save_state = trainer_pt_utils.save_state

    def __new__(cls, *_: Any, **named: Any) -> Self:
        """Refuse overridden methods that are never called, and unknown arguments."""
        require_called(cls)
        require_named(cls, named)
        return super().__new__(cls)

    def _set_up(
        self,
        args: Any,
        tokenizer: PreTrainedTokenizerBase,
        models: Mapping[str, Any],
        rewards: RewardSources,
        task: PromptTask | TokenTask,
        sizes: arguments.RunSizes,
        callbacks: Sequence[Any] | None,
        peft_config: Any,
    ) -> None:
        """Build the run's settings. ``models`` has the models by TRL's names."""
        self.args = args
        self.processing_class = tokenizer
        self._rewards = rewards
        self.model = self.policy_model = models["model"]
        self.ref_model, self.value_model = models.get("ref_model"), models.get("value_model")
        self._task = task
        self.train_dataset = task
        self.sizes = sizes
        dtype = trainer_inputs.bring_to_dtype(models, args)
        self._notes = trainer_inputs.lora_notes(peft_config)
        data = arguments.settings(args, sizes, task.longest, dtype)
        _add_objects(data, self, peft_config)
        self.config: Config = recipes.build(data, type(args).__name__)
        self.run_dir: RunDirectory | None = None
        self.unlogged: list[Mapping[str, float]] = []
        self.state, self.control = TrainerState(), TrainerControl()
        self.state.max_steps = sizes.steps * sizes.updates
        self.callback_handler = CallbackHandler(  # type: ignore[no-untyped-call]
            [DefaultFlowCallback, *(callbacks or ())], self.model, tokenizer, None, None
        )
        self.add_callback = self.callback_handler.add_callback
        self.pop_callback = self.callback_handler.pop_callback
        self.remove_callback = self.callback_handler.remove_callback
        self.tell("on_init_end")

    @functools.cached_property
    def accelerator(self) -> Any:
        """An ``accelerate.Accelerator`` of this one process, for scripts that use it."""
        from accelerate import Accelerator

        return Accelerator(cpu=self.config.model.device == "cpu")

    def is_world_process_zero(self) -> bool:
        return True

    is_local_process_zero = is_world_process_zero

    @in_script
    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train, or resume the run of the same script from its newest checkpoint.

        After Ctrl-C the models have the weights trained so far, which are also in a checkpoint.

        Args:
            resume_from_checkpoint: a ``checkpoint-N`` or run folder, or True for the newest run in
                ``output_dir``.
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
        folder = Path(resumed)
        if resumed:
            resumed = checkpoints.run_of(folder)
        if rows := self._held_out:
            file = Path(self.config.task.held_out_rows)
            with files.explained(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_rows((rows.row(i).data for i in range(len(rows))), file)
        copied = Path(resumed).absolute() / recipes.DATASET
        config = rows_in(self.config, copied) if resumed and copied.is_file() else self.config
        run = api.begin(config, name, resume=resumed, overrides=self._overrides())
        display = make_progress(self.config.observe.progress)
        if resumed:
            checkpoints.put_back(folder)
        else:
            run = _with_rows(run, self._task, display.note)
        self.config, self.run_dir = run.config, run.run_dir
        run = replace(run, gives_objects=True)
        for line in (
            arguments.notes(args, self.sizes) + self._notes + never_called(self.callback_handler)
        ):
            display.note(line)
        self.state.compute_steps(args, self.state.max_steps)  # type: ignore[no-untyped-call]
        self.tell("on_train_begin")
        self.tell("on_epoch_begin")
        self._training = True
        try:
            result = api.execute(run, progress=display, on_step=functools.partial(after_step, self))
        except KeyboardInterrupt as interrupt:  # the frames of the run's threads explain nothing
            raise interrupt.with_traceback(None) from None
        finally:
            self._training = False
        return _finished(self, result, time.monotonic() - began_s)

    def _export(self, step: int, own: Path, save: Callable[[Path], None]) -> None:
        number = step * self.sizes.updates

        def save_with_card(folder: Path) -> None:
            save(folder)
            run = RunDirectory(own.parent.parent)
            card.write_card(run, self.config.algorithm.name, folder=folder)

        checkpoints.export(
            Path(self.config.out) / f"checkpoint-{number}",
            save_with_card,
            own,
            replace(self.state, global_step=number),
            adapter=self._base_is_named,
            limit=self.args.save_total_limit,
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add metrics with the epoch to ``state.log_history``, and call the callbacks."""
        logs["epoch"] = self.state.epoch or 0.0
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.tell("on_log", logs=logs)

    @in_script
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return and log the reward metrics of one greedy answer per prompt. Computes no loss.

        ``eval_dataset`` defaults to the trainer's. With a mapping, metrics include its keys.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(rows, Mapping):
            all_metrics: dict[str, float] = {}
            for name, dataset in rows.items():
                all_metrics |= self.evaluate(dataset, ignore_keys, f"{metric_key_prefix}_{name}")
            return all_metrics
        task = self._read_prompts(self._require_rows(rows), "eval_dataset")
        began_s = time.monotonic()
        answers = self._answers_to(task)
        took_s, prefix = time.monotonic() - began_s, metric_key_prefix
        metrics = {
            **evaluated(figures(self.config, answers), self.source_names, prefix),
            f"{prefix}_runtime": took_s,
            f"{prefix}_samples_per_second": len(answers) / took_s,
        }
        self.log(metrics)
        self.tell("on_evaluate", metrics=metrics)
        return metrics

    def _require_rows(self, rows: Any) -> Any:
        if rows is None:
            raise ConfigError(
                "an evaluation answers the prompts of eval_dataset, and there is none; give one to "
                f"{type(self).__name__}",
                "no-eval-dataset",
            )
        return rows

    def _read_prompts(self, rows: Any, name: str) -> PromptTask | TokenTask:
        rows = trainer_inputs.rows_of(rows, name, 0)
        template_arguments = arguments.template_arguments(self.args)
        return PromptTask(rows, self.processing_class, name, self._answering, template_arguments)

    def _answers_to(self, task: PromptTask | TokenTask) -> list[Rollout]:
        """Return scored greedy answers to all prompts of a task. StateError while training."""
        if self._training:
            raise StateError(
                "the weights change while training is under way; evaluate before or after it, or "
                "during it with eval_strategy",
                "evaluates-in-training",
            )
        task_settings = {"chat": task.chat, "shuffle": False, "max_prompt_tokens": task.longest}
        config = self.config.changed_in("task", held_out=0.0, **task_settings)
        overrides = replace(self._overrides(), task=task, reference=None, critic=None)
        return answer_all(config, overrides, on_stderr)

    def end(self) -> None:
        """Do nothing: training closes its trackers itself and has no process group."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write the run's model card to ``args.output_dir``, unless the card there was edited."""
        if self.run_dir is None:
            on_stderr("no model card is written before training")
        else:
            method, folder = self.config.algorithm.name, Path(self.args.output_dir)
            card.write_card(self.run_dir, method, folder=folder)

    def save_model(
        self, output_dir: str | Path | None = None, _internal_call: bool = False
    ) -> None:
        """Save policy and tokenizer to a folder (default ``args.output_dir``). Other files there
        stay.

        The model has Hugging Face format. With ``peft_config`` the folder has the adapter, and its
        subfolder ``merged`` the merged model. Raises StorageError if the folder is not writable,
        and then no file of the model is in it.
        """
        folder = Path(output_dir or self.args.output_dir)
        with files.explained(folder), files.added_to(folder) as scratch:
            if self.run_dir is not None and self.run_dir.model.is_dir():
                shutil.copytree(self.run_dir.model, scratch, dirs_exist_ok=True)
            else:
                save_model(self.policy_model, self.processing_class, scratch)
            if card.is_edited(folder):
                (scratch / card.NAME).unlink(missing_ok=True)
                (scratch / "adapter" / card.NAME).unlink(missing_ok=True)
            adapted = self._base_is_named and checkpoints.lift_adapter(scratch)
        # transformers would load an adapter on top of a model in the same folder.
        (folder / ("config.json" if adapted else "adapter_config.json")).unlink(missing_ok=True)

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ConfigError: nothing is uploaded."""
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
            exports=self._export if self.config.observe.checkpoint_every else None,
        )

    def tell(self, event: str, **more: Any) -> None:
        """Call the callbacks for an event. ``control`` then holds their requests."""
        call = getattr(self.callback_handler, event)
        self.control = call(self.args, self.state, self.control, **more)


def _add_objects(data: dict[str, Any], t: BaseTrainer, peft_config: Any) -> None:
    """Add the settings of a trainer's objects to those of its arguments."""
    data["task"]["chat"] = t._task.chat
    data["model"]["name"] = str(getattr(t.model, "name_or_path", "") or type(t.model).__name__)
    if peft_config is not None:
        data["model"] |= trainer_inputs.lora_settings(peft_config, t.model)
    elif trainer_inputs.is_quantized(t.model) and not hasattr(t.model, "peft_config"):
        raise ConfigError(
            "the model's weights are in 4 bits, and only adapters beside them can be trained; "
            "give peft_config",
            "4bit-without-adapters",
        )
    environment_sources = (ENVIRONMENT,) if t._answering.rewards else ()
    data["reward"] |= {"sources": (*t._rewards.sources, *environment_sources)}
    if weights := getattr(t.args, "reward_weights", None):
        data["reward"]["weights"] = (*weights, *(1.0 for _ in environment_sources))
    if sources := tuple(t._answering.objects):
        data["environment"] = {"sources": sources, "max_turns": arguments.max_turns(t.args)}
        if t._answering.most:  # episodes must proceed while queued ones wait to open
            data["schedule"] = {**data["schedule"], "score_on": "rollout"}
    if t._held_out:
        file = Path(t.args.output_dir).absolute() / recipes.EVAL_DATASET
        longest = max(t._task.longest, t._held_out.longest)
        data["task"] |= {"held_out": str(file), "max_prompt_tokens": longest}
        interval = arguments.eval_every(t.args, t.sizes)
        data["observe"] |= {"eval_every": interval, "eval_prompts": len(t._held_out)}


def _with_rows(
    run: api.Begun[Config], task: PromptTask | TokenTask, note: Callable[[str], None]
) -> api.Begun[Config]:
    """Copy the rows into the run's folder, so that the run can be evaluated and repeated."""
    file = run.run_dir.path.absolute() / recipes.DATASET
    rows = map(task.row, range(len(task)))
    try:
        write_rows(({"prompt": row.prompt, **row.data} for row in rows), file)
    except TaskError as error:
        note(f"the run's folder has no copy of the rows, which are read as objects: {error}")
        return run
    run = replace(run, config=rows_in(run.config, file))
    run.run_dir.save_config(run.config)
    return run


def _finished(t: BaseTrainer, result: TrainResult, took_s: float) -> TrainOutput:
    """Log the metrics of a complete run, and return its outcome."""
    done = t.state.global_step
    losses = [row["loss"] for row in t.state.log_history if "loss" in row]
    loss = sum(losses) / len(losses) if losses else 0.0
    metrics = {
        "train_runtime": took_s,
        "train_samples_per_second": result.steps * t.config.rollout.batch / took_s,
        "train_steps_per_second": done / took_s,
        "train_loss": loss,
        **means_of(t.unlogged),
    }
    t.log(metrics)
    t.tell("on_train_end")
    of_run = {f.name: getattr(result, f.name) for f in fields(TrainResult)}
    return TrainOutput(**of_run, global_step=done, training_loss=loss, metrics=metrics)


def _newest(out: Path, name: str) -> str:
    """Return the newest run of that name with a checkpoint. Raises StateError without one."""
    pattern = re.compile(re.escape(name) + r"-\d+")
    candidates = (run for run in out.glob("*") if pattern.fullmatch(run.name))
    runs = [run for run in candidates if newest(run / "checkpoints")]
    if not runs:
        raise StateError(
            f"resume_from_checkpoint = True: no run in '{out}' is called '{name}' and has a "
            "checkpoint; start it anew, with save_steps for checkpoints",
            "no-checkpoint",
        )
    return str(max(runs, key=lambda run: (run / "checkpoints").stat().st_mtime))
