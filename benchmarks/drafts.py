"""What proposed tokens (speculative_tokens) save of generation, on the machine at hand.

Answers to GSM8K questions are sampled, several to a prompt, in several epochs, by an engine that
proposes tokens and by one that does not, in turn. Both draw the same random numbers, so that they
sample the same tokens as far as products of other shapes are rounded alike: 'equal' is the share of
responses that are.

    python benchmarks/drafts.py --model DIR --data gsm8k_train.jsonl
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from stretto.models.backend import keep_freed_memory

keep_freed_memory()  # before torch is imported, as the command line does

import torch
from torch import nn

from _shared import parse
from stretto import tasks
from stretto.config import Config, RolloutConfig
from stretto.machine import Machine
from stretto.models.devices import product_speeds
from stretto.models.load import load_causal_lm, load_tokenizer
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.schedules.rollout import Rollout
from stretto.tasks.prompts import PromptSource
from stretto.types import Prompt

SMOKE = {
    "prompts": 2, "samples": 2, "epochs": 2, "new_tokens": 12, "temperatures": [1.0],
    "proposed": [2], "rows": [4],
}  # fmt: skip


class Measured:
    """An engine, and what its epochs took and gave."""

    def __init__(
        self, model: nn.Module, draft: nn.Module | None, args: argparse.Namespace, **options: Any
    ) -> None:
        generation: Any = model.generation_config
        config = RolloutConfig(
            batch=args.samples * args.prompts,
            samples_per_prompt=args.samples,
            max_new_tokens=args.new_tokens,
            **options,
        )
        ends = frozenset(torch.tensor(generation.eos_token_id).flatten().tolist())
        settings = EngineSettings(rollout=config, seed=args.seed, end_tokens=ends, draft=draft)
        self.engine = TorchEngine(model, settings)
        self.seconds, self.few_s, self.made = 0.0, 0.0, list[Rollout]()

    def epoch(self, prompts: Sequence[Prompt], number: int) -> None:
        """Sample answers to all prompts; count the seconds from when 8 rows or fewer are left."""
        samples = self.engine.settings.rollout.samples_per_prompt
        rows = samples * len(prompts)
        made = [
            Rollout(number * rows + i, prompts[i // samples], number * len(prompts) + i // samples)
            for i in range(rows)
        ]
        by_id = {r.id: r for r in made}
        self.engine.admit([r.response() for r in made])
        begun = time.perf_counter()
        for stop_after in (max(rows - 8, 0), 0):
            few = time.perf_counter()
            for chunk in self.engine.decode(
                self.engine.settings.rollout.max_new_tokens, stop_after
            ).chunks:
                by_id[chunk.rollout_id].append(chunk)
        self.few_s += time.perf_counter() - few
        self.seconds += time.perf_counter() - begun
        self.made += made


def lines(args: argparse.Namespace) -> Iterator[str]:
    config = Config.model_validate({"task": {"kind": "gsm8k", "name": str(args.data)}})
    tokenizer = load_tokenizer(args.model)
    source = PromptSource(tasks.load(config.task, args.seed), config.task, tokenizer, args.seed)
    prompts = source.first(args.prompts)
    dtype, cpu = getattr(torch, args.dtype), torch.device("cpu")
    model = load_causal_lm(args.model, dtype, cpu)
    draft = load_causal_lm(args.draft, dtype, cpu) if args.draft else None
    yield (
        f"Machine: {Machine.here()}, {args.dtype}, {product_speeds(torch.get_num_threads())}. "
        f"{args.prompts} prompts, {args.samples} answers each, up to {args.new_tokens} tokens, "
        f"{args.epochs} epochs."
    )
    yield ""
    yield (
        "| temperature | rows | proposed | s an epoch | of it, 8 rows or fewer | gain | accepted a "
        "row | equal |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for temperature in args.temperatures:
        cases = [(0, 1), *((k, rows) for k, rows in product(args.proposed, args.rows))]
        runs = {
            (k, rows): Measured(
                model,
                draft,
                args,
                temperature=temperature,
                engine_args={"speculative_tokens": k, "speculative_rows": rows},
            )
            for k, rows in cases
        }
        for epoch in range(args.epochs):
            for run in runs.values():
                run.epoch(prompts, epoch)
        plain = runs[cases[0]]
        for (k, rows), run in runs.items():
            counts = run.engine.speculated
            accepted = counts["accepted"] / max(counts["eligible"], 1) if counts else 0.0
            pairs = zip(plain.made, run.made, strict=True)
            equal = sum(a.tokens.tolist() == b.tokens.tolist() for a, b in pairs)
            yield (
                f"| {temperature} | {rows if k else ''} | {k or 'none'} "
                f"| {run.seconds / args.epochs:.1f} | {run.few_s / run.seconds:.0%} "
                f"| {plain.seconds / run.seconds:.2f} | {accepted:.2f} "
                f"| {equal / len(plain.made):.0%} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder in HF format")
    parser.add_argument("--draft", type=Path, help="smaller model that proposes; else texts do")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train file")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="answers to a prompt")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=640)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.7, 0.3])
    parser.add_argument("--proposed", type=int, nargs="+", default=[4], help="most tokens a row")
    parser.add_argument("--rows", type=int, nargs="+", default=[8], help="up to which it is done")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the table as well")
    args = parse(parser, SMOKE, model="model", data="data")
    shown = []
    for line in lines(args):
        print(line, flush=True)
        shown.append(line)
        if args.out:
            args.out.write_text("\n".join(shown) + "\n")


if __name__ == "__main__":
    main()
