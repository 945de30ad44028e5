"""Filtering with code in a process of its own: conventions, failures, and the process itself."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import inspect
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from docs_helpers import blocks
from helpers import ticket, told
from raising import raises
from scorer_helpers import byte_tokenizer
from stretto import tasks
from stretto.checks.user_functions import check
from stretto.config import TaskConfig
from stretto.config.sections import RewardSource, reward_source
from stretto.errors import ConfigError, EngineError, TaskError
from stretto.schedules.rollout import Rollout
from stretto.scoring.conventions import convention_of
from stretto.scoring.function_host import FunctionHost
from stretto.scoring.functions import Answers, FunctionScorer
from stretto.scoring.response_buffer import response_text
from stretto.stateful import from_plain, to_plain
from stretto.tasks.prompts import render
from stretto.tasks.task import TaskRow, fingerprint
from stretto.types import FinishReason, Message, Prompt, Score
from stretto.workers import child as child_processes

TOKENIZER = byte_tokenizer()
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
Scorers = Callable[..., FunctionScorer]


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def rollouts(responses: Sequence[str], prompts: Sequence[Prompt] | None = None) -> list[Rollout]:
    """Finished rollouts, numbered from 100, that answer 'q0', 'q1', ..."""
    prompts = prompts or [Prompt(i, (0,), f"q{i}", data={"n": i}) for i in range(len(responses))]
    made = []
    for at, (response, prompt) in enumerate(zip(responses, prompts, strict=True)):
        rollout = Rollout(100 + at, prompt, group=at)
        rollout.tokens, rollout.finish = array("i", [*ids(response), 1]), STOP
        made.append(rollout)
    return made


def judge(
    scorer: FunctionScorer, responses: Sequence[str], prompts: Sequence[Prompt] | None = None
) -> list[Score]:
    batch = rollouts(responses, prompts)
    scorer.admit(told(batch))
    return list(scorer.finish([rollout.id for rollout in batch]))


def numbers(scores: Sequence[Score]) -> list[float | None]:
    return [score.scalar for score in scores]


@pytest.fixture
def function(tmp_path: Path) -> Iterator[Scorers]:
    """Write a function to a file and judge with it; all processes end with the test."""
    open_: list[FunctionScorer] = []

    def make(code: str, name: str = "f", **settings: Any) -> FunctionScorer:
        path = tmp_path / "reward.py"
        path.write_text(textwrap.dedent(code))
        scorer = FunctionScorer(
            reward_source(f"{path}:{name}"), TaskConfig(), 0, TOKENIZER, **settings
        )
        open_.append(scorer)
        return scorer

    yield make
    for scorer in open_:
        scorer.close()


# --- conventions ------------------------------------------------------------------------------


def test_a_class_is_made_once_and_keeps_what_it_has(function: Scorers) -> None:
    scorer = function(
        """
        class Judge:
            def __init__(self):
                self.calls = 0
            def __call__(self, completions, **columns):
                self.calls += 1
                return [len(completion) + 10 * self.calls for completion in completions]
        """,
        "Judge",
    )
    assert numbers(judge(scorer, ["a", "bc"])) == [11.0, 12.0]
    assert numbers(judge(scorer, ["a"])) == [21.0]


def test_a_class_that_cannot_be_made_is_named(function: Scorers) -> None:
    with raises(ConfigError, "reward-class-raised", "Judge", "weights"):
        function(
            """
            class Judge:
                def __init__(self, weights):
                    self.weights = weights
                def __call__(self, completions):
                    return self.weights
            """,
            "Judge",
        )


def test_the_class_that_the_docs_show_judges(function: Scorers) -> None:
    (code,) = (code for code in blocks("rewards", "python") if "class Judge" in code)
    assert numbers(judge(function(code, "Judge"), ["oh please", "no"])) == [1.0, 0.0]


def test_trl_gets_everything_by_keyword(function: Scorers, tmp_path: Path) -> None:
    scorer = function(
        f"""
        import json
        def f(prompts, completions, completion_ids, **kwargs):
            given = {{"trainer_state", "log_extra", "log_metric"}}
            columns = {{key: kwargs[key] for key in kwargs.keys() - given}}
            seen = [prompts, completions, completion_ids, columns, sorted(kwargs.keys() & given)]
            open({str(tmp_path / "seen")!r}, "w").write(json.dumps(seen))
            return [float(len(c)) for c in completions]
        """
    )
    assert scorer.info.name.endswith("reward.py:f")
    assert scorer.info.kind == "reward"
    prompts = [
        Prompt(0, (0,), "a", data={"n": 1, "_index": 7}),
        Prompt(1, (0,), "b", data={"m": 2}),
    ]
    scores = judge(scorer, ["xyz", "é"], prompts)
    assert numbers(scores) == [3.0, 1.0]
    assert [score.rollout_id for score in scores] == [100, 101]
    assert all(score.source == scorer.info.name and score.kind == "reward" for score in scores)
    seen = json.loads((tmp_path / "seen").read_text())
    columns = {"n": [1, None], "m": [None, 2]}
    given = ["log_extra", "log_metric", "trainer_state"]
    assert seen == [["a", "b"], ["xyz", "é"], [[*ids("xyz"), 1], [*ids("é"), 1]], columns, given]


def test_trl_gets_conversations_as_messages_and_only_what_it_takes(function: Scorers) -> None:
    scorer = function(
        """
        def f(completions, prompts, n):
            assert prompts[0] == [{"role": "user", "content": "hi"}], prompts
            assert completions[0] == [{"role": "assistant", "content": "yes"}], completions
            return n
        """,
        columns=["n", "other"],
    )
    turn = (Message(role="user", content="hi"),)
    prompt = Prompt(0, (0,), "<|user|>hi", turn, data={"n": 5, "other": object(), "_index": 0})
    assert numbers(judge(scorer, ["yes"], [prompt])) == [5.0]


def test_trl_gets_text_where_the_row_has_text_whatever_the_template(function: Scorers) -> None:
    scorer = function(
        """
        def f(prompts, completions):
            return [float((p, c) == ("hi", "yes")) for p, c in zip(prompts, completions)]
        """
    )
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    rows = [TaskRow("hi"), TaskRow((Message(role="user", content="hi"),))]
    prompts = [render(row, TaskConfig(kind="dataset"), tokenizer) for row in rows]
    assert [p.text for p in prompts] == ["<|user|>hi"] * 2
    assert numbers(judge(scorer, ["yes", "yes"], prompts)) == [1.0, 0.0]


def test_trls_state_and_logs(function: Scorers) -> None:
    scorer = function(
        """
        import math
        import numpy as np
        def f(completions, trainer_state, log_extra=None, log_metric=None):
            log_metric("share", trainer_state.global_step / trainer_state.max_steps)
            log_metric("share", 1.0)
            log_metric("share", math.nan)
            log_metric("odd", None)
            log_extra("seen", [c.upper() for c in completions])
            log_extra("length", np.array([len(c) for c in completions]))
            return [None if c == "b" else 1.0 for c in completions]
        """,
        columns=[],
        max_steps=4,
    )
    scorer.global_step = 2
    scores = judge(scorer, ["aa", "b"])
    assert numbers(scores) == [1.0, None]
    assert [score.extra for score in scores] == [
        {"share": 0.75, "seen": "AA", "length": 2},
        {"share": 0.75, "seen": "B", "length": 1},
    ]


def test_what_trls_state_has_not_is_named(function: Scorers) -> None:
    scorer = function("def f(completions, trainer_state): return [trainer_state.epoch]")
    failure = judge(scorer, ["a"])[0].failure or ""
    assert "trainer_state has global_step and max_steps here, and no 'epoch'" in failure


def test_a_log_of_another_length_is_a_failure(function: Scorers) -> None:
    scorer = function(
        """
        def f(completions, log_extra):
            log_extra("seen", ["one"])
            return [1.0] * len(completions)
        """
    )
    scores = judge(scorer, ["a", "b"])
    assert numbers(scores) == [1.0, 1.0]  # asked about one at a time
    assert [score.extra for score in scores] == [{"seen": "one"}] * 2


def test_async_functions_share_one_event_loop(function: Scorers) -> None:
    scorer = function(
        """
        import asyncio
        loops = set()
        async def f(completions, **kwargs):
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(0)
            return [len(loops)] * len(completions)
        """
    )
    assert numbers(judge(scorer, ["a"])) + numbers(judge(scorer, ["b", "c"])) == [1.0, 1.0, 1.0]


def test_results_may_be_arrays(function: Scorers) -> None:
    scorer = function(
        """
        import numpy as np
        def f(completions): return np.array([len(c) for c in completions], dtype=np.float32) / 2
        """
    )
    assert numbers(judge(scorer, ["abc", "d"])) == [1.5, 0.5]


VERL = {"data_source": "mine", "reward_model": {"style": "rule", "ground_truth": "7"}}


def test_verl_per_sample(function: Scorers) -> None:
    scorer = function(
        """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            assert data_source == "mine"
            if extra_info:
                return {"score": extra_info["bonus"], "acc": 1}
            return solution_str == ground_truth
        """,
        name="compute_score",
        columns=[*VERL, "extra_info"],
    )
    rows: list[dict[str, Any]] = [
        VERL,
        VERL | {"extra_info": {"bonus": 2.5}},
        {"data_source": "mine"},
    ]
    rows.append({"data_source": "mine", "ground_truth": "8"})
    prompts = [Prompt(i, (0,), "q", data=row) for i, row in enumerate(rows)]
    scores = judge(scorer, ["7", "7", "7", "7"], prompts)
    assert numbers(scores) == [1.0, 2.5, None, 0.0]
    assert "row has no ground truth" in (scores[2].failure or "")


@pytest.mark.parametrize("default", ["", "=None", "={'none': 1}"])
def test_verl_without_extra_info(function: Scorers, default: str) -> None:
    scorer = function(
        f"""
        def compute_score(data_source, solution_str, ground_truth, extra_info{default}):
            assert (extra_info is None) == ({default!r} in ("", "=None"))
            return solution_str == ground_truth
        """,
        name="compute_score",
        columns=VERL,
    )
    assert numbers(judge(scorer, ["7"], [Prompt(0, (0,), "q", data=VERL)])) == [1.0]


def test_verls_scores_keep_what_stands_beside_them(function: Scorers) -> None:
    scorer = function(
        """
        import math
        def compute_score(solution_str, ground_truth):
            if solution_str == "pair":
                return True, {"not": "kept"}
            return {"score": 1, "acc": solution_str == ground_truth, "pred": solution_str,
                    "odd": {1: math.nan}}
        """,
        name="compute_score",
    )
    prompts = [Prompt(0, (0,), "q", data=VERL)] * 2
    scores = judge(scorer, ["7", "pair"], prompts)
    assert numbers(scores) == [1.0, 1.0]
    assert scores[0].extra == {"acc": True, "pred": "7", "odd": {"1": None}}
    assert scores[1].extra == {}


@pytest.mark.parametrize(
    "signature",
    [
        "model_output: str, ground_truth: str, timeout_score: float = 0",  # math_verify, prime_math
        "predict_str, ground_truth, use_boxed=True, format_score=0.1",  # geo3k
        "solution_str, ground_truth, method='strict', format_score=0.0, score=1.0",  # gsm8k
        "completion, test_cases, continuous=False",  # prime_code
        "data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None, **kw",
    ],
)
def test_the_signatures_of_verls_own_scores(function: Scorers, signature: str) -> None:
    names = [name.partition("=")[0].partition(":")[0] for name in signature.split(", ")]
    said, truth = names[1:3] if names[0] == "data_source" else names[:2]
    scorer = function(
        f"""
        def compute_score({signature}):
            assert not locals().get("kw"), kw
            return {said} == {truth}
        """,
        name="compute_score",
    )
    assert numbers(judge(scorer, ["7", "8"], [Prompt(0, (0,), "q", data=VERL)] * 2)) == [1.0, 0.0]


def test_verls_batched_scores(function: Scorers) -> None:
    scorer = function(
        """
        def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos):
            assert data_sources == ["mine", "mine"] and extra_infos == [None, {"bonus": 2.5}]
            pairs = zip(solution_strs, ground_truths, extra_infos, strict=True)
            return [{"score": 2 * (s == t), **e} if e else float(s == t) for s, t, e in pairs]
        """,
        name="compute_score_batched",
        columns=[*VERL, "extra_info"],
    )
    prompts = [Prompt(i, (0,), "q", data=VERL | more) for i, more in enumerate(BONUS)]
    scores = judge(scorer, ["7", "7"], prompts)
    assert numbers(scores) == [1.0, 2.0]
    assert [score.extra for score in scores] == [{}, {"bonus": 2.5}]


BONUS: list[dict[str, Any]] = [{}, {"extra_info": {"bonus": 2.5}}]


def test_openrlhfs_logs_are_kept(function: Scorers) -> None:
    scorer = function(
        """
        import torch
        def reward_func(queries, prompts, labels):
            right = torch.tensor([1.0, 0.0])
            return {"rewards": right, "scores": right, "extra_logs": {"acc": right, "all": 0.5}}
        """,
        name="reward_func",
    )
    scores = judge(scorer, ["a", "b"])
    assert numbers(scores) == [1.0, 0.0]
    assert [score.extra for score in scores] == [{"all": 0.5, "acc": 1.0}, {"all": 0.5, "acc": 0.0}]


def test_openrlhf(function: Scorers) -> None:
    scorer = function(
        """
        def reward_func(queries, prompts, labels):
            assert all(q.startswith(p) for q, p in zip(queries, prompts))
            triples = zip(queries, prompts, labels)
            return {"rewards": [float(q == p + label) for q, p, label in triples]}
        """,
        name="reward_func",
    )
    prompts = [Prompt(i, (0,), "q", data={"label": "b"}) for i in range(2)]
    assert numbers(judge(scorer, ["a", "b"], prompts)) == [0.0, 1.0]


def answers_file(tmp_path: Path, answer: str) -> TaskConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "q", "answer": answer}) + "\n")
    return TaskConfig(kind="dataset", name=str(path), columns={"answer": "answer"})


def test_an_answer_that_cannot_be_compared_in_time_is_wrong_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.tasks.task.TIME_LIMIT_S", 1)
    config = answers_file(tmp_path, "12")
    verifier = FunctionHost.open({"task": config.model_dump(), "seed": 0})
    row = {"index": 0, "fingerprint": fingerprint(tasks.load(config, 0).row(0).data)}
    verdicts: list[Any] = []
    responses = ["12", "$9^{9^{9^{9}}}$", "13"]
    samples = [{**row, "response": response} for response in responses]
    verifier.answer({"samples": samples}, verdicts.append)
    assert verdicts == [
        {"at": 0, "value": 1.0},
        {"at": 1, "value": 0.0, "extra": {"timeouts": 1}},
        {"at": 2, "value": 0.0},
    ]


def test_a_verifier_that_hangs_counts_the_answer_as_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code in C does not see math-verify's own time limit."""
    config = answers_file(tmp_path, "1")
    scorer = FunctionScorer(reward_source("task"), config, 0, TOKENIZER)

    def ask(samples: Sequence[Any], timeout_s: float) -> Answers:
        if any(sample["response"] == "hangs" for sample in samples):
            return Answers([], "it gave no answer", late=True)
        return Answers([{"at": at, "value": 1.0} for at in range(len(samples))])

    monkeypatch.setattr(scorer._process, "ask", ask)
    data = {**tasks.load(config, 0).row(0).data, "_index": 0}
    prompts = [Prompt(0, (0,), "q", data=data)] * 3
    scores = judge(scorer, ["1", "hangs", "1"], prompts)
    scorer.close()
    assert [(s.scalar, s.failure, dict(s.extra)) for s in scores] == [
        (1.0, None, {}),
        (0.0, None, {"timeouts": 1}),
        (1.0, None, {}),
    ]
    assert scorer.timeouts == 1


def test_the_tasks_verifier_judges_in_its_process(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    rows = [{"question": f"What is {n}?", "answer": f"It is.\n#### {n}"} for n in (5, 1200)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = TaskConfig(kind="gsm8k", name=str(path))
    task = tasks.load(config, 0)
    prompts = [render(task.row(i), config, TOKENIZER) for i in (0, 1, 1)]
    scorer = FunctionScorer(reward_source("task"), config, 0, TOKENIZER)
    try:
        assert numbers(judge(scorer, ["5", "so \\boxed{1,200}", "5"], prompts)) == [1.0, 1.0, 0.0]
        rows[1]["answer"] = "#### 6"
        path.write_text("\n".join(map(json.dumps, rows)))
        scorer.close()  # started again, it reads the file again
        scores = judge(scorer, ["5", "6"], prompts[:2])
        assert numbers(scores) == [1.0, None]
        assert "is not the row that the prompt was made of" in (scores[1].failure or "")
        scores = judge(scorer, ["5"])
        assert "the prompt is no row of the task" in (scores[0].failure or "")
    finally:
        scorer.close()


@pytest.mark.parametrize("kind", ["procedural", "reasoning-gym"])
def test_made_rows_are_the_same_in_the_judges_process(kind: Any) -> None:
    config = TaskConfig(kind=kind, size=10, extract="last_number")
    task = tasks.load(config, 5)
    prompts = [render(task.row(i), config, TOKENIZER) for i in range(3)]
    scorer = FunctionScorer(reward_source("task"), config, 5, TOKENIZER)
    try:
        right = [f"It is {task.row(i).reference}." for i in range(2)]
        assert numbers(judge(scorer, [*right, "unknown"], prompts)) == [1.0, 1.0, 0.0]
    finally:
        scorer.close()


# --- refused at construction ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "facts"),
    [
        ("def ff(completions): pass", "unknown-function", ["'f'", "Did you mean 'ff'"]),
        ("x = 1", "unknown-function", ["'f'"]),
        ("def f(a, b): pass", "unknown-signature", ["'f(a, b)'", "solution_str"]),
        ("def f(completions, /): pass", "unknown-signature", ["completions"]),
        ("def f(solution_str, ground_truth, extra): pass", "unknown-signature", ["extra"]),
        ("import json\n1 / 0", "import-failed", ["ZeroDivisionError", "reward.py, line 2, in"]),
        ("def f(:", "import-failed", ["SyntaxError: invalid syntax (reward.py, line 1)"]),
        ("import sys\nsys.exit(3)", "import-failed", ["SystemExit: 3"]),
        ("def f(completions, gold): pass", "missing-columns", ["gold", "has: n"]),
    ],
)
def test_a_function_that_cannot_judge_is_refused(
    function: Scorers, text: str, code: str, facts: list[str]
) -> None:
    with raises(ConfigError, code, *facts):
        function(text, columns=["n"])


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("nowhere.py:f", "no-reward-file"),
        ("nowhere.py", "unknown-source"),
        ("shlex:quote", "unknown-signature"),
        ("json.decoder:JSONDecode", "unknown-function"),
        ("json.nowhere:f", "no-reward-module"),
        ("json.decoder.f:f", "no-reward-module"),
    ],
)
def test_a_source_that_is_none_is_refused(source: str, code: str) -> None:
    with raises(ConfigError, code, source.removesuffix(":f").rpartition(":")[2]):
        FunctionScorer(reward_source(source), TaskConfig(), 0, TOKENIZER)


def test_a_parameter_that_is_no_column_is_refused_beside_keywords() -> None:
    with raises(ConfigError, "missing-columns", "obj", "answer"):
        check(reward_source("json:dumps"), {"answer"})


def test_a_task_without_a_judge_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "x"}')
    config = TaskConfig(kind="dataset", name=str(path))
    with pytest.raises(TaskError, match="names no answer"):
        FunctionScorer(reward_source("task"), config, 0, TOKENIZER)
    with pytest.raises(TaskError, match=r"none\.jsonl"):
        FunctionScorer(
            reward_source("task"), TaskConfig(kind="dataset", name="none.jsonl"), 0, TOKENIZER
        )


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in the working directory; its file of rewards has a relative import."""
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test
    inner = tmp_path / "mine" / "rewards"
    inner.mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "mine" / "letters.py").write_text(
        "def vowels(text): return sum(map('aeiou'.count, text))"
    )
    (inner / "__init__.py").write_text("from .short import f as g")
    (inner / "short.py").write_text(
        "from ..letters import vowels\ndef f(completions): return list(map(vowels, completions))"
    )
    monkeypatch.chdir(tmp_path)
    return inner / "short.py"


@pytest.mark.parametrize(
    "source", ["mine/rewards/short.py:f", "mine.rewards.short:f", "mine.rewards:g"]
)
def test_functions_of_a_package(package: Path, source: str) -> None:
    check(reward_source(source), [])
    scorer = FunctionScorer(reward_source(source), TaskConfig(), 0, TOKENIZER)
    try:
        assert numbers(judge(scorer, ["aeb", "x"])) == [2.0, 0.0]
    finally:
        scorer.close()


LENGTHS = "def f(completions): return list(map(len, completions))"


@pytest.mark.parametrize(
    ("file", "init", "code"),
    [
        ("rewards/rewards.py", "", LENGTHS),
        ("mine/rewards.py", "import nowhere", LENGTHS),
        ("v1.2/rewards.py", "", LENGTHS),
        ("mine/my-rewards.py", "", f"from . import rest\n{LENGTHS}"),
    ],
)
def test_a_file_in_any_folder_with_an_init(tmp_path: Path, file: str, init: str, code: str) -> None:
    path = tmp_path / file
    path.parent.mkdir()
    (path.parent / "rest.py").touch()
    (path.parent / "__init__.py").write_text(init)
    path.write_text(code)
    scorer = FunctionScorer(reward_source(f"{path}:f"), TaskConfig(), 0, TOKENIZER)
    try:
        assert numbers(judge(scorer, ["ab"])) == [2.0]
    finally:
        scorer.close()


def test_a_package_that_its_file_needs_and_that_fails_is_named(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("import nowhere")
    (package / "rewards.py").write_text(f"from . import rest\n{LENGTHS}")
    with raises(ConfigError, "import-failed", "No module named 'nowhere'"):
        FunctionScorer(reward_source(f"{package / 'rewards.py'}:f"), TaskConfig(), 0, TOKENIZER)


class Editable:
    """A finder as editable installs have it: of a package in a folder that is on no path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(self.folder)]) if name == "mine" else None


@pytest.mark.parametrize("found", ["path", "finder"])
def test_modules_are_found_as_python_finds_them(
    package: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    root = package.parents[2]
    monkeypatch.chdir("/")
    if found == "path":
        monkeypatch.syspath_prepend(root)
    else:
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable(root)])
    source = reward_source("mine.rewards.short:f")
    check(source, [])
    scorer = FunctionScorer(source, TaskConfig(), 0, TOKENIZER)
    try:
        assert numbers(judge(scorer, ["aeb"])) == [2.0]
    finally:
        scorer.close()


# --- failures ---------------------------------------------------------------------------------

SUMMED = """
import math, os, sys, time
def f(completions, **kwargs):
    return [one(c) for c in completions]
def g(data_source, solution_str, ground_truth):
    return one(solution_str)
def one(c):
    if c == "raise": raise ValueError("no such answer")
    if c == "exit": sys.exit("out")
    if c == "die": os._exit(9)
    if c == "hang": time.sleep(60)
    return {"none": None, "nan": math.nan, "inf": math.inf, "text": "1"}.get(c, 2.0)
"""


@pytest.mark.parametrize("name", ["f", "g"])
def test_each_failure_is_reported_with_its_sample(
    function: Scorers, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    scorer = function(SUMMED, name=name, timeout_s=1.0)
    responses = ["ok", "raise", "none", "nan", "inf", "text", "exit", "die", "hang", "ok"]
    prompts = [Prompt(i, (0,), f"q{i}", data=VERL) for i in range(len(responses))]
    with caplog.at_level(logging.WARNING):
        scores = judge(scorer, responses, prompts)
    assert numbers(scores) == [2.0, *[None] * 8, 2.0]
    assert scores[0].failure is scores[9].failure is None
    assert "asking about" in caplog.text
    assert "one at a time" in caplog.text
    expected = {
        1: "ValueError: no such answer (reward.py, line 8, in one: ",
        2: "it returned None where a number is needed that is finite as float32",
        3: "it returned nan where",
        4: "it returned inf where",
        5: "it returned '1' where",
        6: "SystemExit: out (reward.py, line 9, in one",
        7: "its process ended in the middle of its work (exit code 9)",
        8: "it gave no answer within 1 s and was stopped",
    }
    if name == "f":  # TRL's None is no failure
        del expected[2]
        assert scores[2].failure is None
    for at, what in expected.items():
        failure = scores[at].failure or ""
        assert failure.startswith(f"'{scorer.info.name}' failed on rollout {100 + at}: {what}")
        assert failure.endswith(f"\n  prompt: 'q{at}'\n  response: {responses[at]!r}")
        assert scores[at].values.shape == (0,)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("[1.0]", "it returned 1 scores for 4 samples"),
        ("[1.0] * 5", "it returned 5 scores for 4 samples"),
        ("[]", "it returned 0 scores for 4 samples"),
        ("None", "it returned None instead of a list of numbers"),
        ("1.0", "it returned 1.0 instead of a list of numbers"),
        ("{'scores': [1.0] * 4}", "it returned {'scores': [1.0, 1.0, 1.0, 1.0]} instead of a list"),
    ],
)
@pytest.mark.parametrize("parameters", ["completions", "queries, prompts"])
def test_a_wrong_list_is_no_score_and_is_not_asked_for_again(
    function: Scorers, result: str, says: str, parameters: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One at a time, ``[1.0]`` would pass for what one sample is worth."""
    scores = judge(function(f"def f({parameters}): return {result}"), ["a", "b", "c", "d"])
    assert numbers(scores) == [None] * 4
    assert all(says in (score.failure or "") for score in scores)
    assert "one at a time" not in caplog.text


NONE = """
import numpy as np
def trl(completions): return [one(c) for c in completions]
def array(completions): return np.array([one(c) for c in completions], dtype=object)
def verl(solution_str, ground_truth): return one(solution_str)
def verls(solution_str, ground_truth): return {"score": one(solution_str)}
def openrlhf(queries, prompts): return {"rewards": [one(q[2:]) for q in queries]}
def one(c): return {"number": 0.5, "none": None, "nan": np.nan}[c]
"""


@pytest.mark.parametrize("name", ["trl", "array", "verl", "verls", "openrlhf"])
def test_none_says_does_not_apply_in_trls_convention_alone(function: Scorers, name: str) -> None:
    prompts = [Prompt(i, (0,), f"q{i}", data=VERL) for i in range(3)]
    scores = judge(function(NONE, name=name), ["number", "none", "nan"], prompts)
    assert numbers(scores) == [0.5, None, None]
    assert scores[0].failure is None
    assert (scores[1].failure is None) == (name in ("trl", "array"))
    assert scores[1].values.shape == (0,)
    assert "it returned nan where" in (scores[2].failure or "")
    back = [from_plain(Score, to_plain(score)) for score in scores]
    assert [(s.scalar, s.failure) for s in back] == [(s.scalar, s.failure) for s in scores]


@pytest.mark.parametrize("name", ["f", "g"])
def test_a_number_beyond_float32_is_a_failure(function: Scorers, name: str) -> None:
    """Rewards are trained on as float32: 3.4028235e38 is its largest number."""
    scorer = function(
        """
        def f(completions): return [eval(c) for c in completions]
        def g(solution_str, ground_truth): return eval(solution_str)
        """,
        name=name,
    )
    responses = ["3.4e38", "1e300", "-3.5e38", "10 ** 400", "-3.4028235e38", "1e-300"]
    prompts = [Prompt(i, (0,), "q", data=VERL) for i in range(len(responses))]
    scores = judge(scorer, responses, prompts)
    big, small = torch.tensor([3.4e38, -3.4028235e38]).tolist()
    assert numbers(scores) == [big, None, None, None, small, 0.0]
    for at, said in ((1, "1e+300"), (2, "-3.5e+38"), (3, "1000000")):
        assert f"it returned {said}" in (scores[at].failure or "")
        assert "finite as float32" in (scores[at].failure or "")


def test_judging_one_at_a_time_is_bounded(function: Scorers) -> None:
    scorer = function("import time\ndef f(completions): time.sleep(60)", timeout_s=0.2)
    began_s = time.monotonic()
    scores = judge(scorer, ["a"] * 40)
    assert time.monotonic() - began_s < 10
    assert numbers(scores) == [None] * 40
    assert "gave no answer within 0.2 s" in (scores[0].failure or "")
    assert "not scored, as too much time went into others" in (scores[39].failure or "")


ODD_CELLS = {
    "made": datetime.datetime(2024, 5, 6, 7, 8),
    "raw": b"caf\xc3\xa9",
    "image": b"\xff",
    "price": decimal.Decimal("1.50"),
    "parts": [{"at": datetime.date(2024, 5, 6)}],
}


def test_columns_without_a_json_form_reach_a_process_as_text(function: Scorers) -> None:
    scorer = function(
        """
        def f(completions, made, raw, image, price, parts, **kwargs):
            assert (made, raw, image) == (["2024-05-06T07:08:00"], ["caf\u00e9"], ["/w=="])
            assert (price, parts) == (["1.50"], [[{"at": "2024-05-06"}]])
            return [1.0]
        """
    )
    (score,) = judge(scorer, ["a"], [Prompt(0, (0,), "q", data=ODD_CELLS)])
    assert (score.scalar, score.failure) == (1.0, None)


def test_columns_reach_an_object_as_they_are() -> None:
    found: dict[str, Any] = {}

    def f(completions: list[str], **columns: Any) -> list[float]:
        found.update({key: columns[key] for key in ODD_CELLS})
        return [1.0]

    assert numbers(judge(local(f), ["a"], [Prompt(0, (0,), "q", data=ODD_CELLS)])) == [1.0]
    assert found == {key: [value] for key, value in ODD_CELLS.items()}


def test_a_column_that_cannot_be_passed_is_named(function: Scorers) -> None:
    scorer = function("def f(completions, **kwargs): return [1.0] * len(completions)")
    cycle: list[Any] = []
    cycle.append(cycle)
    cells: list[Any] = [{"odd": cycle}, {"n": {(1, 2): 3}}]
    scores = judge(scorer, ["a", "b"], [Prompt(i, (0,), "q", data=d) for i, d in enumerate(cells)])
    assert numbers(scores) == [None, 1.0]
    assert "column 'odd' cannot be handed to a function" in (scores[0].failure or "")


@pytest.mark.parametrize(
    ("signature", "columns", "required", "environments"),
    [
        ("(environments, **kwargs)", None, ["environments"], True),
        ("(environments)", ["environments"], ["environments"], True),
        ("(environments, answer, **kwargs)", None, ["answer", "environments"], True),
        ("(completions, environments, **kwargs)", None, ["environments"], True),
        ("(**kwargs)", None, [], False),
        ("(*args, **kwargs)", None, [], False),
        ("(answer, **kwargs)", None, ["answer"], False),
        ("(answer, tests=None, **kwargs)", None, ["answer"], False),
        ("(ground_truth, **kwargs)", None, ["ground_truth"], False),
        ("(completions: list, trainer_state, **kwargs)", None, [], False),
    ],
)
def test_whatever_takes_trls_keywords_is_of_trls_convention(
    signature: str, columns: list[str] | None, required: list[str], environments: bool
) -> None:
    function = eval(f"lambda {signature[1:-1].replace(': list', '')}: []")
    found = convention_of(inspect.signature(function), "", "f")
    assert found.convention.library == "TRL"
    assert (found.columns, list(found.required)) == (columns, required)
    assert found.environments == environments


@pytest.mark.parametrize(
    ("signature", "library"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None, **kwargs", "verl"),
        ("solution_strs, ground_truths, **kwargs", "verl"),
        ("queries, prompts, labels, **kwargs", "OpenRLHF"),
    ],
)
def test_other_conventions_come_before_trls(signature: str, library: str) -> None:
    found = convention_of(inspect.signature(eval(f"lambda {signature}: 0")), "", "f")
    assert found.convention.library == library


@pytest.mark.parametrize("signature", ["a, b", "*args", "x, /, **kwargs", "answer"])
def test_positional_and_other_parameters_are_refused(signature: str) -> None:
    with raises(ConfigError, "unknown-signature"):
        convention_of(inspect.signature(eval(f"lambda {signature}: 0")), "", "f")
    with raises(ConfigError, "unknown-signature"):  # verl's, with a parameter that it never gets
        near = "lambda solution_str, ground_truth, method, **kwargs: 0"
        convention_of(inspect.signature(eval(near)), "", "f")


def test_keywords_alone_get_columns_and_completions(function: Scorers) -> None:
    scorer = function(
        """
        def f(**kwargs):
            return [len(c) + n for c, n in zip(kwargs["completions"], kwargs["n"])]
        def g(n, **kwargs): return [10 * k for k in n]
        """
    )
    assert numbers(judge(scorer, ["a", "bc"])) == [1.0, 3.0]
    assert numbers(judge(local(lambda n, **kwargs: [10 * k for k in n]), ["a", "bc"])) == [
        0.0,
        10.0,
    ]


def test_environments_among_any_keywords_are_seen_in_the_code() -> None:
    assert local(lambda **k: [1.0 for _ in k["environments"]], environment=True).looks_inside
    assert not local(lambda **k: [1.0 for _ in k["completions"]], environment=True).looks_inside


GATHERED = """
import asyncio, sys
inside = most = 0
async def f(data_source, solution_str, ground_truth, extra_info=None):
    global inside, most
    inside += 1
    most = max(most, inside)
    await asyncio.sleep(0.05 if solution_str == "0" else 0.01)
    inside -= 1
    if solution_str == "3": raise ValueError("no such answer")
    if solution_str == "4": sys.exit("out")
    if solution_str == "5": raise asyncio.CancelledError
    return {"score": float(solution_str), "most": most}
"""


@pytest.mark.parametrize("process", [True, False])
def test_verls_asynchronous_functions_are_gathered(function: Scorers, process: bool) -> None:
    """The first answers last. At most 64 are awaited together."""
    names: dict[str, Any] = {}
    exec(GATHERED, names)
    scorer = function(GATHERED) if process else local(names["f"])
    prompts = [Prompt(i, (0,), "q", data=VERL) for i in range(80)]
    scores = judge(scorer, [str(i) for i in range(80)], prompts)
    expected = [None if i in (3, 4, 5) else float(i) for i in range(80)]
    assert numbers(scores) == expected
    assert max(s.extra["most"] for s in scores if s.extra) == 64
    assert "ValueError: no such answer" in (scores[3].failure or "")
    assert "SystemExit: out" in (scores[4].failure or "")
    assert "CancelledError" in (scores[5].failure or "")


def test_prints_and_input_do_not_reach_the_channel(
    function: Scorers, capfd: pytest.CaptureFixture[str]
) -> None:
    scorer = function(
        """
        import os, subprocess, sys
        print('{"ready": 1}')
        def f(completions):
            print('{"at": 0, "value": 9}', flush=True)
            os.write(1, b'{"answer": null}\\n')
            subprocess.run(["echo", "from a child"])
            assert sys.stdin.read() == ""
            return [1.0]
        """
    )
    assert numbers(judge(scorer, ["a"])) == [1.0]
    out, err = capfd.readouterr()
    assert out == ""
    assert '{"at": 0, "value": 9}' in err
    assert "from a child" in err


def test_large_batches_pass_both_pipes(function: Scorers) -> None:
    scorer = function("def f(completions): return [len(c) for c in completions]")
    long = [Prompt(i, (0,), "p" * 100_000) for i in range(50)]
    responses = ["x" * (i + 1) for i in range(50)]
    assert numbers(judge(scorer, responses, long)) == [float(i + 1) for i in range(50)]


@pytest.mark.parametrize(
    ("text", "finish", "stop", "expected"),
    [
        ("a b#c", STOP, ["#"], "a b"),
        ("a b#c", LENGTH, ["#"], "a b#c"),
        ("a b#c", STOP, ["c", "b"], "a "),
        ("a b .", STOP, ["x"], "a b ."),
    ],
)
def test_response_text(text: str, finish: FinishReason, stop: list[str], expected: str) -> None:
    assert response_text(TOKENIZER, [0, *ids(text), 1], finish, stop) == expected


def test_the_stop_string_that_ended_a_response_is_not_judged(function: Scorers) -> None:
    scorer = function("def f(completions): return [len(c) for c in completions]", stop=["#"])
    assert numbers(judge(scorer, ["ab#", "abc"])) == [2.0, 3.0]


# --- the process ------------------------------------------------------------------------------


def process_id(scorer: FunctionScorer) -> int:
    process = scorer._process._process
    assert process
    return process.pid


def wait_until_gone(pid: int, limit_s: float = 5.0) -> None:
    give_up_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_s:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":  # an orphan that nobody has waited for yet
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} is still there after {limit_s} s")


def test_a_hang_costs_the_process_and_its_children(function: Scorers, tmp_path: Path) -> None:
    scorer = function(
        f"""
        import os, subprocess, time
        def f(completions):
            if completions == ["hang"]:
                child = subprocess.Popen(["sleep", "60"])
                open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
                child.wait()
            return [float(os.getpid())]
        """,
        timeout_s=1.0,
    )
    first = process_id(scorer)
    assert numbers(judge(scorer, ["hang"])) == [None]
    wait_until_gone(first)
    wait_until_gone(int((tmp_path / "child").read_text()))
    (score,) = judge(scorer, ["ok"])
    assert score.failure is None
    assert process_id(scorer) != first
    last = process_id(scorer)
    scorer.close()
    wait_until_gone(last)


PROGRAM = """
import os, sys
from types import SimpleNamespace
import numpy as np
from stretto.config import TaskConfig
from stretto.config.sections import RewardSource, reward_source
from stretto.scoring.functions import FunctionScorer
from stretto.types import FinishReason, Prompt, Response

def judged(source, **options):
    tokenizer = SimpleNamespace(decode=lambda tokens, **_: bytes(tokens).decode())
    scorer = FunctionScorer(source, TaskConfig(), 0, tokenizer, **options)
    ends = {"version": 0, "finish": FinishReason.LENGTH}
    tokens = [np.frombuffer(text, np.uint8) for text in (b"abc", b"d")]
    scorer.admit([Response(i, i, Prompt(i, (0,), ""), t, **ends) for i, t in enumerate(tokens)])
    return [score.scalar for score in scorer.finish([0, 1])]
"""
"""The start of a program of its own, without torch, which takes seconds to import."""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_process_ends_with_its_parent_without_a_word(tmp_path: Path, how: int) -> None:
    (tmp_path / "reward.py").write_text(
        "import os, time\n"
        "def f(completions):\n"
        "    open('judge', 'w').write(str(os.getpid()))\n"
        "    os.rename('judge', 'judging')\n"
        "    time.sleep(60)\n"
    )
    program = """
        try:
            judged(reward_source("reward.py:f"))
        except KeyboardInterrupt:
            sys.exit(5)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + textwrap.dedent(program)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    marker = tmp_path / "judging"
    give_up_s = time.monotonic() + 30
    while not marker.exists() and parent.poll() is None and time.monotonic() < give_up_s:
        time.sleep(0.02)
    os.killpg(parent.pid, how)  # as the terminal does: to the whole foreground group
    _, said = parent.communicate(timeout=10)
    assert said == b""
    assert parent.returncode == (5 if how == signal.SIGINT else -signal.SIGKILL)
    wait_until_gone(int(marker.read_text()))


TRACED = """
import os, signal, time
from pathlib import Path
calls, imports = Path({folder!r}, "calls"), Path({folder!r}, "imports")
def count(path):
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    return len(path.read_text())
if count(imports) in {killed_starts}:
    os.kill(os.getpid(), signal.SIGKILL)
def f(completions):
    if count(calls) in {calls}:
        {act}
    return [float(len(c)) for c in completions]
"""
"""A function that counts its calls and imports in files, and does something to itself in some."""


def traced(tmp_path: Path, act: str, calls: Sequence[int], starts: Sequence[int] = ()) -> str:
    return TRACED.format(folder=str(tmp_path), act=act, calls=list(calls), killed_starts=starts)


def counted(tmp_path: Path, name: str) -> int:
    return len((tmp_path / name).read_text())


@pytest.mark.parametrize("responses", [["abc"], ["abc", "d"]])
@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP"])
def test_a_killed_or_paused_process_is_asked_once_more(
    function: Scorers, tmp_path: Path, number: str, responses: list[str]
) -> None:
    heard = "signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # nohup would have it ignored
    code = traced(tmp_path, f"{heard}; os.kill(os.getpid(), signal.{number})", [1])
    scorer = function(code, timeout_s=1.0 if number == "SIGSTOP" else 20.0)
    scores = judge(scorer, responses)
    assert numbers(scores) == [float(len(r)) for r in responses]
    assert (counted(tmp_path, "calls"), counted(tmp_path, "imports")) == (2, 2)


def disappears(pid: int) -> bool:
    """Whether a process that was killed is soon reaped, without a call that asks for it."""
    return soon(lambda: not Path(f"/proc/{pid}").exists())


def ended(pid: int) -> bool:
    """Whether an orphan soon ends; it is not ours to reap."""
    stat = Path(f"/proc/{pid}/stat")
    return soon(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")


def soon(holds: Callable[[], bool]) -> bool:
    for _ in range(1000):
        if holds():
            return True
        time.sleep(0.01)
    return False


def test_a_killed_process_takes_its_children_along_and_its_number_is_not_used_again(
    function: Scorers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread does so at once; later the number may be that of somebody else's group."""
    code = """
    import subprocess
    child = subprocess.Popen(["sleep", "1000"])
    def f(completions): return [float(child.pid)] * len(completions)
    """
    scorer = function(textwrap.dedent(code))
    (child,) = numbers(judge(scorer, ["a"]))
    killed = process_id(scorer)
    os.kill(killed, signal.SIGKILL)
    assert disappears(killed)
    assert ended(int(child))
    groups: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: groups.append(group))
    scorer.close()
    assert killed not in groups


def test_a_process_that_is_killed_between_calls_costs_nothing(function: Scorers) -> None:
    scorer = function("def f(completions): return [float(len(c)) for c in completions]")
    for response in ("ab", "abc"):
        killed = process_id(scorer)
        os.kill(killed, signal.SIGKILL)
        assert disappears(killed)
        assert numbers(judge(scorer, [response])) == [float(len(response))]


@pytest.mark.parametrize("killed_starts", [[1], [2], [1, 3]])
def test_a_process_that_is_killed_while_it_starts_is_started_again(
    function: Scorers, tmp_path: Path, killed_starts: list[int]
) -> None:
    first_call = 1 if killed_starts != [1] else 0
    act = "os.kill(os.getpid(), signal.SIGKILL)"
    scorer = function(traced(tmp_path, act, [first_call], killed_starts))
    assert numbers(judge(scorer, ["abc"])) == [3.0]
    assert counted(tmp_path, "imports") == 1 + len(killed_starts) + first_call


def test_a_process_that_is_killed_at_every_start_fails_its_samples(
    function: Scorers, tmp_path: Path
) -> None:
    scorer = function(traced(tmp_path, "pass", [], [2, 3, 4, 5]))
    os.kill(process_id(scorer), signal.SIGKILL)
    (score,) = judge(scorer, ["abc"])
    assert "was killed (exit code -9) while it was starting" in (score.failure or "")
    assert counted(tmp_path, "imports") == 1 + 2


@pytest.mark.parametrize(
    ("act", "calls", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 2, "(exit code -9)"),
        ("os.abort()", 1, "(exit code -6)"),
        ("os._exit(9)", 1, "(exit code 9)"),
        ("time.sleep(60)", 1, "gave no answer within 1 s"),
    ],
)
def test_what_a_function_does_to_itself_is_its_answer(
    function: Scorers, tmp_path: Path, act: str, calls: int, says: str
) -> None:
    """A kill may have come from outside, and is tried once more."""
    scorer = function(traced(tmp_path, act, range(1, 9)), timeout_s=1.0)
    (score,) = judge(scorer, ["abc"])
    assert says in (score.failure or "")
    assert counted(tmp_path, "calls") == calls


@pytest.mark.parametrize("after", [0.0, 4.6])
def test_a_pause_of_the_run_s_own_process_takes_no_time(tmp_path: Path, after: float) -> None:
    """As by Ctrl-Z and fg. The answer comes during the pause of 4.5 s, or after it."""
    (tmp_path / "reward.py").write_text(
        "import os, signal, subprocess, time\n"
        "def f(completions):\n"
        "    driver = os.getppid()\n"
        "    subprocess.Popen(f'sleep 4.5; kill -CONT {driver}', shell=True)\n"
        "    os.kill(driver, signal.SIGSTOP)\n"  # by this process, as a shell starts late if busy
        f"    time.sleep({after})\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    program = PROGRAM + "\nprint(judged(reward_source('reward.py:f'), timeout_s=4.0))\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("[3.0, 1.0]\n", "")


def test_a_pause_between_two_waits_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "SLICE_S", 0.05)
    deadline = child_processes.Deadline(0.2)
    time.sleep(0.3)
    inbox: SimpleQueue[str] = SimpleQueue()
    writer = threading.Timer(0.1, inbox.put, ("answer",))
    writer.start()
    assert deadline.next(inbox) == "answer"
    writer.join()


def test_a_process_that_cannot_start_again_says_so(function: Scorers, tmp_path: Path) -> None:
    scorer = function("def f(completions): return [1.0]")
    scorer.close()
    (tmp_path / "reward.py").write_text("1 / 0")
    with raises(ConfigError, "import-failed", "ZeroDivisionError"):
        judge(scorer, ["a"])


# --- functions that are objects ---------------------------------------------------------------


def local(function: Callable[..., Any], **settings: Any) -> FunctionScorer:
    return FunctionScorer(
        RewardSource("mine"), TaskConfig(), 0, TOKENIZER, function=function, **settings
    )


def test_an_object_is_judged_with_in_each_convention() -> None:
    offset = 0.5

    def trl(completions: list[str], prompts: list[str], n: list[int]) -> list[float]:
        assert prompts == ["q0", "q1"]
        return [len(c) + offset + k for c, k in zip(completions, n, strict=True)]

    def verl(data_source: str, solution_str: str, ground_truth: str) -> dict[str, float]:
        return {"score": float(solution_str == ground_truth)}

    def openrlhf(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
        return [len(q) - len(p) for q, p in zip(queries, prompts, strict=True)]

    scorer = local(trl, columns=["n"])
    scores = judge(scorer, ["abc", "d"])
    assert numbers(scores) == [3.5, 2.5]
    assert {s.source for s in scores} == {"mine"}
    assert (scorer.info.kind, scorer.info.streams, scorer.info.follows) == ("reward", False, "")
    prompt = Prompt(0, (0,), "", data=VERL)
    assert numbers(judge(local(verl), ["7", "8"], [prompt] * 2)) == [1.0, 0.0]
    assert numbers(judge(local(openrlhf, columns=["label"]), ["xy", ""])) == [2.0, 0.0]


def test_functions_follow_no_model() -> None:
    with raises(EngineError, "scorer-frozen", "mine"):
        local(lambda completions: []).load(ticket(1, ""))


class Keeps:
    """A judge with a state, as an object that is called."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, completions: list[str], **_: Any) -> list[int]:
        self.seen += completions
        return [len(self.seen)] * len(completions)

    def method(self, completions: list[str]) -> list[int]:
        return self(completions)


def test_objects_methods_and_partials_are_called_in_this_process() -> None:
    keeps = Keeps()
    scorer = local(keeps)
    assert numbers(judge(scorer, ["a", "b"])) + numbers(judge(scorer, ["c"])) == [2.0, 2.0, 3.0]
    assert keeps.seen == ["a", "b", "c"]
    assert numbers(judge(local(keeps.method), ["d"])) == [4.0]
    scaled = partial(lambda completions, by: [by * len(c) for c in completions], by=3)
    assert numbers(judge(local(scaled), ["ab"])) == [6.0]
    scorer.close()
    assert numbers(judge(scorer, ["e"])) == [5.0]


def test_an_async_object_is_waited_for() -> None:
    loops = set()

    async def f(completions: list[str]) -> list[float]:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [len(c) for c in completions]

    scorer = local(f)
    assert numbers(judge(scorer, ["abc"])) + numbers(judge(scorer, ["d"])) == [3.0, 1.0]
    assert len(loops) == 1


def test_an_object_may_run_event_loops_although_the_thread_runs_one() -> None:
    async def length(text: str) -> float:
        await asyncio.sleep(0)
        return len(text)

    def trl(completions: list[str]) -> list[float]:
        return [asyncio.run(length(c)) for c in completions]

    async def verl(solution_str: str, ground_truth: str, data_source: str = "") -> float:
        return await length(solution_str)

    async def judged(function: Callable[..., Any]) -> list[float | None]:
        loop = asyncio.get_running_loop()
        prompts = [Prompt(i, (0,), "q", data={"ground_truth": ""}) for i in range(2)]
        values = numbers(judge(local(function), ["ab", "c"], prompts))
        assert asyncio.get_running_loop() is loop
        return values

    assert asyncio.run(judged(trl)) == asyncio.run(judged(verl)) == [2.0, 1.0]


def test_what_goes_wrong_in_an_object_is_a_failure_of_the_sample() -> None:
    def f(completions: list[str]) -> list[float | str | None]:
        if "bomb" in completions:
            raise KeyError("kaputt")
        return [{"none": None, "text": "1"}.get(c, 1.0) for c in completions]

    scores = judge(local(f), ["a", "none", "bomb", "text"])
    assert numbers(scores) == [1.0, None, None, None]
    assert scores[1].failure is None
    assert "it returned '1' where a number is needed" in str(scores[3].failure)
    assert "KeyError: 'kaputt' (test_functions.py, line " in str(scores[2].failure)
    assert "raise KeyError" in str(scores[2].failure)
    assert "'mine' failed on rollout 102" in str(scores[2].failure)


def test_ctrl_c_in_an_object_is_the_user_s_own() -> None:
    def f(completions: list[str]) -> list[float]:
        raise KeyboardInterrupt

    def one(solution_str: str, ground_truth: str) -> float:
        raise KeyboardInterrupt

    prompt = Prompt(0, (0,), "", data=VERL)
    for function in (f, one):
        with pytest.raises(KeyboardInterrupt):
            judge(local(function), ["a"], [prompt])


def test_objects_that_cannot_judge_are_refused() -> None:
    def odd(a: int, b: int) -> int:
        return a + b

    with raises(ConfigError, "unknown-signature", "'odd(a: ", "test_functions.py'"):
        local(odd)
    with raises(ConfigError, "missing-columns", "answer"):
        local(lambda completions, answer: [0.0], columns=["n"])
    with raises(ConfigError, "unknown-signature", "'max'"):
        local(max)


def test_what_an_object_does_to_its_arguments_stays_there() -> None:
    """The rollouts that are trained on are not the lists that it gets."""

    def f(completion_ids: list[list[int]]) -> list[float]:
        for ids_ in completion_ids:
            ids_.clear()
        return [0.0] * len(completion_ids)

    batch = rollouts(["abc"])
    scorer = local(f)
    scorer.admit(told(batch))
    scorer.finish([100])
    assert list(batch[0].tokens) == [*ids("abc"), 1]


# --- functions that fork ----------------------------------------------------------------------

FORKS = """
import os, sys, time
def f(completions, **kwargs):
    child = os.fork()
    if child:
        {wait}
        return [float(len(c)) for c in completions]
    {child}
"""


REAPED, NOT_REAPED = "os.waitpid(child, 0)", "os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)"


@pytest.mark.parametrize(
    ("child", "wait"),
    [
        *itertools.product(
            ["return [9.0] * len(completions)", "sys.exit(3)", "raise ValueError"],
            [REAPED, NOT_REAPED],
        ),
        ("return time.sleep(60)", "pass"),
    ],
)
def test_what_a_forked_child_says_is_no_answer(function: Scorers, child: str, wait: str) -> None:
    """The child falls through, exits, raises, or outlives the call; the parent's numbers count."""
    scorer = function(FORKS.format(child=child, wait=wait), timeout_s=5.0)
    for lengths in [(6, 8), (20, 30, 40), (1,), (7, 5)]:
        assert numbers(judge(scorer, ["x" * n for n in lengths])) == list(map(float, lengths))


def test_a_forked_child_ends_as_python_would_end_it(function: Scorers) -> None:
    """What runs in a child and is judged by its exit status is judged rightly."""
    scorer = function(
        """
        import os, sys
        def f(completions):
            return [status_of(c) for c in completions]
        def status_of(c):
            child = os.fork()
            if child:
                return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if c == "raise":
                raise ValueError("in the child")
            sys.exit({"none": None, "text": "bad"}.get(c) if c.isalpha() else int(c))
        """
    )
    assert numbers(judge(scorer, ["0", "7", "none", "text", "raise"])) == [0, 7, 0, 1, 1]


def test_the_end_of_the_process_is_seen_while_its_children_live(function: Scorers) -> None:
    scorer = function(
        """
        import os, time
        def f(completions):
            if os.fork():
                os._exit(9)
            time.sleep(60)
        """,
        timeout_s=20.0,
    )
    began_s = time.monotonic()
    (score,) = judge(scorer, ["a"])
    assert "its process ended in the middle of its work (exit code 9)" in (score.failure or "")
    assert time.monotonic() - began_s < 10


def test_a_file_that_forks_when_it_is_imported(function: Scorers) -> None:
    scorer = function(
        """
        import os
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        else:
            raise SystemExit
        def f(completions): return [2.0] * len(completions)
        """
    )
    assert numbers(judge(scorer, ["a"])) + numbers(judge(scorer, ["b", "c"])) == [2.0, 2.0, 2.0]


POOLS = """
import multiprocessing, os
from concurrent.futures import ProcessPoolExecutor
fork = multiprocessing.get_context("fork")
def length(c): return float(len(c))
def forked(completions):
    with fork.Pool(2) as pool:
        return pool.map(length, completions)
def spawned(completions):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return pool.map(length, completions)
def executor(completions):
    with ProcessPoolExecutor(2, mp_context=fork) as executor:
        return list(executor.map(length, completions))
kept = []
def stays(completions):
    kept.extend([fork.Pool(2)] if not kept else [])
    return kept[0].map(length, completions)
"""


@pytest.mark.parametrize("name", ["forked", "spawned", "executor", "stays"])
def test_functions_may_use_pools_of_processes(function: Scorers, name: str) -> None:
    scorer = function(POOLS, name=name, timeout_s=20.0)
    for lengths in [(3, 1), (2, 5, 4)]:
        assert numbers(judge(scorer, ["x" * n for n in lengths])) == list(map(float, lengths))


@pytest.mark.parametrize(
    "lines",
    [
        ['{"request": 2, "pid": PID, "at": 0, "value": 9}'],
        [
            '{"request": 3, "pid": 1, "at": 0, "value": 9}',
            '{"request": 3, "pid": 1, "answer": null}',
        ],
        ['{"request": 3, "pid": PID, "at": 1, "value": 9}'],
        ['{"request": 3, "pid": PID, "answer": null}'],
        ['{"at": 0, "value": 9}', '{"answer": null}'],
        ["no JSON"],
        ["[]"],
    ],
)
def test_a_reply_that_does_not_match_is_no_verdict(function: Scorers, lines: list[str]) -> None:
    """The function finds the pipe, and answers there for another request, process or sample."""
    scorer = function(
        f"""
        import os, stat
        def f(completions):
            if completions[0] == "forge":
                for fd in range(3, 100):
                    try:
                        if stat.S_ISFIFO(os.fstat(fd).st_mode):
                            for line in {lines!r}:
                                line = line.replace("PID", str(os.getpid())) + "\\n"
                                os.write(fd, line.encode())
                    except OSError:
                        pass
            return [1.0] * len(completions)
        """,
        timeout_s=5.0,
    )
    assert numbers(judge(scorer, ["a"])) == [1.0]
    (score,) = judge(scorer, ["forge"])
    assert score.failure is not None
    assert "was stopped" in score.failure
    assert numbers(judge(scorer, ["a", "b"])) == [1.0, 1.0]


def test_a_child_of_an_object_does_not_go_on_as_the_trainer() -> None:
    program = """
        def f(completions):
            child = os.fork()
            if child:
                os.waitpid(child, 0)
            return [float(len(c)) for c in completions]
        print(judged(RewardSource("mine"), function=f), flush=True)
    """
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM + textwrap.dedent(program)],
        capture_output=True, text=True, timeout=60, check=True, start_new_session=True,
    )  # fmt: skip
    assert ended.stdout == "[3.0, 1.0]\n"
