"""Groups of services in processes: what they answer, and how they end and start again."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from helpers import ManualClock
from raising import raises
from stretto.errors import ConfigError, EngineError, RankError, RoleLostError, StrettoError
from stretto.runtime.learner_service import LearnerService
from stretto.runtime.role_services import GeneratorService, ScorerService
from stretto.types import Decoded, Reply, Work
from stretto.workers import group as group_module
from stretto.workers import services as services_module
from stretto.workers.group_executor import GroupExecutor, ServiceGroup, ahead, deadline_s
from stretto.workers.rank import Facts, GroupSpec, check, interface_of
from stretto.workers.services import Makes, RankServices, Remote, Service, remote_of

ONE = GroupSpec()


class Counter(Service):
    """A service that counts, and can misbehave."""

    def __init__(self, factor: int) -> None:
        super().__init__(None)
        if not factor:
            raise ConfigError("a factor of 0", "no-factor")
        self.factor, self.calls = factor, 0
        self.held, self.released = threading.Event(), threading.Event()

    def times(self, number: int) -> Reply[int]:
        self.calls += 1
        with self._timed("work") as timed:
            product = self.factor * number
            timed.attributes = {"of": number}
        return Reply(product, timed.work)

    def count(self) -> Reply[int]:
        return Reply(self.calls)

    def refuse(self) -> Reply[None]:
        raise EngineError("not so", "refused")

    def stumble(self) -> Reply[None]:
        raise ValueError("a bug")

    def hold(self) -> Reply[None]:
        """Be at work until :meth:`release`."""
        self.held.set()
        self.released.wait(60)
        return Reply(None)

    def holding(self) -> bool:
        return self.held.wait(60)

    def release(self) -> None:
        self.released.set()

    def decode(self, tokens: int, stop_after: int) -> Reply[Decoded]:
        return Reply(Decoded((), stop_after))

    def stall(self) -> Reply[None]:
        """Have the next :meth:`hold` wait again."""
        self.released.clear()
        return Reply(None)

    def warn(self) -> Reply[None]:
        import warnings

        warnings.warn("mind the gap", UserWarning, stacklevel=1)
        return Reply(None)

    def chatter(self) -> Reply[None]:
        import logging

        print("a bar")
        logging.getLogger("stretto").warning("slow %s", "disk")
        logging.getLogger("transformers.x").warning("old name")
        return Reply(None)

    def tensor(self) -> torch.Tensor:
        return torch.ones(1000)

    def function(self) -> Any:
        return lambda: None

    def environment(self) -> Reply[dict[str, str]]:
        return Reply(dict(os.environ))

    def pid(self) -> Reply[int]:
        return Reply(os.getpid())


def group_of(makes: Makes, spec: GroupSpec = ONE, **options: Any) -> ServiceGroup:
    return ServiceGroup(spec, makes, name="counter", **options)


@pytest.fixture
def group() -> Iterator[ServiceGroup]:
    makes: Makes = {"two": (Counter, (2,)), "three": (Counter, (3,))}
    group = group_of(makes).start()
    yield group
    group.close()


def test_services_of_one_process_answer_by_this_clock_and_survive_errors(
    group: ServiceGroup,
) -> None:
    two, three = GroupExecutor(group, "two"), GroupExecutor(group, "three")

    async def body() -> None:
        before_s = time.perf_counter()
        replies = await asyncio.gather(two.call(Counter.times, 4), three.call(Counter.times, 4))
        after_s = time.perf_counter()
        assert [r.value for r in replies] == [8, 12]
        works = [r.work[0] for r in replies]
        assert all(before_s - 0.05 <= w.start_s <= w.end_s <= after_s + 0.05 for w in works)
        with raises(EngineError, "refused"):
            await two.call(Counter.refuse)
        assert (await two.call(Counter.times, 5)).value == 10
        assert (await two.call(Counter.count)).value == 2

    asyncio.run(body())


def test_a_process_that_dies_is_replaced_once_for_all_its_services(group: ServiceGroup) -> None:
    two, three = GroupExecutor(group, "two"), GroupExecutor(group, "three")

    async def body() -> None:
        await two.call(Counter.times, 1)
        pid = (await two.call(Counter.pid)).value
        os.kill(pid, signal.SIGKILL)
        with raises(RoleLostError, "rank-died", "counter", "SIGKILL"):
            await two.call(Counter.hold)
        await two.restart()
        assert (await two.call(Counter.count)).value == 0  # what it held is gone
        with raises(RoleLostError, "replaced-with-another", "counter", "three") as lost:
            await three.call(Counter.count)
        assert lost.value.role == "three"
        await three.restart()  # which starts no other process
        pids = [(await e.call(Counter.pid)).value for e in (two, three)]
        assert pids[0] == pids[1] != pid
        assert group.generation == 1

    asyncio.run(body())


def test_a_bug_ends_the_process_and_its_traceback_is_a_note(group: ServiceGroup) -> None:
    two = GroupExecutor(group, "two")

    async def body() -> None:
        with raises(RoleLostError, "rank-failed", "ValueError: a bug") as lost:
            await two.call(Counter.stumble)
        assert "in stumble" in lost.value.__cause__.__notes__[0]  # type: ignore[union-attr]

    asyncio.run(body())


def test_a_call_that_takes_far_longer_than_others_is_taken_to_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one kind: 20 times the median, for as much work, once five are known; at half a line."""
    assert deadline_s([1.0] * 4, 10.0) is None
    assert deadline_s([1.0, 2.0, 9.0, 1.0, 2.0], 100.0) == 20 * 2.0 * 100
    assert deadline_s([1e-3] * 5, 1.0) == 300.0
    assert remote_of(GeneratorService.decode).size(128, 0) == 128
    assert remote_of(ScorerService.extend).size([]) == 1
    assert remote_of(LearnerService.train).size(SimpleNamespace(total_tokens=0)) == 1
    monkeypatch.setattr("stretto.workers.group_executor.QUICK_S", 0.5)
    said: list[str] = []
    group = group_of({"two": (Counter, (2,))}, say=said.append).start()
    try:
        executor = GroupExecutor(group, "two")
        executor.aside_on_all(Counter.release, timeout_s=60.0)
        for _ in range(5):
            executor.ask(Counter.hold)
        assert not said
        executor.ask(Counter.stall)
        with raises(RankError, "rank-silent", "0.5 s"):
            executor.ask(Counter.hold)
    finally:
        group.close()
    assert said == ["counter: the process of the counter: its work has taken 0.25 s; it may 0.5 s"]


def test_a_process_at_work_answers_on_the_side(group: ServiceGroup) -> None:
    two = GroupExecutor(group, "two")
    worker = threading.Thread(target=lambda: two.ask(Counter.hold))
    worker.start()
    assert two.aside_on_all(Counter.holding, timeout_s=60.0) == [True]
    assert two.aside_on_all(Counter.count, timeout_s=5.0) == [Reply(0)]
    assert "self.released.wait(60)" in group.stacks()
    assert group.used_bytes()[0][""] > 10 << 20
    two.aside_on_all(Counter.release, timeout_s=5.0)
    worker.join()


def test_a_local_process_listens_on_the_loopback_alone(group: ServiceGroup) -> None:
    """So do the groups of gloo and NCCL: both read the interface from the environment."""
    pid = GroupExecutor(group, "two").ask(Counter.pid).value
    open_ = [c for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert open_
    assert {c.laddr.ip for c in open_} == {"127.0.0.1"}
    environment = GroupExecutor(group, "two").ask(Counter.environment).value
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        assert environment[name] == os.environ.get(name, interface_of("127.0.0.1"))


class Slice(Service):
    """A rank's slice of a model, which meets the others in its methods, and can misbehave."""

    def __init__(self, alone_s: float) -> None:
        super().__init__(None)
        services_module.ALONE_S, self._rank = alone_s, dist.get_rank()

    @Remote("work", alike=True)
    def work(self, how: str) -> Reply[Any]:
        """Return the same on all ranks, but for what is asked for."""
        if how == "all refuse" or (how == "one refuses early" and self._rank):
            raise EngineError("not so", "refused")
        dist.all_reduce(torch.ones(1))
        if how == "one refuses late" and self._rank:
            raise EngineError("not so", "refused")
        return Reply([7, 2.5 if how == "unlike" and self._rank else 1.5])


@pytest.fixture
def slices() -> Iterator[ServiceGroup]:
    makes: Makes = {"slice": (Slice, (0.2,))}
    group = ServiceGroup(GroupSpec(2), makes, name="slices").start()
    yield group
    group.close()


def test_what_ranks_return_alike_comes_from_the_first_alone(slices: ServiceGroup) -> None:
    answers = slices.call(RankServices.answer, "slice", "work", ("",))
    assert answers == [Reply([7, 1.5]), Reply(None)]
    with raises(EngineError, "refused"):  # on all: they are in step
        slices.ask(["slice"], Slice.work, "all refuse")
    assert slices.ask(["slice"], Slice.work, "")[0].value == [7, 1.5]


@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [
        ("unlike", "rank-failed", "ranks-disagree"),
        ("one refuses early", "rank-failed", "refused"),  # the other waits for it for ever
        ("one refuses late", "ranks-out-of-step", "refused"),
    ],
)
def test_ranks_that_are_out_of_step_are_found_at_once_and_replaced(
    how: str, code: str, cause: str, slices: ServiceGroup
) -> None:
    executor = GroupExecutor(slices, "slice")

    async def body() -> None:
        with raises(RoleLostError, code) as lost:
            await executor.call(Slice.work, how)
        error = lost.value.__cause__
        assert error is not None
        assert isinstance(error.__cause__, StrettoError)
        assert error.__cause__.code == cause
        await executor.restart()
        assert (await executor.call(Slice.work, "")).value == [7, 1.5]

    asyncio.run(body())


def test_a_process_that_is_stopped_does_not_answer(group: ServiceGroup) -> None:
    two = GroupExecutor(group, "two")
    pid = two.ask(Counter.pid).value
    os.kill(pid, signal.SIGSTOP)
    with raises(RankError, "no-answer-aside", "process of the counter", "its work (two)", "0.2 s"):
        two.aside_on_all(Counter.count, timeout_s=0.2)
    assert "during 'stacks'" in group.stacks()
    group.close()
    assert not psutil.pid_exists(pid)


def test_what_a_process_prints_goes_to_its_log_and_warnings_are_said(tmp_path: Path) -> None:
    said = Queue[str]()
    log = tmp_path / "logs" / "counter.log"
    ranks = group_of({"two": (Counter, (2,))}, GroupSpec(logs=[log]), say=said.put).start()
    try:
        ranks.call(RankServices.answer, "two", "warn", ())
        ranks.call(RankServices.answer, "two", "pid", ())
        assert said.get(timeout=5) == "counter: UserWarning: mind the gap"
        assert said.empty()
        with raises(RankError, "rank-failed", "a bug"):
            ranks.call(RankServices.answer, "two", "stumble", ())
        assert log.exists()
    finally:
        ranks.close()


def test_a_line_is_said_once_and_logged_each_time(tmp_path: Path) -> None:
    said = Queue[str]()
    log = tmp_path / "counter.log"
    ranks = group_of({"two": (Counter, (2,))}, GroupSpec(logs=[log]), say=said.put).start()
    try:
        for _ in range(3):
            ranks.call(RankServices.answer, "two", "chatter", ())
        lines = ["counter: WARNING stretto: slow disk", "counter: WARNING transformers.x: old name"]
        assert [said.get(timeout=5) for _ in lines] == lines
        ranks.call(RankServices.answer, "two", "pid", ())
        assert said.empty()
        text = log.read_text()
        assert (text.count("slow disk"), text.count("old name")) == (3, 3)
        assert text.count("a bar") == 3
    finally:
        ranks.close()


def test_clocks_are_moved_as_little_as_calls_and_answers_ask_for() -> None:
    def work(start_s: float, end_s: float) -> list[Work]:
        return [Work("work", start_s, end_s, {})]

    assert ahead(5.0, [], 10.0, 11.0) == 5.0
    assert ahead(5.0, work(5.2, 5.8), 10.0, 11.0) == 5.0  # 10.2 to 10.8
    assert ahead(5.0, work(4.5, 5.0), 10.0, 11.0) == 5.5  # it would begin before the call
    assert ahead(5.0, work(5.5, 6.25), 10.0, 11.0) == 4.75  # it would end after the answer
    assert ahead(5.0, work(5.0, 6.5), 10.0, 11.0) == 4.75  # too long: as much on either side
    two = [*work(5.0, 5.5), *work(5.5, 6.25)]
    assert ahead(4.0, two, 10.0, 11.5) == 5.0


class Drifting(ServiceGroup):
    """Ranks of one service, in this process, whose clock runs 1 % too fast."""

    _clock: ManualClock

    def _run(self, *_: Any, **__: Any) -> list[Any]:
        self._clock.advance(0.25)
        start_s = self._clock.now() * 1.01
        self._clock.advance(50.0)
        end_s = self._clock.now() * 1.01
        self._clock.advance(0.25)
        earlier = Work("swap", start_s - 9.0, start_s - 8.0, beside=True)  # before it was asked
        return [Reply(None, (earlier, Work("work", start_s, end_s, {})))]


def test_spans_stay_in_place_when_clocks_drift_apart() -> None:
    clock = ManualClock()
    group = Drifting(ONE, {}, clock=clock)
    for _ in range(1000):  # after which clocks are 500 s apart
        sent_s = clock.now()
        swap, work = group.ask(["any"], Slice.work, "")[0].work
        assert work.start_s - swap.start_s == pytest.approx(9.0)
        assert abs(work.start_s - (sent_s + 0.25)) <= 0.5
        assert abs(work.end_s - (clock.now() - 0.25)) <= 0.5
    group.close()


class Slow(Service):
    """A service that takes a minute to make."""

    def __init__(self) -> None:
        super().__init__(None)
        threading.Event().wait(60)


def test_a_process_can_be_ended_while_it_starts() -> None:
    def end(facts: Any) -> None:  # before the service is made
        threading.Thread(target=slow.close).start()

    since_s = time.monotonic()
    slow = group_of({"slow": (Slow, ())}, check=end)
    with raises(RankError, "ranks-ended"):
        slow.start()
    with raises(RankError, "ranks-ended", "was ended with the run"):
        slow.start()
    assert time.monotonic() - since_s < 60


def test_each_phase_of_a_start_has_a_deadline_and_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_module, "SAY_EVERY_S", 1.0)
    said = list[str]()
    with raises(RankError, "rank-silent", "the counter", "its start (loading)", "in 4 s"):
        group_of({"slow": (Slow, ())}, GroupSpec(timeout_s=4.0), say=said.append).start()
    loading = [line.rpartition(" (loading)")[2] for line in said if "(loading)" in line]
    assert loading == [f" has taken {s} s; it may 4 s" for s in (1, 2, 3)]


class Mortal(Service):
    """A service whose process dies while it is made, as often as a file has lines left."""

    def __init__(self, deaths: Path) -> None:
        super().__init__(None)
        left = deaths.read_text().splitlines()
        deaths.write_text("\n".join(left[1:]))
        if left:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("deaths", "restarts"), [(0, 0), (2, 2), (1, 0), (3, 2)])
def test_a_death_while_processes_start_is_retried_as_often_as_any_other(
    deaths: int, restarts: int, tmp_path: Path
) -> None:
    file, said = tmp_path / "deaths", list[str]()
    file.write_text("dies\n" * deaths)
    group = group_of({"mortal": (Mortal, (file,))}, say=said.append)
    if deaths > restarts:
        with raises(RankError, "rank-died", "SIGKILL", "its start"):
            group.start(restarts)
    else:
        group.start(restarts).close()
    tried = min(deaths, restarts)
    assert [line.rpartition(" (")[2] for line in said] == [
        f"restart {i} of {restarts})" for i in range(1, tried + 1)
    ]


def test_an_error_of_the_start_is_raised_as_it_is() -> None:
    with raises(ConfigError, "no-factor"):
        group_of({"none": (Counter, (0,))}).start()


def test_the_preflight_may_refuse_before_anything_is_made() -> None:
    seen: list[Facts] = []

    def refuse(facts: Any) -> None:
        seen.extend(facts)
        raise RankError("not here", code="not-here")

    with raises(RankError, "not-here"):
        group_of({"none": (Counter, (0,))}, check=refuse).start()
    assert seen[0].threads == 1
    assert seen[0].pid != os.getpid()
    assert {"python", "torch", "stretto", "transformers"} <= seen[0].versions.keys()


def facts(**changes: Any) -> Facts:
    return replace(Facts("one", 1, {"torch": "2.13"}, 2, ""), **changes)


def test_the_preflight_names_ranks_that_differ() -> None:
    check({"a": facts(), "b": facts()}, {"a": 2})
    with raises(RankError, "versions-differ", "torch", "'a' on one has 2.13, 'b' on two has 2.12"):
        check({"a": facts(), "b": facts(node="two", versions={"torch": "2.12"})}, {})
    with raises(RankError, "threads-differ", "'a' on one", "1 CPU threads", 2):
        check({"a": facts()}, {"a": 1})
    shared = {"a": facts(device_id="G"), "b": facts(device_id="G")}
    with raises(RankError, "gpu-shared", "'b' and 'a'", "G of one"):
        check(shared, {})
    check(shared, {}, {"a": "cuda:0", "b": "cuda:0"})
    with raises(RankError, "gpu-shared"):
        check(shared, {}, {"a": "cuda:0", "b": "cuda:1"})


def test_a_rank_with_an_interpreter_of_its_own_may_have_other_versions() -> None:
    """All but Stretto's, and Python's up to the minor version."""
    here = {"stretto": "1", "python": "3.11.7", "torch": "2.13", "ray": ""}
    there = here | {"python": "3.11.9", "torch": "2.14", "ray": "2.60"}
    for apart in ({"a"}, {"b"}):
        check({"a": facts(versions=here), "b": facts(versions=there)}, {}, {}, apart)
    with raises(RankError, "versions-differ", "python"):
        check({"a": facts(versions=here), "b": facts(versions=there)}, {})
    for changed in ({"stretto": "2"}, {"python": "3.12.1"}):
        other = facts(versions=there | changed)
        with raises(RankError, "versions-differ", next(iter(changed))):
            check({"a": facts(versions=here), "b": other}, {}, {}, {"b"})


def test_tensors_go_by_value_on_the_side_and_what_cannot_travel_is_an_error(
    group: ServiceGroup,
) -> None:
    two = GroupExecutor(group, "two")
    (tensor,) = two.aside_on_all(Counter.tensor, timeout_s=10.0)
    assert tensor.tolist() == [1.0] * 1000
    with raises(RankError, "rank-failed", "lambda"):
        two.aside_on_all(Counter.function, timeout_s=10.0)
    assert two.aside_on_all(Counter.count, timeout_s=10.0) == [Reply(0)]
