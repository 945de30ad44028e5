"""The comparison of schedules: the table, the arguments, real runs, and runs in virtual time."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest

from run_helpers import ended_rollout
from stretto import signals
from stretto.api import runs
from stretto.api.runs import VARIANTS, Job, config_of_job
from stretto.cli.compare import DEFAULT_VARIANTS, plan
from stretto.cli.main import main
from stretto.config import PRESETS, Config, Knobs, ScheduleConfig, recipes
from stretto.errors import ConfigError
from stretto.observe import RunDirectory, Span, Window, report
from stretto.observe.comparison import (
    Comparison,
    VariantResult,
    mean_interval,
    ratio_interval,
    smoothed,
    t_quantile,
    three_digits,
)
from stretto.schedules.rollout import RolloutState


def result(
    variant: str,
    seed: int,
    rewards: Sequence[float],
    step_s: float = 1.0,
    first_s: float = 5.0,
    stalest: Sequence[float] = (),
    busy: Mapping[str, float] | None = None,
) -> VariantResult:
    """A run of 8 samples a step whose first step takes ``first_s``, and each other ``step_s``."""
    n = len(rewards)
    metrics = [
        {"objective/scores": reward, "staleness/mean": 0.0, "staleness/max": most}
        for reward, most in zip(rewards, stalest or [0.0] * n, strict=True)
    ]
    times_s = [first_s + i * step_s for i in range(n)]
    return VariantResult(variant, seed, times_s, [8] * n, metrics, busy or {})


def rows(table: str) -> dict[str, list[str]]:
    """The cells of a Markdown table by row label.

    A range is found under its row's label + '..', an interval under the label + ' 95 %'.
    """
    found: dict[str, list[str]] = {}
    last = ""
    for line in table.splitlines():
        label, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        below = {"min..max": f"{last}..", "95 %": f"{last} 95 %"}
        last = last if label in below else label
        found[below.get(label, label)] = cells
    return found


def printed_table(output: str) -> str:
    return output[output.index("|") : output.index("\n\n- ")]


def ramp(first: float, last: float, steps: int) -> list[float]:
    return [first + (last - first) * i / (steps - 1) for i in range(steps)]


# -- the figures ----------------------------------------------------------------------------------


def test_smoothing_is_over_whole_windows() -> None:
    assert smoothed([1, 2, 6, 3], 2) == [1.5, 4, 4.5]
    assert smoothed([1, 2, 6, 3], 4) == [3]


def test_windows_of_long_and_short_runs() -> None:
    windows = [Comparison([result("sync", 0, [0.0] * n)]).window for n in (1, 3, 19, 20, 100)]
    assert windows == [1, 1, 9, 10, 10]


def test_rates_leave_out_the_first_step_and_the_target_does_not() -> None:
    """39 steps of 2 s after one of 5 s; the reward rises by 1 a step, smoothed: 4.5 to 34.5."""
    sync = result("sync", 0, ramp(0, 39, 40), step_s=2.0)
    comparison = Comparison([sync])
    figures = comparison.figures["sync"][0]
    assert figures["samples_per_s"] == pytest.approx(8 / 2)
    assert figures["step_s"] == pytest.approx(2.0)
    assert figures["final_reward"] == pytest.approx(34.5)
    # 4.5 + 0.95 * 30 = 33; the mean of 10 steps is that after step 38.5, so after step 39.
    assert comparison.target == pytest.approx(33.0)
    assert figures["steps_to_target"] == 39
    assert figures["time_to_target_s"] == pytest.approx(5 + 38 * 2)
    assert figures["speedup"] == 1.0


def test_the_default_target_is_of_the_mean_over_seeds() -> None:
    """Of seeds that go from 0 to 1 and from 0.2 to 0.6: from 0.1 to 0.8."""
    curves = [[0.0] * 10 + [1.0] * 10, [0.2] * 10 + [0.6] * 10]
    runs = [result("sync", seed, curve) for seed, curve in enumerate(curves)]
    # What other variants reach does not matter.
    comparison = Comparison([*runs, result("oppo", 0, [9.0] * 20)])
    assert comparison.target == pytest.approx(0.1 + 0.95 * 0.7)
    assert "0.765, which is 95 % of the way" in comparison.notes()[0]
    assert "sync (0.100) to its last (0.800)" in comparison.notes()[0]


def test_the_table_says_what_was_not_reached_and_how_far_seeds_differ() -> None:
    flat, rising = [0.1] * 20, [0.0] * 10 + [1.0] * 10
    comparison = Comparison(
        [
            result("sync", 0, rising, step_s=1.0),
            result("oppo", 0, rising, step_s=0.5, stalest=[0.0] * 19 + [3.0]),
            result("async", 0, flat, step_s=0.25),
            result("sync", 1, rising, step_s=2.0),
            result("oppo", 1, flat, step_s=0.5, stalest=[2.0] * 20),
            result("async", 1, flat, step_s=0.25),
        ],
        target=0.75,
    )
    table = rows(comparison.table())
    assert table[""] == ["sync", "oppo", "async"]
    assert table["samples/s"] == ["6.00", "16.0", "32.0"]
    assert table["samples/s.."] == ["4.00..8.00", "", ""]
    # Against the run of the same seed: 2 and 4 times as fast, 4 and 8 times.
    assert table["samples/s, x sync"] == ["1.00", "3.00", "6.00"]
    assert table["samples/s, x sync.."] == ["", "2.00..4.00", "4.00..8.00"]
    # The mean of 10 is 0.8 at step 18, and was 0.7 at 17.
    assert table["steps to the target"] == ["18", "18 (1 of 2)", "not reached"]
    assert table["seconds to the target"] == ["30.5", "13.5 (1 of 2)", "not reached"]
    assert table["seconds to the target.."] == ["22.0..39.0", "", ""]
    assert table["final reward"] == ["1.000", "0.550", "0.100"]
    assert table["staleness, max"] == ["0", "2.5", "0"]
    assert table["staleness, max.."] == ["", "2..3", ""]
    assert "Target reward: 0.75, as asked." in comparison.notes()
    data = comparison.data()
    assert data["target_reward"] == 0.75
    assert data["variants"]["oppo"]["seeds"] == [0, 1]
    assert data["variants"]["oppo"]["steps_to_target"] == [18.0, None]
    assert data["variants"]["async"]["time_to_target_s"] == [None, None]
    assert data["variants"]["async"]["speedup"] == [4.0, 8.0]


def reaching(variant: str, seed: int, steps: int, step_s: float) -> VariantResult:
    """A run of 30 steps whose smoothed reward is first above 0.95 after ``steps``."""
    return result(variant, seed, [0.0] * (steps - 10) + [1.0] * (40 - steps), step_s, step_s)


def test_times_to_the_target_have_intervals_over_seeds() -> None:
    """sync takes 20 and 24 s; oppo, twice and three times as fast, as many steps and 1.2 times."""
    comparison = Comparison(
        [
            reaching("sync", 0, steps=20, step_s=1.0),
            reaching("oppo", 0, steps=20, step_s=0.5),
            reaching("sync", 1, steps=24, step_s=1.0),
            reaching("oppo", 1, steps=20, step_s=0.4),
        ],
        target=0.95,
    )
    table = rows(comparison.table())
    assert table["seconds to the target"] == ["22.0", "9.00"]
    # 22 +- 12.706 * 2.828 / sqrt(2), with t at 97.5 % and 1 degree of freedom.
    assert table["seconds to the target 95 %"] == ["[-3.41, 47.4]", "[-3.71, 21.7]"]
    assert table["steps to the target"] == ["22", "20"]
    assert table["steps to the target 95 %"] == ["[-3.4, 47.4]", ""]
    # sqrt(2 * 3); exp of ln sqrt 6 +- 12.706 * ln(3 / 2) / 2.
    assert table["seconds, sync's / own"] == ["1.00", "2.45"]
    assert table["seconds, sync's / own.."] == ["", "2.00..3.00"]
    assert table["seconds, sync's / own 95 %"] == ["", "[0.19, 32.20]"]
    assert table["steps, sync's / own"] == ["1.00", "1.10"]
    intervals = comparison.data()["intervals_95"]["oppo"]
    assert intervals["time_ratio"] == [
        pytest.approx(0.1863, abs=1e-4),
        pytest.approx(32.20, abs=0.01),
    ]
    assert intervals["steps_to_target"] == [20, 20]
    assert comparison.data()["variants"]["oppo"]["time_ratio"] == [
        pytest.approx(2.0),
        pytest.approx(3.0),
    ]
    seconds, steps = comparison.notes()[-2:]
    assert "no significant difference: oppo 2.45x [0.19, 32.20]." in seconds
    assert "no significant difference: oppo 1.10x [0.34, 3.49]." in steps


def test_significant_differences_are_named() -> None:
    """Over three seeds; the intervals are worked out by hand, with t = 4.303."""
    factors = {"sync": (1, 1, 1), "oppo": (0.4, 0.5, 0.5), "stretto": (1.9, 2.0, 2.0)}
    runs = [
        reaching(variant, seed, steps=20, step_s=factor[seed])
        for seed in range(3)
        for variant, factor in factors.items()
    ]
    *_, seconds, steps = Comparison(runs, target=0.95).notes()
    assert (
        "significantly fewer: oppo 2.15x [1.56, 2.97]; "
        "significantly more: stretto 0.51x [0.47, 0.55]." in seconds
    )
    assert "no significant" not in seconds
    assert "no significant difference: oppo 1.00x [1.00, 1.00], stretto 1.00x" in steps


def test_runs_that_miss_the_target_are_named_and_their_schedule_is_not_judged() -> None:
    runs = [reaching(v, seed, steps=20, step_s=1.0) for seed in (0, 1) for v in ("sync", "oppo")]
    runs += [reaching("sync", 2, steps=20, step_s=1.0), result("oppo", 2, [0.0] * 30)]
    *_, missed, seconds, steps = Comparison(runs, target=0.95).notes()
    assert missed.startswith("Target not reached within 30 steps")
    assert missed.endswith(": oppo with seed 2.")
    for note in (seconds, steps):
        assert note.endswith(" not judged: oppo (2 of 3 pairs reached the target).")


def test_one_seed_has_neither_intervals_nor_verdicts() -> None:
    runs = [reaching(variant, 0, steps=20, step_s=1.0) for variant in ("sync", "oppo")]
    comparison = Comparison(runs, target=0.95)
    assert "95 %" not in comparison.table()
    assert not any("paired by seed" in note for note in comparison.notes())
    assert comparison.data()["intervals_95"]["oppo"]["time_ratio"] is None


def test_all_lines_of_a_table_are_of_one_width() -> None:
    runs = [result(name, seed, ramp(0, seed, 20)) for seed in (1, 900) for name in VARIANTS]
    table = Comparison(runs).table()
    assert len({len(line) for line in table.splitlines()}) == 1


@pytest.mark.parametrize(
    ("runs", "note"),
    [
        ([result("oppo", 0, ramp(0, 1, 20))], "no run of sync to take it from; use `target`"),
        ([result("sync", 0, ramp(1, 0, 20))], "of sync does not rise (0.763 to 0.237)"),
    ],
)
def test_without_a_sensible_target_none_is_invented(runs: list[VariantResult], note: str) -> None:
    comparison = Comparison(runs)
    assert comparison.target is None
    assert note in comparison.notes()[0]
    assert "steps to the target" not in rows(comparison.table())
    assert "steps_to_target" not in comparison.data()["variants"][runs[0].variant]


def test_speed_ups_need_the_baseline() -> None:
    assert "samples/s, x sync" not in rows(Comparison([result("oppo", 0, [0.0] * 4)]).table())
    failed = [result("sync", 0, [0.0] * 4), result("oppo", 1, [0.0] * 4)]
    assert rows(Comparison(failed).table())["samples/s, x sync"] == ["1.00", "-"]


def test_busy_shares_are_in_the_order_of_roles_with_generators_taken_together() -> None:
    busy = {"learner": 0.5, "generator 1": 0.4, "generator 0": 0.2, "critic": 0.1}
    table = rows(Comparison([result("sync", 0, [0.0] * 4, busy=busy)]).table())
    assert list(table)[-3:] == ["busy: generator", "busy: critic", "busy: learner"]
    assert [table[row] for row in list(table)[-3:]] == [["30.0 %"], ["10.0 %"], ["50.0 %"]]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (0.01234, "0.0123"), (9.0, "9.00"), (17.04, "17.0"), (254.4, "254")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert three_digits(value) == text
    assert three_digits(123456.7) == "123457"


def write_run(folder: str, name: str, config: Config, *, step_s: float, reward: float) -> Path:
    """The records of a run of 4 steps, after an evaluation; the third left a sample out."""
    run = RunDirectory.create(folder, name, config)
    run.append_metrics(0, {"eval/score": 0.25})
    for step in range(1, 5):
        batch = [ended_rollout(10 * step + i) for i in range(2 if step == 3 else 3)]
        lost = [ended_rollout(10 * step + 9, state=RolloutState.REJECTED)] if step == 3 else []
        run.append_rollouts(step, [*batch, *lost], {r.id: 1.0 for r in batch})
        figures = {
            "objective/scores": reward * step,
            "time_s": 1 + step * step_s,
            "staleness/mean": 0.5 * step,
            "staleness/max": float(step),
            "utilisation/generator": 0.5 if step < 4 else 1.0,
        }
        run.append_metrics(step, figures)
    return run.path


def test_a_result_is_read_from_a_runs_records(tmp_path: Path) -> None:
    path = write_run(str(tmp_path), "oppo", Config(), step_s=2.0, reward=0.25)
    found = VariantResult.of("oppo", 7, report.load([path])[0])
    assert (found.variant, found.seed) == ("oppo", 7)
    assert found.times_s == [3, 5, 7, 9]
    assert found.samples == [3, 3, 2, 3]
    assert found.column("objective/scores") == [0.25, 0.5, 0.75, 1.0]
    assert found.column("staleness/mean") == [0.5, 1.0, 1.5, 2.0]
    assert found.column("staleness/max") == [1, 2, 3, 4]
    assert all(map(math.isnan, found.column("lr")))
    assert found.utilisation == {"generator": pytest.approx((7 * 0.5 + 2 * 1.0) / 9)}
    figures = Comparison([found]).figures["oppo"][7]
    assert figures["samples_per_s"] == pytest.approx((3 + 2 + 3) / 6)
    assert figures["staleness_mean"] == pytest.approx(1.25)
    assert figures["staleness_max"] == 4


# -- intervals, against printed tables and cases worked out by hand -------------------------------


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)],
)
def test_quantiles_are_those_of_the_printed_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=5e-4)


def test_other_levels() -> None:
    assert t_quantile(1, 0.5) == pytest.approx(1.0)  # a Cauchy distribution's quartile
    assert t_quantile(2, 0.99) == pytest.approx(9.925, abs=5e-4)
    assert t_quantile(10_000) == pytest.approx(1.960, abs=5e-4)  # all but a normal distribution


def test_the_interval_of_a_mean() -> None:
    """Of 1, 2, 3: 2 with a standard error of 1 / sqrt(3)."""
    half = 4.302653 / math.sqrt(3)
    found = mean_interval([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2 - half, 2 + half))


def test_ratios_are_averaged_by_their_logarithms() -> None:
    """Twice as fast and half as fast are no difference; swapping the sides inverts the interval."""
    even, ahead, behind = (
        ratio_interval(r) for r in ([2, 0.5], [1.2, 1.5, 1.4], [1 / 1.2, 1 / 1.5, 1 / 1.4])
    )
    assert even is not None
    assert even.mean == pytest.approx(1.0)
    assert even.low == pytest.approx(1 / even.high)
    assert ahead is not None
    assert behind is not None
    assert ahead.mean == pytest.approx((1.2 * 1.5 * 1.4) ** (1 / 3))
    assert (behind.low, behind.high) == (
        pytest.approx(1 / ahead.high),
        pytest.approx(1 / ahead.low),
    )


def test_one_value_has_no_interval() -> None:
    assert mean_interval([]) is None
    assert mean_interval([1.0]) is None
    assert ratio_interval([2.0]) is None


# -- what is run ----------------------------------------------------------------------------------


def test_seeds_come_one_after_the_other_with_the_variants_in_turn() -> None:
    jobs = plan("sync, oppo", "2,0")
    assert jobs == [Job("sync", 2), Job("oppo", 2), Job("sync", 0), Job("oppo", 0)]
    assert [job.variant for job in plan(DEFAULT_VARIANTS, "0")] == list(VARIANTS)[:6]


@pytest.mark.parametrize(
    ("variants", "seeds", "message"),
    [
        ("sync,opo", "0", "there is no 'opo'. Did you mean 'oppo'?"),
        ("sync,sync", "0", "--variants names 'sync' twice"),
        ("sync,", "0", "there is no ''"),
        ("sync", "1,2,01", "--seeds names '1' twice"),
        ("sync", "1;2", "'1;2' is no whole number; write 0,1,2"),
    ],
)
def test_wrong_plans_are_refused(variants: str, seeds: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(variants, seeds)
    assert message in str(error.value)


def test_variants_set_the_knobs_and_leave_the_rest() -> None:
    asked = {"schedule": {"preset": "async", "overcommit": 7, "lag": 3, "max_carries": 2}}
    base = recipes.build({**asked, "seed": 5, "steps": 9}, "here")

    def knobs(variant: str) -> Knobs:
        config = config_of_job(base, Job(variant, 1), "there")
        assert (config.seed, config.steps, config.out) == (1, 9, "there")
        assert config.schedule.max_carries == 2
        assert config.rollout == base.rollout
        assert not config.observe.checkpoints
        return config.schedule.knobs

    assert knobs("sync") == Knobs("batch", 0, 0, "off")
    assert knobs("oppo-no-intra") == Knobs("batch", "auto", 0, "off")
    assert knobs("oppo-no-inter") == Knobs("chunk", 0, 0, "off")
    for name in PRESETS:
        assert knobs(name) == ScheduleConfig(preset=name).knobs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "--variants", "asinc"], "Did you mean 'async'?"),
        (["tiny", "--seeds", "0,0"], "--seeds names '0' twice"),
        (["tiny", "--seed", "3"], "--seeds"),
        (["tiny", "--schedule.overcommit", "3"], "--schedule.overcommit' has no effect"),
        (["tinny"], "Did you mean 'tiny'?"),
        (["--seeds", "0", "tiny"], "write 'tiny' first"),
        (["tiny", "--sim", "x.toml"], "so does the recipe 'tiny'; leave one of them out"),
        (["--sim", "absent.toml"], "cannot read the settings 'absent.toml'"),
        (
            ["--sim", "absent.toml", "--steps", "-1"],
            "--steps -1: must be greater than or equal to 0",
        ),
        (["--sim", "x.toml", "--placement", "tiny"], "or give a run's folder as --sim"),
        ([], "RECIPE"),
    ],
)
def test_what_cannot_be_compared_is_said_with_status_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status(["compare", *arguments]) == 2
    captured = capsys.readouterr()
    shown = " ".join((captured.err + captured.out).replace("│", " ").split())
    assert message in shown
    assert list(tmp_path.iterdir()) == []


def status(arguments: Sequence[str]) -> int:
    """The exit status, whichever way the command line ends."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


# -- real runs ------------------------------------------------------------------------------------


class FakeTraining:
    """Stands in for the processes: writes what they would; some fail, one is interrupted."""

    def __init__(self, fails: Sequence[str] = (), interrupted_at: int = 0) -> None:
        self.commands: list[Sequence[str]] = []
        self.fails, self.interrupted_at = fails, interrupted_at

    def __call__(self, command: Sequence[str], log: Path) -> int:
        self.commands.append(command)
        recipe = Path(command[4])
        config = recipes.load(recipe)
        if len(self.commands) == self.interrupted_at:
            raise KeyboardInterrupt
        if recipe.stem in self.fails:
            log.write_text("".join(f"line {i}\n" for i in range(20)) + "stretto: error: no\n")
            return 2
        step_s = {"sync": 1.0, "oppo": 0.5, "async": 0.25}[recipe.stem]
        write_run(config.out, recipe.stem, config, step_s=step_s, reward=0.1)
        return 0


def compare_with(
    training: FakeTraining, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str
) -> int:
    monkeypatch.setattr(runs, "run_command", training)
    monkeypatch.chdir(folder)
    return status(["compare", "tiny", "--steps", "4", "--variants", "sync,oppo,async", *arguments])


def test_each_run_is_a_training_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = FakeTraining()
    options = ["--seeds", "3,4", "--out", "here", "--rollout.batch", "16"]
    assert compare_with(training, monkeypatch, tmp_path, *options) == 0
    text = capsys.readouterr().out
    assert [command[:4] for command in training.commands] == [
        [sys.executable, "-m", "stretto", "train"]
    ] * 6
    names = [f"seed{s}/{v}.toml" for s in (3, 4) for v in ("sync", "oppo", "async")]
    folder = Path("here/tiny-compare-001")
    assert [command[4] for command in training.commands] == [str(folder / n) for n in names]
    shared = [folder / f"seed{seed}" / "warmup.safetensors" for seed in (3, 4) for _ in range(3)]
    assert [command[5:] for command in training.commands] == [
        ["--warmup-file", str(file)] for file in shared
    ]
    config = recipes.load(folder / "seed4" / "oppo.toml")
    assert (config.seed, config.steps, config.rollout.batch) == (4, 4, 16)
    assert (config.schedule.preset, config.observe.progress) == ("oppo", "plain")
    assert "[4/6] sync, seed 4: 4 steps in 5.0 s" in text

    # 8 samples of the last three steps, in 3, 1.5 and 0.75 s.
    table = rows(printed_table(text))
    assert table["samples/s"] == ["2.67", "5.33", "10.7"]
    assert table["samples/s, x sync"] == ["1.00", "2.00", "4.00"]
    written = (folder / "compare.md").read_text()
    assert printed_table(text) in written
    command = "stretto compare tiny --steps 4 --variants sync,oppo,async " + " ".join(options)
    assert f"```\n{command}\n```" in written
    assert "cores, torch 2." in written
    data = json.loads((folder / "compare.json").read_text())
    assert data["command"] == command
    assert data["failed"] == []
    assert data["variants"]["async"]["samples_per_s"] == pytest.approx([8 / 0.75] * 2)
    page = (folder / "report.html").read_text()
    assert all(f'"{name}-001"' in page for name in ("sync", "oppo", "async"))

    # The same again does not mix with it.
    assert compare_with(FakeTraining(), monkeypatch, tmp_path, *options) == 0
    assert sorted(path.name for path in Path("here").iterdir()) == [
        "tiny-compare-001",
        "tiny-compare-002",
    ]


def test_a_failed_run_is_shown_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = FakeTraining(fails=["oppo"])
    assert compare_with(training, monkeypatch, tmp_path, "--seeds", "0") == 1
    text = capsys.readouterr().out
    assert len(training.commands) == 3
    log = "runs/tiny-compare-001/seed0/oppo.log"
    assert f"[2/3] oppo, seed 0: failed, exit status 2; the end of {log}:" in text
    assert "\n    line 9\n" in text
    assert "\n    stretto: error: no\n" in text
    assert "line 8\n" not in text
    assert rows(printed_table(text))[""] == ["sync", "async"]
    assert "- Failed and left out: oppo with seed 0." in text


def test_nothing_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = FakeTraining(fails=["sync", "oppo", "async"])
    assert compare_with(training, monkeypatch, tmp_path, "--seeds", "0") == 1
    assert "no run has finished, so there is nothing to compare" in capsys.readouterr().out


def test_ctrl_c_ends_with_the_table_of_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = FakeTraining(interrupted_at=3)
    assert compare_with(training, monkeypatch, tmp_path) == 130
    captured = capsys.readouterr()
    assert len(training.commands) == 3
    assert "[3/9] async, seed 0: interrupted" in captured.out
    table = rows(printed_table(captured.out))
    assert table["samples/s"] == ["2.67", "5.33"]
    assert "- Interrupted: what had not finished is left out." in captured.out
    assert captured.err == "stretto: interrupted\n"
    assert "samples/s" in Path("runs/tiny-compare-001/compare.md").read_text()


PATIENT = """
import os, time
from stretto import signals
signals.end_with(int(os.environ[signals.PARENT]))
try:
    with signals.ending_in_order():
        print("ready", os.getpid(), flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    {last_words}
"""


def send_when_ready(number: int, log: Path) -> threading.Thread:
    """Sends this process a signal, once the other one has begun."""

    def wait() -> None:
        while not (log.exists() and "ready" in log.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("last_words", "stop_s", "said"),
    [
        ("print('ended in order', flush=True)", 30.0, "ended in order\n"),
        ("time.sleep(60); print('too late', flush=True)", 0.05, ""),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_process_end_in_order_but_not_for_ever(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last_words: str,
    stop_s: float,
    said: str,
    number: int,
) -> None:
    monkeypatch.setattr(runs, "STOP_S", stop_s)
    log = tmp_path / "log"
    thread = send_when_ready(number, log)
    with pytest.raises(KeyboardInterrupt), signals.ending_in_order():
        runs.run_command([sys.executable, "-c", PATIENT.format(last_words=last_words)], log)
    thread.join()
    assert log.read_text().partition("\n")[2] == said


PARENT = """
import sys
from pathlib import Path
from stretto.api.runs import run_command
run_command([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]))
"""


def test_a_run_ends_in_order_when_the_comparison_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = PATIENT.format(last_words="print('ended in order', flush=True)")
    with subprocess.Popen([sys.executable, "-c", PARENT, child, str(log)]) as parent:
        while "ready" not in (text := log.read_text() if log.exists() else ""):
            time.sleep(0.02)
        parent.kill()
    while "ended in order" not in log.read_text():
        time.sleep(0.02)
    pid = int(text.split()[1])
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)


def test_a_command_with_a_parent_to_end_with_watches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[int] = []
    monkeypatch.setattr(signals, "end_with", watched.append)
    monkeypatch.setenv(signals.PARENT, "7")
    assert main(["--version"]) == 0
    assert watched == [7]
    assert signals.PARENT not in os.environ  # which commands that it starts would inherit


def test_a_real_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--steps", "3", "--rollout.batch", "8", "--rollout.max-new-tokens", "8"]
    variants = ["--variants", "sync,oppo", "--seeds", "0", "--warmup-examples", "32"]
    assert status(["compare", "tiny-tail", *small, *variants]) == 0
    text = capsys.readouterr().out
    table = rows(printed_table(text))
    assert table[""] == ["sync", "oppo"]
    seen, warm = {}, {}
    for column, variant in enumerate(("sync", "oppo")):
        folder = Path("runs/tiny-tail-compare-001/seed0") / f"{variant}-001"
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        rate = 16 / (lines[2]["time_s"] - lines[0]["time_s"])
        assert table["samples/s"][column] == three_digits(rate)
        stale = fmean(line["staleness/mean"] for line in lines)
        assert table["staleness, mean"][column] == f"{stale:.2f}"
        ended = RunDirectory(folder).read_rollouts()
        seen[variant] = {r.id: (r.prompt, r.prompt_tokens) for r in ended}
        assert len(ended) == 24
        log = (folder.parent / f"{variant}.log").read_text()
        assert "ppo with tiny: 115.2K parameters" in log
        warm[variant] = re.findall(
            r"^warmed up (already on|on) 32 examples.*?(\d\.\d+)", log, re.MULTILINE
        )
    ((on, loss),) = warm["sync"]
    assert (on, warm["oppo"]) == ("on", [("already on", loss)])  # by one, whose file has gone
    assert not list(Path("runs").rglob("warmup*"))
    assert not list(Path("runs").rglob("run.lock"))
    assert sorted(seen["sync"]) == list(range(24))
    shared = seen["sync"].keys() & seen["oppo"].keys()  # the same data in the same order
    assert {id_: seen["oppo"][id_] for id_ in shared} == {id_: seen["sync"][id_] for id_ in shared}


# -- virtual time ---------------------------------------------------------------------------------

CLUSTER = """
[[generators]]
devices = [0]
cost = {{ decode = {{ step_s = 1.0 }}, load_s = 0.25 }}

[[scorers]]
name = "reward"
devices = [1]
cost = {{ token_s = 0.1 }}

[learner]
devices = [{learner}]
cost = {{ step_s = 5.0, publish_s = 0.5 }}

[workload]
batch = 2
steps = 2
max_new_tokens = 30
prompt_tokens = {{ kind = "replayed", tokens = [1] }}
response_tokens = {{ kind = "replayed", tokens = [10, 20] }}
"""


def test_a_simulated_comparison_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step: 20 s to decode, 3.2 to score, 5.5 to train and publish, 0.25 to load.

    With one version of lag the second batch is decoded from 20 s to 40 s, and so it is trained on
    20 s after the first.
    """
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text(CLUSTER.format(learner=2))
    options = ["--variants", "sync,async", "--seeds", "0", "--target", "5"]
    assert status(["compare", "--sim", "two.toml", *options]) == 0
    text = capsys.readouterr().out
    table = rows(printed_table(text))
    first, second = 20 + 3.2 + 5.5, 0.25 + 20 + 3.2 + 5.5
    assert table["seconds to the target"] == ["not reached", "not reached"]
    assert table["busy: generator"][0] == f"{100 * 40.25 / (first + second):.1f} %"
    assert table["busy: all devices"][0] == f"{100 * 57.65 / 3 / (first + second):.1f} %"
    assert table["staleness, max"] == ["0", "1"]
    data = json.loads(Path("runs/two-compare-001/compare.json").read_text())
    assert data["ran_on"] == "virtual time, with costs and lengths of two.toml"
    assert data["variants"]["sync"]["step_s"] == [pytest.approx(second)]
    assert data["variants"]["async"]["step_s"] == [pytest.approx(20.0)]
    assert data["variants"]["sync"]["samples_per_s"] == [pytest.approx(2 / second)]
    assert data["variants"]["async"]["speedup"] == [pytest.approx(second / 20.0)]


def test_simulated_steps_and_seeds_are_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = CLUSTER.format(learner=0).replace(
        'kind = "replayed", tokens = [10, 20]', "kind = 'uniform'"
    )
    Path("two.toml").write_text(text)
    assert status(["compare", "--sim", "two.toml", "--variants", "sync", "--steps", "7"]) == 0
    data = json.loads(Path("runs/two-compare-001/compare.json").read_text())
    assert data["steps"] == 7
    assert data["variants"]["sync"]["seeds"] == [0, 1, 2]
    assert len(set(data["variants"]["sync"]["final_reward"])) == 3
    assert "[3/3] sync, seed 2: 7 steps in " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "seeds", "message"),
    [
        ("", "-1", "--seeds: 'seed = -1': must be greater than or equal to 0"),
        (
            "[schedule]\novercommit_max = 32",
            "0",
            "variant 'oppo': with 'schedule.overcommit_max = 32'",
        ),
    ],
)
def test_what_cannot_be_simulated_is_said_before_anything_runs(
    schedule: str,
    seeds: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text(CLUSTER.format(learner=0) + schedule)
    options = ["--variants", "sync,oppo", f"--seeds={seeds}"]
    assert status(["compare", "--sim", "two.toml", *options]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "[1/2]" not in out


def test_a_recorded_run_is_replayed_under_other_schedules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decoding took 1 s a step, a judge 0.5 s, training 4 s; one thing after the other."""
    monkeypatch.chdir(tmp_path)
    config = recipes.build(
        {"steps": 6, "rollout": {"batch": 2, "max_new_tokens": 20}, "seed": 3}, "here"
    )
    run = RunDirectory.create(".", "real", config)
    for step in range(1, 7):
        start_s, batch = 14.5 * (step - 1), []
        for i, length in enumerate((5, 10)):
            batch.append(ended_rollout(2 * step - 2 + i, length, versions=[step - 1] * length))
        ids = [r.id for r in batch]
        run.append_rollouts(step, batch, dict.fromkeys(ids, 0.5))
        window = Window(
            start_s,
            start_s + 14.5,
            (
                span("generator", "gen", start_s, 10.0, steps=10, tokens=15),
                span("task", "score", start_s + 10.0, 0.5, rollouts=ids),
                span("learner", "update", start_s + 10.5, 4.0, tokens=21),
            ),
        )
        run.trace.append(step, window, start_s)
    arguments = ["compare", "--sim", "real-001", "--variants", "sync,async", "--steps", "4"]
    assert status(arguments) == 0
    figures = json.loads(Path("runs/real-compare-001/compare.json").read_text())["variants"]
    assert figures["sync"]["seeds"] == [3]
    assert figures["sync"]["step_s"] == [pytest.approx(14.5, rel=0.02)]
    assert figures["async"]["step_s"] == [pytest.approx(10.0, rel=0.02)]
    assert "busy/all devices" not in figures["sync"]
    Path("apart.toml").write_text('runtime = "local"\n[rollout]\nengines = 2\n')
    assert status([*arguments, "--placement", "apart.toml"]) == 0
    again = json.loads(Path("runs/real-compare-002/compare.json").read_text())["variants"]
    assert again["sync"]["step_s"][0] < 14.5  # each of two generators has one of two responses
    capsys.readouterr()
    assert status([*arguments, "--placement", "absent.toml"]) == 2
    assert "cannot read the settings 'absent.toml'" in capsys.readouterr().err
    assert status([*arguments, "--seeds", "1"]) == 2
    assert "depend on no seed; leave it out" in capsys.readouterr().err


def span(role: str, name: str, start_s: float, seconds: float, **attributes: Any) -> Span:
    return Span(role, name, start_s, start_s + seconds, attributes)
