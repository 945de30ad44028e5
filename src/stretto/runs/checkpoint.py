"""Checkpoints: the whole state of a run between two steps, as plain data and tensors.

::

    checkpoints/step-000020/
    ├── driver.pt        prompts, schedule, weights that generation works with (runtime/state.py)
    ├── inputs.json      fingerprints of rows and models as the run began (runs/inputs.py)
    ├── learner/         the models under training and their optimizers, a file of each process that
    │                    holds a part of them (training/shard_files.py)
    └── manifest.json    the length and the SHA-256 of each other file

Earlier versions wrote a file ``learner.pt`` in place of the folder, which is still read.

A checkpoint appears under its name once all of it is on disk, and is read only if it is as it was
written. While a run is under way the two newest are kept: the older one is read if the newest is
damaged. One is kept where the disk has no room for another, and at the end of the run.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from stretto import files
from stretto.errors import StateError
from stretto.observe.run_directory import KEPT
from stretto.runtime.state import DRIVER, LEARNER, Writer

INPUTS = "inputs.json"
"""The file with fingerprints, which earlier versions did not write."""

_FORMAT, _FORMER = 4, 3
_NAME = re.compile(r"step-(\d+)")
_MANIFEST = "manifest.json"


def save(folder: Path, step: int, parts: Mapping[str, Writer], keep: int = KEPT) -> Path:
    """Write ``<folder>/step-<N>``, and remove what it makes superfluous once it is on disk.

    Superfluous are all but the newest, and those of later steps: the run was resumed before them.
    What a killed run has left half-written goes first, and on a disk without room for another
    checkpoint, what is superfluous beside the newest one.

    Args:
        step: after which the state was taken.
        parts: what writes each file or folder, by its name.

    Raises:
        StorageError: the checkpoint cannot be written; nothing is left of it.
    """
    target = folder / f"step-{step:06d}"
    for left in folder.glob("step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    with files.explained(target):
        _make_room(folder, step)
    with files.explained(target), files.new_folder(target) as scratch:
        for name, write in parts.items():
            write(scratch / name)
        paths = sorted(path for path in scratch.rglob("*") if path.is_file())
        described = {path.relative_to(scratch).as_posix(): _described(path) for path in paths}
        manifest = {"format": _FORMAT, "step": step, "files": described}
        (scratch / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in _superfluous(folder, step, keep):
        shutil.rmtree(path, ignore_errors=True)
    return target


def _make_room(folder: Path, step: int) -> None:
    """Remove all checkpoints but the newest, where another one fits then and not before."""
    old = _found(folder)
    before = [number for number in old if number <= step]
    if not before:
        return
    needed = (1 + files.SPARE) * files.size_of(old[max(before)])  # they are all about as large
    free, superfluous = files.free(folder), _superfluous(folder, step, 1)
    if free < needed <= free + sum(map(files.size_of, superfluous)):
        for path in superfluous:
            shutil.rmtree(path, ignore_errors=True)


def _superfluous(folder: Path, step: int, keep: int) -> list[Path]:
    found = _found(folder)
    kept = sorted(number for number in found if number <= step)[-keep:]
    return [path for number, path in found.items() if number not in kept]


def load_latest(folder: Path, note: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
    """Load the newest checkpoint that is whole.

    A checkpoint is only tensors and plain data; loading it runs no code of its own.

    Args:
        note: called with a line for each checkpoint that is damaged and passed over.

    Returns:
        Its step; and by their names what is in ``driver.pt``, the path of the learner's state, and
        what is in ``inputs.json``.

    Raises:
        StateError: there is none, or none that is whole.
    """
    found = _found(folder)
    if not found:
        raise StateError(
            f"'{folder}' holds no checkpoint to resume from; a run writes one after its first "
            "minute, every observe.checkpoint_minutes (10, unless set otherwise) and at its end, "
            "or every observe.checkpoint_every steps. Start the run anew"
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


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint, whole or damaged; 0 where there is none."""
    return max(_found(folder), default=0)


class _DamagedError(Exception):
    """A checkpoint is not what was written."""


def _described(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _found(folder: Path) -> dict[int, Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return {int(m[1]): path for path in paths if (m := _NAME.fullmatch(path.name))}


def _load(checkpoint: Path) -> dict[str, Any]:
    former = _verified(checkpoint) == _FORMER
    learner = checkpoint / (f"{LEARNER}.pt" if former else LEARNER)
    file = checkpoint / INPUTS
    inputs = json.loads(file.read_bytes()) if file.is_file() else {}
    return {DRIVER: _load_file(checkpoint / DRIVER), LEARNER: learner, INPUTS: inputs}


def _load_file(file: Path) -> Any:
    try:
        return torch.load(file, weights_only=True, map_location="cpu")
    except UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise _DamagedError(
            f"{file.name} holds other things than tensors and plain data: {reason}"
        ) from error


def _verified(checkpoint: Path) -> int:
    """Check that all files are those that were written; return the format."""
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_bytes())
        described = {n: (int(f["bytes"]), f["sha256"]) for n, f in manifest["files"].items()}
        written_for = int(manifest["format"])
    except FileNotFoundError:
        raise _DamagedError(
            f"it has no {_MANIFEST} (versions of Stretto before there was one wrote none)"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _DamagedError(f"{_MANIFEST} cannot be read: {error!r}") from error
    if written_for not in (_FORMAT, _FORMER):
        raise _DamagedError(
            f"{_MANIFEST} has the format {written_for}, and this version knows {_FORMAT} and "
            f"{_FORMER}"
        )
    for name, (size, digest) in described.items():
        _check_file(checkpoint / name, size, digest)
    return written_for


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
