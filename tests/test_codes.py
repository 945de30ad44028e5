"""The messages of all error codes, in the words of each command, function, file and trainer."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import stretto
from stretto import errors, interfaces
from stretto.cli.main import COMMANDS, dispatch
from stretto.config import Config, RewardModelConfig, SftConfig, recipes
from stretto.config.cluster_config import ProcessConfig
from stretto.interfaces import CALLS, SETTINGS, CommandLine, Python, TomlFile, worded
from stretto.trl import base_trainer

SOURCE = Path(stretto.__file__).parent
CLASSES = {name for name, each in vars(errors).items() if inspect.isclass(each)}
CODE = re.compile(r"[a-z0-9]+([-_][a-z0-9]+)+")
LEAVES = {name.rpartition(".")[2] for name in SETTINGS if "." in name}
TOP = {name for name in SETTINGS if "." not in name}
SECTIONS = {name.partition(".")[0] for name in SETTINGS if "." in name}
OTHERS = {"concurrency", "hold", "replay", "schedule", "slots", "timeout_s"}
OTHERS |= {"data", *ProcessConfig.model_fields}
"""Names that settings share with other things in messages, such as attributes and arguments."""


def text_of(node: ast.AST) -> str:
    """A string with ``X`` in place of its values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(p) if isinstance(p, ast.Constant) else "X" for p in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def codes_in(node: ast.AST) -> Iterator[str]:
    """Codes that a node gives to errors: of a call, a rule of settings, or a parameter."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        values = [*node.args, *(k.value for k in node.keywords if k.arg == "code")]
        if name in CLASSES or name.startswith(("_require", "_refuse", "require", "refuse")):
            yield from (text_of(v) for v in values[1:] if CODE.fullmatch(text_of(v)))
    elif isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "broken":
        yield text_of(node.slice)


@cache
def messages() -> dict[str, set[str]]:
    """Texts by the codes of the function that raises them, without the command line's own."""
    by_code = dict[str, set[str]]()
    for file in sorted(SOURCE.rglob("*.py")):
        if file.parent.name in ("cli", "contracts"):
            continue
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            nodes = [each for part in function.body for each in ast.walk(part)]
            inner = {id(p) for n in nodes if isinstance(n, ast.JoinedStr) for p in n.values}
            inner |= {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
            texts = {text_of(n) for n in nodes if id(n) not in inner}
            for code in {code for each in nodes for code in codes_in(each)}:
                by_code.setdefault(code, set()).update(t for t in texts if " " in t)
    return by_code


@cache
def options_of(command: str) -> dict[str, str]:
    """The options that a command offers, by the names of settings or parameters."""
    offered = dict[str, str]()

    def note(options: dict[str, str]) -> None:
        offered.update(options)
        raise StopIteration

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interfaces, "offer", note)
        with pytest.raises((StopIteration, SystemExit)):
            dispatch([command, "--help"])
    return offered


OFFERING = [command for command in COMMANDS if command != "pipeline"]
"""Commands whose errors may come from below them; ``pipeline`` has no settings."""
FUNCTIONS = [
    name for name in stretto.__all__ if hasattr(getattr(stretto, name, None), "__wrapped__")
]
TRAINERS = ("PPOTrainer", "GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer")


@cache
def parameters() -> set[str]:
    """The names of all options and parameters."""
    options = (option.removeprefix("--") for each in OFFERING for option in options_of(each))
    functions = (inspect.signature(getattr(stretto, name)) for name in FUNCTIONS)
    return {*options, *(p for signature in functions for p in signature.parameters)}


def door(name: str) -> tuple[TomlFile, set[str]]:
    """An interface by the name of its command, function, trainer or file, and its options."""
    if name in OFFERING:
        return CommandLine(options_of(name)), {*options_of(name).values()}
    if name in TRAINERS:
        trainer: Any = getattr(stretto, name)
        config = {field.name for field in fields(trainer.config_class)}
        return base_trainer.words_of(trainer), config | {
            *inspect.signature(trainer.__init__).parameters
        }
    if name in FUNCTIONS:
        taken = inspect.signature(getattr(stretto, name)).parameters
        changes = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        settings = {each.replace(".", "__") for each in SETTINGS} if changes else set()
        return Python(taken, changes, CALLS), {*taken, *settings}
    return TomlFile(), set()


def commands_in(shown: str) -> Iterator[str]:
    """What command lines in a message name, and no command has."""
    for command, rest in re.findall(r"'stretto ([a-zX]+)([^']*)'", shown):
        offered = options_of(command) if command in OFFERING else {}
        known = {*offered.values(), "--help", "--help-all"}
        if command not in (*COMMANDS, "X"):
            yield f"stretto {command}"
        elif offered:
            options = re.findall(r"--[a-z][\w.-]*", rest)
            yield from (f"stretto {command} {each}" for each in options if each not in known)


def wrong(text: str, interface: TomlFile, known: set[str]) -> Iterator[str]:
    """What a message names in an interface, and the interface lacks.

    Names of parameters, which are no settings, may be those of another command or function.
    """
    shown = worded(text, interface)
    yield from commands_in(shown)
    shown = re.sub(r"'stretto [^']*'( in a shell)?", "", shown)
    for option in re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", shown):
        positive = option.replace(".no-", ".").replace("--no-", "--")
        if not {option, positive} & known and option not in text:
            yield option
    if isinstance(interface, Python):
        for keyword in re.findall(r"(?<![\w.(\"'])([a-z]\w*)=(?!=)", shown):
            if keyword not in known | parameters() and f"{keyword}=" not in text:
                yield f"{keyword}="
        calls = re.findall(r"stretto\.([a-z]\w*)\(", shown)
        yield from (f"stretto.{call}()" for call in calls if call not in stretto.__all__)
    for name in re.findall(r"'([a-z]+\.[a-z_]\w*)(?: = [^']*)?'", shown):
        if name not in SETTINGS and name.partition(".")[0] in SECTIONS:
            yield name
    for name in re.findall(r"(?<![\w.`'\"{-])([a-z]\w*) = ", shown):
        if name in LEAVES - OTHERS - TOP:
            yield f"{name} without its section"


@pytest.mark.parametrize("name", [*OFFERING, *FUNCTIONS, *TRAINERS, "file.toml"])
def test_what_messages_name_exists(name: str) -> None:
    interface, known = door(name)
    found = {
        (code, each)
        for code, texts in messages().items()
        for text in texts
        for each in wrong(text, interface, known)
    }
    assert found == set()


def test_codes_are_found_and_are_words() -> None:
    assert len(messages()) > 400
    assert {"unknown-model", "vllm-without-processes", "argument-refused"} <= messages().keys()


def test_all_settings_are_known_by_their_names() -> None:
    kinds = (Config, SftConfig, RewardModelConfig)
    assert {n for kind in kinds for n in recipes.setting_names(kind)} == SETTINGS


@pytest.mark.parametrize("command", OFFERING)
def test_the_parser_takes_what_a_command_offers(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that messages, which name offered options, name options that can be given."""
    several = any("." in option for option in options_of(command).values())
    with pytest.raises(SystemExit):
        dispatch([command, "--help-all" if several else "--help"])
    taken = {*re.findall(r"(?<![\w-])--[a-z][\w.-]*", capsys.readouterr().out)}
    offered = {each for each in options_of(command).values() if each.startswith("--")}
    assert offered <= taken
