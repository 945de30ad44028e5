"""An OpenAI-compatible application over an engine, with vLLM's endpoint for token ids."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from hmac import compare_digest
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from stretto.config import TaskConfig
from stretto.errors import EngineError, StrettoError, TaskError
from stretto.serving.requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    parsed,
)
from stretto.serving.streams import EngineClient, Request, Stream
from stretto.serving.texts import GrowingText
from stretto.tasks.base import TaskRow
from stretto.tasks.encode import Encoder, utf8
from stretto.tasks.prompts import render
from stretto.types import FinishReason, Message, TopLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_COMPLETION_TOKENS = 16
"""Token limit of ``/v1/completions`` where the request has none; OpenAI's."""

MOST_BYTES = 1 << 23
"""Bytes of a request's body, at most."""

_STATUS = {
    "context-length": (400, "context_length_exceeded"),
    "too-many-requests": (429, "rate_limit_exceeded"),
    "engine-stopped": (503, None),
}
"""Status and OpenAI's code of an engine's refusals; what is missing is a server's error."""

T = TypeVar("T")


@dataclass
class Piece:
    """What has come of one answer since the last piece, or all of it."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stopped_by: str | None = None
    start: int = 0  # tokens of the answer before
    offset: int = 0  # characters of the answer before

    def add(self, piece: Piece) -> None:
        """Take in the next piece of the same answer."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.top_logprobs += piece.top_logprobs
        self.versions += piece.versions
        self.finish, self.stopped_by = piece.finish, piece.stopped_by


@dataclass(kw_only=True)
class _Call:
    """A request that is being answered.

    Attributes:
        prompts: token ids; each has as many answers as the next.
        choice: makes the JSON of an answer, or in a stream of a piece of it.
        about: fields of every JSON object that is sent.
    """

    asked: ChatRequest | CompletionRequest | GenerateRequest
    prompts: Sequence[tuple[int, ...]]
    stream: Stream
    texts: Sequence[GrowingText]
    choice: Callable[[Piece, bool], dict[str, Any]]
    about: Mapping[str, Any]

    @property
    def per_prompt(self) -> int:
        """Answers to each prompt."""
        return len(self.texts) // len(self.prompts)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces of the answers as they come."""
        offsets = [0] * len(self.texts)
        async for number, chunk in self.stream.chunks():
            text, finish = self.texts[number], chunk.finish
            taken = text.add(chunk.tokens.tolist())
            if text.stopped_by is not None:
                self.stream.abort(number)
                finish = FinishReason.STOP
            new, offset = text.take(last=finish is not None), offsets[number]
            offsets[number] += len(new)
            yield Piece(
                number,
                new,
                chunk.tokens[:taken].tolist(),
                chunk.logprobs[:taken].tolist(),
                list(chunk.top_logprobs[:taken]),
                [chunk.version] * taken,
                finish,
                text.stopped_by,
                chunk.start,
                offset,
            )


class _EventStream(StreamingResponse):
    """Events of a stream, which is closed with the response, even before its first event."""

    def __init__(self, events: AsyncIterator[str], stream: Stream) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._stream):
            await super().__call__(scope, receive, send)


class Server:
    """The application: one model, whose newest weights answer.

    Attributes:
        app: for any ASGI server.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        *,
        api_key: str = "",
        label: Callable[[int], str | None] = lambda _: None,
        hosts: Sequence[str] = ("*",),
    ) -> None:
        """Make one.

        Args:
            name: of the model in requests and answers.
            api_key: that requests must bring, if any.
            label: names a version of the weights, for ``system_fingerprint``.
            hosts: names that requests may call this host by; '*' is any.
        """
        self._engine, self._tokenizer, self._name = engine, tokenizer, name
        self._key, self._label = api_key, label
        self._encoder, self._since = Encoder(tokenizer), int(time.time())
        routes: dict[str, tuple[str, Callable[[HttpRequest], Any]]] = {
            "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._complete),
            "/inference/v1/generate": ("POST", self._generate),
        }
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                *(Route(p, self._guarded(f), methods=[m]) for p, (m, f) in routes.items()),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
            exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _refused),
        )

    def _guarded(self, answer: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
        async def guarded(http: HttpRequest) -> Response:
            given = http.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
            if self._key and not compare_digest(given, self._key.encode()):
                raise ApiError("this server needs its API key", 401, "invalid_api_key")
            try:
                response: Response = await answer(http)
            except TaskError as error:  # a prompt that cannot be read
                raise ApiError(str(error), 400, "invalid_prompt") from error
            except EngineError as error:
                raise _of_engine(error) from error
            return response

        return guarded

    async def _health(self, _: HttpRequest) -> Response:
        return Response()

    async def _models(self, _: HttpRequest) -> Response:
        about = {"object": "model", "created": self._since, "owned_by": "stretto"}
        model = {"id": self._name, **about, "max_model_len": self._engine.longest}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, http: HttpRequest) -> Response:
        asked = parsed(ChatRequest, await _json(http))
        if not self._tokenizer.chat_template:
            raise ApiError("the model has no chat template; it takes /v1/completions")
        turns = tuple(Message(role=m.role, content=m.content) for m in asked.messages)
        prompt = render(TaskRow(turns), TaskConfig(), self._tokenizer, encoder=self._encoder).tokens
        most = asked.max_completion_tokens or asked.max_tokens

        def choice(piece: Piece, whole: bool) -> dict[str, Any]:
            found = {"index": piece.index, "finish_reason": piece.finish}
            if asked.likeliest is None:
                logprobs = None
            else:
                logprobs = {"content": self._chat_logprobs(piece), "refusal": None}
            said: dict[str, Any] = {"content": piece.text} if piece.text or whole else {}
            key = "message" if whole else "delta"
            if whole:
                said = {"role": "assistant", **said, "refusal": None}
            return {**found, key: said, "logprobs": logprobs, **_ids(asked, piece)}

        kind = "chat.completion" + (".chunk" if asked.stream else "")
        return await self._answer(http, asked, [prompt], most, choice, "chatcmpl-", kind)

    async def _complete(self, http: HttpRequest) -> Response:
        asked = parsed(CompletionRequest, await _json(http))
        plain = TaskConfig(chat="off")
        prompts = [
            self._checked(p)
            if not isinstance(p, str)
            else render(TaskRow(p), plain, self._tokenizer, encoder=self._encoder).tokens
            for p in asked.prompt
        ]
        most = asked.max_tokens or DEFAULT_COMPLETION_TOKENS

        def choice(piece: Piece, _: bool) -> dict[str, Any]:
            logprobs = None if asked.likeliest is None else self._text_logprobs(piece)
            found = {"index": piece.index, "text": piece.text, "logprobs": logprobs}
            ids = _ids(asked, piece)
            if ids and not piece.start:
                prompt = prompts[piece.index // asked.choices]
                ids["prompt_token_ids"] = list(prompt)
            return {**found, "finish_reason": piece.finish, **ids}

        return await self._answer(http, asked, prompts, most, choice, "cmpl-", "text_completion")

    async def _generate(self, http: HttpRequest) -> Response:
        asked = parsed(GenerateRequest, await _json(http))
        params = asked.sampling_params
        prompt = self._checked(asked.token_ids)

        def choice(piece: Piece, _: bool) -> dict[str, Any]:
            logprobs = None if params.likeliest is None else {"content": _token_logprobs(piece)}
            spans, start = [], 0
            for version, run in groupby(piece.versions):
                end = start + len(list(run))
                spans.append({"version": str(version), "start": start, "end": end})
                start = end
            found = {"index": piece.index, "token_ids": piece.tokens, "logprobs": logprobs}
            ended = {"finish_reason": piece.finish, "stop_reason": piece.stopped_by}
            return {**found, **ended, "weight_versions": spans}

        return await self._answer(http, asked, [prompt], params.max_tokens, choice, "", "")

    async def _answer(
        self,
        http: HttpRequest,
        asked: ChatRequest | CompletionRequest | GenerateRequest,
        prompts: Sequence[tuple[int, ...]],
        most: int | None,
        choice: Callable[[Piece, bool], dict[str, Any]],
        prefix: str,
        kind: str,
    ) -> Response:
        """Submit a request; return the answer, or begin to stream it.

        Without ``most`` tokens an answer may take what the prompt leaves of the context.
        """
        if asked.model not in (None, "", self._name):
            message = f"the model '{asked.model}' does not exist; there is '{self._name}'"
            raise ApiError(message, 404, "model_not_found", "model")
        options = asked.options
        if "" in (stop := options.stop_strings):
            raise ApiError("an empty stop string ends every answer", param="stop")
        requests = [
            Request(p, options.sampling(i, most or max(self._engine.longest - len(p), 1)))
            for i, p in enumerate(p for p in prompts for _ in range(options.choices))
        ]
        name = asked.request_id or f"{prefix}{uuid.uuid4().hex}"
        about: dict[str, Any] = {"created": int(time.time()), "model": self._name}
        if kind:
            fingerprint = self._label(self._engine.version)
            about |= {"id": name, "object": kind, "system_fingerprint": fingerprint}
        else:
            about |= {"request_id": name, "output_mode": "tokens"}
        texts = [GrowingText(self._tokenizer, stop) for _ in requests]
        stream = self._engine.submit(requests)
        call = _Call(
            asked=asked, prompts=prompts, stream=stream, texts=texts, choice=choice, about=about
        )
        if asked.stream:
            return _EventStream(self._events(call), stream)
        with closing(stream):
            return await _unless_gone(http, self._whole(call))

    async def _whole(self, call: _Call) -> Response:
        answers = [Piece(i) for i in range(len(call.texts))]
        async for piece in call.pieces():
            answers[piece.index].add(piece)
        found = {
            **call.about,
            "choices": [call.choice(answer, True) for answer in answers],
            "usage": _usage(call, [len(answer.tokens) for answer in answers]),
            **self._versioned(call, answers),
        }
        return JSONResponse({**found, **_prompt_ids(call)})

    async def _events(self, call: _Call) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        asked, counts = call.asked, [0] * len(call.texts)
        tokens = isinstance(asked, GenerateRequest) or bool(asked.return_token_ids)
        details = tokens or asked.options.likeliest is not None
        first = _prompt_ids(call)
        if isinstance(asked, ChatRequest):
            opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
            for index in range(len(call.texts)):
                choice = {"index": index, **opening, "finish_reason": None}
                yield _event({**call.about, "choices": [choice], **first})
            first = {}
        try:
            async for piece in call.pieces():
                counts[piece.index] += len(piece.tokens)
                if piece.text or piece.finish or (details and piece.tokens):
                    choices = [call.choice(piece, False)]
                    versioned = self._versioned(call, [piece])
                    yield _event({**call.about, "choices": choices, **versioned, **first})
                    first = {}
        except EngineError as error:
            yield _event(_of_engine(error).body)
        else:
            if asked.with_usage:
                yield _event({**call.about, "choices": [], "usage": _usage(call, counts)})
        yield "data: [DONE]\n\n"

    def _versioned(self, call: _Call, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the name of the weights that have answered."""
        versions = {version for piece in pieces for version in piece.versions}
        if "system_fingerprint" not in call.about or not versions:
            return {}
        return {"system_fingerprint": self._label(max(versions))}

    def _checked(self, tokens: Sequence[int]) -> tuple[int, ...]:
        known = len(self._tokenizer)
        if wrong := [t for t in tokens if not 0 <= t < known]:
            message = f"token ids are from 0 to {known - 1}; got {wrong[0]}"
            raise ApiError(message, code="invalid_prompt")
        return tuple(tokens)

    def _token(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _chat_logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._token(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return [
            {**entry(token, logprob), "top_logprobs": [entry(*pair) for pair in top]}
            for token, logprob, top in _places(piece)
        ]

    def _text_logprobs(self, piece: Piece) -> dict[str, Any]:
        texts = [self._token(token) for token in piece.tokens]
        offsets, at = [], piece.offset
        for text in texts:
            offsets.append(at)
            at += len(text)
        return {
            "tokens": texts,
            "token_logprobs": piece.logprobs,
            "top_logprobs": [
                {self._token(token): logprob for token, logprob in (*top, (sampled, own))}
                for sampled, own, top in _places(piece)
            ],
            "text_offset": offsets,
        }


def _places(piece: Piece) -> list[tuple[int, float, TopLogprobs]]:
    tops = piece.top_logprobs or [()] * len(piece.tokens)
    return list(zip(piece.tokens, piece.logprobs, tops, strict=True))


def _token_logprobs(piece: Piece) -> list[dict[str, Any]]:
    """Return vLLM's form: the sampled token first among the likeliest."""
    found = []
    for token, logprob, top in _places(piece):
        own = {"token_id": token, "logprob": logprob}
        others = [{"token_id": t, "logprob": x} for t, x in top if t != token]
        found.append({**own, "top_logprobs": [own, *others] if top else []})
    return found


def _ids(asked: ChatRequest | CompletionRequest, piece: Piece) -> dict[str, Any]:
    return {"token_ids": piece.tokens} if asked.return_token_ids else {}


def _prompt_ids(call: _Call) -> dict[str, Any]:
    """Return the token ids of the one prompt, if they are asked for; completions, which may have
    several, give them with their answers."""
    if isinstance(call.asked, CompletionRequest) or not call.asked.return_token_ids:
        return {}
    return {"prompt_token_ids": list(call.prompts[0])}


def _usage(call: _Call, counts: Sequence[int]) -> dict[str, int]:
    read, written = sum(map(len, call.prompts)), sum(counts)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def _json(http: HttpRequest) -> Any:
    # Of browsers, a page of another site may send other types without having asked the server.
    if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError("requests have the header Content-Type: application/json", 415)
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise ApiError(f"the body has more than {MOST_BYTES} bytes", 413)
    try:
        found = json.loads(body)
        utf8(json.dumps(found, ensure_ascii=False))  # JSON spells what is no Unicode, too
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is no JSON: {error}") from error
    return found


async def _unless_gone(http: HttpRequest, work: Any) -> Response:
    """Do the work of an answer, unless the client goes before."""

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


def _of_engine(error: StrettoError) -> ApiError:
    status, code = _STATUS.get(error.code, (500, None))
    return ApiError(str(error), status, code)


async def _refused(_: HttpRequest, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.detail, error.status_code)
    if not isinstance(error, ApiError):
        error = ApiError("the server has a fault, which its log shows", 500)
    return JSONResponse(error.body, error.status)
