"""Checkpoints: the whole state of a run between two steps, as plain data and tensors.

::

    checkpoints/step-000020/
    ├── state.pt         the state, as torch.save writes it
    └── manifest.json    the length and the SHA-256 of each other file

A checkpoint appears under its name once all of it is on disk, and is read only if it is as it was
written. The two newest are kept: the older one is read if the newest is damaged.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch

from stretto import files
from stretto.errors import StateError

KEPT = 2
"""Checkpoints of a run that stay; older ones go."""

_FORMAT = 2
_NAME = re.compile(r"step-(\d+)")
_STATE, _MANIFEST = "state.pt", "manifest.json"


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write ``<folder>/step-<N>``, and remove what it makes superfluous once it is on disk.

    Superfluous are all but the :data:`KEPT` newest, and those of later steps: the run was resumed
    before them. A run that is killed in between leaves the older ones as they were.

    Raises:
        StorageError: the checkpoint cannot be written; nothing is left of it.
    """
    target = folder / f"step-{step:06d}"
    with files.explained(target), files.new_folder(target) as scratch:
        with (scratch / _STATE).open("wb") as stream:
            written = _Digesting(stream)
            _save(state, written)
        manifest = {"format": _FORMAT, "step": step, "files": {_STATE: written.described()}}
        (scratch / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    found = _found(folder)
    kept = sorted(n for n in found if n <= step)[-KEPT:]
    for number, path in found.items():
        if number not in kept:
            shutil.rmtree(path, ignore_errors=True)
    return target


def load_latest(folder: Path, note: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
    """Load the newest checkpoint that is whole: its step and its state.

    A checkpoint is only tensors and plain data; loading it runs no code of its own.

    Args:
        folder: of all checkpoints of a run.
        note: called with a line for each checkpoint that is damaged and passed over.

    Raises:
        StateError: there is none, or none that is whole.
    """
    found = _found(folder)
    if not found:
        raise StateError(
            f"'{folder}' holds no checkpoint to resume from; runs write them with "
            "--observe.checkpoint-every N"
        )
    damages = []
    for step in sorted(found, reverse=True):
        try:
            state = _load(found[step])
        except _DamagedError as damage:
            damages.append(f"'{found[step]}' cannot be used: {damage}")
            continue
        for line in damages:
            note(f"{line}; going on from step {step}, before it")
        return step, state
    raise StateError(f"{'; '.join(damages)}. There is no other checkpoint: start the run anew")


class _DamagedError(Exception):
    """A checkpoint is not what was written."""


class _Digesting:
    """A file that is written to, and hashed on the way.

    Attributes:
        error: the system's error, which torch hides behind one of its own.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self.error: OSError | None = None
        self._stream, self._digest, self._bytes = stream, hashlib.sha256(), 0

    def write(self, data: memoryview) -> int:
        try:
            self._stream.write(data)
        except OSError as error:
            self.error = error
            raise
        self._digest.update(data)
        self._bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self._stream.flush()

    def described(self) -> dict[str, Any]:
        """Return the file's length and SHA-256, for the manifest."""
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def _save(state: dict[str, Any], written: _Digesting) -> None:
    try:
        torch.save(state, written)  # type: ignore[arg-type]  # it needs no more of a file
    except RuntimeError as error:
        raise written.error or error from error


def _found(folder: Path) -> dict[int, Path]:
    """Return the checkpoints by step, without one that is still being written."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return {int(m[1]): path for path in paths if (m := _NAME.fullmatch(path.name))}


def _load(checkpoint: Path) -> dict[str, Any]:
    _verify(checkpoint)
    try:
        state: dict[str, Any] = torch.load(
            checkpoint / _STATE, weights_only=True, map_location="cpu"
        )
    except UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise _DamagedError(
            f"{_STATE} holds other things than tensors and plain data: {reason}"
        ) from error
    return state


def _verify(checkpoint: Path) -> None:
    """Check that all files are those that were written."""
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_bytes())
        described = {n: (int(f["bytes"]), f["sha256"]) for n, f in manifest["files"].items()}
        written_for, _ = manifest["format"], described[_STATE]
    except FileNotFoundError:
        raise _DamagedError(
            f"it has no {_MANIFEST} (versions of Stretto before there was one wrote none)"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _DamagedError(f"{_MANIFEST} cannot be read: {error!r}") from error
    if written_for != _FORMAT:
        raise _DamagedError(
            f"{_MANIFEST} has the format {written_for!r}, and this version knows {_FORMAT}"
        )
    for name, (size, digest) in described.items():
        _check_file(checkpoint / name, size, digest)


def _check_file(file: Path, size: int, digest: str) -> None:
    try:
        has = file.stat().st_size
        if has != size:
            raise _DamagedError(f"{file.name} has {has} bytes of the {size} that were written")
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise _DamagedError(f"{file.name} cannot be read: {error.strerror}") from error
    if found != digest:
        raise _DamagedError(f"{file.name} is not what was written: its SHA-256 differs")
