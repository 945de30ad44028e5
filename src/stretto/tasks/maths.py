"""Comparison of mathematical answers, by math-verify."""

from __future__ import annotations

import threading
from typing import Any

from stretto.errors import TaskError

TIME_LIMIT_S = 5
"""Time limit for reading an expression, and for comparing two."""


def same_answer(reference: str, response: str, *, bare: bool) -> bool:
    """Return whether ``response`` gives the answer ``reference``.

    Equal texts are the same answer. If the reference holds no mathematics, no other text is. A
    response that math-verify cannot read or compare is not the same answer.

    Args:
        reference: the right answer and nothing else: a number, an expression, LaTeX or a word.
        response: the text that is scored.
        bare: the response is an answer and nothing else, so that all of it is one expression;
            otherwise the expression is searched in the text.

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
            "thread can keep; score there, or in a process of its own with FunctionScorer"
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
