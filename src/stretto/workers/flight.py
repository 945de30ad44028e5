"""The flight recorder: the order, times and checksums of a run's calls, in ``flight.log``.

Each step is a :class:`FlightLine`: JSON, compressed and in base 85. The lines of a start or
resumption of the run form a :class:`Segment`. Answers of code outside of Stretto are recorded as
they are. Everything else is computed again by a replay (:mod:`stretto.runs.replaying`), which
compares 16 bits of a checksum for each part of an outcome.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from base64 import b85decode, b85encode
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from stretto import errors, files
from stretto.config import Config, recipes
from stretto.errors import StateError, StrettoError
from stretto.machine import current_start
from stretto.types import Decoded, Score, TrainStepOutput, WeightsRef

UNREPEATABLE = ("perf/", "timing_s/", "pipeline/", "memory/")
"""First parts of the names of the learner's metrics that hold times or sizes."""

Sums = Mapping[str, int]
"""Checksums of 16 bits, by the name of the part of an outcome."""

T = TypeVar("T")


class AnswerCodec(Protocol[T]):
    """How the outcome of a call is recorded, if code outside of Stretto computes it."""

    def plain(self, value: T) -> Any:
        """Return the value as plain data for JSON."""

    def value(self, plain: Any) -> T:
        """Restore the value."""


@dataclass(slots=True, eq=False)
class RoleCall(Generic[T]):
    """A call of a role by the schedule.

    Attributes:
        index: in the order in which the schedule makes calls.
        threads: CPU threads of its work, set before by a replay, or by the work itself if their
            number depends on other calls. Otherwise 0.
        answer: how the outcome is recorded, if it cannot be computed again.
        delivered: the outcome that the schedule waits for.
        work: the outcome that has arrived, or will.
        replayed: whether it repeats a call of a recorded run.
    """

    index: int
    role: str
    method: str
    answer: AnswerCodec[T] | None
    delivered: asyncio.Future[T] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    work: asyncio.Future[T] | None = None
    threads: int = 0
    replayed: bool = False

    @property
    def name(self) -> str:
        return f"{self.role} {self.method}"

    @property
    def arrived(self) -> bool:
        return self.work is not None and self.work.done()


current_call: ContextVar[RoleCall[Any] | None] = ContextVar("current_call", default=None)
"""The call that a task, or the work that it starts, belongs to."""


class Event(NamedTuple):
    """An outcome that passed.

    Attributes:
        name: of the call: its role and method.
        call: number of the call, in the order in which the schedule made them.
        ticks: the clock from then on.
        sums: checksums of the outcome's parts, in their order.
        threads: CPU threads of the work, if they depended on other calls.
        answer: the outcome in plain data, if it cannot be computed again.
        error: type, code and arguments of a StrettoError that the call raised.
    """

    name: str
    call: int
    ticks: int
    sums: Sequence[int] = ()
    threads: int = 0
    answer: Any = None
    error: Sequence[str] = ()


@dataclass
class FlightLine:
    """What a line of the file holds: the record since the line before.

    Attributes:
        head: settings and versions, in the first line of a segment.
        facts: measurements that settings of the schedule depend on.
        step: the step that ended with this line, or 0.
        saves: the step after which the caller requested a checkpoint, or 0.
        given_up: whether the schedule no longer waits for a call.
    """

    head: Mapping[str, Any] | None = None
    events: list[Event] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    saves: int = 0
    given_up: bool = False


def flight_head(config: Config, first: int, objects: Sequence[str]) -> dict[str, Any]:
    """Return the head of a segment that begins after the step ``first``. ``objects`` names the
    Python objects that the run was given.
    """
    return {
        "first": first,
        "versions": current_start()["versions"],
        "config": config.model_dump(mode="json"),
        "objects": objects,
    }


class FlightRecorder:
    """Writes the record of one start or resumption of a run, step by step. Without a file, it
    records nothing.
    """

    def __init__(self, file: Path | None = None, head: Mapping[str, Any] | None = None) -> None:
        self._file = file
        self._line = FlightLine(head)
        self._threads: Mapping[str, int] = {}  # of calls, by role

    def fact(self, name: str, value: Any) -> None:
        """Record a measurement that settings of the schedule depend on."""
        self._line.facts[name] = value
        if name == "threads":
            self._threads = value

    def passed(self, call: RoleCall[Any], ticks: int) -> None:
        """Record the outcome of a call."""
        if self._file is None:
            return
        assert call.work
        error = None if call.work.cancelled() else call.work.exception()
        sums: Sums = {}
        answer = None
        if error is None and not call.work.cancelled():
            value = call.work.result()
            answer = call.answer.plain(value) if call.answer else None
            sums = {} if call.answer else checksums(value)
        threads = 0 if call.threads == self._threads.get(call.role) else call.threads
        parts = _error_parts(error) if isinstance(error, StrettoError) else ()
        event = Event(call.name, call.index, ticks, [*sums.values()], threads, answer, parts)
        self._line.events.append(event)

    def gave_up(self) -> None:
        """Record that the schedule no longer waits for a call."""
        self._line.given_up = True

    def step(self, step: int) -> None:
        """Record the end of a step."""
        self._line.step = step
        self.flush()

    def saves(self, step: int) -> None:
        """Record that the caller requested a checkpoint after a step."""
        self._line.saves = step

    def flush(self) -> None:
        """Write everything recorded so far."""
        line, self._line = self._line, FlightLine()
        if self._file:
            content = json.dumps(vars(line), separators=(",", ":"), default=str)
            files.append(self._file, b85encode(zlib.compress(content.encode())) + b"\n")


@dataclass(slots=True)
class Segment:
    """The record of one start or resumption of a run.

    Attributes:
        ends: number of events before the end of each step, by step.
        saves: steps after which the caller requested a checkpoint.
        given_up: number of events before the line in which the schedule gave up a call, if it did.
    """

    head: Mapping[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    saves: set[int] = field(default_factory=set)
    given_up: int | None = None

    @property
    def config(self) -> Config:
        """The recorded settings, read like those of a run to resume. ConfigError if this version
        of Stretto does not know one.
        """
        writer = f"Stretto {self.head['versions'].get('stretto', '')}".strip()
        where = f"settings in the flight record, written by {writer}, which can replay it"
        return recipes.build(self.head["config"], where)

    @property
    def first(self) -> int:
        """Steps that were done before it."""
        return int(self.head["first"])

    @property
    def last(self) -> int:
        return max(self.ends, default=self.first)

    def add(self, line: FlightLine) -> None:
        if line.given_up and self.given_up is None:
            self.given_up = len(self.events)
        self.facts |= line.facts
        self.events += [Event(*event) for event in line.events]
        if line.step:
            self.ends[line.step] = len(self.events)
        if line.saves:
            self.saves.add(line.saves)

    def end_of(self, until: int) -> int:
        """Return the number of events up to a step. If the run staged a checkpoint after it, they
        include that, because the rest of the run continues from the checkpoint.
        """
        end = self.ends[until]
        next_step = self.ends.get(until + 1, len(self.events))
        staged = (i + 1 for i in range(end, next_step) if self.events[i].name == "learner stage")
        return next(staged, end)


def read_flight(file: Path) -> list[Segment]:
    """Return a run's segments. StateError if there are none, or for a damaged line."""
    lines = files.whole_lines(file.read_bytes()) if file.is_file() else []
    if not lines:
        raise StateError(
            f"'{file.parent}' has no {file.name} with a step: the run ended before its first step, "
            "was made with observe.flight = false, or by a version of Stretto without it. It "
            "cannot be replayed",
            "no-flight-record",
        )
    segments = list[Segment]()
    for number, text in enumerate(lines, 1):
        try:
            line = FlightLine(**json.loads(zlib.decompress(b85decode(text.strip()))))
            if line.head:
                segments.append(Segment(line.head))
            segments[-1].add(line)
        except (zlib.error, *files.UNREADABLE) as error:
            raise StateError(
                f"line {number} of '{file}' cannot be read: {error}. Restore the file, or delete "
                "this line and those after it in a copy of the folder, to replay the steps before",
                "damaged-record",
            ) from error
    return segments


class FlightScript:
    """The recorded order of a segment's outcomes up to the end of a step, which a gate follows."""

    def __init__(self, segment: Segment, until: int) -> None:
        self._segment = segment
        self._until = until
        self._end = segment.end_of(until)
        self._events = {event.call: event for event in segment.events}
        self.compared = 0  # outcomes that passed

    def fact(self, name: str) -> Any:
        """Return a recorded measurement, ``None`` if it was not made."""
        return self._segment.facts.get(name)

    @property
    def coming(self) -> Event | None:
        """The next outcome that passes. ``None`` at the end of the script."""
        return self._segment.events[self.compared] if self.compared < self._end else None

    def prepare(self, call: RoleCall[Any]) -> asyncio.Future[Any] | None:
        """Check a call against the record. Returns the recorded outcome of calls that code outside
        of Stretto answered, and of those that failed. Without a recorded one, the former never end.
        """
        event = self._events.get(call.index)
        future = asyncio.get_running_loop().create_future()
        if event is None or self.coming is None:
            return future if call.answer else None
        if event.name != call.name:
            raise self._differs(
                event,
                f"is '{call.name}' now: the replay has taken another course before, which no "
                "checksum shows. Use the versions and the runtime of the run",
            )
        call.replayed = True
        call.threads = event.threads or self.fact("threads").get(call.role, 0)
        if event.error:
            future.set_exception(_restored(event.error))
        elif call.answer:
            future.set_result(call.answer.value(event.answer))
        else:
            return None
        return future

    def passed(self, call: RoleCall[Any]) -> None:
        """Compare the coming outcome with the record. Raises a StateError if they differ."""
        event = self.coming
        assert event
        assert call.work
        if not (call.answer or event.error or call.work.cancelled() or call.work.exception()):
            sums = checksums(call.work.result())
            pairs = zip(sums.items(), event.sums, strict=False)
            parts = [name for (name, checksum), expected in pairs if checksum != expected]
            if parts or len(sums) != len(event.sums):
                parts = parts or ["the number of its parts"]
                more = f" and {len(parts) - 1} more parts" if len(parts) > 1 else ""
                raise self._differs(
                    event,
                    f"is the first whose outcome differs from the run's: {parts[0]}{more}. All "
                    "outcomes before it are equal",
                )
        self.compared += 1

    def stuck(self, waiting: Sequence[RoleCall[Any]]) -> NoReturn:
        """Raise a StateError, because the coming outcome is of a call that was never made."""
        assert self.coming
        names = ", ".join(sorted({call.name for call in waiting}))
        raise self._differs(self.coming, f"is not made by the replay, which waits for {names}")

    def step(self, step: int) -> None:
        """Compare the number of outcomes at the end of a step with the record."""
        expected = self._segment.ends.get(step)
        if step <= self._until and expected != self.compared:
            raise StateError(
                f"step {step} ended after {expected} calls in the run, and after {self.compared} "
                "in the replay",
                "replay-differs",
            )

    def _differs(self, event: Event, how: str) -> StateError:
        ends = self._segment.ends.items()
        step = next((s for s, count in ends if count > self.compared), self._segment.last + 1)
        text = f"step {step}, call {event.call}, '{event.name}', {how}"
        return StateError(text, "replay-differs")


def _restored(error: Sequence[str]) -> StrettoError:
    name, code, *arguments = error
    if name == errors.RoleLostError.__name__:
        role, cause = arguments
        return errors.RoleLostError(role, cause, code)
    kind: type[StrettoError] = getattr(errors, name, StrettoError)  # else a user's own class
    if kind.__init__ is not StrettoError.__init__:  # has other arguments
        kind = StrettoError
    return kind(arguments[0], code=code)


def _error_parts(error: StrettoError) -> list[str]:
    return [type(error).__name__, error.code, *map(str, error.args)]


def checksums(value: Any) -> Sums:
    """Return checksums of the parts of a role's answer that a replay must repeat."""
    match value:
        case Decoded(chunks):
            order = [(c.rollout_id, c.start, len(c.tokens), c.finish) for c in chunks]
            return {
                "rollouts": _sum([str(order).encode()]),
                "tokens": _sum([c.tokens.tobytes() for c in chunks]),
                "log-probs": _sum([c.logprobs.tobytes() for c in chunks]),
            }
        case TrainStepOutput(stats, rewards):
            repeatable = [(k, v) for k, v in stats.items() if not k.startswith(UNREPEATABLE)]
            metrics = str(repeatable).encode()
            return {"rewards": _sum([rewards.tobytes()]), "metrics": _sum([metrics])}
        case [Score(), *_]:
            return {"scores": _sum([score.values.tobytes() for score in value])}
        case Mapping():
            refs = [ref for ref in value.values() if isinstance(ref, WeightsRef)]
            return {f"{ref.model}: {name}": s for ref in refs for name, s in ref.sums.items()}
    return {}


def _sum(parts: Sequence[bytes]) -> int:
    return zlib.crc32(b"".join(parts)) & 0xFFFF
