"""Connections: what gets in, what does not, and that ends are noticed."""

from __future__ import annotations

import hmac
import itertools
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection
from threading import Barrier, Event
from typing import Any, cast

import pytest

from raising import raises
from stretto.errors import RankError
from stretto.workers.connection import (
    KEY_BYTES,
    TO_DRIVER,
    TO_RANK,
    DriverConnection,
    Listener,
    RankConnection,
    SignedConnection,
    connected,
)

LIMIT_S = 10.0


class Echo:
    """A rank that returns what it is called with."""

    def echo(self, *arguments: object) -> object:
        return arguments


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1")
    yield listener
    listener.close()


def came(listener: Listener) -> Connection[Any, Any]:
    entered = listener.next(LIMIT_S)
    assert entered
    assert entered[0] == 7
    return entered[1]


def test_both_ends_speak_and_notice_an_end(listener: Listener) -> None:
    rank_end = connected(listener.address, listener.key, 7, LIMIT_S)
    driver_end = came(listener)
    ended = threading.Event()
    DriverConnection(rank_end, Echo(), lambda: None)
    client = RankConnection(driver_end, lambda _: None, ended.set)
    assert client.aside("echo", 1, 2, timeout_s=LIMIT_S) == (1, 2)
    assert not client.wait(0.01)
    with socket.fromfd(rank_end.fileno(), socket.AF_INET, socket.SOCK_STREAM) as line:
        line.shutdown(socket.SHUT_RDWR)
    assert client.wait(LIMIT_S)
    assert ended.wait(LIMIT_S)
    with raises(RankError, "process-ended"):
        client.aside("echo", 1, 2, timeout_s=LIMIT_S)


def test_each_message_is_signed_with_its_direction_and_number(listener: Listener) -> None:
    """What the network could change, leave out, repeat or send back is refused."""
    pairs = []
    for _ in range(4):
        rank_end = connected(listener.address, listener.key, 7, LIMIT_S)
        pairs.append((rank_end, cast(SignedConnection, came(listener))))
    keys = {end._key for pair in pairs for end in pair}
    assert len(keys) == 4  # one for both ends of each
    (rank_end, driver_end), *others = pairs
    for message in (b"", b"one", b"x" * 100_000):
        rank_end.send_bytes(message)
        assert driver_end.recv_bytes() == message
        driver_end.send_bytes(message)
        assert rank_end.recv_bytes() == message
    code = rank_end._code(TO_DRIVER, 3, b"two")
    assert code == hmac.digest(rank_end._key, TO_DRIVER + bytes([3] + 7 * [0]) + b"two", "sha256")
    for said in (
        (code, b"too"),  # changed
        (rank_end._code(TO_DRIVER, 2, b"x" * 100_000), b"x" * 100_000),  # repeated
        (rank_end._code(TO_DRIVER, 4, b"two"), b"two"),  # one before it is left out
        (driver_end._code(TO_RANK, 3, b"two"), b"two"),  # sent back
    ):
        driver_end._received = itertools.count(3)
        for part in said:
            Connection.send_bytes(rank_end, part)
        with pytest.raises(AuthenticationError):
            driver_end.recv_bytes()
    for one, other in others:
        one.close()
        other.close()


def test_a_message_that_was_changed_ends_the_connection_and_is_not_unpickled(
    listener: Listener,
) -> None:
    for of_driver in (False, True):
        rank_end = connected(listener.address, listener.key, 7, LIMIT_S)
        driver_end, ended = came(listener), threading.Event()
        if of_driver:
            RankConnection(driver_end, lambda _: None, ended.set)
        else:
            DriverConnection(rank_end, Echo(), ended.set)
        for part in (b"x" * 32, bytes(8) + pickle.dumps(Bomb())):
            Connection.send_bytes(rank_end if of_driver else driver_end, part)
        assert ended.wait(LIMIT_S)
    assert not Bomb.went_off.is_set()


def test_a_rank_notices_that_its_driver_is_gone(listener: Listener) -> None:
    ended = threading.Event()
    DriverConnection(connected(listener.address, listener.key, 7, LIMIT_S), Echo(), ended.set)
    came(listener).close()
    assert ended.wait(LIMIT_S)


def test_another_key_is_refused_and_others_still_get_in(listener: Listener) -> None:
    silent = socket.create_connection(listener.address)  # says nothing, and holds none up
    with pytest.raises(AuthenticationError):
        connected(listener.address, b"x" * KEY_BYTES, 7, LIMIT_S)
    assert listener.next(0.1) is None
    connected(listener.address, listener.key, 7, LIMIT_S)
    assert came(listener)
    silent.close()


class Bomb:
    """Goes off where it is unpickled."""

    went_off = threading.Event()

    def __reduce__(self) -> Any:
        return _set_off, ()


def test_nothing_is_unpickled_of_one_without_the_key(listener: Listener) -> None:
    with socket.create_connection(listener.address) as line:
        connection: Connection[Any, Any] = Connection(line.detach())
        connection.recv_bytes()  # the challenge
        connection.send_bytes(pickle.dumps(Bomb()))
        connection.send_bytes(pickle.dumps(Bomb()))
        assert connection.recv_bytes() == b"#FAILURE#"
    assert not Bomb.went_off.is_set()
    assert listener.next(0.1) is None


def _set_off() -> None:
    Bomb.went_off.set()


def test_a_closed_door_lets_nobody_in() -> None:
    listener = Listener("127.0.0.1")
    listener.close()
    for thread in threading.enumerate():
        if thread.name == "listener":
            thread.join(LIMIT_S)
    with pytest.raises(ConnectionRefusedError):
        connected(listener.address, listener.key, 7, LIMIT_S)


def test_listeners_have_keys_of_their_own(listener: Listener) -> None:
    other = Listener("127.0.0.1")
    other.close()
    assert len(listener.key) == KEY_BYTES
    assert listener.key != other.key


def test_it_is_closed_once_whoever_closes_it_at_the_same_time() -> None:
    """A file's number that is closed twice may be another file's by then."""
    threads = 4
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(50):
            ours, theirs = Pipe()
            ended, barrier = Event(), Barrier(threads)
            client = RankConnection(ours, print, ended.set)

            def close(client: RankConnection = client, barrier: Barrier = barrier) -> int:
                barrier.wait()
                client.close()
                return os.open(os.devnull, os.O_RDONLY)  # takes the number that is free

            numbers = [future.result() for future in [pool.submit(close) for _ in range(threads)]]
            assert ended.wait(10)
            for number in numbers:
                os.close(number)  # raises, where another has closed it
            theirs.close()


def test_a_call_under_way_ends_with_the_channel() -> None:
    ours, theirs = Pipe()
    client = RankConnection(ours, print)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.aside, "stacks", timeout_s=30.0)
        theirs.recv_bytes()
        client.close()
        with raises(RankError, "process-ended"):
            call.result(10)
    with raises(RankError, "process-ended"):
        client.aside("stacks", timeout_s=30.0)
    theirs.close()


def test_a_channel_ends_with_the_rank() -> None:
    ours, theirs = Pipe()
    said, ended = list[str](), Event()
    client = RankConnection(ours, said.append, ended.set)
    server = DriverConnection(theirs, Echo(), lambda: None)
    assert client.aside("echo", 3, timeout_s=10.0) == (3,)
    del server
    theirs.close()
    client.close()
    assert ended.wait(10)
    assert client.gone
