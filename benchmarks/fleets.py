"""Weeks of PPO on 1,024 GPUs that fail, simulated: the tables of docs/fleets.md.

    python benchmarks/fleets.py
    python benchmarks/fleets.py --weeks 1000

Four models of 70B, on the layout with the shortest step by the formulas of ``stretto.planner``;
failures at published rates; once as Stretto runs, where only the learner's failures end the run,
and once as a trainer runs that every failure ends. Each number is a mean over the same weeks.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from _estimate import Estimate, StepSizes, estimate
from _fleet import (
    HOUR_S,
    PUBLISHED,
    Fleet,
    Recovery,
    first_order_goodput,
    young_interval_s,
)
from _goodput import CAUSES, Summary, summarize
from _shared import parse
from scaling import apart, preference, table
from stretto.models.shapes import LLAMAS
from stretto.planner import memory_model
from stretto.planner.hardware import GPUS, Hardware, Links
from stretto.planner.run_layout import ModelShapes

GPU_COUNT = 1024
WORKLOAD = StepSizes(responses=2048, prompt_tokens=512, response_tokens=1024)
STORE_BYTES_PER_S = 20e9
"""Assumed of the storage that checkpoints are written to."""
BASE = Recovery(
    interval_s=600,
    hold_s=5,
    write_s=0,  # by the size of the checkpoint
    detect_s=60,
    restart_s=600,
    replace_s=300,
    spares=8,
    repair_s=24 * HOUR_S,
)
"""What all tables assume where they do not say otherwise."""
MINUTES = (2, 5, 10, 20, 30, 60, 120)
RESTARTS = (2, 5, 10, 30)
"""Minutes between checkpoints, and of a restart of the whole run."""
HOLDS = (5, 60)
"""Seconds by which a checkpoint holds training up."""
TIMES_YOUNG = (0.25, 0.5, 1, 2, 4)
SPARES = (0, 1, 2, 4, 8)
DETECTED = (1, 60, 600, 1800)
TABLED = ("Llama 3", "RSC-1", "RSC-1, large jobs")
"""The rates of all tables but the first two, which have all."""


@dataclass(frozen=True, slots=True)
class Weeks:
    """The weeks that are simulated.

    Attributes:
        found: the layout and its step.
        base: what the runs do about failures.
        count: how many weeks a number is the mean of.
    """

    found: Estimate
    base: Recovery
    count: int

    def fleets(self) -> tuple[Fleet, Fleet]:
        """Return the fleet that every failure ends, and Stretto's."""
        own = Fleet.of(self.found)
        return own.rigid(), own

    def of(self, fleet: Fleet, recovery: Recovery, rate: str) -> Summary:
        """Simulate them."""
        return summarize(fleet, recovery, PUBLISHED[rate], range(self.count))

    def both(self, recovery: Recovery, rate: str) -> str:
        """Return the goodputs of both fleets as a cell."""
        return " / ".join(share(self.of(f, recovery, rate).goodput) for f in self.fleets())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weeks", type=int, default=100, help="weeks that a number is the mean of")
    args = parse(parser, {"weeks": 2})
    began_s = time.perf_counter()
    print(tables(args.weeks))
    print(f"{time.perf_counter() - began_s:.1f} s of computing", file=sys.stderr)


def tables(count: int = 100) -> str:
    """Return all tables as Markdown, of so many weeks (two or more)."""
    models = ModelShapes.of_one_size(LLAMAS["70B"])
    gpu = GPUS["h100"]
    hardware = Hardware(gpu, Links.of(gpu))
    listed = apart(LLAMAS["70B"], GPU_COUNT)
    found = min((estimate(models, each, WORKLOAD, hardware) for each in listed), key=preference)
    learner = found.layout.learner
    size = memory_model.kept_bytes(models, learner) * learner.ranks
    weeks = Weeks(found, replace(BASE, write_s=size / STORE_BYTES_PER_S), count)
    parts = ["### What goes in", inputs(weeks, size), "### Rates of failure", rates(weeks)]
    parts += ["### Where a week goes", causes(weeks)]
    for rate in TABLED:
        parts += [f"### By checkpoints and restarts: {rate}", goodputs(weeks, rate)]
    parts += ["### The best interval", intervals(weeks)]
    spares = {f"{n}": replace(weeks.base, spares=n) for n in SPARES}
    parts += ["### By spare nodes", varied(weeks, spares)]
    noticed = {f"{seconds:,} s": replace(weeks.base, detect_s=seconds) for seconds in DETECTED}
    parts += ["### By the time to notice", varied(weeks, noticed)]
    return "\n\n".join(parts)


# -- Markdown --------------------------------------------------------------------------------------


def inputs(weeks: Weeks, size: float) -> str:
    """Return what the tables are made from; ``size`` is a checkpoint's, in bytes."""
    base, fleet, load = weeks.base, Fleet.of(weeks.found), WORKLOAD
    groups = "; ".join(
        f"{g.name}: {g.copies} x {g.gpus} GPUs, {g.seconds:.1f} s" for g in fleet.groups
    )
    rows = [
        (
            "fleet",
            f"{fleet.gpus:,} H100s in nodes of {fleet.gpus_per_node}; a failure takes a node",
        ),
        ("roles", f"{groups}; a step is the longest, {fleet.step_s():.1f} s"),
        (
            "a step",
            f"{load.responses:,} responses, {load.prompt_tokens} tokens of prompt and "
            f"{load.response_tokens:,} of response each",
        ),
        (
            "a checkpoint",
            f"each {minutes(base.interval_s)} min, {size / 1e12:.2f} TB: holds training up for "
            f"{base.hold_s:g} s, is written within {base.write_s:.0f} s more "
            f"({STORE_BYTES_PER_S / 1e9:.0f} GB/s)",
        ),
        ("a failure", f"is noticed after {base.detect_s:g} s"),
        ("the whole run", f"starts again within {minutes(base.restart_s)} min"),
        ("a generator or scorer", f"is replaced within {minutes(base.replace_s)} min"),
        (
            "nodes",
            f"{base.spares} spare ones; a failed one is a spare one after "
            f"{base.repair_s / HOUR_S:g} h",
        ),
    ]
    return table(("", "assumed"), rows)


def rates(weeks: Weeks) -> str:
    """Return how often something fails, by published rates."""
    rigid, own = weeks.fleets()
    head = (
        "",
        "a GPU, in 1,000 days",
        f"one of {rigid.gpus:,}",
        f"one of the learner's {own.fatal_gpus}",
    )
    return table(
        head,
        [
            (
                name,
                f"{1000 * 24 * rate:.2f}",
                *(f"each {mtbf_s(fleet, name) / HOUR_S:.1f} h" for fleet in (rigid, own)),
            )
            for name, rate in PUBLISHED.items()
        ],
    )


def causes(weeks: Weeks) -> str:
    """Return shares of the time by what it went to."""
    rows = []
    for rate in PUBLISHED:
        for fleet, ends in zip(weeks.fleets(), ("any", "learner's"), strict=True):
            found = weeks.of(fleet, weeks.base, rate)
            rows.append(
                (
                    *(rate, ends, f"{share(found.goodput)} ± {100 * found.within:.1f}"),
                    *(f"{100 * found.shares[cause]:.2f}" for cause in CAUSES[1:]),
                    *(f"{found.restarts:.1f}", f"{found.replaced:.1f}"),
                )
            )
    head = ("failures as", "which end the run", "goodput, %", *CAUSES[1:], "restarts", "replaced")
    return table(head, rows)


def goodputs(weeks: Weeks, rate: str) -> str:
    """Return goodput by interval and restart, of both fleets."""
    rows = [
        [
            f"{interval} min",
            *(
                weeks.both(replace(weeks.base, interval_s=60 * interval, restart_s=60 * each), rate)
                for each in RESTARTS
            ),
        ]
        for interval in MINUTES
    ]
    return table(("checkpoint each", *(f"restart {each} min" for each in RESTARTS)), rows)


def intervals(weeks: Weeks) -> str:
    """Return Young's interval, and goodput with it and with others."""
    rows = []
    for rate in TABLED:
        for hold_s in HOLDS:
            for fleet, ends in zip(weeks.fleets(), ("any", "learner's"), strict=True):
                mtbf = mtbf_s(fleet, rate)
                young = young_interval_s(hold_s, mtbf)
                tried = [
                    replace(weeks.base, hold_s=hold_s, interval_s=n * young) for n in TIMES_YOUNG
                ]
                formula = first_order_goodput(tried[TIMES_YOUNG.index(1)], mtbf)
                rows.append(
                    (
                        *(rate, ends, f"{hold_s} s", f"{minutes(young)} min"),
                        *(share(weeks.of(fleet, each, rate).goodput) for each in tried),
                        share(formula),
                    )
                )
    times = [f"{n:g} x" for n in TIMES_YOUNG]
    times[TIMES_YOUNG.index(1)] = "with it"
    head = (
        "failures as",
        "which end the run",
        "held up for",
        "Young's interval",
        *times,
        "by formula",
    )
    return table(head, rows)


def varied(weeks: Weeks, columns: Mapping[str, Recovery]) -> str:
    """Return goodputs of both fleets, a column for each way to recover."""
    rows = [[rate, *(weeks.both(each, rate) for each in columns.values())] for rate in TABLED]
    return table(("failures as", *columns), rows)


def mtbf_s(fleet: Fleet, rate: str) -> float:
    """Return the mean time between failures that end the run."""
    return HOUR_S / (PUBLISHED[rate] * fleet.fatal_gpus)


def minutes(seconds: float) -> str:
    """Return seconds in minutes, to a tenth below ten."""
    count = seconds / 60
    return f"{count:.1f}".removesuffix(".0") if count < 10 else f"{math.floor(count + 0.5)}"


def share(part: float) -> str:
    """Return a share in per cent, to a tenth."""
    return f"{100 * part:.1f}"


if __name__ == "__main__":
    main()
