"""Transcripts of episodes: turns, calls, answers, rewards, and tokens by their origin."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, TypedDict

from stretto.schedules.episode_metrics import answers, calls, wait_s
from stretto.schedules.rollout import Rollout
from stretto.types import Observation, episode_of

MOST_CHARS = 20_000
"""Most characters of a text in a transcript. A longer one keeps its start and end."""

MOST_DEPTH = 8  # Most depth of plain data in a transcript. Deeper data becomes text.


class Transcript(TypedDict, total=False):
    """An episode's sample, as plain data; empty for a plain response.

    ``episode``
        Its id, which forks of one episode share.
    ``turns``
        In order, each with ``tokens`` that the policy sampled, ``messages`` (the turn's, and those
        that answer it), ``calls`` (``name``, ``arguments``, ``status``, ``seconds``, ``error``,
        ``result``, as far as recorded), ``context`` tokens of the answer, ``wait_s`` seconds until
        it came, and the turn's ``reward``, or ``None``.
    ``pieces``
        The response's ``text`` in pieces, with control tokens, each with its ``tokens``, its
        ``turn`` (from 0), and ``sampled``: whether the policy sampled it, and was trained on it.
    ``ended_by``
        As in :class:`~stretto.types.Observation`.
    """

    episode: int
    turns: Sequence[Mapping[str, Any]]
    pieces: Sequence[Mapping[str, Any]]
    ended_by: str


def transcript(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> Transcript:
    """Return the transcript of a rollout. ``decode`` keeps all tokens, control tokens too."""
    if not (rollout.log or rollout.turns):
        return Transcript()
    count = len(rollout.turns)
    rows = zip_longest(turn_sizes(rollout), answers(rollout)[:count], rollout.turn_rewards[:count])
    turns = [
        {**size, **_told(answer), "reward": None if reward is None else float(reward)}
        for size, answer, reward in rows
    ]
    return Transcript(
        episode=episode_of(rollout.id),
        turns=turns,
        pieces=_pieces(rollout, decode),
        ended_by=rollout.ended_by,
    )


def turn_sizes(rollout: Rollout) -> list[dict[str, Any]]:
    """Return each turn's sampled tokens, its answer's tokens, and the seconds until the answer."""
    sampled, sizes = rollout.sampled, list[dict[str, Any]]()
    start = 0
    for end, answer in zip_longest(rollout.turns, answers(rollout)[: len(rollout.turns)]):
        context_end = end
        for first, last in rollout.context:
            if first == context_end:
                context_end = last
        sizes.append(
            {
                "tokens": int(sampled[start:end].sum()),
                "wait_s": round(wait_s(answer), 6) if answer else 0.0,
                "context": context_end - end,
            }
        )
        start = end
    return sizes


def _told(answer: Observation | None) -> dict[str, Any]:
    if answer is None:
        return {"messages": [], "calls": []}
    tool_calls = list(calls(answer))
    results = [message["content"] for message in answer.messages if message["role"] == "tool"]
    if len(results) == len(tool_calls):
        tool_calls = [{"result": r, **c} for r, c in zip(results, tool_calls, strict=True)]
    return {
        "messages": [plain(message) for message in answer.messages],
        "calls": [plain(call) for call in tool_calls],
    }


def _pieces(
    rollout: Rollout, decode: Callable[[Sequence[int]], str]
) -> Sequence[Mapping[str, Any]]:
    mask = rollout.sampled
    turn_ends = set(rollout.turns)
    changes = {i for a, b in rollout.context for i in (a, b)} | turn_ends | {0, len(rollout)}
    edges = sorted(changes)
    pieces = list[Mapping[str, Any]]()
    turn = 0
    for start, end in pairwise(edges):
        if mask[start] and start and (start in turn_ends or not mask[start - 1]):
            turn = sum(e <= start for e in rollout.turns)
        text = cut(decode(rollout.tokens[start:end].tolist()))
        piece = {"text": text, "tokens": end - start, "turn": turn, "sampled": bool(mask[start])}
        pieces.append(piece)
    return pieces


def cut(text: str) -> str:
    """Cut the middle out of a text that is too long."""
    left_out = len(text) - MOST_CHARS
    if left_out <= 0:
        return text
    half = MOST_CHARS // 2
    return f"{text[:half]} ... {left_out:,} characters left out ... {text[-half:]}"


def plain(value: Any, depth: int = MOST_DEPTH) -> Any:
    """Convert a value to plain JSON data, with long texts cut."""
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Mapping) and depth:
        return {str(key): plain(element, depth - 1) for key, element in value.items()}
    if isinstance(value, list | tuple) and depth:
        return [plain(element, depth - 1) for element in value]
    return cut(str(value))
