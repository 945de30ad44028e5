"""RLHFuse's figures: throughput, stages, migration, fused pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from _bars import Bars, Lines, picture
from _papers import Part, percent, table
from _rlhfuse import (
    BATCH,
    LIMITS,
    PAIRS,
    PLAIN,
    RATIOS,
    SWEPT,
    SYSTEMS,
    VARIANTS,
    Assumed,
    Run,
    fuse,
    latency,
    stages,
)
from _table3 import ROWS
from stretto.pipelines.baselines import serial_1f1b
from stretto.pipelines.graph import latency_bound


def part(*, smoke: bool = False) -> Part:
    """Return tables and pictures.

    Args:
        smoke: of few runs.
    """
    pairs, limits = (PAIRS[1:2], LIMITS[:1]) if smoke else (PAIRS, LIMITS)
    ratios = (0.0, 0.5) if smoke else RATIOS
    varied = {"as assumed": PLAIN} if smoke else VARIANTS
    middle = Run(*PAIRS[1], limits[len(limits) // 2])
    return Part(
        {
            "rlhfuse-throughput": throughput_table(pairs, limits),
            "rlhfuse-stages": stage_table([Run(*pair, middle.limit) for pair in pairs]),
            "rlhfuse-migration": migration_table(middle, ratios),
            "rlhfuse-fused": fused_table(),
            "rlhfuse-varied": varied_table(middle, varied),
        },
        {"papers-rlhfuse.svg": drawn(pairs, limits, middle, ratios)},
    )


def gain(run: Run, system: Assumed) -> float:
    """Return RLHFuse's throughput as a multiple of a system's."""
    return stages(replace(run, assumed=system)).step_s / fuse(run).step_s


def gains(pair: tuple[str, str], limits: Sequence[int], system: Assumed) -> tuple[float, float]:
    """Return the lowest and the highest of these over all limits."""
    found = [gain(Run(*pair, limit), system) for limit in limits]
    return min(found), max(found)


def throughput_table(pairs: Sequence[tuple[str, str]], limits: Sequence[int]) -> str:
    """Return RLHFuse's throughput, and as a multiple of others'."""
    rows = []
    for pair in pairs:
        for limit in limits:
            run = Run(*pair, limit)
            rows.append(
                [
                    "/".join(pair),
                    f"{limit:,}",
                    f"{BATCH / fuse(run).step_s:.0f}",
                    *(f"{gain(run, system):.2f}" for system, _ in SYSTEMS.values()),
                ]
            )
    reported = [f"**{low} to {high}**" for _, (low, high) in SYSTEMS.values()]
    head = ["actor/critic", "limit", "RLHFuse, samples/s", *(f"to {name}" for name in SYSTEMS)]
    return table(head, [["reported, all", "", "", *reported], *rows])


def stage_table(runs: Sequence[Run]) -> str:
    """Return the seconds of each stage."""
    rows = []
    for run in runs:
        found = {
            "RLHFuse": fuse(run),
            **{name: stages(replace(run, assumed=system)) for name, (system, _) in SYSTEMS.items()},
        }
        for name, each in found.items():
            seconds = (each.generating_s, each.scoring_s, each.training_s, each.handover_s)
            shown = [f"{s:.2f}" for s in (*seconds, each.step_s)]
            rows.append([f"{run.actor}/{run.critic}", name.removeprefix("to "), *shown])
    head = ["actor/critic", "system", "generation", "inference after it", "training", "hand-over"]
    return table([*head, "step, s"], rows)


def swept(run: Run, ratios: Sequence[float]) -> dict[str, list[float]]:
    """Return the speed-up of generation and inference by ratio, under each assumption."""
    found = {}
    for name in SWEPT:
        each = replace(run, assumed=VARIANTS[name])
        found[name] = [stages(each).before_s / stages(each, ratio).before_s for ratio in ratios]
    return found


def migration_table(run: Run, ratios: Sequence[float]) -> str:
    """Return these speed-ups as a table."""
    rows = [
        [name, *(f"{gain:.3f}" for gain in gains)] for name, gains in swept(run, ratios).items()
    ]
    return table(["migrate at", *(percent(ratio) if ratio else "never" for ratio in ratios)], rows)


def fused_table() -> str:
    """Return speed-ups of fused schedules over 1F1B, reported and found in a second."""
    rows = []
    for i, row in enumerate(ROWS):
        serial = serial_1f1b(row.problem).latency
        cells = [
            row.models,
            f"{row.stages[0]}, {row.stages[1]}",
            str(row.global_batch),
            f"{row.speedup:.2f}",
            f"**{serial / latency(i):.3f}**",
            f"{serial / latency_bound(row.problem):.3f}",
        ]
        rows.append(cells)
    head = ["models", "stages", "micro-batches", "reported", "ours", "bound"]
    return table(head, rows)


def varied_table(run: Run, varied: Mapping[str, Assumed]) -> str:
    """Return what each assumption changes."""
    rows = []
    for name, assumed in varied.items():
        each = replace(run, assumed=assumed)
        base, ours = stages(each), fuse(each)
        rows.append(
            [
                name,
                f"{base.generating_s:.1f}, {base.scoring_s:.1f}, {base.training_s:.1f} s",
                f"{base.before_s / ours.before_s:.2f}",
                f"{base.training_s / ours.training_s:.2f}",
                f"**{base.step_s / ours.step_s:.2f}**",
            ]
        )
    head = ["assumed", "generation, inference, training of the base"]
    return table([*head, "generation and inference", "training", "step"], rows)


def drawn(
    pairs: Sequence[tuple[str, str]], limits: Sequence[int], run: Run, ratios: Sequence[float]
) -> str:
    """Return a picture of throughput, migration and fused schedules."""
    panels: list[Bars | Lines] = [
        Bars(
            "RLHFuse's throughput, in multiples of another system's",
            list(SYSTEMS),
            {
                "reported": [reported for _, reported in SYSTEMS.values()],
                **{
                    "/".join(pair): [gains(pair, limits, system) for system, _ in SYSTEMS.values()]
                    for pair in pairs
                },
            },
        )
    ]
    panels.append(
        Lines(
            f"Generation and inference: speed-up by migration ({run.actor}/{run.critic}, "
            f"{run.limit:,} tokens)",
            "share of the batch at which it migrates; 0: never (reported: best at 0.2, 1.2 to 1.6)",
            ratios,
            swept(run, ratios),
        )
    )
    panels.append(
        Bars(
            "Fused pipelines: speed-up over 1F1B",
            [f"{r.models}, {r.stages[0]}/{r.stages[1]} stages, {r.global_batch}" for r in ROWS],
            {
                "reported": [r.speedup for r in ROWS],
                "found here": [
                    serial_1f1b(r.problem).latency / latency(i) for i, r in enumerate(ROWS)
                ],
            },
        )
    )
    return picture("RLHFuse: reported and simulated throughput", panels)
