"""The twelve instances of RLHFuse's Table 3, and what is known of them.

Latencies and memory are those of the authors' published problem files, in their units. The
columns of the paper are ratios to serial 1F1B; the published traces hold the schedules themselves,
and do not agree with the paper in all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.pipelines.baselines import serial_1f1b
from stretto.pipelines.problem import ModelPipelines, Problem


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        models: sizes of actor and critic.
        stages: of actor and critic.
        global_batch: micro-batches of all pipelines of a model together.
        problem: without a capacity.
        plus_speedup: 1F1B+'s in the paper.
        greedy_speedup: the greedy schedule's in the paper.
        speedup: of the paper's schedule.
        bound_speedup: of the paper's lower bound.
        greedy_memory: the greedy schedule's peak to that of serial 1F1B, in the paper.
        memory: the same of the paper's schedule.
        traced_latency: of the published schedule, in ticks.
        traced_peak: its peak of memory.
    """

    models: str
    stages: tuple[int, int]
    global_batch: int
    problem: Problem
    plus_speedup: float
    greedy_speedup: float
    speedup: float
    bound_speedup: float
    greedy_memory: float
    memory: float
    traced_latency: int
    traced_peak: float

    @property
    def least_memory(self) -> float:
        """The lower of the paper's and the published trace's peak."""
        return min(self.memory * serial_1f1b(self.problem).peak, self.traced_peak)


_SMALL, _LARGE = "33B/13B", "65B/33B"
_FORWARD_AND_ACTIVATION = {
    # The authors scale each pair of models, so that its numbers are small.
    _SMALL: {8: (5, 1.95), 4: (4, 2.0)},
    _LARGE: {16: (2, 1.64), 8: (2, 2.0)},
}
_EQUAL_STAGES = {_SMALL: (2, 1.0), _LARGE: (1, 1.0)}
"""The critic's, where it has as many stages as the actor."""


def _side(numbers: tuple[int, float], stages: int, devices: int, batch: int) -> ModelPipelines:
    pipelines = devices // stages
    return ModelPipelines.of(
        stages,
        pipelines,
        batch // pipelines,
        forward=numbers[0],
        backward=2 * numbers[0],
        activation=numbers[1],
    )


def _row(
    models: str,
    stages: tuple[int, int],
    batch: int,
    speedups: tuple[float, float, float, float],
    memory: tuple[float, float],
    traced: tuple[int, float],
) -> Row:
    numbers, devices = _FORWARD_AND_ACTIVATION[models], max(stages)
    of_critic = _EQUAL_STAGES[models] if stages[0] == stages[1] else numbers[stages[1]]
    problem = Problem(
        _side(numbers[stages[0]], stages[0], devices, batch),
        _side(of_critic, stages[1], devices, batch),
    )
    return Row(models, stages, batch, problem, *speedups, *memory, *traced)


ROWS = (
    _row(_SMALL, (8, 4), 8, (1.10, 1.29, 1.38, 1.38), (1.51, 1.00), (225, 15.60)),
    _row(_SMALL, (8, 4), 16, (1.06, 1.12, 1.30, 1.30), (2.14, 1.00), (372, 15.75)),
    _row(_SMALL, (8, 4), 32, (1.03, 1.10, 1.15, 1.15), (2.75, 1.26), (708, 19.70)),
    _row(_SMALL, (8, 8), 8, (1.07, 1.40, 1.40, 1.40), (1.51, 1.00), (225, 15.60)),
    _row(_SMALL, (8, 8), 16, (1.05, 1.15, 1.32, 1.32), (2.00, 1.19), (366, 18.55)),
    _row(_SMALL, (8, 8), 32, (1.03, 1.08, 1.17, 1.17), (2.75, 1.31), (702, 20.50)),
    _row(_LARGE, (16, 8), 16, (1.05, 1.28, 1.48, 1.48), (1.61, 1.00), (186, 26.24)),
    _row(_LARGE, (16, 8), 32, (1.03, 1.14, 1.27, 1.27), (2.23, 1.00), (330, 29.88)),
    _row(_LARGE, (16, 8), 64, (1.02, 1.12, 1.15, 1.15), (2.88, 1.26), (618, 39.72)),
    _row(_LARGE, (16, 16), 16, (1.03, 1.27, 1.50, 1.50), (1.57, 1.00), (186, 26.24)),
    _row(_LARGE, (16, 16), 32, (1.02, 1.16, 1.33, 1.33), (2.00, 1.22), (318, 32.16)),
    _row(_LARGE, (16, 16), 64, (1.01, 1.09, 1.16, 1.17), (2.88, 1.47), (613, 38.72)),
)
