"""Calls of tools, read off what a policy wrote: to run, wrong, or not finished."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.environments.bridge import Turn
from stretto.environments.calls import (
    HERMES,
    MAX_DEPTH,
    CallFormat,
    ToolCall,
    find_calls,
    format_of,
)
from template_helpers import FAMILIES, bridge_of, tokenizer_of

LLAMA = CallFormat("", "", "parameters")
MISTRAL = CallFormat("[TOOL_CALLS] ", "", listed=True, numbered=True)
NAMES = {"add", "multiply"}
ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


def calls(text: str, form: CallFormat = HERMES, *, ended: bool = True) -> list[ToolCall]:
    """Calls in a text that spells no control token."""
    return [f.call for f in find_calls(text, text, form, names=NAMES, ended=ended)]


def told(text: str, form: CallFormat = HERMES, *, ended: bool = True) -> list[tuple[str, str]]:
    return [(c.name, c.status) for c in calls(text, form, ended=ended)]


def block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def test_an_id_that_templates_do_not_take_is_replaced() -> None:
    own = [f'{{"name": "add", "arguments": {{}}, "id": "{i}"}}' for i in ("x1", "abcdefghi")]
    made, kept = (c.id for text in own for c in calls(block(text)))
    assert len(made) == 9
    assert made.isalnum()
    assert kept == "abcdefghi"


# -- what is read ----------------------------------------------------------------------------------


def test_calls_between_marks() -> None:
    text = f"Let me see.\n{block(ADD)}\nand\n{block(ADD)} done"
    first, second = calls(text)
    assert (first.name, first.arguments, first.status) == ("add", {"a": 1, "b": 2}, "ok")
    assert first.raw == block(ADD)
    assert first.id != second.id
    assert all(len(c.id) == 9 and c.id.isalnum() for c in (first, second))
    assert [c.id for c in calls(text)] == [first.id, second.id]


def test_the_mark_within_an_argument_ends_no_call() -> None:
    arguments = {"a": "</tool_call> <tool_call>", "b": {"c": [1, None, "}"]}}
    (call,) = calls(block(json.dumps({"name": "add", "arguments": arguments})))
    assert call.status == "ok"
    assert call.arguments == arguments


def test_calls_that_are_all_of_a_turn() -> None:
    one = '{"name": "add", "parameters": {"a": 1}}'
    assert told(one, LLAMA) == [("add", "ok")]
    assert told(f"\n {one}; {one}\n", LLAMA) == [("add", "ok"), ("add", "ok")]
    assert told(f"I say {one}", LLAMA) == []
    assert told('{"answer": 3}', LLAMA) == []
    assert told("{x}", LLAMA) == []
    assert told(f"{one} I say", LLAMA) == [("add", "invalid")]
    assert told(one[:-1], LLAMA) == [("", "invalid")]


def test_a_list_of_calls() -> None:
    one = '{"name": "add", "arguments": {}, "id": "abcdefghi"}'
    two = '{"name": "multiply", "arguments": {}, "id": "abcdefghi"}'
    found = calls(f"[TOOL_CALLS] [{one}, {two}]", MISTRAL)
    assert [(c.name, c.status) for c in found] == [("add", "ok"), ("multiply", "ok")]
    assert found[0].id == "abcdefghi" != found[1].id
    assert told(f"[TOOL_CALLS] [{one}, 3]", MISTRAL) == [("add", "ok"), ("", "invalid")]
    assert told("[TOOL_CALLS] []", MISTRAL) == [("", "invalid")]
    assert told(f"[TOOL_CALLS] [{one}] and", MISTRAL) == [("", "invalid")]


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (block(ADD)[:-5], HERMES),
        ("<tool_call>", HERMES),
        ("so <tool_call>\n" + ADD[:-3], HERMES),
        ('{"name": "add", "parameters": {"a": 1', LLAMA),
        ('{"name": "add", "parameters": {"a": 1}}', LLAMA),
        ("[TOOL_CALLS] [" + ADD + "]", MISTRAL),
        ("[TOOL_CALLS] [" + ADD, MISTRAL),
    ],
)
def test_a_call_that_a_limit_cuts_is_unclosed(text: str, form: CallFormat) -> None:
    (call,) = calls(text, form, ended=False)
    assert call.status == "unclosed"
    assert call.arguments == {}
    assert call.reason
    assert text.endswith(call.raw)


def test_a_call_before_the_one_that_is_cut_stays() -> None:
    assert told(block(ADD) + "<tool_call>\n{", ended=False) == [("add", "ok"), ("", "unclosed")]
    one = '{"name": "add", "parameters": {}}'
    assert told(f"{one}; {one}", LLAMA, ended=False) == [("add", "ok"), ("add", "unclosed")]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "arguments": {"a": 1, "a": 2}}',
        '{"name": "add", "name": "multiply", "arguments": {}}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": -Infinity}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        '{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "add", "arguments": "{}"}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add"}',
        '{"arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "subtract", "arguments": {}}',
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
        "{'name': 'add', 'arguments': {}}",
        '__import__("os").system("true")',
        f"{ADD} {ADD}",
        "[" + ADD + "]",
        "",
        '{"name": "add", "arguments": ' + '{"a":' * 200 + "1" + "}" * 201,
        '{"name": "add", "arguments": ' + "[" * 200_000,
    ],
)
def test_what_is_no_call_is_invalid_with_a_reason(text: str) -> None:
    (call,) = calls(block(text))
    assert call.status == "invalid"
    assert call.arguments == {}
    assert call.reason
    assert call.raw == block(text)


def test_nesting_is_bounded() -> None:
    def nested(depth: int) -> str:
        lists = "[" * depth + "]" * depth
        return block(f'{{"name": "add", "arguments": {{"a": {lists}}}}}')

    assert told(nested(MAX_DEPTH - 1)) == [("add", "ok")]  # the arguments are an object, too
    assert told(nested(MAX_DEPTH)) == [("add", "invalid")]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from(
            [
                *(
                    "<tool_call>",
                    "</tool_call>",
                    ADD,
                    "{",
                    "}",
                    "[",
                    '"',
                    "\\",
                    "\n",
                    "é",
                    "\ufffe",
                ),
                *("[TOOL_CALLS]", '{"name": "add"', "<think>", "</think>", ";", "\x00", "1e9"),
                "\ufffe",
            ]
        ),
        max_size=12,
    ).map("".join),
    st.sampled_from([HERMES, LLAMA, MISTRAL]),
    st.booleans(),
)
def test_any_text_gives_calls_in_its_order(text: str, form: CallFormat, ended: bool) -> None:
    end = 0
    for start, behind, call in find_calls(text, text, form, names=NAMES, ended=ended):
        assert call.raw == text[start:behind]
        assert start >= end or form.listed
        end = behind
        assert bool(call.reason) == (call.status != "ok")


# -- formats ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
def test_a_format_is_known_by_what_it_writes(form: CallFormat) -> None:
    call = {"name": "f", "arguments": {"a": "b"}, "id": "abcdefghi"}
    assert format_of(form.write([call]), "f", {"a": "b"}) == form


@pytest.mark.parametrize(
    "text", ["", "f(a='b')", "<function=f><parameter=a>b</parameter>", '[{"name": "g"}', "{{{"]
)
def test_other_formats_are_not_known(text: str) -> None:
    assert format_of(text, "f", {"a": "b"}) is None


# -- turns, by tokens ------------------------------------------------------------------------------


def turn(family: str, text: str, *, ended: bool = True) -> Turn:
    """Read a turn whose control tokens were sampled as such."""
    tokenizer: Any = tokenizer_of(family)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if ended:
        ids.append(tokenizer.eos_token_id)
    return bridge_of(family).parse(ids, ended=ended)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_reads_what_it_writes(family: str) -> None:
    bridge = bridge_of(family)
    made = {"name": "add", "arguments": {"a": 1, "b": {"c": [True, "é"]}}, "id": "abcdefghi"}
    said = turn(family, bridge.form.write([made]))
    (call,) = said.calls
    assert (call.name, call.arguments, call.status) == ("add", made["arguments"], "ok")
    assert said.message["content"] == ""
    assert said.message["tool_calls"] == [
        {
            "type": "function",
            "id": call.id,
            "function": {"name": "add", "arguments": made["arguments"]},
        }
    ]
    assert (call.id == "abcdefghi") == (family == "mistral")


def test_a_text_and_a_call_are_both_kept() -> None:
    said = turn("qwen2.5", f"Let me see.\n{block(ADD)}")
    assert said.text == f"Let me see.\n{block(ADD)}"
    assert said.message["content"] == "Let me see."
    assert len(said.message["tool_calls"]) == 1


def test_a_call_that_is_not_run_stays_text() -> None:
    wrong = block('{"name": "subtract", "arguments": {}}')
    said = turn("qwen2.5", f"So:\n{block(ADD)}\n{wrong}")
    assert [c.status for c in said.calls] == ["ok", "invalid"]
    assert said.message["content"] == f"So:\n\n{wrong}"
    assert len(said.message["tool_calls"]) == 1
    said = turn("qwen2.5", wrong)
    assert said.message == {"role": "assistant", "content": wrong}


def test_reasoning_about_a_call_is_none() -> None:
    assert turn("qwen3", f"<think>\nPerhaps {block(ADD)}?\n</think>\n\nNo.").calls == ()
    assert turn("qwen3", f"<think>\nPerhaps {block(ADD)}?").calls == ()
    said = turn("qwen3", f"<think>\nPerhaps.\n</think>\n\n{block(ADD)}")
    assert [c.status for c in said.calls] == ["ok"]
    assert said.message["content"] == "<think>\nPerhaps.\n</think>"


def test_a_mark_that_is_a_control_token_must_be_sampled_as_one() -> None:
    text = '[TOOL_CALLS] [{"name": "add", "arguments": {}}]'
    assert [c.status for c in turn("mistral", text).calls] == ["ok"]
    spelled = list(text.encode())  # a token a byte
    said = bridge_of("mistral").parse(spelled, ended=True)
    assert said.calls == ()
    assert said.text == text


def test_a_token_before_a_bare_call_is_passed_over() -> None:
    text = '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'
    said = turn("llama3.1", text)
    assert [(c.name, c.status) for c in said.calls] == [("add", "ok")]
    assert said.message["content"] == ""


def test_another_end_token_is_no_text_behind_a_call() -> None:
    """Such as Llama's <|eom_id|>, which a model's generation config names."""
    tokenizer: Any = tokenizer_of("llama3.1")
    text = '{"name": "add", "parameters": {}}<|eom_id|>'
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    said = bridge_of("llama3.1").parse(ids, ended=True)
    assert [c.status for c in said.calls] == ["ok"]
    assert said.message["content"] == ""


def test_broken_utf8_and_control_tokens_within_a_turn() -> None:
    tokenizer: Any = tokenizer_of("qwen2.5")
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    said = bridge_of("qwen2.5").parse([0xFF, 0x61, start, 0x62], ended=False)
    assert said.text == said.message["content"] == "\ufffdab"
    inside = block('{"name": "add", "arguments": {"a": "X"}}').encode().split(b"X")
    said = bridge_of("qwen2.5").parse([*inside[0], start, *inside[1]], ended=True)
    assert said.calls[0].arguments == {"a": "<|im_start|>"}
    assert said.message["content"] == ""


def test_tools_of_a_row_are_known_instead() -> None:
    ids = list(block('{"name": "subtract", "arguments": {}}').encode())
    tools = [{"type": "function", "function": {"name": "subtract"}}]
    bridge = bridge_of("qwen2.5")
    assert bridge.parse(ids, ended=True).calls[0].status == "invalid"
    assert bridge.parse(ids, ended=True, tools=tools).calls[0].status == "ok"
