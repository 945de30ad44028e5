"""Reward servers: functions behind a URL, by the protocol of OpenRLHF's remote reward models.

A request has lists of texts, and the answer has one number for each of them::

    {"query": prompts and responses, "prompts": prompts, "labels": column 'label', or nulls}
    {"rewards": numbers, "extra_logs": {name: numbers, or one number}}
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from stretto.errors import ConfigError, RewardError
from stretto.machine import is_loopback
from stretto.plain import parse
from stretto.scoring.conventions import (
    Log,
    RewardFunction,
    Sample,
    Send,
    Verdict,
    as_number,
    listed,
)

TOKEN = "STRETTO_REWARD_TOKEN"
"""Environment variable whose value, if any, servers get as a bearer token."""
IN_FLIGHT = 8
"""Requests to a server at a time; a batch is cut into as many."""
WAITS_S = (0.5, 1.0, 2.0)
"""Seconds to wait before each further attempt at a request."""
BUSY = (429, 502, 503, 504)
"""Statuses of a server, or of what is before it, that may be over in a moment."""


class _RefusedError(RewardError):
    """The server has answered, and will not score these samples."""


class _NoRedirect(HTTPRedirectHandler):
    """Takes an answer that points elsewhere for an error: texts go where the user said."""

    def redirect_request(self, *_: Any) -> None:
        return None


def check_url(url: str) -> None:
    """Raise ConfigError for a URL without a host, to which texts would travel in the clear, or with
    parts that may be secret: records and messages name sources by their URLs.
    """
    place = urlsplit(url)
    if "@" in place.netloc or place.query or place.fragment:
        shown = f"{place.scheme}://{place.netloc.rpartition('@')[2]}{place.path}"
        raise ConfigError(
            f"reward.sources: '{shown}' must be all of the URL, without user, password, query or "
            f"fragment, as records name sources by it. {TOKEN} in the environment is sent as a "
            "bearer token",
            "reward-url",
        )
    if not place.hostname:
        raise ConfigError(f"reward.sources: '{url}' names no host", "reward-url")
    if url.startswith("http:") and not is_loopback(place.hostname):
        raise ConfigError(
            f"reward.sources: '{url}' would send prompts and responses to another machine in the "
            "clear. Use https://, or a tunnel: ssh -N -L PORT:127.0.0.1:PORT HOST, and "
            "http://127.0.0.1:PORT/...",
            "reward-url",
        )


def open_server(url: str) -> RewardFunction:
    """Make a reward function of a server. Proxies of the environment are not used for loopback."""
    # ProxyHandler({}) is without proxies, ProxyHandler() with those of the environment.
    proxies = ProxyHandler({}) if is_loopback(urlsplit(url).hostname) else ProxyHandler()
    judge = partial(_judge, build_opener(proxies, _NoRedirect), url)

    def run(samples: Sequence[Sample], send: Send) -> None:
        size = -(-len(samples) // IN_FLIGHT) or 1
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            verdicts = (verdict for part in threads.map(judge, parts) for verdict in part)
            for at, verdict in enumerate(verdicts):
                send({"at": at, **verdict})

    return RewardFunction(run, columns=("label",))


def _judge(opener: OpenerDirector, url: str, samples: Sequence[Sample]) -> list[Verdict]:
    try:
        log = Log(len(samples))
        rewards = listed(log.scores(_post(opener, url, samples)), len(samples))
    except _RefusedError as error:
        if len(samples) > 1:
            return [verdict for sample in samples for verdict in _judge(opener, url, [sample])]
        return [{"error": str(error)}]
    except RewardError as error:
        return [{"error": str(error)}] * len(samples)
    return list(_verdicts(rewards, log))


def _verdicts(rewards: Sequence[Any], log: Log) -> Iterator[Verdict]:
    for at, reward in enumerate(rewards):
        try:
            yield log.beside(at, {"value": as_number(reward)})
        except RewardError as error:
            yield {"error": str(error)}


def _post(opener: OpenerDirector, url: str, samples: Sequence[Sample]) -> Any:
    """Return the server's answer; raises RewardError where none comes, or none that is JSON."""
    body = {
        "query": [s["prompt"] + s["response"] for s in samples],
        "prompts": [s["prompt"] for s in samples],
        "labels": [s["data"].get("label") for s in samples],
    }
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get(TOKEN):
        headers["Authorization"] = f"Bearer {token}"
    request = Request(url, json.dumps(body).encode(), headers)
    for wait_s in (*WAITS_S, None):
        try:
            with opener.open(request) as answer:
                return parse(answer.read())
        except ValueError as error:
            raise RewardError(f"'{url}' did not answer with JSON: {error}") from error
        except HTTPError as error:
            trouble = f"status {error.code}: {error.read(500).decode(errors='replace')}"
            if error.code not in BUSY:
                raise _RefusedError(f"'{url}' answered with {trouble}") from error
        except (OSError, HTTPException) as error:
            trouble = str(error)
        if wait_s is not None:
            time.sleep(wait_s)
    raise RewardError(f"'{url}' was asked {len(WAITS_S) + 1} times, without success: {trouble}")
