"""Settings from Python: recipes, changes, and settings that a resumed run may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from stretto.config import Config, RewardModelConfig, Section, SftConfig, TaskConfig, recipes
from stretto.config import changes as merge
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


def load_recipe(name: str | Path, **changes: Any) -> Config:
    """A recipe's settings, changed.

    Args:
        name: of a packaged recipe, a ``.toml`` file or a run's folder.
        changes: as in :func:`train`.

    Raises:
        ConfigError: no such recipe, an unknown setting, or a value out of range.
    """
    return changed(recipes.load(name), changes)


def changed(config: S, *changes: Mapping[str, Any]) -> S:
    """Settings with some of them changed, as :mod:`stretto.api` says, the later ones last; see
    :func:`stretto.config.changes.changed` for what goes with them.

    Raises:
        ConfigError: an unknown setting, or a value out of range.
    """
    nested: dict[str, Any] = {}
    for key, value in (item for some in changes for item in some.items()):
        for part in reversed(key.split("__")):
            value = {part: value}
        nested = merge.merged(nested, value, type(config))
    return merge.changed(config, nested, "settings")


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
        say: told in a line what was decided, and why.

    Raises:
        ConfigError: CUDA is asked for and missing.
    """
    if config.model.dtype != "auto":
        return config
    from stretto.models.backend import fastest_dtype, pick_device

    dtype, because = fastest_dtype(pick_device(config.model.device), config.threads)
    name = str(dtype).removeprefix("torch.")
    say(f"model.dtype = auto takes {name}: {because}")
    model = config.model.model_copy(update={"dtype": name})
    return config.model_copy(update={"model": model})


def of_dataset(task: TaskConfig, name: str) -> dict[str, Any]:
    """Changes of a task's settings, for rows that come from elsewhere."""
    kind = "dataset" if task.is_procedural else task.kind
    return {"task": {"name": name, "kind": kind}}


def named(settings: Settings, dataset: str | Path | None, changes: Mapping[str, Any]) -> Config:
    """Settings with a dataset by name in place of their own, and changed."""
    config = config_of(settings)
    rows = {} if dataset is None else of_dataset(config.task, str(dataset))
    return changed(config, rows, changes)


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
