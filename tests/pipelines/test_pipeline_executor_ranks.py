"""Ranks that fail, and ranks that are ended: always all of them, soon, and with the cause."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from _published import greedy
from pipeline_helpers import problem_of
from pipeline_misbehaving import Misbehaving
from pipeline_models import critic_of, language_model, load_stages
from pipeline_workers import Batch, Trainer
from raising import raises
from rank_helpers import alive, call_each, deaths_of, require_gone
from stretto.errors import LearnerError, RankError
from stretto.pipelines.executor.stages import StageLayout
from stretto.workers.connection import RankConnection
from stretto.workers.forkserver import NAME
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec

LIMIT_S = 10.0


@pytest.fixture
def ranks() -> Iterator[RankGroup]:
    ranks = RankGroup(GroupSpec(2, threads=3), Misbehaving, ("hello",)).start()
    yield ranks
    ranks.close()


def require_none_left() -> None:
    for child in psutil.Process().children(recursive=True):
        assert child.name() != NAME or child.status() == psutil.STATUS_ZOMBIE


def test_calls_answer_by_rank(ranks: RankGroup) -> None:
    assert ranks.call(Misbehaving.greet, "you") == ["hello you, from 0", "hello you, from 1"]
    assert call_each(ranks, Misbehaving.total, [(3,), (4,)]) == [7.0, 7.0]
    assert ranks.call(Misbehaving.threads) == [3, 3]
    ranks.close()
    ranks.close()
    with raises(RankError, "ranks-ended"):
        ranks.call(Misbehaving.greet, "you")
    require_none_left()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "raise",
            "rank 1 of 2 failed in 'fail': ValueError: no such luck (pipeline_misbehaving",
        ),
        ("own", "rank 1 of 2 failed in 'fail': LearnerError: the loss is not finite. All ranks"),
        # Whether the other has noticed by then is a matter of luck.
        ("exit", "rank 1 of 2 ended with exit code 3 in the middle of 'fail'"),
        ("kill", "rank 1 of 2 was killed by SIGKILL (by hand, or for want of memory) in the mi"),
    ],
)
def test_a_failure_ends_all_and_has_its_cause(ranks: RankGroup, how: str, said: str) -> None:
    begun = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.call(Misbehaving.fail, how, 1)
    assert time.monotonic() - begun < LIMIT_S
    assert str(caught.value).startswith(said)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, LearnerError) == (how == "own")
    notes = getattr(caught.value, "__notes__", [])
    # Rank 0 may have noticed a death first, and then there is what it raised.
    traces = [note for note in notes if note.startswith("On rank 1:\nTraceback (mos")]
    assert len(traces) == (how == "raise")
    require_none_left()


def test_a_death_after_an_error_does_not_hide_it(ranks: RankGroup) -> None:
    cause = "rank 0 had raised: ValueError: the true cause (pipeline_misbehaving.py"
    with raises(RankError, "rank-died", "rank 1 of 2", "SIGABRT", "'both'", cause) as caught:
        ranks.call(Misbehaving.both)
    assert caught.value.__notes__[0].startswith("On rank 0:\nTraceback")


def test_a_death_between_two_calls_is_noticed_at_once_and_raised(
    ranks: RankGroup,
) -> None:
    deaths = deaths_of(ranks)
    ranks.remedy = "try again"
    pids = ranks.call(Misbehaving.pid)
    assert deaths.empty()
    os.kill(pids[0], signal.SIGKILL)
    death = deaths.get(timeout=LIMIT_S)
    require_none_left()
    assert str(death) == (
        "rank 0 of 2 was killed by SIGKILL (by hand, or for want of memory) between two calls. "
        "All ranks have been ended; fix the cause, and try again"
    )
    with pytest.raises(RankError) as caught:
        ranks.call(Misbehaving.pid)
    assert caught.value is death
    assert deaths.empty()


def test_an_end_that_was_asked_for_is_no_death(ranks: RankGroup) -> None:
    deaths = deaths_of(ranks)
    ranks.close()
    for thread in threading.enumerate():
        if thread.name == "connection":
            thread.join(LIMIT_S)
    assert deaths.empty()


def test_arguments_are_packed_one_by_one(ranks: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    send = RankConnection.send

    def sent(connection: RankConnection, message: memoryview) -> Any:
        done.append("sent")
        return send(connection, message)

    monkeypatch.setattr(RankConnection, "send", sent)

    class Packed:
        def __reduce__(self) -> Any:
            done.append("packed")
            return int, (3,)

    call_each(ranks, Misbehaving.take, [(Packed(),), (Packed(),)])
    assert done == ["packed", "sent"] * 2


def test_what_cannot_be_packed_is_named_and_ends_the_ranks(ranks: RankGroup) -> None:
    with pytest.raises(pickle.PicklingError, match=r"local object .*<lambda>"):
        call_each(ranks, Misbehaving.take, [(1,), (lambda: 0,)])
    with raises(RankError, "ranks-ended"):
        ranks.call(Misbehaving.pid)
    require_none_left()


def test_the_first_to_fail_is_named_even_if_another_is_heard_before(ranks: RankGroup) -> None:
    with raises(RankError, "rank-failed", "rank 1 of 2", "'late': SlowError: early on rank 1"):
        ranks.call(Misbehaving.late)


def test_a_rank_that_cannot_start_is_named() -> None:
    with raises(RankError, "rank-failed", "of 2", "TypeError: Misbehaving"):
        RankGroup(GroupSpec(2), Misbehaving).start()
    require_none_left()


DIVIDED = {
    "stages": StageLayout(2, 1, 2, 1),
    "slices": StageLayout(2, 1, 2, 1, 2, 2),
    "replicas": StageLayout(2, 1, 2, 1, replicas=2),
    "replicas of slices, merged": StageLayout(2, 1, 4, 1, 2, 1, replicas=2),
}


@pytest.mark.parametrize("layout", DIVIDED.values(), ids=list(DIVIDED))
def test_a_rank_killed_in_the_middle_of_a_step_ends_the_step(layout: StageLayout) -> None:
    """The last slice of the actor's last stage dies alone. All ranks wait for it, or for others."""
    actor = language_model("llama", layers=4)
    critic = critic_of(actor)
    ranks = RankGroup(GroupSpec(layout.ranks), Trainer).start()
    load_stages(ranks, layout, actor, critic)
    batches = [Batch(torch.ones(2, 5, dtype=torch.long), (5, 4))] * 4
    schedule = greedy(problem_of(layout, 4, 4))
    ranks.call(Trainer.step, schedule, batches, batches)
    doomed = layout.rank("actor", 0, 1, layout.actor_tp - 1, layout.replicas - 1)
    ranks.call(Trainer.doom, doomed)
    begun = time.monotonic()
    named = f"rank {doomed} of {layout.ranks} was killed by SIGKILL"
    with raises(RankError, "rank-died", named, "'step'"):
        ranks.call(Trainer.step, schedule, batches, batches)
    assert time.monotonic() - begun < LIMIT_S
    require_none_left()


def test_close_ends_ranks_at_work(ranks: RankGroup) -> None:
    timer = threading.Timer(0.5, ranks.close)
    timer.start()
    with raises(RankError, "ranks-ended"):
        ranks.call(Misbehaving.hang)
    timer.join()
    require_none_left()


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
from pipeline_misbehaving import Misbehaving
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec
ranks = RankGroup(GroupSpec(2), Misbehaving, ("hello",)).start()
print(*ranks.call(Misbehaving.pid), flush=True)
ranks.call(Misbehaving.hang)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_parent(how: signal.Signals) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]))  # no guard of __main__ is needed
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert all(alive(pid) for pid in pids)
    parent.send_signal(how)
    _, said = parent.communicate(timeout=LIMIT_S)
    assert ("KeyboardInterrupt" in said) == (how == signal.SIGINT)
    require_gone(pids, LIMIT_S)
