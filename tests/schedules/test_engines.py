"""Locations of rollouts, and moves between generators. No torch."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from raising import raises
from schedule_helpers import Setting, schedule_of
from stretto.config.knobs import Settings
from stretto.errors import LifecycleError
from stretto.runtime.sim.loop import run
from stretto.schedules.engines import Locations, Place
from stretto.schedules.rollout import Rollout
from stretto.testing import World
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


def test_an_episode_goes_on_once_its_own_move_has_ended() -> None:
    """Rollout 1 answered first and lands last: it does not keep rollout 0 from going on."""

    async def main() -> None:
        schedule = schedule_of(Setting(Settings(2, 1, 100, 1, score_on="rollout")), World([3]))
        pool, first = schedule._pool, rollouts(2)
        for rollout in first:
            for place in (Place.WAITING, Place.DECODING, Place.MOVING):
                pool._locations.put(rollout, place)
        async with asyncio.TaskGroup() as group:
            for rollout in reversed(first):
                schedule._waits.begin(partial(pool.resume, rollout), group)
            for landing in first:
                await asyncio.sleep(1)
                pool._locations.put(landing, Place.PARKED, 0)
                pool._moves.landed.set()
                await asyncio.sleep(1)
                places = [pool._locations.place_of(rollout) for rollout in first]
                assert places == [Place.WAITING, Place.WAITING if landing.id else Place.MOVING]

    run(main())
