"""Writes files and folders completely or not at all, also on a full disk, a kill or a power cut."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from stretto.errors import StorageError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of Linux's renameat2(2)
_BLOCK = 1 << 16

SPARE = 0.5
"""Disk space that large files must leave for records and the model, as a share of their size."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_REMEDIES = {
    **dict.fromkeys(_FULL, "make room there"),
    **dict.fromkeys(_READ_ONLY, "make it writable, or copy the folder to a place that is"),
}
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,  # for Infinity
    RecursionError,  # for lists nested thousands deep
)
"""Errors of reading a damaged JSON file, and of using content of unexpected types."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` into a StorageError of one line with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "see that the disk is there and can be written to")
        message = f"cannot write '{path}': {error.strerror or error}; {remedy}"
        raise StorageError(message, "cannot-write") from error


def require_writable(file: Path) -> None:
    """Raise StorageError for a file that cannot be written, before the work that fills it."""
    reason = "it is a directory" if file.is_dir() else ""
    if not file.parent.is_dir():
        reason = f"there is no directory '{file.parent}'"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = "permission denied"
    if reason:
        message = f"cannot write '{file}': {reason}; choose another file"
        raise StorageError(message, "cannot-write")


def existing(path: Path) -> Path:
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def free(path: Path) -> int:
    return shutil.disk_usage(existing(path)).free


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class FileSum(NamedTuple):
    """The length of a file, and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


def sum_of(file: Path) -> FileSum:
    with file.open("rb") as stream:
        return FileSum(file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


def leave_room(path: Path, size: int) -> None:
    """Raise OSError if ``size`` bytes at ``path`` would leave less room than :data:`SPARE`."""
    free_bytes = free(path)
    if free_bytes < (1 + SPARE) * size:
        raise OSError(
            errno.ENOSPC,
            f"{path.name} takes {size / 1e6:.1f} MB of the {free_bytes / 1e6:.1f} MB that are "
            "free, and would leave too little for records and the model",
        )


def write_whole(file: Path, content: bytes) -> None:
    """Write a file under its name once it is on disk. An existing one stays until then."""
    scratch = file.with_name(f"{file.name}.tmp")
    with explained(file):
        try:
            scratch.write_bytes(content)
            sync(scratch)
            scratch.replace(file)
            sync(file.parent)
        finally:
            scratch.unlink(missing_ok=True)


def link(file: Path, name: Path) -> None:
    """Give a file another name, on another disk a copy, unless that name exists."""
    if name.exists():
        return
    scratch = name.with_name(f"{name.name}.tmp")
    scratch.unlink(missing_ok=True)
    with explained(name):
        try:
            os.link(file, scratch)
        except OSError:  # another disk, or one without links
            shutil.copyfile(file, scratch)
        scratch.replace(name)


def append(file: Path, lines: bytes) -> bool:
    """Append complete lines to a file, all or none of them.

    Returns whether an incomplete last line, left by a crash, was dropped first. Raises StorageError
    if the lines cannot be written, and then restores the file.
    """
    with explained(file), file.open("ab+", buffering=0) as stream:
        descriptor = stream.fileno()
        size = os.fstat(descriptor).st_size
        complete_size = _end_of_lines(descriptor, size)
        if complete_size < size:
            os.ftruncate(descriptor, complete_size)
        try:
            write(descriptor, lines)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(descriptor, complete_size)
            raise
    return complete_size < size


def write(descriptor: int, content: bytes) -> None:
    """Write everything: on a nearly full disk one call may write only a part, without an error.

    Otherwise it is one call, so that Ctrl-C comes before or after it, never in between.
    """
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def whole_lines(content: bytes) -> list[bytes]:
    lines = content.splitlines(keepends=True)
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def last_line(file: Path) -> bytes:
    """Read the last complete line, with its end. Empty if there is none."""
    with file.open("rb", buffering=0) as stream:
        descriptor = stream.fileno()
        end = _end_of_lines(descriptor, os.fstat(descriptor).st_size)
        start = _end_of_lines(descriptor, end - 1) if end else 0
        return os.pread(descriptor, end - start, start)


def _end_of_lines(descriptor: int, size: int) -> int:
    end = size
    while end:
        start = max(end - _BLOCK, 0)
        at = os.pread(descriptor, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a scratch folder that replaces ``target`` once it is complete and on disk.

    An existing ``target`` stays until then, and is exchanged in one step if the system supports
    that. If the body fails, ``target`` stays and the scratch folder goes. OSError if refused.
    """
    target = target.resolve()
    scratch = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        yield scratch
        sync_tree(scratch)
        _put(scratch, target)
        sync(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def added_to(folder: Path) -> Iterator[Path]:
    """Yield a scratch folder whose files move to ``folder`` once all of them are on disk. Other
    files of ``folder`` stay. Raises OSError if the system refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
        scratch = Path(name) / "files"
        scratch.mkdir()
        yield scratch
        sync_tree(scratch)
        for path in sorted(scratch.rglob("*")):  # a folder comes before its content
            target = folder / path.relative_to(scratch)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            else:
                path.replace(target)
        sync(folder)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems do not support it for folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync a folder that mkdir created, and give its files the permissions of the umask."""
    rights = folder.stat().st_mode & 0o666  # safetensors makes files that only their owner can read
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_file() and mode | rights != mode:
            path.chmod(mode | rights)
        sync(path)


def _put(scratch: Path, target: Path) -> None:
    """Rename a folder. A replaced one is under the scratch name afterwards, or gone."""
    if not target.exists():
        scratch.rename(target)
        return
    if _exchange(scratch, target):
        return
    former = target.with_name(f"{target.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    target.rename(former)
    try:
        scratch.rename(target)
    except BaseException:
        former.rename(target)
        raise
    shutil.rmtree(former, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(a), os.fsencode(b)
    return bool(swap and swap(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)
