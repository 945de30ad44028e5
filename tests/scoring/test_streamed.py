"""Streamed scoring against the same scorers on whole rollouts."""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_helpers import GROUPED, LATENT, from_config, with_adapters
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
from scorer_helpers import begun, bert, long_text, other_tokenizer, stream, text_rollout, trained
from stretto.errors import EngineError, ModelError
from stretto.models.cached import CachedPass, SlotCache, slots_within
from stretto.models.tiny import byte_tokenizer
from stretto.models.weights import fingerprint
from stretto.schedules.rollout import Rollout
from stretto.scoring.base_scorer import ModelScorer
from stretto.scoring.model_scorers import RewardModelScorer, critic_scorer, reference_scorer
from stretto.scoring.retokenise import ConversationReader, StablePrefix
from stretto.testing.contracts import chunk_of
from stretto.types import FinishReason, Prompt

EOS = 258
TOLERANCE = rounding(GRADIENT_TERMS)


def rollouts(shapes: Sequence[tuple[int, int]], vocabulary: int = VOCABULARY) -> list[Rollout]:
    """Finished rollouts of (prompt, response) lengths; prompts of one length are one prompt."""
    rng = np.random.default_rng(3)
    prompts = {p: tuple(int(t) for t in rng.integers(3, vocabulary, size=p)) for p, _ in shapes}
    made = []
    for i, (p, length) in enumerate(shapes):
        r = Rollout(i, Prompt(p, prompts[p], ""), p)
        r.tokens = array("i", rng.integers(3, vocabulary, size=length).tolist())
        r.logprobs, r.versions = array("f", [-1.0] * length), array("i", [0] * length)
        r.finish = FinishReason.STOP if i % 2 else FinishReason.LENGTH
        made.append(r)
    return made


def whole(scorer: ModelScorer, made: Sequence[Rollout]) -> list[np.ndarray[Any, Any]]:
    scorer.admit(told(made))
    return [s.values for s in scorer.finish([r.id for r in made])]


def assert_same(got: Sequence[Any], want: Sequence[Any]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


# -- any chunks, any order -----------------------------------------------------------------------

SMALL: dict[str, Any] = {
    **GROUPED,
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "mixed windows": lambda: from_config(hf.Qwen2Config(**SMALL, **WINDOW)),
    "learned positions": lambda: from_config(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=24,
            pad_token_id=0,
            initializer_range=0.3,
        )
    ),
}
SHAPES = [(4, 9), (4, 5), (4, 13), (1, 3), (11, 7), (7, 1), (7, 12), (5, 0)]
PARTS = ["reference", "critic", "reward"]


def scorer_of(part: str, model: Any, budget: int = 1000, **options: Any) -> ModelScorer:
    if part == "reference":
        return reference_scorer(model, 0.7, budget, **options)
    if part == "critic":
        return critic_scorer(model, budget, **options)
    tokenizer = byte_tokenizer()
    return RewardModelScorer("model:x", model, tokenizer, tokenizer, budget, **options)


@cache
def case(architecture: str, part: str) -> tuple[Any, list[Rollout], list[Any]]:
    """A model, rollouts, and their scores when they are scored whole."""
    model = MODELS[architecture]()
    if part != "reference":
        model = critic_of(model)
    made = rollouts(SHAPES)
    return model, made, whole(scorer_of(part, model), made)


OPERATION = st.tuples(
    st.sampled_from(["admit", "extend", "extend", "extend", "finish", "release"]),
    st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=5, unique=True),
    st.integers(1, 8),
)


class Driver:
    """Takes rollouts through a scorer in any order of calls, and keeps what comes out."""

    def __init__(self, scorer: ModelScorer, made: Sequence[Rollout]) -> None:
        self.scorer, self.made = scorer, made
        self.given: dict[int, int] = {}
        self.ended: set[int] = set()
        self.scores: dict[int, Any] = {}

    def do(self, name: str, ids: Sequence[int], size: int) -> None:
        here = [i for i in ids if i in self.given]
        if name == "admit":
            new = [i for i in ids if i not in self.given and i not in self.scores]
            self.scorer.admit(told([begun(self.made[i], size - 1) for i in new if size <= 3]))
            self.given |= {i: min(size - 1, len(self.made[i])) for i in new if size <= 3}
        elif name == "extend":
            going = [i for i in here if self.given[i] < len(self.made[i])]
            self._extend(going, size)
            self.given |= {i: min(self.given[i] + size, len(self.made[i])) for i in going}
        elif name == "finish":
            # A rollout whose last token came without its end still waits for that.
            self.do("extend", [i for i in here if self.given[i] < len(self.made[i])], 20)
            self._finish(here)
        else:
            self.scorer.release(here)
            for i in here:
                del self.given[i]
            self.ended -= set(here)

    def _extend(self, ids: Sequence[int], size: int) -> None:
        chunks = [chunk_of(self.made[i], self.given[i], self.given[i] + size) for i in ids]
        self.scorer.extend(chunks)
        self.ended |= {c.rollout_id for c in chunks if c.finish}

    def _finish(self, ids: Sequence[int]) -> None:
        self._extend([i for i in ids if i not in self.ended], 0)
        for score in self.scorer.finish(ids):
            self.scores[score.rollout_id] = score.values
            del self.given[score.rollout_id]
            self.ended.remove(score.rollout_id)

    def complete(self) -> list[Any]:
        everyone = range(len(self.made))
        self.do("admit", everyone, 1)
        self.do("finish", everyone, 1)
        return [self.scores[i] for i in everyone]


PROPERTY = settings(
    max_examples=25, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("architecture", MODELS)
@PROPERTY
@given(st.lists(OPERATION, max_size=15), st.sampled_from([1, 3, 7]), st.sampled_from([1, 9, 500]))
def test_scores_depend_on_neither_chunks_nor_order(
    architecture: str,
    part: str,
    operations: list[tuple[str, list[int], int]],
    slots: int,
    budget: int,
) -> None:
    model, made, expected = case(architecture, part)
    said: list[str] = []
    driver = Driver(scorer_of(part, model, budget, slots=slots, say=said.append), made)
    assert driver.scorer.info.streams
    for operation in operations:
        driver.do(*operation)
    assert_same(driver.complete(), expected)
    assert len(said) <= 1


@torch.no_grad()
def test_streamed_numbers_are_those_of_plain_passes() -> None:
    actor = llama()
    critic = critic_of(actor)
    made = rollouts(SHAPES[:-1])  # the helpers know no empty responses
    got = stream(reference_scorer(actor, 0.7, 30, slots=8), made, 4)
    assert_same(got, [x.numpy() for x in left_padded_logprobs(actor, made, 0.7)])
    got = stream(critic_scorer(critic, 30, slots=8), made, 4)
    assert_same(got, [naive_values(critic, r).numpy() for r in made])
    tokenizer = byte_tokenizer()
    got = stream(RewardModelScorer("m", critic, tokenizer, tokenizer, 30, slots=8), made, 4)
    for values, r in zip(got, made, strict=True):
        ids = torch.tensor([[*r.prompt.tokens, *r.tokens]])
        np.testing.assert_allclose(values, critic(input_ids=ids).logits[0], rtol=1e-4, atol=1e-5)


def test_the_reference_under_lora_has_the_frozen_weights_alone_and_shares_them() -> None:
    made = rollouts(SHAPES)
    expected = whole(reference_scorer(llama(), 1.0, 100), made)
    wrapped = with_adapters(llama())
    for values, r in zip(expected, made[:-1], strict=False):
        assert np.abs(left_padded_logprobs(wrapped, [r])[0].detach().numpy() - values).max() > 0.1
    scorer = reference_scorer(wrapped, 1.0, 100, slots=8)
    assert_same(stream(scorer, made, 3), expected)
    for values, of in zip(whole(scorer, made), expected, strict=True):
        np.testing.assert_array_equal(values, of)
    theirs = wrapped.get_base_model().model
    assert scorer.model.model.norm.weight is theirs.norm.weight
    assert set(scorer.model.modules()).isdisjoint(wrapped.modules())
    assert sum(p.requires_grad for p in wrapped.parameters()) == 2 * 2 * 7  # A, B; layers; linears


# -- how much is left to do ----------------------------------------------------------------------


@pytest.mark.parametrize(("part", "extra"), [("reference", 0), ("critic", 0), ("reward", 1)])
def test_only_the_last_chunk_is_left_when_a_rollout_ends(part: str, extra: int) -> None:
    """The newest token of a response waits for the next ones; a reward is read at the last."""
    model, _, _ = case("llama", part)
    (r,) = made = rollouts([(50, 40)])
    scorer = scorer_of(part, model, slots=1)
    scorer.admit(told([begun(r)]))
    assert scorer.read_tokens == 49
    for start in range(0, 32, 8):
        scorer.extend([chunk_of(r, start, start + 8)])
    assert scorer.read_tokens == 50 + 31
    scorer.extend([chunk_of(r, 32, 40)])
    assert scorer.read_tokens == 50 + 39 + extra
    got = [scorer.finish([0])[0].values]
    assert scorer.read_tokens == 50 + 39 + extra
    plain = scorer_of(part, model)
    assert_same(got, whole(plain, made))
    assert plain.read_tokens == scorer.read_tokens


def test_a_prompt_is_read_once_for_all_its_samples() -> None:
    model, _, _ = case("llama", "reference")
    made = rollouts([(30, 5), (30, 6), (20, 5), (30, 7)])
    scorer = reference_scorer(model, 0.7, 16, slots=4)  # in several passes
    scorer.admit(told([begun(r) for r in made[:3]]))
    assert scorer.read_tokens == 29 + 19
    scorer.admit(told([begun(made[3])]))
    assert scorer.read_tokens == 29 + 19
    scorer.extend([chunk_of(r, 0, 9) for r in made])
    assert scorer.read_tokens == 29 + 19 + sum(map(len, made))
    got = [s.values for s in scorer.finish([0, 1, 2, 3])]
    assert_same(got, whole(reference_scorer(model, 0.7, 100), made))


def test_passes_keep_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made, expected = case("llama", "reference")
    sizes = []
    prefill = CachedPass.prefill

    def counted(self: CachedPass, slots: Any, starts: Any, rows: Sequence[Any]) -> Tensor:
        sizes.append(len(rows) * max(map(len, rows)))
        return prefill(self, slots, starts, rows)

    scorer = reference_scorer(model, 0.7, 10, slots=8)
    monkeypatch.setattr(CachedPass, "prefill", counted)
    assert_same(stream(scorer, made, 6), expected)
    assert 6 < max(sizes) <= 10


def test_rollouts_that_have_ended_are_scored_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made, expected = case("llama", "reference")
    scorer = reference_scorer(model, 0.7, 1000, slots=8)
    monkeypatch.delattr(CachedPass, "prefill")
    for got, want in zip(whole(scorer, made), expected, strict=True):
        np.testing.assert_array_equal(got, want)


# -- memory --------------------------------------------------------------------------------------


def test_rollouts_beyond_the_slots_wait_for_one_or_their_end() -> None:
    model, made, expected = case("llama", "critic")
    said: list[str] = []
    scorer = critic_scorer(model, 1000, slots=2, say=said.append)
    scorer.admit(told([begun(r) for r in made[:4]]))
    assert scorer.read_tokens == 3  # the one prompt of the first two, less its last token
    scorer.extend([chunk_of(r, 0, 5) for r in made[:4]])
    assert scorer.read_tokens == 3 + 5 + 5
    got = [s.values for s in scorer.finish([1, 3])]  # in a slot; without one
    assert scorer.read_tokens == 3 + 5 + 5 + 3
    scorer.extend([chunk_of(made[2], 5, 9)])  # the second's slot is the third's now
    assert scorer.read_tokens == 3 + 5 + 5 + 3 + 9  # its prompt comes from the first's
    scorer.extend([chunk_of(made[0], 5, 9), chunk_of(made[2], 9, 13)])
    got += [s.values for s in scorer.finish([0, 2])]
    assert_same(got, [expected[i] for i in (1, 3, 0, 2)])
    assert said == [
        "'critic' has more rollouts than slots to read them in; it scores those beyond its slots "
        "whole, at their end"
    ]


def no_memory_on_a_cpu() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def no_memory_on_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore on this")


@pytest.mark.parametrize("fail", [no_memory_on_a_cpu, no_memory_on_a_gpu])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("after", [0, 2, 5])
def test_out_of_memory_ends_streaming_and_nothing_else(
    fail: Callable[[], None], part: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made, expected = case("llama", part)
    said: list[str] = []
    scorer = scorer_of(part, model, slots=8, say=said.append)
    passes = 0
    update = SlotCache.update

    def failing(self: SlotCache, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        nonlocal passes
        passes += 1
        if passes > after:  # in the middle of a pass for uneven numbers
            fail()
        return update(self, *args, **kwargs)

    monkeypatch.setattr(SlotCache, "update", failing)
    assert_same(stream(scorer, made, 3), expected)
    assert not scorer.info.streams
    (line,) = said
    assert line.startswith(f"'{scorer.name}' scores rollouts whole from now on, at their end: ")
    assert "memory" in line
    assert "\n" not in line
    assert_same(stream(scorer, made, 3), expected)
    assert len(said) == 1


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made, _ = case("llama", "reference")
    scorer = reference_scorer(model, 0.7, 100, slots=2)

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a shape is wrong")

    monkeypatch.setattr(CachedPass, "prefill", failing)
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        stream(scorer, made, 3)


WIDE = {**SMALL, "head_dim": 12}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SMALL),
    "gpt-neox": lambda: hf.GPTNeoXConfig(
        **{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**WIDE, sliding_window=5),
    "deepseek": lambda: hf.DeepseekV3Config(**{**SMALL, "num_key_value_heads": 4}, **LATENT),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_slots_is_what_they_take(name: str, dtype: torch.dtype) -> None:
    model = from_config(CONFIGS[name]()).to(dtype)
    slots = SlotCache(3)
    slots.reserve(70)
    CachedPass(model, slots).prefill([0], [0], [[5, 6, 7]])
    taken = sum(x.nbytes for x in (*slots._keys, *slots._values))
    assert slots_within(model, 70, taken) == 3
    assert slots_within(model, 70, taken - 1) == 2
    assert slots_within(model, 70, taken // 3 - 1) == 0


# -- weight syncs, and rollouts that are carried past them -----------------------------------------


def moved(model: Any, seed: int) -> dict[str, Tensor]:
    """The model's weights after a step in a random direction."""
    torch.manual_seed(seed)
    named = model.named_parameters()
    return {n: p.detach() + 0.05 * torch.randn_like(p) for n, p in named}


def put(model: Any, tensors: dict[str, Tensor]) -> Any:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors[name])
    return model


@PROPERTY
@given(
    st.lists(st.one_of(OPERATION, st.just(("load", [0], 1))), max_size=15),
    st.booleans(),
    st.sampled_from([9, 500]),
)
def test_the_critic_scores_with_its_newest_weights_alone(
    operations: list[tuple[str, list[int], int]], copied: bool, budget: int
) -> None:
    critic, made = critic_of(llama()), rollouts(SHAPES)
    scorer = critic_scorer(critic, budget, slots=5, say=lambda _: None, channel=CHANNEL)
    driver = Driver(scorer, made)
    version = 0
    for name, ids, size in operations:
        if name != "load":
            driver.do(name, ids, size)
            continue
        version += 1
        tensors = moved(critic, version)
        mark = fingerprint(tensors.items())
        if not copied:
            put(critic, tensors)  # as a learner does that shares memory
        scorer.load(ticket(version, mark, tensors if copied else None))
        driver.scores.clear()  # what came out before is of other weights
    got = driver.complete()
    assert_same(got, whole(critic_scorer(critic, 1000), made))


def test_carried_rollouts() -> None:
    """A frozen scorer keeps what it has read; the critic reads it again after a weight sync."""
    actor = llama()
    critic, made = critic_of(actor), rollouts([(10, 20), (5, 8)])
    reference = reference_scorer(actor, 1.0, 1000, slots=2)
    values = critic_scorer(critic, 1000, slots=2, channel=CHANNEL)
    for scorer in (reference, values):
        scorer.admit(told([begun(r) for r in made]))
        scorer.extend([chunk_of(r, 0, 8) for r in made])
        scorer.finish([1])
        assert scorer.read_tokens == 9 + 4 + 8 + 8
    weights = moved(critic, 1)
    values.load(ticket(1, fingerprint(weights.items()), weights))
    for scorer, read in ((reference, 12), (values, 29)):
        before = scorer.read_tokens
        scorer.extend([chunk_of(made[0], 8, 20)])
        assert scorer.read_tokens == before + read
    assert_same(
        [reference.finish([0])[0].values], whole(reference_scorer(actor, 1.0, 99), made[:1])
    )
    fresh = critic_scorer(put(critic_of(llama()), weights), 1000)
    assert_same([values.finish([0])[0].values], whole(fresh, made[:1]))


def test_weights_that_did_not_arrive_are_refused() -> None:
    critic = critic_of(llama())
    scorer = critic_scorer(critic, 100, slots=1, channel=CHANNEL)
    assert scorer.info.follows == "critic"
    with raises(EngineError, "other-weights", "version 4", "abc", "'critic'"):
        scorer.load(ticket(4, "abc"))
    with raises(EngineError, "unknown-tensor", "'other'", "'critic'"):
        scorer.load(ticket(4, "abc", {"other": torch.zeros(1)}))
    frozen = reference_scorer(llama(), 1.0, 100)
    assert frozen.info.follows == ""
    with raises(EngineError, "scorer-frozen", "'reference'"):
        frozen.load(ticket(4, fingerprint(frozen.model.named_parameters())))


# -- models that cannot be streamed --------------------------------------------------------------


def recurrent() -> Any:
    return from_config(
        hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4)
    )


def convolving() -> Any:
    layers = ["conv", "full_attention"]
    return from_config(hf.Lfm2Config(**SMALL, layer_types=layers, block_ff_dim=48))


def stretched() -> Any:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return from_config(hf.LlamaConfig(**SMALL, rope_parameters=rope))


UNSUITED: list[tuple[str, Callable[[], Any], str]] = [
    ("reward", bert, "no causal decoder"),
    ("reference", recurrent, "key-value cache"),
    ("reference", convolving, "layers of type conv keep no plain"),
    ("reference", stretched, r"position frequencies \(dynamic\)"),
]


@pytest.mark.parametrize(("part", "make", "why"), UNSUITED)
def test_models_that_cannot_be_streamed_score_whole_rollouts(
    part: str, make: Callable[[], Any], why: str
) -> None:
    said: list[str] = []
    model, made = make(), rollouts(SHAPES[:3])
    scorer = scorer_of(part, model, slots=8, say=said.append)
    assert not scorer.info.streams
    assert re.search(why, said[0])
    assert "scores rollouts whole, at their end" in said[0]
    assert_same(stream(scorer, made, 4), whole(scorer_of(part, model), made))
    assert len(said) == 1


# -- reward models with a tokenizer of their own -------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\\n' + m['content'] | trim + '<sep>\\n' }}"
    "{% endfor %}"
)
FORGETFUL = TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1]")


@cache
def judge_model() -> Any:
    return critic_of(llama(vocabulary=512))


def judge(tokenizer: Any, slots: int, stop: Sequence[str] = ()) -> RewardModelScorer:
    model = judge_model()
    return RewardModelScorer(
        "model:x", model, tokenizer, byte_tokenizer(), 100, stop, slots=slots, say=pytest.fail
    )


WORDS = [
    "the",
    " the",
    "weather ",
    "für",
    " 日本語",
    "。",
    "🙂",
    "  ",
    "\n\n",
    "123",
    "isn't",
    "é ",
]
TEXTS = st.lists(st.lists(st.sampled_from(WORDS), max_size=30).map("".join), min_size=1, max_size=3)


@pytest.mark.parametrize("kind", ["bytes", "words"])
@pytest.mark.parametrize("template", [None, TEMPLATE, FORGETFUL])
@settings(PROPERTY, max_examples=15)
@given(TEXTS, st.integers(1, 40), st.booleans(), st.booleans())
def test_the_score_is_always_that_of_all_the_text(
    kind: str, template: str | None, texts: list[str], size: int, chat: bool, stopped: bool
) -> None:
    tokenizer = other_tokenizer(kind, template)
    finish = FinishReason.STOP if stopped else FinishReason.LENGTH
    texts = [t + "</think>the rest" for t in texts] if template == FORGETFUL else texts
    made = [text_rollout(i, t + "x", chat=chat, finish=finish) for i, t in enumerate(texts)]
    scorer = judge(tokenizer, slots=len(made))
    assert_same(stream(scorer, made, size), whole(judge(tokenizer, 0), made))


@pytest.mark.parametrize("kind", ["bytes", "words"])
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_little_is_left_of_text_too_and_nothing_is_taken_back(
    kind: str, template: str | None
) -> None:
    tokenizer = other_tokenizer(kind, template)
    r = text_rollout(0, long_text(150), chat=True, finish=FinishReason.LENGTH)
    scorer = judge(tokenizer, slots=1)
    scorer.admit(told([begun(r)]))
    last = len(r) - len(r) % 16
    for start in range(0, last, 16):
        scorer.extend([chunk_of(r, start, start + 16)])
    before = scorer.read_tokens
    scorer.extend([chunk_of(r, last, len(r))])
    got = [scorer.finish([0])[0].values]
    everything = judge(tokenizer, 0)
    assert_same(got, whole(everything, [r]))
    assert scorer.rolled_back_tokens == 0
    assert scorer.read_tokens == everything.read_tokens > 150
    # Held back are two words, or 64 characters of the corpus's lines without spaces.
    assert scorer.read_tokens - before < 64


def test_what_a_template_takes_away_later_is_rolled_back_and_counted() -> None:
    tokenizer = other_tokenizer("bytes", FORGETFUL)
    thought = "the weather is the weather in the north, and the wind is cold in the north"
    r = text_rollout(0, thought + "</think>It is cold", chat=True, finish=FinishReason.STOP)
    scorer = judge(tokenizer, slots=1)
    got = stream(scorer, [r], 10)
    read = ConversationReader("x", tokenizer, byte_tokenizer(), ends=frozenset({2}))
    assert scorer.rolled_back_tokens > 10
    assert tokenizer.decode(read.tokens(*told([r]))).endswith("\nIt is cold<sep>")
    assert_same(got, whole(judge(tokenizer, 0), [r]))


@pytest.mark.parametrize("words", [3, 40])
def test_the_prompts_tokens_stay_while_the_response_grows(words: int) -> None:
    """The last word goes on in the response: in one text it would be tokenised in another way."""
    tokenizer = other_tokenizer("bytes")
    said = long_text(words) + " wea"
    r = text_rollout(
        0, "ther in the north and the wind is cold", chat=False, finish=FinishReason.STOP
    )
    r.prompt = Prompt(0, tuple(said.encode()), said)
    ids = tokenizer(said)["input_ids"]
    whole_text = said + "ther in the north and the wind is cold"
    assert tokenizer(whole_text)["input_ids"][: len(ids)] != ids
    read = ConversationReader("x", tokenizer, byte_tokenizer(), ends=frozenset({2})).tokens(
        *told([r])
    )
    behind = "ther in the north and the wind is cold"
    assert read == [*ids, *tokenizer(behind)["input_ids"], 2]
    scorer = judge(tokenizer, slots=1)
    assert_same(stream(scorer, [r], 5), whole(judge(tokenizer, 0), [r]))
    assert scorer.rolled_back_tokens == 0


def test_a_stop_string_that_is_cut_off_is_not_read() -> None:
    tokenizer = other_tokenizer("bytes")
    text = "the weather in the north is cold and the end of it"
    r = text_rollout(0, text, chat=False, finish=FinishReason.STOP)
    scorer = judge(tokenizer, slots=1, stop=[" and the end of it"])
    got = stream(scorer, [r], 7)
    assert scorer.rolled_back_tokens == 0
    cut = text_rollout(0, text[: -len(" and the end of it")], chat=False, finish=r.finish)
    assert_same(got, whole(judge(tokenizer, 0), [cut]))


def test_a_response_that_turns_out_shorter_is_read_at_its_last_token() -> None:
    """Of a response that is cut well before its end, all tokens have been read, and more."""
    tokenizer = other_tokenizer("bytes")
    kept, rest = "the weather in the", "# north is rather cold and the wind in the north is too"
    r = text_rollout(0, kept + rest, chat=False, finish=FinishReason.STOP)
    scorer = judge(tokenizer, slots=1, stop=["#"])
    got = stream(scorer, [r], 10)
    assert scorer.rolled_back_tokens > 5
    cut = text_rollout(0, kept, chat=False, finish=FinishReason.STOP)
    assert_same(got, whole(judge(tokenizer, 0), [cut]))


def test_a_prompt_that_is_read_in_another_way_later_is_not_shared() -> None:
    """Here the template puts something before the prompt that depends on the response."""
    template = "{{ 'cold: ' if 'cold' in messages[-1].content else 'is: ' }}" + TEMPLATE
    tokenizer = other_tokenizer("bytes", template)
    texts = ["it is cold in the north and so is the wind", "the wind is the wind is the wind"]
    made = [text_rollout(i, t, chat=True, finish=FinishReason.LENGTH) for i, t in enumerate(texts)]
    scorer = judge(tokenizer, slots=2)
    scorer.admit(told([begun(made[0])]))
    for start in (0, 16, 32):
        scorer.extend([chunk_of(made[0], start, start + 16)])
    scorer.admit(told([begun(made[1])]))
    scorer.extend([chunk_of(made[1], 0, 99)])
    assert_same([s.values for s in scorer.finish([0, 1])], whole(judge(tokenizer, 0), made))


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_tokens_of_a_growing_text_are_the_first_ones_of_the_whole(kind: str) -> None:
    """And the work of a call does not grow with the text before it."""
    tokenizer = trained(kind)
    text = long_text(400)
    expected = tokenizer(text)["input_ids"]
    sizes: list[int] = []

    def encode(text: str, start: int) -> tuple[list[int], list[tuple[int, int]]]:
        sizes.append(len(text) - start)
        encoded = tokenizer(text[start:], return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]

    prefix = StablePrefix(encode)
    rng = random.Random(1)
    at, kept = 0, 0
    while at < len(text):
        at += rng.randrange(1, 30)
        assert prefix.grow(text[:at]) == kept
        kept = len(prefix.tokens)
        assert prefix.tokens == expected[:kept]
    assert len(expected) - kept < 64
    assert max(sizes) < 400 < len(text) / 5
    assert prefix.close(expected) == kept
    assert prefix.tokens == expected


def test_tokens_that_depend_on_what_comes_much_later_are_found_out() -> None:
    """Digits in groups of three from the right: each new one moves all the groups."""

    def encode(text: str, start: int) -> tuple[list[int], list[tuple[int, int]]]:
        groups = list(re.finditer(r"\d{1,3}(?=(?:\d{3})*(?!\d))", text[start:]))
        return [int(g[0]) for g in groups], [g.span() for g in groups]

    rng = random.Random(2)
    digits = "".join(rng.choice("123456789") for _ in range(300))
    prefix = StablePrefix(encode)
    for at in range(70, 300, 4):
        before = list(prefix.tokens)
        kept = prefix.grow(digits[:at])
        assert prefix.tokens
        assert prefix.tokens == encode(digits[:at], 0)[0][: len(prefix.tokens)]
        assert prefix.tokens[:kept] == before[:kept]
        assert kept == len(before) or prefix.tokens[kept] != before[kept]


def test_a_text_that_changes_is_tokenised_anew() -> None:
    tokenizer = trained("bytes")

    def encode(text: str, start: int) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = tokenizer(text[start:], return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]

    prefix = StablePrefix(encode, held=3)
    assert prefix.grow("the weather in the north is") == 0
    assert tokenizer.decode(prefix.tokens) == "the weather in"
    known = len(prefix.tokens)
    assert prefix.grow("the weather in the south is rather cold") == known
    assert tokenizer.decode(prefix.tokens) == "the weather in the south is"
    assert prefix.grow("the weather here is like that") == 2
    assert tokenizer.decode(prefix.tokens) == "the weather here is"


def test_a_template_that_refuses_the_conversation_is_named() -> None:
    tokenizer = other_tokenizer("bytes", "{{ raise_exception('no such role') }}")
    r = text_rollout(0, "the", chat=True, finish=FinishReason.STOP)
    with raises(ModelError, "template-refuses", "'model:x'", "no such role"):
        judge(tokenizer, slots=1).admit(told([begun(r)]))


def test_a_tokenizer_without_offsets_reads_whole_texts() -> None:
    class Slow:
        """As the tokenizers are that transformers has in Python."""

        is_fast = False

        def __init__(self, fast: Any) -> None:
            self._fast = fast

        def __getattr__(self, name: str) -> Any:
            return getattr(self._fast, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self._fast(*args, **kwargs)

    said: list[str] = []
    made = [text_rollout(0, "the weather", chat=False, finish=FinishReason.STOP)]
    model, tokenizer = judge_model(), trained("bytes")
    scorer = RewardModelScorer(
        "model:x", model, Slow(tokenizer), byte_tokenizer(), 100, slots=1, say=said.append
    )
    assert said == [
        "'model:x' scores rollouts whole, at their end: its tokenizer does not say where in the "
        "text its tokens are"
    ]
    assert_same(stream(scorer, made, 4), whole(judge(tokenizer, 0), made))
