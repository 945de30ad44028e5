"""Small models of many architectures, engines over them, vLLM's stand-in, roles of virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from helpers import CHANNEL, VOCABULARY
from stretto.config import ModelConfig, RolloutConfig
from stretto.models.devices import Backend
from stretto.models.info import language_auto
from stretto.rollout.base import EngineSettings, StopStrings
from stretto.rollout.engine import TorchEngine
from stretto.rollout.vllm.llm import Output
from stretto.rollout.vllm.vllm_engine import FullWeights, VllmEngine
from stretto.runtime.sim.loop import run
from stretto.schedules.rollout import Rollout
from stretto.testing import contracts
from stretto.testing.contracts import answer
from stretto.types import (
    Chunk,
    FinishReason,
    FloatArray,
    Prompt,
    Sampling,
)
from stretto.weights.channel import SharedChannel

END, LIMIT, BLOCK, SEED = 7, 12, 4, 5

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,  # keys and values of different sizes
    "first_k_dense_replace": 2,
}


def from_config(config: Any, attention: str | None = None) -> Any:
    """A language model with random weights whose responses are ended by their length alone."""
    torch.manual_seed(0)
    auto = language_auto(type(config))
    model = auto.from_config(config, attn_implementation=attention).eval()
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model


def with_adapters(model: Any) -> Any:
    """The model in adapters that change what it computes."""
    from stretto.models.lora import add_lora

    wrapped = add_lora(model, ModelConfig(lora_rank=4), "CAUSAL_LM")
    torch.manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return wrapped


@torch.no_grad()
def plain_logprobs(model: Any, r: Rollout, temperature: float = 1.0) -> Tensor:
    """[T] of the response, by one forward pass over all of it."""
    ids = torch.tensor([[*r.prompt.tokens, *r.tokens]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(r.prompt.tokens) - 1 : -1].float()
    if temperature:
        logits = logits / temperature
    table = logits.log_softmax(-1).cpu()
    return table.gather(1, torch.tensor(r.tokens)[:, None])[:, 0]


class Letters:
    """A tokenizer of which every token is one letter, besides the last, which is three."""

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join("xyz" if t == VOCABULARY - 1 else chr(ord("A") + t) for t in tokens)


def engine(
    model: Any,
    *,
    end: Sequence[int] = (),
    stop: Sequence[str] = (),
    tokenizer: Any = None,
    own: dict[str, Any] | None = None,
    **options: Any,
) -> TorchEngine:
    """An engine; ``options`` are of its config, ``own`` of its other settings."""
    given = EngineSettings(
        rollout=RolloutConfig(**{"batch": 7, "max_new_tokens": LIMIT, **options}),
        end_tokens=frozenset(end),
        seed=SEED,
        stop=StopStrings(stop, tokenizer or Letters()) if stop else None,
        **{"channel": CHANNEL, **(own or {})},
    )
    return TorchEngine(model, given)


class EagerGraph:
    """What stands for a CUDA graph: a replay runs everything once more."""

    def __init__(self, run: Callable[[], Any], backend: EagerBackend) -> None:
        self._run, self.outputs, self._backend = run, run(), backend

    def replay(self) -> None:
        self._backend.replays += 1
        for output, new in zip(self.outputs, self._run(), strict=True):
            output.copy_(new)

    def pool(self) -> None:
        pass


class EagerBackend(Backend):
    graphs = True

    """Attributes: ``failures``, the number of first captures that fail."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self.captures, self.replays, self.failures = 0, 0, failures

    def capture(self, run: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        self.captures += 1
        graph = EagerGraph(run, self)
        return graph, graph.outputs


def rollouts(prompts: Sequence[Sequence[int]]) -> list[Rollout]:
    return [Rollout(i, Prompt(i, tuple(p), ""), i) for i, p in enumerate(prompts)]


def random_prompts(lengths: Sequence[int], vocabulary: int = VOCABULARY) -> list[list[int]]:
    rng = random.Random(sum(lengths))
    return [[rng.randrange(3, vocabulary) for _ in range(n)] for n in lengths]


def take(chunks: Sequence[Chunk], by_id: dict[int, Rollout]) -> None:
    for chunk in chunks:
        assert len(chunk.tokens) == len(chunk.logprobs)
        assert len(chunk.tokens)
        by_id[chunk.rollout_id].append(chunk)  # refuses gaps, overlaps and what follows an end


def finish(e: TorchEngine, made: Sequence[Rollout], chunk: int = 5) -> list[Rollout]:
    return contracts.finish(e, made, chunk, e.version)


def following(tokens: Sequence[int]) -> int:
    """The one token that follows in the language of the stand-in."""
    return (3 * sum(tokens) + 5 * len(tokens) + 1) % 11


def logprob(token: int) -> float:
    return -0.1 * (token + 1)


class StandIn:
    """Requests to a model that knows :func:`following`; it reads one prompt in an iteration."""

    longest, kv_bytes_per_token, seeds_positions, ends = 40, 64, False, {END}

    def __init__(self, ends_early: str = "") -> None:
        self.tokens: dict[str, list[int]] = {}
        self.left: dict[str, int] = {}
        self.read: dict[str, int] = {}
        self.salts: dict[str, str] = {}
        self.added: list[tuple[str, int, int, str]] = []  # name, tokens, seed, salt
        self.samplings: list[Sampling] = []
        self.cache: set[tuple[str, tuple[int, ...]]] = set()
        self.loaded: dict[str, Tensor] = {}
        self.steps, self.ends_early = 0, ends_early
        self.sleeps, self.slept = False, list[str]()

    def add(
        self, request: str, tokens: Sequence[int], salt: str, seed: int, sampling: Sampling
    ) -> None:
        assert request not in self.tokens
        self.tokens[request], self.left[request] = list(tokens), sampling.max_new_tokens
        self.salts[request] = salt
        self.added.append((request, len(tokens), seed, salt))
        self.samplings.append(sampling)

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
            ended = "stop" if token in self.ends else "length" if not self.left[request] else ""
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

    def sleep(self, level: int) -> None:
        assert not self.busy
        self.slept.append(f"sleep {level}")

    def wake(self, what: Sequence[str]) -> None:
        self.slept += what

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int, adapters: str = "") -> None:
        assert not self.busy
        self.slept.append("load")
        self.loaded = dict(tensors)


STAND_IN_MODEL = torch.nn.Linear(2, 2)


def stand_in_engine(
    stand_in: StandIn | None = None,
    carry: Literal["recompute", "reuse"] = "recompute",
    stop: StopStrings | None = None,
    channel: SharedChannel | None = None,
    sleep_level: Literal[1, 2] = 1,
    source: FullWeights | None = None,
    end_tokens: frozenset[int] = frozenset({END}),
) -> VllmEngine:
    requests: Any = stand_in or StandIn()
    requests.ends = end_tokens
    settings = EngineSettings(
        rollout=RolloutConfig(max_new_tokens=LIMIT),
        end_tokens=end_tokens,
        seed=3,
        stop=stop,
        carry=carry,
        channel=channel,
        sleep_level=sleep_level,
    )
    return VllmEngine(requests, source or FullWeights(STAND_IN_MODEL), settings)


def played_whole(make: Callable[[], Any], made: Sequence[Rollout]) -> None:
    """Play episodes alone, and each turn by an engine that is given the whole transcript."""
    for r in made:
        while not r.ended_by:
            engine = make()
            engine.admit([r.response()])
            (chunk,) = engine.decode(1000).chunks
            r.append(chunk)
            if chunk.finish is FinishReason.TURN:
                answer(r)


class Virtual:
    """A role of virtual time, one call after another."""

    def __init__(self, role: Any) -> None:
        self._role = role

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._role, name)
        if not callable(found):
            return found

        async def called(*args: Any, **kwargs: Any) -> Any:
            return await found(*args, **kwargs)

        return lambda *args, **kwargs: run(called(*args, **kwargs))
