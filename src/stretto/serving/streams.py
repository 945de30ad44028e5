"""Requests to a generator, which start and end while others are decoded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from stretto.errors import EngineError, StrettoError
from stretto.rollout.base import Engine
from stretto.types import Chunk, Prompt, Response, Sampling, WeightsRef


class GenerationRequest(NamedTuple):
    """A prompt's token ids, and the sampling of its answer."""

    tokens: Sequence[int]
    sampling: Sampling


class AsyncEngine:
    """A server's interface to an engine. Requests enter free slots while others decode.

    Every answer is of one version of the weights. Before new ones are loaded, answers in progress
    are completed, and new requests wait.

    Args:
        call: runs calls of the engine, in order.

    Attributes:
        longest: most tokens of prompt and answer together.
        most: answers in progress or waiting at a time, and so per request.
        version: of the weights for the next request, unless newer ones come first.
    """

    def __init__(
        self,
        engine: Engine,
        call: Callable[[Callable[[], Any]], Awaitable[Any]],
        longest: int,
        most: int,
    ) -> None:
        self.longest = longest
        self.most = most
        self.version = 0
        self._engine, self._call = engine, call
        self._ids = count()
        self._streams: dict[int, Stream] = {}  # by rollout
        self._new: dict[int, Response] = {}
        self._admitted, self._gone = set[int](), list[int]()
        self._weights: WeightsRef | None = None
        self._failure: EngineError | None = None
        self._work = asyncio.Event()

    def submit(self, requests: Sequence[GenerationRequest]) -> Stream:
        """Queue requests. Raises EngineError if there are too many, or one is too long."""
        if self._failure:
            raise self._failure
        for tokens, sampling in requests:
            if (total := len(tokens) + sampling.max_new_tokens) > self.longest:
                raise EngineError(
                    f"a prompt of {len(tokens)} tokens and an answer of up to "
                    f"{sampling.max_new_tokens} are {total} tokens, and the longest sequence has "
                    f"{self.longest}",
                    "context-length",
                )
        if len(self._streams) + len(requests) > self.most:
            raise EngineError(
                f"{len(self._streams)} requests are under way or wait, of at most {self.most}; "
                "try again later",
                "too-many-requests",
            )
        ids = [next(self._ids) for _ in requests]
        stream = Stream(self, ids)
        empty = np.empty(0, np.int32)
        prompts = {tuple(r.tokens): i for r, i in zip(requests, ids, strict=True)}
        for id_, (tokens, sampling) in zip(ids, requests, strict=True):
            prompt = Prompt(prompts[tuple(tokens)], tuple(tokens), "")
            self._new[id_] = Response(id_, prompt.id, prompt, empty, sampling=sampling)
            self._streams[id_] = stream
        self._work.set()
        return stream

    def load(self, weights: WeightsRef) -> None:
        """Load these weights once no answer is in progress, unless newer ones replace them."""
        self._weights = weights
        self._work.set()

    async def run(self) -> None:
        """Decode until cancelled. An error ends all answers, and is raised."""
        try:
            while True:
                await self._turn()
        except BaseException as error:
            why = str(error) if isinstance(error, StrettoError) else type(error).__name__
            if isinstance(error, asyncio.CancelledError):
                why = "the server is ending"
            self._failure = EngineError(f"the engine has stopped: {why}", "engine-stopped")
            for stream in set(self._streams.values()):
                stream.queue.put_nowait(self._failure)
            raise

    def forget(self, id_: int) -> None:
        """Drop a request that has not ended."""
        del self._streams[id_]
        if self._new.pop(id_, None) is None:
            self._gone.append(id_)
            self._work.set()

    async def _turn(self) -> None:
        if self._gone:
            released_ids, self._gone = self._gone, []
            self._admitted -= set(released_ids)
            await self._call(partial(self._engine.release, released_ids))
        if self._weights and not self._admitted:
            weights, self._weights = self._weights, None
            await self._call(partial(self._engine.load, weights))
            self.version = weights.version
        if self._new and not self._weights:
            responses, self._new = self._new, {}
            self._admitted |= set(responses)
            await self._call(partial(self._engine.admit, list(responses.values())))
        if not self._admitted:
            if not (self._gone or self._new or self._weights):
                self._work.clear()
                await self._work.wait()
            return
        for chunk in (await self._call(partial(self._engine.decode, 1))).chunks:
            stream = self._streams.get(chunk.rollout_id)
            if chunk.finish:
                self._admitted.discard(chunk.rollout_id)
                self._streams.pop(chunk.rollout_id, None)
            if stream:
                stream.queue.put_nowait(chunk)


class Stream:
    """The growing answers to some requests. Whoever submits them must close it."""

    def __init__(self, engine: AsyncEngine, ids: Sequence[int]) -> None:
        self.queue: asyncio.Queue[Chunk | EngineError] = asyncio.Queue()
        self._engine, self._ids = engine, ids
        self._numbers = {id_: number for number, id_ in enumerate(ids)}

    async def chunks(self) -> AsyncIterator[tuple[int, Chunk]]:
        """Yield (request number, chunk) until all answers have ended. May raise EngineError."""
        while self._numbers:
            event = await self.queue.get()
            if isinstance(event, EngineError):
                raise event
            number = self._numbers.get(event.rollout_id)
            if number is None:  # aborted meanwhile
                continue
            if event.finish:
                del self._numbers[event.rollout_id]
            yield number, event

    def abort(self, number: int) -> None:
        """End an answer. No more chunks of it follow. An ended answer is left alone."""
        id_ = self._ids[number]
        if self._numbers.pop(id_, None) is not None:
            with suppress(KeyError):  # it has just ended
                self._engine.forget(id_)

    def close(self) -> None:
        """End all answers."""
        for number in list(self._numbers.values()):
            self.abort(number)
