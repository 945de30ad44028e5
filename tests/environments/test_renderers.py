"""The library 'renderers' and Stretto's own reading of templates agree where both know a family."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from raising import raises
from stretto.environments import renderer as module
from stretto.environments.renderer import PlainTokenizer, RendererBridge, find_renderer, open_bridge
from stretto.errors import ConfigError
from stretto.tasks.encode import Encoder
from stretto.types import Message
from template_helpers import FAMILIES, TOOLS, bridge_of, tokenizer_of

ASKED = [Message(role="user", content="What is 6 times 7?")]
RESULT = Message(role="tool", content="42 <|im_end|> <|eot_id|>", name="add", tool_call_id="a")
MORE = Message(role="user", content="And <|im_start|>then?")
CALL = {"name": "add", "arguments": {"a": 6, "b": [7, "é"]}}
NAMES = {"qwen3": "Qwen/Qwen3-0.6B", "llama3.1": "meta-llama/Llama-3.2-1B-Instruct"}


def of_library(family: str) -> RendererBridge:
    """The bridge of a family by the library, whose tokenizer has the real one's name."""
    pytest.importorskip("renderers")
    tokenizer = tokenizer_of(family)
    tokenizer.name_or_path = NAMES[family]
    made = find_renderer(Encoder(tokenizer))
    if made is None:
        pytest.skip(f"renderers does not know {NAMES[family]}")
    return RendererBridge(Encoder(tokenizer), (), frozenset(), made)


def turn(family: str, text: str) -> list[int]:
    tokenizer = tokenizer_of(family)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [*ids, tokenizer.convert_tokens_to_ids(FAMILIES[family].end)]


@pytest.mark.parametrize("answers", [[RESULT], [RESULT, RESULT], [MORE], [RESULT, MORE]])
@pytest.mark.parametrize("family", NAMES)
def test_both_go_on_with_the_same_tokens(family: str, answers: list[Message]) -> None:
    library, own = of_library(family), bridge_of(family, tools=False)
    prompt, _ = own.prompt(ASKED)
    assert prompt == library.prompt(ASKED)[0]
    for text in ("42", own.form.write([CALL])):
        standing = [*prompt, *turn(family, text)]
        expected = own.context(standing, answers, prompt=ASKED)
        found = library.context(standing, answers)
        if family == "qwen3" and MORE in answers:
            assert found is None  # a new question: it leaves out whether there is any reasoning
        else:
            assert found == expected


@pytest.mark.parametrize("family", NAMES)
def test_both_read_the_same_calls(family: str) -> None:
    library, own = of_library(family), bridge_of(family, tools=False)
    call = own.form.write([CALL])
    for text in (call, "42", call[:-14] if family == "qwen3" else call):
        ids = turn(family, text)
        expected, found = own.parse(ids, ended=True), library.parse(ids, ended=True)
        shown = [[(c.name, c.arguments, c.status) for c in t.calls] for t in (expected, found)]
        if "unclosed" not in str(shown):
            assert shown[0] == shown[1]
            assert expected.message["content"] == found.message["content"]
        assert [c.status for c in expected.calls] == [c.status for c in found.calls]
        assert expected.text == found.text


# -- with a renderer made up -----------------------------------------------------------------------

IN_XML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls %}{{ '<f=' + c.function.name + '>' }}"
    "{% for k, v in c.function.arguments.items() %}{{ k + '=' + v }}{% endfor %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)


class MadeUp:
    """A renderer of ChatML whose calls are '<f=name>' and JSON."""

    def __init__(self, texts: Any, header: str = "assistant") -> None:
        self.texts, self.header = texts, header
        self.start, self.end = texts.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

    def render_ids(self, messages: Any, *, tools: Any, add_generation_prompt: bool) -> list[int]:
        # The template tells of no tools, so that Stretto does.
        about = module.Bridge(self.texts._encoder).prompt(messages)[0]
        return about if tools is None and add_generation_prompt else []

    def parse_response(self, ids: list[int], *, tools: Any) -> Any:
        text = self.texts.decode(ids[:-1])
        content, _, call = text.partition("<f=")
        name, _, arguments = call.partition(">")
        status, found = "ok", None
        try:
            found = json.loads(arguments)
        except ValueError:
            status = "unclosed_block" if arguments.startswith("{") else "invalid_json"
        read = SimpleNamespace(
            raw=f"<f={call}",
            name=name,
            arguments=found,
            id=None,
            status=SimpleNamespace(value=status),
        )
        calls = [read] if call else []
        return SimpleNamespace(content=content, reasoning_content="So.", tool_calls=calls)

    def bridge_to_next_turn(self, before: Any, turn: Any, messages: Any, *, tools: Any) -> Any:
        if messages[0]["role"] == "system":
            return None
        ids = [*before, *turn]
        for m in messages:
            texts = [*self.texts.encode(f"{m['role']}\n{m['content']}"), self.end]
            ids += [*self.texts.encode("\n"), self.start, *texts]
        if messages[0]["role"] == "tool":
            ids = ids[1:]  # no longer what stands
        return SimpleNamespace(token_ids=ids)


def made_up() -> RendererBridge:
    encoder = Encoder(tokenizer_of("chatml", IN_XML))
    return RendererBridge(encoder, (), frozenset(), MadeUp(PlainTokenizer(encoder)))


def test_calls_as_a_renderer_reads_them() -> None:
    bridge = made_up()
    said = bridge.parse(turn("chatml", 'Well <f=add>{"a": 1}'), ended=True)
    (call,) = said.calls
    assert (call.name, call.arguments, call.status) == ("add", {"a": 1}, "ok")
    assert said.message["content"] == "<think>\nSo.\n</think>\n\nWell "
    assert said.message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert said.text == 'Well <f=add>{"a": 1}'
    for text, status in (
        ("<f=add>{", "unclosed"),
        ("<f=add>x", "invalid"),
        ("<f=add>[]", "invalid"),
    ):
        (call,) = bridge.parse(turn("chatml", text), ended=True).calls
        assert (call.status, bool(call.reason)) == (status, True)
    known = bridge.parse(turn("chatml", "<f=subtract>{}"), ended=True, tools=TOOLS)
    assert known.calls[0].status == "invalid"


def test_what_a_renderer_cannot_read_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = made_up()

    def fail(ids: Any, *, tools: Any) -> None:
        raise AssertionError("two marks in a row")

    monkeypatch.setattr(bridge._renderer, "parse_response", fail)
    said = bridge.parse(turn("chatml", "Well <f="), ended=True)
    assert (said.text, said.calls) == ("Well <f=", ())
    assert said.message == {"role": "assistant", "content": "Well <f="}


def test_the_context_of_a_renderer_begins_with_what_stands_or_is_a_break() -> None:
    bridge = made_up()
    standing = [*bridge.prompt(ASKED)[0], *turn("chatml", "42")]
    context = bridge.context(standing, [MORE])
    assert context is not None
    text = tokenizer_of("chatml").decode(context)
    assert text == "\n<|im_start|>user\nAnd <|im_start|>then?<|im_end|>"
    start = tokenizer_of("chatml").convert_tokens_to_ids("<|im_start|>")
    assert context.count(start) == 1
    assert bridge.context(standing, [RESULT]) is None
    assert bridge.context(standing, [Message(role="system", content="x")]) is None


def test_a_renderer_takes_part_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(open_bridge(Encoder(tokenizer_of("qwen2.5")), TOOLS)) is module.Bridge
    encoder = Encoder(tokenizer_of("chatml", IN_XML))
    monkeypatch.setattr(module, "find_renderer", lambda _: None)
    with raises(ConfigError, "unknown-call-format", "renderers"):
        open_bridge(encoder, TOOLS)
    monkeypatch.setattr(module, "find_renderer", lambda encoder: MadeUp(PlainTokenizer(encoder)))
    with raises(ConfigError, "renderer-differs"):
        open_bridge(encoder, TOOLS)
