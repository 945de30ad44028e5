"""docs/papers.md has the tables of today; what they are made of, against cases by hand."""

from __future__ import annotations

import re

import pytest

import _async
import _async_tables
import _oppo
import _rlhfuse
import _rlhfuse_tables
from _papers import step_s
from papers import PAGE, PARTS, replaced
from stretto.config import recipes
from stretto.observe.spans import Span
from stretto.runtime.sim.simulate import SimResult
from stretto.types import Stats

AGAIN = "the simulator says something else by now: run 'python benchmarks/papers.py --write'"


def written(mark: str) -> str:
    """The table of the page below a mark."""
    found = re.search(rf"<!-- {mark} -->\n(.*?)\n<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert found, mark
    return found[1]


def test_the_page_has_the_quick_tables_of_today() -> None:
    known = [task for task in _async.TASKS if task.generating_s]
    assert written("async-reported") == _async_tables.reported_table(known, _async.STEPS), AGAIN
    assert written("rlhfuse-fused") == _rlhfuse_tables.fused_table(), AGAIN


@pytest.mark.parametrize(("column", "name"), list(enumerate(("tldr", "no-robots", "gsm8k-rho"))))
def test_recipes_and_tables_take_a_papers_batch_from_one_number(column: int, name: str) -> None:
    """That of the simulated setting: prompts of a step, and responses to each."""
    task, recipe = _async.TASKS[column], recipes.load(name)
    assert recipe.rollout.samples_per_prompt == task.samples
    assert recipe.rollout.batch == task.prompts * task.samples
    rows = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5:
            rows[cells[0]] = cells[1 + column].replace(",", "")
    assert rows["prompts a step"] == str(task.prompts)
    assert rows["responses to a prompt"] == str(task.samples)
    assert recipe.steps == int(rows["responses of the run"]) // recipe.rollout.batch


def test_the_reported_minutes_say_that_a_batch_counts_prompts() -> None:
    """Online DPO on GSM8K: 218 and 129 minutes, of 25 and 15.1 s a step."""
    task, recipe = _async.TASKS[2], recipes.load("gsm8k-rho")
    assert task.plain_s is not None
    assert task.overlapped_s is not None
    assert recipe.steps * task.plain_s / 60 == pytest.approx(218, rel=0.03)
    assert recipe.steps * task.overlapped_s / 60 == pytest.approx(129, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_the_page_has_all_tables_and_pictures_of_today(name: str) -> None:
    made = PARTS[name](False)
    for mark, table in made.tables.items():
        assert written(mark) == table, AGAIN
    for file, svg in made.pictures.items():
        assert (PAGE.parent / "images" / file).read_text() == svg, AGAIN


def test_tables_are_put_between_their_marks() -> None:
    page = "a\n<!-- x -->\nold\n<!-- end -->\nb\n<!-- y -->\nkept\n<!-- end -->\n"
    assert replaced(page, "x", "| \\1 |") == page.replace("old", "| \\1 |")
    with pytest.raises(ValueError, match="0 places for 'z'"):
        replaced(page, "z", "")


def result(seconds: list[float], spans: list[Span], devices: list[float]) -> SimResult:
    steps: list[Stats] = [{"timing_s/step": s} for s in seconds]
    return SimResult(steps, spans, sum(seconds), 0.0, {}, {}, devices, {})


def test_a_step_leaves_out_the_first_and_the_last() -> None:
    run = result([9.0, 2.0, 4.0, 1.0], [], [])
    assert step_s(run) == 5.0
    assert step_s(run, 1) == 3.0
    assert step_s(result([7.0], [], [])) == 7.0


def test_utilisation_counts_decoding_by_the_rows_that_get_a_token() -> None:
    cluster = _oppo.TRL.cluster(_oppo.TASKS[0], 1)  # seven of eight devices generate
    gen = Span("generator", "gen", 0.0, 10.0, {"steps": 100, "tokens": 100 * 28})
    run = result([20.0], [gen], [0.75] * 7 + [0.25])
    # 28 of 112 rows: three quarters of ten of the twenty seconds are idle, on seven devices.
    expected = (7 * (0.75 - 0.75 * 0.5) + 0.25) / 8
    found = _oppo.Ablation(cluster, {"base": run}).utilisation("base")
    assert found == pytest.approx(expected)


def test_a_fused_schedules_idle_time_in_micro_batches() -> None:
    # Row 2 of Table 3: 372 ticks, of which 16 x 15 of the actor's and 8 x 12 of the critic's.
    assert _rlhfuse.fused_bubble("33B", "13B") == pytest.approx((372 - 336) / 27)
    assert _rlhfuse.row_of("33B", "65B") is _rlhfuse.row_of("65B", "33B")


def test_layouts_use_all_gpus_and_fit() -> None:
    for pair in _rlhfuse.PAIRS:
        run = _rlhfuse.Run(*pair, 1024)
        assert {run.layout(size).ranks for size in pair} == {_rlhfuse.GPUS}
        assert run.trained_bytes < 0.5 * run.on.usable_bytes
        assert run.cluster.device_count == _rlhfuse.GPUS
    zero = _rlhfuse.Run("13B", "33B", 512, _rlhfuse.Assumed("zero"))
    held = _rlhfuse.SHAPES["13B"].parameters + _rlhfuse.SHAPES["33B"].parameters
    assert zero.trained_bytes == pytest.approx(16 * held / 256)


def test_online_dpo_trains_on_two_of_each_prompts_responses() -> None:
    task = _async.TASKS[0]
    two, four = (_async.cluster(task, _async.Assumed(samples=k), 1).learner.cost for k in (2, 4))
    assert two is not None
    assert four is not None
    assert four.token_s == pytest.approx(two.token_s / 2, rel=0.01)


def test_reported_stages_overlap_but_for_the_hand_over() -> None:
    task = _async.TASKS[1]
    pair = _async.of_reported(task, 6)
    hand_over_s = pair.plain_s - 54.0
    assert 0 < hand_over_s < 1
    assert pair.ahead_s == pytest.approx(33.0, abs=hand_over_s)
