"""A teacher with another tokenizer against one plain pass over the text, summed by spans."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from helpers import llama, told
from raising import raises
from rounding import GRADIENT_TERMS, rounding
from scorer_helpers import begun, other_tokenizer, stream, text_rollout, trained
from stretto.errors import ModelError
from stretto.models.load import named_ends
from stretto.models.tiny import byte_tokenizer
from stretto.schedules.rollout import Rollout
from stretto.scoring.cross_tokenizer import CrossTokenizerScorer, TeacherReader
from stretto.scoring.model_scorers import TokenScorer, reference_scorer
from stretto.testing.contracts import chunk_of
from stretto.types import INSIDE_SPAN, FinishReason, Message, Prompt

TOLERANCE = rounding(GRADIENT_TERMS)
TEMPERATURE = 0.7
PROMPT = "What is the weather in the north?\n"  # of text_rollout
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\\n' + m['content'] | trim + '<sep>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)
TEXTS = (
    "the weather is cold, and the wind isn't",
    " für die Brücke 🙂🙃 und 日本語のテキスト。\n\n  12345",
    "x",
    "👩‍🔬é",
)


@cache
def teacher() -> Any:
    return llama(vocabulary=512)


def scorer_of(
    tokenizer: Any, slots: int = 0, stop: Sequence[str] = (), student: Any = None
) -> TokenScorer:
    student = byte_tokenizer() if student is None else student
    ends = named_ends(teacher().config, tokenizer)
    reader = TeacherReader("teacher", tokenizer, student, stop, ends)
    options: Any = {"scorer": CrossTokenizerScorer, "reader": reader, "slots": slots}
    return reference_scorer(
        teacher(), TEMPERATURE, 100, None, "teacher", say=pytest.fail, **options
    )


def whole(scorer: TokenScorer, made: Sequence[Rollout]) -> list[Any]:
    scorer.admit(told(made))
    return [s.values for s in scorer.finish([r.id for r in made])]


def logprobs(ids: Sequence[int]) -> list[float]:
    """Of all tokens but the first, in one pass."""
    with torch.no_grad():
        logits = teacher()(torch.tensor([list(ids)])).logits[0].double() / TEMPERATURE
    places = torch.arange(len(ids) - 1)
    return torch.log_softmax(logits, -1)[places, list(ids[1:])].tolist()


def naive(r: Rollout, tokenizer: Any, asked: str, end: Sequence[int]) -> list[float]:
    """Sums over spans of bytes, from the text of each first part of the teacher's tokens."""
    has_end = r.finish is FinishReason.STOP
    written = bytes(list(r.tokens[: len(r) - has_end]))
    text = written.decode(errors="ignore" if r.finish is FinishReason.LENGTH else "replace")
    prompt_ids = tokenizer(asked)["input_ids"]
    ids = tokenizer(asked + text)["input_ids"]
    if ids[: len(prompt_ids)] != prompt_ids:
        ids = [*prompt_ids, *tokenizer(text)["input_ids"]]
    numbers = logprobs([*ids, *end])[len(prompt_ids) - 1 :]
    values, before = [INSIDE_SPAN] * len(r), len(tokenizer.decode(prompt_ids))
    start = 0
    for count in range(1, len(ids) - len(prompt_ids) + 1):
        part = tokenizer.decode(ids[: len(prompt_ids) + count])[before:]
        if part and text.startswith(part):
            values[len(part.encode()) - 1] = sum(numbers[start:count])
            start = count
    if has_end:
        values[-1] = sum(numbers[start:])
    return values


def close(got: Sequence[Any], want: Sequence[Any]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["bytes", "words"])
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("chat", [False, True])
def test_streamed_or_whole_it_is_a_plain_pass_summed_by_spans(
    kind: str, finish: FinishReason, chat: bool
) -> None:
    if kind == "words" and chat:
        pytest.skip("its naive decoding drops the template's control tokens' spaces")
    tokenizer = other_tokenizer(kind, TEMPLATE if chat else None)
    made = [text_rollout(i, t, chat=chat, finish=finish) for i, t in enumerate(TEXTS)]
    asked = f"<s>user\n{PROMPT.strip()}<sep>\n<s>assistant\n" if chat else PROMPT
    want = [naive(r, tokenizer, asked, [2] if r.finish is FinishReason.STOP else []) for r in made]
    close(whole(scorer_of(tokenizer), made), want)
    for size in (1, 7, 1000):
        close(stream(scorer_of(tokenizer, slots=len(made)), made, size), want)
    assert any(np.isposinf(w).any() for w in want)


@pytest.mark.parametrize("slots", [0, 2])
def test_with_the_students_own_tokenizer_each_token_is_a_span(slots: int) -> None:
    """Forced to read the text, it gives what a teacher of the same tokens does."""
    tokenizer = trained("bytes")
    made = [text_rollout(i, "", chat=False, finish=FinishReason.STOP) for i in range(2)]
    for r, text in zip(made, ("the weather in the north is cold. " * 5, "x = 5"), strict=True):
        r.prompt = Prompt(1, tuple(tokenizer(PROMPT)["input_ids"]), PROMPT)
        r.tokens = array("i", [*tokenizer(text)["input_ids"], 2])
        r.logprobs, r.versions = array("f", [-1.0] * len(r)), array("i", [0] * len(r))
    want = whole(reference_scorer(teacher(), TEMPERATURE, 100), made)
    close(stream(scorer_of(tokenizer, slots, student=tokenizer), made, 3), want)


def test_a_student_of_words_is_taught_by_a_teacher_of_bytes() -> None:
    """Each token is a span then, and a leading space is part of it."""
    student, tokenizer = trained("words"), byte_tokenizer()
    asked = "the weather in the"
    r = text_rollout(0, "", chat=False, finish=FinishReason.LENGTH)
    r.prompt = Prompt(1, tuple(student(asked)["input_ids"]), asked)
    r.tokens = array("i", student(" north is rather cold")["input_ids"][1:])
    text = " north is rather cold"
    assert student.decode(r.tokens) == text[1:]
    numbers = logprobs([*asked.encode(), *text.encode()])[len(asked) - 1 :]
    want, start = [], 0
    for count in range(1, len(r) + 1):
        end = 1 + len(student.decode(r.tokens[:count]))
        want.append(sum(numbers[start:end]))
        start = end
    close(stream(scorer_of(tokenizer, 1, student=student), [r], 2), [want])


def test_a_stop_string_is_read_and_ends_no_turn_of_the_teacher() -> None:
    tokenizer = other_tokenizer("bytes")
    r = text_rollout(0, "the weather is cold. END", chat=False, finish=FinishReason.LENGTH)
    want = naive(r, tokenizer, PROMPT, [])
    r.finish = FinishReason.STOP
    close(stream(scorer_of(tokenizer, 1, stop=[" END"]), [r], 5), [want])
    assert np.isfinite(want[-1])


def test_a_control_token_is_read_as_its_spelling_and_a_cut_character_not_at_all() -> None:
    tokenizer = other_tokenizer("bytes")
    r = text_rollout(0, "the xweather is cold", chat=False, finish=FinishReason.LENGTH)
    r.tokens[4] = 258
    spelled = byte_tokenizer().decode(list(r.tokens))
    assert spelled != "the weather is cold"
    plain = text_rollout(1, spelled, chat=False, finish=FinishReason.LENGTH)
    (got,), (want,) = (whole(scorer_of(tokenizer), [x]) for x in (r, plain))
    got, want = (values[np.isfinite(values)] for values in (got, want))
    assert got.sum() == pytest.approx(want.sum(), rel=TOLERANCE)
    cut = text_rollout(2, "x🙂", chat=False, finish=FinishReason.LENGTH)
    cut.tokens = cut.tokens[:-1]
    (values,) = whole(scorer_of(tokenizer), [cut])
    assert np.isposinf(values).tolist() == [False, True, True, True]


def test_a_response_without_tokens_has_no_spans() -> None:
    r = text_rollout(0, "", chat=False, finish=FinishReason.LENGTH)
    (values,) = whole(scorer_of(other_tokenizer("bytes")), [r])
    assert values.shape == (0,)


@pytest.mark.parametrize("slots", [0, 3])
def test_a_text_that_the_teacher_cannot_spell_fails_alone(slots: int) -> None:
    tokenizer = other_tokenizer("words")
    tokenizer.unk_token = "<pad>"
    texts = ("the wind", "Ω, the wind in the north is cold", "the north")
    made = [text_rollout(i, t, chat=False, finish=FinishReason.STOP) for i, t in enumerate(texts)]
    scorer = scorer_of(tokenizer, slots)
    scorer.admit(told(map(begun, made)))
    scorer.extend([chunk_of(r, 0, len(r)) for r in made])
    scores = scorer.finish([0, 1, 2])
    assert [s.failure is None for s in scores] == [True, False, True]
    assert "choose another teacher" in str(scores[1].failure)
    assert not len(scores[1].values)
    rest = [r for r in made if r.id != 1]
    close([scores[0].values, scores[2].values], whole(scorer_of(tokenizer), rest))


def test_a_prompt_without_room_or_without_a_template_is_refused() -> None:
    long = Prompt(0, (5,), "the weather " * 999)
    with raises(ModelError, "too-few-positions", "'teacher'"):
        scorer_of(other_tokenizer("bytes")).require_room([long])
    refusing = other_tokenizer("bytes", "{{ raise_exception('no such role') }}")
    chat = Prompt(0, (5,), "x", (Message(role="user", content="x"),))
    with raises(ModelError, "template-refuses", "'teacher'", "no such role"):
        scorer_of(refusing).require_room([chat])
