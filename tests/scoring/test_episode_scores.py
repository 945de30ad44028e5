"""Model scorers on responses with context between turns: streamed, whole, and as messages."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from helpers import (
    CHANNEL,
    VOCABULARY,
    critic_of,
    left_padded_logprobs,
    llama,
    naive_values,
    ticket,
    told,
)
from raising import raises
from rounding import GRADIENT_TERMS, rounding
from scorer_helpers import begun, byte_rollout, byte_tokenizer, plain_score, reward_model
from stretto.errors import ModelError
from stretto.models.weights import fingerprint
from stretto.schedules.rollout import Rollout
from stretto.scoring.base_scorer import ModelScorer
from stretto.scoring.model_scorers import RewardModelScorer, critic_scorer, reference_scorer
from stretto.types import CONTEXT, Chunk, FinishReason, Message, Observation, Prompt

TOLERANCE = rounding(GRADIENT_TERMS)
SPANS = [[(2, 5)], [(1, 2), (6, 9)], [(0, 3)], [(4, 6)], [], [(3, 4), (7, 8)]]
SHAPES = [(4, 9), (4, 12), (7, 5), (3, 6), (5, 4), (1, 11)]
"""Prompt and response lengths; the third response begins with context, the fourth ends with it."""


def episodes() -> list[Rollout]:
    rng = np.random.default_rng(3)
    made = []
    for i, (p, length) in enumerate(SHAPES):
        prompt = tuple(int(t) for t in np.random.default_rng(p).integers(3, VOCABULARY, size=p))
        r = Rollout(i, Prompt(p, prompt, ""), p)
        r.tokens = array("i", rng.integers(3, VOCABULARY, size=length).tolist())
        r.context = SPANS[i]
        r.logprobs = array("f", np.where(r.sampled, -1.0, 0.0).tolist())
        r.versions = array("i", np.where(r.sampled, 0, CONTEXT).tolist())
        r.finish = FinishReason.STOP
        made.append(r)
    return made


def chunks_of(r: Rollout, size: int) -> Iterator[Chunk]:
    """The response as a schedule tells it: turns and context apart, at its end a bare finish."""
    drawn, start = r.sampled, 0
    while start < len(r):
        stop = start + 1
        while stop < min(len(r), start + size) and drawn[stop] == drawn[start]:
            stop += 1
        tokens = np.array(r.tokens[start:stop], np.int32)
        ends_turn = drawn[start] and stop < len(r) and not drawn[stop]
        yield Chunk(
            r.id,
            start,
            tokens,
            np.zeros(stop - start, np.float32),
            0 if drawn[start] else CONTEXT,
            FinishReason.TURN if ends_turn else None,
            None if drawn[start] else np.zeros(stop - start, np.bool_),
        )
        start = stop
    yield Chunk(r.id, len(r), np.empty(0, np.int32), np.empty(0, np.float32), 0, FinishReason.STOP)


def streamed(scorer: ModelScorer, made: list[Rollout], size: int) -> list[Any]:
    """Scores of rollouts that grow in turn, one chunk each."""
    scorer.admit(told([begun(r) for r in made]))
    growing = [chunks_of(r, size) for r in made]
    while growing:
        found = [(g, next(g, None)) for g in growing]
        scorer.extend([chunk for _, chunk in found if chunk])
        growing = [g for g, chunk in found if chunk]
    return [s.values for s in scorer.finish([r.id for r in made])]


def assert_same(got: list[Any], want: list[Any]) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("slots", [0, 2, 6])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_scores_are_of_what_the_policy_drew_behind_all_that_stands(size: int, slots: int) -> None:
    """Streamed in part, streamed or whole: the numbers of plain passes over prompt and response."""
    actor, made = llama(), episodes()
    critic = critic_of(actor)
    options: dict[str, Any] = {"slots": slots, "say": lambda _: None}
    drawn = [r.sampled for r in made]
    got = streamed(reference_scorer(actor, 0.7, 30, **options), made, size)
    logprobs = left_padded_logprobs(actor, made, 0.7)
    assert_same(got, [x.numpy()[d] for x, d in zip(logprobs, drawn, strict=True)])
    got = streamed(critic_scorer(critic, 30, **options), made, size)
    values = [naive_values(critic, r) for r in made]
    assert_same(got, [x.numpy()[d] for x, d in zip(values, drawn, strict=True)])
    tokenizer = byte_tokenizer()
    judge = RewardModelScorer("m", critic, tokenizer, tokenizer, 30, **options)
    got = streamed(judge, made, size)
    rows = [[*r.prompt.tokens, *r.tokens] for r in made]
    assert_same(got, [np.array([plain_score(critic, row)]) for row in rows])


def test_all_that_stands_is_read_while_a_turn_waits() -> None:
    """What is left when the world answers is the answer alone."""
    r = episodes()[0]
    scorer = reference_scorer(llama(), 1.0, 1000, slots=1)
    scorer.admit(told([begun(r)]))
    first, context, *rest = chunks_of(r, 100)
    scorer.extend([first])
    read = scorer.read_tokens
    assert read == len(r.prompt.tokens) + len(first.tokens) - 1
    scorer.extend([context])
    assert scorer.read_tokens == read + len(context.tokens)
    scorer.extend(rest)
    assert scorer.read_tokens == len(r.prompt.tokens) + len(r) - 1
    (score,) = scorer.finish([r.id])
    assert len(score.values) == r.sampled_tokens


@torch.no_grad()
def test_the_critic_reads_an_episode_again_with_newer_weights() -> None:
    made = episodes()[:2]
    critic = critic_of(llama())
    scorer = critic_scorer(critic, 100, slots=2, channel=CHANNEL)
    scorer.admit(told([begun(r) for r in made]))
    growing = [list(chunks_of(r, 2)) for r in made]
    scorer.extend([chunk for chunks in growing for chunk in chunks[:3]])
    weights = {n: p + 0.05 for n, p in critic.named_parameters()}
    scorer.load(ticket(1, fingerprint(weights.items()), weights))
    scorer.extend([chunk for chunks in growing for chunk in chunks[3:]])
    got = [s.values for s in scorer.finish([0, 1])]
    assert_same(got, [naive_values(critic, r).numpy()[r.sampled] for r in made])


# -- a reward model with a tokenizer of its own --------------------------------------------------

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] + '<sep>' }}{% endfor %}"


def talk(*turns: Message, finish: FinishReason = FinishReason.STOP) -> Rollout:
    """An episode whose log says these turns, whatever its tokens are."""
    r = byte_rollout(1, "what is 3 * 4?", "garbage of the actor's template")
    r.context, r.finish = [(2, 5)], finish
    nothing = np.empty(0, np.int32)
    r.log = [Observation(1, n, nothing, messages=(turn,)) for n, turn in enumerate(turns)]
    return r


def scorer_of(template: str | None, **options: Any) -> tuple[RewardModelScorer, Any]:
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<sep>"]})
    model = reward_model(vocabulary=300)
    given: dict[str, Any] = {"episodes": True, "say": lambda _: None, **options}
    actor_tokenizer = byte_tokenizer()
    actor_tokenizer.add_tokens(["actor"])
    return RewardModelScorer("model:x", model, tokenizer, actor_tokenizer, 60, **given), tokenizer


CALL = Message(role="assistant", content="mul", tool_calls=[{"name": "mul"}])
ANSWER = Message(role="tool", content="12</s>")
SAID = Message(role="assistant", content="It is 12.")


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_it_reads_an_episode_as_messages(template: str | None) -> None:
    """In its own template; without one, with empty lines between. Controls in texts stay text."""
    scorer, tokenizer = scorer_of(template)
    r = talk(CALL, ANSWER, SAID)
    ids = scorer._tokens(*told([r]))
    assert ids[-1] == tokenizer.eos_token_id
    between = "[user]what is 3 * 4?<sep>[assistant]mul<sep>[tool]12</s><sep>[assistant]It is 12."
    if template is None:
        between = "what is 3 * 4?\n\nmul\n\n12</s>\n\nIt is 12."
    shown = tokenizer.decode(ids[:-1]).removeprefix("<s>").removesuffix("<sep>")
    assert shown == between
    assert ids.count(tokenizer.eos_token_id) == 1


def test_an_episode_that_its_environment_ended_is_read_to_its_last_message() -> None:
    scorer, tokenizer = scorer_of(TEMPLATE)
    ids = scorer._tokens(*told([talk(CALL, ANSWER)]))
    assert tokenizer.decode(ids).endswith("[tool]12</s><sep>")
    (score,) = finished(scorer, talk(CALL, ANSWER))
    assert score.scalar == pytest.approx(plain_score(scorer.model, ids), rel=1e-4)


def test_it_does_not_stream_episodes_and_says_so() -> None:
    said: list[str] = []
    scorer, _ = scorer_of(TEMPLATE, slots=4, say=said.append)
    assert not scorer.info.streams
    assert "tokenizer of its own" in said[0]
    assert scorer_of(TEMPLATE, slots=4, episodes=False)[0].info.streams
    same = RewardModelScorer(
        "m", reward_model(), byte_tokenizer(), byte_tokenizer(), 60, episodes=True, slots=2
    )
    assert same.info.streams


def test_a_template_without_tools_refuses_them_in_words() -> None:
    strict = "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}"
    scorer, _ = scorer_of(strict + "{% endif %}{{ m['content'] }}{% endfor %}")
    with raises(ModelError, "template-refuses", "model:x", "no tools", "knows tools"):
        scorer._tokens(*told([talk(CALL, ANSWER, SAID)]))


def finished(scorer: ModelScorer, r: Rollout) -> Any:
    scorer.admit(told([r]))
    return scorer.finish([r.id])
