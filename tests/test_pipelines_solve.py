"""The search for schedules: known optima, brute force, peers, proofs, and the command."""

from __future__ import annotations

import builtins
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.cli.main import main
from stretto.errors import ConfigError, MissingExtraError
from stretto.pipelines.bounds import latency_bound
from stretto.pipelines.draw import bars, timeline_svg
from stretto.pipelines.evaluate import evaluate
from stretto.pipelines.graph import Ints, capacity_units, make_graph
from stretto.pipelines.kernels import earliest_starts, latency_of, peak_memory
from stretto.pipelines.listing import UNLIMITED, decode, plain_rules, urgency
from stretto.pipelines.problem import Problem, Side
from stretto.pipelines.schedule import Schedule
from stretto.pipelines.search import list_schedule, make_views, turned
from stretto.pipelines.solve import Solution, solve
from stretto.pipelines.table3 import ROWS


def side(stages: int, pipelines: int, batches: int, **other: Any) -> Side:
    given = {"forward": 1, "backward": 2, "activation": 1.0, **other}
    return Side.of(stages, pipelines, batches, **given)


def recheck(problem: Problem, solution: Solution) -> None:
    """What a solution says of itself is what the evaluator says of its schedule."""
    result = evaluate(problem, solution.schedule)
    assert result.latency == solution.makespan >= solution.bound >= latency_bound(problem)
    assert result.peak == solution.peak <= (problem.capacity or np.inf)
    assert (solution.status == "at the bound") == (solution.makespan == latency_bound(problem))
    last = solution.trace[-1]
    assert (last.latency, last.peak) == (solution.makespan, solution.peak)
    earlier = [(i.latency, i.peak) for i in solution.trace]
    assert earlier == sorted(earlier, reverse=True)


def all_words(problem: Problem) -> Iterator[Ints]:
    """Every choice of words that keeps the order of each queue."""
    graph = make_graph(problem)
    of_device = []
    for d in range(problem.devices):
        queues = graph.queues[4 * d : 4 * d + 4].tolist()
        letters = [q for q in queues for _ in range(graph.length[q])]
        words = []
        for word in set(itertools.permutations(letters)):
            done = dict.fromkeys(queues, 0)
            tasks = []
            for q in word:
                tasks.append(int(graph.offset[q]) + done[q])
                done[q] += 1
            words.append(tasks)
        of_device.append(words)
    for choice in itertools.product(*of_device):
        yield np.array([task for word in choice for task in word])


def brute_force(problem: Problem) -> tuple[int, float]:
    """The shortest latency within the capacity, and the least memory at it."""
    graph, capacity = make_graph(problem), capacity_units(problem, problem.capacity)
    best = (10**9, 10**9)
    peaks = np.zeros(problem.devices, np.int64)
    for word in all_words(problem):
        start, order = np.zeros(word.size, np.int64), np.zeros(word.size, np.int64)
        if earliest_starts(graph, word, start, order) == word.size:
            peak = int(peak_memory(graph, word, peaks))
            if peak <= capacity:
                best = min(best, (int(latency_of(graph, word, start)), peak))
    return best[0], best[1] / problem.memory_scale


SMALL = (
    Problem(side(1, 1, 2, forward=2, activation=1.5), side(1, 1, 2)),
    Problem(side(2, 1, 1, forward=[1, 3], backward=[2, 2]), side(2, 1, 1, activation=0.5)),
    Problem(side(2, 1, 1, communication=2), side(1, 2, 1, forward=2), capacity=1.0),
    Problem(side(2, 1, 2, forward=2, backward=3), side(2, 1, 1, activation=2.0), capacity=2.5),
)


class TestKnownOptima:
    @pytest.mark.parametrize("problem", SMALL)
    def test_brute_force(self, problem: Problem) -> None:
        latency, peak = brute_force(problem)
        solution = solve(problem, seconds=0.5, seed=1)
        recheck(problem, solution)
        assert (solution.makespan, solution.peak) == (latency, peak)

    def test_two_pipelines_that_fit_into_each_other(self) -> None:
        # One micro-batch each way over two devices, which are busy all the time.
        problem = Problem(side(2, 1, 1), side(2, 1, 1))
        solution = solve(problem, seconds=1)
        assert (solution.makespan, solution.bound, solution.status) == (6, 6, "at the bound")
        assert sum(solution.evaluation.bubbles[0].values()) == 0

    @pytest.mark.parametrize("number", [1, 2, 4, 8, 10])
    def test_published_instances_reach_the_bound(self, number: int) -> None:
        problem = ROWS[number - 1].problem
        solution = solve(problem, seconds=20, seed=0, memory=1e6)
        recheck(problem, solution)
        assert solution.status == "at the bound"

    @pytest.mark.parametrize("number", [4, 5])
    def test_published_memory_is_reached(self, number: int) -> None:
        row = ROWS[number - 1]
        problem = replace(row.problem, capacity=row.traced_peak)
        solution = solve(problem, seconds=60, seed=0, memory=row.traced_peak)
        recheck(problem, solution)
        assert solution.status == "at the bound"


class TestSearch:
    @given(st.integers(0, 10_000))
    @settings(max_examples=25, deadline=None)
    def test_list_schedules_are_valid_and_keep_the_capacity(self, seed: int) -> None:
        chance = np.random.default_rng(seed)
        devices = int(chance.choice([1, 2, 4, 6]))
        sides = []
        for _ in range(2):
            stages = int(chance.choice([n for n in range(1, devices + 1) if devices % n == 0]))
            ticks = chance.integers(1, 9, size=(3, stages))
            batches, c = int(chance.integers(1, 6)), int(chance.integers(0, 4))
            sides.append(
                Side(
                    stages, devices // stages, batches, tuple(ticks[0].tolist()),
                    tuple(ticks[1].tolist()), tuple((ticks[2] / 4).tolist()), c,
                )
            )  # fmt: skip
        most = max(sides[0].activation + sides[1].activation)
        problem = Problem(*sides, capacity=most * float(chance.choice([1.0, 1.3, 2.0, 4.0])))
        capacity = capacity_units(problem, problem.capacity)
        views = make_views(problem)
        for view in views:
            latency, word = list_schedule(view, capacity, 0, 5, chance)
            front = turned(view, word) if view.backwards else word
            result = evaluate(problem, Schedule.of_tasks(views[0].graph, front))
            assert result.latency <= latency
            assert problem.capacity is not None
            assert result.peak <= problem.capacity
            assert np.array_equal(turned(views[not view.backwards], turned(view, word)), word)

    def test_one_after_the_other_where_the_capacity_holds_one(self) -> None:
        problem = Problem(side(2, 1, 2), side(2, 1, 2), capacity=1.0)
        solution = solve(problem, seconds=1)
        recheck(problem, solution)
        assert solution.peak == 1.0

    def test_decoder_prefers_the_higher_key(self) -> None:
        problem = Problem(side(1, 1, 1), side(1, 1, 1))
        graph = make_graph(problem)
        word, start = np.zeros(4, np.int64), np.zeros(4, np.int64)
        for key, letters in (
            ([4.0, 3.0, 2.0, 1.0], "0F 0B 1F 1B"),
            ([2.0, 1.0, 4.0, 3.0], "1F 1B 0F 0B"),
            ([4.0, 1.0, 3.0, 2.0], "0F 1F 1B 0B"),
        ):
            decode(graph, np.array(key), plain_rules(graph), UNLIMITED, word, start)
            assert Schedule.of_tasks(graph, word).to_json() == {"devices": [letters]}

    def test_urgency_is_what_is_left(self) -> None:
        problem = Problem(side(2, 1, 2, communication=5), side(1, 2, 1))
        # The first micro-batch's first forward: 1 + 5 + 1 + 2 + 5 + 2, and 3 for the other one.
        assert urgency(make_graph(problem))[0] == 19

    def test_same_seed_same_schedule(self) -> None:
        problem = ROWS[3].problem
        first, again = (solve(problem, seconds=20, seed=7, memory=1e6) for _ in range(2))
        assert first.schedule == again.schedule

    def test_threads_find_valid_schedules(self) -> None:
        row = ROWS[3]
        solution = solve(row.problem, seconds=2, threads=2)
        recheck(row.problem, solution)
        assert solution.status == "at the bound"

    def test_published_search_is_a_peer(self) -> None:
        problem = ROWS[3].problem
        solution = solve(problem, seconds=1.0, method="annealing")
        recheck(problem, solution)
        assert solution.makespan < 300
        with pytest.raises(ConfigError, match="knows no capacity"):
            solve(replace(problem, capacity=20.0), method="annealing")

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"seconds": 0}, "seconds 0: must be more than 0"),
            ({"threads": 0}, "threads 0: must be 1 or more"),
            ({"method": "strettto"}, "unknown method 'strettto'. Did you mean 'stretto'"),
        ],
    )
    def test_bad_settings(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            solve(SMALL[0], **given)


class TestProofs:
    def test_what_brute_force_finds_is_proved(self) -> None:
        # The capacity keeps the schedule above the bound, which knows no memory.
        latency, peak = brute_force(SMALL[3])
        solution = solve(SMALL[3], seconds=6, method="cp-sat")
        recheck(SMALL[3], solution)
        assert (solution.makespan, solution.bound, solution.peak) == (latency, latency, peak)
        assert latency > latency_bound(SMALL[3])
        assert solution.status == "proved optimal"
        assert solution.memory_proved

    def test_memory_is_proved_least(self) -> None:
        problem = Problem(side(2, 1, 3), side(2, 1, 3))
        solution = solve(problem, seconds=10, method="cp-sat")
        recheck(problem, solution)
        assert solution.memory_proved
        tighter = replace(problem, capacity=solution.peak - 0.5)
        assert solve(tighter, seconds=0.5).makespan > solution.makespan

    def test_missing_library_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("stretto.pipelines.certify.find_spec", lambda _: None)
        with pytest.raises(MissingExtraError, match=r"pip install 'stretto\[cpsat\]'"):
            solve(SMALL[0], method="cp-sat")


class TestPictures:
    def test_bars_are_the_tasks(self) -> None:
        problem = Problem(side(2, 1, 1), side(1, 2, 1, forward=3))
        schedule = Schedule((("0F", "1F", "1B", "0B"), ("0F", "0B", "2F", "2B")))
        drawn = bars(problem, make_graph(problem), evaluate(problem, schedule))
        assert [(b.device, b.start, b.end, b.critic, b.backward, b.label) for b in drawn] == [
            (0, 0, 1, False, False, "0"),
            (0, 1, 4, True, False, "0"),
            (0, 4, 6, True, True, "0"),
            (0, 6, 8, False, True, "0"),
            (1, 1, 2, False, False, "0"),
            (1, 2, 4, False, True, "0"),
            (1, 4, 7, True, False, "1"),
            (1, 7, 9, True, True, "1"),
        ]

    def test_svg_has_a_bar_for_each_task(self) -> None:
        problem = ROWS[0].problem
        solution = solve(problem, seconds=5, memory=1e6)
        text = timeline_svg(problem, solution.evaluation, "a < b")
        # The paper, the four keys and the 192 tasks.
        assert text.count("<rect") == 1 + 4 + 192
        assert "a &lt; b" in text


class TestCommand:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        file = tmp_path / "problem.json"
        file.write_text(json.dumps(ROWS[3].problem.to_json()))
        return file

    def test_solves_a_file(
        self, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out, page = tmp_path / "schedule.json", tmp_path / "page.html"
        arguments = ["pipeline", str(file), "--seconds", "1.5", "--schedule", str(out)]
        assert main([*arguments, "--draw", str(page), "--capacity", "23.6"]) == 0
        printed = capsys.readouterr().out
        assert "latency 225 ticks (bound 225): at the bound" in printed
        assert "1.40 over serial 1F1B (315)" in printed
        assert "1.31 over 1F1B+ (294)" in printed
        data = json.loads(out.read_text())
        problem = Problem.from_json(data["problem"])
        result = evaluate(problem, Schedule.from_json(data))
        assert (result.latency, result.peak) == (data["latency"], data["peak"])
        assert problem.capacity == 23.6
        assert "<svg" in page.read_text()

    def test_solves_sizes(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = "--actor 13B --critic 7B --actor-stages 2 --critic-stages 1 --seconds 1"
        assert main(["pipeline", *arguments.split(), "--micro-batches", "4"]) == 0
        assert "µs (bound" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("none.json", "cannot read 'none.json'"),
            ("--actor 13B", "--critic, --actor-stages, --critic-stages, --micro-batches are"),
            ("FILE --actor 13B", "leave out --actor"),
            ("FILE --draw a.gif", "must end in .svg, .png or .html"),
            ("FILE --capacity 1.5", "capacity 1.5 is below the 1.95 that one micro-batch"),
            ("FILE --seconds 0.3 --schedule /none/s.json", "cannot write '/none/s.json'"),
            ("table3 --draw a.png", "table3 solves twelve instances"),
        ],
    )
    def test_bad_input(
        self, arguments: str, message: str, file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = [str(file) if word == "FILE" else word for word in arguments.split()]
        assert main(["pipeline", *words]) == 2
        assert message in capsys.readouterr().err

    def test_png_without_matplotlib(
        self, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        real = builtins.__import__

        def missing(name: str, *rest: Any) -> Any:
            if name.startswith("matplotlib"):
                raise ImportError(name)
            return real(name, *rest)

        monkeypatch.setattr(builtins, "__import__", missing)
        monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
        assert main(["pipeline", str(file), "--seconds", "0.3", "--draw", "a.png"]) == 2
        assert "stretto[plots]" in capsys.readouterr().err
