"""Costs fitted to the spans of a real run, so that it can be replayed and varied in virtual time.

The fit reads the length of each span, and of its attributes

- ``gen``: ``steps``, ``tokens`` and, where the engine counts them, ``context`` (tokens of context
  that all steps read) and ``prefilled``;
- ``prefill`` and ``score``, of a scorer: ``tokens``; a scorer that gives none is taken for a
  function, whose time goes by the number of its ``rollouts``;
- ``update``: ``tokens``; ``publish``, ``load`` and, between processes, ``send``: nothing;
- ``driver/...``, the driver's own work: ``items``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from statistics import median
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from stretto.errors import StateError
from stretto.observe.idle import is_generator, seconds, subtract, union
from stretto.observe.spans import NO_DEVICES, WEIGHT_SYNC, Span
from stretto.protocols import DRIVER
from stretto.runtime.sim.costs import (
    DecodeCost,
    DriverCost,
    GeneratorCost,
    PrefillCost,
    SampleCost,
    TrainCost,
)

Array = npt.NDArray[np.float64]

_NO_THREADS: Mapping[str, int] = MappingProxyType({})

_ROUNDS = 20

_FAR_OFF = 10.0
"""How many times what the others let expect a first call takes that is left out: it compiles."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The costs of a run's roles.

    Attributes:
        generator: of the generators, all alike.
        scorers: by name.
        loads_s: seconds that scorers take to take over a version of the weights, by name.
        learner: its training and publishing.
        call_s: seconds that a call is on its way, and its answer: what passes between the end of an
            update and the publishing that follows, without the driver's own work.
        driver: its own work, by the names of its spans.
    """

    generator: GeneratorCost
    scorers: Mapping[str, PrefillCost | SampleCost]
    loads_s: Mapping[str, float]
    learner: TrainCost
    call_s: float
    driver: Mapping[str, DriverCost]


def calibrate(
    spans: Iterable[Span], threads: Mapping[str, int] = _NO_THREADS, cores: int = 0
) -> Calibration:
    """Fit all costs to the spans of a run; the first steps are best left out, as they warm up.

    Args:
        spans: of all roles.
        threads, cores: see :func:`undisturbed`, which takes off what roles took from each other.

    Raises:
        StateError: the generator or the learner has no spans.
    """
    as_they_were = list(spans)
    by_role: defaultdict[str, list[Span]] = defaultdict(list)
    sends: defaultdict[str, list[Span]] = defaultdict(list)
    for span in undisturbed(as_they_were, threads, cores):
        if span.role == WEIGHT_SYNC:  # which contains the loads of all who take part
            sends[span.attributes.get("model", "")].append(replace(span, name="load"))
        elif not span.waits and span.role not in NO_DEVICES:
            by_role[role_of(span)].append(span)
    loads_s = {
        name: _mean_s(sends.get("actor" if name == "generator" else name) or found, "load")
        for name, found in by_role.items()
    }
    for role, name in (("generator", "gen"), ("learner", "update")):
        if not any(s.name == name for s in by_role[role]):
            raise StateError(
                f"costs are fitted to a run's spans, and there is no '{name}' of the {role}; "
                "calibrate on a run of at least a few steps"
            )
    generator, learner = by_role.pop("generator"), by_role.pop("learner")
    return Calibration(
        generator=_generator(generator, loads_s["generator"]),
        scorers={
            name: _scorer(spans)
            for name, spans in by_role.items()
            if any(span.name != "load" for span in spans)
        },
        loads_s=loads_s,
        learner=_learner(learner),
        call_s=_call_s(as_they_were),
        driver=_driver(as_they_were),
    )


def undisturbed(spans: Iterable[Span], threads: Mapping[str, int], cores: int) -> Iterator[Span]:
    """Yield work as it would have been without the others at work on the same cores.

    While more threads are at work than there are cores, all work at the same reduced rate.

    Args:
        threads: of each role's work, by the names that :func:`role_of` gives.
        cores: that they share; 0 for enough.
    """
    spans = list(spans)
    if not cores:
        yield from spans
        return
    changes: defaultdict[float, int] = defaultdict(int)
    for span in spans:
        works = not span.waits and span.role not in NO_DEVICES
        used = threads[role_of(span)] if works else 0
        changes[span.start_s] += used
        changes[span.end_s] -= used
    done_s = at_s = 0.0  # seconds of work that each has done
    busy = 0
    done: dict[float, float] = {}
    for moment_s in sorted(changes):
        done_s += (moment_s - at_s) * (min(1.0, cores / busy) if busy else 1.0)
        at_s = moment_s
        busy += changes[moment_s]
        done[moment_s] = done_s
    for span in spans:
        yield replace(span, start_s=done[span.start_s], end_s=done[span.end_s])


def role_of(span: Span) -> str:
    """Return whose work a span is, by a name that replicas share."""
    if is_generator(span.role):
        return "generator"
    name, _, number = span.role.rpartition(" ")
    return name if name and number.isdecimal() else span.role


def fit_costs(features: Array, took_s: Array, far_off: float = _FAR_OFF) -> Array:
    """Fit coefficients, none negative, so that ``features @ coefficients`` is near ``took_s``.

    The calls take as long in all as they did: squared errors count in inverse proportion to what is
    expected (a Poisson regression, by iteratively reweighted least squares). So a mean is
    predicted, to which the slow calls of a busy machine belong. First calls that take many times
    what the others let expect, as they compile, are left out.

    Args:
        features: [n calls, k], in the order in which they were made; a column of zeros gets the
            coefficient 0.
        took_s: of each call; [n calls]
        far_off: how many times what the others let expect a first call takes that is left out.
    """
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
    """Fit what is typical: the less a call counts, the further off it is (Huber's weights).

    Relative errors are minimised, as calls differ in length by orders of magnitude.
    """
    scale = np.maximum(took_s, np.median(took_s) * 1e-3 + 1e-12)
    x, y = features / scale[:, None], took_s / scale
    weights = np.ones_like(y)
    coefficients = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        coefficients = nonnegative(x * root[:, None], y * root)
        error = np.abs(x @ coefficients - y)
        usual = max(float(np.median(error)) * 1.4826, 1e-9)
        weights = np.minimum(1.0, 3 * usual / np.maximum(error, 1e-12))
    return coefficients


def nonnegative(x: Array, y: Array) -> Array:
    """Solve least squares, leaving out the columns that would get a negative coefficient.

    Args:
        x: [n, k].
        y: [n].

    Returns:
        coefficients [k], 0 for what is left out.
    """
    norms = np.linalg.norm(x, axis=0)
    used = np.flatnonzero(norms)
    while used.size:
        # Columns of unit length: tokens and steps are orders of magnitude apart.
        found = np.linalg.lstsq(x[:, used] / norms[used], y, rcond=None)[0] / norms[used]
        if (found >= 0).all():
            break
        used = np.delete(used, int(np.argmin(found * norms[used])))
    coefficients = np.zeros(x.shape[1])
    if used.size:
        coefficients[used] = found
    return coefficients


def _fit(
    spans: Sequence[Span], rows: Sequence[Sequence[float]], far_off: float = _FAR_OFF
) -> list[float]:
    features = np.array(rows, np.float64).reshape(len(spans), -1)
    took_s = np.array([s.end_s - s.start_s for s in spans])
    return [float(c) for c in fit_costs(features, took_s, far_off)]


def _generator(spans: Sequence[Span], load_s: float) -> GeneratorCost:
    calls = [s for s in spans if s.name == "gen"]
    numbers = [
        [float(s.attributes.get(key, 0)) for key in ("steps", "tokens", "context", "prefilled")]
        for s in calls
    ]
    rows = [[*n, float(n[3] > 0)] for n in numbers]
    step_s, row_s, context_s, token_s, call_s = _fit(calls, rows)
    return GeneratorCost(
        decode=DecodeCost(step_s=step_s, row_s=row_s, context_s=context_s),
        prefill=PrefillCost(call_s=call_s, token_s=token_s),
        load_s=load_s,
    )


def _scorer(spans: Sequence[Span]) -> PrefillCost | SampleCost:
    calls = [s for s in spans if s.name.partition("/")[0] in ("prefill", "score")]
    if any("tokens" in s.attributes for s in calls):
        known = [s for s in calls if s.attributes.get("tokens")]
        call_s, token_s = _fit(known, [[1.0, s.attributes["tokens"]] for s in known])
        return PrefillCost(call_s=call_s, token_s=token_s)
    counts = [s.attributes.get("rollouts_count", len(s.attributes["rollouts"])) for s in calls]
    call_s, sample_s = _fit(calls, [[1.0, float(n)] for n in counts])
    return SampleCost(call_s=call_s, sample_s=sample_s)


def _learner(spans: Sequence[Span]) -> TrainCost:
    updates = [s for s in spans if s.name == "update"]
    step_s, token_s = _fit(updates, [[1.0, s.attributes["tokens"]] for s in updates])
    return TrainCost(step_s=step_s, token_s=token_s, publish_s=_mean_s(spans, "publish"))


def _driver(spans: Sequence[Span]) -> dict[str, DriverCost]:
    """Return the costs of the driver's work; of that nothing is left out, however rare."""
    by_name: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.role == DRIVER:
            by_name[span.name].append(span)
    costs = {}
    for name, found in by_name.items():
        rows = [[1.0, float(s.attributes["items"])] for s in found]
        call_s, item_s = _fit(found, rows, far_off=inf)
        costs[name] = DriverCost(call_s=call_s, item_s=item_s)
    return costs


def _call_s(spans: Sequence[Span]) -> float:
    """Return what typically passes between an update and the publishing of what it has made.

    What the driver does itself in between is not on the way.
    """
    learner = sorted((s for s in spans if s.role == "learner"), key=lambda span: span.start_s)
    driver = union((s.start_s, s.end_s) for s in spans if s.role == DRIVER)
    gaps = [
        seconds(subtract([(before.end_s, max(after.start_s, before.end_s))], driver))
        for before, after in pairwise(s for s in learner if not s.waits)
        if (before.name, after.name) == ("update", "publish")
    ]
    return median(gaps) if gaps else 0.0


def _mean_s(spans: Sequence[Span], name: str) -> float:
    return _mean([s.end_s - s.start_s for s in spans if s.name == name])


def _mean(times: Sequence[float]) -> float:
    return float(fit_costs(np.ones((len(times), 1)), np.array(times))[0]) if times else 0.0
