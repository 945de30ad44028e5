"""Several ways to run the same training, side by side in one table.

The figures are those that overlapping is about: how fast samples go through, how long and how many
steps it takes to reach a reward, what reward is reached in the end, how stale the samples were, and
how busy each role was. The rewards of single steps are noisy, so they are smoothed before they are
compared with a target.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Any, Self

from stretto.observe.idle import ALL_DEVICES, is_generator, role_order
from stretto.observe.intervals import LEVEL, Interval, mean_interval, ratio_interval
from stretto.observe.progress import REWARD
from stretto.observe.report.runs import Run, shares
from stretto.observe.significance import verdict

BASELINE = "sync"
"""The variant that speed-ups are relative to, and that the target reward is taken from."""

SMOOTHED_STEPS = 10
"""Steps that a smoothed reward is the mean of; half the steps of a run shorter than twice that."""

TARGET_SHARE = 0.95
"""Share of the baseline's own rise in reward that is the target, if none is given."""

Figures = Mapping[str, float | None]
"""A run's figures by key; ``None`` for one that it does not have, or a target not reached."""


@dataclass(frozen=True, slots=True)
class Outcome:
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
    def of(cls, variant: str, seed: int, run: Run) -> Self:
        """Make the outcome from a run's records."""
        trained = Counter(r.step for r in run.rollouts if r.state == "trained")
        times_s = run.times_s()
        total_s = max(times_s.values(), default=0.0)
        return cls(
            variant=variant,
            seed=seed,
            times_s=list(times_s.values()),
            samples=[trained[step] for step in times_s],
            rewards=_column(run, REWARD),
            staleness_mean=_column(run, "staleness/mean"),
            staleness_max=_column(run, "staleness/max"),
            utilisation={s.role: s.busy_s / total_s for s in shares(run) if total_s},
        )


def smoothed(rewards: Sequence[float], window: int) -> list[float]:
    """Means of ``window`` steps in a row; the first is of the first ``window`` steps."""
    return [fmean(rewards[end - window : end]) for end in range(window, len(rewards) + 1)]


def three_digits(value: float) -> str:
    """Write a number with three significant digits, or as a whole number if it has more."""
    decimals = 2 - math.floor(math.log10(abs(value))) if value else 2
    return f"{value:.{max(decimals, 0)}f}"


def counted(value: float) -> str:
    """Write a mean of whole numbers: '12', '12.5'."""
    return f"{value:.1f}".removesuffix(".0")


def percent(share: float) -> str:
    """Write a share as '12.3 %'."""
    return f"{100 * share:.1f} %"


@dataclass(frozen=True, slots=True)
class _Row:
    key: str
    label: str
    write: Callable[[float], str] = three_digits
    missing: str = "-"
    mean: Callable[[Sequence[float]], float] = fmean
    interval: Callable[[Sequence[float]], Interval | None] | None = None


_RATIO = "{:.2f}".format
_MISSED = "not reached"
_ROWS = (
    _Row("samples_per_s", "samples/s"),
    _Row("speedup", f"samples/s, x {BASELINE}", _RATIO),
    _Row("step_s", "seconds a step"),
    _Row("time_to_target_s", "seconds to the target", three_digits, _MISSED, fmean, mean_interval),
    _Row("time_ratio", f"seconds, {BASELINE}'s / own", _RATIO, "-", geometric_mean, ratio_interval),
    _Row("steps_to_target", "steps to the target", counted, _MISSED, fmean, mean_interval),
    _Row("steps_ratio", f"steps, {BASELINE}'s / own", _RATIO, "-", geometric_mean, ratio_interval),
    _Row("final_reward", "final reward", "{:.3f}".format),
    _Row("staleness_mean", "staleness, mean", "{:.2f}".format),
    _Row("staleness_max", "staleness, max", counted),
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

    Attributes:
        steps: of each run.
        window: steps that a smoothed reward is the mean of.
        target: the smoothed reward to reach; ``None`` where there is no sensible one.
        figures: by variant, in the order in which they came, and by seed.
    """

    def __init__(self, outcomes: Sequence[Outcome], target: float | None = None) -> None:
        """Work out the figures.

        Args:
            outcomes: at least one; all of the same number of steps.
            target: the reward to reach; without it, :data:`TARGET_SHARE` of the way from the
                baseline's first smoothed reward to its last, each the mean over its seeds.
        """
        self.steps = len(outcomes[0].rewards)
        self.window = max(1, min(SMOOTHED_STEPS, self.steps // 2))
        self.target, self._target_note = self._choose(outcomes, target)
        self.figures: dict[str, dict[int, Figures]] = {}
        for outcome in outcomes:
            of_variant = self.figures.setdefault(outcome.variant, {})
            of_variant[outcome.seed] = self._figures(outcome)
        self._add_ratios()

    @property
    def seeds(self) -> list[int]:
        """The seeds of which any variant has a run."""
        return sorted({seed for by_seed in self.figures.values() for seed in by_seed})

    def table(self) -> str:
        """The figures in Markdown that is aligned, so that it can be read as it is.

        A figure is the mean over a variant's seeds; below it stands its range, and for the target
        the mean's confidence interval.
        """
        lines = [["", *self.figures]]
        for row in self._rows():
            cells = [self._values(variant, row.key) for variant in self.figures]
            lines.append([row.label, *(_mean(values, row) for values in cells)])
            ranges = [_range(values, row) for values in cells]
            if any(ranges):
                lines.append(["  min..max", *ranges])
            intervals = [_interval(values, row) for values in cells]
            if any(intervals):
                lines.append([f"  {100 * LEVEL:.0f} %", *intervals])
        return "\n".join(_aligned(lines))

    def notes(self) -> list[str]:
        """Notes without which the table cannot be read, a sentence or two each."""
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
        """All figures as plain data: for each variant its seeds, and a list of values a figure."""
        keys = [row.key for row in self._rows()]
        judged = [row for row in self._rows() if row.interval]
        return {
            "steps": self.steps,
            "smoothed_steps": self.window,
            "target_reward": self.target,
            "variants": {
                variant: {"seeds": list(by_seed), **{k: self._values(variant, k) for k in keys}}
                for variant, by_seed in self.figures.items()
            },
            f"intervals_{100 * LEVEL:.0f}": {
                variant: {row.key: _bounds(self._values(variant, row.key), row) for row in judged}
                for variant in self.figures
            },
        }

    def _target_notes(self) -> list[str]:
        """Runs that did not reach the target, and differences that the seeds show."""
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
            for key, what in (("time_ratio", "Seconds"), ("steps_ratio", "Steps")):
                pairs = {variant: self._paired(variant, key) for variant in self.figures}
                pairs.pop(BASELINE)
                notes.append(verdict(f"{what} to the target", BASELINE, pairs))
        return notes

    def _paired(self, variant: str, key: str) -> list[float | None]:
        return [
            figures[key]
            for seed, figures in self.figures[variant].items()
            if seed in self.figures[BASELINE]
        ]

    def _choose(
        self, outcomes: Sequence[Outcome], target: float | None
    ) -> tuple[float | None, str]:
        """The target, and a sentence about it."""
        if target is not None:
            return target, f"Target reward: {target:g}, as asked."
        curves = [smoothed(o.rewards, self.window) for o in outcomes if o.variant == BASELINE]
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

    def _figures(self, outcome: Outcome) -> dict[str, float | None]:
        warm_s = outcome.times_s[-1] - outcome.times_s[0]
        rewards = smoothed(outcome.rewards, self.window)
        reached = None
        if self.target is not None:
            at = (i for i, reward in enumerate(rewards, self.window) if reward >= self.target)
            reached = next(at, None)
        return {
            "samples_per_s": sum(outcome.samples[1:]) / warm_s if warm_s else None,
            "step_s": warm_s / (self.steps - 1) if warm_s else None,
            "time_to_target_s": None if reached is None else outcome.times_s[reached - 1],
            "steps_to_target": None if reached is None else float(reached),
            "final_reward": rewards[-1],
            "staleness_mean": fmean(outcome.staleness_mean),
            "staleness_max": max(outcome.staleness_max),
            **{f"{_BUSY}{role}": share for role, share in _by_kind(outcome.utilisation).items()},
        }

    def _add_ratios(self) -> None:
        """Add each run's ratios to the baseline's run with the same seed."""
        baseline = self.figures.get(BASELINE, {})
        for by_seed in self.figures.values():
            for seed, figures in by_seed.items():
                of_base = baseline.get(seed, {})
                by_seed[seed] = {
                    **figures,
                    **{
                        key: _ratio(figures.get(source), of_base.get(source), inverse)
                        for key, (source, inverse) in _OVER_BASELINE.items()
                    },
                }

    def _rows(self) -> list[_Row]:
        roles = {
            key.removeprefix(_BUSY)
            for by_seed in self.figures.values()
            for figures in by_seed.values()
            for key in figures
            if key.startswith(_BUSY)
        }
        left_out = set(_OF_TARGET) if self.target is None else set()
        if BASELINE not in self.figures:
            left_out.update(_OVER_BASELINE)
        ordered = sorted(roles, key=lambda role: (role == ALL_DEVICES, role_order(role)))
        busy = [_Row(f"{_BUSY}{role}", f"busy: {role}", percent) for role in ordered]
        return [row for row in _ROWS if row.key not in left_out] + busy

    def _values(self, variant: str, key: str) -> list[float | None]:
        return [figures.get(key) for figures in self.figures[variant].values()]


def _by_kind(utilisation: Mapping[str, float]) -> dict[str, float]:
    several = [share for role, share in utilisation.items() if is_generator(role)]
    rest = {role: share for role, share in utilisation.items() if not is_generator(role)}
    return {"generator": fmean(several), **rest} if several else rest


def _column(run: Run, metric: str) -> list[float]:
    return [math.nan if m.get(metric) is None else float(m[metric]) for m in run.metrics]


def _mean(values: Iterable[float | None], row: _Row) -> str:
    every = list(values)
    known = [value for value in every if value is not None]
    if not known:
        return row.missing
    some = f" ({len(known)} of {len(every)})" if len(known) < len(every) else ""
    return f"{row.write(row.mean(known))}{some}"


def _range(values: Iterable[float | None], row: _Row) -> str:
    known = [value for value in values if value is not None]
    low, high = (row.write(f(known)) if known else "" for f in (min, max))
    return f"{low}..{high}" if low != high else ""


def _interval(values: Iterable[float | None], row: _Row) -> str:
    """The confidence interval of the mean, where there is one and it has a width."""
    bounds = _bounds(values, row)
    return (
        f"[{row.write(bounds[0])}, {row.write(bounds[1])}]"
        if bounds and bounds[0] < bounds[1]
        else ""
    )


def _bounds(values: Iterable[float | None], row: _Row) -> list[float] | None:
    known = [value for value in values if value is not None]
    found = row.interval(known) if row.interval else None
    return [found.low, found.high] if found else None


def _ratio(own: float | None, base: float | None, inverse: bool) -> float | None:
    if not own or not base:
        return None
    return base / own if inverse else own / base


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    made = []
    for first, *rest in lines:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        made.append(f"| {' | '.join(cells)} |")
    rule = [":" + "-" * (widths[0] + 1), *("-" * (width + 1) + ":" for width in widths[1:])]
    return [made[0], f"|{'|'.join(rule)}|", *made[1:]]
