"""Checks that the Hugging Face hub answers, to avoid its library's long retries.

For each file of a model the library asks up to six times, even if the file is cached. Without an
answer that takes minutes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from stretto.errors import StrettoError, first_line

PATIENCE_S = 4.0  # time limit of the hub's answer, in seconds


def is_cached(kind: str, name: str) -> bool:
    """Return whether files of a repository were fetched. ``kind`` is "models" or "datasets"."""
    from huggingface_hub import constants

    return (Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}").is_dir()


def unreachable() -> str:
    """Return the reason why the hub cannot be asked, empty if it answers."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    return _probe(constants.ENDPOINT, int(time.monotonic() // 60))


def require(what: str, error: type[StrettoError], remedy: str) -> None:
    """Raise ``error`` if the hub cannot be asked for something that is not on this machine."""
    if reason := unreachable():
        _probe.cache_clear()
        message = f"{what} is not on this machine, and the hub cannot be asked for it: {reason}"
        raise error(f"{message}. {remedy}", "hub-unreachable")


@contextmanager
def loading() -> Iterator[None]:
    """Load from the hub, or if it does not answer from its cache."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or bool(unreachable())
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@lru_cache(maxsize=1)
def _probe(url: str, minute: int) -> str:
    """Request the hub's first page. The result holds for a minute, because runs load many files."""
    import httpx2

    return _failure(lambda: httpx2.head(url, timeout=PATIENCE_S), httpx2.URL(url).host, PATIENCE_S)


_fetched: set[str] = set()


def fetch_config(name: str) -> str:
    """Fetch the config.json of a hub model. Return the reason if that fails, otherwise ""."""
    from huggingface_hub import constants, hf_hub_download

    if name in _fetched:
        return ""
    start = time.monotonic()
    if reason := unreachable():
        return reason
    patience_s = PATIENCE_S + 1 - (time.monotonic() - start)
    reason = _failure(lambda: hf_hub_download(name, "config.json"), constants.ENDPOINT, patience_s)
    if not reason:
        _fetched.add(name)
    return reason


def _failure(call: Callable[[], object], host: str, patience_s: float) -> str:
    """Return the reason if a call fails or takes too long, empty if it succeeds."""
    from huggingface_hub.errors import RepositoryNotFoundError

    reasons = [f"{host} does not answer within {patience_s:.3g} s"]

    def run() -> None:
        try:
            call()
            reasons[0] = ""
        except RepositoryNotFoundError:
            reasons[0] = "the hub has no such model, or HF_TOKEN has no access to it"
        except TimeoutError:
            pass
        except Exception as error:  # each HTTP library has its own errors
            reasons[0] = f"{host}: {getattr(error, 'strerror', None) or first_line(error)}"

    # Name resolution has no time limit of its own.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience_s)
    return reasons[0]
