"""Settings from Python: recipes, changes, and settings that a resumed run may change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from stretto.config import Config, RewardModelConfig, Section, SftConfig, TaskConfig, recipes
from stretto.errors import ConfigError

S = TypeVar("S", bound=Section)
R = TypeVar("R", Config, SftConfig, RewardModelConfig)

Settings: TypeAlias = Config | str | Path

RESUMABLE = (
    "steps",
    "threads",
    "runtime",
    "cluster",
    "observe",
    "pipeline",
    "training.ratio_tolerance",
)
"""Settings and sections that a resumed run may change; any other would make it a different run."""

ROWS = ("task.name", "task.split")
HELD_OUT = "task.held_out"
"""Held-out rows belong to the rows that are trained on. Who names other rows, to train on or to
measure on, and no held-out ones, means those: the settings' own would be of another dataset."""


def load_recipe(name: str | Path, **changes: Any) -> Config:
    """A recipe's settings, changed.

    Args:
        name: of a packaged recipe, a ``.toml`` file or a run's folder.
        changes: as in :func:`train`.

    Raises:
        ConfigError: no such recipe, an unknown setting, or a value out of range.
    """
    return changed(recipes.load(name), changes)


def changed(config: S, changes: Mapping[str, Any]) -> S:
    """Settings with some of them changed; as in :func:`train`.

    Rows that are named in place of others take ``task.held_out`` with them, see :data:`ROWS`.

    Raises:
        ConfigError: an unknown setting, or a value out of range.
    """
    data: dict[str, Any] = config.model_dump()
    if isinstance(config, Config) and other_rows(_leaves(changes)):
        data["task"]["held_out"] = 0.0
    for key, value in changes.items():
        *path, last = key.split("__")
        inner = data
        for part in path:
            inner = inner.setdefault(part, {})
        if isinstance(value, Mapping) and isinstance(inner.get(last), dict):
            inner[last] = {**inner[last], **value}
        else:
            inner[last] = value
    return recipes.build(data, "settings", type(config))


def other_rows(named: Collection[str]) -> bool:
    """Return whether settings that were named say where rows come from, and not which are held out.

    Args:
        named: dotted settings.
    """
    return HELD_OUT not in named and any(key in named for key in ROWS)


def _leaves(changes: Mapping[str, Any]) -> set[str]:
    """The dotted settings that changes name."""
    named = set[str]()
    for key, value in changes.items():
        dotted = key.replace("__", ".")
        named |= {f"{dotted}.{k}" for k in value} if isinstance(value, Mapping) else {dotted}
    return named


def check_resumable(before: Config, after: Config) -> None:
    """Refuse changes that would make a resumed run another one.

    Raises:
        ConfigError: a setting beyond :data:`RESUMABLE` is changed, or the number of steps that a
            learning-rate schedule depends on.
    """
    old, new = before.model_dump(), after.model_dump()
    for key in recipes.setting_names():
        may_change = key in RESUMABLE or key.partition(".")[0] in RESUMABLE
        if not may_change and _get(old, key) != _get(new, key):
            raise ConfigError(
                f"{key} = {_get(new, key)!r}: the run to resume has {_get(old, key)!r}, and only "
                f"{', '.join(RESUMABLE)} may change. Start a new run for other settings"
            )
    schedule = after.training.lr_schedule
    if schedule != "constant" and before.steps != after.steps:
        raise ConfigError(
            f"steps = {after.steps}: the run to resume has {before.steps}, which its "
            f"{schedule} learning-rate schedule depends on. Keep it, or start a new run"
        )


def _get(data: dict[str, Any], key: str) -> Any:
    value: Any = data
    for part in key.split("."):
        value = value[part]
    return value


def config_of(settings: Settings) -> Config:
    """Settings as an object."""
    return settings if isinstance(settings, Config) else recipes.load(settings)


def settled(config: R, say: Callable[[str], object]) -> R:
    """Settings of a run with what depends on the machine decided: the type that ``model.dtype =
    "auto"`` takes. Kept with the run, it is the same when the run is resumed or repeated.

    Args:
        config: of the run.
        say: told in a line what was decided, and why.

    Raises:
        ConfigError: CUDA is asked for and missing.
    """
    if config.model.dtype != "auto":
        return config
    from stretto.models.load import fastest_dtype, pick_device

    dtype, because = fastest_dtype(pick_device(config.model.device), config.threads)
    name = str(dtype).removeprefix("torch.")
    say(f"model.dtype = auto takes {name}: {because}")
    model = config.model.model_copy(update={"dtype": name})
    return config.model_copy(update={"model": model})


def of_dataset(task: TaskConfig, name: str) -> dict[str, Any]:
    """Changes of a task's settings, for rows that come from elsewhere."""
    kind = "dataset" if task.kind == "reasoning-gym" else task.kind
    own = {"name": name, "settings": {}, "size": 0, "split": "train", "held_out": 0.0}
    data = task.model_dump() | {"kind": kind} | own
    return {"task": TaskConfig.model_validate(data).model_dump()}


def named(settings: Settings, dataset: str | Path | None, changes: Mapping[str, Any]) -> Config:
    """Settings with a dataset by name in place of their own, and changed."""
    config = config_of(settings)
    if dataset is not None:
        config = changed(config, of_dataset(config.task, str(dataset)))
    return changed(config, changes)


def model_of(model: str | Path, settings: Settings, config: Config) -> str:
    """The model that is meant: ``model``, or else the trained one of the run that ``settings`` is,
    or else the settings' own. A run's folder stands for its trained model.
    """
    if model:
        return str(model)
    if isinstance(settings, Config) or str(settings) in recipes.names():
        return config.model.name
    return str(settings) if Path(settings).is_dir() else config.model.name


def trained_with(model: str | Path, settings: Settings, config: Config) -> Config:
    """Settings that a measured model was trained with, or is to be.

    For the model of a run these are the run's. For others they are the settings that it is measured
    with, but for rows named in place of the settings' own: these are only measured on.

    Args:
        model: as given, or empty.
        settings: as given.
        config: the settings, resolved.
    """
    folder = Path(model or settings if isinstance(settings, str | Path) else model).expanduser()
    if (folder / "config.toml").is_file():
        try:
            return recipes.load(folder)
        except ConfigError:  # the run of a command that trains by examples
            return config
    start = config_of(settings).task
    same = (config.task.name, config.task.split) == (start.name, start.split)
    return config if same else config.model_copy(update={"task": start})
