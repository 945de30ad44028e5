"""Stretto's two engines beside each other: decoding, what chunks cost, and PPO steps.

Decoding: prompts of random token ids, sampled at temperature 1 with log-probs, in calls of so many
tokens; 'free-running' is one call for all. 'vLLM alone' is its own loop of iterations over the same
requests, of which nobody looks at the tokens. Steps: 'stretto train RECIPE' over processes, median
of all but the first; the processes of both engines have the same threads. Each figure comes from a
process of its own, the engines in turn, nothing else beside them.

    make vllm
    python benchmarks/vllm_engine.py --model DIR --python .venv-vllm/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from stretto.models.backend import keep_freed_memory

keep_freed_memory()  # before torch is imported, as the command line does

import torch

from _shared import parse, random_prompts
from stretto.assembly.roles import RoleFactory
from stretto.config import Config, ModelConfig, RolloutConfig, TaskConfig
from stretto.machine import Machine
from stretto.models.load import load_causal_lm
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.rollout.vllm.llm import installed
from stretto.types import IntArray, Prompt, Response

SMOKE = {"prompts": 2, "prompt_tokens": 4, "new_tokens": 8, "runs": 1, "steps": 2, "threads": 1}
CHUNKS = (8, 64, 256, 0)
"""Tokens of a call; 0 asks for all at once."""


def vllm_engine(model: Any, config: RolloutConfig, args: argparse.Namespace) -> Any:
    """Open vLLM with a model's weights."""
    settings = Config.model_construct(
        model=ModelConfig(name=args.model, dtype=args.dtype, device="cpu"),
        rollout=config,
        task=TaskConfig(max_prompt_tokens=args.prompt_tokens),
    )
    ends = frozenset[int]()
    tokenizer: Any = None  # no response ends
    return RoleFactory(settings, print).make_engine(
        model, tokenizer, args.prompts, ends, threads=args.threads
    )


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens/s of an engine in this process, by what was asked of it."""
    torch.set_num_threads(args.threads)
    options = {"enforce_eager": not args.compiled}
    config = RolloutConfig(
        batch=args.prompts,
        max_new_tokens=args.new_tokens,
        engine=args.engine,
        engine_args=options if args.engine == "vllm" else {},
    )
    model = load_causal_lm(args.model, getattr(torch, args.dtype), torch.device("cpu"))
    ids = random_prompts(args.prompts, args.prompt_tokens, 0, model.config.vocab_size)
    if args.engine == "vllm":
        engine: Any = vllm_engine(model, config, args)
    else:
        engine = TorchEngine(model, EngineSettings(rollout=config))
    nothing: IntArray = torch.empty(0, dtype=torch.int32).numpy()
    found: dict[str, list[float]] = defaultdict(list)
    for run in range(args.runs + 1):
        for chunk in CHUNKS:
            first = 10_000 * len(CHUNKS) * run + 10_000 * CHUNKS.index(chunk)
            engine.admit(
                [
                    Response(first + i, i, Prompt(first + i, tuple(tokens), ""), nothing)
                    for i, tokens in enumerate(ids)
                ]
            )
            start_s, done, made = time.perf_counter(), 0, 0
            while done < len(ids):
                new = engine.decode(chunk or args.new_tokens).chunks
                done += sum(c.finish is not None for c in new)
                made += sum(len(c.tokens) for c in new)
            seconds = time.perf_counter() - start_s
            if run:  # the first is a rehearsal
                found[str(chunk)].append(made / seconds)
        if args.engine == "vllm":
            rate = alone(engine, ids, args.new_tokens, str(run))
            found["alone"] += [rate] if run else []
    return found


def alone(engine: Any, ids: list[list[int]], new_tokens: int, run: str) -> float:
    """Tokens/s of vLLM's own loop over the same requests."""
    requests = engine._requests
    for i, tokens in enumerate(ids):
        requests.add(f"{run}.{i}", tokens, f"alone {run}", i, new_tokens)
    start_s = time.perf_counter()
    while requests.busy:
        requests._engine.step()
    return len(ids) * new_tokens / (time.perf_counter() - start_s)


def train_s(args: argparse.Namespace, engine: str, preset: str) -> float:
    """Seconds of a step of a run over processes, as its metrics have them."""
    with tempfile.TemporaryDirectory() as out:
        options = [f"--steps={args.steps}", f"--schedule.preset={preset}", f"--out={out}"]
        if args.smoke:
            options += ["--rollout.batch=4", "--rollout.max-new-tokens=4", "--warmup-examples=0"]
        settings = Path(out) / "engine.toml"
        settings.write_text(
            f'runtime = "local"\n[rollout]\nengine = "{engine}"\n'
            '[[cluster.processes]]\nroles = ["generator"]\n'
            + (f'python = "{args.python}"\n' if engine == "vllm" else "")
        )
        command = [sys.executable, "-m", "stretto", "train", args.recipe]
        command += [f"--overrides={settings}", f"--threads={args.threads}", *options]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (metrics,) = Path(out).glob("*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return float(statistics.median(row["timing_s/step"] for row in rows[1:]))


def child(args: argparse.Namespace, engine: str, compiled: bool) -> dict[str, list[float]]:
    """Measure an engine in a process of its own, and its interpreter."""
    names = ("model", "prompts", "prompt_tokens", "new_tokens", "runs", "threads", "dtype")
    options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    options += [f"--engine={engine}", *(["--compiled"] if compiled else [])]
    python = args.python if engine == "vllm" else sys.executable
    source = str(Path(__file__).parents[1] / "src")
    print("running", engine, "compiled" if compiled else "", file=sys.stderr)
    done = subprocess.run(
        [python, __file__, *options],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": str(args.threads)},
    )
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has vLLM")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=26)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--recipe", default="arithmetic")
    parser.add_argument("--presets", default="sync,oppo,async")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-compiled", action="store_true", help="leave out vLLM compiled")
    parser.add_argument("--engine", choices=("", "torch", "vllm"), default="", help="for itself")
    parser.add_argument("--compiled", action="store_true", help="for itself")
    args = parse(parser, SMOKE, model="model")
    if args.engine:
        print(json.dumps(measure(args)))
        return
    if args.smoke:
        args.recipe, args.presets, args.dtype, args.no_compiled = "tiny", "sync", "float32", True
    has = args.python != sys.executable or installed() is not None
    engines = [("Stretto's own", "torch", False)]
    if has:
        engines.append(("vLLM", "vllm", False))
        engines += [] if args.no_compiled else [("vLLM, compiled", "vllm", True)]
    else:
        print("vLLM is not installed for this interpreter; 'make vllm' makes one", file=sys.stderr)
    print(f"{Machine.here()}, {args.threads} threads, {args.dtype}\n")
    print(decode_table(args, engines))
    print()
    print(step_table(args, [name for _, name, compiled in engines if not compiled]))


def decode_table(args: argparse.Namespace, engines: list[tuple[str, str, bool]]) -> str:
    heads = [f"chunks of {chunk}" if chunk else "free-running" for chunk in CHUNKS]
    lines = [
        f"| tokens/s, {args.prompts} prompts, {args.new_tokens} tokens | {' | '.join(heads)} |",
        f"|---|{'---|' * len(CHUNKS)}",
    ]
    for title, engine, compiled in engines:
        found = child(args, engine, compiled)
        rates = {name: statistics.median(runs) for name, runs in found.items()}
        cells = [f"{rates[str(c)]:.0f} ({rates[str(c)] / rates['0']:.2f}x)" for c in CHUNKS]
        lines.append(f"| {title} | {' | '.join(cells)} |")
        if "alone" in rates:
            empty = "| " * (len(CHUNKS) - 1)
            lines.append(f"| {title}, alone {empty}| {rates['alone']:.0f} |")
    return "\n".join(lines)


def step_table(args: argparse.Namespace, engines: list[str]) -> str:
    lines = [f"| seconds a step, {args.recipe} | {' | '.join(engines)} |"]
    lines.append(f"|---|{'---|' * len(engines)}")
    for preset in args.presets.split(","):
        seconds = [train_s(args, engine, preset) for engine in engines]
        lines.append(f"| {preset} | {' | '.join(f'{s:.2f}' for s in seconds)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
