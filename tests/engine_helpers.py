"""vLLM's stand-in, the engine over it, and roles of virtual time that answer at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from stretto.config import RolloutConfig
from stretto.rollout.base import EngineSettings, StopStrings
from stretto.rollout.vllm.engine import FullWeights, VllmEngine
from stretto.rollout.vllm.llm import Output
from stretto.runtime.sim.loop import run
from stretto.types import FloatArray
from stretto.weights.channel import SharedChannel

END, LIMIT, BLOCK = 7, 12, 4


def following(tokens: Sequence[int]) -> int:
    """The one token that follows in the language of the stand-in."""
    return (3 * sum(tokens) + 5 * len(tokens) + 1) % 11


def logprob(token: int) -> float:
    return -0.1 * (token + 1)


class StandIn:
    """Requests to a model that knows :func:`following`; it reads one prompt in an iteration."""

    longest, kv_bytes_per_token, seeds_positions, end = 40, 64, False, END

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
            ended = "stop" if token == self.end else "length" if not self.left[request] else ""
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

    def sleep(self) -> None:
        assert not self.busy
        self.slept.append("sleep")

    def wake(self, what: Sequence[str]) -> None:
        self.slept += what

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert not self.busy
        self.slept.append("load")
        self.loaded = dict(tensors)


STAND_IN_MODEL = torch.nn.Linear(2, 2)


def stand_in_engine(
    stand_in: StandIn | None = None,
    carry: Literal["recompute", "reuse"] = "recompute",
    stop: StopStrings | None = None,
    channel: SharedChannel | None = None,
) -> VllmEngine:
    requests: Any = stand_in or StandIn()
    settings = EngineSettings(
        rollout=RolloutConfig(max_new_tokens=LIMIT),
        end_tokens=frozenset({END}),
        seed=3,
        stop=stop,
        carry=carry,
        channel=channel,
    )
    return VllmEngine(requests, FullWeights(STAND_IN_MODEL), settings)


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
