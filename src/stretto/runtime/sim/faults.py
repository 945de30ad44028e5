"""Roles that fail, on purpose and reproducibly.

The fault of a call, if any, is a pure function of (seed, role, number of the call). So a run that
goes wrong can be repeated, and other schedules can be given the same faults.
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
    """The error that a faulty role raises: none that a schedule could know."""


class Faults(Section):
    """Shares of a role's calls that go wrong, by the way they do; they add up to at most 1."""

    seed: int = 0
    """Seed of all draws."""
    raises: Fraction = 0.0
    """The call does its work and raises instead of answering."""
    hangs: Fraction = 0.0
    """The call never answers."""
    dawdles: Fraction = 0.0
    """The call takes ``slow_factor`` times as long."""
    slow_factor: float = 10.0
    """Factor by which a slow call takes longer."""
    unscored: Fraction = 0.0
    """Share of scores that are failures; of scorers alone."""


class _Faulty:
    """A role whose calls and answers suffer faults. Calls stay in order."""

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
        """Return the score, or a failure in its place; the same for a rollout every time."""
        if uniform(self._faults.seed, self._name, "score", score.rollout_id) >= (
            self._faults.unscored
        ):
            return score
        return replace(score, values=np.zeros(0, np.float32), failure="made to fail")


def faulty(role: R, faults: Faults, name: str) -> R:
    """Return the role with faults; ``name`` tells it from other roles with the same faults."""
    return cast(R, _Faulty(role, faults, name))
