"""Stretto beside its peers on this machine: PPO steps against TRL, decoding against vLLM.

Runs every program in a process of its own, peers and Stretto in turn, nothing else beside them, and
prints tables in Markdown; the file has what was measured so far after each run. The peers live in
environments of their own (peers/setup.sh).

    benchmarks/peers/setup.sh .peers
    python benchmarks/compare.py --model DIR --data gsm8k_train.jsonl --out table.md
    python benchmarks/compare.py --model DIR --data gsm8k_train.jsonl --only decode
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _shared import MISSING, parse
from stretto.machine import Machine, usable_cores
from stretto.models.devices import product_speeds

HERE = Path(__file__).parent


Results = dict[str, list[dict[str, Any]]]
"""By program, one of each run; without those whose packages are not installed."""


def run(results: Results, name: str, command: list[str], **environment: str) -> None:
    """Add a program's result: the JSON object that it prints."""
    print("running", " ".join(command), file=sys.stderr)
    done = subprocess.run(
        command, check=False, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode == MISSING:
        print(done.stderr.splitlines()[-1], file=sys.stderr)
        return
    if done.returncode:
        raise SystemExit(f"{name} ended with status {done.returncode}:\n{done.stderr}")
    results[name].append(json.loads(done.stdout.splitlines()[-1]))


def ppo(args: argparse.Namespace) -> Iterator[Results]:
    """PPO steps, in turn; all results so far after each run."""
    small = ["--model", str(args.model), "--data", str(args.data), "--steps", str(args.steps)]
    options = ["--smoke"] if args.smoke else small
    trl = sys.executable if args.smoke else str(args.peers / "trl/bin/python")
    results: Results = defaultdict(list)
    for _ in range(args.rounds):
        run(results, "Stretto", [sys.executable, str(HERE / "ppo_step.py"), *options])
        yield results
        run(results, "TRL 1.12 PPOTrainer", [trl, str(HERE / "peers/trl_ppo.py"), *options])
        yield results


def decode(args: argparse.Namespace) -> Iterator[Results]:
    """Decoding, in turn; all results so far after each run."""
    options = ["--smoke"] if args.smoke else ["--model", str(args.model)]
    python = sys.executable if args.smoke else str(args.peers / "vllm/bin/python")
    vllm = [python, str(HERE / "peers/vllm_decode.py"), *options]
    one_core = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
    results: Results = defaultdict(list)
    for _ in range(args.rounds):
        own = [sys.executable, str(HERE / "decode.py"), *options]
        run(results, "Stretto (with log-probs)", own)
        yield results
        run(results, "vLLM, all cores, with log-probs", [*vllm, "--logprobs"])
        yield results
        run(results, "vLLM, all cores", vllm)
        yield results
        run(results, "vLLM, as it comes (one core kept free)", vllm, **one_core)
        yield results
    peer = HERE / "peers/transformers_decode.py"
    run(results, "transformers generate", [sys.executable, str(peer), *options])
    yield results


def table(results: Results, figure: str, unit: str) -> list[str]:
    """One row a program: median of its runs, spread, Stretto over it, peak memory."""
    ours = statistics.median(r[figure] for r in next(iter(results.values())))
    lines = [f"| | {unit} | runs | Stretto is | peak memory |", "|---|---|---|---|---|"]
    for name, runs in results.items():
        values = [r[figure] for r in runs]
        middle = statistics.median(values)
        each = ", ".join(f"{v:.3g}" for v in values)
        memory = max(r["peak_rss_bytes"] for r in runs) / 1e9
        lines.append(f"| {name} | {middle:.3g} | {each} | {ours / middle:.2f}x | {memory:.1f} GB |")
    return lines


def phases(results: Results) -> list[str]:
    """Where the time of a step goes, in seconds."""
    lines = ["| | seconds of a step |", "|---|---|"]
    for name, runs in results.items():
        parts = {p: statistics.median(r["phase_s"][p] for r in runs) for p in runs[0]["phase_s"]}
        lines.append(f"| {name} | " + ", ".join(f"{p} {s:.2f}" for p, s in parts.items()) + " |")
    return lines


def text(parts: dict[str, Results], rates: str) -> str:
    """What was measured so far."""
    versions: dict[str, str] = {}
    for results in parts.values():
        for runs in results.values():
            versions = runs[0]["versions"] | versions
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [f"Machine: {Machine.here()}; {rates}. Peers: {named}.", ""]
    if steps := parts.get("ppo"):
        lines += [
            "PPO, SmolLM2-135M, bfloat16, 16 GSM8K prompts a step, 64 response tokens, one update:",
            "",
            *table(steps, "samples_per_s", "samples/s"),
            "",
            *phases(steps),
            "",
        ]
    if tokens := parts.get("decode"):
        lines += [
            "Decoding, SmolLM2-135M, bfloat16, 32 prompts of 26 tokens, 64 new tokens each:",
            "",
            *table(tokens, "tokens_per_s", "tokens/s"),
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M in HF format")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train file")
    parser.add_argument("--peers", type=Path, default=Path(".peers"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    args = parse(parser, {"model": "", "data": "", "rounds": 1})
    rates, found = str(product_speeds(usable_cores())), dict[str, Results]()
    for part in args.only:
        for results in PARTS[part](args):
            found[part] = results
            if args.out:
                args.out.write_text(text(found, rates))
    print(text(found, rates))


PARTS = {"ppo": ppo, "decode": decode}

if __name__ == "__main__":
    main()
