"""Processes of a run that die or hang at random, and what becomes of its rollouts.

A run of two generators is disturbed from outside, by SIGKILL or SIGSTOP to the process of a random
generator or scorer, every few seconds. Its rollouts are then compared with those of an undisturbed
run on threads: the same ids, each once, and the same lengths.

    python benchmarks/chaos.py
    python benchmarks/chaos.py --steps 200 --every 2 --hangs 0.3
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import psutil

from _shared import parse
from stretto.cli.main import dispatch as stretto

RESTARTS = 1000
"""More than any run needs."""


def command(args: argparse.Namespace, out: Path, runtime: str) -> list[str]:
    """The run, as a command."""
    settings = {
        "steps": args.steps,
        "warmup-examples": 0,
        "threads": 1,
        "out": str(out),
        "rollout.engines": 2,
        "rollout.batch": args.batch,
        "rollout.max-new-tokens": args.tokens,
        "schedule.score-on": "rollout",
        "schedule.deadline-s": args.deadline_s,
        "observe.checkpoint-minutes": 0,
        "observe.progress": "off",
        "runtime": runtime,
        "cluster.restarts": RESTARTS,
    }
    options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "stretto", "train", "tiny", *options]


def disturb(
    args: argparse.Namespace, process: subprocess.Popen[bytes], out: Path
) -> dict[str, int]:
    """Disturb the run, once it has begun, until it ends; return how often, by role and signal."""
    draw, done = random.Random(args.seed), dict[str, int]()
    while process.poll() is None and not list(out.glob("*/metrics.jsonl")):
        time.sleep(0.1)
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0.2, 2 * args.every))
        victims = sorted(victims_of(process.pid).items())
        if not victims or process.poll() is not None:
            continue
        role, pid = draw.choice(victims)
        number = signal.SIGSTOP if draw.random() < args.hangs else signal.SIGKILL
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        name = f"{role}, {signal.Signals(number).name}"
        done[name] = done.get(name, 0) + 1
    return done


def victims_of(pid: int) -> dict[str, int]:
    """Ids of the run's processes that may be lost, by the name of their log."""
    found = {}
    try:
        for child in psutil.Process(pid).children(recursive=True):
            log = Path(f"/proc/{child.pid}/fd/2").readlink()
            if log.parent.name == "logs" and not log.stem.startswith("learner"):
                found[log.stem] = child.pid
    except (psutil.NoSuchProcess, OSError):
        return found
    return found


def rollouts(out: Path) -> list[dict[str, Any]]:
    """The run's records, in the order in which they were trained on."""
    (file,) = out.glob("*/rollouts.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two, on average")
    parser.add_argument("--hangs", type=float, default=0.25, help="share of SIGSTOP")
    parser.add_argument("--deadline-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="keep both runs in this folder, with their logs")
    args = parse(
        parser, {"steps": 2, "batch": 4, "tokens": 4, "every": 20.0, "hangs": 0.0, "deadline_s": 60}
    )
    with tempfile.TemporaryDirectory() as folder:
        whole, torn = (Path(args.out or folder) / name for name in ("whole", "torn"))
        with redirect_stdout(sys.stderr):
            stretto(command(args, whole, "inline")[3:])
        start_s = time.monotonic()
        process = subprocess.Popen(command(args, torn, "local"), stdout=sys.stderr)
        done = disturb(args, process, torn)
        seconds = time.monotonic() - start_s
        if process.returncode:
            raise SystemExit(f"the run ended with status {process.returncode}")
        (metrics,) = torn.glob("*/metrics.jsonl")
        last = json.loads(metrics.read_text().splitlines()[-1])
        expected, found = rollouts(whole), rollouts(torn)
    ids = [r["id"] for r in found if r["state"] == "trained"]
    lengths = {r["id"]: r["tokens"] for r in expected}
    print("| what | figure |")
    print("|---|---|")
    for name, count in sorted(done.items()):
        print(f"| signals to {name} | {count} |")
    print(f"| processes lost and replaced | {last['cluster/deaths']:.0f} |")
    print(f"| steps, seconds | {args.steps}, {seconds:.0f} |")
    print(f"| rollouts trained on | {len(ids)} |")
    print(f"| rollouts lost | {len(set(lengths) - set(ids))} |")
    print(f"| trained twice | {len(ids) - len(set(ids))} |")
    print(f"| of another length | {sum(lengths.get(r['id']) != r['tokens'] for r in found)} |")
    if set(ids) != set(lengths) or len(ids) != len(lengths):
        raise SystemExit("rollouts were lost, or trained twice")


if __name__ == "__main__":
    main()
