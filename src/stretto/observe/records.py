"""Records: JSON Lines files that grow step by step, and can be read meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto import files
from stretto.errors import StateError


def append(file: Path, records: Sequence[Mapping[str, Any]]) -> bool:
    """Append records, all or none, durably. Raises StorageError if they cannot be written. Returns
    whether an unfinished last line, left by a crash, was dropped first."""
    if not records:
        return False  # a record kind that a run does not have gets no file
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return files.append(file, lines.encode(errors="replace"))


def read(file: Path, field: str = "step", kind: Callable[[Any], Any] = int) -> list[dict[str, Any]]:
    """Return complete records, if any. Raises StateError if one lacks the field of this kind."""
    if not file.is_file():
        return []
    return [_record(line, file, field, kind) for line in files.whole_lines(file.read_bytes())]


class Growing:
    """A file of step records that is read incrementally as it grows."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._records: list[dict[str, Any]] = []
        self._inode, self._size = 0, 0

    def read(self) -> list[dict[str, Any]]:
        """Return all records, reading only new lines unless the file was cut or replaced. Raises
        StateError if a line is no step record."""
        if not self._file.is_file():
            return []
        with self._file.open("rb") as stream:
            stat = os.fstat(stream.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._size:
                self._records = []
                self._inode = stat.st_ino
                self._size = 0
            stream.seek(self._size)
            lines = files.whole_lines(stream.read())
        self._records += [_record(line, self._file) for line in lines]
        self._size += sum(map(len, lines))
        return self._records


def last(file: Path) -> dict[str, Any] | None:
    """Return the last complete record, if any. Raises StateError if it is no step record."""
    line = files.last_line(file) if file.is_file() else b""
    return _record(line, file) if line else None


def rewind(file: Path, step: int) -> bool:
    """Drop the records after ``step``. Return whether an unfinished last line was dropped too.
    Raises StateError if another line is no step record."""
    if not file.is_file():
        return False
    content = file.read_bytes()
    lines = files.whole_lines(content)
    prefix = b"".join(line for line in lines if _record(line, file)["step"] <= step)
    if prefix != content:
        files.write_whole(file, prefix)
    return sum(map(len, lines)) < len(content)


def _record(
    line: bytes, file: Path, field: str = "step", kind: Callable[[Any], Any] = int
) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
        return {**record, field: kind(record[field])}
    except (ValueError, KeyError, TypeError) as error:
        number = file.read_bytes().partition(line)[0].count(b"\n") + 1
        text = f"'{file}', line {number} has no '{field}': {line[:60]!r}; repair or remove the file"
        raise StateError(text, "damaged-record") from error
