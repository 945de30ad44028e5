"""The driver's end of a side channel."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from threading import Barrier, Event

import pytest

from stretto.errors import RankError
from stretto.workers.side import SideClient, SideServer


def test_it_is_closed_once_whoever_closes_it_at_the_same_time() -> None:
    """A file's number that is closed twice may be another file's by then."""
    threads = 4
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(50):
            ours, theirs = Pipe()
            ended, barrier = Event(), Barrier(threads)
            client = SideClient(ours, print, ended.set)

            def close(client: SideClient = client, barrier: Barrier = barrier) -> int:
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
    client = SideClient(ours, print)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, "stacks", timeout_s=30.0)
        theirs.recv_bytes()
        client.close()
        with pytest.raises(RankError, match="the process has ended"):
            call.result(10)
    with pytest.raises(RankError, match="the process has ended"):
        client.call("stacks", timeout_s=30.0)
    theirs.close()


def test_a_channel_ends_with_the_rank() -> None:
    ours, theirs = Pipe()
    said, ended = list[str](), Event()
    client = SideClient(ours, said.append, ended.set)
    server = SideServer(theirs, lambda method, arguments: (method, arguments), lambda: None)
    assert client.call("count", 3, timeout_s=10.0) == ("count", (3,))
    del server
    theirs.close()
    client.close()
    assert ended.wait(10)
    assert client.gone
