"""Figures of episodes, from what their environment's answers recorded.

An :class:`~stretto.types.Observation`'s ``record`` is plain data. What is read of it, here and by
records and transcripts, all of it optional:

``seconds``
    That the environment took to answer.
``calls``
    Of the turn, in order, each with ``name``, ``arguments``, ``status`` (``ok``; ``invalid`` or
    ``unclosed`` as it was parsed, ``unknown`` where there is no such tool: then it did not run),
    ``seconds``, ``error`` (a text; empty where it worked), ``timed_out`` and ``result``.
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
"""Outcomes of reading a call, of which only the first is run."""

MOST_TOOLS = 32
"""Tools of a step that have figures of their own, the most often called first."""

_NAME_CHARS = 64


def answers(rollout: Rollout) -> Sequence[Observation]:
    return rollout.log[1:]


def _answers(samples: Sequence[Rollout]) -> list[Observation]:
    return [o for rollout in samples for o in rollout.log if o.number]


def calls(observation: Observation) -> Iterator[Mapping[str, Any]]:
    found = observation.record.get("calls")
    yield from (call for call in found or () if isinstance(call, Mapping))


def tools_called(observation: Observation) -> str:
    return ", ".join(_clean(str(call.get("name") or "?")) for call in calls(observation))


def wait_s(observation: Observation) -> float:
    """Return the seconds that an answer took; those of its calls where it has none of its own."""
    seconds = observation.record.get("seconds")
    if seconds is None:
        each = (float(call.get("seconds") or 0.0) for call in calls(observation))
        return max(each, default=0.0)  # they ran side by side
    return float(seconds)


def episode_metrics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return the metrics of the episodes that rollouts are samples of; none where there are none.

    ``episode/...`` are over episodes, an episode's samples taken together: turns, samples where
    there are forks, context tokens and their share, seconds of waiting (a turn's, and a whole
    episode's), and the share that was ended by each cause. ``tools/call_frequency`` is calls an
    episode, ``tools/failure_frequency`` the share of calls that failed, ``tools/calls/<status>``
    are shares of the calls, and ``tools/<name>/...`` count a tool's calls, errors and time-outs.
    """
    episodes: defaultdict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.log or rollout.in_turns:
            episodes[episode_of(rollout.id)].append(rollout)
    if not episodes:
        return {}
    each = list(episodes.values())
    turns = [sum(len(r.turns) for r in samples) for samples in each]
    context = [sum(len(r) - r.sampled_tokens for r in samples) for samples in each]
    tokens = sum(len(r) for samples in each for r in samples)
    waits = [[wait_s(o) for o in _answers(samples)] for samples in each]
    flat = [seconds for own in waits for seconds in own]
    found = {
        "episode/turns_mean": fmean(turns),
        "episode/turns_max": float(max(turns)),
        "episode/context_tokens_mean": fmean(context),
        "episode/context_share": sum(context) / tokens if tokens else 0.0,
        "episode/wait_s_mean": fmean(flat) if flat else 0.0,
        "episode/wait_s_p95": float(np.quantile(flat, 0.95)) if flat else 0.0,
        "episode/wait_s_total_mean": fmean(map(sum, waits)),
    }
    if any(len(samples) > 1 for samples in each):
        found["episode/samples_mean"] = fmean(map(len, each))
    newest = (max(samples, key=lambda r: r.log[-1].number if r.log else -1) for samples in each)
    ended = Counter(rollout.ended_by for rollout in newest)
    found |= {f"episode/ended_by/{why}": n / len(each) for why, n in ended.items() if why}
    made = [call for samples in each for o in _answers(samples) for call in calls(o)]
    return found | _tools(made, len(each))


def _tools(made: Sequence[Mapping[str, Any]], episodes: int) -> dict[str, float]:
    if not made:
        return {}
    statuses = Counter(str(call.get("status") or "ok") for call in made)
    failed = sum(call.get("status", "ok") != "ok" or bool(call.get("error")) for call in made)
    found = {
        "tools/call_frequency": len(made) / episodes,
        "tools/failure_frequency": failed / len(made),
        **{f"tools/calls/{s}": statuses[s] / len(made) for s in CALL_STATUSES},
    }
    # Names that were not run are whatever the policy wrote: no metric is named after them.
    by_name: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for call in made:
        if call.get("status", "ok") == "ok":
            by_name[_clean(str(call.get("name") or "tool"))].append(call)
    often = sorted(by_name, key=lambda name: (-len(by_name[name]), name))[:MOST_TOOLS]
    for name in often:
        own = by_name[name]
        found |= {
            f"tools/{name}/calls": float(len(own)),
            f"tools/{name}/errors": float(sum(bool(call.get("error")) for call in own)),
            f"tools/{name}/timeouts": float(sum(bool(call.get("timed_out")) for call in own)),
            f"tools/{name}/seconds_mean": fmean(float(call.get("seconds") or 0.0) for call in own),
        }
    return found


def _clean(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)[:_NAME_CHARS]
