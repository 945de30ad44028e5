"""Variables that go along to ranks, which of their values are said, and the GPU that ranks use."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from raising import raises
from stretto.errors import ConfigError
from stretto.workers.rank import Rank, RankSpec
from stretto.workers.ray_cluster import described, forwarded


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


def test_a_call_aside_works_on_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a thread of its own, and threads begin at the first GPU."""
    used = list[tuple[str, str]]()
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda name: used.append((name, threading.current_thread().name))
    )
    monkeypatch.setattr("stretto.workers.rank.DriverConnection", lambda *_: None)
    for device in ("cpu", "cuda:3"):
        rank = Rank(RankSpec(1, 2, device=device), None)  # type: ignore[arg-type]
        rank.make(lambda index: SimpleNamespace(own=lambda: index), ())
        with ThreadPoolExecutor(1, thread_name_prefix="aside") as pool:
            assert pool.submit(rank.aside, "own", ()).result() == 1
            assert pool.submit(rank.aside, "used_bytes", ()).result()[""] > 0
    assert used == [("cuda:3", "aside_0")]
