"""The figures of asynchronous RLHF: step times, and what the dials cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from _async import (
    DIAL_K,
    DIAL_N,
    DIAL_T,
    PLAIN,
    SLOWED,
    STEPS,
    TASKS,
    VARIANTS,
    Task,
    ahead,
    both,
    dial_n,
    of_reported,
    steady_s,
)
from _bars import Bars, picture
from _papers import Part, percent, table


def part(steps: int = STEPS, *, smoke: bool = False) -> Part:
    """Return tables and pictures.

    Args:
        steps: of each run.
        smoke: of few runs.
    """
    tasks = TASKS[1:2] if smoke else TASKS
    known = [task for task in tasks if task.generating_s]
    return Part(
        {
            "async-formula": formula_table(tasks, steps),
            "async-reported": reported_table(known, steps),
            "async-varied": varied_table(tasks, steps),
            "async-n": n_table(tasks[:2], DIAL_N[:1] if smoke else DIAL_N),
            "async-t": t_table(tasks, steps),
            "async-k": k_table(tasks, steps),
        },
        {"papers-async.svg": drawn(tasks, steps)},
    )


def formula_table(tasks: Sequence[Task], steps: int) -> str:
    """Return step times by formula beside the reported ones."""
    rows = []
    for task in tasks:
        ours = both(task, PLAIN, steps)
        rows.append(
            [
                task.name,
                compared(task.generating_s, ours.work_s("gen")),
                compared(task.training_s, ours.work_s("score", "update")),
                compared(task.plain_s, ours.plain_s),
                compared(task.overlapped_s, ours.ahead_s),
                f"{task.step_speedup}**{ours.speedup:.2f}**",
            ]
        )
    head = ["setting", "generate", "score and train", "synchronous step", "asynchronous step"]
    return table([*head, "speed-up of the step"], rows)


def compared(reported: float | None, ours: float) -> str:
    """Return a reported figure, if there is one, and ours."""
    return f"{reported:.1f} s, **{ours:.1f} s**" if reported else f"-, **{ours:.1f} s**"


def reported_table(tasks: Sequence[Task], steps: int) -> str:
    """Return asynchronous steps made of the reported stage times."""
    rows = []
    for task in tasks:
        ideal, slowed = of_reported(task, steps), of_reported(task, steps, SLOWED)
        assert task.overlapped_s is not None
        rows.append(
            [
                task.name,
                f"{task.plain_s:.1f} s",
                f"{task.overlapped_s:.1f} s, {task.plain_s / task.overlapped_s:.2f}"
                if task.plain_s
                else "-",
                f"**{ideal.ahead_s:.1f} s, {ideal.speedup:.2f}**",
                f"{slowed.ahead_s:.1f} s, {slowed.speedup:.2f}",
                f"{task.speedup:.2f}",
            ]
        )
    head = ["setting", "synchronous", "asynchronous, reported", "simulated"]
    last = [f"simulated, both stages {percent(SLOWED - 1)} slower", "whole run, reported"]
    return table([*head, *last], rows)


def varied_table(tasks: Sequence[Task], steps: int) -> str:
    """Return what each assumption changes."""
    rows = []
    for name, assumed in VARIANTS.items():
        cells = []
        for task in tasks:
            ours = both(task, assumed, steps)
            parts = ours.work_s("gen"), ours.work_s("score", "update")
            cells.append(f"{parts[0]:.0f} + {parts[1]:.0f} s, **{ours.speedup:.2f}**")
        rows.append([name, *cells])
    return table(["assumed", *(task.name for task in tasks)], rows)


def n_table(tasks: Sequence[Task], dial: Sequence[int]) -> str:
    """Return seconds a mini-batch by N."""
    rows = []
    for task in tasks:
        cells = []
        for n in dial:
            plain_s, ahead_s = dial_n(task, n)
            cells.append(f"{plain_s:.1f}, {ahead_s:.1f} s")
        rows.append([task.name, *cells])
    return table(["synchronous, asynchronous", *(f"N = {n}" for n in dial)], rows)


def t_table(tasks: Sequence[Task], steps: int) -> str:
    """Return seconds of an asynchronous step by T."""
    rows = []
    for task in tasks:
        found = [steady_s(ahead(task, replace(PLAIN, updates=t), steps)) for t in DIAL_T]
        cells = [f"{seconds:.1f} s, x {seconds / found[0]:.2f}" for seconds in found]
        rows.append([task.name, *cells])
    return table(["asynchronous", *(f"T = {t}" for t in DIAL_T)], rows)


def k_table(tasks: Sequence[Task], steps: int) -> str:
    """Return the time of as many responses by K, where the two best of K are trained on."""
    rows = []
    for task in tasks:
        found = [steady_s(ahead(task, replace(PLAIN, samples=k), steps)) for k in DIAL_K]
        cells = [f"{seconds:.1f} s" for seconds in found]
        gain = found[0] * DIAL_K[1] / DIAL_K[0] / found[1]
        rows.append([task.name, *cells, f"{gain:.2f}"])
    head = ["asynchronous", *(f"K = {k}" for k in DIAL_K)]
    return table([*head, "speed-up with half the steps"], rows)


def drawn(tasks: Sequence[Task], steps: int) -> str:
    """Return a picture of speed-ups and of step times."""
    known = [task for task in tasks if task.plain_s]
    pairs = {task: both(task, PLAIN, steps) for task in tasks}
    speedups = Bars(
        "Asynchronous to synchronous: speed-up",
        [task.name for task in tasks],
        {
            "reported, of the run": [task.speedup for task in tasks],
            "simulated by formula": [pairs[task].speedup for task in tasks],
            "simulated, reported stages": [
                of_reported(task, steps).speedup if task.plain_s else None for task in tasks
            ],
        },
    )
    stages: list[tuple[str, float | None, float]] = []
    for task in known:
        ours = pairs[task]
        stages += [
            (f"{task.name}: generate", task.generating_s, ours.work_s("gen")),
            ("score and train", task.training_s, ours.work_s("score", "update")),
            ("synchronous step", task.plain_s, ours.plain_s),
            ("asynchronous step", task.overlapped_s, ours.ahead_s),
        ]
    times = Bars(
        "Times of a step, seconds",
        [name for name, _, _ in stages],
        {
            "reported": [reported for _, reported, _ in stages],
            "simulated by formula": [ours for _, _, ours in stages],
        },
    )
    return picture("Asynchronous RLHF: reported and simulated step times", [speedups, times])
