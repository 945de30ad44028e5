"""Buffers responses until they are scored, and decodes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np

from stretto.errors import LifecycleError
from stretto.types import CONTEXT, BoolArray, Chunk, FinishReason, IntArray, Response, sampled_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


INCOMPLETE = "\ufffd"
"""End of a text whose last character is incomplete."""
WINDOW = 4
"""Tokens before a piece of text that are decoded with it."""


class ResponseScorer:
    """Base of scorers. Buffers responses, which grow by chunks, until they are scored."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._responses: dict[int, Response] = {}
        self._buffers: dict[int, IntArray] = {}  # tokens, with spare capacity

    @property
    def rollout_ids(self) -> list[int]:
        return [*self._responses]

    def admit(self, responses: Sequence[Response]) -> None:
        for r in responses:
            self._responses[r.id], self._buffers[r.id] = r, r.tokens

    def extend(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            response = self._responses.get(chunk.rollout_id)
            if response is None or response.finish or chunk.start != len(response):
                raise LifecycleError(
                    f"scorer '{self.name}' cannot take tokens {chunk.start} and on of rollout "
                    f"{chunk.rollout_id}: it was not admitted, has ended, or has a gap there",
                    "chunk-not-next",
                )
            buffer, end = self._buffers[response.id], len(response) + len(chunk.tokens)
            if end >= len(buffer):  # the first buffer is the response's own
                buffer = self._buffers[response.id] = np.resize(buffer, 2 * end)
            buffer[len(response) : end] = chunk.tokens
            mixed = response.sampled is not None or chunk.sampled is not None
            self._responses[response.id] = replace(
                response,
                tokens=buffer[:end],
                version=response.version if chunk.version == CONTEXT else chunk.version,
                finish=None if chunk.finish is FinishReason.TURN else chunk.finish,
                sampled=np.concatenate([sampled_of(response), sampled_of(chunk)])
                if mixed
                else None,
            )

    def release(self, rollout_ids: Sequence[int]) -> None:
        for rollout_id in rollout_ids:
            self._responses.pop(rollout_id, None)
            self._buffers.pop(rollout_id, None)

    def _take(self, rollout_ids: Sequence[int]) -> list[Response]:
        """Return finished responses and drop them. If one is not finished, raise and drop none."""
        for rollout_id in rollout_ids:
            response = self._responses.get(rollout_id)
            if response is None or response.finish is None:
                raise LifecycleError(
                    f"scorer '{self.name}' cannot score rollout {rollout_id}: it was not admitted, "
                    "or its last chunk has not come",
                    "response-not-ended",
                )
        responses = [self._responses[rollout_id] for rollout_id in rollout_ids]
        ResponseScorer.release(self, rollout_ids)
        return responses


class GrowingPieces:
    """Decodes tokens as they arrive, in a window, because a text depends on the token before it.

    ``tokens`` are already known. Their text is not returned.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], tokens: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(tokens)
        self._read = len(self._tokens)

    def piece(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Return the text of further tokens. Unless ``last``, an incomplete character waits."""
        self._tokens += tokens
        read_text = self._decode(self._tokens[: self._read])
        text = self._decode(self._tokens)
        if len(text) <= len(read_text) or (text.endswith(INCOMPLETE) and not last):
            return ""
        del self._tokens[: self._read]
        self._read = len(self._tokens)
        return text[len(read_text) :]


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Cut the text of a turn before its first stop string."""
    places = [at for at in map(text.find, stop) if at >= 0]
    return text[: min(places)] if places else text


def response_text(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    finish: FinishReason | None,
    stop: Sequence[str] = (),
    sampled: BoolArray | None = None,
    joints: Mapping[int, str] | None = None,
) -> str:
    """Decode a response without special tokens, each turn up to its stop string.

    ``sampled`` and ``joints`` are as in :class:`~stretto.types.Response`. Context is not cut.
    """
    ids = list(tokens)

    def decoded(start: int, end: int) -> str:
        # Some tokenizers drop a leading space, so decode some tokens before it, too.
        first = max(0, start - WINDOW)
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        before = tokenizer.decode(ids[first:start], **options) if start else ""
        return cast(str, tokenizer.decode(ids[first:end], **options))[len(before) :]

    joints = joints or {}
    if sampled is None or (sampled.all() and not joints):
        text = decoded(0, len(ids))
        return before_stop(text, stop) if finish is FinishReason.STOP else text
    if not (stop or joints):
        return decoded(0, len(ids))
    edges = {0, len(ids), *joints, *(np.flatnonzero(np.diff(sampled)) + 1).tolist()}
    text = ""
    for start, end in pairwise(sorted(edges)):
        piece = decoded(start, end)
        text += joints.get(start, "") + (before_stop(piece, stop) if sampled[start] else piece)
    return text


def spelt_out(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return cast(str, tokenizer.decode(list(tokens), **options))


STREAMED_SHARE = 16
"""A streaming scorer's call is worth its fixed cost from 1 / 16 of a forward pass on, or 64 tokens
on a CPU (docs/schedules.md). A constant, so that runs are reproducible."""


def worthwhile_tokens(token_budget: int, *, streaming: bool) -> int:
    """Return the tokens from which a call is worth its fixed cost: half a forward pass.

    If a scorer streams, they are fewer, because tokens not read during decoding wait for the end.
    """
    return token_budget // (STREAMED_SHARE if streaming else 2)
