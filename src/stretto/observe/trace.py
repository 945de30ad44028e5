"""The trace of a run: every span, in the trace-event format of Perfetto and Chrome.

``trace.json`` is one JSON array with one event a line, complete after every write. The format
allows a missing closing bracket, so a file cut short by a kill can still be read. Times are
microseconds since the run's start, over all resumptions.

Each role is a track ("thread") of its process: generators on top, then scorers, then the learner.
Work has the category ``work``, waiting ``wait``. Flow events lead from the generators of a batch
over its scorers to the learner, and from a version's publication to the roles that load it.
Counters show the decoding rollouts, those that wait for the learner or for their environment, and
metrics of each step. An environment's overlapping calls are spread over a few tracks, and the rest
are joined. The steps have a track of their own. A step's event is written last, after the spans
that ended during the step, and is the point that a resumed run rewinds to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stretto import files
from stretto.errors import StateError
from stretto.observe.idle import generator_number, is_generator
from stretto.observe.spans import ENVIRONMENT, WAIT, Span, Window
from stretto.observe.waiting import LANE, Lanes, RoleLanes, is_environment, profile

LIMIT_BYTES = 200_000_000
"""Size at which a trace stops growing, because viewers cannot open larger ones."""

LIST_ITEMS = 8
"""Most items of a list in an event's arguments. A longer list is cut, with its length added."""

COUNTS = 1000  # most changes per step in the recorded number of waiting rollouts

COUNTED = (
    *("schedule/carried", "schedule/overcommit", "schedule/chunk_tokens"),
    *("staleness/mean", "staleness/max", "perf/throughput"),
)
"""Metrics of a step that the trace has as counters."""

Event = dict[str, Any]

_DRIVER = 1
_LEARNER_TRACK = 1_000_000
_SCORER_TRACK = 100_000
_ENVIRONMENT_TRACK = 50_000
_STEP_TRACK = 0
_NEXT_LANE = 2_000_000  # between numbers of a role's tracks, which sort as one
_STEP = "step"
_STEP_MARK = b'"cat": "step"'
_END = b"\n]\n"


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Start and end of a step, in seconds since the run's start."""

    step: int
    start_s: float
    end_s: float
    spans: tuple[Span, ...] = ()  # that overlap it, if asked for


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace read back: steps in order, and spans in order of their ends."""

    steps: tuple[TracedStep, ...]
    spans: tuple[Span, ...]


class TraceFile:
    """A trace on disk that grows a step at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.note: Callable[[str], None] = lambda _: None  # gets a line about a damaged file
        self._tracks: _Tracks | None = None
        self._rollouts = _Rollouts()
        self._lanes = Lanes()
        self._role_lanes = RoleLanes()

    def append(
        self,
        step: int,
        window: Window,
        start_s: float,
        stats: Mapping[str, float] = MappingProxyType({}),
        ended: Iterable[int] = (),
    ) -> bool:
        """Add the spans that ended during a step, ``start_s`` after the run's start.

        Returns False once the file has :data:`LIMIT_BYTES`. Raises StorageError, with the file
        unchanged, if they cannot be written.

        Args:
            stats: the step's metrics, of which :data:`COUNTED` are kept.
            ended: ids of the rollouts that were trained on or rejected.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        if size > LIMIT_BYTES:
            return False
        if self._tracks is None:
            try:
                self._tracks = _Tracks(map(self._parse, self._lines()))
            except StateError as damage:
                self._put_aside(damage)
                self._tracks, size = _Tracks(()), 0
        offset_s = start_s - window.start_s
        events: list[Event] = []
        if not size:
            process = _named("process_name", _DRIVER, _STEP_TRACK, name="stretto")
            events += [process, *_track("steps", _DRIVER, _STEP_TRACK)]
        calls = [span for span in window.ended if span.role == ENVIRONMENT]
        role_spans = self._role_lanes.place(s for s in window.ended if s.role != ENVIRONMENT)
        for track, span in (*role_spans, *self._lanes.place(calls)):
            place = self._tracks.place(track, window.processes.get(span.role, ""), events)
            event = _event(span, offset_s, *place)
            events += [event, *self._rollouts.follow(span, event)]
        self._rollouts.end(ended)
        events += _answering(calls, window, offset_s)
        marker = Span("", f"{_STEP} {step}", window.start_s, window.end_s, {"step": step})
        event = {**_event(marker, offset_s, _DRIVER, _STEP_TRACK), "cat": _STEP}
        counters = {n: stats[n] for n in COUNTED if math.isfinite(stats.get(n, math.nan))}
        counters[_WAITING] = self._rollouts.waiting
        events += (_counter(name, _end(event), _DRIVER, value) for name, value in counters.items())
        self._write(size, [*events, event])
        return True

    def rewind(self, step: int) -> None:
        """Drop events after step ``step``, and unfinished ones left by a crash. Raises StorageError
        if the file cannot be written. A damaged file is renamed."""
        self._tracks = None
        self._rollouts = _Rollouts()
        self._lanes = Lanes()
        self._role_lanes = RoleLanes()
        if not self.path.exists():
            return
        line_count = 0
        lines = self._lines()
        for index, line in enumerate(lines):
            if _STEP_MARK in line:
                try:
                    if self._parse(line)["args"]["step"] > step:
                        break
                except StateError as damage:
                    self._put_aside(damage)
                    return
                line_count = index + 1
        if line_count:
            files.write_whole(self.path, b"[\n" + b",\n".join(lines[:line_count]) + _END)
        else:
            self.path.unlink()

    def _put_aside(self, damage: StateError) -> None:
        """Rename a damaged file, so that training goes on without its spans."""
        aside = self.path.with_name(f"{self.path.stem}-damaged{self.path.suffix}")
        with files.explained(aside):
            self.path.replace(aside)
        self.note(f"{damage}. It is called {aside.name} now, and a new trace starts")

    def read(self, steps: int = 0) -> Trace:
        """Read the trace (empty without a file), or its first ``steps`` steps. Steps whose end was
        not written because of a kill are left out. Raises StateError for a damaged event."""
        names: dict[tuple[int, int], str] = {}
        traced_steps: list[TracedStep] = []
        spans: list[Span] = []
        for event in map(self._parse, self._lines()):
            if event["name"] == "thread_name":
                names[event["pid"], event["tid"]] = event["args"]["name"]
            if event["ph"] != "X":
                continue
            start_s = event["ts"] / 1e6
            end_s = start_s + event["dur"] / 1e6
            if event["cat"] == _STEP:
                traced_steps.append(TracedStep(event["args"]["step"], start_s, end_s))
                if len(traced_steps) == steps:
                    break
            else:
                name = WAIT if event["name"].startswith(f"{WAIT}: ") else event["name"]
                role = names.get((event["pid"], event["tid"]))
                if role is None:
                    raise self._damaged(event["name"])
                role = ENVIRONMENT if is_environment(role) else LANE.sub("", role)
                spans.append(Span(role, name, start_s, end_s, event["args"]))
        return Trace(tuple(traced_steps), tuple(spans))

    def _write(self, size: int, events: list[Event]) -> None:
        """Append events, all or none, replacing the closing bracket if there is one."""
        lines = ",\n".join(json.dumps(event, ensure_ascii=False) for event in events)
        text = lines.encode(errors="replace") + _END
        path = self.path
        with files.explained(path), path.open("r+b" if size else "wb", buffering=0) as stream:
            start = max(size - len(_END), 0)
            stream.seek(start)
            try:
                files.write(stream.fileno(), (b",\n" if size else b"[\n") + text)
            except BaseException:
                with suppress(OSError):
                    stream.truncate(start)
                    stream.seek(start)
                    files.write(stream.fileno(), _END if size else b"")
                raise

    def _lines(self) -> list[bytes]:
        if not self.path.is_file():
            return []
        lines = [line.strip().rstrip(b",") for line in self.path.read_bytes().splitlines()]
        lines = [line for line in lines if line not in (b"[", b"]", b"")]
        return lines[:-1] if lines and not lines[-1].endswith(b"}}") else lines

    def _parse(self, line: bytes) -> Event:
        try:
            event: Event = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._damaged(line[:60]) from error
        if not _is_event(event):
            raise self._damaged(line[:60])
        return event

    def _damaged(self, event: object) -> StateError:
        text = f"{event!r} in '{self.path}' is no trace event; repair or remove the file"
        return StateError(text, "damaged-trace")


def _is_event(event: Any) -> bool:
    """Check the types of all fields of an event that are read."""
    if not isinstance(event, dict) or not isinstance(arguments := event.get("args"), dict):
        return False
    fields: dict[str, Any] = {"name": str, "ph": str, "pid": int, "tid": int}
    if event.get("ph") == "X":
        fields |= {"cat": str, "ts": int | float, "dur": int | float}
    if event.get("name") in ("process_name", "thread_name"):
        arguments_of: dict[str, type] = {"name": str}
    else:
        arguments_of = {"step": int} if event.get("cat") == _STEP else {}
    return all(isinstance(event.get(n), kind) for n, kind in fields.items()) and all(
        isinstance(arguments.get(n), kind) for n, kind in arguments_of.items()
    )


class _Tracks:
    """Numbers of a trace's processes and of the roles' tracks in them."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._processes = {"": _DRIVER}
        self._places: dict[str, tuple[int, int]] = {}
        for event in events:
            if event["name"] == "process_name" and event["pid"] != _DRIVER:
                self._processes[event["args"]["name"]] = event["pid"]
            elif event["name"] == "thread_name" and event["tid"] != _STEP_TRACK:
                self._places[event["args"]["name"]] = event["pid"], event["tid"]

    def place(self, role: str, process: str, events: list[Event]) -> tuple[int, int]:
        """Return a role's process and track numbers. Names new ones by ``events``."""
        if process not in self._processes:
            pid = self._processes[process] = len(self._processes) + 1
            events += [
                _named("process_name", pid, _STEP_TRACK, name=process),
                _named("process_sort_index", pid, _STEP_TRACK, sort_index=pid),
            ]
        pid, place = self._processes[process], self._places.get(role)
        if place is None or place[0] != pid:
            track = place[1] if place else self._new(role)
            self._places[role] = pid, track
            events += _track(role, pid, track)
        return self._places[role]

    def _new(self, role: str) -> int:
        if lane := LANE.search(role):
            return self._places[LANE.sub("", role)][1] + _NEXT_LANE * int(lane[1])
        if role == "learner":
            return _LEARNER_TRACK
        if is_generator(role):
            return 1 + generator_number(role)
        if is_environment(role):
            return _ENVIRONMENT_TRACK + int(role.partition(" ")[2] or 1)
        scorers = (track for _, track in self._places.values() if track < _LEARNER_TRACK)
        return max([_SCORER_TRACK, *scorers]) + 1


class _Rollouts:
    """Last events of rollouts and weight versions, for flow events between roles."""

    def __init__(self) -> None:
        self._worked: dict[int, dict[str, Event]] = {}  # the last of each role, by rollout
        self._scored: set[int] = set()  # scored rollouts not trained on
        self._published: dict[int, Event] = {}  # by version

    @property
    def waiting(self) -> int:
        return len(self._scored)

    def end(self, rollouts: Iterable[int]) -> None:
        for rollout in rollouts:
            self._worked.pop(rollout, None)
            self._scored.discard(rollout)

    def follow(self, span: Span, event: Event) -> Iterator[Event]:
        kind, rollouts = span.name.partition("/")[0], span.attributes.get("rollouts") or ()
        version = span.attributes.get("version")
        if kind in ("gen", "score"):
            for rollout in rollouts:
                self._worked.setdefault(rollout, {})[span.role] = event
        if kind == "gen":
            running = f"running rollouts, {span.role}"
            yield _counter(running, event["ts"], event["pid"], len(rollouts))
            yield _counter(running, _end(event), event["pid"], 0)
        elif kind == "score":
            self._scored.update(rollouts)
            yield _counter(_WAITING, _end(event), _DRIVER, self.waiting)
        elif kind in ("accumulate", "update"):
            self._scored.difference_update(rollouts)
            yield _counter(_WAITING, event["ts"], _DRIVER, self.waiting)
            if kind == "update":
                yield from self._batch(rollouts, event)
        elif kind == "publish" and version is not None:
            self._published[version] = event
            if len(self._published) > LIST_ITEMS:
                del self._published[min(self._published)]
        elif kind == "load" and version in self._published:
            number = f"{version} {span.role} {event['ts']}"  # a role may have copies
            yield from _flow("weights", number, self._published[version], event)

    def _batch(self, rollouts: Iterable[int], update: Event) -> Iterator[Event]:
        last: dict[str, Event] = {}
        for rollout in rollouts:
            for role, event in self._worked.get(rollout, {}).items():
                if role not in last or last[role]["ts"] < event["ts"]:
                    last[role] = event
        scorers = [role for role in last if not is_generator(role)]
        for generator in last.keys() - scorers:
            for scorer in scorers:
                name = f"{update['ts']} {generator} {scorer}"
                yield from _flow("batch", name, last[generator], last[scorer], update)


_WAITING = "scored rollouts that wait for the learner"
_ANSWERING = "rollouts that wait for their environment"


def _answering(calls: Iterable[Span], window: Window, offset_s: float) -> Iterator[Event]:
    """Yield the counter of environment calls in a window, ended or open."""
    open_now = [span for span in window.open if span.role == ENVIRONMENT]
    last_s = None
    for start_s, end_s, count in profile([*calls, *open_now], window.start_s, window.end_s, COUNTS):
        if last_s is not None and last_s < start_s:
            yield _counter(_ANSWERING, _micros(last_s + offset_s), _DRIVER, 0)
        yield _counter(_ANSWERING, _micros(start_s + offset_s), _DRIVER, count)
        last_s = end_s
    if last_s is not None:
        yield _counter(_ANSWERING, _micros(last_s + offset_s), _DRIVER, 0)


def _flow(name: str, number: str, *events: Event) -> Iterator[Event]:
    """Yield a flow from the end of the first event over the starts of the others. Its points lie
    inside the events. Yields nothing if an event starts before the previous one ends."""
    # Viewers may assign a point on the edge of two events to either of them.
    inside_us = [min(event["dur"] / 2, 1.0) for event in events]
    times = [round(event["ts"] + by, 3) for event, by in zip(events, inside_us, strict=True)]
    times[0] = round(_end(events[0]) - inside_us[0], 3)
    if times != sorted(times):
        return
    phases = ["s", *"t" * (len(events) - 2), "f"]
    for phase, at, event in zip(phases, times, events, strict=True):
        yield {
            "ph": phase,
            **({"bp": "e"} if phase == "f" else {}),  # binds to the enclosing event
            "pid": event["pid"],
            "tid": event["tid"],
            "name": name,
            "cat": "flow",
            "id": f"{name} {number}",
            "ts": at,
            "args": {},
        }


def _counter(name: str, at: float, pid: int, value: float) -> Event:
    return {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": at, "args": {"value": value}}


def _end(event: Event) -> float:
    return round(float(event["ts"] + event["dur"]), 3)


def _track(name: str, pid: int, track: int) -> list[Event]:
    return [
        _named("thread_name", pid, track, name=name),
        _named("thread_sort_index", pid, track, sort_index=track % _NEXT_LANE),
    ]


def _named(kind: str, pid: int, track: int, **arguments: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": track, "name": kind, "args": arguments}


def _event(span: Span, offset_s: float, pid: int, track: int) -> Event:
    # A span may begin before the run's first step, at negative times, which viewers do not show.
    start, end = (_micros(max(at_s + offset_s, 0.0)) for at_s in (span.start_s, span.end_s))
    return {
        "ph": "X",
        "pid": pid,
        "tid": track,
        # A wait's name includes its cause, because viewers show names without a click.
        "name": f"{WAIT}: {span.cause}" if span.name == WAIT else span.name,
        "cat": WAIT if span.waits else "work",
        "ts": start,
        "dur": round(end - start, 3),  # so that a span ends where the next one starts
        "args": _arguments(span.attributes),
    }


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _arguments(attributes: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in attributes.items():
        if isinstance(value, list | tuple):
            plain[key] = [_scalar(v) for v in value[:LIST_ITEMS]]
            if len(value) > LIST_ITEMS:
                plain[f"{key}_count"] = len(value)
        else:
            plain[key] = _scalar(value)
    return plain


def _scalar(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, int | str | None) else str(value)
