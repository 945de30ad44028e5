"""Tasks, their judges, and the stream of prompts made from them."""

from __future__ import annotations

import gzip
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raising import raises
from scorer_helpers import byte_tokenizer
from stretto import tasks
from stretto.config import TaskConfig
from stretto.errors import StateError, TaskError
from stretto.tasks.procedural import WORDS, ChainSum, SpellBackward
from stretto.tasks.prompts import PromptSource, render
from stretto.tasks.task import INDEX_KEY, TaskRow, extract, fingerprint, same_answer
from stretto.types import Message

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_train.jsonl"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def table(path: Path, rows: list[Any], **settings: Any) -> TaskConfig:
    return TaskConfig(kind="dataset", name=write_jsonl(path, rows), **settings)


# --- what is judged ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("It is 7.", "7"),
        ("-3", "-3"),
        ("5-3", "3"),
        ("5 - 3 = 2", "2"),
        ("it falls to -3.", "-3"),
        ("1,234", "1234"),
        ("$12,345,678.90 in all", "12345678.90"),
        ("1,2,3", "3"),
        ("1, 234", "234"),
        ("2.5", "2.5"),
        ("between 2 and 2.5%.", "2.5"),
        ("\u22124 degrees", "-4"),
        ("(3)-4", "4"),
        ("x = -4", "-4"),
        ("none", None),
    ],
)
def test_last_number(response: str, number: str | None) -> None:
    assert extract(response, "last_number") == number


def test_full_and_answer_tag() -> None:
    assert extract("  4 and 5\n", "full") == "4 and 5"
    assert extract("<answer>1</answer> no: <ANSWER>\n2 </ANSWER> 3", "answer_tag") == "2"
    assert extract("<answer>1", "answer_tag") is None


@pytest.mark.parametrize(
    ("reference", "response", "bare", "same"),
    [
        ("72", "The answer is 72 dollars.", False, True),
        ("72", "The answer is 72.0", False, True),
        ("72", "The answer is 73", False, False),
        ("1,080", "so \\boxed{1080}", False, True),
        ("-7", "-7", True, True),
        ("\\frac{1}{2}", "0.5", True, True),
        ("1/2", "It is $\\frac{2}{4}$", False, True),
        ("(1, 2)", "(1, 3)", True, False),
        ("x^2+1", "1+x^2", True, True),
        ("blue", " blue ", False, True),
        ("blue", "It may be anything", False, False),
    ],
)
def test_same_answer(reference: str, response: str, bare: bool, same: bool) -> None:
    assert same_answer(reference, response, bare=bare) is same


def test_a_comparison_out_of_the_main_thread_is_refused_not_judged_wrong() -> None:
    with ThreadPoolExecutor(1) as pool, raises(TaskError, "not-main-thread"):
        pool.submit(same_answer, "72", "72.0", bare=True).result()


def test_a_comparison_that_takes_too_long_is_wrong_and_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("stretto.tasks.task.TIME_LIMIT_S", 1)
    with pytest.raises(TimeoutError, match="within 1 s"):
        same_answer("12", "9**9**9**9", bare=False)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "q", "answer": "12"}\n')
    task = tasks.load(TaskConfig(kind="dataset", name=str(path), columns={"answer": "answer"}), 0)
    assert (task.verify(0, "9**9**9**9"), task.timeouts) == (0.0, 1)
    assert (task.verify(0, "12.0"), task.verify(0, "13"), task.timeouts) == (1.0, 0.0, 1)


# --- procedural tasks -------------------------------------------------------------------------

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.mark.parametrize("settings", [{}, SUMS, {"min_terms": 1, "max_terms": 9, "max_digits": 2}])
def test_chains_have_the_answer_and_the_length_that_they_should(settings: dict[str, int]) -> None:
    limits = {"min_terms": 2, "max_terms": 6, "min_digits": 1, "max_digits": 4} | settings
    task = tasks.load(TaskConfig(settings=settings, size=300), seed=2)
    assert len(task) == 300
    terms, digits, signs = set[int](), set[int](), set[str]()
    for index in range(300):
        row = task.row(index)
        opening, _, rest = str(row.prompt).partition(": ")
        assert opening == "State the final answer to the following arithmetic problem"
        chain = rest.removesuffix(" =")
        assert row.reference == str(eval(chain))
        assert row.data == {"question": row.prompt, "answer": row.reference}
        numbers = chain.split()[::2]
        terms.add(len(numbers))
        digits.add(max(map(len, numbers)))
        signs |= set(chain.split()[1::2])
    assert terms == set(range(limits["min_terms"], limits["max_terms"] + 1))
    assert digits == set(range(limits["min_digits"], limits["max_digits"] + 1))
    assert signs == {"+", "-"}


def test_words_are_asked_for_backward() -> None:
    task = tasks.load(TaskConfig(name="spell_backward", size=200), seed=0)
    words = [str(task.row(i).prompt).rpartition(" ")[2] for i in range(200)]
    assert [task.row(i).reference for i in range(200)] == [word[::-1] for word in words]
    assert set(words) <= set(WORDS)
    assert len(set(words)) > 140  # of 392, drawn with replacement: 157 on average
    answer = words[0][::-1]
    responses = [answer, answer.upper(), answer + "s", "??" + answer[2], answer[:2], ""]
    assert [task.verify(0, r) for r in responses] == pytest.approx([1, 1, 0.8, 1 / 3, 2 / 3, 0])


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward"])
def test_rows_depend_on_the_seed_and_the_place_alone(name: str) -> None:
    def rows(seed: int) -> list[Any]:
        task = tasks.load(TaskConfig(name=name, size=40), seed)
        return [task.row(i).prompt for i in range(40)]

    assert rows(3) == rows(3)
    assert len(set(rows(3)) & set(rows(4))) < 10
    assert len(tasks.load(TaskConfig(name=name), seed=0)) == 100_000


@pytest.mark.parametrize("settings", [{}, SUMS])
def test_chains_are_those_of_reasoning_gym(settings: dict[str, Any]) -> None:
    config = TaskConfig(settings=settings, size=200)
    ours = tasks.load(config, 5)
    theirs = tasks.load(config.model_copy(update={"kind": "reasoning-gym"}), 5)
    for index in range(200):
        one, other = ours.row(index), theirs.row(index)
        assert (one.prompt, one.reference) == (other.prompt, other.reference)


@given(right=st.integers(-50, 2000), response=st.text("0123456789-+.,e ", max_size=7))
def test_sums_are_scored_as_by_reasoning_gym(right: int, response: str) -> None:
    from reasoning_gym.utils import compute_decimal_reward

    for answer in (response, f"{response[:2]}{right}{response[2:]}"):
        theirs = compute_decimal_reward(answer, str(right))
        assert ChainSum().score(answer, str(right)) == theirs


@cache
def gym_speller() -> Any:
    """Reasoning-gym's dataset, which opens its list of words once."""
    from reasoning_gym.algorithmic.spell_backward import SpellBackwardConfig, SpellBackwardDataset

    return SpellBackwardDataset(SpellBackwardConfig(seed=0))


@settings(deadline=None)  # the first example opens the dataset
@given(right=st.sampled_from(WORDS), response=st.text("abestABEST ", max_size=5))
def test_words_are_scored_as_by_reasoning_gym(right: str, response: str) -> None:
    score = gym_speller().score_answer
    for answer in (response, f"{right[:2]}{response}", f"{right}{response}"):
        theirs = score(answer, {"answer": right})
        assert SpellBackward().score(answer, right) == pytest.approx(theirs)


# --- reasoning-gym ----------------------------------------------------------------------------


CHAIN = TaskConfig(kind="reasoning-gym", settings=SUMS, size=50, extract="last_number")
GYM = partial(TaskConfig, kind="reasoning-gym")


def test_reasoning_gym_rows_and_verifier() -> None:
    import reasoning_gym

    from stretto.tasks.procedural import SEED_STRIDE

    task = tasks.load(CHAIN, seed=3)
    theirs = reasoning_gym.create_dataset(
        "chain_sum", size=50, seed=3 * SEED_STRIDE, **CHAIN.settings
    )
    assert len(task) == 50
    assert task.has_verifier
    for index in (0, 17, 49):
        row = task.row(index)
        assert row.prompt == theirs[index]["question"]
        assert row.reference == theirs[index]["answer"]
        assert row.data == theirs[index]
        assert row.index == index
        assert task.verify(index, f"That makes {row.reference}.") == 1.0
        assert task.verify(index, f"That makes {int(row.reference or 0) + 1000}") < 1.0
        assert task.verify(index, "no idea") == 0.0
    assert tasks.load(CHAIN, seed=4).row(0).data != task.row(0).data
    assert len(tasks.load(GYM(), seed=0)) == 100_000


@pytest.mark.parametrize(
    ("config", "code", "facts"),
    [
        (TaskConfig(name="chainsum"), "unknown-task", ["'chainsum'", "'chain_sum'"]),
        (TaskConfig(settings={"min_term": 2}), "unknown-task-setting", ["'min_terms'"]),
        (TaskConfig(settings={"size": 2}), "setting-elsewhere", ["'size'", "task.size"]),
        (TaskConfig(settings={"seed": 2}), "setting-elsewhere", ["'seed'"]),
        (TaskConfig(settings={"min_terms": -1}), "task-setting-range", ["max_terms", -1, 6]),
        (TaskConfig(settings={"max_digits": 0}), "task-setting-range", ["min_digits", 1, 0]),
        (TaskConfig(settings={"min_terms": "two"}), "task-setting-range", ["'two' and 6"]),
        (
            TaskConfig(name="spell_backward", settings={"min_word_len": 3}),
            "unknown-task-setting",
            ["'min_word_len'"],
        ),
        (
            TaskConfig(columns={"answer": "x"}),
            "setting-without-effect",
            ["columns = {'answer': 'x'}", "procedural"],
        ),
        (TaskConfig(held_out="x.jsonl"), "held-out-rows-of-made-task", ["x.jsonl", "procedural"]),
        (GYM(name="chainsum"), "unknown-task", ["'chainsum'", "'chain_sum'"]),
        (GYM(settings={"min_term": 2}), "unknown-task-setting", ["'min_term'", "'min_terms'"]),
        (GYM(settings={"size": 2}), "setting-elsewhere", ["'size'", "task.size"]),
        (GYM(settings={"min_terms": -1}), "task-setting-range", ["{'min_terms': -1}", "positive"]),
        (GYM(settings={"min_terms": "two"}), "task-setting-range", ["two"]),
        (GYM(columns={"answer": "x"}), "setting-without-effect", ["columns =", "reasoning-gym"]),
        (
            TaskConfig(kind="gsm8k", columns={"prompt": "q"}),
            "setting-without-effect",
            ["columns ="],
        ),
        (TaskConfig(kind="dataset", settings={"a": 1}), "setting-without-effect", ["{'a': 1}"]),
    ],
)
def test_a_bad_setting_is_named(config: TaskConfig, code: str, facts: list[object]) -> None:
    with raises(TaskError, code, *facts):
        tasks.load(config, seed=0)


# --- rows of files ----------------------------------------------------------------------------

ROWS = [
    {"prompt": "one?", "answer": 1, "day": "2020-01-01"},
    {"prompt": [{"role": "user", "content": "two?"}], "answer": "2", "extra": {"k": [1]}},
]


@pytest.mark.parametrize("form", ["lines", "list"])
def test_json_rows_are_read_as_they_stand(tmp_path: Path, form: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS) if form == "list" else "\n".join(map(json.dumps, ROWS)) + "\n")
    task = tasks.load(TaskConfig(kind="dataset", name=str(path), columns={"answer": "answer"}), 0)
    assert [task.row(i).data for i in range(len(task))] == ROWS
    assert task.row(0).prompt == "one?"
    assert task.row(1).prompt == (Message(role="user", content="two?"),)
    assert [task.row(i).reference for i in range(2)] == ["1", "2"]
    assert [task.verify(0, r) for r in ("1", "It is 1.", "2")] == [1.0, 1.0, 0.0]


def test_parquet_in_verls_layout(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{i}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i},
        }
        for i in range(5)
    ]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    task = tasks.load(TaskConfig(kind="dataset", name=str(path), size=4), 0)
    assert len(task) == 4
    assert [task.row(i).data for i in range(4)] == rows[:4]
    assert task.row(3).prompt == (Message(role="user", content="3?"),)
    assert not task.has_verifier
    with raises(TaskError, "task-without-verifier", "task.columns"):
        task.verify(0, "0")
    path.write_bytes(b"PAR1 and no more")
    with raises(TaskError, "invalid-parquet", path):
        tasks.load(TaskConfig(kind="dataset", name=str(path)), 0)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    before = tasks.load(table(path, [{"prompt": "old"}]), 0).row(0).prompt
    stamp = path.stat()
    config = table(path, [{"prompt": "new"}])
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert (before, tasks.load(config, 0).row(0).prompt) == ("old", "new")


def test_answers_in_a_tag(tmp_path: Path) -> None:
    rows = [{"prompt": "a?", "answer": "\\frac{1}{2}"}, {"prompt": "b?", "answer": "red"}]
    config = table(tmp_path / "t.jsonl", rows, columns={"answer": "answer"}, extract="answer_tag")
    task = tasks.load(config, 0)
    assert task.verify(0, "5 so <answer>0.5</answer> 7") == 1.0
    assert task.verify(0, "0.5") == 0.0
    assert task.verify(1, "<answer>red</answer>") == 1.0


@pytest.mark.parametrize(
    ("rows", "settings", "code", "facts"),
    [
        (
            [{"promt": "x", "n": 1}],
            {},
            "missing-column",
            ["row 0", "'prompt'", "prompt=promt", "n, p"],
        ),
        ([{"prompt": ""}, {"n": 1}], {}, "prompt-not-text", ["none of the 2 rows", "row 0"]),
        (
            [{"prompt": "x"}],
            {"columns": {"answer": "gold"}},
            "missing-column",
            ["'gold'", ": prompt"],
        ),
        ([{"prompt": "x", "a": None}], {"columns": {"answer": "a"}}, "answer-not-text", ["None"]),
        (
            [{"prompt": "x", "d": [Message(role="tool", content="1")]}],
            {"columns": {"demonstration": "d"}},
            "demonstration-not-text",
            ["row 0, column 'd'", "'assistant'"],
        ),
        ([{"prompt": " "}], {}, "prompt-not-text", ["row 0, column 'prompt'"]),
        ([{"prompt": [{"role": "user"}]}], {}, "prompt-not-text", ["'role'", "'content'"]),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}],
            {},
            "part-not-text",
            ["'image'", "text alone"],
        ),
        (
            [{"prompt": [Message(role="assistant", content="x")]}],
            {},
            "prompt-ends-with-assistant",
            [],
        ),
        ([{"prompt": "x", INDEX_KEY: 1}], {}, "reserved-column", ["'_index'"]),
        (["text"], {}, "row-not-object", ["row 0", '"text"']),
        ([], {}, "no-rows", []),
        ([{"prompt": "x"}], {"size": 2}, "too-few-rows", ["task.size = 2", "1 rows"]),
        ([{"prompt": "x"}], {"split": "test"}, "setting-without-effect", ["task.split = 'test'"]),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: Path, rows: list[Any], settings: dict[str, Any], code: str, facts: list[object]
) -> None:
    with raises(TaskError, code, *facts):
        tasks.load(table(tmp_path / "t.jsonl", rows, **settings), 0)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    def load(name: str) -> None:
        tasks.load(TaskConfig(kind="dataset", name=str(tmp_path / name)), 0)

    with raises(TaskError, "missing-file", "none.jsonl"):
        load("none.jsonl")
    (tmp_path / "t.txt").write_text("prompt\nx\n")
    with raises(TaskError, "unknown-suffix", ".jsonl, .json, .csv, .parquet (all but"):
        load("t.txt")
    (tmp_path / "t.csv").write_text("prompt,answer,prompt\nx,1,y\n")
    with raises(TaskError, "columns-alike", "t.csv", "prompt"):
        load("t.csv")
    (tmp_path / "r.csv").write_text("prompt,answer\nx\n")
    with raises(TaskError, "prompt-not-text", "row 0", "None"):
        load("r.csv")
    (tmp_path / "s.csv").write_text("prompt;answer\nx;1\n")
    with raises(TaskError, "invalid-csv", "';'"):
        load("s.csv")
    (tmp_path / "q.csv").write_text('prompt\n"x\n')
    with raises(TaskError, "invalid-csv", "q.csv', line 2"):
        load("q.csv")
    whole = gzip.compress(b'{"prompt": "x"}')
    for content in (b'{"prompt": "x"}', whole[:-9]):
        (tmp_path / "t.json.gz").write_bytes(content)
        with raises(TaskError, "invalid-gzip", "t.json.gz"):
            load("t.json.gz")
    (tmp_path / "empty").mkdir()
    with raises(TaskError, "no-data-files", "empty", ".jsonl"):
        load("empty")
    (tmp_path / "t.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    with raises(TaskError, "invalid-json", "t.jsonl', line 2"):
        load("t.jsonl")
    (tmp_path / "l.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with raises(TaskError, "not-utf8", "l.jsonl"):
        load("l.jsonl")


def test_csv_and_compressed_files(tmp_path: Path) -> None:
    rows = [{"prompt": 'a, "b"?', "answer": "1"}, {"prompt": "two\nlines?", "answer": "2"}]
    table = 'prompt,answer\r\n"a, ""b""?",1\r\n"two\nlines?",2\r\n'
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name, text in (
        ("t.csv", "\ufeff" + table),
        ("t.json", json.dumps(rows)),
        ("t.jsonl", lines),
    ):
        for file in (tmp_path / name, tmp_path / f"{name}.gz"):
            write = gzip.compress if file.suffix == ".gz" else bytes
            file.write_bytes(write(text.encode()))
            task = tasks.load(TaskConfig(kind="dataset", name=str(file)), 0)
            assert [task.row(i).data for i in task.indices] == rows


@pytest.mark.parametrize("suffix", ["jsonl", "csv.gz", "parquet", "mixed"])
def test_a_folder_of_files_and_its_splits(tmp_path: Path, suffix: str) -> None:
    import pandas

    def write(name: str, *prompts: str) -> None:
        data = pandas.DataFrame({"prompt": prompts})
        kind = suffix if suffix != "mixed" else "csv.gz" if len(prompts) > 1 else "parquet"
        file = folder / f"{name}.{kind}"
        match kind:
            case "jsonl":
                data.to_json(file, orient="records", lines=True)
            case "csv.gz":
                data.to_csv(file, index=False)
            case "parquet":
                data.to_parquet(file)

    def prompts(split: str) -> list[Any]:
        task = tasks.load(TaskConfig(kind="dataset", name=str(folder), split=split), 0)
        return [task.row(i).prompt for i in task.indices]

    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "README.md").touch()
    write("train-00001-of-00002", "c")
    write("train-00000-of-00002", "a", "b")
    assert prompts("train") == ["a", "b", "c"]
    write("test-00000-of-00001", "d", "e")
    assert (prompts("train"), prompts("test")) == (["a", "b", "c"], ["d", "e"])
    with raises(TaskError, "unknown-split", "'dev'", "test, train"):
        prompts("dev")
    for file in folder.glob("train*"):
        file.rename(folder / f"train_sft{file.name[5:]}")
    assert (prompts("train_sft"), prompts("test")) == (["a", "b", "c"], ["d", "e"])
    with raises(TaskError, "unknown-split", "'train'", "train_sft"):
        prompts("train")
    for file in folder.glob("train*"):
        file.unlink()
    with raises(TaskError, "unknown-split", "'train'", "test"):
        prompts("train")
    for file in folder.glob("test*"):
        file.rename(folder / f"part{file.name[4:]}")
    write("more", "f")
    assert prompts("train") == ["f", "d", "e"]


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    import datasets

    parts = {split: datasets.Dataset.from_dict({"prompt": [split]}) for split in ("train", "test")}
    both, one = tmp_path / "both", tmp_path / "one"
    datasets.DatasetDict(parts).save_to_disk(both)
    parts["test"].save_to_disk(one)

    def prompt(path: Path, **settings: Any) -> Any:
        return tasks.load(TaskConfig(kind="dataset", name=str(path), **settings), 0).row(0).prompt

    assert [prompt(both), prompt(both, split="test"), prompt(one)] == ["train", "test", "test"]
    with raises(TaskError, "unknown-split", "'dev'", "test, train"):
        prompt(both, split="dev")
    with raises(TaskError, "setting-without-effect", "task.split = 'test'"):
        prompt(one, split="test")


def test_a_ragged_line_of_a_table_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("prompt,answer\nx,1\ny\n\nz,2,3\nw,4\n")
    task = tasks.load(TaskConfig(kind="dataset", name=str(tmp_path / "t.csv")), 0)
    assert [task.row(i).data for i in task.indices] == [
        {"prompt": "x", "answer": "1"},
        {"prompt": "w", "answer": "4"},
    ]
    assert task.left_out == 2
    assert "row 1, column 'prompt'" in task.left_out_because


def test_a_row_that_cannot_be_used_costs_no_other(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "answer": n} for n in range(6)]
    rows[0]["prompt"], rows[2]["answer"], rows[4] = None, None, {"n": 1}
    task = tasks.load(table(tmp_path / "t.jsonl", rows, columns={"answer": "answer"}), 0)
    assert (len(task), list(task.indices)) == (3, [1, 3, 5])
    assert (task.left_out, task.first.index) == (3, 1)
    assert "row 0, column 'prompt': a prompt must be text" in task.left_out_because
    config = TaskConfig(kind="dataset")
    source = PromptSource(task, config, byte_tokenizer(), seed=0)
    prompts = [source.next() for _ in range(6)]
    assert sorted(p.data[INDEX_KEY] for p in prompts) == [1, 1, 3, 3, 5, 5]
    assert all(p.text == rows[p.data[INDEX_KEY]]["prompt"] for p in prompts)
    assert [task.verify(i, "3") for i in task.indices] == [0.0, 1.0, 0.0]


CALLS = (
    "{% for tool in tools or [] %}<|tool|>{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.name or '' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.n }}]"
    "{% endfor %}{% endfor %}"
)


def test_parts_tools_and_their_calls_are_rendered(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "half", "arguments": {"n": "<eos>"}}}
    schema = {"type": "function", "function": {"name": "half", "parameters": {"type": "object"}}}
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        },
        {"role": "user", "content": "Half of 8?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "half", "tool_call_id": "1", "content": "4"},
    ]
    rows = [{"prompt": messages, "tools": [schema]}, {"prompt": messages, "tools": None}]
    config = table(tmp_path / "t.jsonl", rows)
    task, tokenizer = tasks.load(config, 0), byte_tokenizer(CALLS)
    first, second = (render(task.row(i), config, tokenizer) for i in range(2))
    shown = "<|system|>Be brief.<|user|>Half of 8?<|assistant|>[half <eos>]<|tool|>half4"
    assert (first.text, second.text) == (f"<|tool|>half{shown}", shown)
    assert first.tokens.count(tokenizer.eos_token_id) == 0  # what a call spells is text
    assert first.messages
    assert first.messages[2:] == (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "half", "tool_call_id": "1", "content": "4"},
    )
    named = config.model_copy(update={"columns": {"tools": "tools"}})
    with raises(TaskError, "tools-not-schemas", "row 0: column 'tools'", "'half'"):
        render(TaskRow(task.row(0).prompt, {"tools": "half"}, index=0), named, tokenizer)


def test_each_turn_of_a_demonstration_is_read_behind_what_came_before(tmp_path: Path) -> None:
    shown = [
        Message(role="assistant", content="half(8)"),
        Message(role="tool", name="half", content="4"),
        Message(role="assistant", content="It is 4."),
    ]
    rows = [{"prompt": "Half of 8?", "answer": "4", "d": shown}]
    config = table(
        tmp_path / "t.jsonl",
        rows,
        columns={"answer": "answer", "demonstration": "d"},
        system="Be brief.",
        instruction="Quick!",
    )
    source = PromptSource(tasks.load(config, 0), config, byte_tokenizer(CALLS), seed=0)
    (first, call), (second, answer) = source.demonstration(0, "")
    asked = "<|system|>Be brief.<|user|>Half of 8?\nQuick!"
    assert (first.text, call) == (asked, "half(8)")
    assert (second.text, answer) == (f"{asked}<|assistant|>half(8)<|tool|>half4", "It is 4.")
    text = config.model_copy(update={"columns": {"demonstration": "answer"}})
    source = PromptSource(tasks.load(text, 0), text, byte_tokenizer(CALLS), seed=0)
    assert [said for _, said in source.demonstration(0, "")] == ["4"]


def test_columns_have_further_names_for_functions(tmp_path: Path) -> None:
    rows = [{"input": "1?", "answer": "1", "label": "no"}, {"input": "2?", "answer": "2"}]
    columns = {"prompt": "input", "label": "answer"}
    task = tasks.load(table(tmp_path / "t.jsonl", rows, columns=columns), 0)
    assert [task.row(i).prompt for i in task.indices] == ["1?", "2?"]
    assert [task.row(i).data for i in task.indices] == [
        row | {"label": row["answer"]} for row in rows
    ]


def test_the_hub_is_asked_by_name_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def fake(name: str, configuration: str | None, *, split: str) -> Any:
        asked.append((name, configuration, split))
        if name == "no/such":
            raise ConnectionError("offline")
        return datasets.Dataset.from_list([{"prompt": f"{i}?"} for i in range(3)])

    monkeypatch.setattr(datasets, "load_dataset", fake)
    config = TaskConfig(kind="dataset", name="o/d:main", split="test", size=2)
    task = tasks.load(config, 0)
    assert [task.row(i).prompt for i in range(len(task))] == ["0?", "1?"]
    tasks.load(TaskConfig(kind="dataset", name="o/d"), 0)
    assert asked == [("o/d", "main", "test"), ("o/d", None, "train")]
    with raises(TaskError, "hub-dataset", "'no/such'", "offline"):
        tasks.load(TaskConfig(kind="dataset", name="no/such"), 0)


# --- GSM8K ------------------------------------------------------------------------------------


def test_gsm8k_in_its_published_form(tmp_path: Path) -> None:
    solution = "He earned 0.2*50 = $<<0.2*50=10>>10.\n#### 1,010"
    name = write_jsonl(tmp_path / "g.jsonl", [{"question": "How much?", "answer": solution}])
    task = tasks.load(TaskConfig(kind="gsm8k", name=name), 0)
    assert task.row(0).prompt == "How much?"
    assert task.row(0).reference == solution
    right = [solution, "#### 1010", "He has $3 and $7, so 1,010 in all.", "\\boxed{1010}", "1010.0"]
    assert [task.verify(0, response) for response in right] == [1.0] * len(right)
    wrong = ["#### 101", "1010 or\n#### 11", "no", ""]
    assert [task.verify(0, response) for response in wrong] == [0.0] * len(wrong)

    bad = write_jsonl(tmp_path / "b.jsonl", [{"question": "How much?", "answer": "10"}])
    with raises(TaskError, "no-gsm8k-answer", "row 0", "'#### N'", "'10'"):
        tasks.load(TaskConfig(kind="gsm8k", name=bad), 0)


@pytest.mark.skipif(not GSM8K.exists(), reason=f"{GSM8K} is not there")
@pytest.mark.parametrize("how", ["full", "last_number"])
def test_gsm8k_judges_its_own_solutions_right(how: Any) -> None:
    task = tasks.load(TaskConfig(kind="gsm8k", name=str(GSM8K), extract=how), 0)
    assert len(task) == 7473
    rows = range(0, 7473, 25)
    assert all(task.verify(i, task.row(i).reference or "") == 1.0 for i in rows)
    finals = [(task.row(i).reference or "").split("#### ")[1].replace(",", "") for i in rows]
    off_by_one = [f"So it is {int(final) + 1}." for final in finals]
    assert not any(task.verify(i, text) for i, text in zip(rows, off_by_one, strict=True))


# --- rendering --------------------------------------------------------------------------------


def test_plain_text_gets_the_tokenizers_special_tokens() -> None:
    tokenizer = byte_tokenizer()
    config = TaskConfig(instruction="Short.")
    prompt = render(TaskRow("Hi", {"a": 1}, index=4), config, tokenizer, prompt_id=9)
    assert prompt.text == "Hi\nShort."
    assert prompt.tokens == (0, *tokenizer("Hi\nShort.", add_special_tokens=False)["input_ids"])
    assert len(prompt.tokens) == 1 + len("Hi\nShort.")
    assert (prompt.id, prompt.messages, prompt.data) == (9, None, {"a": 1, INDEX_KEY: 4})


def test_conversations_get_the_template_and_no_second_bos() -> None:
    tokenizer = byte_tokenizer("<s>" + TEMPLATE)
    config = TaskConfig(system="Be kind.", instruction="Short.")
    prompt = render(TaskRow("Hi"), config, tokenizer)
    assert prompt.text == "<s><|system|>Be kind.\n<|user|>Hi\nShort.\n<|assistant|>"
    assert prompt.messages == (
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi\nShort."},
    )
    assert prompt.tokens.count(0) == 1
    assert tokenizer.decode(list(prompt.tokens)) == prompt.text
    turns = (Message(role="user", content="a"), Message(role="user", content="b"))
    assert render(TaskRow(turns), TaskConfig(), tokenizer).text == (
        "<s><|user|>a\n<|user|>b\n<|assistant|>"
    )
    assert render(TaskRow("Hi"), TaskConfig(chat="off"), tokenizer).text == "Hi"


@pytest.mark.parametrize(
    ("template", "prompt", "config", "code", "facts"),
    [
        (None, "x", TaskConfig(chat="on"), "no-chat-template", ["task.chat = 'on'"]),
        (None, "x", TaskConfig(system="s"), "no-chat-template", ["task.system is set"]),
        (None, (Message(role="user", content="x"),), TaskConfig(), "no-chat-template", ["a list"]),
        (
            TEMPLATE,
            "x",
            TaskConfig(system="s", chat="off"),
            "chat-is-off",
            ["task.chat = 'off'", "task.system is set"],
        ),
        (
            TEMPLATE,
            (Message(role="system", content="a"), Message(role="user", content="b")),
            TaskConfig(system="s"),
            "two-system-messages",
            ["task.system"],
        ),
        (
            "{{ raise_exception('no users') }}",
            "x",
            TaskConfig(),
            "template-refuses",
            ["'content': 'x'", "no users"],
        ),
    ],
)
def test_a_template_that_does_not_fit_is_named(
    template: str | None, prompt: Any, config: TaskConfig, code: str, facts: list[object]
) -> None:
    with raises(TaskError, code, *facts):
        render(TaskRow(prompt), config, byte_tokenizer(template))


# --- the stream -------------------------------------------------------------------------------


def source(
    tmp_path: Path, texts: list[str], seed: int = 0, limit: int = 10, **settings: Any
) -> PromptSource:
    rows = [{"prompt": text} for text in texts]
    config = table(tmp_path / "s.jsonl", rows, max_prompt_tokens=limit, **settings)
    return PromptSource(tasks.load(config, 0), config, byte_tokenizer(), seed)


def test_each_epoch_holds_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    texts = [f"p{i}" for i in range(8)]
    stream = source(tmp_path, texts)
    drawn = [stream.next() for _ in range(24)]
    assert [prompt.id for prompt in drawn] == list(range(24))
    epochs = [[prompt.text for prompt in drawn[at : at + 8]] for at in (0, 8, 16)]
    assert all(sorted(epoch) == texts for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(texts[prompt.data[INDEX_KEY]] == prompt.text for prompt in drawn)
    again, other = source(tmp_path, texts), source(tmp_path, texts, seed=-1)
    assert [again.next() for _ in range(24)] == drawn
    assert [other.next().text for _ in range(8)] != epochs[0]
    assert [again.prompt_by_id(i) for i in (23, 0, 9)] == [drawn[23], drawn[0], drawn[9]]


def test_rows_keep_their_order_in_each_epoch_if_they_are_not_shuffled(tmp_path: Path) -> None:
    texts = [f"p{i}" for i in range(8)]
    stream = source(tmp_path, texts, shuffle=False)
    assert [stream.next().text for _ in range(24)] == 3 * texts
    assert stream.prompt_by_id(13).text == "p5"


def test_resuming_goes_on_where_it_stopped(tmp_path: Path) -> None:
    texts = ["short", "much too long for it", "brief"]
    stream = source(tmp_path, texts)
    for _ in range(3):
        stream.next()
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = source(tmp_path, texts)
    resumed.load_state_dict(state)
    assert [resumed.next() for _ in range(7)] == [stream.next() for _ in range(7)]
    assert resumed.skipped == stream.skipped
    with raises(StateError, "other-prompts", "seed = 0", "seed = 1"):
        source(tmp_path, texts, seed=1).load_state_dict(state)
    with raises(StateError, "other-prompts", "rows = 3", "rows = 2"):
        source(tmp_path, texts[:2]).load_state_dict(state)


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    stream = source(tmp_path, ["nine char", "ten  chars", "x"])  # and one token for '<s>'
    drawn = [stream.next() for _ in range(4)]
    assert sorted(prompt.text for prompt in drawn) == ["nine char", "nine char", "x", "x"]
    places = range(drawn[-1].id)
    assert stream.skipped == sum(len(stream.prompt_by_id(i).tokens) == 11 for i in places) > 0
    assert all(stream.prompt_by_id(prompt.id) == prompt for prompt in drawn)
    with raises(TaskError, "prompts-too-long", "all 2", "= 3", "5 tokens"):
        source(tmp_path, ["four", "five5"], limit=3).next()


def test_fingerprints_tell_rows_apart() -> None:
    row = {"a": 1, "b": [1.5, "x"], "c": object()}
    assert fingerprint(row) == fingerprint({**row, "c": object(), INDEX_KEY: 3})
    assert fingerprint(row) != fingerprint({**row, "a": 2})
