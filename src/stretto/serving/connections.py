"""Connections of a server: limits of bodies, clients that leave, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from stretto.errors import StrettoError
from stretto.serving.requests import ApiError

BODY_S = 30
"""Seconds for a body to arrive."""

IDLE_S = 5
"""Seconds that a connection may be open without a complete request head. uvicorn's own limit only
applies after an answer, and until the next byte."""

_STATUS = {
    "context-length": (400, "context_length_exceeded"),
    "too-many-requests": (429, "rate_limit_exceeded"),
    "engine-stopped": (503, None),
    "episode-over": (400, "episode_over"),
    "template-breaks": (400, "conversation_rewritten"),
}
"""Status and OpenAI's code of an engine's errors. All others are server errors."""


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Closes a connection in which no request has begun for a while."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle = self.loop.call_later(IDLE_S, self._close_idle, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.cancel()
        super().connection_lost(exc)

    def _close_idle(self, before: Any) -> None:
        if self.cycle is before and (before is None or before.response_complete):
            self.transport.close()
        self._idle = self.loop.call_later(IDLE_S, self._close_idle, self.cycle)


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    return uvicorn.Config(app, http=_Protocol, log_level="warning", lifespan="off", **options)


async def read_body(http: Request, most: int) -> bytes:
    """Return a JSON body. Raises ApiError if it has another type, is too large, or too slow."""
    # Browsers let pages of other sites send other types without a preflight request.
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("requests have the header Content-Type: application/json", 415)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in http.stream():
                body += part
                if len(body) > most:
                    raise ApiError(f"the body has more than {most} bytes", 413)
    except TimeoutError as error:
        raise ApiError(f"the body has not come within {BODY_S} s", 408) from error
    return bytes(body)


async def unless_gone(http: Request, work: Any) -> Response:
    """Compute an answer, unless the client leaves before."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return Response(status_code=499)  # which nobody reads
        response: Response = await working
        return response
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def of_engine(error: StrettoError) -> ApiError:
    status, code = _STATUS.get(error.code, (500, None))
    return ApiError(str(error), status, code)


async def refused(http: Request, error: Exception) -> Response:
    """Convert an error to a response."""
    headers = None
    if isinstance(error, HTTPException):
        headers, message = error.headers, error.detail
        if error.status_code == 404:
            message = f"there is no {http.url.path} here; chats are asked at /v1/chat/completions"
        error = ApiError(message, error.status_code)
    if not isinstance(error, ApiError):
        error = ApiError("the server has a fault, which its log shows", 500)
    return JSONResponse(error.body, error.status, headers)
