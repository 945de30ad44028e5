"""What a model is, told by its files, without reading all of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from stretto.errors import ModelError
from stretto.models.load import load_config
from stretto.models.resolve import resolve
from stretto.saying import Say

WHOLE = 64 << 20
"""Bytes of a file that is read whole."""

HEAD, BLOCKS, BLOCK = 1 << 20, 64, 16 << 10
"""Bytes that are read at the beginning of a longer file; number and size of blocks that are read
of the rest, spread evenly."""

_CONFIG, _WEIGHTS = "config.json", "*.safetensors"


def identity(name: str, trust_remote_code: bool, say: Say) -> Mapping[str, str]:
    """Tell what a model is: fingerprints of its config and its weights, by the names of the files.

    Files of up to :data:`WHOLE` bytes are read whole. Of longer ones, as many as gigabytes, come
    the size, the beginning (where safetensors has names, types and shapes) and blocks spread over
    the rest: a step of training, another model or another type are seen, as they change all of it;
    a few numbers that are edited between two blocks are not. A model of the hub is known by its
    commit.

    Args:
        name: as settings name it; see :func:`~stretto.models.resolve.resolve`.

    Raises:
        ModelError: it is not there, or cannot be read.
    """
    path = resolve(name, say)
    if isinstance(path, str):
        return {"commit": str(load_config(path, trust_remote_code)._commit_hash)}
    try:
        files = {file.name: _digest(file) for file in sorted(path.glob(_WEIGHTS))}
        return {_CONFIG: _config_digest(path / _CONFIG), **files}
    except (OSError, ValueError) as error:
        raise ModelError(f"the files of '{name}' cannot be read: {error}") from error


def _config_digest(file: Path) -> str:
    known = json.loads(file.read_bytes())
    known.pop("transformers_version", None)
    return _named(hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest())


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= WHOLE:
            return _named(hashlib.file_digest(stream, "sha256").hexdigest())
        digest = hashlib.sha256(str(size).encode())
        for start, length in _parts(size):
            digest.update(os.pread(stream.fileno(), length, start))
    return _named(digest.hexdigest())


def _parts(size: int) -> Iterator[tuple[int, int]]:
    yield 0, HEAD
    for i in range(1, BLOCKS + 1):
        yield HEAD + (size - HEAD) * i // BLOCKS - BLOCK, BLOCK


def _named(digest: str) -> str:
    return f"sha256:{digest[:16]}"
