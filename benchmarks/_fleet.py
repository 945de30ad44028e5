"""GPUs that fail, at published rates; what a run does about it; and the formulas for rare failures.

What becomes of a run's time is simulated in ``goodput.py``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace

from _estimate import Estimate
from stretto.errors import ConfigError

HOUR_S = 3600.0

PUBLISHED: Mapping[str, float] = {
    "RSC-2": 2.34 / 1000 / (24 * 8),
    "Llama 3": 419 / (54 * 24 * 16_384),
    "RSC-1": 6.50 / 1000 / (24 * 8),
    "RSC-1, large jobs": 1 / (7.9 * 1024),
}
"""Failures of a GPU in an hour, by where they were counted.

"Llama 3" is Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.3.4: 419 unexpected
interruptions (466 in all) of training on 16,384 H100s in 54 days. "RSC-1" and "RSC-2" are Kokolis
et al. 2024, "Revisiting Reliability in Large-Scale Machine Learning Research Clusters": 6.50 and
2.34 failures in 1,000 days of a node of 8 A100s; and, for jobs of 1,024 GPUs, a measured mean time
to failure of 7.9 hours, where the rate of the nodes alone would give 28.8. All are as others quote
them; the papers were not at hand.
"""


@dataclass(frozen=True, slots=True)
class Group:
    """GPUs of a role, on nodes of their own.

    Attributes:
        name: of the role.
        copies: how many there are, which share the work; 1 is a learner in shards.
        gpus: of each copy.
        seconds: of a step with all copies; fewer take as much longer.
        replaced: a lost copy is replaced while the others go on. Else its loss ends the run, which
            starts again from its last checkpoint.
    """

    name: str
    copies: int
    gpus: int
    seconds: float
    replaced: bool = False

    def __post_init__(self) -> None:
        if min(self.copies, self.gpus) < 1 or self.seconds <= 0:
            raise ConfigError(
                f"{self.copies} copies of {self.gpus} GPUs, {self.seconds} s a step: give 1 or "
                "more of both, and seconds above 0"
            )

    @property
    def again_s(self) -> float:
        """Seconds in which the others do again what a lost copy had done of a step: half its share.

        More than generators need, which only prefill the tokens that there are.
        """
        return self.seconds / 2 / max(1, self.copies - 1)


@dataclass(frozen=True, slots=True)
class Fleet:
    """All GPUs of a run, numbered from 0 in the order of the groups."""

    groups: tuple[Group, ...]
    gpus_per_node: int = 8

    @classmethod
    def of(cls, found: Estimate, gpus_per_node: int = 8) -> Fleet:
        """Return the fleet of an estimated layout, as Stretto runs it.

        Generators and scorers that are apart are replaced. The driver is on a node of the learner.
        """
        layout = found.layout
        seconds = {name: sum(limits.values()) for name, limits in found.groups.items()}
        if layout.colocated:
            groups = (Group("all roles", 1, layout.gpus, seconds["all"]),)
            return cls(groups, gpus_per_node)
        replaced = (
            ("generators", layout.generator, seconds["generation"]),
            ("scorers", layout.scorer, seconds["scoring"]),
        )
        learner = Group("learner", 1, layout.learner.ranks, seconds["training"])
        others = (Group(name, n.dp, n.tp, s, replaced=True) for name, n, s in replaced)
        return cls((learner, *others), gpus_per_node)

    @property
    def gpus(self) -> int:
        """How many there are."""
        return sum(group.copies * group.gpus for group in self.groups)

    @property
    def fatal_gpus(self) -> int:
        """How many of them end the run when they fail."""
        return sum(group.copies * group.gpus for group in self.groups if not group.replaced)

    def rigid(self) -> Fleet:
        """Return the fleet of a trainer that every failure ends, as one SPMD program is."""
        return replace(self, groups=tuple(replace(g, replaced=False) for g in self.groups))

    def step_s(self, away: Mapping[str, int] | None = None) -> float:
        """Return seconds of a step: those of the slowest group.

        Args:
            away: copies that are not there, by group. Without all of a group's a step never ends.
        """
        left = {group: group.copies - (away or {}).get(group.name, 0) for group in self.groups}
        return max(g.seconds * g.copies / n if n > 0 else math.inf for g, n in left.items())

    def hit(self, gpu: int, width: int) -> tuple[Group, range]:
        """Return the copies that have one of the ``width`` neighbours among which a GPU is."""
        for group in self.groups:
            if gpu < group.copies * group.gpus:
                break
            gpu -= group.copies * group.gpus
        first = gpu - gpu % width
        past = min(group.copies, math.ceil((first + width) / group.gpus))
        return group, range(first // group.gpus, past)


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a run keeps its state, and gets over failures. All in seconds but for the nodes.

    Attributes:
        interval_s: from checkpoint to checkpoint, start to start; at least as long as one takes.
            ``math.inf`` for none.
        hold_s: a checkpoint holds training up.
        write_s: it is then written while training goes on. It counts once that has ended.
        detect_s: from a failure until it is noticed, as by a deadline. Training stands still.
        restart_s: to start the whole run and load the checkpoint, once nodes are there.
        replace_s: to start a copy of a role and load its weights, once a node is there.
        spares: nodes that wait to be used.
        repair_s: until a failed node is a spare one again.
        whole_nodes: a failure takes all copies on its node, not those of one GPU alone.
    """

    interval_s: float
    hold_s: float = 0.0
    write_s: float = 0.0
    detect_s: float = 0.0
    restart_s: float = 0.0
    replace_s: float = 0.0
    spares: int = 0
    repair_s: float = 0.0
    whole_nodes: bool = True

    def __post_init__(self) -> None:
        if self.interval_s <= 0 or min(astuple(self)) < 0:
            raise ConfigError(f"{self}: the interval is above 0, all else 0 or more")

    @property
    def period_s(self) -> float:
        """Seconds from checkpoint to checkpoint: the next one waits for the one before."""
        return max(self.interval_s, self.hold_s + self.write_s)


Failure = tuple[float, int]
"""Seconds from the start, and the number of the GPU."""


def drawn(gpus: int, per_gpu_hour: float, seed: int) -> Iterator[Failure]:
    """Draw failures without end: at exponential gaps, of any GPU alike."""
    rng, now = random.Random(seed), 0.0
    while per_gpu_hour > 0:
        now += rng.expovariate(gpus * per_gpu_hour / HOUR_S)
        yield now, int(gpus * rng.random())


def young_interval_s(hold_s: float, mtbf_s: float) -> float:
    """Return the interval between checkpoints that wastes least, to first order: sqrt(2 C M).

    Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006 has
    higher orders. Writing beside training shifts what is lost, and not the optimum.

    Args:
        hold_s: C, by which a checkpoint holds training up.
        mtbf_s: M, the mean time between failures that end the run.
    """
    return math.sqrt(2 * hold_s * mtbf_s)


def first_order_goodput(recovery: Recovery, mtbf_s: float) -> float:
    """Return what is left of the time where failures that end the run are rare.

    A failure costs half a period and the writing on average, its detection, and a restart. Spare
    nodes are taken to be there, and replacing copies to cost nothing. The expected ETTR of Kokolis
    et al. 2024 is the same to this order, with checkpoints that are written at once.

    Args:
        mtbf_s: mean time between those that end it.
    """
    before_s = recovery.period_s / 2 + recovery.write_s
    lost_s = before_s + recovery.detect_s + recovery.restart_s
    return 1 - recovery.hold_s / recovery.period_s - lost_s / mtbf_s
