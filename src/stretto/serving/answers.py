"""Answers as JSON, in OpenAI's and vLLM's forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stretto.tasks.encode import with_parsed_arguments
from stretto.types import FinishReason, Message, TopLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Piece:
    """The part of one answer since the last piece, or the complete answer."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stopped_by: str | None = None
    start: int = 0  # tokens of the answer before
    offset: int = 0  # characters of the answer before

    def add(self, piece: Piece) -> None:
        """Append the next piece of the same answer."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.top_logprobs += piece.top_logprobs
        self.versions += piece.versions
        self.finish, self.stopped_by = piece.finish, piece.stopped_by


class Logprobs:
    """Log-probabilities of tokens, with the tokens' texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def _token(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def chat_logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        """Return OpenAI's form for chats."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._token(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return [
            {**entry(token, logprob), "top_logprobs": [entry(*pair) for pair in top]}
            for token, logprob, top in _places(piece)
        ]

    def text_logprobs(self, piece: Piece) -> dict[str, Any]:
        """Return OpenAI's form for completions."""
        texts = [self._token(token) for token in piece.tokens]
        offsets, at = [], piece.offset
        for text in texts:
            offsets.append(at)
            at += len(text)
        return {
            "tokens": texts,
            "token_logprobs": piece.logprobs,
            "top_logprobs": [
                {
                    self._token(token): logprob
                    for token, logprob in (*top, (sampled, sampled_logprob))
                }
                for sampled, sampled_logprob, top in _places(piece)
            ],
            "text_offset": offsets,
        }


def _places(piece: Piece) -> list[tuple[int, float, TopLogprobs]]:
    tops = piece.top_logprobs or [()] * len(piece.tokens)
    return list(zip(piece.tokens, piece.logprobs, tops, strict=True))


def token_logprobs(piece: Piece) -> list[dict[str, Any]]:
    """Return vLLM's form: the sampled token first among the likeliest."""
    entries = []
    for token, logprob, top in _places(piece):
        sampled_entry = _entry(token, logprob)
        other_entries = [_entry(t, x) for t, x in top if t != token]
        entries.append(
            {**sampled_entry, "top_logprobs": [sampled_entry, *other_entries] if top else []}
        )
    return entries


def _entry(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "token_id": token, "logprob": logprob}


def sent(message: Message, *, streamed: bool = False) -> dict[str, Any]:
    """Return a turn as in an answer, with arguments as JSON. Number its calls if ``streamed``."""
    calls = []
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = dict(call["function"])
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        number = {"index": index} if streamed else {}
        about = {"id": call.get("id") or f"call_{index}", "type": "function"}
        calls.append({**number, **about, "function": function})
    content = message.get("content") or None
    return {
        "content": content if calls else content or "",
        **({"tool_calls": calls} if calls else {}),
    }


def received(message: Mapping[str, Any]) -> Message:
    turn: Any = {**message, "content": message.get("content") or ""}
    return with_parsed_arguments(turn)
