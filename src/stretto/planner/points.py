"""Measured points, and the rates and seconds that describe them best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from stretto.errors import StateError
from stretto.planner.calibration import nonnegative
from stretto.planner.hardware import Gpu, Hardware, Links
from stretto.runtime.sim.costs import Efficiency

Kind = Literal[
    "product", "copy", "prefill", "decode", "training", "update", "broadcast", "swap", "reduce"
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds of a piece of work.

    Attributes:
        kind: of work; a decode point is one step.
        what: its size, in words.
        seconds: that it took.
        flops: its operations, by the formulas of :mod:`stretto.planner.work`.
        size: its bytes, likewise.
    """

    kind: Kind
    what: str
    seconds: float
    flops: float = 0.0
    size: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """The device that was measured.

    Attributes:
        name: of the device.
        memory_bytes: that a process may fill.
        per_node: such devices of this machine; of a CPU, processes with as many threads.
    """

    name: str
    memory_bytes: float
    per_node: int


def fitted(points: Sequence[Point], place: Place) -> Hardware:
    """Return the figures by which formulas come nearest to the points; no term is negative.

    Peaks are the highest rates of all points: of products and copies, and of a run's work, if that
    is faster. A forward pass and a decode step take seconds beside their work, which are fitted
    with the rate by least squares of relative errors; a decode step takes the longer of reading and
    computing. Where seconds hardly grow with the work, a pass is taken to go at the peak, and a
    decode step to read like a copy of about its size. Training,
    updates and transfers take no such seconds in the formulas, so what they do take lowers their
    rates. Links get the rate that was reached, of which the share is 1.

    Args:
        points: of every kind one or more.
        place: where they were measured.

    Raises:
        StateError: a kind has no points.
    """
    of = {kind: [p for p in points if p.kind == kind] for kind in KINDS}
    if missing := [kind for kind, found in of.items() if not found]:
        raise StateError(f"no points of {', '.join(missing)}: measure every kind of work")
    # Work of a run may outdo a plain product or copy, as by what caches hold.
    computing = [*of["product"], *of["prefill"], *of["training"]]
    flops = max(p.flops / p.seconds for p in computing)
    memory = max(p.size / p.seconds for p in [*of["copy"], *of["decode"], *of["update"]])
    call_s, prefill = _line(of["prefill"], [p.flops for p in of["prefill"]], flops, flops)
    training = _rate(of["training"], [p.flops for p in of["training"]], flops)
    largest = max(p.size for p in of["decode"])
    like = min(of["copy"], key=lambda p: abs(math.log(p.size / largest)))
    step_s, read = _decoding(of["decode"], prefill, memory, like.size / like.seconds)
    update = _rate(of["update"], [p.size for p in of["update"]], memory)
    link = _rate(of["broadcast"], [p.size for p in of["broadcast"]])
    host = _rate(of["swap"], [p.size for p in of["swap"]])
    gpu = Gpu(place.name, flops, memory, place.memory_bytes, link, host)
    assumed = Efficiency(
        memory=read / memory,
        prefill=prefill / flops,
        training=training / flops,
        link=1.0,
        optimizer=update / memory,
        step_s=step_s,
        call_s=call_s,
        reduce_s=min(p.seconds for p in of["reduce"]),
    )
    return Hardware(gpu, Links.of(gpu, gpus_per_node=place.per_node), assumed)


def predicted_s(point: Point, on: Hardware) -> float:
    """Return the seconds of a point's work by the formulas."""
    gpu, a = on.gpu, on.assumed
    shares = {"prefill": a.prefill, "decode": a.prefill, "training": a.training}
    speeds = {
        "decode": gpu.memory_bytes_per_s * a.memory,
        "update": gpu.memory_bytes_per_s * a.optimizer,
        "broadcast": gpu.link_bytes_per_s * a.link,
        "swap": gpu.host_bytes_per_s * a.link,
    }
    beside_s = {"prefill": a.call_s, "decode": a.step_s, "reduce": a.reduce_s}.get(point.kind, 0.0)
    flops = gpu.flops * shares.get(point.kind, 1.0)
    speed = speeds.get(point.kind, gpu.memory_bytes_per_s)
    return beside_s + max(point.flops / flops, point.size / speed)


def _decoding(
    points: Sequence[Point], flops: float, peak: float, otherwise: float
) -> tuple[float, float]:
    """Return seconds beside the work of a decode step, and the rate at which it reads.

    The points with the fewest operations a byte read for longer than they compute. How many they
    are is tried.

    Args:
        flops: rate of computing.
        peak, otherwise: see :func:`_line`.
    """
    ordered = sorted(points, key=lambda p: p.flops / p.size)

    def fit(reading: int) -> tuple[float, float]:
        sizes = [p.size * (i < reading) for i, p in enumerate(ordered)]
        computed_s = [p.flops / flops * (i >= reading) for i, p in enumerate(ordered)]
        return _line(ordered, sizes, peak, otherwise, computed_s)

    def error(found: tuple[float, float]) -> float:
        beside_s, read = found
        took = ((beside_s + max(p.size / read, p.flops / flops)) / p.seconds for p in points)
        return sum((t - 1) ** 2 for t in took)

    return min(map(fit, range(len(points), -1, -1)), key=error)


def _line(
    points: Sequence[Point],
    work: Sequence[float],
    peak: float,
    otherwise: float,
    known_s: Sequence[float] = (),
) -> tuple[float, float]:
    """Return seconds beside the work, and its rate.

    Args:
        work: of each, in operations or bytes.
        peak: what the rate is at most.
        otherwise: the rate that is taken if the points tell none.
        known_s: seconds of each that other terms account for.
    """
    amount, seconds = np.array(work), np.array([p.seconds for p in points])
    unknown_s = seconds - np.array(known_s) if known_s else seconds
    once = 1 / seconds[:, None]  # relative errors: points differ in length by orders of magnitude
    beside_s, unit_s = nonnegative(np.hstack([once, once * amount[:, None]]), unknown_s / seconds)
    if unit_s * peak >= 1:
        return float(beside_s), float(1 / unit_s)
    (beside_s,) = nonnegative(once, (unknown_s - amount / otherwise) / seconds)
    return float(beside_s), otherwise


def _rate(points: Sequence[Point], work: Sequence[float], peak: float = math.inf) -> float:
    """Return the rate of work that takes no seconds beside it, all points together.

    It is what least squares give if errors grow with the work: the largest point says the most.
    """
    return min(sum(work) / sum(p.seconds for p in points), peak)
