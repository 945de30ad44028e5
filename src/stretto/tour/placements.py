"""Part 4, placements: what the recorded run would have taken elsewhere, by the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import tomli_w

from stretto.api import simulated
from stretto.api.runs import Job
from stretto.files import write_whole
from stretto.runtime.sim.simulate import simulate


@dataclass(frozen=True, slots=True)
class Placement:
    """A way to place the roles of a run, and the schedule on it.

    Attributes:
        settings: that say so, as a file for ``--placement`` has them; empty for the run's own.
        variant: of the schedule.
    """

    name: str
    text: str
    settings: dict[str, object]
    variant: str


_APART: dict[str, object] = {"runtime": "local"}
_TWO: dict[str, object] = {
    "runtime": "local",
    "cluster": {"processes": [{"roles": ["generator", "reference", "critic"]}]},
}

PLACEMENTS = (
    Placement("colocated", "all roles take turns on one device", {}, "sync"),
    Placement("apart", "a device a role; only scorers side by side", _APART, "sync"),
    Placement("overlapping", "the same, generation a version ahead", _APART, "async"),
    Placement("two", "learner on one, all others on the other", _TWO, "async"),
)
"""From one device to one for each role, and back to two."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A placement in virtual time.

    Attributes:
        devices: processes of models; here each is a device.
        step_s: mean seconds of a step, without the first.
        idle: mean share of the devices' time in which they had nothing to do.
    """

    placement: Placement
    devices: int
    step_s: float
    idle: float


def outcomes(run: Path, files: Path) -> Iterator[Outcome]:
    """Simulate the run on each of :data:`PLACEMENTS`.

    Args:
        run: its folder.
        files: folder for the placements' files.

    Raises:
        StateError: the run has recorded too little.
        StorageError: a placement's file cannot be written.
    """
    for placement in PLACEMENTS:
        file = ""
        if placement.settings:
            path = file_of(placement, files)
            write_whole(path, tomli_w.dumps(placement.settings).encode())
            file = str(path)
        simulation = simulated.recorded(str(run), file)
        assert simulation.seed is not None
        cluster = simulation.asked(Job(placement.variant, simulation.seed))
        result = simulate(cluster)
        steps = [step["timing_s/step"] for step in result.steps]
        yield Outcome(
            placement,
            cluster.device_count,
            fmean(steps[1:]),
            1 - fmean(result.device_utilisation),
        )


def file_of(placement: Placement, files: Path) -> Path:
    """Return where the settings of a placement stand, in a folder of such files."""
    return files / f"{placement.name}.toml"
