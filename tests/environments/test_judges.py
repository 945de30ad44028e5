"""Reward functions that look at environments, called where these live."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from bridge_helpers import ENCODER, WORLDS, Player, call, places_of, role_of
from worlds import Vault, looks

from raising import raises
from stretto.assembly.environments import open_places
from stretto.config import EnvironmentConfig, TaskConfig
from stretto.config.sections import reward_source
from stretto.environments.executors import EnvironmentExecutor, LocalEnvironment, settings_of
from stretto.environments.role import EnvironmentRole
from stretto.errors import ConfigError
from stretto.scoring.functions import FunctionScorer

NAMES = ("looks", "by_name", "Counts", "fails")


def judge(name: str, function: Any = None, *, environment: bool = True) -> FunctionScorer:
    source = reward_source(name if function else f"{WORLDS}:{name}")
    columns = ("secret", "environment")
    return FunctionScorer(
        source,
        TaskConfig(),
        0,
        ENCODER.tokenizer,
        columns=columns,
        function=function,
        environment=environment,
    )


@pytest.fixture(scope="module")
def judges() -> Mapping[str, FunctionScorer]:
    return {name: judge(name) for name in NAMES}


@pytest.fixture(scope="module")
def vaults() -> Iterator[list[EnvironmentExecutor]]:
    places = places_of("Cracked", judges=NAMES, reward_timeout_s=1.0)
    yield places
    places[0].close()


def last_of(role: EnvironmentRole, *turns: str, id_: int = 1, **data: Any) -> Any:
    """Play an episode; return its last observation."""

    async def go() -> Any:
        player = Player(role, id_, **data)
        await player.open()
        for turn in turns:
            await player.say(turn)
        await role.release([player.id])
        return player.log[-1]

    return asyncio.run(go())


def scores_of(seen: Any) -> dict[str, Any]:
    """Verdicts by the names of functions."""
    return {name.rpartition(":")[2]: score for name, score in seen.record["scores"].items()}


def test_a_function_reads_the_state_of_an_environment_after_its_episode(
    vaults: list[EnvironmentExecutor], judges: Mapping[str, FunctionScorer]
) -> None:
    role = role_of(vaults, judges=[judges[name] for name in ("looks", "by_name", "Counts")])
    look = call("look", lock=1)
    # 2 looks and 5 messages, then none and 1; the object of Counts is made once.
    for number, (turns, score) in enumerate((((look, look, "8"), 25.0), (("8",), 1.0)), 1):
        seen = last_of(role, *turns, secret=7)
        assert seen.ended_by == "environment"
        assert seen.reward is None
        assert scores_of(seen) == {
            "looks": {"value": score},
            "by_name": {"value": None, "extra": {"kind": "Cracked"}},
            "Counts": {"value": float(number)},
        }


def test_it_is_called_where_a_limit_ends_the_episode(
    vaults: list[EnvironmentExecutor], judges: Mapping[str, FunctionScorer]
) -> None:
    role = role_of(vaults, EnvironmentConfig(max_turns=2), judges=[judges["looks"]])
    look = call("look", lock=1)
    seen = last_of(role, look, look, secret=7)
    assert seen.ended_by == "turns"
    assert scores_of(seen)["looks"]["value"] == 10.0 * 2 + 4


@pytest.mark.parametrize(
    ("secret", "error"),
    [
        (1, "no such drawer"),
        (2, "it took longer than 1 s"),
        (3, "its process ended"),
        (4, "2 scores for 1 samples"),
    ],
)
def test_what_goes_wrong_is_a_failure_and_no_number(
    vaults: list[EnvironmentExecutor], judges: Mapping[str, FunctionScorer], secret: int, error: str
) -> None:
    role = role_of(vaults, judges=[judges["fails"]])
    found = scores_of(last_of(role, "hm", secret=secret))["fails"]
    assert set(found) == {"error"}
    assert error in found["error"]
    assert "failed on rollout 1" in found["error"]
    assert "response: 'hm'" in found["error"]
    vaults[0].start()  # if it was lost
    assert scores_of(last_of(role, "hm", id_=2, secret=6))["fails"] == {"value": 6.0}


def test_environments_of_a_dict_and_objects_of_this_process() -> None:
    settings = settings_of(EnvironmentConfig(timeout_s=5))
    named = {"looks": looks}
    place = LocalEnvironment({"environments": {"vault": Vault}}, settings, named)
    place.start()
    role = role_of([place], judges=[judge("looks", looks)])
    seen = last_of(role, call("look", lock=1), "8", secret=7, environment="vault")
    place.close()
    assert seen.reward == 1.0
    assert seen.record["scores"] == {"looks": {"value": 13.0}}


def test_without_an_environment_the_parameter_is_a_column() -> None:
    with raises(ConfigError, "missing-columns"):
        judge("fails", environment=False)


@pytest.mark.parametrize(("objects", "functions"), [({"Vault": Vault}, {}), ({}, {"looks": looks})])
def test_functions_that_are_not_where_environments_are_get_refused(
    objects: Mapping[str, Any], functions: Mapping[str, Any]
) -> None:
    names: Sequence[str] = ["looks"] if functions else [f"{WORLDS}:looks"]
    source = "Vault" if objects else f"{WORLDS}:Vault"
    with raises(ConfigError, "environments-mixed"):
        open_places(EnvironmentConfig(sources=(source,)), objects, names, functions)


def test_tools_have_no_objects_to_look_at() -> None:
    with raises(ConfigError, "no-environments", "add are no environments"):
        places_of("add", judges=["fails"])
