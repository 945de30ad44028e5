"""Proposed tokens: what is proposed, and that verifying it changes no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine_helpers import LIMIT, engine, finish, random_prompts, rollouts, take
from helpers import VOCABULARY, llama, told
from stretto.rollout import drafts
from stretto.rollout.base import Row
from stretto.rollout.drafts import PromptLookup
from stretto.rollout.engine import TorchEngine
from stretto.schedules.rollout import Rollout
from stretto.types import Prompt, Sampling


def row(number: int, prompt: Sequence[int], response: Sequence[int], limit: int = 100) -> Row:
    tokens = [*prompt, *response]
    return Row(id=number, prompt=tuple(prompt), tokens=tokens, reported=0, sampling=Sampling(limit))


def naive(one: Row, texts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """What followed each occurrence of the longest suffix, in a text itself or else in others."""
    text, prompt = one.tokens, len(one.prompt)
    for among in ([text], texts):
        for n in range(min(drafts.LONGEST, len(text)), 0, -1):
            found = []
            for other in among:
                for at in range(n, len(other)):
                    if other[at - n : at] == text[-n:]:
                        after = [*other[at : prompt if at < prompt else None]]
                        own = other is text and at >= prompt
                        found.append((after * (most if own else 1))[:most])
            if found:
                return found
    return [[]]


def test_what_followed_the_longest_suffix_is_proposed() -> None:
    lookup = PromptLookup(kept=2)
    #                      1 2 3 -> 9, and 2 3 -> 4
    (got,) = lookup.propose([row(0, [1, 2, 3, 9, 8, 2, 3, 4], [1, 2, 3])], 2)
    assert list(got) == [9, 8]
    (got,) = lookup.propose([row(1, [1, 2, 3, 9, 8, 2, 3, 4], [7, 2, 3])], 2)
    assert list(got) == [4]  # of several, what came last
    assert [list(p) for p in lookup.propose([row(2, [5], [6, 7])], 2)] == [[]]


def test_proposals_are_those_of_a_naive_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        prompt = rng.integers(3, size=rng.integers(1, 9)).tolist()
        group = [row(i, prompt, rng.integers(3, size=6).tolist()) for i in range(3)]
        lookup = PromptLookup(kept=4)
        for _ in range(5):
            for each, got in zip(group, lookup.propose(group, 3), strict=True):
                assert list(got) in naive(each, [r.tokens for r in group], 3)
            for each in group:
                each.tokens += rng.integers(3, size=rng.integers(1, 4)).tolist()


def test_a_proposal_leaves_room_for_the_token_after_it() -> None:
    one = row(0, [1, 2, 3, 4, 5, 6, 1], [2], limit=4)
    assert [len(p) for p in PromptLookup(1).propose([one], 8)] == [2]


def test_earlier_responses_to_a_prompt_are_remembered_up_to_a_number_and_a_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookup = PromptLookup(kept=2)
    for number, response in enumerate(([7, 1], [7, 2], [8, 3])):
        lookup.ended(row(number, [5, 6], response))
    assert [list(p) for p in lookup.propose([row(9, [5, 6], [7])], 1)] == [[2]]
    monkeypatch.setattr(drafts, "REMEMBERED", 5)
    lookup.ended(row(10, [4], [4, 4, 4]))
    assert [list(p) for p in lookup.propose([row(12, [4], [4])], 4)] == [[4, 4, 4, 4]]
    assert [list(p) for p in lookup.propose([row(11, [5, 6], [7])], 1)] == [[]]


def speculating(tokens: int, rows: int = 4) -> dict[str, int]:
    return {"speculative_tokens": tokens, "speculative_rows": rows}


def decoded(model: Any, made: Sequence[Rollout], chunk: int = 5, **options: Any) -> TorchEngine:
    e = engine(model, **options)
    e.admit(told(made))
    finish(e, made, chunk)
    return e


def assert_same(plain: Sequence[Rollout], speculative: Sequence[Rollout]) -> None:
    for a, b in zip(plain, speculative, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.finish is b.finish
        assert torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5)


@pytest.mark.parametrize("stop", [(), ("B",)])
@pytest.mark.parametrize("temperature", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("slots", "rows", "k"), [(0, 7, 1), (0, 3, 4), (2, 8, 8), (0, 1, 3)])
def test_no_token_changes(
    temperature: float, stop: tuple[str, ...], slots: int, rows: int, k: int
) -> None:
    """Rows of several groups, whose ends and limits come anywhere; in float32."""
    torch.manual_seed(0)
    model = llama(vocabulary=VOCABULARY)
    prompts = [p for p in random_prompts([1, 6, 17]) for _ in range(2)]
    options: dict[str, Any] = {"temperature": temperature, "stop": stop, "slots": slots, "end": [1]}
    plain, speculative = rollouts(prompts), rollouts(prompts)
    decoded(model, plain, **options)
    e = decoded(model, speculative, 3, **options, engine_args=speculating(k, rows))
    assert_same(plain, speculative)
    counts = e.speculated
    assert 0 <= counts["accepted"] <= counts["proposed"] <= k * counts["looked_up"]


def test_repeated_text_takes_fewer_steps() -> None:
    """A greedy model repeats itself; each proposal that is accepted saves a step."""
    torch.manual_seed(0)
    model = llama(vocabulary=VOCABULARY)
    tokens, steps = 100, []
    for k in (0, 4):
        e = engine(model, temperature=0, max_new_tokens=tokens, engine_args=speculating(k))
        e.admit(told(rollouts(random_prompts([5]))))
        found = e.decode(tokens)
        assert len(found.chunks[0].tokens) == tokens
        steps.append(found.steps)
    assert steps == [tokens, tokens - e.speculated["accepted"]]
    assert steps[1] < tokens


def test_rows_with_sampling_of_their_own_and_rows_that_are_prefilled_propose_nothing() -> None:
    model = llama(vocabulary=VOCABULARY)
    made = rollouts(random_prompts([5, 90]))
    e = engine(model, temperature=0, prefill_tokens=8, engine_args=speculating(4))
    e.admit(told(made[:1]))
    take(e.decode(1).chunks, {0: made[0]})
    before = e.speculated["looked_up"]
    e.admit(told(made[1:]))
    take(e.decode(3).chunks, {0: made[0]})  # meanwhile the second prompt is read
    assert e.speculated["looked_up"] == before == 1
    finish(e, made)
    assert e.speculated["accepted"] > 0
    own = engine(model, temperature=0, engine_args=speculating(4))
    (other,) = rollouts(random_prompts([5]))
    own.admit([replace(other.response(), sampling=Sampling(LIMIT, 0.5))])
    finish(own, [other])
    assert own.speculated["looked_up"] == 0


def test_the_past_of_a_prompt_serves_its_next_epoch() -> None:
    """Greedy answers to one prompt are equal: all but the first are proposed as a whole."""
    torch.manual_seed(1)
    model = llama(vocabulary=VOCABULARY)
    e = engine(model, temperature=0, engine_args=speculating(LIMIT))
    prompt = Prompt(0, tuple(random_prompts([9])[0]), "")
    steps = []
    for i in range(2):
        made = Rollout(i, prompt, i)
        e.admit(told([made]))
        steps.append(e.decode(LIMIT).steps)
    assert steps[1] < min(steps[0], 4)
