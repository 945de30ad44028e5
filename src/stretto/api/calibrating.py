"""Measures this machine's performance for plans."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.api.settings import Settings, config_of
from stretto.machine import Machine, current_start
from stretto.planner.calibration import MeasuredDevice, Point, fitted, predicted_s
from stretto.planner.hardware import Hardware, write_hardware
from stretto.planner.memory_model import HALF
from stretto.saying import LOADING, Say, working

if TYPE_CHECKING:
    from stretto.planner.measuring import MeasuredModel, WorkSizes

NOT_MEASURED = "Not measured: links.between_bytes_per_s (between machines), assumed.usable"
NOTE = f"""Figures of a machine, for 'stretto plan --hardware FILE'; they may be edited.
{NOT_MEASURED}.
[measured] is for people: nothing reads it."""


def calibrate(
    settings: Settings,
    file: str | Path,
    *,
    sizes: WorkSizes | None = None,
    command: str = "",
    say: Say = print,
) -> Hardware:
    """Measure this machine and write a file for plans, like ``stretto plan --calibrate``.

    Device, dtype and threads are those of a run with these settings. ``command`` is recorded in the
    file. Raises ModelError if no model to measure fits here, RankError if the processes that sync
    weights fail, and StorageError if the file cannot be written.
    """
    with working(say, LOADING):
        import torch

        from stretto.assembly.run_models import prepare_torch
        from stretto.models.backend import pick_device
        from stretto.planner.measuring import WorkSizes, device_of, measured, model_to_measure

    config, began_s = config_of(settings), time.perf_counter()
    threads = torch.get_num_threads()
    prepare_torch(config.seed, config.threads)
    try:
        sizes = sizes or WorkSizes.of(pick_device(config.model.device))
        model = model_to_measure(config, max(sizes.training), say)
        device = device_of(model)
        for line in _head(model, device):
            say(line)
        points = []
        with working(say, "measuring"):
            for point in measured(model, sizes):
                points.append(point)
                say(f"  {point.kind:<9} {point.what:<28} {_seconds(point.seconds):>9}")
    finally:
        torch.set_num_threads(threads)
    hardware = fitted(points, device)
    for line in _summary(hardware, points):
        say(line)
    took_s = time.perf_counter() - began_s
    write_hardware(file, hardware, _measured(model, points, hardware, command, took_s), NOTE)
    say(NOT_MEASURED)
    return hardware


def _head(model: MeasuredModel, device: MeasuredDevice) -> Iterator[str]:
    dtype = str(model.dtype).removeprefix("torch.")
    yield (
        f"{device.name} with random weights of the shape of '{model.name}' "
        f"({model.shape.parameters / 1e6:,.4g} million) in {dtype}"
    )
    if model.device.type == "cpu":
        yield (
            f"This machine counts as {device.per_node} of these, which share its memory evenly: "
            f"{device.memory_bytes / 1e9:.1f} GB each"
        )
    if model.dtype.itemsize != HALF:
        yield (
            f"Weights, keys and values are counted at {HALF} bytes, as plans do, and have "
            f"{model.dtype.itemsize}: rates are as much lower, and memory is underestimated"
        )


def _summary(hardware: Hardware, points: Sequence[Point]) -> Iterator[str]:
    gpu, a = hardware.gpu, hardware.assumed
    yield (
        f"peaks: {gpu.flops / 1e12:.4g} Tflop/s, {gpu.memory_bytes_per_s / 1e9:.4g} GB/s; links "
        f"{gpu.link_bytes_per_s / 1e9:.4g} GB/s, to the host {gpu.host_bytes_per_s / 1e9:.4g} GB/s"
    )
    yield (
        f"reached of these: prefill {a.prefill:.0%}, training {a.training:.0%}, decoding "
        f"{a.memory:.1%}, updates {a.optimizer:.1%}; beside it {_seconds(a.call_s)} a prefill, "
        f"{_seconds(a.step_s)} a decode step, {_seconds(a.reduce_s)} an all-reduce"
    )
    yield "By these figures, beside what was measured:"
    for point in points:
        if point.kind not in ("product", "copy", "reduce"):
            off = f"{100 * (predicted_s(point, hardware) / point.seconds - 1):+.0f} %"
            yield f"  {point.kind:<9} {point.what:<28} {off:>9}"


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _measured(
    model: MeasuredModel, points: Sequence[Point], hardware: Hardware, command: str, took_s: float
) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "seconds": round(took_s, 1),
        "machine": str(Machine.here()),
        "model": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": current_start()["versions"],
        "points": [
            {
                "kind": p.kind,
                "what": p.what,
                "seconds": p.seconds,
                "flops": p.flops,
                "bytes": p.size,
                "by_figures_s": predicted_s(p, hardware),
            }
            for p in points
        ],
    }
