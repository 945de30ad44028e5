"""Reads rows of local files and hub datasets, and makes tasks of them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from stretto import hub
from stretto.config import RowsConfig, TaskConfig
from stretto.errors import TaskError, nearest, require
from stretto.plain import parse, plain
from stretto.tasks.messages import PROMPTS, as_demonstration, cell_of, prompt_of
from stretto.tasks.task import INDEX_KEY, Task, TaskRow, extract, fingerprints, same_answer

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
FORMATS = f"{', '.join(SUFFIXES)} (all but parquet also with .gz)"

ROWS_FOLDER = "stretto-rows-"
"""Prefix of a folder for rows from Python, until their run has its own folder."""

ANSWERS = ("answer", "ground_truth", "solution")
"""Columns to try as the answer if the settings name none."""

SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}
"""First words in names of files that are splits."""

_NUMBER = re.compile(r"[-_]\d+(-of-\d+)?$")
_FINAL = re.compile(r"####\s*(\S.*?)\s*$", re.MULTILINE)


def read(config: TaskConfig | RowsConfig) -> Sequence[Row]:
    """Return the rows of ``config.name``, cut to ``config.size`` if it is set.

    Local files are read again each time, without network or cache. Raises TaskError if the dataset
    is missing, unreadable, too short, or lacks the split. May raise MissingExtraError.
    """
    section = "task" if isinstance(config, TaskConfig) else "data"
    rows = _read_local(config, f"{section}.split") if is_local(config.name) else _read_hub(config)
    if not len(rows):
        name = shown_name(config.name)
        raise TaskError(f"{name} holds no rows; it needs at least one", "no-rows")
    if config.size > len(rows):
        raise TaskError(
            f"{section}.size = {config.size}, but {shown_name(config.name)} holds {len(rows)} "
            f"rows; set {section}.size to that or less, or to 0 for all",
            "too-few-rows",
        )
    if config.size:
        rows = rows[: config.size] if isinstance(rows, list) else rows.select(range(config.size))
    return cast(Sequence[Row], rows)


def shown_name(name: str | Path) -> str:
    """Return a dataset's name for messages. Users do not know the file of rows from Python."""
    return "dataset" if Path(name).parent.name.startswith(ROWS_FOLDER) else f"'{name}'"


def format_of(name: str | Path) -> str:
    """Return the suffix that determines how a file is read, or ``''``."""
    path = Path(name)
    suffix = path.suffix
    if suffix == ".gz":
        suffix = Path(path.stem).suffix.replace(".parquet", "")
    return suffix if suffix in SUFFIXES else ""


def is_local(name: str) -> bool:
    """Whether a dataset's name is a file or folder, existing or not, instead of a hub dataset."""
    path = Path(name).expanduser()
    return bool(format_of(path)) or name.startswith(("/", "./", "../", "~")) or path.exists()


class _ArrowRows(Sequence[Row]):
    """Rows of an Arrow table, made on access, as in a hub dataset."""

    def __init__(self, table: Any) -> None:
        self._table = table

    @classmethod
    def of(cls, parts: Iterable[_ArrowRows], path: Path) -> _ArrowRows:
        import pyarrow

        try:
            tables = [part._table for part in parts]
            return cls(pyarrow.concat_tables(tables, promote_options="default"))
        except pyarrow.ArrowException as error:
            message = f"the files of '{path}' cannot be put together: {error}"
            raise TaskError(message, "invalid-parquet") from error

    def select(self, rows: range) -> Sequence[Row]:
        return _ArrowRows(self._table.slice(rows.start, len(rows)))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches():
            yield from batch.to_pylist()


def _read_local(config: TaskConfig | RowsConfig, setting: str) -> Any:
    path, split = Path(config.name).expanduser(), config.split
    marker_files = [name for name in ("dataset_dict.json", "state.json") if (path / name).is_file()]
    if path.is_dir() and marker_files != ["state.json"]:
        if not marker_files:
            return _read_folder(path, split)
        splits = _read_saved(path)
        if split not in splits:
            raise no_split(str(path), split, splits)
        return splits[split]
    if split != "train":
        raise TaskError(
            f"{setting} = '{split}' has no effect on '{path}', which has no splits; "
            f"leave {setting} out, or name the split's own file",
            "setting-without-effect",
        )
    return _read_saved(path) if marker_files else _read_file(path)


def _read_saved(path: Path) -> Any:
    require("datasets", "hub", f"'{path}', a folder of save_to_disk,")
    import datasets

    return datasets.load_from_disk(str(path))


def no_split(name: str, split: str, known: Iterable[str]) -> TaskError:
    return TaskError(f"'{name}' has no split '{split}'. {nearest(split, known)}", "unknown-split")


def _read_folder(path: Path, split: str) -> Any:
    """Read a folder's files of a split, with or without a number
    (``train-00000-of-00002.parquet``), in order of their names. ``train`` reads all if no file is
    named after a split.
    """
    files = sorted(file for file in path.iterdir() if format_of(file))
    if not files:
        raise TaskError(f"the folder '{path}' has no file that ends in {FORMATS}", "no-data-files")
    splits = {file: _NUMBER.sub("", file.name.partition(".")[0]) for file in files}
    split_files = [file for file in files if splits[file] == split]
    has_splits = any(re.split(r"[\W_]", stem)[0] in SPLITS for stem in splits.values())
    if not split_files and (has_splits or split != "train"):
        raise no_split(str(path), split, set(splits.values()))
    parts = list(map(_read_file, split_files or files))
    if all(isinstance(part, _ArrowRows) for part in parts):
        return _ArrowRows.of(parts, path)
    return [row for part in parts for row in part]


def _read_file(path: Path) -> Any:
    if not path.is_file():
        raise TaskError(f"there is no file '{path}' (looked for from {Path.cwd()})", "missing-file")
    match format_of(path):
        case "":
            raise TaskError(f"'{path}' must end in one of {FORMATS}", "unknown-suffix")
        case ".parquet":
            return _read_parquet(path)
        case ".csv":
            return _read_csv(path)
    # Not through a table, which would turn texts that look like dates into dates, and give
    # every row the columns of all others.
    return _read_json(path)


def _read_parquet(path: Path) -> Any:
    require("pyarrow", "parquet", f"'{path}'")
    import pyarrow
    import pyarrow.parquet

    try:
        return _ArrowRows(pyarrow.parquet.read_table(path))
    except pyarrow.ArrowException as error:
        message = f"'{path}' cannot be read as parquet: {error}"
        raise TaskError(message, "invalid-parquet") from error


def _text_of(path: Path) -> str:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            return file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(f"'{path}' must be UTF-8: {error}", "not-utf8") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TaskError(
            f"'{path}' is no gzip file, or not whole: {error}", "invalid-gzip"
        ) from error


def _read_csv(path: Path) -> list[Row]:
    """Read a table whose first line names its columns. All cells are text.

    A line with more or fewer cells becomes a row of ``None``, because no cell can be trusted.
    """
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(io.StringIO(_text_of(path), newline=""), strict=True)
    try:
        names = next(lines, [])
        if duplicates := [name for name, count in Counter(names).items() if count > 1]:
            message = f"'{path}' has several columns of one name: {', '.join(duplicates)}"
            raise TaskError(message, "columns-alike")
        if len(names) == 1 and (separator := re.search("[;\t|]", names[0])):
            raise TaskError(
                f"'{path}' separates its columns by {separator[0]!r}, and must by commas",
                "invalid-csv",
            )
        none = [None] * len(names)
        cells = (row if len(row) == len(names) else none for row in lines if row)
        return [dict(zip(names, row, strict=True)) for row in cells]
    except csv.Error as error:
        raise TaskError(f"'{path}', line {lines.line_num}: {error}", "invalid-csv") from error


def _read_json(path: Path) -> list[Row]:
    text = _text_of(path)
    if text.lstrip().startswith("["):
        rows = _decode(text, shown_name(path))
    else:
        lines = enumerate(text.split("\n"), start=1)
        rows = [_decode(line, f"{shown_name(path)}, line {n}") for n, line in lines if line.strip()]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            row_text = json.dumps(row)[:80]
            message = (
                f"{shown_name(path)}: row {number} must be an object with columns; got {row_text}"
            )
            raise TaskError(message, "row-not-object")
    return list(rows)


def _decode(text: str, where: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise TaskError(
            f"{where}: not valid JSON ({error}); a file is a list of rows, or has one row a line",
            "invalid-json",
        ) from error


def _read_hub(config: TaskConfig | RowsConfig) -> Any:
    """Read a hub dataset. A colon and its configuration may follow the name."""
    require("datasets", "hub", f"'{config.name}', a dataset of the hub,")
    import datasets

    name, _, configuration = config.name.partition(":")
    try:
        with hub.loading():
            return datasets.load_dataset(name, configuration or None, split=config.split)
    except Exception as error:  # the library raises whatever its network stack raises
        raise TaskError(
            f"the dataset '{config.name}' (split '{config.split}') cannot be loaded from the hub: "
            f"{error}. Give a local file ({FORMATS}) or folder, a hub name as 'owner/name', or "
            "'owner/name:configuration' where it has several",
            "hub-dataset",
        ) from error


@contextmanager
def of_row(name: str) -> Iterator[None]:
    """Add the row's name to a TaskError."""
    try:
        yield
    except TaskError as error:
        raise TaskError(f"{name}: {error}", error.code) from error


class TableTask(Task):
    """Rows of a file or a hub dataset. A column of right answers makes it a verifier.

    Every row is checked at construction, so that none can stop a run later. Unusable rows are left
    out. Raises TaskError if no row is usable.
    """

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._renamed = self._columns()
        self._prompt_column = self._renamed.pop("prompt", "prompt")
        self._answer_column = self._renamed.pop("answer", "")
        self._shown_column = self._renamed.pop("demonstration", "")
        self._rows = read(config)
        if not self._answer_column:
            self._answer_column = self.found_answers = self._find_answers()
        faults: dict[int, TaskError] = {}
        rows, count = self._checked_rows(faults), len(self._rows)
        self._fingerprints = fingerprints(rows, count)
        self._indices = [i for i in range(count) if i not in faults] if faults else range(count)
        if faults:
            first = next(iter(faults.values()))
            if len(faults) == count:
                message = f"none of the {count} rows can be used. The first: {first}"
                raise TaskError(message if count > 1 else str(first), first.code)
            self.left_out = len(faults)
            self.left_out_because = str(first)

    def _columns(self) -> dict[str, str]:
        return dict(self._config.columns)

    def _find_answers(self) -> str:
        """Return the column of answers if the settings name none, or ``''``.

        Every row must have an answer in it, so that rewards without answers lose no row. Worked
        solutions with a marked end do not count, because they cannot be compared.
        """
        for column in ANSWERS:
            self._answer_column = column
            try:
                if not any(_FINAL.search(self._answer(row)) for row in self._rows):
                    return column
            except (KeyError, TaskError):
                continue
        return ""

    def _checked_rows(self, faults: dict[int, TaskError]) -> Iterator[Row]:
        for index, row in enumerate(self._rows):
            row_name = f"{shown_name(self._config.name)}, row {index}"
            if INDEX_KEY in row:
                message = f"{row_name}: the column name '{INDEX_KEY}' is reserved; rename it"
                raise TaskError(message, "reserved-column")
            try:
                with of_row(row_name):
                    self._check_columns(row)
                    if self._answer_column:
                        self._answer(row)
                with of_row(f"{row_name}, column '{self._prompt_column}'"):
                    prompt_of(row, self._prompt_column)
                if self._shown_column:
                    with of_row(f"{row_name}, column '{self._shown_column}'"):
                        as_demonstration(cell_of(row, self._shown_column))
            except TaskError as error:
                faults[index] = error
            yield row

    def _check_columns(self, row: Row) -> None:
        main_columns = (self._prompt_column, self._answer_column, self._shown_column)
        for column in filter(None, (*main_columns, *self._renamed.values())):
            try:
                cell_of(row, column)
            except KeyError:
                raise self._no_column(column, row) from None

    def _no_column(self, column: str, row: Row) -> TaskError:
        column_list = ", ".join(sorted(row))
        if column != self._prompt_column or column != "prompt":
            message = f"no column '{column}'. {nearest(column, row)} Its columns: {column_list}"
            return TaskError(message, "missing-column")
        name = next(filter(row.__contains__, PROMPTS), next(iter(row), "COLUMN"))
        remedy = f"name the column of prompts by `task.columns = prompt={name}`"
        if _FINAL.search(str(row.get("answer"))):
            remedy += ", or set `task.kind = gsm8k`, as answers have '####'"
        return TaskError(
            f"no column 'prompt' among its columns ({column_list}); {remedy}", "missing-column"
        )

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def indices(self) -> Sequence[int]:
        return self._indices

    def row(self, index: int) -> TaskRow:
        """Return the row at an index of the data, with the renamed columns of ``columns``, too."""
        row = self._rows[index]
        answer, shown = self._answer_column, self._shown_column
        reference = str(plain(cell_of(row, answer))) if answer else None
        demonstration = as_demonstration(cell_of(row, shown)) if shown else None
        aliases = {name: cell_of(row, column) for name, column in self._renamed.items() if column}
        data = plain({**row, **aliases}, finite=False)
        return TaskRow(
            prompt_of(row, self._prompt_column), data, reference, index, shown=demonstration
        )

    @property
    def identity(self) -> Mapping[str, str]:
        return {**super().identity, **self._fingerprints}

    @property
    def has_verifier(self) -> bool:
        return bool(self._answer_column)

    def verify(self, index: int, response: str) -> float:
        """Return 1 if a response's answer is the row's, as text or as mathematics, or else 0.

        An answer that cannot be compared in time scores 0 and counts in :attr:`timeouts`. Raises
        TaskError without an answer column, or outside the process's main thread.
        """
        self.require_verifier()
        answer, bare = self._extract(response)
        if answer is None:
            return 0.0
        try:
            return float(same_answer(self._answer(self._rows[index]), answer, bare=bare))
        except TimeoutError:
            self.timeouts += 1
            return 0.0

    def _extract(self, response: str) -> tuple[str | None, bool]:
        return extract(response, self._config.extract), self._config.extract != "full"

    def _answer(self, row: Row) -> str:
        answer = plain(cell_of(row, self._answer_column))
        if not isinstance(answer, str | int | float) or not str(answer).strip():
            cell_name = f"the answer in column '{self._answer_column}'"
            raise TaskError(
                f"{cell_name} must be text or a number; got {answer!r}", "answer-not-text"
            )
        return str(answer)


class Gsm8kTask(TableTask):
    """GSM8K as published (Cobbe et al. 2021): the answer's last line is '#### N'.

    The reference is the complete worked solution. With ``extract = full``, a response in the same
    form is scored by the text after its last '####'. Other responses are scored completely.
    """

    def _columns(self) -> dict[str, str]:
        return {"prompt": "question", "answer": "answer"}

    def _extract(self, response: str) -> tuple[str | None, bool]:
        final = _FINAL.findall(response)
        if final and self._config.extract == "full":
            return final[-1], True
        return super()._extract(response)

    def _answer(self, row: Row) -> str:
        final = _FINAL.findall(super()._answer(row))
        if not final:
            raise TaskError(
                "GSM8K's answers end in a line '#### N', and this one does not: "
                f"{super()._answer(row)!r}. For other datasets use task.kind = 'dataset'",
                "no-gsm8k-answer",
            )
        return str(final[-1])
