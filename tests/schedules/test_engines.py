"""Locations of rollouts, as a state machine. No torch."""

from __future__ import annotations

import pytest

from raising import raises
from stretto.errors import LifecycleError
from stretto.schedules.engines import Locations, Place
from stretto.schedules.rollout import Rollout
from stretto.types import Prompt


def rollouts(n: int) -> list[Rollout]:
    return [Rollout(i, Prompt(i, (1,), ""), i) for i in range(n)]


def test_a_rollout_has_one_location() -> None:
    locations = Locations()
    (rollout,) = rollouts(1)
    assert locations.place_of(rollout) is None
    way = [
        (Place.WAITING, 0),
        (Place.DECODING, 0),
        (Place.PARKED, 0),
        (Place.MOVING, None),
        (Place.PARKED, 1),
        (Place.MOVING, 2),
        (Place.DECODING, 2),
        (Place.NOWHERE, None),  # its engine was lost
    ]
    for place, engine in way:
        locations.put(rollout, place, engine)
        assert locations.place_of(rollout) is place
        there = [(p, e) for p in Place for e in (None, 0, 1, 2) if locations.at(p, e)]
        assert there == [(place, engine)]
        assert [p for p in Place if locations.any_at(p)] == [place]
    locations.remove(rollout)
    assert not locations.any_at(*Place)
    locations.remove(rollout)  # it is not there any more
    assert locations.place_of(rollout) is None


def test_rollouts_of_a_location_are_in_the_order_of_their_coming() -> None:
    locations = Locations()
    for rollout in (first := rollouts(3)):
        locations.put(rollout, Place.WAITING, 1)
    locations.put(first[0], Place.WAITING, 1)  # behind the others now
    assert [*locations.at(Place.WAITING, 1)] == [1, 2, 0]
    assert [*locations.at(Place.WAITING, 1).values()] == [first[1], first[2], first[0]]


@pytest.mark.parametrize(
    ("before", "place"),
    [
        ([], Place.DECODING),
        ([], Place.PARKED),
        ([Place.WAITING], Place.MOVING),
        ([Place.WAITING], Place.PARKED),
        ([Place.WAITING, Place.DECODING, Place.PARKED], Place.DECODING),
        ([Place.WAITING, Place.DECODING, Place.MOVING, Place.DROPPED], Place.PARKED),
        ([Place.NOWHERE], Place.DROPPED),
    ],
)
def test_a_rollout_comes_to_no_place_from_elsewhere(before: list[Place], place: Place) -> None:
    locations = Locations()
    (rollout,) = rollouts(1)
    for each in before:
        locations.put(rollout, each)
    with raises(LifecycleError, "no-such-edge"):
        locations.put(rollout, place)
    assert locations.place_of(rollout) is (before[-1] if before else None)
