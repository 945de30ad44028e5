"""Clients for a schedule's roles. Executors run the work on a thread or in a process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

from stretto.observe.spans import SWAPS
from stretto.protocols import Generator, Learner, Scorer, Tracer, remote_methods
from stretto.types import Reply, ScorerInfo, short_name
from stretto.workers.threads import Executor

Ways = Mapping[str, Callable[..., Awaitable[Reply[Any]]]]
"""Functions called instead of the executor, by method name."""


class Client:
    """A role that calls its service and traces the work. ``member`` is unique in the run."""

    def __init__(
        self, protocol: type, member: str, role: str, executor: Executor, tracer: Tracer, ways: Ways
    ) -> None:
        self.member = member
        self._role = role
        self._executor = executor
        self._tracer = tracer
        self._methods = remote_methods(protocol)
        for method in self._methods:
            call = ways.get(method) or partial(executor.call, method)
            setattr(self, method, partial(self.answer, method, call))

    async def restart(self) -> None:
        await self._executor.restart()

    async def answer(
        self, method: str, call: Callable[..., Awaitable[Reply[Any]]], *args: Any
    ) -> Any:
        """Return the value of a method's reply, and trace the work that the reply lists."""
        work = self._span(self._methods[method].span)
        with self._tracer.awaiting(self._role, work) if work else nullcontext():
            reply = await call(*args)
        for w in reply.work:
            role = SWAPS if w.beside else self._role
            self._tracer.add(role, w.name, w.start_s, w.end_s, **w.attributes)
        return self._value(reply.value)

    def _span(self, name: str) -> str:
        return name

    def _value(self, value: Any) -> Any:
        return value


class ScorerClient(Client):
    """A scorer on an executor. See :class:`~stretto.protocols.Scorer`."""

    def __init__(
        self,
        info: ScorerInfo,  # initial, replaced by calls that return a ScorerInfo
        executor: Executor,
        tracer: Tracer,
        replica: str = "",  # name of this replica if there are several, unique in a run
        ways: Ways | None = None,
        shown: str = "",  # name in traces
    ) -> None:
        self.info, member = info, replica or info.name
        role = short_name(shown or member)
        super().__init__(Scorer, member, role, executor, tracer, ways or {})

    def _span(self, name: str) -> str:
        return f"{name}/{short_name(self.info.name)}" if name in ("prefill", "score") else name

    def _value(self, value: Any) -> Any:
        if isinstance(value, ScorerInfo):
            self.info, value = value, None
        return value


def generator_client(
    name: str, executor: Executor, tracer: Tracer, ways: Ways | None = None
) -> Generator:
    return cast(Generator, Client(Generator, name, name, executor, tracer, ways or {}))


def scorer_client(info: ScorerInfo, *args: Any, **rest: Any) -> Scorer:
    return cast(Scorer, ScorerClient(info, *args, **rest))


def learner_client(name: str, executor: Executor, tracer: Tracer) -> Learner:
    return cast(Learner, Client(Learner, name, name, executor, tracer, {}))
