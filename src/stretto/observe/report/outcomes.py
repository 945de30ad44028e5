"""Outcomes of runs: win-rate against KL, and both against how off-policy they were."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from statistics import fmean
from typing import Any

from stretto.observe.progress import REWARD
from stretto.observe.report.runs import Run

OFF_POLICY = "schedule.weight_sync_interval"
"""The setting N: batches generated, and then trained on, with one version of the weights."""

UNKNOWN = "unknown"
"""Name for the algorithm of a run whose settings do not say."""

LAST_SHARE = 10
"""The reward of a run is the mean over the last tenth of its steps."""

Point = Mapping[str, Any]
Value = Callable[[Run], float | None]


def algorithms(runs: Sequence[Run]) -> list[str]:
    """Algorithms of the runs, without repeats, in the order in which they come."""
    return list(dict.fromkeys(algorithm(run) for run in runs))


def algorithm(run: Run) -> str:
    """Algorithm of a run."""
    return str(run.settings.get("algorithm.name", UNKNOWN))


def groups(runs: Sequence[Run]) -> list[int]:
    """Place of each run's algorithm among :func:`algorithms`."""
    names = algorithms(runs)
    return [names.index(algorithm(run)) for run in runs]


def pareto(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Win-rates with the KL of the same samples: one group a judge and SFT model.

    Figures of different judges, and distances to different models, do not go into one picture.

    Returns:
        For each group ``by`` and ``sft``, and ``points``: an evaluation each, the index of its run
        under ``run``, the rate with its standard error under ``rate`` and ``rate_error``, ``kl``
        (nats a response) with ``kl_error``, and ``perplexity``.
    """
    groups: dict[tuple[str, str], list[Point]] = {}
    for index, run in enumerate(runs):
        for record in run.evaluations:
            figures = record["figures"]
            if "kl" not in figures:
                continue
            kl = figures["kl"]
            for by, rate, error in win_rates(figures):
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


def win_rates(figures: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Win-rates that an evaluation has: who judged, the rate and its standard error."""
    found = []
    for key, name, said in (("win_rate", "by", "{}"), ("judge", "judge", "LLM judge {}")):
        if key in figures:
            of = figures[key]
            found.append((said.format(of[name]), of["rate"], of["standard_error"]))
    return found


def verified(run: Run) -> Point | None:
    """The latest pass@1 and mean score of a run, ``None`` where neither was measured.

    Returns:
        ``pass_at_1`` and ``mean_score``, each with its standard error, and ``overlap``: the share
        of the prompts that training asks too, ``None`` where that is not known.
    """
    for record in reversed(run.evaluations):
        figures = record["figures"]
        if "pass@1" in figures:
            values = {
                name: [figures[key], figures[f"{key}_standard_error"]]
                for name, key in (("pass_at_1", "pass@1"), ("mean_score", "mean_score"))
            }
            return {**values, "overlap": figures["overlap"]}
    return None


def off_policy(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Reward, win-rates, KL and perplexity by off-policyness; nothing for runs of a single N.

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


def _figures(runs: Sequence[Run]) -> list[tuple[str, bool, Value]]:
    """Figures shown by N: a title, whether it is a share, and the function that gives a run's."""
    judges = dict.fromkeys(
        by for run in runs for record in run.evaluations for by, *_ in win_rates(record["figures"])
    )
    return [
        ("Reward, last tenth of the steps", False, _reward),
        *((f"Win-rate by {by}", True, _latest_rate(by)) for by in judges),
        ("KL to the SFT model [nats a response]", False, _latest_kl("kl")),
        ("Perplexity of the SFT model on the samples", False, _latest_kl("perplexity")),
    ]


def _reward(run: Run) -> float | None:
    _, values = run.curve(REWARD)
    return fmean(values[-math.ceil(len(values) / LAST_SHARE) :]) if values else None


def _latest_rate(by: str) -> Value:
    def value(run: Run) -> float | None:
        every = [r for record in run.evaluations for r in win_rates(record["figures"])]
        return next((rate for name, rate, _ in reversed(every) if name == by), None)

    return value


def _latest_kl(key: str) -> Value:
    def value(run: Run) -> float | None:
        every = [record["figures"] for record in reversed(run.evaluations)]
        return next((figures["kl"][key] for figures in every if "kl" in figures), None)

    return value


def _short(model: str) -> str:
    path = PurePath(model)
    return path.parent.name if path.name == "model" and path.parent.name else path.name
