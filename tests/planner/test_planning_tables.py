"""The tables of docs/scaling.md are those that the formulas make, of layouts that they choose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from _estimate import Estimate, estimate
from scaling import EIGHTHS, WORKLOAD, apart, cells, preference, rows_of, tables, together
from stretto.layout import Layout
from stretto.models.shapes import LLAMAS
from stretto.planner.hardware import GPUS, Hardware, Links
from stretto.planner.run_layout import ModelShapes, RunLayout

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
H100 = Hardware(GPUS["h100"], Links.of(GPUS["h100"]))


def test_the_page_has_the_tables_of_today() -> None:
    written = PAGE.read_text(encoding="utf-8").partition("<!-- tables -->\n")[2]
    assert written.partition("<!-- end of tables -->")[0].strip() == tables(H100), (
        "the formulas say something else by now: put what 'python benchmarks/scaling.py' prints "
        "between the marks of docs/scaling.md, and read its text again"
    )


def estimated(size: str, layout: RunLayout) -> Estimate:
    return estimate(ModelShapes.of_one_size(LLAMAS[size]), layout, WORKLOAD, H100)


def test_what_fits_comes_before_what_is_quick() -> None:
    place = RunLayout(Layout(fsdp=12), Layout(dp=4, tp=4), Layout(dp=8, tp=2), "none")
    slow, burst = estimated("13B", place), estimated("13B", replace(place, checkpointing=False))
    assert not slow.bursts
    assert burst.bursts
    assert burst.step_s < slow.step_s
    assert min(burst, slow, key=preference) is slow


@pytest.mark.parametrize("gpus", [8, 64])
def test_layouts_use_all_gpus_and_can_be_divided(gpus: int) -> None:
    for size in ("33B", "70B"):
        models = ModelShapes.of_one_size(LLAMAS[size])
        for listed in (list(together(LLAMAS[size], gpus)), list(apart(LLAMAS[size], gpus))):
            assert len(listed) == len(set(listed)) > 50
            for layout in listed:
                assert layout.gpus == gpus
                layout.check(models, H100.links)
    assert all(sum(shares) == 8 and min(shares) >= 1 for shares in EIGHTHS)


def test_what_does_not_fit_says_which_phase_bursts() -> None:
    colocated, separate = rows_of(LLAMAS["70B"], H100, [8])
    assert cells(colocated)[-1] == "does not fit: generation, scoring, training, weight sync"
    assert cells(separate)[-1].startswith("does not fit: generation, ")
    # 16 bytes of each trained parameter alone are more than there are.
    assert colocated.best.training.parts["learner's states"] > H100.usable_bytes
