"""The door for side channels: who gets in, who does not, and that ends are noticed."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

import pytest

from stretto.errors import RankError
from stretto.workers.door import KEY_BYTES, Door, enter
from stretto.workers.side import SideClient, SideServer

LIMIT_S = 10.0


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door("127.0.0.1")
    yield door
    door.close()


def came_in(door: Door) -> Connection[Any, Any]:
    entered = door.next(LIMIT_S)
    assert entered
    assert entered[0] == 7
    return entered[1]


def test_both_ends_speak_and_notice_an_end(door: Door) -> None:
    rank_end = enter(door.address, door.key, 7, LIMIT_S)
    driver_end = came_in(door)
    ended = threading.Event()
    SideServer(rank_end, lambda method, arguments: (method, arguments))
    client = SideClient(driver_end, lambda _: None, ended.set)
    assert client.call("add", 1, 2, timeout_s=LIMIT_S) == ("add", (1, 2))
    assert not client.wait(0.01)
    with socket.fromfd(rank_end.fileno(), socket.AF_INET, socket.SOCK_STREAM) as line:
        line.shutdown(socket.SHUT_RDWR)
    assert client.wait(LIMIT_S)
    assert ended.wait(LIMIT_S)
    with pytest.raises(RankError, match="the process has ended"):
        client.call("add", 1, 2, timeout_s=LIMIT_S)


def test_a_rank_notices_that_its_driver_is_gone(door: Door) -> None:
    ended = threading.Event()
    SideServer(enter(door.address, door.key, 7, LIMIT_S), lambda *_: None, ended.set)
    came_in(door).close()
    assert ended.wait(LIMIT_S)


def test_another_key_is_refused_and_others_still_get_in(door: Door) -> None:
    silent = socket.create_connection(door.address)  # says nothing, and holds nobody up
    with pytest.raises(AuthenticationError):
        enter(door.address, b"x" * KEY_BYTES, 7, LIMIT_S)
    assert door.next(0.1) is None
    enter(door.address, door.key, 7, LIMIT_S)
    assert came_in(door)
    silent.close()


class Bomb:
    """Goes off where it is unpickled."""

    went_off = threading.Event()

    def __reduce__(self) -> Any:
        return _set_off, ()


def test_nothing_is_unpickled_of_one_without_the_key(door: Door) -> None:
    with socket.create_connection(door.address) as line:
        connection: Connection[Any, Any] = Connection(line.detach())
        connection.recv_bytes()  # the challenge
        connection.send_bytes(pickle.dumps(Bomb()))
        connection.send_bytes(pickle.dumps(Bomb()))
        assert connection.recv_bytes() == b"#FAILURE#"
    assert not Bomb.went_off.is_set()
    assert door.next(0.1) is None


def _set_off() -> None:
    Bomb.went_off.set()


def test_a_closed_door_lets_nobody_in() -> None:
    door = Door("127.0.0.1")
    door.close()
    for thread in threading.enumerate():
        if thread.name == "door":
            thread.join(LIMIT_S)
    with pytest.raises(ConnectionRefusedError):
        enter(door.address, door.key, 7, LIMIT_S)


def test_doors_have_keys_of_their_own(door: Door) -> None:
    other = Door("127.0.0.1")
    other.close()
    assert len(door.key) == KEY_BYTES
    assert door.key != other.key
