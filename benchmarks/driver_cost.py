"""What the driver costs a chunk: real processes that do nothing, thousands of rollouts in flight.

The generators' and the scorer's processes answer at once; the schedule, the ledger, the pickling
and the pipes are the real ones. Timed is the driver's own processor time.

    python benchmarks/driver_cost.py
    python benchmarks/driver_cost.py --rollouts 10000 --generators 1 2 --chunk 16 64 256

With ``--pauses`` what stops the driver's event loop is timed instead: taking the state of rollouts
in flight for a checkpoint, and putting a batch together. Writing is a thread's, reading a resumed
run's.

    python benchmarks/driver_cost.py --pauses --rollouts 1024 --tokens 8192
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
import torch

from _driver import IdleGenerator, IdleScorer
from _shared import parse
from stretto.config.cluster_config import generator_names
from stretto.config.knobs import Settings
from stretto.observe.spans import Spans
from stretto.protocols import RealClock
from stretto.runtime.clients import GeneratorClient, ScorerClient
from stretto.runtime.state import copied, write
from stretto.schedules.chunking import FixedChunk
from stretto.schedules.controls import Controls
from stretto.schedules.overcommit import FixedOvercommit
from stretto.schedules.rollout import Rollout, restored, train_batch
from stretto.schedules.schedule import Schedule
from stretto.schedules.scoring import ScorerReplica
from stretto.types import (
    Chunk,
    FinishReason,
    Prompt,
    Score,
    TrainBatch,
    TrainStepOutput,
    WeightsRef,
)
from stretto.workers.group_executor import GroupExecutor, ServiceGroup
from stretto.workers.rank import GroupSpec
from stretto.workers.services import Makes

T = TypeVar("T")

GENERATOR_TOKENS_PER_S = 10_000.0
"""Tokens that one generator decodes: 250 rows at 40 steps a second, such as a 7B model on a GPU."""


class IdleLearner:
    """A learner that learns nothing."""

    version = 0

    async def train(self, batch: TrainBatch) -> TrainStepOutput:
        """Take a step."""
        return TrainStepOutput({"objective/scores": 0.0}, np.zeros(len(batch), np.float32))

    async def accumulate(self, batch: TrainBatch) -> None:
        """Do nothing."""

    async def publish(self) -> Mapping[str, WeightsRef]:
        """Publish nothing new."""
        self.version += 1
        return {"actor": WeightsRef("actor", self.version, "x")}


def launched(name: str, makes: Makes) -> ServiceGroup:
    """Start a process."""
    return ServiceGroup(GroupSpec(), makes, name=name).start()


def prompts() -> Prompt:
    """Return the next prompt: always another, of eight tokens."""
    prompts.count += 1  # type: ignore[attr-defined]
    return Prompt(prompts.count, (1,) * 8, "")  # type: ignore[attr-defined]


prompts.count = 0  # type: ignore[attr-defined]


def cost(args: argparse.Namespace, generators: int, chunk: int, stream: bool) -> tuple[float, int]:
    """Processor seconds of the driver's steps, and chunks in them."""
    names = generator_names(generators)
    makes: dict[str, Makes] = {n: {n: (IdleGenerator, (args.tokens,))} for n in names}
    makes["reward"] = {"reward": (IdleScorer, ())}
    groups = {n: launched(n, m) for n, m in makes.items()}
    spans = Spans(RealClock())
    schedule = Schedule(
        prompts,
        [GeneratorClient(n, n, GroupExecutor(groups[n], n), spans) for n in names],
        [scorer(groups["reward"], spans)],
        IdleLearner(),
        Controls(
            Settings(
                batch=args.rollouts,
                samples_per_prompt=1,
                max_new_tokens=args.tokens,
                steps=args.steps,
                score_on="chunk" if stream else "rollout",
            ),
            FixedChunk(chunk),
            FixedOvercommit(0),
        ),
        RealClock(),
        spans,
    )

    async def body() -> float:
        gc.collect()
        gc.freeze()
        start_s = time.process_time()
        async with schedule:
            for _ in range(args.steps):
                await schedule.step()
        return time.process_time() - start_s

    seconds = asyncio.run(body())
    for group in groups.values():
        group.close()
    return seconds, args.steps * args.rollouts * -(-args.tokens // chunk)


def scorer(group: ServiceGroup, spans: Spans) -> ScorerReplica:
    """Return the scorer, as the schedule knows it."""
    executor, info = GroupExecutor(group, "reward"), IdleScorer.info
    return ScorerReplica(ScorerClient(info.name, info.name, executor, spans, info=info))


def rows(args: argparse.Namespace) -> Sequence[str]:
    """Return the table's rows."""
    found = []
    for generators in args.generators:
        for chunk in args.chunk:
            for stream in (False, True):
                seconds, chunks = cost(args, generators, chunk, stream)
                each = 1e6 * seconds / chunks
                most = 1e6 * chunk / each / GENERATOR_TOKENS_PER_S
                kind = "chunk by chunk" if stream else "whole responses"
                found.append(
                    f"| {generators} | {chunk} | {kind} | {each:.0f} | "
                    f"{1000 * each / chunk:.0f} | {most:.0f} |"
                )
    return found


def scored(id_: int, tokens: int) -> Rollout:
    """Return a rollout that waits for the learner, with the scores of PPO."""
    rollout, rng = Rollout(id_, prompts(), id_), np.random.default_rng(id_)
    ids = rng.integers(0, 150_000, tokens, np.int32)
    logprobs, values = rng.standard_normal((2, tokens), np.float32)
    rollout.append(Chunk(id_, 0, ids, logprobs, 0, FinishReason.STOP))
    rollout.scores = {
        "reference": Score(id_, "reference", "logprobs", logprobs),
        "critic": Score(id_, "critic", "values", values),
        "reward": Score(id_, "reward", "reward", values[:1]),
    }
    return rollout


def pauses(args: argparse.Namespace) -> Sequence[str]:
    """Return the rows of the table of what stops the event loop, and what does not."""
    rollouts = [scored(i, args.tokens) for i in range(args.rollouts)]
    found = dict[str, float]()

    def timed(name: str, call: Callable[[], T]) -> T:
        start_s = time.perf_counter()
        result = call()
        found[name] = time.perf_counter() - start_s
        return result

    timed("a batch for the learner (event loop)", lambda: train_batch(rollouts))
    state = timed("a checkpoint (event loop)", lambda: copied([r.state_dict() for r in rollouts]))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "driver.pt"
        timed("writing it (thread)", lambda: write(file, state))
        size = file.stat().st_size
        read = timed("reading it (resume)", lambda: torch.load(file, weights_only=True))
    by_id = {r.prompt.id: r.prompt for r in rollouts}
    timed("taking it up (resume)", lambda: restored(read, by_id.__getitem__))
    return [*(f"| {name} | {s:.3f} |" for name, s in found.items()), f"| MB | {size / 1e6:.0f} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--generators", type=int, nargs="+", default=[2])
    parser.add_argument("--chunk", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--pauses", action="store_true", help="time what stops the event loop")
    args = parse(parser, {"rollouts": 64, "tokens": 32, "chunk": [16]})
    if args.pauses or args.smoke:
        print(f"| {args.rollouts} rollouts of {args.tokens} tokens | s |\n|---|---|")
        print("\n".join(pauses(args)))
    if args.pauses:
        return
    print(
        "| generators | chunk, tokens | scored | driver, us a chunk | ns a token | "
        "generators it can serve |"
    )
    print("|---|---|---|---|---|---|")
    for row in rows(args):
        print(row, flush=True)


if __name__ == "__main__":
    main()
