"""What the engine asks of vLLM, and makes of its answers; vLLM is a small stand-in here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from packaging.version import Version

from engine_helpers import BLOCK, END, LIMIT, STAND_IN_MODEL, StandIn, following, logprob
from engine_helpers import stand_in_engine as engine
from raising import raises
from stretto.config import RolloutConfig
from stretto.errors import EngineError, RankError, StrettoError
from stretto.models.weights import fingerprint
from stretto.rollout.base import EngineSettings, StopStrings
from stretto.rollout.sampling import stream_seed
from stretto.rollout.vllm import llm
from stretto.rollout.vllm.vllm_engine import SEEDS, FullWeights, VllmEngine
from stretto.types import Chunk, FinishReason, Prompt, Response, Sampling, WeightsRef
from stretto.weights.channel import SharedChannel

MODEL = STAND_IN_MODEL


def response(id_: int, tokens: Sequence[int] = (), prompt: Sequence[int] = ()) -> Response:
    prompt = prompt or [id_ + 1, 2, 3, 4, 5]
    return Response(id_, id_, Prompt(id_, tuple(prompt), ""), np.array(tokens, np.int32))


def whole(id_: int) -> list[int]:
    """All tokens of a response, by the rules."""
    tokens = list(response(id_).prompt.tokens)
    start = len(tokens)
    while len(tokens) - start < LIMIT and END not in tokens[start:]:
        tokens.append(following(tokens))
    return tokens[start:]


def together(chunks: Iterable[Chunk]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for c in chunks:
        assert c.start == len(found.setdefault(c.rollout_id, []))
        assert c.logprobs.tolist() == pytest.approx([logprob(t) for t in c.tokens])
        found[c.rollout_id] += c.tokens.tolist()
    return found


IDS = range(5)


def test_a_prompt_that_is_being_read_is_no_step() -> None:
    """The stand-in reads one prompt an iteration: each but the first waits for its turn."""
    stand_in = StandIn()
    one = engine(stand_in)
    one.admit([response(0), response(1)])
    assert [len(c.tokens) for c in one.decode(1).chunks] == [1]
    assert [len(c.tokens) for c in one.decode(1).chunks] == [1, 1]
    assert stand_in.steps == 2


def test_no_number_is_drawn_twice() -> None:
    """Each request of a rollout has a seed of its own, where seeds begin again with a request."""
    channel, ref = weights(1)
    stand_in = StandIn()
    one = engine(stand_in, channel=channel)
    one.admit([response(i) for i in IDS])
    for _ in range(3):
        one.decode(2)
        one.load(ref)
    # A request that ended before its first token has drawn nothing: the next may have its seed.
    by_place = {(name.split(".")[0], tokens): seed for name, tokens, seed, _ in stand_in.added}
    seeds = list(by_place.values())
    assert len(set(seeds)) == len(seeds) > len(IDS)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    again = StandIn()
    one = engine(again)
    one.admit([response(0)])
    one.decode(1)
    assert again.added[0][2] == seeds[0]


def test_a_seed_that_counts_positions_stays() -> None:
    channel, ref = weights(1)
    stand_in = StandIn()
    stand_in.seeds_positions = True
    one = engine(stand_in, channel=channel)
    one.admit([response(0), response(1)])
    for _ in range(2):
        one.decode(1)
        one.load(ref)
    one.decode(1)
    by_rollout = {(name.split(".")[0], seed) for name, _, seed, _ in stand_in.added}
    assert len(by_rollout) == 2


def test_a_response_with_sampling_of_its_own_is_asked_for_so() -> None:
    """And after a weight sync, which begins a new request, for what is left of it."""
    channel, ref = weights(1)
    stand_in = StandIn()
    one = engine(stand_in, channel=channel)
    own = Sampling(3, 0.5, top_k=4, top_p=0.9, seed=(8, 2), top_logprobs=5)
    one.admit([replace(response(0), sampling=own), response(1)])
    chunks = list(one.decode(1).chunks)
    one.load(ref)
    chunks += one.decode(LIMIT).chunks
    assert together(chunks)[0] == whole(0)[:3]
    assert stand_in.samplings[0] == own
    assert stand_in.samplings[1] == Sampling(LIMIT)
    added = zip(stand_in.added, stand_in.samplings, strict=True)
    left = {name.split(".")[0]: sampling for (name, *_), sampling in added}
    assert left["0"] == replace(own, max_new_tokens=2)
    assert stand_in.added[0][2] == stream_seed(stream_seed(8, 2), 0) % SEEDS


def weights(version: int) -> tuple[SharedChannel, WeightsRef]:
    channel = SharedChannel()
    new = {n: torch.full_like(p, version) for n, p in MODEL.named_parameters()}
    ref = WeightsRef("actor", version, fingerprint(new.items()), channel.name)
    channel.put(ref, new)
    return channel, ref


@pytest.mark.parametrize(
    ("carry", "carried_salt", "read"), [("recompute", "1", 8 + 5 + 1), ("reuse", "0", 4 + 5 + 5)]
)
def test_after_a_weight_sync_no_prefix_of_older_weights_is_found(
    carry: Literal["recompute", "reuse"], carried_salt: str, read: int
) -> None:
    """Rollout 0 has 8 tokens, of 1 nothing has been read; 2 has 0's prompt, a block and one token.

    Recomputed, 0 is read anew, and 2 finds its first block. Reused, 0 finds its own first block,
    and 2 nothing.
    """
    channel, ref = weights(4)
    stand_in = StandIn()
    one = engine(stand_in, carry, channel=channel)
    one.admit([response(0)])
    first = one.decode(3).chunks
    assert one.prefilled_tokens == 5
    one.admit([response(1)])
    one.load(ref)
    assert one.version == 4
    assert all(t.eq(4).all() for t in stand_in.loaded.values())
    one.admit([response(2, prompt=response(0).prompt.tokens)])
    chunks = one.decode(100).chunks
    assert {c.version for c in chunks} == {4}
    assert together([c for c in [*first, *chunks] if c.rollout_id == 0]) == {0: whole(0)}
    newest = {name.split(".")[0]: (tokens, salt) for name, tokens, _, salt in stand_in.added}
    assert newest == {"0": (8, carried_salt), "1": (5, "1"), "2": (5, "1")}
    assert one.prefilled_tokens == 5 + read


def test_rollouts_of_one_prompt_share_its_prefix() -> None:
    one = engine()
    one.admit([response(i, prompt=range(1, 10)) for i in range(3)])
    one.decode(4)
    assert one.prefilled_tokens == 9 + 1 + 1  # two blocks of 4 are shared


EPISODE = Sampling(30, max_turn_tokens=8)


def waiting(one: VllmEngine) -> Response:
    """A response whose first turn has ended, with 2 more tokens of context; others are released."""
    one.admit([replace(response(i), sampling=EPISODE) for i in range(20)])
    turns = [c for c in one.decode(100).chunks if c.finish is FinishReason.TURN]
    chunk = next(c for c in turns if len(c.tokens) > 3)
    one.release([i for i in range(20) if i != chunk.rollout_id])
    sampled = np.array([True] * len(chunk.tokens) + [False] * 2)
    r = replace(response(chunk.rollout_id), sampling=EPISODE, sampled=sampled)
    return replace(r, tokens=np.array([*chunk.tokens, 8, 9], np.int32))


@pytest.mark.parametrize("carry", [None, "recompute", "reuse"])
def test_one_that_waited_goes_on_from_what_the_prefix_cache_has(
    carry: Literal["recompute", "reuse"] | None,
) -> None:
    """Its salt is that under which its blocks were made, where a weight sync lets these be used."""
    channel, ref = weights(1)
    stand_in = StandIn()
    one = engine(stand_in, carry or "recompute", channel=channel)
    r = waiting(one)
    assert not stand_in.busy
    if carry:
        one.load(ref)
    before = one.prefilled_tokens
    one.hold([r.id], "remake")  # which does nothing
    one.admit([r])
    (chunk,) = one.decode(100).chunks
    read = one.prefilled_tokens - before
    assert stand_in.added[-1][1] == r.total_tokens
    assert stand_in.added[-1][3] == ("1" if carry == "recompute" else "0")
    whole = (r.total_tokens - 2) // BLOCK * BLOCK  # blocks of prompt and turn
    assert read == r.total_tokens - (0 if carry == "recompute" else whole)
    assert stand_in.samplings[-1].max_new_tokens == 8
    assert chunk.start == len(r)


def test_it_stays_awake_for_those_that_wait() -> None:
    """They go on before weights come, without which it could not wake."""
    stand_in = StandIn()
    stand_in.sleeps = True
    one = engine(stand_in, sleep_level=2)
    r = waiting(one)
    one.admit([r])
    one.decode(100)
    assert not stand_in.slept
    one.release([r.id])
    assert stand_in.slept == ["sleep 2"]


def test_the_limit_of_a_turn_or_of_what_is_left_of_the_episode_is_asked_for() -> None:
    stand_in = StandIn()
    one = engine(stand_in)
    r = waiting(one)
    whole = len(r) + 5
    one.admit([replace(r, sampling=replace(EPISODE, max_new_tokens=whole))])
    one.decode(1)
    assert stand_in.samplings[-1].max_new_tokens == 5


def test_stop_strings_end_a_response_by_the_runs_own_rule() -> None:
    class Digits:
        def decode(self, tokens: Sequence[int], **_: Any) -> str:
            return "".join(chr(97 + t) for t in tokens)

    text = "".join(chr(97 + t) for t in whole(0))
    stop = text[2:4]
    stand_in = StandIn()
    one = engine(stand_in, stop=StopStrings([stop], Digits()))
    one.admit([response(0)])
    (chunk,) = one.decode(100).chunks
    assert chunk.finish is FinishReason.STOP
    assert chunk.tokens.tolist() == whole(0)[: text.index(stop) + 2]
    assert not stand_in.busy


def test_an_end_that_no_rule_knows_is_an_error() -> None:
    one = engine(StandIn(ends_early="abort"))
    one.admit([response(0)])
    with raises(EngineError, "ended-early", "rollout 0", "abort"):
        one.decode(5)


def test_the_probe_does_not_disturb_rollouts() -> None:
    one = engine()
    one.admit([response(0)])
    first = one.decode(2).chunks
    found = one.logprobs(np.array([[1, 2, 3], [4, 5, 6]], np.int32))
    assert found.tolist() == [[102, 203], [105, 206]]
    assert one.prefill_tokens_per_s() > 0
    assert together([*first, *one.decode(100).chunks]) == {0: whole(0)}


def test_it_sleeps_while_it_holds_nothing_and_wakes_in_order() -> None:
    """Weights are written before keys and values have their memory again."""
    channel, ref = weights(1)
    stand_in = StandIn()
    stand_in.sleeps = True
    one = engine(stand_in, channel=channel)
    one.load(ref)
    one.admit([response(0)])
    one.decode(1)
    assert stand_in.slept == ["load"]
    one.decode(100)
    one.release([0])
    assert stand_in.slept == ["load", "sleep 1"]
    one.load(ref)
    assert stand_in.slept[2:] == ["weights", "load", "kv_cache"]
    one.admit([response(1), response(2)])
    one.decode(1)
    one.export([1, 2], with_cache=False)
    assert stand_in.slept[5:] == ["sleep 1"]
    one.admit([response(3)])
    one.decode(1)
    assert stand_in.slept[6:] == ["weights", "kv_cache"]


def test_weights_that_a_sync_replaces_are_dropped_and_others_kept() -> None:
    """At level 2 they come back by a sync alone; those below adapters are sent once."""
    channel, ref = weights(1)
    for adapters, level in (("", 2), ("folder", 1)):
        stand_in = StandIn()
        stand_in.sleeps = True
        source = FullWeights(MODEL)
        source.adapters = adapters
        one = engine(stand_in, channel=channel, sleep_level=2, source=source)
        one.load(ref)
        one.admit([response(0)])
        one.decode(100)
        assert stand_in.slept == ["load", f"sleep {level}"]
        one.admit([response(1)])
        if level == 2:
            with raises(RankError, "weights-asleep"):
                one.decode(1)
            one.load(ref)
            assert stand_in.slept[2:] == ["weights", "load", "kv_cache"]
        assert together(one.decode(100).chunks) == {1: whole(1)}


@pytest.mark.parametrize("sleeps", [True, False])
def test_segments_do_not_grow_beside_memory_that_is_put_away(
    sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the user has asked torch for it: vLLM would refuse to start."""
    given, name = list[str](), "PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    monkeypatch.setattr(llm.os, "environ", dict(llm.os.environ))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    arguments: dict[str, Any] = {"enable_sleep_mode": sleeps}
    rollout = RolloutConfig(engine="vllm", engine_args=arguments)
    llm._prepare_environment(EngineSettings(rollout=rollout))
    grow = "False" if sleeps else "True"
    assert llm.os.environ[name] == f"max_split_size_mb:64,expandable_segments:{grow}"
    assert given == (["expandable_segments:False"] if sleeps else [])


def test_what_steps_have_looked_back_on_is_counted() -> None:
    one = engine()
    one.admit([response(0)])
    one.decode(3)
    assert one.context_tokens == 5 + 6 + 7


@pytest.mark.parametrize(
    ("version", "code", "facts"),
    [
        (None, "missing-library", ["'vllm'"]),
        ("0.31.2", "old-vllm", ["0.31.2", "0.32"]),
    ],
)
def test_versions_that_cannot_work_are_refused_by_name(
    version: str | None, code: str, facts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "installed", lambda: version and Version(version))
    with raises(StrettoError, code, *facts):
        llm.check_version()


def test_versions_that_are_not_tested_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "installed", lambda: Version("0.33.1"))
    with pytest.warns(UserWarning, match=r"vLLM 0.33.1 is not tested"):
        llm.check_version()
    monkeypatch.setattr(llm, "installed", lambda: Version("0.32.4"))
    llm.check_version()
