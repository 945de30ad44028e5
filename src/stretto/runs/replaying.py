"""Replays: a recorded run once more, with the same order of events, and so the same weights.

A replay makes the same calls of roles as the run did. Each passes the gate
(:mod:`stretto.workers.gate`) at its recorded place and time, whatever the runtime of either. The
answers of environments and reward functions come from the record. All other outcomes are computed,
and compared with the recorded checksums.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from stretto import errors
from stretto.assembly.run_models import NO_OVERRIDES, Overrides
from stretto.config import ClusterConfig, Config
from stretto.config.cluster_config import GENERATOR
from stretto.errors import StateError, StrettoError
from stretto.machine import current_start
from stretto.models.backend import hardware, pick_device
from stretto.observe import Progress, RunDirectory
from stretto.observe.flight import Event, Segment, checksums
from stretto.observe.run_directory import TrainResult
from stretto.runs.training_loop import train
from stretto.types import Stats
from stretto.workers.gate import RoleCall

PATIENCE_S = 1e6
"""Seconds for a call of a replay, which may have fewer devices than the run had."""


class FlightScript:
    """The recorded order of a segment's outcomes up to the end of a step.

    If the run staged a checkpoint after that step, the order goes on until then, because the rest
    of the run continues from this checkpoint.
    """

    def __init__(self, segment: Segment, until: int) -> None:
        self.start_ticks = int(segment.head["facts"]["ticks"])
        self._segment = segment
        self._until = until
        self._end = _end_of(segment, until)
        self._events = {event.index: event for event in segment.events}
        self._threads: Mapping[str, int] = segment.head["facts"]["threads"]
        self.compared = 0  # outcomes that passed

    def fact(self, name: str) -> Any:
        """Return a recorded measurement, ``None`` if it was not made."""
        return self._segment.head["facts"].get(name)

    def prepare(self, call: RoleCall[Any]) -> asyncio.Future[Any] | None:
        """Check a call against the record. Returns the recorded outcome of calls that code outside
        of Stretto answered, and of those that failed. Without a recorded one, the former never end.
        """
        event = self._events.get(call.index)
        future = asyncio.get_running_loop().create_future()
        if event is None or self.coming() is None:
            return future if call.answer else None
        if event.name != call.name:
            raise StateError(
                f"{self._place(event)} was '{event.name}', and is '{call.name}' now: the replay "
                "has taken another course before, which no checksum shows. Use the versions and "
                "the runtime of the run",
                "replay-differs",
            )
        call.replayed = True
        call.threads = event.threads or self._threads.get(call.role, 0)
        if event.error:
            future.set_exception(_restored(event.error))
            return future
        if call.answer:
            future.set_result(call.answer.value(event.answer))
            return future
        return None

    def coming(self) -> tuple[int, int] | None:
        """Return the index of the next call whose outcome passes, and the clock."""
        if self.compared >= self._end:
            return None
        event = self._segment.events[self.compared]
        return event.index, event.ticks

    def passed(self, call: RoleCall[Any]) -> None:
        """Compare an outcome with the record. Raises a StateError if they differ."""
        event = self._segment.events[self.compared]
        place = self._place(event)
        self.compared += 1
        assert call.work
        if call.answer or event.error or call.work.cancelled() or call.work.exception():
            return
        sums = checksums(call.work.result())
        pairs = zip(sums.items(), event.sums, strict=False)
        parts = [name for (name, checksum), expected in pairs if checksum != expected]
        if parts or len(sums) != len(event.sums):
            parts = parts or ["the number of its parts"]
            more = f" and {len(parts) - 1} more parts" if len(parts) > 1 else ""
            raise StateError(
                f"{place}, '{event.name}', is the first whose outcome differs from "
                f"the run's: {parts[0]}{more}. All outcomes before it are equal",
                "replay-differs",
            )

    def stuck(self, waiting: Sequence[RoleCall[Any]]) -> NoReturn:
        """Raise a StateError, because the next outcome is of a call that was never made."""
        event = self._segment.events[self.compared]
        raise StateError(
            f"{self._place(event)}, '{event.name}', is not made by the replay, which waits for "
            f"{', '.join(sorted({call.name for call in waiting}))}",
            "replay-differs",
        )

    def step(self, step: int) -> None:
        """Compare the number of outcomes at the end of a step with the record."""
        expected = self._segment.ends.get(step)
        if step <= self._until and expected != self.compared:
            raise StateError(
                f"step {step} ended after {expected} calls in the run, and after {self.compared} "
                "in the replay",
                "replay-differs",
            )

    def _place(self, event: Event) -> str:
        ends = self._segment.ends.items()
        step = next((s for s, count in ends if count > self.compared), self._segment.last + 1)
        return f"step {step}, call {event.index}"


def _end_of(segment: Segment, until: int) -> int:
    end = segment.ends[until]
    next_step = segment.ends.get(until + 1, len(segment.events))
    for place in range(end, next_step):
        if segment.events[place].name == "learner stage":
            return place + 1
    return end


def _restored(error: Sequence[str]) -> StrettoError:
    name, code, *arguments = error
    if name == errors.RoleLostError.__name__:
        role, cause = arguments
        return errors.RoleLostError(role, cause, code)
    kind: type[StrettoError] = getattr(errors, name, StrettoError)  # else a user's own class
    if kind.__init__ is not StrettoError.__init__:  # has other arguments
        kind = StrettoError
    return kind(arguments[0], code=code)


class Leg(NamedTuple):
    """A part of a replay: a segment of the record, up to the step ``until``."""

    segment: Segment
    until: int


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
        if lags and _end_of(segment, end) == segment.ends[end]:
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
    roles = segment.head["facts"]["threads"]
    numbered = [role for role in roles if role.rpartition(" ")[2].isdecimal()]
    copies = [role for role in numbered if not role.startswith(GENERATOR)]
    ranks = [config.pipeline.ranks, *(process.ranks for process in config.cluster.processes)]
    same_roles = bool(copies) == config.schedule.knobs.hosts_scorers(config.rollout.engines)
    if same_roles and max(ranks) <= 1 and config.rollout.engine == "torch":
        changes |= {"runtime": "inline", "cluster": ClusterConfig()}
    return config.model_copy(update=changes)


def warnings_of(segment: Segment, config: Config) -> list[str]:
    """Return facts that differ from those of the run, and may change bits of results."""
    device = hardware(pick_device(config.model.device))
    now = {**current_start()["versions"], "device": device}
    before = {**segment.head["versions"], "device": segment.head["facts"]["device"]}
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
    for leg in legs:
        config = config_of_replay(leg.segment)
        deadlines = {"schedule": leg.segment.config.schedule}  # for a resumption of the replay
        target.save_config(config.model_copy(update=deadlines))
        for line in warnings_of(leg.segment, config):
            progress.note(line)
        script = FlightScript(leg.segment, leg.until)
        result = train(
            config,
            run_dir=target,
            resume=leg.segment.first > 0,
            progress=progress,
            overrides=overrides,
            on_step=_Stop(leg),
            script=script,
        )
        progress.note(
            f"steps {leg.segment.first + 1} to {leg.until}: {script.compared} calls, each with the "
            "outcome of the run"
        )
    assert result
    return result


class _Stop:
    """Requests the checkpoints that the run's caller requested, and stops at the last step."""

    def __init__(self, leg: Leg) -> None:
        self._leg = leg

    def __call__(self, step: int, stats: Stats) -> Any:
        if step == self._leg.until:
            return "stop"
        return "save" if step in self._leg.segment.saves else None
