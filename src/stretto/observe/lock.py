"""A lock on a folder, so that one process at a time writes into it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from stretto import files
from stretto.errors import StorageError
from stretto.machine import command_line

NAME = "run.lock"
"""Name of the locked file. It names the holder of the lock, and is deleted with the lock."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of file systems without locks


@contextmanager
def locked(folder: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Keep other processes from writing into an existing folder.

    Raises StorageError if a process holds the lock, or the folder cannot be written to. The system
    releases the lock when this process ends, even by a kill. Between machines it works if the file
    system supports flock(2) across them, as NFS does. On a file system without locks, ``note`` is
    called with a warning, and the work goes on.
    """
    from filelock import FileLock, Timeout

    file = folder / NAME
    # Wait a little, because :func:`in_use` takes the lock for a moment too.
    lock = FileLock(file, 0.1, poll_interval=0.01, thread_local=False, fallback_to_soft=False)
    with files.explained(file):
        try:
            lock.acquire()
        except Timeout as error:
            raise _refusal(file) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            note(f"'{folder}' is on a file system without locks; let no other run use it")
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": command_line(),
        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
    }
    try:
        with files.explained(file):
            file.write_text(json.dumps(holder), encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # for example, the folder was removed
            file.unlink()
        lock.release()


def in_use(folder: Path) -> bool:
    """Return whether a process has locked a folder."""
    try:
        with (folder / NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False


def _refusal(file: Path) -> StorageError:
    try:
        holder = json.loads(file.read_bytes())
        by = "process {pid} on {host} ({command}, since {since})".format(**holder)
    except (OSError, ValueError, KeyError, TypeError):  # the holder has only just taken it
        by = "another process"
    return StorageError(
        f"'{file.parent}' is in use by {by}; wait until that has ended, or end it, and try again",
        "folder-in-use",
    )
