"""How OpenMP's waiting threads should wait: decoding and training, alone and beside a busy process.

OpenMP reads its environment when it is loaded, so every way to wait gets a process of its own. It
decodes, and makes forward and backward passes, for --seconds each: alone, then beside a Python loop
that keeps one core busy. All cores, bfloat16. What was measured while yet others were at work is
measured again.

    python benchmarks/waiting.py --model DIR
    python benchmarks/waiting.py --model DIR --ways spin=2000 sleep    # some of them
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from _shared import parse, random_prompts

OWN = 300_000
"""Turns for which libgomp's waiting threads spin by themselves before they sleep."""
TURNS = (OWN, 20_000, 10_000, 5_000, 3_000, 2_000, 1_000, 500)
WAYS: Mapping[str, Mapping[str, str]] = {
    **{f"spin={turns}": {"GOMP_SPINCOUNT": str(turns)} for turns in TURNS},
    "sleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one-thread": {"OMP_NUM_THREADS": "1"},
}
"""Environment by name."""
ROWS, PROMPT, CHUNK = 32, 26, 2
"""Prompts decoded at a time, their tokens, and tokens of each between two looks at the clock."""
UNDISTURBED, TRIES = 0.05, 5
"""Share of a core that others may take, and how often to try for it."""
TRAINED, LENGTH = 4, 128
"""Sequences of a training pass, and their tokens."""


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Speeds in this process, by what is done and whether beside a busy process."""
    import torch

    from stretto.models.load import load_causal_lm

    model = load_causal_lm(args.model, torch.bfloat16, torch.device("cpu"))
    works = {"decoding, tokens/s": decoding(model), "training, tokens/s": training(model)}
    found = {}
    for name, work in works.items():
        work()  # warms up
        found[name] = undisturbed(work, args.seconds, [])
        with busy() as other:
            found[f"{name} beside"] = undisturbed(work, args.seconds, [other])
    return found


def decoding(model: Any) -> Callable[[], int]:
    """Decodes a few tokens of a batch, with their log-probabilities, and says how many."""
    from stretto.config import RolloutConfig
    from stretto.rollout.base import EngineSettings
    from stretto.rollout.engine import TorchEngine
    from stretto.schedules.rollout import Rollout
    from stretto.types import Prompt

    ids = random_prompts(ROWS, PROMPT, 0, model.config.vocab_size)
    config = RolloutConfig(batch=ROWS, max_new_tokens=64)
    engine = TorchEngine(model, EngineSettings(rollout=config))
    numbers = count()

    def work() -> int:
        chunks = engine.decode(CHUNK).chunks
        if not chunks:  # all have ended
            prompts = (Prompt(i, tuple(tokens), "") for i, tokens in enumerate(ids))
            engine.admit([Rollout(next(numbers), p, p.id).response() for p in prompts])
            chunks = engine.decode(CHUNK).chunks
        return sum(len(chunk.tokens) for chunk in chunks)

    return work


def training(model: Any) -> Callable[[], int]:
    """Makes a forward and a backward pass, and says of how many tokens."""
    import torch

    ids = torch.tensor(random_prompts(TRAINED, LENGTH, 1, model.config.vocab_size))

    def work() -> int:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return ids.numel()

    return work


def undisturbed(work: Callable[[], int], seconds: float, beside: Sequence[psutil.Process]) -> float:
    """Units of work a second, while no others ran than this process and those beside."""

    def others_s() -> float:
        every = psutil.cpu_times()
        ours = (p.cpu_times() for p in (psutil.Process(), *beside))
        return float(every.user + every.nice + every.system - sum(t.user + t.system for t in ours))

    best, least_s = 0.0, float("inf")
    for _ in range(TRIES):
        before_s, start_s = others_s(), time.perf_counter()
        found = speed(work, seconds)
        lost_s = (others_s() - before_s) / (time.perf_counter() - start_s)
        if lost_s < least_s:
            best, least_s = found, lost_s
        if lost_s < UNDISTURBED:
            return best
    print(f"others took {least_s:.0%} of a core", file=sys.stderr)
    return best


def speed(work: Callable[[], int], seconds: float) -> float:
    """Units of work a second, over so many seconds or a single piece of work."""
    start_s, done = time.perf_counter(), 0
    while done == 0 or time.perf_counter() < start_s + seconds:
        done += work()
    return done / (time.perf_counter() - start_s)


@contextmanager
def busy() -> Iterator[psutil.Process]:
    """A process beside, that never waits."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def measured_in_a_process(way: str, options: list[str]) -> dict[str, float]:
    """The speeds of one way to wait."""
    # What the user's shell says would hold for every way.
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    command = [sys.executable, __file__, *options, "--here"]
    done = subprocess.run(
        command, env={**outside, **WAYS[way]}, stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=2, help="the median counts")
    parser.add_argument("--here", action="store_true", help="measure in this process, as it is")
    args = parse(parser, {"ways": ["spin=2000"], "seconds": 0.1, "rounds": 1}, model="model")
    if args.here:
        print(json.dumps(measure(args)))
        return
    options = ["--model", str(args.model), "--seconds", str(args.seconds)]
    results: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(args.rounds):
        for way in args.ways:
            results[way].append(measured_in_a_process(way, options))
            print(way, results[way][-1], file=sys.stderr, flush=True)
    names = list(results[args.ways[0]][0])
    print(f"| way to wait | {' | '.join(names)} |")
    print("|---" * (1 + len(names)) + "|")
    for way, runs in results.items():
        cells = (f"{median(run[name] for run in runs):.0f}" for name in names)
        print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
