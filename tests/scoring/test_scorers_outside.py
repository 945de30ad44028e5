"""Rewards of the user's own code that read responses chunk by chunk, on all runtimes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stretto
from docs_helpers import blocks
from raising import raises
from run_helpers import lines, settings, write_rows
from stretto import GRPOConfig, GRPOTrainer, outside
from stretto.checks import check_run
from stretto.config import Config
from stretto.config.sections import reward_source
from stretto.errors import ConfigError
from stretto.scoring.streaming import StreamingScorer
from stretto.types import Chunk, FinishReason, Prompt, Response, Score, ScorerInfo

NAME = "scorer:repeats.py:Repeats"

WHOLE = """

def whole(completion_ids, **columns):
    pairs = [zip(ids, ids[1:]) for ids in completion_ids]
    return [-float(sum(a == b for a, b in each)) for each in pairs]


def make(name, tokenizer):
    return Repeats(name, tokenizer)


def of_one(name, tokenizer):
    return 1


class Counted(Repeats):
    extends = 0

    def extend(self, chunks):
        Counted.extends += len(chunks)
        super().extend(chunks)
"""


@pytest.fixture(autouse=True)
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that the docs show, and the same reward as a function."""
    (code,) = (code for code in blocks("rewards", "python") if "class Repeats" in code)
    (tmp_path / "repeats.py").write_text(code + WHOLE)
    monkeypatch.chdir(tmp_path)


def scorer(name: str = NAME, given: Any = None) -> StreamingScorer:
    return StreamingScorer(reward_source(name), given, None)


def loaded(name: str = "Repeats") -> Any:
    return outside.load(f"repeats.py:{name}", "reward.sources", object)


def response(number: int, tokens: Sequence[int], finish: Any = None) -> Response:
    prompt = Prompt(0, (1, 2), "p")
    return Response(number, number, prompt, np.array(tokens, np.int32), finish=finish)


def chunk(number: int, start: int, tokens: Sequence[int], finish: Any = None) -> Chunk:
    ids = np.array(tokens, np.int32)
    return Chunk(number, start, ids, np.zeros(len(ids), np.float32), 0, finish)


@pytest.mark.parametrize("name", [NAME, "scorer:repeats.py:make"])
def test_chunks_and_whole_responses_get_the_same_score(name: str) -> None:
    read, stop = scorer(name), FinishReason.STOP
    read.admit([response(1, []), response(2, [5, 5, 7, 7, 7], stop), response(3, [4])])
    read.extend([chunk(1, 0, [5, 5]), chunk(3, 1, [4])])
    read.extend([chunk(1, 2, [7]), chunk(1, 3, [7, 7], stop)])
    read.release([3, 9])
    scores = read.finish([2, 1])
    assert [(s.rollout_id, s.source, s.scalar) for s in scores] == [(2, name, -3), (1, name, -3)]


def pairs(config: Config, folder: Path, reward: Any) -> list[tuple[float, float]]:
    """The scores of all samples of a run: by the scorer, and by the function of whole responses."""
    result = stretto.train(config, reward=[reward, "repeats.py:whole"], out=str(folder / "runs"))
    scores = [line["scores"] for line in lines(result.run_dir / "samples.jsonl")]
    return [(each[first], each["repeats.py:whole"]) for each in scores for first in [*each][:1]]


@pytest.mark.parametrize("runtime", ["inline", "local", "ray"])
def test_a_run_scores_while_it_decodes_as_it_does_at_the_end(
    tiny_folder: Path, tmp_path: Path, runtime: str
) -> None:
    if runtime == "ray":
        pytest.importorskip("ray")
    schedule = {"preset": "oppo", "chunk_tokens": 2}
    rollout = {"batch": 8, "max_new_tokens": 12}
    config = settings(tiny_folder, runtime=runtime, rollout=rollout, schedule=schedule)
    scores = pairs(config, tmp_path, "scorer:repeats.py:Counted")
    assert len(scores) == 16
    assert len({a for a, _ in scores}) > 1
    assert all(a == b for a, b in scores)
    assert loaded("Counted").extends > 16


@pytest.mark.parametrize("kind", ["class", "object"])
def test_a_call_from_python_takes_the_class_or_an_object(
    tiny_folder: Path, tmp_path: Path, kind: str
) -> None:
    reward = loaded() if kind == "class" else loaded()("any name", None)
    scores = pairs(settings(tiny_folder), tmp_path, reward)
    assert len(scores) == 8
    assert all(a == b for a, b in scores)


def test_trls_trainers_take_it_among_reward_funcs(tiny_folder: Path, tmp_path: Path) -> None:
    args = GRPOConfig(
        str(tmp_path / "runs"),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        schedule={"preset": "oppo", "chunk_tokens": 2},
    )
    rows = [{"prompt": "1+1="}] * 2
    rewards = [loaded(), loaded("whole")]
    result = GRPOTrainer(str(tiny_folder), rewards, args, rows).train()
    scores = [line["scores"] for line in lines(result.run_dir / "samples.jsonl")]
    assert len(scores) == 4  # as many as are kept
    assert all(each["Repeats"] == each["whole"] for each in scores)


class Other:
    """A scorer that does all but one thing right."""

    def __init__(self, result: Any = None, **members: Any) -> None:
        vars(self).update(members)
        self.result = result

    def admit(self, responses: Sequence[Response]) -> None: ...
    def extend(self, chunks: Sequence[Chunk]) -> None: ...
    def release(self, rollout_ids: Sequence[int]) -> None: ...

    def finish(self, rollout_ids: Sequence[int]) -> Any:
        return self.result


async def later(_: Any) -> None: ...


def score(number: int = 1, kind: Any = "reward", values: Sequence[float] = (1.0,)) -> Score:
    return Score(number, "", kind, np.array(values))


@pytest.mark.parametrize(
    "result",
    [
        None,
        1.0,
        [1.0],
        [],
        [score(2)],
        [score(), score()],
        [score(kind="values")],
        [score(values=[1, 2])],
    ],
)
def test_anything_but_a_score_for_each_response_is_refused(result: Any) -> None:
    with raises(ConfigError, "scorer-answer", "finish"):
        scorer("other", Other(result)).finish([1])


def test_a_number_that_is_not_finite_is_a_failure_and_none_does_not_apply() -> None:
    first, second, third = score(values=[np.nan]), score(2, values=[]), score(3, values=[1e39])
    scores = scorer("other", Other([first, second, third])).finish([1, 2, 3])
    assert [(s.scalar, bool(s.failure)) for s in scores] == [(None, 1), (None, 0), (None, 1)]


@pytest.mark.parametrize(
    ("members", "code", "fact"),
    [
        ({"info": 1}, "wrong-kind-of-object", "info"),
        ({"info": ScorerInfo("x", "values")}, "scorer-answer", "kind"),
        ({"info": ScorerInfo("x", "reward", follows="actor")}, "scorer-answer", "follows"),
        ({"extend": later}, "scorer-answer", "async def"),
        ({"extend": lambda chunks: chunks.missing}, "outside-raised", "missing"),
    ],
)
def test_a_scorer_that_breaks_the_contract_is_refused(
    members: dict[str, Any], code: str, fact: str
) -> None:
    with raises(ConfigError, code, "reward.sources", fact):
        scorer("other", Other(**members)).extend([])


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("repeats.py:Repeat", "unknown-function"),
        ("missing.py:Repeats", "no-reward-file"),
        ("Repeats", "unknown-source"),
    ],
)
def test_a_scorer_that_is_not_there_is_refused_before_the_run(
    tiny_folder: Path, name: str, code: str
) -> None:
    config = settings(tiny_folder, reward={"sources": (f"scorer:{name}",)})
    with raises(ConfigError, code, "reward.sources"):
        check_run(config)


@pytest.mark.parametrize(
    ("name", "code"), [("whole", "outside-raised"), ("of_one", "wrong-kind-of-object")]
)
def test_code_that_makes_no_scorer_is_refused(name: str, code: str) -> None:
    with raises(ConfigError, code, name):
        scorer(f"scorer:repeats.py:{name}")


def test_what_scores_in_neither_way_is_refused() -> None:
    with raises(ConfigError, "reward-not-callable", "extend"):
        stretto.train("tiny", reward=object())  # type: ignore[arg-type]


def test_given_responses_are_scored_whole(tmp_path: Path) -> None:
    write_rows(tmp_path, [{"prompt": "a", "chosen": "xxx", "rejected": "xyx"}])
    stretto.label("rows.jsonl", out="pairs.jsonl", by=NAME)
    (pair,) = lines(tmp_path / "pairs.jsonl")
    assert (pair["chosen"], pair["rejected"]) == ("xyx", "xxx")
