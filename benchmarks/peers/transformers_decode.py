"""Decode throughput of transformers' `generate` on the CPU.

Measured: the wall time of one `generate` call on a batch of prompts (by default 32 prompts of 26
random token ids and 64 new tokens each, sampled at temperature 1 from the whole vocabulary, bf16
weights). The end-of-sequence token is held back by min_new_tokens, so every call yields exactly
prompts x new tokens. The prefill counts in the time; loading and one warm-up call do not.
tokens_per_s is new tokens over wall time, median of the measured calls. Run it in this project's
environment:

    python benchmarks/peers/transformers_decode.py --model DIR [--out result.json]
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from _shared import parse, random_prompts

SMOKE = {"prompts": 2, "prompt_tokens": 4, "new_tokens": 4, "runs": 1}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of a causal LM in HF format")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=26)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the JSON as well")
    return parse(parser, SMOKE, model="model")


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model.eval()
    size = model.config.vocab_size
    prompts = torch.tensor(random_prompts(args.prompts, args.prompt_tokens, args.seed, size))

    def tokens_per_s() -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=args.new_tokens,
                max_new_tokens=args.new_tokens,
            )
        elapsed = time.perf_counter() - start
        new: int = out.shape[1] - args.prompt_tokens
        if new != args.new_tokens:
            raise RuntimeError(f"{new} new tokens a prompt, not {args.new_tokens}")
        return float(args.prompts * new / elapsed)

    tokens_per_s()
    runs = [tokens_per_s() for _ in range(args.runs)]
    result = {
        "name": f"transformers {version('transformers')} generate",
        "tokens_per_s": statistics.median(runs),
        "runs": runs,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
