"""The flight recorder: the order, times and checksums of a run's calls, in ``flight.log``.

One line for each step: JSON, compressed and in base 85. The lines of a start or resumption of the
run form a segment, whose first line has a ``head``. Answers of code outside of Stretto are recorded
as they are. Everything else is computed again by a replay (:mod:`stretto.runs.replaying`), which
compares 16 bits of a checksum for each part of an outcome.
"""

from __future__ import annotations

import json
import zlib
from base64 import b85decode, b85encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from stretto import files
from stretto.config import Config, recipes
from stretto.errors import StateError, StrettoError
from stretto.machine import current_start
from stretto.types import Decoded, Score, TrainStepOutput, WeightsRef
from stretto.workers.gate import RoleCall, Tape

UNREPEATABLE = ("perf/", "timing_s/", "pipeline/", "memory/")
"""First parts of the names of the learner's metrics that hold times or sizes."""

Sums = Mapping[str, int]
"""Checksums of 16 bits, by the name of the part of an outcome."""


@dataclass(frozen=True, slots=True)
class Event:
    """An outcome that passed.

    Attributes:
        name: of the call: its role and method.
        index: number of the call, in the order in which the schedule made them.
        ticks: the clock from then on.
        sums: checksums of the outcome's parts, in their order.
        threads: CPU threads of the work, if they depended on other calls.
        answer: the outcome in plain data, if it cannot be computed again.
        error: type, code and arguments of a StrettoError that the call raised.
    """

    name: str
    index: int
    ticks: int
    sums: Sequence[int] = ()
    threads: int = 0
    answer: Any = None
    error: Sequence[str] = ()


@dataclass(slots=True)
class Segment:
    """The events of one start or resumption of a run.

    Attributes:
        first: steps that were done before it.
        ends: number of events before the end of each step, by step.
        saves: steps after which the caller requested a checkpoint.
        given_up: number of events before the schedule gave up the first call, if it did.
    """

    head: Mapping[str, Any]
    events: list[Event] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    saves: set[int] = field(default_factory=set)
    given_up: int | None = None
    names: list[str] = field(default_factory=list)

    @property
    def config(self) -> Config:
        """The recorded settings. ConfigError if this version of Stretto does not know one."""
        return recipes.build(self.head["config"], "settings in the flight record")

    @property
    def first(self) -> int:
        return int(self.head["first"])

    @property
    def last(self) -> int:
        return max(self.ends, default=self.first)


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


class FlightRecorder(Tape):
    """Writes the record of one start or resumption of a run, step by step."""

    def __init__(self, file: Path, head: Mapping[str, Any]) -> None:
        self._file = file
        self._facts: dict[str, Any] = {}
        self._head: dict[str, Any] | None = {**head, "facts": self._facts}
        self._new_facts: dict[str, Any] = {}  # since the head was written
        self._names: dict[str, int] = {}
        self._new_names: list[str] = []
        self._events: list[Event] = []
        self._given_up = False
        self._saves = 0  # step after which a checkpoint was requested
        self._last = (0, 0)  # index and ticks of the last event on disk

    def fact(self, name: str, value: Any) -> None:
        """Record a measurement, with the head or with the step in which it was made."""
        self._facts[name] = value
        if self._head is None:
            self._new_facts[name] = value

    def passed(self, call: RoleCall[Any], ticks: int) -> None:
        """Record the outcome of a call."""
        assert call.work
        if call.name not in self._names:
            self._names[call.name] = len(self._names)
            self._new_names.append(call.name)
        error = None if call.work.cancelled() else call.work.exception()
        sums: Sums = {}
        answer = None
        if error is None and not call.work.cancelled():
            value = call.work.result()
            answer = call.answer.plain(value) if call.answer else None
            sums = {} if call.answer else checksums(value)
        usual = call.threads == self._facts.get("threads", {}).get(call.role)
        self._events.append(
            Event(
                call.name,
                call.index,
                ticks,
                list(sums.values()),
                0 if usual else call.threads,
                answer,
                _error_parts(error) if isinstance(error, StrettoError) else (),
            )
        )

    def gave_up(self) -> None:
        self._given_up = True

    def step(self, step: int) -> None:
        self._write({"step": step})

    def saves(self, step: int) -> None:
        self._saves = step

    def flush(self) -> None:
        self._write({})

    def _write(self, content: dict[str, Any]) -> None:
        events, self._events = self._events, []
        names, self._new_names = self._new_names, []
        places = [(self._last), *((event.index, event.ticks) for event in events)]
        self._last = places[-1]
        if self._head:
            content["head"], self._head = self._head, None
        content |= {
            "names": names,
            "name": [self._names[event.name] for event in events],
            "calls": [after[0] - before[0] for before, after in pairwise(places)],
            "ticks": [after[1] - before[1] for before, after in pairwise(places)],
            "sums": ["".join(f"{value:04x}" for value in event.sums) for event in events],
        }
        for key in ("threads", "answer", "error"):
            if values := {i: v for i, e in enumerate(events) if (v := getattr(e, key))}:
                content[key] = values
        if self._new_facts:
            content["facts"], self._new_facts = self._new_facts, {}
        if self._given_up:
            content["given_up"] = True
        if self._saves:
            content["saves"], self._saves = self._saves, 0
        line = b85encode(
            zlib.compress(json.dumps(content, separators=(",", ":"), default=str).encode())
        )
        files.append(self._file, line + b"\n")


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
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(zlib.decompress(b85decode(line.strip())))
            if "head" in content:
                segments.append(Segment(content["head"]))
            _add(segments[-1], content)
        except (zlib.error, *files.UNREADABLE) as error:
            raise StateError(
                f"line {number} of '{file}' cannot be read: {error}. Restore the file, or delete "
                "this line and those after it in a copy of the folder, to replay the steps before",
                "damaged-record",
            ) from error
    return segments


def _add(segment: Segment, content: Mapping[str, Any]) -> None:
    last = segment.events[-1] if segment.events else Event("", 0, 0)
    segment.names += content["names"]
    segment.head["facts"].update(content.get("facts", {}))
    indices = accumulate(content["calls"], initial=last.index)
    ticks = accumulate(content["ticks"], initial=last.ticks)
    next(indices)
    next(ticks)
    columns = zip(content["name"], indices, ticks, content["sums"], strict=True)
    for i, (name, index, at, sums) in enumerate(columns):
        extras = {key: content.get(key, {}).get(str(i)) for key in ("threads", "answer", "error")}
        options = {key: value for key, value in extras.items() if value is not None}
        segment.events.append(Event(segment.names[name], index, at, _words(sums), **options))
    if content.get("given_up") and segment.given_up is None:
        segment.given_up = len(segment.events)
    if "step" in content:
        segment.ends[content["step"]] = len(segment.events)
    if "saves" in content:
        segment.saves.add(content["saves"])


def _words(text: str) -> list[int]:
    return [int(text[i : i + 4], 16) for i in range(0, len(text), 4)]


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
