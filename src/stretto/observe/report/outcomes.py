"""What runs achieved: win-rate against KL, and both against how off-policy the runs were."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from statistics import fmean
from typing import Any

from stretto.observe.display import REWARD
from stretto.observe.report.runs import LoadedRun

OFF_POLICY = "schedule.weight_sync_interval"
"""The setting N: batches generated, and then trained on, with one version of the weights."""

LAST_SHARE = 10
"""The reward of a run is the mean over the last tenth of its steps."""

Value = Callable[[LoadedRun], float | None]


def algorithm(run: LoadedRun) -> str:
    """Return a run's algorithm; 'unknown' where its settings do not say."""
    return str(run.settings.get("algorithm.name", "unknown"))


def algorithms(runs: Sequence[LoadedRun]) -> list[str]:
    """Return algorithms of the runs, without repeats, in the order in which they come."""
    return list(dict.fromkeys(map(algorithm, runs)))


def win_rates(figures: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield the win-rates that an evaluation has: judge, rate and its standard error."""
    for key, name, form in (("win_rate", "by", "{}"), ("judge", "judge", "LLM judge {}")):
        if found := figures.get(key):
            yield form.format(found[name]), found["rate"], found["standard_error"]


def pareto(runs: Sequence[LoadedRun]) -> list[dict[str, Any]]:
    """Return win-rates with the KL of the same samples: one group a judge and SFT model.

    Figures of different judges, and distances to different models, do not go into one picture.

    Returns:
        For each group ``by`` and ``sft``, and ``points``: an evaluation each, the index of its run
        under ``run``, the rate with its standard error under ``rate`` and ``rate_error``, ``kl``
        (nats a response) with ``kl_error``, and ``perplexity``.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for index, run in enumerate(runs):
        for figures in (record["figures"] for record in run.evaluations):
            kl = figures.get("kl")
            for by, rate, error in win_rates(figures) if kl else ():
                point = {
                    "run": index,
                    "rate": rate,
                    "rate_error": error,
                    "kl": kl["kl"],
                    "kl_error": kl["standard_error"],
                    "perplexity": kl["perplexity"],
                }
                groups.setdefault((by, str(kl["sft"])), []).append(point)
    return [{"by": by, "sft": _short(sft), "points": group} for (by, sft), group in groups.items()]


def verified(run: LoadedRun) -> dict[str, Any] | None:
    """Return the latest pass@1 and mean score of a run, ``None`` where neither was measured.

    Returns:
        ``pass_at_1`` and ``mean_score``, each with its standard error, and ``overlap``: the share
        of the prompts that training asks too, ``None`` where that is not known.
    """
    for record in reversed(run.evaluations):
        if "pass@1" in (figures := record["figures"]):
            return {
                "pass_at_1": [figures["pass@1"], figures["pass@1_standard_error"]],
                "mean_score": [figures["mean_score"], figures["mean_score_standard_error"]],
                "overlap": figures["overlap"],
            }
    return None


def off_policy(runs: Sequence[LoadedRun]) -> list[dict[str, Any]]:
    """Return reward, win-rates, KL and perplexity by off-policyness; nothing for runs of a single
    N.

    Returns:
        For each figure that a run has: ``title``, ``is_share`` and ``lines``, of which each has
        the ``algorithm``, its ``points`` (N and the mean over the runs with this N) and its
        ``runs`` (N, value and index of each run).
    """
    dials = {
        i: run.settings[OFF_POLICY] for i, run in enumerate(runs) if OFF_POLICY in run.settings
    }
    if len(set(dials.values())) < 2:
        return []
    charts = []
    for title, is_share, value in _figures(runs):
        lines: dict[str, list[tuple[int, float, int]]] = {}
        for i, n in dials.items():
            found = value(runs[i])
            if found is not None:
                lines.setdefault(algorithm(runs[i]), []).append((n, found, i))
        if lines:
            drawn = [_line(name, sorted(each)) for name, each in lines.items()]
            charts.append({"title": title, "is_share": is_share, "lines": drawn})
    return charts


def _line(name: str, runs: Sequence[tuple[int, float, int]]) -> dict[str, Any]:
    values: dict[int, list[float]] = {}
    for n, value, _ in runs:
        values.setdefault(n, []).append(value)
    means = [[n, fmean(each)] for n, each in values.items()]
    return {"algorithm": name, "points": means, "runs": [list(run) for run in runs]}


def _figures(runs: Sequence[LoadedRun]) -> list[tuple[str, bool, Value]]:
    """List figures by N: a title, whether it is a share, and the function that gives a run's."""

    def reward(run: LoadedRun) -> float | None:
        _, values = run.curve(REWARD)
        return fmean(values[-math.ceil(len(values) / LAST_SHARE) :]) if values else None

    def rate_by(judge: str) -> Value:
        return _latest(lambda figures: (rate for by, rate, _ in win_rates(figures) if by == judge))

    def kl(key: str) -> Value:
        return _latest(lambda figures: [figures["kl"][key]] if "kl" in figures else [])

    judges = dict.fromkeys(
        by for run in runs for record in run.evaluations for by, *_ in win_rates(record["figures"])
    )
    return [
        ("Reward, last tenth of the steps", False, reward),
        *((f"Win-rate by {judge}", True, rate_by(judge)) for judge in judges),
        ("KL to the SFT model [nats a response]", False, kl("kl")),
        ("Perplexity of the SFT model on the samples", False, kl("perplexity")),
    ]


def _latest(values: Callable[[Mapping[str, Any]], Iterable[float]]) -> Value:
    """Make the function that gives a run's latest value out of the figures of its evaluations."""

    def value(run: LoadedRun) -> float | None:
        found = (v for record in reversed(run.evaluations) for v in values(record["figures"]))
        return next(found, None)

    return value


def _short(model: str) -> str:
    path = PurePath(model)
    return path.parent.name if path.name == "model" and path.parent.name else path.name
