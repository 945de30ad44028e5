"""Pipeline problems, schedules, their evaluation and bounds, against naive versions of them."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _published import greedy
from _table3 import ROWS
from pipeline_helpers import model, problems, random_schedule
from raising import raises
from stretto.errors import ConfigError
from stretto.pipelines.annealing import length_after, make_state, may_swap, swap
from stretto.pipelines.baselines import interleaved_1f1b, one_f_one_b_plus, serial_1f1b
from stretto.pipelines.graph import (
    Ints,
    earliest_starts,
    latency_bound,
    latency_of,
    make_graph,
)
from stretto.pipelines.pipeline_schedule import BUBBLES, PipelineSchedule, evaluate, memory_curve
from stretto.pipelines.problem import ModelPipelines, Parallel, Problem, make_problem

INSTANCES = json.loads((Path(__file__).parent / "pipeline_instances.json").read_text())


TINY = Problem(model(2, 1, 2), model(1, 2, 1, forward=2, backward=3, activation=0.5))
"""Devices 0 and 1: pipeline 0 is the actor's, 1 and 2 are the critic's, one a device."""
GOOD = PipelineSchedule(
    (("0F", "0F", "1F", "1B", "0B", "0B"), ("2F", "0F", "0B", "0F", "0B", "2B"))
)


def pipelines(problem: Problem) -> list[tuple[list[int], ModelPipelines]]:
    """The devices of each pipeline's stages, by the definition."""
    found = []
    for k, s in enumerate(problem.models):
        for copy in range(s.pipelines):
            block = list(range(copy * s.stages, (copy + 1) * s.stages))
            found.append((block if k == 0 else block[::-1], s))
    return found


def naive_starts(
    problem: Problem, schedule: PipelineSchedule
) -> dict[tuple[int, str, int, int], int]:
    """Starts by relaxation, keyed by pipeline, kind, stage and micro-batch."""
    layout = pipelines(problem)
    keys: list[list[tuple[int, str, int, int]]] = []
    for d, word in enumerate(schedule.words):
        seen: dict[str, int] = {}
        row = []
        for letter in word:
            p, kind = int(letter[:-1]), letter[-1]
            row.append((p, kind, layout[p][0].index(d), seen.get(letter, 0)))
            seen[letter] = seen.get(letter, 0) + 1
        keys.append(row)

    def ticks(key: tuple[int, str, int, int]) -> int:
        s = layout[key[0]][1]
        return (s.forward if key[1] == "F" else s.backward)[key[2]]

    starts = {key: 0 for row in keys for key in row}
    for _ in range(10_000):
        before = dict(starts)
        for row in keys:
            for previous, key in itertools.pairwise(row):
                starts[key] = max(starts[key], starts[previous] + ticks(previous))
            for key in row:
                p, kind, s, i = key
                of = layout[p][1]
                if kind == "F" and s > 0:
                    earlier, c = (p, "F", s - 1, i), of.communication
                elif kind == "B" and s < of.stages - 1:
                    earlier, c = (p, "B", s + 1, i), of.communication
                elif kind == "B":
                    earlier, c = (p, "F", s, i), 0
                else:
                    continue
                starts[key] = max(starts[key], starts[earlier] + ticks(earlier) + c)
        if starts == before:
            return starts
    raise AssertionError("no fixed point")


def naive_peak(problem: Problem, schedule: PipelineSchedule) -> float:
    layout = pipelines(problem)
    peak = 0.0
    for d, word in enumerate(schedule.words):
        held = 0.0
        for letter in word:
            devices, s = layout[int(letter[:-1])]
            held += s.activation[devices.index(d)] * (1 if letter[-1] == "F" else -1)
            peak = max(peak, held)
    return peak


class TestEvaluation:
    def test_by_hand(self) -> None:
        # Device 0: 0F 0-1, 0F 1-2, 1F 2-4, 1B 4-7, 0B 7-9, 0B 9-11.
        # Device 1: 2F 0-2, 0F 2-3, 0B 3-5, 0F 5-6, 0B 6-8, 2B 8-11.
        result = evaluate(TINY, GOOD)
        assert result.latency == 11
        assert result.peaks == (2.5, 1.5)
        assert all(sum(of.values()) == 0 for of in result.bubbles)

    def test_bubbles_by_hand(self) -> None:
        # Pipeline 0 over two devices with 3 ticks between; the critic's wait on purpose.
        problem = Problem(
            model(2, 1, 1, communication=3), model(1, 2, 1, forward=2, backward=3), capacity=1.0
        )
        schedule = PipelineSchedule((("0F", "0B", "1F", "1B"), ("0F", "0B", "2F", "2B")))
        result = evaluate(problem, schedule)
        # Device 0: 0F 0-1, 0B 10-12, 1F 12-14, 1B 14-17. Its 1F could run from 1 on, but the
        # forward that is in flight fills the memory.
        # Device 1: 0F 4-5, 0B 5-7, 2F 7-9, 2B 9-12, though 2F could be first.
        assert result.latency == 17
        names = ("warm-up", "memory", "order", "dependency", "communication", "drain")
        assert [result.bubbles[0][n] for n in names] == [0, 9, 0, 0, 0, 0]
        assert [result.bubbles[1][n] for n in names] == [4, 0, 0, 0, 0, 5]
        freed = evaluate(replace(problem, capacity=None), schedule)
        assert [freed.bubbles[0][n] for n in names] == [0, 0, 9, 0, 0, 0]

    def test_dependency_and_communication(self) -> None:
        problem = Problem(model(2, 1, 1, communication=3), model(1, 2, 1))
        schedule = PipelineSchedule((("1F", "1B", "0F", "0B"), ("2F", "2B", "0F", "0B")))
        result = evaluate(problem, schedule)
        # Device 0: ... 0F 3-4, 0B 13-15; its input is made from 8 to 10 and comes at 13.
        # Device 1: ... 0F 7-8, 0B 8-10; made at 4, comes at 7.
        assert result.bubbles[0]["dependency"] == 6
        assert result.bubbles[0]["communication"] == 3
        assert result.bubbles[1]["dependency"] == 1
        assert result.bubbles[1]["communication"] == 3

    @given(problems(), st.randoms(use_true_random=False))
    @settings(max_examples=60, deadline=None)
    def test_equals_a_naive_simulator(self, problem: Problem, chance: random.Random) -> None:
        schedule = random_schedule(problem, chance.choice)
        result = evaluate(problem, schedule)
        naive = naive_starts(problem, schedule)
        graph = make_graph(problem)
        for task, start in enumerate(result.starts.tolist()):
            q = int(graph.queue_of[task])
            key = (int(graph.pipeline[q]), "FB"[graph.kind[q]], int(graph.stage[q]))
            assert naive[*key, task - int(graph.offset[q])] == start
        assert result.peak == naive_peak(problem, schedule)
        assert result.latency >= latency_bound(problem)
        work = [
            sum(int(graph.duration[q] * graph.length[q]) for q in graph.queues[4 * d : 4 * d + 4])
            for d in range(problem.devices)
        ]
        for d, of in enumerate(result.bubbles):
            assert min(of.values()) >= 0
            assert sum(of[cause] for cause in BUBBLES) + work[d] == result.latency
            curve = memory_curve(graph, result, d)
            assert max(held for _, held in curve) == result.peaks[d] * problem.memory_scale
            assert curve[-1][1] == 0

    @given(problems(), st.randoms(use_true_random=False))
    @settings(max_examples=40, deadline=None)
    def test_a_local_change_equals_the_full_evaluation(
        self, problem: Problem, chance: random.Random
    ) -> None:
        graph = make_graph(problem)
        state = make_state(graph, random_schedule(problem, chance.choice).tasks(problem))
        for _ in range(60):
            k = chance.randrange(state.word.size - 1)
            if not may_swap(graph, state, k):
                continue
            before: list[Any] = [np.array(a) for a in state]
            latency, longest = latency_of(graph, *before[:3:2]), length_after(graph, state, k)
            other = state.word.copy()
            other[[k, k + 1]] = other[[k + 1, k]]
            full, ran = full_evaluation(graph, other)
            done = swap(graph, state, k)
            assert done == (ran == other.size)
            if not done:
                # Words, places, starts, tails, order, ranks and memory are as they were.
                assert all(map(np.array_equal, before[:7], state[:7]))
                continue
            assert state.word.tolist() == other.tolist()
            assert state.start.tolist() == full.tolist()
            fresh = make_state(graph, state.word)
            assert state.tail.tolist() == fresh.tail.tolist()
            assert state.held.tolist() == fresh.held.tolist()
            ends = state.start + graph.duration[graph.queue_of]
            new = latency_of(graph, state.word, state.start)
            assert new == int(ends.max()) == int((ends + state.tail).max())
            assert new == longest if longest > latency else new <= latency
            if chance.random() < 0.5:
                assert swap(graph, state, k)
                assert all(map(np.array_equal, before[:4], state[:4]))


def full_evaluation(graph: Any, word: Ints) -> tuple[Ints, int]:
    start = np.zeros(word.size, np.int64)
    return start, int(earliest_starts(graph, word, start, np.zeros(word.size, np.int64)))


class TestValidity:
    def test_backward_before_its_forward(self) -> None:
        bad = PipelineSchedule((("0F", "0B", "0B", "0F", "1F", "1B"), GOOD.words[1]))
        with raises(ConfigError, "deadlock", "0B of micro-batch 1 on device 0"):
            evaluate(TINY, bad)

    def test_devices_that_wait_for_each_other_are_named(self) -> None:
        problem = Problem(model(2, 1, 1), model(2, 1, 1))
        # The actor's backward waits for device 1, which waits for the critic's from device 0.
        bad = PipelineSchedule((("0F", "0B", "1F", "1B"), ("1F", "1B", "0F", "0B")))
        steps = "0B of micro-batch 0 on device 0", "1B of micro-batch 0 on device 1"
        with raises(ConfigError, "deadlock", ", ".join(steps)):
            evaluate(problem, bad)

    @pytest.mark.parametrize(
        "words",
        [
            (GOOD.words[0],),
            ((*GOOD.words[0][:-1], "7B"), GOOD.words[1]),
            (GOOD.words[0][:-1], GOOD.words[1]),
        ],
    )
    def test_words_of_another_problem(self, words: Any) -> None:
        with raises(ConfigError, "other-problem"):
            evaluate(TINY, PipelineSchedule(words))

    def test_as_json(self) -> None:
        strings = GOOD.to_json()["devices"]
        assert strings == ["0F 0F 1F 1B 0B 0B", "2F 0F 0B 0F 0B 2B"]


class TestProblem:
    def test_json_round_trip(self) -> None:
        per_stage = model(2, 1, 3, forward=[1, 2], activation=[0.25, 1.5], communication=4)
        problem = Problem(per_stage, model(1, 2, 3), capacity=7.5)
        data = json.loads(json.dumps(problem.to_json()))
        assert data["actor"]["forward"] == [1, 2]
        assert data["actor"]["backward"] == 2
        assert Problem.from_json(data) == problem

    @pytest.mark.parametrize(
        ("change", "code", "fact"),
        [
            ({"stages": 3}, "other-devices", "3 stages = 6 devices, critic: 1 x 4 = 4"),
            ({"forward": -1}, "greater_than_equal", "actor.forward"),
            ({"backward": 1.5}, "int_type", "actor.backward"),
            ({"backward": [1, 2, 3]}, "not-one-a-stage", "actor.backward: has 3 numbers for 2"),
            ({"activation": float("inf")}, "finite_number", "actor.activation"),
            ({"activation": -0.5}, "greater_than_equal", "actor.activation"),
            ({"micro_batches": 0}, "greater_than_equal", "actor.micro_batches"),
            ({"micro_batches": True}, "int_type", "actor.micro_batches"),
            ({"communication": -2}, "greater_than_equal", "actor.communication"),
            ({"forwards": 1}, "unexpected_keyword_argument", "Did you mean 'forward'"),
            ({"activation": 1 / 3 * 1e-9}, "memory-too-fine", ""),
        ],
    )
    def test_bad_models(self, change: dict[str, Any], code: str, fact: str) -> None:
        data = Problem(model(2, 2, 2), model(4, 1, 2)).to_json()
        data["actor"].update(change)
        with raises(ConfigError, code, fact):
            Problem.from_json(data)

    def test_capacity_below_one_micro_batch(self) -> None:
        with raises(ConfigError, "capacity-below-micro-batch", "capacity 1 ", 1.5, "critic"):
            Problem(model(2, 1, 2), model(1, 2, 2, activation=1.5), capacity=1.0)

    def test_files(self, tmp_path: Path) -> None:
        with raises(ConfigError, "unreadable-file", "none.json", "check the path"):
            Problem.read(tmp_path / "none.json")
        (tmp_path / "bad.json").write_text("{")
        with raises(ConfigError, "not-json"):
            Problem.read(tmp_path / "bad.json")
        (tmp_path / "list.json").write_text("[1]")
        with raises(ConfigError, "dataclass_type", [1]):
            Problem.read(tmp_path / "list.json")

    def test_merged_stages_keep_the_work_of_a_device(self) -> None:
        merged = model(4, 1, 3, forward=[1, 3, 2, 3], backward=4, activation=[1, 2, 3, 5]).merged(2)
        assert merged.forward == (2, 3)
        assert merged.backward == (4, 4)
        assert merged.activation == (1.5, 4.0)
        with raises(ConfigError, "stages-not-mergeable", 4, 3):
            model(4, 1, 3).merged(3)

    def test_from_sizes(self) -> None:
        actor, critic = Parallel.of("33B", 4, 8), Parallel.of("40x5120", 4, 4)
        problem = make_problem(actor, critic, micro_batches=8, tokens=1000, teraflops=100.0)
        # Tensor parallelism 8 and 4: two stages of the critic become one of 20 layers.
        assert (problem.actor.stages, problem.actor.pipelines) == (4, 1)
        assert (problem.critic.stages, problem.critic.pipelines) == (2, 2)
        assert (problem.actor.micro_batches, problem.critic.micro_batches) == (8, 4)
        # 15 layers x 24 x 6656^2 x 1000 operations, on 8 devices at 1e8 operations a microsecond.
        assert problem.actor.forward == (round(15 * 24 * 6656**2 * 1000 / 8e8),) * 4
        assert problem.critic.forward == (round(10 * 24 * 5120**2 * 1000 / 4e8),) * 2
        with raises(ConfigError, "tensor-parallelism-not-multiple", 8, 3):
            make_problem(actor, replace(critic, devices=3), micro_batches=8, tokens=1, teraflops=1)
        with raises(ConfigError, "micro-batches-not-divisible", "take a multiple of 2"):
            make_problem(actor, critic, micro_batches=7, tokens=1000, teraflops=100.0)
        with raises(ConfigError, "not-a-shape", "'12'"):
            Parallel.of("12", 1)


class TestBoundsAndBaselines:
    @pytest.mark.parametrize("facts", INSTANCES, ids=lambda f: f"row{f['row']}")
    def test_published_instances(self, facts: dict[str, Any]) -> None:
        row = ROWS[facts["row"] - 1]
        for of, name in ((row.problem.actor, "a"), (row.problem.critic, "b")):
            told = facts[name]
            counts = (told["stages"], told["pipelines"], told["micro_batches"])
            assert (of.stages, of.pipelines, of.micro_batches) == counts
            assert set(of.forward) == {told["fwd"]}
            assert set(of.backward) == {told["bwd"]}
            assert set(of.activation) == {told["act_mem"]}
        assert latency_bound(row.problem) == facts["lower_bound"]
        serial = serial_1f1b(row.problem)
        assert serial.latency == facts["serial_1f1b"]["latency"]
        assert serial.peak == pytest.approx(facts["serial_1f1b"]["peak_memory"])
        plus = one_f_one_b_plus(row.problem)
        assert plus is not None
        assert plus.latency == facts["one_f_one_b_plus_latency"]
        assert row.traced_latency == facts["flexfusion_published_trace"]["latency"]
        assert row.traced_peak == facts["flexfusion_published_trace"]["peak_memory"]
        assert row.memory == facts["paper"]["memory_ratio"]["ours"]

    def test_greedy_runs_the_larger_model_first(self) -> None:
        schedule = greedy(Problem(model(1, 1, 2, forward=5, backward=5), model(1, 1, 2)))
        assert schedule.words == (("0F", "0B", "0F", "0B", "1F", "1B", "1F", "1B"),)

    def test_interleaved_divides_the_bubble(self) -> None:
        # Actor: 6 x 3 + 3 x 3 / 2; critic the same.
        problem = Problem(model(4, 1, 6), model(4, 1, 6))
        assert interleaved_1f1b(problem).latency == 2 * 22.5
        assert serial_1f1b(problem).latency == 2 * 27

    def test_plus_needs_even_stages(self) -> None:
        assert one_f_one_b_plus(Problem(model(3, 1, 2), model(3, 1, 2))) is None

    def test_bound_takes_the_best_subset(self) -> None:
        # All of device 0's work is 3 x 3 + 1 x 3; the actor alone, with its way to device 1 and
        # back, takes longer there: 1 + 9 + 2.
        assert latency_bound(Problem(model(2, 1, 3), model(1, 2, 1))) == 12
        # With much work of the critic, the sum counts.
        assert latency_bound(Problem(model(2, 1, 3), model(1, 2, 4))) == 21
