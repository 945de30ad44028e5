"""An OpenAI-compatible application over an engine, with vLLM's endpoint for token ids."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hmac import compare_digest
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from stretto.config import TaskConfig
from stretto.environments.sessions import Bridges, Session, Sessions
from stretto.errors import ConfigError, EngineError, StrettoError, TaskError
from stretto.plain import parse
from stretto.serving.answers import Logprobs, Piece, received, sent, token_logprobs
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
from stretto.types import FinishReason, Message

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
    "one-answer": (400, "unsupported_parameter"),
    "episode-over": (400, "episode_over"),
    "template-breaks": (400, "conversation_rewritten"),
}
"""Status and OpenAI's code of an engine's refusals; what is missing is a server's error."""

SESSION = "x-session-id"
"""Header of a request's session, where its path has none."""

T = TypeVar("T")


@dataclass
class _Form:
    """The form of answers: see :class:`_Call`.

    Attributes:
        prefix, kind: of answers' names, and OpenAI's name of such objects; empty: vLLM's form.
    """

    choice: Callable[[Piece, bool], dict[str, Any]]
    prefix: str = ""
    kind: str = ""
    said: Callable[[Piece], None] | None = None
    whole: bool = False


@dataclass(kw_only=True)
class _Call:
    """A request that is being answered.

    Attributes:
        prompts: token ids; each has as many answers as the next.
        choice: makes the JSON of an answer, or in a stream of a piece of it.
        about: fields of every JSON object that is sent.
        said: is told of each whole answer.
        whole: whether an answer is sent at its end alone, as its calls are.
        stop_ids: tokens that end an answer, besides those that end every one.
    """

    asked: ChatRequest | CompletionRequest | GenerateRequest
    prompts: Sequence[Sequence[int]]
    stream: Stream
    texts: Sequence[GrowingText]
    choice: Callable[[Piece, bool], dict[str, Any]]
    about: Mapping[str, Any]
    said: Callable[[Piece], None] | None = None
    whole: bool = False
    stop_ids: Collection[int] = ()

    @property
    def per_prompt(self) -> int:
        """Answers to each prompt."""
        return len(self.texts) // len(self.prompts)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces of the answers as they come."""
        offsets = [0] * len(self.texts)
        async for number, chunk in self.stream.chunks():
            text, finish = self.texts[number], chunk.finish
            tokens = chunk.tokens.tolist()
            end = next((i for i, t in enumerate(tokens, 1) if t in self.stop_ids), None)
            taken = text.add(tokens[:end])
            if text.stopped_by is not None or taken == end:
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

    With sessions, it is for the programs of a run's episodes: every request belongs to a session,
    by its path or else its header, and the run's schedule has its turn sampled.

    Attributes:
        app: for any ASGI server.
    """

    def __init__(
        self,
        engine: EngineClient | Sessions,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        *,
        api_key: str = "",
        label: Callable[[int], str | None] = lambda _: None,
        hosts: Sequence[str] = ("*",),
        end_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """Make one.

        Args:
            name: of the model in requests and answers.
            api_key: that requests must bring, if any.
            label: names a version of the weights, for ``system_fingerprint``.
            hosts: names that requests may call this host by; '*' is any.
            end_tokens: that end a turn, for chats with tools.
        """
        self._logprobs = Logprobs(tokenizer)
        self._engine, self._tokenizer, self._name = engine, tokenizer, name
        self._key, self._label = api_key, label
        self._encoder, self._since = Encoder(tokenizer), int(time.time())
        sessions = engine if isinstance(engine, Sessions) else None
        self._bridges = sessions.bridges if sessions else Bridges(self._encoder, end_tokens)
        routes: dict[str, tuple[str, Callable[[HttpRequest], Any]]] = {
            "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._complete),
            "/inference/v1/generate": ("POST", self._generate),
        }
        guarded = [Route(p, self._guarded(f), methods=[m]) for p, (m, f) in routes.items()]
        in_paths = [Mount("/e/{session}", routes=guarded)] if sessions else []
        self.app = Starlette(
            routes=[Route("/health", self._health), *guarded, *in_paths],
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

    def _client(self, http: HttpRequest) -> EngineClient | Session:
        """Return what answers a request: the engine, or the request's session."""
        if not isinstance(self._engine, Sessions):
            return self._engine
        key = http.path_params.get("session") or http.headers.get(SESSION)
        session = self._engine.find(key or "")
        if session is None:
            message = "no episode has this session; use the base_url that the program was given"
            raise ApiError(message, 404, "unknown_session")
        return session

    async def _models(self, http: HttpRequest) -> Response:
        about = {"object": "model", "created": self._since, "owned_by": "stretto"}
        model = {"id": self._name, **about, "max_model_len": self._client(http).longest}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, http: HttpRequest) -> Response:
        asked = parsed(ChatRequest, await _json(http))
        if not self._tokenizer.chat_template:
            raise ApiError("the model has no chat template; it takes /v1/completions")
        client, tools = self._client(http), asked.offered
        turns = [received(m.model_dump(exclude_none=True)) for m in asked.messages]
        prompt = self._chat_prompt(client, turns, tools)
        most = asked.max_completion_tokens or asked.max_tokens

        def message(piece: Piece) -> Message:
            if not tools:
                return Message(role="assistant", content=piece.text)
            ended = piece.finish is FinishReason.STOP
            return self._bridges.of(tools).parse(piece.tokens, ended=ended, tools=tools).message

        def choice(piece: Piece, whole: bool) -> dict[str, Any]:
            if asked.likeliest is None:
                logprobs = None
            else:
                logprobs = {"content": self._logprobs.chat_logprobs(piece), "refusal": None}
            said: dict[str, Any] = {}
            if piece.text or whole or tools:
                said = sent(message(piece), streamed=not whole)
            finish = "tool_calls" if said.get("tool_calls") else piece.finish
            key = "message" if whole else "delta"
            if whole:
                said = {"role": "assistant", **said, "refusal": None}
            found = {"index": piece.index, "finish_reason": finish}
            return {**found, key: said, "logprobs": logprobs, **_ids(asked, piece)}

        def said(piece: Piece) -> None:
            if isinstance(client, Session):
                told = received({"role": "assistant", **sent(message(piece))})
                client.said(turns, tools, told, prompt, piece.tokens)

        kind = "chat.completion" + (".chunk" if asked.stream else "")
        form = _Form(choice, "chatcmpl-", kind, said, whole=bool(tools))
        return await self._answer(http, asked, [prompt], most, form)

    def _chat_prompt(
        self,
        client: EngineClient | Session,
        turns: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> Sequence[int]:
        """Return the tokens of a conversation."""
        try:
            if isinstance(client, Session):
                return client.prompt(turns, tools)
            if tools:
                return self._bridges.of(tools).prompt(turns, tools)[0]
        except ConfigError as error:  # the template cannot do it
            raise ApiError(str(error), 400, "unsupported_parameter", "tools") from error
        row = TaskRow(tuple(turns))
        return render(row, TaskConfig(), self._tokenizer, encoder=self._encoder).tokens

    async def _complete(self, http: HttpRequest) -> Response:
        asked = parsed(CompletionRequest, await _json(http))
        plain = TaskConfig(chat="off")
        prompts = [
            self._checked(p)
            if not isinstance(p, str)
            else render(TaskRow(p), plain, self._tokenizer, encoder=self._encoder).tokens
            for p in asked.prompt
        ]
        in_session = isinstance(self._client(http), Session)  # where the run sets the limit
        most = asked.max_tokens or (None if in_session else DEFAULT_COMPLETION_TOKENS)

        def choice(piece: Piece, _: bool) -> dict[str, Any]:
            likely = asked.likeliest is not None
            logprobs = self._logprobs.text_logprobs(piece) if likely else None
            found = {"index": piece.index, "text": piece.text, "logprobs": logprobs}
            ids = _ids(asked, piece)
            if ids and not piece.start:
                prompt = prompts[piece.index // asked.choices]
                ids["prompt_token_ids"] = list(prompt)
            return {**found, "finish_reason": piece.finish, **ids}

        form = _Form(choice, "cmpl-", "text_completion")
        return await self._answer(http, asked, prompts, most, form)

    async def _generate(self, http: HttpRequest) -> Response:
        asked = parsed(GenerateRequest, await _json(http))
        params = asked.sampling_params
        prompt = self._checked(asked.token_ids)

        def choice(piece: Piece, _: bool) -> dict[str, Any]:
            logprobs = None if params.likeliest is None else {"content": token_logprobs(piece)}
            spans, start = [], 0
            for version, run in groupby(piece.versions):
                end = start + len(list(run))
                spans.append({"version": str(version), "start": start, "end": end})
                start = end
            found = {"index": piece.index, "token_ids": piece.tokens, "logprobs": logprobs}
            ended = {"finish_reason": piece.finish, "stop_reason": piece.stopped_by}
            return {**found, **ended, "weight_versions": spans}

        return await self._answer(http, asked, [prompt], params.max_tokens, _Form(choice))

    async def _answer(
        self,
        http: HttpRequest,
        asked: ChatRequest | CompletionRequest | GenerateRequest,
        prompts: Sequence[Sequence[int]],
        most: int | None,
        form: _Form,
    ) -> Response:
        """Submit a request; return the answer, or begin to stream it.

        Without ``most`` tokens an answer may take what the prompt leaves of the context.
        """
        client, options = self._client(http), asked.options
        in_session = isinstance(client, Session)  # which has one model, whatever its name
        if not in_session and asked.model not in (None, "", self._name):
            message = f"the model '{asked.model}' does not exist; there is '{self._name}'"
            raise ApiError(message, 404, "model_not_found", "model")
        if in_session and options.stop_strings:
            message = "turns of an episode end with the stop strings of the run, rollout.stop"
            raise ApiError(message, 400, "unsupported_parameter", "stop")
        if "" in (stop := options.stop_strings):
            raise ApiError("an empty stop string ends every answer", param="stop")
        if in_session:
            stop = list(client.stop)
        requests = [
            Request(p, options.sampling(i, most or _room(client, p)))
            for i, p in enumerate(p for p in prompts for _ in range(options.choices))
        ]
        name = asked.request_id or f"{form.prefix}{uuid.uuid4().hex}"
        about: dict[str, Any] = {"created": int(time.time()), "model": self._name}
        if form.kind:
            fingerprint = self._label(client.version)
            about |= {"id": name, "object": form.kind, "system_fingerprint": fingerprint}
        else:
            about |= {"request_id": name, "output_mode": "tokens"}
        texts = [GrowingText(self._tokenizer, stop) for _ in requests]
        stream: Stream = client.submit(requests)
        if isinstance(client, Session):
            client.answers.append(name)
        call = _Call(
            asked=asked,
            prompts=prompts,
            stream=stream,
            texts=texts,
            choice=form.choice,
            about=about,
            said=form.said,
            whole=form.whole,
            stop_ids=() if in_session else frozenset(options.stop_token_ids or ()),
        )
        if asked.stream:
            return _EventStream(self._events(call), stream)
        with closing(stream):
            return await _unless_gone(http, self._whole(call))

    async def _whole(self, call: _Call) -> Response:
        answers = [Piece(i) for i in range(len(call.texts))]
        async for piece in call.pieces():
            answers[piece.index].add(piece)
        if call.said:
            for answer in answers:
                call.said(answer)
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
            answers = [Piece(i) for i in range(len(call.texts))]
            async for piece in call.pieces():
                counts[piece.index] += len(piece.tokens)
                answer = answers[piece.index]
                answer.add(piece)
                if piece.finish and call.said:
                    call.said(answer)
                if call.whole:
                    if not piece.finish:
                        continue
                    piece = answer
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


def _room(client: EngineClient | Session, prompt: Sequence[int]) -> int:
    """Return the tokens of an answer whose request sets no limit; in a session the run does."""
    if isinstance(client, Session):
        return client.longest
    return max(client.longest - len(prompt), 1)


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
        found = parse(body)
        utf8(json.dumps(found, ensure_ascii=False))  # JSON spells what is no Unicode, too
    except ValueError as error:
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
