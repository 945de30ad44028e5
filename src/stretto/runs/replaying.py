"""Replays: a recorded run once more, with the same order of events, and so the same weights.

A replay makes the same calls of roles as the run did. Each passes the gate
(:mod:`stretto.workers.gate`) at its recorded place and time, whatever the runtime of either. The
answers of environments and reward functions come from the record. All other outcomes are computed,
and compared with the recorded checksums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from stretto.assembly.run_models import NO_OVERRIDES, Overrides
from stretto.config import ClusterConfig, Config
from stretto.config.cluster_config import GENERATOR
from stretto.errors import StateError
from stretto.machine import Machine, current_start
from stretto.models.backend import hardware, pick_device
from stretto.observe import Progress, RunDirectory
from stretto.observe.run_directory import TrainResult
from stretto.runs.training_loop import train
from stretto.types import Stats
from stretto.workers.flight import FlightScript, Segment

PATIENCE_S = 1e6
"""Seconds for a call of a replay, which may have fewer devices than the run had."""


class Leg(NamedTuple):
    """A part of a replay: a segment of the record, up to the step ``until``."""

    segment: Segment
    until: int

    def on_step(self, step: int, stats: Stats) -> Literal["stop", "save"] | None:
        """Request the checkpoints that the run's caller requested, and stop at the last step."""
        if step == self.until:
            return "stop"
        return "save" if step in self.segment.saves else None


def legs_of(segments: Sequence[Segment], to: int) -> list[Leg]:
    """Return the segments that lead to step ``to``, 0 for the last one. A segment ends at the
    checkpoint from which a later one of them went on.
    """
    until = to or segments[-1].last
    legs = list[Leg]()
    for segment in reversed(segments):
        if segment.first < until <= segment.last:
            legs.append(Leg(segment, until))
            until = segment.first
    if until or not legs:
        recorded = f"steps {segments[0].first + 1} to {segments[-1].last}"
        raise StateError(
            f"step {until or to} is not in the record, which has {recorded}; a replay begins with "
            "step 1. Name a recorded step with `to`",
            "step-not-recorded",
        )
    for segment, end in legs:
        if segment.given_up is not None and segment.given_up < segment.ends[end]:
            raise StateError(
                "a call had no answer within schedule.deadline_s, or a role was cancelled: such a "
                "run cannot be replayed beyond that; name an earlier step with `to`",
                "call-given-up",
            )
    for segment, end in legs[1:]:
        lags = segment.config.schedule.knobs.copies_weights
        if lags and segment.end_of(end) == segment.ends[end]:
            raise StateError(
                f"the run was interrupted after step {end}, while responses of later steps were "
                f"generated, and went on from there; name a step up to {end} with `to`",
                "interrupted-in-a-step",
            )
    return legs[::-1]


def config_of_replay(segment: Segment) -> Config:
    """Return a run's settings without effects outside of the folder, and on ``inline`` if threads
    make the same calls and compute the same: no role had several ranks, between which sums are
    divided, and scorers have the same copies.
    """
    config = segment.config
    off = {"trackers": (), "prometheus_port": 0, "flight": True}
    changes: dict[str, Any] = {
        "minutes": 0,
        "observe": config.observe.model_copy(update=off),
        "schedule": config.schedule.model_copy(update={"deadline_s": PATIENCE_S}),
    }
    roles = segment.facts["threads"]
    numbered = [role for role in roles if role.rpartition(" ")[2].isdecimal()]
    copies = [role for role in numbered if not role.startswith(GENERATOR)]
    ranks = [config.pipeline.ranks, *(process.ranks for process in config.cluster.processes)]
    same_roles = bool(copies) == config.schedule.knobs.hosts_scorers(config.rollout.engines)
    if same_roles and max(ranks) <= 1 and not config.rollout.capabilities.own_weights:
        changes |= {"runtime": "inline", "cluster": ClusterConfig()}
    return config.model_copy(update=changes)


def warnings_of(segment: Segment, config: Config) -> list[str]:
    """Return facts that differ from those of the run, and may change bits of results."""
    device = hardware(pick_device(config.model.device))
    now = {**current_start()["versions"], "device": device}
    before = {**segment.head["versions"], "device": segment.facts["device"]}
    return [
        f"{name} is {now.get(name)}, and was {value} in the run: results may differ"
        for name, value in before.items()
        if now.get(name) != value
    ]


def replay(
    run_dir: RunDirectory,
    target: RunDirectory,
    legs: Sequence[Leg],
    *,
    progress: Progress,
    overrides: Overrides = NO_OVERRIDES,
) -> TrainResult:
    """Repeat a run in the folder ``target``. Raises StateError for the first outcome that differs.

    Args:
        legs: from :func:`legs_of`.
        overrides: the objects that the run was given.
    """
    result: TrainResult | None = None
    if run_dir.warmup.exists() and not overrides.warmup:
        overrides = replace(overrides, warmup=run_dir.warmup)
    runtime = config_of_replay(legs[-1].segment).runtime
    target.save_machine(Machine.here(), runtime=runtime)
    for leg in legs:
        target.save_config(leg.segment.config)  # for a resumption of the replay
        config = config_of_replay(leg.segment)
        for line in warnings_of(leg.segment, config):
            progress.note(line)
        script = FlightScript(leg.segment, leg.until)
        result = train(
            config,
            run_dir=target,
            resume=leg.segment.first > 0,
            progress=progress,
            overrides=overrides,
            on_step=leg.on_step,
            script=script,
        )
        progress.note(
            f"steps {leg.segment.first + 1} to {leg.until}: {script.compared} calls, each with the "
            "outcome of the run"
        )
    assert result
    return result
