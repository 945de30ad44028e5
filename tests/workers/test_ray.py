"""Ranks as Ray actors: what they answer, how they fail and end, and where they are put."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline_misbehaving import Misbehaving
from raising import raises
from rank_helpers import alive, call_each, deaths_of, require_gone
from stretto.errors import ConfigError, LearnerError, MissingExtraError, RankError, RoleLostError
from stretto.types import Reply
from stretto.workers.group import RankGroup
from stretto.workers.group_executor import GroupExecutor, ServiceGroup
from stretto.workers.rank import GroupSpec, Rank, address_of, interface_of
from stretto.workers.ray_cluster import (
    ActorProcesses,
    Bundle,
    RayCluster,
    by_node,
    code_paths,
    explained,
    find,
)
from stretto.workers.services import Makes, Service

ray = pytest.importorskip("ray")

LIMIT_S = 20.0
START_S = 120.0
ONE, TWO = (GroupSpec(size, timeout_s=START_S) for size in (1, 2))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_ECHO", "over there")
        patch.setenv("STRETTO_STAYS", "here")
        patch.delenv("OMP_NUM_THREADS", raising=False)
        cluster = RayCluster([Bundle(1, 1)] * 2, cpus=4, gpus=4, timeout_s=START_S)
    yield cluster
    cluster.close()
    assert not ray.is_initialized()


def launch(cluster: RayCluster, spec: GroupSpec, *arguments: Any, **options: Any) -> RankGroup:
    start = partial(ActorProcesses, cluster=cluster, **options)
    given = arguments or ("hello",)
    return RankGroup(spec, Misbehaving, given, launch=start).start()


def test_the_signals_of_the_program_stay_its_own(cluster: RayCluster) -> None:
    """Ray has SIGTERM end the program in the midst of what it does."""
    handler = signal.getsignal(signal.SIGTERM)
    assert "ray" not in getattr(handler, "__module__", "")


def test_ranks_answer_and_are_ended_at_work(cluster: RayCluster) -> None:
    cluster.secrets["STRETTO_API_KEY"] = "hunter2"  # the raylet, which the driver started, has not
    spec = replace(TWO, threads=3)
    ranks = launch(cluster, spec)
    assert ranks.call(Misbehaving.variable, "STRETTO_API_KEY") == ["hunter2"] * 2
    assert ranks.call(Misbehaving.greet, "you") == ["hello you, from 0", "hello you, from 1"]
    assert call_each(ranks, Misbehaving.total, [(3,), (4,)]) == [7.0, 7.0]
    assert ranks.call(Misbehaving.threads) == [3, 3]
    assert [facts.threads for facts in ranks.facts] == [3, 3]
    assert ranks.call(Misbehaving.variable, "STRETTO_ECHO") == ["over there"] * 2
    assert ranks.call(Misbehaving.variable, "OMP_NUM_THREADS") == ["3"] * 2
    assert {facts.versions["ray"] for facts in ranks.facts} == {ray.__version__}
    own = psutil.Process().nice()
    assert [psutil.Process(facts.pid).nice() for facts in ranks.facts] == [own, own]
    big = bytes(300_000)
    ranks.call(Misbehaving.take, big)
    pids = ranks.call(Misbehaving.pid)
    assert pids == [facts.pid for facts in ranks.facts]

    seen: list[str] = []

    def look() -> None:
        assert all(
            ranks._aside(i, "'hang'", Rank.call, "hanging", (), timeout_s=LIMIT_S) for i in range(2)
        )
        seen.append(ranks.stacks())
        assert all(used[""] > 10**7 for used in ranks.used_bytes())
        ranks.close()

    looking = threading.Thread(target=look)
    looking.start()
    with raises(RankError, "ranks-ended", "'hang'"):
        ranks.call(Misbehaving.hang)
    looking.join()
    assert f"rank 1 of 2 (pid {pids[1]} on {socket.gethostname()}):" in seen[0]
    assert "in hang" in seen[0]
    require_gone(pids, LIMIT_S)
    ranks.close()
    with raises(RankError, "ranks-ended"):
        ranks.call(Misbehaving.pid)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "rank 0 of 1 failed in 'fail': ValueError: no such luck (pipeline_misbehaving"),
        ("own", "rank 0 of 1 failed in 'fail': LearnerError: the loss is not finite. All ranks"),
    ],
)
def test_an_error_is_told_with_its_cause(cluster: RayCluster, how: str, said: str) -> None:
    ranks = launch(cluster, ONE)
    with pytest.raises(RankError) as caught:
        ranks.call(Misbehaving.fail, how, 0)
    assert str(caught.value).startswith(said)
    assert caught.value.rank == 0
    assert isinstance(caught.value.__cause__, LearnerError) == (how == "own")
    notes = getattr(caught.value, "__notes__", [])
    assert len([n for n in notes if n.startswith("On rank 0:\nTraceback")]) == (how == "raise")
    require_gone([ranks.facts[0].pid], LIMIT_S)


def test_a_killed_rank_ends_a_call_of_all(cluster: RayCluster, tmp_path: Path) -> None:
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = launch(cluster, replace(TWO, logs=logs))
    logs[1].write_text("last words\n")
    with pytest.raises(RankError) as caught:
        ranks.call(Misbehaving.fail, "kill", 1)
    assert str(caught.value).startswith(
        "rank 1 of 2 ended unexpectedly (it crashed, or was killed by hand or for want of memory) "
        "in the middle of 'fail'"
    )
    assert caught.value.rank == 1
    if "rank 0 had raised" not in str(caught.value):  # it may have noticed first
        assert any("last words" in note for note in caught.value.__notes__)
        assert any(note.startswith("Ray says: The actor died") for note in caught.value.__notes__)
    require_gone([facts.pid for facts in ranks.facts], LIMIT_S)


def test_a_death_between_two_calls_is_noticed_at_once(cluster: RayCluster) -> None:
    ranks = launch(cluster, TWO)
    deaths = deaths_of(ranks)
    ranks.remedy = "try again"
    assert deaths.empty()
    os.kill(ranks.facts[0].pid, signal.SIGKILL)
    death = deaths.get(timeout=LIMIT_S)
    assert str(death) == (
        "rank 0 of 2 ended unexpectedly (it crashed, or was killed by hand or for want of memory) "
        "between two calls. All ranks have been ended; fix the cause, and try again"
    )
    with pytest.raises(RankError) as caught:
        ranks.call(Misbehaving.pid)
    assert caught.value is death
    require_gone([facts.pid for facts in ranks.facts], LIMIT_S)


def test_a_rank_that_cannot_start_is_named(cluster: RayCluster) -> None:
    with raises(RankError, "rank-failed", "rank 0 of 1", "its start (loading): TypeError"):
        launch(cluster, ONE, 1, 2, 3)


def test_a_rank_that_cannot_listen_is_named(cluster: RayCluster) -> None:
    with raises(RankError, "no-such-interface", "'nosuch0'"):
        launch(cluster, replace(ONE, interface="nosuch0"))


def test_groups_may_share_a_place_and_more_do_not_fit(cluster: RayCluster) -> None:
    one = launch(cluster, ONE, share=0.5, python=sys.executable)
    other = launch(cluster, ONE, share=0.5)
    assert one.call(Misbehaving.pid) != other.call(Misbehaving.pid)
    with raises(RankError, "rank-not-connected", "rank 0 of 1", "1 s"):
        launch(cluster, replace(ONE, timeout_s=1.0), share=0.5)
    one.close()
    other.close()


class Counter(Service):
    """A service that counts."""

    def __init__(self, start: int) -> None:
        super().__init__(None)
        self.count = start

    def add(self, number: int) -> Reply[int]:
        self.count += number
        return Reply(self.count)

    def pid(self) -> Reply[int]:
        return Reply(os.getpid())


def test_a_group_of_services_is_lost_and_started_again(cluster: RayCluster) -> None:
    makes: Makes = {"counter": (Counter, (5,))}
    actors = partial(ActorProcesses, cluster=cluster, places=[1])
    group = ServiceGroup(ONE, makes, launch=actors, name="counter").start()
    executor = GroupExecutor(group, "counter")

    async def body() -> None:
        assert (await executor.call(Counter.add, 2)).value == 7
        os.kill(executor.ask(Counter.pid).value, signal.SIGKILL)
        with raises(RoleLostError, "rank-died", "the counter ended unexpectedly"):
            await executor.call(Counter.add, 2)
        await executor.restart()
        assert (await executor.call(Counter.add, 2)).value == 7

    try:
        asyncio.run(body())
    finally:
        group.close()


def test_places_that_there_are_not_are_waited_for_and_missed(cluster: RayCluster) -> None:
    asked = "8 GPUs and 3 CPUs (on one node 8 GPUs and 1 CPUs at least)"
    there = "its 1 node have 4 GPUs and 4 CPUs, of which 2 GPUs and 2 CPUs are free"
    with raises(ConfigError, "places-not-free", asked, "1 s", there):
        RayCluster([Bundle(1, 8), Bundle(2)], timeout_s=1)
    assert ray.is_initialized()  # by another, which needs it still


def test_how_an_actor_ended_is_told_by_what_ray_says() -> None:
    errors = ray.exceptions
    memory = "2 worker(s) were killed due to the node running low on memory."
    assert "for want of memory on its node" in explained(errors.OutOfMemoryError(memory))
    gone = errors.ActorUnavailableError("Socket closed", None)
    assert explained(gone) == "was lost with its node, or the connection to it,"
    died = errors.RayActorError(error_msg="The actor died because its node has died. Node Id: x")
    assert explained(died) == "was lost with its node"
    killed = errors.RayActorError(error_msg="it was killed by `ray.kill`.")
    assert explained(killed) == "was killed through Ray"
    other = errors.RayActorError(error_msg="connection error code 2; prevent node deaths; died")
    assert explained(other).startswith("ended unexpectedly")


def test_interfaces_are_found_by_address_and_by_name() -> None:
    loopback = "lo" if sys.platform == "linux" else "lo0"
    assert address_of(loopback) == "127.0.0.1"
    assert interface_of("127.0.0.1") == loopback
    with raises(RankError, "no-interface-has-address", "203.0.113.9"):
        interface_of("203.0.113.9")


def test_neighbours_are_on_one_node_and_the_order_is_always_the_same() -> None:
    nodes = [("10.0.0.12", "b"), ("10.0.0.9", "a"), ("10.0.0.12", "b"), ("10.0.0.9", "a")]
    assert by_node([Bundle(1, 1)] * 4, nodes) == [1, 3, 0, 2]
    unlike = [Bundle(2), Bundle(1, 1), Bundle(1, 1), Bundle(2)]
    assert by_node(unlike, nodes) == [3, 1, 2, 0]
    same = [("node", "d"), ("node", "c"), ("node", "d")]
    assert by_node([Bundle()] * 3, same) == [1, 0, 2]


def test_only_paths_that_are_not_installed_go_along(tmp_path: Path) -> None:
    own, library = str(tmp_path), sysconfig.get_path("stdlib")
    paths = [own, library, f"{library}/lib-dynload", "/x/python311.zip", "/x/site-packages", own]
    assert code_paths(paths) == [own]
    assert code_paths([""]) == [str(Path.cwd())]


def test_without_the_library_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[ray\]'"):
        RayCluster([Bundle()])


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.mark.usefixtures("unconnected")
def test_an_address_where_nobody_answers_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with raises(ConfigError, "no-cluster-answers", f"127.0.0.1:{port}"):
        RayCluster([Bundle()], address=f"127.0.0.1:{port}")
    with raises(ConfigError, "not-a-cluster-address", "ray://head:10001"):
        RayCluster([Bundle()], address="ray://head:10001")


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
from pipeline_misbehaving import Misbehaving
from stretto.workers.ray_cluster import Bundle, RayCluster
from stretto.workers.ray_cluster import ActorProcesses
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec, Rank
cluster = RayCluster([Bundle()], cpus=1)
launch = lambda spec: ActorProcesses(spec, cluster)
ranks = RankGroup(GroupSpec(), Misbehaving, ("hello",), launch=launch).start()
print("pids", *ranks.call(Misbehaving.pid), flush=True)
ranks.call(Misbehaving.hang)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_driver(how: signal.Signals) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]))
    driver = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().removeprefix("pids ").split()]
    assert pids
    assert all(alive(pid) for pid in pids)
    processes = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(how)
    require_gone(pids, LIMIT_S)
    _, said = driver.communicate(timeout=LIMIT_S)
    assert ("KeyboardInterrupt" in said) == (how == signal.SIGINT)
    require_gone([process.pid for process in processes], 120.0)  # Ray's own take their time


@pytest.mark.slow
def test_ranks_on_two_nodes_are_stable_lost_with_one_and_wait_for_another() -> None:
    from ray.cluster_utils import Cluster

    options: dict[str, Any] = {"object_store_memory": 80 * 2**20}
    nodes = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False} | options,
    )
    other = nodes.add_node(num_cpus=2, **options)
    try:
        cluster = RayCluster([Bundle()] * 3, address=nodes.address, timeout_s=START_S)
        assert not cluster.alone
        assert cluster.host == ray.util.get_node_ip_address()
        at = find()
        assert at
        assert (at.nodes, at.cpus, at.gpus) == (2, 3.0, 0.0)
        ranks = launch(cluster, replace(ONE, size=3))
        assert call_each(ranks, Misbehaving.total, [(1,), (2,), (4,)]) == [7.0] * 3
        first = [
            psutil.Process(pid).ppid() for pid in ranks.call(Misbehaving.pid)
        ]  # each node's own process
        assert first[0] == first[1] or first[1] == first[2]
        assert len(set(first)) == 2
        ranks.close()
        ranks = launch(cluster, replace(ONE, size=3))
        pids = ranks.call(Misbehaving.pid)
        assert [psutil.Process(pid).ppid() for pid in pids] == first
        theirs = [rank for rank in range(3) if first.count(first[rank]) == 2]
        threading.Timer(0.5, lambda: nodes.remove_node(other, allow_graceful=False)).start()
        with pytest.raises(RankError, match=r"was lost with its node.* in the middle") as caught:
            ranks.call(Misbehaving.hang)
        assert caught.value.rank in theirs
        require_gone(pids, LIMIT_S)
        # New ranks wait for a node in place of the lost one.
        with ThreadPoolExecutor(1) as pool:
            launched = pool.submit(launch, cluster, replace(ONE, size=3))
            nodes.add_node(num_cpus=2, **options)
            ranks = launched.result()
        assert call_each(ranks, Misbehaving.total, [(1,), (2,), (4,)]) == [7.0] * 3
        cluster.close()
    finally:
        ray.shutdown()
        nodes.shutdown()
