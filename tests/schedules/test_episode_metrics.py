"""Figures of episodes, by hand-computed values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stretto.schedules.episode_metrics import MOST_TOOLS, episode_metrics
from stretto.schedules.rollout import Rollout
from stretto.types import CONTEXT, FORKS, Chunk, FinishReason, Observation, Prompt, Sampling

EMPTY = np.empty(0, np.int32)


def call(name: str, seconds: float | None = 1.0, **more: Any) -> dict[str, Any]:
    return {"name": name, "arguments": {}, "status": "ok", "seconds": seconds, **more}


def episode(
    rollout_id: int, *turns: tuple[int, int, dict[str, Any]], ended_by: str = "environment"
) -> Rollout:
    """A rollout of turns: tokens drawn, tokens of the answer, and the answer's record."""
    rollout = Rollout(rollout_id, Prompt(0, (1,), ""), 0, sampling=Sampling(99, max_turn_tokens=9))
    number = rollout_id // FORKS * 10
    rollout.append(rollout.observe(Observation(rollout_id, number, EMPTY)))
    for drawn, context, record in turns:
        number += 1
        logprobs, tokens = np.zeros(drawn, np.float32), np.ones(drawn, np.int32)
        chunk = Chunk(rollout_id, len(rollout), tokens, logprobs, 3, FinishReason.TURN)
        rollout.append(chunk)
        answer = Observation(rollout_id, number, np.full(context, 7, np.int32), record=record)
        rollout.append(rollout.observe(answer))
    rollout.ended_by = ended_by
    assert rollout.versions.count(CONTEXT) == sum(context for _, context, _ in turns)
    return rollout


def test_plain_responses_have_no_figures() -> None:
    assert episode_metrics([]) == {}
    assert episode_metrics([Rollout(0, Prompt(0, (1,), ""), 0)]) == {}


def test_figures_of_episodes_are_over_episodes_and_those_of_tools_over_calls() -> None:
    first = episode(
        1,
        (4, 6, {"seconds": 2.0, "calls": [call("add"), call("add", error="no", timed_out=True)]}),
        (2, 0, {"seconds": 0.0}),
    )
    fork = episode(1 + FORKS, (3, 1, {"calls": [call("search", 4.0)]}), ended_by="turns")
    unread = [call("rm -rf", status="invalid"), call("?", None, status="unclosed")]
    unread.append(call("no such", status="unknown"))
    second = episode(2, (8, 1, {"seconds": 6.0, "calls": unread}), ended_by="tokens")
    found = episode_metrics([first, second, fork, Rollout(5, Prompt(0, (1,), ""), 0)])
    assert found == pytest.approx(
        {
            "episode/turns_mean": (3 + 1) / 2,
            "episode/turns_max": 3,
            "episode/context_tokens_mean": (7 + 1) / 2,
            "episode/context_share": 8 / (17 + 8),
            "episode/wait_s_mean": (2 + 0 + 0 + 4 + 6) / 5,  # the fork began with an answer
            "episode/wait_s_p95": 4 + 0.8 * (6 - 4),  # of five, at place 0.95 * 4
            "episode/wait_s_total_mean": (6 + 6) / 2,
            "episode/samples_mean": 1.5,
            "episode/ended_by/turns": 0.5,  # the fork was answered last
            "episode/ended_by/tokens": 0.5,
            "tools/call_frequency": 6 / 2,
            "tools/failure_frequency": 4 / 6,  # one raised, three could not be run
            "tools/calls/ok": 3 / 6,
            "tools/calls/invalid": 1 / 6,
            "tools/calls/unclosed": 1 / 6,
            "tools/calls/unknown": 1 / 6,
            "tools/add/calls": 2,
            "tools/add/errors": 1,
            "tools/add/timeouts": 1,
            "tools/add/seconds_mean": 1,
            "tools/search/calls": 1,
            "tools/search/errors": 0,
            "tools/search/timeouts": 0,
            "tools/search/seconds_mean": 4,
        }
    )


def test_names_that_the_policy_makes_up_become_no_metrics() -> None:
    many = [call(f"tool/{i} é\n" + "x" * 99) for i in range(MOST_TOOLS + 9)]
    record = {"calls": [call("never ran", status="unknown"), *many, "no call"]}
    found = episode_metrics([episode(1, (1, 1, record))])
    names = {name.removesuffix("/calls") for name in found if name.endswith("/calls")}
    assert len(names) == MOST_TOOLS
    for name in names:
        assert name.startswith("tools/tool_")
        assert len(name) == len("tools/") + 64
