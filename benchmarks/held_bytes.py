"""Bytes of weights that each rank of a pipelined learner holds, beside those of the plan.

Actor and critic are Llamas with random weights, with the layers of LLaMA-33B and 13B and about a
tenth of their width. They are written to files, which the ranks load as those of a run do. ``held``
are all tensors of a rank's process. ``plan`` is the memory model's count of the weights
(``planner/memory_model.py``), which has embedding and output layer in every stage.

    python benchmarks/held_bytes.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from _held import HoldingRank, weight_bytes
from _shared import parse
from stretto.config import Config
from stretto.models.heads import critic_from_actor
from stretto.models.shapes import Shape
from stretto.planner import memory_model
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec

SMOKE: dict[str, Any] = {
    "layers": [2, 2],
    "hidden": [32, 16],
    "inner": [48, 32],
    "heads": 4,
    "vocabulary": 64,
    "stages": 2,
    "slices": 1,
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    both = "of the actor and of the critic"
    parser.add_argument("--layers", type=int, nargs=2, default=[60, 40], help=both)
    parser.add_argument("--hidden", type=int, nargs=2, default=[672, 512], help=both)
    parser.add_argument("--inner", type=int, nargs=2, default=[1792, 1376], help=both)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=3200)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--slices", type=int, default=2)
    return parse(parser, SMOKE)


def write_model(args: argparse.Namespace, number: int, folder: Path) -> int:
    """Write the actor (0) or the model that the critic starts from (1). Return the bytes of the
    actor, or of the critic.
    """
    torch.manual_seed(number)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden[number],
        intermediate_size=args.inner[number],
        num_hidden_layers=args.layers[number],
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        tie_word_embeddings=False,
    )
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return weight_bytes(critic_from_actor(model) if number else model)


def planned_bytes(args: argparse.Namespace) -> float:
    """Return the plan's bytes of both models' weights on a rank."""
    total = 0.0
    for number in range(2):
        shape = Shape(
            layers=args.layers[number],
            hidden=args.hidden[number],
            inner=args.inner[number],
            heads=args.heads,
            kv_heads=args.heads,
            vocabulary=args.vocabulary,
            outputs=1 if number else args.vocabulary,
        )
        total += memory_model.weight_bytes(shape.stage(args.stages), args.slices, 4)
    return total


def main() -> None:
    args = options()
    print(f"{args}; load {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", flush=True)
    stages, slices = args.stages, args.slices
    pipeline = {
        "ranks": stages * slices,
        "stage_counts": (stages, stages),
        "stage_slices": (slices, slices),
    }
    config = Config.model_validate({"pipeline": pipeline})
    with tempfile.TemporaryDirectory() as scratch:
        folders = Path(scratch, "actor"), Path(scratch, "critic")
        sizes = [write_model(args, number, folder) for number, folder in enumerate(folders)]
        ranks = RankGroup(GroupSpec(stages * slices, threads=1), HoldingRank).start()
        try:
            answers = ranks.call(HoldingRank.load, *folders, config)
        finally:
            ranks.close()
    print(f"all weights: actor {sizes[0] / 1e6:.1f} MB, critic {sizes[1] / 1e6:.1f} MB")
    print("| rank | actor, MB | critic, MB | held, MB | of all weights | plan, MB |")
    print("|---|---|---|---|---|---|")
    for rank, (weights, held) in enumerate(answers):
        cells = [f"{size / 1e6:.1f}" for size in (weights["actor"], weights["critic"], held)]
        share = f"{held / sum(sizes):.1%}"
        print(f"| {rank} | {' | '.join(cells)} | {share} | {planned_bytes(args) / 1e6:.1f} |")


if __name__ == "__main__":
    main()
