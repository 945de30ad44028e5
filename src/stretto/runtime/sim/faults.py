"""Roles that fail on purpose and reproducibly.

The fault of a call, if any, is a pure function of (seed, role, number of the call). A role whose
process has died answers every call with ``RoleLostError`` until it is restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

from stretto.config.sections import Fraction, NonNegative, Section
from stretto.errors import RoleLostError
from stretto.runtime.sim.lengths import uniform
from stretto.types import Score

R = TypeVar("R")


class InjectedError(RuntimeError):
    """The error that a faulty role raises. No schedule can know its type."""


class Faults(Section):
    """Shares of a role's calls that fail, by kind of failure. Their sum is at most 1."""

    seed: int = 0
    """Seed of all draws."""
    raises: Fraction = 0.0
    """The call does its work and then raises an error."""
    hangs: Fraction = 0.0
    """The call never answers."""
    dawdles: Fraction = 0.0
    """The call takes ``slow_factor`` times as long."""
    slow_factor: float = 10.0
    """Factor by which a slow call takes longer."""
    dies: Fraction = 0.0
    """The process dies within a second, or at the call's end. Generators and scorers only."""
    restart_s: NonNegative = 0.0
    """Seconds to start a new process."""
    restart_fails: Fraction = 0.0
    """Share of new processes that die as they start."""
    slow_loads: Fraction = 0.0
    """Share of weight syncs that take ``slow_factor`` times as long."""
    unscored: Fraction = 0.0
    """Share of scores that are failures. Scorers only."""


class _Faulty:
    """Injects faults into a role's calls and answers. Calls stay in order."""

    def __init__(self, role: Any, faults: Faults, name: str, *, mortal: bool) -> None:
        self._role = role
        self._faults = faults
        self._name = name
        self._mortal = mortal
        self._turn = asyncio.Lock()
        self._calls = self._restarts = 0
        self._dead = False

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._role, name)
        if not asyncio.iscoroutinefunction(member):
            return member

        @wraps(member)
        async def faulty(*args: Any, **keywords: Any) -> Any:
            async with self._turn:
                return await self._call(member, *args, **keywords)

        return faulty

    async def _call(self, call: Callable[..., Awaitable[Any]], *args: Any, **keywords: Any) -> Any:
        if self._dead:
            raise RoleLostError(self._name, "its process has died before")
        number, self._calls = self._calls, self._calls + 1
        f, loop = self._faults, asyncio.get_running_loop()
        draw = uniform(f.seed, self._name, number)
        alive = f.raises + f.hangs + f.dawdles
        if self._mortal and alive <= draw < alive + f.dies:
            await self._die(call(*args, **keywords), number)
        if f.raises <= draw < f.raises + f.hangs:
            await loop.create_future()
        start_s = loop.time()
        answer = await call(*args, **keywords)
        if draw < f.raises:
            raise InjectedError(f"call {number} of {self._name} was made to fail")
        loads = call.__name__ == "load"
        slow = loads and uniform(f.seed, self._name, "load", number) < f.slow_loads
        if slow or f.raises + f.hangs <= draw < alive:
            await asyncio.sleep((f.slow_factor - 1) * (loop.time() - start_s))
        if f.unscored and call.__name__ == "finish":
            return [self._marked(score) for score in answer]
        return answer

    async def _die(self, work: Awaitable[Any], number: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(uniform(self._faults.seed, self._name, "death", number)):
                await work
        self._dead = True
        cause = f"its process was made to die in call {number}"
        raise RoleLostError(self._name, cause, "made-to-die")

    async def restart(self) -> None:
        f, self._dead = self._faults, True  # fails calls still waiting for the old process
        async with self._turn:
            number, self._restarts = self._restarts, self._restarts + 1
            await asyncio.sleep(f.restart_s)
            if uniform(f.seed, self._name, "restart", number) < f.restart_fails:
                raise RoleLostError(self._name, f"its new process {number} was made to die")
            await self._role.restart()
            self._dead = False

    def _marked(self, score: Score) -> Score:
        draw = uniform(self._faults.seed, self._name, "score", score.rollout_id)
        if draw >= self._faults.unscored:
            return score
        return replace(score, values=np.zeros(0, np.float32), failure="made to fail")


def faulty(role: R, faults: Faults, name: str) -> R:
    return cast(R, _Faulty(role, faults, name, mortal=hasattr(role, "restart")))
