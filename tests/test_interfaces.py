"""Remedies in messages are true in the words of each interface."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import stretto
from raising import raises
from stretto.cli.main import COMMANDS, main
from stretto.config import Config, RewardModelConfig, SftConfig, recipes
from stretto.errors import ConfigError, RoleLostError, StrettoError
from stretto.interfaces import (
    CALLS,
    QUOTED,
    CommandLine,
    Python,
    TomlFile,
    in_python,
    through,
    worded,
)
from stretto.trl import base_trainer
from stretto.trl.config import CONFIGS, SETS

SOURCE = Path(stretto.__file__).parent
SETTINGS = {
    name for kind in (Config, SftConfig, RewardModelConfig) for name in recipes.setting_names(kind)
}
SHELL = re.compile(rf"(?<![\w-])--[a-z][\w-]+|'stretto (?:{'|'.join(COMMANDS)})\b")
"""Words of the command line."""

NO_MESSAGES = {
    "api/calibrating.py": "a note in a file for the shell",
    "api/planning.py": "a comment in a file for the shell",
    "api/runs.py": "arguments of a process",
    "interfaces.py": "the table of calls",
    "models/resolve.py": "arguments of pip",
    "observe/report/style.py": "CSS",
    "observe/report/timeline.py": "CSS",
    "pipelines/draw.py": "CSS",
    "trl/base_trainer.py": "the table of calls",
    "workers/ray_cluster.py": "commands of Ray",
}
"""Files with words of the shell that are no messages, and the reason."""


def texts(tree: ast.AST) -> Iterator[str]:
    """Strings of a module without its docstrings, with ``X`` in place of values."""
    nodes = [*ast.walk(tree)]
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    skipped |= {id(p) for node in nodes if isinstance(node, ast.JoinedStr) for p in node.values}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in skipped:
                yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "X" for p in node.values)


@cache
def messages() -> list[tuple[str, str]]:
    """Texts of all files of the package, with the files' names."""
    return [
        (str(file.relative_to(SOURCE)), text)
        for file in sorted(SOURCE.rglob("*.py"))
        for text in texts(ast.parse(file.read_text(encoding="utf-8")))
    ]


TRAIN = [f"--{name.replace('_', '-')}" for name in recipes.setting_names()]


@cache
def scripts() -> dict[str, Python]:
    """The words of scripts for each of TRL's trainers."""
    trainers = [getattr(stretto, kind.__name__.replace("Config", "Trainer")) for kind in CONFIGS]
    return {trainer.__name__: base_trainer.words_of(trainer) for trainer in trainers}


def test_messages_outside_the_command_line_quote_its_words() -> None:
    plain = [
        (file, text)
        for file, text in messages()
        if file.partition("/")[0] != "cli" and file not in NO_MESSAGES
        if SHELL.search(QUOTED.sub("", text))
    ]
    assert plain == []


def test_quotes_are_true_in_each_interface() -> None:
    quotes = {found[0] for _, text in messages() for found in QUOTED.finditer(text)}
    assert len(quotes) > 50
    source = "".join(text for file, text in messages() if file.startswith("cli/"))
    tree = "".join(file.read_text() for file in (SOURCE / "cli").glob("*.py"))
    for quote in quotes:
        check_quote(quote, source + tree)


def check_quote(quote: str, source: str) -> None:
    """Compare what a quote names with what commands, functions and trainers take."""
    found = QUOTED.fullmatch(quote)
    assert found
    line, name, _ = found.groups()
    if line:
        command = line.split()[0]
        assert command in COMMANDS or command == "X"
        options = re.findall(r"--[a-z-]+", line)
        for option in options:
            assert option == "--help-all" or option[2:].replace("-", "_") in source
    elif "." in name:
        assert name in SETTINGS
    if not line and name in recipes.setting_names():
        option = worded(quote, CommandLine({n: f"--{n.replace('_', '-')}" for n in SETTINGS}))
        assert option.split()[0] in TRAIN
    python = worded(quote, words(stretto.train))
    assert not SHELL.search(python) or python.endswith("in a shell")
    keyword = re.match(r"(\w+)=", python)
    if not line and name in recipes.setting_names():
        assert keyword
        known = [n.replace(".", "__") for n in SETTINGS]
        assert keyword[1] in [*known, *inspect.signature(stretto.train).parameters]
    for trainer, script in scripts().items():
        text = worded(quote, script)
        assert not SHELL.search(text) or text.endswith("in a shell")
        keyword = re.match(r"(\w+)=", text)
        assert keyword or text.startswith(("'", "trainer.")), trainer
        if keyword:
            assert keyword[1] in script.keywords


def words(function: object) -> Python:
    assert callable(function)
    keywords = inspect.signature(function).parameters
    return Python(keywords, any(k.kind is k.VAR_KEYWORD for k in keywords.values()), CALLS)


def test_scripts_read_the_argument_that_sets_a_setting() -> None:
    for kind, script in zip(CONFIGS, scripts().values(), strict=True):
        names = {field.name for field in fields(kind)}
        for argument, setting in SETS.items():
            if argument in names and setting != "seed":
                assert worded(f"`{setting}`", script) == f"{argument}="


def test_calls_exist() -> None:
    for call in CALLS.values():
        name = call.partition("(")[0].removeprefix("stretto.")
        assert name in stretto.__all__


MESSAGE = "`model.dtype = bfloat16` or `rollout.max_new_tokens = 8` of `model.name`; `seed`"


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        (
            CommandLine(),
            "--model.dtype bfloat16 or --rollout.max-new-tokens 8 of --model.name; --seed",
        ),
        (
            CommandLine({"model": "MODEL", "dtype": "--dtype", "seed": "--seed"}),
            "--dtype bfloat16 or 'rollout.max_new_tokens = 8' of MODEL; --seed",
        ),
        (
            words(stretto.train),
            "model__dtype='bfloat16' or rollout__max_new_tokens=8 of model=; seed=",
        ),
        (words(stretto.generate), "dtype='bfloat16' or max_new_tokens=8 of model=; seed="),
        (
            scripts()["GRPOTrainer"],
            "bf16=True or max_completion_length=8 of model=; seed=",
        ),
        (
            TomlFile(),
            "'model.dtype = \"bfloat16\"' or 'rollout.max_new_tokens = 8' of 'model.name'; 'seed'",
        ),
    ],
)
def test_a_setting_is_named_as_each_interface_takes_it(interface: TomlFile, expected: str) -> None:
    assert worded(MESSAGE, interface) == expected


def test_a_command_is_a_call_where_there_is_one() -> None:
    message = "`stretto train --resume runs/a-1`, `stretto recipes`"
    assert worded(message, words(stretto.train)) == (
        "stretto.resume('runs/a-1'), 'stretto recipes' in a shell"
    )
    assert worded(message, scripts()["PPOTrainer"]).startswith(
        "trainer.train(resume_from_checkpoint='runs/a-1'), "
    )
    assert worded(message, CommandLine()) == "'stretto train --resume runs/a-1', 'stretto recipes'"


@pytest.mark.parametrize(
    "error", [ConfigError("set `seed = 1`", "c"), RoleLostError("learner", "set `seed = 1`", "c")]
)
def test_an_error_of_another_process_is_worded_where_it_leaves(error: StrettoError) -> None:
    """And in the words of the outermost interface."""
    again = pickle.loads(pickle.dumps(error))
    assert "`seed = 1`" in str(again)
    assert again.code == "c"

    @in_python
    def inner(seed: int = 0) -> None:
        raise again

    with raises(type(error), "c", "set --seed 1"), through(CommandLine()):
        inner()


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"learning_rate": 1}, "training__lr="),
        ({"reward_funcs": len}, "reward="),
        ({"bf16": True}, "model__dtype='bfloat16'"),
        ({"resume_from_checkpoint": "x"}, "stretto.resume('RUN_DIR')"),
        ({"model__device": "cuda"}, "model__device='auto'"),
    ],
)
def test_python_is_answered_in_python(changes: dict[str, Any], fact: str) -> None:
    with raises(ConfigError, None, fact) as caught:
        stretto.train("tiny", **changes)
    assert not SHELL.search(str(caught.value))
    assert "`" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("generate hi --device cuda", "--device auto"),
        ("eval tiny --model.device cuda", "--model.device auto"),
        ("plan gsm8k --gpus 2 --write x.toml", "--task.name"),
        ("serve tiny --port 0 --max-model-len 1", "--max-model-len 1"),
    ],
)
def test_a_command_is_answered_with_its_own_options(
    line: str, fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert fact in said
    assert "`" not in said
