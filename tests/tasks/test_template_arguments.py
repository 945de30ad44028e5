"""Arguments of the chat template, from settings and rows; texts that bring a template's marks."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

import stretto
from raising import raises
from stretto.config import DemonstrationsConfig, TaskConfig, recipes
from stretto.config.sections import ARGUMENTS, RESERVED_ARGUMENTS
from stretto.environments.bridge import Bridge
from stretto.environments.sessions import Bridges, EpisodeLimits, Sessions
from stretto.environments.templates import TemplateShape
from stretto.errors import ConfigError, TaskError
from stretto.models.tiny import byte_tokenizer, make_tiny
from stretto.tasks import TaskRow
from stretto.tasks.encode import Encoder
from stretto.tasks.messages import arguments_in
from stretto.tasks.prompts import refuse_templated, render
from stretto.tasks.responses import PromptLayout
from stretto.tasks.supervised_rows import Demonstration, example_of
from stretto.types import Message, Prompt, Response

THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""A template with the argument ``thinking``, false unless given."""
ASKED = [{"role": "user", "content": "2+2?"}]
OPEN = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
SHUT = OPEN + "<think>\n\n</think>\n\n"


def tokenizer_of(template: str = THINKS) -> Any:
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = template
    return tokenizer


def row(**data: Any) -> TaskRow:
    return TaskRow((Message(role="user", content="2+2?"),), data)


@pytest.mark.parametrize(
    ("own", "rows", "text"),
    [
        ({}, {}, SHUT),
        ({"thinking": True}, {}, OPEN),
        ({"thinking": True}, {ARGUMENTS: {"thinking": False}}, SHUT),
        ({}, {ARGUMENTS: {"thinking": True, "padded": None}}, OPEN),
        ({}, {ARGUMENTS: '{"thinking": true}'}, OPEN),
        ({"thinking": True}, {ARGUMENTS: None}, OPEN),
    ],
)
def test_a_rows_arguments_win_over_those_of_the_settings(
    own: dict[str, Any], rows: dict[str, Any], text: str
) -> None:
    tokenizer = tokenizer_of()
    prompt = render(row(**rows), TaskConfig(template_arguments=own), tokenizer)
    assert prompt.text == text
    assert list(prompt.tokens) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_demonstrations_are_read_with_the_arguments_too() -> None:
    tokenizer = tokenizer_of()
    ends = frozenset({tokenizer.eos_token_id})
    said = Demonstration("2+2?", "4", 0)
    for own, begun in (({}, SHUT), ({"thinking": True}, OPEN)):
        layout = PromptLayout(tokenizer, ends, DemonstrationsConfig(template_arguments=own))
        example = example_of(said, layout)
        assert tokenizer.decode(example.tokens) == begun + "4<|im_end|>"
        assert tokenizer.decode(example.prompt) == begun


def test_a_demonstrations_own_arguments_win() -> None:
    tokenizer = tokenizer_of()
    layout = PromptLayout(tokenizer, frozenset({tokenizer.eos_token_id}), DemonstrationsConfig())
    prompt = layout.prompt("2+2?", data={ARGUMENTS: {"thinking": True}})
    turns = (Message(role="assistant", content="4"),)
    for completion in ("4", turns):
        example = layout.example(prompt, completion)
        assert tokenizer.decode(example.tokens) == OPEN + "4<|im_end|>"


def test_the_way_from_turn_to_turn_is_read_with_the_arguments() -> None:
    """Of the settings, and of a row."""
    tokenizer = tokenizer_of()
    more = [Message(role="user", content="And 3+3?")]
    behind = "<|im_end|>\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n"
    think = "<think>\n\n</think>\n\n"
    thinking = {"thinking": True}
    for bridge, added in (
        (Bridge(Encoder(tokenizer)), behind + think),
        (Bridge(Encoder(tokenizer, thinking)), behind),
        (Bridge(Encoder(tokenizer)).of(thinking), behind),
        (Bridge(Encoder(tokenizer, thinking)).of({"thinking": False}), behind + think),
    ):
        prompt, _ = bridge.prompt([Message(role="user", content="2+2?")])
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        context = bridge.context([*prompt, *b"4", end], more)
        assert context is not None
        assert "<|im_end|>" + tokenizer.decode(context) == added
    bridge = Bridge(Encoder(tokenizer))
    assert bridge.of({}) is bridge
    assert bridge.of(thinking) is bridge.of(dict(thinking))


def test_arguments_that_a_template_cannot_go_on_with_are_refused_with_the_row() -> None:
    template = "{% if broken %}{{ raise_exception('no') }}{% endif %}" + THINKS
    bridge = Bridge(Encoder(tokenizer_of(template)))
    with raises(TaskError, "template-refuses", "broken"):
        bridge.of({"broken": True})


@pytest.mark.parametrize("name", ["tools", "messages", "add_generation_prompt", "tokenize"])
def test_names_that_the_template_has_are_refused(name: str) -> None:
    for section in ("template_arguments", ARGUMENTS):
        with raises(ConfigError, "template-argument-reserved", name):
            recipes.build({"task": {section: {name: True}}}, "x")
    with raises(TaskError, "template-argument-reserved", name):
        arguments_in({ARGUMENTS: {name: True}})


def test_every_parameter_of_rendering_is_refused_but_for_documents() -> None:
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert own.keys() - {"documents", "kwargs"} <= RESERVED_ARGUMENTS
    assert tokenizer_of().special_tokens_map.keys() <= RESERVED_ARGUMENTS


def test_arguments_that_are_no_object_are_refused() -> None:
    for cell in ([1], "thinking", 3, '["a"]'):
        with raises(TaskError, "template-arguments-no-object"):
            arguments_in({ARGUMENTS: cell})


def test_a_setting_has_one_value_under_either_name() -> None:
    config = recipes.build({"task": {ARGUMENTS: {"thinking": False}}}, "x")
    assert config.task.template_arguments == {"thinking": False}
    with raises(ConfigError, "extra_forbidden", "task.template_arguments"):
        recipes.build({"task": {"apply_chat_template_kwargs": {}}}, "x")


def test_a_text_in_arguments_spells_no_control_token() -> None:
    tokenizer = tokenizer_of("{{ rule }}" + THINKS)
    spelled = {"rule": "<|im_end|>"}
    prompt = render(row(**{ARGUMENTS: spelled}), TaskConfig(), tokenizer)
    assert list(prompt.tokens[: len("<|im_end|>")]) == list(b"<|im_end|>")
    assert prompt.text == "<|im_end|>" + SHUT


@pytest.mark.parametrize(
    "template",
    [
        THINKS,
        "{%- set thinking = thinking if thinking is defined else false %}" + THINKS,
        "{% macro last() %}{{ thinking }}{% endmacro %}{{ last() }}",
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{% break %}{% endif %}{% endfor %}{{ thinking }}",
    ],
)
def test_arguments_that_the_template_never_reads_are_noted(template: str) -> None:
    encoder = Encoder(tokenizer_of(template), {"thinking": True, "thinks": True})
    encoder.chat([Message(role="user", content="?")], tools=None, add_generation_prompt=True)
    assert encoder.unread == {"thinks"}


def test_an_end_token_behind_texts_ends_no_prompt() -> None:
    tokenizer = byte_tokenizer()
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    plain = TaskConfig(chat="off")
    for single, kept in (
        ("<bos> $A <eos>", [begin]),
        ("$A <eos>", []),
        ("<bos> $A", [begin]),
        ("<bos> <bos> $A <eos> <pad>", [begin, begin]),
    ):
        names = [(t, tokenizer.convert_tokens_to_ids(t)) for t in ("<bos>", "<eos>", "<pad>")]
        processor = TemplateProcessing(single=single, special_tokens=names)
        tokenizer.backend_tokenizer.post_processor = processor
        for text in ("2+2=", "aa", "a <eos>", ""):
            ids = Encoder(tokenizer).ids(Encoder(tokenizer).escape(text), special=True)
            assert ids == [*kept, *text.encode()]
            if text:
                assert list(render(TaskRow(text), plain, tokenizer).tokens) == ids
        layout = PromptLayout(tokenizer, frozenset({end}), DemonstrationsConfig())
        example = example_of(Demonstration("2+2=", "4", 0), layout)
        assert list(example.tokens) == [*kept, *b"2+2=4", end]


def test_a_program_reads_with_the_arguments_of_the_run_and_of_its_row() -> None:
    """Those of its requests have no effect, which is said once."""
    said: list[str] = []
    encoder = Encoder(tokenizer_of(), {"thinking": True, "b": 2})
    bridges = Bridges(encoder, frozenset())
    sessions = Sessions(bridges, encoder, EpisodeLimits(400, 400), said.append)
    turns = [Message(role="user", content="2+2?")]
    for own, text in (({}, OPEN), ({"thinking": False}, SHUT)):
        prompt = Prompt(0, (65,), "A", data={ARGUMENTS: own})
        session = sessions.open(Response(0, 0, prompt, np.empty(0, np.int32)))
        assert session.arguments_of({"b": 2, **own}) == own
        assert not said
        ids = encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert list(session.prompt(turns)) == ids
    assert session.arguments_of({"thinking": True}) == {"thinking": False}
    assert session.arguments_of({"other": 1}) == {"thinking": False}
    assert len(said) == 1
    assert "without effect" in said[0]


def texts(*prompts: str) -> list[TaskRow]:
    return [TaskRow(prompt) for prompt in prompts]


def test_templated_texts_are_refused_if_all_are() -> None:
    encoder = Encoder(tokenizer_of())
    with raises(TaskError, "prompts-templated", "<|im_end|>, <|im_start|>"):
        refuse_templated(texts(SHUT, OPEN), encoder)
    with raises(TaskError, "prompts-templated"):
        refuse_templated(texts("<|im_start|>user\n?"), encoder)
    refuse_templated(texts(SHUT, "What is <|im_start|"), encoder)
    refuse_templated([], encoder)
    refuse_templated([row()], encoder)
    spelled = {"role": "user", "content": SHUT}
    refuse_templated([TaskRow((Message(**spelled),))], encoder)  # type: ignore[typeddict-item]
    refuse_templated([TaskRow(OPEN, tokens=(1, 2))], encoder)
    refuse_templated(texts("<eos>"), Encoder(byte_tokenizer()))  # without a template


def run(tmp_path: Path, prompts: list[Any], **settings: Any) -> list[dict[str, Any]]:
    """Train for a step; its samples."""
    make_tiny(tmp_path / "model", chat=True)
    (tmp_path / "model/chat_template.jinja").write_text(THINKS)
    stretto.train(
        stretto.Config(steps=1),
        model=str(tmp_path / "model"),
        dataset=prompts,
        reward=lambda completions, **_: [1.0] * len(completions),
        algorithm={"name": "grpo", "kl_coef": 0.0},
        rollout={"batch": 2, "samples_per_prompt": 2, "max_new_tokens": 2},
        observe={"progress": "plain", "checkpoint_minutes": 0, "samples": 8},
        out=str(tmp_path),
        threads=1,
        **settings,
    )
    lines = (tmp_path / "run-001/samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_training_reads_the_arguments_and_reports_those_without_effect(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = {"thinking": True, "thinks": 1}
    (sample, *_) = run(tmp_path, [{"prompt": ASKED}], task__template_arguments=own)
    assert sample["prompt"] == OPEN
    told = [line for line in capfd.readouterr().out.splitlines() if "never reads" in line]
    assert len(told) == 1
    assert "'thinks'" in told[0]
    assert "'thinking'" not in told[0]


@pytest.mark.parametrize("chat", ["auto", "off"])
def test_training_refuses_templated_texts(tmp_path: Path, chat: str) -> None:
    with raises(TaskError, "prompts-templated", "lists of messages"):
        run(tmp_path, [{"prompt": OPEN}, {"prompt": SHUT}], task__chat=chat)


def test_the_ends_of_turns_are_read_with_the_arguments() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ '<eos>' if short else '<|im_end|>' }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = tokenizer_of(template)
    for own, end in (({}, "<|im_end|>"), ({"short": True}, "<eos>")):
        shape = TemplateShape(Encoder(tokenizer, own), reads_calls=False)
        assert shape.ends == {tokenizer.convert_tokens_to_ids(end)}
