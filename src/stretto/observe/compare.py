"""Several ways to run the same training, side by side in one table.

The figures are those that overlapping is about: how fast samples go through, how long and how many
steps it takes to reach a reward, what reward is reached in the end, how stale the samples were, and
how busy each role was. The rewards of single steps are noisy, so they are smoothed before they are
compared with a target.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Any, Self

from stretto.observe.display import REWARD
from stretto.observe.idle import ALL_DEVICES, is_generator, role_order
from stretto.observe.report.runs import LoadedRun, shares
from stretto.observe.significance import (
    LEVEL,
    Interval,
    mean_interval,
    ratio_interval,
    verdict,
)
from stretto.saying import padded

BASELINE = "sync"
"""The variant that speed-ups are relative to, and that the target reward is taken from."""

SMOOTHED_STEPS = 10
"""Steps that a smoothed reward is the mean of; half the steps of a run shorter than twice that."""

TARGET_SHARE = 0.95
"""Share of the baseline's own rise in reward that is the target, if none is given."""

Values = Sequence[float | None]
"""A figure of a variant's runs; ``None`` for a run that lacks it, or did not reach the target."""


@dataclass(frozen=True, slots=True)
class VariantResult:
    """Figures to compare of one run that took all its steps.

    Attributes:
        times_s: seconds since the run's start at the end of each step.
        samples: responses trained on in each step.
        rewards: mean of each step's responses.
        staleness_mean, staleness_max: of each step; versions of the weights.
        utilisation: share of the run's time in which a role worked, by role.
    """

    variant: str
    seed: int
    times_s: Sequence[float]
    samples: Sequence[int]
    rewards: Sequence[float]
    staleness_mean: Sequence[float]
    staleness_max: Sequence[float]
    utilisation: Mapping[str, float]

    @classmethod
    def of(cls, variant: str, seed: int, run: LoadedRun) -> Self:
        """Make the result from a run's records."""

        def column(metric: str) -> list[float]:
            values = (m.get(metric) for m in run.metrics)
            return [math.nan if value is None else float(value) for value in values]

        trained = Counter(r.step for r in run.rollouts if r.state == "trained")
        times_s = run.times_s()
        total_s = max(times_s.values(), default=0.0)
        return cls(
            variant=variant,
            seed=seed,
            times_s=list(times_s.values()),
            samples=[trained[step] for step in times_s],
            rewards=column(REWARD),
            staleness_mean=column("staleness/mean"),
            staleness_max=column("staleness/max"),
            utilisation={s.role: s.busy_s / total_s for s in shares(run) if total_s},
        )


def smoothed(rewards: Sequence[float], window: int) -> list[float]:
    """Return means of ``window`` steps in a row; the first is of the first ``window`` steps."""
    return [fmean(rewards[end - window : end]) for end in range(window, len(rewards) + 1)]


def three_digits(value: float) -> str:
    """Write a number with three significant digits, or as a whole number if it has more."""
    decimals = 2 - math.floor(math.log10(abs(value))) if value else 2
    return f"{value:.{max(decimals, 0)}f}"


def _counted(value: float) -> str:
    """Write a mean of whole numbers: '12', '12.5'."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure of runs, a row of the table: how it is written and averaged over seeds."""

    key: str
    label: str
    write: Callable[[float], str] = three_digits
    missing: str = "-"
    average: Callable[[Sequence[float]], float] = fmean
    interval: Callable[[Sequence[float]], Interval | None] = lambda _: None

    def mean(self, values: Values) -> str:
        known = _known(values)
        if not known:
            return self.missing
        some = f" ({len(known)} of {len(values)})" if len(known) < len(values) else ""
        return f"{self.write(self.average(known))}{some}"

    def range(self, values: Values) -> str:
        low, high = (self.write(f(known)) if (known := _known(values)) else "" for f in (min, max))
        return f"{low}..{high}" if low != high else ""

    def interval_of_mean(self, values: Values) -> str:
        """Write the confidence interval, where there is one and it has a width."""
        found = self.interval(_known(values))
        if not (found and found.low < found.high):
            return ""
        return f"[{self.write(found.low)}, {self.write(found.high)}]"


def _known(values: Values) -> list[float]:
    return [value for value in values if value is not None]


_RATIO = "{:.2f}".format
_MISSED = "not reached"
_ROWS = (
    _Figure("samples_per_s", "samples/s"),
    _Figure("speedup", f"samples/s, x {BASELINE}", _RATIO),
    _Figure("step_s", "seconds a step"),
    _Figure(
        "time_to_target_s", "seconds to the target", three_digits, _MISSED, fmean, mean_interval
    ),
    _Figure(
        "time_ratio", f"seconds, {BASELINE}'s / own", _RATIO, "-", geometric_mean, ratio_interval
    ),
    _Figure("steps_to_target", "steps to the target", _counted, _MISSED, fmean, mean_interval),
    _Figure(
        "steps_ratio", f"steps, {BASELINE}'s / own", _RATIO, "-", geometric_mean, ratio_interval
    ),
    _Figure("final_reward", "final reward", "{:.3f}".format),
    _Figure("staleness_mean", "staleness, mean", "{:.2f}".format),
    _Figure("staleness_max", "staleness, max", _counted),
)
_BUSY = "busy/"
_OF_TARGET = ("time_to_target_s", "steps_to_target", "time_ratio", "steps_ratio")
_OVER_BASELINE = {
    "speedup": ("samples_per_s", False),
    "time_ratio": ("time_to_target_s", True),
    "steps_ratio": ("steps_to_target", True),
}
"""Ratios to the baseline's run of the same seed: of which figure, and whether the baseline's is on
top, as where less is better."""


class Comparison:
    """The figures of runs, by variant and seed.

    Args:
        results: at least one; all of the same number of steps.
        target: the reward to reach; without it, :data:`TARGET_SHARE` of the way from the
            baseline's first smoothed reward to its last, each the mean over its seeds.

    Attributes:
        steps: of each run.
        window: steps that a smoothed reward is the mean of.
        target: the smoothed reward to reach; ``None`` where there is no sensible one.
        figures: by variant, in the order in which they came, by seed and by key; ``None`` for what
            a run does not have, and for a target not reached.
    """

    def __init__(self, results: Sequence[VariantResult], target: float | None = None) -> None:
        self.steps = len(results[0].rewards)
        self.window = max(1, min(SMOOTHED_STEPS, self.steps // 2))
        self.target, self._target_note = self._choose(results, target)
        self.figures: dict[str, dict[int, dict[str, float | None]]] = {}
        for result in results:
            self.figures.setdefault(result.variant, {})[result.seed] = self._figures(result)
        baseline = self.figures.get(BASELINE, {})
        for by_seed in self.figures.values():
            for seed, own in by_seed.items():
                for key, (source, inverse) in _OVER_BASELINE.items():
                    own[key] = _ratio(own[source], baseline.get(seed, {}).get(source), inverse)

    @property
    def seeds(self) -> list[int]:
        """The seeds of which any variant has a run."""
        return sorted({seed for by_seed in self.figures.values() for seed in by_seed})

    def table(self) -> str:
        """Return the figures in Markdown that is aligned, so that it can be read as it is.

        A figure is the mean over a variant's seeds; below it stands its range, and for the target
        the mean's confidence interval.
        """
        lines = [["", *self.figures]]
        for row in self._rows():
            columns = [self._values(variant, row.key) for variant in self.figures]
            lines.append([row.label, *map(row.mean, columns)])
            for label, write in (
                ("  min..max", row.range),
                (f"  {100 * LEVEL:.0f} %", row.interval_of_mean),
            ):
                if any(cells := [write(values) for values in columns]):
                    lines.append([label, *cells])
        head, *body = (f"| {' | '.join(cells)} |" for cells in padded(lines))
        first, *others = (len(cell) + 1 for cell in padded(lines)[0])
        rule = [":" + "-" * first, *("-" * width + ":" for width in others)]
        return "\n".join([head, f"|{'|'.join(rule)}|", *body])

    def notes(self) -> list[str]:
        """Return notes without which the table cannot be read, a sentence or two each."""
        means = f"mean of {self.window} steps" if self.window > 1 else "reward of one step"
        notes = [
            self._target_note,
            f"Smoothed reward: {means}; time and steps to the target count up to the first one "
            "that is there, and the final reward is the last one.",
            "samples/s and seconds a step leave out the first step, which warms up; time to the "
            "target does not.",
        ]
        if len(self.seeds) > 1:
            named = ", ".join(map(str, self.seeds))
            notes.append(
                f"Means over seeds {named}, with the lowest and the highest below where they "
                f"differ; x {BASELINE} compares runs of the same seed; {100 * LEVEL:.0f} %: "
                "confidence interval of the mean (Student's t)."
            )
        return notes if self.target is None else notes + self._target_notes()

    def data(self) -> dict[str, Any]:
        """Return all figures as plain data: by variant its seeds, and a list of values a figure."""
        keys = [row.key for row in self._rows()]
        return {
            "steps": self.steps,
            "smoothed_steps": self.window,
            "target_reward": self.target,
            "variants": {
                variant: {"seeds": list(by_seed), **{k: self._values(variant, k) for k in keys}}
                for variant, by_seed in self.figures.items()
            },
            f"intervals_{100 * LEVEL:.0f}": {
                variant: {
                    row.key: found and [found.low, found.high]
                    for row in self._rows()
                    if row.key in _OF_TARGET
                    for found in [row.interval(_known(self._values(variant, row.key)))]
                }
                for variant in self.figures
            },
        }

    def _target_notes(self) -> list[str]:
        """Name runs that did not reach the target, and differences that the seeds show."""
        missed = [
            f"{variant} with seed {seed}"
            for variant, by_seed in self.figures.items()
            for seed, figures in by_seed.items()
            if figures["steps_to_target"] is None
        ]
        notes = []
        if missed:
            notes.append(
                f"Target not reached within {self.steps} steps, and so left out of its means and "
                f"intervals, which flatter a schedule that lacks runs: {', '.join(missed)}."
            )
        if len(self.seeds) > 1 and len(self.figures) > 1 and BASELINE in self.figures:
            base = self.figures[BASELINE]
            for key, what in (("time_ratio", "Seconds"), ("steps_ratio", "Steps")):
                pairs = {
                    variant: [own[key] for seed, own in by_seed.items() if seed in base]
                    for variant, by_seed in self.figures.items()
                    if variant != BASELINE
                }
                notes.append(verdict(f"{what} to the target", BASELINE, pairs))
        return notes

    def _choose(
        self, results: Sequence[VariantResult], target: float | None
    ) -> tuple[float | None, str]:
        """Return the target, and a sentence about it."""
        if target is not None:
            return target, f"Target reward: {target:g}, as asked."
        curves = [smoothed(r.rewards, self.window) for r in results if r.variant == BASELINE]
        if not curves:
            return None, f"No target reward: no run of {BASELINE} to take it from; use --target."
        first, last = (fmean(curve[end] for curve in curves) for end in (0, -1))
        if not last > first:
            return None, (
                f"No target reward: the smoothed reward of {BASELINE} does not rise "
                f"({first:.3f} to {last:.3f}); use --target, or train for more steps."
            )
        chosen = first + TARGET_SHARE * (last - first)
        return chosen, (
            f"Target reward: {chosen:.3f}, which is {100 * TARGET_SHARE:.0f} % of the way from the "
            f"first smoothed reward of {BASELINE} ({first:.3f}) to its last ({last:.3f}), means "
            "over its seeds."
        )

    def _figures(self, result: VariantResult) -> dict[str, float | None]:
        warm_s = result.times_s[-1] - result.times_s[0]
        rewards = smoothed(result.rewards, self.window)
        reached = None
        if (target := self.target) is not None:
            at = (i for i, reward in enumerate(rewards, self.window) if reward >= target)
            reached = next(at, None)
        busy = result.utilisation
        generators = [share for role, share in busy.items() if is_generator(role)]
        by_kind = {"generator": fmean(generators)} if generators else {}
        by_kind |= {role: share for role, share in busy.items() if not is_generator(role)}
        return {
            "samples_per_s": sum(result.samples[1:]) / warm_s if warm_s else None,
            "step_s": warm_s / (self.steps - 1) if warm_s else None,
            "time_to_target_s": None if reached is None else result.times_s[reached - 1],
            "steps_to_target": None if reached is None else float(reached),
            "final_reward": rewards[-1],
            "staleness_mean": fmean(result.staleness_mean),
            "staleness_max": max(result.staleness_max),
            **{f"{_BUSY}{role}": share for role, share in by_kind.items()},
        }

    def _rows(self) -> list[_Figure]:
        left_out = set(_OF_TARGET) if self.target is None else set()
        if BASELINE not in self.figures:
            left_out.update(_OVER_BASELINE)
        keys = {k for by_seed in self.figures.values() for own in by_seed.values() for k in own}
        roles = {key.removeprefix(_BUSY) for key in keys if key.startswith(_BUSY)}
        ordered = sorted(roles, key=lambda role: (role == ALL_DEVICES, role_order(role)))
        busy = [
            _Figure(f"{_BUSY}{role}", f"busy: {role}", lambda share: f"{100 * share:.1f} %")
            for role in ordered
        ]
        return [row for row in _ROWS if row.key not in left_out] + busy

    def _values(self, variant: str, key: str) -> list[float | None]:
        return [figures.get(key) for figures in self.figures[variant].values()]


def _ratio(own: float | None, base: float | None, inverse: bool) -> float | None:
    if not own or not base:
        return None
    return base / own if inverse else own / base
