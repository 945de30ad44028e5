"""Incremental decoding of an answer's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"
"""End of a text whose last character is incomplete."""


class GrowingText:
    """A text without special tokens, cut before its first stop string (``stopped_by``)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        # Decoded in a window, because a token's text depends on the token before it.
        self._start = self._read = 0
        self._text, self._taken = "", 0
        self._borders = [_borders(string) for string in self._stop]
        self._begun = [0] * len(self._stop)  # how much of each string the text ends with
        self.stopped_by: str | None = None

    def add(self, tokens: Sequence[int]) -> int:
        """Add tokens up to the one that completes a stop string. Return how many were added."""
        for number, token in enumerate(tokens, start=1):
            self._tokens.append(token)
            self._extend(last=False)
            if self.stopped_by is not None:
                return number
        return len(tokens)

    def take(self, *, last: bool = False) -> str:
        """Return new text. Unless ``last``, hold back beginnings of stop strings and characters."""
        if last and self.stopped_by is None:
            self._extend(last=True)
        end = len(self._text)
        if not last and self.stopped_by is None:
            end -= max(self._begun, default=0)
        piece, self._taken = self._text[self._taken : end], max(end, self._taken)
        return piece

    def _extend(self, *, last: bool) -> None:
        read_text = self._decoded(self._tokens[self._start : self._read])
        text = self._decoded(self._tokens[self._start :])
        if len(text) <= len(read_text) or (text.endswith(_UNFINISHED) and not last):
            return
        old_length = len(self._text)
        self._text += text[len(read_text) :]
        self._start, self._read = self._read, len(self._tokens)
        matches = [
            (at, string)
            for string in self._stop
            if (at := self._text.find(string, max(0, old_length - len(string) + 1))) >= 0
        ]
        if matches:
            at, self.stopped_by = min(matches)
            self._text = self._text[:at]
            return
        for i, (string, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            self._begun[i] = _matched(string, borders, self._text[old_length:], self._begun[i])

    def _decoded(self, tokens: Sequence[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return cast(str, self._tokenizer.decode(list(tokens), **options))


def _matched(string: str, borders: Sequence[int], text: str, matched: int = 0) -> int:
    """Return how much of a string's start a text ends with (KMP), if ``matched`` came before."""
    for character in text:
        while matched and string[matched] != character:
            matched = borders[matched - 1]
        matched += string[matched] == character
    return matched


def _borders(string: str) -> list[int]:
    """Return the length of the longest border of each prefix (Knuth, Morris, Pratt)."""
    borders = [0] * len(string)
    for end in range(1, len(string) - 1):
        borders[end] = _matched(string, borders, string[end], borders[end - 1])
    return borders
