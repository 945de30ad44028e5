"""Decode throughput of Stretto's engine in the setting of peers/vllm_decode.py.

32 prompts of 26 random token ids and 64 new tokens each, bfloat16, sampled at temperature 1, each
with its log-probability. The prefill counts in the time; loading and one warm-up call do not.

    python benchmarks/decode.py --model DIR
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from importlib.metadata import version
from pathlib import Path

from stretto.models.backend import keep_freed_memory

keep_freed_memory()  # before torch is imported, as the command line does

import torch

from _shared import parse, random_prompts
from stretto.config import RolloutConfig
from stretto.models.load import load_causal_lm
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.schedules.rollout import Rollout
from stretto.types import Prompt

SMOKE = {"prompts": 2, "prompt_tokens": 4, "new_tokens": 4, "runs": 1}


def seconds(
    folder: Path,
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    runs: int = 5,
) -> list[float]:
    """Seconds of each run, prefill and decoding together."""
    model = load_causal_lm(folder, dtype, torch.device("cpu"))
    ids = random_prompts(rows, prompt_tokens, seed, model.config.vocab_size)
    prompts = [Prompt(i, tuple(tokens), "") for i, tokens in enumerate(ids)]
    config = RolloutConfig(batch=rows, max_new_tokens=new_tokens)
    engine = TorchEngine(model, EngineSettings(rollout=config, seed=seed))

    def timed(run: int) -> float:
        engine.admit([Rollout(run * rows + p.id, p, p.id).response() for p in prompts])
        start = time.perf_counter()
        chunks = engine.decode(new_tokens).chunks
        assert sum(len(c.tokens) for c in chunks) == rows * new_tokens
        return time.perf_counter() - start

    return [timed(run) for run in range(runs + 1)][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=26)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the JSON as well")
    args = parse(parser, SMOKE, model="model")

    sizes = args.prompts, args.prompt_tokens, args.new_tokens
    took = seconds(args.model, *sizes, args.seed, runs=args.runs)
    runs = [args.prompts * args.new_tokens / each for each in took]
    result = {
        "name": f"stretto {version('stretto')}",
        "tokens_per_s": statistics.median(runs),
        "runs": runs,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
