"""What every generation engine must do, and the simulated one with them.

An engine joins by a line of :data:`SUBJECTS`. Whatever has its name in ``rollout.engine`` is in
:data:`~stretto.rollout.engine_registry.ENGINES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, get_args

import numpy as np
import pytest

from engine_helpers import STAND_IN_MODEL, Virtual, played_whole, stand_in_engine
from helpers import llama, told
from raising import raises
from stretto.config import Config, ModelConfig, RolloutConfig
from stretto.errors import EngineError
from stretto.models.weights import fingerprint
from stretto.rollout.base import Engine, EngineSettings, StopStrings
from stretto.rollout.engine import TorchEngine
from stretto.rollout.engine_registry import ENGINES
from stretto.rollout.vllm.llm import installed
from stretto.runtime.sim.cluster import GeneratorRole
from stretto.runtime.sim.costs import GeneratorCost
from stretto.runtime.sim.generator import SimGenerator
from stretto.runtime.sim.resources import Device, SimWorker
from stretto.schedules.rollout import Rollout
from stretto.testing import World
from stretto.testing.contracts import (
    WAITS,
    answer,
    check_chunks,
    check_moves,
    context_of,
    episodes,
    finish,
    play,
    require_same,
    take,
)
from stretto.types import (
    Chunk,
    FinishReason,
    KVTransfer,
    Observation,
    Prompt,
    WeightsRef,
)
from stretto.weights.channel import SharedChannel

LIMIT, END = 12, 14
IDS = range(5)
NOTHING = Observation(0, 0, np.empty(0, np.int32))
CHANNEL = SharedChannel()


def simulated(**options: Any) -> Any:
    worker = SimWorker("generator", [Device(0)], World([]))
    lengths = {0: 3, 1: 20, 2: 5, 3: 12, 4: 1}.__getitem__
    role = GeneratorRole(cost=GeneratorCost())
    return Virtual(SimGenerator(worker, role, lengths, max_new_tokens=LIMIT, **options))


def own(**options: Any) -> Engine:
    config = RolloutConfig(batch=4, max_new_tokens=LIMIT)
    options = {"end_tokens": frozenset({END}), "channel": CHANNEL, **options}
    return TorchEngine(llama(), EngineSettings(rollout=config, seed=5, **options))


def vllm_itself(end_tokens: frozenset[int] = frozenset({END}), **_: Any) -> Engine:
    """Greedy, as its samples depend on their company; the process is vLLM's from here on."""
    from stretto.assembly.roles import RoleFactory

    options = {"block_size": 32}
    config = Config.model_construct(
        model=ModelConfig(dtype="float32", device="cpu"),
        rollout=RolloutConfig(
            batch=4, max_new_tokens=LIMIT, engine="vllm", engine_args=options, temperature=0.0
        ),
    )
    tokenizer: Any = None
    model = llama(hidden=64)
    return RoleFactory(config, print).make_engine(model, tokenizer, 4, end_tokens, overridden=True)


SUBJECTS: dict[str, Callable[..., Any]] = {
    "torch": own,
    "torch, one slot": partial(own, rows=1),
    "vllm, stand-in": partial(stand_in_engine, channel=CHANNEL),
    "vllm": vllm_itself,
    "simulated": simulated,
}
without_vllm = pytest.mark.skipif(not installed(), reason="vLLM is not installed")
NAMES = [pytest.param(n, marks=without_vllm) if n == "vllm" else n for n in SUBJECTS]
ENGINES_ALONE = [p for p in NAMES if p != "simulated"]


def rollouts(ids: Sequence[int] = IDS) -> list[Rollout]:
    return [Rollout(i, Prompt(i, (i + 1, 2, 3, 4, 5), ""), i) for i in ids]


def expected(name: str) -> list[Rollout]:
    """All responses, each decoded alone and whole."""
    made = rollouts()
    for r in made:
        subject = SUBJECTS[name]()
        subject.admit(told([r]))
        finish(subject, [r], 1000)
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_any_size_make_the_same_responses(name: str, size: int) -> None:
    check_chunks(SUBJECTS[name](), rollouts(), expected(name), size, LIMIT)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_decoded_of_nothing_or_for_no_tokens(name: str) -> None:
    subject = SUBJECTS[name]()
    assert tuple(subject.decode(5)) == ([], 0)
    subject.admit(told(rollouts()))
    assert tuple(subject.decode(0)) == ([], 0)


@pytest.mark.parametrize("name", NAMES)
def test_it_returns_as_soon_as_enough_have_finished_and_these_come_first(name: str) -> None:
    subject, made = SUBJECTS[name](), rollouts()
    subject.admit(told(made))
    while not all(r.finish for r in made):
        decoded = subject.decode(1000, stop_after=1)
        done = [c for c in decoded.chunks if c.finish]
        assert done
        assert list(decoded.chunks[: len(done)]) == done
        rest = [c.rollout_id for c in decoded.chunks[len(done) :]]
        assert rest == sorted(rest)
        take(decoded, made)
    require_same(made, expected(name), name)


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_released_and_admitted_again_a_rollout_goes_on(name: str, after: int) -> None:
    """In the same engine and in another, after what calls have returned."""
    one, two, made = SUBJECTS[name](), SUBJECTS[name](), rollouts()
    one.admit(told(made))
    take(one.decode(after), made)
    one.release([0, 1, 2, 99])
    back = [r for r in made if r.id in (0, 1, 2) and not r.finish]
    one.admit(told(back[:1]))
    two.admit(told(back[1:]))
    finish(two, back[1:], 2)
    finish(one, [r for r in made if r not in back[1:]], 2)
    require_same(made, expected(name), name)
    one.release([r.id for r in made])


@pytest.mark.parametrize("with_cache", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_rollouts_move(name: str, with_cache: bool) -> None:
    one, two = SUBJECTS[name](), SUBJECTS[name]()
    transfers = check_moves(one, two, rollouts(), expected(name), with_cache)
    capabilities = getattr(one, "capabilities", ENGINES["torch"].capabilities)
    if not with_cache or not capabilities.moves_cache:
        assert all(t.cache is None and not t.cached_tokens for t in transfers)


@pytest.mark.parametrize("ids", [[0, 9], [1, 1]])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_there_cannot_leave(name: str, ids: list[int]) -> None:
    subject, made = SUBJECTS[name](), rollouts()
    subject.admit(told(made))
    with raises(EngineError, "not-in-engine", ids[1]):
        subject.export(ids, False)
    finish(subject, made)
    require_same(made, expected(name), name)


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_go_on_is_refused(name: str) -> None:
    subject, (ended, full, twice) = SUBJECTS[name](), rollouts([1, 3, 0])
    tokens, logprobs = np.full(LIMIT, 3, np.int32), np.full(LIMIT, -1.0, np.float32)
    ended.append(Chunk(1, 0, tokens[:1], logprobs[:1], 0, FinishReason.STOP))
    full.append(Chunk(3, 0, tokens, logprobs, 0))
    for r in (ended, full):
        with raises(EngineError, "rollout-ended", r.id, len(r)):
            subject.admit(told([r]))
    subject.admit(told([twice]))
    with raises(EngineError, "already-in-engine", 0):
        subject.admit(told([twice]))
    finish(subject, [twice])


@contextmanager
def synced(subject: Any, version: int) -> Iterator[WeightsRef]:
    model = getattr(subject, "model", STAND_IN_MODEL)
    new = {n: p.detach().clone() for n, p in model.named_parameters()}
    ref = WeightsRef("actor", version, fingerprint(new.items()), CHANNEL.name)
    CHANNEL.put(ref, new)
    yield ref


@pytest.mark.parametrize("name", [n for n in NAMES if isinstance(n, str)])
def test_tokens_bear_the_version_that_sampled_them(name: str) -> None:
    """The weights are the same, so that responses are."""
    subject, made = SUBJECTS[name](), rollouts()
    subject.admit(told(made))
    take(subject.decode(2), made)
    with synced(subject, 4) as ref:
        subject.load(ref)
    assert subject.version == 4
    finish(subject, [r for r in made if not r.finish], version=4)
    require_same(made, expected(name), name)


# -- engines alone ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES_ALONE)
def test_prompts_and_transfers_are_looked_at(name: str) -> None:
    engine, (r,) = SUBJECTS[name](), rollouts([0])
    with raises(EngineError, "empty-prompt", 7):
        engine.admit(told([Rollout(7, Prompt(7, (), ""), 7)]))
    for wrong in (KVTransfer(4), KVTransfer(0, None, 5)):
        with raises(EngineError, "other-transfer", wrong.rollout_id, wrong.cached_tokens):
            engine.accept(told([r]), [wrong])
    if engine.longest is not None:
        long = Rollout(8, Prompt(8, (1,) * engine.longest, ""), 8)
        with raises(EngineError, "too-few-positions", engine.longest, LIMIT):
            engine.admit(told([long]))
    engine.admit(told([r]))
    finish(engine, [r])


@pytest.mark.parametrize("name", [n for n in ENGINES_ALONE if isinstance(n, str)])
def test_other_weights_than_the_learners_are_refused(name: str) -> None:
    engine = SUBJECTS[name]()
    with synced(engine, 1) as ref:
        wrong = WeightsRef("actor", 1, "other", ref.channel)
        with raises(EngineError, "other-weights", 1, "other"):
            engine.load(wrong)
    assert engine.version == 0
    with raises(EngineError, "other-channel"):
        engine.load(WeightsRef("actor", 1, "x", "elsewhere"))


@pytest.mark.parametrize("name", ENGINES_ALONE)
def test_what_is_measured_disturbs_no_rollout(name: str) -> None:
    engine, made = SUBJECTS[name](), rollouts()
    engine.admit(told(made))
    take(engine.decode(2), made)
    prompts = sum(len(r.prompt.tokens) for r in made if len(r))
    assert 0 < engine.prefilled_tokens <= prompts
    assert engine.context_tokens > 0
    found = engine.logprobs(np.array([[1, 2, 3], [4, 5, 6]], np.int32))
    assert found.shape == (2, 2)
    assert engine.prefill_tokens_per_s() > 0
    assert engine.kv_bytes_per_token > 0
    finish(engine, [r for r in made if not r.finish])
    require_same(made, expected(name), name)


# -- episodes --------------------------------------------------------------------------------------

TURN_LIMIT, EPISODE_LIMIT = 9, 30


def turning(name: str) -> tuple[Callable[[], Any], list[Rollout]]:
    """An engine of which turns end often, and episodes for it."""
    make = partial(SUBJECTS[name], end_tokens=frozenset(range(3, 9)))
    limits = {"max_new_tokens": EPISODE_LIMIT, "max_turn_tokens": TURN_LIMIT}
    sampling = replace(make()._sampling, **limits)
    return make, episodes([r.prompt.tokens for r in rollouts(range(8))], sampling)


@cache
def turning_alone(name: str) -> list[Rollout]:
    """Episodes as they are if every turn is decoded from the whole transcript."""
    make, made = turning(name)
    played_whole(make, made)
    return made


def assert_episodes(name: str, made: Sequence[Rollout]) -> None:
    require_same(made, turning_alone(name), name)
    for r, other in zip(made, turning_alone(name), strict=True):
        assert r.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", ENGINES_ALONE)
def test_episodes_of_the_tests_have_several_turns_and_end_in_several_ways(name: str) -> None:
    made = turning_alone(name)
    assert sum(len(r.turns) > 1 for r in made) > 1
    assert len({r.ended_by for r in made}) > 1


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("name", ENGINES_ALONE)
def test_a_turn_ends_by_itself_or_by_a_limit_which_ends_the_episode(name: str, size: int) -> None:
    make, made = turning(name)
    ended: list[Chunk] = []

    def each(chunks: Sequence[Chunk]) -> None:
        first = [c for c in chunks if c.finish]
        rest = [c.rollout_id for c in chunks[len(first) :]]
        assert list(chunks[: len(first)]) == first
        assert rest == sorted(rest)
        ended.extend(first)

    play(make(), made, size, each=each)
    assert_episodes(name, made)
    starts = {r.id: [0, *(end for _, end in r.context)] for r in made}
    for c in ended:
        r, end = made[c.rollout_id], c.start + len(c.tokens)
        turn = end - max(start for start in starts[r.id] if start < end)
        full = turn == TURN_LIMIT or end == EPISODE_LIMIT
        assert turn <= TURN_LIMIT
        ends = FinishReason.TURN if c.tokens[-1] in range(3, 9) else FinishReason.LENGTH
        assert c.finish is ends
        assert full or ends is FinishReason.TURN


@pytest.mark.parametrize("way", WAITS)
@pytest.mark.parametrize("name", ENGINES_ALONE)
def test_whatever_becomes_of_a_rollout_that_waits_it_goes_on_the_same(name: str, way: str) -> None:
    make, made = turning(name)
    play(make(), made, way=WAITS[way])
    assert_episodes(name, made)


@pytest.mark.parametrize("name", ENGINES_ALONE)
def test_one_that_waits_may_move_as_it_is(name: str) -> None:
    make, made = turning(name)
    by_id, engine = {r.id: r for r in made}, make()

    def waits(engine: Any, ids: list[int]) -> None:
        responses = [replace(by_id[i].response(), finish=FinishReason.TURN) for i in ids]
        engine.accept(responses, engine.export(ids, True))

    play(engine, made, way=(waits, WAITS["kept"][1]))
    assert_episodes(name, made)


@pytest.mark.parametrize("name", ENGINES_ALONE)
def test_a_call_counts_no_turns_and_returns_when_all_rollouts_wait(name: str) -> None:
    make, made = turning(name)
    engine, (other,) = make(), rollouts([50])
    engine.admit(told(made))
    decoded = engine.decode(1000, stop_after=len(made))
    assert len(decoded.chunks) == len(made)  # each ended, or ended a turn
    turns = [c.rollout_id for c in decoded.chunks if c.finish is FinishReason.TURN]
    assert turns
    assert tuple(engine.decode(1000, stop_after=1)) == ([], 0)
    engine.admit(told([other]))  # the slots are free
    (chunk,) = engine.decode(1000, stop_after=1).chunks
    assert (chunk.rollout_id, chunk.finish in ("stop", "length")) == (50, True)


@pytest.mark.parametrize("name", ENGINES_ALONE)
def test_one_that_waits_goes_on_from_its_own_tokens_alone(name: str) -> None:
    make, made = turning(name)
    engine = make()
    engine.admit(told(made))
    take(engine.decode(1000), made)
    waiting = [r for r in made if not r.ended_by]
    r, before = waiting[0], waiting[0].response()
    with raises(EngineError, "not-in-engine", 99):
        engine.export([r.id, 99], True)
    assert answer(r)
    response = r.response()
    tokens = response.tokens.copy()
    tokens[0] += 1
    shorter = replace(before, tokens=before.tokens[:-1])
    other = replace(response, prompt=replace(r.prompt, tokens=(1, *r.prompt.tokens)))
    for wrong in (replace(response, tokens=tokens), shorter, other):
        with raises(EngineError, "other-transcript", r.id, before.total_tokens):
            engine.admit([wrong])
    with raises(EngineError, "already-in-engine", r.id):
        engine.accept([response], [KVTransfer(r.id)])
    full = np.full(TURN_LIMIT, 9, np.int32)
    with raises(EngineError, "rollout-ended", TURN_LIMIT):
        engine.admit([replace(before, id=77, tokens=full)])
    engine.admit([response])
    with raises(EngineError, "already-in-engine", r.id):
        engine.admit([response])


@pytest.mark.parametrize("name", [n for n in ENGINES_ALONE if isinstance(n, str)])
def test_one_that_waited_over_a_weight_sync_goes_on_with_the_new_weights(name: str) -> None:
    """The weights are the same, so that responses are."""
    make, made = turning(name)
    versions = iter(range(1, 100))

    def waits(engine: Any, ids: list[int]) -> None:
        with synced(engine, next(versions)) as ref:
            engine.load(ref)

    play(make(), made, way=(waits, WAITS["kept"][1]))
    assert_episodes(name, made)
    assert {v for r in made for v in r.versions} > {-1, 0, 1}


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(chr(ord("A") + t) for t in tokens)


@pytest.mark.parametrize("name", [n for n in ENGINES_ALONE if isinstance(n, str)])
def test_a_stop_string_is_looked_for_in_the_present_turn(name: str) -> None:
    """Neither in the context before it, nor across."""
    _, made = turning(name)
    r = made[0]
    free = SUBJECTS[name](end_tokens=frozenset())
    context = np.array(context_of(0, 1), np.int32)
    r.append(Chunk(0, 0, np.array([9], np.int32), np.zeros(1, np.float32), 0, FinishReason.TURN))
    r.append(r.observe(replace(NOTHING, tokens=context)))
    start = r.response()
    assert start.sampling
    assert start.turn_start == 1 + len(context)
    free.admit([start])
    (chunk,) = free.decode(4).chunks
    said, read = chunk.tokens.tolist(), Letters().decode(context.tolist())
    text = Letters().decode(said)
    for stop in (read, read + text[0], text[0], text[1:3]):
        length = next((n for n in range(1, 5) if stop in text[:n]), 4)
        own = replace(start, sampling=replace(start.sampling, stop=("none such", stop)))
        for strings, turn in (([stop], start), ([], own), (["none such"], own)):
            stops = StopStrings(strings, Letters())
            engine = SUBJECTS[name](end_tokens=frozenset(), stop=stops)
            engine.admit([turn])
            (chunk,) = engine.decode(4).chunks
            assert chunk.tokens.tolist() == said[:length]
            assert chunk.finish is (FinishReason.TURN if stop in text else None)


def test_each_name_of_the_settings_is_an_engine() -> None:
    names = set(get_args(RolloutConfig.model_fields["engine"].annotation)) - {"auto"}
    assert names == set(ENGINES)
    assert names <= {name.split(",")[0] for name in SUBJECTS}
