"""Roles that fail, on purpose and reproducibly.

Whether a call fails, and how, is a pure function of (seed, role, number of the call). So a run that
goes wrong can be had again, and the same faults can be put upon another schedule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from stretto.config import Fraction, Section
from stretto.runtime.sim.lengths import uniform
from stretto.types import Score

R = TypeVar("R")


class InjectedError(RuntimeError):
    """What a faulty role raises: nothing that a schedule could know of."""


class Faults(Section):
    """How often calls of a role go wrong. Shares of all calls; they add up to at most 1."""

    seed: int = 0
    """Of all draws."""
    raises: Fraction = 0.0
    """The call does its work and raises instead of answering."""
    hangs: Fraction = 0.0
    """The call never answers."""
    dawdles: Fraction = 0.0
    """The call takes ``slow_factor`` times as long."""
    slow_factor: float = 10.0
    """How slow a slow call is."""
    unscored: Fraction = 0.0
    """Share of scores that are failures; of scorers alone."""


class _Faulty:
    """A role between whose calls and answers faults happen. Calls stay in order."""

    def __init__(self, role: Any, faults: Faults, name: str) -> None:
        self._role, self._faults, self._name = role, faults, name
        self._turn = asyncio.Lock()
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._role, name)
        return self._wrapped(member) if asyncio.iscoroutinefunction(member) else member

    def _wrapped(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @wraps(call)
        async def faulty(*args: Any, **keywords: Any) -> Any:
            async with self._turn:
                return await self._call(call, *args, **keywords)

        return faulty

    async def _call(self, call: Callable[..., Awaitable[Any]], *args: Any, **keywords: Any) -> Any:
        number, self._calls = self._calls, self._calls + 1
        f, loop = self._faults, asyncio.get_running_loop()
        draw = uniform(f.seed, self._name, number)
        if f.raises <= draw < f.raises + f.hangs:
            await loop.create_future()
        start_s = loop.time()
        answer = await call(*args, **keywords)
        if draw < f.raises:
            raise InjectedError(f"call {number} of {self._name} was made to fail")
        if f.raises + f.hangs <= draw < f.raises + f.hangs + f.dawdles:
            await asyncio.sleep((f.slow_factor - 1) * (loop.time() - start_s))
        if f.unscored and call.__name__ == "finish":
            return [self._marked(score) for score in answer]
        return answer

    def _marked(self, score: Score) -> Score:
        """The score, or a failure in its place; of a rollout always the same."""
        if uniform(self._faults.seed, self._name, "score", score.rollout_id) >= (
            self._faults.unscored
        ):
            return score
        return replace(score, values=np.zeros(0, np.float32), failure="made to fail")


def faulty(role: R, faults: Faults, name: str) -> R:
    """The role, with faults; ``name`` tells it from other roles with the same faults."""
    return cast(R, _Faulty(role, faults, name))
