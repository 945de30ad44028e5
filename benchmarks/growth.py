"""How time and memory of a step grow: with the batch, the length of responses, and the model.

Each point is a process of its own, which takes two steps of RLOO on GSM8K prompts (4 responses to
each prompt, a reference, no critic); the second counts. Nothing ends a response, so that all are of
one length. Models but the given one are random weights of their true shape, with adapters of rank
16, as the weights, masters, gradients and moments of the largest would take 20 GB. An exponent of 1
is growth in proportion, from one row of a table to the next.

    python benchmarks/growth.py --model DIR --data gsm8k_train.jsonl
    python benchmarks/growth.py --model DIR --data gsm8k_train.jsonl --only length
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from stretto.models.backend import keep_freed_memory

keep_freed_memory()  # before torch is imported, as the command line does

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ppo_step
from _shared import parse
from stretto.config import Config
from stretto.machine import Machine
from stretto.models import info
from stretto.models.devices import product_speeds

SMOKE = {"batches": [4, 8], "lengths": [4], "shapes": ["given"], "rows": 4, "new_tokens": 4}

SHAPES = {
    "360M": {"hidden": 960, "layers": 32, "heads": 15, "kv_heads": 5, "inner": 2560},  # SmolLM2
    "1B": {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "inner": 8192},  # Llama 3.2
}
"""Sizes of models by name; the vocabulary is the given model's."""


class Point(NamedTuple):
    """A run: its responses, their tokens, and the folder of its model."""

    rows: int
    new_tokens: int
    model: str
    lora_rank: int = 0


class Found(NamedTuple):
    """What a step of it took."""

    gen_s: float
    score_s: float
    update_s: float
    peak_bytes: int
    weights: int

    @property
    def step_s(self) -> float:
        """The seconds of the phases together; nothing overlaps."""
        return self.gen_s + self.score_s + self.update_s


def settings(point: Point, args: argparse.Namespace) -> Config:
    return Config.model_validate(
        {
            "seed": args.seed,
            "steps": 2,
            "model": {"name": point.model, "dtype": args.dtype, "lora_rank": point.lora_rank},
            "task": {"kind": "gsm8k", "name": str(args.data)},
            "reward": {"missing_eos": "off"},
            "algorithm": {"name": "rloo"},
            "rollout": {
                "batch": point.rows,
                "samples_per_prompt": 4,
                "max_new_tokens": point.new_tokens,
            },
        }
    )


def measure(point: Point, args: argparse.Namespace) -> tuple[float, float, float, int, int]:
    """Take two steps in this process; what :class:`Found` has."""
    config = settings(point, args)
    _, phases = ppo_step.timed(config)
    took = phases[-1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    weights, _ = info.measure(config.model)
    return took["gen"], took["score/reference"], took["update"], peak, weights


def in_a_process(point: Point, args: argparse.Namespace) -> Found:
    """Take them in a new process, whose peak of memory is theirs alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.modeling_utils", "stretto.runtime.run"])
    with ProcessPoolExecutor(1, context) as pool:
        return Found(*pool.submit(measure, point, args).result())


def shaped(name: str, folder: Path, like: str) -> str:
    """Write a model of random weights, with a tokenizer and vocabulary like another's."""
    if name == "given":
        return like
    s, config = SHAPES[name], AutoConfig.from_pretrained(like)
    config.update(
        {
            "hidden_size": s["hidden"],
            "num_hidden_layers": s["layers"],
            "num_attention_heads": s["heads"],
            "num_key_value_heads": s["kv_heads"],
            "head_dim": s["hidden"] // s["heads"],
            "intermediate_size": s["inner"],
        }
    )
    made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(like).save_pretrained(folder)
    return str(folder)


def table(
    what: str, sizes: Sequence[float], names: Sequence[str], found: Iterator[Found]
) -> Iterator[str]:
    """Rows of a table, each as soon as it is measured, with exponents since the row before."""
    yield ""
    yield f"| {what} | step, s | exponent | generation | scoring | update | GB | exponent |"
    yield "|---|---|---|---|---|---|---|---|"
    before: tuple[float, Found] | None = None
    for size, name, now in zip(sizes, names, found, strict=True):
        powers = ["", ""]
        if before:
            last, then = before
            growth = [now.step_s / then.step_s, now.peak_bytes / then.peak_bytes]
            of_size = math.log((size or now.weights) / (last or then.weights))
            powers = [f"{math.log(each) / of_size:.2f}" for each in growth]
        yield (
            f"| {name} | {now.step_s:.3g} | {powers[0]} | {now.gen_s:.3g} | {now.score_s:.3g} "
            f"| {now.update_s:.3g} | {now.peak_bytes / 1e9:.2g} | {powers[1]} |"
        )
        before = size, now


def tables(args: argparse.Namespace, scratch: Path) -> Iterator[str]:
    speeds = product_speeds(torch.get_num_threads())
    yield f"Machine: {Machine.here()}, {args.dtype}, {speeds}."
    model = str(args.model)
    if args.only in ("", "batch"):
        points = [Point(rows, args.new_tokens, model) for rows in args.batches]
        found = (in_a_process(point, args) for point in points)
        what = f"responses of {args.new_tokens} tokens"
        yield from table(what, args.batches, [str(n) for n in args.batches], found)
    if args.only in ("", "length"):
        points = [Point(args.rows, tokens, model) for tokens in args.lengths]
        found = (in_a_process(point, args) for point in points)
        what = f"tokens of {args.rows} responses"
        yield from table(what, args.lengths, [str(n) for n in args.lengths], found)
    if args.only in ("", "model"):
        folders = (shaped(name, scratch / name, model) for name in args.shapes)
        found = (
            in_a_process(Point(args.rows, args.new_tokens, folder, 16), args) for folder in folders
        )
        what = f"weights, with adapters; {args.rows} responses of {args.new_tokens} tokens"
        yield from table(what, [0.0] * len(args.shapes), args.shapes, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder in HF format")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train file")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 2048])
    parser.add_argument("--shapes", nargs="+", default=["given", *SHAPES])
    parser.add_argument(
        "--rows", type=int, default=4, help="responses, where lengths or models grow"
    )
    parser.add_argument("--new-tokens", type=int, default=32, help="where batches or models grow")
    parser.add_argument("--only", choices=["", "batch", "length", "model"], default="")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the tables as well")
    args = parse(parser, SMOKE, model="model", data="data")
    shown = ""
    with tempfile.TemporaryDirectory() as scratch:
        for line in tables(args, Path(scratch)):
            print(line, flush=True)
            shown += line + "\n"
            if args.out:
                args.out.write_text(shown)


if __name__ == "__main__":
    main()
