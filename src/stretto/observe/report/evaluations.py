"""Results of ``stretto eval``: one record an evaluation, kept in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto import files
from stretto.errors import StateError
from stretto.observe import records

FILE = "evaluations.jsonl"


def append(run: Path, record: Mapping[str, Any]) -> bool:
    """Add a record: the ``model``, ``what`` was measured, the ``figures`` and the ``settings``.

    Returns:
        Whether a last line that was never finished was dropped first.

    Raises:
        StorageError: the run's folder cannot be written to.
    """
    return records.append(run / FILE, [record])


def read(run: Path) -> list[dict[str, Any]]:
    """All records of a run, the oldest first, but for a last line that was never finished; none
    where there is no file.

    Raises:
        StateError: the file is damaged.
    """
    file = run / FILE
    if not file.is_file():
        return []
    found = []
    for number, line in enumerate(files.whole_lines(file.read_bytes()), start=1):
        try:
            record: dict[str, Any] = json.loads(line)
            found.append({**record, "figures": dict(record["figures"])})
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"'{file}', line {number} is no record of an evaluation: {line[:60]!r}; repair or "
                "remove it"
            ) from error
    return found
