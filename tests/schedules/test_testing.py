"""The scripted roles that others get: the example of the docs, and what they check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stretto.errors import EngineError
from stretto.runtime.sim.loop import run
from stretto.testing import FakeGenerator, FakeLearner, FakeScorer, World, make_chunk
from stretto.types import FinishReason, Prompt, Response, TrainBatch

DOCS = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_the_example_prints_what_the_docs_say() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("\n## Trying a controller\n")[2]
    _, code, _, printed, *_ = section.split("```")
    done = subprocess.run(
        [sys.executable, "-c", code.removeprefix("python\n")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (printed.lstrip("\n"), "")


def empty(id_: int) -> Response:
    return Response(id_, id_, Prompt(id_, (1,), ""), np.zeros(0, np.int32))


def test_a_generator_decodes_a_token_a_second() -> None:
    world = World([2, 5])
    generator = FakeGenerator(world)

    async def decode() -> float:
        await generator.admit([empty(0), empty(1)])
        (first, second), _ = await generator.decode(3)
        assert (first.tokens.tolist(), first.finish) == ([0, 1], FinishReason.STOP)
        assert (second.tokens.tolist(), second.finish) == ([100, 101, 102], None)
        return world.clock.now()

    assert run(decode()) == 3.0
    assert generator.done == {1: 3}


def test_a_scorer_minds_what_it_is_given() -> None:
    async def scored(start: int, tokens: list[int]) -> float:
        scorer = FakeScorer(World([2]), "judge")
        await scorer.admit([empty(4)])
        logprobs = [0.0] * len(tokens)
        await scorer.extend([make_chunk(4, start, tokens, logprobs, 0, FinishReason.STOP)])
        (score,) = await scorer.finish([4])
        return score.scalar

    assert run(scored(0, [400, 401])) == 4.5
    for start, tokens in ((1, [401]), (0, [400]), (0, [400, 7])):  # a gap, too few, others
        with pytest.raises((AssertionError, EngineError)):
            run(scored(start, tokens))


def test_controllers_can_be_given_any_reward() -> None:
    learner = FakeLearner(World([1]))
    learner.mean_score = 0.5
    none, tokens, numbers = np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32)
    rewards = {"judge": numbers}
    batch = TrainBatch(
        none, (), none, none, none.astype(bool), tokens, numbers, tokens, rewards=rewards
    )
    assert run(learner.train(batch)).stats == {"objective/scores": 0.5}
