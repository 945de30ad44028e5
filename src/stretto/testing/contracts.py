"""Contracts of engines and scorers that a device could break. ``stretto doctor --gpu`` checks them
on a GPU. ``tests/contracts`` checks them for every engine and scorer, and more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from stretto.config import RolloutConfig
from stretto.errors import EngineError
from stretto.evaluation.generation import completed
from stretto.models.backend import backend_of
from stretto.models.heads import critic_from_actor, scalar_head
from stretto.models.weights import fingerprint
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.schedules.rollout import Rollout
from stretto.scoring.model_scorers import critic_scorer, reference_scorer
from stretto.testing import make_chunk
from stretto.training.trained import WholeModel
from stretto.types import (
    Chunk,
    Decoded,
    FinishReason,
    Hold,
    KVTransfer,
    Observation,
    Prompt,
    Sampling,
    WeightsRef,
)
from stretto.weights.channel import SharedChannel

EXACT = 1e-3
"""Tolerance of log-probabilities (nats) and values in float32."""
ROUNDED = 0.2
"""Tolerance of the RMS difference in bfloat16, in nats; the same as for the weight-sync probe."""

LIMIT = 24
"""Tokens of the longest response."""

SMALL: Mapping[str, Any] = {
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""A shape that fits on any device."""

_SMALL: Mapping[str, Any] = {
    **SMALL,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # makes the tokens of a response depend on each other
}


def random_model(
    shape: Mapping[str, Any], device: torch.device, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Return a Qwen2 with fixed random weights, prepared for the engine."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    gpus = [device] if device.type == "cuda" else []
    config = Qwen2Config(**shape, dtype=dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a large model in float32 may not fit
    try:
        with torch.random.fork_rng(gpus), device:
            torch.manual_seed(0)
            model: nn.Module = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    backend_of(device).use_fastest_attention(model)
    return model.eval()


def random_rollouts(count: int, vocabulary: int, longest: int, shortest: int = 1) -> list[Rollout]:
    """Return rollouts of random prompts, without responses."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(shortest, longest + 1, count)
    prompts = [rng.integers(vocabulary, size=n).tolist() for n in lengths]
    return [Rollout(i, Prompt(i, tuple(p), ""), i) for i, p in enumerate(prompts)]


def decoded(engine: TorchEngine, rollouts: Sequence[Rollout], chunk: int) -> list[Rollout]:
    list(completed(engine, rollouts, chunk))
    return list(rollouts)


def logprob_gap(model: nn.Module, rollouts: Sequence[Rollout]) -> float:
    """Return the RMS difference in nats between the engine's and a learner's log-probabilities."""
    longest = max(map(len, rollouts))
    mask = torch.tensor([[at < len(r) for at in range(longest)] for r in rollouts])
    learners = WholeModel(model).logprobs([r.response() for r in rollouts], mask, 1.0)[mask]
    engines = torch.tensor([x for r in rollouts for x in r.logprobs])
    return (learners - engines).square().mean().sqrt().item()


def _engine(model: nn.Module, ends: Iterable[int] = (), **options: Any) -> TorchEngine:
    config = RolloutConfig(batch=6, max_new_tokens=LIMIT, prefill_tokens=64, **options)
    channel = SharedChannel()
    end_tokens = frozenset(ends)
    settings = EngineSettings(
        rollout=config, seed=5, end_tokens=end_tokens, channel=channel, longest=64
    )
    return TorchEngine(model, settings)


def _small(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    return random_model(_SMALL, device, dtype)


def _made(engine: TorchEngine, chunk: int = 5) -> list[Rollout]:
    return decoded(engine, _small_rollouts(), chunk)


def _small_rollouts() -> list[Rollout]:
    return random_rollouts(8, _SMALL["vocab_size"], 40)


def _require(good: bool, what: str) -> None:
    if not good:
        raise EngineError(what, "contract-broken")


def require_same(rollouts: Sequence[Rollout], expected: Sequence[Rollout], what: str) -> None:
    """Raise EngineError if responses differ from the expected ones with the same ids."""
    by_id = {r.id: _response(r) for r in expected}
    different = [r.id for r in rollouts if _response(r) != by_id[r.id]]
    _require(not different, f"{what}: rollouts {different} got other tokens")


def _response(r: Rollout) -> tuple[Any, ...]:
    return r.tokens, r.finish, r.turns, r.ended_by


def take(decoded: Decoded, rollouts: Sequence[Rollout], version: int = 0) -> None:
    """Append chunks to their rollouts."""
    by_id = {r.id: r for r in rollouts}
    for c in decoded.chunks:
        valid = len(c.tokens) == len(c.logprobs) > 0 and c.version == version
        _require(valid and bool(np.all(c.logprobs <= 0)), f"{c} is no chunk of version {version}")
        by_id[c.rollout_id].append(c)  # refuses gaps, overlaps and chunks after an end


def finish(
    engine: Any, rollouts: Sequence[Rollout], size: int = 5, version: int = 0
) -> list[Rollout]:
    """Decode admitted rollouts to their ends, after which the engine must have nothing left."""
    for _ in range(500):
        if all(r.finish for r in rollouts):
            _require(tuple(engine.decode(3)) == ([], 0), "the engine decodes ended rollouts")
            return list(rollouts)
        take(engine.decode(size), rollouts, version)
    raise EngineError("the engine never finished", "contract-broken")


def check_chunks(
    engine: Any, rollouts: Sequence[Rollout], expected: Sequence[Rollout], size: int, limit: int
) -> None:
    """Chunks of any size make the same responses, of at most ``limit`` tokens."""
    engine.admit([r.response() for r in rollouts])
    while not all(r.finish for r in rollouts):
        lengths = {r.id: len(r) for r in rollouts}
        decoded = engine.decode(size)
        _require(0 < decoded.steps <= size, f"{decoded.steps} steps of at most {size}")
        new = {c.rollout_id: len(c.tokens) for c in decoded.chunks}
        _require(len(new) == len(decoded.chunks), "a rollout has two chunks of a call")
        _require(max(new.values()) <= decoded.steps, f"{new} tokens in {decoded.steps} steps")
        take(decoded, rollouts)
        for r in rollouts:
            _require(len(r) == lengths[r.id] + new.get(r.id, 0), f"rollout {r.id} has other tokens")
    require_same(rollouts, expected, f"chunks of {size}")
    for r in rollouts:
        full = r.finish is not FinishReason.LENGTH or len(r) == limit
        _require(full, f"rollout {r.id} was ended at {len(r)} of {limit} tokens")
    finish(engine, rollouts)


def check_moves(
    giver: Any,
    taker: Any,
    rollouts: Sequence[Rollout],
    expected: Sequence[Rollout],
    with_cache: bool,
) -> Sequence[KVTransfer]:
    """Rollouts continue on another engine as if they had stayed. Returns their transfers."""
    giver.admit([r.response() for r in rollouts])
    take(giver.decode(2), rollouts)
    moving = [r for r in rollouts if not r.finish][::-1]
    transfers: Sequence[KVTransfer] = giver.export([r.id for r in moving], with_cache)
    in_order = [t.rollout_id for t in transfers] == [r.id for r in moving]
    _require(in_order, "transfers are not in the order of the request")
    _require(tuple(giver.decode(5)) == ([], 0), "the engine decodes rollouts that it gave up")
    taker.accept([r.response() for r in moving], transfers)
    finish(taker, moving)
    cache = "with" if with_cache else "without"
    require_same(rollouts, expected, f"moved {cache} keys and values")
    return transfers


TURNS = 4
"""Turns after which :func:`answer` ends an episode."""


def context_of(rollout_id: int, turn: int) -> list[int]:
    """Return the 1 to 5 tokens with which :func:`answer` answers a turn."""
    return [(7 * rollout_id + 3 * turn + i) % 11 for i in range(1 + (rollout_id + turn) % 5)]


def episodes(prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
    """Return rollouts of episodes, which :func:`play` brings to their ends."""
    rollouts = [Rollout(i, Prompt(i, tuple(p), ""), i) for i, p in enumerate(prompts)]
    for r in rollouts:
        r.sampling = sampling
    return rollouts


def answer(r: Rollout) -> bool:
    """Answer a turn as an environment does. Return whether the episode continues."""
    context = np.array(context_of(r.id, len(r.turns)), np.int32)
    if len(r.turns) == TURNS:
        r.ended_by = "turns"
    elif len(r) + len(context) >= r.most_tokens:
        r.ended_by = "tokens"
    else:
        r.append(r.observe(Observation(r.id, len(r.turns), context)))
    return not r.ended_by


Wait = tuple[Callable[[Any, list[int]], Any], Callable[[Any, list[Rollout], Any], None]]
"""An action on parked rollouts, and how they continue, given the first function's result."""


def _nothing(engine: Any, ids: list[int]) -> None:
    """Leave parked rollouts as they are."""


def _admit(engine: Any, rollouts: list[Rollout], transfers: Any) -> None:
    engine.admit([r.response() for r in rollouts])


def _hold(*ways: Hold) -> Callable[[Any, list[int]], None]:
    def hold(engine: Any, ids: list[int]) -> None:
        for how in ways:
            engine.hold([*ids, 99], how)

    return hold


def _accept(engine: Any, rollouts: list[Rollout], transfers: Any) -> None:
    engine.accept([r.response() for r in rollouts], transfers)


WAITS: Mapping[str, Wait] = {
    "kept": (_nothing, _admit),
    "offloaded": (_hold("offload"), _admit),
    "offloaded and back": (_hold("offload", "keep"), _admit),
    "made again": (_hold("remake"), _admit),
    "released": (lambda e, ids: e.release(ids), _admit),
    "moved": (lambda e, ids: e.export(ids, False), _accept),
    "moved with its cache": (lambda e, ids: e.export(ids, True), _accept),
}


def play(
    engine: Any,
    rollouts: Sequence[Rollout],
    size: int = 5,
    way: Wait = WAITS["kept"],
    each: Callable[[Sequence[Chunk]], None] | None = None,
) -> None:
    """Decode episodes to their ends. ``each`` gets the chunks of each call of ``size`` tokens."""
    by_id = {r.id: r for r in rollouts}
    park, resume = way
    engine.admit([r.response() for r in rollouts if not r.ended_by])
    for _ in range(1000):
        if all(r.ended_by for r in rollouts):
            _require(tuple(engine.decode(3)) == ([], 0), "the engine decodes ended rollouts")
            return
        chunks = engine.decode(size).chunks
        if each:
            each(chunks)
        for chunk in chunks:
            by_id[chunk.rollout_id].append(chunk)
        turns = [by_id[c.rollout_id] for c in chunks if c.finish is FinishReason.TURN]
        transfers = park(engine, [r.id for r in turns])
        continuing = [r for r in turns if answer(r)]
        if transfers:
            transfers = [t for t in transfers if not by_id[t.rollout_id].ended_by]
        resume(engine, continuing, transfers)
        engine.release([r.id for r in turns if r.ended_by])
    raise EngineError("the episodes never ended", "contract-broken")


def _chunks(device: torch.device) -> str:
    model = _small(device)
    expected = _made(_engine(model), 100)
    for size in (1, 3):
        check_chunks(_engine(model), _small_rollouts(), expected, size, LIMIT)
    return "chunks of 1, 3 and 100 tokens make the same responses"


def _moves(device: torch.device) -> str:
    model = _small(device)
    expected = _made(_engine(model))
    for with_cache in (True, False):
        check_moves(_engine(model), _engine(model), _small_rollouts(), expected, with_cache)
    return "with its keys and values, and without, a rollout goes on as if it had stayed"


def _turns(device: torch.device) -> str:
    model = _small(device)
    prompts = [r.prompt.tokens for r in _small_rollouts()]
    ways = "kept", "offloaded", "made again"
    rollouts_by_way = {way: episodes(prompts, Sampling(LIMIT, max_turn_tokens=12)) for way in ways}
    expected = rollouts_by_way["kept"]
    for way, rollouts in rollouts_by_way.items():
        play(_engine(model, ends=range(0, _SMALL["vocab_size"], 8)), rollouts, way=WAITS[way])
        require_same(rollouts, expected, f"{way} during a wait")
    _require(any(len(r.turns) > 1 for r in expected), "no turn has ended")
    return "kept on the device, on the host or made again, a rollout goes on the same after a turn"


def _graphs(device: torch.device) -> str:
    if not backend_of(device).graphs:
        return "the device has none"
    model = _small(device)
    graphed = _made(_engine(model))
    eager = _made(_engine(model, engine_args={"cuda_graphs": False}))
    require_same(graphed, eager, "with CUDA graphs")
    gap = max(
        abs(x - y)
        for a, b in zip(graphed, eager, strict=True)
        for x, y in zip(a.logprobs, b.logprobs, strict=True)
    )
    _require(gap <= EXACT, f"log-probabilities with CUDA graphs differ by {gap:.2g} nats")
    return f"the same tokens; log-probabilities differ by {gap:.1g} nats at most"


def _learner(device: torch.device) -> str:
    gaps = []
    for dtype, limit in ((torch.float32, EXACT), (torch.bfloat16, ROUNDED)):
        model = _small(device, dtype)
        gap = logprob_gap(model, _made(_engine(model)))
        name = str(dtype).removeprefix("torch.")
        _require(gap <= limit, f"engine and learner differ by {gap:.2g} nats in {name}")
        gaps.append(f"{gap:.1g} nats in {name}")
    return f"apart by {', '.join(gaps)} (root mean square)"


def _weights(device: torch.device) -> str:
    model, learner = _small(device), _small(device)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.mul_(1.01)
    engine = _engine(model)
    new = {name: p.detach() for name, p in learner.named_parameters()}
    channel = engine.settings.channel
    assert isinstance(channel, SharedChannel)
    ref = WeightsRef("actor", 1, fingerprint(new.items()), channel.name)
    channel.put(ref, new)
    engine.load(ref)
    gap = logprob_gap(learner, _made(engine))
    _require(gap <= EXACT, f"with new weights the engine is {gap:.2g} nats from the learner")
    wrong = replace(ref, version=2, fingerprint="other")
    channel.put(wrong, new)
    try:
        engine.load(wrong)
    except EngineError:
        return "new weights arrive, and others than the learner's are refused"
    raise EngineError("the engine took weights that are not the learner's", "contract-broken")


def _scorers(device: torch.device) -> str:
    model = _small(device)
    critic = critic_from_actor(model)
    nn.init.normal_(next(scalar_head(critic).parameters()), std=0.1)
    rollouts = _made(_engine(model))
    slots = len(rollouts)
    complete = reference_scorer(model, 1.0, 256), critic_scorer(critic, 256)
    streaming = (
        reference_scorer(model, 1.0, 256, slots=slots),
        critic_scorer(critic, 256, slots=slots),
    )
    gap = max(scores_gap(*pair, rollouts, 5) for pair in zip(complete, streaming, strict=True))
    _require(gap <= EXACT, f"scores of streamed and whole responses differ by {gap:.2g}")
    return f"streamed and whole scores differ by {gap:.1g} at most"


def scores_gap(scorer: Any, streaming: Any, rollouts: Sequence[Rollout], size: int) -> float:
    """Return the largest difference between scores of complete responses, and of responses that
    arrive in chunks of ``size`` tokens at another scorer.
    """
    complete = np.concatenate([score.values for score in scores_of(scorer, rollouts)])
    streamed = np.concatenate([score.values for score in scores_of(streaming, rollouts, size)])
    return float(np.abs(complete - streamed).max())


def scores_of(scorer: Any, rollouts: Sequence[Rollout], size: int = 0) -> list[Any]:
    """Score complete rollouts, told at once or in chunks of ``size`` tokens."""
    initial_rollouts = [Rollout(r.id, r.prompt, r.group) for r in rollouts] if size else rollouts
    scorer.admit([r.response(text=True) for r in initial_rollouts])
    longest = max(map(len, rollouts)) if size else 0
    for start in range(0, longest, size or 1):
        growing = [r for r in rollouts if start <= max(0, len(r) - 1)]
        scorer.extend([chunk_of(r, start, start + size) for r in growing])
    return list(scorer.finish([r.id for r in rollouts]))


def chunk_of(r: Rollout, start: int, stop: int) -> Chunk:
    finish = r.finish if stop >= len(r) else None
    return make_chunk(r.id, start, r.tokens[start:stop], r.logprobs[start:stop], 0, finish)


CONTRACTS: Mapping[str, Callable[[torch.device], str]] = {
    "chunks": _chunks,
    "migration": _moves,
    "turns": _turns,
    "CUDA graphs": _graphs,
    "learner": _learner,
    "new weights": _weights,
    "streaming": _scorers,
}
"""Checks that return their result on a device, or raise EngineError."""


def checked(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """Yield each contract's name, whether the device keeps it, and the result."""
    for name, check in CONTRACTS.items():
        try:
            yield name, True, check(device)
        except Exception as error:
            # Any error of a driver or kernel counts.
            yield name, False, f"{type(error).__name__}: {error}"
