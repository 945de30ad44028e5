"""Contracts of engines and scorers that a device could break. ``tests/contracts`` has more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

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
from stretto.scoring.base_scorer import ModelScorer
from stretto.scoring.model_scorers import critic_scorer, reference_scorer
from stretto.testing import make_chunk
from stretto.training.trained import WholeModel
from stretto.types import Chunk, FinishReason, Hold, Observation, Prompt, Sampling, WeightsRef
from stretto.weights.channel import SharedChannel

EXACT = 1e-3
"""Tolerance of log-probabilities (nats) and values in float32."""
ROUNDED = 0.2
"""Tolerance of the RMS difference in bfloat16, in nats; the same as for the weight-sync probe."""

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
    config = RolloutConfig(batch=6, max_new_tokens=24, prefill_tokens=64, **options)
    channel = SharedChannel()
    end_tokens = frozenset(ends)
    settings = EngineSettings(
        rollout=config, seed=5, end_tokens=end_tokens, channel=channel, longest=64
    )
    return TorchEngine(model, settings)


def _small(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    return random_model(_SMALL, device, dtype)


def _made(engine: TorchEngine, chunk: int = 5) -> list[Rollout]:
    return decoded(engine, random_rollouts(8, _SMALL["vocab_size"], 40), chunk)


def _require(good: bool, what: str) -> None:
    if not good:
        raise EngineError(what, "contract-broken")


def _same_tokens(one: Sequence[Rollout], other: Sequence[Rollout], what: str) -> None:
    differ = [a.id for a, b in zip(one, other, strict=True) if a.tokens != b.tokens]
    _require(not differ, f"{what}: rollouts {differ} got other tokens")


def _chunks(device: torch.device) -> str:
    model = _small(device)
    expected = _made(_engine(model), 100)
    for size in (1, 3):
        _same_tokens(_made(_engine(model), size), expected, f"chunks of {size}")
    return "chunks of 1, 3 and 100 tokens make the same responses"


def _moves(device: torch.device) -> str:
    model = _small(device)
    expected = _made(_engine(model))
    for with_cache in (True, False):
        one, two = _engine(model), _engine(model)
        rollouts = random_rollouts(8, _SMALL["vocab_size"], 40)
        one.admit([r.response() for r in rollouts])
        _take(one, rollouts, 4)
        going = [r for r in rollouts if not r.finish]
        two.accept([r.response() for r in going], one.export([r.id for r in going], with_cache))
        while not all(r.finish for r in rollouts):
            _take(two, rollouts, 5)
        _same_tokens(
            rollouts, expected, "moved " + ("with" if with_cache else "without") + " its cache"
        )
    return "with its keys and values, and without, a rollout goes on as if it had stayed"


def _take(engine: TorchEngine, rollouts: Sequence[Rollout], tokens: int) -> list[Rollout]:
    """Decode rollouts whose ids are their places. Return those that ended a turn."""
    chunks = engine.decode(tokens).chunks
    for chunk in chunks:
        rollouts[chunk.rollout_id].append(chunk)
    return [rollouts[c.rollout_id] for c in chunks if c.finish is FinishReason.TURN]


def _turns(device: torch.device) -> str:
    model = _small(device)
    rollouts_by_hold = {how: _episodes(model, how) for how in get_args(Hold)}
    _require(any(len(r.turns) > 1 for r in rollouts_by_hold["keep"]), "no turn has ended")
    for how, rollouts in rollouts_by_hold.items():
        _same_tokens(rollouts, rollouts_by_hold["keep"], f"after a wait by hold = '{how}'")
    return "kept on the device, on the host or made again, a rollout goes on the same after a turn"


def _episodes(model: nn.Module, how: Hold) -> list[Rollout]:
    """Decode episodes, with an observation of two tokens after each turn."""
    engine = _engine(model, ends=range(0, _SMALL["vocab_size"], 8))
    rollouts = random_rollouts(8, _SMALL["vocab_size"], 40)
    for r in rollouts:
        r.sampling = Sampling(24, max_turn_tokens=12)
    engine.admit([r.response() for r in rollouts])
    for _ in range(24):
        for r in _take(engine, rollouts, 5):
            engine.hold([r.id], how)
            if len(r) + 2 < r.most_tokens:
                context = np.array([r.id, len(r)], np.int32)
                r.append(r.observe(Observation(r.id, len(r.turns), context)))
                engine.admit([r.response()])
    return rollouts


def _graphs(device: torch.device) -> str:
    if not backend_of(device).graphs:
        return "the device has none"
    model = _small(device)
    graphed = _made(_engine(model))
    eager = _made(_engine(model, engine_args={"cuda_graphs": False}))
    _same_tokens(graphed, eager, "with CUDA graphs")
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
    gap = max(
        _streamed_gap(lambda slots: reference_scorer(model, 1.0, 256, slots=slots), rollouts),
        _streamed_gap(lambda slots: critic_scorer(critic, 256, slots=slots), rollouts),
    )
    _require(gap <= EXACT, f"scores of streamed and whole responses differ by {gap:.2g}")
    return f"streamed and whole scores differ by {gap:.1g} at most"


def _streamed_gap(make: Callable[[int], ModelScorer], rollouts: Sequence[Rollout]) -> float:
    """Return the largest difference between scores of complete and of streamed responses."""
    complete_scores, streamed_scores = (
        scores_of(make(0), rollouts),
        scores_of(make(len(rollouts)), rollouts, 5),
    )
    gaps = (
        np.abs(a.values - b.values).max()
        for a, b in zip(complete_scores, streamed_scores, strict=True)
    )
    return float(max(gaps))


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
