"""What every scorer must do, and the simulated one with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_helpers import Virtual
from helpers import critic_of, llama, told
from raising import raises
from scorer_helpers import begun, byte_rollout, reward_model
from stretto.config import TaskConfig
from stretto.config.sections import reward_source
from stretto.errors import LifecycleError
from stretto.models.tiny import byte_tokenizer
from stretto.runtime.sim.cluster import ScorerRole
from stretto.runtime.sim.costs import PrefillCost
from stretto.runtime.sim.resources import Device, SimWorker
from stretto.runtime.sim.sim_roles import SimScorer
from stretto.schedules.rollout import Rollout
from stretto.scoring.functions import FunctionScorer
from stretto.scoring.model_scorers import RewardModelScorer, critic_scorer, reference_scorer
from stretto.testing import World, make_chunk
from stretto.testing.contracts import chunk_of, scores_gap, scores_of

Make = Callable[..., Any]


def simulated(kind: Any) -> Any:
    worker = SimWorker("it", [Device(0)], World([]))
    reward = lambda id_, _: id_ / 2  # noqa: E731
    return Virtual(SimScorer(worker, ScorerRole(name="x", kind=kind, cost=PrefillCost()), reward))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make a scorer by name; ``slots`` are rollouts that a model follows while they grow."""
    stack, tokenizer = ExitStack(), byte_tokenizer()

    def function() -> Any:
        file = tmp_path / "judge.py"
        file.write_text("def f(completions, **_):\n    return [len(c) / 2 for c in completions]\n")
        scorer = FunctionScorer(reward_source(f"{file}:f"), TaskConfig(), 0, tokenizer)
        stack.callback(scorer.close)
        return scorer

    def made(name: str, slots: int = 0) -> Any:
        actor = llama(vocabulary=259)
        if name == "reward model":
            return RewardModelScorer("it", reward_model(), tokenizer, tokenizer, 64, slots=slots)
        if name == "reference":
            return reference_scorer(actor, 1.0, 64, slots=slots)
        if name == "critic":
            return critic_scorer(critic_of(actor), 64, slots=slots)
        return function() if name == "function" else simulated(name.split()[1])

    yield made
    stack.close()


NAMES = [
    "reward model",
    "reference",
    "critic",
    "function",
    "simulated reward",
    "simulated values",
]


def rollouts() -> list[Rollout]:
    texts = ["be", "a longer one", "", "off", "be"]
    return [byte_rollout(i, f"p{i}", text, stop=i != 3) for i, text in enumerate(texts)]


@pytest.mark.parametrize("name", NAMES)
def test_there_is_one_score_each_in_the_order_asked(name: str, make: Make) -> None:
    scorer, made = make(name), rollouts()[::-1]
    scores = scores_of(scorer, made)
    assert [s.rollout_id for s in scores] == [r.id for r in made]
    for score, r in zip(scores, made, strict=True):
        facts = (scorer.info.name, scorer.info.kind, None)
        assert (score.source, score.kind, score.failure) == facts
        assert len(score.values) == (1 if scorer.info.kind == "reward" else len(r))
        assert np.isfinite(score.values).all()


@pytest.mark.parametrize("slots", [0, 2, 8])
@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_any_size_make_the_same_scores(
    name: str, size: int, slots: int, make: Make
) -> None:
    """Bit for bit, unless a model reads responses while they grow."""
    gap = scores_gap(make(name), make(name, slots), rollouts(), size)
    assert gap <= (1e-4 if slots else 0)


@pytest.mark.parametrize("name", [n for n in NAMES if "simulated" not in n])
def test_what_a_scorer_cannot_do_is_refused_and_forgets_nothing(name: str, make: Make) -> None:
    scorer, (going, done) = make(name), rollouts()[:2]
    given = told([begun(going, 1), done])
    scorer.admit(given)
    for ids, unknown in (([1, 0], 0), ([9], 9)):
        with raises(LifecycleError, "response-not-ended", f"rollout {unknown}"):
            scorer.finish(ids)
    for r, start in ((done, len(done)), (going, 2), (going, 0)):
        with raises(LifecycleError, "chunk-not-next", f"tokens {start}", f"rollout {r.id}"):
            scorer.extend([make_chunk(r.id, start, (1,), (0.0,), 0)])
    scorer.extend([chunk_of(going, 1, 99)])
    assert len(given[0].tokens) == 1  # the scorer has a copy of its own
    expected = {s.rollout_id: s.values for s in scores_of(make(name), [going, done])}
    for score, id_ in zip(scorer.finish([1, 0]), (1, 0), strict=True):
        assert score.rollout_id == id_
        assert score.values == pytest.approx(expected[id_], abs=1e-5)
    for gone in (done.id, going.id):
        with raises(LifecycleError, "response-not-ended", f"rollout {gone}"):
            scorer.finish([gone])
    assert scorer.finish([]) == []


@pytest.mark.parametrize("name", NAMES)
def test_what_was_released_is_forgotten(name: str, make: Make) -> None:
    scorer, made = make(name, 8), rollouts()
    expected = scores_of(make(name), made)
    scorer.admit(told([begun(r) for r in made]))
    scorer.extend([chunk_of(r, 0, 1) for r in made])
    scorer.release([r.id for r in made] + [99])
    scores = scores_of(scorer, made, 2)  # admitted again, and again when they were scored
    for again in (scores, scores_of(scorer, made)):
        for score, of in zip(again, expected, strict=True):
            assert score.values == pytest.approx(of.values, abs=1e-4)
