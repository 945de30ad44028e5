"""A lock on a folder: one process at a time writes into it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from stretto import files
from stretto.errors import StorageError
from stretto.machine import command_line

NAME = "run.lock"
"""Name of the locked file, which names the process that holds the lock and is deleted with it."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems that have no locks."""

_held: set[int] = set()
"""Descriptors of this process's locks. A child that is forked shares them, and would hold the locks
beyond the end of this process."""


def _let_go_in_child() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go_in_child)


@contextmanager
def locked(folder: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Keep other processes from writing into an existing folder. Raises StorageError if one holds
    the lock, or the folder cannot be written to.

    The system lets go of the lock when this process ends, however it does. Between machines it
    holds where the file system does flock(2) for all of them, as NFS does. ``note`` is called with
    a line where the file system has no locks; the work goes on without.
    """
    file = folder / NAME
    with files.explained(file):
        descriptor = _take(file, note)
        _held.add(descriptor)
        os.ftruncate(descriptor, 0)
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "command": command_line(),
            "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        }
        files.write(descriptor, json.dumps(holder).encode())
    try:
        yield
    finally:
        with suppress(OSError):  # such as of a folder that has been removed
            file.unlink()
        _held.discard(descriptor)
        os.close(descriptor)


def in_use(folder: Path) -> bool:
    """Return whether some process keeps others from writing into a folder."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _take(file: Path, note: Callable[[str], None]) -> int:
    tries = 10  # for a moment :func:`in_use` holds the lock, too
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == file.stat().st_ino:
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 1 << 16, 0)
            os.close(descriptor)
            if not tries:
                raise _refusal(file.parent, holder) from None
            tries -= 1
            time.sleep(0.01)
            continue
        except FileNotFoundError:  # its holder removed the file, and let go, after it was opened
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                note(f"'{file.parent}' is on a file system without locks; let no other run use it")
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)


def _refusal(folder: Path, holder: bytes) -> StorageError:
    try:
        by = "process {pid} on {host} ({command}, since {since})".format(**json.loads(holder))
    except (ValueError, KeyError, TypeError):  # it has only just taken it
        by = "another process"
    return StorageError(
        f"'{folder}' is in use by {by}; wait until that has ended, or end it, and try again",
        "folder-in-use",
    )
