"""A learner in shards against one process: gradients, weights after some steps, memory.

Memory is that of the fullest rank, without the pages of files and without what a process holds
before there are models.

Differences are relative to the largest entry of each tensor, and the largest over all tensors.

    python benchmarks/sharded.py                                   # a tiny model, all algorithms
    python benchmarks/sharded.py --model DIR --algorithms ppo --memory    # nothing is compared
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from _sharded import Side, batch_of
from _shared import parse
from stretto.config.algorithm import ALGORITHMS
from stretto.models.tiny import make_tiny
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec

LENGTHS = [(12, 7), (12, 40), (30, 5), (30, 33), (8, 64), (8, 2), (20, 16), (20, 50)]
"""Tokens of prompts and responses."""

WITHOUT_TEACHER = [name for name, spec in ALGORITHMS.items() if not spec.teacher]


def settings(algorithm: str) -> dict[str, Any]:
    return {
        "algorithm": {"name": algorithm},
        "rollout": {"batch": len(LENGTHS), "samples_per_prompt": 2, "max_new_tokens": 64},
        "training": {"lr": 1e-4, "critic_lr": 1e-4, "microbatch_tokens": 128},
    }


def difference(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
    assert one.keys() == two.keys()
    each = [float((one[n] - two[n]).abs().max() / two[n].abs().max()) for n in two]
    return max(each, default=math.nan)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="folder; a tiny model without one")
    parser.add_argument(
        "--layouts", nargs="+", default=["2x1", "3x1", "1x2", "2x2"], help="fsdp x tp, such as 2x2"
    )
    parser.add_argument("--algorithms", nargs="+", default=WITHOUT_TEACHER)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="memory and seconds alone")
    args = parse(parser, {"layouts": ["1x2"], "algorithms": ["ppo"], "steps": 1})
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch) / "tiny"
        if not args.model:
            make_tiny(folder)
        vocabulary = AutoConfig.from_pretrained(folder).vocab_size
        print(
            "| fsdp x tp | algorithm | gradients | weights | s a step "
            "| GB at most, loading | GB once loaded | GB after the steps |"
        )
        print("|---|---|---|---|---|---|---|---|")
        whole: dict[str, Any] = {}
        for layout in ["1x1", *args.layouts]:
            fsdp, tp = map(int, layout.split("x"))
            ranks = RankGroup(GroupSpec(fsdp * tp), Side, (folder, tp)).start()
            for name in args.algorithms:
                batch = batch_of(name, LENGTHS, vocabulary)
                found = ranks.call(Side.learn, settings(name), batch, args.steps, not args.memory)
                gradients, weights, seconds, _ = found[0]
                before = whole.setdefault(name, (gradients, weights))
                used = [
                    max(sizes) / 1e9 for sizes in zip(*(rank[3] for rank in found), strict=True)
                ]
                print(
                    f"| {layout} | {name} | {difference(gradients, before[0]):.1e} "
                    f"| {difference(weights, before[1]):.1e} | {seconds:.2f} | "
                    + " | ".join(f"{size:.2f}" for size in used)
                    + " |",
                    flush=True,
                )
            ranks.close()


if __name__ == "__main__":
    main()
