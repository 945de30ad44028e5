"""Messages and tools as users' rows have them, on their way into a chat template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raising import raises
from scorer_helpers import byte_tokenizer
from stretto.config import TaskConfig
from stretto.errors import TaskError
from stretto.tasks.base import TaskRow
from stretto.tasks.encode import Encoder
from stretto.tasks.prompts import render
from stretto.types import Message

ARGUMENTS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments | items %}<{{ k }}={{ v }}>{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %};{% endfor %}"
)
"""Writes arguments as Qwen3-Coder's template does, which takes an object and no text."""


def templated(template: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def called(arguments: Any) -> tuple[Message, ...]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return (
        Message(role="user", content="q"),
        Message(role="assistant", content="", tool_calls=[call]),
        Message(role="tool", content="ok"),
    )


def text(row: TaskRow, template: str = ARGUMENTS, **settings: Any) -> str:
    config = TaskConfig.model_validate({"kind": "dataset", "name": "x", **settings})
    return render(row, config, templated(template)).text


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, json.dumps({"city": "Rome"})])
def test_arguments_are_the_same_as_an_object_and_as_json_text(arguments: Any) -> None:
    assert text(TaskRow(called(arguments))) == "user:q;assistant:<city=Rome>;tool:ok;"
    marked = ARGUMENTS.replace(
        "{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"
    )
    encoder = Encoder(templated(marked))
    ids, _ = encoder.marked(called(arguments))
    assert ids == encoder.ids("user:q;assistant:<city=Rome>;tool:ok;")


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{% for x in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
    ],
)
def test_whatever_a_template_raises_is_a_refusal(template: str, error: str) -> None:
    with raises(TaskError, "template-refuses", error):
        text(TaskRow((Message(role="user", content="q"),), index=7), template)


def test_arguments_that_are_no_json_are_the_templates_to_refuse() -> None:
    with raises(TaskError, "template-refuses", "TypeError"):
        text(TaskRow(called("{city: Rome")))
