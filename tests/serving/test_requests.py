"""Bodies that agent frameworks send, bodies that ask for too much, and texts while they grow."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from contextlib import suppress
from typing import Any

import pytest

from stretto.errors import TaskError
from stretto.models.tiny import byte_tokenizer
from stretto.serving import requests
from stretto.serving.answers import received
from stretto.serving.requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    RequestLimits,
    parsed,
    read_json,
)
from stretto.serving.texts import GrowingText

NO_ENGINE: tuple[Any, Any] = (None, None)

USER = {"role": "user", "content": "What is 17 times 23?"}
FUNCTION = {
    "name": "multiply",
    "description": "Multiply.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"name": "multiply", "arguments": '{"a": 17}'}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "391"}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "Answer", "strict": True, "schema": {"type": "object"}},
}

# Written after the requests of the frameworks' clients, with the prompts and schemas shortened.
BODIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "openai.parse, its message appended": (
        {
            "messages": [
                USER,
                {
                    "content": None,
                    "refusal": None,
                    "role": "assistant",
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "index": 0,
                            "function": {**CALL, "parsed_arguments": {"a": 17}},
                        }
                    ],
                    "parsed": None,
                },
                RESULT,
            ],
            "response_format": FORMAT,
            "tools": [TOOL],
        },
        ["response_format"],
    ),
    "Agents SDK": (
        {
            "messages": [{"content": "Be brief.", "role": "developer"}, USER],
            "tools": [{**TOOL, "function": {**FUNCTION, "strict": True}}],
            "tool_choice": "required",
            "response_format": FORMAT,
            "reasoning_effort": "low",
            "verbosity": "low",
            "parallel_tool_calls": False,
            "store": False,
            "metadata": {"a": "b"},
            "stream_options": {"include_usage": True},
            "stream": True,
        },
        ["tool_choice", "response_format", "reasoning_effort", "verbosity"],
    ),
    "LangChain": (
        {
            "messages": [USER, {"role": "assistant", "content": None}, RESULT],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "multiply"}},
            "parallel_tool_calls": False,
            "stop": ["\nObservation"],
        },
        ["tool_choice"],
    ),
    "Pydantic AI": (
        {
            "messages": [{"role": "system", "content": "x"}, USER],
            "tool_choice": "required",
            "tools": [{**TOOL, "function": {**FUNCTION, "strict": True}}],
            "stream": False,
            "max_completion_tokens": 64,
        },
        ["tool_choice"],
    ),
    "smolagents": (
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}],
            "stop": ["Observation:", "Calling tools:"],
            "tools": [TOOL],
            "tool_choice": "required",
        },
        ["tool_choice"],
    ),
    "LiteLLM": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}
                    ],
                },
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "hm",
                    "provider_specific_fields": {"refusal": None},
                    "thinking_blocks": None,
                    "tool_calls": [{"id": "c1", "type": "function", "function": CALL}],
                },
                RESULT,
            ],
            "extra_headers": {},
            "presence_penalty": 1.5,
            "min_p": 0.1,
            "logit_bias": {"50256": -100},
        },
        ["extra_headers", "presence_penalty", "min_p", "logit_bias"],
    ),
    "LlamaIndex": (
        {
            "messages": [USER, {"role": "assistant", "tool_calls": [{"function": CALL}]}, RESULT],
            "tools": [TOOL],
            "tool_choice": "auto",
            "temperature": 0.1,
        },
        [],
    ),
    "instructor": (
        {
            "messages": [USER],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "multiply"}},
        },
        ["tool_choice"],
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_an_episode_takes_what_frameworks_send(name: str) -> None:
    body, ignored = BODIES[name]
    noted: list[str] = []
    asked = parsed(ChatRequest, body, RequestLimits(note=noted.extend))
    assert noted == ignored
    assert [m.role for m in asked.messages] == [m["role"] for m in body["messages"]]
    for message, given in zip(asked.messages, body["messages"], strict=True):
        turn: Any = received(message.model_dump(exclude_none=True))
        keys = {"role", "content", "tool_calls", "tool_call_id", "reasoning_content"}
        assert turn.keys() <= keys
        assert turn.get("reasoning_content") == given.get("reasoning_content")
        for call in turn.get("tool_calls", []):
            assert call["function"] == {"name": "multiply", "arguments": {"a": 17}}
    assert asked.offered == body.get("tools", [])
    assert asked.sampling(0, 5).stop == tuple(body.get("stop", ()))


@pytest.mark.parametrize("name", BODIES)
def test_a_server_names_the_first_field_that_it_cannot_honour(name: str) -> None:
    body, ignored = BODIES[name]
    if not ignored:
        parsed(ChatRequest, body)
        return
    with pytest.raises(ApiError) as refused:
        parsed(ChatRequest, body)
    assert (refused.value.status, refused.value.param) == (400, ignored[0])
    parsed(ChatRequest, {key: value for key, value in body.items() if key not in ignored})


def test_requests_that_can_never_fit_are_refused_before_work() -> None:
    limits = RequestLimits(answers=4, tokens=10, characters=50)
    call = {"function": {"name": "f", "arguments": json.dumps({"a": "b" * 50})}}
    long_call = {"role": "assistant", "content": None, "tool_calls": [call]}
    few: list[tuple[Any, dict[str, Any], str]] = [
        (CompletionRequest, {"prompt": ["a"] * 5}, "too_many_answers"),
        (CompletionRequest, {"prompt": [[1]] * 3, "n": 2}, "too_many_answers"),
        (CompletionRequest, {"prompt": ["a", "b" * 51]}, "context_length_exceeded"),
        (CompletionRequest, {"prompt": [[1] * 11]}, "context_length_exceeded"),
        (ChatRequest, {"messages": [USER] * 3}, "context_length_exceeded"),
        (ChatRequest, {"messages": [{**USER, "role": "r" * 50}]}, "context_length_exceeded"),
        (ChatRequest, {"messages": [USER, long_call]}, "context_length_exceeded"),
        (ChatRequest, {"messages": [USER], "n": 5}, "too_many_answers"),
        (ChatRequest, {"messages": [USER], "tools": [TOOL]}, "context_length_exceeded"),
        (ChatRequest, {"messages": [USER], "stop": list("abcde")}, "invalid_value"),
        (ChatRequest, {"messages": [USER], "stop": "a" * 257}, "invalid_value"),
        (ChatRequest, {"messages": [USER], "stop": ["a", ""]}, "invalid_value"),
        (
            GenerateRequest,
            {"token_ids": [1], "sampling_params": {"n": 5}},
            "too_many_answers",
        ),
        (
            GenerateRequest,
            {"token_ids": [1] * 11, "sampling_params": {}},
            "context_length_exceeded",
        ),
    ]
    for kind, body, code in few:
        with pytest.raises(ApiError) as refused:
            parsed(kind, body, limits)
        assert (refused.value.status, refused.value.code) == (400, code), body
    parsed(CompletionRequest, {"prompt": ["a" * 50] * 2, "n": 2}, limits)
    parsed(ChatRequest, {"messages": [USER], "stop": ["a" * 256] * 4}, limits)


def test_json_that_is_too_much_or_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_VALUES", 3)
    few = RequestLimits(tokens=4)
    assert read_json(b'{"a": [{}]}', few) == {"a": [{}]}
    for raw, status in ((b'{"a": [{}, {}]}', 413), (b"[" * 3, 400), (b'{"a": "\xff"}', 400)):
        with pytest.raises(ApiError) as refused:
            read_json(raw, few)
        assert refused.value.status == status
    assert read_json(b'{"a": [{}, {}]}', RequestLimits(tokens=5)) == {"a": [{}, {}]}
    with pytest.raises(TaskError):
        read_json(b'{"a": "\\udc00"}')


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("aabaabaaa", "aabaaa", ["", "", "", "", "", "aab", "aab", "aab"]),
        ("abcabd", "abd", ["", "", "abc", "abc", "abc"]),
        ("zzzzzy", "zzzx", ["", "", "", "z", "zz", "zzzzzy"]),
    ],
)
def test_a_text_is_held_back_while_it_may_become_a_stop_string(
    text: str, stop: str, shown: list[str]
) -> None:
    growing, come, seen = GrowingText(byte_tokenizer(), [stop]), "", []
    for byte in text.encode():
        growing.add([byte])
        if growing.stopped_by:
            break
        come += growing.take()
        seen.append(come)
    assert seen == shown


def test_long_stop_strings_take_no_time() -> None:
    """A length that took 400 times as long for each token would not end here."""
    stop = "z" * 400_000 + "y"
    growing = GrowingText(byte_tokenizer(), [stop])
    for _ in range(30):
        growing.add([ord("z")])
        assert growing.take() == ""
    growing.add([ord("a")])
    assert growing.take() == "z" * 30 + "a"


def test_connections_end_and_clients_leave_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection without the head of a request is closed, also behind an answer; one whose
    request is being answered is not. A body that does not come is refused, and one that is cut off
    leaves nothing in the log.
    """
    uvicorn = pytest.importorskip("uvicorn")
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    from stretto.serving import connections
    from stretto.serving.app import ModelServer
    from stretto.serving.streams import AsyncEngine

    monkeypatch.setattr(connections, "IDLE_S", 0.3)
    monkeypatch.setattr(connections, "BODY_S", 0.5)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"

    async def slow(_: Any) -> Response:
        await asyncio.sleep(1.0)
        return Response("late")

    async def work() -> None:
        server = ModelServer(AsyncEngine(*NO_ENGINE, 100, 4), byte_tokenizer(), "own").app
        app = Starlette(routes=[Route("/slow", slow), *server.routes])
        app.exception_handlers = server.exception_handlers
        config = connections.server_config(app)
        config.load()
        protocol: Any = config.http_protocol_class
        state = uvicorn.server.ServerState()
        loop = asyncio.get_running_loop()
        made = await loop.create_server(
            lambda: protocol(config=config, server_state=state, app_state={}),
            "127.0.0.1",
        )
        port = made.sockets[0].getsockname()[1]

        async def sent(*parts: bytes, whole: bool = True) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            got = b""
            for part in parts:
                writer.write(part)
                with suppress(TimeoutError):
                    got += await asyncio.wait_for(reader.read(1 << 16), 20 if whole else 0.1)
            if whole:
                got += await asyncio.wait_for(reader.read(), 20)
            writer.close()
            return got

        get = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
        answers = await asyncio.gather(
            sent(b""),
            sent(head + b"X: "),
            sent(get, b"GET /hea"),
            sent(get.replace(b"health", b"slow")),
            sent(head + b"Content-Length: 9\r\n\r\n{"),
            sent(head + b"Content-Length: 9\r\n\r\n{", whole=False),
        )
        assert answers[:2] == [b"", b""]
        assert answers[2].startswith(b"HTTP/1.1 200")
        assert answers[2].count(b"HTTP/1.1") == 1
        assert answers[3].endswith(b"late")
        assert answers[4].startswith(b"HTTP/1.1 408")
        made.close()
        while state.connections:
            await asyncio.sleep(0.01)

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(work(), 60))
    assert not [r for r in caplog.records if r.exc_info]


def test_a_long_prompt_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    httpx = pytest.importorskip("httpx2")
    pytest.importorskip("starlette")
    from stretto.serving import app
    from stretto.serving.streams import AsyncEngine

    threads = []
    real = app.render

    def render(row: Any, *args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return real(row, *args, **options)

    monkeypatch.setattr(app, "render", render)

    async def work() -> None:
        engine: Any = AsyncEngine(*NO_ENGINE, 1000, 4)
        transport = httpx.ASGITransport(app.ModelServer(engine, byte_tokenizer(), "own").app)
        async with httpx.AsyncClient(transport=transport, base_url="http://own") as client:
            for prompt in ("a" * 1001, ["a" * 4500] * 4):
                body = {"prompt": prompt}
                answer = await client.post("/v1/completions", json=body)
                assert answer.json()["error"]["code"] == "context_length_exceeded"

    asyncio.run(asyncio.wait_for(work(), 60))
    assert threads == [True, False, False, False, False]
