"""Incremental decoding of an answer's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from stretto.scoring.response_buffer import GrowingPieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GrowingText:
    """A text without special tokens, cut before its first stop string (``stopped_by``)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._pieces = GrowingPieces(self._decoded)
        self._text, self._taken = "", 0
        self.stopped_by: str | None = None

    def add(self, tokens: Sequence[int]) -> int:
        """Add tokens up to the one that completes a stop string. Return how many were added."""
        for number, token in enumerate(tokens, start=1):
            self._extend(self._pieces.piece([token]))
            if self.stopped_by is not None:
                return number
        return len(tokens)

    def take(self, *, last: bool = False) -> str:
        """Return new text. Unless ``last``, hold back beginnings of stop strings and characters."""
        if last and self.stopped_by is None:
            self._extend(self._pieces.piece([], last=True))
        end = len(self._text)
        if not last and self.stopped_by is None:
            end -= max((_begun(string, self._text) for string in self._stop), default=0)
        piece, self._taken = self._text[self._taken : end], max(end, self._taken)
        return piece

    def _extend(self, piece: str) -> None:
        if not piece:
            return
        old_length = len(self._text)
        self._text += piece
        matches = [
            (at, string)
            for string in self._stop
            if (at := self._text.find(string, max(0, old_length - len(string) + 1))) >= 0
        ]
        if matches:
            at, self.stopped_by = min(matches)
            self._text = self._text[:at]

    def _decoded(self, tokens: Sequence[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return cast(str, self._tokenizer.decode(list(tokens), **options))


def _begun(string: str, text: str) -> int:
    """Return how much of a string's start, but not all of it, a text ends with."""
    longest = min(len(string) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
