"""Records: JSON Lines that are added to a step at a time, and read while they still grow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto import files
from stretto.errors import StateError


def append(file: Path, records: Sequence[Mapping[str, Any]]) -> bool:
    """Add records, all or none; on disk, whole, when the call returns.

    Returns:
        Whether a last line that a crash had left unfinished was dropped first.

    Raises:
        StorageError: they cannot be written.
    """
    if not records:
        return False  # what a kind of run does not have gets no file
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return files.append(file, lines.encode(errors="replace"))


def read(file: Path) -> list[dict[str, Any]]:
    """All records, but for a last line that a crash left unfinished; none where there is no file.

    Raises:
        StateError: another line is no step's record.
    """
    if not file.exists():
        return []
    return [_record(line, file) for line in files.whole_lines(file.read_bytes())]


def last(file: Path) -> dict[str, Any] | None:
    """The last record that is whole, without reading the others; ``None`` where there is none.

    Raises:
        StateError: it is no step's record.
    """
    line = files.last_line(file) if file.exists() else b""
    return _record(line, file) if line else None


def rewind(file: Path, step: int) -> bool:
    """Drop the records of steps after ``step``.

    Returns:
        Whether a last line that a crash had left unfinished was dropped too.

    Raises:
        StateError: another line is no step's record.
        StorageError: the file cannot be written.
    """
    if not file.exists():
        return False
    content = file.read_bytes()
    lines = files.whole_lines(content)
    kept = b"".join(line for line in lines if _record(line, file)["step"] <= step)
    if kept != content:
        files.write_whole(file, kept)
    return sum(map(len, lines)) < len(content)


def _record(line: bytes, file: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
        return {**record, "step": int(record["step"])}
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"'{file}' has a line that is not a step's record: {line[:60]!r}; "
            "repair or remove the file"
        ) from error
