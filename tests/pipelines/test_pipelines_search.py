"""The search at its edges: tight memory, huge numbers, interrupts, memory above the bound."""

from __future__ import annotations

import _thread
import inspect
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from _certify import by_cp_sat
from pipeline_helpers import model
from raising import raises
from stretto.errors import ConfigError
from stretto.pipelines.baselines import one_f_one_b_plus, serial_1f1b
from stretto.pipelines.graph import capacity_units, earliest_starts, make_graph
from stretto.pipelines.pipeline_schedule import PipelineSchedule, evaluate
from stretto.pipelines.problem import Problem
from stretto.pipelines.solve import solve


def unequal(capacity: float | None = None) -> Problem:
    """4 devices, 48 tasks; with a capacity the bound is out of reach."""
    return Problem(
        model(4, 1, 4, forward=5, backward=10, activation=1.95),
        model(2, 2, 2, forward=4, backward=8, activation=2.0),
        capacity,
    )


def test_a_device_may_be_woken_before_its_turn() -> None:
    """It then stands twice among those to look at; uncompiled, as that checks the indices."""
    problem = Problem(model(2, 2, 1), model(4, 1, 1))
    word = PipelineSchedule(
        (
            ("2F", "0F", "0B", "2B"), ("2F", "0F", "0B", "2B"),
            ("2F", "1F", "1B", "2B"), ("2F", "1F", "1B", "2B"),
        )
    ).tasks(problem)  # fmt: skip
    start = np.zeros(word.size, np.int64)
    in_python = inspect.unwrap(earliest_starts)  # as numba keeps it
    assert in_python(make_graph(problem), word, start, start.copy()) == word.size


@pytest.mark.parametrize(
    ("capacity", "at_most"),
    [
        (4.0, 1.1 * 147),  # the optimum, by CP-SAT; 3 s on a core of its own find it
        (2.0, 1.1 * 270),  # one micro-batch at a time; the optimum, by CP-SAT
    ],
)
def test_tight_capacities(capacity: float, at_most: float) -> None:
    """Within a tenth of the optimum, even where others are at work on the same cores."""
    problem = unequal(capacity)
    solution = solve(problem, seconds=3.0)
    assert evaluate(problem, solution.schedule).latency == solution.makespan <= at_most
    assert solution.peak <= capacity


def test_memory_is_lowered_where_the_bound_is_out_of_reach() -> None:
    """6 devices, 2 and 3 pipelines: 134 is the optimum by CP-SAT, the bound of the formula 129."""
    actor = model(3, 2, 2, forward=[5, 7, 6], backward=[9, 12, 10], activation=2.0)
    critic = model(2, 3, 2, forward=[6, 5], backward=[9, 8], activation=1.5, communication=2)
    solution = solve(Problem(actor, critic), seconds=2.0)
    assert solution.makespan > solution.bound
    first = next(i.peak for i in solution.trace if i.latency == solution.makespan)
    again = solve(Problem(actor, critic, solution.peak), seconds=2.0)
    assert solution.peak <= first
    assert again.makespan >= solution.makespan


class TestNumbers:
    def test_communication_counts_towards_the_longest_schedule(self) -> None:
        with raises(ConfigError, "less_than_equal", "communication"):
            Problem(model(2, 1, 1, communication=4 * 10**17), model(2, 1, 1))
        with raises(ConfigError, "too-many-ticks", "longer ticks"):
            Problem(model(2, 1, 1, communication=2**30), model(2, 1, 1))

    def test_too_many_stages_are_refused_before_they_take_memory(self) -> None:
        with raises(ConfigError, "less_than_equal", "stages", 10**10):
            model(10**10, 1, 1)

    def test_capacity_is_exact(self) -> None:
        problem = Problem(model(2, 1, 1), model(2, 1, 1))
        assert capacity_units(problem, 1.9999995) == 1
        assert capacity_units(problem, 0.1 + 0.2 + 1.7) == 2
        assert capacity_units(problem, 1e30) == capacity_units(problem, None)
        tenths = Problem(model(2, 1, 1, activation=0.1), model(2, 1, 1, activation=0.3))
        assert capacity_units(tenths, 0.1 + 0.2) == 3  # 0.30000000000000004

    def test_activations_are_added_as_they_are_written(self) -> None:
        four = model(4, 1, 4, activation=[0.1, 0.2, 0.3, 0.1])
        plus = one_f_one_b_plus(Problem(four, four))
        assert plus is not None
        # The first of two stages holds two micro-batches, 0.1 + 0.2 each.
        assert plus.peak == 2 * 0.3

    def test_thirds_are_rounded_up(self) -> None:
        assert model(3, 1, 1, activation=[1.0, 0.0, 1.0]).merged(3).activation == (0.667,)

    def test_no_memory_at_all(self) -> None:
        nothing = model(2, 1, 2, activation=0)
        solution = solve(Problem(nothing, nothing), seconds=1.0)
        assert solution.peak == serial_1f1b(Problem(nothing, nothing)).peak == 0

    @pytest.mark.parametrize("seed", [-1, 2**31])
    def test_seed(self, seed: int) -> None:
        with raises(ConfigError, "seed-out-of-range", seed):
            solve(unequal(), seconds=1.0, seed=seed)


class TestInterrupts:
    @pytest.fixture(autouse=True)
    def _after_a_moment(self) -> Any:
        solve(unequal(), seconds=0.1)  # compile
        timer = threading.Timer(0.7, _thread.interrupt_main)
        timer.start()
        yield
        timer.cancel()

    @pytest.mark.parametrize("threads", [1, 2])
    def test_what_was_found_can_be_kept(self, threads: int) -> None:
        problem, begun = unequal(2.0), time.monotonic()
        solution = solve(problem, seconds=300.0, threads=threads, keep_interrupted=True)
        assert solution.interrupted
        assert time.monotonic() - begun < 60  # it was to take 300 s
        assert evaluate(problem, solution.schedule).latency == solution.makespan

    def test_or_is_raised(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            solve(unequal(2.0), seconds=300.0)

    def test_a_proof_is_broken_off_and_leaves_ctrl_c_as_it_was(self) -> None:
        """CP-SAT's own handler would swallow the first, and the next would end the process."""
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            solve(unequal(2.0), seconds=300.0, search=by_cp_sat)
        assert time.monotonic() - begun < 60
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
