"""PPO on 8 to 128 GPUs, on paper: the tables of docs/scaling.md.

    python benchmarks/scaling.py                       # H100s
    python benchmarks/scaling.py --gpu a100-80gb

For each number of GPUs the layout with the shortest step, by the formulas of ``stretto.planning``,
among those listed here that fit; once with all roles on all GPUs, and once with roles apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from _shared import parse
from stretto.planning import wire
from stretto.planning.estimate import Estimate, estimate
from stretto.planning.hardware import GPUS, Hardware, Links
from stretto.planning.layout import Layout, Mesh, Workload
from stretto.planning.shapes import LLAMAS, Models, Shape

COUNTS = (8, 16, 32, 64, 128)
TENSOR = (1, 2, 4, 8)
MICRO_TOKENS = (4096, 16_384)
LEARNER_EIGHTHS, SCORER_EIGHTHS = (2, 3, 4, 5, 6), (1, 2)
"""Shares of the GPUs, where roles are apart; generators get the rest."""
WORKLOAD = Workload()
PAGE_SIZE = "7B"
"""The model for which ways of handing weights over are compared."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table.

    Attributes:
        gpus: how many.
        colocated: all roles are on all of them.
        best: the quickest layout that fits; else the one that lacks least memory.
    """

    gpus: int
    colocated: bool
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


def tables(hardware: Hardware, sizes: list[str], counts: list[int]) -> str:
    """Return all tables as Markdown."""
    parts = [inputs(hardware)]
    for size in sizes:
        rows = list(rows_of(LLAMAS[size], hardware, counts))
        parts += [f"### {size}", layouts(rows), memory_and_traffic(rows), seconds(rows)]
    parts += ["### Weights and tokens on their way", transfers(sizes, hardware)]
    return "\n\n".join(parts)


def rows_of(shape: Shape, hardware: Hardware, counts: list[int]) -> Iterator[Row]:
    """Choose layouts of four models of one size."""
    models = Models.of_one_size(shape)
    for gpus in counts:
        for colocated in (True, False):
            listed = together(shape, gpus) if colocated else apart(shape, gpus)
            estimates = [estimate(models, layout, WORKLOAD, hardware) for layout in listed]
            yield Row(gpus, colocated, min(estimates, key=_preference))


def _preference(found: Estimate) -> tuple[float, float, int]:
    """What fits first, then what lacks least memory, then what is quick; of equals the simplest."""
    lacking = max(max(p.memory_bytes for p in found.phases) - found.usable_bytes, 0.0)
    meshes = (found.layout.learner, found.layout.generator, found.layout.scorer)
    return lacking, found.step_s, sum(mesh.tensor for mesh in meshes)


def meshes(shape: Shape, devices: int) -> list[Mesh]:
    """Return ways to divide devices among copies or shards of a model."""
    fitting = (t for t in TENSOR if devices % t == 0 and shape.heads % t == 0)
    return [Mesh(devices // t, t) for t in fitting]


def together(shape: Shape, gpus: int) -> Iterator[Layout]:
    """List layouts with all roles on all GPUs."""
    for learner, checkpointing, micro_tokens in _learners(shape, gpus):
        for generator in meshes(shape, gpus):
            for scorer in meshes(shape, gpus):
                for offload in (False, True):
                    yield Layout(
                        learner, generator, scorer, True, offload, checkpointing, micro_tokens
                    )


def apart(shape: Shape, gpus: int) -> Iterator[Layout]:
    """List layouts with roles on GPUs of their own."""
    for of_learner in LEARNER_EIGHTHS:
        for of_scorer in SCORER_EIGHTHS:
            rest = 8 - of_learner - of_scorer
            if rest < 1:
                continue
            counts = (gpus * eighths // 8 for eighths in (of_learner, rest, of_scorer))
            at_learner, at_generator, at_scorer = counts
            for learner, checkpointing, micro_tokens in _learners(shape, at_learner):
                for generator in meshes(shape, at_generator):
                    for scorer in meshes(shape, at_scorer):
                        yield Layout(
                            learner, generator, scorer, False, False, checkpointing, micro_tokens
                        )


def _learners(shape: Shape, devices: int) -> Iterator[tuple[Mesh, bool, int]]:
    for mesh in meshes(shape, devices):
        for checkpointing in (False, True):
            for micro_tokens in MICRO_TOKENS:
                yield mesh, checkpointing, micro_tokens


if __name__ == "__main__":
    main()
