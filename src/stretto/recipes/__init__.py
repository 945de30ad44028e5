"""Ready-to-run settings: short TOML files; what they leave out takes its default.

A recipe's first line is a comment, its description. A run's own ``config.toml`` is read the same
way, so that a run can be repeated or resumed from its folder alone.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from pydantic import BaseModel, ValidationError

from stretto.config import Config
from stretto.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["build", "describe", "dump", "load", "name_of", "names", "setting_names"]


def names() -> list[str]:
    """The packaged recipes, in alphabetical order."""
    files = (Path(entry.name) for entry in resources.files(__name__).iterdir())
    return sorted(file.stem for file in files if file.suffix == ".toml")


def describe(name: str) -> str:
    """The one-line description of a packaged recipe.

    Raises:
        ConfigError: there is no such recipe.
    """
    return _packaged(name).partition("\n")[0].removeprefix("#").strip()


def load(name_or_path: str | Path) -> Config:
    """Settings from a packaged recipe, a ``.toml`` file, or a run directory.

    A packaged name wins over a folder of the same name in the working directory (``./name`` means
    the folder).

    Raises:
        ConfigError: no such recipe or file, no valid TOML, an unknown key, or a value out of rule.
    """
    if str(name_or_path) in names():
        return _with_own_files(_parse(_packaged(str(name_or_path)), f"recipe '{name_or_path}'"))
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.toml"
        if not path.is_file():
            raise ConfigError(
                f"'{name_or_path}' is a folder without a config.toml, so not a run directory; "
                "give the folder of a run, a .toml file, or a recipe's name"
            )
    if path.suffix != ".toml":
        raise _unknown_recipe(str(name_or_path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the recipe '{path}': {error}") from error
    return _parse(text, str(path))


def name_of(name_or_path: str | Path) -> str:
    """The short name that runs of a recipe are called by."""
    path = Path(name_or_path)
    if path.name == "config.toml":
        path = path.parent
    if path.suffix == ".toml":
        return path.stem
    return re.sub(r"-\d+$", "", path.resolve().name) if path.is_dir() else path.name


def dump(config: Config) -> str:
    """Every setting as TOML; :func:`load` of it gives an equal object."""
    return tomli_w.dumps(config.model_dump())


def setting_names() -> list[str]:
    """The dotted name of every setting, in the order of :mod:`stretto.config`."""
    return list(_keys_of(Config, ""))


def build(data: Mapping[str, Any], where: str) -> Config:
    """Settings from nested plain data, validated.

    Args:
        data: as TOML gives it; what is left out takes its default.
        where: where the data comes from, for messages.

    Raises:
        ConfigError: an unknown key, or a value out of rule; says all that is wrong.
    """
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        problems = [_explain(e) for e in error.errors(include_url=False)]
        raise ConfigError(f"{where}: " + "; ".join(problems)) from error


def _packaged(name: str) -> str:
    if name not in names():
        raise _unknown_recipe(name)
    return resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")


def _with_own_files(config: Config) -> Config:
    """Files that come with the packaged recipes, by their full paths."""
    folder = Path(str(resources.files(__name__)))

    def located(name: str) -> str:
        file, colon, function = name.partition(":")
        return f"{folder / file}{colon}{function}" if file and (folder / file).is_file() else name

    task = config.task.model_copy(update={"name": located(config.task.name)})
    sources = tuple(located(source) for source in config.reward.sources)
    reward = config.reward.model_copy(update={"sources": sources})
    return config.model_copy(update={"task": task, "reward": reward})


def _unknown_recipe(name: str) -> ConfigError:
    return ConfigError(
        f"there is no recipe '{name}'. {nearest(name, names())} "
        "A path to a .toml file or to a run's folder does as well."
    )


def _parse(text: str, where: str) -> Config:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from error
    return build(data, where)


def _keys_of(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys_of(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def _explain(error: ErrorDetails) -> str:
    """One of pydantic's complaints as a sentence with the dotted key, the value and the rule."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        # A setting that exists, but in another section, is what was meant more often than a typo.
        leaf = key.rpartition(".")[2]
        same_leaf = [known for known in setting_names() if known.rpartition(".")[2] == leaf]
        return f"unknown setting '{key}'. {nearest(key, same_leaf or setting_names())}"
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(context["error"])
    rule = error["msg"].replace("Input should be", "must be")
    hint = ""
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        hint = f". {nearest(error['input'], choices)}"
    return f"{key} = {error['input']!r}: {rule}{hint}"
