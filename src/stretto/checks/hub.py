"""Whether the hub can be reached, for what would have to be fetched from it."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

from stretto.errors import ModelError, TaskError, require

PATIENCE_S = 4.0
"""Seconds in which the hub must answer; its library would try again for half a minute."""


def check_model(name: str) -> None:
    """Refuse a model that is not on this machine, where the hub does not answer."""
    if reason := unreachable():
        raise ModelError(
            f"the model '{name}' is not on this machine, and the hub cannot be asked for it: "
            f"{reason}. Check the name and the network (a gated model needs HF_TOKEN), or download "
            "it elsewhere and give the folder with --model.name",
            "hub-unreachable",
        )


def check_dataset(name: str, *, ask: bool = True) -> None:
    """Refuse a dataset of the hub that is not on this machine, where the hub's library is missing
    or, unless ``ask`` is false, the hub does not answer.
    """
    require("datasets", "hub", f"'{name}', a dataset of the hub,")
    owner_and_name = name.partition(":")[0]
    if ask and not _dataset_is_cached(owner_and_name) and (reason := unreachable()):
        raise TaskError(
            f"the dataset '{name}' is not on this machine, and the hub cannot be asked for it: "
            f"{reason}. Give a local file (.jsonl, .json or .parquet), or download it where there "
            "is a network",
            "hub-unreachable",
        )


def unreachable() -> str:
    """Return why the hub cannot be asked; empty where it answers."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    url = urlsplit(proxy or constants.ENDPOINT)
    host, port = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    said = [f"{host} does not answer within {PATIENCE_S:g} s"]

    def knock() -> None:
        try:
            socket.create_connection((host, port), timeout=PATIENCE_S).close()
            said[0] = ""
        except OSError as error:
            said[0] = f"{host}: {error.strerror or error}"

    # Looking a name up has no time limit of its own.
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return said[0]


def _dataset_is_cached(name: str) -> bool:
    from huggingface_hub import constants

    made = Path(os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets"))
    fetched = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    return (made / name.replace("/", "___").lower()).is_dir() or fetched.is_dir()
