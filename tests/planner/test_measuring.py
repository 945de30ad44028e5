"""This machine, measured: the fit, and a small measurement."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
import torch

from raising import raises
from run_helpers import SMALL_SIZES
from stretto.config import recipes
from stretto.errors import ModelError, StateError
from stretto.layout import Layout
from stretto.models.shapes import shape_of
from stretto.planner import formulas, measuring
from stretto.planner.calibration import Kind, MeasuredDevice, Point, fitted, predicted_s
from stretto.planner.formulas import TrainingPasses, generator_cost, prefill_cost, train_cost
from stretto.planner.hardware import Gpu, Hardware, Links
from stretto.planner.measuring import WorkSizes, model_to_measure
from stretto.planner.memory_model import cache_bytes
from stretto.runtime.sim.costs import Efficiency

DEVICE = MeasuredDevice("a box", 32e9, 2)
TRUE = Hardware(
    Gpu("a box", 1e11, 2e10, 32e9, 1e9, 4e9),
    Links(1e9, 50e9, 4e9, 2),
    Efficiency(
        memory=0.25,
        prefill=0.5,
        training=0.4,
        link=1.0,
        optimizer=0.1,
        step_s=0.003,
        reduce_s=1e-4,
        call_s=0.002,
    ),
)
TINY = recipes.build({"model": {"name": "tiny", "dtype": "float32"}}, "a test")


def point(kind: Kind, flops: float = 0.0, size: float = 0.0) -> Point:
    """A point that takes as long as the true figures say."""
    blank = Point(kind, "", 1.0, flops, size)
    return replace(blank, seconds=predicted_s(blank, TRUE))


def points() -> list[Point]:
    return [
        point("product", flops=1e10),
        point("copy", size=1e9),
        *(point("prefill", flops=flops) for flops in (1e8, 1e9, 4e9)),
        *(point("decode", f, s) for f, s in ((1e7, 1e7), (4e7, 3e7), (4e7, 8e7), (2e9, 5e7))),
        *(point("training", flops=flops) for flops in (1e9, 8e9)),
        point("update", size=1e8),
        *(point("broadcast", size=size) for size in (1e7, 1e8)),
        *(point("swap", size=size) for size in (1e7, 1e8)),
        point("reduce"),
    ]


# -- the fit ---------------------------------------------------------------------------------------


def test_known_figures_are_recovered() -> None:
    found = fitted(points(), DEVICE)
    assert astuple(found.gpu)[1:] == pytest.approx(astuple(TRUE.gpu)[1:])
    assert found.links == TRUE.links
    assert dict(found.assumed) == pytest.approx(dict(TRUE.assumed))
    assert [predicted_s(p, found) for p in points()] == pytest.approx([p.seconds for p in points()])


def test_nothing_is_negative_and_no_share_is_above_one() -> None:
    others = [p for p in points() if p.kind not in ("prefill", "decode")]
    # Larger calls that take no longer: all is beside the work, which goes at the peak.
    flat = [Point("prefill", "", 0.1, flops) for flops in (1e6, 2e6, 3e6)]
    # Seconds that grow faster than in proportion, which a line meets below zero.
    steep = [Point("decode", "", s, size=1e6 * s**0.5) for s in (0.001, 0.01, 0.1)]
    found = fitted([*others, *flat, *steep], DEVICE)
    assert found.assumed.prefill == 1.0
    assert found.assumed.call_s == pytest.approx(0.1, rel=0.01)
    assert found.assumed.step_s == 0.0
    assert 0 < found.assumed.memory < 1


def test_decode_steps_that_tell_no_rate_read_as_copies_of_their_size_do() -> None:
    others = [p for p in points() if p.kind != "decode"]
    cached = Point("copy", "", 1e-5, size=1e6)  # 100 GB/s, beside the 20 GB/s of a large one
    flat = [Point("decode", "", 0.1, size=size) for size in (1e9, 1.1e9, 1.2e9)]
    found = fitted([*others, cached, *flat], DEVICE)
    assert found.gpu.memory_bytes_per_s == pytest.approx(1e11)
    assert found.assumed.memory == pytest.approx(2e10 / 1e11)
    assert found.assumed.step_s == pytest.approx(0.1 - 1.1e9 / 2e10, rel=0.01)


def test_work_may_outdo_a_product_and_a_copy() -> None:
    fast = Point("training", "", 0.01, flops=1e10)
    cached = Point("update", "", 0.001, size=1e8)
    found = fitted([*points(), fast, cached], DEVICE)
    assert found.gpu.flops == pytest.approx(1e12)
    assert found.gpu.memory_bytes_per_s == pytest.approx(1e11)


def test_every_kind_of_point_is_needed() -> None:
    with raises(StateError, "no-points", "decode"):
        fitted([p for p in points() if p.kind != "decode"], DEVICE)


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_points_are_predicted_as_plans_cost_them(rows: int) -> None:
    shape, one = shape_of("smollm2-135m"), Layout()
    prefill = point("prefill", flops=formulas.forward_flops(shape, 256, 64, 1))
    assert prefill.seconds == pytest.approx(prefill_cost(shape, one, TRUE, length=64).seconds(256))
    decode = point(
        "decode",
        formulas.decode_flops(shape, rows, 100, 1),
        formulas.decode_read_bytes(shape, rows, 100, 1),
    )
    cost = generator_cost(shape, 1, TRUE).decode
    assert decode.seconds == pytest.approx(cost.seconds(rows, context=100 * rows, steps=1))
    flops = formulas.training_flops(shape, 256, 64, 1, checkpointing=False)
    work = [
        point("training", flops=flops),
        point("update", size=formulas.optimizer_bytes(shape, one)),
    ]
    trained = train_cost([shape], one, TRUE, TrainingPasses(tokens=256, length=64))
    assert sum(p.seconds for p in work) == pytest.approx(trained.seconds(256))


# -- what is measured with -------------------------------------------------------------------------


def test_a_runs_own_shape_is_taken_if_it_fits() -> None:
    told: list[str] = []
    model = model_to_measure(TINY, 64, told.append)
    assert (model.name, model.shape.parameters, told) == ("tiny", 115_200, [])
    assert model.model.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "stands_in", "reason"),
    [
        ("owner/unheard-of", "smollm2-135m", "would have to be fetched"),
        ("huggyllama/llama-7b", "smollm2-135m", "has 6.7 billion parameters, too many"),
    ],
)
def test_another_stands_in_for_one_that_cannot_be_measured(
    name: str, stands_in: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "free_bytes", lambda device: 16e9)
    told: list[str] = []
    config = recipes.build({"model": {"name": name, "device": "cpu"}}, "a test")
    assert model_to_measure(config, 64, told.append).name == stands_in
    (line,) = told
    assert line.startswith(f"'{name}' {reason}")
    assert f"'{stands_in}' stands in for it" in line


def test_no_model_may_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "free_bytes", lambda device: 1000.0)
    with raises(ModelError, "nothing-fits", "'tiny' needs"):
        model_to_measure(TINY, 64, print)


# -- a small measurement ---------------------------------------------------------------------------


def test_work_is_counted_as_the_formulas_do() -> None:
    model = model_to_measure(TINY, 64, print)
    shape = model.shape
    prefills = list(measuring.prefills(model, SMALL_SIZES))
    assert [p.flops for p in prefills] == [
        formulas.forward_flops(shape, tokens, 16, 1) for tokens in (32, 64)
    ]
    small, large = measuring.decodes(model, SMALL_SIZES)
    tokens = (small.size - formulas.decode_read_bytes(shape, 0, 0, 1)) / cache_bytes(shape, 1)
    assert small.flops == pytest.approx(formulas.decode_flops(shape, 2, tokens / 2, 1))
    assert formulas.decode_read_bytes(shape, 2, 8, 1) < small.size
    assert large.size < formulas.decode_read_bytes(shape, 4, 16 + 70, 1)
    *trainings, update = measuring.trainings(model, SMALL_SIZES)
    assert [p.flops for p in trainings] == [3 * p.flops for p in prefills]
    assert update.size == 32 * 115_200
    assert min(p.seconds for p in [*prefills, small, large, *trainings, update]) > 0


def test_the_model_is_left_without_gradients() -> None:
    model = model_to_measure(TINY, 64, print)
    list(measuring.trainings(model, SMALL_SIZES))
    assert all(p.grad is None for p in model.model.parameters())
    assert all(p.isfinite().all() for p in model.model.parameters())


def test_products_copies_and_swaps() -> None:
    device = torch.device("cpu")
    product, copy = measuring.peaks(device, torch.float32, SMALL_SIZES)
    assert (product.flops, copy.size) == (2 * 64**3, 2e6)
    (swap,) = measuring.swaps(device, SMALL_SIZES)
    assert (swap.size, swap.what) == (4e6, "4 MB within memory")


def test_two_processes_sync_weights() -> None:
    broadcast, reduce = measuring.broadcasts(torch.device("cpu"), torch.float32, 1, SMALL_SIZES)
    assert (broadcast.kind, broadcast.size) == ("broadcast", 2 * 2**20)  # at two bytes a weight
    assert reduce.kind == "reduce"
    assert broadcast.seconds > 0 < reduce.seconds


def test_sizes_suit_the_device() -> None:
    cpu, gpu = WorkSizes.of(torch.device("cpu")), WorkSizes.of(torch.device("cuda"))
    assert max(cpu.training) < max(gpu.training)


def test_repeats_are_more_of_short_calls_and_fewer_of_long_ones() -> None:
    calls: list[int] = []
    measuring.timed(lambda: calls.append(0), torch.device("cpu"), 3, enough_s=0.0)
    assert len(calls) == 4  # one warms up
    calls.clear()
    measuring.timed(lambda: calls.append(0), torch.device("cpu"), 3, patience_s=0.0)
    assert len(calls) == 2
    calls.clear()
    measuring.timed(lambda: calls.append(0), torch.device("cpu"), 3, enough_s=0.01)
    assert len(calls) > 4
