"""Errors known by their codes, so that tests leave the wording of messages free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from stretto.errors import StrettoError

E = TypeVar("E", bound=StrettoError)


@contextmanager
def raises(error: type[E], code: str | None, *facts: object) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error with this code, whose message has these facts in it, such as values.

    The code is ``None`` where tests of the module that raises the error pin it.
    """
    with pytest.raises(error) as caught:
        yield caught
    assert code in (None, caught.value.code)
    missing = [fact for fact in facts if str(fact) not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
