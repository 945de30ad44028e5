"""Rows of users' files: the columns that are taken, and the rows that are left out."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from raising import raises
from scorer_helpers import byte_tokenizer
from stretto import tasks
from stretto.api.training import write_rows
from stretto.config import TaskConfig
from stretto.errors import TaskError
from stretto.tasks.prompts import PromptSource
from stretto.tasks.tables import ROWS_FOLDER
from stretto.tasks.task import Task, TaskRow
from stretto.types import Message

ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{{ 1 / (m.content | length - 4) }}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
"""Refuses system messages by an error of its own, and texts of four characters by Python's."""


def table(path: Path, rows: list[Any], **settings: Any) -> TaskConfig:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return TaskConfig(kind="dataset", name=str(path), **settings)


def said(text: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def opened(config: TaskConfig, template: str | None = None) -> PromptSource:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return PromptSource(tasks.load(config, 0), config, tokenizer, seed=3)


# --- rows that the template refuses ---------------------------------------------------------------


def test_rows_that_the_template_refuses_are_left_out_before_the_first_step(tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": said(f"question {i}")} for i in range(8)]
    rows[2] = {"prompt": said("be brief", "system") + said("q")}
    rows[5] = {"prompt": said("four")}
    config = table(tmp_path / "t.jsonl", rows, max_prompt_tokens=99)
    notes = list[str]()
    source = opened(config, ALTERNATING)
    source.check(notes.append)
    assert {i: error.code for i, error in source.refused.items()} == {
        2: "template-refuses",
        5: "template-refuses",
    }
    assert "row 2" in str(source.refused[2])
    assert "no system role" in str(source.refused[2])
    assert "ZeroDivisionError" in str(source.refused[5])
    drawn = [source.next() for _ in range(12)]
    assert {prompt.data["_index"] for prompt in drawn} == {0, 1, 3, 4, 6, 7}
    unchecked = opened(config, ALTERNATING)  # as a process that draws prompts without looking first
    assert [unchecked.next() for _ in range(12)] == drawn
    assert unchecked.refused.keys() == {2, 5}
    resumed = opened(config, ALTERNATING)
    resumed.check(notes.append)
    resumed.load_state_dict(source.state_dict())
    assert [resumed.next() for _ in range(9)] == [source.next() for _ in range(9)]


def test_a_template_that_refuses_every_row_is_told_at_the_start(tmp_path: Path) -> None:
    config = table(tmp_path / "t.jsonl", [{"prompt": said("four")}, {"prompt": said("more")}])
    with raises(TaskError, "template-refuses", "row 0", "ZeroDivisionError"):
        opened(config, ALTERNATING).check(print)
    with raises(TaskError, "template-refuses", "ZeroDivisionError"):
        opened(config, ALTERNATING).next()


def test_a_users_task_loses_no_more_than_the_row(tmp_path: Path) -> None:
    class Mine(Task):
        def __len__(self) -> int:
            return 3

        def row(self, index: int) -> TaskRow:
            return TaskRow((Message(role="user", content=("a", "four", "c")[index]),))

        def verify(self, index: int, response: str) -> float:
            raise NotImplementedError

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ALTERNATING
    source = PromptSource(Mine(), TaskConfig(), tokenizer, seed=0)
    contents = {str(source.next().messages) for _ in range(6)}
    assert len(contents) == 2
    assert "four" not in str(contents)


# --- columns --------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["answer", "ground_truth", "solution"])
def test_a_column_of_answers_is_found(tmp_path: Path, column: str) -> None:
    rows = [{"prompt": "1+1?", column: 2}, {"prompt": "2+2?", column: "4"}]
    task = tasks.load(table(tmp_path / "t.jsonl", rows, extract="last_number"), 0)
    assert task.found_answers == column
    assert task.has_verifier
    assert [task.verify(i, "It is 4") for i in range(2)] == [0, 1]
    named = table(tmp_path / "t.jsonl", rows, columns={"answer": column})
    assert tasks.load(named, 0).found_answers == ""


@pytest.mark.parametrize(
    "answers",
    [["2", None], ["2", float("nan")], ["2", ["3"]], ["1 and 1\n#### 2", "#### 3"]],
    ids=["null", "nan", "list", "worked"],
)
def test_a_column_is_no_answer_unless_each_row_has_one(tmp_path: Path, answers: list[Any]) -> None:
    rows = [{"prompt": "?", "answer": answer} for answer in answers]
    task = tasks.load(table(tmp_path / "t.jsonl", rows), 0)
    assert (task.found_answers, task.has_verifier, len(task)) == ("", False, 2)


def test_nan_is_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "a", "answer": NaN}\n{"prompt": "b", "answer": 3}\n')
    config = TaskConfig(kind="dataset", name=str(path), columns={"answer": "answer"})
    task = tasks.load(config, 0)
    assert (list(task.indices), task.left_out) == ([1], 1)


def test_answers_and_names_lead_into_objects(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "reward_model": {"ground_truth": "7"}}]
    columns = {"answer": "reward_model.ground_truth", "label": "reward_model.ground_truth"}
    task = tasks.load(table(tmp_path / "t.jsonl", rows, columns=columns), 0)
    assert (task.first.reference, task.first.data["label"]) == ("7", "7")
    assert task.verify(0, "7") == 1


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"question": "q", "id": 1}, ["`task.columns = prompt=question`"]),
        ({"messages": []}, ["prompt=messages"]),
        ({"xyz": "q"}, ["prompt=xyz"]),
        ({"question": "q", "answer": "so\n#### 7"}, ["`task.kind = gsm8k`"]),
    ],
)
def test_a_missing_prompt_column_says_what_to_type(
    tmp_path: Path, row: Any, facts: list[str]
) -> None:
    with raises(TaskError, "missing-column", *facts) as caught:
        tasks.load(table(tmp_path / "t.jsonl", [row]), 0)
    assert ("gsm8k" in str(caught.value)) == ("####" in str(row))


def test_values_without_a_json_form_are_text_from_a_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    day = datetime.date(2026, 1, 2)
    rows = [{"prompt": "q", "at": day, "raw": b"\xff", "price": Decimal("7.50"), "n": {"at": day}}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    columns = {"answer": "price"}
    config = TaskConfig(kind="dataset", name=str(tmp_path / "t.parquet"), columns=columns)
    row = tasks.load(config, 0).first
    assert row.reference == "7.50"
    assert row.data == {
        "prompt": "q",
        "at": "2026-01-02",
        "raw": "/w==",
        "price": "7.50",
        "n": {"at": "2026-01-02"},
    }


def test_parquet_adds_no_nulls_to_messages_and_tools(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def called(**arguments: str) -> list[dict[str, Any]]:
        call = {"function": {"name": "f", "arguments": arguments}}
        return [*said("q"), {"role": "assistant", "tool_calls": [call]}, *said("5", "tool")]

    def tool(**properties: Any) -> list[dict[str, Any]]:
        return [{"function": {"name": "f", "parameters": {"properties": properties}}}]

    rows = [
        {"prompt": called(city="Rome"), "tools": tool(city={"type": "string"})},
        {"prompt": called(day="Monday"), "tools": tool(day={"type": "string"})},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    template = "[{{ tools | tojson }}{% for m in messages %}, {{ m | tojson }}{% endfor %}]"
    config = TaskConfig(kind="dataset", name=str(tmp_path / "t.parquet"), max_prompt_tokens=999)
    of_parquet = opened(config, template)
    of_json = opened(table(tmp_path / "t.jsonl", rows, max_prompt_tokens=999), template)
    # Some versions of pyarrow sort the keys of objects.
    read = [json.loads(of_parquet.prompt_by_id(i).text) for i in range(2)]
    assert read == [json.loads(of_json.prompt_by_id(i).text) for i in range(2)]
    assert "null" not in json.dumps(read)


# --- rows from Python -----------------------------------------------------------------------------


def test_rows_from_python_are_named_by_no_file(tmp_path: Path) -> None:
    folder = tmp_path / f"{ROWS_FOLDER}abc"
    folder.mkdir()
    write_rows([{"prompt": "a\ud800", "n": 1}], folder / "dataset.jsonl")
    config = TaskConfig(kind="dataset", name=str(folder / "dataset.jsonl"))
    with raises(TaskError, "invalid-unicode", "dataset, row 0, column 'prompt'") as caught:
        tasks.load(config, 0)
    assert str(tmp_path) not in str(caught.value)


def test_half_a_surrogate_pair_costs_its_row_alone(tmp_path: Path) -> None:
    rows = [{"prompt": "a\ud83d"}, {"prompt": "é", "n": "\ud83d"}]
    write_rows(rows, tmp_path / "t.jsonl")
    task = tasks.load(TaskConfig(kind="dataset", name=str(tmp_path / "t.jsonl")), 0)
    assert [task.row(i).data for i in task.indices] == [rows[1]]


@pytest.mark.parametrize("row", [None, 3, [1], {("a",): 1}, {"n": 10**5000}], ids=list("abcde"))
def test_other_rows_from_python_are_refused(tmp_path: Path, row: Any) -> None:
    with raises(TaskError, "row-not-plain", "row 1"):
        write_rows([{"prompt": "q"}, row], tmp_path / "t.jsonl")
