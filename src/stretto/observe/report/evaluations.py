"""What ``stretto eval`` found of a run: one record an evaluation, kept in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.errors import ConfigError, StateError

FILE = "evaluations.jsonl"


def append(run: Path, record: Mapping[str, Any]) -> None:
    """Add a record: the ``model``, ``what`` was measured, the ``figures`` and the ``settings``.

    Raises:
        ConfigError: the run's folder cannot be written to.
    """
    try:
        with (run / FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot keep the figures in '{run / FILE}': {error}; make the folder writable, or "
            "measure the folder of the model itself with --model"
        ) from error


def read(run: Path) -> list[dict[str, Any]]:
    """All records of a run, the oldest first; none where there is no file.

    Raises:
        StateError: the file is damaged.
    """
    file = run / FILE
    if not file.is_file():
        return []
    records = []
    for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1):
        try:
            record: dict[str, Any] = json.loads(line)
            records.append({**record, "figures": dict(record["figures"])})
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"'{file}', line {number} is no record of an evaluation: {line[:60]!r}; repair or "
                "remove it"
            ) from error
    return records
