"""Proposed tokens: what is proposed, and that verifying it changes no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_helpers import LIMIT, EagerBackend, engine, finish, random_prompts, rollouts, take
from helpers import VOCABULARY, llama, told
from raising import raises
from run_helpers import settings
from stretto import runs
from stretto.errors import ConfigError
from stretto.models.tiny import make_tiny
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.rollout import drafts
from stretto.rollout.base import Row
from stretto.rollout.drafts import DraftModel, PromptLookup, ProposalLength
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


def gain(rate: float, k: int, cost: float) -> float:
    """Leviathan et al. 2023, theorem 3.8, for a model that costs ``cost`` a proposed token."""
    return (1 - rate ** (k + 1)) / ((1 - rate) * (k * cost + 1))


@pytest.mark.parametrize("cost", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("rejected_every", [1, 2, 3, 10])
def test_as_many_are_proposed_as_pay_by_what_was_accepted(cost: float, rejected_every: int) -> None:
    length = ProposalLength(8, cost)
    accepted, verified = 1.0, 2.0
    for i in range(200):
        hit = i % rejected_every > 0
        length.verified(int(hit), rejected=not hit)
        accepted, verified = accepted * (31 / 32) + hit, verified * (31 / 32) + 1
    rate = accepted / verified
    best = max(range(9), key=lambda k: gain(rate, k, cost + 3 * drafts.TOKEN_COST))
    found = [length.next(rows=3) for _ in range(40)]
    if best:
        assert found == [best] * 40
    else:  # a token is tried now and then
        assert found == ([0] * 16 + [1]) * 2 + [0] * 6


def test_nothing_rejected_is_proposed_to_the_full() -> None:
    length = ProposalLength(4, 0.0)
    assert length.next(rows=4) == 2  # half are expected to be accepted, before anything is known
    length.verified(200, rejected=False)
    assert length.next(rows=4) == 4


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


@pytest.fixture
def always_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as may be are proposed, whether that pays or not."""
    monkeypatch.setattr(ProposalLength, "next", lambda self, rows: self._most)


@pytest.mark.usefixtures("always_most")
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
    assert 0 <= counts["accepted"] <= counts["proposed"] <= k * counts["eligible"]


@torch.inference_mode()
def likeliest(model: Any, tokens: Sequence[int], most: int) -> list[int]:
    """What a model would go on with, by a pass over the whole text for each token."""
    known, text = model.config.vocab_size - 1, [*tokens]
    for _ in range(most):
        logits = model(input_ids=torch.tensor([text]).clamp_max(known), use_cache=False).logits
        text.append(min(int(logits[0, -1].argmax()), VOCABULARY - 1))
    return text[len(tokens) :]


@pytest.mark.usefixtures("always_most")
@pytest.mark.parametrize("vocabulary", [VOCABULARY, VOCABULARY - 9, VOCABULARY + 9])
@pytest.mark.parametrize("temperature", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("slots", "rows", "k"), [(0, 7, 1), (3, 3, 4), (2, 8, 8), (1, 1, 3)])
def test_a_smaller_model_proposes_its_likeliest_tokens_and_no_token_changes(
    temperature: float,
    slots: int,
    rows: int,
    k: int,
    vocabulary: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over its cache, from which rows come and go; tables of tokens may be padded differently."""
    torch.manual_seed(0)
    model, draft = llama(vocabulary=VOCABULARY), llama(vocabulary=vocabulary, hidden=8, seed=3)
    propose, proposed = DraftModel.propose, 0

    def checked(self: DraftModel, rows: Sequence[Row], most: int) -> list[Sequence[int]]:
        nonlocal proposed
        found = propose(self, rows, most)
        for row, tokens in zip(rows, found, strict=True):
            assert [*tokens] == likeliest(draft, row.tokens, min(most, row.tokens_left - 1))
            proposed += len(tokens)
        return found

    monkeypatch.setattr(DraftModel, "propose", checked)
    prompts = [p for p in random_prompts([1, 6, 17]) for _ in range(2)]
    options: dict[str, Any] = {"temperature": temperature, "slots": slots, "end": [1]}
    plain, speculative = rollouts(prompts), rollouts(prompts)
    decoded(model, plain, **options)
    own = {"draft": draft}
    decoded(model, speculative, 3, **options, own=own, engine_args=speculating(k, rows))
    assert_same(plain, speculative)
    assert proposed


@pytest.mark.usefixtures("always_most")
def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    model = llama(vocabulary=VOCABULARY)
    e = engine(model, temperature=0, engine_args=speculating(5), own={"draft": model})
    e.admit(told(rollouts(random_prompts([5]))))
    assert e.decode(LIMIT).steps == LIMIT / 6  # each gives five proposals and a token of its own
    assert e.speculated["accepted"] == e.speculated["proposed"] == LIMIT * 5 / 6


@pytest.mark.usefixtures("always_most")
def test_graphs_of_a_smaller_model_propose_what_its_passes_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, draft = llama(vocabulary=VOCABULARY), llama(vocabulary=VOCABULARY)
    prompts, own = random_prompts([4, 9, 2, 30]), {"draft": draft, "longest": 60}
    options: dict[str, Any] = {"temperature": 0, "own": own, "engine_args": speculating(4)}
    plain, graphed = rollouts(prompts), rollouts(prompts)
    eager = decoded(model, plain, **options)
    backend = EagerBackend()
    monkeypatch.setattr("stretto.rollout.steps.backend_of", lambda device: backend)
    e = decoded(model, graphed, **options)
    assert_same(plain, graphed)
    assert e.speculated["accepted"] == eager.speculated["accepted"] > 0
    assert backend.captures > 2


def test_a_smaller_model_that_costs_as_much_proposes_nothing() -> None:
    model = llama(vocabulary=VOCABULARY)
    e = engine(model, temperature=0, engine_args=speculating(5), own={"draft": model})
    e.admit(told(rollouts(random_prompts([5]))))
    assert e.decode(LIMIT).steps == LIMIT
    assert e.speculated == {"eligible": LIMIT, "proposed": 0, "accepted": 0}


@pytest.mark.usefixtures("always_most")
def test_a_row_beyond_the_positions_of_the_smaller_model_has_nothing_proposed() -> None:
    model, draft = llama(vocabulary=VOCABULARY), llama(vocabulary=VOCABULARY)
    draft.config.max_position_embeddings = 24
    made = rollouts(random_prompts([5, 19]))
    e = engine(model, temperature=0, engine_args=speculating(4), own={"draft": draft})
    e.admit(told(made))
    finish(e, made)
    plain = rollouts(random_prompts([5, 19]))
    decoded(model, plain, temperature=0)
    assert_same(plain, made)
    assert e.speculated["accepted"] >= LIMIT / 2  # of the short one


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
    before = e.speculated["eligible"]
    e.admit(told(made[1:]))
    take(e.decode(3).chunks, {0: made[0]})  # meanwhile the second prompt is read
    assert e.speculated["eligible"] == before == 1
    finish(e, made)
    assert e.speculated["accepted"] > 0
    own = engine(model, temperature=0, engine_args=speculating(4))
    (other,) = rollouts(random_prompts([5]))
    own.admit([replace(other.response(), sampling=Sampling(LIMIT, 0.5))])
    finish(own, [other])
    assert own.speculated["eligible"] == 0


@pytest.mark.usefixtures("always_most")
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


@pytest.mark.usefixtures("always_most")
def test_a_run_takes_a_smaller_model_by_its_folder(tiny_folder: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "draft", seed=1)
    texts, proposed = [], []
    for name in ("", str(tmp_path / "draft")):
        args = {"speculative_tokens": 4, "speculative_model": name} if name else {}
        config = settings(
            tiny_folder, steps=1, rollout={"batch": 4, "max_new_tokens": 12, "engine_args": args}
        )
        run = RunDirectory.create(tmp_path, name=f"run{bool(name)}", config=config)
        runs.train(config, run_dir=run, progress=Progress())
        texts.append([sample["response"] for sample in run.read_samples()])
        spans = (s.attributes for s in run.trace.read().spans if s.name == "gen")
        proposed.append(sum(s.get("proposed", 0) for s in spans))
    assert len(texts[0]) == 4
    assert texts[0] == texts[1]
    assert proposed[1] > proposed[0] == 0


def test_a_smaller_model_with_other_tokens_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "draft", chat=True)
    args = {"speculative_tokens": 4, "speculative_model": str(tmp_path / "draft")}
    config = settings(tiny_folder, rollout={"batch": 4, "engine_args": args})
    with raises(ConfigError, "draft-of-other-tokenizer", "speculative_model"):
        run = RunDirectory.create(tmp_path, "run", config)
        runs.train(config, run_dir=run, progress=Progress())
