"""The generation engine against transformers, and against a generator without cache or batch."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_helpers import (
    EXPERTS,
    GROUPED,
    LATENT,
    LIMIT,
    SEED,
    SMALL,
    EagerBackend,
    Letters,
    engine,
    finish,
    from_config,
    plain_logprobs,
    random_prompts,
    rollouts,
    take,
    with_adapters,
)
from helpers import VOCABULARY, llama, ticket, told
from raising import raises
from rounding import rounding
from stretto.config import ModelConfig, RolloutConfig, TrainingConfig
from stretto.errors import EngineError, StrettoError
from stretto.evaluation.generation import completed
from stretto.models import devices
from stretto.models.cached import SlotCache
from stretto.models.devices import PackedLinears
from stretto.models.load import load_causal_lm
from stretto.models.lora import add_lora
from stretto.models.tiny import byte_tokenizer
from stretto.models.weights import fingerprint, with_own_structure, with_own_weights
from stretto.rollout.base import StopStrings
from stretto.rollout.engine import TorchEngine
from stretto.rollout.sampling import stream_seed, uniform
from stretto.rollout.steps import GraphedDecode, ModelPass, StepInputs
from stretto.runtime.role_services import GeneratorService
from stretto.schedules.rollout import Rollout
from stretto.training.trained import LearningRate, TrainedModel
from stretto.types import FinishReason, Sampling, WeightsRef


def run(e: TorchEngine, prompts: Sequence[Sequence[int]], chunk: int = 5) -> list[Rollout]:
    made = rollouts(prompts)
    e.admit(told(made))
    return finish(e, made, chunk)


def assert_logprobs(model: Any, r: Rollout, tolerance: float, temperature: float = 1.0) -> None:
    expected = plain_logprobs(model, r, temperature)
    assert torch.allclose(torch.tensor(r.logprobs), expected, rtol=0, atol=tolerance)


def assert_greedy_as_transformers(model: Any, made: Sequence[Rollout], tolerance: float) -> None:
    for r in made:
        ids = torch.tensor([r.prompt.tokens])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LIMIT
        )
        assert list(r.tokens) == out[0, ids.shape[1] :].tolist()
        assert_logprobs(model, r, tolerance)


def weights_of(model: Any, version: int, *, copied: bool = True) -> WeightsRef:
    named = dict(model.named_parameters())
    tensors = {k: v.detach().clone() for k, v in named.items()}
    return ticket(version, fingerprint(named.items()), tensors if copied else None)


# -- as transformers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Any:
    return load_causal_lm(tiny_folder, torch.float32, torch.device("cpu"))


def test_tiny_is_greedy_as_transformers(tiny: Any) -> None:
    made = run(engine(tiny, temperature=0, end=[258]), random_prompts([1, 2, 17, 64, 65, 30], 256))
    assert_greedy_as_transformers(tiny, made, 1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_tiny_logprobs_are_of_the_sampled_distribution(tiny: Any, temperature: float) -> None:
    made = run(engine(tiny, temperature=temperature), random_prompts([1, 2, 17, 64, 65, 30], 256))
    assert len({t for r in made for t in r.tokens}) > 20
    for r in made:
        assert_logprobs(tiny, r, 1e-5, temperature)


MIXED = {**GROUPED, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
N_STYLE = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 28}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
WORKS: dict[str, Callable[[], Any]] = {
    "gpt-neox": lambda: hf.GPTNeoXConfig(**SMALL),
    "qwen2": lambda: hf.Qwen2Config(**GROUPED),
    "qwen2, windows": lambda: hf.Qwen2Config(**GROUPED, **WINDOW),
    "qwen3, windows": lambda: hf.Qwen3Config(**GROUPED, head_dim=8, **WINDOW),
    "mistral, all windows": lambda: hf.MistralConfig(**GROUPED, sliding_window=6),
    "gemma2, caps": lambda: hf.Gemma2Config(**MIXED, sliding_window=5, **CAPS),
    "gemma3": lambda: hf.Gemma3TextConfig(**MIXED, sliding_window=5),
    "gpt2": lambda: hf.GPT2Config(**N_STYLE, initializer_range=0.3),
    "gpt-j": lambda: hf.GPTJConfig(**N_STYLE, rotary_dim=4, initializer_range=0.3),
    "opt": lambda: hf.OPTConfig(
        **{**SMALL, "max_position_embeddings": 28}, ffn_dim=48, word_embed_proj_dim=32, init_std=0.3
    ),
    "phi": lambda: hf.PhiConfig(**SMALL),
    "mixtral": lambda: hf.MixtralConfig(**GROUPED, **EXPERTS),
    "gpt-oss, sinks": lambda: hf.GptOssConfig(**MIXED, sliding_window=5, **EXPERTS),
    "cohere, scaled": lambda: hf.CohereConfig(**GROUPED, logit_scale=0.5),
    "deepseek, latent": lambda: hf.DeepseekV3Config(**SMALL, num_key_value_heads=4, **LATENT),
}


def check_architecture(model: Any) -> None:
    """Sequences longer than the windows, and a budget that cuts prompts to pieces."""
    prompts = random_prompts([3, 9, 16, 11, 5, 2], 97)
    made = run(engine(model, temperature=0, prefill_tokens=7, slots=4), prompts, chunk=3)
    assert_greedy_as_transformers(model, made, 1e-4)


@pytest.mark.parametrize("name", WORKS)
def test_architectures_are_greedy_as_transformers(name: str) -> None:
    check_architecture(from_config(WORKS[name]()))


def test_eager_attention_takes_masks_of_its_own_kind() -> None:
    check_architecture(from_config(hf.LlamaConfig(**GROUPED), "eager"))


def test_adapters_are_part_of_the_model() -> None:
    m = with_adapters(from_config(hf.LlamaConfig(**GROUPED)))
    e = engine(m, slots=3)
    e.load(weights_of(m, 1, copied=False))
    for r in run(e, random_prompts([9, 3, 12, 5], 97)):
        assert_logprobs(m, r, 1e-4)
        with m.disable_adapter():
            assert (plain_logprobs(m, r) - torch.tensor(r.logprobs)).abs().max() > 0.5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bfloat16(attention: str) -> None:
    m = from_config(hf.LlamaConfig(**{**GROUPED, "initializer_range": 0.1}), attention).bfloat16()
    for r in run(engine(m, slots=3, prefill_tokens=7), random_prompts([9, 3, 12, 5], 97)):
        assert_logprobs(m, r, 0.05)


REFUSED: dict[str, Callable[[], Any]] = {
    "mamba": lambda: hf.MambaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4
    ),
    "rwkv": lambda: hf.RwkvConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2),
    "lfm2": lambda: hf.Lfm2Config(
        **GROUPED, layer_types=["conv", "full_attention"], block_ff_dim=48
    ),
    "bloom": lambda: hf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
    "gpt-neo": lambda: hf.GPTNeoConfig(
        vocab_size=97,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_architectures_are_refused(name: str) -> None:
    model = from_config(REFUSED[name]())
    with pytest.raises(StrettoError, match=r"[Cc]hoose"):
        engine(model)


def test_frequencies_that_follow_the_longest_in_the_batch_are_refused() -> None:
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 20,
    }
    model = from_config(
        hf.Phi3Config(
            **{**GROUPED, "max_position_embeddings": 80},
            original_max_position_embeddings=20,
            rope_parameters=scaling,
        )
    )
    e = engine(model, temperature=0)
    assert_greedy_as_transformers(model, run(e, random_prompts([8, 3], 97)), 1e-4)
    with raises(EngineError, "too-few-positions", 9, LIMIT, 20):
        e.admit(told(rollouts(random_prompts([9], 97))))


# -- as without cache and batch ------------------------------------------------------------------

END = 14
PROMPTS = [*random_prompts([1, 3, 9, 20]), *([[8, 1, 2, 33, 4, 5, 60]] * 3)]


@cache
def model() -> Any:
    return llama()


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[float]
    finish: FinishReason


@cache
def answers() -> list[Answer]:
    """Each rollout by itself: a full forward pass a token, and a search in float64."""
    out = []
    for i, prompt in enumerate(PROMPTS):
        a = Answer([], [], FinishReason.LENGTH)
        seed = torch.tensor([stream_seed(SEED, i)])
        while len(a.tokens) < LIMIT and END not in a.tokens:
            with torch.no_grad():
                logits = model()(torch.tensor([[*prompt, *a.tokens]])).logits[0, -1]
            p = logits.double().softmax(-1)
            u = uniform(seed, torch.tensor([len(a.tokens)])).item()
            ends = p.cumsum(-1)
            assert (ends - u).abs().min() > 1e-5  # not a matter of rounding
            a.tokens.append(int((ends <= u).sum()))
            a.logprobs.append(math.log(p[a.tokens[-1]]))
        if END in a.tokens:
            a.finish = FinishReason.STOP
        out.append(a)
    return out


def assert_answers(made: Sequence[Rollout]) -> None:
    for r in made:
        expected = answers()[r.id]
        assert list(r.tokens) == list(expected.tokens)
        assert r.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert r.finish == expected.finish


def test_the_answers_are_of_all_kinds() -> None:
    lengths = {len(a.tokens) for a in answers()}
    assert len(lengths) > 1
    assert {a.finish for a in answers()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len({tuple(a.tokens) for a in answers()[4:]}) == 3  # one prompt, three streams


@pytest.mark.parametrize("slots", [1, 2, 7])
@pytest.mark.parametrize("prefill_tokens", [1, 4, 30, 4096])
def test_tokens_depend_on_neither_slots_nor_budget(slots: int, prefill_tokens: int) -> None:
    e = engine(model(), end=[END], slots=slots, prefill_tokens=prefill_tokens)
    assert_answers(run(e, PROMPTS))


OPERATION = st.one_of(
    st.tuples(st.just("admit"), st.integers(0, len(PROMPTS) - 1)),
    st.tuples(st.just("decode"), st.integers(1, 6)),
    st.tuples(st.just("interrupt"), st.integers(0, len(PROMPTS) - 1)),
    st.tuples(st.just("load"), st.just(0)),
)


@settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    st.lists(OPERATION, max_size=20),
    st.sampled_from([1, 2, 3, 7]),
    st.integers(1, 40),
    st.integers(1, LIMIT + 1),
    st.permutations(range(len(PROMPTS))),
)
def test_tokens_do_not_depend_on_company_order_or_interruption(
    operations: list[tuple[str, int]],
    slots: int,
    prefill_tokens: int,
    last_chunk: int,
    order: list[int],
) -> None:
    e = engine(model(), end=[END], slots=slots, prefill_tokens=prefill_tokens)
    made = {r.id: r for r in rollouts(PROMPTS)}
    outside = set(made)
    for name, value in operations:
        if name == "admit" and value in outside and not made[value].finish:
            e.admit(told([made[value]]))
            outside.remove(value)
        elif name == "decode":
            before = {i: len(r) for i, r in made.items()}
            chunks = e.decode(value).chunks
            assert len({c.rollout_id for c in chunks}) == len(chunks)
            assert {c.rollout_id for c in chunks}.isdisjoint(outside)
            take(chunks, made)
            assert all(len(r) - before[i] <= value for i, r in made.items())
            assert all(set(made[c.rollout_id].versions[c.start :]) == {e.version} for c in chunks)
        elif name == "interrupt":
            e.release([value])
            outside.add(value)
        elif name == "load":
            e.load(weights_of(model(), e.version + 1, copied=False))
    e.admit(told([made[i] for i in order if i in outside and not made[i].finish]))
    assert_answers(finish(e, list(made.values()), last_chunk))


def test_rollouts_are_handed_out_as_they_end() -> None:
    """Three for two slots: the third begins when the first has ended, of the same tokens."""
    prompts = random_prompts([3, 5, 4])
    alone = run(engine(llama(), end=range(6), slots=2), prompts)
    made = rollouts(prompts)
    e = engine(llama(), end=range(6), slots=2)
    seen = []
    for r in completed(e, made, chunk_tokens=1):
        assert r.finish
        seen.append((r.id, [other.id for other in made if other.finish]))
    assert [ended for _, ended in seen][-1] == [0, 1, 2]
    assert sorted(i for i, _ in seen) == [0, 1, 2]
    assert len(seen[0][1]) == 1
    assert [r.tokens for r in made] == [r.tokens for r in alone]
    assert e.decode(3).chunks == []
    assert list(completed(e, [])) == []


def test_slots_grow_under_running_rollouts() -> None:
    """Positions go over one allocation's size while others are decoding, and rows move."""
    prompts = random_prompts([5, 50, 70, 130, 3, 200])
    together = rollouts(prompts)
    e = engine(model(), slots=3, temperature=0.8)
    by_id = {r.id: r for r in together}
    for r in together:
        e.admit(told([r]))
        take(e.decode(3).chunks, by_id)
    finish(e, together)
    for r in together:
        assert_logprobs(model(), r, 1e-4, 0.8)


@torch.inference_mode()
def test_prefill_from_different_starts_up_to_the_last_position() -> None:
    """Padding of the row that is nearly full would lie beyond its slot."""
    slots = SlotCache(2)
    slots.reserve(64)
    steps = ModelPass(model(), slots, RolloutConfig())
    a, b = random_prompts([64, 41])
    steps.prefill([1, 0], [0, 0], [b[:5], a[:60]])
    steps.prefill([0, 1], [60, 5], [a[60:63], b[5:40]])
    got = steps.next_logits(torch.tensor([a[-1], b[-1]]), torch.tensor([63, 40]), 64)
    for row, logits in zip((a, b), got, strict=True):
        expected = model()(torch.tensor([row]), use_cache=False).logits[0, -1]
        assert torch.allclose(logits, expected, rtol=0, atol=1e-4)


def test_samples_of_one_prompt_prefill_it_once_and_within_the_budget() -> None:
    passes: list[tuple[int, ...]] = []
    m = llama()
    e = engine(m, slots=8, prefill_tokens=16)
    handle = m.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: passes.append(tuple(args[0].shape))
    )
    run(e, random_prompts([60]) * 8)
    handle.remove()
    prefilled = [n * q for n, q in passes if q > 1]
    assert max(prefilled) <= 16
    assert 48 < sum(prefilled) <= 64  # of 8 times 59
    assert sum(n for n, q in passes if q == 1) <= 8 * LIMIT + 8


# -- where a call ends ----------------------------------------------------------------------------


def ends_by_step(slots: int, prefill_tokens: int) -> tuple[list[list[int]], dict[int, Rollout]]:
    """Which rollouts end with each decode step, by calls of one step; and what they are."""
    made = {r.id: r for r in rollouts(PROMPTS)}
    e = engine(model(), end=[END], slots=slots, prefill_tokens=prefill_tokens)
    e.admit(told(list(made.values())))
    steps = []
    while any(r.finish is None for r in made.values()):
        chunks = e.decode(1).chunks
        take(chunks, made)
        steps.append(sorted(c.rollout_id for c in chunks if c.finish))
    return steps, made


@cache
def stepwise(slots: int, prefill_tokens: int) -> tuple[list[list[int]], dict[int, Rollout]]:
    return ends_by_step(slots, prefill_tokens)


@settings(max_examples=40, deadline=None, database=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), max_size=12),
    st.sampled_from([(2, 5), (3, 40), (7, 4096)]),
)
def test_where_calls_end_changes_nothing(
    calls: list[tuple[int, int]], shape: tuple[int, int]
) -> None:
    """Bit for bit; and each call returns with the step in which enough have finished."""
    steps, expected = stepwise(*shape)
    made = {r.id: r for r in rollouts(PROMPTS)}
    e = engine(model(), end=[END], slots=shape[0], prefill_tokens=shape[1])
    e.admit(told(list(made.values())))
    at = 0
    for max_tokens, stop_after in [*calls, (1000, 0)]:
        finished: list[int] = []
        last = min(at + max_tokens, len(steps))
        while at < last and not 0 < stop_after <= len(finished):
            finished += steps[at]
            at += 1
        chunks = e.decode(max_tokens, stop_after).chunks
        assert [c.rollout_id for c in chunks if c.finish] == finished
        others = [c.rollout_id for c in chunks[len(finished) :]]
        assert others == sorted(others)
        take(chunks, made)
    for i, r in made.items():
        assert (r.tokens, r.logprobs, r.finish) == (
            expected[i].tokens,
            expected[i].logprobs,
            expected[i].finish,
        )


def test_some_end_together_and_some_apart() -> None:
    steps, _ = stepwise(7, 4096)
    assert len([s for s in steps if s]) > 1
    assert max(map(len, steps)) > 1


def test_slots_are_allocated_as_rollouts_come() -> None:
    e = engine(model(), end=[END], own={"rows": 6})
    made = rollouts(PROMPTS)
    by_id = {r.id: r for r in made}
    allocated = []
    for r in made:
        e.admit(told([r]))
        take(e.decode(1).chunks, by_id)
        allocated.append(len(e._slots.cache._keys[0]))
    assert allocated == [1, 2, 3, 4, 6, 6, 6]
    assert_answers(finish(e, made))


@pytest.mark.parametrize("slots", [0, -1])
def test_an_engine_without_slots_is_refused(slots: int) -> None:
    with raises(EngineError, "no-slots", slots):
        engine(model(), own={"rows": slots})


# -- from one engine to another -------------------------------------------------------------------


def test_moved_with_its_cache_a_rollout_goes_on_bit_for_bit() -> None:
    alone = run(engine(model()), PROMPTS)
    made = rollouts(PROMPTS)
    by_id = {r.id: r for r in made}
    a, b = engine(model()), engine(model())
    a.admit(told(made))
    take(a.decode(4).chunks, by_id)
    transfers = a.export(range(7), with_cache=True)
    assert [p.rollout_id for p in transfers] == list(range(7))
    assert [p.cached_tokens for p in transfers] == [len(r.prompt.tokens) + 3 for r in made]
    assert a.decode(3).chunks == []
    b.accept(told(made), transfers)
    finish(b, made)
    for r, expected in zip(made, alone, strict=True):
        assert (r.tokens, r.logprobs) == (expected.tokens, expected.logprobs)


MOVE = st.tuples(
    st.sampled_from(["there", "back"]), st.booleans(), st.sets(st.integers(0, len(PROMPTS) - 1))
)


@settings(max_examples=40, deadline=None, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), MOVE), max_size=8),
    st.sampled_from([(1, 7), (2, 3), (7, 2)]),
    st.sampled_from([4, 4096]),
)
def test_tokens_do_not_depend_on_the_engine(
    operations: list[tuple[int, int, tuple[str, bool, set[int]]]],
    slots: tuple[int, int],
    prefill_tokens: int,
) -> None:
    """Waiting, half prefilled or decoding; with keys and values and without; there and back."""
    here, there = (
        engine(model(), end=[END], prefill_tokens=prefill_tokens, own={"rows": n}) for n in slots
    )
    made = {r.id: r for r in rollouts(PROMPTS)}
    at = dict.fromkeys(made, here)
    here.admit(told(list(made.values())))
    for steps_here, steps_there, (way, with_cache, ids) in operations:
        take(here.decode(steps_here).chunks, made)
        take(there.decode(steps_there).chunks, made)
        source, target = (here, there) if way == "there" else (there, here)
        moving = [i for i in sorted(ids) if at[i] is source and not made[i].finish]
        transfers = source.export(moving, with_cache)
        assert all(p.cache is None for p in transfers if not with_cache)
        target.accept(told([made[i] for i in moving]), transfers)
        at.update(dict.fromkeys(moving, target))
    for _ in range(50):
        take(here.decode(5).chunks, made)
        take(there.decode(5).chunks, made)
    assert_answers(list(made.values()))


def test_a_cache_of_another_model_is_refused() -> None:
    a = engine(model())
    made = rollouts(PROMPTS[2:4])
    a.admit(told(made))
    take(a.decode(3).chunks, dict(enumerate(made)))
    transfers = a.export([0, 1], with_cache=True)
    other = engine(from_config(hf.LlamaConfig(**SMALL)))
    run(other, [[1, 2]])
    other.accept(told(made), transfers)
    with raises(EngineError, "other-model", "[(2, 8), (2, 8)]", "[(4, 8), (4, 8)]"):
        other.decode(1)


def test_responses_with_sampling_of_their_own_are_those_of_an_engine_with_such_settings() -> None:
    """Temperature, truncation, length, random numbers and the likeliest tokens, side by side."""
    model, prompts = llama(seed=3), random_prompts([3, 9, 6, 4, 5])
    own = [
        Sampling(5, 0.0, top_logprobs=3),
        Sampling(9, 0.6, top_k=4, top_logprobs=6),
        Sampling(LIMIT, 1.7, top_p=0.5, seed=(SEED + 1, 7), top_logprobs=VOCABULARY),
        Sampling(2, 0.6, top_k=4),
        None,
    ]
    mixed, made = engine(model), rollouts(prompts)
    asked = [replace(r, sampling=s) for r, s in zip(told(made), own, strict=True)]
    mixed.admit(asked)
    by_id, likeliest = {r.id: r for r in made}, dict[int, list[Any]]()
    while any(r.finish is None for r in made):
        chunks = mixed.decode(3).chunks
        take(chunks, by_id)
        for chunk in chunks:
            likeliest.setdefault(chunk.rollout_id, []).extend(chunk.top_logprobs)
    for r, s in zip(made, own, strict=True):
        sampling = s or Sampling(LIMIT)
        t, k, p = sampling.distribution
        options: dict[str, Any] = {"temperature": t, "top_k": k, "top_p": p}
        alone = engine(model, max_new_tokens=sampling.max_new_tokens, **options)
        seed, stream = sampling.seed or (SEED, r.id)
        alone.settings = replace(alone.settings, seed=seed)
        (same,) = (Rollout(stream, r.prompt, 0),)
        alone.admit(told([same]))
        finish(alone, [same])
        assert list(r.tokens) == list(same.tokens)
        assert list(r.logprobs) == pytest.approx(list(same.logprobs), abs=1e-5)
        found = likeliest[r.id]
        assert len(found) == (len(r) if sampling.top_logprobs else 0)
        for token, logprob, row in zip(r.tokens, r.logprobs, found, strict=False):
            assert len(row) <= min(sampling.top_logprobs, k or VOCABULARY)
            assert [x for _, x in row] == sorted((x for _, x in row), reverse=True)
            if sampling.top_logprobs >= (k or VOCABULARY):  # all that can be sampled
                assert dict(row)[token] == pytest.approx(logprob, abs=1e-5)
                assert sum(math.exp(x) for _, x in row) == pytest.approx(1, abs=1e-5)


def test_a_response_needs_room_for_its_own_limit() -> None:
    e, (r,) = engine(llama()), told(rollouts([[3, 4, 5]]))
    with raises(EngineError, "too-few-positions"):
        e.admit([replace(r, sampling=Sampling(10_000))])


# -- how responses end ---------------------------------------------------------------------------


def free_run(prompt: Sequence[int]) -> Rollout:
    """What the model answers where nothing ends it."""
    return run(engine(model()), [prompt])[0]


@pytest.mark.parametrize("at", [0, 4, LIMIT - 1])
def test_end_token(at: int) -> None:
    for n in range(1, 60):
        prompt = random_prompts([n])[0]
        tokens = free_run(prompt).tokens
        if tokens.index(tokens[at]) == at:
            break
    ended = run(engine(model(), end=[tokens[at], VOCABULARY]), [prompt])[0]
    assert (ended.tokens, ended.finish) == (tokens[: at + 1], FinishReason.STOP)
    other = run(engine(model(), end=[VOCABULARY]), [prompt])[0]
    assert (other.tokens, other.finish) == (tokens, FinishReason.LENGTH)


@pytest.mark.parametrize("last", [3, 7, LIMIT])
def test_stop_string_over_several_tokens(last: int) -> None:
    tokens = free_run(PROMPTS[2]).tokens
    text = Letters().decode(tokens[:last])
    string = text[-3:]
    assert text.index(string) == len(text) - 3
    e = engine(model(), stop=["never this", string])
    ended = run(e, [PROMPTS[2]], chunk=last - 1)[0]  # the string lies across two chunks
    assert (ended.tokens, ended.finish) == (tokens[:last], FinishReason.STOP)


def test_the_prompt_is_not_searched_for_stop_strings() -> None:
    prompt = PROMPTS[2]
    tokens = free_run(prompt).tokens
    string = Letters().decode([prompt[-1], tokens[0]])
    assert string not in Letters().decode(tokens)
    assert run(engine(model(), stop=[string]), [prompt])[0].tokens == tokens


def test_stop_strings_see_whole_characters_near_the_end() -> None:
    tokenizer = byte_tokenizer()
    stops = StopStrings(["né.", "\n\n"], tokenizer)

    def ends(text: str) -> list[int]:
        tokens = list(text.encode())
        return [n for n in range(1, len(tokens) + 1) if stops.ends(tokens[:n])][:1]

    assert ends("il est né. Il") == [len("il est né.".encode())]
    assert ends("né") == []
    assert ends("a\nb\n\nc") == [5]
    assert ends("nné.") == [5]
    assert ends("ünününé" + "." * 2) == [len("ünününé.".encode())]


def test_positions_end_where_the_models_do() -> None:
    m = from_config(hf.GPT2Config(**N_STYLE, initializer_range=0.3))
    e = engine(m, temperature=0, slots=2, prefill_tokens=5)
    made = run(e, random_prompts([28 - LIMIT, 4, 28 - LIMIT], 97))
    assert_greedy_as_transformers(m, made, 1e-4)
    with raises(EngineError, "too-few-positions", 17, 12, 28, "rollout.max_new_tokens"):
        e.admit(told(rollouts(random_prompts([28 - LIMIT + 1]))))


# -- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_new_weights_are_used_from_their_version_on(shared: bool) -> None:
    m, old, new = llama(), llama(), llama(seed=1)
    e = engine(m, slots=5)
    made = rollouts([*PROMPTS[2:6], PROMPTS[0]])
    by_id = {r.id: r for r in made}
    e.admit(told(made))
    take(e.decode(4).chunks, by_id)
    had = [len(r) for r in made]
    if shared:
        m.load_state_dict(new.state_dict())
    e.load(weights_of(new, 3, copied=not shared))
    finish(e, made)
    for r, n in zip(made, had, strict=True):
        assert 0 < n < LIMIT
        assert list(r.versions) == [0] * n + [3] * (LIMIT - n)
        before, after = plain_logprobs(old, r), plain_logprobs(new, r)
        got = torch.tensor(r.logprobs)
        assert torch.allclose(got[:n], before[:n], rtol=0, atol=1e-4)
        assert torch.allclose(got[n:], after[n:], rtol=0, atol=1e-4)
        assert (after - before).abs()[n:].max() > 0.1


@torch.no_grad()
def continued_logprobs(before: Any, after: Any, r: Rollout, kept: int) -> Tensor:
    """[T - kept] of the last tokens under ``after``, over keys that ``before`` made.

    Those keys are of all tokens but the newest of the first ``kept``.
    """
    ids = torch.tensor([[*r.prompt.tokens, *r.tokens]])
    first = len(r.prompt.tokens) + kept - 1
    past = hf.DynamicCache()
    before(input_ids=ids[:, :first], past_key_values=past, use_cache=True)
    logits = after(input_ids=ids[:, first:-1], past_key_values=past, use_cache=True).logits[0]
    return logits.log_softmax(-1).gather(1, ids[0, first + 1 :, None])[:, 0]


@pytest.mark.parametrize("moved", [False, True])
def test_a_cache_that_is_reused_is_of_the_old_weights(moved: bool) -> None:
    m, old, new = llama(), llama(), llama(seed=1)
    made = rollouts(PROMPTS[2:4])
    by_id = {r.id: r for r in made}
    e = engine(m, own={"carry": "reuse"})
    e.admit(told(made))
    take(e.decode(4).chunks, by_id)
    if moved:  # a transfer that is on its way while the weights change
        transfers = e.export([0, 1], with_cache=True)
        e = engine(m, own={"carry": "reuse"})
    m.load_state_dict(new.state_dict())
    e.load(weights_of(new, 1, copied=False))
    if moved:
        e.accept(told(made), transfers)
    finish(e, made)
    for r in made:
        assert list(r.versions) == [0] * 4 + [1] * (LIMIT - 4)
        expected = continued_logprobs(old, new, r, 4)
        assert torch.allclose(torch.tensor(r.logprobs[4:]), expected, rtol=0, atol=1e-4)
        assert (expected - plain_logprobs(new, r)[4:]).abs().max() > 0.1


@pytest.mark.parametrize("seed", [0, 3, 7])
def test_after_a_weight_sync_it_is_the_engine_of_a_resumed_run_bit_for_bit(seed: int) -> None:
    """Half-decoded rows are prefilled in the passes that they would have where admitted anew."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 30))] for _ in range(15)
    ]
    m, new = llama(), llama(seed=1)
    options: dict[str, Any] = {"end": range(3, 9), "max_new_tokens": 30, "prefill_tokens": 12}
    here, resumed = (engine(m, **options, own={"rows": 16}) for _ in range(2))
    made = rollouts(prompts)
    here.admit(told(made[:11]))
    take(
        here.decode(100, stop_after=4).chunks, dict(enumerate(made))
    )  # others move into their slots
    m.load_state_dict(new.state_dict())
    here.load(weights_of(new, 1, copied=False))
    resumed.version = 1
    left = [r for r in made if not r.finish]
    assert sum(1 for r in left if r.tokens) > 3
    ends = []
    for e, part in ((here, left), (resumed, copy.deepcopy(left))):
        e.admit(told([r for r in part if e is resumed or r.id >= 11]))
        take(e.decode(100, stop_after=6).chunks, {r.id: r for r in part})
        ends.append([(r.tokens, r.logprobs) for r in part])
    assert ends[0] == ends[1]


def test_a_cache_on_its_way_while_the_weights_change_is_made_again() -> None:
    m, new = llama(), llama(seed=1)
    made = rollouts(PROMPTS[2:4])
    a, b = engine(m), engine(m, own={"rows": 1})
    a.admit(told(made))
    take(a.decode(4).chunks, dict(enumerate(made)))
    transfers = a.export([0, 1], with_cache=True)
    b.accept(
        told(made[:1]), transfers[:1]
    )  # one waits in the queue, the other is accepted afterwards
    m.load_state_dict(new.state_dict())
    b.load(weights_of(new, 1, copied=False))
    b.accept(told(made[1:]), transfers[1:])
    for r in finish(b, made):
        got, expected = torch.tensor(r.logprobs), plain_logprobs(new, r)
        assert torch.allclose(got[4:], expected[4:], rtol=0, atol=1e-4)


def test_no_response_begins_on_a_reused_prompt() -> None:
    """Neither one that was half prefilled at the weight sync, nor a new one of a carried prompt."""
    m, new = llama(), llama(seed=1)
    long = random_prompts([40])[0]
    made = rollouts([PROMPTS[2], long, PROMPTS[2], long])
    by_id = {r.id: r for r in made}
    e = engine(m, prefill_tokens=8, own={"carry": "reuse"})
    for r in made[:2]:
        e.admit(told([r]))
        take(e.decode(2).chunks, by_id)
    assert [len(r) for r in made] == [4, 0, 0, 0]
    assert [row.cached for row in e._slots.rows] == [len(PROMPTS[2]) + 3, 16]
    m.load_state_dict(new.state_dict())
    e.load(weights_of(new, 1, copied=False))
    e.admit(told(made[2:]))
    while not made[0].finish:
        take(e.decode(1).chunks, by_id)
    assert all(len(r) for r in made[2:])  # they did not wait for the one with the old prompt
    finish(e, made)
    for r in made[1:]:
        assert set(r.versions) == {1}
        assert_logprobs(new, r, 1e-4)


def test_the_engine_works_on_the_models_own_memory() -> None:
    m = llama()
    where = {k: p.data_ptr() for k, p in m.named_parameters()}
    e = engine(m)
    run(e, PROMPTS)
    assert {k: p.data_ptr() for k, p in m.named_parameters()} == where
    held = ModelPass(m, SlotCache(1), RolloutConfig()).head.weight
    assert held.data_ptr() == m.get_output_embeddings().weight.data_ptr()
    with torch.no_grad():
        m.get_output_embeddings().weight.zero_()
    flat = run(e, PROMPTS)[0]
    assert flat.logprobs == pytest.approx([-math.log(VOCABULARY)] * LIMIT, abs=rounding(VOCABULARY))


# -- CUDA graphs ---------------------------------------------------------------------------------


@torch.inference_mode()
def test_graphed_decode_is_eager_decode() -> None:
    config = RolloutConfig(temperature=0.9)
    slots = SlotCache(6)
    steps = ModelPass(model(), slots, config)
    graphed = GraphedDecode(steps, EagerBackend())
    slots.reserve(40)
    prompts = random_prompts([9, 30, 2, 17, 25, 300])
    for n, more in ((1, 0), (3, 0), (5, 2), (6, 0), (2, 2)):
        if n == 6:
            slots.reserve(310)  # what was set up for smaller slots must not be used any more
        steps.prefill(range(n), [0] * n, [p[:-1] for p in prompts[:n]])
        at = torch.tensor([len(p) - 1 for p in prompts[:n]])[:, None] + torch.arange(1 + more)
        if n == 3:
            at[1] = slots.capacity  # sits out
        ids = torch.tensor([[p[-1]] + [7] * more for p in prompts[:n]])
        seeds = torch.tensor([[stream_seed(1, i)] * (1 + more) for i in range(n)])
        inputs = StepInputs(ids, at, seeds, torch.arange(n)[:, None] + torch.arange(1 + more))
        read = max(len(p) for p in prompts[:n]) + more
        expected, got = steps.decode(inputs, read), graphed.decode(inputs, read)
        active = at < slots.capacity
        assert got[0][active].tolist() == expected[0][active].tolist()
        assert torch.allclose(got[1][active], expected[1][active], rtol=0, atol=1e-5)


def test_slots_and_lengths_are_reserved_once_where_graphs_hold_their_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = random_prompts([3, 9, 40, 11, 250, 2])
    plain = run(engine(llama()), prompts)
    backend = EagerBackend()
    monkeypatch.setattr("stretto.rollout.steps.backend_of", lambda device: backend)
    e = engine(llama(), own={"longest": 250 + LIMIT})
    made = rollouts(prompts)
    e.admit(told(made[:2]))
    first = e.decode(2).chunks
    place = e._slots.cache._keys[0].data_ptr()
    e.admit(told(made[2:]))  # more rows, and longer ones
    take(first, {r.id: r for r in made})
    finish(e, made)
    assert [r.tokens for r in made] == [r.tokens for r in plain]
    assert e._slots.cache._keys[0].data_ptr() == place
    # Rows of 2, 7 (all slots), 4 and 1 at a time; up to 256 positions, then up to all.
    assert backend.captures <= 2 * 4
    assert e.graphed_steps == backend.replays > 0


@torch.inference_mode()
def test_graphs_are_for_numbers_of_rows_and_lengths_that_double() -> None:
    slots, backend = SlotCache(8), EagerBackend()
    graphed = GraphedDecode(ModelPass(model(), slots, RolloutConfig()), backend)
    slots.reserve(3000)

    def captures_after(n: int, read: int) -> int:
        graphed.decode(StepInputs(*torch.ones(4, n, 1, dtype=torch.long)), read)
        return backend.captures

    assert [captures_after(n, 2) for n in (1, 2, 3, 4, 5, 8)] == [1, 2, 3, 3, 4, 4]
    reads = (256, 257, 512, 513, 1024, 2000, 2048, 2049, 3000)
    assert [captures_after(8, read) - 4 for read in reads] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert graphed.replays == 6 + len(reads)


def test_rows_with_sampling_of_their_own_are_decoded_by_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits are captured, for each number of rows. Tokens are those of decoding without graphs."""
    backend, found = EagerBackend(), []
    for graphs in (False, True):
        if graphs:
            monkeypatch.setattr("stretto.rollout.steps.backend_of", lambda device: backend)
        made, e = rollouts(random_prompts([3, 9, 40])), engine(llama())
        own = [Sampling(LIMIT, temperature) for temperature in (0.0, 0.7, 1.3)]
        e.admit([replace(r.response(), sampling=s) for r, s in zip(made, own, strict=True)])
        found.append([r.tokens for r in finish(e, made)])
    assert found[0] == found[1]
    assert backend.captures <= 3
    assert e.graphed_steps == backend.replays >= LIMIT


@pytest.mark.parametrize("failures", [1, 2])
def test_steps_whose_capture_fails_twice_run_eagerly_and_that_is_said_once(
    failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = random_prompts([3, 9, 40, 11, 2])
    plain = run(engine(llama()), prompts)
    backend = EagerBackend(failures)
    monkeypatch.setattr("stretto.rollout.steps.backend_of", lambda device: backend)
    e = engine(llama())
    got = run(e, prompts)
    assert [r.tokens for r in got] == [r.tokens for r in plain]
    said = [record.getMessage() for record in caplog.records]
    if failures == 1:
        assert not said
        assert e.graphed_steps == backend.replays > 0
    else:
        assert e.graphed_steps == backend.captures == 0
        assert said == [
            "decode steps run without CUDA graphs, as one could not be captured: "
            "operation not permitted when stream is capturing"
        ]


def test_a_capture_minds_its_own_thread_alone_and_leaves_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current: list[Any] = []
    sides: list[Any] = []
    modes = []

    class Stream:
        def __init__(self, priority: int) -> None:
            self.priority = priority

        def wait_stream(self, other: Any) -> None:
            pass

    @contextmanager
    def stream(name: Any) -> Iterator[None]:
        before, current[0] = current[0], name
        try:
            yield
        finally:
            current[0] = before

    class Graph:
        def __init__(self, graph: Any, pool: Any, side: Stream, capture_error_mode: str) -> None:
            sides.append(side)
            assert devices._CAPTURES.locked()
            assert not gc.isenabled()  # what is freed during a capture can make it invalid
            modes.append(capture_error_mode)

        def __enter__(self) -> None:
            current[0] = "capture's"

        def __exit__(self, *error: object) -> None:  # as torch's, which then leaves its stream
            raise RuntimeError("the capture is invalid")

    main = Stream(-1)
    current.append(main)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    backend = devices.CudaBackend(torch.device("cuda", 0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="invalid"):
            backend.capture(lambda: (torch.ones(1),), None)
    assert modes == ["thread_local"] * 2
    assert sides[0] is sides[1]  # their pool's memory is the stream's
    assert sides[0] is not main
    assert sides[0].priority == -1
    assert current == [main]
    assert gc.isenabled()
    assert not devices._CAPTURES.locked()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama", "qwen2, windows", "gemma2, caps"])
def test_cuda_graphs_decode_as_eager(name: str) -> None:
    m = (llama() if name == "llama" else from_config(WORKS[name]())).cuda()
    limit = m.config.max_position_embeddings - LIMIT
    prompts = random_prompts([min(n, limit) for n in (3, 9, 40, 11, 300, 2)])
    results = []
    for graphs in (True, False):  # the longest comes late: slots grow after the first capture
        e = engine(
            m, temperature=0, slots=3, prefill_tokens=64, engine_args={"cuda_graphs": graphs}
        )
        results.append(run(e, prompts, chunk=4))
    for a, b in zip(*results, strict=True):
        assert a.tokens == b.tokens
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)
        assert_logprobs(m, a, 1e-3)


def test_packed_layers_give_the_same_bits_and_follow_the_weights() -> None:
    """bfloat16 on a CPU: in the context packed, outside plain, and packed anew after an update."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 32, bias=False))
    net = net.to(torch.bfloat16)
    x, many = (torch.randn(n, 1, 64, dtype=torch.bfloat16) for n in (5, 200))
    packed = PackedLinears(net)
    with torch.no_grad():
        for _ in range(2):
            plain, plain_many = net(x), net(many)
            with packed:
                assert torch.equal(net(x), plain)
                assert torch.equal(net(many), plain_many)
            assert torch.equal(net(x), plain)
            net[0].weight.mul_(1.5)
            net[1].weight.add_(0.25)
    assert "forward" not in vars(net[0])


def test_packed_layers_of_shared_weights_are_freed_once_all_responses_are_complete() -> None:
    """The learner has the memory during its update. Copies of weights are kept for more prompts."""
    m = larger(torch.bfloat16, layers=1)
    e = engine(m, max_new_tokens=3)
    if not (layers := len(e._packed.layers)):
        pytest.skip("this CPU packs no layers")
    expected = run(e, PROMPTS[2:4])
    assert len(e._packed._packed) == layers
    e.load(weights_of(m, 1, copied=False))
    e.release([0, 1])
    made = rollouts(PROMPTS[2:4])
    e.admit(told(made))
    for chunk in e.decode(1).chunks:
        made[chunk.rollout_id].append(chunk)
    assert len(e._packed._packed) == layers  # kept between chunks
    finish(e, made)
    assert not e._packed._packed
    assert [r.tokens for r in made] == [r.tokens for r in expected]


# -- several bodies, several threads ---------------------------------------------------------------


def larger(dtype: torch.dtype, layers: int = 2) -> Any:
    """Large enough that two threads are at work at the same time."""
    config = {**GROUPED, "hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1}
    config["num_hidden_layers"] = layers
    return from_config(hf.LlamaConfig(**config)).to(dtype)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums whose order does not depend on how many cores are idle."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_engines_in_two_threads_do_what_each_does_alone(dtype: torch.dtype) -> None:
    shared = larger(dtype)
    prompts = random_prompts([9, 3, 12, 5, 7, 20], 97)

    def work(n: int, m: Any) -> list[tuple[list[int], list[float]]]:
        made = run(engine(m, slots=2 + n), prompts[n:] * 3, chunk=1)
        return [(r.tokens, r.logprobs) for r in made]

    alone = [work(n, shared) for n in range(2)]
    with ThreadPoolExecutor(2) as threads:
        bodies = [with_own_structure(shared) for _ in range(2)]
        assert list(threads.map(work, range(2), bodies)) == alone


def adapted(dtype: torch.dtype = torch.float32) -> Any:
    m = from_config(hf.LlamaConfig(**GROUPED, tie_word_embeddings=True)).to(dtype)
    return add_lora(m, ModelConfig(lora_rank=4), "CAUSAL_LM")


@pytest.mark.parametrize("make", [llama, adapted])
def test_own_structure_shares_every_weight_and_no_module(make: Callable[[], Any]) -> None:
    m = make()
    body = with_own_structure(m)
    assert {n: id(p) for n, p in body.named_parameters()} == {
        n: id(p) for n, p in m.named_parameters()
    }
    assert {n: id(b) for n, b in body.named_buffers()} == {n: id(b) for n, b in m.named_buffers()}
    assert not {id(x) for x in m.modules()} & {id(x) for x in body.modules()}
    ids = torch.tensor([PROMPTS[2]])
    body.get_input_embeddings().register_forward_hook(lambda *_: 0 * _[2])
    m.train()
    assert not body.training
    with torch.no_grad():
        assert not torch.equal(m(input_ids=ids).logits, body(input_ids=ids).logits)


@pytest.mark.parametrize("make", [llama, adapted])
def test_own_weights_follow_only_what_is_loaded(make: Callable[[], Any]) -> None:
    m = make()
    trained = TrainedModel(m, LearningRate(0.1, 5), TrainingConfig())
    body = with_own_weights(m)
    assert not any(p.requires_grad for p in body.parameters())
    where = {n: p.data_ptr() for n, p in body.named_parameters()}
    kept = {n for n, p in m.named_parameters() if p.data_ptr() == where[n]}
    assert kept == {n for n, p in m.named_parameters() if not p.requires_grad}
    assert body.get_output_embeddings().weight is body.get_input_embeddings().weight
    before = run(engine(m), PROMPTS[:1])[0]
    for p in m.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    trained.update()
    e = engine(body)
    r = run(e, PROMPTS[:1])[0]
    assert (r.tokens, r.logprobs) == (before.tokens, before.logprobs)
    assert (plain_logprobs(m, r) - torch.tensor(r.logprobs)).abs().max() > 0.1
    e.load(ticket(1, fingerprint(m.named_parameters()), trained.snapshot()))
    e.admit(told(made := rollouts(PROMPTS[:1])))
    assert_logprobs(m, finish(e, made)[0], 1e-4)
    assert {n: p.data_ptr() for n, p in body.named_parameters()} == where


def test_a_copy_in_bfloat16_has_the_bits_of_the_model() -> None:
    m = larger(torch.bfloat16)
    TrainedModel(m, LearningRate(0.1, 5), TrainingConfig())  # its hooks stay behind
    a, b = (run(engine(x), random_prompts([9, 3], 97)) for x in (m, with_own_weights(m)))
    assert [(r.tokens, r.logprobs) for r in a] == [(r.tokens, r.logprobs) for r in b]


# -- interruption ----------------------------------------------------------------------------------


@contextmanager
def interrupted_at(count: int, *codes: CodeType) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before the ``count``-th line executed in these functions."""
    seen: list[int] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in codes:
            return None
        if event == "line":
            seen.append(frame.f_lineno)
            if len(seen) == count:
                raise KeyboardInterrupt
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(outer)


def test_layers_are_restored_wherever_decoding_is_interrupted() -> None:
    m = larger(torch.bfloat16, layers=1)
    e = engine(m, max_new_tokens=3)
    layers = len(e._packed.layers)
    if not layers:
        pytest.skip("this CPU packs no layers")
    codes = [
        f.__code__
        for f in (
            PackedLinears.__enter__,
            PackedLinears.__exit__,
            PackedLinears.restore,
            TorchEngine._decode_steps.__wrapped__,  # type: ignore[attr-defined]
        )
    ]
    expected = run(e, PROMPTS[2:4])
    for count in itertools.count(1):
        made = rollouts(PROMPTS[2:4])
        e.release([0, 1])
        e.admit(told(made))
        e._packed.invalidate()
        try:
            with interrupted_at(count, *codes):
                finish(e, made, chunk=2)
        except KeyboardInterrupt:
            assert not [n for n, x in m.named_modules() if "forward" in vars(x)]
        else:
            break
    assert count > 3 * 4 * layers  # packed and restored, twice to be sure, in three calls
    assert [r.tokens for r in made] == [r.tokens for r in expected]


def test_a_call_is_recorded_in_parts_of_growing_context() -> None:
    """Two prompts of 3 and 5 tokens get 12 each. Each step reads the longer row twice."""
    e = engine(llama())
    e.admit(told(rollouts([[1, 2, 3], [4, 5, 6, 7, 8]])))
    works = GeneratorService(e).decode(LIMIT, 0).work
    names = ("steps", "tokens", "context", "prefilled")
    assert [tuple(work.attributes[name] for name in names) for work in works] == [
        (1, 2, 2 * 5, 2 + 4),
        (3, 6, 2 * (6 + 7 + 8), 0),
        (8, 16, 2 * sum(range(9, 17)), 0),
    ]
    assert {work.name for work in works} == {"gen"}
    assert all(before.end_s == after.start_s for before, after in itertools.pairwise(works))
    assert all(work.end_s > work.start_s for work in works)
