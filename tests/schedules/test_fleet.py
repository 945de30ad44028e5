"""What may become of a role's process: edges, budgets, totals. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raising import raises
from stretto.errors import LifecycleError
from stretto.schedules.fleet import Event, Fleet, Member, MemberState
from stretto.types import WeightsRef

EVENTS: Sequence[Event] = get_args(Event)
EDGES = {
    "healthy": {"died": "dead"},
    "dead": {"starting": "starting", "retired": "retired"},
    "starting": {"started": "stale", "died": "dead"},
    "stale": {"loaded": "healthy", "died": "dead"},
    "retired": {},
}
WAY_TO: Mapping[str, Sequence[Event]] = {
    "healthy": (),
    "dead": ("died",),
    "starting": ("died", "starting"),
    "stale": ("died", "starting", "started"),
    "retired": ("died", "retired"),
}


def tell(member: Member, event: Event) -> None:
    member.note(event, "out of memory" if event == "died" else "")


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("start", MemberState)
def test_a_member_moves_along_its_edges_only(start: MemberState, event: Event) -> None:
    member = Member("critic", 3)
    for before in WAY_TO[start]:
        tell(member, before)
    assert member.state is start
    if after := EDGES[start].get(event):
        tell(member, event)
        assert member.state == after
    else:
        with raises(LifecycleError, "no-such-edge", "critic", start, event):
            tell(member, event)
        assert member.state is start


@given(st.lists(st.sampled_from(EVENTS), max_size=60), st.integers(0, 3))
def test_a_new_member_serves_after_a_weight_sync_and_within_the_budget(
    events: list[Event], restarts: int
) -> None:
    """Whatever is tried: what is refused leaves no trace, and what happened adds up."""
    fleet = Fleet(restarts)
    member, happened = fleet.member("critic"), []
    for event in events:
        before = vars(member).copy()
        try:
            tell(member, event)
        except LifecycleError:
            assert vars(member) == before
        else:
            happened.append(event)
    assert member.deaths == happened.count("died")
    assert member.lives == happened.count("starting") <= restarts
    assert fleet.totals == (member.deaths, member.lives)
    assert member.deaths - member.lives == (member.state in ("dead", "retired"))
    assert "retired" not in happened[:-1]
    for first, second in pairwise(happened):
        assert (first == "starting") <= (second in ("started", "died"))
        assert (first == "started") <= (second in ("loaded", "died"))
    assert member.serves == (not happened or happened[-1] == "loaded")


def test_the_budget_is_each_member_s_own() -> None:
    fleet = Fleet(1)
    first, second = fleet.member("generator 0"), fleet.member("generator 1")
    for event in ("died", "starting", "died"):
        tell(first, event)
    assert (first.exhausted, second.exhausted) == (True, False)
    with raises(LifecycleError, "restarts-spent", "generator 0", 1):
        tell(first, "starting")
    assert first.cause == "out of memory"
    assert fleet.metrics() == {"cluster/deaths": 2.0, "cluster/restarts": 1.0}
    assert Fleet(0).metrics() == {}


def test_each_loss_is_told_once_and_without_the_advice_to_start_again() -> None:
    fleet = Fleet(2)
    member = fleet.member("critic")
    assert fleet.losses() == []
    member.note("died", "critic was lost: it was killed; fix the cause, and start again")
    tell(member, "starting")
    assert fleet.losses() == ["critic was lost: it was killed (restart 1 of 2)"]
    assert fleet.losses() == []
    tell(member, "died")  # and is about to be started
    assert fleet.losses() == ["out of memory (restart 2 of 2)"]
    tell(member, "starting")
    tell(member, "died")
    assert fleet.losses() == ["out of memory (not replaced)"]


def test_tickets_and_totals_outlive_the_run() -> None:
    zero, one = (WeightsRef(m, v, "x") for m, v in (("actor", 0), ("actor", 1)))
    fleet = Fleet(2, {"actor": zero, "critic": zero})
    tell(fleet.member("critic"), "died")
    fleet.held = {"actor": one}
    again = Fleet(2, {"actor": zero, "critic": zero})
    again.load_state_dict(fleet.state_dict())
    assert again.held == {"actor": one, "critic": zero}
    assert again.metrics() == {"cluster/deaths": 1.0, "cluster/restarts": 0.0}
    tell(again.member("critic"), "died")
    assert again.totals == (2, 0)
