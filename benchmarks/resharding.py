"""Resharding from shards to slices in the same ranks, against gathering the whole model first.

Shards are float32 rows (FSDP), slices bfloat16 (tensor parallelism). Each way has processes of its
own, with one thread each; the quickest of ``--rounds`` is shown, and the memory that a rank had at
most beyond its shards and slices.

    python benchmarks/resharding.py
    python benchmarks/resharding.py --model smollm2-135m --ranks 3
"""

from __future__ import annotations

import argparse

from _resharding import Rank
from _shared import parse
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec

WAYS = {"reshard": "each sends what the other needs", "gather": "all gather the whole model"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="EleutherAI/pythia-410m-deduped")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parse(parser, {"model": "smollm2-135m", "ranks": [3], "rounds": 1})
    print("| ranks | way | seconds | MB that travel | MB at most beside shards and slices |")
    print("|---|---|---|---|---|")
    for count in args.ranks:
        filled = []
        for way, words in WAYS.items():
            ranks = RankGroup(GroupSpec(count), Rank, (args.model, args.bucket_mb)).start()
            found = [ranks.call(getattr(Rank, way)) for _ in range(args.rounds)]
            seconds = min(max(rank[0] for rank in each) for each in found)
            beside = max(rank[2] for each in found for rank in each)
            print(
                f"| {count} | {words} | {seconds:.2f} | {found[0][0][1] / 1e6:.0f} "
                f"| {beside / 1e6:.0f} |",
                flush=True,
            )
            filled.append(ranks.call(Rank.slices))
            ranks.close()
        for ours, theirs in zip(*filled, strict=True):
            assert all(ours[name].equal(tensor) for name, tensor in theirs.items())


if __name__ == "__main__":
    main()
