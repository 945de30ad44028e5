"""The process of one rank.

It speaks pickles over the connection with a given file descriptor, and ends with its parent,
however that ends, whatever it is doing. ::

    in    Opening                     once, first
    in    (make, arguments)           once
    out   Done(None) or Failed        after both
    in    (method, arguments)         repeatedly
    out   Done(result) or Failed
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn

from stretto.allocator import keep_freed_memory
from stretto.errors import StrettoError


@dataclass(frozen=True, slots=True)
class Opening:
    """The facts that a rank must know to join the group.

    Attributes:
        rank: of this process.
        size: of the group.
        backend: of the group.
        threads: of torch.
        port: of the group's store, on this machine.
        listener: file descriptor of the socket that listens there, on rank 0.
    """

    rank: int
    size: int
    backend: str
    threads: int
    port: int
    listener: int | None


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a call that went well."""

    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """An error that a rank raised.

    Attributes:
        at_s: time by the machine's monotonic clock: the first to fail has the cause.
        what: the error in a line, with its place.
        trace: all of the traceback.
        error: the error itself, where it is one of Stretto that can be pickled.
    """

    at_s: float
    what: str
    trace: str
    error: StrettoError | None


def main(descriptor: int) -> None:
    """Join the group, make the object, and answer calls until the parent goes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    keep_freed_memory()
    connection: Connection[Any, Any] = Connection(descriptor)
    inbox: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_listen, args=(connection, inbox), daemon=True).start()
    made: object = None

    def start() -> None:
        nonlocal made
        opening = pickle.loads(inbox.get())
        _join(opening)
        make, arguments = pickle.loads(inbox.get())
        made = make(opening.rank, *arguments)

    def call() -> object:
        method, arguments = pickle.loads(inbox.get())
        return getattr(made, method)(*arguments)

    well = _answer(connection, start)
    while well:
        well = _answer(connection, call)
    inbox.get()  # which never comes: the parent knows, and ends this process


def _listen(connection: Connection[Any, Any], inbox: SimpleQueue[bytes]) -> NoReturn:
    """Hand messages on until the parent's end closes, then end.

    In a thread of its own, so that it notices while this rank waits for another.
    """
    while True:
        try:
            inbox.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _join(opening: Opening) -> None:
    """Join the process group."""
    # All ranks are on this machine, whatever its name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(opening.threads)
    if opening.backend == "nccl":
        torch.cuda.set_device(opening.rank)
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch lists it nowhere
        "127.0.0.1",
        opening.port,
        opening.size,
        is_master=opening.rank == 0,
        wait_for_workers=False,
        master_listen_fd=opening.listener,
    )
    dist.init_process_group(
        opening.backend, store=store, rank=opening.rank, world_size=opening.size
    )


def _answer(connection: Connection[Any, Any], step: Callable[[], object]) -> bool:
    """Take a step and tell the parent how it went; return whether it went well."""
    answer: Done | Failed
    try:
        answer = Done(step())
        data = pickle.dumps(answer)
    except BaseException as error:  # SystemExit, too, is a failure here
        answer = _failed(error)
        data = pickle.dumps(answer)
    try:
        connection.send_bytes(data)
    except OSError:
        os._exit(0)  # the parent is gone
    return isinstance(answer, Done)


def _failed(error: BaseException) -> Failed:
    at_s = time.monotonic()
    frames = traceback.extract_tb(error.__traceback__)
    own = error if isinstance(error, StrettoError) and _travels(error) else None
    what = f"{type(error).__name__}: {error}"
    if frames and own is None:  # an error of Stretto says all that is needed
        last = frames[-1]
        what += f" ({Path(last.filename).name}, line {last.lineno}, in {last.name}: {last.line})"
    return Failed(at_s, what, "".join(traceback.format_exception(error)), own)


def _travels(error: StrettoError) -> bool:
    """Return whether an error comes out of a pickle as it went in."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
