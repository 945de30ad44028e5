"""One rank of a group: it joins, makes an object, and answers calls of its methods.

The same :class:`Rank` works under every launcher. Below it is the process of the local one, which
speaks pickles over connections with given file descriptors, and ends with its parent, however that
ends, whatever it is doing. ::

    in    Opening                     once, first
    out   Done(Facts) or Failed
    in    (make, arguments)           once
    out   Done(None) or Failed
    in    (method, arguments)         repeatedly
    out   Done(result) or Failed
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn

from stretto.errors import OutOfMemoryError, StrettoError, first_line, is_out_of_memory
from stretto.models.backend import keep_freed_memory
from stretto.workers import preflight
from stretto.workers.side import SideServer, stacks


@dataclass(frozen=True, slots=True)
class Opening:
    """The facts that a rank must know to join the group.

    Attributes:
        rank: of this process.
        size: of the group.
        backend: of the group.
        threads: of torch; 0 leaves its choice.
        host, port: of the group's store.
        listener: file descriptor of the socket that listens there, on rank 0.
        interface: network interface of the group; empty for the loopback.
        timeout_s: for joining, and for each of the group's collectives.
        device: that the rank computes on, as torch names it.
        log: file for all that the process prints; empty leaves it as it is.
        environment: variables that were forwarded here; for the preflight.
    """

    rank: int
    size: int
    backend: str
    threads: int
    host: str
    port: int
    listener: int | None
    interface: str = ""
    timeout_s: float = 600.0
    device: str = "cpu"
    log: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


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


class Rank:
    """A rank, whoever launched it. It knows nothing of what its object does."""

    def __init__(self) -> None:
        self._made: Any = None

    def join(self, opening: Opening) -> preflight.Facts:
        """Join the process group, and return what there is at this place."""
        if opening.log:
            _print_to(Path(opening.log))
        loopback = "lo" if sys.platform == "linux" else "lo0"
        # Without a name, gloo takes what the machine's own name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", opening.interface or loopback)
        import torch
        import torch.distributed as dist

        if opening.threads:
            torch.set_num_threads(opening.threads)
        if opening.device.startswith("cuda"):
            torch.cuda.set_device(opening.device)
        timeout = timedelta(seconds=opening.timeout_s)
        store = dist.TCPStore(  # type: ignore[attr-defined]  # torch lists it nowhere
            opening.host,
            opening.port,
            opening.size,
            is_master=opening.rank == 0,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=opening.listener,
        )
        dist.init_process_group(
            opening.backend,
            store=store,
            rank=opening.rank,
            world_size=opening.size,
            timeout=timeout,
        )
        return preflight.facts(opening.device, opening.environment)

    def make(self, rank: int, make: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        """Make the object whose methods are called."""
        self._made = make(rank, *arguments)

    def call(self, method: str, arguments: tuple[Any, ...]) -> object:
        """Call a method of the object."""
        return getattr(self._made, method)(*arguments)

    def aside(self, method: str, arguments: tuple[Any, ...]) -> object:
        """Answer on the side: ``stacks``, ``used_bytes``, or a method of the object."""
        if method == "stacks":
            return stacks()
        if method == "used_bytes":
            import psutil

            return psutil.Process().memory_info().rss
        return getattr(self._made, method)(*arguments)


def outcome(step: Callable[[], object]) -> Done | Failed:
    """Take a step; return its result or its error. SystemExit, too, is a failure here."""
    try:
        return Done(step())
    except BaseException as error:
        return failed(error)


def failed(error: BaseException) -> Failed:
    """Return an error as it travels."""
    at_s = time.monotonic()
    frames = traceback.extract_tb(error.__traceback__)
    own = error if isinstance(error, StrettoError) and _travels(error) else None
    if is_out_of_memory(error):
        own = OutOfMemoryError(first_line(error))
    what = f"{type(error).__name__}: {error}"
    if frames and own is None:  # an error of Stretto says all that is needed
        last = frames[-1]
        what += f" ({Path(last.filename).name}, line {last.lineno}, in {last.name}: {last.line})"
    return Failed(at_s, what, "".join(traceback.format_exception(error)), own)


def tell_warnings(say: Callable[[str], None]) -> None:
    """Have Python's warnings, and log records from WARNING up, said as lines for people.

    Each line is said once; all of them, and all that libraries print, are in the log.
    """
    from transformers.utils import logging as of_transformers

    said: set[str] = set()
    print_warning = warnings.showwarning

    def once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    def show(message: Warning | str, category: type[Warning], *where: Any, **rest: Any) -> None:
        print_warning(message, category, *where, **rest)
        once(f"{category.__name__}: {message}")

    class Saying(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            once(f"{record.levelname} {record.name}: {record.getMessage()}")

    warnings.showwarning = show
    root = logging.getLogger()
    root.addHandler(logging.StreamHandler())
    root.addHandler(Saying(logging.WARNING))
    # It prints its records itself, and passes them on only where CI is in the environment.
    of_transformers.disable_default_handler()
    of_transformers.enable_propagation()


def main(calls: int, side: int, listener: int | None) -> None:
    """Join the group, make the object, and answer calls until the parent goes.

    Args:
        calls, side: file descriptors of the connections.
        listener: file descriptor of the socket on which the group's store listens, on rank 0.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # the parent decides
    keep_freed_memory()
    connection: Connection[Any, Any] = Connection(calls)
    inbox: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_listen, args=(connection, inbox), name="inbox", daemon=True).start()
    rank = Rank()
    server = SideServer(Connection(side), rank.aside)
    number = 0

    def join() -> object:
        nonlocal number
        opening: Opening = replace(pickle.loads(inbox.get()), listener=listener)
        number = opening.rank
        if opening.log:
            tell_warnings(server.say)
        return rank.join(opening)

    def make() -> None:
        rank.make(number, *pickle.loads(inbox.get()))

    def call() -> object:
        return rank.call(*pickle.loads(inbox.get()))

    well = _answer(connection, join) and _answer(connection, make)
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


def _answer(connection: Connection[Any, Any], step: Callable[[], object]) -> bool:
    """Take a step and tell the parent how it went; return whether it went well."""
    answer = outcome(step)
    try:
        data = pickle.dumps(answer)
    except Exception as error:  # a result that cannot travel
        answer = failed(error)
        data = pickle.dumps(answer)
    try:
        connection.send_bytes(data)
    except OSError:
        os._exit(0)  # the parent is gone
    return isinstance(answer, Done)


def _print_to(log: Path) -> None:
    """Send what this process prints, from whatever language, to the end of a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _travels(error: StrettoError) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
