"""Rows of a local file or of a hub dataset, with the values they have there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from stretto.config import RowsConfig, TaskConfig
from stretto.errors import TaskError, require

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".parquet")


def read(config: TaskConfig | RowsConfig) -> Sequence[Row]:
    """The rows that ``config.name`` stands for, cut to ``config.size`` where that is set.

    Local files are read afresh each time and need neither a network nor a cache.

    Raises:
        TaskError: the file or dataset is missing, cannot be read, or is too short.
        MissingExtraError: it is a parquet file, or of the hub, and what reads it is not installed.
    """
    section = "task" if isinstance(config, TaskConfig) else "data"
    path = Path(config.name).expanduser()
    if is_local(config.name):
        if config.split != "train":
            raise TaskError(
                f"{section}.split = '{config.split}' has no effect on the local file '{path}'; "
                f"leave {section}.split out, or name the split's own file"
            )
        rows = _read_file(path)
    else:
        rows = _read_hub(config)
    if not len(rows):
        raise TaskError(f"'{config.name}' holds no rows; it needs at least one")
    if config.size > len(rows):
        raise TaskError(
            f"{section}.size = {config.size}, but '{config.name}' holds {len(rows)} rows; "
            f"set {section}.size to that or less, or to 0 for all"
        )
    return _Head(rows, config.size) if config.size else rows


def is_local(name: str) -> bool:
    """Return whether a dataset's name means a file, there or not, rather than a hub dataset."""
    path = Path(name).expanduser()
    meant = path.suffix in SUFFIXES or name.startswith(("/", "./", "../", "~"))
    return meant or path.exists()


class _Head(Sequence[Row]):
    """The first rows of others, without a copy."""

    def __init__(self, rows: Sequence[Row], size: int) -> None:
        self._rows, self._size = rows, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        return self._rows[range(self._size)[index]]

    def __iter__(self) -> Iterator[Row]:
        return islice(self._rows, self._size)


class _Table(Sequence[Row]):
    """Rows of an Arrow table, made when they are asked for."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches():
            yield from batch.to_pylist()


def _read_file(path: Path) -> Sequence[Row]:
    if not path.is_file():
        raise TaskError(f"there is no file '{path}' (looked for from {Path.cwd()})")
    if path.suffix not in SUFFIXES:
        raise TaskError(f"'{path}' must end in one of {', '.join(SUFFIXES)}")
    if path.suffix != ".parquet":
        # Not through a table: that would turn texts that look like dates into dates, and give
        # every row the columns of all others.
        return _read_json(path)
    require("pyarrow", "parquet", f"'{path}'")
    import pyarrow
    import pyarrow.parquet

    try:
        return _Table(pyarrow.parquet.read_table(path))
    except pyarrow.ArrowException as error:
        raise TaskError(f"'{path}' cannot be read as parquet: {error}") from error


def _read_json(path: Path) -> list[Row]:
    """JSON Lines, or one JSON list, as the first character says."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(f"'{path}' must be UTF-8: {error}") from error
    if text.lstrip().startswith("["):
        rows = _decode(text, str(path))
    else:
        lines = enumerate(text.split("\n"), start=1)
        rows = [_decode(line, f"{path}, line {n}") for n, line in lines if line.strip()]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise TaskError(
                f"'{path}': row {number} must be an object with columns; got {json.dumps(row)[:80]}"
            )
    return list(rows)


def _decode(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: not valid JSON ({error})") from error


def _read_hub(config: TaskConfig | RowsConfig) -> Sequence[Row]:
    """A hub dataset; one of several configurations is named behind a colon."""
    require("datasets", "hub", f"'{config.name}', a dataset of the hub,")
    import datasets

    name, _, configuration = config.name.partition(":")
    try:
        rows: Sequence[Row] = datasets.load_dataset(name, configuration or None, split=config.split)
    except Exception as error:  # the library raises whatever its network stack raises
        raise TaskError(
            f"the dataset '{config.name}' (split '{config.split}') cannot be loaded from the hub: "
            f"{error}. Give a local {', '.join(SUFFIXES)} file, a hub name as 'owner/name', or "
            "'owner/name:configuration' where it has several"
        ) from error
    return rows
