"""Messages and tools as users' rows have them, on their way into a chat template."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from raising import raises
from scorer_helpers import byte_tokenizer
from stretto.config import TaskConfig
from stretto.errors import TaskError
from stretto.tasks.encode import Encoder, with_parsed_arguments
from stretto.tasks.messages import as_messages, as_prompt, cell_of, prompt_of, tools_in
from stretto.tasks.prompts import render
from stretto.tasks.task import TaskRow
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


def test_blank_arguments_are_an_empty_object() -> None:
    assert text(TaskRow(called(" "))) == text(TaskRow(called({}))) == "user:q;assistant:;tool:ok;"


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


SCHEMA = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"city": {"type": "string"}}}},
}
PADDED: Any = {
    "type": "function",
    "strict": None,
    "function": {
        "name": "f",
        "parameters": {"properties": {"city": {"type": "string"}, "day": None}},
    },
}
"""The same schema as Arrow gives it back, if another row's has a parameter 'day'."""


@pytest.mark.parametrize(
    "tools",
    [[SCHEMA], [PADDED], json.dumps([SCHEMA]), [json.dumps(SCHEMA)], SCHEMA, json.dumps(SCHEMA)],
)
def test_tools_reach_the_template_in_every_form(tools: Any) -> None:
    row = TaskRow((Message(role="user", content="q"),), {"tools": tools})
    assert text(row) == f"user:q[{json.dumps(SCHEMA)}];"


@pytest.mark.parametrize("tools", [None, [], "", " ", "[]"])
def test_no_tools_are_none(tools: Any) -> None:
    assert tools_in({"tools": tools}, "tools") == []


@pytest.mark.parametrize("tools", ["calculator", ["calculator"], 3, [[SCHEMA]], '{"a":'])
def test_other_tools_are_refused_with_the_row(tools: Any) -> None:
    row = TaskRow((Message(role="user", content="q"),), {"tools": tools}, index=4)
    with raises(TaskError, "tools-not-schemas", "row 4", "tools = ''"):
        text(row)
    assert text(row, columns={"tools": ""}) == "user:q;"


def test_nulls_that_arrow_adds_to_messages_are_left_out() -> None:
    call = {"name": "f", "arguments": {"city": "Rome", "day": None}, "id": None}
    padded = [
        {"role": "user", "content": "q", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": call, "id": None}]},
        {"role": "assistant", "content": "b", "tool_calls": []},
    ]
    assert as_messages(padded) == (
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Rome"}}}],
        },
        {"role": "assistant", "content": "b"},
    )


def test_nulls_in_json_text_and_in_lists_stay() -> None:
    call = {"function": {"name": "f", "arguments": json.dumps({"day": None})}}
    (message,) = as_messages([{"role": "assistant", "tool_calls": [call], "x": [None]}])
    assert with_parsed_arguments(message)["tool_calls"][0]["function"]["arguments"] == {"day": None}
    assert dict(message)["x"] == [None]


def test_further_keys_of_messages_reach_the_template() -> None:
    template = (
        "{% for m in messages %}{{ m.reasoning_content }}{{ m.at }}{{ m.weight }}{% endfor %}"
    )
    message = {"role": "user", "content": "q", "reasoning_content": "hm", "weight": 1}
    messages = as_messages([message | {"at": datetime.date(2026, 1, 2)}])
    assert text(TaskRow(messages), template) == "hm2026-01-021"


def test_sharegpts_messages_are_read() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "5"},
        {"from": "gpt", "value": "a", "weight": None},
    ]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert as_messages(turns) == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "a"},
    )
    assert as_messages({"from": "gpt", "value": "a"}) == ({"role": "assistant", "content": "a"},)


TURNS = [{"role": "system", "content": "s"}, {"content": "q", "role": "user"}]


def test_messages_and_calls_may_be_json_text() -> None:
    assert as_prompt(f" {json.dumps(TURNS)}\n") == as_prompt(TURNS) == tuple(TURNS)
    calls = [{"function": {"name": "f", "arguments": {"a": None}}}]
    turn = {"role": "assistant", "content": None, "tool_calls": json.dumps(calls)}
    assert as_messages([turn]) == as_messages([{**turn, "tool_calls": calls}])
    assert as_messages([{**turn, "tool_calls": ""}]) == ({"role": "assistant", "content": ""},)
    for question in ('[{"role": "admin"}]', '[{"role": "user"}] What is that?', '{"content": ""}'):
        assert as_prompt(question) == question


@pytest.mark.parametrize("value", [str(TURNS), "[{'from': 'human', 'value': 'q'}\n {}]"])
def test_messages_as_python_prints_them_are_refused(value: str) -> None:
    with raises(TaskError, "messages-not-json", "json.dumps"):
        as_prompt(value)
    with raises(TaskError, "messages-not-json", "tool_calls"):
        as_messages({"role": "assistant", "tool_calls": value})


def test_parts_of_openais_responses_are_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    assert as_prompt([{"role": "user", "content": parts}]) == ({"role": "user", "content": "ab"},)


@pytest.mark.parametrize("value", [[{"role": "user"}], [{"content": "q"}], [1], "q", [], {}, None])
def test_what_is_no_message_is_none(value: Any) -> None:
    assert as_messages(value) == ()


def test_a_rows_own_system_message_is_put_before_its_prompt() -> None:
    messages = (Message(role="user", content="q"),)
    assert text(TaskRow("q", {"system": "s"})) == "system:s;user:q;"
    assert text(TaskRow(messages, {"system": "s"})) == "system:s;user:q;"
    brings = (Message(role="system", content="own"), *messages)
    assert text(TaskRow(brings, {"system": "s"})) == "system:own;user:q;"
    assert text(TaskRow("q", {"system": "s"}), system="set") == "system:set;user:q;"
    assert text(TaskRow("q", {"system": "s"}), chat="off") == "s\n\nq"
    assert text(TaskRow("q", {"system": "s"}), columns={"system": ""}) == "user:q;"
    assert text(TaskRow("q", {"system": None})) == "user:q;"


def test_an_instruction_has_its_input_behind_it() -> None:
    assert prompt_of({"instruction": "i", "input": "x"}, "instruction") == "i\nx"
    assert prompt_of({"instruction": "i", "context": "c"}, "instruction") == "i\nc"
    assert prompt_of({"instruction": "i", "input": ""}, "instruction") == "i"
    assert prompt_of({"prompt": "p", "input": "x"}, "prompt") == "p"


def test_a_dotted_name_leads_into_objects() -> None:
    row = {"a": {"b": {"c": 7}}, "d.e": 8}
    assert cell_of(row, "a.b.c") == 7
    assert cell_of(row, "d.e") == 8
    for column in ("a.x", "a.b.c.d", "x.y", "x"):
        with pytest.raises(KeyError):
            cell_of(row, column)
