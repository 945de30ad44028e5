"""Placements: which roles share a process, on what, with how many threads. Pure."""

from __future__ import annotations

import re
import tomllib
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from raising import raises
from stretto.config import ClusterConfig, Config, recipes
from stretto.errors import ConfigError
from stretto.layout import Layout
from stretto.runtime.placement import (
    ProcessPlacement,
    memory,
    places,
    remarks,
    shares_weights,
    table,
)
from stretto.runtime.processes import RayLauncher
from stretto.workers.rank import GroupSpec

SLICES: dict[str, Any] = {"ranks": 2, "layout": {"generator": {"tp": 2}}}


def config(**settings: Any) -> Config:
    return Config.model_validate({"runtime": "local", **settings})


def shown(found: list[ProcessPlacement]) -> list[tuple[tuple[str, ...], int, str]]:
    return [(tuple(placed.role for placed in p.roles), p.threads, p.device) for p in found]


def remarks_on(settings: Config, cores: int, gpus: int) -> list[str]:
    knobs, engines = settings.schedule.knobs, settings.rollout.engines
    return remarks(knobs, engines, places(settings, cores, gpus), cores, gpus)


def test_each_role_has_a_process_and_all_cores_where_nothing_overlaps() -> None:
    found = places(config(reward={"sources": ("model:./rm", "task")}), 8, 0)
    roles = ["learner", "generator", "model:./rm", "reference", "critic"]
    assert shown(found) == [((role,), 0, "cpu") for role in roles]
    assert found[2].name == "model:._rm"  # a file's name


def test_cores_are_shared_out_among_roles_that_overlap() -> None:
    found = places(config(schedule={"preset": "oppo"}), 8, 0)
    assert [p.threads for p in found] == [8, 4, 4, 4]  # without lag the learner works alone
    found = places(config(schedule={"preset": "async"}), 8, 0)
    assert [p.threads for p in found] == [4, 2, 2, 2]
    found = places(config(schedule={"preset": "async", "threads": (3, 2, 1)}), 8, 0)
    assert [p.threads for p in found] == [1, 3, 2, 2]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("apart", ["learner", "generator 0", "generator 1", "reference", "critic"]),
        ("together", ["learner", "generator 0", "generator 1", "reference+critic"]),
        (
            "generators",
            ["learner", "generator 0+reference 0+critic 0", "generator 1+reference 1+critic 1"],
        ),
    ],
)
def test_scorers_stand_where_the_rule_says(rule: str, expected: list[str]) -> None:
    settings = config(rollout={"engines": 2}, cluster={"scorers": rule})
    assert [p.name for p in places(settings, 4, 0)] == expected


def test_where_stragglers_move_scorers_sit_with_the_generators_that_may_be_freed() -> None:
    fused = config(rollout={"engines": 2}, schedule={"preset": "rlhfuse"})
    roles = places(fused, 4, 0)[2].roles
    assert [(s.role, s.scorer, s.host) for s in roles] == [
        ("generator 1", "", None),
        ("reference 1", "reference", 1),
        ("critic 1", "critic", 1),
    ]
    streamed = config(rollout={"engines": 2}, schedule={"preset": "stretto"})
    assert len(places(streamed, 4, 0)) == 5  # they work while all generators decode


def test_processes_by_hand_come_first_and_the_rest_goes_by_the_rule() -> None:
    by_hand = [
        {"roles": ["generator", "reference"], "threads": 3, "device": "cuda:1"},
        {"roles": ["learner", "critic"]},
    ]
    settings = config(
        cluster={"processes": by_hand}, reward={"sources": ("model:rm",)},
        schedule={"score_on": "rollout"},
    )  # fmt: skip
    found = places(settings, 4, 2)
    assert shown(found) == [
        (("learner", "critic"), 4, "cuda:0"),
        (("generator", "reference"), 3, "cuda:1"),
        (("model:rm",), 2, "cuda:0"),
    ]
    assert found[1].roles[1].host == 0  # it works when the generator has nothing left to decode


def test_copies_of_a_scorer_have_a_process_each_and_numbers() -> None:
    copies = [{"roles": [f"reference {i}", f"critic {i}"], "ranks": 2} for i in range(2)]
    settings = config(cluster={"processes": copies}, reward={"sources": ("model:rm",)})
    found = places(settings, 4, 8)
    assert [tuple(placed.role for placed in place.roles) for place in found] == [
        ("learner",),
        ("reference 0", "critic 0"),
        ("reference 1", "critic 1"),
        ("generator",),
        ("model:rm",),
    ]
    assert [placed.scorer for placed in found[2].roles] == ["reference", "critic"]
    assert {placed.host for place in found for placed in place.roles} == {None}
    assert len({device for place in found for device in place.devices}) == 7


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ([{"roles": ["referense"]}], ("unknown-role", "'referense'", "'reference'")),
        ([{"roles": ["generator 1"]}], ("unknown-role", "'generator 1'")),
        ([{"roles": ["critic"], "device": "cuda:3"}], ("no-such-gpu", "'critic'", "cuda:3", 2)),
        ([{"roles": ["critic 1"]}], ("copies-not-numbered", "critic 1:", "'critic 0'")),
        (
            [{"roles": ["critic"]}, {"roles": ["critic 0"]}],
            ("copies-not-numbered", "critic, critic 0"),
        ),
        ([{"roles": ["critic x"]}], ("unknown-role", "'critic x'")),
        ([{"roles": ["learner"], "ranks": 3, "device": ""}], ("too-few-gpus", "3 ranks", "2 GPUs")),
    ],
)
def test_impossible_placements_are_refused(processes: Any, message: tuple[Any, ...]) -> None:
    with raises(ConfigError, *message):
        places(config(cluster={"processes": processes}), 4, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"processes": [{"roles": ["a"]}, {"roles": ["a"]}]}, "'a' has 2 places"),
        ({"processes": [{"roles": []}]}, "a process without roles"),
        ({"processes": [{"roles": ["a"], "device": "gpu"}]}, "unknown device = 'gpu'"),
        (
            {"processes": [{"roles": ["learner", "generator 0"]}]},
            "is what runtime = 'inline' does; .* set ranks to share several .with pipelines: ranks",
        ),
        (
            {"processes": [{"roles": ["a"], "ranks": 2, "layout": {"a": {"fsdp": True}}}]},
            "layout.a has fsdp = true; write a number, as in fsdp = 4",
        ),
        (
            {"processes": [{"roles": ["a"], "ranks": 2, "layout": {"a": {"tp": False}}}]},
            "layout.a has tp = false; write a number, as in tp = 4",
        ),
        ({"processes": [{"roles": ["generator 0", "generator 1"]}]}, "two generators in one"),
        ({"processes": [{"roles": ["critic"], "offload": True}]}, "the critic has these processes"),
        ({"address": "somewhere"}, "is no address"),
    ],
)
def test_contradictions_are_refused_with_the_settings(settings: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ClusterConfig.model_validate(settings)


def test_waste_is_remarked_on() -> None:
    crowded = config(schedule={"preset": "oppo"}, reward={"sources": ("model:a", "model:b")})
    (line,) = remarks_on(crowded, 2, 0)
    assert line.startswith("7 threads of 6 processes share 2 cores: put scorers together")
    assert not remarks_on(config(), 2, 0)  # they take turns
    one_group = {"roles": ["learner", "generator", "reference", "critic"], "ranks": 5}
    shared = config(cluster={"processes": [one_group]}, rollout={"engines": 5})
    (line,) = remarks_on(shared, 2, 0)
    assert line.startswith("5 threads of 5 processes share 2 cores: give processes fewer")
    together = config(cluster={"scorers": "together"})
    (line,) = remarks_on(together, 8, 4)
    assert line == "1 of 4 GPUs have no role"


def test_offload_that_gains_nothing_is_remarked_on() -> None:
    roles = ["learner", "generator", "reference", "critic"]
    cluster = {"processes": [{"roles": roles, "offload": True, "ranks": 2}]}
    taking_turns = config(cluster=cluster)
    assert places(taking_turns, 2, 2)[0].offload
    assert not remarks_on(taking_turns, 2, 2)
    (line,) = remarks_on(taking_turns, 2, 0)
    assert line.startswith("offload: the roles of 'learner+generator+reference+critic' work on the")
    chunks = config(cluster=cluster, schedule={"preset": "oppo"})
    (line,) = remarks_on(chunks, 2, 2)
    assert line.startswith("offload: with schedule.score_on = 'chunk' the roles of ")


def test_the_settings_in_the_docs_are_settings() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    configs = [Config.model_validate(tomllib.loads(block)) for block in blocks]
    by_hand, sharded, colocated, ray = configs
    assert [p.name for p in places(by_hand, 4, 2)] == [
        "learner", "generator 0+reference", "generator 1", "critic",
    ]  # fmt: skip
    assert [len(p.devices) for p in places(sharded, 4, 0)] == [4, 2, 1]
    assert [len(p.devices) for p in places(colocated, 4, 0)] == [4]
    assert (ray.runtime, ray.cluster.address) == ("ray", "auto")


def test_the_table_says_what_each_process_holds() -> None:
    fused = config(rollout={"engines": 2}, schedule={"preset": "rlhfuse"})
    found = places(fused, 2, 0)
    sizes = {"learner": 32_000_000, "actor": 2_000_000, "reference": 2_000_000, "critic": 3_000_000}
    assert [memory(p, sizes) for p in found] == [32_000_000, 7_000_000, 7_000_000]
    lines = table(fused.schedule.knobs, found, sizes).splitlines()
    assert lines[1].split() == ["learner", "cpu", "2", "32", "MB"]
    assert lines[2].split()[-4:] == ["cpu", "1", "7", "MB"]
    assert lines[2].lstrip().startswith("generator 0, reference 0, critic 0")
    assert "KV cache, and for the learner 2 copies of the trained weights" in lines[-1]
    behind = config(rollout={"engines": 2}, schedule={"preset": "async"})
    assert "3 copies" in table(behind.schedule.knobs, places(behind, 2, 0), sizes)


def test_roles_share_the_ranks_of_a_learner() -> None:
    """The learner comes first, as others look for what it leaves them."""
    roles = ["generator", "learner", "reference", "critic"]
    layout = {"learner": {"fsdp": 2, "tp": 2}}
    one = config(cluster={"processes": [{"roles": roles, "ranks": 4, "layout": layout}]})
    (place,) = places(one, 8, 0)
    assert [placed.role for placed in place.roles] == [
        "learner",
        "generator",
        "reference",
        "critic",
    ]
    assert place.devices == ("cpu",) * 4
    assert one.cluster.learner_layout == Layout(fsdp=2, tp=2)
    assert shares_weights(one.schedule.knobs, [place])
    assert "copies" not in table(one.schedule.knobs, [place], {})
    assert memory(place, {"learner": 100, "actor": 10, "reference": 7, "critic": 11}) == 32


def test_copies_of_a_role_divide_the_ranks_evenly() -> None:
    """Eight ranks: a learner in shards, four engines of two slices, two copies of a reference."""
    process = {
        "roles": ["learner", "generator", "reference", "critic"],
        "ranks": 8,
        "layout": {
            "generator": {"dp": 4, "tp": 2},
            "reference": {"dp": 2, "tp": 4},
            "critic": "auto",
        },
    }
    (place,) = places(config(cluster={"processes": [process]}, rollout={"engines": 4}), 8, 0)
    assert place.name == "learner+generator+reference+critic"
    assert {seat.role: (list(seat.ranks), seat.layout, seat.host) for seat in place.roles} == {
        "learner": ([0, 1, 2, 3, 4, 5, 6, 7], Layout(fsdp=8), None),
        **{f"generator {i}": ([2 * i, 2 * i + 1], Layout(tp=2), None) for i in range(4)},
        "reference 0": ([0, 1, 2, 3], Layout(tp=4), 0),
        "reference 1": ([4, 5, 6, 7], Layout(tp=4), 2),
        "critic": ([0, 1, 2, 3, 4, 5, 6, 7], None, 0),
    }
    assert place.close_ranks == 4
    assert memory(place, {"learner": 80, "actor": 10, "reference": 8, "critic": 16}) == 19


def test_engines_in_one_group_host_a_copy_of_each_scorer() -> None:
    process = {"roles": ["generator"], "ranks": 4}
    settings = {"cluster": {"processes": [process], "scorers": "generators"}}
    _, group = places(config(**settings, rollout={"engines": 2}), 8, 0)
    assert [(seat.role, list(seat.ranks), seat.host) for seat in group.roles] == [
        ("generator 0", [0, 1], None),
        ("generator 1", [2, 3], None),
        ("reference 0", [0, 1], 0),
        ("reference 1", [2, 3], 1),
        ("critic 0", [0, 1], 0),
        ("critic 1", [2, 3], 1),
    ]


@pytest.mark.parametrize(
    ("process", "remedy"),
    [
        ({"layout": {"reference": {"tp": 4}}}, "name one of these"),
        ({"layout": {"learner": {"fsdp": 2}}}, "product is 4"),
        ({"layout": {"learner": {"pp": 4}}}, "leave pp out"),
        ({"layout": {"learner": {"dp": 2, "fsdp": 2}}}, "fsdp instead of dp"),
        ({"layout": {"generator": {"fsdp": 4}}}, "dp and tp instead"),
        ({"layout": {"critic": {"dp": 2, "fsdp": 2}}}, "leave dp out"),
        ({"layout": {"learner": {"fsdp": 0}}}, "each number is 1 or more"),
        ({"layout": {"learner": {"shards": 4}}}, "shards"),
    ],
)
def test_an_impossible_layout_is_refused(process: dict[str, Any], remedy: str) -> None:
    roles = ["learner", "generator", "critic"]
    with pytest.raises(ValidationError, match=remedy):
        config(cluster={"processes": [{"roles": roles, "ranks": 4, **process}]})


@pytest.mark.parametrize(
    ("engines", "layout", "code"),
    [(3, {}, "engines-not-divisor"), (2, {"generator": {"tp": 4}}, "engines-of-layout")],
)
def test_engines_are_the_copies_of_the_generator(
    engines: int, layout: dict[str, Any], code: str
) -> None:
    process = {"roles": ["learner", "generator"], "ranks": 4, "layout": layout}
    settings = config(cluster={"processes": [process]}, rollout={"engines": engines})
    with raises(ConfigError, code):
        places(settings, 8, 0)


@pytest.mark.parametrize(
    ("roles", "schedule", "expected"),
    [
        (["learner", "generator", "critic"], {}, True),
        (["learner", "generator"], {}, False),  # the critic follows from elsewhere
        (["learner", "generator", "critic"], {"preset": "async"}, False),
    ],
)
def test_weights_are_shared_with_those_that_are_never_behind(
    roles: list[str], schedule: dict[str, Any], expected: bool
) -> None:
    c = config(cluster={"processes": [{"roles": roles, "ranks": 2}]}, schedule=schedule)
    assert shares_weights(c.schedule.knobs, places(c, 8, 0)) == expected


def test_generators_between_which_rollouts_move_have_equally_many_ranks() -> None:
    given: dict[str, Any] = {
        "cluster": {"processes": [{"roles": ["generator 0"], **SLICES}]},
        "rollout": {"engines": 2},
    }
    moving = config(**given, schedule={"preset": "rlhfuse"})
    facts = "generator 0: 2", "generator 1: 1"
    with raises(ConfigError, "generators-cut-differently", *facts):
        places(moving, 8, 0)
    assert places(config(**given), 8, 0)


def test_a_scorer_that_no_process_names_sits_with_generators_that_are_placed_by_hand() -> None:
    process = {"roles": ["generator"], **SLICES}
    c = config(cluster={"scorers": "generators", "processes": [process]})
    (generator,) = [p for p in places(c, 8, 0) if p.roles[0].role == "generator"]
    assert [placed.role for placed in generator.roles] == ["generator", "reference", "critic"]


def test_a_learner_in_shards_has_a_rank_each() -> None:
    by_hand = {"roles": ["learner"], "ranks": 2}
    sharded = config(cluster={"processes": [by_hand]})
    learner, generator, *_ = places(sharded, 8, 0)
    assert (learner.devices, learner.threads) == (("cpu", "cpu"), 4)
    assert (generator.devices, generator.threads) == (("cpu",), 0)
    found = places(sharded, 8, 4)
    assert [p.devices for p in found[:3]] == [("cuda:0", "cuda:1"), ("cuda:2",), ("cuda:3",)]
    assert memory(found[0], {"learner": 101}) == 51
    lines = table(sharded.schedule.knobs, found, {"learner": 100}).splitlines()
    assert [line.split("  ")[1] for line in lines[1:3]] == ["learner, rank 0", "learner, rank 1"]
    there = config(cluster={"processes": [{**by_hand, "device": "cuda:2"}]})
    assert places(there, 8, 4)[0].devices == ("cuda:2", "cuda:3")
    with pytest.raises(ValidationError, match="python = 'py' is for generators and scorers"):
        config(cluster={"processes": [{"roles": ["learner"], "python": "py"}]})
    with pytest.raises(ValidationError, match="asks for processes, and"):
        config(runtime="inline", cluster={"processes": [by_hand]})


def test_on_ray_each_rank_that_uses_a_gpu_has_one_and_others_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten ranks, two of them on the CPU, and eight GPUs."""
    opened = list[Any]()

    def cluster(bundles: Any, **_: Any) -> Any:
        opened.extend(bundles)
        return SimpleNamespace(close=lambda: None, host="h")

    monkeypatch.setattr("stretto.workers.ray_cluster.RayCluster", cluster)
    launcher = RayLauncher(ClusterConfig(), "cpu", print)
    launcher.gpus = 8
    generators = [{"roles": [f"generator {i}"]} for i in range(4)]
    scorers = [{"roles": [name], "device": "cpu"} for name in ("reference", "critic")]
    processes = [{"roles": ["learner"], "ranks": 4}, *generators, *scorers]
    settings = config(rollout={"engines": 4}, cluster={"processes": processes})
    found = places(settings, 8, 8)
    gpus = [device for process in found for device in process.devices if device != "cpu"]
    assert gpus == [f"cuda:{i}" for i in range(8)]
    with ExitStack() as stack:
        launcher.prepare(found, stack)
    assert [bundle.gpus for bundle in opened] == [1.0] * 8 + [0.0] * 2
    opened.clear()
    layouts = {"learner": {"fsdp": 2, "tp": 2}, "generator": {"tp": 4}}
    processes = [{"roles": [role], "ranks": 4, "layout": {role: layouts[role]}} for role in layouts]
    found = places(config(cluster={"processes": [*processes, *scorers]}), 8, 8)
    with ExitStack() as stack:
        launcher.prepare(found, stack)
    # Ranks that share out layers have one bundle, which Ray puts on one node.
    assert [bundle.gpus for bundle in opened] == [2.0, 2.0, 4.0, 0.0, 0.0]
    assert launcher._positions[found[0].name] == [0, 0, 1, 1]
    assert launcher._positions[found[1].name] == [2] * 4


def test_ranks_that_are_placed_on_a_gpu_share_its_bundle_on_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four of the learner, four of generators, and a reference on the first GPU. NCCL refuses two
    ranks of one group on one GPU.
    """
    opened, launched = list[Any](), list[Any]()

    def cluster(bundles: list[Any], **_: Any) -> Any:
        opened.extend(bundles)
        return SimpleNamespace(close=lambda: None, host="h")

    monkeypatch.setattr("stretto.workers.ray_cluster.RayCluster", cluster)
    monkeypatch.setattr(
        "stretto.workers.ray_cluster.ActorProcesses",
        lambda spec, cluster, places, share, python: launched.append((places, share)),
    )
    processes = [{"roles": ["learner"], "ranks": 4, "threads": 4}]
    processes += [{"roles": [f"generator {i}"], "device": "cuda"} for i in range(4)]
    settings = config(
        runtime="ray",
        rollout={"engines": 4, "samples_per_prompt": 2},
        algorithm={"name": "rloo"},
        cluster={"processes": [*processes, {"roles": ["reference"], "device": "cpu"}]},
    )
    found = places(settings, 8, 4)
    launcher = RayLauncher(ClusterConfig(), "cpu", print)
    with ExitStack() as stack:
        launcher.prepare(found, stack)
    assert [bundle.gpus for bundle in opened] == [1.0] * 4 + [0.0]
    for place in found:
        launcher.launch(place, GroupSpec())
    assert launched == [
        ([0, 1, 2, 3], 0.5),
        *(([i], 0.5) for i in range(4)),
        ([4], 1.0),
    ]


def test_a_driver_without_gpus_counts_those_of_its_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = SimpleNamespace(gpus=16.0)
    monkeypatch.setattr("stretto.workers.ray_cluster.find", lambda: found)
    assert RayLauncher(ClusterConfig(address="auto"), "cuda", print).gpus == 16
    assert RayLauncher(ClusterConfig(address="auto"), "cpu", print).gpus == 0
    with raises(ConfigError, "no-cuda"):
        RayLauncher(ClusterConfig(), "cuda", print)


def test_a_gpus_number_is_refused_on_ray() -> None:
    processes = [{"roles": ["learner"], "device": "cuda:1"}]
    data = {"runtime": "ray", "cluster": {"processes": processes}}
    with raises(ConfigError, "device-number-on-ray", "cuda:1"):
        recipes.build(data, "here")
    processes[0]["device"] = "cpu"
    recipes.build(data, "here")
