"""What depends on the machine: how threads wait, and the type that products are fastest in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stretto
from stretto import SftConfig
from stretto.api.settings import settled
from stretto.cli import doctor
from stretto.config import recipes
from stretto.errors import ConfigError
from stretto.models import devices
from stretto.models.backend import SPIN_TURNS, fastest_dtype, pick_dtype, sleep_when_waiting
from stretto.models.devices import INNER, OUTER, REPEATS, ROWS, ProductSpeeds, measure

CPU = torch.device("cpu")
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)


# -- how threads wait ----------------------------------------------------------------------------


@pytest.mark.usefixtures("unset")
def test_threads_are_told_to_sleep_soon() -> None:
    sleep_when_waiting()
    assert os.environ.pop("GOMP_SPINCOUNT") == str(SPIN_TURNS)


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("name", WAITING)
def test_what_the_user_says_of_waiting_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    sleep_when_waiting()
    assert {n: os.environ[n] for n in WAITING if n in os.environ} == {name: "7"}


@pytest.mark.usefixtures("unset")
@pytest.mark.skipif(
    not any((Path(torch.__file__).parent / "lib").glob("libgomp*")),
    reason="torch brings no OpenMP of GNU's",
)
@pytest.mark.parametrize("module", ["stretto", "stretto.scoring.function_host"])
def test_openmp_reads_it_when_torch_loads_it(module: str) -> None:
    """In commands and scripts that import stretto first, and in a process of a reward function."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}, torch"],
        env={**os.environ, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{SPIN_TURNS}'" in done.stderr


# -- the type that products are fastest in -------------------------------------------------------


def timer(float32_s: float, bfloat16_s: float) -> Callable[[torch.dtype], float]:
    """A machine that takes so long for a product; twice that while something else runs, which is
    but for the third product of a type always.
    """
    calls = {torch.float32: 0, torch.bfloat16: 0}
    seconds = {torch.float32: float32_s, torch.bfloat16: bfloat16_s}

    def product(dtype: torch.dtype) -> float:
        calls[dtype] += 1
        assert calls[dtype] <= REPEATS + 1
        return seconds[dtype] * (1 if calls[dtype] == 3 else 2)

    return product


@pytest.mark.parametrize(
    ("float32_s", "bfloat16_s", "chosen"),
    [
        (0.004, 0.002, torch.bfloat16),  # AVX512-BF16 at twice the speed
        (0.004, 0.0074, torch.float32),  # the same instructions, at half of it
        (0.004, 0.0034, torch.float32),  # a near tie goes to the exact type ...
        (0.004, 0.0033, torch.bfloat16),  # ... and 1.2 times as fast is none
    ],
)
def test_the_faster_type_is_chosen(
    float32_s: float, bfloat16_s: float, chosen: torch.dtype
) -> None:
    found = measure(timer(float32_s, bfloat16_s))
    work = 2 * ROWS * INNER * OUTER / 1e9
    assert found.float32 == pytest.approx(work / float32_s)
    assert found.bfloat16 == pytest.approx(work / bfloat16_s)
    assert found.choice == chosen


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[ProductSpeeds], None]:
    """A CPU with instructions for bfloat16, and how fast it is."""
    monkeypatch.setattr(devices, "cpu_has_bfloat16", lambda: True)

    def has(found: ProductSpeeds) -> None:
        monkeypatch.setattr(devices, "product_speeds", lambda threads: found)

    return has


def test_auto_goes_by_what_is_measured(machine: Callable[[ProductSpeeds], None]) -> None:
    machine(ProductSpeeds(float32=310, bfloat16=167))
    assert pick_dtype("auto", CPU) == torch.float32
    assert pick_dtype("bfloat16", CPU) == torch.bfloat16
    machine(ProductSpeeds(float32=160, bfloat16=380))
    assert pick_dtype("auto", CPU) == torch.bfloat16
    assert pick_dtype("float32", CPU) == torch.float32


def test_a_cpu_without_bfloat16_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would emulate the product, which may take seconds."""

    def never(threads: int) -> ProductSpeeds:
        raise AssertionError

    monkeypatch.setattr(devices, "product_speeds", never)
    monkeypatch.setattr(devices, "cpu_has_bfloat16", lambda: False)
    dtype, because = fastest_dtype(CPU)
    assert dtype == torch.float32
    assert "no instructions" in because


@pytest.fixture
def three_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    devices.product_speeds.cache_clear()
    yield 3
    devices.product_speeds.cache_clear()
    torch.set_num_threads(before)


def test_a_measurement_leaves_no_trace(three_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def product(dtype: torch.dtype) -> float:
        seen.append(torch.get_num_threads())
        return 1.0

    monkeypatch.setattr(devices, "product_timer", lambda: product)
    before, state = torch.get_num_threads(), torch.get_rng_state()
    assert devices.product_speeds(three_threads) is devices.product_speeds(
        three_threads
    )  # measured once
    assert seen == [3] * 2 * (REPEATS + 1)
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_the_product_takes_time_in_both_types() -> None:
    product = devices.product_timer()
    assert all(product(dtype) > 0 for dtype in (torch.float32, torch.bfloat16))


# -- kept with a run -----------------------------------------------------------------------------

SLOW, FAST = ProductSpeeds(float32=310, bfloat16=167), ProductSpeeds(float32=160, bfloat16=380)


@pytest.mark.parametrize("kind", [stretto.Config, SftConfig])
def test_settings_keep_what_was_decided(
    kind: type[stretto.Config] | type[SftConfig], machine: Callable[[ProductSpeeds], None]
) -> None:
    lines: list[str] = []
    machine(SLOW)
    config = settled(kind(), lines.append)
    assert config.model.dtype == "float32"
    assert lines == [
        "model.dtype = auto takes float32: products at 167 GFLOP/s in bfloat16, 310 in float32"
    ]
    machine(FAST)
    assert settled(config, lines.append) is config
    assert len(lines) == 1
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        settled(kind.model_validate({"model": {"device": "cuda"}}), lines.append)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_head_without_gpus_takes_the_type_of_its_clusters(
    device: str, machine: Callable[[ProductSpeeds], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(SLOW)
    lines: list[str] = []
    monkeypatch.setattr("stretto.workers.ray_cluster.find", lambda: SimpleNamespace(gpus=8.0))
    data = {"runtime": "ray", "model": {"device": device}, "cluster": {"address": "auto"}}
    config = settled(stretto.Config.model_validate(data), lines.append)
    assert config.model.dtype == "bfloat16"
    assert lines[0] == "model.dtype = auto takes bfloat16: the run works on GPUs of other machines"
    monkeypatch.setattr("stretto.workers.ray_cluster.find", lambda: SimpleNamespace(gpus=0.0))
    data["model"] = {"device": "auto"}
    assert settled(stretto.Config.model_validate(data), lines.append).model.dtype == "float32"


def test_a_run_keeps_its_type_when_it_is_resumed_or_repeated(
    tmp_path: Path, machine: Callable[[ProductSpeeds], None], capsys: pytest.CaptureFixture[str]
) -> None:
    small: dict[str, Any] = {
        "warmup_examples": 0,
        "model__dtype": "auto",
        "rollout": {"batch": 4, "max_new_tokens": 4},
        "observe": {"progress": "plain", "checkpoint_every": 1},
        "out": str(tmp_path),
    }
    machine(SLOW)
    run = stretto.train("tiny", steps=1, **small).model.parent
    assert "model__dtype='auto' takes float32: products at 167" in capsys.readouterr().out
    assert recipes.load(run).model.dtype == "float32"
    machine(FAST)  # the machine, or what else runs on it, has changed
    stretto.resume(run, steps=2)
    assert recipes.load(run).model.dtype == "float32"
    again = stretto.train(run, steps=1).model.parent
    assert recipes.load(again).model.dtype == "float32"
    assert "model.dtype = auto" not in capsys.readouterr().out


def test_the_doctor_shows_both_rates(machine: Callable[[ProductSpeeds], None]) -> None:
    machine(SLOW)
    found = {f.topic: f for f in doctor._accelerator()}["cpu dtype"]
    assert found.text == (
        "model.dtype = auto takes float32: products at 167 GFLOP/s in bfloat16, 310 in float32"
    )
