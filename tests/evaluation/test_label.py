"""Labels from a gold reward: files labelled anew, and pairs made from a policy's responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
from helpers import critic_of
from raising import raises
from stretto import evaluation, tasks
from stretto.cli.main import main
from stretto.config import Config, PairsConfig, RewardModelConfig
from stretto.errors import ConfigError, RewardError, StrettoError, TaskError
from stretto.evaluation.generation import answer, open_engine
from stretto.evaluation.labels import best_and_worst
from stretto.models.load import load_tokenizer
from stretto.scoring.response_buffer import response_text
from stretto.tasks.prompts import PromptSource
from stretto.tasks.supervised_rows import read_pairs
from stretto.types import FinishReason

JUDGE = """
def length(prompts, completions, **_):
    return [float(len(text)) for text in completions]

def known(prompts, completions, bonus, **_):
    # TRL hands over the completion of a conversation as a conversation.
    return [b + (turns[-1]["content"] == "right") for turns, b in zip(completions, bonus)]

def asks(prompts, completions, **_):
    return [len(p) + len(c) / 100 for p, c in zip(prompts, completions)]

def nothing(prompts, completions, **_):
    return [0.0 for _ in completions]

def broken(prompts, completions, **_):
    raise ValueError("no")

def never(prompts, completions, **_):
    return [None for _ in completions]
"""


@pytest.fixture
def judge(tmp_path: Path) -> str:
    (tmp_path / "judge.py").write_text(JUDGE)
    return f"{tmp_path / 'judge.py'}:"


def write(tmp_path: Path, rows: Sequence[dict[str, Any]], name: str = "pairs.jsonl") -> Path:
    file = tmp_path / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def of(file: Path, **data: Any) -> RewardModelConfig:
    return RewardModelConfig.model_validate(
        {
            "threads": 1,
            "model": {"device": "cpu", "dtype": "float32"},
            "data": {"name": str(file), **data},
        }
    )


def test_sides_change_places_where_the_source_says_so(tmp_path: Path, judge: str) -> None:
    rows = [
        {"prompt": "a", "chosen": "xxx", "rejected": "x", "id": 1},
        {"prompt": "b", "chosen": "y", "rejected": "yyyy", "id": 2},
        {"prompt": "c", "chosen": "zz", "rejected": "zy", "id": 3},
        {"prompt": "d", "chosen": "é" * 3, "rejected": "éé", "id": 4},
    ]
    out = tmp_path / "out.jsonl"
    result = evaluation.label_pairs(of(write(tmp_path, rows)), by=f"{judge}length", out=out)
    assert (result.read, result.kept, result.ties, result.flipped) == (4, 3, 1, 1)
    assert result.agreement == pytest.approx(2 / 3)
    assert read(out) == [
        {**rows[0], "chosen_score": 3.0, "rejected_score": 1.0, "flipped": False},
        {
            "prompt": "b",
            "chosen": "yyyy",
            "rejected": "y",
            "id": 2,
            "chosen_score": 4.0,
            "rejected_score": 1.0,
            "flipped": True,
        },
        {**rows[3], "chosen_score": 3.0, "rejected_score": 2.0, "flipped": False},
    ]


def test_functions_get_columns_and_prompts(tmp_path: Path, judge: str) -> None:
    user = [{"role": "user", "content": "hello"}]
    rows: list[dict[str, Any]] = [
        {"prompt": user, "good": "right", "bad": "wrong", "bonus": 2.0},
        {"prompt": user, "good": "wrong", "bad": "right", "bonus": 3.0},
    ]
    file, out = write(tmp_path, rows), tmp_path / "out.jsonl"
    config = of(file, chosen_column="good", rejected_column="bad")
    result = evaluation.label_pairs(config, by=f"{judge}known", out=out)
    assert result.flipped == 1
    assert [(r["good"], r["bad"]) for r in read(out)] == [("right", "wrong")] * 2
    assert [(r["chosen_score"], r["rejected_score"]) for r in read(out)] == [(3, 2), (4, 3)]
    without = write(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}], "no.jsonl")
    with pytest.raises(ConfigError, match="no columns of the dataset: bonus"):
        evaluation.label_pairs(of(without), by=f"{judge}known", out=out)


def test_transcripts_keep_their_form(tmp_path: Path, judge: str) -> None:
    start = "\n\nHuman: Hi\n\nAssistant:"
    rows = [{"chosen": f"{start} No.", "rejected": f"{start} Yes, of course."}]
    out = tmp_path / "out.jsonl"
    assert evaluation.label_pairs(of(write(tmp_path, rows)), by=f"{judge}asks", out=out).kept == 1
    (row,) = read(out)
    assert (row["chosen"], row["rejected"]) == (rows[0]["rejected"], rows[0]["chosen"])
    assert row["chosen_score"] == pytest.approx(len(start) + len(" Yes, of course.") / 100)
    assert row["flipped"] is True


def test_functions_get_the_text_as_it_stands(tmp_path: Path, judge: str) -> None:
    """Also what looks like a special token of some tokenizer."""
    (tmp_path / "judge.py").write_text(
        "def same(prompts, completions, wanted, **_):\n"
        "    return [float(p + c in w) for p, c, w in zip(prompts, completions, wanted)]\n"
    )
    row = {"prompt": "q<bos>", "chosen": "a<eos>b", "rejected": "ab"}
    file = write(tmp_path, [{**row, "wanted": ["q<bos>a<eos>b"]}, {**row, "wanted": ["q<bos>ab"]}])
    out = tmp_path / "out.jsonl"
    evaluation.label_pairs(of(file), by=f"{judge}same", out=out)
    assert [row["chosen"] for row in read(out)] == ["a<eos>b", "ab"]


def test_rows_that_cannot_be_used_are_left_out_where_that_is_asked_for(
    tmp_path: Path, judge: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "chosen": "xx", "rejected": "x"},
        {"prompt": "b", "chosen": "x", "rejected": "x"},
        {"prompt": "", "chosen": "xx", "rejected": "x"},
        {"question": "d", "chosen": "xx", "rejected": "x"},
        {"prompt": "e", "chosen": "\ud83d", "rejected": "x"},
    ]
    file, out = write(tmp_path, rows), tmp_path / "out.jsonl"
    facts = ("row 1: ", "(3 rows ", "data.on_error = 'drop'")
    with raises(TaskError, "equal-sides", *facts):
        evaluation.label_pairs(of(file), by=f"{judge}length", out=out)
    unread = write(tmp_path, [rows[0], rows[-1]], "unicode.jsonl")
    with raises(TaskError, "invalid-unicode", "row 1: "):
        evaluation.label_pairs(of(unread), by=f"{judge}length", out=out)
    result = evaluation.label_pairs(of(file, on_error="drop"), by=f"{judge}length", out=out)
    assert (result.read, result.kept) == (1, 1)
    assert "3 rows of" in capsys.readouterr().err


def test_best_and_worst_by_hand() -> None:
    assert best_and_worst(["a", "b", "c"], [1.0, 3.0, 2.0]) == {
        "chosen": "b",
        "rejected": "a",
        "chosen_score": 3.0,
        "rejected_score": 1.0,
    }
    assert best_and_worst(["a", "b"], [1.0, 1.0]) is None
    assert best_and_worst(["a", "a"], [1.0, 2.0]) is None


def test_a_reward_model_labels_what_it_was_trained_to_read(
    tmp_path: Path, tiny_folder: Path
) -> None:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = critic_of(auto.from_pretrained(tiny_folder))
    model.save_pretrained(tmp_path / "gold")
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.save_pretrained(tmp_path / "gold")
    rows = [
        {"prompt": f"{i}?", "chosen": "ab" * i + "c", "rejected": "q" * (6 - i)}
        for i in range(1, 6)
    ]
    out = tmp_path / "out.jsonl"
    by = f"model:{tmp_path / 'gold'}"
    evaluation.label_pairs(of(write(tmp_path, rows)), by=by, out=out)
    assert len(read(out)) == 5
    for before, after in zip(rows, read(out), strict=True):
        with torch.no_grad():
            scores = {
                before[side]: model(
                    input_ids=torch.tensor(
                        [
                            [
                                *tokenizer(before["prompt"])["input_ids"],
                                *tokenizer(before[side])["input_ids"],
                                tokenizer.eos_token_id,
                            ]
                        ]
                    )
                ).logits.item()
                for side in ("chosen", "rejected")
            }
        assert scores[after["chosen"]] > scores[after["rejected"]]
        assert after["chosen_score"] == pytest.approx(scores[after["chosen"]], abs=1e-5)
        assert after["rejected_score"] == pytest.approx(scores[after["rejected"]], abs=1e-5)
        assert after["flipped"] == (after["chosen"] != before["chosen"])


TURNS = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '~\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def test_a_reward_model_that_ends_turns_in_its_own_way_labels_them_so(
    tmp_path: Path, tiny_folder: Path
) -> None:
    """Its config names '~' as an end token, beside the tokenizer's <eos>."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = critic_of(auto.from_pretrained(tiny_folder))
    model.config.eos_token_id = [ord("~"), 258]
    model.save_pretrained(tmp_path / "gold")
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(tmp_path / "gold")
    out = tmp_path / "out.jsonl"
    row = {"prompt": "hello", "chosen": "yes", "rejected": "no"}
    unusable = {"prompt": [{"role": "user", "content": 1}], "chosen": "a", "rejected": "b"}
    by = f"model:{tmp_path / 'gold'}"
    config = of(write(tmp_path, [unusable, row]), on_error="drop")
    assert evaluation.label_pairs(config, by=by, out=out).kept == 1
    (labelled,) = read(out)
    for side in ("chosen", "rejected"):
        text = f"<user>hello~\n<assistant>{labelled[side]}~"
        with torch.no_grad():
            score = model(input_ids=torch.tensor([list(text.encode())])).logits.item()
        assert labelled[f"{side}_score"] == pytest.approx(score, abs=1e-5)


def test_what_cannot_be_labelled_is_refused(tmp_path: Path, judge: str) -> None:
    file = write(tmp_path, [{"prompt": "a", "chosen": "xxx", "rejected": "x"}])
    out = tmp_path / "out.jsonl"

    def refused(
        kind: type[StrettoError], code: str, by: str, *facts: object, file: Path = file, **rest: Any
    ) -> None:
        with raises(kind, code, *facts):
            evaluation.label_pairs(of(file), by=by, **{"out": out, **rest})

    refused(ConfigError, "task-labels-pairs", "task")
    refused(ConfigError, "output-is-input", f"{judge}length", file, out=file)
    nowhere = tmp_path / "no" / "x"
    refused(ConfigError, "no-output-file", f"{judge}length", nowhere.parent, out=nowhere)
    refused(ConfigError, "no-output-file", f"{judge}length", tmp_path, out=tmp_path)
    refused(RewardError, "reward-failed", f"{judge}broken", "ValueError: no")
    refused(RewardError, "reward-without-number", f"{judge}never", "None")
    refused(TaskError, "only-ties", f"{judge}nothing", "1 rows")
    assert not out.exists()
    equal = write(tmp_path, [{"prompt": "a", "chosen": "x", "rejected": "x"}], "equal.jsonl")
    refused(TaskError, "equal-sides", f"{judge}length", "row 0", file=equal)
    other = write(tmp_path, [{"question": "a", "good": "x"}], "other.jsonl")
    columns = ("'chosen'", "'good', 'question'")
    refused(TaskError, "missing-column", f"{judge}length", *columns, file=other)


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path) -> Config:
    rows = [{"prompt": f"question {i}:", "answer": str(i)} for i in range(6)]
    return Config.model_validate(
        {
            "threads": 1,
            "model": {"dtype": "float32", "device": "cpu"},
            "task": {
                "kind": "dataset",
                "name": str(write(tmp_path, rows, "prompts.jsonl")),
                "columns": {"answer": "answer"},
                "instruction": "Reply.",
            },
            "rollout": {"batch": 4, "max_new_tokens": 5},
        }
    )


def short(config: Config, **rollout: Any) -> Config:
    """Responses that mostly end, by one of many stop strings."""
    stop = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    changed = config.rollout.model_copy(update={"stop": tuple(stop), **rollout})
    return config.model_copy(update={"rollout": changed})


def test_responses_of_a_policy_make_pairs(
    config: Config, tiny_folder: Path, tmp_path: Path, judge: str
) -> None:
    (tmp_path / "judge.py").write_text(
        "def e(prompts, completions, **_):\n"
        "    return [float(sum(map(ord, text)) % 97) for text in completions]\n"
    )
    out = tmp_path / "out.jsonl"
    config = short(config, max_new_tokens=40)
    result = evaluation.label_responses(
        config, policy=str(tiny_folder), by=f"{judge}e", out=out, prompts=5, per_prompt=3
    )
    rows = read(out)
    assert result.read == 5 == result.kept + result.ties + result.empty + result.unended
    assert result.kept == len(rows) > 2
    assert len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        assert row["prompt"].startswith("question ")
        assert row["prompt"].endswith("\nReply.")
        assert row["chosen_score"] == sum(map(ord, row["chosen"])) % 97 > row["rejected_score"]
        assert row["rejected_score"] == sum(map(ord, row["rejected"])) % 97
    pairs, left_out = read_pairs(PairsConfig(name=str(out)))
    assert [(p.prompt, p.chosen) for p in pairs] == [(r["prompt"], r["chosen"]) for r in rows]
    assert not left_out


def test_responses_that_did_not_end_are_left_out(
    config: Config, tiny_folder: Path, tmp_path: Path, judge: str
) -> None:
    """The naive count: prompts with two responses that ended, and the best and worst of those."""
    out, by = tmp_path / "out.jsonl", f"{judge}length"
    config = short(config, max_new_tokens=3)
    result = evaluation.label_responses(
        config, policy=str(tiny_folder), by=by, out=out, prompts=6, per_prompt=3
    )
    own = config.with_model(str(tiny_folder))
    task, tokenizer = tasks.load(own.task, own.seed), load_tokenizer(tiny_folder)
    asked = PromptSource(task, own.task, tokenizer, own.seed).first(6)
    rollouts = answer(open_engine(own, tokenizer)[0], asked, 3)
    expected, unended = {}, 0
    for start in range(0, 18, 3):
        group = [r for r in rollouts[start : start + 3] if r.finish is FinishReason.STOP]
        texts = [response_text(tokenizer, r.tokens, r.finish, own.rollout.stop) for r in group]
        unended += len(group) < 2
        if len({len(t) for t in texts}) > 1 and min(map(len, map(str.strip, texts))):
            expected[rollouts[start].prompt.text] = (max(map(len, texts)), min(map(len, texts)))
    assert 0 < unended < 6
    assert result.unended == unended
    assert sum(r.finish is not FinishReason.STOP for r in rollouts) > 2 * unended
    kept = {row["prompt"]: (len(row["chosen"]), len(row["rejected"])) for row in read(out)}
    assert expected.items() <= kept.items()
    assert result.read == 6 == result.kept + result.ties + result.empty + unended
    with raises(TaskError, "no-ended-responses", "6 prompts", "max_new_tokens = 1"):
        evaluation.label_responses(
            short(config, max_new_tokens=1, stop=()),
            policy=str(tiny_folder), by=by, out=out, prompts=6,
        )  # fmt: skip


def test_a_pair_takes_two_responses(config: Config, tmp_path: Path) -> None:
    with raises(ConfigError, "greater_than_equal", "per_prompt=1"):
        stretto.label_responses(config, by="task", out=tmp_path / "x", per_prompt=1)


def test_the_command_labels_files_and_recipes(
    tmp_path: Path,
    tiny_folder: Path,
    judge: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(
        tmp_path,
        [
            {"prompt": "a", "chosen": "xxx", "rejected": "x"},
            {"prompt": "a", "chosen": "x", "rejected": "xxx"},
            {"prompt": "a", "chosen": "x", "rejected": "y"},
        ],
    )
    assert main(["label", str(file), "--by", "judge.py:length", "--out", "new.jsonl"]) == 0
    printed = capsys.readouterr().out
    assert "ties         1 left out" in printed
    assert "flipped      1 of 2 (0.5000)" in printed
    assert "agreement    0.5000" in printed
    command = ["label", "tiny", "--responses-from", str(tiny_folder), "--by", "judge.py:length"]
    command += ["--out", "made.jsonl", "--prompts", "6", "--samples", "4", "--task.size", "50"]
    command += ["--rollout.max-new-tokens", "5", "--rollout.stop", *"abcdefghijklmnop"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "read         6" in printed
    assert "left out, as fewer than two responses ended" in printed
    for row in read(tmp_path / "made.jsonl"):
        assert row["chosen_score"] == len(row["chosen"]) > row["rejected_score"]
    for arguments, message in (
        ([str(file)], "needs --by"),
        ([str(file), "--by", "judge.py:length"], "needs --out"),
        (["tiny", "--by", "x.py:f", "--out", "y"], "say by which model with --responses-from"),
        ([str(file), "--by", "x.py:f", "--out", "y", "--timeout", "0"], "--timeout 0.0: must be"),
        (["nowhere.jsonl", "--by", "judge.py:length", "--out", "y"], "there is no file"),
        ([*command[1:], "--prompts", "0"], "--prompts 0: must be greater than 0"),
    ):
        assert main(["label", *arguments]) == 2
        assert message in capsys.readouterr().err
