"""Stop strings: responses that end where their text does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """A check whether the newest token completed one of several strings."""

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        # Every token stands for at least one byte of text, so a string that was just completed
        # lies within this many tokens; a few more keep multi-byte characters whole.
        self._window = max(len(s.encode()) for s in strings) + 4

    def ends(self, tokens: Sequence[int], start: int = 0) -> bool:
        """Return whether the response, ``tokens[start:]``, holds a stop string near its end."""
        tail = tokens[max(start, len(tokens) - self._window) :]
        text = self._tokenizer.decode(list(tail), skip_special_tokens=False)
        return any(s in text for s in self._strings)
