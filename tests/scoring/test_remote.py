"""Scoring by a reward server over HTTP: what is sent, what is tried again, and what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, Lock, Thread
from typing import Any
from urllib.parse import urlsplit

import pytest
from tenacity import wait_none

from raising import raises
from scorer_helpers import byte_rollout, byte_tokenizer
from stretto.checks.user_functions import check
from stretto.config import TaskConfig
from stretto.config.sections import reward_source
from stretto.errors import ConfigError
from stretto.machine import is_loopback
from stretto.scoring import remote
from stretto.scoring.functions import FunctionScorer

Answer = Callable[[dict[str, Any]], tuple[int, Any]]
Serve = Callable[[Answer], str]

tokens: list[str | None] = []
"""What requests had for authorization."""
connections: set[Any] = set()
"""Addresses from which requests came, one for each connection."""


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Answer requests on loopback, each on a thread of its own; returns the server's URL."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                connections.add(self.client_address)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                tokens.append(self.headers["Authorization"])
                status, said = answer(json.loads(body))
                text = said if isinstance(said, str) else json.dumps(said)
                self.send_response(status)
                if status in (301, 307):
                    self.send_header("Location", said)
                if status == 429:
                    self.send_header("Retry-After", said)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/get_reward"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def lengths(request: dict[str, Any]) -> tuple[int, Any]:
    """OpenRLHF's answer: the lengths of the responses."""
    pairs = zip(request["query"], request["prompts"], strict=True)
    rewards = [len(query) - len(prompt) for query, prompt in pairs]
    logs = {"right": [label == "a" for label in request["labels"]], "asked": len(rewards)}
    return 200, {"rewards": rewards, "scores": rewards, "extra_logs": logs}


def samples(*responses: str) -> list[dict[str, Any]]:
    return [{"prompt": "q", "response": r, "data": {"label": r[:1]}} for r in responses]


def verdicts(url: str, *responses: str) -> list[dict[str, Any]]:
    sent: list[Any] = []
    assert remote.open_server(url).run(samples(*responses), sent.append) is None
    assert [verdict.pop("at") for verdict in sent] == list(range(len(responses)))
    return sent


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BACKOFF", wait_none())
    monkeypatch.setattr(remote, "ATTEMPTS", 3)


def test_a_scorer_asks_a_server(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nobody is there
    url = serve(lengths)
    source = reward_source(url)
    check(source, [])
    scorer = FunctionScorer(source, TaskConfig(), 0, byte_tokenizer(), columns=["label"])
    try:
        rollouts = [byte_rollout(i, "q", text) for i, text in enumerate(("xyz", ""))]
        for rollout, label in zip(rollouts, "ab", strict=True):
            rollout.prompt = replace(rollout.prompt, data={"label": label})
        scorer.admit([r.response(text=True) for r in rollouts])
        scores = scorer.finish([r.id for r in rollouts])
        assert [score.scalar for score in scores] == [3.0, 0.0]
        assert [score.extra for score in scores] == [
            {"asked": 1.0, "right": True},
            {"asked": 1.0, "right": False},
        ]
    finally:
        scorer.close()


def test_requests_are_in_flight_together(serve: Serve) -> None:
    together, sizes, lock = Barrier(remote.IN_FLIGHT, timeout=60), list[int](), Lock()

    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        with lock:
            sizes.append(len(request["query"]))
        together.wait()
        return lengths(request)

    responses = ["a" * n for n in range(2 * remote.IN_FLIGHT)]
    found = verdicts(serve(answer), *responses)
    assert [verdict["value"] for verdict in found] == list(map(len, responses))
    assert sizes == [2] * remote.IN_FLIGHT


def test_a_busy_server_is_asked_again(serve: Serve) -> None:
    asked = list[Any]()

    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        asked.append(request)
        return (503, "loading") if len(asked) < 3 else lengths(request)

    assert [verdict["value"] for verdict in verdicts(serve(answer), "abc")] == [3.0]
    assert len(asked) == 3
    busy = verdicts(serve(lambda _: (429, "later")), "abc")[0]["error"]
    assert "was asked 3 times" in busy
    assert "status 429: later" in busy


def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that are waited, as far as a test asks; nothing waits."""
    seconds = list[float]()
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("86400", remote.LONGEST_WAIT_S),
        ("9" * 400, remote.LONGEST_WAIT_S),
        ("Fri, 31 Dec 9999 23:59:59 GMT", remote.LONGEST_WAIT_S),
        ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0),
        *((header, 0.0) for header in ("soon", "-7", "nan", "inf", "1e3", "")),
    ],
)
def test_a_server_is_asked_again_when_it_says(
    header: str, seconds: float, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = naps(monkeypatch)
    assert "status 429" in verdicts(serve(lambda _: (429, header)), "abc")[0]["error"]
    assert [max(wait, 0.0) for wait in waited] == [seconds] * 2


def test_attempts_are_apart_by_doubling_and_random_waits(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    waited = naps(monkeypatch)
    found = verdicts(serve(lambda _: (503, "loading")), *["a"] * 4)
    assert all("was asked 4 times" in verdict["error"] for verdict in found)
    assert len(waited) == 12
    assert len(set(waited)) > 4
    for least, most in ((0.5, 1.0), (1.0, 1.5), (2.0, 2.5)):
        assert sum(least <= wait <= most for wait in waited) >= 4


def test_requests_of_later_batches_reuse_connections(serve: Serve) -> None:
    url = serve(lengths)
    connections.clear()
    function = remote.open_server(url)
    for _ in range(3):
        function.run(samples(*["ab"] * remote.IN_FLIGHT), lambda verdict: None)
    assert 1 <= len(connections) <= remote.IN_FLIGHT


def test_a_proxy_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "nonsense://127.0.0.1:1")
    with raises(ConfigError, "reward-url", "nonsense"):
        remote.open_server("https://rewards.example/")


def test_a_sample_that_the_server_cannot_score_costs_no_other(serve: Serve) -> None:
    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        return (500, "Traceback") if "qbad" in request["query"] else lengths(request)

    responses = ["a", "bad", *["cc"] * (2 * remote.IN_FLIGHT - 2)]
    first, bad, *others = verdicts(serve(answer), *responses)
    assert first["value"] == 1.0
    assert "answered with status 500: Traceback" in bad["error"]
    assert [verdict["value"] for verdict in others] == [2.0] * len(others)


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        ((200, "<html>"), "did not answer with JSON"),
        ((200, {"rewards": [1.0, 2.0]}), "2 scores for 1 samples"),
        ((200, {"score": 1.0}), "instead of a list of numbers"),
        ((200, {"rewards": [None]}), "it returned None where a number is needed"),
        ((200, {"rewards": ["1"]}), "it returned '1' where a number is needed"),
        ((307, "http://127.0.0.1:1/elsewhere"), "status 307"),
        ((301, "http://127.0.0.1:1/elsewhere"), "status 301"),
    ],
)
def test_an_answer_that_is_none(serve: Serve, answer: tuple[int, Any], fact: str) -> None:
    assert fact in verdicts(serve(lambda _: answer), "abc")[0]["error"]


def test_a_server_that_is_gone() -> None:
    url = "http://127.0.0.1:1/get_reward"
    found = verdicts(url, "a", "b")
    assert all("was asked 3 times, without success: " in verdict["error"] for verdict in found)
    with raises(ConfigError, "no-reward-server", url):
        check(reward_source(url), [])


@pytest.mark.parametrize(
    ("url", "fact"),
    [("http://10.0.0.5:5000/get_reward", "ssh -N -L"), ("http:///x", "no host")],
)
def test_urls_to_which_nothing_is_sent(url: str, fact: str) -> None:
    with raises(ConfigError, "reward-url", url, fact):
        check(reward_source(url), [])


@pytest.mark.parametrize(
    "url",
    [
        "https://me:secret@a.example/x",
        "https://a.example/x?key=secret",
        "http://a.example/x#secret",
    ],
)
def test_urls_with_secrets_are_refused_without_saying_them(url: str) -> None:
    with raises(ConfigError, "reward-url", "://a.example/x'", remote.TOKEN) as caught:
        check(reward_source(url), [])
    assert "secret" not in str(caught.value)


def test_a_token_of_the_environment_is_sent(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    url = serve(lengths)
    tokens.clear()
    assert verdicts(url) == []  # no samples, no request
    monkeypatch.delenv(remote.TOKEN, raising=False)
    verdicts(url, "a")
    monkeypatch.setenv(remote.TOKEN, "secret")
    verdicts(url, "a")
    assert tokens == [None, "Bearer secret"]


@pytest.mark.parametrize(
    "url",
    ["http://localhost:1/", "http://[::1]:1/", "http://127.0.0.2/", "https://rewards.example/"],
)
def test_urls_to_which_texts_may_go(url: str) -> None:
    remote.check_url(url)
    assert is_loopback(urlsplit(url).hostname) == ("example" not in url)
