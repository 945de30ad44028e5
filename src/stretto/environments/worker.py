"""The process that environments run in: ``python -m stretto.environments.worker``.

It speaks JSON lines with the same guarantees as :mod:`stretto.scoring.worker`, but works on many
requests concurrently and answers in any order.
::

    in    {"sources": {name: {"file", "module", "root", "function"}}, "settings": {...},
           "judges": as "sources", of reward functions that take environments}             once
    out   {"ready": {"kind", "tools": schemas, "replay": text}}
    in    a request to :class:`stretto.environments.host.Host`                         repeatedly
    out   {"answer": its answer}
          {"alive": true}   for request 0, each second, unless user code blocks the event loop

It ends once as many calls hang as may run concurrently, and its parent starts another process. If
the parent closes the pipe or dies, it cancels all calls and closes the open episodes in
:data:`CLOSE_S` seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import ModuleType
from typing import Any

from stretto.environments.host import CLOSE_S, Host
from stretto.outside import import_module, member_of
from stretto.workers.channel import Channel, Request, end_all

THREADS = 1024
"""Threads for ``asyncio.to_thread`` in user code. asyncio's default follows the number of cores,
and can deadlock a batch of programs that all wait for their turns in such threads."""

BEAT_S = 1.0
SETTING = "`environment.sources`"


def main() -> None:
    asyncio.run(_Worker().work())


class _Worker:
    def __init__(self) -> None:
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._asked: set[asyncio.Task[None]] = set()
        self._is_worn = False
        self._host: Host | None = None

    async def work(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(THREADS))
        take = self._requests.put_nowait
        self._channel = Channel(
            lambda request: loop.call_soon_threadsafe(take, request), lambda: self._leave(loop)
        )
        request = await self._requests.get()
        self._host = host = self._channel.open(request, self._make_host)
        host.use_main(loop)
        self._channel.send(request["request"], {"ready": host.ready()})
        self._asked.add(asyncio.create_task(self._beat()))
        while True:
            task = asyncio.create_task(self._answer(host, await self._requests.get()))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)

    def _make_host(self, opening: Mapping[str, Any]) -> Host:
        modules: dict[str, ModuleType] = {}
        sources = _named(opening["sources"], modules)
        judges = _named(opening.get("judges", {}), modules, "reward.sources")
        return Host(sources, opening["settings"], self._wear, judges)

    def _leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close all episodes, unless user code blocks the event loop. Runs in another thread."""
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._close(), loop).result(CLOSE_S)

    async def _close(self) -> None:
        for task in self._asked:  # so that their calls do not delay the closing
            task.cancel()
        if self._host is not None:
            await self._host.close()

    def _wear(self) -> None:
        self._is_worn = True

    async def _answer(self, host: Host, request: Request) -> None:
        answer = await host.answer(request["body"])
        self._channel.send(request["request"], {"answer": answer})
        if self._is_worn:
            end_all()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._channel.send(0, {"alive": True})


def _named(
    sources: Mapping[str, Mapping[str, str]], modules: dict[str, ModuleType], setting: str = SETTING
) -> dict[str, Any]:
    objects = {}
    for name, place in sources.items():
        file = place["file"]
        if file not in modules:
            modules[file] = import_module(file, place["module"], place["root"], setting)
        objects[name] = member_of(modules[file], place, setting)
    return objects


if __name__ == "__main__":
    main()
