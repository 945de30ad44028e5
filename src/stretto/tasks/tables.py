"""Tasks out of rows that were read from somewhere: any dataset, and GSM8K."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stretto.config import TaskConfig
from stretto.errors import TaskError, nearest
from stretto.tasks.answers import extract, same_answer
from stretto.tasks.base import INDEX_KEY, RowMarks, Task, TaskRow
from stretto.tasks.encode import utf8
from stretto.tasks.files import read
from stretto.types import Message

_FINAL = re.compile(r"####\s*(\S.*?)\s*$", re.MULTILINE)


class TableTask(Task):
    """Rows of a file or a hub dataset; a column of right answers makes it score.

    Every row is checked at construction, so that none can stop a run half-way.
    """

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._prompt_column, self._answer_column = self._columns()
        self._rows = read(config)
        self._marks = RowMarks(len(self._rows))
        for index, row in enumerate(self._rows):
            where = f"'{config.name}', row {index}"
            self._check_columns(row, where)
            as_prompt(row[self._prompt_column], f"{where}, column '{self._prompt_column}'")
            if self._answer_column:
                self._answer(row, where)
            self._marks.add(row)

    def _columns(self) -> tuple[str, str]:
        return self._config.prompt_column, self._config.answer_column

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def row(self, index: int) -> TaskRow:
        """The row at ``index``."""
        row = self._rows[index]
        return TaskRow(
            prompt=as_prompt(row[self._prompt_column], f"row {index}"),
            data=dict(row),
            reference=str(row[self._answer_column]) if self._answer_column else None,
            index=index,
        )

    @property
    def identity(self) -> Mapping[str, str]:
        """Number of rows, and fingerprints of them."""
        return {**super().identity, **self._marks.named}

    @property
    def has_verifier(self) -> bool:
        """Return whether there is a column of right answers."""
        return bool(self._answer_column)

    def verify(self, index: int, response: str) -> float:
        """Score a response: 1 if its answer is the row's, as text or as mathematics; else 0.

        Raises:
            TaskError: there is no answer column, or this is not the process's main thread.
            TimeoutError: the comparison took too long.
        """
        self.require_verifier()
        answer, bare = self._extract(response)
        if answer is None:
            return 0.0
        reference = self._answer(self._rows[index], f"row {index}")
        return float(same_answer(reference, answer, bare=bare))

    def _extract(self, response: str) -> tuple[str | None, bool]:
        how = self._config.extract
        return extract(response, how), how != "full"

    def _answer(self, row: Mapping[str, Any], where: str) -> str:
        """The right answer and nothing else."""
        answer = row[self._answer_column]
        if not isinstance(answer, str | int | float) or not str(answer).strip():
            raise TaskError(
                f"{where}: the answer in column '{self._answer_column}' must be text or a number; "
                f"got {answer!r}"
            )
        return str(answer)

    def _check_columns(self, row: Mapping[str, Any], where: str) -> None:
        for column in filter(None, (self._prompt_column, self._answer_column)):
            if column not in row:
                raise TaskError(
                    f"{where} has no column '{column}'. {nearest(column, row)} "
                    f"Its columns: {', '.join(sorted(row))}"
                )
        if INDEX_KEY in row:
            raise TaskError(f"{where}: the column name '{INDEX_KEY}' is reserved; rename it")


class Gsm8kTask(TableTask):
    """GSM8K in its published form (Cobbe et al. 2021): the answer's last line is '#### N'.

    The reference is the whole worked solution, as it stands in the data. With ``extract = full``, a
    response in the same form is scored by what follows its last '####', any other as a whole.
    """

    def _columns(self) -> tuple[str, str]:
        return "question", "answer"

    def _extract(self, response: str) -> tuple[str | None, bool]:
        final = _FINAL.findall(response)
        if final and self._config.extract == "full":
            return final[-1], True
        return super()._extract(response)

    def _answer(self, row: Mapping[str, Any], where: str) -> str:
        final = _FINAL.findall(super()._answer(row, where))
        if not final:
            raise TaskError(
                f"{where}: GSM8K's answers end in a line '#### N', and this one does not: "
                f"{row[self._answer_column]!r}. For other datasets use task.kind = 'dataset'"
            )
        return str(final[-1])


def as_prompt(value: Any, where: str) -> str | tuple[Message, ...]:
    """A cell of the prompt column, as text or messages.

    Raises:
        TaskError: it is neither, is empty, is no valid Unicode, or ends in the assistant's turn.
    """
    if isinstance(value, str) and value.strip():
        utf8(value, where)
        return value
    if messages := as_messages(value):
        for message in messages:
            utf8(message["role"] + message["content"], where)
        if messages[-1]["role"] != "assistant":
            return messages
        raise TaskError(
            f"{where}: a prompt ends with a turn to be answered, and this one ends with the "
            "assistant's; drop that message"
        )
    raise TaskError(
        f"{where}: a prompt must be text, or a list of messages with 'role' and 'content' and "
        f"nothing else; got {repr(value)[:200]}"
    )


def as_messages(value: Any) -> tuple[Message, ...]:
    """A cell as messages; empty where it is something else."""
    if not isinstance(value, list) or not all(map(_is_message, value)):
        return ()
    return tuple(Message(role=m["role"], content=m["content"]) for m in value)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {key for key, entry in value.items() if entry is not None} == {"role", "content"}
        and all(isinstance(value[key], str) for key in ("role", "content"))
    )
