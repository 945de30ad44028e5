"""The settings of :mod:`stretto.config` as command-line options.

tyro makes the options and their help. It parses into plain dataclasses that mirror the settings
classes, so that files and the command line share one validation with the same messages.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from operator import attrgetter
from typing import Annotated, Any

import tomli_w
from pydantic import BaseModel
from tyro.conf import arg

from stretto import interfaces
from stretto.api.settings import changed
from stretto.cli.parsing import documented, form, options_of, read, table_of, values_of
from stretto.config import Config, Section, recipes
from stretto.errors import ConfigError, nearest

IN_FILES_ALONE = ("cluster.processes",)
"""Settings that are lists of tables and can only be set in files."""

COMMON = (
    *("steps", "out", "runtime", "model.name", "model.lora_rank", "task.kind", "task.name"),
    *("task.columns", "data.name", "batch", "reward.sources", "rollout.batch"),
    *("rollout.samples_per_prompt", "rollout.max_new_tokens", "schedule.preset", "algorithm.name"),
    "training.lr",
)
"""Frequent settings, which ``--help`` documents. ``--help-all`` documents the rest."""

DEFAULT_RECIPES: Mapping[type[Section], str] = {Config: "arithmetic"}
"""Recipes of command lines without one. Other kinds of settings have their defaults then."""

RECIPE_HELP = "A recipe's name ('stretto recipes' lists them), a .toml file, or a run's folder."

Recipe = Annotated[str, arg(help=RECIPE_HELP, metavar="RECIPE")]
DryRun = Annotated[
    bool,
    arg(
        help="Resolve names, print derived sizes and the memory plan, and load nothing.", metavar=""
    ),
]


def parse_with_config(
    function: Callable[..., Any],
    command: str,
    arguments: Sequence[str],
    only: Sequence[str] = (),
    *,
    kind: type[Section] = Config,
    config: Section | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Parse options that change settings, and the command's own.

    Raises ConfigError for unknown options, a recipe after options, and invalid settings. Raises
    SystemExit after help (0) or if the command line cannot be parsed (2).

    Args:
        function: its parameters are the command's own options, and its docstring describes the
            command. The first one is the recipe (or a file). ``overrides`` is a file with changes,
            which apply before those of the command line.
        command: name, for usage and messages.
        only: dotted settings or sections to offer. Empty offers all.
        kind: class of the leading recipe's settings.
        config: replaces these settings. Rules between its settings may be unchecked.
    """
    recipe = leading_recipe(arguments)
    usual = recipe or DEFAULT_RECIPES.get(kind)
    config = config or (recipes.load(usual, kind, checked=False) if usual else kind())
    own_names, kind = [*options_of(function)], type(config)
    all_names = set(recipes.setting_names(kind)).difference(IN_FILES_ALONE)
    offered = {name for name in all_names if not only or _within(name, only)}
    interfaces.offer({name: interfaces.option(name) for name in (*offered, *own_names[1:])})
    help_names, more = _asked_for_help(arguments, offered)
    if help_names is not None:
        arguments, offered = ["--help"], help_names
    changed_names = _named(arguments, offered, own_names, config)
    if not {"-h", "--help"} & {*arguments}:  # without help, parsing few options is faster
        offered = changed_names
    own_form, mirror = form(function), _mirror(kind, offered, config.model_dump())
    parts = {"own": own_form, "settings": mirror}  # may share names: --model, --model.dtype
    fields = [(name, Annotated[part, arg(name="")]) for name, part in parts.items()]
    both = dataclasses.make_dataclass("Options", fields)
    both.__doc__ = own_form.__doc__
    try:
        parsed = read(both, command, arguments)
    finally:
        print(more, end="")
    values = {name: attrgetter(name)(parsed.settings) for name in changed_names}
    for name, value in values.items():
        if isinstance(attrgetter(name)(config), dict):
            values[name] = table_of(value, name)
    command_options = values_of(function, parsed.own)
    file = command_options.get("overrides", "")
    result = changed(
        config,
        recipes.read(file) if file else {},
        {name.replace(".", "__"): value for name, value in values.items()},
        where=f"'{file}' and the command line" if file else "command line",
        start=recipe,
    )
    named_recipe = command_options[own_names[0]]
    if named_recipe not in ("", recipe):  # the options were read with other defaults
        raise ConfigError(f"the recipe comes before the options: write '{named_recipe}' first")
    return result, command_options


def call_with_config(function: Callable[..., int | None], *line: Any, **start: Any) -> int:
    config, options = parse_with_config(function, *line, **start)
    return function(config, options.pop(next(iter(options))), **options) or 0


def leading_recipe(arguments: Sequence[str]) -> str:
    return arguments[0] if arguments and not arguments[0].startswith("-") else ""


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """Return an option's value before parsing, if other options depend on it."""
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, sign, value = argument.partition("=")
        if name == option:
            return value if sign else following
    return None


def _asked_for_help(arguments: Sequence[str], offered: set[str]) -> tuple[set[str] | None, str]:
    """Return the settings to document, ``None`` without ``--help``, and a line on the rest."""
    help_indices = [i for i, argument in enumerate(arguments) if argument in ("-h", "--help")]
    common = offered & {*COMMON}
    if "--help-all" in arguments:
        return offered, ""
    if not help_indices:
        return None, ""
    sections = list(dict.fromkeys(n.partition(".")[0] for n in sorted(offered) if "." in n))
    for section in arguments[help_indices[0] + 1 :]:
        if section not in sections:
            raise ConfigError(
                f"--help {section}: there is no such section. {nearest(section, sections)}"
            )
        return {name for name in offered if _within(name, [section])}, ""
    line = (
        f"These are {len(common)} of {len(offered)} settings. --help-all documents all of them, "
        f"--help SECTION one section: {', '.join(sections)}\n"
    )
    return common, line


def _within(name: str, only: Sequence[str]) -> bool:
    return any(name == allowed or name.startswith(f"{allowed}.") for allowed in only)


def _named(
    arguments: Sequence[str],
    offered: Collection[str],
    options: Collection[str],
    config: Section,
) -> set[str]:
    names, options_begin = set[str](), False
    lists = {n for n in offered if isinstance(attrgetter(n)(config), tuple | dict)}
    for argument in arguments:
        if not argument.startswith("--"):
            _refuse_hydra_style(argument, offered, options_begin)
            continue
        options_begin = True
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        section, dot, leaf = name.rpartition(".")
        positive = f"{section}{dot}{leaf.removeprefix('no_')}"
        if name in offered or positive in offered:
            if name in names & lists:
                option = argument.partition("=")[0]
                raise ConfigError(
                    f"{option} is given twice; give all of its values behind one: {option} A B",
                    "option-repeated",
                )
            names.add(name if name in offered else positive)
        elif not {name, positive} & {*options, "help", ""}:
            raise ConfigError(_unknown(argument.partition("=")[0], name, options, type(config)))
    return names


def _refuse_hydra_style(argument: str, offered: Collection[str], options_begin: bool) -> None:
    name, sign, value = argument.partition("=")
    name = name.removeprefix("+")
    if sign and name in offered and ("." in name or not options_begin):
        option = name.replace("_", "-")
        raise ConfigError(f"'{argument}': options begin with two dashes; write --{option} {value}")


def _unknown(shown: str, name: str, options: Collection[str], kind: type[Section]) -> str:
    matches = get_close_matches(name, options, n=1, cutoff=0.8)
    if name in IN_FILES_ALONE:
        return f"'{shown}' is spelled in a file alone, as [[{name}]]; name it with --overrides"
    if name in recipes.setting_names(kind) and not matches:
        return f"'{shown}' has no effect on what this command does; leave it out"
    hint = f"Did you mean `{matches[0]}`?" if matches else recipes.hint(name, kind)
    return f"unknown option '{shown}'. {hint}"


def _mirror(
    section: type[BaseModel], offered: Collection[str], values: Mapping[str, Any], prefix: str = ""
) -> type[Any]:
    """Make a dataclass of a section's offered fields, with values as defaults."""
    fields: list[tuple[str, Any, Any]] = []
    for name, info in section.model_fields.items():
        kind = info.annotation
        value = values[name]
        key = prefix + name
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            inner = _mirror(kind, offered, value, f"{key}.")
            if dataclasses.fields(inner):
                fields.append((name, inner, dataclasses.field(default_factory=inner)))
        elif key in offered:
            text = info.description
            if typing.get_origin(kind) is dict:
                # Keys that the recipe's table lacks can be given, too.
                kind, text = tuple[str, ...], f"{text} As key=value; replaces the recipe's."
                words = (tomli_w.dumps({key: entry}).strip() for key, entry in value.items())
                value = tuple(word.replace(" = ", "=", 1) for word in words)
            fields.append((name, Annotated[kind, documented(text or "", value)], value))
    mirror_class = dataclasses.make_dataclass(section.__name__, fields)
    mirror_class.__doc__ = section.__doc__
    return mirror_class
