"""Variables that go along to ranks, which of their values are said, and the GPU that ranks use."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raising import raises
from stretto.errors import ConfigError
from stretto.workers.rank import GroupSpec, Rank
from stretto.workers.ray_cluster import (
    ActorProcesses,
    Bundle,
    RankActor,
    RayCluster,
    _connect,
    described,
    forwarded,
    split,
)


def test_only_listed_variables_are_forwarded() -> None:
    environment = {
        "WANDB_API_KEY": "k",
        "NCCL_DEBUG": "INFO",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "CUDA_LAUNCH_BLOCKING": "1",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "PATH": "/bin",
        "MASTER_ADDR": "10.0.0.1",
        "MY_A": "1",
        "MY_B": "2",
        "OTHER": "3",
    }
    usual = ["CUDA_LAUNCH_BLOCKING", "NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "WANDB_API_KEY"]
    assert list(forwarded(environment)) == usual
    more = forwarded(environment, ["MY_*", "OTHER", "CUDA_VISIBLE*"])
    assert set(more) == {*usual, "MY_A", "MY_B", "OTHER"}
    assert more["NCCL_DEBUG"] == "INFO"
    with raises(ConfigError, "cannot-be-forwarded", "CUDA_VISIBLE_DEVICES"):
        forwarded(environment, ["CUDA_VISIBLE_DEVICES"])


def test_secrets_are_named_and_not_shown() -> None:
    variables = {
        "HF_ENDPOINT": "https://me:hunter2@hub.example/",
        "HF_HOME": "/data",
        "HF_TOKEN": "hf_hunter2",
        "MY_HOST": "hunter2",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_API_KEY": "hunter2",
        "WANDB_API_KEY": "hunter2",
        "WANDB_KEYS": "hunter2",
    }
    assert described(variables) == (
        "environment of the ranks: HF_ENDPOINT, HF_HOME=/data, HF_TOKEN, MY_HOST, "
        "TOKENIZERS_PARALLELISM=false, VLLM_API_KEY, WANDB_API_KEY, WANDB_KEYS"
    )
    assert described({}) == "environment of the ranks: nothing"


def test_secrets_do_not_go_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows an actor's environment; a rank gets them over its connection, before it works."""
    given = {"HF_TOKEN": "hunter2", "HF_HOME": "/data", "WANDB_BASE_URL": "https://me:hunter2@w"}
    for name in os.environ:
        monkeypatch.delenv(name) if name.startswith(("HF_", "WANDB_")) else None
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    passed, threads, served = list[Any](), list[threading.Thread](), list[dict[str, str]]()

    class Serving:
        def __init__(self, spec: GroupSpec, rank: int, connection: Any) -> None:
            assert connection._key

        def serve(self) -> None:
            served.append({name: os.environ[name] for name in given})

    class FakeActor:
        """An actor in a thread of this process, which has not the variables."""

        def options(self, **options: Any) -> FakeActor:
            passed.append(options)
            return self

        def remote(self, *args: Any) -> Any:
            def run() -> None:
                RankActor().run(*args)

            if args:
                passed.append(args)
                threads.append(threading.Thread(target=run))
                threads[-1].start()
            return self

        @property
        def run(self) -> FakeActor:
            return self

    fake = SimpleNamespace(
        remote=lambda _: FakeActor(), wait=lambda *_, **__: ((), ()), is_initialized=lambda: False
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr("stretto.workers.rank.Rank", Serving)
    cluster = object.__new__(RayCluster)
    cluster.environment, cluster.secrets = split(forwarded(os.environ))
    cluster.say = lambda _: None
    cluster.alone, cluster.host, cluster.bundles = True, "127.0.0.1", (Bundle(),)
    monkeypatch.setattr(RayCluster, "scheduling", lambda *_: None)
    processes = ActorProcesses(GroupSpec(timeout_s=10.0), cluster)
    for name in cluster.secrets:
        monkeypatch.delenv(name)
    (connection,) = processes.connect(10.0)
    threads[0].join(10.0)
    assert served == [given]
    assert "hunter2" not in repr(passed)
    assert passed[0]["runtime_env"]["env_vars"]["HF_HOME"] == "/data"
    connection.close()


@pytest.mark.parametrize(("mode", "remarks"), [("token", 0), ("", 1)])
def test_a_cluster_without_authentication_is_remarked_on(
    mode: str, remarks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    fake = SimpleNamespace(is_initialized=lambda: False, init=lambda **_: None)
    monkeypatch.setitem(sys.modules, "ray", fake)
    said = list[str]()
    assert _connect("auto", None, None, said.append)
    assert len(said) == remarks


@pytest.mark.parametrize(("writable", "exists"), [(True, False), (False, True), (False, False)])
def test_a_cluster_of_ones_own_starts_without_a_home_to_write_to(
    writable: bool, exists: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray would write its token to ~/.ray, and fail."""
    monkeypatch.setenv("HOME", str(tmp_path))
    if exists:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("known")
    monkeypatch.setattr(os, "access", lambda *_: writable)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")  # and so it is gone again after the test
        monkeypatch.delenv(name)
    fake = SimpleNamespace(is_initialized=lambda: False, init=lambda **_: None)
    monkeypatch.setitem(sys.modules, "ray", fake)
    assert _connect("", 1, 0)
    assert ("RAY_AUTH_TOKEN" in os.environ) is (not writable and not exists)
    assert len(os.environ.get("RAY_AUTH_TOKEN", "0" * 64)) == 64


def test_a_call_aside_works_on_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a thread of its own, and threads begin at the first GPU."""
    used = list[tuple[str, str]]()
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda name: used.append((name, threading.current_thread().name))
    )
    monkeypatch.setattr("stretto.workers.rank.DriverConnection", lambda *_: None)
    for device in ("cpu", "cuda:3"):
        rank = Rank(GroupSpec(2, devices=["cpu", device]), 1, None)  # type: ignore[arg-type]
        rank.make(lambda index: SimpleNamespace(own=lambda: index), ())
        with ThreadPoolExecutor(1, thread_name_prefix="aside") as pool:
            assert pool.submit(rank.call, "own", ()).result() == 1
            assert pool.submit(rank.used_bytes).result()[""] > 0
    assert used == [("cuda:3", "aside_0")]
