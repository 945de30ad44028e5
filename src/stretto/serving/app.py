"""An OpenAI-compatible application over an engine, with vLLM's endpoint for token ids."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from hmac import compare_digest
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from stretto.config import TaskConfig
from stretto.config.sections import ARGUMENTS
from stretto.environments.sessions import Asked, Bridges, Session, Sessions
from stretto.errors import ConfigError, EngineError, TaskError
from stretto.scoring.response_buffer import before_stop
from stretto.serving.answers import Logprobs, Piece, received, sent, token_logprobs
from stretto.serving.connections import of_engine, read_body, refused, unless_gone
from stretto.serving.requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    R,
    RequestLimits,
    parsed,
    read_json,
)
from stretto.serving.streams import AsyncEngine, GenerationRequest, Stream
from stretto.serving.texts import GrowingText
from stretto.tasks.encode import Encoder
from stretto.tasks.prompts import render
from stretto.tasks.task import TaskRow
from stretto.types import FinishReason, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default token limit of ``/v1/completions``."""

MOST_BYTES = 1 << 23
"""Most bytes of a request's body."""

INLINE = 1 << 14
"""Most bytes of a body to parse, and log-probs of an answer to serialise, in the event loop. Larger
ones use a thread, so that other requests and a run's schedule continue meanwhile."""

SESSION = "x-session-id"
"""Header of a request's session, if its path has none."""

P = TypeVar("P")


@dataclass
class _Form:
    """The form of answers: OpenAI's ``kind`` with a ``prefix`` of names, or vLLM's.

    Attributes:
        choice: makes the JSON of an answer, or of a piece of it in a stream.
        said: called with each complete answer.
        whole: whether an answer is sent only at its end, as for tool calls.
    """

    choice: Callable[[Piece, bool], dict[str, Any]]
    prefix: str = ""
    kind: str = ""
    said: Callable[[Piece], None] | None = None
    whole: bool = False


@dataclass(kw_only=True)
class _Call:
    """A request in progress.

    Attributes:
        prompts: token ids. Each prompt has the same number of answers.
        about: fields of every JSON object that is sent.
        stop_ids: tokens that end an answer, in addition to the engine's.
    """

    asked: ChatRequest | CompletionRequest | GenerateRequest
    prompts: Sequence[Sequence[int]]
    stream: Stream | Asked
    texts: Sequence[GrowingText]
    form: _Form
    about: Mapping[str, Any]
    stop_ids: Collection[int]

    async def pieces(self) -> AsyncIterator[Piece]:
        offsets = [0] * len(self.texts)
        async for number, chunk in self.stream.chunks():
            text, finish = self.texts[number], chunk.finish
            tokens = chunk.tokens.tolist()
            end = next((i for i, t in enumerate(tokens, 1) if t in self.stop_ids), None)
            count = text.add(tokens[:end])
            if text.stopped_by is not None or count == end:
                self.stream.abort(number)
                finish = FinishReason.STOP
            new_text, offset = text.take(last=finish is not None), offsets[number]
            offsets[number] += len(new_text)
            yield Piece(
                number,
                new_text,
                chunk.tokens[:count].tolist(),
                chunk.logprobs[:count].tolist(),
                list(chunk.top_logprobs[:count]),
                [chunk.version] * count,
                finish,
                text.stopped_by,
                chunk.start,
                offset,
            )


class _EventStream(StreamingResponse):
    """Events of a stream. It is closed with the response, even before its first event."""

    def __init__(self, events: AsyncIterator[str], stream: Stream | Asked) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._stream):
            await super().__call__(scope, receive, send)


class ModelServer:
    """The application for one model, whose newest weights answer.

    With sessions, it serves the programs of a run's episodes: every request belongs to a session,
    by its path or header, and the run's schedule samples its turn.

    Attributes:
        app: for any ASGI server.
    """

    def __init__(
        self,
        engine: AsyncEngine | Sessions,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        *,
        api_key: str = "",
        label: Callable[[int], str | None] = lambda _: None,
        hosts: Sequence[str] = ("*",),
        end_tokens: frozenset[int] = frozenset(),
        template_arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Build the application.

        Args:
            name: of the model in requests and answers.
            api_key: required in requests, if any.
            label: names a version of the weights, for ``system_fingerprint``.
            hosts: allowed host names in requests. '*' allows any.
            end_tokens: that end a turn, for chats with tools.
            template_arguments: of the chat template. Those of a request override them.
        """
        self._logprobs = Logprobs(tokenizer)
        self._engine = engine
        self._tokenizer = tokenizer
        self._name = name
        self._key, self._label = api_key, label
        self._encoder, self._since = Encoder(tokenizer, template_arguments), int(time.time())
        self._widest = max(map(len, tokenizer.get_vocab()))  # most characters of a token
        sessions = engine if isinstance(engine, Sessions) else None
        self._bridges = sessions.bridges if sessions else Bridges(self._encoder, end_tokens)
        routes: dict[str, tuple[str, Callable[[HttpRequest], Any]]] = {
            "/v1/models": ("GET", self._models),
            "/v1/models/{name:path}": ("GET", self._models),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._complete),
            "/inference/v1/generate": ("POST", self._generate),
        }
        guarded = [Route(p, self._guarded(f), methods=[m]) for p, (m, f) in routes.items()]
        in_paths = [Mount("/e/{session}", routes=guarded)] if sessions else []
        self.app = Starlette(
            routes=[Route("/health", self._health), *guarded, *in_paths],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
            exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), refused),
        )

    def _guarded(self, answer: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
        async def guarded(http: HttpRequest) -> Response:
            token = http.headers.get("authorization", "")
            token = token[7:] if token[:7].lower() == "bearer " else token
            if self._key and not compare_digest(token.encode("latin-1"), self._key.encode()):
                raise ApiError("this server needs its API key", 401, "invalid_api_key")
            try:
                response: Response = await answer(http)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except TaskError as error:  # an invalid prompt
                raise ApiError(str(error), 400, "invalid_prompt") from error
            except EngineError as error:
                raise of_engine(error) from error
            return response

        return guarded

    async def _health(self, _: HttpRequest) -> Response:
        return Response()

    def _client(self, http: HttpRequest) -> AsyncEngine | Session:
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
        if "name" in http.path_params:
            self._check_model(self._client(http), http.path_params["name"])
            return JSONResponse(model)
        return JSONResponse({"object": "list", "data": [model]})

    def _check_model(self, client: AsyncEngine | Session, name: str | None) -> None:
        if not isinstance(client, Session) and name not in (None, "", self._name):
            message = f"the model '{name}' does not exist; there is '{self._name}'"
            raise ApiError(message, 404, "model_not_found", "model")

    async def _read(
        self, http: HttpRequest, kind: type[R], prompts: Callable[[R], P]
    ) -> tuple[R, P]:
        """Parse a request and make its prompts, on a thread if that may take long."""
        client, raw = self._client(http), await read_body(http, MOST_BYTES)
        note, longest = client.note if isinstance(client, Session) else None, client.longest
        limits = RequestLimits(client.most, longest, longest * self._widest, note)

        def work() -> tuple[R, P]:
            request = parsed(kind, read_json(raw, limits), limits)
            return request, prompts(request)

        is_slow = kind is ChatRequest or len(raw) > INLINE  # the first chat probes the template
        return await asyncio.to_thread(work) if is_slow else work()

    async def _chat(self, http: HttpRequest) -> Response:
        if not self._tokenizer.chat_template:
            raise ApiError("the model has no chat template; it takes /v1/completions")
        client = self._client(http)
        prompts = partial(self._chat_prompt, client)
        request, (turns, prompt, arguments) = await self._read(http, ChatRequest, prompts)
        tools, stop = request.offered, request.stop or ()
        max_tokens = request.max_completion_tokens or request.max_tokens

        def message(piece: Piece) -> Message:
            if not tools:
                return Message(role="assistant", content=piece.text)
            is_stopped = piece.finish is FinishReason.STOP
            bridge = self._bridges.of(tools, arguments)
            turn = bridge.parse(piece.tokens, ended=is_stopped, tools=tools).message
            turn["content"] = before_stop(turn["content"], stop if is_stopped else ())
            return turn

        def choice(piece: Piece, is_complete: bool) -> dict[str, Any]:
            if request.likeliest is None:
                logprobs = None
            else:
                logprobs = {"content": self._logprobs.chat_logprobs(piece), "refusal": None}
            said: dict[str, Any] = {}
            if piece.text or is_complete or tools:
                said = sent(message(piece), streamed=not is_complete)
            finish = "tool_calls" if said.get("tool_calls") else piece.finish
            key = "message" if is_complete else "delta"
            if is_complete:
                said = {"role": "assistant", **said, "refusal": None}
            fields = {"index": piece.index, "finish_reason": finish}
            return {**fields, key: said, "logprobs": logprobs, **_ids(request, piece)}

        def said(piece: Piece) -> None:
            if isinstance(client, Session):
                turn = received({"role": "assistant", **sent(message(piece))})
                client.said(turns, tools, turn, prompt, piece.tokens)

        kind = "chat.completion" + (".chunk" if request.stream else "")
        form = _Form(choice, "chatcmpl-", kind, said, whole=bool(tools))
        return await self._answer(http, request, [prompt], max_tokens, form)

    def _chat_prompt(
        self, client: AsyncEngine | Session, request: ChatRequest
    ) -> tuple[Sequence[Message], Sequence[int], Mapping[str, Any]]:
        """Return a conversation, its tokens, and its template arguments."""
        turns = [received(m.model_dump(exclude_none=True)) for m in request.messages]
        tools, arguments = request.offered, request.chat_template_kwargs or {}
        try:
            if isinstance(client, Session):
                merged_arguments = client.arguments_of(arguments)
                return turns, client.prompt(turns, tools), merged_arguments
            if tools:
                return turns, self._bridges.of(tools, arguments).prompt(turns, tools)[0], arguments
        except ConfigError as error:  # not possible with this template
            raise ApiError(str(error), 400, "unsupported_parameter", "tools") from error
        row = TaskRow(tuple(turns), {ARGUMENTS: arguments})
        return (
            turns,
            render(row, TaskConfig(), self._tokenizer, encoder=self._encoder).tokens,
            arguments,
        )

    async def _complete(self, http: HttpRequest) -> Response:
        plain = TaskConfig(chat="off")

        def tokens(p: str | list[int]) -> Sequence[int]:
            if not isinstance(p, str):
                return self._checked(p)
            return render(TaskRow(p), plain, self._tokenizer, encoder=self._encoder).tokens

        request, prompts = await self._read(
            http, CompletionRequest, lambda request: [tokens(p) for p in request.prompt]
        )
        in_session = isinstance(self._client(http), Session)  # the run sets the limit
        max_tokens = request.max_tokens or (None if in_session else DEFAULT_COMPLETION_TOKENS)

        def choice(piece: Piece, _: bool) -> dict[str, Any]:
            likely = request.likeliest is not None
            logprobs = self._logprobs.text_logprobs(piece) if likely else None
            fields = {"index": piece.index, "text": piece.text, "logprobs": logprobs}
            ids = _ids(request, piece)
            if ids and not piece.start:
                prompt = prompts[piece.index // request.choices]
                ids["prompt_token_ids"] = list(prompt)
            return {**fields, "finish_reason": piece.finish, **ids}

        form = _Form(choice, "cmpl-", "text_completion")
        return await self._answer(http, request, prompts, max_tokens, form)

    async def _generate(self, http: HttpRequest) -> Response:
        request, prompt = await self._read(
            http, GenerateRequest, lambda request: self._checked(request.token_ids)
        )
        params = request.sampling_params

        def choice(piece: Piece, _: bool) -> dict[str, Any]:
            logprobs = None if params.likeliest is None else {"content": token_logprobs(piece)}
            spans, start = [], 0
            for version, run in groupby(piece.versions):
                end = start + len(list(run))
                spans.append({"version": str(version), "start": start, "end": end})
                start = end
            fields = {"index": piece.index, "token_ids": piece.tokens, "logprobs": logprobs}
            ending = {"finish_reason": piece.finish, "stop_reason": piece.stopped_by}
            return {**fields, **ending, "weight_versions": spans}

        return await self._answer(http, request, [prompt], params.max_tokens, _Form(choice))

    async def _answer(
        self,
        http: HttpRequest,
        request: ChatRequest | CompletionRequest | GenerateRequest,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        form: _Form,
    ) -> Response:
        """Submit a request. Without ``max_tokens``, an answer may fill the rest of the context."""
        client, options = self._client(http), request.options
        in_session = isinstance(client, Session)
        self._check_model(client, request.model)
        requests = []
        for i, prompt in enumerate(p for p in prompts for _ in range(options.choices)):
            room = client.longest if in_session else max(client.longest - len(prompt), 1)
            requests.append(GenerationRequest(prompt, options.sampling(i, max_tokens or room)))
        stop = list(options.stop or ())
        if isinstance(client, Session):
            stop += client.stop
            client.note(["stop_token_ids"] if options.stop_token_ids else [])
        name = request.request_id or f"{form.prefix}{uuid.uuid4().hex}"
        about: dict[str, Any] = {"created": int(time.time()), "model": self._name}
        if form.kind:
            fingerprint = self._label(client.version)
            about |= {"id": name, "object": form.kind, "system_fingerprint": fingerprint}
        else:
            about |= {"request_id": name, "output_mode": "tokens"}
        texts = [GrowingText(self._tokenizer, stop) for _ in requests]
        stream = client.submit(requests)
        if isinstance(client, Session):
            client.answers.append(name)
        call = _Call(
            asked=request,
            prompts=prompts,
            stream=stream,
            texts=texts,
            form=form,
            about=about,
            stop_ids=() if in_session else frozenset(options.stop_token_ids or ()),
        )
        if request.stream:
            return _EventStream(self._events(call), stream)
        with closing(stream):
            return await unless_gone(http, self._whole(call))

    async def _whole(self, call: _Call) -> Response:
        answers = [Piece(i) for i in range(len(call.texts))]
        async for piece in call.pieces():
            answers[piece.index].add(piece)
        if call.form.said:
            for answer in answers:
                call.form.said(answer)

        def body() -> str:
            fields = {
                **call.about,
                "choices": [call.form.choice(answer, True) for answer in answers],
                "usage": _usage(call, [len(answer.tokens) for answer in answers]),
                **self._versioned(call, answers),
                **_prompt_ids(call),
            }
            # In pieces, so that other threads can run in between.
            encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
            return "".join(encoder.iterencode(fields))

        likely = call.asked.options.likeliest
        entries = 0 if likely is None else (likely + 1) * sum(len(a.tokens) for a in answers)
        content = await asyncio.to_thread(body) if entries > INLINE else body()
        return Response(content, media_type="application/json")

    async def _events(self, call: _Call) -> AsyncIterator[str]:
        request, counts = call.asked, [0] * len(call.texts)
        tokens = isinstance(request, GenerateRequest) or bool(request.return_token_ids)
        details = tokens or request.options.likeliest is not None
        first = _prompt_ids(call)
        if isinstance(request, ChatRequest):
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
                if piece.finish and call.form.said:
                    call.form.said(answer)
                if call.form.whole:
                    if not piece.finish:
                        continue
                    piece = answer
                if piece.text or piece.finish or (details and piece.tokens):
                    choices = [call.form.choice(piece, False)]
                    fingerprint = self._versioned(call, [piece])
                    yield _event({**call.about, "choices": choices, **fingerprint, **first})
                    first = {}
        except EngineError as error:
            yield _event(of_engine(error).body)
        else:
            if request.stream_options and request.stream_options.include_usage:
                yield _event({**call.about, "choices": [], "usage": _usage(call, counts)})
        yield "data: [DONE]\n\n"

    def _versioned(self, call: _Call, pieces: Sequence[Piece]) -> dict[str, Any]:
        versions = {version for piece in pieces for version in piece.versions}
        if "system_fingerprint" not in call.about or not versions:
            return {}
        return {"system_fingerprint": self._label(max(versions))}

    def _checked(self, tokens: Sequence[int]) -> tuple[int, ...]:
        vocabulary_size = len(self._tokenizer)
        if invalid_ids := [t for t in tokens if not 0 <= t < vocabulary_size]:
            message = f"token ids are from 0 to {vocabulary_size - 1}; got {invalid_ids[0]}"
            raise ApiError(message, code="invalid_prompt")
        return tuple(tokens)


def _ids(request: ChatRequest | CompletionRequest, piece: Piece) -> dict[str, Any]:
    return {"token_ids": piece.tokens} if request.return_token_ids else {}


def _prompt_ids(call: _Call) -> dict[str, Any]:
    """Return the single prompt's token ids, if requested. Completions return theirs per answer."""
    if isinstance(call.asked, CompletionRequest) or not call.asked.return_token_ids:
        return {}
    return {"prompt_token_ids": list(call.prompts[0])}


def _usage(call: _Call, counts: Sequence[int]) -> dict[str, int]:
    prompt_tokens, completion_tokens = sum(map(len, call.prompts)), sum(counts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
