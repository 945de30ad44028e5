"""Tools and environments that are refused before anything is started, from files and as objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raising import raises
from stretto.checks import user_functions
from stretto.environments.objects import named_objects
from stretto.errors import ConfigError

TOOL = (
    'def f(a: int, b: Any = 1) -> list[int]:\n    """F.\n\n'
    '    Args:\n        a: one\n        b: two\n    """\n'
)
GYM = "class {}:\n    def reset(self): ...\n    def step(self, action): ...\n"
TRL = 'class f:\n    def reset(self): ...\n    def look(self{}):\n        """Look.{}"""\n'
ARGS = "\n\n        Args:\n            at: a place\n        "
GOOD = [
    TOOL,
    f"async {TOOL}",
    "class f:\n    def run(self, data): ...",
    "async def f(data, base_url, api_key): ...",
    "def f() -> 'Made': ...",
    f"{GYM.format('A')}def f() -> A: ...",
    GYM.format("f"),
    f"{GYM.format('A')}class f(A): ...",
    "class A:\n    def open(self, row): ...\nclass f(A):\n    def step(self, turn): ...",
    TRL.format("", ""),
    TRL.format(", at: int = 1", ARGS),
    f"{GYM.format('A')}f = {{'a': A}}",
    "class f:\n    def create(self): ...\n    def execute(self): ...\n    def release(self): ...",
    # Only running the file can tell.
    "from elsewhere import Base\nclass f(Base): ...",
    "@wrapped\ndef f(a): ...",
    "@wrapped\nclass f: ...",
    "f = make()",
    "f = partial(print)",
]
WRONG = [
    ("class f: ...", "unknown-environment"),
    ("class f:\n    def step(self, action): ...", "unknown-environment"),
    ("class A: ...\nclass f(A, object): ...", "unknown-environment"),
    (f"{GYM.format('A')}f = A()", "unknown-environment"),
    (f"{GYM.format('A')}f = {{'a': A, 'b': A()}}", "unknown-environment"),
    ("f = 3", "unknown-environment"),
    ("f = {}", "unknown-environment"),
    ("class A: ...\nf = A", "unknown-environment"),
    ("def f(a): ...", "tool-without-schema"),
    ('def f(a):\n    """F.\n\n    Args:\n        a: one\n    """', "tool-without-schema"),
    ('def f(a: int):\n    """F."""', "tool-without-schema"),
    ("def f() -> int: ...", "tool-without-schema"),
    (TRL.format(", at", ARGS), "tool-without-schema"),
    (TRL.format(", at: int", ""), "tool-without-schema"),
]


@pytest.mark.parametrize("text", GOOD)
def test_environments_are_read_without_running_them(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{text}\nraise SystemExit('it ran')\n".replace("from elsewhere", "from ast"))
    user_functions.check_environments([f"{file}:f"])


@pytest.mark.parametrize(("text", "code"), WRONG)
def test_wrong_environments_are_refused_without_running_them(
    tmp_path: Path, text: str, code: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{text}\nraise SystemExit('it ran')\n")
    with raises(ConfigError, code):
        user_functions.check_environments([f"{file}:f"])


class Safe:
    """TRL's environment."""

    def reset(self) -> None: ...

    def look(self, at: int) -> str:
        """Look.

        Args:
            at: a place
        """
        return str(at)


class Bare(Safe):
    """Its tool has no hints."""

    def look(self, at):  # type: ignore[no-untyped-def]
        """Look."""


class Plain:
    """No environment."""


def raising() -> Safe:
    """Raise."""
    raise LookupError("no server")


def untyped(a):  # type: ignore[no-untyped-def]
    """Take anything."""


def test_objects_of_the_known_shapes_are_taken() -> None:
    assert named_objects(None, Safe) == {"Safe": Safe}
    assert named_objects(None, {"a": Safe}) == {"environments": {"a": Safe}}
    assert named_objects(None, lambda: Safe())["<lambda>"].makes is Safe  # noqa: PLW0108
    assert named_objects([], None) == {}


@pytest.mark.parametrize(
    ("tools", "factory", "code"),
    [
        (None, Safe(), "unknown-environment"),
        (None, {"a": Safe, "b": Safe()}, "unknown-environment"),
        (None, Plain, "unknown-environment"),
        (None, Plain(), "unknown-environment"),
        (None, lambda: Plain(), "unknown-environment"),  # noqa: PLW0108
        (None, 3, "unknown-environment"),
        (None, "games.py:Safe", "unknown-environment"),
        (None, raising, "environment-parameters"),
        (None, Bare, "tool-without-schema"),
        (None, lambda: Bare(), "tool-without-schema"),  # noqa: PLW0108
        ("tools.py:stock", None, "tool-not-function"),
        (["tools.py:stock"], None, "tool-not-function"),
        (3, None, "tool-not-function"),
        ([Safe], None, "tool-not-function"),
        ([untyped], None, "tool-without-schema"),
        (untyped, None, "tool-without-schema"),
    ],
)
def test_objects_of_no_known_shape_are_refused_at_once(tools: Any, factory: Any, code: str) -> None:
    with raises(ConfigError, code):
        named_objects(tools, factory)
