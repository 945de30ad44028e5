"""Programs that hold their own loop: their requests as observations, over a real server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program_helpers import (
    END,
    TOKENIZER,
    Here,
    Played,
    Program,
    played,
    sessions,
)

from docs_helpers import blocks
from raising import raises
from stretto.config import EnvironmentConfig
from stretto.environments.executors import EnvironmentProcess, locate_source, settings_of
from stretto.environments.launch import is_program
from stretto.environments.program import PlacedPrograms, ProgramEnvironment, reward_of
from stretto.environments.sessions import Sessions
from stretto.errors import EngineError, EpisodeLostError, RewardError
from stretto.plain import dumps, parse
from stretto.schedules.rollout import Rollout
from stretto.serving.answers import received
from stretto.stateful import from_plain, to_plain
from stretto.types import FORKS, Chunk, FinishReason, Observation, Prompt, Sampling, episode_of

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


CLIENTS: list[Any] = []
"""Those of the test, which are closed with its server."""


def client_of(base_url: str, api_key: str, **options: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, **options)
    CLIENTS.append(client)
    return client


async def ask(client: Any, messages: list[Any], **options: Any) -> Any:
    return await client.chat.completions.create(model="own", messages=messages, **options)


@asynccontextmanager
async def serving(
    program: Program, over: Sessions | None = None, **settings: Any
) -> AsyncIterator[tuple[ProgramEnvironment, Sessions]]:
    """The environment of a program in this process, with its server."""
    from stretto.serving.programs import ProgramServer

    over = over or sessions()
    server = ProgramServer(over, TOKENIZER, "own")
    config = EnvironmentConfig(**{"timeout_s": 20.0, **settings})
    try:
        yield ProgramEnvironment(Here(program), over, server.start, config), over
    finally:
        while CLIENTS:
            await CLIENTS.pop().close()
        await server.stop()


def episodes(program: Program, *scripts: list[str], **settings: Any) -> list[Played]:
    """Play an episode for each script, all at once."""

    async def all_of_them() -> list[Played]:
        async with serving(program, **settings) as (role, _):
            return await asyncio.gather(
                *(played(role, script, id_) for id_, script in enumerate(scripts))
            )

    return asyncio.run(asyncio.wait_for(all_of_them(), 60))


def test_a_conversation_that_goes_on_extends_its_sample() -> None:
    seen: list[Any] = []

    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        client, messages = client_of(base_url, api_key), [user(data["prompt"])]
        for _ in range(2):
            options = {"logprobs": True, "extra_body": {"return_token_ids": True}}
            answer = await ask(client, messages, tools=[ADD], **options)
            seen.append(answer)
            messages.append(answer.choices[0].message)
            for call in answer.choices[0].message.tool_calls or ():
                seen.append(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
        return 2.0 if data["answer"] == "42" else 0.0

    (found,) = episodes(run, ['hm!add {"a": 2}', "five"])
    assert found.texts() == [
        '[add]<user>Q\n<assistant>[hm!add {"a": 2}]\n<tool>5\n<assistant>[five]'
    ]
    assert (found.end.reward, found.end.ended_by, found.end.record) == (2.0, "environment", {})
    assert [o.number for o in found.observations] == [0, 1, 2]
    called, five = found.observations[1].messages, found.observations[2].messages
    assert [m["role"] for m in called] == ["assistant", "tool"]
    assert called[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert [m["content"] for m in five] == ["five"]
    first, arguments, second = seen
    assert (first.choices[0].finish_reason, arguments) == ("tool_calls", '{"a": 2}')
    assert first.choices[0].message.content == "hm"
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "five")
    (rollout,) = found.rollouts.values()
    assert second.choices[0].token_ids == [*b"five", END]
    assert second.prompt_token_ids == [*rollout.prompt.tokens, *rollout.tokens[:-5]]
    given = [entry.logprob for entry in second.choices[0].logprobs.content]
    assert given == [0.0, -0.125, -0.25, -0.375, -0.5]


def test_other_conversations_fork_and_each_goes_on_from_its_own_sample() -> None:
    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        client = client_of(base_url, api_key)
        main, sub = [user("main")], [user("sub")]
        for messages, more in ((main, "m2"), (sub, "s2"), (main, "m3"), (sub, "")):
            answer = await ask(client, messages)
            messages += [answer.choices[0].message.model_dump(), user(more)]
        return 1.0

    (found,) = episodes(run, ["A", "B", "C", "D"])
    assert found.texts() == [
        "<user>main\n<assistant>[A]\n<user>m2\n<assistant>[C]",
        "<user>sub\n<assistant>[B]\n<user>s2\n<assistant>[D]",
    ]
    assert list(found.rollouts) == [0, FORKS]
    assert [episode_of(i) for i in found.rollouts] == [0, 0]
    assert found.end.rollout_id == FORKS
    said = [[m["content"] for m in r.messages or ()] for r in found.rollouts.values()]
    assert said == [["A", "m2", "C"], ["B", "s2", "D"]]
    assert found.rollouts[FORKS].prompt.data == {"answer": "42"}


def test_an_edited_past_forks_from_the_tokens_that_stand() -> None:
    """What comes again is read as it was sampled, not as it is rendered."""

    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        client, start = client_of(base_url, api_key), [user("q")]
        first = (await ask(client, start)).choices[0].message
        await ask(client, [*start, first, user("one")])
        await ask(client, [*start, first, user("two")])  # back before the last turn
        await ask(client, start)  # the same again
        await ask(client, [*start, first, user("rewrite")])  # which the template cannot append
        return 0.5

    (found,) = episodes(run, ["x", "y", "z", "v", "w"])
    assert found.texts() == [
        "<user>q\n<assistant>[x]\n<user>one\n<assistant>[y]",
        "<user>q\n<assistant>x|\n<user>two\n<assistant>[z]",
        "<user>q\n<assistant>[v]",
        "<user>q\n<assistant>x\n<user>rewrite\n<assistant>[w]",
    ]
    assert list(found.rollouts) == [0, FORKS, 2 * FORKS, 3 * FORKS]


def test_a_template_that_rewrites_is_refused_where_samples_may_not_fork() -> None:
    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        client, start = client_of(base_url, api_key), [user("q")]
        first = (await ask(client, start)).choices[0].message
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, [*start, first, user("rewrite")])
        return float(caught.value.code == "conversation_rewritten")

    (found,) = episodes(run, ["x"], over=sessions(on_break="refuse"))
    assert (found.end.reward, len(found.rollouts)) == (1.0, 1)


def test_token_ids_extend_the_sample_that_they_begin_with() -> None:
    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        base = base_url.removesuffix("/v1")
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as client:
            models = (await client.get(f"{base_url}/models")).json()["data"]
            assert [(m["id"], m["max_model_len"]) for m in models] == [("own", 600)]

            async def generate(tokens: list[int], **params: Any) -> Any:
                params = {"stop_token_ids": [END], "logprobs": 1, **params}
                body = {"token_ids": tokens, "sampling_params": params}
                url = f"{base}/inference/v1/generate"
                return (await client.post(url, json=body)).json()

            (choice,) = (await generate([1, 2]))["choices"]
            assert choice["token_ids"] == [*b"ab", END]
            content = choice["logprobs"]["content"]
            assert [(e["token"], e["logprob"]) for e in content] == [
                (f"token_id:{t}", -i / 8) for i, t in enumerate([*b"ab", END])
            ]
            assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": 3}]
            standing = [1, 2, *choice["token_ids"]]
            await generate([*standing, 5, 6], skip_special_tokens=False)
            await generate([1, 3])
            await generate(standing)  # without anything new: a sample of its own
            return 1.0

    (found,) = episodes(run, ["ab", "c", "d", "e"])
    samples = [(list(r.prompt.tokens), list(r.tokens)) for r in found.rollouts.values()]
    assert samples == [
        ([1, 2], [*b"ab", END, 5, 6, *b"c", END]),
        ([1, 3], [*b"d", END]),
        ([1, 2, *b"ab", END], [*b"e", END]),
    ]
    assert found.end.reward == 1.0


def test_streams_and_completions_are_answered_too() -> None:
    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        client, messages = client_of(base_url, api_key), [user("q")]
        stream = await ask(client, messages, stream=True, tools=[ADD])
        deltas = [e.choices[0].delta async for e in stream if e.choices]
        (call,) = (c for d in deltas for c in d.tool_calls or ())
        assert (call.function.name, call.function.arguments) == ("add", "{}")
        said = {"role": "assistant", "content": "a", "tool_calls": [call.model_dump()]}
        del said["tool_calls"][0]["index"]
        answer = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        stream = await ask(client, [*messages, said, answer], stream=True, tools=[ADD])
        text = "".join([e.choices[0].delta.content or "" async for e in stream if e.choices])
        assert text == "five"
        completion = await client.completions.create(model="own", prompt="plain")
        return float(completion.choices[0].text == "six")

    (found,) = episodes(run, ["a!add {}", "five", "six"])
    assert found.end.reward == 1.0
    assert found.texts() == [
        "[add]<user>q\n<assistant>[a!add {}]\n<tool>5\n<assistant>[five]",
        "plain[six]",
    ]
    assert [o.max_turn_tokens for o in found.observations] == [0] * 4  # the run's limit alone


def test_arguments_that_are_nested_too_deeply_stay_text() -> None:
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    for text, read in (('{"a": 1}', {"a": 1}), ("{", "{"), (deep, deep)):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
        told = received({"role": "assistant", "content": None, "tool_calls": [call]})
        assert told["content"] == ""
        assert told["tool_calls"][0]["function"]["arguments"] == read


def test_two_sessions_at_once_keep_apart_and_in_order() -> None:
    """Requests of one episode that come at once are answered one after another."""

    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        client = client_of(base_url, api_key)
        answers = await asyncio.gather(*(ask(client, [user(t)]) for t in "abc"))
        said = "".join(a.choices[0].message.content for a in answers)
        return float(said)

    first, second = episodes(run, ["1", "2", "3"], ["4", "5", "6"])
    assert sorted(str(int(first.end.reward or 0))) == ["1", "2", "3"]
    assert sorted(str(int(second.end.reward or 0))) == ["4", "5", "6"]
    assert len(first.rollouts) == len(second.rollouts) == 3
    assert list(second.rollouts) == [1, FORKS + 1, 2 * FORKS + 1]


def test_wrong_keys_sessions_and_requests_are_refused() -> None:
    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        client = client_of(base_url, api_key)
        forged = client_of(base_url, api_key + "x")
        with pytest.raises(openai.AuthenticationError):
            await ask(forged, [user("q")])
        root = base_url.split("/e/")[0]
        for base in (f"{root}/e/none/v1", f"{root}/v1"):
            with pytest.raises(openai.NotFoundError) as unknown:
                await ask(client_of(base, api_key), [user("q")])
            assert unknown.value.code == "unknown_session"
        with pytest.raises(openai.BadRequestError) as several:
            await ask(client, [user("q")], n=2)
        assert several.value.code == "too_many_answers"
        with pytest.raises(openai.BadRequestError) as long:
            await ask(client, [user("q" * 300)])
        assert long.value.code == "context_length_exceeded"
        key = base_url.split("/e/")[1].removesuffix("/v1")
        headed = client_of(f"{root}/v1", api_key, default_headers={"X-Session-ID": key})
        await ask(headed, [user("q")], temperature=0.3, seed=4)
        await ask(headed, [user("r")], temperature=1.0, max_tokens=5)
        await ask(headed, [user("s")], top_p=0.5)
        for _ in range(2):
            await ask(headed, [user("t")], extra_body={"chat_template_kwargs": {"a": 1}})
        return 1.0

    said: list[str] = []
    (found,) = episodes(run, ["x", "y", "z", "u", "v"], over=sessions(say=said.append))
    assert found.end.reward == 1.0
    assert [o.max_turn_tokens for o in found.observations] == [0, 5, 0, 0, 0, 0]
    limits = [r.response().sampling for r in found.rollouts.values()]
    assert [s and s.max_turn_tokens for s in limits] == [100, 5, 100, 100, 100]
    assert ["temperature" in text for text in said] == [True, False]  # once
    assert ["chat_template_kwargs" in text for text in said] == [False, True]


FIELDS: dict[str, Any] = {
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "presence_penalty": 1.5,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1},
    "reasoning_effort": "low",
    "extra_body": {"repetition_penalty": 1.1, "min_p": 0.1, "guided_json": {}, "mine": 1},
}


def test_fields_that_would_change_the_distribution_are_noted_once() -> None:
    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        client = client_of(base_url, api_key)
        await ask(client, [user("q")], tools=[ADD], **FIELDS, logprobs=True, top_logprobs=2)
        newer = {"verbosity": "low"}  # not in the oldest client
        await ask(client, [user("r")], tools=[ADD], presence_penalty=0.5, extra_body=newer)
        await ask(client, [user("s")], tool_choice="none", response_format={"type": "text"})
        return 1.0

    told: list[str] = []
    (episode,) = episodes(run, ["x", "y", "z"], over=sessions(say=told.append))
    assert [text.split("[")[0] for text in episode.texts()] == [
        "",
        "",
        "<user>s\n<assistant>",
    ]  # a request without tools tells of none
    names = [text.split(" set ")[1].split(", without")[0] for text in told]
    first = (FIELDS.keys() - {"extra_body"}) | FIELDS["extra_body"].keys()
    assert names == [", ".join(sorted(first)), "top_logprobs", "verbosity"]


def test_a_stop_string_of_a_request_ends_its_turn() -> None:
    """The engine gets it with the turn, and the answer and the conversation end before it."""

    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        client = client_of(base_url, api_key)
        first = await ask(client, [user("q")], stop=["END", "\n\n"])
        assert (first.choices[0].finish_reason, first.choices[0].message.content) == ("stop", "on")
        more = [user("q"), {"role": "assistant", "content": "on"}, user("r")]
        await ask(client, more, max_tokens=5)
        return 1.0

    async def played_with_stop() -> Any:
        async with serving(run) as (role, _):
            return await played(role, ["onEND|", "y"])

    episode = asyncio.run(asyncio.wait_for(played_with_stop(), 60))
    assert [o.stop for o in episode.observations] == [("END", "\n\n"), (), ()]
    turn = Rollout(0, Prompt(0, (1,), "Q"), 0, sampling=Sampling(40, 0.5, max_turn_tokens=20))
    for observation, most, stop in zip(
        episode.observations[:2], (20, 5), (("END", "\n\n"), ()), strict=True
    ):
        turn.log.append(observation)
        expected = Sampling(40, 0.5, max_turn_tokens=most, stop=stop)
        assert turn.response().sampling == expected
    (rollout,) = episode.rollouts.values()
    assert rollout.messages[:2] == ({"role": "assistant", "content": "on"}, user("r"))
    again = from_plain(Observation, parse(dumps(to_plain(episode.observations[0]))))
    assert again.stop == ("END", "\n\n")


def test_limits_refuse_further_turns_and_the_program_may_still_earn() -> None:
    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        client, messages = client_of(base_url, api_key), [user("q")]
        while True:
            try:
                answer = (await ask(client, messages)).choices[0]
            except openai.BadRequestError as error:
                return 0.25 * len(messages) if error.code == "episode_over" else 0.0
            messages += [answer.message, user("more")]

    many, cut = episodes(run, ["a", "b", "c"], ["a…"], max_turns=3)
    assert (many.end.ended_by, many.end.reward) == ("turns", 7 / 4)
    assert (cut.end.ended_by, cut.end.reward) == ("turn_tokens", 3 / 4)
    assert cut.texts() == ["<user>q\n<assistant>[a"]


def test_a_sample_without_room_is_told_to_the_program() -> None:
    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        client, messages = client_of(base_url, api_key), [user("q")]
        answer = (await ask(client, messages)).choices[0].message
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, [*messages, answer, user("x" * 60)])
        return float(caught.value.code == "context_length_exceeded")

    (found,) = episodes(run, ["a"], over=sessions(response=50))
    assert (found.end.reward, found.end.ended_by) == (1.0, "environment")


@pytest.mark.parametrize("how", ["raises", "hangs", "silent", "no number", "late", "dies"])
def test_a_program_that_fails_ends_its_episode_with_the_reason(how: str) -> None:
    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        if how == "silent":
            return 1.0
        await ask(client_of(base_url, api_key), [user("q")])
        if how == "raises":
            raise ValueError("no such file")
        if how == "hangs":
            await asyncio.sleep(60)
        if how == "dies":
            raise asyncio.CancelledError
        return "three" if how == "no number" else float("nan")

    (found,) = episodes(run, ["x"], timeout_s=1.0 if how == "hangs" else 20.0)
    assert (found.end.reward, found.end.ended_by) == (None, "environment")
    said = {
        "raises": "ValueError: no such file",
        "hangs": "did not end in 1 s",
        "silent": "without a request",
        "no number": "returned 'three'",
        "late": "returned 'nan'",
        "dies": "was ended",
    }
    assert said[how] in found.end.record["failure"]


def test_a_client_that_leaves_gets_the_same_turn_when_it_asks_again() -> None:
    left = asyncio.Event()

    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        hasty = client_of(base_url, api_key, timeout=0.3)
        with pytest.raises(openai.APITimeoutError):
            await ask(hasty, [user("q")])
        left.set()
        again = await ask(client_of(base_url, api_key), [user("q")])
        return float(again.choices[0].message.content == "x")

    async def one() -> Played:
        async with serving(run) as (role, over):

            async def later() -> None:
                (session,) = over._by_key.values()
                first = session._current
                await left.wait()
                while first and first.is_open:
                    await asyncio.sleep(0.01)

            return await played(role, ["x"], between=later)

    found = asyncio.run(asyncio.wait_for(one(), 60))
    assert (found.end.reward, len(found.rollouts)) == (1.0, 1)


def test_the_last_turn_is_kept_too_for_a_client_that_has_left() -> None:
    async def one() -> None:
        over = sessions()
        session = over.open(Rollout(7, Prompt(7, tuple(b"Q"), "Q"), 0).response(text=True))
        asked = [(tuple(b"abc"), Sampling(9))]
        first = session.submit(asked)
        rollout = Rollout(7, Prompt(7, tuple(b"abc"), "abc"), 0, sampling=Sampling(9))
        await session.next()
        first.close()
        turn = Chunk(7, 0, np.array([5, END], "i4"), np.zeros(2, "f4"), 3, FinishReason.TURN)
        rollout.append(turn)
        session.deliver(rollout.response(text=True), "turns")
        again = session.submit(asked)
        assert again.turn is not None
        assert again.turn.tokens.tolist() == [5, END]
        with raises(EngineError, "episode-over"):
            session.submit(asked)

    asyncio.run(one())


def test_a_program_lives_as_long_as_one_of_its_samples() -> None:
    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        client = client_of(base_url, api_key)
        for text in ("main", "sub", "end"):
            await ask(client, [user(text)])
        return 1.0

    async def one() -> None:
        async with serving(run) as (role, over):
            prompt = Prompt(7, tuple(b"Q"), "Q")
            opening = await role.open(Rollout(7, prompt, 0).response(text=True))
            rollout = Rollout(7, opening.prompt or prompt, 0, sampling=Sampling(9))
            turn = Chunk(7, 0, np.array([5, END], "i4"), np.zeros(2, "f4"), 3, FinishReason.TURN)
            rollout.append(turn)
            fork = await role.step(rollout.response(text=True))
            assert fork.rollout_id == 7 + FORKS
            await role.release([7])
            assert over._by_key
            await role.release([7 + FORKS])
            assert not over._by_key

    asyncio.run(asyncio.wait_for(one(), 60))


def test_a_request_that_puts_words_into_the_policys_mouth_is_told_so() -> None:
    def told(*new: dict[str, str]) -> str:
        session = sessions(on_break="refuse").open(
            Rollout(7, Prompt(7, tuple(b"Q"), "Q"), 0).response(text=True)
        )
        turn: Any = {"role": "assistant", "content": "x"}
        messages: list[Any] = [user("q"), turn, *new]
        session.said(messages[:1], (), turn, tuple(b"q"), tuple(b"x"))
        with raises(EngineError, "template-breaks") as caught:
            session.prompt(messages)
        return str(caught.value)

    assert "the chat template" in told(user("rewrite"))
    assert "no turn of the policy" in told({"role": "assistant", "content": "rewrite"})


def test_the_port_is_closed_with_the_run() -> None:
    from stretto.serving.programs import ProgramServer

    over = sessions()
    server = ProgramServer(over, TOKENIZER, "own")
    asyncio.run(server.start())
    server.close()
    host, port = over.base_url.removeprefix("http://").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5.0)


def test_a_released_episode_ends_its_program_and_its_session() -> None:
    ended: list[str] = []

    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        try:
            await ask(client_of(base_url, api_key), [user("q")])
        except openai.BadRequestError as error:
            ended.append(error.code)
            raise
        finally:
            ended.append("ended")
        return 1.0

    async def one() -> None:
        async with serving(run) as (role, _):
            prompt = Prompt(5, tuple(b"Q"), "Q")
            rollout = Rollout(-5, prompt, 0)  # of an evaluation
            opening = await role.open(rollout.response(text=True))
            assert (opening.rollout_id, opening.number) == (-5, 0)
            await role.release([-5 - 3 * FORKS])
            await role.release([-5])
            assert ended[-1] == "ended"
            with raises(EpisodeLostError, "program-lost"):
                await role.open(rollout.response(text=True), [opening])

    asyncio.run(asyncio.wait_for(one(), 60))


def test_rewards_are_numbers_or_have_a_name() -> None:
    assert reward_of(1) == (1.0, {})
    assert reward_of(True) == (1.0, {})
    assert reward_of({"reward": 0.5, "steps": 3}) == (0.5, {"steps": 3})
    assert reward_of({"a": 0.5, "b": 0.25}, ["a", "b", "c"]) == (0.75, {})
    huge: tuple[Any, ...] = (float("inf"), 1e39, 10**400, 10**5000, {"b": 10**400})
    for wrong in (None, "1", {}, {"a": 1.0}, {"reward": None}, {"b": None}, {"b": "1"}, *huge):
        with raises(RewardError, "program-result", "return a finite number"):
            reward_of(wrong, ["b"])


def in_a_process(name: str, answer: str, episodes: int = 1, **settings: Any) -> list[Played]:
    """Play episodes of a program of the module in a process of its own; turns come once all ask."""
    from stretto.serving.programs import ProgramServer

    config = EnvironmentConfig(**settings)
    source = f"{Path(__file__).parent / 'programs_under_test.py'}:{name}"
    opening = {"sources": {name: locate_source(source)}, "settings": settings_of(config)}
    place = EnvironmentProcess(opening)

    async def all_of_them() -> list[Played]:
        over, asking = sessions(), [0]
        server = ProgramServer(over, TOKENIZER, "own")
        role = ProgramEnvironment(PlacedPrograms([place]), over, server.start, config)

        async def together() -> None:
            asking[0] += 1
            while asking[0] < episodes:
                await asyncio.sleep(0.01)

        try:
            return await asyncio.gather(
                *(played(role, ["hello"], i, together, answer) for i in range(episodes))
            )
        finally:
            await server.stop()

    try:
        place.start()
        assert place.ready["kind"] == "program"
        return asyncio.run(asyncio.wait_for(all_of_them(), 60))
    finally:
        place.close()


def test_programs_run_in_processes_of_their_own() -> None:
    (found,) = in_a_process("run", "return")
    assert (found.end.reward, found.end.record) == (1.5, {"extra": {"said": "hello"}})
    several = in_a_process("Blocking", "return", 3, parallel=1)  # none waits for another
    assert [one.end.reward for one in several] == [1.0] * 3


def test_errors_in_a_process_are_told_and_its_loss_begins_the_episode_anew() -> None:
    (found,) = in_a_process("run", "raise")
    failure = found.end.record["failure"]
    assert "LookupError: no such page" in failure
    assert "programs_under_test.py, line 17" in failure
    (found,) = in_a_process("run", "refused")
    assert "more answers" in found.end.record["failure"]
    assert "programs_under_test.py, line 23" in found.end.record["failure"]
    with raises(EpisodeLostError, "program-lost"):
        in_a_process("run", "die")


def test_the_program_of_the_page() -> None:
    (code,) = blocks("episodes-programs", "python")
    names: dict[str, Any] = {}
    exec(compile(code, "documentation", "exec"), names)

    async def run(data: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        row = {"messages": [user(data["prompt"])], "answer": data["answer"]}
        return await names["run"](row, base_url=base_url, api_key=api_key)

    right, wrong = episodes(run, ["It is 42."], ["I do not know."])
    assert (right.end.reward, wrong.end.reward) == (1.0, 0.0)


def test_programs_are_told_from_tools_and_environments() -> None:
    def run(data: Any, **extra: Any) -> None: ...

    def tool(base: str) -> None: ...

    class Steps:
        def run(self) -> None: ...

        def step(self, action: str) -> None: ...

    class Program:
        def run(self, data: Any, base_url: str, api_key: str) -> None: ...

    assert [is_program(x) for x in (run, Program, tool, Steps, 5)] == [
        True,
        True,
        False,
        False,
        False,
    ]
