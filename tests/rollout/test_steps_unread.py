"""Decode steps of which the host reads the tokens of several at once, against reading each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch

from engine_helpers import EagerBackend, engine, finish, random_prompts, rollouts
from helpers import VOCABULARY, llama
from rounding import rounding
from stretto.models.devices import Backend, CudaBackend
from stretto.rollout import engine as engines
from stretto.testing.contracts import episodes, play
from stretto.types import Decoded, Sampling

LIMIT, TURN_LIMIT = 40, 15
ENDS = range(0, VOCABULARY, 16)
"""Tokens that end responses, in different steps."""

PROMPTS = [*random_prompts([1, 3, 9, 20]), *([[8, 1, 2, 33, 4, 5, 60]] * 4)]
EXACT = rounding(4000)
"""Nats between log-probabilities of passes over other numbers of rows."""


@cache
def model() -> Any:
    return llama()


def recorded(e: Any) -> list[Decoded]:
    """The list that all that an engine decodes from now on is added to."""
    calls, decode = list[Decoded](), e.decode

    def noted(*given: Any) -> Decoded:
        calls.append(decode(*given))
        return calls[-1]

    e.decode = noted
    return calls


def told(call: Decoded) -> Any:
    chunks = [(c.rollout_id, c.start, c.tokens.tolist(), c.finish, c.version) for c in call.chunks]
    return call.steps, chunks


def responses(chunk: int, stop_after: int = 0, **options: Any) -> Any:
    """Play responses to their ends, with a new one for each that has finished, up to twelve."""
    e = engine(model(), **{"end": ENDS, "max_new_tokens": LIMIT, "batch": 8, **options})
    calls, made = recorded(e), rollouts([*PROMPTS, *random_prompts([4, 2, 11, 5])])
    e.admit([r.response() for r in made[:8]])
    later = iter(made[8:])
    while not all(r.finish for r in made):
        for c in e.decode(chunk, stop_after).chunks:
            made[c.rollout_id].append(c)
            if c.finish:
                e.admit([r.response() for r in islice(later, 1)])
    return e, calls


def turns(chunk: int) -> Any:
    e = engine(model(), end=range(0, VOCABULARY, 8), max_new_tokens=LIMIT, batch=8)
    calls = recorded(e)
    play(e, episodes(PROMPTS, Sampling(LIMIT, max_turn_tokens=TURN_LIMIT)), chunk)
    return e, calls


def of_their_own(chunk: int) -> Any:
    e = engine(model(), end=ENDS, max_new_tokens=LIMIT, batch=8)
    calls, made = recorded(e), rollouts(PROMPTS)
    own = [Sampling(LIMIT), Sampling(9), Sampling(LIMIT, 0.7), Sampling(LIMIT, stop=("AB",))] * 2
    e.admit([replace(r.response(), sampling=s) for r, s in zip(made, own, strict=True)])
    finish(e, made, chunk)
    return e, calls


WAYS: dict[str, Callable[[int], Any]] = {
    "responses": responses,
    "until three have finished": lambda chunk: responses(chunk, 3),
    "two slots": lambda chunk: responses(chunk, slots=2),
    "prefilled in pieces": lambda chunk: responses(chunk, prefill_tokens=5),
    "greedy": lambda chunk: responses(chunk, temperature=0.0),
    "top-k and top-p": lambda chunk: responses(chunk, top_k=20, top_p=0.9, temperature=1.3),
    "stop strings": lambda chunk: responses(chunk, stop=("AB", "x")),
    "proposed tokens": lambda chunk: responses(
        chunk, temperature=0.3, engine_args={"speculative_tokens": 3}
    ),
    "turns": turns,
    "sampling of a row's own": of_their_own,
}
READS_EACH_STEP = {"stop strings", "proposed tokens", "sampling of a row's own"}


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("way", WAYS)
def test_all_is_as_if_each_step_were_read(
    way: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, chunks, steps, finish reasons and counts are the same, and log-probabilities are as
    near as passes over other numbers of rows are.
    """
    several, counts = engines.decode_several, list[int]()

    def noted(*given: Any) -> Any:
        counts.append(given[-1])
        return several(*given)

    monkeypatch.setattr(engines, "decode_several", noted)
    if graphs:
        backend = EagerBackend()
        monkeypatch.setattr("stretto.rollout.steps.backend_of", lambda device: backend)
    for chunk in (3, 100):
        found = []
        for unread in (1, 4):
            monkeypatch.setattr(Backend, "steps_unread", unread)
            counts.clear()
            found.append(WAYS[way](chunk))
            assert max(counts, default=1) == (1 if way in READS_EACH_STEP else min(unread, chunk))
        (first, expected), (e, calls) = found
        assert [told(call) for call in calls] == [told(call) for call in expected]
        for ours, theirs in zip(calls, expected, strict=True):
            for a, b in zip(ours.chunks, theirs.chunks, strict=True):
                assert a.logprobs == pytest.approx(b.logprobs, rel=EXACT, abs=EXACT)
        for name in ("context_tokens", "prefilled_tokens", "graphed_steps", "speculated"):
            assert getattr(e, name) == getattr(first, name), name


def test_without_ends_the_forward_passes_are_the_very_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for unread in (1, 4):
        monkeypatch.setattr(Backend, "steps_unread", unread)
        _, calls = responses(100, end=())
        found.append([c.logprobs.tolist() for call in calls for c in call.chunks])
    assert found[0] == found[1]


def test_a_gpu_waits_for_the_host_in_one_step_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "steps_unread", CudaBackend.steps_unread)
    reads, tolist = list[torch.dtype](), torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        reads.append(tensor.dtype)
        return tolist(tensor)

    e, made = engine(model(), max_new_tokens=32, batch=8), rollouts(PROMPTS)
    e.admit([r.response() for r in made])
    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    assert e.decode(32).steps == 32
    assert reads == [torch.int64, torch.float32] * (32 // 8)
