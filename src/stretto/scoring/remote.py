"""Reward servers behind a URL, by the protocol of OpenRLHF's remote reward models.

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
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from httpx2 import Client, HTTPError, InvalidURL, Limits, Timeout
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_exponential, wait_random

from stretto.bounds import ceil_div
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
"""Environment variable with the bearer token for servers, if any."""
IN_FLIGHT = 8
"""Concurrent requests to a server. A batch is cut into as many."""
ATTEMPTS = 4
"""Most requests for the same samples."""
BACKOFF = wait_exponential(multiplier=0.5) + wait_random(0, 0.5)
"""Seconds between attempts. Partly random, so that a batch's requests do not coincide again."""
LONGEST_WAIT_S = 30.0
"""Most seconds to wait for a server's Retry-After."""
BUSY = (429, 502, 503, 504)
"""HTTP statuses that may be temporary."""


class _RefusedError(RewardError):
    """The server answered, and refuses to score these samples."""


class _BusyError(RewardError):
    """The server did not answer. It may do so after ``wait_s``."""

    wait_s = 0.0


def check_url(url: str) -> None:
    """Raise ConfigError for a URL without host, for unencrypted texts to another machine, and for
    secret parts, because records and messages contain the URL.
    """
    place = urlsplit(url)
    if "@" in place.netloc or place.query or place.fragment:
        address = f"{place.scheme}://{place.netloc.rpartition('@')[2]}{place.path}"
        raise ConfigError(
            f"reward.sources: '{address}' must be all of the URL, without user, password, query or "
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
    """Make a reward function of a server. Loopback addresses bypass proxies."""
    try:
        client = Client(
            trust_env=not is_loopback(urlsplit(url).hostname),  # for proxies
            timeout=Timeout(None, connect=10.0),  # the server may take long to score
            limits=Limits(keepalive_expiry=60.0),
        )
    except (ImportError, ValueError, InvalidURL) as error:
        problem = f"reward.sources: the proxy for '{url}' cannot be used: {error}"
        raise ConfigError(problem, "reward-url") from error
    judge = partial(_judge, client, url)

    def run(samples: Sequence[Sample], send: Send) -> None:
        size = ceil_div(len(samples), IN_FLIGHT) or 1
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            verdicts = (verdict for part in threads.map(judge, parts) for verdict in part)
            for at, verdict in enumerate(verdicts):
                send({"at": at, **verdict})

    return RewardFunction(run, columns=("label",))


def _judge(client: Client, url: str, samples: Sequence[Sample]) -> list[Verdict]:
    try:
        log = Log(len(samples))
        rewards = listed(log.scores(_post(client, url, samples)), len(samples))
    except _RefusedError as error:
        if len(samples) > 1:
            return [verdict for sample in samples for verdict in _judge(client, url, [sample])]
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


def _post(client: Client, url: str, samples: Sequence[Sample]) -> Any:
    """Return the server's answer. Raises RewardError if there is none, or it is not JSON."""
    body = {
        "query": [s["prompt"] + s["response"] for s in samples],
        "prompts": [s["prompt"] for s in samples],
        "labels": [s["data"].get("label") for s in samples],
    }
    headers = {"Content-Type": "application/json"}
    if token := os.environ.get(TOKEN):
        headers["Authorization"] = f"Bearer {token}"
    attempts = Retrying(
        stop=stop_after_attempt(ATTEMPTS),
        wait=_wait,
        retry=retry_if_exception_type(_BusyError),
        reraise=True,
    )
    try:
        return attempts(_ask, client, url, json.dumps(body), headers)
    except _BusyError as error:
        problem = f"'{url}' was asked {ATTEMPTS} times, without success: {error}"
        raise RewardError(problem) from error


def _ask(client: Client, url: str, body: str, headers: dict[str, str]) -> Any:
    """Send one request. Redirects are refused, so that texts go only where the user said."""
    try:
        answer = client.post(url, content=body, headers=headers)
    except (HTTPError, InvalidURL) as error:
        raise _BusyError(str(error)) from error
    if not answer.is_success:
        text = answer.content[:500].decode(errors="replace")
        trouble = f"status {answer.status_code}: {text}"
        if answer.status_code not in BUSY:
            raise _RefusedError(f"'{url}' answered with {trouble}")
        busy = _BusyError(trouble)
        busy.wait_s = _retry_after_s(answer.headers.get("Retry-After", ""))
        raise busy
    try:
        return parse(answer.content)
    except ValueError as error:
        raise RewardError(f"'{url}' did not answer with JSON: {error}") from error


def _wait(state: RetryCallState) -> float:
    error = state.outcome and state.outcome.exception()
    return max(BACKOFF(state), error.wait_s if isinstance(error, _BusyError) else 0.0)


def _retry_after_s(header: str) -> float:
    """Return the seconds of a Retry-After header, which is a number or a date."""
    try:
        if header.isdecimal():
            return min(float(header), LONGEST_WAIT_S)
        return min(parsedate_to_datetime(header).timestamp() - time.time(), LONGEST_WAIT_S)
    except ValueError:
        return 0.0
