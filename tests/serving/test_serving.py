"""Requests that come and go, the OpenAI application over them, and policies while they train."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stretto
from raising import raises
from stretto.api.policies import Conversation, Policy, open_policy
from stretto.cli.main import main
from stretto.config import RolloutConfig
from stretto.errors import ConfigError, EngineError
from stretto.models.load import load_causal_lm, load_tokenizer
from stretto.models.tiny import byte_tokenizer
from stretto.runs import checkpoint
from stretto.scoring.response_buffer import response_text
from stretto.serving.requests import ApiError, ChatRequest, CompletionRequest, parsed
from stretto.serving.streams import AsyncEngine, GenerationRequest
from stretto.serving.texts import GrowingText
from stretto.types import Chunk, Decoded, FinishReason, Response, Sampling, WeightsRef
from stretto.workers.threads import WorkerThread

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


# -- streams -------------------------------------------------------------------------------------


class Counting:
    """An engine with two slots, whose responses are 0, 1, 2, ... up to their limits."""

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}  # tokens so far, and the limit
        self.calls: list[str] = []
        self.failure: Exception | None = None
        self.version = 0

    def admit(self, responses: Sequence[Response]) -> None:
        self.calls.append(f"admit {[r.id for r in responses]}")
        for r in responses:
            assert r.sampling
            self.held[r.id] = [0, r.sampling.max_new_tokens]

    def decode(self, max_tokens: int, stop_after: int = 0) -> Decoded:
        if self.failure:
            raise self.failure
        chunks = []
        for id_, row in list(self.held.items())[:2]:
            row[0] += 1
            finish = FinishReason.LENGTH if row[0] == row[1] else None
            tokens, logprobs = np.array([row[0] - 1], "i4"), np.zeros(1, "f4")
            chunks.append(Chunk(id_, row[0] - 1, tokens, logprobs, self.version, finish))
            if finish:
                del self.held[id_]
        return Decoded(chunks, 1)

    def release(self, rollout_ids: Sequence[int]) -> None:
        self.calls.append(f"release {list(rollout_ids)}")
        for id_ in rollout_ids:
            self.held.pop(id_, None)

    def load(self, weights: WeightsRef) -> None:
        assert not self.held
        self.calls.append(f"load {weights.version}")
        self.version = weights.version


def driven(
    work: Callable[[AsyncEngine, Counting], Awaitable[None]], most: int = 8, longest: int = 100
) -> Counting:
    counting = Counting()
    as_engine: Any = counting

    async def call(method: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)
        return method()

    async def both() -> None:
        engine = AsyncEngine(as_engine, call, longest, most)
        running = asyncio.create_task(engine.run())
        try:
            await work(engine, counting)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, ValueError):
                await running

    asyncio.run(asyncio.wait_for(both(), 30))
    return counting


async def collected(engine: AsyncEngine, *limits: int) -> list[list[tuple[int, int]]]:
    """Tokens of the answers, with the version that each is of."""
    found: list[list[tuple[int, int]]] = [[] for _ in limits]
    stream = engine.submit([GenerationRequest((1, 2), Sampling(limit)) for limit in limits])
    async for number, chunk in stream.chunks():
        found[number] += [(t, chunk.version) for t in chunk.tokens.tolist()]
    return found


def test_requests_enter_while_others_are_decoded() -> None:
    async def work(engine: AsyncEngine, counting: Counting) -> None:
        long = asyncio.create_task(collected(engine, 40, 3))
        while sum(row[0] for row in counting.held.values()) < 6:
            await asyncio.sleep(0)
        (short,) = await collected(engine, 2)
        assert not long.done()
        assert [t for t, _ in short] == [0, 1]
        assert [[t for t, _ in one] for one in await long] == [list(range(40)), list(range(3))]

    assert driven(work).calls == ["admit [0, 1]", "admit [2]"]


def test_an_answer_that_nobody_reads_any_more_frees_its_slot() -> None:
    async def work(engine: AsyncEngine, counting: Counting) -> None:
        stream = engine.submit(
            [GenerationRequest((1,), Sampling(90)), GenerationRequest((1,), Sampling(4))]
        )
        with closing(stream):
            async for number, chunk in stream.chunks():
                if number == 0 and chunk.start == 1:
                    stream.abort(0)
                elif number == 1 and chunk.finish:
                    break
        leaving = engine.submit([GenerationRequest((1,), Sampling(90))])
        while len(counting.calls) < 3:
            await asyncio.sleep(0)
        leaving.close()  # before anything of it was read
        assert await collected(engine, 2) == [[(0, 0), (1, 0)]]
        assert counting.held == {}

    assert [call for call in driven(work).calls if "release" in call] == [
        "release [0]",
        "release [2]",
    ]


def test_every_answer_is_of_one_version() -> None:
    """Those under way end first; those that come meanwhile wait, and the newest weights count."""

    async def work(engine: AsyncEngine, counting: Counting) -> None:
        before = asyncio.create_task(collected(engine, 5))
        while not counting.held:
            await asyncio.sleep(0)
        engine.load(WeightsRef("actor", 3, ""))
        engine.load(WeightsRef("actor", 4, ""))
        after = asyncio.create_task(collected(engine, 2))
        assert await before == [[(t, 0) for t in range(5)]]
        assert await after == [[(0, 4), (1, 4)]]
        assert engine.version == 4

    assert driven(work).calls == ["admit [0]", "load 4", "admit [1]"]


def test_too_many_and_too_long_requests_are_refused() -> None:
    async def work(engine: AsyncEngine, counting: Counting) -> None:
        with raises(EngineError, "context-length", "101 tokens"):
            engine.submit([GenerationRequest((1,) * 98, Sampling(3))])
        first = asyncio.create_task(collected(engine, 9, 9))
        while not counting.held:
            await asyncio.sleep(0)
        with raises(EngineError, "too-many-requests", "2 requests", "at most 3"):
            engine.submit([GenerationRequest((1,), Sampling(3))] * 2)
        await first
        assert len(await collected(engine, 1, 1, 1)) == 3

    driven(work, most=3)


def test_an_engine_that_fails_ends_all_answers() -> None:
    async def work(engine: AsyncEngine, counting: Counting) -> None:
        counting.failure = ValueError("broken")
        with raises(EngineError, "engine-stopped"):
            await collected(engine, 3)
        with raises(EngineError, "engine-stopped"):
            engine.submit([GenerationRequest((1,), Sampling(3))])

    driven(work)


# -- texts ---------------------------------------------------------------------------------------


@given(
    st.binary(max_size=40) | st.text(max_size=20).map(str.encode),
    st.lists(st.sampled_from(["a", "ab", "ba", "é!", "\n\n"]), max_size=2, unique=True),
)
def test_a_growing_text_is_the_whole_one_in_pieces(data: bytes, stop: list[str]) -> None:
    """Also of bytes that are no text; of tokens up to the first stop string."""
    tokenizer = byte_tokenizer()
    text, pieces, taken = GrowingText(tokenizer, stop), [], 0
    for token in data:
        taken += text.add([token])
        if text.stopped_by is not None:
            break
        pieces.append(text.take())
        assert not any(s in "".join(pieces) for s in stop)
    pieces.append(text.take(last=True))
    finish = FinishReason.STOP if text.stopped_by is not None else FinishReason.LENGTH
    assert "".join(pieces) == response_text(tokenizer, data[:taken], finish, stop)
    if text.stopped_by is None:
        assert not any(s in "".join(pieces) for s in stop)


# -- what requests may ask for -------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "hi"}]


def test_what_would_change_an_answer_is_refused_by_name() -> None:
    for name, value in {
        "functions": [{"name": "f"}],
        "response_format": {"type": "json_object"},
        "presence_penalty": 0.5,
        "logit_bias": {"5": 1},
        "function_call": "auto",
        "tool_choice": "required",
    }.items():
        with pytest.raises(ApiError) as caught:
            parsed(ChatRequest, {"messages": MESSAGES, name: value})
        found = caught.value
        assert (found.status, found.code, found.param) == (400, "unsupported_parameter", name)
    with pytest.raises(ApiError) as caught:
        parsed(ChatRequest, {"messages": MESSAGES, "min_q": 1})
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", "min_q")
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    for body in (
        {"messages": [{"role": "user", "content": image}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        {"messages": [{"role": "user", "content": [{"type": "foo", "text": "x"}]}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
        {"messages": ["hi"]},
        {"messages": MESSAGES, "top_logprobs": 2},
        {"messages": MESSAGES, "tools": [{"type": "function"}]},
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"x": 1}}]},
        {"messages": MESSAGES, "tool_choice": "required"},
        {"messages": []},
        {"messages": MESSAGES, "temperature": -1},
        {"messages": MESSAGES, "temperature": 1e-39},
        {"messages": MESSAGES, "n": 0},
        {"messages": MESSAGES, "max_tokens": 0},
        {},
        [],
    ):
        with pytest.raises(ApiError):
            parsed(ChatRequest, body)
    for prompt in ([], [[]], [1, "a"], None, {"a": 1}):
        with pytest.raises(ApiError):
            parsed(CompletionRequest, {"prompt": prompt})


def test_fields_without_effect_are_taken() -> None:
    neutral = {
        "tools": None,
        "presence_penalty": 0,
        "response_format": {"type": "text"},
        "user": "u",
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turn = {"role": "user", "content": parts}
    own = {"role": "assistant", "content": "b", "refusal": None, "tool_calls": [], "audio": None}
    asked = parsed(
        ChatRequest, {"messages": [turn, own], "top_k": -1, "seed": 7, "user": "u", **neutral}
    )
    assert [m.content for m in asked.messages] == ["ab", "b"]
    assert asked.sampling(2, 5) == Sampling(5, 1.0, 0, 1.0, (7, 2), 0)
    for prompt, several in (("a", ["a"]), ([1, 2], [[1, 2]]), (["a", [3]], ["a", [3]])):
        assert parsed(CompletionRequest, {"prompt": prompt}).prompt == several


# -- the application -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "talks"
    shutil.copytree(tiny_folder, folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


EXACT: dict[str, Any] = {"dtype": "float32", "device": "cpu"}


def opened(folder: Path, longest: int = 128, **options: Any) -> Policy:
    rollout = RolloutConfig(batch=4, slots=4)
    return open_policy(str(folder), rollout, max_model_len=longest, **EXACT, **options)


def answered(
    folder: Path, work: Callable[[Any], Awaitable[None]], longest: int = 128, **options: Any
) -> None:
    """Let a client work with the application, without a network."""
    pytest.importorskip("starlette")
    http = pytest.importorskip("httpx2")
    from stretto.serving.app import ModelServer

    async def both() -> None:
        thread, policy = WorkerThread("generator", 1), opened(folder, longest)
        engine = AsyncEngine(policy.engine, thread.run, policy.longest, 8)
        tokenizer = options.pop("tokenizer", policy.tokenizer)
        app = ModelServer(engine, tokenizer, "own", **options).app
        running = asyncio.create_task(engine.run())
        transport = http.ASGITransport(app)
        try:
            async with http.AsyncClient(transport=transport, base_url="http://own") as client:
                await work(client)
        finally:
            running.cancel()
            thread.stop()

    asyncio.run(asyncio.wait_for(both(), 60))


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_completions_are_those_of_generate(tiny_folder: Path) -> None:
    """Seed and number of an answer say what a run's seed and a rollout's id do."""
    given: dict[str, Any] = {"max_tokens": 9, "temperature": 0.9, "seed": 5, "top_k": 50}
    own: dict[str, Any] = {"max_new_tokens": 9, "temperature": 0.9, "seed": 5, "top_k": 50}
    expected = stretto.generate(tiny_folder, ["one"] * 3, **own, **EXACT)
    greedy = stretto.generate(tiny_folder, ["one", "two"], max_new_tokens=7, temperature=0, **EXACT)

    async def work(client: Any) -> None:
        async def post(**body: Any) -> Any:
            return await client.post("/v1/completions", json=body)

        several, both = await asyncio.gather(
            post(prompt="one", n=3, **given),
            post(prompt=["one", "two"], temperature=0, max_tokens=7),
        )
        found = several.json()
        assert [c["text"] for c in found["choices"]] == expected
        assert [c["finish_reason"] for c in found["choices"]] == ["length"] * 3
        counts = {"prompt_tokens": 3, "completion_tokens": 27, "total_tokens": 30}
        assert found["usage"] == counts
        assert [c["text"] for c in both.json()["choices"]] == greedy
        alike = await post(prompt=["one", "one"], **given)  # with numbers of their own
        assert [c["text"] for c in alike.json()["choices"]] == expected[:2]
        asked = {"stream": True, "return_token_ids": True, "n": 2, "max_tokens": 3}
        read: list[list[list[int]]] = [[], [], [], []]
        for event in events((await post(prompt=["one", "two"], **asked)).text):
            (choice,) = event["choices"]
            read[choice["index"]] += [choice[k] for k in ("prompt_token_ids",) if k in choice]
        assert read == [[list(b"one")]] * 2 + [[list(b"two")]] * 2
        stop = expected[0][3:5]
        cut = (await post(prompt="one", stop=[stop], **given)).json()["choices"][0]
        before = expected[0][: expected[0].index(stop)]
        assert (cut["text"], cut["finish_reason"]) == (before, "stop")
        body = {"prompt": "one", "n": 3, "stream": True, "stream_options": {"include_usage": True}}
        pieces = events((await post(**body, **given)).text)
        assert pieces.pop()["usage"] == counts
        texts, reasons = [""] * 3, [None] * 3
        for piece in pieces:
            (choice,) = piece["choices"]
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
        assert (texts, reasons) == (expected, ["length"] * 3)

    answered(tiny_folder, work)


def test_chats_have_tools(chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the policy writes is scripted: a call, and one that the token limit has cut."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {}},
    }
    script = [[*b"Well. ", *call.encode(), byte_tokenizer().eos_token_id], [*call.encode()[:-3]]]

    async def chunks(self: Any) -> Any:
        tokens = np.array(script[0], np.int32)
        whole = tokens[-1] >= 256
        finish = FinishReason.STOP if whole else FinishReason.LENGTH
        yield 0, Chunk(0, 0, tokens, np.zeros(len(tokens), np.float32), 0, finish)

    monkeypatch.setattr("stretto.serving.streams.Stream.chunks", chunks)

    async def work(client: Any) -> None:
        async def post(**body: Any) -> Any:
            body = {"messages": MESSAGES, "tools": [tool], "max_tokens": 5, **body}
            return await client.post("/v1/chat/completions", json=body)

        found = (await post(return_token_ids=True)).json()
        assert "Adds." in bytes(found["prompt_token_ids"]).decode()
        (choice,) = found["choices"]
        assert (choice["finish_reason"], choice["token_ids"]) == ("tool_calls", script[0])
        assert choice["message"]["content"].strip() == "Well."
        (made,) = choice["message"]["tool_calls"]
        assert (made["type"], made["function"]["name"]) == ("function", "add")
        assert json.loads(made["function"]["arguments"]) == {"a": 2}
        _, piece = events((await post(stream=True)).text)
        delta = piece["choices"][0]["delta"]
        assert delta["tool_calls"] == [{"index": 0, **made}]
        answer = {"role": "tool", "tool_call_id": made["id"], "content": "5"}
        more = [*MESSAGES, choice["message"], answer]
        found = (await post(messages=more, return_token_ids=True)).json()
        assert '"a": 2' in bytes(found["prompt_token_ids"]).decode()
        script.pop(0)
        (choice,) = (await post()).json()["choices"]
        assert choice["finish_reason"] == "length"
        assert "tool_calls" not in choice["message"]
        none = (await post(tool_choice="none", return_token_ids=True)).json()
        assert "Adds." not in bytes(none["prompt_token_ids"]).decode()

    answered(chat_folder, work, longest=2000)


def test_stop_token_ids_end_an_answer(tiny_folder: Path) -> None:
    async def work(client: Any) -> None:
        async def generate(**params: Any) -> Any:
            body = {"token_ids": [65], "sampling_params": {"max_tokens": 20, "seed": 1, **params}}
            return (await client.post("/inference/v1/generate", json=body)).json()["choices"][0]

        whole = await generate()
        third = whole["token_ids"][2]
        place = whole["token_ids"].index(third) + 1
        cut = await generate(stop_token_ids=[third, 258])
        assert (cut["token_ids"], cut["finish_reason"]) == (whole["token_ids"][:place], "stop")

    answered(tiny_folder, work)


def test_log_probs_are_the_models_and_tokens_go_in_and_out(chat_folder: Path) -> None:
    model: Any = load_causal_lm(chat_folder, torch.float32, torch.device("cpu"))

    def table(prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1)

    async def work(client: Any) -> None:
        async def post(path: str, **body: Any) -> Any:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response

        asked = {"messages": MESSAGES, "max_completion_tokens": 6, "temperature": 0.8, "seed": 1}
        wanted = {"logprobs": True, "top_logprobs": 3, "return_token_ids": True}
        chat = (await post("/v1/chat/completions", **asked, **wanted)).json()
        assert (chat["object"], chat["model"]) == ("chat.completion", "own")
        (choice,), prompt = chat["choices"], chat["prompt_token_ids"]
        assert bytes(prompt).decode() == "<user>hi\n<assistant>"
        tokens = choice["token_ids"]
        own = table(prompt, tokens, 0.8)
        assert choice["message"]["role"] == "assistant"
        assert choice["message"]["content"] == bytes(tokens).decode(errors="replace")
        for place, (token, entry) in enumerate(
            zip(tokens, choice["logprobs"]["content"], strict=True)
        ):
            assert entry["logprob"] == pytest.approx(own[place, token].item(), abs=1e-5)
            likeliest = own[place].topk(3).values.tolist()
            assert [e["logprob"] for e in entry["top_logprobs"]] == pytest.approx(
                likeliest, abs=1e-5
            )
        streamed = events((await post("/v1/chat/completions", **asked, **wanted, stream=True)).text)
        assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert streamed[0]["prompt_token_ids"] == prompt
        ids = [i for e in streamed for c in e["choices"] for i in c.get("token_ids", [])]
        assert ids == tokens
        deltas = [e["choices"][0]["delta"].get("content", "") for e in streamed]
        assert "".join(deltas) == choice["message"]["content"]
        params = {"max_tokens": 6, "temperature": 0.8, "seed": 1, "logprobs": 2, "n": 2}
        out = await post("/inference/v1/generate", token_ids=prompt, sampling_params=params)
        first, second = out.json()["choices"]
        assert (first["token_ids"], first["finish_reason"]) == (tokens, "length")
        assert second["token_ids"] != tokens
        assert first["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
        pieces = {"token_ids": prompt, "sampling_params": {**params, "n": 1}, "stream": True}
        for event in events((await post("/inference/v1/generate", **pieces)).text):
            (piece,) = event["choices"]
            spans = [{"version": "0", "start": 0, "end": len(piece["token_ids"])}]
            assert piece["weight_versions"] == spans
        entries = first["logprobs"]["content"]
        assert [e["token_id"] for e in entries] == tokens
        assert [e["top_logprobs"][0]["token_id"] for e in entries] == tokens
        chosen = own[torch.arange(6), torch.tensor(tokens)].tolist()
        assert [e["logprob"] for e in entries] == pytest.approx(chosen, abs=1e-5)
        text = (await post("/v1/completions", prompt=prompt, logprobs=1, max_tokens=2)).json()
        about = text["choices"][0]["logprobs"]
        assert len(about["tokens"]) == len(about["token_logprobs"]) == 2
        assert about["text_offset"][0] == 0
        assert all(
            max(top.values()) >= own
            for top, own in zip(about["top_logprobs"], about["token_logprobs"], strict=True)
        )

    answered(chat_folder, work)


def test_errors_have_openais_form(tiny_folder: Path) -> None:
    pytest.importorskip("starlette")
    from stretto.serving.app import MOST_BYTES

    async def work(client: Any) -> None:
        client.headers["authorization"] = "Bearer sécret"
        assert (await client.get("/health")).status_code == 200
        about = (await client.get("/v1/models")).json()["data"][0]
        assert (about["id"], about["max_model_len"]) == ("own", 128)

        async def refused(path: str, status: int, code: str | None, **body: Any) -> None:
            response = await client.post(path, json=body)
            assert response.status_code == status, response.text
            assert response.json()["error"]["code"] == code

        text, tokens = "/v1/completions", "/inference/v1/generate"
        await refused(text, 400, "unsupported_parameter", prompt="a", echo=True)
        await refused(text, 404, "model_not_found", prompt="a", model="gpt-9")
        await refused(text, 400, "context_length_exceeded", prompt="a" * 200)
        await refused(text, 400, "context_length_exceeded", prompt="a", max_tokens=128)
        await refused(text, 400, "too_many_answers", prompt="a", n=9)
        await refused(text, 400, "invalid_prompt", prompt=[10_000])
        for stop in ("", ["a"] * 5, "a" * 257):
            await refused(text, 400, "invalid_value", prompt="a", stop=stop)
        await refused(tokens, 400, "invalid_value", token_ids=[1], sampling_params={"n": 0})
        await refused("/v1/chat/completions", 400, None, messages=MESSAGES)
        await refused("/v1/embeddings", 404, None)
        await refused("/v1/responses", 404, None, input="a")
        assert "/v1/chat/completions" in (await client.post("/v1/responses")).text
        wrong = await client.get(text)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert wrong.json()["error"]["message"] == "Method Not Allowed"
        assert (await client.get("/v1/models/own")).json() == about
        assert (await client.get("/v1/models/org/o")).json()["error"]["code"] == "model_not_found"
        kind = {"content-type": "application/json"}
        for content, headers, status, code in (
            (b"{", kind, 400, None),
            (b'{"prompt": "\\ud800"}', kind, 400, "invalid_prompt"),
            (b'{"prompt": "a", "model": "\\ud800"}', kind, 400, "invalid_prompt"),
            (b"[" * 100_000, kind, 400, None),
            (b" " * (MOST_BYTES + 1), kind, 413, None),
            (b'{"prompt": "a"}', {"content-type": "text/plain"}, 415, None),
            (b'{"prompt": [' + b"[]," * 200_001 + b"1]}", kind, 413, None),
            (
                b'{"prompt": "a", "n": 9}',
                {"content-type": "Application/JSON;q"},
                400,
                "too_many_answers",
            ),
        ):
            response = await client.post(text, content=content, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        response = await client.get("/v1/models", headers={"host": "site.example:8000"})
        assert response.status_code == 400
        client.headers["authorization"] = "bearer sécret"
        assert (await client.get("/v1/models")).status_code == 200
        client.headers["authorization"] = "Bearer other"
        await refused(text, 401, "invalid_api_key", prompt="a")
        assert (await client.get("/health")).status_code == 200

    answered(tiny_folder, work, api_key="sécret", hosts=["own"])


@pytest.mark.parametrize(("stream", "early"), [(True, False), (True, True), (False, False)])
def test_a_client_that_leaves_frees_its_slot(tiny_folder: Path, stream: bool, early: bool) -> None:
    """Long before the answer is whole, whether it is streamed or not; also before a stream starts,
    where the first thing sent already fails.
    """
    pytest.importorskip("starlette")
    from stretto.serving.app import ModelServer

    body = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": stream}).encode()
    http = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"}
    kind = [(b"content-type", b"application/json")]
    place = {"scheme": "http", "path": "/v1/completions", "query_string": b"", "headers": kind}
    tokens = []

    async def both() -> None:
        thread = WorkerThread("generator", 1)
        policy = open_policy(str(tiny_folder), RolloutConfig(batch=1), **EXACT)
        engine = AsyncEngine(policy.engine, thread.run, policy.longest, 1)
        app = ModelServer(engine, policy.tokenizer, "own").app
        running = asyncio.create_task(engine.run())
        events = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if events:
                return events.pop()
            while not any(row.generated > 2 for row in list(policy.engine._held.values())):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if early:
                raise OSError("the client has left")
            tokens.append(message)

        with suppress(OSError):
            await app({**http, **place}, receive, send)
        while policy.engine._held:  # until its next token
            await asyncio.sleep(0)
        engine.submit([GenerationRequest((1,), Sampling(1))])  # there is room again
        running.cancel()
        thread.stop()

    asyncio.run(asyncio.wait_for(both(), 60))
    assert len(tokens) < 1000


# -- the command, with OpenAI's client ----------------------------------------------------------


@contextmanager
def served(*arguments: str, errors: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Address of the command in a process of its own; ``errors`` gets its standard error."""
    command = [sys.executable, "-m", "stretto", "serve", *arguments, "--port", "0"]
    environment = {**os.environ, "STRETTO_API_KEY": "secret", "OMP_NUM_THREADS": "1"}
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        )
    assert process.stdout
    try:
        line = process.stdout.readline()
        assert line.startswith("serving "), errors.read_text()
        yield next(word for word in line.split() if word.startswith("http")), process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_openais_client_is_served(chat_folder: Path, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    greedy: dict[str, Any] = {"model": "talks", "messages": MESSAGES, "temperature": 0}
    arguments = ("--dtype", "float32", "--max-model-len", "300", "--slots", "3")
    errors = tmp_path / "errors.txt"
    with served(str(chat_folder), *arguments, errors=errors) as (url, process):
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=60)
        assert [model.id for model in client.models.list()] == ["talks"]
        create = client.chat.completions.create
        whole = create(**greedy, max_tokens=12, logprobs=True, top_logprobs=2)
        text, about = whole.choices[0].message.content, whole.choices[0].logprobs.content
        assert len(about) == whole.usage.completion_tokens == 12
        for entry in about:  # greedy: the likeliest token is the one
            assert entry.token == entry.top_logprobs[0].token
            assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-5)
        pieces = list(create(**greedy, max_tokens=12, stream=True))
        assert "".join(p.choices[0].delta.content or "" for p in pieces) == text
        assert pieces[-1].choices[0].finish_reason == "length"
        with ThreadPoolExecutor(5) as pool:
            asked = [pool.submit(create, **greedy, max_tokens=12) for _ in range(5)]
            assert {a.result().choices[0].message.content for a in asked} == {text}
        left = create(**greedy, max_tokens=250, stream=True)
        next(iter(left))
        left.close()
        with pytest.raises(openai.BadRequestError, match="functions"):
            create(**greedy, functions=[{"name": "f"}])
        with pytest.raises(openai.BadRequestError) as caught:
            create(**greedy, max_tokens=3000)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="other", max_retries=0).models.list()
        unfinished = create(**greedy, max_tokens=40, stream=True)
        next(iter(unfinished))
        process.send_signal(signal.SIGTERM)
        ends = [p.choices[0].finish_reason for p in unfinished]  # an answer under way is whole
        assert ends[-1] == "length"
        assert process.wait(60) == 143
    said = errors.read_text().splitlines()
    assert said.pop() == "stretto: interrupted"
    assert all(line.startswith(("loading ", "starting ")) for line in said), said


def test_what_cannot_be_served_is_said_first(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("uvicorn")
    assert main(["serve", str(tiny_folder), "--slots", "0"]) == 2
    assert main(["serve", str(tiny_folder), "--port", "70000"]) == 2
    assert "port 70000" in capsys.readouterr().err
    assert main(["serve", "no-such-model", "--port", "0"]) == 2
    assert main(["serve", str(tiny_folder), "--port", "0", "--follow"]) == 2
    assert "--follow needs a run's folder" in capsys.readouterr().err
    with raises(ConfigError, "too-few-positions", "max_model_len=100000"):
        open_policy(str(tiny_folder), RolloutConfig(), max_model_len=100_000, **EXACT)
    assert main(["chat", str(tiny_folder), "--max-model-len", "-5"]) == 2
    assert "--max-model-len -5: must be" in capsys.readouterr().err
    assert main(["serve", str(tiny_folder), "--port", "0", "--seed", "-1"]) == 2
    assert "--seed -1" in capsys.readouterr().err


# -- policies of runs ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
def test_a_policy_is_followed_while_it_trains(rank: int, tmp_path: Path) -> None:
    """Its answers are those of the model that the run saves at that step."""
    settings: dict[str, Any] = {
        "steps": 1,
        "rollout": {"batch": 4, "max_new_tokens": 4},
        "observe": {"progress": "off", "checkpoint_every": 1},
        "model": {"name": "tiny", "dtype": "float32", "lora_rank": rank},
        "training": {"lr": 0.1},
        "out": str(tmp_path),
    }
    options: dict[str, Any] = {"max_new_tokens": 40, **EXACT}
    stretto.train("tiny", **settings, warmup_examples=32 if rank else 0)
    run = tmp_path / "tiny-001"
    if rank:
        kept = (run / "warmup.safetensors").rename(tmp_path / "kept")
        with raises(ConfigError, "nothing-to-follow", "warm-up"):
            opened(run, follow=True)
        kept.rename(run / "warmup.safetensors")
    policy = opened(run, follow=True)
    assert (policy.step, policy.label(1)) == (1, "step-1")

    def said() -> str:
        talk = Conversation(policy, RolloutConfig(max_new_tokens=40), 0)
        return "".join(talk.answer("1 + 1 ="))

    first = stretto.generate(run, ["1 + 1 ="], **options)
    assert [said()] == first
    assert policy.newer() is None
    stretto.resume(run, steps=3)
    weights = policy.newer()
    assert weights is not None
    assert weights.version == policy.step == 3
    policy.engine.load(weights)
    assert [said()] == stretto.generate(run, ["1 + 1 ="], **options) != first
    # A run that has ended is the model that it saved; one that was killed before, its checkpoint.
    assert opened(run).run is None
    shutil.rmtree(run / "model")
    assert opened(run).step == 3
    last = run / "checkpoints" / "step-000003" / "learner"
    assert checkpoint.newest(run / "checkpoints") == 3
    shutil.copytree(last.parent, last.parents[1] / "step-000004")
    (last.parents[1] / "step-000004" / "learner" / "rank-0-of-1.safetensors").write_bytes(b"x")
    assert policy.newer() is None


def test_a_run_without_checkpoints_cannot_be_followed(tmp_path: Path) -> None:
    observe = {"progress": "off", "checkpoint_minutes": 0}
    small: dict[str, Any] = {"rollout": {"batch": 4, "max_new_tokens": 4}, "warmup_examples": 0}
    stretto.train("tiny", steps=1, observe=observe, out=str(tmp_path), **small)
    with raises(ConfigError, "nothing-to-follow", "writes no checkpoints"):
        opened(tmp_path / "tiny-001", follow=True)


# -- chats ---------------------------------------------------------------------------------------


def test_a_requests_template_arguments_win_over_the_servers(chat_folder: Path) -> None:
    tokenizer = load_tokenizer(chat_folder)
    tokenizer.chat_template = TEMPLATE + "{{ '[' ~ rule ~ effort ~ ']' }}"
    turns = [{"role": "user", "content": "a"}]
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}

    async def work(client: Any) -> None:
        async def prompt(**body: Any) -> str:
            body = {"messages": turns, "max_tokens": 1, "return_token_ids": True, **body}
            found = (await client.post("/v1/chat/completions", json=body)).json()
            return bytes(found["prompt_token_ids"]).decode()

        begun = "<user>a\n<assistant>"
        assert await prompt() == f"{begun}[xlow]"
        high = {"chat_template_kwargs": {"effort": "high", "none": None}}
        assert await prompt(**high) == f"{begun}[xhigh]"
        assert await prompt(chat_template_kwargs=None) == f"{begun}[xlow]"
        assert (await prompt(**high, tools=[tool])).endswith("<assistant>[xhigh]")
        assert (await prompt(tools=[tool])).endswith("<assistant>[xlow]")
        wrong = {"messages": turns, "chat_template_kwargs": {"tools": []}}
        refused = await client.post("/v1/chat/completions", json=wrong)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "chat_template_kwargs"
        plain = {"prompt": "a", "chat_template_kwargs": {"effort": "high"}}
        assert (await client.post("/v1/completions", json=plain)).status_code == 400

    own = {"rule": "x", "effort": "low"}
    answered(chat_folder, work, 1000, template_arguments=own, tokenizer=tokenizer)


def test_a_conversation_goes_through_the_chat_template(chat_folder: Path) -> None:
    policy = opened(chat_folder)
    options = RolloutConfig(max_new_tokens=5, temperature=0)
    talk = Conversation(policy, options, 0, "be")
    first, second = ("".join(talk.answer(text)) for text in ("a", "b"))
    turns = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "b"},
    ]
    expected = stretto.generate(
        chat_folder, [turns[:2], turns], max_new_tokens=5, temperature=0, **EXACT
    )
    assert [first, second] == expected
    talk.clear()
    assert "".join(talk.answer("a")) == first
    answer = talk.answer("b")
    begun = next(answer)
    answer.close()  # as Ctrl-C does: what has come stays
    assert not policy.engine._held
    follows = [*turns, {"role": "assistant", "content": begun}, {"role": "user", "content": "c"}]
    greedy: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0, **EXACT}
    assert ["".join(talk.answer("c"))] == stretto.generate(chat_folder, [follows], **greedy)
    with raises(EngineError, "context-length", "/clear"):
        next(talk.answer("x" * 200))


def test_chat_reads_lines_and_obeys(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model without a template goes on with the text so far; Ctrl-C stops one answer."""
    import io

    lines = "one\n/no\n/system be\n\ntwo\n/clear\none\nstopped\n/exit\nunread\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    own = Conversation.answer

    def answer(self: Conversation, said: str) -> Iterator[str]:
        if said == "stopped":
            raise KeyboardInterrupt
        return own(self, said)

    monkeypatch.setattr(Conversation, "answer", answer)
    options = ["--max-new-tokens", "4", "--temperature", "0", "--dtype", "float32"]
    assert main(["chat", str(tiny_folder), *options]) == 0
    greedy: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0, **EXACT}
    (one,) = stretto.generate(tiny_folder, ["one"], **greedy)
    (two,) = stretto.generate(tiny_folder, [f"one{one}\ntwo"], **greedy)
    said = capsys.readouterr()
    assert said.out == f"{one}\n{two}\n{one}\n\n"
    assert "There is no /no" in said.err
    assert "no chat template" in said.err
    assert main(["chat", str(tiny_folder), "--temperature", "-1"]) == 2
    assert "--temperature -1.0" in capsys.readouterr().err
    assert main(["chat", str(tiny_folder), "--temperature", "1e-39"]) == 2
    assert "--temperature 1e-39: must be 0" in capsys.readouterr().err


def test_chat_in_a_terminal(chat_folder: Path) -> None:
    """Ctrl-C stops an answer, Ctrl-D leaves."""
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "stretto", "chat", str(chat_folder), "--dtype", "float32"]
    options = ["--max-new-tokens", "4000", "--max-model-len", "4090", "--seed", "3"]
    process = subprocess.Popen(
        [*command, *options], stdin=follower, stdout=follower, stderr=subprocess.DEVNULL
    )
    os.close(follower)
    try:
        seen = _read_until(leader, b"> ")
        assert b"Ctrl-C stops an answer" in seen
        os.write(leader, b"hello\n")
        _read_until(leader, b"hello", more=20)
        process.send_signal(signal.SIGINT)  # what a terminal makes of Ctrl-C
        _read_until(leader, b"\n> ")
        os.write(leader, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def _read_until(descriptor: int, wanted: bytes, more: int = 0) -> bytes:
    seen = b""
    while (at := seen.replace(b"\r", b"").find(wanted)) < 0 or len(seen) < at + len(wanted) + more:
        seen += os.read(descriptor, 1024)
    return seen
