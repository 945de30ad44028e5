"""The table of knobs, the presets, the settings: that they agree, and what follows from them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from raising import raises
from stretto.cli.compare import DEFAULT_VARIANTS, VARIANTS
from stretto.config import KNOBS, PRESETS, Config, Knobs, PresetName, ScheduleConfig, recipes
from stretto.config.algorithm import ALGORITHMS
from stretto.config.changes import merged
from stretto.errors import ConfigError
from stretto.observe.progress import headline

DOCS = Path(__file__).parents[2] / "docs" / "schedules.md"


def choices(annotation: Any) -> Iterator[object]:
    """The literals and the types that an annotation allows, without bounds."""
    match get_origin(annotation):
        case origin if origin is Annotated:
            yield from choices(get_args(annotation)[0])
        case origin if origin in (Union, UnionType):
            for part in get_args(annotation):
                yield from choices(part)
        case origin if origin is Literal:
            yield from get_args(annotation)
        case _:
            yield annotation


def test_the_presets() -> None:
    assert {name: preset.knobs for name, preset in PRESETS.items()} == {
        "sync": Knobs(score_on="batch", overcommit=0, lag=0, migrate="off", hold="keep"),
        "oppo": Knobs(score_on="chunk", overcommit="auto", lag=0, migrate="off", hold="keep"),
        "async": Knobs(score_on="rollout", overcommit=0, lag=1, migrate="off", hold="keep"),
        "rlhfuse": Knobs(score_on="rollout", overcommit=0, lag=0, migrate="auto", hold="keep"),
        "stretto": Knobs(score_on="chunk", overcommit="auto", lag=1, migrate="auto", hold="auto"),
        "auto": Knobs(score_on="chunk", overcommit="auto", lag=1, migrate="off", hold="auto"),
    }
    assert tuple(PRESETS) == get_args(PresetName)
    assert ScheduleConfig().knobs == Knobs()


def test_table_settings_and_presets_have_the_same_knobs() -> None:
    """A knob that only one of them has shows here: each has its setting, with the same values."""
    settings, kinds = ScheduleConfig.model_fields, get_type_hints(Knobs)
    left_to_presets = {name for name, info in settings.items() if info.default == "preset"}
    assert list(KNOBS) == list(kinds) == [name for name in settings if name in left_to_presets]
    for name, knob in KNOBS.items():
        assert set(choices(settings[name].annotation)) == {"preset", *choices(kinds[name])}
        assert settings[name].description == knob.help
        assert knob.off[0] == getattr(Knobs(), name)
    on = {name for preset in PRESETS.values() for name in KNOBS if preset.knobs.on(name)}
    assert on == set(KNOBS) - {"train_on"}  # some preset turns each, but for what few may use
    for preset in PRESETS.values():
        assert all(preset.knobs.on(knob) for knob in preset.parts.values())


def test_what_is_set_by_hand_comes_before_the_preset() -> None:
    schedule = ScheduleConfig(preset="stretto", score_on="batch", overcommit=3, lag=0, migrate=0.5)
    assert schedule.knobs == Knobs("batch", 3, 0, 0.5, "auto")
    assert ScheduleConfig(preset="async", lag=2).knobs == Knobs("rollout", 0, 2, "off")


@pytest.mark.parametrize(
    ("values", "on"),
    [
        ({}, set()),
        ({"score_on": "batch", "overcommit": 0, "lag": 0, "migrate": 0.0}, set()),
        ({"score_on": "rollout"}, {"score_on"}),
        ({"overcommit": "auto"}, {"overcommit"}),
        ({"overcommit": 1, "lag": 2}, {"overcommit", "lag"}),
        ({"migrate": 0.2}, {"migrate"}),
        ({"migrate": "auto"}, {"migrate"}),
        ({"hold": "keep"}, set()),
        ({"hold": "offload"}, {"hold"}),
        ({"hold": "auto"}, {"hold"}),
        ({"train_on": "batch"}, set()),
        ({"train_on": "group", "score_on": "rollout"}, {"train_on", "score_on"}),
    ],
)
def test_which_values_switch_a_knob_on(values: dict[str, Any], on: set[str]) -> None:
    knobs = ScheduleConfig.model_validate(values).knobs
    assert {name for name in KNOBS if knobs.on(name)} == on
    assert {name for name in KNOBS if knobs.works(name, engines=1)} == on - {"migrate"}
    assert {name for name in KNOBS if knobs.works(name, engines=2)} == on


def test_what_each_knob_takes() -> None:
    assert {name: set(knob.needs) for name, knob in KNOBS.items()} == {
        "score_on": {"scoring worker"},
        "overcommit": set(),
        "lag": {"training worker", "weights"},
        "migrate": {"engines"},
        "hold": set(),
        "train_on": {"training worker", "weights"},
    }


FACTS = ("streams", "scores_early", "trains_beside", "copies_weights")
OF_ENGINES = ("overlaps", "migrates", "hosts_scorers", "scores_beside")

FOLLOWS: dict[str, tuple[set[str], set[str], set[str]]] = {
    "sync": (set(), set(), {"overlaps"}),
    "oppo": (
        {"streams", "scores_early"},
        {"overlaps", "scores_beside"},
        {"overlaps", "scores_beside"},
    ),
    "async": (
        {"scores_early", "trains_beside", "copies_weights"},
        {"overlaps", "scores_beside"},
        {"overlaps", "scores_beside"},
    ),
    "rlhfuse": (
        {"scores_early"},
        {"overlaps", "scores_beside"},
        {"overlaps", "migrates", "hosts_scorers"},
    ),
    "stretto": (
        {"streams", "scores_early", "trains_beside", "copies_weights"},
        {"overlaps", "scores_beside"},
        {"overlaps", "migrates", "scores_beside"},
    ),
    "auto": (
        {"streams", "scores_early", "trains_beside", "copies_weights"},
        {"overlaps", "scores_beside"},
        {"overlaps", "scores_beside"},
    ),
}
"""What is true of a preset: always, with one engine, with three."""


@pytest.mark.parametrize("name", get_args(PresetName))
def test_what_follows_from_each_preset(name: PresetName) -> None:
    knobs, (always, with_one, with_three) = PRESETS[name].knobs, FOLLOWS[name]
    assert {fact for fact in FACTS if getattr(knobs, fact)} == always
    assert {fact for fact in OF_ENGINES if getattr(knobs, fact)(1)} == with_one
    assert {fact for fact in OF_ENGINES if getattr(knobs, fact)(3)} == with_three


def test_over_committing_alone_overlaps_nothing() -> None:
    assert not Knobs(overcommit=8).overlaps(engines=1)
    assert Knobs(lag=1).overlaps(engines=1)
    assert Knobs(lag=2).copies_weights


def test_the_line_that_a_run_shows() -> None:
    assert Knobs("chunk", "auto", 1, 0.5).describe(2) == (
        "score on chunk, overcommit auto, lag 1, migrate 0.5, train on batch"
    )
    assert Knobs(hold="remake").describe(1, episodes=True).endswith(", hold remake, train on batch")
    one = Config.model_validate({"schedule": {"preset": "rlhfuse"}})
    assert (
        "\nschedule: rlhfuse: score on rollout, overcommit 0, lag 0, "
        "migrate off (there is one engine), train on batch" in headline(one)
    )
    assert (
        "\nschedule: sync: score on batch, overcommit 0, lag 0, migrate off, train on batch"
        in headline(Config())
    )


def test_migration_that_is_asked_for_by_hand() -> None:
    assert not ScheduleConfig(preset="rlhfuse").asks_to_migrate
    assert not ScheduleConfig(preset="rlhfuse", migrate="off").asks_to_migrate
    assert not ScheduleConfig(migrate=0.0).asks_to_migrate
    assert ScheduleConfig(migrate=0.5).asks_to_migrate
    assert ScheduleConfig(migrate="auto").asks_to_migrate


def test_the_most_in_flight_fills_up_the_last_group() -> None:
    schedule = ScheduleConfig(overcommit=5, weight_sync_interval=2)
    assert schedule.most_in_flight(batch=8, samples_per_prompt=1) == 16 + 5
    assert schedule.most_in_flight(batch=8, samples_per_prompt=4) == 16 + 8
    assert ScheduleConfig(overcommit="auto", overcommit_max=6).most_in_flight(8, 2) == 8 + 6


def test_the_variants_of_a_comparison() -> None:
    assert list(VARIANTS.items()) == [
        ("sync", {"preset": "sync"}),
        ("oppo-no-intra", {"preset": "oppo", "score_on": "batch"}),
        ("oppo-no-inter", {"preset": "oppo", "overcommit": 0}),
        ("oppo", {"preset": "oppo"}),
        ("async", {"preset": "async"}),
        ("stretto", {"preset": "stretto"}),
        ("rlhfuse", {"preset": "rlhfuse"}),
        ("oppo-algorithm1", {"preset": "oppo", "overcommit_rule": "algorithm1"}),
        ("oppo-throughput", {"preset": "oppo", "overcommit_rule": "throughput"}),
        ("oppo-delta4", {"preset": "oppo", "overcommit": 4}),
        ("oppo-delta8", {"preset": "oppo", "overcommit": 8}),
        ("auto", {"preset": "auto"}),
    ]
    assert DEFAULT_VARIANTS == "sync,oppo-no-intra,oppo-no-inter,oppo,async,stretto"


def allowed(**settings: Any) -> set[tuple[str, int, int]]:
    schedule = ScheduleConfig.model_validate({"preset": "auto", **settings})
    return {(k.score_on, k.delta, k.lag) for k in schedule.round_knobs(8, 2)}


def test_what_auto_may_choose_is_within_the_bound_on_data_age() -> None:
    fresh = {("batch", 0, 0), ("rollout", 0, 0), ("chunk", 0, 0)}
    assert allowed() == fresh
    assert ScheduleConfig(preset="auto").knobs == Knobs("chunk", 0, 0, hold="auto")
    # With one version, either lag or carried responses, whose groups of 2 fill delta up.
    old = {(event, delta, 0) for event, _, _ in fresh for delta in (2, 4, 8)}
    behind = {(event, 0, 1) for event, _, _ in fresh}
    assert allowed(max_staleness=1) == fresh | old | behind
    assert ScheduleConfig(preset="auto", max_staleness=1).carries == 1
    both = {(event, delta, 1) for event, delta, _ in old}
    assert allowed(max_staleness=3) == fresh | old | behind | both
    assert ScheduleConfig(preset="auto", max_staleness=3).carries == 2
    assert ScheduleConfig(preset="auto", max_staleness=30).carries == 8  # max_carries


def test_auto_keeps_the_knobs_that_are_set_by_hand() -> None:
    assert allowed(score_on="rollout") == {("rollout", 0, 0)}
    assert allowed(max_staleness=2, lag=1, score_on="batch") == {
        ("batch", delta, 1) for delta in (0, 2, 4, 8)
    }
    assert allowed(max_staleness=1, overcommit=4, score_on="batch") == {("batch", 4, 0)}
    assert {event for event, *_ in allowed(migrate="auto")} == {"batch", "rollout"}
    on_groups = ScheduleConfig(preset="auto", train_on="group", max_staleness=1)
    groups = {k for k in on_groups.round_knobs(8, 2) if k.train_on == "group"}
    assert {(k.score_on, k.lag) for k in groups} == {("rollout", 0), ("chunk", 0)}
    assert allowed(train_on="group", max_staleness=1) == allowed(max_staleness=1)
    for by_hand in ({"lag": 1}, {"overcommit": 1}, {"lag": 2, "max_staleness": 1}):
        with raises(ConfigError, "beyond-max-staleness"):
            recipes.build({"schedule": {"preset": "auto", **by_hand}}, "a test")


def test_the_bound_on_data_age_alone_changes_nothing() -> None:
    schedule = ScheduleConfig(preset="oppo", max_staleness=1)
    assert schedule.knobs == PRESETS["oppo"].knobs
    assert schedule.carries == 8
    assert any("max_staleness" in remark for remark in schedule.remarks)


def test_the_documented_tables_are_these() -> None:
    text = DOCS.read_text(encoding="utf-8")
    rows = [re.findall(r"[\w.]+", line) for line in text.splitlines() if line.startswith("| `")]
    shown = {row[0]: row[1 : 1 + len(KNOBS)] for row in rows if row[0] in PRESETS}
    assert shown == {
        name: [str(value) for value in asdict(preset.knobs).values()]
        for name, preset in PRESETS.items()
    }
    assert [row[0] for row in rows if row[0].startswith("schedule.")] == [
        f"schedule.{name}" for name in KNOBS
    ]


ON_GROUPS = {"schedule": {"train_on": "group", "score_on": "rollout"}}
GRPO = {"algorithm": {"name": "grpo"}, "rollout": {"batch": 8, "samples_per_prompt": 2}}


@pytest.mark.parametrize(
    ("changes", "code", "facts"),
    [
        ({"schedule": {"train_on": "group"}}, "group-before-scores", ["schedule.score_on"]),
        ({"schedule": {"lag": 1}}, "group-with-lag", ["schedule.lag = 1"]),
        ({"schedule": {"preset": "async"}}, "group-with-lag", ["schedule.lag = 1"]),
        (
            {"schedule": {"preset": "auto", "max_staleness": 1, "lag": 1}},
            "group-with-lag",
            ["schedule.lag = 1"],
        ),
        ({"schedule": {"weight_sync_interval": 2}}, "group-of-several-steps", ["= 2"]),
        ({"training": {"minibatches": 2}}, "group-among-minibatches", ["= 2"]),
        ({"algorithm": {"name": "ppo"}}, "group-needs-others", ["'ppo'"]),
        ({"algorithm": {"scale_rewards": "batch"}}, "group-needs-others", ["scale_rewards"]),
        (
            {
                "algorithm": {"multi_objective_aggregation": "normalize_then_sum"},
                "reward": {"missing_eos": "off"},
            },
            "group-needs-others",
            ["multi_objective_aggregation"],
        ),
        (
            {"algorithm": {"entropy_coef": 0.1, "entropy_aggregation": "token_mean"}},
            "group-with-two-means",
            ["sequence_mean", "entropy_aggregation"],
        ),
    ],
)
def test_what_a_learner_cannot_do_with_groups_is_refused(
    changes: dict[str, Any], code: str, facts: list[object]
) -> None:
    given: dict[str, Any] = merged(GRPO, ON_GROUPS)
    assert recipes.build(given, "here").schedule.knobs.train_on == "group"
    if code == "group-before-scores":
        given = dict(GRPO)
    with raises(ConfigError, code, *facts):
        recipes.build(merged(given, changes), "here")


@pytest.mark.parametrize("name", [n for n, a in ALGORITHMS.items() if a.group > 1])
def test_all_algorithms_of_groups_can_start_early(name: str) -> None:
    assert recipes.build(merged(merged(GRPO, ON_GROUPS), {"algorithm": {"name": name}}), "here")
