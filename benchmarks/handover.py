"""Seconds in which weights go from one process to others, beside a plain broadcast and a memcpy.

Each way is taken in turn, ``--rounds`` times; the medians are shown. Each process has one thread.

    python benchmarks/handover.py
    python benchmarks/handover.py --megabytes 1024 --followers 1 2 4
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch

from _handover import Side
from _shared import parse
from stretto.types import WeightsRef
from stretto.weights.transfer import Meeting, open_store
from stretto.workers.group_executor import GroupExecutor, ServiceGroup
from stretto.workers.rank import GroupSpec
from stretto.workers.services import Makes


def launched(megabytes: int, bucket_mb: int) -> ServiceGroup:
    """Start a process with one side."""
    makes: Makes = {"side": (Side, (megabytes, bucket_mb))}
    return ServiceGroup(GroupSpec(), makes, name="side").start()


def memcpy_s(megabytes: int) -> float:
    """Seconds of one copy within this process, on one thread."""
    torch.set_num_threads(1)
    source = torch.ones(megabytes << 18)
    target = torch.zeros_like(source)
    start_s = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - start_s


def measure(followers: int, args: argparse.Namespace) -> tuple[float, float]:
    """Median seconds of a hand-over, and of a plain broadcast, to so many followers."""
    groups = [launched(args.megabytes, args.bucket_mb) for _ in range(followers + 1)]
    learner, *others = (GroupExecutor(group, "side") for group in groups)
    store, port = open_store("127.0.0.1")
    meeting = Meeting("127.0.0.1", port, 120.0)
    ways = meeting.routes("weights/actor", 1, followers + 1)
    ours, plain = [], []
    with ThreadPoolExecutor(followers + 1) as pool:
        for turn in range(args.rounds):
            ref = WeightsRef("actor", turn, "x", "broadcast")
            mark = learner.ask(Side.put, ref).value
            loading = [
                pool.submit(o.ask, Side.load, ref, mark, w)
                for o, w in zip(others, ways[1:], strict=True)
            ]
            learner.ask(Side.send, ref, ways[0])
            ours.append(max(f.result().value for f in loading))
            routes = meeting.routes("plain", turn, followers + 1)
            done = [
                pool.submit(o.ask, Side.plain, r)
                for o, r in zip((learner, *others), routes, strict=True)
            ]
            plain.append(max(f.result().value for f in done))
    for group in groups:
        group.close()
    del store
    return median(ours), median(plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--followers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    args = parse(parser, {"megabytes": 16, "bucket_mb": 4, "followers": [1], "rounds": 2})
    copies = median(memcpy_s(args.megabytes) for _ in range(args.rounds + 1))
    gigabytes = args.megabytes / 1024
    print("| followers | hand-over, s/GiB | plain broadcast, s/GiB | ratio | memcpy, s/GiB |")
    print("|---|---|---|---|---|")
    for followers in args.followers:
        ours, plain = measure(followers, args)
        print(
            f"| {followers} | {ours / gigabytes:.2f} | {plain / gigabytes:.2f} | "
            f"{ours / plain:.2f} | {copies / gigabytes:.2f} |"
        )


if __name__ == "__main__":
    main()
