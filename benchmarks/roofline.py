"""How much of each phase's time its matrix products would take at the rate that this machine has.

Products alone are measured first, with the shapes of the model's layers and rows as in training and
as in decoding; then PPO steps as in ppo_step.py, and decoding as in decode.py, in this process and
in turn. What a phase takes beyond its products is what there is to gain. A second table has the
time of one update by operation, on one thread.

    python benchmarks/roofline.py --model DIR --data gsm8k_train.jsonl
    python benchmarks/roofline.py --model DIR --data gsm8k_train.jsonl --only operations
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from stretto.models.backend import keep_freed_memory

keep_freed_memory()  # before torch is imported, as the command line does

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

import decode
import ppo_step
from _shared import parse
from engine_and_learner import scored, worker
from stretto import tasks
from stretto.config import Config
from stretto.config.training_config import token_budget
from stretto.machine import Machine
from stretto.models.cpu_threads import set_threads
from stretto.models.load import load_tokenizer
from stretto.runtime.run import start
from stretto.schedules.rollout import train_batch
from stretto.tasks.prompts import PromptSource

SMOKE = {"steps": 2, "prompts_per_step": 2, "response_tokens": 4, "decoded": 2, "seconds": 0.05}


class Shapes(NamedTuple):
    """Inputs and outputs of a model's matrices: those of one token's pass through the body, and the
    vocabulary's.
    """

    body: Sequence[tuple[int, int]]
    head: tuple[int, int]
    hidden: int
    layers: int

    def flops(self, tokens: int, pairs: int, sampled: int) -> float:
        """Operations of products for tokens of the body, pairs of tokens that attention compares,
        and tokens whose log-probabilities are taken."""
        body = sum(a * b for a, b in self.body)
        attention = 2 * self.layers * self.hidden * pairs
        return 2.0 * (tokens * body + attention + sampled * self.head[0] * self.head[1])


def shapes(model: Path) -> Shapes:
    found = AutoModelForCausalLM.from_pretrained(model)
    linear = {n: m for n, m in found.named_modules() if isinstance(m, nn.Linear)}
    head = linear.pop("lm_head")
    sizes = [(m.in_features, m.out_features) for m in linear.values()]
    config = found.config
    hidden, layers = config.hidden_size, config.num_hidden_layers
    return Shapes(sizes, (head.in_features, head.out_features), hidden, layers)


def rate(sizes: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype, seconds: float) -> float:
    """Operations a second of products of ``rows`` rows with matrices of these sizes, one after
    another, the best of several passes."""
    matrices = [torch.randn(b, a, dtype=dtype) for a, b in sizes]
    inputs = {a: torch.randn(rows, a, dtype=dtype) for a, _ in sizes}
    best, began = float("inf"), time.perf_counter()
    with torch.inference_mode():
        while time.perf_counter() - began < seconds or best == float("inf"):
            start = time.perf_counter()
            for matrix in matrices:
                nn.functional.linear(inputs[matrix.shape[1]], matrix)
            best = min(best, time.perf_counter() - start)
    return 2.0 * rows * sum(a * b for a, b in sizes) / best


def prompt_tokens(args: argparse.Namespace) -> float:
    """Tokens of a prompt, the mean of those that the steps draw."""
    config = ppo_step.settings(args, Path("none")).task
    tokenizer = load_tokenizer(Path(args.model))
    prompts = PromptSource(tasks.load(config, args.seed), config, tokenizer, args.seed)
    drawn = prompts.first(args.prompts_per_step * args.steps)
    return statistics.fmean(len(prompt.tokens) for prompt in drawn)


def phases(args: argparse.Namespace, config: Config) -> list[str]:
    """A table of what each phase takes, and what its products alone would take."""
    dtype = getattr(torch, args.dtype)
    sizes = shapes(args.model)
    budget = token_budget(0, "cpu")

    def rates() -> list[float]:
        every = [*sizes.body, sizes.head]
        few = (args.prompts_per_step, args.decoded)
        many = rate(sizes.body, budget, dtype, args.seconds)
        return [many, *(rate(every, rows, dtype, args.seconds) for rows in few)]

    before = rates()
    _, steps = ppo_step.timed(config)
    new, rows = args.response_tokens, args.prompts_per_step
    sizes_of = args.decoded, 26, new
    decoded_s = statistics.median(decode.seconds(Path(args.model), *sizes_of, args.seed, dtype))
    many, few, alone = map(max, zip(before, rates(), strict=True))

    prompt = prompt_tokens(args)
    total = prompt + new
    read = sizes.flops(round(rows * prompt), round(rows * prompt**2 / 2), 0)
    drawn = sizes.flops(rows * new, round(rows * new * (prompt + new / 2)), rows * new)
    scored = sizes.flops(round(rows * total), round(rows * total**2 / 2), 0)
    walked = sizes.flops(round(rows * total), round(rows * total**2 / 2), rows * new)
    single = sizes.flops(args.decoded * new, round(args.decoded * new * (26 + new / 2)), 0)
    single += sizes.flops(0, 0, args.decoded * new)
    wanted_s = {
        "gen": read / many + drawn / few,
        "score/reward-model": scored / many,
        "score/reference": walked / many,
        "score/critic": scored / many,
        "update": 3 * (walked + scored) / many,
    }
    took_s = {name: statistics.median(p[name] for p in steps[1:]) for name in wanted_s}
    wanted_s["whole step"], took_s["whole step"] = sum(wanted_s.values()), sum(took_s.values())
    wanted_s[f"decoding {args.decoded} rows"] = (
        sizes.flops(26 * args.decoded, 26 * 13 * args.decoded, 0) / many + single / alone
    )
    took_s[f"decoding {args.decoded} rows"] = decoded_s
    print("seconds of the steps' phases:", steps, file=sys.stderr)
    return [
        f"Machine: {Machine.here()}, {args.dtype}. Products: "
        f"{many / 1e9:.0f} GFLOP/s with {budget} rows, {few / 1e9:.0f} with {rows}, "
        f"{alone / 1e9:.0f} with {args.decoded}.",
        "",
        "| phase | s | products alone, s | share |",
        "|---|---|---|---|",
        *(
            f"| {name} | {took_s[name]:.3g} | {wanted_s[name]:.3g} "
            f"| {wanted_s[name] / took_s[name]:.0%} |"
            for name in wanted_s
        ),
    ]


PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mkldnn_linear")
PARTS = {
    "log-probabilities": ("_TokenLogprobs", "_TokenLogprobsBackward"),
    "attention": ("_CausalAttention", "_CausalAttentionBackward"),
    "optimizer": ("Optimizer.step#AdamW.step",),
}
"""Parts of an update whose operations, products included, are counted once more together."""


def operations(config: Config, rows: int = 14) -> list[str]:
    """A table of one update's time by operation, on one thread, actor and critic in turn."""
    with ExitStack() as stack:
        say = partial(print, file=sys.stderr)
        run = start(config, stack, say, ppo_step.NEVER_ENDS)
        batch = train_batch(scored(run, config.rollout.batch, 0)[0])
        learner, threads = worker(run, "learner"), torch.get_num_threads()
        set_threads(1)
        learner.train(batch)  # touches all memory
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            learner.train(batch)
        set_threads(threads)
    events = {event.key: event for event in profiler.key_averages()}
    total = sum(event.self_cpu_time_total for event in events.values())
    seconds = {name: event.self_cpu_time_total for name, event in events.items()}
    products = sum(seconds.pop(name, 0.0) for name in PRODUCTS)
    top = sorted(seconds, key=seconds.__getitem__, reverse=True)[:rows]
    shares = {"products": products, **{name: seconds[name] for name in top}}
    shares["the rest"] = total - sum(shares.values())
    lines = [f"An update on one thread: {total / 1e6:.1f} s.", ""]
    lines += ["| operation | calls | s | share |", "|---|---|---|---|"]
    for name, micros in shares.items():
        calls = events[name].count if name in events else ""
        lines.append(f"| {name} | {calls} | {micros / 1e6:.2f} | {micros / total:.1%} |")
    for part, names in PARTS.items():
        micros = sum(events[name].cpu_time_total for name in names if name in events)
        lines.append(f"| in all: {part} | | {micros / 1e6:.2f} | {micros / total:.1%} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder in HF format")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train file")
    parser.add_argument("--steps", type=int, default=4, help="of PPO; the first does not count")
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--decoded", type=int, default=32, help="rows of decoding alone")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each rate's measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["phases", "operations"], help="one of the tables")
    parser.add_argument("--out", type=Path, help="where to write the tables as well")
    args = parse(parser, SMOKE, model="model", data="data")
    args.temperature, args.microbatch_tokens = 1.0, 0
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        reward_model = Path(scratch) / "reward-model"
        ppo_step.save_reward_model(args.model, reward_model, args.seed)
        config = ppo_step.settings(args, reward_model)
        if args.only != "operations":
            lines += [*phases(args, config), ""]
        if args.only != "phases":
            lines += operations(config)
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
