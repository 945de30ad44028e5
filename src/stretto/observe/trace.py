"""The trace of a run: every span, in the trace-event format that Perfetto and Chrome show.

``trace.json`` is one JSON array with one event a line. It is whole, closing bracket included, after
every write; and the format allows the bracket to be missing, so that a file cut short by a kill can
be read as well. Times are microseconds since the run's start, over all resumptions.

Each role is a track ("thread"): generators on top, then scorers, then the learner. Work has the
category ``work``, waiting ``wait``. A track of its own has the steps, one event each. It is written
last, with the spans that ended during the step before it, and is what a resumed run rewinds to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto import files
from stretto.errors import StateError
from stretto.observe.idle import generator_number, is_generator
from stretto.observe.spans import WAIT, Span, Window

LIMIT_BYTES = 200_000_000
"""Size at which a trace is no longer written on, as viewers no longer open it."""

LIST_ITEMS = 8
"""A longer list in an event's arguments is cut to its first items, and its length is given."""

_PROCESS = 1
_LEARNER_TRACK, _SCORER_TRACK, _STEP_TRACK = 1_000_000, 100_000, 0
_STEP = "step"
_STEP_MARK = b'"cat": "step"'
_END = b"\n]\n"


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Start and end of a step, in seconds since the run's start."""

    step: int
    start_s: float
    end_s: float
    spans: tuple[Span, ...] = ()  # that touch it, where they were asked for


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace, read back: steps in order, and spans in the order in which they ended."""

    steps: tuple[TracedStep, ...]
    spans: tuple[Span, ...]


class TraceFile:
    """A trace on disk that grows a step at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tracks: dict[str, int] | None = None

    def append(self, step: int, window: Window, start_s: float) -> bool:
        """Add the spans that ended during a step, ``start_s`` after the run's start; return False
        once the file has :data:`LIMIT_BYTES`. Raises StorageError if they cannot be written; the
        file is as it was before."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size > LIMIT_BYTES:
            return False
        if self._tracks is None:
            self._tracks = self._known_tracks()
        offset_s = start_s - window.start_s
        process = _named("process_name", _STEP_TRACK, name="stretto")
        events = [] if size else [process, *_track("steps", _STEP_TRACK)]
        for span in window.ended:
            if span.role not in self._tracks:
                self._tracks[span.role] = _new_track(span.role, self._tracks)
                events += _track(span.role, self._tracks[span.role])
            events.append(_event(span, offset_s, self._tracks[span.role]))
        marker = Span("", f"{_STEP} {step}", window.start_s, window.end_s, {"step": step})
        events.append({**_event(marker, offset_s, _STEP_TRACK), "cat": _STEP})
        self._write(size, events)
        return True

    def rewind(self, step: int) -> None:
        """Drop what was written after step ``step``, and what a crash left unfinished. Raises
        StateError if a step's event is not JSON, StorageError if the file cannot be written."""
        self._tracks = None
        if not self.path.exists():
            return
        kept = 0
        lines = self._lines()
        for index, line in enumerate(lines):
            if _STEP_MARK in line:
                if self._parse(line)["args"]["step"] > step:
                    break
                kept = index + 1
        if kept:
            files.write_whole(self.path, b"[\n" + b",\n".join(lines[:kept]) + _END)
        else:
            self.path.unlink()

    def read(self, steps: int = 0) -> Trace:
        """Read the trace, or its first ``steps``, but for steps whose end was not written, because
        of a kill; an empty one without a file. Raises StateError if an event is not JSON."""
        names: dict[int, str] = {}
        read: list[TracedStep] = []
        spans: list[Span] = []
        for event in map(self._parse, self._lines()):
            if event["ph"] == "M":
                if event["name"] == "thread_name":
                    names[event["tid"]] = event["args"]["name"]
                continue
            start_s = event["ts"] / 1e6
            end_s = start_s + event["dur"] / 1e6
            if event["cat"] == _STEP:
                read.append(TracedStep(event["args"]["step"], start_s, end_s))
                if len(read) == steps:
                    break
            else:
                name = WAIT if event["name"].startswith(f"{WAIT}: ") else event["name"]
                spans.append(Span(names[event["tid"]], name, start_s, end_s, event["args"]))
        return Trace(tuple(read), tuple(spans))

    def _write(self, size: int, events: list[dict[str, Any]]) -> None:
        """Put events at the end, in place of the closing bracket if there is one; all or none."""
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

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            event: dict[str, Any] = json.loads(line)
        except ValueError as error:
            text = f"{line[:60]!r} in '{self.path}' is no trace event; repair or remove the file"
            raise StateError(text, "damaged-trace") from error
        return event

    def _known_tracks(self) -> dict[str, int]:
        named = (self._parse(line) for line in self._lines() if b'"thread_name"' in line)
        return {e["args"]["name"]: e["tid"] for e in named if e["tid"] != _STEP_TRACK}


def _new_track(role: str, taken: Mapping[str, int]) -> int:
    """Number a track; viewers order the tracks by number."""
    if role == "learner":
        return _LEARNER_TRACK
    if is_generator(role):
        return 1 + generator_number(role)
    return max([_SCORER_TRACK, *(t for t in taken.values() if t < _LEARNER_TRACK)]) + 1


def _track(name: str, track: int) -> list[dict[str, Any]]:
    return [
        _named("thread_name", track, name=name),
        _named("thread_sort_index", track, sort_index=track),
    ]


def _named(kind: str, track: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": track, "name": kind, "args": arguments}


def _event(span: Span, offset_s: float, track: int) -> dict[str, Any]:
    # A span may have begun before the run's first step did, where viewers show nothing.
    start_s = max(span.start_s + offset_s, 0.0)
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": track,
        # The cause is in a wait's name as well: a viewer shows names without a click.
        "name": f"{WAIT}: {span.cause}" if span.name == WAIT else span.name,
        "cat": WAIT if span.waits else "work",
        "ts": round(start_s * 1e6, 3),
        "dur": round((span.end_s + offset_s - start_s) * 1e6, 3),
        "args": _arguments(span.attributes),
    }


def _arguments(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Make attributes plain: long lists cut, what is neither number nor text by its text."""
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
