"""Costs fitted to measurements.

:func:`calibrate` (docs/simulator.md) fits the costs of roles to a run's spans, by their duration
and attributes. A ``gen`` span has ``steps``, ``tokens`` and, if the engine counts them, ``context``
(tokens that all steps read) and ``prefilled``. ``prefill``, ``score`` and ``update`` have
``tokens`` or else a number of ``rollouts``, ``driver/...`` has ``items``. :func:`fitted`
(docs/planning.md) fits the rates of a device to timed work (``measuring.py``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from stretto.errors import StateError
from stretto.observe.idle import is_generator, seconds, subtract, union
from stretto.observe.spans import NO_DEVICES, WEIGHT_SYNC, Span
from stretto.planner.hardware import Gpu, Hardware, Links
from stretto.protocols import DRIVER
from stretto.runtime.sim import costs
from stretto.runtime.sim.resources import full_speed, speed_with_driver

Array = npt.NDArray[np.float64]

_ROUNDS = 20
_FAR_OFF = 10.0
"""Initial calls that take this many times the expected seconds are left out, as they compile."""


def fit_costs(features: Array, took_s: Array, far_off: float = _FAR_OFF) -> Array:
    """Fit nonnegative coefficients [k] to the seconds of calls [n] with features [n, k]. The fit
    keeps the calls' total time. It is a Poisson regression, by iteratively reweighted least
    squares. Initial calls that take ``far_off`` times their expected seconds are left out."""
    least_s = np.median(took_s) * 1e-3 + 1e-12
    coefficients = _robust(features, took_s)
    like_others = took_s <= far_off * np.maximum(features @ coefficients, least_s)
    first = int(np.argmax(like_others))
    x, y = features[first:], took_s[first:]
    for _ in range(_ROUNDS):
        root = np.sqrt(1 / np.maximum(x @ coefficients, least_s))
        coefficients = nonnegative(x * root[:, None], y * root)
    return coefficients


def _robust(features: Array, took_s: Array) -> Array:
    """Fit relative errors, as calls differ by orders of magnitude, with Huber's weights."""
    scale = np.maximum(took_s, np.median(took_s) * 1e-3 + 1e-12)
    x, y = features / scale[:, None], took_s / scale
    coefficients = nonnegative(x, y)
    for _ in range(_ROUNDS - 1):
        error = np.abs(x @ coefficients - y)
        usual = max(float(np.median(error)) * 1.4826, 1e-9)
        root = np.sqrt(np.minimum(1.0, 3 * usual / np.maximum(error, 1e-12)))
        coefficients = nonnegative(x * root[:, None], y * root)
    return coefficients


def nonnegative(x: Array, y: Array) -> Array:
    """Solve least squares of x [n, k] and y [n], dropping columns with negative coefficients."""
    norms = np.linalg.norm(x, axis=0)
    columns = np.flatnonzero(norms)
    while columns.size:
        # Normalize columns, because tokens and steps are orders of magnitude apart.
        fit = np.linalg.lstsq(x[:, columns] / norms[columns], y, rcond=None)[0] / norms[columns]
        if (fit >= 0).all():
            break
        columns = np.delete(columns, int(np.argmin(fit * norms[columns])))
    coefficients = np.zeros(x.shape[1])
    if columns.size:
        coefficients[columns] = fit
    return coefficients


@dataclass(frozen=True, slots=True)
class Calibration:
    """The costs of a run's roles. The gap between an update's end and its publishing, without the
    driver's work, counts as ``call_s``, the seconds to deliver a call and its answer."""

    generator: costs.GeneratorCost
    scorers: Mapping[str, costs.PrefillCost | costs.SampleCost]
    loads_s: Mapping[str, float]  # in which scorers load a version of the weights, by name
    learner: costs.TrainCost
    call_s: float
    driver: Mapping[str, costs.DriverCost]  # its own work, by span name


def calibrate(
    spans: Iterable[Span],
    threads: Mapping[str, int] = {},
    cores: int = 0,
    thread_scaling: float = 0.0,
) -> Calibration:
    """Fit all costs to a run's spans. Raises StateError if generator or learner has none."""
    all_spans = list(spans)
    by_role: defaultdict[str, list[Span]] = defaultdict(list)
    sends: defaultdict[str, list[Span]] = defaultdict(list)
    for span in undisturbed(all_spans, threads, cores, thread_scaling):
        if span.role == WEIGHT_SYNC:  # contains the loads of all roles
            sends[span.attributes.get("model", "")].append(replace(span, name="load"))
        elif not span.waits and span.role not in NO_DEVICES:
            by_role[role_of(span)].append(span)
    loads_s = {
        name: _mean_s(sends.get("actor" if name == "generator" else name) or role_spans, "load")
        for name, role_spans in by_role.items()
    }
    for role, name in (("generator", "gen"), ("learner", "update")):
        if not any(s.name == name for s in by_role[role]):
            raise StateError(
                f"costs are fitted to a run's spans, and there is no '{name}' of the {role}; "
                "calibrate on a run of at least a few steps",
                "no-spans",
            )
    generator, learner = by_role.pop("generator"), by_role.pop("learner")
    scorers = {
        name: _scorer(spans)
        for name, spans in by_role.items()
        if any(span.name != "load" for span in spans)
    }
    return Calibration(
        generator=_generator(generator, loads_s["generator"], scorers.get("reference")),
        scorers=scorers,
        loads_s=loads_s,
        learner=_learner(learner),
        call_s=_call_s(all_spans),
        driver=_driver(all_spans),
    )


def undisturbed(
    spans: Iterable[Span], threads: Mapping[str, int], cores: int, thread_scaling: float = 0.0
) -> Iterator[Span]:
    """Yield spans as if no other work had shared the ``cores`` (0: enough for all). While several
    roles are busy, all are assumed to slow down at the rate of
    :func:`~stretto.runtime.sim.resources.full_speed`."""
    spans = list(spans)
    if not cores:
        yield from spans
        return
    in_processes = not thread_scaling
    changes: defaultdict[float, list[int]] = defaultdict(lambda: [0, 0, 0])
    for span in spans:
        works = not span.waits and span.role not in NO_DEVICES
        span_threads = threads[role_of(span)] if works else 0
        if works and in_processes and span.name == "load":
            span_threads += 1  # of the learner's process
        driver = span.role == DRIVER
        for moment_s, sign in ((span.start_s, 1), (span.end_s, -1)):
            changes[moment_s][0] += sign * works
            changes[moment_s][1] += sign * span_threads
            changes[moment_s][2] += sign * driver
    done_s = at_s = 0.0  # seconds of undisturbed work
    pieces = busy = drivers = 0
    done: dict[float, float] = {}
    for moment_s in sorted(changes):
        if drivers:
            rate = speed_with_driver(pieces, busy, cores, in_processes)
        else:
            rate = full_speed(pieces, busy, cores, thread_scaling)
        done_s += (moment_s - at_s) * rate
        at_s = moment_s
        more_pieces, more_threads, more_drivers = changes[moment_s]
        pieces, busy = pieces + more_pieces, busy + more_threads
        drivers += more_drivers
        done[moment_s] = done_s
    for span in spans:
        yield replace(span, start_s=done[span.start_s], end_s=done[span.end_s])


def role_of(span: Span) -> str:
    """Return the role of a span, without a replica's number."""
    if is_generator(span.role):
        return "generator"
    name, _, number = span.role.rpartition(" ")
    return name if name and number.isdecimal() else span.role


def _fit(spans: Sequence[Span], rows: Sequence[Sequence[float]], far_off: float) -> list[float]:
    features = np.array(rows, np.float64).reshape(len(spans), -1)
    took_s = np.array([s.end_s - s.start_s for s in spans])
    return [float(c) for c in fit_costs(features, took_s, far_off)]


ALIKE = 2.0
"""If the largest amount is below this multiple of the smallest, the calls do not show their fixed
cost. It is then fitted as part of the cost per unit, as in large calls."""


def _fit_line(
    spans: Sequence[Span], amount: Callable[[Span], float], far_off: float = _FAR_OFF
) -> list[float]:
    amounts = [float(amount(s)) for s in spans]
    if amounts and max(amounts) < ALIKE * min(amounts):
        return [0.0, *_fit(spans, [[units] for units in amounts], far_off)]
    return _fit(spans, [[1.0, units] for units in amounts], far_off)


def _generator(
    spans: Sequence[Span], load_s: float, reference: costs.PrefillCost | costs.SampleCost | None
) -> costs.GeneratorCost:
    """Fit a generator's costs. If all its prefills have similar sizes, a prefilled token costs as
    much as one that the reference reads, which is the same model."""
    calls = [s for s in spans if s.name == "gen"]
    names = ("steps", "tokens", "context", "prefilled", "proposed", "accepted")
    numbers = [[float(s.attributes.get(name, 0)) for name in names] for s in calls]
    rows = [  # a step reads its rows' newest tokens, and proposed ones
        [steps, tokens - accepted + proposed, context, float(prefilled > 0), prefilled]
        for steps, tokens, context, prefilled, proposed, accepted in numbers
    ]
    prefills = [row[-1] for row in rows if row[-1]]
    similar = bool(prefills) and max(prefills) < ALIKE * min(prefills)
    if similar and isinstance(reference, costs.PrefillCost):
        token_s = reference.token_s
        calls = [_shorter(s, token_s * row.pop()) for s, row in zip(calls, rows, strict=True)]
        step_s, row_s, context_s, call_s = _fit(calls, rows, _FAR_OFF)
    else:
        step_s, row_s, context_s, call_s, token_s = _fit(calls, rows, _FAR_OFF)
    return costs.GeneratorCost(
        decode=costs.DecodeCost(step_s=step_s, row_s=row_s, context_s=context_s),
        prefill=costs.PrefillCost(call_s=call_s, token_s=token_s),
        load_s=load_s,
    )


def _shorter(span: Span, by_s: float) -> Span:
    return replace(span, start_s=min(span.start_s + by_s, span.end_s))


def _scorer(spans: Sequence[Span]) -> costs.PrefillCost | costs.SampleCost:
    calls = [s for s in spans if s.name.partition("/")[0] in ("prefill", "score")]
    if any("tokens" in s.attributes for s in calls):
        calls_with_tokens = [s for s in calls if s.attributes.get("tokens")]
        call_s, token_s = _fit_line(calls_with_tokens, lambda s: s.attributes["tokens"])
        return costs.PrefillCost(call_s=call_s, token_s=token_s)
    call_s, sample_s = _fit_line(
        calls, lambda s: s.attributes.get("rollouts_count", len(s.attributes["rollouts"]))
    )
    return costs.SampleCost(call_s=call_s, sample_s=sample_s)


def _learner(spans: Sequence[Span]) -> costs.TrainCost:
    updates = _with_accumulated(spans)
    step_s, token_s = _fit_line(updates, lambda s: s.attributes["tokens"])
    return costs.TrainCost(step_s=step_s, token_s=token_s, publish_s=_mean_s(spans, "publish"))


def _with_accumulated(spans: Sequence[Span]) -> list[Span]:
    """Return the updates, each longer by those of its passes that preceded it."""
    updates, accumulated_s = [], 0.0
    for span in sorted(spans, key=lambda s: s.start_s):
        if span.name == "accumulate":
            accumulated_s += span.end_s - span.start_s
        elif span.name == "update":
            updates.append(replace(span, start_s=span.start_s - accumulated_s))
            accumulated_s = 0.0
    return updates


def _driver(spans: Sequence[Span]) -> dict[str, costs.DriverCost]:
    """Return the costs of the driver's work. Rare long calls count too."""
    by_name: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.role == DRIVER:
            by_name[span.name].append(span)
    cost_by_name = {}
    for name, work in by_name.items():
        call_s, item_s = _fit_line(work, lambda s: s.attributes["items"], far_off=math.inf)
        cost_by_name[name] = costs.DriverCost(call_s=call_s, item_s=item_s)
    return cost_by_name


def _call_s(spans: Sequence[Span]) -> float:
    """Return the median gap from an update to its publishing, without the driver's work."""
    learner = sorted((s for s in spans if s.role == "learner"), key=lambda span: span.start_s)
    driver = union((s.start_s, s.end_s) for s in spans if s.role == DRIVER)
    gaps = [
        seconds(subtract([(before.end_s, max(after.start_s, before.end_s))], driver))
        for before, after in pairwise(s for s in learner if not s.waits)
        if (before.name, after.name) == ("update", "publish")
    ]
    return median(gaps) if gaps else 0.0


def _mean_s(spans: Sequence[Span], name: str) -> float:
    times = np.array([s.end_s - s.start_s for s in spans if s.name == name])
    return float(fit_costs(np.ones((len(times), 1)), times)[0]) if len(times) else 0.0


Kind = Literal[
    "product", "copy", "prefill", "decode", "training", "update", "broadcast", "swap", "reduce"
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Point:
    """A piece of work: its description, seconds, operations and bytes. Decoding is one step."""

    kind: Kind
    what: str
    seconds: float
    flops: float = 0.0
    size: float = 0.0


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """The measured device, the memory that a process may fill, and the number of such devices. A
    CPU counts as often as processes with this many threads have room on it."""

    name: str
    memory_bytes: float
    per_node: int


def fitted(points: Sequence[Point], device: MeasuredDevice) -> Hardware:
    """Return the rates by which formulas come nearest to the points. No term is negative. If
    seconds hardly grow with the work, a pass is assumed to run at the peak, and a decode step to
    read like a copy of about its size. Raises StateError if a kind has no points."""
    of = {kind: [p for p in points if p.kind == kind] for kind in KINDS}
    if missing := [kind for kind, kind_points in of.items() if not kind_points]:
        problem = f"no points of {', '.join(missing)}: measure every kind of work"
        raise StateError(problem, "no-points")
    # A run's work may outdo a plain product or copy, for example because of caches.
    computing = [*of["product"], *of["prefill"], *of["training"]]
    flops = max(p.flops / p.seconds for p in computing)
    memory = max(p.size / p.seconds for p in [*of["copy"], *of["decode"], *of["update"]])
    call_s, prefill = _line(of["prefill"], [p.flops for p in of["prefill"]], flops, flops)
    training = min(_rate(of["training"]), flops)
    largest = max(p.size for p in of["decode"])
    like = min(of["copy"], key=lambda p: abs(math.log(p.size / largest)))
    step_s, read = _decoding(of["decode"], prefill, memory, like.size / like.seconds)
    update = min(_rate(of["update"]), memory)
    link, host = _rate(of["broadcast"]), _rate(of["swap"])
    gpu = Gpu(device.name, flops, memory, device.memory_bytes, link, host)
    assumed = costs.Efficiency(
        memory=read / memory,
        prefill=prefill / flops,
        training=training / flops,
        link=1.0,
        optimizer=update / memory,
        step_s=step_s,
        call_s=call_s,
        reduce_s=min(p.seconds for p in of["reduce"]),
    )
    return Hardware(gpu, Links.of(gpu, device.per_node), assumed)


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
    fixed_s = {"prefill": a.call_s, "decode": a.step_s, "reduce": a.reduce_s}.get(point.kind, 0.0)
    flops = gpu.flops * shares.get(point.kind, 1.0)
    speed = speeds.get(point.kind, gpu.memory_bytes_per_s)
    return fixed_s + max(point.flops / flops, point.size / speed)


def _decoding(
    points: Sequence[Point], flops: float, peak: float, otherwise: float
) -> tuple[float, float]:
    """Return a decode step's fixed seconds, and the rate at which it reads. Points with the fewest
    operations a byte are bound by reading. Every number of them is tried."""
    ordered = sorted(points, key=lambda p: p.flops / p.size)

    def fit(reading: int) -> tuple[float, float]:
        sizes = [p.size * (i < reading) for i, p in enumerate(ordered)]
        computed_s = [p.flops / flops * (i >= reading) for i, p in enumerate(ordered)]
        return _line(ordered, sizes, peak, otherwise, computed_s)

    def error(candidate: tuple[float, float]) -> float:
        fixed_s, read = candidate
        took = ((fixed_s + max(p.size / read, p.flops / flops)) / p.seconds for p in points)
        return sum((t - 1) ** 2 for t in took)

    return min(map(fit, range(len(points), -1, -1)), key=error)


def _line(
    points: Sequence[Point],
    work: Sequence[float],
    peak: float,
    otherwise: float,
    known_s: Sequence[float] = (),
) -> tuple[float, float]:
    """Return fixed seconds and the rate of work, at most ``peak``; ``otherwise`` if none can be
    fitted. Other terms account for ``known_s`` of each point's seconds."""
    amount, seconds = np.array(work), np.array([p.seconds for p in points])
    unknown_s = seconds - np.array(known_s) if known_s else seconds
    once = 1 / seconds[:, None]  # relative errors: points differ in length by orders of magnitude
    fixed_s, unit_s = nonnegative(np.hstack([once, once * amount[:, None]]), unknown_s / seconds)
    if unit_s * peak >= 1:
        return float(fixed_s), float(1 / unit_s)
    (fixed_s,) = nonnegative(once, (unknown_s - amount / otherwise) / seconds)
    return float(fixed_s), otherwise


def _rate(points: Sequence[Point]) -> float:
    return sum(p.flops or p.size for p in points) / sum(p.seconds for p in points)
