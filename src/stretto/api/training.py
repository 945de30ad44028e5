"""Training runs from Python."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from stretto.api.execution import Begun, begin, execute
from stretto.api.settings import Settings, changed, config_of, of_dataset
from stretto.config import Config, RewardModelConfig, SftConfig, recipes
from stretto.errors import ConfigError, TaskError
from stretto.observe import Progress, RunDirectory

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from stretto.assembly.models import Overrides
    from stretto.runs import RewardModelResult, SftResult, TrainResult
    from stretto.tasks import Task

C = TypeVar("C", SftConfig, RewardModelConfig)

Function: TypeAlias = Callable[..., Any]
Rows: TypeAlias = Iterable[Mapping[str, Any]]

DATASET = "dataset.jsonl"
"""File in which a run keeps the rows that it was given."""


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

    Whatever ends the run after its first step: what was learned is saved, and in the model. Raises
    a StrettoError where a setting, a model, a dataset, a reward function, the numbers or the disk
    are at fault; KeyboardInterrupt for Ctrl-C, or as :class:`stretto.signals.Terminated` for
    SIGTERM or SIGHUP.

    Args:
        settings: a :class:`~stretto.config.Config`, a recipe's name, a ``.toml`` file or a run's
            folder.
        reward: a function with TRL's, OpenRLHF's or verl's parameters, which is called in this
            process; a source as ``reward.sources`` takes it; or several of both, which are summed.
            They take the place of the settings' sources. A mapping changes the section instead.
        dataset: rows, or the name of a file or a hub dataset. The prompts are in the column
            ``task.prompt_column``. Rows are kept in the run's folder, so they must be plain data.
        task: prompts as an object; what scores them is ``reward``. A mapping changes the section
            instead.
        model: the policy as an object, which is trained in place and needs its ``tokenizer``, or a
            model's name. A mapping changes the section instead.
        progress: a display; without one what ``observe.progress`` says.
        changes: of settings: a section as a mapping (``rollout={"batch": 64}``), or one setting
            behind its section's name (``rollout__batch=64``).
    """
    config = config_of(settings)
    rows = None if dataset is None or isinstance(dataset, str | Path) else list(dataset)
    overrides, implied = _overrides(reward, task, model, tokenizer)
    prompts: dict[str, Any] = {}
    if dataset is not None:
        prompts = of_dataset(config.task, str(dataset) if rows is None else DATASET)
    elif overrides.task is not None:
        prompts = of_dataset(config.task, type(task).__name__)
    config = changed(config, prompts, implied, changes)
    if overrides.task is not None and "task" in config.reward.sources:
        raise ConfigError(
            "a task that is brought as an object does not score by itself; give what scores as "
            "reward=, a function of the completions and of the row's columns",
            "task-without-reward",
        )
    if not config.task.name:
        raise ConfigError("task.name is empty: give rows or a file as dataset=", "task-unnamed")
    name = recipes.name_of(settings) if not isinstance(settings, Config) else "run"
    if rows is None:
        return execute(begin(config, name, overrides=overrides), progress=progress)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / DATASET
        _write(rows, file)
        run = begin(_named_rows(config, file), name, overrides=overrides)
        kept = run.run_dir.path.absolute() / DATASET
        shutil.copyfile(file, kept)
    run = replace(run, config=_named_rows(config, kept))
    run.run_dir.save_config(run.config)
    return execute(run, progress=progress)


def _named_rows(config: Config, file: Path) -> Config:
    return config.model_copy(update={"task": config.task.model_copy(update={"name": str(file)})})


def resume(run: str | Path, *, progress: Progress | None = None, **changes: Any) -> TrainResult:
    """Go on with a run from its newest checkpoint; what ``stretto train --resume`` does.

    Raises ConfigError where it is no run's folder or another setting is changed, StateError where
    it holds no checkpoint that is whole, StorageError where another process is at work in it.

    Args:
        run: its folder. A run that was given objects cannot be resumed by its folder alone.
        progress: as in :func:`train`.
        changes: of the settings that :data:`RESUMABLE` names.
    """
    before = recipes.load(RunDirectory.open(run).config_file)
    return execute(begin(changed(before, changes), resume=run), progress=progress)


def sft(
    settings: SftConfig | str | Path, *, progress: Progress | None = None, **changes: Any
) -> SftResult:
    """Fine-tune a language model on demonstrations; what ``stretto sft`` does.

    Args:
        settings: its settings, a recipe's name, a ``.toml`` file or a run's folder.
        progress, changes: as in :func:`train`.
    """
    return execute(_begun(settings, SftConfig, "sft", changes), progress=progress)


def train_reward_model(
    settings: RewardModelConfig | str | Path, *, progress: Progress | None = None, **changes: Any
) -> RewardModelResult:
    """Train a reward model on pairs of a better and a worse response; what ``stretto reward`` does.

    Args:
        settings: its settings, a recipe's name, a ``.toml`` file or a run's folder.
        progress, changes: as in :func:`train`.
    """
    return execute(_begun(settings, RewardModelConfig, "reward", changes), progress=progress)


def _begun(
    settings: C | str | Path, kind: type[C], name: str, changes: Mapping[str, Any]
) -> Begun[C]:
    if isinstance(settings, str | Path):
        name = recipes.name_of(settings)
        settings = recipes.load(settings, kind)
    return begin(changed(settings, changes), name)


def _overrides(
    reward: Any, task: Any, model: Any, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[Overrides, dict[str, Any]]:
    """Return the objects among the arguments, and changes of settings for names and mappings."""
    from stretto.assembly.models import Overrides

    arguments = {"reward": reward, "task": task, "model": model}
    changes: dict[str, Any] = {
        n: part for n, part in arguments.items() if isinstance(part, Mapping)
    }
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
            raise ConfigError(
                "model is an object, whose tokenizer nothing names: give tokenizer= too",
                "tokenizer-of-object",
            )
        objects["actor"] = model
        changes["model__name"] = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return Overrides(**objects), changes


def _rewards(
    reward: Function | str | Sequence[Function | str],
) -> tuple[dict[str, Function], tuple[str, ...]]:
    """Return functions by name, and the names of all sources."""
    parts = [reward] if isinstance(reward, str) or callable(reward) else list(reward)
    functions, sources = dict[str, Function](), list[str]()
    for part in parts:
        if not isinstance(part, str) and not callable(part):
            wanted = "reward takes functions, and sources such as 'task' and 'model:NAME'"
            raise ConfigError(f"{wanted}; got {part!r}", "reward-not-callable")
        name = part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)
        if name in sources:
            raise ConfigError(
                f"two rewards are called '{name}'; give one of them another name", "rewards-alike"
            )
        sources.append(name)
        if not isinstance(part, str):
            functions[name] = part
    return functions, tuple(sources)


def _write(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write rows to a file, which the run's reward functions and a resumed run read."""
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False) + "\n")
        except (TypeError, ValueError) as error:
            raise TaskError(
                f"dataset: row {number} must be a mapping of plain data (text, numbers, lists and "
                f"mappings of them); {error}",
                "row-not-plain",
            ) from error
    file.write_text("".join(lines), encoding="utf-8")
