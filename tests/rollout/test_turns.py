"""Rollouts of episodes in Stretto's own engine: turns end, and rows are parked and go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from engine_helpers import GROUPED, from_config, plain_logprobs, played_whole
from helpers import CHANNEL, llama, ticket, told
from rounding import rounding
from stretto.config import RolloutConfig
from stretto.models.cached import SlotCache
from stretto.models.weights import fingerprint
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.schedules.rollout import Rollout
from stretto.testing.contracts import WAITS, answer, context_of, episodes, play
from stretto.types import FinishReason, Sampling, WeightsRef

ENDS = frozenset(range(3, 9))
LIMIT, TURN_LIMIT = 40, 12
PROMPTS = [[8, 1, 2, 33, 4, 5, 60]] * 4 + [[11 + i, 2, 9] for i in range(4)]


def engine(model: Any = None, rows: int = 4, **own: Any) -> TorchEngine:
    config = RolloutConfig(batch=8, max_new_tokens=LIMIT, **own.pop("options", {}))
    given = EngineSettings(
        rollout=config, seed=5, end_tokens=ENDS, rows=rows, channel=CHANNEL, **own
    )
    return TorchEngine(model or llama(), given)


def made_anew(prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Rollout]:
    return episodes(prompts, Sampling(LIMIT, max_turn_tokens=TURN_LIMIT))


@pytest.fixture(scope="module")
def alone() -> list[Rollout]:
    """The episodes, each turn decoded from the whole transcript."""
    made = made_anew()
    played_whole(engine, made)
    return made


def assert_same(made: Sequence[Rollout], others: Sequence[Rollout]) -> None:
    for r, other in zip(made, others, strict=True):
        assert (r.tokens, r.turns, r.ended_by) == (other.tokens, other.turns, other.ended_by)


def parked(e: TorchEngine, count: int = 1) -> list[Rollout]:
    """Rollouts whose first turn has ended, in their engine; others are released."""
    made = made_anew([[20 + i, 9, 30 + i] for i in range(20)])
    e.admit(told(made))
    waiting = []
    for chunk in e.decode(1000).chunks:
        made[chunk.rollout_id].append(chunk)
        if chunk.finish is FinishReason.TURN:
            waiting.append(made[chunk.rollout_id])
    assert len(waiting) >= count
    e.release({r.id for r in made} - {r.id for r in waiting[:count]})
    return waiting[:count]


def go_on(e: TorchEngine, r: Rollout) -> None:
    """Decode the next turn."""
    assert answer(r)
    e.admit(told([r]))
    (chunk,) = e.decode(1000).chunks
    r.append(chunk)


@pytest.mark.parametrize("way", ["kept", "made again", "moved with its cache"])
def test_logprobs_are_those_of_a_pass_over_the_whole_transcript(way: str) -> None:
    """Sums of 16 and 32 features and of up to 47 positions in each of two layers, and 61 words."""
    model, made = llama(), made_anew()
    play(engine(model), made, way=WAITS[way])
    terms = 2 * (5 * 16 + 32 + 2 * 47) + 16 + 61
    for r in made:
        sampled = torch.from_numpy(r.sampled)
        expected, got = plain_logprobs(model, r), torch.tensor(r.logprobs)
        bound = rounding(terms) * expected.abs().max()
        assert (got - expected)[sampled].abs().max() <= bound
        assert not got[~sampled].any()


def test_packed_layers_of_shared_weights_are_freed_with_the_last_episode() -> None:
    """Not while one waits for its environment: its next turn would pack them again."""
    model = from_config(hf.LlamaConfig(**GROUPED | {"hidden_size": 128, "intermediate_size": 256}))
    e = engine(model.to(torch.bfloat16))
    if not (layers := len(e._packed.layers)):
        pytest.skip("this CPU packs no layers")
    e.load(ticket(1, fingerprint(model.named_parameters())))
    (waiting,) = parked(e)
    assert len(e._packed._packed) == layers
    e.release([waiting.id])
    assert not e._packed._packed


def test_what_is_kept_goes_on_bit_for_bit() -> None:
    """As what moved with its cache, and as what went to the host and back."""
    found = []
    for way in ("kept", "offloaded", "offloaded and back", "moved with its cache"):
        made = made_anew()
        play(engine(), made, way=WAITS[way])
        found.append([(r.tokens, r.logprobs) for r in made])
    assert all(other == found[0] for other in found[1:])


@pytest.mark.parametrize(
    ("rows", "prefill_tokens", "size"), [(1, 4096, 5), (2, 3, 1), (8, 1, 7), (3, 30, 100)]
)
@pytest.mark.parametrize("way", ["kept", "made again"])
def test_tokens_depend_on_neither_slots_nor_budget(
    alone: Sequence[Rollout], way: str, rows: int, prefill_tokens: int, size: int
) -> None:
    made, e = made_anew(), engine(rows=rows, options={"prefill_tokens": prefill_tokens})
    play(e, made, size, way=WAITS[way])
    assert_same(made, alone)


@pytest.mark.parametrize("how", ["keep", "offload", "remake"])
def test_of_what_is_kept_only_the_context_is_prefilled(how: Any) -> None:
    """The newest token is never in the cache: that of the turn is read with the context, and the
    last of the context is not.
    """
    e = engine()
    (r,) = parked(e)
    e.hold([r.id], how)
    before, whole = e.prefilled_tokens, len(r.prompt.tokens) + len(r)
    context = len(context_of(r.id, 1))
    go_on(e, r)
    read = e.prefilled_tokens - before
    assert read == (whole + context - 1 if how == "remake" else context)


def test_the_slot_of_one_that_waits_is_anothers_in_the_same_call() -> None:
    e, made = engine(rows=1), made_anew()
    e.admit(told(made))
    chunks = e.decode(1000).chunks
    assert [c.rollout_id for c in chunks] == [r.id for r in made]
    assert all(c.finish for c in chunks)


def test_episodes_with_the_settings_distribution_are_decoded_by_the_fast_step(
    monkeypatch: pytest.MonkeyPatch, alone: Sequence[Rollout]
) -> None:
    monkeypatch.delattr("stretto.rollout.engine.decode_each")
    made = made_anew()
    play(engine(), made)
    assert_same(made, alone)


# -- weights ---------------------------------------------------------------------------------------


def synced(e: TorchEngine, version: int) -> None:
    named = {n: p.detach().clone() for n, p in llama(seed=1).named_parameters()}
    ref: WeightsRef = ticket(version, fingerprint(named.items()), named)
    e.load(ref)


@pytest.mark.parametrize("carry", ["recompute", "reuse"])
def test_new_weights_that_come_in_a_wait(carry: Any) -> None:
    """Keys and values of the old ones are made again, or reused, as of rows in flight."""
    old, new = llama(), llama(seed=1)
    e = engine(llama(), carry=carry)
    (r,) = parked(e)
    first, before = len(r.prompt.tokens) + len(r) - 1, e.prefilled_tokens
    synced(e, 3)
    go_on(e, r)
    context = len(context_of(r.id, 1))
    assert e.prefilled_tokens - before == context + (first if carry == "recompute" else 0)
    start = r.context[-1][1]
    assert set(r.versions[start:]) == {3}
    got, all_new = torch.tensor(r.logprobs)[start:], plain_logprobs(new, r)[start:]
    if carry == "recompute":
        expected = all_new
    else:
        ids = torch.tensor([[*r.prompt.tokens, *r.tokens]])
        with torch.no_grad():
            cache = old(input_ids=ids[:, :first], use_cache=True).past_key_values
            logits = new(input_ids=ids[:, first:-1], past_key_values=cache).logits[0]
        rows = logits.log_softmax(-1).gather(1, ids[0, first + 1 :, None])[:, 0]
        expected = rows[-len(got) :]
        assert (expected - all_new).abs().max() > 0.1
    assert torch.allclose(got, expected, rtol=0, atol=1e-4)


# -- bad days --------------------------------------------------------------------------------------


def test_a_thousand_that_wait_keep_no_more_than_the_slots_could_hold() -> None:
    """Those that have waited for longest are made again; all go on with the same tokens."""
    e = engine(rows=40)
    prompts = [[20 + i % 30, 9, 30 + i // 40] for i in range(1000)]
    made = episodes(prompts, Sampling(16, max_turn_tokens=8))
    kept = []

    def waits(e: Any, ids: list[int]) -> None:
        rows = list(e._parked.values())
        capacity = e._slots.most * e._slots.cache.capacity
        had = [row for row in rows if row.kv]
        assert sum(row.cached for row in had) <= capacity
        assert rows[len(rows) - len(had) :] == had  # the youngest
        kept.append((len(had), len(rows)))

    play(e, made, size=1000, way=(waits, WAITS["kept"][1]))
    assert 0 < kept[0][0] < kept[0][1]
    few = [r.id for r in made if len(r.turns) > 1][::100]
    some = episodes([prompts[i] for i in few], Sampling(16, max_turn_tokens=8))
    for r, i in zip(some, few, strict=True):
        r.id = i
    played_whole(engine, some)
    assert_same([made[i] for i in few], some)
    assert not e._parked


def outside(e: TorchEngine) -> list[int]:
    """Tokens with keys and values of each row that has them outside the slots."""
    return [row.cached for row in (*e._parked.values(), *e._slots.waiting) if row.kv]


def test_answered_rows_that_wait_for_a_slot_count_as_parked_ones() -> None:
    """Two slots of 64 positions: 128 tokens outside them, however many answers came."""
    e, sampling = engine(rows=2), Sampling(40, max_turn_tokens=8)
    made = episodes([[20 + i % 30, 9, 30 + i // 40] for i in range(60)], sampling)
    e.admit(told(made))
    most = 0
    for _ in range(400):
        chunks = e.decode(1).chunks
        for chunk in chunks:
            r = made[chunk.rollout_id]
            r.append(chunk)
            if chunk.finish is FinishReason.TURN and answer(r):
                e.admit(told([r]))
        most = max(most, sum(outside(e)))
        assert e._slots.most * e._slots.cache.capacity == 2 * 64
    assert 64 < most <= 128


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("finish", [None, FinishReason.TURN])
def test_rows_that_come_with_keys_and_values_are_bounded_on_device_and_host(
    device: str, finish: FinishReason | None
) -> None:
    """A row may get 3 + 40 tokens, so that one slot has room for 43."""
    source, e = engine(rows=40), engine(rows=1)
    waiting = parked(source, 12)
    transfers = source.export([r.id for r in waiting], with_cache=True)
    assert sum(t.cached_tokens for t in transfers) > 43
    e.device = torch.device(device)  # from another device, a CPU is the host
    e.accept([replace(r, finish=finish) for r in told(waiting)], transfers)
    kept, cached = outside(e), [t.cached_tokens for t in transfers]
    assert 0 < sum(kept) <= 43
    youngest = finish is FinishReason.TURN  # while those at the end of a queue wait for longest
    assert kept == (cached[-len(kept) :] if youngest else cached[: len(kept)])


def test_where_the_device_has_no_room_for_copies_they_are_made_again(
    monkeypatch: pytest.MonkeyPatch, alone: Sequence[Rollout]
) -> None:
    def take(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(SlotCache, "take", take)
    made = made_anew()
    play(engine(), made)
    assert_same(made, alone)
    sliced = engine()
    sliced._sliced = True  # other ranks may have room, and would prefill other tokens
    with pytest.raises(torch.OutOfMemoryError):
        play(sliced, made_anew())


@contextmanager
def interrupted_in(e: TorchEngine, steps: int) -> Iterator[None]:
    """Have the step after so many ones break off."""
    step, left = e._pass.decode, [steps]

    def breaking(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return step(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(e._pass, "decode", breaking)
        yield


@pytest.mark.parametrize("steps", range(0, 24, 3))
def test_an_interrupted_call_leaves_those_that_wait(alone: Sequence[Rollout], steps: int) -> None:
    """Those in doubt are released, and admitted with what earlier calls have returned."""
    e, made = engine(), made_anew()
    e.admit(told(made))
    for chunk in e.decode(4).chunks:
        made[chunk.rollout_id].append(chunk)
    waiting = set(e._parked)
    assert waiting
    try:
        with interrupted_in(e, steps):
            e.decode(1000)
    except KeyboardInterrupt:
        pass
    doubtful = [r for r in made if r.id not in waiting and not r.ended_by]
    e.release([r.id for r in doubtful])
    assert set(e._parked) == waiting
    assert all(answer(made[i]) for i in waiting)
    play(e, made)
    assert_same(made, alone)


def test_one_that_is_released_begins_anew() -> None:
    e = engine()
    (r,) = parked(e)
    (again,) = made_anew([r.prompt.tokens])
    again.id = r.id
    e.release([r.id])
    assert not e._parked
    before = e.prefilled_tokens
    e.admit(told([again]))
    (chunk,) = e.decode(1000).chunks
    assert chunk.tokens.tolist() == list(r.tokens)
    assert e.prefilled_tokens - before == len(r.prompt.tokens) - 1


def test_a_full_turn_that_ends_by_itself_waits_and_has_no_room_for_an_answer() -> None:
    """The end token may be the last that the limit permits: the turn is whole."""
    e = engine()
    (r,) = parked(e)
    (other,) = episodes([r.prompt.tokens], Sampling(len(r), max_turn_tokens=len(r)))
    other.id = r.id
    e.release([r.id])
    e.admit(told([other]))
    (chunk,) = e.decode(1000).chunks
    assert chunk.finish is FinishReason.TURN
    assert np.array_equal(chunk.tokens, r.tokens)
