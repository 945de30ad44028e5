"""Several ways to run the same training, compared in one table. The metrics show the effects of
overlapping: samples per second, time and steps to reach a reward, final reward, staleness of the
samples, and busy time of each role. Rewards of single steps are noisy, so they are smoothed before
they are compared with a target."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, stdev
from typing import Any, NamedTuple, Self

from stretto.observe.display import REWARD
from stretto.observe.idle import is_generator, role_order
from stretto.observe.report.run_data import LoadedRun, shares
from stretto.saying import padded

BASELINE = "sync"  # the variant that speed-ups are relative to and that sets the target reward

SMOOTHED_STEPS = 10
"""Steps that rewards are averaged over, or half the steps of a run shorter than twice that."""

TARGET_SHARE = 0.95  # default target, as a share of the baseline's rise in reward
LEVEL = 0.95  # level of confidence intervals

_LEVEL_TEXT = f"{100 * LEVEL:.0f} %"

Values = Sequence[float | None]
"""A metric of a variant's runs, ``None`` for a run without it or that missed the target."""


@dataclass(frozen=True, slots=True)
class VariantResult:
    """Metrics to compare of one completed run."""

    variant: str
    seed: int
    times_s: Sequence[float]  # since the run's start, at the end of each step
    samples: Sequence[int]  # responses trained on in each step
    metrics: Sequence[Mapping[str, Any]]  # of each step
    utilisation: Mapping[str, float]  # busy share of the run's time, by role

    @classmethod
    def of(cls, variant: str, seed: int, run: LoadedRun) -> Self:
        """Make the result from a run's records."""
        sample_counts = Counter(r.step for r in run.rollouts if r.state == "trained")
        times_s = {step: at_s for step, at_s in run.times_s().items() if step}
        metrics = [m for m in run.metrics if m["step"]]  # step 0 is an evaluation before training
        total_s = max(times_s.values(), default=0.0)
        busy = {s.role: s.busy_s / total_s for s in shares(run) if total_s}
        samples = [sample_counts[step] for step in times_s]
        return cls(variant, seed, list(times_s.values()), samples, metrics, busy)

    def column(self, metric: str) -> list[float]:
        values = (m.get(metric) for m in self.metrics)
        return [math.nan if value is None else float(value) for value in values]


def smoothed(rewards: Sequence[float], window: int) -> list[float]:
    return [fmean(rewards[end - window : end]) for end in range(window, len(rewards) + 1)]


# -- confidence intervals ------------------------------------------------------------------------


class Interval(NamedTuple):
    """A mean with its confidence interval, at :data:`LEVEL`."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of normally distributed values, or ``None`` for fewer than two."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(ratios: Sequence[float]) -> Interval | None:
    """Return the geometric mean of positive, log-normally distributed ratios of paired
    measurements. Common effects of a pair, for example of its seed, cancel."""
    log_interval = mean_interval([math.log(ratio) for ratio in ratios])
    return log_interval and Interval(*map(math.exp, log_interval))


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """Return the two-sided quantile of Student's t for ``freedom`` degrees of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(100):  # halves the range of the angle down to rounding
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Return the probability of \\|t\\| below ``sqrt(freedom) tan(angle)``, by finite sums for odd
    and even degrees of freedom (Abramowitz and Stegun 26.7.3, 4)."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def verdict(what: str, ratios: Mapping[str, Values]) -> str:
    """Describe which variants are better or worse than the baseline in a quantity to be minimized.
    ``ratios`` are the baseline's over the variant's own, by seed. A difference is significant if
    the interval of the mean ratio excludes 1. A variant with a pair that lacks a ratio is not
    judged, because the remaining pairs are a selection."""
    fewer, more, no_difference, unknown = groups = [list[str]() for _ in range(4)]
    for variant, pairs in ratios.items():
        known_ratios = _known(pairs)
        interval = ratio_interval(known_ratios)
        if interval is None or len(known_ratios) < len(pairs):
            unknown.append(
                f"{variant} ({len(known_ratios)} of {len(pairs)} pairs reached the target)"
            )
            continue
        mean, low, high = interval
        kind = fewer if low > 1 else more if high < 1 else no_difference
        kind.append(f"{variant} {mean:.2f}x [{low:.2f}, {high:.2f}]")
    kinds = "significantly fewer", "significantly more", "no significant difference", "not judged"
    verdicts = "; ".join(
        f"{k}: {', '.join(entries)}" for k, entries in zip(kinds, groups, strict=True) if entries
    )
    return (
        f"{what}, {BASELINE}'s over the schedule's own, paired by seed: geometric mean and its "
        f"{_LEVEL_TEXT} interval (Student's t on logarithms), each schedule by itself. {verdicts}."
    )


# -- the table -----------------------------------------------------------------------------------


def three_digits(value: float) -> str:
    decimals = 2 - math.floor(math.log10(abs(value))) if value else 2
    return f"{value:.{max(decimals, 0)}f}"


def _counted(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _known(values: Values) -> list[float]:
    return [value for value in values if value is not None]


@dataclass(frozen=True, slots=True)
class _Figure:
    """A metric of runs, a row of the table."""

    key: str
    label: str
    write: Callable[[float], str] = three_digits
    of_target: bool = False  # about reaching the target: less is better, means have intervals
    over: str = ""  # ratio of this metric to the baseline's run of the same seed

    def interval(self, values: Values) -> Interval | None:
        find = ratio_interval if self.over else mean_interval
        return find(_known(values)) if self.of_target else None

    def lines(self, columns: Sequence[Values]) -> list[list[str]]:
        means = list[str]()
        ranges = list[str]()
        intervals = list[str]()
        average = geometric_mean if self.of_target and self.over else fmean
        missing = "not reached" if self.of_target and not self.over else "-"
        for values in columns:
            numbers, interval = _known(values), self.interval(values)
            note = f" ({len(numbers)} of {len(values)})" if len(numbers) < len(values) else ""
            means.append(f"{self.write(average(numbers))}{note}" if numbers else missing)
            low, high = (self.write(f(numbers)) if numbers else "" for f in (min, max))
            ranges.append(f"{low}..{high}" if low != high else "")
            has_width = interval and interval.low < interval.high
            low, high = map(self.write, interval[1:]) if interval else ("", "")
            intervals.append(f"[{low}, {high}]" if has_width else "")
        extras = (("  min..max", ranges), (f"  {_LEVEL_TEXT}", intervals))
        return [[self.label, *means], *([label, *cells] for label, cells in extras if any(cells))]


_RATIO = "{:.2f}".format
_FIGURES = (
    _Figure("samples_per_s", "samples/s"),
    _Figure("speedup", f"samples/s, x {BASELINE}", _RATIO, over="samples_per_s"),
    _Figure("step_s", "seconds a step"),
    _Figure("time_to_target_s", "seconds to the target", of_target=True),
    _Figure("time_ratio", f"seconds, {BASELINE}'s / own", _RATIO, True, "time_to_target_s"),
    _Figure("steps_to_target", "steps to the target", _counted, of_target=True),
    _Figure("steps_ratio", f"steps, {BASELINE}'s / own", _RATIO, True, "steps_to_target"),
    _Figure("final_reward", "final reward", "{:.3f}".format),
    _Figure("staleness_mean", "staleness, mean", "{:.2f}".format),
    _Figure("staleness_max", "staleness, max", _counted),
)
_BUSY = "busy/"


class Comparison:
    """The metrics of runs, by variant and seed.

    Args:
        results: at least one, all with the same number of steps.
        target: the reward to reach. By default, :data:`TARGET_SHARE` of the way from the baseline's
            first smoothed reward to its last, each the mean over its seeds.

    Attributes:
        steps: of each run.
        window: steps that a smoothed reward is the mean of.
        target: the smoothed reward to reach; ``None`` if there is no sensible one.
        figures: by variant (in order of the results), seed and key; ``None`` for values that a run
            lacks, and for a target not reached.
    """

    def __init__(self, results: Sequence[VariantResult], target: float | None = None) -> None:
        self.steps = len(results[0].times_s)
        self.window = max(1, min(SMOOTHED_STEPS, self.steps // 2))
        self.target, self._target_note = self._choose(results, target)
        self.figures: dict[str, dict[int, dict[str, float | None]]] = {}
        for result in results:
            self.figures.setdefault(result.variant, {})[result.seed] = self._figures(result)
        baseline = self.figures.get(BASELINE, {})
        for by_seed in self.figures.values():
            for seed, metrics in by_seed.items():
                for figure in (figure for figure in _FIGURES if figure.over):
                    top, base = metrics[figure.over], baseline.get(seed, {}).get(figure.over)
                    if figure.of_target:
                        top, base = base, top
                    metrics[figure.key] = top / base if top and base else None

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for by_seed in self.figures.values() for seed in by_seed})

    def table(self) -> str:
        """Return an aligned Markdown table of means over a variant's seeds, with ranges below them.
        Metrics about the target also have confidence intervals of the means."""
        lines = [["", *self.figures]]
        for row in self._rows():
            lines += row.lines([self._values(variant, row.key) for variant in self.figures])
        cells = padded(lines)
        label_width, *value_widths = (len(cell) + 1 for cell in cells[0])
        rule = "|".join([":" + "-" * label_width, *("-" * width + ":" for width in value_widths)])
        head, *body = (f"| {' | '.join(line)} |" for line in cells)
        return "\n".join([head, f"|{rule}|", *body])

    def notes(self) -> list[str]:
        """Return notes for reading the table, a sentence or two each."""
        means = f"mean of {self.window} steps" if self.window > 1 else "reward of one step"
        notes = [
            self._target_note,
            f"Smoothed reward: {means}; time and steps to the target count up to the first one "
            "that is there, and the final reward is the last one.",
            "samples/s and seconds a step leave out the first step, which warms up; time to the "
            "target does not.",
        ]
        if len(self.seeds) > 1:
            seed_list = ", ".join(map(str, self.seeds))
            notes.append(
                f"Means over seeds {seed_list}, with the lowest and the highest below where they "
                f"differ; x {BASELINE} compares runs of the same seed; {_LEVEL_TEXT}: confidence "
                "interval of the mean (Student's t)."
            )
        return notes if self.target is None else notes + self._target_notes()

    def data(self) -> dict[str, Any]:
        """Return all metrics as plain data: each variant's seeds, and values by metric."""
        rows = self._rows()
        variants: dict[str, Any] = {}
        intervals: dict[str, Any] = {}
        for variant, by_seed in self.figures.items():
            values = {row.key: self._values(variant, row.key) for row in rows}
            variants[variant] = {"seeds": list(by_seed), **values}
            row_intervals = {r.key: r.interval(values[r.key]) for r in rows if r.of_target}
            intervals[variant] = {key: i and list(i[1:]) for key, i in row_intervals.items()}
        return {
            "steps": self.steps,
            "smoothed_steps": self.window,
            "target_reward": self.target,
            "variants": variants,
            f"intervals_{100 * LEVEL:.0f}": intervals,
        }

    def _target_notes(self) -> list[str]:
        missed_runs = [
            f"{variant} with seed {seed}"
            for variant, by_seed in self.figures.items()
            for seed, figures in by_seed.items()
            if figures["steps_to_target"] is None
        ]
        notes = []
        if missed_runs:
            notes.append(
                f"Target not reached within {self.steps} steps, and so left out of its means and "
                f"intervals, which flatter a schedule that lacks runs: {', '.join(missed_runs)}."
            )
        variants = dict(self.figures)
        baseline = variants.pop(BASELINE, None)
        if len(self.seeds) > 1 and variants and baseline:
            for key, what in (("time_ratio", "Seconds"), ("steps_ratio", "Steps")):
                pairs = {
                    variant: [metrics[key] for seed, metrics in by_seed.items() if seed in baseline]
                    for variant, by_seed in variants.items()
                }
                notes.append(verdict(f"{what} to the target", pairs))
        return notes

    def _choose(
        self, results: Sequence[VariantResult], target: float | None
    ) -> tuple[float | None, str]:
        if target is not None:
            return target, f"Target reward: {target:g}, as asked."
        curves = [smoothed(r.column(REWARD), self.window) for r in results if r.variant == BASELINE]
        if not curves:
            return None, f"No target reward: no run of {BASELINE} to take it from; use `target`."
        first, last = (fmean(curve[end] for curve in curves) for end in (0, -1))
        if not last > first:
            return None, (
                f"No target reward: the smoothed reward of {BASELINE} does not rise "
                f"({first:.3f} to {last:.3f}); use `target`, or train for more steps."
            )
        reward = first + TARGET_SHARE * (last - first)
        return reward, (
            f"Target reward: {reward:.3f}, which is {100 * TARGET_SHARE:.0f} % of the way from the "
            f"first smoothed reward of {BASELINE} ({first:.3f}) to its last ({last:.3f}), means "
            "over its seeds."
        )

    def _figures(self, result: VariantResult) -> dict[str, float | None]:
        warm_s = result.times_s[-1] - result.times_s[0]
        rewards = smoothed(result.column(REWARD), self.window)
        target = math.inf if self.target is None else self.target
        target_step = next((i for i, r in enumerate(rewards, self.window) if r >= target), None)
        busy = {role: b for role, b in result.utilisation.items() if not is_generator(role)}
        generators = [b for role, b in result.utilisation.items() if is_generator(role)]
        if generators:
            busy["generator"] = fmean(generators)
        return {
            "samples_per_s": sum(result.samples[1:]) / warm_s if warm_s else None,
            "step_s": warm_s / (self.steps - 1) if warm_s else None,
            "time_to_target_s": None if target_step is None else result.times_s[target_step - 1],
            "steps_to_target": None if target_step is None else float(target_step),
            "final_reward": rewards[-1],
            "staleness_mean": fmean(result.column("staleness/mean")),
            "staleness_max": max(result.column("staleness/max")),
            **{f"{_BUSY}{role}": share for role, share in busy.items()},
        }

    def _rows(self) -> list[_Figure]:
        has_target, has_baseline = self.target is not None, BASELINE in self.figures
        figures = [
            f for f in _FIGURES if (has_target or not f.of_target) and (has_baseline or not f.over)
        ]
        keys = {
            k for by_seed in self.figures.values() for metrics in by_seed.values() for k in metrics
        }
        roles = [key.removeprefix(_BUSY) for key in keys if key.startswith(_BUSY)]
        busy = [
            _Figure(f"{_BUSY}{role}", f"busy: {role}", lambda share: f"{100 * share:.1f} %")
            for role in sorted(roles, key=role_order)
        ]
        return figures + busy

    def _values(self, variant: str, key: str) -> list[float | None]:
        return [figures.get(key) for figures in self.figures[variant].values()]
