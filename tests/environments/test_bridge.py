"""What is sampled stays; the bridge adds what the template would have written, token for token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stretto.environments.bridge import Bridge
from stretto.types import Message
from template_helpers import FAMILIES, bridge_of, tokenizer_of

RESULT = Message(role="tool", content="42", name="multiply", tool_call_id="abcdefghi")
MORE = Message(role="user", content="And then?")
ASKED = [Message(role="user", content="What is 6 times 7?")]
CALL = {"name": "multiply", "arguments": {"a": 6, "b": 7}, "id": "abcdefghi"}


def shown(family: str, ids: Sequence[int]) -> str:
    return str(tokenizer_of(family).decode(ids, clean_up_tokenization_spaces=False))


def sampled(family: str, text: str, end: str | None = None) -> list[int]:
    """A turn as a policy samples it: marks of calls are tokens where the family has them."""
    tokenizer = tokenizer_of(family)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [*ids, tokenizer.convert_tokens_to_ids(end or FAMILIES[family].end)]


# -- the context, by hand --------------------------------------------------------------------------

BEHIND_A_CALL = {
    "chatml": "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n",
    "smollm2": "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n",
    "qwen2.5": (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "qwen3": (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "smollm3": "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n",
    "llama3": (
        "<|start_header_id|>tool<|end_header_id|>\n\n42<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "llama3.1": (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "gemma3": (
        "\n<start_of_turn>user\n<tool_response>\n42\n</tool_response><end_of_turn>\n"
        "<start_of_turn>model\n"
    ),
    "mistral": '[TOOL_RESULTS] {"content": 42, "call_id": "abcdefghi"}[/TOOL_RESULTS]',
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_context_behind_a_call(family: str) -> None:
    bridge = bridge_of(family)
    prompt, text = bridge.prompt(ASKED)
    assert shown(family, prompt) == text
    standing = [*prompt, *sampled(family, bridge.written([CALL]))]
    context = bridge.context(standing, [RESULT], prompt=ASKED)
    assert context is not None
    assert shown(family, context) == BEHIND_A_CALL[family]


def test_another_end_token_stays_and_the_templates_own_follows() -> None:
    bridge = bridge_of("qwen2.5")
    prompt, _ = bridge.prompt(ASKED)
    context = bridge.context([*prompt, *sampled("qwen2.5", "42", "<|endoftext|>")], [MORE])
    own = bridge.context([*prompt, *sampled("qwen2.5", "42")], [MORE])
    assert context is not None
    assert own is not None
    end = tokenizer_of("qwen2.5").convert_tokens_to_ids("<|im_end|>")
    assert context == [end, *own]


def test_a_turn_that_a_stop_string_ended_gets_its_end_token() -> None:
    bridge = bridge_of("chatml")
    prompt, _ = bridge.prompt(ASKED)
    standing = [*prompt, *sampled("chatml", "42.")[:-1]]
    context = bridge.context(standing, [MORE])
    assert context is not None
    added = "<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    assert shown("chatml", context) == added


# -- the context, by the template ------------------------------------------------------------------


def conversations(bridge: Bridge) -> list[list[list[Message]]]:
    """Turns of conversations: what answers each turn."""
    again = Message(**{**RESULT, "content": "43"})
    return [
        [[RESULT], [RESULT]],
        [[RESULT, again], [MORE]],
        [[MORE], [RESULT], [MORE]],
        [[MORE], [MORE], [RESULT, again]],
    ]


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_what_stands_and_the_context_are_the_rendering_of_the_whole(
    family: str, number: int, system: bool
) -> None:
    """Where a policy writes its turns as the template does."""
    bridge, tokenizer = bridge_of(family), tokenizer_of(family)
    rules = [Message(role="system", content="Be brief.")] if system else []
    messages = [*rules, *ASKED]
    standing, _ = bridge.prompt(messages)
    one_call_a_turn = family == "llama3.1"
    for answers in conversations(bridge)[number]:
        calls = sum(m["role"] == "tool" for m in answers[: 1 if one_call_a_turn else None])
        text = bridge.written([CALL] * calls) if calls else " 42" if family == "mistral" else "42"
        turn = sampled(family, text)
        standing += turn
        said = bridge.parse(turn, ended=True)
        assert [c.status for c in said.calls] == ["ok"] * calls
        messages += [said.message, *answers]
        message = dict(said.message)
        if family == "mistral":
            message["content"] = said.message["content"].strip()
            for call in message.get("tool_calls", []):
                call["id"] = "abcdefghi"
        messages[-1 - len(answers)] = message  # type: ignore[call-overload]
        context = bridge.context(standing, answers, prompt=ASKED if not system else messages)
        whole, _ = bridge.prompt(messages)
        if context is None:
            assert family == "mistral"
            assert whole[: len(standing)] != standing
            return
        standing += context
        assert shown(family, standing) == shown(family, whole)
        assert standing == whole
    assert tokenizer.chat_template
