"""Stretto beside its peers on this machine: PPO steps against TRL, decoding against vLLM.

Runs every program in a process of its own, one after another, and prints tables in Markdown. The
file has the results so far after each round. The peers live in environments of their own
(peers/setup.sh).

A round runs Stretto and its peers once, every second round in reverse order. A pair is the ratio of
Stretto's result to a peer's of the same round. Rounds are repeated until the median over the pairs
with the first peer is known to 10 %, or ``--pairs`` rounds have run. Only pairs count during whose
runs the machine was quiet: other processes and steal by the hypervisor took little CPU time, and
nothing else was runnable before and after each run.

    benchmarks/peers/setup.sh .peers
    python benchmarks/compare.py --model DIR --data gsm8k_train.jsonl --out table.md
    python benchmarks/compare.py --model DIR --data gsm8k_train.jsonl --only decode
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import comb
from pathlib import Path
from typing import Any, NamedTuple, Self

from _shared import MISSING, parse
from stretto.machine import Machine, usable_cores
from stretto.models.devices import product_speeds

HERE = Path(__file__).parent

WIDTH = 0.10
"""Largest width of the interval of a median, relative to the median, at which rounds end."""
CONFIDENCE = 0.90
"""Least probability that the interval holds the true median."""
OTHERS, STEAL = 0.03, 0.02
"""Largest shares of the cores' time that others may take of a quiet machine."""


class Reading(NamedTuple):
    """CPU times in seconds since start-up: /proc/stat, and this process's ended children."""

    busy: float
    steal: float
    total: float
    children: float
    runnable: int  # threads other than this one, from /proc/loadavg

    @classmethod
    def now(cls) -> Self:
        columns = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        times = [int(column) / os.sysconf("SC_CLK_TCK") for column in columns]
        user, nice, system, idle, iowait, irq, softirq, steal = times
        busy = user + nice + system + irq + softirq
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        runnable = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1
        children = usage.ru_utime + usage.ru_stime
        return cls(busy, steal, busy + idle + iowait + steal, children, runnable)


class Noise(NamedTuple):
    """What else the machine did during a run."""

    others: float  # share of the cores' time that other processes took
    steal: float  # share that the hypervisor took
    runnable: int  # threads of others, before or after the run

    @classmethod
    def between(cls, before: Reading, after: Reading) -> Self:
        total = max(after.total - before.total, 1e-9)
        others = after.busy - before.busy - (after.children - before.children)
        runnable = max(before.runnable, after.runnable)
        return cls(max(others, 0.0) / total, (after.steal - before.steal) / total, runnable)

    @property
    def is_quiet(self) -> bool:
        return self.others <= OTHERS and self.steal <= STEAL and not self.runnable

    def __str__(self) -> str:
        return f"{self.others:.1%}, {self.steal:.1%}, {self.runnable}"


class Run(NamedTuple):
    """A program's result, and whether anything disturbed it."""

    result: dict[str, Any]  # the JSON object that the program printed
    noise: Noise


Round = Mapping[str, Run]
"""By program, without those whose packages are not installed."""


class Program(NamedTuple):
    """Stretto or a peer, as a command of its own."""

    name: str
    command: list[str]
    environment: Mapping[str, str] = {}


class Pair(NamedTuple):
    """Stretto and a peer in the same round."""

    ours: float
    theirs: float
    noises: tuple[Noise, Noise]

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def is_quiet(self) -> bool:
        return all(noise.is_quiet for noise in self.noises)


class Part(NamedTuple):
    """A comparison: Stretto's program, the peer whose pairs decide, and further peers."""

    title: str
    figure: str
    unit: str
    programs: Sequence[Program]

    def pairs(self, rounds: Sequence[Round], peer: str) -> list[Pair]:
        """Return one pair for each round in which both programs ran."""
        ours = self.programs[0].name
        both = [(r[ours], r[peer]) for r in rounds if ours in r and peer in r]
        return [
            Pair(a.result[self.figure], b.result[self.figure], (a.noise, b.noise)) for a, b in both
        ]


def adopt_orphans() -> None:
    """Become the parent of processes that outlive their own, such as vLLM's engine. The CPU time of
    children counts only once their parent has waited for them.
    """
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def wait_for_orphans(seconds: float = 10.0) -> None:
    end_s = time.monotonic() + seconds
    with suppress(ChildProcessError):  # there are none
        while time.monotonic() < end_s:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.1)


def execute(program: Program) -> Run | None:
    """Run a program. Returns None if its packages are not installed."""
    print("running", " ".join(program.command), file=sys.stderr)
    before = Reading.now()
    done = subprocess.run(
        program.command,
        check=False,
        env={**os.environ, **program.environment},
        capture_output=True,
        text=True,
    )
    wait_for_orphans()
    noise = Noise.between(before, Reading.now())
    if done.returncode == MISSING:
        print(done.stderr.splitlines()[-1], file=sys.stderr)
        return None
    if done.returncode:
        raise SystemExit(f"{program.name} ended with status {done.returncode}:\n{done.stderr}")
    return Run(json.loads(done.stdout.splitlines()[-1]), noise)


def measure(
    part: Part, limit: int, run: Callable[[Program], Run | None] = execute
) -> Iterator[list[Round]]:
    """Yield the rounds so far after each round, until the first peer's ratio is known."""
    rounds: list[Round] = []
    while len(rounds) < limit:
        programs = part.programs if len(rounds) % 2 == 0 else part.programs[::-1]
        runs = {program.name: run(program) for program in programs}
        rounds.append({name: r for name, r in runs.items() if r is not None})
        yield rounds
        pairs = part.pairs(rounds, part.programs[1].name)
        if not pairs or is_known(quiet_ratios(pairs)):
            return


def quiet_ratios(pairs: Sequence[Pair]) -> list[float]:
    return [pair.ratio for pair in pairs if pair.is_quiet]


def median_interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the narrowest interval between the k-th smallest and the k-th largest ratio that holds
    the median with CONFIDENCE, whatever their distribution is. None: too few ratios (4 or less).

    The median lies outside if fewer than k of n values fall on one side of it: binomial tails.
    """
    n, ordered, interval = len(ratios), sorted(ratios), None
    for k in range(1, (n + 1) // 2 + 1):
        outside = 2 * sum(comb(n, i) for i in range(k)) / 2**n
        if 1 - outside >= CONFIDENCE:
            interval = ordered[k - 1], ordered[n - k]
    return interval


def is_known(ratios: Sequence[float]) -> bool:
    interval = median_interval(ratios)
    if interval is None:
        return False
    low, high = interval
    return high - low < WIDTH * statistics.median(ratios)


def verdict(pairs: Sequence[Pair]) -> str:
    """Say how well the median over the pairs is known."""
    ratios = quiet_ratios(pairs)
    noisy = len(pairs) - len(ratios)
    lines = [f"The machine was NOT quiet in {noisy} of {len(pairs)} pairs (*)."] if noisy else []
    if not ratios:
        middle = statistics.median(pair.ratio for pair in pairs)
        return " ".join([*lines, f"No ratio. Median of the disturbed pairs: {middle:.2f}x."])
    interval = median_interval(ratios)
    if interval is None:
        bounds = f"unknown interval (5 quiet pairs are needed, there are {len(ratios)})"
    else:
        bounds = f"{CONFIDENCE:.0%} interval {interval[0]:.2f} to {interval[1]:.2f}"
    state = "known" if is_known(ratios) else "NOT known"
    lines.append(f"Median {statistics.median(ratios):.2f}x, {bounds}: {state} to {WIDTH:.0%}.")
    return " ".join(lines)


def tables(part: Part, rounds: Sequence[Round]) -> list[str]:
    """One row for each program, one for each pair, and the verdict."""
    lines = [part.title, "", f"| | {part.unit} | runs | Stretto is | peak memory |"]
    lines.append("|---|---|---|---|---|")
    pair_lines = []
    for program in part.programs:
        name = program.name
        runs = [r[name].result for r in rounds if name in r]
        if not runs:
            continue
        values = [run[part.figure] for run in runs]
        each = ", ".join(f"{v:.3g}" for v in values)
        memory = max(run["peak_rss_bytes"] for run in runs) / 1e9
        pairs = part.pairs(rounds, name)
        ratios = quiet_ratios(pairs) or [pair.ratio for pair in pairs]
        mark = "" if quiet_ratios(pairs) else "*"
        lines.append(
            f"| {name} | {statistics.median(values):.3g} | {each} "
            f"| {statistics.median(ratios):.2f}x{mark} | {memory:.1f} GB |"
        )
        if program is not part.programs[0]:
            pair_lines += [*pair_table(name, pairs), "", verdict(pairs), ""]
    return [*lines, "", *pair_lines, *phases(part, rounds)]


def pair_table(peer: str, pairs: Sequence[Pair]) -> list[str]:
    noise = "others' CPU, steal, runnable"
    lines = [
        f"| pair | Stretto | {noise} | {peer} | {noise} | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for number, pair in enumerate(pairs, 1):
        a, b = pair.noises
        mark = "" if pair.is_quiet else "*"
        lines.append(
            f"| {number} | {pair.ours:.3g} | {a} | {pair.theirs:.3g} | {b} "
            f"| {pair.ratio:.2f}x{mark} |"
        )
    return lines


def phases(part: Part, rounds: Sequence[Round]) -> list[str]:
    """Where the time of a step goes, in seconds."""
    lines = ["| | seconds of a step |", "|---|---|"]
    for program in part.programs:
        runs = [r[program.name].result for r in rounds if program.name in r]
        if not runs or "phase_s" not in runs[0]:
            return []
        parts = {p: statistics.median(r["phase_s"][p] for r in runs) for p in runs[0]["phase_s"]}
        each = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in parts.items())
        lines.append(f"| {program.name} | {each} |")
    return [*lines, ""]


def ppo(args: argparse.Namespace) -> Part:
    small = ["--model", str(args.model), "--data", str(args.data), "--steps", str(args.steps)]
    options = ["--smoke"] if args.smoke else small
    trl = sys.executable if args.smoke else str(args.peers / "trl/bin/python")
    title = "PPO, SmolLM2-135M, bfloat16, 16 GSM8K prompts a step, 64 response tokens, one update:"
    programs = [
        Program("Stretto", [sys.executable, str(HERE / "ppo_step.py"), *options]),
        Program("TRL 1.12 PPOTrainer", [trl, str(HERE / "peers/trl_ppo.py"), *options]),
    ]
    return Part(title, "samples_per_s", "samples/s", programs)


def decode(args: argparse.Namespace) -> Part:
    options = ["--smoke"] if args.smoke else ["--model", str(args.model)]
    python = sys.executable if args.smoke else str(args.peers / "vllm/bin/python")
    vllm = [python, str(HERE / "peers/vllm_decode.py"), *options]
    transformers = [sys.executable, str(HERE / "peers/transformers_decode.py"), *options]
    one_core = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
    title = "Decoding, SmolLM2-135M, bfloat16, 32 prompts of 26 tokens, 64 new tokens each:"
    programs = [
        Program("Stretto (with log-probs)", [sys.executable, str(HERE / "decode.py"), *options]),
        Program("vLLM, all cores, with log-probs", [*vllm, "--logprobs"]),
        Program("vLLM, all cores", vllm),
        Program("vLLM, default settings (one core kept free)", vllm, one_core),
        Program("transformers generate", transformers),
    ]
    return Part(title, "tokens_per_s", "tokens/s", programs)


def text(parts: Mapping[str, tuple[Part, Sequence[Round]]], rates: str) -> str:
    """What was measured so far."""
    versions: dict[str, str] = {}
    for _, rounds in parts.values():
        for run in rounds[0].values():
            versions = run.result["versions"] | versions
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [f"Machine: {Machine.here()}; {rates}. Peers: {named}.", ""]
    for part, rounds in parts.values():
        lines += tables(part, rounds)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M in HF format")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train file")
    parser.add_argument("--peers", type=Path, default=Path(".peers"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=11, help="rounds after which to give up")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--first", action="store_true", help="leave out all but the first peer")
    parser.add_argument("--out", type=Path)
    args = parse(parser, {"model": "", "data": "", "pairs": 1})
    adopt_orphans()
    rates = str(product_speeds(usable_cores()))
    results: dict[str, tuple[Part, Sequence[Round]]] = {}
    for name in args.only:
        part = PARTS[name](args)
        if args.first:
            part = part._replace(programs=part.programs[:2])
        for rounds in measure(part, args.pairs):
            results[name] = part, rounds
            if args.out:
                args.out.write_text(text(results, rates))
    print(text(results, rates))


PARTS = {"ppo": ppo, "decode": decode}

if __name__ == "__main__":
    main()
