"""The server for programs of a run's episodes: on loopback, in the run's process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from stretto.environments.sessions import Sessions
from stretto.serving.app import ModelServer
from stretto.serving.connections import server_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HOST = "127.0.0.1"

STARTS_S = 0.01
"""Seconds between checks whether the server has started."""


class _Quiet(uvicorn.Server):
    """A server that leaves signals to the run."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ProgramServer:
    """Answers programs' requests, which must bring the sessions' key, while it is running."""

    def __init__(self, sessions: Sessions, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        """Prepare the server. ``name`` is the model's in requests."""
        self._sessions = sessions
        app = ModelServer(sessions, tokenizer, name, api_key=sessions.api_key, hosts=(HOST,)).app
        self._server = _Quiet(server_config(app))
        self._starting: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    async def start(self) -> None:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        listener = self._listener = socket.create_server((HOST, 0))
        self._sessions.base_url = f"http://{HOST}:{listener.getsockname()[1]}"
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not (self._server.started or self._serving.done()):
            await asyncio.sleep(STARTS_S)
        if self._serving.done():
            self._serving.result()

    async def stop(self) -> None:
        """Close the port and all connections."""
        self._server.should_exit = self._server.force_exit = True
        if self._serving:
            await asyncio.gather(self._serving, return_exceptions=True)
        self.close()

    def close(self) -> None:
        if self._listener:
            self._listener.close()
