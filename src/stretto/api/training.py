"""Starts and executes runs, also for commands, and trains by keyword arguments."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, overload

from stretto.api.settings import RESUMABLE, R, Settings, changed, check_resumable, of_rows, settled
from stretto.checks import check_run, check_supervised, disk
from stretto.config import (
    Config,
    ModelConfig,
    RewardModelConfig,
    SftConfig,
    SupervisedConfig,
    TaskConfig,
    recipes,
)
from stretto.config.training_config import token_budget
from stretto.environments.objects import named_objects
from stretto.errors import (
    ConfigError,
    OutOfMemoryError,
    StateError,
    TaskError,
    first_line,
    is_out_of_memory,
)
from stretto.interfaces import in_python, worded
from stretto.machine import Machine, usable_gpus
from stretto.models.info import measure, model_info, with_adapter_settings
from stretto.observe import Progress, RunDirectory, make_progress
from stretto.observe.progress import headline
from stretto.plain import dumps
from stretto.planner import fitting
from stretto.saying import CHECKING, LOADING, format_count
from stretto.signals import ending_in_order
from stretto.tasks.tables import ROWS_FOLDER, no_split

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from stretto.assembly.run_models import Overrides
    from stretto.runs import RewardModelResult, SftResult, TrainResult
    from stretto.runs.training_loop import OnStep
    from stretto.scoring.streaming import StreamingReward
    from stretto.tasks import Task

    Reward: TypeAlias = Callable[..., Any] | str | StreamingReward

C = TypeVar("C", SftConfig, RewardModelConfig)

Function: TypeAlias = Callable[..., Any]

_FEW_TOKENS, _FEW_SLOTS = 256, 4
"""Tokens per pass and slots below which the out-of-memory advice proposes no less."""


@dataclass(frozen=True, slots=True)
class Begun(Generic[R]):
    """A run with a folder that has not been executed yet.

    Attributes:
        resuming: whether it continues from the newest checkpoint in its folder.
        task: the settings' task, if a check has opened it.
        gives_objects: whether the call that resumes the run passes its ``overrides`` again.
    """

    config: R
    run_dir: RunDirectory
    resuming: bool = False
    overrides: Overrides | None = None
    task: Task | None = None
    gives_objects: bool = False


def begin(
    config: R,
    name: str = "run",
    *,
    resume: str | Path = "",
    overrides: Overrides | None = None,
    may_change: Sequence[str] = RESUMABLE,
) -> Begun[R]:
    """Check for causes of failure (:mod:`stretto.checks`), then create the folder of a run
    (``name`` and a number in ``config.out``) or open ``resume``, the folder of a run to continue
    with the same settings but for those in ``may_change``.
    """
    run_dir, folder = None, Path(config.out)
    if not isinstance(config, RewardModelConfig) and (overrides is None or overrides.actor is None):
        config = config.model_copy(update={"model": with_adapter_settings(config.model)})
    if resume:
        assert isinstance(config, Config), "runs of supervised training keep no checkpoints"
        run_dir = RunDirectory.open(resume)
        folder = run_dir.path
        check_resumable(recipes.load(run_dir.config_file), config, may_change)
    task = None
    if not (run_dir and overrides is None and run_dir.ended(config.steps)):
        with make_progress(config.observe.progress).working(CHECKING):
            if isinstance(config, Config):
                task = check_run(config, overrides)
            else:
                check_supervised(config)
            if overrides is None or overrides.actor is None:
                disk.check(disk.written(config), folder, resuming=bool(resume))
    run_dir = run_dir or RunDirectory.create(config.out, name, config)
    return Begun(config, run_dir, bool(resume), overrides, task)


@overload
def execute(
    run: Begun[Config], *, progress: Progress | None = None, on_step: OnStep | None = None
) -> TrainResult: ...
@overload
def execute(run: Begun[SftConfig], *, progress: Progress | None = None) -> SftResult: ...
@overload
def execute(
    run: Begun[RewardModelConfig], *, progress: Progress | None = None
) -> RewardModelResult: ...
def execute(
    run: Begun[Any], *, progress: Progress | None = None, on_step: OnStep | None = None
) -> Any:
    """Execute a run, with display and a report of the results. For errors see :func:`train`.

    A new folder is removed if the run ends before its first step. A resumed run's settings are
    written into its folder. If it is complete, its result is returned at once.
    """
    config, run_dir = run.config, run.run_dir
    if on_step is not None and not callable(on_step):
        message = "on_step is a function of a step's number and metrics"
        raise ConfigError(f"{message}; got {on_step!r}", "on-step-not-callable")
    if isinstance(progress, str | bool):
        message = f"progress is a display object; got {progress!r}"
        raise ConfigError(f"{message}. Set `observe.progress = off`", "progress-not-display")
    display = progress or make_progress(config.observe.progress)
    previous = run_dir.ended(config.steps) if run.resuming and run.overrides is None else None
    if previous is not None:
        display.note(
            f"the run in {run_dir.path} has ended: all of its {previous.steps} steps are taken, "
            f"and the trained model is in {previous.model}. With more `steps` it goes on from there"
        )
        return previous
    tokens, slots = config.training.microbatch_tokens, 0
    if isinstance(config, Config):
        slots = config.rollout.slots or config.rollout.batch
    with _memory_explained(config.model, tokens, slots), ending_in_order(), ExitStack() as stack:
        stack.enter_context(run_dir.locked(display.note))
        if run.resuming:
            from stretto.runs import checkpoint

            checkpoint.require(run_dir.checkpoints)
        try:
            with stack:  # unlock the folder before it is removed
                result = _train(run, display, on_step)
        except BaseException:
            _leave(run, display)
            raise
        display.close()
        records = "metrics, samples" if run_dir.samples_file.exists() else "metrics"
        display.note(f"done; {records} and the trained model are in {run_dir.path}")
        if isinstance(config, Config) and result.stopped:
            display.note(_continuation(run, result.steps))
        if best := run_dir.best():
            summary = f"of the evaluations, step {best.step} had the best score, {best.score:.3f}"
            display.note(f"{summary}; its model is in {best.model}")
        return result


def _train(run: Begun[Any], display: Progress, on_step: OnStep | None) -> Any:
    config = run.config
    run_dir = run.run_dir
    overrides = run.overrides
    if run.resuming:
        run_dir.save_config(config)
    lines: list[str] = []
    with display.working(LOADING):
        from stretto import runs
        from stretto.assembly.run_models import NO_OVERRIDES

        actor = overrides.actor if overrides else None
        if actor is None:  # otherwise the model has its own dtype
            config = settled(config, lines.append)
            if lines:
                run_dir.save_config(config)
            o = overrides  # models in them are not checked in processes
            objects = o and (o.critic or o.reference or o.reward_models)
            if isinstance(config, Config) and not (config.runtime_kind.has_processes and objects):
                lines += fitting.RunMemory(config).check_devices()
        run_dir.save_machine(Machine.here())
        text = _opening(config, run_dir, actor, resuming=run.resuming)
    display.start(text)
    for line in lines:
        display.note(line)
    if isinstance(config, Config):
        overrides = replace(overrides or NO_OVERRIDES, opened=run.task)
        return runs.train(
            config,
            run_dir=run_dir,
            resume=run.resuming,
            progress=display,
            overrides=overrides,
            on_step=on_step,
        )
    supervised = runs.sft if isinstance(config, SftConfig) else runs.train_reward_model
    return supervised(config, run_dir=run_dir, progress=display)


def _opening(
    config: Config | SupervisedConfig,
    run_dir: RunDirectory,
    actor: nn.Module | None,
    *,
    resuming: bool,
) -> str:
    from stretto.models.backend import pick_device

    where = f"{'goes on' if resuming else 'results'} in {run_dir.path}"
    if actor is None:
        size = ""
        if model_info(config.model.name) is not None:
            parameters, adapters = measure(config.model)
            size = f"{format_count(parameters)} parameters"
            if adapters is not None:
                size += f", of which adapters train {format_count(adapters)}"
        dtype, device = str(config.model.dtype), str(config.model.device)
        if not (isinstance(config, Config) and config.cluster.address):
            device = pick_device(device).type
        where = "; ".join(filter(None, (where, disk.said(disk.written(config), run_dir.path))))
    else:
        weight = next(actor.parameters())
        size = f"{format_count(sum(p.numel() for p in actor.parameters()))} parameters"
        dtype, device = str(weight.dtype).removeprefix("torch."), weight.device.type
    return headline(config, ", ".join(filter(None, (size, f"{dtype} on {device}"))), where)


@contextmanager
def _memory_explained(model: ModelConfig, tokens: int, slots: int) -> Iterator[None]:
    """Replace torch's and Python's memory errors by OutOfMemoryError with remedies."""
    try:
        yield
    except Exception as error:
        short = next((e for e in (error, error.__cause__) if e and is_out_of_memory(e)), None)
        if short is None:
            raise
        what = f" ({first_line(short)})" if str(short) else ""
        raise OutOfMemoryError(
            f"out of memory{what}. Less is taken with {_remedies(model, tokens, slots)}",
            "out-of-memory",
        ) from error


def _remedies(model: ModelConfig, microbatch_tokens: int, slots: int) -> str:
    remedies = list[str]()
    on_gpu = model.device != "cpu" and usable_gpus()
    tokens = token_budget(microbatch_tokens, "cuda" if on_gpu else "cpu")
    if tokens > _FEW_TOKENS:
        remedies.append(f"`training.microbatch_tokens = {max(tokens // 4, _FEW_TOKENS)}`")
    if model.gradient_checkpointing != "on":
        remedies.append("`model.gradient_checkpointing = on`")
    if not model.lora_rank:
        remedies.append("`model.lora_rank = 16`")
    if slots > _FEW_SLOTS:
        remedies.append(f"`rollout.slots = {max(slots // 4, _FEW_SLOTS)}`")
    return f"{', '.join([*remedies, 'or'])} a smaller model"


def _leave(run: Begun[Any], display: Progress) -> None:
    """Report a stopped run's folder and how to resume it. Remove the folder if the run never took a
    step. A failure here, for example of a closed terminal, must not hide the original error.
    """
    run_dir = run.run_dir
    with suppress(OSError, ValueError, StateError):
        display.close()
    with suppress(OSError, ValueError, StateError):
        if done := run_dir.last_step():
            how = f"; {_continuation(run, done)}" if isinstance(run.config, Config) else ""
            display.note(f"stopped; what was done so far is in {run_dir.path}{how}")
        elif not run.resuming:
            shutil.rmtree(run_dir.path)


def _continuation(run: Begun[Any], done: int) -> str:
    from stretto.assembly.run_models import NO_OVERRIDES
    from stretto.runs.checkpoint import newest
    from stretto.runs.training_loop import taken_again

    folder = run.run_dir.checkpoints
    step = newest(folder)
    if not step:
        return "it cannot be resumed, as it has no checkpoint"
    again = taken_again(step, done)
    if run.overrides not in (None, NO_OVERRIDES) and not run.gives_objects:
        return f"the newest checkpoint in {folder} is of step {step}{again}"
    return worded(f"`stretto train --resume {run.run_dir.path}` goes on after step {step}{again}")


@in_python
def train(
    settings: Settings = "arithmetic",
    *,
    reward: Reward | Sequence[Reward] | Mapping[str, Any] | None = None,
    dataset: Iterable[Mapping[str, Any] | str] | str | Path | None = None,
    task: Task | Mapping[str, Any] | None = None,
    model: nn.Module | str | Path | Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tools: Sequence[Function] = (),
    environment_factory: Function | Mapping[str, Function] | None = None,
    progress: Progress | None = None,
    on_step: OnStep | None = None,
    **changes: Any,
) -> TrainResult:
    """Train a model with reinforcement learning, like ``stretto train``.

    If the run ends early after its first step, the trained weights are saved, and in the model.
    Raises a StrettoError for invalid settings, models, datasets, reward functions or numbers, disk
    errors, and if another process uses the folder. Raises KeyboardInterrupt for Ctrl-C, or its
    subclass :class:`stretto.signals.Terminated` for the signals of ``stretto.signals.ENDING``.

    Args:
        settings: a ``Config``, a recipe's name, a ``.toml`` file or a run's folder.
        reward: a function with TRL's, OpenRLHF's or verl's parameters, called in this process; a
            class or object that scores chunk by chunk (docs/rewards.md); a source of
            ``reward.sources``; or several of these, which are summed. They replace the sources in
            the settings. A mapping changes the section instead.
        dataset: rows, or the name of a file, a folder or a hub dataset. Rows are mappings of plain
            data or just prompts, a DataFrame, or a DatasetDict (``task.split`` is read). They are
            copied into the run's folder.
        task: prompts as an object, scored by ``reward``. A mapping changes the section instead.
        model: the policy as an object, which is trained in place and needs its ``tokenizer``, or a
            model's name. A mapping changes the section instead.
        tools: functions that the policy may call between turns, in this process.
        environment_factory: makes environments of any kind in ``environment.sources``, in this
            process. In a dict of several, a row's column ``environment`` selects one.
        progress: a display. The default follows ``observe.progress``.
        on_step: called after each step with its number and metrics. If it returns ``"stop"``, the
            run ends in order, with a checkpoint, the saved model and a result. ``"save"`` requests
            a checkpoint.
        changes: changes of settings, as in :mod:`stretto.api`.
    """
    config = settings if isinstance(settings, Config) else recipes.load(settings, checked=False)
    overrides, implied = _overrides(reward, task, model, tokenizer)
    if objects := named_objects(tools, environment_factory):
        overrides = replace(overrides, environment=objects)
        implied["environment__sources"] = tuple(objects)
    dataset_name = None if overrides.task is None else type(task).__name__
    if dataset is not None:
        dataset_name = str(dataset) if isinstance(dataset, str | Path) else recipes.DATASET
    prompts = {} if dataset_name is None else of_rows(config.task, dataset_name)
    start = "" if isinstance(settings, Config) else str(settings)
    config = changed(config, prompts, implied, changes, start=start)
    if overrides.task is not None and "task" in config.reward.sources:
        raise ConfigError(
            "a task that is brought as an object does not score by itself; give what scores as "
            "reward=, a function of the completions and of the row's columns",
            "task-without-reward",
        )
    if not config.task.name:
        raise ConfigError("task.name is empty: give rows or a file as dataset=", "task-unnamed")
    name = recipes.name_of(settings) if not isinstance(settings, Config) else "run"
    if dataset is None or isinstance(dataset, str | Path):
        run = begin(config, name, overrides=overrides)
        return execute(run, progress=progress, on_step=on_step)
    with tempfile.TemporaryDirectory(prefix=ROWS_FOLDER) as folder:
        file = Path(folder) / recipes.DATASET
        write_rows(_rows_of(dataset, config.task), file)
        config = rows_in(config, file)
        run = begin(config, name, overrides=overrides)
        rows_path = run.run_dir.path.absolute() / recipes.DATASET
        shutil.copyfile(file, rows_path)
    run = replace(run, config=rows_in(run.config, rows_path))
    run.run_dir.save_config(run.config)
    return execute(run, progress=progress, on_step=on_step)


def rows_in(config: Config, file: Path) -> Config:
    return config.changed_in("task", name=str(file), split="train")


@in_python
def resume(
    run: str | Path,
    *,
    progress: Progress | None = None,
    on_step: OnStep | None = None,
    **changes: Any,
) -> TrainResult:
    """Continue a run from its newest checkpoint, like ``stretto train --resume``.

    Raises ConfigError if the folder is not a run's or a fixed setting changes, StateError without
    an undamaged checkpoint, and StorageError if another process uses the folder.

    Args:
        run: its folder. A run with objects cannot be resumed from its folder alone.
        progress, on_step, changes: as in :func:`train`, for settings in :data:`RESUMABLE`.
    """
    before = recipes.load(RunDirectory.open(run).config_file)
    resumed = begin(changed(before, changes), resume=run)
    return execute(resumed, progress=progress, on_step=on_step)


@in_python
def sft(
    settings: SftConfig | str | Path = "", *, progress: Progress | None = None, **changes: Any
) -> SftResult:
    """Fine-tune a language model on demonstrations, like ``stretto sft``.

    Args:
        settings: an ``SftConfig``, recipe name, ``.toml`` file or run folder. Empty is the default
            settings.
        progress, changes: as in :func:`train`.
    """
    return execute(_begun(settings, SftConfig, "sft", changes), progress=progress)


@in_python
def train_reward_model(
    settings: RewardModelConfig | str | Path = "",
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> RewardModelResult:
    """Train a reward model on pairs of a better and a worse response, like ``stretto reward``.

    Args:
        settings, progress, changes: as in :func:`sft`.
    """
    return execute(_begun(settings, RewardModelConfig, "reward", changes), progress=progress)


def _begun(
    settings: C | str | Path, kind: type[C], name: str, changes: Mapping[str, Any]
) -> Begun[C]:
    start = ""
    if settings == "":
        settings = kind()
    if isinstance(settings, str | Path):
        name = recipes.name_of(settings)
        start, settings = str(settings), recipes.load(settings, kind, checked=False)
    return begin(changed(settings, changes, start=start), name)


def _overrides(
    reward: Any, task: Any, model: Any, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[Overrides, dict[str, Any]]:
    from stretto.assembly.run_models import Overrides

    arguments = {"reward": reward, "task": task, "model": model}
    changes: dict[str, Any] = {
        n: part for n, part in arguments.items() if isinstance(part, Mapping)
    }
    if isinstance(tokenizer, str):
        raise ConfigError(
            f"tokenizer is an object of transformers; got '{tokenizer}'. Leave it out if the model "
            f"is named, or give AutoTokenizer.from_pretrained('{tokenizer}')",
            "tokenizer-not-object",
        )
    objects: dict[str, Any] = {"tokenizer": tokenizer}
    if reward is not None and "reward" not in changes:
        objects["functions"], sources = _rewards(reward)
        changes |= {"reward__sources": sources, "reward__weights": ()}
    if task is not None and "task" not in changes:
        objects["task"] = task
    if isinstance(model, str | Path):
        changes["model__name"] = str(model)
    elif model is not None and "model" not in changes:
        if tokenizer is None:
            message = "model is an object, whose tokenizer nothing names: give tokenizer= too"
            raise ConfigError(message, "tokenizer-of-object")
        objects["actor"] = model
        changes["model__name"] = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return Overrides(**objects), changes


def _rewards(reward: Reward | Sequence[Reward]) -> tuple[dict[str, Function], tuple[str, ...]]:
    from stretto.scoring.streaming import StreamingReward

    parts: list[Any] = [reward]
    if isinstance(reward, Iterable) and not isinstance(reward, str) and not callable(reward):
        parts = list(reward)
    functions, sources = dict[str, Function](), list[str]()
    for part in parts:
        if not (isinstance(part, str | StreamingReward) or callable(part)):
            rule = (
                "reward takes functions, scorers with the methods admit, extend, finish and "
                "release, and sources such as 'task' and 'model:NAME'"
            )
            raise ConfigError(f"{rule}; got {part!r}", "reward-not-callable")
        name = part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)
        if name in sources:
            raise ConfigError(
                f"two rewards are called '{name}'; give one of them another name", "rewards-alike"
            )
        sources.append(name)
        if not isinstance(part, str):
            functions[name] = part
    return functions, tuple(sources)


def _rows_of(dataset: Any, task: TaskConfig) -> Iterator[Mapping[str, Any]]:
    if isinstance(dataset, Mapping):  # a DatasetDict
        if task.split not in dataset:
            raise no_split("dataset", task.split, dataset)
        dataset = dataset[task.split]
    if hasattr(dataset, "itertuples"):  # a DataFrame, in which NaN are empty cells
        dataset = dataset.astype(object).where(dataset.notna(), None).to_dict("records")
    try:
        rows = iter(dataset)
    except TypeError as error:
        raise TaskError(
            "dataset must be rows (mappings or prompts) in a list or another iterable, or the name "
            f"of a file; got {type(dataset).__name__}",
            "dataset-not-rows",
        ) from error
    for row in rows:
        yield {task.columns.get("prompt", "prompt"): row} if isinstance(row, str) else row


def write_rows(rows: Iterable[Mapping[str, Any]], file: Path) -> None:
    """Write rows to a file, for the run's reward functions and a resumed run."""
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(dumps(dict(row)) + "\n")
        except (TypeError, ValueError) as error:
            raise TaskError(
                f"dataset: row {number} must be a mapping of plain data (text, numbers, lists and "
                f"mappings of them); {error}",
                "row-not-plain",
            ) from error
    file.write_text("".join(lines), encoding="utf-8")
