"""Settings from files: packaged recipes, other TOML files, and run directories.

A recipe is a short TOML file; what it leaves out takes its default. Its first line is a comment,
its description. A run's own ``config.toml`` is read the same way, so that a run can be repeated or
resumed from its folder alone.

Each command that trains has recipes of its own, of the kind of settings that it takes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import tomli_w
from pydantic import BaseModel, ValidationError

from stretto.config import Config, RewardModelConfig, Section, SftConfig
from stretto.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = [
    "FOLDERS",
    "build",
    "describe",
    "difference",
    "dump",
    "load",
    "merged",
    "name_of",
    "names",
    "overlaid",
    "overlay",
    "setting_names",
]


S = TypeVar("S", bound=Section)

PACKAGE = "stretto.recipes"
"""Package that holds the recipes."""

RENAMED = {"schedule.batches_per_handover": "schedule.weight_sync_interval"}
"""Names of settings in earlier versions, with their present names."""

FOLDERS: Mapping[type[Section], str] = {Config: "", SftConfig: "sft", RewardModelConfig: "reward"}
"""Folder of the packaged recipes of each kind of settings, below the package's."""


def names(kind: type[Section] = Config) -> list[str]:
    """The packaged recipes of a kind, in alphabetical order."""
    folder = _folder(kind)
    files = (Path(entry.name) for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted(file.stem for file in files if file.suffix == ".toml")


def describe(name: str, kind: type[Section] = Config) -> str:
    """The one-line description of a packaged recipe.

    Raises:
        ConfigError: there is no such recipe.
    """
    return _packaged(name, kind).partition("\n")[0].removeprefix("#").strip()


@overload
def load(name_or_path: str | Path) -> Config: ...
@overload
def load(name_or_path: str | Path, kind: type[S]) -> S: ...
def load(name_or_path: str | Path, kind: type[Any] = Config) -> Any:
    """Load settings from a packaged recipe, a ``.toml`` file, or a run directory.

    A packaged name wins over a folder of the same name in the working directory (``./name`` means
    the folder).

    Args:
        name_or_path: see above.
        kind: of settings: ``Config``, ``SftConfig`` or ``RewardModelConfig``.

    Raises:
        ConfigError: no such recipe or file, no valid TOML, an unknown key, or a value out of range.
    """
    name = str(name_or_path)
    if name in names(kind):
        return _with_own_files(_parse(_packaged(name, kind), f"recipe '{name}'", kind))
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.toml"
        if not path.is_file():
            raise ConfigError(
                f"'{name_or_path}' is a folder without a config.toml, so not a run directory; "
                "give the folder of a run, a .toml file, or a recipe's name"
            )
    if path.suffix != ".toml":
        raise _unknown_recipe(name, kind)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the recipe '{path}': {error}") from error
    return _parse(text, str(path), kind)


def name_of(name_or_path: str | Path) -> str:
    """Short name of a recipe, after which its runs are named."""
    path = Path(name_or_path)
    if path.name == "config.toml":
        path = path.parent
    if path.suffix == ".toml":
        return path.stem
    return re.sub(r"-\d+$", "", path.resolve().name) if path.is_dir() else path.name


def dump(config: Section) -> str:
    """Write every setting as TOML, from which :func:`load` makes an equal object."""
    return tomli_w.dumps(config.model_dump())


def setting_names(kind: type[Section] = Config) -> list[str]:
    """The dotted name of every setting, in the order of :mod:`stretto.config`."""
    return list(_keys_of(kind, ""))


def overlaid(config: Config, data: Mapping[str, Any], where: str) -> Config:
    """Settings with those that ``data`` names in their place; arrays of tables as a whole.

    Args:
        config: the settings.
        data: some of them, as TOML gives them.
        where: where they come from, for messages.

    Raises:
        ConfigError: an unknown key, or settings that contradict each other.
    """
    return build(merged(config.model_dump(), data), where)


def overlay(config: Config, file: str | Path) -> dict[str, Any]:
    """Settings with those of a file in their place, such as one that ``stretto plan`` wrote.

    They may contradict each other, as others may come on top: :func:`build` checks them all.

    Raises:
        ConfigError: the file cannot be read, or a setting in it is wrong whatever the others are.
    """
    try:
        data = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the settings '{file}': {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"'{file}' is not valid TOML: {error}") from error
    data = merged(config.model_dump(), data)
    try:
        return Config.model_validate(data).model_dump()
    except ValidationError as error:
        wrong = [e for e in error.errors(include_url=False) if e["type"] != "value_error"]
        if wrong:
            raise _wrong(wrong, f"'{file}'", Config) from error
    return data


def difference(base: Config, config: Config) -> dict[str, Any]:
    """Return what settings have otherwise than others, as nested plain data."""
    return _difference(base.model_dump(), config.model_dump())


def _difference(base: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            if inner := _difference(base[key], value):
                found[key] = inner
        elif value != base.get(key):
            found[key] = value
    return found


def merged(base: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested data with others in its place, where these name some."""
    both = dict(base)
    for key, value in data.items():
        inner = both.get(key, {})
        nested = isinstance(inner, Mapping) and isinstance(value, Mapping)
        both[key] = merged(inner, value) if nested else value
    return both


@overload
def build(data: Mapping[str, Any], where: str) -> Config: ...
@overload
def build(data: Mapping[str, Any], where: str, kind: type[S]) -> S: ...
def build(data: Mapping[str, Any], where: str, kind: type[Any] = Config) -> Any:
    """Make settings from nested plain data, validated.

    Args:
        data: as TOML gives it; what is left out takes its default.
        where: where the data comes from, for messages.
        kind: of settings.

    Raises:
        ConfigError: an unknown key, or a value out of range; the message lists all faults.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _wrong(error.errors(include_url=False), where, kind) from error


def _wrong(errors: Sequence[ErrorDetails], where: str, kind: type[Section]) -> ConfigError:
    return ConfigError(f"{where}: " + "; ".join(_explain(e, kind) for e in errors))


def _folder(kind: type[Section]) -> Traversable:
    root = resources.files(PACKAGE)
    return root.joinpath(FOLDERS[kind]) if FOLDERS[kind] else root


def _packaged(name: str, kind: type[Section]) -> str:
    if name not in names(kind):
        raise _unknown_recipe(name, kind)
    return _folder(kind).joinpath(f"{name}.toml").read_text(encoding="utf-8")


def _with_own_files(config: Any) -> Any:
    """Replace names of files that come with the packaged recipes by their full paths."""
    folder = Path(str(resources.files(PACKAGE)))

    def located(name: str) -> str:
        file, colon, function = name.partition(":")
        return f"{folder / file}{colon}{function}" if file and (folder / file).is_file() else name

    if isinstance(config, SftConfig | RewardModelConfig):
        data = config.data.model_copy(update={"name": located(config.data.name)})
        return config.model_copy(update={"data": data})
    assert isinstance(config, Config)
    own = {"name": located(config.task.name)}
    if config.task.held_out_rows:
        own["held_out"] = located(config.task.held_out_rows)
    task = config.task.model_copy(update=own)
    sources = tuple(located(source) for source in config.reward.sources)
    reward = config.reward.model_copy(update={"sources": sources})
    return config.model_copy(update={"task": task, "reward": reward})


def _unknown_recipe(name: str, kind: type[Section]) -> ConfigError:
    known = names(kind)
    return ConfigError(
        f"there is no recipe '{name}'. {nearest(name, known) + ' ' if known else ''}"
        "A path to a .toml file or to a run's folder does as well."
    )


def _parse(text: str, where: str, kind: type[S]) -> S:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from error
    try:
        return build(data, where, kind)
    except ConfigError as error:
        others = [k for k in FOLDERS if k is not kind and _fits(data, k)]
        # A single setting may stand at the wrong place, where another kind has one of its name.
        tables = {key for key, value in data.items() if isinstance(value, dict)}
        if others and (_is_run(where) or not tables <= kind.model_fields.keys()):
            raise _other_command(where, others, kind) from error
        raise


def _is_run(where: str) -> bool:
    return Path(where).name == "config.toml"


def _fits(data: Mapping[str, Any], kind: type[Section]) -> bool:
    try:
        kind.model_validate(data)
    except ValidationError:
        return False
    return True


def _other_command(
    where: str, theirs: Sequence[type[Section]], wanted: type[Section]
) -> ConfigError:
    """Error for settings of another kind than a command takes, with what its user may have meant."""
    commands = " or ".join(f"'stretto {_command(kind)}'" for kind in theirs)
    hint = f"give it to {commands}"
    if _is_run(where):
        run = Path(where).parent
        hint = (
            f"for its trained model, name settings of that kind first: stretto {_command(wanted)} "
            f"RECIPE --model.name {run}"
        )
        if wanted is Config:
            hint += f", or to measure it: stretto eval RECIPE --model {run}"
    return ConfigError(
        f"{where} holds settings of {commands}, where those of 'stretto {_command(wanted)}' are "
        f"taken; {hint}"
    )


def _command(kind: type[Section]) -> str:
    return FOLDERS[kind] or "train"


def _keys_of(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys_of(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def _explain(error: ErrorDetails, kind: type[Section]) -> str:
    """Write one of pydantic's errors as a sentence with the dotted key, the value and the rule."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        # A setting that exists, but in another section, is what was meant more often than a typo.
        if key in RENAMED:
            return f"'{key}' is called '{RENAMED[key]}' now"
        leaf = key.rpartition(".")[2]
        every = setting_names(kind)
        same_leaf = [known for known in every if known.rpartition(".")[2] == leaf]
        return f"unknown setting '{key}'. {nearest(key, same_leaf or every)}"
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(context["error"])
    rule = error["msg"].replace("Input should be", "must be")
    hint = ""
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        hint = f". {nearest(error['input'], choices)}"
    return f"{key} = {error['input']!r}: {rule}{hint}"
