"""A rank in a Ray actor, from inside.

The side channel goes past Ray: an actor comes in at the driver's door (:mod:`stretto.workers.door`)
when it starts, and ends when that connection does.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stretto.errors import RankError
from stretto.models.backend import keep_freed_memory
from stretto.workers.door import Address, enter
from stretto.workers.preflight import Facts
from stretto.workers.rank import Opening, Rank, failed, outcome, tell_warnings
from stretto.workers.side import SideServer


class RankActor:
    """A rank in a Ray actor, which makes one call at a time, in their order.

    Args:
        number: of the rank.
        door, key: of the driver's door.
        alone: whether all ranks are on the driver's machine.
        timeout_s: for the connection to the door.
    """

    def __init__(
        self, number: int, door: Address, key: bytes, alone: bool, timeout_s: float
    ) -> None:
        keep_freed_memory()
        self._number, self._alone, self._rank = number, alone, Rank()
        self._listener: socket.socket | None = None
        connection = enter(door, key, number, timeout_s)
        self._side = SideServer(connection, self._rank.aside, ended=lambda: os._exit(0))

    def ready(self) -> None:
        """Answer: the actor is there."""

    def listen(self, interface: str) -> Address:
        """Open the socket of the group's store, and keep it; return where it is."""
        host = _address_of(interface) if interface else "127.0.0.1" if self._alone else _own()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        address: Address = self._listener.getsockname()[:2]
        return address

    def take(self, step: str, message: bytes) -> bytes:
        """Take a step, ``join``, ``make`` or ``call``; return the pickle of its outcome."""
        answer = outcome(lambda: getattr(self, f"_{step}")(*pickle.loads(message)))
        try:
            return pickle.dumps(answer)
        except Exception as error:  # a result that cannot travel
            return pickle.dumps(failed(error))

    def _join(self, opening: Opening) -> Facts:
        if opening.log:
            tell_warnings(self._side.say)
        interface = opening.interface
        if interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        elif not self._alone:
            interface = _interface_of(_own())
        return self._rank.join(
            replace(
                opening,
                interface=interface,
                listener=self._listener.detach() if self._listener else None,
                # As it is here: what was sent may not be what has arrived.
                environment={k: os.environ[k] for k in opening.environment if k in os.environ},
            )
        )

    def _make(self, make: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._rank.make(self._number, make, arguments)

    def _call(self, method: str, arguments: tuple[Any, ...]) -> object:
        return self._rank.call(method, arguments)


def _own() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


def _address_of(interface: str) -> str:
    """Return the address of one of this machine's network interfaces.

    Raises:
        RankError: there is none of that name.
    """
    import psutil

    names = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in names.get(interface, ()):
            if entry.family == family:
                return str(entry.address).partition("%")[0]
    raise RankError(
        f"{socket.gethostname()} has no network interface '{interface}' with an address; "
        f"it has: {', '.join(sorted(names))}"
    )


def _interface_of(address: str) -> str:
    """Return the network interface with an address.

    Raises:
        RankError: there is none.
    """
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(str(entry.address).partition("%")[0] == address for entry in entries):
            return str(name)
    raise RankError(
        f"no network interface of {socket.gethostname()} has the address {address}, by which Ray "
        "knows it; name the interface"
    )
