"""Training runs from Python."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from stretto.api.settings import (
    R,
    Settings,
    changed,
    check_resumable,
    config_of,
    of_dataset,
    settled,
)
from stretto.config import Config, RewardModelConfig, SftConfig, recipes
from stretto.errors import ConfigError, StateError, StrettoError, TaskError
from stretto.files import write_whole
from stretto.observe import Progress, RunDirectory, make_progress
from stretto.signals import ending_in_order

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from stretto.assembly.models import Given
    from stretto.runs import RewardModelResult, SftResult, TrainResult
    from stretto.tasks import Task

C = TypeVar("C", SftConfig, RewardModelConfig)
T = TypeVar("T")

Function: TypeAlias = Callable[..., Any]
Rows: TypeAlias = Iterable[Mapping[str, Any]]

DATASET = "dataset.jsonl"
"""Where a run keeps the rows that it was given."""


def train(
    settings: Settings = "arithmetic",
    *,
    reward: Function | str | Sequence[Function | str] | Mapping[str, Any] | None = None,
    dataset: Rows | str | Path | None = None,
    task: Task | Mapping[str, Any] | None = None,
    model: nn.Module | str | Path | Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
    **changes: Any,
) -> TrainResult:
    """Train a model with reinforcement learning; what ``stretto train`` does.

    Args:
        settings: see :mod:`stretto.api`.
        reward: a function with TRL's, OpenRLHF's or verl's parameters, which is called in this
            process; a source as ``reward.sources`` takes it; or several of both, which are summed.
            They take the place of the settings' sources. A mapping changes the section instead.
        dataset: rows, or the name of a file or a hub dataset. The prompts are in the column
            ``task.prompt_column``. Rows are kept in the run's folder, so they must be plain data.
        task: prompts as an object; what judges them is ``reward``. A mapping changes the section
            instead.
        model: the policy as an object, which is trained in place and needs its ``tokenizer``, or a
            model's name. A mapping changes the section instead.
        tokenizer: of ``model``.
        progress: a display; without one what ``observe.progress`` says.
        changes: see :mod:`stretto.api`.

    Returns:
        the number of steps, the last one's figures, and the folder of the trained model, which is
        in the run's folder.

    Raises:
        StrettoError: a setting, a model, a dataset, a judge, the numbers or the disk are at fault.
        KeyboardInterrupt: Ctrl-C, or as :class:`stretto.signals.Terminated` SIGTERM or SIGHUP.

    Whatever ends the run after its first step: what was learned is saved, and in the model.
    """
    config = config_of(settings)
    rows = None
    if isinstance(dataset, str | Path):
        config = changed(config, of_dataset(config.task, str(dataset)))
    elif dataset is not None:
        rows = list(dataset)
        config = changed(config, of_dataset(config.task, DATASET))
    elif task is not None and not isinstance(task, Mapping):
        config = changed(config, of_dataset(config.task, type(task).__name__))
    given, meant = _brought(reward, task, model, tokenizer)
    config = changed(config, {**meant, **changes})
    if given.task is not None and "task" in config.reward.sources:
        raise ConfigError(
            "a task that is brought as an object does not judge by itself; give what judges as "
            "reward=, a function of the completions and of the row's columns"
        )
    if not config.task.name:
        raise ConfigError("task.name is empty: give rows or a file as dataset=")
    name = recipes.name_of(settings) if not isinstance(settings, Config) else "run"
    run_dir = RunDirectory.create(config.out, name, config)
    if rows is not None:
        task_config = config.task.model_copy(update={"name": str(_keep(rows, run_dir))})
        config = config.model_copy(update={"task": task_config})
        run_dir.save_config(config)
    return execute(config, run_dir, given=given, progress=progress)


def resume(run: str | Path, *, progress: Progress | None = None, **changes: Any) -> TrainResult:
    """Go on with a run from its newest checkpoint; what ``stretto train --resume`` does.

    Args:
        run: its folder. A run that was given objects cannot be resumed by its folder alone.
        progress: as in :func:`train`.
        changes: of the settings that :data:`RESUMABLE` names.

    Raises:
        ConfigError: it is no run's folder, or another setting is changed.
        StateError: it holds no checkpoint that is whole.
        StorageError: another process is at work in it, or it cannot be written to.
    """
    run_dir = RunDirectory.open(run)
    before = recipes.load(run_dir.config_file)
    config = changed(before, changes)
    check_resumable(before, config)
    return execute(config, run_dir, resuming=True, progress=progress)


def execute(
    config: Config,
    run_dir: RunDirectory,
    *,
    resuming: bool = False,
    given: Given | None = None,
    progress: Progress | None = None,
) -> TrainResult:
    """A run in a folder that is there: plan, display, training, and where the results are.

    Args:
        config: of the run.
        run_dir: its folder; removed again if a new run ends before its first step.
        resuming: go on from the newest checkpoint in it; the settings are written into it.
        given: what the caller brings instead of names.
        progress: as in :func:`train`.
    """
    display = progress or make_progress(config.observe.progress)

    def work() -> TrainResult:
        if resuming:
            run_dir.save_config(config)
        from stretto import runs
        from stretto.models.memory import format_plan, plan_for

        # A model that the caller brings has a type of its own.
        named = given is None or given.actor is None
        final, decided = _settled(config, run_dir) if named else (config, [])
        display.start(final, format_plan(plan_for(final)) if named else "")
        display.note(f"{'resuming' if resuming else 'run directory'}: {run_dir.path}")
        for line in decided:
            display.note(line)
        brought = {"given": given} if given else {}
        return runs.train(final, run_dir=run_dir, resume=resuming, progress=display, **brought)

    return _to_the_end(work, run_dir, display, keep=resuming)


def sft(
    settings: SftConfig | str | Path, *, progress: Progress | None = None, **changes: Any
) -> SftResult:
    """Fine-tune a language model on demonstrations; what ``stretto sft`` does.

    Args:
        settings: its settings, a recipe's name, a ``.toml`` file or a run's folder.
        progress: as in :func:`train`.
        changes: see :mod:`stretto.api`.

    Raises:
        StrettoError: a setting, the model, the data or the numbers are at fault.
    """
    config, run_dir = _begun(settings, SftConfig, "sft", changes)
    return execute_sft(config, run_dir, progress=progress)


def train_reward_model(
    settings: RewardModelConfig | str | Path, *, progress: Progress | None = None, **changes: Any
) -> RewardModelResult:
    """Train a reward model on pairs of a better and a worse response; what ``stretto reward`` does.

    Args:
        settings: its settings, a recipe's name, a ``.toml`` file or a run's folder.
        progress: as in :func:`train`.
        changes: see :mod:`stretto.api`.

    Raises:
        StrettoError: a setting, the model, the data or the numbers are at fault.
    """
    config, run_dir = _begun(settings, RewardModelConfig, "reward", changes)
    return execute_reward(config, run_dir, progress=progress)


def execute_sft(
    config: SftConfig, run_dir: RunDirectory, *, progress: Progress | None = None
) -> SftResult:
    """Fine-tuning in a folder that is there; arguments as those of :func:`execute`."""
    from stretto import runs

    return _supervised(config, run_dir, runs.sft, progress)


def execute_reward(
    config: RewardModelConfig, run_dir: RunDirectory, *, progress: Progress | None = None
) -> RewardModelResult:
    """The training of a reward model, likewise; see :func:`execute_sft`."""
    from stretto import runs

    return _supervised(config, run_dir, runs.train_reward_model, progress)


def _begun(
    settings: C | str | Path, kind: type[C], name: str, changes: Mapping[str, Any]
) -> tuple[C, RunDirectory]:
    """The settings of a run of supervised training, and its folder."""
    if isinstance(settings, str | Path):
        name = recipes.name_of(settings)
        settings = recipes.load(settings, kind)
    config = changed(settings, changes)
    return config, RunDirectory.create(config.out, name, config)


def _supervised(
    config: C, run_dir: RunDirectory, work: Callable[..., T], progress: Progress | None
) -> T:
    display = progress or make_progress(config.observe.progress)

    def run() -> T:
        final, decided = _settled(config, run_dir)
        display.start(final, "")
        display.note(f"run directory: {run_dir.path}")
        for line in decided:
            display.note(line)
        return work(final, run_dir=run_dir, progress=display)

    return _to_the_end(run, run_dir, display)


def _settled(config: R, run_dir: RunDirectory) -> tuple[R, list[str]]:
    """The settings with what the machine decides, kept in the run's folder, and lines about it."""
    lines: list[str] = []
    final = settled(config, lines.append)
    if lines:
        run_dir.save_config(final)
    return final, lines


def _to_the_end(
    work: Callable[[], T], run_dir: RunDirectory, display: Progress, keep: bool = False
) -> T:
    """Do a run's work while nobody else writes into its folder, and say what there is of it, also
    where it is stopped.
    """
    with ending_in_order(), ExitStack() as stack:
        stack.enter_context(run_dir.locked(display.note))
        try:
            with stack:  # a folder that is removed is let go of first
                result = work()
        except BaseException:
            _leave(run_dir, display, keep)
            raise
        display.close()
        records = "metrics, samples" if run_dir.samples_file.exists() else "metrics"
        display.note(f"done; {records} and the trained model are in {run_dir.path}")
        return result


def _leave(run_dir: RunDirectory, display: Progress, keep: bool) -> None:
    """Say what there is of a run that was stopped; one that never took a step leaves nothing.

    What fails on the way, as on a terminal that is gone, must not hide what stopped the run.
    """
    with suppress(OSError, ValueError, StateError):
        display.close()
    with suppress(OSError, ValueError, StateError):
        if any(record["step"] for record in run_dir.read_metrics()):
            display.note(f"stopped; what was done so far is in {run_dir.path}")
        elif not keep:
            shutil.rmtree(run_dir.path)


def _brought(
    reward: Any, task: Any, model: Any, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[Given, dict[str, Any]]:
    """Objects, and what settings say of them; mappings are settings as they are."""
    from stretto.assembly.models import Given

    given = Given(tokenizer=tokenizer)
    meant: dict[str, Any] = {}
    for name, part in (("reward", reward), ("task", task), ("model", model)):
        if isinstance(part, Mapping):
            meant[name] = part
    if reward is not None and "reward" not in meant:
        functions, sources = _rewards(reward)
        given = replace(given, functions=functions)
        meant |= {"reward__sources": sources, "reward__weights": ()}
    if task is not None and "task" not in meant:
        given = replace(given, task=task)
    if isinstance(model, str | Path):
        meant["model__name"] = str(model)
    elif model is not None and "model" not in meant:
        if tokenizer is None:
            raise ConfigError(
                "model is an object, whose tokenizer nothing names: give tokenizer= too"
            )
        given = replace(given, actor=model)
        meant["model__name"] = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return given, meant


def _rewards(
    given: Function | str | Sequence[Function | str],
) -> tuple[dict[str, Function], tuple[str, ...]]:
    """Functions by name, and the names of all sources."""
    parts = [given] if isinstance(given, str) or callable(given) else list(given)
    functions: dict[str, Function] = {}
    sources = []
    for part in parts:
        if not isinstance(part, str) and not callable(part):
            raise ConfigError(
                f"reward takes functions, and sources such as 'task' and 'model:NAME'; got {part!r}"
            )
        name = part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)
        if name in sources:
            raise ConfigError(f"two rewards are called '{name}'; give one of them another name")
        sources.append(name)
        if not isinstance(part, str):
            functions[name] = part
    return functions, tuple(sources)


def _keep(rows: Sequence[Mapping[str, Any]], run_dir: RunDirectory) -> Path:
    """Write rows into a run's folder: its judge reads them there, and so does who resumes it."""
    file = run_dir.path.absolute() / DATASET
    lines = []
    try:
        for number, row in enumerate(rows):
            try:
                lines.append((json.dumps(dict(row), ensure_ascii=False) + "\n").encode())
            except (TypeError, ValueError) as error:
                raise TaskError(
                    f"dataset: row {number} must be a mapping of plain data (text, numbers, lists "
                    f"and mappings of them); {error}"
                ) from error
        write_whole(file, b"".join(lines))
    except StrettoError:
        shutil.rmtree(run_dir.path)
        raise
    return file
