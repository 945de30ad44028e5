"""Twelve workloads in virtual time, on which ``preset = "auto"`` is compared with fixed knobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from stretto.config import ScheduleConfig
from stretto.config.knobs import RoundKnobs
from stretto.runtime.sim.cluster import Cluster, GeneratorRole, LearnerRole, ScorerRole, Workload
from stretto.runtime.sim.costs import DecodeCost, GeneratorCost, PrefillCost, TrainCost
from stretto.runtime.sim.lengths import Distribution, Drifting, Lognormal, Uniform
from stretto.runtime.sim.simulate import simulate
from stretto.runtime.sim.tuning import fixed
from stretto.runtime.sim.turns import AnswerLatency, SimEpisodes
from stretto.types import Stats

BATCH, STEPS, LATE = 32, 80, 20
CHUNKS = (16, 64, 256)
LENGTHS: dict[str, Distribution] = {
    "constant": Uniform(low=200, high=200),
    "long tail": Lognormal(median=120, p95=700),
    "drifting": Drifting(first=60, last=400, over=1500),
}
COSTS = {
    "slow scorer": (4e-4, 1e-4),
    "slow learner": (3e-5, 8e-4),
    "balanced": (1e-4, 3e-4),
}
"""Seconds a token of each scorer, and of the learner."""


def workloads(steps: int) -> Iterator[tuple[str, Cluster]]:
    for (lengths, distribution), (costs, seconds) in product(LENGTHS.items(), COSTS.items()):
        yield f"{lengths}, {costs}", cluster(distribution, *seconds, steps=steps)
    for lengths, costs in (("long tail", "slow scorer"), ("drifting", "balanced")):
        name = f"{lengths}, {costs}, 2 engines"
        yield name, cluster(LENGTHS[lengths], *COSTS[costs], steps=steps, engines=2)
    waits = SimEpisodes(turns=Uniform(low=2, high=4), wait_s=AnswerLatency(median=1, p95=6))
    turns = Lognormal(median=60, p95=200)
    yield "episodes that wait", cluster(turns, *COSTS["balanced"], steps=steps, episodes=waits)


def cluster(
    lengths: Distribution,
    score_s: float,
    train_s: float,
    *,
    steps: int,
    engines: int = 1,
    episodes: SimEpisodes | None = None,
) -> Cluster:
    generator = GeneratorCost(
        decode=DecodeCost(step_s=0.01, row_s=0.0002, context_s=1e-8),
        prefill=PrefillCost(call_s=0.005, token_s=1e-5),
        load_s=0.05,
    )
    scoring = PrefillCost(call_s=0.01, token_s=score_s)
    learner = TrainCost(step_s=0.1, token_s=train_s, publish_s=0.05)
    names = (("reward", "reward"), ("reference", "logprobs"))
    return Cluster(
        generators=tuple(GeneratorRole(devices=(i,), cost=generator) for i in range(engines)),
        scorers=tuple(
            ScorerRole(name=name, kind=kind, devices=(engines,), cost=scoring)
            for name, kind in names
        ),
        learner=LearnerRole(devices=(engines + 1,), cost=learner),
        workload=Workload(
            batch=BATCH,
            steps=steps,
            max_new_tokens=1024,
            prompt_tokens=Uniform(low=50, high=150),
            response_tokens=lengths,
            episodes=episodes,
        ),
    )


def rate(steps: Sequence[Mapping[str, float]], first: int = 0) -> float:
    """Tokens trained on a second, from a step on."""
    seconds = sum(step["timing_s/step"] for step in steps[first:])
    return sum(step["perf/throughput"] * step["timing_s/step"] for step in steps[first:]) / seconds


def table(bounds: Sequence[int], names: Sequence[str], *, smoke: bool = False) -> None:
    """Speeds relative to ``sync``, and the decisions of each run. All workloads without names."""
    late = 2 if smoke else LATE
    print("| max_staleness | workload | best of the grid | auto, from step 21 | auto, all steps |")
    print("|---|---|---|---|---|")
    decisions: list[str] = []
    for bound in bounds:
        auto = ScheduleConfig(preset="auto", max_staleness=bound)
        for name, described in workloads(8 if smoke else STEPS):
            if names and name not in names:
                continue
            plain, tuned = (
                simulate(described.model_copy(update={"schedule": schedule}))
                for schedule in (ScheduleConfig(), auto)
            )
            choices = list(auto.round_knobs(BATCH, 1))[: 1 if smoke else None]
            grid = [
                replace(knobs, chunk_tokens=chunk)
                for knobs, chunk in product(choices, CHUNKS)
                if knobs.score_on != "batch" or knobs.delta or chunk == CHUNKS[0]  # else no chunks
            ]
            best = max(rate(run_fixed(described, auto, knobs), late) for knobs in grid)
            late_ratio = rate(tuned.steps, late) / rate(plain.steps, late)
            ratio = rate(tuned.steps) / rate(plain.steps)
            print(
                f"| {bound} | {name} | {best / rate(plain.steps, late):.2f} | {late_ratio:.2f} "
                f"| {ratio:.2f} |",
                flush=True,
            )
            decisions += [f"{bound}, {name}, step {n}: {line}" for n, line in tuned.decisions]
            if smoke:
                break
    print("\n" + "\n".join(decisions))


def run_fixed(described: Cluster, auto: ScheduleConfig, knobs: RoundKnobs) -> Sequence[Stats]:
    return simulate(described.model_copy(update={"schedule": fixed(auto, knobs)})).steps
