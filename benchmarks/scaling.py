"""PPO on 8 to 128 GPUs, on paper: the tables of docs/scaling.md.

    python benchmarks/scaling.py                       # H100s
    python benchmarks/scaling.py --gpu a100-80gb

For each number of GPUs the layout with the shortest step, by the formulas of ``stretto.planner``,
among those listed here that fit; once with all roles on all GPUs, and once with roles apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from _estimate import Estimate, StepSizes, chunk_bytes, estimate, gathered_first_bytes
from _shared import parse
from stretto.layout import Layout
from stretto.models.shapes import LLAMAS, Shape
from stretto.planner.formulas import broadcast_bytes
from stretto.planner.hardware import GPUS, Hardware, Links
from stretto.planner.run_layout import ModelShapes, RunLayout

COUNTS = (8, 16, 32, 64, 128)
TENSOR = (1, 2, 4, 8)
PASSES = ((False, 4096), (True, 2048), (True, 4096), (True, 16_384))
"""Of the learner: whether layers are computed again, and tokens of a micro-batch."""
EIGHTHS = tuple(
    (n, 8 - n - scorer, scorer) for n in range(2, 7) for scorer in (1, 2) if n + scorer < 8
)
"""Shares of the GPUs that learner, generators and scorers get where they are apart."""
WORKLOAD = StepSizes()
SPLIT = (Layout(fsdp=32), Layout(dp=24), Layout(dp=8))
"""Learner, generators and scorers of the table on weights that travel."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table.

    Attributes:
        gpus: how many.
        best: the quickest layout that fits; where none does, the one that lacks least memory.
    """

    gpus: int
    best: Estimate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100")
    parser.add_argument("--sizes", nargs="+", choices=sorted(LLAMAS), default=list(LLAMAS))
    parser.add_argument("--counts", nargs="+", type=int, default=list(COUNTS))
    args = parse(parser, {"sizes": ["7B"], "counts": [8]})
    gpu = GPUS[args.gpu]
    print(tables(Hardware(gpu, Links.of(gpu)), args.sizes, args.counts))


def tables(
    hardware: Hardware, sizes: Sequence[str] = tuple(LLAMAS), counts: Sequence[int] = COUNTS
) -> str:
    """Return all tables as Markdown."""
    by_size = {size: list(rows_of(LLAMAS[size], hardware, counts)) for size in sizes}
    parts = ["### What goes in", inputs(hardware), "### The quickest of each", quickest(by_size)]
    for size, rows in by_size.items():
        parts += [f"### Four models of {size}", layouts(rows)]
    parts += ["### Weights and tokens on their way", travelling(sizes, hardware)]
    return "\n\n".join(parts)


# -- which layouts ---------------------------------------------------------------------------------


def rows_of(shape: Shape, hardware: Hardware, counts: Sequence[int]) -> Iterator[Row]:
    """Choose layouts of four models of one size: colocated, and apart."""
    models = ModelShapes.of_one_size(shape)
    for gpus in counts:
        for listed in (together(shape, gpus), apart(shape, gpus)):
            estimates = (estimate(models, layout, WORKLOAD, hardware) for layout in listed)
            yield Row(gpus, min(estimates, key=preference))


def preference(found: Estimate) -> tuple[float, float, float, float]:
    """What fits first, then what lacks least, then what is quick; of equals the least work."""
    held = max(*(phase.memory_bytes for phase in found.phases), found.usable_bytes)
    work = sum(phase.seconds for phase in found.phases)
    return held, found.step_s, work, sum(phase.wire_bytes for phase in found.phases)


def learners(shape: Shape, gpus: int) -> list[Layout]:
    """Return ways to divide GPUs among shards of a model."""
    return [Layout(fsdp=gpus // t, tp=t) for t in slices(shape, gpus)]


def copies(shape: Shape, gpus: int) -> list[Layout]:
    """Return ways to divide GPUs among copies of a model."""
    return [Layout(dp=gpus // t, tp=t) for t in slices(shape, gpus)]


def slices(shape: Shape, gpus: int) -> list[int]:
    """Return numbers of slices that divide GPUs and heads."""
    return [t for t in TENSOR if gpus % t == 0 and shape.heads % t == shape.kv_heads % t == 0]


def together(shape: Shape, gpus: int) -> Iterator[RunLayout]:
    """List layouts with all roles on all GPUs."""
    ways = copies(shape, gpus)
    scorers = [*ways, Layout(fsdp=gpus)]
    for learner, generator, scorer, offload, passes in product(
        learners(shape, gpus), ways, scorers, (False, True), PASSES
    ):
        yield RunLayout(learner, generator, scorer, "all", offload, *passes)


def apart(shape: Shape, gpus: int) -> Iterator[RunLayout]:
    """List layouts with roles on GPUs of their own."""
    for shares in EIGHTHS:
        learner_gpus, *others = (gpus * share // 8 for share in shares)
        generators, scorers = (copies(shape, count) for count in others)
        for learner, generator, scorer, passes in product(
            learners(shape, learner_gpus), generators, scorers, PASSES
        ):
            yield RunLayout(learner, generator, scorer, "none", False, *passes)


# -- Markdown --------------------------------------------------------------------------------------


def inputs(hardware: Hardware) -> str:
    """Return what the tables are made from."""
    gpu, links, assumed, load = hardware.gpu, hardware.links, hardware.assumed, WORKLOAD
    return table(
        ("", "published", "assumed of it"),
        [
            (
                f"{gpu.name}, bfloat16",
                f"{gpu.flops / 1e12:.0f} Tflop/s",
                f"{percent(assumed.prefill)} in a forward pass, {percent(assumed.training)} in "
                "training",
            ),
            (
                "its memory",
                f"{gb(gpu.memory_bytes)} GB, {gpu.memory_bytes_per_s / 1e12:.2f} TB/s",
                f"{percent(assumed.usable)} filled, {percent(assumed.memory)} of the bandwidth",
            ),
            (
                f"NVLink within {links.gpus_per_node} GPUs",
                f"{gb(links.within_bytes_per_s)} GB/s",
                percent(assumed.link),
            ),
            (
                "network, an adapter each GPU",
                f"{gb(links.between_bytes_per_s)} GB/s",
                percent(assumed.link),
            ),
            ("to the host", f"{gb(links.host_bytes_per_s)} GB/s", percent(assumed.link)),
            ("a decode step beside that", "", f"{1e3 * assumed.step_s:g} ms"),
            ("an all-reduce beside its bytes", "", f"{1e6 * assumed.reduce_s:g} µs"),
            (
                "a step",
                "",
                f"{load.responses} responses, {load.prompt_tokens} tokens of prompt and "
                f"{load.response_tokens} of response each, {load.epochs} epoch",
            ),
        ],
    )


def quickest(by_size: Mapping[str, Sequence[Row]]) -> str:
    """Return seconds of a step and what it waits for, of the quicker layout of each two."""
    counts = sorted({row.gpus for rows in by_size.values() for row in rows})
    lines = []
    for size, rows in by_size.items():
        line = [size]
        for gpus in counts:
            fitting = [row.best for row in rows if row.gpus == gpus and not row.best.bursts]
            best = min(fitting, key=lambda found: found.step_s, default=None)
            line.append(
                f"{brief(best.step_s)} s {where(best)}, {': '.join(best.bottleneck)}"
                if best
                else "does not fit"
            )
        lines.append(line)
    return table(("", *(f"{gpus} GPUs" for gpus in counts)), lines)


def where(found: Estimate) -> str:
    """Return whether roles share their GPUs."""
    return "colocated" if found.layout.colocated else "apart"


def layouts(rows: Sequence[Row]) -> str:
    """Return the chosen layouts with all that is said of them."""
    head = (
        *("GPUs", "learner, generators, scorers", "micro-batch, tokens", "memory a GPU, GB"),
        *("in over links a GPU, GB", "seconds", "step", "bottleneck"),
    )
    return table(head, [cells(row) for row in rows])


def cells(row: Row) -> tuple[str, ...]:
    """Return a layout's row."""
    best, layout = row.best, row.best.layout
    divided = (layout.learner, layout.generator, layout.scorer)
    roles = ", ".join(f"{n.data_parallel}x{n.tp}" for n in divided)
    if layout.scorer.fsdp > 1:
        roles += " shards"
    held = " / ".join(gb(phase.memory_bytes) for phase in best.phases)
    if best.bursts:
        named = ", ".join(phase.name for phase in best.bursts)
        outcome = ("", "", "", f"does not fit: {named}")
    else:
        name, limit = best.bottleneck
        outcome = (
            " / ".join(gb(phase.wire_bytes) for phase in best.phases),
            " / ".join(brief(phase.seconds) for phase in best.phases),
            f"{brief(best.step_s)} s",
            f"{name}: {limit}",
        )
    passes = f"{layout.micro_tokens:,}{', recomputed' if layout.checkpointing else ''}"
    offloaded = f"; {gb(best.host_bytes)} GB to the host" if layout.offload else ""
    return f"{row.gpus} {where(best)}", roles + offloaded, passes, held, *outcome


def travelling(sizes: Sequence[str], hardware: Hardware) -> str:
    """Return ways of weights to generators that are apart, and the tokens of a step."""
    learner, generator, scorer = SPLIT
    link = hardware.links.between_bytes_per_s * hardware.assumed.link
    rows = []
    for size in sizes:
        models = ModelShapes.of_one_size(LLAMAS[size])
        layout = RunLayout(learner, generator, scorer, "none")
        at_once_s = estimate(models, layout, WORKLOAD, hardware).syncs[0].exposed_s
        whole = broadcast_bytes(models.actor)
        first = gathered_first_bytes(models.actor, learner)
        rows.append(
            (
                size,
                f"{gb(whole)} GB, {gb(whole / learner.ranks)} GB",
                f"{at_once_s:.2f} s",
                f"{whole / link:.2f} s",
                f"{first / link:.2f} s",
                f"{chunk_bytes(WORKLOAD.tokens, 3) / 1e6:.1f} MB",
            )
        )
    head = (
        *("model", "its weights, a rank's shard", "ranks broadcast shards at once"),
        *("one after another", "all through the first rank", "tokens of a step to 3 scorers"),
    )
    return (
        f"From a learner of {learner.ranks} GPUs to generators on {generator.ranks}; where not "
        f"all ranks broadcast at once, one adapter works at a time:\n\n{table(head, rows)}"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def gb(size: float) -> str:
    """Return bytes in GB, to two digits at least or a tenth."""
    return f"{size / 1e9:,.0f}" if size >= 10e9 else f"{size / 1e9:.1f}"


def brief(seconds: float) -> str:
    """Return seconds, to a tenth or, below one, to a hundredth."""
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2f}"


def percent(share: float) -> str:
    """Return a share."""
    return f"{100 * share:.0f} %"


if __name__ == "__main__":
    main()
