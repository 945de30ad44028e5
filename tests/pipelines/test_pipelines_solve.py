"""The search for schedules: known optima, brute force, peers, proofs, and the command."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import caching

import pipelines as benchmark
from _certify import by_cp_sat
from _published import as_published, greedy, plain_rules
from _table3 import ROWS
from pipeline_helpers import model
from raising import raises
from stretto.cli.main import main
from stretto.errors import ConfigError
from stretto.pipelines.draw import KINDS, bars, page_html, save_png, timeline_svg
from stretto.pipelines.graph import (
    Ints,
    capacity_units,
    earliest_starts,
    latency_bound,
    latency_of,
    make_graph,
    njit,
    peak_memory,
)
from stretto.pipelines.listing import UNLIMITED, decode, urgency
from stretto.pipelines.pipeline_schedule import PipelineSchedule, evaluate
from stretto.pipelines.problem import UNITS, ModelPipelines, Problem, Units
from stretto.pipelines.search import View, list_schedule
from stretto.pipelines.solve import Solution, solve
from stretto.saying import tick_step


def test_without_a_folder_for_a_cache_functions_are_compiled_in_each_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a user who can write neither next to the package nor into HOME."""
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    double = njit(cache=True, nogil=True)(lambda x: 2 * x)
    assert double(4) == 8


def recheck(problem: Problem, solution: Solution) -> None:
    """What a solution says of itself is what the evaluator says of its schedule."""
    result = evaluate(problem, solution.schedule)
    assert result.latency == solution.makespan >= solution.bound >= latency_bound(problem)
    assert result.peak == solution.peak <= (problem.capacity or np.inf)
    assert (solution.status == "at the bound") == (solution.makespan == solution.bound)
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
    Problem(model(1, 1, 2, forward=2, activation=1.5), model(1, 1, 2)),
    Problem(model(2, 1, 1, forward=[1, 3], backward=[2, 2]), model(2, 1, 1, activation=0.5)),
    Problem(model(2, 1, 1, communication=2), model(1, 2, 1, forward=2), capacity=1.0),
    Problem(model(2, 1, 2, forward=2, backward=3), model(2, 1, 1, activation=2.0), capacity=2.5),
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
        problem = Problem(model(2, 1, 1), model(2, 1, 1))
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
                ModelPipelines(
                    stages, devices // stages, batches, tuple(ticks[0].tolist()),
                    tuple(ticks[1].tolist()), tuple((ticks[2] / 4).tolist()), c,
                )
            )  # fmt: skip
        most = max(sides[0].activation + sides[1].activation)
        problem = Problem(
            sides[0], sides[1], capacity=most * float(chance.choice([1.0, 1.3, 2.0, 4.0]))
        )
        capacity = capacity_units(problem, problem.capacity)
        for backwards in (False, True):
            view = View.of(problem, backwards=backwards)
            latency, word = list_schedule(view, capacity, 0, 5, chance)
            front = view.turned(word)
            result = evaluate(problem, PipelineSchedule.of_tasks(make_graph(problem), front))
            assert result.latency <= latency
            assert problem.capacity is not None
            assert result.peak <= problem.capacity
            assert np.array_equal(view.turned(front), word)

    def test_one_after_the_other_where_the_capacity_holds_one(self) -> None:
        problem = Problem(model(2, 1, 2), model(2, 1, 2), capacity=1.0)
        solution = solve(problem, seconds=1)
        recheck(problem, solution)
        assert solution.peak == 1.0
        # A micro-batch holds its first device for 6 ticks, and the other one from tick 1 to 4 of
        # them. So the next one may start after 6 ticks if it is of the same model, after 5 if not.
        # Model after model: at 0, 6, 11 and 17, the last for 6. In turn: at 0, 5, 10 and 15.
        assert solution.makespan <= 17 + 6
        proved = solve(problem, seconds=5, search=by_cp_sat)
        assert (proved.makespan, proved.peak, proved.bound) == (15 + 6, 1.0, 15 + 6)

    def test_decoder_prefers_the_higher_key(self) -> None:
        problem = Problem(model(1, 1, 1), model(1, 1, 1))
        graph = make_graph(problem)
        word, start = np.zeros(4, np.int64), np.zeros(4, np.int64)
        for key, letters in (
            ([4.0, 3.0, 2.0, 1.0], "0F 0B 1F 1B"),
            ([2.0, 1.0, 4.0, 3.0], "1F 1B 0F 0B"),
            ([4.0, 1.0, 3.0, 2.0], "0F 1F 1B 0B"),
        ):
            decode(graph, np.array(key), plain_rules(graph), UNLIMITED, word, start)
            assert PipelineSchedule.of_tasks(graph, word).to_json() == {"devices": [letters]}

    def test_urgency_is_what_is_left(self) -> None:
        problem = Problem(model(2, 1, 2, communication=5), model(1, 2, 1))
        # The first micro-batch's first forward: 1 + 5 + 1 + 2 + 5 + 2, and 3 for the other one.
        assert urgency(make_graph(problem))[0] == 19

    def test_same_seed_same_schedule(self) -> None:
        # The memory goal is below what the first schedules at the bound take.
        row = ROWS[3]
        first, again = (
            solve(row.problem, seconds=20, seed=7, memory=row.traced_peak + 0.5) for _ in range(2)
        )
        assert first.schedule == again.schedule
        assert first.peak <= row.traced_peak + 0.5
        ways = [[(i.latency, i.peak) for i in s.trace] for s in (first, again)]
        assert ways[0] == ways[1]
        assert {225} < {latency for latency, _ in ways[0]}

    def test_threads_find_valid_schedules(self) -> None:
        row = ROWS[3]
        solution = solve(row.problem, seconds=2, threads=2)
        recheck(row.problem, solution)
        assert solution.status == "at the bound"

    def test_published_search_is_a_peer(self) -> None:
        problem = ROWS[0].problem
        start = evaluate(problem, greedy(problem))
        solve(problem, seconds=0.1, search=as_published)  # compile
        solution = solve(problem, seconds=2, search=as_published)
        recheck(problem, solution)
        assert (solution.trace[0].latency, solution.trace[0].peak) == (start.latency, start.peak)
        assert solution.makespan < start.latency == 244
        with pytest.raises(ConfigError, match="knows no capacity"):
            solve(replace(problem, capacity=20.0), search=as_published)

    @pytest.mark.parametrize(
        ("given", "code"),
        [({"seconds": 0}, "seconds-not-positive"), ({"threads": 0}, "no-threads")],
    )
    def test_bad_settings(self, given: dict[str, Any], code: str) -> None:
        with raises(ConfigError, code, 0):
            solve(SMALL[0], **given)


class TestProofs:
    def test_what_brute_force_finds_is_proved(self) -> None:
        # The capacity keeps the schedule above the bound, which knows no memory.
        latency, peak = brute_force(SMALL[3])
        solution = solve(SMALL[3], seconds=6, search=by_cp_sat)
        recheck(SMALL[3], solution)
        assert (solution.makespan, solution.bound, solution.peak) == (latency, latency, peak)
        assert latency > latency_bound(SMALL[3])
        assert solution.memory_proved

    def test_memory_is_proved_least(self) -> None:
        problem = Problem(model(2, 1, 3), model(2, 1, 3))
        solution = solve(problem, seconds=10, search=by_cp_sat)
        recheck(problem, solution)
        assert solution.memory_proved
        tighter = replace(problem, capacity=solution.peak - 0.5)
        assert solve(tighter, seconds=0.5).makespan > solution.makespan


class TestPictures:
    def test_bars_are_the_tasks(self) -> None:
        problem = Problem(model(2, 1, 1), model(1, 2, 1, forward=3))
        schedule = PipelineSchedule((("0F", "1F", "1B", "0B"), ("0F", "0B", "2F", "2B")))
        drawn = bars(problem, make_graph(problem), evaluate(problem, schedule))
        assert [(b.device, b.start, b.end, KINDS[b.kind], b.label) for b in drawn] == [
            (0, 0, 1, "actor forward", "0"),
            (0, 1, 4, "critic forward", "0"),
            (0, 4, 6, "critic backward", "0"),
            (0, 6, 8, "actor backward", "0"),
            (1, 1, 2, "actor forward", "0"),
            (1, 2, 4, "actor backward", "0"),
            (1, 4, 7, "critic forward", "1"),
            (1, 7, 9, "critic backward", "1"),
        ]

    def test_svg_has_a_bar_for_each_task(self) -> None:
        problem = ROWS[0].problem
        solution = solve(problem, seconds=5, memory=1e6)
        text = timeline_svg(problem, solution.evaluation, "a < b", Units())
        assert text.count("<rect") == 1 + 4  # the paper and the keys
        lines = re.findall(r'<path class="bar" .*? d="(.*?)"', text)
        assert sum(dashes.count("M") for dashes in lines) == 192
        assert text.count('<text class="on') == 192
        assert "a &lt; b" in text

    def test_svg_of_very_many_tasks(self) -> None:
        # One device; 1,000 forwards of 1 tick, each followed by a backward of 2, for each model.
        one = model(1, 1, 1000)
        schedule = PipelineSchedule((("0F", "0B") * 1000 + ("1F", "1B") * 1000,))
        text = timeline_svg(Problem(one, one), evaluate(Problem(one, one), schedule), "", Units())
        paths = re.findall(r'class="bar" stroke="(#\w+)" d="(.*?)"', text)
        assert [len(dashes.split("M")) - 1 for _, dashes in paths] == [1000] * 4
        assert len({colour for colour, _ in paths}) == 4
        # 912 pixels are 6,000 ticks; 15 % of a narrow bar is its gap.
        assert [dashes.split("M")[2] for _, dashes in paths] == [
            f"{64 + start * 0.152:.2f} 0h{ticks * 0.152 * 0.85:.2f}"
            for start, ticks in ((3, 1), (4, 2), (3003, 1), (3004, 2))
        ]

    def test_units_and_scales(self) -> None:
        one = model(1, 1, 2, activation=1500)
        problem = Problem(one, one, capacity=2048.0)
        result = evaluate(
            problem, PipelineSchedule((("0F", "0B", "0F", "0B", "1F", "1B", "1F", "1B"),))
        )
        text = timeline_svg(problem, result, "", UNITS)
        labels = re.findall(r"<text class=\"muted\"[^>]*>([^<]*)<", text)
        assert labels == [
            "0", *(f"{t}" for t in range(0, 13, 2)), "µs",
            "activation memory (MiB) of each device; the highest is 1,500 MiB",
            "0", "500", "1,000", "1,500", "2,000", "serial 1F1B 1,500 MiB", "capacity 2,048 MiB",
        ]  # fmt: skip
        page = page_html(problem, result, "", UNITS, ["a < b"])
        assert "<td>1,500 MiB</td>" in page
        assert "Idle µs of each device" in page
        assert Units().of_memory(1.0 / 3) == "0.333333"
        assert UNITS.of_memory(12345678.9) == "12,345,679 MiB"

    @pytest.mark.parametrize(
        ("length", "ticks", "step"),
        [
            *((16.848, 5, 5), (2211.84, 5, 500), (1.0, 5, 0.2), (225, 10, 50), (100, 10, 10)),
            *((10, 8, 2), (7, 8, 1), (0.3, 8, 0.05), (81, 8, 20), (80, 8, 10)),
        ],
    )
    def test_tick_step(self, length: float, ticks: int, step: float) -> None:
        assert tick_step(length, ticks) == pytest.approx(step)

    def test_png(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        figure_module = pytest.importorskip("matplotlib.figure")
        drawn: list[Any] = []
        save = figure_module.Figure.savefig

        def keep(figure: Any, *args: Any, **kwargs: Any) -> None:
            drawn.append(figure)
            save(figure, *args, **kwargs)

        monkeypatch.setattr(figure_module.Figure, "savefig", keep)
        problem = replace(TWO_WAYS, capacity=2e6)
        result = evaluate(problem, TWO_WAYS_SCHEDULE)
        save_png(problem, result, "a title", UNITS, tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
        above, below = drawn[0].axes
        boxes = [path.get_extents() for of in above.collections for path in of.get_paths()]
        starts = sorted((round(box.y0 + 0.42), box.x0) for box in boxes)
        assert starts == [(0, 0), (0, 1), (0, 4), (0, 6), (1, 1), (1, 2), (1, 4), (1, 7)]
        # The fullest device's curve is black and above the grey ones; then the two limits.
        colours = {line.get_color(): line.get_zorder() for line in below.lines}
        assert list(colours)[:2] == ["0.75", "black"]
        assert colours["black"] > colours["0.75"]
        assert below.lines[1].get_ydata().tolist() == [0, 1e6, 2e6, 1e6, 0]
        names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
        assert names[4:] == ["serial 1F1B 1,000,000 MiB", "capacity 2,000,000 MiB"]
        assert (below.get_xlabel(), below.get_ylabel()) == ("µs", "activation memory (MiB)")
        assert "2,000,000" in [text.get_text() for text in below.get_yticklabels()]
        assert below.yaxis.get_offset_text().get_text() == ""


TWO_WAYS = Problem(model(2, 1, 1, activation=1e6), model(1, 2, 1, forward=3, activation=1e6))
TWO_WAYS_SCHEDULE = PipelineSchedule((("0F", "1F", "1B", "0B"), ("0F", "0B", "2F", "2B")))


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
        words = (tuple(word.split()) for word in data["devices"])
        result = evaluate(problem, PipelineSchedule(tuple(words)))
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
            ("FILE --schedule /none/s.json", "cannot write '/none/s.json': there is no directory"),
            ("FILE --draw /none/x.svg", "cannot write '/none/x.svg': there is no directory"),
            ("FILE --schedule /", "cannot write '/': it is a directory"),
            ("FILE --actor-tp 4 --tokens 7 --teraflops 1",
             "a file says all of the problem: leave out --actor-tp, --tokens, --teraflops"),
            ("SIZES --capacity 1", "capacity 1 GiB is below the 4,352 MiB that one micro-batch "
             "takes: give 4.25 GiB or more"),
            ("SIZES --actor-tp 0", "tensor parallelism of the actor 0: must be a whole number"),
            ("SIZES --critic-tp -1", "tensor parallelism of the critic -1: must be a whole number"),
            ("SIZES --critic-tp 2 --actor-stages 1", "1 stages cannot be merged by 2"),
            ("SIZES --tokens 0", "tokens 0: must be a whole number from 1 to"),
            ("SIZES --teraflops 0", "teraflops 0.0: must be more than 0"),
            ("SIZES --teraflops 1e-300", "too long to be planned for; check both numbers"),
            ("SIZES --communication-us -1", "communication_us -1: must be a whole number from 0"),
            ("SIZES --micro-batches -4", "micro_batches -4: must be a whole number from 1 to"),
            ("SIZES --actor-stages -1", "-1 stages of the actor, which has 32 layers: take 1 to"),
        ],
    )  # fmt: skip
    def test_bad_input_is_refused_before_the_search(
        self,
        arguments: str,
        message: str,
        file: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr("stretto.pipelines.solve.solve", None)
        sizes = "--actor 7B --critic 7B --actor-stages 2 --critic-stages 2 --micro-batches 4"
        arguments = arguments.replace("SIZES", sizes)
        words = [str(file) if word == "FILE" else word for word in arguments.split()]
        assert main(["pipeline", *words]) == 2
        assert message in capsys.readouterr().err

    def test_png_without_matplotlib(
        self, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setattr("stretto.pipelines.solve.solve", None)
        assert main(["pipeline", str(file), "--draw", "a.png"]) == 2
        assert "pip install 'matplotlib>=3.8'" in capsys.readouterr().err

    def test_one_file_fails_and_the_other_is_written(
        self,
        file: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        real = Path.write_text

        def full(path: Path, *args: Any, **kwargs: Any) -> int:
            if path.suffix == ".json":
                raise OSError(28, "No space left on device")
            return real(path, *args, **kwargs)

        monkeypatch.setattr(Path, "write_text", full)
        out, picture = tmp_path / "s.json", tmp_path / "s.svg"
        arguments = ["pipeline", str(file), "--seconds", "0.2", "--schedule", str(out)]
        assert main([*arguments, "--draw", str(picture)]) == 2
        assert f"cannot write '{out}': No space left" in capsys.readouterr().err
        assert picture.read_text().startswith("<svg")

    def test_a_schedule_file_is_a_problem_file(
        self, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out, again = tmp_path / "one.json", tmp_path / "two.json"
        end = ["--seconds", "0.2", "--schedule"]
        assert main(["pipeline", str(file), "--capacity", "30", *end, str(out)]) == 0
        assert main(["pipeline", str(out), *end, str(again)]) == 0
        assert json.loads(again.read_text())["problem"] == json.loads(out.read_text())["problem"]
        assert json.loads(again.read_text())["problem"]["capacity"] == 30

    def test_no_activations(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file, picture = tmp_path / "p.json", tmp_path / "p.svg"
        nothing = model(2, 1, 2, activation=0)
        file.write_text(json.dumps(Problem(nothing, nothing).to_json()))
        assert main(["pipeline", str(file), "--seconds", "1", "--draw", str(picture)]) == 0
        assert "peak activation memory 0, as serial 1F1B's 0;" in capsys.readouterr().out
        assert "the highest is 0<" in picture.read_text()

    def test_interrupted(
        self,
        file: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def cut_short(problem: Problem, **given: Any) -> Solution:
            assert given["keep_interrupted"]
            return replace(solve(problem, seconds=0.1), interrupted=True)

        monkeypatch.setattr("stretto.pipelines.solve.solve", cut_short)
        picture = tmp_path / "p.svg"
        assert main(["pipeline", str(file), "--draw", str(picture)]) == 130
        assert "interrupted after 0." in capsys.readouterr().out
        assert picture.read_text().startswith("<svg")


class TestTable3:
    @pytest.mark.parametrize(
        ("method", "last"),
        [
            ("stretto", "Each instance has the lower of the paper's and the trace's memory as its"),
            ("annealing", "The published annealing knows no capacity: it only stops at the lower"),
        ],
    )
    def test_table(
        self,
        method: str,
        last: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        found = solve(ROWS[0].problem, seconds=20, memory=1e6)
        capacities = []

        def seen(problem: Problem, **given: Any) -> Solution:
            capacities.append((problem.capacity, given["memory"], given["search"]))
            return found

        monkeypatch.setattr(benchmark, "solve", seen)
        monkeypatch.setattr(sys, "argv", ["pipelines.py", "table3", "--method", method])
        benchmark.main()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2 + 12 + 2
        assert lines[2].startswith("| 33B/13B | 8, 4 | 8 | 1.10 | 1.373 | 1.38 | 1.373 | 1.373 |")
        assert last in lines[-1]
        # Row 1: the paper's 1.00 of serial 1F1B's 15.6, which is the trace's too.
        capacity, goal, asked = capacities[0]
        assert goal == pytest.approx(15.6)
        assert capacity == (None if method == "annealing" else goal)
        assert asked is benchmark.METHODS[method]

    def test_ends_at_an_interrupt(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def cut_short(problem: Problem, **given: Any) -> Solution:
            assert given["keep_interrupted"]
            return replace(solve(problem, seconds=0.1), interrupted=True)

        monkeypatch.setattr(benchmark, "solve", cut_short)
        monkeypatch.setattr(sys, "argv", ["pipelines.py", "table3"])
        with pytest.raises(SystemExit, match="130"):
            benchmark.main()
        assert len(capsys.readouterr().out.splitlines()) == 3  # two of heads, and the first row
