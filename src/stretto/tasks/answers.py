"""Answers: their extraction from a response, and the comparison of mathematical ones."""

from __future__ import annotations

import re
import threading
from typing import Any, Literal

from stretto.errors import TaskError

Extraction = Literal["full", "last_number", "answer_tag"]

TIME_LIMIT_S = 5
"""Time limit for reading an expression, and for comparing two."""

# A minus sign belongs to the number unless it stands right behind an operand, as in "5-3".
# Thousands must be grouped by three, so that the list "1,2,3" ends in 3.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-\u2212])?(?:(?<![\d,.])\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def extract(response: str, how: Extraction) -> str | None:
    """Return the part of ``response`` that is scored; ``None`` when there is no such part.

    ``full`` is all of it without surrounding blanks. ``last_number`` is written plainly: '1,234.'
    becomes '1234'. ``answer_tag`` is what stands in the last ``<answer>...</answer>``.
    """
    if how == "full":
        return response.strip()
    if how == "answer_tag":
        tagged = _ANSWER.findall(response)
        return tagged[-1].strip() if tagged else None
    numbers = _NUMBER.findall(response)
    return numbers[-1].replace(",", "").replace("\u2212", "-") if numbers else None


def same_answer(reference: str, response: str, *, bare: bool) -> bool:
    """Return whether ``response`` gives the answer ``reference``.

    Equal texts are the same answer. If the reference holds no mathematics, no other text is. A
    response that math-verify cannot read or compare is not the same answer.

    Args:
        reference: the right answer and nothing else: a number, an expression, LaTeX or a word.
        bare: all of the response is one expression; otherwise it is searched in the text.

    Raises:
        TimeoutError: reading or comparing took longer than the time limit.
        TaskError: called outside the main thread, where math-verify cannot keep a time limit.
    """
    reference, response = reference.strip(), response.strip()
    if reference == response:
        return True
    if threading.current_thread() is not threading.main_thread():
        raise TaskError(
            "mathematical answers are compared under a time limit that only a process's main "
            "thread can keep; score there, or in a process of its own with FunctionScorer",
            "not-main-thread",
        )
    from math_verify import verify
    from math_verify.errors import TimeoutException

    try:
        gold, answer = _parse(reference, bare=True), _parse(response, bare=bare)
        return bool(verify(gold, answer, timeout_seconds=TIME_LIMIT_S, raise_on_error=True))
    except TimeoutException as error:
        raise TimeoutError(
            f"math-verify could not compare with '{reference}' within {TIME_LIMIT_S} s"
        ) from error
    except Exception:
        return False


def _parse(text: str, *, bare: bool) -> Any:
    from math_verify import parse

    if bare and "$" not in text and "\\boxed" not in text:
        text = f"${text}$"
    return parse(text, parsing_timeout=TIME_LIMIT_S, raise_on_error=True)
