"""Prompts held out by what they ask: training never sees them, and an evaluation says so."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import stretto
from raising import raises
from stretto import runs, tasks
from stretto.config import Config, TaskConfig, recipes
from stretto.errors import ConfigError, TaskError
from stretto.evaluation.measures import measured_on, questions
from stretto.models.tiny import byte_tokenizer
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.tasks.prompts import PromptSource
from stretto.tasks.task import TaskRow, content, is_held_out
from stretto.types import Message

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def sums(**task: Any) -> Config:
    """One-digit sums and differences: 200 different prompts, whatever the seed."""
    small = {"steps": 30, "model": {"name": "tiny"}, "rollout": {"batch": 32}}
    return Config.model_validate({**small, "task": {"settings": SUMS} | task})


def asked(config: Config, count: int = 200, trained: Config | None = None) -> SimpleNamespace:
    """The prompts of an evaluation, and the facts about them."""
    read = measured_on(config)
    task = tasks.load(read.task, read.seed)
    source = PromptSource(task, read.task, byte_tokenizer(), read.seed)
    prompts, facts = questions(source, count, trained or config)
    return SimpleNamespace(prompts=prompts, **facts)


def rows_file(path: Path, texts: list[str]) -> str:
    rows = [{"prompt": text, "answer": str(i)} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# -- by content ----------------------------------------------------------------------------------


def test_rows_that_ask_the_same_are_told_by_what_they_ask() -> None:
    same = [
        TaskRow("What is\n 3 + 4?", {"id": 1}, reference="7", index=0),
        TaskRow(" What is 3 + 4? ", {"id": 2}, index=9),
        TaskRow((Message(role="user", content="What is 3 + 4?"),)),
    ]
    others = [
        TaskRow("What is 3+4?"),
        TaskRow((Message(role="system", content="What is 3 + 4?"),)),
        TaskRow((Message(role="user", content="What is"), Message(role="user", content="3 + 4?"))),
    ]
    assert len({content(row) for row in same}) == 1
    assert len({content(row) for row in [same[0], *others]}) == 4


def test_a_share_is_held_out_by_a_hash_of_the_content() -> None:
    rows = [TaskRow(f"question {i}") for i in range(2000)]

    def place(row: TaskRow) -> float:
        text = json.dumps([["user", row.prompt]])
        return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64

    for share in (0.0, 0.2, 0.5, 0.999):
        held = [is_held_out(row, share) for row in rows]
        assert held == [place(row) < share for row in rows]
        assert sum(held) == pytest.approx(2000 * share, abs=60)  # 2.7 standard deviations


@pytest.mark.parametrize("share", [1.0, -0.1])
def test_a_share_leaves_something_to_train_on(share: float) -> None:
    with raises(ConfigError, "held-out-share", f"task.held_out = {share}"):
        recipes.build({"task": {"held_out": share}}, "here")


def test_a_share_is_a_number_and_rows_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes.build({"task": {"held_out": 0}}, "here").task.held_out_share == 0
    from stretto.cli.main import main

    for value, said in (
        ("0.3", "30% of all different prompts"),
        ("0", "rows of another seed, which may ask what training asks"),
    ):
        assert main(["train", "arithmetic", "--task.held-out", value, "--dry-run"]) == 0
        assert f"evaluation: {said}" in capsys.readouterr().out
    assert main(["train", "tldr", "--task.held-out", "test", "--dry-run"]) == 0
    assert "evaluation: test\n" in capsys.readouterr().out
    with raises(TaskError, "held-out-rows-of-made-task", "task.held_out = 'test'"):
        tasks.load(TaskConfig(held_out="test"), 0)


# -- training ------------------------------------------------------------------------------------


def test_training_draws_every_other_prompt_in_the_same_order() -> None:
    plain, config = sums(size=500).task, sums(size=500, held_out=0.3).task
    task, tokenizer = tasks.load(config, 0), byte_tokenizer()
    source = PromptSource(task, config, tokenizer, 0)
    every = PromptSource(task, plain, tokenizer, 0)
    expected = [p for p in (every.next() for _ in range(1000)) if not held(p.text, 0.3)]
    drawn = [source.next() for _ in expected]
    assert drawn == expected  # two epochs; ids, too: a prompt's id is its place in the order
    assert 0.6 * 1000 < len(drawn) < 0.8 * 1000
    assert list(source.ids()) == [p.id for p in drawn if p.id < 500]
    assert list(source.ids(backwards=True)) == list(source.ids())[::-1]
    assert source.first(7) == drawn[:7]
    assert source.skipped == 0

    again = PromptSource(task, config, tokenizer, 0)
    state = source.state_dict()
    again.load_state_dict(state)
    assert again.next() == source.next()


def held(text: str, share: float) -> bool:
    return is_held_out(TaskRow(text), share)


def test_a_task_of_one_question_cannot_be_split(tmp_path: Path) -> None:
    name = rows_file(tmp_path / "r.jsonl", ["question 1"] * 3)
    place = next(s / 100 for s in range(100) if held("question 1", s / 100))
    config = TaskConfig(kind="dataset", name=name, columns={"answer": "answer"}, held_out=place)
    source = PromptSource(tasks.load(config, 0), config, byte_tokenizer(), 0)
    for draw in (source.next, lambda: source.first(1), lambda: list(source.ids())):
        with raises(TaskError, "all-held-out", place, 3):
            draw()
    less = Config(task=config.model_copy(update={"held_out": place - 0.01}))
    with raises(TaskError, "none-held-out", place - 0.01, 3):
        asked(less)


def test_neither_the_warm_up_nor_a_step_sees_what_is_held_out(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed_up: list[str] = []

    def warm_up(model: Any, examples: Any, *_: Any) -> float:
        warmed_up.extend(e.prompt.text for e in examples)
        return 0.0

    monkeypatch.setattr("stretto.assembly.parts.warm_up", warm_up)
    config = recipes.build(
        {
            "steps": 3,
            "threads": 1,
            "warmup_examples": 120,
            "model": {"name": str(tiny_folder), "dtype": "float32"},
            "task": {"settings": SUMS, "size": 90, "held_out": 0.4},
            "rollout": {"batch": 32, "max_new_tokens": 2},
            "observe": {"samples": 32, "progress": "off"},
        },
        "here",
    )
    run = RunDirectory.create(tmp_path, "run", config)
    runs.train(config, run_dir=run, progress=Progress())
    trained_on = [json.loads(line)["prompt"] for line in run.samples_file.open()]
    assert (len(trained_on), len(warmed_up)) == (96, 120)
    assert not any(held(text, 0.4) for text in trained_on + warmed_up)
    result = stretto.evaluate(run.path, samples=100)
    assert (result.overlap, result.seen) == (
        0,
        f"none of {result.samples} prompts is asked in training",
    )
    assert 60 < result.samples == result.distinct < 100  # about 40 % of 200


# -- evaluation ----------------------------------------------------------------------------------


def test_another_seed_is_no_other_set() -> None:
    """Without a share, what is measured on is what was trained on, and that is said."""
    found = asked(sums())
    assert (found.rows, found.distinct, len(found.prompts)) == ("chain_sum, seed 1000", 200, 200)
    assert found.overlap is not None
    assert found.overlap > 0.95
    n = round(200 * found.overlap)
    assert found.seen == f"{n} of 200 prompts ({found.overlap:.1%}) are asked in training"


@pytest.mark.parametrize("seed", [0, 7])
def test_each_prompt_that_is_held_out_is_asked_once(seed: int) -> None:
    config = sums(held_out=0.25).model_copy(update={"seed": seed})
    found = asked(config)
    task = tasks.load(config.task, seed)
    every = {str(task.row(i).prompt) for i in range(5000)}
    assert len(every) == 200
    expected = {text for text in every if held(text, 0.25)}
    assert {p.text for p in found.prompts} == expected
    assert len(found.prompts) == found.distinct == len(expected) == 44
    assert found.overlap == 0
    assert found.rows == f"chain_sum, seed {seed + 1000}; the 25% of its prompts that are held out"
    assert len(asked(config, 10).prompts) == 10
    without = sums().model_copy(update={"seed": seed})
    assert asked(config, trained=without).overlap > 0.9


def test_the_overlap_is_with_what_a_run_draws_and_not_with_all_rows(tmp_path: Path) -> None:
    name = rows_file(tmp_path / "r.jsonl", [f"question {i}" for i in range(40)])
    rollout = {"batch": 4, "samples_per_prompt": 2}
    task = {"kind": "dataset", "name": name, "columns": {"answer": "answer"}}
    config = Config.model_validate({"steps": 3, "rollout": rollout, "task": task})
    # The order of training and evaluation is one. 3 steps of 2 prompts, and 2 prompts in flight.
    assert asked(config, 40).overlap == 8 / 40
    warm = config.model_copy(update={"warmup_examples": 5})  # from the end of the order
    assert asked(config, 40, warm).overlap == 13 / 40
    long = config.model_copy(update={"steps": 1000, "warmup_examples": 1000})
    assert asked(config, 40, long).overlap == 1.0


def test_files_are_compared_by_what_they_ask(tmp_path: Path) -> None:
    own = rows_file(tmp_path / "own.jsonl", [f"question {i}" for i in range(8)])
    other = rows_file(tmp_path / "other.jsonl", ["question  2", "question 20", "question 20"])
    task = {"kind": "dataset", "name": own, "columns": {"answer": "answer"}}
    config = Config.model_validate({"task": {**task, "held_out": other}})
    found = asked(config)
    assert (len(found.prompts), found.distinct, found.overlap) == (3, 2, 1 / 3)
    halves = asked(Config.model_validate({"task": {**task, "held_out": 0.5}}))
    assert halves.overlap == 0
    assert {p.text for p in halves.prompts} == {
        f"question {i}" for i in range(8) if held(f"question {i}", 0.5)
    }
    gone = config.model_copy(update={"task": config.task.model_copy(update={"name": "gone.jsonl"})})
    found = asked(config, trained=gone)
    assert found.overlap is None
    assert found.seen.startswith("not known: there is no file 'gone.jsonl'")


def test_a_model_is_compared_with_the_rows_of_its_own_run(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        key: rows_file(tmp_path / f"{key}.jsonl", texts)
        for key, texts in {
            "mine": ["question 1", "question 2"],
            "test": ["question 2", "question 3", "question 4", "question 5"],
        }.items()
    }
    task = {"kind": "dataset", "name": names["mine"], "columns": {"answer": "answer"}}
    options = {"threads": 1, "rollout": {"max_new_tokens": 1, "batch": 4}}
    config = Config.model_validate({"task": task, "model": {"name": str(tiny_folder)}, **options})
    run = RunDirectory.create(tmp_path, "run", config)
    run.model.symlink_to(tiny_folder)
    test = config.model_copy(
        update={"task": config.task.model_copy(update={"name": names["test"]})}
    )
    assert stretto.evaluate(run.path).overlap == 1
    assert stretto.evaluate(run.path, dataset=names["test"]).overlap == 0.25
    assert stretto.evaluate(config, dataset=names["test"]).overlap == 0.25  # before training
    assert stretto.evaluate(test, model=run.path).overlap == 0.25
    assert stretto.measure(test, model=run.path).overlap == 0.25
    assert stretto.evaluate(test).overlap == 1


# -- pass@1 and the mean score -------------------------------------------------------------------


def test_partial_credit_is_no_right_answer(tiny_folder: Path) -> None:
    """A random model repeats the last letter, as 'dddddd', which is the first of the answer."""
    result = stretto.evaluate("tiny", model=tiny_folder, samples=100)
    assert (result.pass_at_1, result.pass_at_1_standard_error) == (0, 0)
    assert result.mean_score == pytest.approx(0.35, abs=0.03)
    assert 0 < result.mean_score_standard_error < 0.02


def test_pass_at_1_and_mean_score_with_their_standard_errors(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = [1.0, 0.5, 0.999, 1.0, 0.0, 1.0, 0.25, 0.0]
    monkeypatch.setattr("stretto.evaluation.measures.score_all", lambda *_: scores)
    result = stretto.evaluate("tiny", model=tiny_folder, samples=8, rollout={"max_new_tokens": 1})
    assert result.pass_at_1 == 3 / 8
    assert result.pass_at_1_standard_error == pytest.approx((3 / 8 * 5 / 8 / 8) ** 0.5)
    mean = sum(scores) / 8
    assert result.mean_score == pytest.approx(mean)
    variance = sum((s - mean) ** 2 for s in scores) / 7
    assert result.mean_score_standard_error == pytest.approx((variance / 8) ** 0.5)
