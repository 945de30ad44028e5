"""A hub that does not answer is not waited for, whoever asks it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from raising import raises
from stretto import hub
from stretto.checks import preflight
from stretto.errors import ModelError, TaskError
from stretto.models.info import load_config
from stretto.models.load import load_tokenizer
from stretto.models.resolve import resolve
from stretto.saying import silent


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that takes connections and never answers."""
    from huggingface_hub import constants

    monkeypatch.setattr(hub, "PATIENCE_S", 0.05)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub._probe.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        yield url
    hub._probe.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_config_that_could_not_be_fetched_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([OSError("no route"), None, AssertionError("it was fetched")])

    def download(*_: str) -> None:
        if error := next(answers):
            raise error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(hub, "unreachable", lambda: "")
    reasons = [hub.fetch_config("owner/asked-twice") for _ in range(3)]
    assert ["no route" in reason for reason in reasons] == [True, False, False]
    assert reasons[1:] == ["", ""]


def test_a_hub_that_is_silent_or_refuses_is_asked_once(
    silent_hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    timeouts = []
    head = httpx2.head

    def count(url: str, timeout: float) -> httpx2.Response:
        timeouts.append(timeout)
        return head(url, timeout=timeout)

    monkeypatch.setattr(httpx2, "head", count)
    for _ in range(3):
        assert hub.unreachable() == "127.0.0.1 does not answer within 0.05 s"
    assert timeouts == [0.05]
    monkeypatch.setattr(hub, "PATIENCE_S", 4.0)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "refused" in hub.unreachable()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.unreachable() == "HF_HUB_OFFLINE is set"


def test_all_loads_from_the_hub_are_refused_at_once(silent_hub: str, cache: Path) -> None:
    with raises(TaskError, "hub-unreachable", "'owner/rows:default'"):
        preflight.check_dataset("owner/rows:default")
    path = resolve("owner/nowhere", silent)
    with raises(ModelError, "hub-unreachable", "'owner/nowhere'", "HF_TOKEN"):
        load_config(path, False)
    with raises(ModelError, "hub-unreachable", "'owner/nowhere'"):
        load_tokenizer(path, False)


def test_a_cached_repository_is_loaded_without_asking(silent_hub: str, cache: Path) -> None:
    from huggingface_hub import constants

    (cache / "models--owner--tiny").mkdir()
    assert hub.is_cached("models", "owner/tiny")
    with hub.loading():
        assert constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
