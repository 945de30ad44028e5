"""What the engine asks of vLLM, and makes of its answers; vLLM is a small stand-in here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from packaging.version import Version
from torch import Tensor

from stretto.config import RolloutConfig
from stretto.errors import EngineError, StrettoError
from stretto.models.weights import fingerprint
from stretto.rollout.base import StopStrings
from stretto.rollout.vllm import llm
from stretto.rollout.vllm.engine import VllmEngine
from stretto.rollout.vllm.llm import Output
from stretto.rollout.vllm.source import WholeWeights
from stretto.types import Chunk, FinishReason, FloatArray, KVTransfer, Prompt, Response, WeightsRef
from stretto.weights.channel import SharedChannel

END, LIMIT, BLOCK = 7, 12, 4


def following(tokens: Sequence[int]) -> int:
    """The one token that follows in the language of the stand-in."""
    return (3 * sum(tokens) + 5 * len(tokens) + 1) % 11


def logprob(token: int) -> float:
    return -0.1 * (token + 1)


class StandIn:
    """Requests to a model that knows :func:`following`; it reads one prompt in an iteration."""

    longest, kv_bytes_per_token, seeds_positions = 40, 64, False

    def __init__(self, ends_early: str = "") -> None:
        self.tokens: dict[str, list[int]] = {}
        self.left: dict[str, int] = {}
        self.read: dict[str, int] = {}
        self.salts: dict[str, str] = {}
        self.added: list[tuple[str, int, int, str]] = []  # name, tokens, seed, salt
        self.cache: set[tuple[str, tuple[int, ...]]] = set()
        self.loaded: dict[str, Tensor] = {}
        self.steps, self.ends_early = 0, ends_early
        self.sleeps, self.slept = False, list[str]()

    def add(
        self, request: str, tokens: Sequence[int], salt: str, seed: int, max_tokens: int
    ) -> None:
        assert request not in self.tokens
        self.tokens[request], self.left[request] = list(tokens), max_tokens
        self.salts[request] = salt
        self.added.append((request, len(tokens), seed, salt))

    def abort(self, requests: Sequence[str]) -> None:
        for request in requests:
            for of in (self.tokens, self.left, self.salts):
                del of[request]
            self.read.pop(request, None)

    def _cached(self, request: str) -> int:
        tokens, salt = self.tokens[request], self.salts[request]
        hits = 0
        for end in range(BLOCK, len(tokens), BLOCK):
            hits = end if (salt, tuple(tokens[:end])) in self.cache else hits
        return hits

    def step(self) -> Sequence[Output]:
        self.steps += 1
        for request in self.tokens:
            if request not in self.read:
                self.read[request] = self._cached(request)
                break
        found = []
        for request in [r for r in self.tokens if r in self.read]:
            tokens = self.tokens[request]
            token = following(tokens)
            tokens.append(token)
            for end in range(BLOCK, len(tokens), BLOCK):
                self.cache.add((self.salts[request], tuple(tokens[:end])))
            self.left[request] -= 1
            ended = "stop" if token == END else "length" if not self.left[request] else ""
            ended = ended or self.ends_early
            found.append(Output(request, [token], [logprob(token)], self.read[request], ended))
            if ended:
                self.abort([request])
        return found

    @property
    def busy(self) -> bool:
        return bool(self.tokens)

    def logprobs(self, prefixes: Sequence[Sequence[int]], tokens: Sequence[int]) -> FloatArray:
        assert not self.busy
        return np.array([100 * len(p) + t for p, t in zip(prefixes, tokens, strict=True)], "f4")

    def prefill_tokens_per_s(self) -> float:
        assert not self.busy
        return 123.0

    def sleep(self) -> None:
        assert not self.busy
        self.slept.append("sleep")

    def wake(self, what: Sequence[str]) -> None:
        self.slept += what

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert not self.busy
        self.slept.append("load")
        self.loaded = dict(tensors)


MODEL = torch.nn.Linear(2, 2)


def engine(
    stand_in: StandIn | None = None,
    carry: Literal["recompute", "reuse"] = "recompute",
    stop: StopStrings | None = None,
    channel: SharedChannel | None = None,
) -> VllmEngine:
    return VllmEngine(
        stand_in or StandIn(),
        WholeWeights(MODEL),
        RolloutConfig(max_new_tokens=LIMIT),
        end_tokens=frozenset({END}),
        seed=3,
        stop=stop,
        carry=carry,
        channel=channel,
    )


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


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_chunks_of_any_size_make_the_same_responses(size: int) -> None:
    one = engine()
    one.admit([response(i) for i in IDS])
    chunks: list[Chunk] = []
    while not one.decode(0).chunks and one._held:
        new = one.decode(size).chunks
        assert all(len(c.tokens) <= size for c in new)
        chunks += new
    assert together(chunks) == {i: whole(i) for i in IDS}
    ends = {c.rollout_id: c.finish for c in chunks if c.finish}
    assert ends == {
        i: FinishReason.STOP if whole(i)[-1] == END else FinishReason.LENGTH for i in IDS
    }
    assert {FinishReason.STOP, FinishReason.LENGTH} == set(ends.values())


def test_it_returns_as_soon_as_enough_have_finished_and_these_come_first() -> None:
    one = engine()
    one.admit([response(i) for i in IDS])
    chunks = one.decode(100, stop_after=2).chunks
    done = [c for c in chunks if c.finish]
    assert chunks[: len(done)] == done
    assert 2 <= len(done) < len(IDS)  # several may end in one iteration
    rest = [c.rollout_id for c in chunks[len(done) :]]
    assert rest == sorted(rest)
    assert together([*chunks, *one.decode(100).chunks]) == {i: whole(i) for i in IDS}


def test_a_prompt_that_is_being_read_is_no_step() -> None:
    """The stand-in reads one prompt an iteration: each but the first waits for its turn."""
    stand_in = StandIn()
    one = engine(stand_in)
    one.admit([response(0), response(1)])
    assert [len(c.tokens) for c in one.decode(1).chunks] == [1]
    assert [len(c.tokens) for c in one.decode(1).chunks] == [1, 1]
    assert stand_in.steps == 2


@pytest.mark.parametrize("after", [1, 3])
def test_nothing_that_was_decoded_is_lost_when_a_request_ends(after: int) -> None:
    """Released and admitted again with what calls have returned, a rollout goes on after it."""
    one, two = engine(), engine()
    one.admit([response(0)])
    first = one.decode(after).chunks
    have = together(first)[0]
    one.release([0, 99])
    assert not one._requests.busy
    two.admit([response(0, have)])
    assert together([*first, *two.decode(100).chunks])[0] == whole(0)


def test_no_number_is_drawn_twice() -> None:
    """Each request of a rollout has a seed of its own, where seeds begin again with a request."""
    stand_in = StandIn()
    one = engine(stand_in)
    one.admit([response(i) for i in IDS])
    for _ in range(3):
        one.decode(2)
        one._withdraw(one._held.values())
    # A request that ended before its first token has drawn nothing: the next may have its seed.
    by_place = {(name.split(".")[0], tokens): seed for name, tokens, seed, _ in stand_in.added}
    seeds = list(by_place.values())
    assert len(set(seeds)) == len(seeds) > len(IDS)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    again = engine(StandIn())
    again.admit([response(0)])
    again.decode(1)
    assert again._requests.added[0][2] == seeds[0]  # type: ignore[attr-defined]


def test_a_seed_that_counts_positions_stays() -> None:
    stand_in = StandIn()
    stand_in.seeds_positions = True
    one = engine(stand_in)
    one.admit([response(0), response(1)])
    for _ in range(2):
        one.decode(1)
        one._withdraw(one._held.values())
    one.decode(1)
    by_rollout = {(name.split(".")[0], seed) for name, _, seed, _ in stand_in.added}
    assert len(by_rollout) == 2


def weights(version: int) -> tuple[SharedChannel, WeightsRef]:
    channel = SharedChannel()
    new = {n: torch.full_like(p, version) for n, p in MODEL.named_parameters()}
    ref = WeightsRef("actor", version, fingerprint(new.items()), channel.name)
    channel.put(ref, new)
    return channel, ref


@pytest.mark.parametrize(
    ("carry", "carried_salt", "read"), [("recompute", "1", 8 + 5 + 1), ("reuse", "0", 4 + 5 + 5)]
)
def test_after_a_hand_over_no_prefix_of_older_weights_is_found(
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


def test_other_weights_than_the_learners_are_refused() -> None:
    channel, ref = weights(1)
    with pytest.raises(EngineError, match="handed over with fingerprint other"):
        engine(channel=channel).load(WeightsRef("actor", 1, "other", ref.channel))


def test_stop_strings_end_a_response_by_the_runs_own_rule() -> None:
    class Digits:
        def decode(self, tokens: Sequence[int], **_: Any) -> str:
            return "".join(chr(97 + t) for t in tokens)

    text = "".join(chr(97 + t) for t in whole(0))
    stop = text[2:4]
    one = engine(stop=StopStrings([stop], Digits()))
    one.admit([response(0)])
    (chunk,) = one.decode(100).chunks
    assert chunk.finish is FinishReason.STOP
    assert chunk.tokens.tolist() == whole(0)[: text.index(stop) + 2]
    assert not one._requests.busy


def test_rollouts_move_without_their_cache() -> None:
    one, two = engine(), engine()
    one.admit([response(0), response(1)])
    first = one.decode(2).chunks
    have = together(first)
    transfers = one.export([1, 0], with_cache=True)
    assert transfers == [KVTransfer(1), KVTransfer(0)]
    two.accept([response(1, have[1]), response(0, have[0])], transfers)
    assert together([*first, *two.decode(100).chunks]) == {i: whole(i) for i in (0, 1)}
    with pytest.raises(EngineError, match="are not in this engine"):
        one.export([0], with_cache=False)
    with pytest.raises(EngineError, match="give each rollout its own transfer"):
        two.accept([response(3)], [KVTransfer(4)])
    with pytest.raises(EngineError, match="is in the engine already"):
        one.admit([response(5), response(5)])
    with pytest.raises(EngineError, match="the model has positions for 40"):
        one.admit([response(6, prompt=range(1, 31))])


def test_an_end_that_no_rule_knows_is_an_error() -> None:
    one = engine(StandIn(ends_early="abort"))
    one.admit([response(0)])
    with pytest.raises(EngineError, match=r"ended rollout 0 after 1 tokens \(abort\)"):
        one.decode(5)


def test_the_probe_does_not_disturb_rollouts() -> None:
    one = engine()
    one.admit([response(0)])
    first = one.decode(2).chunks
    found = one.logprobs(np.array([[1, 2, 3], [4, 5, 6]], np.int32))
    assert found.tolist() == [[102, 203], [105, 206]]
    assert one.prefill_tokens_per_s() == 123.0
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
    assert stand_in.slept == ["load", "sleep"]
    one.load(ref)
    assert stand_in.slept[2:] == ["weights", "load", "kv_cache"]
    one.admit([response(1), response(2)])
    one.decode(1)
    one.export([1, 2], with_cache=False)
    assert stand_in.slept[5:] == ["sleep"]
    one.admit([response(3)])
    one.decode(1)
    assert stand_in.slept[6:] == ["weights", "kv_cache"]


def test_what_steps_have_looked_back_on_is_counted() -> None:
    one = engine()
    one.admit([response(0)])
    one.decode(3)
    assert one.context_tokens == 5 + 6 + 7
    state = one.state_dict()
    other = engine()
    other.load_state_dict({**state, "version": 9})
    assert other.version == 9


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "needs the library 'vllm'"),
        ("0.31.2", "vLLM 0.31.2 is installed, and rollout.engine = 'vllm' needs 0.32 or newer"),
    ],
)
def test_versions_that_cannot_work_are_refused_by_name(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "installed", lambda: version and Version(version))
    with pytest.raises(StrettoError, match=message):
        llm.check_version()


def test_versions_that_are_not_tested_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "installed", lambda: Version("0.33.1"))
    with pytest.warns(UserWarning, match=r"vLLM 0.33.1 is not tested"):
        llm.check_version()
    monkeypatch.setattr(llm, "installed", lambda: Version("0.32.4"))
    llm.check_version()
