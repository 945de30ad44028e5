"""The text of turns and of episodes, as reward functions of every convention get it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scorer_helpers import byte_tokenizer
from stretto.config import TaskConfig
from stretto.config.sections import reward_source
from stretto.scoring.functions import FunctionScorer
from stretto.scoring.response_buffer import response_text
from stretto.types import FinishReason, Message, Prompt, Response

TOKENIZER = byte_tokenizer()
EOS = 1
QUESTION = Message(role="user", content="2 * 21?")
TURNS = ("Let me see: 4.", "", "It is 42.")
ANSWERS = ("\nQ: go. on\nA: ", "\nQ: and. so?\nA: ")
"""Contexts hold the stop string, and are never cut."""


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def episode(*turns: str, finish: FinishReason = FinishReason.STOP, eos: bool = False) -> Response:
    """An episode of these turns, as its environment's role tells of it."""
    tokens, sampled = list[int](), list[bool]()
    for turn, answer in zip(turns, (*ANSWERS, ""), strict=True):
        for text, drawn in ((turn, True), (answer, False)):
            more = ids(text) + [EOS] * (eos and drawn)
            tokens += more
            sampled += [drawn] * len(more)
    said = [Message(role="assistant", content=turn.removesuffix(".")) for turn in turns]
    answers = [Message(role="user", content=c) for c in ("go. on", "and. so?")]
    messages = (said[0], answers[0], said[1], answers[1], said[2])
    return Response(
        id=7,
        group=7,
        prompt=Prompt(
            0, tuple(ids("2 * 21?")), "2 * 21?", (QUESTION,), data={"ground_truth": "42"}
        ),
        tokens=np.array(tokens, np.int32),
        finish=finish,
        sampled=np.array(sampled),
        messages=messages,
    )


def arguments_of(function: Any, response: Response, stop: tuple[str, ...]) -> dict[str, Any]:
    """What a function that returns 0 or a list of 0 is called with."""
    scorer = FunctionScorer(
        reward_source("f"), TaskConfig(), 0, TOKENIZER, stop=stop, function=function
    )
    scorer.admit([response])
    (score,) = scorer.finish([response.id])
    assert score.scalar == 0.0, score.failure
    return SEEN


SEEN: dict[str, Any] = {}


def trl(prompts, completions, completion_ids):  # type: ignore[no-untyped-def]
    SEEN.update(prompts=prompts, completions=completions)
    return [0.0]


def verl(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    SEEN.update(text=solution_str)
    return 0.0


def verl_batched(data_sources, solution_strs, ground_truths, extra_infos):  # type: ignore[no-untyped-def]
    SEEN.update(text=solution_strs[0])
    return [0.0]


def openrlhf(queries, prompts, labels=None):  # type: ignore[no-untyped-def]
    SEEN.update(text=queries[0].removeprefix(prompts[0]))
    return [0.0]


WHOLE = "Let me see: 4\nQ: go. on\nA: \nQ: and. so?\nA: It is 42"


@pytest.mark.parametrize("function", [verl, verl_batched, openrlhf])
@pytest.mark.parametrize("eos", [False, True])
def test_each_turn_is_cut_at_its_own_stop_string(function: Any, eos: bool) -> None:
    """Not the episode at the first one, and no context anywhere; after an end token, too."""
    SEEN.clear()
    response = episode(*TURNS, eos=eos)
    assert arguments_of(function, response, (".", "#"))["text"] == WHOLE


@pytest.mark.parametrize("function", [verl, verl_batched, openrlhf])
def test_without_a_stop_string_nothing_is_cut(function: Any) -> None:
    SEEN.clear()
    uncut = WHOLE.replace("4\n", "4.\n") + "."
    assert arguments_of(function, episode(*TURNS), ())["text"] == uncut


def test_a_last_turn_that_a_limit_cut_is_all_there() -> None:
    SEEN.clear()
    response = episode("4.", "5.", "and so fo", finish=FinishReason.LENGTH)
    got = arguments_of(verl, response, (".",))["text"]
    assert got == "4\nQ: go. on\nA: 5\nQ: and. so?\nA: and so fo"


def test_trls_functions_get_the_messages_of_the_turns() -> None:
    SEEN.clear()
    got = arguments_of(trl, episode(*TURNS), (".",))
    assert got["prompts"] == [[QUESTION]]
    contents = [m["content"] for m in got["completions"][0]]
    assert contents == ["Let me see: 4", "go. on", "", "and. so?", "It is 42"]


def test_a_joint_is_text_between_two_samples() -> None:
    """Where the second of two adjacent turns begins another sample of the episode."""
    tokens = ids("one.two.")
    drawn = np.ones(len(tokens), np.bool_)
    text = response_text(TOKENIZER, tokens, FinishReason.STOP, (".",), drawn, {4: "\nmore.\n"})
    assert text == "one\nmore.\ntwo"


def test_pieces_keep_the_space_that_some_tokenizers_drop_in_front() -> None:
    """As SentencePiece's do of a text's first word."""

    class Words:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return "".join((" a", " b.", " c")[t] for t in tokens).removeprefix(" ")

    words: Any = Words()
    sampled = np.array([True, True, False, True, True])
    got = response_text(words, [0, 1, 2, 0, 1], FinishReason.STOP, (".",), sampled)
    assert got == "a b c a b"
