"""What the schedule itself costs: simulated roles that cost nothing, 10,000 rollouts in flight.

    python benchmarks/schedule_cost.py

Everything that is timed is coordination: the schedule's own Python, the event loop, and the
bookkeeping of the simulated roles, whose share is measured by calling them without a schedule.
"""

from __future__ import annotations

import argparse
import gc
import time

from _shared import parse
from stretto.config import ScheduleConfig
from stretto.observe.spans import Spans
from stretto.runtime.sim.cluster import Cluster, GeneratorRole, LearnerRole, ScorerRole, Workload
from stretto.runtime.sim.costs import GeneratorCost, PrefillCost, TrainCost
from stretto.runtime.sim.lengths import Uniform
from stretto.runtime.sim.loop import VirtualClock, run
from stretto.runtime.sim.simulate import make_roles, make_schedule
from stretto.schedules.rollout import Rollout


def cluster(rollouts: int, tokens: int, chunk: int, steps: int, score_on: str) -> Cluster:
    names = (
        ("reward", "reward", ""),
        ("reference", "logprobs", ""),
        ("critic", "values", "critic"),
    )
    return Cluster(
        generators=(GeneratorRole(devices=(0,), cost=GeneratorCost()),),
        scorers=tuple(
            ScorerRole(name=n, kind=k, devices=(i + 1,), cost=PrefillCost(), follows=f)
            for i, (n, k, f) in enumerate(names)
        ),
        learner=LearnerRole(devices=(0,), cost=TrainCost(), trains=("actor", "critic")),
        workload=Workload(
            batch=rollouts,
            steps=steps,
            max_new_tokens=tokens,
            prompt_tokens=Uniform(low=8, high=8),
            response_tokens=Uniform(low=tokens // 2, high=tokens),
        ),
        schedule=ScheduleConfig(score_on=score_on, chunk_tokens=chunk),
    )


def seconds(description: Cluster) -> tuple[float, int]:
    """Processor seconds of the steps, and chunks passed on in them."""

    async def main() -> tuple[float, int]:
        spans = Spans(VirtualClock())
        schedule = make_schedule(description, make_roles(description, spans), spans)
        chunks, w = 0, description.workload
        gc.collect()
        gc.freeze()
        start_s = time.process_time()
        async with schedule:
            for _ in range(w.steps):
                step = await schedule.step()
                size = description.schedule.chunk_tokens
                chunks += sum(-(-len(r) // size) for r in step.batch)
        return time.process_time() - start_s, chunks

    return run(main())


def bare(description: Cluster) -> float:
    """Processor seconds of the same calls to the roles, without a schedule."""

    async def main() -> float:
        spans = Spans(VirtualClock())
        roles = make_roles(description, spans)
        (generator,), w = roles.generators, description.workload
        scorers = [replica.scorer for replica in roles.replicas]
        size = description.schedule.chunk_tokens
        prompt = make_schedule(description, roles, spans)._rounds._next_prompt()
        start_s = time.process_time()
        for step in range(w.steps):
            rollouts = [Rollout(step * w.batch + i, prompt, i) for i in range(w.batch)]
            responses = [r.response() for r in rollouts]
            await generator.admit(responses)
            for scorer in scorers:
                await scorer.admit(responses)
            left = len(rollouts)
            while left:
                chunks, _ = await generator.decode(size, left)
                left -= sum(c.finish is not None for c in chunks)
                for scorer in scorers:
                    await scorer.extend(chunks)
            for scorer in scorers:
                await scorer.finish([r.id for r in rollouts])
        return time.process_time() - start_s

    return run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    args = parse(parser, {"rollouts": 8, "tokens": 16, "chunk": 4, "steps": 1})
    print("| score_on | chunks | microseconds a chunk | of which roles |")
    print("|---|---|---|---|")
    for score_on in ("batch", "rollout", "chunk"):
        description = cluster(args.rollouts, args.tokens, args.chunk, args.steps, score_on)
        total_s, chunks = seconds(description)
        roles = f"{1e6 * bare(description) / chunks:.1f}" if score_on == "chunk" else ""
        print(f"| {score_on} | {chunks:,} | {1e6 * total_s / chunks:.1f} | {roles} |", flush=True)


if __name__ == "__main__":
    main()
