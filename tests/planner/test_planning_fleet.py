"""Runs on fleets that fail: cases by hand, a run by the second, and Young's and Daly's formulas."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import islice, takewhile

import pytest

from _estimate import StepSizes, estimate
from _fleet import (
    HOUR_S,
    PUBLISHED,
    Fleet,
    Group,
    Recovery,
    drawn,
    first_order_goodput,
    young_interval_s,
)
from _goodput import (
    CAUSES,
    CHECKPOINT,
    DEGRADED,
    DETECTION,
    LOST,
    RESTART,
    USEFUL,
    WAITING,
    WEEK_S,
    Outcome,
    simulate,
    summarize,
)
from stretto.errors import ConfigError
from stretto.layout import Layout
from stretto.models.shapes import LLAMAS
from stretto.planner.hardware import GPUS, Hardware, Links
from stretto.planner.run_layout import ModelShapes, RunLayout

ALONE = Fleet((Group("learner", 1, 8, 10.0),))
APART = Fleet(
    (Group("learner", 1, 8, 10.0), Group("generators", 4, 8, 10.0, True)),
)
CARE = Recovery(interval_s=100, hold_s=10, write_s=20, detect_s=5, restart_s=45, spares=9)
NEVER = replace(CARE, interval_s=math.inf, hold_s=0, write_s=0, replace_s=20)


def spent(outcome: Outcome) -> dict[str, float]:
    """What time went to, without what took none."""
    return {cause: pytest.approx(s) for cause, s in outcome.seconds.items() if s}


# -- cases by hand ---------------------------------------------------------------------------------


def test_without_failures_checkpoints_alone_cost() -> None:
    found = simulate(ALONE, CARE, [], 1000)
    assert spent(found) == {USEFUL: 910, CHECKPOINT: 90}  # at 100, 200, ..., 900
    assert found.goodput == pytest.approx(0.91)
    assert (found.restarts, found.replaced) == (0, 0)
    assert simulate(ALONE, NEVER, [], 1000).goodput == 1


def test_the_learners_loss_costs_what_came_after_the_last_whole_checkpoint() -> None:
    # The one of 200 is written by 230 and has 190 useful seconds; by 250 there are 230. The run is
    # up at 300, and the next checkpoint is due at 400.
    found = simulate(ALONE, CARE, [(250.0, 3)], 500)
    assert spent(found) == {USEFUL: 380, LOST: 40, CHECKPOINT: 30, DETECTION: 5, RESTART: 45}
    assert found.restarts == 1


def test_a_checkpoint_counts_once_it_is_written() -> None:
    # At 225 the one of 200 is not; the one of 100 has 100 of 205 useful seconds.
    assert simulate(ALONE, CARE, [(225.0, 0)], 500).seconds[LOST] == pytest.approx(105)
    assert simulate(ALONE, CARE, [(230.0, 0)], 500).seconds[LOST] == pytest.approx(20)
    assert simulate(ALONE, CARE, [(105.0, 0)], 500).seconds[LOST] == pytest.approx(100)


def test_checkpoints_wait_for_the_one_before() -> None:
    slow = replace(CARE, write_s=240)
    assert slow.period_s == 250
    assert simulate(ALONE, slow, [], 1000).seconds[CHECKPOINT] == pytest.approx(30)


def test_a_lost_generator_leaves_its_work_to_the_others() -> None:
    # Noticed at 105; they do half of its 10 / 4 s again in 10 / 2 / 3. It is back at 125, and until
    # then three of four make three quarters of the steps.
    found = simulate(APART, NEVER, [(100.0, 8)], 200)
    degraded = 5 / 3 + (20 - 5 / 3) / 4
    assert spent(found) == {USEFUL: 195 - degraded, DETECTION: 5, DEGRADED: degraded}
    assert (found.restarts, found.replaced) == (0, 1)


def test_slow_training_fills_checkpoints_slowly() -> None:
    # Three quarters from 5 + 5 / 3 on: 677.5 useful seconds when the one of 1,000 begins, after
    # nine of 10 s, and 707.5 at 1,050.
    found = simulate(APART, replace(CARE, replace_s=5000), [(0.0, 8), (1050.0, 0)], 1200)
    assert found.seconds[LOST] == pytest.approx(30)
    assert found.seconds[USEFUL] == pytest.approx(677.5 + 100)  # at once in full, from 1,100 on


def test_a_group_with_time_to_spare_holds_nobody_up() -> None:
    quick = replace(APART.groups[1], seconds=6.0)  # 8 s with three of four
    found = simulate(replace(APART, groups=(APART.groups[0], quick)), NEVER, [(100.0, 39)], 200)
    assert spent(found) == {USEFUL: 194, DETECTION: 5, DEGRADED: 1}


def test_without_any_generator_training_stands_still() -> None:
    lone = Fleet((APART.groups[0], Group("generators", 1, 8, 10.0, True)))
    found = simulate(lone, NEVER, [(100.0, 8)], 200)
    assert spent(found) == {USEFUL: 175, DETECTION: 5, DEGRADED: 20}


def test_every_failure_ends_a_rigid_run() -> None:
    found = simulate(APART.rigid(), CARE, [(250.0, 8)], 500)
    assert found == simulate(ALONE, CARE, [(250.0, 0)], 500)
    assert simulate(APART, CARE, [(250.0, 8)], 500).restarts == 0


def test_who_has_no_spare_node_waits_for_the_repair() -> None:
    care = replace(NEVER, spares=0, repair_s=70)
    found = simulate(ALONE, care, [(100.0, 0)], 300)
    waited = {LOST: 100, DETECTION: 5, WAITING: 65, RESTART: 45, USEFUL: 85}
    assert spent(found) == waited
    one = replace(care, spares=1)
    assert simulate(ALONE, one, [(100.0, 0)], 300).seconds[WAITING] == 0
    # The second failure finds the spare one taken, and the first one's node repaired at 170.
    found = simulate(ALONE, one, [(100.0, 0), (160.0, 0)], 300)
    assert found.seconds[WAITING] == pytest.approx(5)


def test_a_failure_during_a_restart_starts_it_again() -> None:
    found = simulate(APART, NEVER, [(100.0, 0), (130.0, 8)], 300)
    assert spent(found) == {LOST: 100, DETECTION: 10, RESTART: 25 + 45, USEFUL: 120}
    assert (found.restarts, found.replaced) == (2, 0)


def test_a_restart_brings_back_all_that_were_away() -> None:
    care = replace(NEVER, spares=1, repair_s=1000, replace_s=500)
    # The generator's node is there at 105; the learner's is the generator's, repaired at 1,100.
    found = simulate(APART, care, [(100.0, 8), (200.0, 0)], 2000)
    assert found.seconds[WAITING] == pytest.approx(1100 - 205)
    assert found.seconds[USEFUL] == pytest.approx(2000 - 1100 - 45)


def test_who_is_away_cannot_be_lost() -> None:
    failures = [(100.0, 8), (101.0, 9), (120.0, 15)]
    assert simulate(APART, NEVER, failures, 200) == simulate(APART, NEVER, failures[:1], 200)


@pytest.mark.parametrize(("whole", "lost"), [(True, 2), (False, 1)])
def test_a_node_takes_all_its_copies_along(whole: bool, lost: int) -> None:
    halves = Fleet((APART.groups[0], Group("generators", 8, 4, 10.0, True)))
    found = simulate(halves, replace(NEVER, whole_nodes=whole), [(100.0, 21)], 200)
    assert found.replaced == lost


def test_copies_are_found_by_the_number_of_a_gpu() -> None:
    groups = (Group("a", 1, 16, 1.0), Group("b", 3, 4, 1.0), Group("c", 2, 16, 1.0))
    fleet = Fleet(groups)
    assert fleet.gpus == 60
    assert fleet.hit(15, 8) == (groups[0], range(1))
    assert fleet.hit(16 + 5, 8) == (groups[1], range(2))
    assert fleet.hit(16 + 5, 1) == (groups[1], range(1, 2))
    assert fleet.hit(16 + 8, 8) == (groups[1], range(2, 3))
    assert fleet.hit(28 + 16, 8) == (groups[2], range(1, 2))


# -- against a run by the second, and by formulas --------------------------------------------------


def by_the_second(care: Recovery, failures: set[int], wall_s: int) -> int:
    """Useful seconds of a learner alone, each looked at."""
    useful = kept = 0
    due, held_until, writing = care.period_s, 0.0, None
    for now in range(wall_s):
        if writing and writing[0] <= now:
            kept, writing = writing[1], None
        if now in failures:
            useful, writing = kept, None
            held_until = now + care.detect_s + care.restart_s
            due = held_until + care.period_s
        if now >= due and now >= held_until and not writing:
            due, held_until = now + care.period_s, now + care.hold_s
            writing = (held_until + care.write_s, useful)
        useful += now >= held_until
    return useful


@pytest.mark.parametrize("seed", range(30))
def test_a_run_by_the_second_comes_to_the_same(seed: int) -> None:
    rng = random.Random(seed)
    care = replace(
        CARE,
        interval_s=rng.randint(20, 300),
        hold_s=rng.randint(0, 15),
        write_s=rng.randint(0, 60),
        spares=99,
    )
    failures = sorted(rng.sample(range(1, 5000), rng.randint(0, 12)))
    found = simulate(ALONE, care, [(float(t), 0) for t in failures], 5000)
    assert found.seconds[USEFUL] == pytest.approx(by_the_second(care, set(failures), 5000))
    assert found.restarts == len(failures)


@pytest.mark.parametrize("fleet", [APART, APART.rigid()])
def test_all_time_is_accounted_for(fleet: Fleet) -> None:
    care = Recovery(600, 5, 80, 60, 600, 300, spares=1, repair_s=8 * HOUR_S)
    for seed in range(20):
        found = simulate(fleet, care, drawn(fleet.gpus, 0.005, seed))
        assert sum(found.seconds.values()) == pytest.approx(WEEK_S)
        assert min(found.seconds.values()) >= 0
        assert found == simulate(fleet, care, drawn(fleet.gpus, 0.005, seed))
    summary = summarize(fleet, care, 0.005, range(20))
    assert sum(summary.shares.values()) == pytest.approx(1)
    assert summary.goodput == pytest.approx(summary.shares[USEFUL])
    assert set(summary.shares) == set(CAUSES)


def test_failures_come_at_their_rate_to_any_gpu() -> None:
    failures = list(takewhile(lambda f: f[0] < 1e6, drawn(100, 0.36, 0)))  # one in 100 s
    assert len(failures) == pytest.approx(10_000, rel=0.03)
    assert {gpu for _, gpu in failures} == set(range(100))
    assert list(islice(drawn(100, 0.36, 0), 5)) == failures[:5]
    assert list(islice(drawn(100, 0.36, 1), 5)) != failures[:5]
    assert list(drawn(100, 0.0, 0)) == []


def test_rare_failures_cost_what_the_first_order_says_and_youngs_interval_is_the_best() -> None:
    mtbf_s, care = 24 * HOUR_S, replace(CARE, hold_s=20, write_s=60, detect_s=60, spares=99)
    young = young_interval_s(care.hold_s, mtbf_s)
    assert young == pytest.approx(math.sqrt(2 * 20 * 86_400))
    by_interval = {}
    for times in (0.4, 1, 2.5):
        tried = replace(care, interval_s=times * young)
        found = summarize(ALONE, tried, 1 / 24 / 8, range(300))
        assert found.goodput == pytest.approx(first_order_goodput(tried, mtbf_s), abs=0.002)
        by_interval[times] = found.goodput
    assert max(by_interval, key=lambda times: by_interval[times]) == 1


def test_first_order_by_hand() -> None:
    # 10 of 100 s held up; each 1,000 s half a period, 20 of writing, 5 and 45.
    assert first_order_goodput(CARE, 1000) == pytest.approx(1 - 0.1 - 0.12)


# -- fleets of layouts, rates, refusals ------------------------------------------------------------


def test_fleets_of_layouts() -> None:
    models, hardware = ModelShapes.of_one_size(LLAMAS["7B"]), Hardware(GPUS["h100"], Links(450e9))
    place = RunLayout(Layout(fsdp=16), Layout(dp=2, tp=4), Layout(dp=8), "none")
    found = estimate(models, place, StepSizes(), hardware)
    fleet = Fleet.of(found)
    assert [(g.name, g.copies, g.gpus, g.replaced) for g in fleet.groups] == [
        ("learner", 1, 16, False),
        ("generators", 2, 4, True),
        ("scorers", 8, 1, True),
    ]
    assert (fleet.gpus, fleet.fatal_gpus, fleet.rigid().fatal_gpus) == (32, 16, 32)
    assert fleet.step_s() == found.step_s
    generation = sum(found.groups["generation"].values())
    assert fleet.step_s({"generators": 1}) == max(2 * generation, found.step_s)
    assert fleet.step_s({"generators": 2}) == math.inf

    together = estimate(
        models, RunLayout(Layout(fsdp=8), Layout(dp=8), Layout(dp=8), "all"), StepSizes(), hardware
    )
    fleet = Fleet.of(together)
    assert fleet.fatal_gpus == fleet.gpus == 8
    assert fleet.step_s() == together.step_s


def test_published_rates_are_those_of_the_papers() -> None:
    """419 interruptions in 54 days; 6.50 in 1,000 node-days, so 28.8 h on 128 nodes."""
    assert 1 / (16_384 * PUBLISHED["Llama 3"]) == pytest.approx(54 * 24 / 419)
    assert 1 / (1024 * PUBLISHED["RSC-1"]) == pytest.approx(28.8, abs=0.1)
    assert PUBLISHED["RSC-2"] * 24 * 8 * 1000 == pytest.approx(2.34)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 copies of 8 GPUs"):
        Group("generators", 0, 8, 1.0)
    with pytest.raises(ConfigError, match="seconds above 0"):
        Group("generators", 1, 8, 0.0)
    with pytest.raises(ConfigError, match="the interval is above 0"):
        Recovery(0)
    with pytest.raises(ConfigError, match="all else 0 or more"):
        Recovery(60, hold_s=-1)
