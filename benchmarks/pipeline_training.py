"""Step time of PPO's training through pipelines: 1F1B of one model after the other, and fused.

Actor and critic are Llamas with random weights, cut into a stage a rank; the ranks are processes of
this machine, with a thread each. For each number of micro-batches latencies are measured, schedules
are made for them, and runs of both kinds take turns, so that what else the machine does meets both
alike. A run is all passes of a mini-batch, without the optimizer. Of several runs the fastest
counts, for latencies too: the others were disturbed.

``serial`` goes on with the critic on each rank as soon as the actor has ended there; what it would
take if all ranks waited for the actor to end is given as ``1F1B apart`` (predicted only).

    python benchmarks/pipeline_training.py --layers 8 --hidden 256 --ranks 2 --micro-batches 2 4 8
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from stretto.models.backend import keep_freed_memory

keep_freed_memory()  # before torch is imported, as the command line does

import torch
from transformers import LlamaConfig

from _pipelined import StageRank
from _shared import parse
from stretto.algorithms.experience import LossInputs
from stretto.config import Config
from stretto.models.forward import flat_places
from stretto.pipelines.baselines import serial_1f1b
from stretto.pipelines.executor.instructions import Timings, makespan_us, profile
from stretto.pipelines.executor.stages import layout_of
from stretto.training.losses import MicroBatch
from stretto.training.pipelined import PipelinePlan, Planner
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec

PROFILED = 4
"""Runs of which the fastest gives the latencies."""
PROMPT = 64
"""Tokens of a prompt; the rest of a sequence is response."""
SMOKE: dict[str, Any] = {
    "layers": 2,
    "hidden": 64,
    "vocabulary": 64,
    "micro_batches": [2],
    "rows": 1,
    "tokens": PROMPT + 8,
    "repeats": 1,
    "seconds": 0.5,
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--critic-stages", type=int, default=0)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rows", type=int, default=2, help="responses of a micro-batch")
    parser.add_argument("--tokens", type=int, default=256, help="of a prompt and its response")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=10.0, help="to search for a schedule")
    return parse(parser, SMOKE)


def architecture_of(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        max_position_embeddings=args.tokens,
        tie_word_embeddings=True,
    )


def make_batch(args: argparse.Namespace, seed: int, micro_batches: int) -> MicroBatch:
    """One micro-batch of random responses of one length."""
    chance = torch.Generator().manual_seed(seed)
    b, t = args.rows, args.tokens - PROMPT
    ids = torch.randint(args.vocabulary, (b, args.tokens), generator=chance)
    noise = torch.randn(4, b, t, generator=chance)
    weights = torch.full((b, t), 1 / (b * t * micro_batches))
    inputs = LossInputs(
        mask=torch.ones(b, t, dtype=torch.bool),
        weights=weights,
        means=weights,
        response_weights=torch.full((b,), 1 / (b * micro_batches)),
        advantages=noise[0],
        old_logprobs=noise[1] - 7,
        ref_logprobs=noise[1] - 7,
        tensors={"returns": noise[2], "old_values": noise[3]},
    )
    return MicroBatch(
        tokens=ids[:, :-1].clone(),
        places=flat_places([range(PROMPT - 1, args.tokens - 1)] * b, args.tokens - 1),
        targets=ids[:, PROMPT:].reshape(-1),
        inputs=inputs.located(),
        lengths=(args.tokens - 1,) * b,
    )


class Bench:
    """The ranks, and what has been measured on them."""

    def __init__(self, args: argparse.Namespace) -> None:
        settings = {
            "ranks": args.ranks,
            "stage_counts": (0, args.critic_stages),
            "seconds": args.seconds,
        }
        self.config = Config.model_validate({"pipeline": settings})
        self.layout = layout_of(self.config.pipeline)
        made = architecture_of(args), self.config
        self.ranks = RankGroup(GroupSpec(args.ranks, threads=1), StageRank, made).start()

    def run(self, plan: PipelinePlan, batches: Sequence[MicroBatch]) -> list[Timings]:
        return self.ranks.call(StageRank.run, plan, batches)

    def planner(self, schedule: str) -> Planner:
        config = self.config.pipeline.model_copy(update={"schedule": schedule})
        return Planner(config, {"actor": 1, "critic": 1}, seed=0)

    def compare(self, count: int, batches: Sequence[MicroBatch], repeats: int) -> str:
        """A row of the table."""
        planners = {name: self.planner(name) for name in ("serial", "fused")}
        runs = [self.run(planners["serial"].plan(count), batches) for _ in range(PROFILED)]
        timings = min(runs, key=makespan_us)
        for planner in planners.values():
            planner.measure(profile(self.layout, timings, planner.problem))
        plans = {name: planner.plan(count) for name, planner in planners.items()}
        measured: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(repeats):
            for name, plan in plans.items():
                measured[name].append(makespan_us(self.run(plan, batches)) / 1e3)
        ms = {name: min(of) for name, of in measured.items()}
        told = {name: (plan.predicted_us or 0) / 1e3 for name, plan in plans.items()}
        apart = serial_1f1b(plans["serial"].problem).latency / 1e3
        cells = [f"{count}", f"{apart:.0f}"]
        for name in plans:
            cells += [f"{told[name]:.0f}", f"{ms[name]:.0f}", f"{ms[name] / told[name]:.2f}"]
        cells += [f"{told['serial'] / told['fused']:.2f}", f"{ms['serial'] / ms['fused']:.2f}"]
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| micro-batches | 1F1B apart, predicted ms | serial predicted ms | serial measured ms | ratio "
    "| fused predicted ms | fused measured ms | ratio | speed-up predicted | speed-up measured |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    args = options()
    bench = Bench(args)
    print(f"{args}; load {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", flush=True)
    print(HEAD, flush=True)
    try:
        for count in args.micro_batches:
            batches = [make_batch(args, seed, count) for seed in range(count)]
            print(bench.compare(count, batches, args.repeats), flush=True)
        print(f"load {os.getloadavg()[0]:.2f} at the end")
    finally:
        bench.ranks.close()


if __name__ == "__main__":
    main()
