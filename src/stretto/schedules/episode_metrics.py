"""Metrics of episodes, from the records of their environment's answers.

An :class:`~stretto.types.Observation`'s ``record`` is plain data. This module, the run's records
and transcripts read two entries: ``seconds`` that the environment took to answer, and ``calls`` of
the turn in order, with ``name``, ``arguments``, ``status``, ``seconds``, ``error`` (a text, empty
on success), ``timed_out`` and ``result``. All of them are optional. Only a call with status ``ok``
runs. The parser sets ``invalid`` or ``unclosed``, and a missing tool ``unknown``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from stretto.schedules.rollout import Rollout
from stretto.types import Observation, episode_of

CALL_STATUSES = ("ok", "invalid", "unclosed", "unknown")
MOST_TOOLS = 32  # tools per step with metrics of their own, the most often called first
_NAME_CHARS = 64


def answers(rollout: Rollout) -> Sequence[Observation]:
    return rollout.log[1:]


def _answers(samples: Sequence[Rollout]) -> list[Observation]:
    return [o for rollout in samples for o in rollout.log if o.number]


def calls(observation: Observation) -> Iterator[Mapping[str, Any]]:
    entries = observation.record.get("calls")
    yield from (call for call in entries or () if isinstance(call, Mapping))


def tools_called(observation: Observation) -> str:
    return ", ".join(_clean(str(call.get("name") or "?")) for call in calls(observation))


def wait_s(observation: Observation) -> float:
    """Return the seconds that an answer took, or its slowest call if it has no time itself."""
    seconds = observation.record.get("seconds")
    if seconds is None:
        call_seconds = (float(call.get("seconds") or 0.0) for call in calls(observation))
        return max(call_seconds, default=0.0)  # calls run concurrently
    return float(seconds)


def episode_metrics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return the metrics of the episodes among rollouts, empty without episodes.

    ``episode/...`` count an episode with all its samples: turns, samples if there are forks,
    context tokens and their share, seconds of waiting per turn and per episode, and the share ended
    by each cause. ``tools/call_frequency`` is calls per episode, ``tools/failure_frequency`` the
    share of failed calls, ``tools/calls/<status>`` are shares of calls, and ``tools/<name>/...``
    are calls, errors, time-outs and mean seconds of a tool.
    """
    episodes: defaultdict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.log or rollout.in_turns:
            episodes[episode_of(rollout.id)].append(rollout)
    if not episodes:
        return {}
    episode_samples = list(episodes.values())
    turns = [sum(len(r.turns) for r in samples) for samples in episode_samples]
    context = [sum(len(r) - r.sampled_tokens for r in samples) for samples in episode_samples]
    tokens = sum(len(r) for samples in episode_samples for r in samples)
    waits = [[wait_s(o) for o in _answers(samples)] for samples in episode_samples]
    flat = [seconds for episode_waits in waits for seconds in episode_waits]
    metrics = {
        "episode/turns_mean": fmean(turns),
        "episode/turns_max": float(max(turns)),
        "episode/context_tokens_mean": fmean(context),
        "episode/context_share": sum(context) / tokens if tokens else 0.0,
        "episode/wait_s_mean": fmean(flat) if flat else 0.0,
        "episode/wait_s_p95": float(np.quantile(flat, 0.95)) if flat else 0.0,
        "episode/wait_s_total_mean": fmean(map(sum, waits)),
    }
    if any(len(samples) > 1 for samples in episode_samples):
        metrics["episode/samples_mean"] = fmean(map(len, episode_samples))
    last_samples = (
        max(samples, key=lambda r: r.log[-1].number if r.log else -1) for samples in episode_samples
    )
    end_causes = Counter(rollout.ended_by for rollout in last_samples)
    metrics |= {
        f"episode/ended_by/{cause}": n / len(episode_samples)
        for cause, n in end_causes.items()
        if cause
    }
    all_calls = [
        call for samples in episode_samples for o in _answers(samples) for call in calls(o)
    ]
    return metrics | _tools(all_calls, len(episode_samples))


def _tools(all_calls: Sequence[Mapping[str, Any]], episodes: int) -> dict[str, float]:
    if not all_calls:
        return {}
    statuses = Counter(str(call.get("status") or "ok") for call in all_calls)
    failures = sum(
        call.get("status", "ok") != "ok" or bool(call.get("error")) for call in all_calls
    )
    metrics = {
        "tools/call_frequency": len(all_calls) / episodes,
        "tools/failure_frequency": failures / len(all_calls),
        **{f"tools/calls/{s}": statuses[s] / len(all_calls) for s in CALL_STATUSES},
    }
    # A call that did not run may have any name, so no metric is named after it.
    by_name: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for call in all_calls:
        if call.get("status", "ok") == "ok":
            by_name[_clean(str(call.get("name") or "tool"))].append(call)
    tools = sorted(by_name, key=lambda name: (-len(by_name[name]), name))[:MOST_TOOLS]
    for name in tools:
        uses = by_name[name]
        metrics |= {
            f"tools/{name}/calls": float(len(uses)),
            f"tools/{name}/errors": float(sum(bool(call.get("error")) for call in uses)),
            f"tools/{name}/timeouts": float(sum(bool(call.get("timed_out")) for call in uses)),
            f"tools/{name}/seconds_mean": fmean(float(call.get("seconds") or 0.0) for call in uses),
        }
    return metrics


def _clean(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)[:_NAME_CHARS]
