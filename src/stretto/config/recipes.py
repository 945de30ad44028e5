"""Settings from files: packaged recipes, other TOML files, and run directories.

A recipe is a short TOML file. Omitted settings have their defaults. The comment in its first line
is its description. A run's own ``config.toml`` is read the same way, so that a run can be repeated
or resumed from its folder alone. Each training command has its own recipes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, overload

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stretto.config import Config, RewardModelConfig, Section, SftConfig
from stretto.config.sections import UNCHECKED, subsection
from stretto.errors import ConfigError, near, nearest
from stretto.foreign import ADVICE, ELSEWHERE, OF_RUNS, RENAMED
from stretto.interfaces import QUOTED, SETTINGS, TomlFile, worded
from stretto.layout import LAYOUT_SETTINGS

S = TypeVar("S", bound=Section)

PACKAGED = Path(str(resources.files("stretto.recipes")))
"""Folder of the packaged recipes."""

FOLDERS: Mapping[type[Section], str] = {Config: "", SftConfig: "sft", RewardModelConfig: "reward"}
"""Folder of the recipes for each kind of settings, below :data:`PACKAGED`."""

_PATHS = (
    ("task", "name"),
    ("task", "held_out"),
    ("data", "name"),
    ("reward", "sources"),
    ("environment", "sources"),
    ("observe", "trackers"),
    ("model", "name"),
    ("critic", "init"),
    ("rollout", "engine_args"),
    ("algorithm", "name"),
    ("algorithm", "teacher"),
    ("algorithm", "teachers"),
    ("schedule", "controllers"),
)
"""Settings that may name files and folders."""

_CODE = ("reward", "environment", "observe", "algorithm", "schedule")
"""Their sections in which a name is code: a file ending in .py, or else a module."""

DATASET = "dataset.jsonl"
"""Rows that a run was given as objects, in its folder."""

EVAL_DATASET = "eval_dataset.jsonl"
"""Held-out rows from objects in TRL scripts, next to the run folders."""


def names(kind: type[Section] = Config) -> list[str]:
    return sorted(file.stem for file in (PACKAGED / FOLDERS[kind]).glob("*.toml"))


def describe(name: str, kind: type[Section] = Config) -> str:
    """Return the description of a packaged recipe. Raises ConfigError for an unknown recipe."""
    return _packaged_text(name, kind).partition("\n")[0].removeprefix("#").strip()


def text_of(name: str, kind: type[Section] = Config) -> str:
    """Return the TOML of a packaged recipe, with absolute paths, for use in any folder."""
    text = _packaged_text(name, kind)
    for file in PACKAGED.glob("*.*"):
        text = text.replace(f'"{file.name}', f'"{file}')
    return text


@overload
def load(name_or_path: str | Path, *, checked: bool = True) -> Config: ...
@overload
def load(name_or_path: str | Path, kind: type[S], *, checked: bool = True) -> S: ...
def load(name_or_path: str | Path, kind: type[Any] = Config, *, checked: bool = True) -> Any:
    """Load settings from a packaged recipe, a ``.toml`` file, or a run directory.

    A packaged name wins over a folder of that name in the working directory (``./name`` is the
    folder). Raises ConfigError for an unknown recipe, a missing file or invalid TOML, and as
    :func:`build`, which also explains ``checked``.
    """
    if not isinstance(name_or_path, str | Path):
        raise ConfigError(
            f"settings are a {kind.__name__}, a recipe's name, a .toml file or a run's folder; got "
            f"{name_or_path!r}. Give single settings by keyword",
            "settings-not-named",
        )
    name, path = str(name_or_path), Path(name_or_path)
    if name in names(kind):
        data = _located(read(_packaged(name, kind)), PACKAGED, first=True)
        return _built(data, f"recipe '{name}'", kind, checked)
    if path.is_dir():
        path = path / "config.toml"
        if not path.is_file():
            raise ConfigError(
                f"'{name_or_path}' is a folder without a config.toml, so not a run directory; "
                "give the folder of a run, a .toml file, or a recipe's name",
                "no-run-directory",
            )
    if path.suffix != ".toml":
        raise _unknown_recipe(name, kind)
    data = read(path)
    if path.name == "config.toml":
        _moved(data.get("task"), path.absolute().parent)
    return _built(data, str(path), kind, checked)


def _moved(task: Any, run: Path) -> None:
    """Update paths of missing rows, because a run's folder may have been moved."""
    for key, rows in (("name", run / DATASET), ("held_out", run.parent / EVAL_DATASET)):
        name = task.get(key) if isinstance(task, dict) else None
        if not isinstance(name, str) or Path(name).name != rows.name:
            continue
        if rows.is_file() and not Path(name).is_file():
            task[key] = str(rows)


def read(file: str | Path) -> dict[str, Any]:
    """Read a TOML file of settings. Raises ConfigError if it is unreadable or invalid. Its paths
    are relative to the working directory or, if missing there, to the file's folder.
    """
    try:
        data = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        return _located(data, Path(file).parent)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the settings '{file}': {error}", "unreadable") from error
    except tomllib.TOMLDecodeError as error:
        remedy = " (text needs quotes)" if str(error).startswith("Invalid value") else ""
        raise ConfigError(f"'{file}' is not valid TOML: {error}{remedy}", "invalid-toml") from error


def name_of(name_or_path: str | Path) -> str:
    """Return the short name of a recipe, which its runs are named after."""
    path = Path(name_or_path)
    if path.name == "config.toml":
        path = path.parent
    if path.suffix == ".toml":
        return path.stem
    return re.sub(r"-\d+$", "", path.resolve().name) if path.is_dir() else path.name


def dump(config: Section) -> str:
    return tomli_w.dumps(config.model_dump())


def setting_names(kind: type[Section] = Config) -> list[str]:
    """Return the dotted name of every setting, in the order of :mod:`stretto.config`."""
    dotted_names = []
    for key in kind.model_fields:
        inner = subsection(kind, key)
        dotted_names += [f"{key}.{name}" for name in setting_names(inner)] if inner else [key]
    return dotted_names


SETTINGS.update(name for kind in FOLDERS for name in setting_names(kind))


@overload
def build(data: Mapping[str, Any], where: str, *, checked: bool = True) -> Config: ...
@overload
def build(data: Mapping[str, Any], where: str, kind: type[S], *, checked: bool = True) -> S: ...
def build(
    data: Mapping[str, Any], where: str, kind: type[Any] = Config, *, checked: bool = True
) -> Any:
    """Build settings from TOML data. Missing ones have their defaults.

    Raises ConfigError for unknown keys, values out of range and contradictions. The message names
    the source ``where`` and lists all faults. With ``checked`` false, contradictions are left to a
    later check, for settings that will be changed.
    """
    try:
        return kind.model_validate(data, context=None if checked else UNCHECKED)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        problems = "; ".join(_explain(e, kind) for e in faults)
        if where.endswith(".toml"):
            problems = worded(problems, TomlFile())
        raise ConfigError(": ".join(filter(None, (where, problems))), code_of(faults[0])) from error


def code_of(fault: ErrorDetails) -> str:
    return str(getattr(fault.get("ctx", {}).get("error"), "code", fault["type"]))


def hint(key: str, kind: type[Section] = Config, *, table: bool = False) -> str:
    """Name the settings probably meant by an unknown name, which is a section's if ``table``."""
    settings, leaf = setting_names(kind), key.rpartition(".")[2].replace("-", "_")
    if now := RENAMED.get(re.sub(r"\.\d+\.", ".", key)):
        return f"It is called `{now}` now."
    if table and "." not in key:
        return nearest(key, {name.partition(".")[0] for name in settings if "." in name})
    leaves: dict[str, list[str]] = {}
    for name in settings:
        leaves.setdefault(name.rpartition(".")[2], []).append(name)
    # The right name in the wrong section is more frequent than a typo.
    if same_leaf := leaves.get(leaf):
        return f"Did you mean {_either(same_leaf)}?"
    advice = (OF_RUNS.get(leaf) if kind is Config else None) or ADVICE.get(leaf)
    if advice and all(name in settings for _, name, _ in QUOTED.findall(advice) if name):
        return advice
    elsewhere = {name: [o for o in ours if o in settings][:1] for name, ours in ELSEWHERE.items()}
    if ours := elsewhere.get(leaf):
        return f"It is called `{ours[0]}` here."
    leaves |= {name: ours for name, ours in elsewhere.items() if ours}
    key_matches = [name for name in near(key, settings, 3) if near(leaf, [name.rpartition(".")[2]])]
    leaf_matches = [name for near_leaf in near(leaf, leaves, 3) for name in leaves[near_leaf]]
    if suggestions := list(dict.fromkeys([*key_matches, *leaf_matches]))[:3]:
        return f"Did you mean {_either(suggestions)}?"
    return (
        f"No setting has a similar name; `stretto {FOLDERS[kind] or 'train'} --help-all` lists all."
    )


def _either(names: Sequence[str]) -> str:
    return " or ".join(f"`{name}`" for name in names[:3])


def _packaged_text(name: str, kind: type[Section]) -> str:
    if name not in names(kind):
        raise _unknown_recipe(name, kind)
    return _packaged(name, kind).read_text(encoding="utf-8")


def _packaged(name: str, kind: type[Section]) -> Path:
    return PACKAGED / FOLDERS[kind] / f"{name}.toml"


def _located(data: dict[str, Any], folder: Path, *, first: bool = False) -> dict[str, Any]:
    """Complete names of files in ``folder``, if missing in the working directory.

    Args:
        first: the folder takes precedence over the working directory, and has only files.
    """

    def located(value: Any, section: str) -> Any:
        if isinstance(value, list):
            return [located(entry, section) for entry in value]
        if isinstance(value, dict):
            return {key: located(entry, section) for key, entry in value.items()}
        if not isinstance(value, str):
            return value
        kind = "model:" if value.startswith("model:") else ""
        name, colon, function = value.removeprefix(kind).partition(":")
        if section in ("model", "critic", "rollout") and "/" not in name:
            return value  # one of Stretto's own models, even if the folder has such a file
        if section in _CODE and not kind and not name.endswith(".py"):
            return value
        candidate = folder / name
        in_folder = candidate.is_file() if first else not Path(name).exists() and candidate.exists()
        path = str(candidate) if name and in_folder else name
        return f"{kind}{path}{colon}{function}"

    for section, key in _PATHS:
        if isinstance(data.get(section), dict) and key in data[section]:
            of_model = key in ("teacher", "teachers")
            data[section][key] = located(data[section][key], "model" if of_model else section)
    return data


def _unknown_recipe(name: str, kind: type[Section]) -> ConfigError:
    recipes = names(kind)
    if Path(name).suffix in {".yaml", ".yml", ".json"}:
        message = f"'{name}': settings are TOML files; `stretto recipes tiny` prints one"
    elif "/" in name:
        message = (
            f"there is no folder '{name}' (looked for from {Path.cwd()}); give a run's folder, a "
            ".toml file, or a recipe's name"
        )
    elif theirs := [FOLDERS[k] or "train" for k in FOLDERS if name in names(k)]:
        message = f"'{name}' is a recipe of `stretto {theirs[0]}`; known here: {', '.join(recipes)}"
    else:
        message = (
            f"there is no recipe '{name}', and no run's folder. {nearest(name, recipes)} "
            "A path to a .toml file does as well."
        )
    return ConfigError(message, "unknown-recipe")


def _built(data: Mapping[str, Any], where: str, kind: type[S], checked: bool) -> S:
    try:
        return build(data, where, kind, checked=checked)
    except ConfigError as error:
        kinds = [k for k in FOLDERS if k is not kind and _fits(data, k)]
        # A single setting may be misplaced at a name that another kind of settings has.
        tables = {key for key, value in data.items() if isinstance(value, dict)}
        is_run = Path(where).name == "config.toml"
        if kinds and (is_run or not tables <= kind.model_fields.keys()):
            raise _other_command(where, kinds, kind, is_run=is_run) from error
        raise


def _fits(data: Mapping[str, Any], kind: type[Section]) -> bool:
    try:
        kind.model_validate(data)
    except ValidationError:
        return False
    return True


def _other_command(
    where: str, theirs: Sequence[type[Section]], wanted: type[Section], *, is_run: bool
) -> ConfigError:
    commands = " or ".join(f"'stretto {FOLDERS[kind] or 'train'}'" for kind in theirs)
    command = FOLDERS[wanted] or "train"
    remedy = f"give it to {commands}"
    if is_run:
        run = Path(where).parent
        remedy = (
            f"for its trained model, name settings of that kind first: `stretto {command} RECIPE "
            f"--model.name {run}`"
        )
        if wanted is Config:
            remedy += f", or measure it: `stretto eval RECIPE --model {run}`"
    return ConfigError(
        f"{where} holds settings of {commands}, where those of 'stretto {command}' are taken; "
        f"{remedy}",
        "settings-of-another-command",
    )


def _explain(error: ErrorDetails, kind: type[Section]) -> str:
    key, value = ".".join(map(str, error["loc"])), error["input"]
    key = re.sub(r"\.(literal\[|constrained-).*", "", key)  # a type of several
    context = error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        table = isinstance(value, Mapping)
        return f"unknown setting '{key}'. {hint(key, kind, table=table)}"
    if error["type"] == "unexpected_keyword_argument":
        return f"unknown setting '{key}'; a layout has {LAYOUT_SETTINGS}"
    if error["type"] == "value_error":
        return str(context["error"])
    plain = isinstance(value, str | int | float | Mapping | Sequence | None)
    if not plain and key.startswith(("algorithm", "schedule.controllers", "observe.trackers")):
        setting = "algorithm.name" if key == "algorithm" else re.sub(r"\.\d+$", "", key)
        return (
            f"{key} is an object of {type(value).__name__}; settings name code by its import path, "
            "because other processes and a resumed run import it. Put the object into a file, and "
            f"give 'file.py:NAME' as `{setting}`"
        )
    rule = error["msg"].replace("Input should be", "must be")
    if error["type"] == "literal_error" and isinstance(value, str):
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        if matches := near(value, choices):
            rule += f". Did you mean '{matches[0]}'?"
    if error["type"] == "model_type" and (section := subsection(kind, key)):
        first = next(iter(section.model_fields))
        usual = next((n for n in ("name", "preset", "sources") if n in section.model_fields), first)
        meant = f"{key}.{usual} = {value}" if isinstance(value, str) else f"{key}.{usual}"
        rule = f"is a section of settings; the one that is probably meant is `{meant}`"
    if error["type"] == "tuple_type":
        rule = f"must be a list, such as ['{value}']"
    return f"{key} = {value!r}: {rule}"
