"""Options of commands: the parameters of their functions, with bounds for numbers."""

from __future__ import annotations

import contextlib
import inspect
import io
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import pytest
from pydantic import Field
from tyro.conf import arg

import stretto
from raising import raises
from stretto import bounds
from stretto.api.planning import PlanOptions
from stretto.cli import compare, evaluate, generate, memory, pipeline, plan, serve, train
from stretto.cli.main import COMMANDS, main
from stretto.cli.parsing import call, options_of, takes
from stretto.config.sections import Fraction, PositiveInt
from stretto.errors import ConfigError

PYTHON = [getattr(stretto, name) for name in stretto.__all__]
FUNCTIONS: list[Callable[..., Any]] = [
    *(function for function in PYTHON if inspect.isfunction(function)),
    *(generate.command_generate, generate.command_chat, serve.command_serve, train.command_align),
    *(evaluate.EvalOptions, evaluate.command_label, evaluate._command_label_responses),
    *(compare.command_compare, compare.command_compare_simulated),
    *(compare.command_report, compare.command_watch, plan.command_plan),
    *(memory.command_memory, pipeline.command_pipeline, PlanOptions),
]
CHECKED_ELSEWHERE = {
    *("actor_stages", "critic_stages", "actor_tp", "critic_tp", "micro_batches", "tokens"),
    *("teraflops", "communication_us"),
}
"""Sizes of pipelines, whose bounds depend on each other."""


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_numbers_that_nobody_means_are_refused(function: Callable[..., Any]) -> None:
    """From the command line and from Python, by the same types."""
    types = {name: option.kind for name, option in options_of(function).items()}
    for name in types.keys() - CHECKED_ELSEWHERE:
        parts = bounds.parts(types[name])
        if not parts & {int, float}:
            continue
        absurd = [10**30, -(10**30), *([math.inf, math.nan] if float in parts else [])]
        for value in absurd:
            given: Any = (value, value) if parts & {tuple, Sequence} else value
            with pytest.raises(ConfigError) as caught:
                bounds.checked(types, {name: given})
            assert f"`{name} = {value}`: must be" in str(caught.value)
            assert caught.value.code


def test_python_words_the_range_of_a_number() -> None:
    with raises(ConfigError, "less_than_equal", "max_new_tokens=1000000000000000000: must be"):
        stretto.generate("tiny", ["x"], max_new_tokens=10**18)
    with raises(ConfigError, "finite_number", "must be a finite number"):
        stretto.generate("tiny", ["x"], temperature=math.nan)
    with raises(ConfigError, "literal_error", "dtype=", "must be 'auto', 'float32' or"):
        stretto.generate("tiny", ["x"], dtype="float16")  # type: ignore[arg-type]
    with raises(ConfigError, "greater_than", "samples=0: must be greater than 0"):
        stretto.evaluate("tiny", samples=0)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_no_empty_default(command: str) -> None:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        main([command, "--help"])
    assert "usage: stretto" in shown.getvalue()
    for empty in ("default: )", "default: '')", "default: None)"):
        assert empty not in shown.getvalue()


def source(
    text: Annotated[str, arg(metavar="TEXT")],
    /,
    *,
    times: PositiveInt = 2,
    share: Fraction | None = None,
) -> None:
    """Repeat a text.

    Args:
        text: What is repeated.
        times: How often the text
            is repeated.
        share: Part of the text.
    """


@takes(source, "text", "times", part="share")
def command(text: str, /, *, word: Annotated[str, Field(max_length=3)] = "", **named: Any) -> int:
    """Repeat.

    Args:
        word: Ends the text.
    """
    assert (text, word, named) == ("a", "b", {"times": 5, "part": 0.5})
    return 7


def test_a_command_takes_options_of_another_function(capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(command)
    assert {name: option.help for name, option in options.items()} == {
        "text": "What is repeated.",
        "word": "Ends the text.",
        "times": "How often the text is repeated.",
        "part": "Part of the text.",
    }
    assert [options["times"].default, options["text"].positional] == [2, True]
    assert call(command, "repeat", ["a", "--word", "b", "--times", "5", "--part", "0.5"]) == 7
    with raises(ConfigError, "greater_than", "`times = 0`"):
        call(command, "repeat", ["a", "--times", "0"])
    with raises(ConfigError, "command-line", "needs TEXT"):
        call(command, "repeat", [])
