"""A recorded run of one process, as a cluster that can be simulated, checked and varied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stretto.config import Config
from stretto.errors import StateError
from stretto.observe.run_directory import RolloutRecord
from stretto.observe.spans import Span
from stretto.runtime.sim.calibration import calibrate
from stretto.runtime.sim.cluster import (
    Cluster,
    GeneratorRole,
    LearnerRole,
    ScorerRole,
    Workload,
)
from stretto.runtime.sim.costs import PrefillCost, SampleCost
from stretto.runtime.sim.lengths import Replayed
from stretto.runtime.sim.roles import LearningCurve
from stretto.scoring.worthwhile import worthwhile_tokens
from stretto.types import ScoreKind

CPU_TOKEN_BUDGET = 1024
"""Tokens of a pass on a CPU, where the settings leave it open."""

_KINDS: dict[str, ScoreKind] = {"reference": "logprobs", "critic": "values"}


def recorded_cluster(
    config: Config, rollouts: Sequence[RolloutRecord], spans: Iterable[Span]
) -> Cluster:
    """Describe the roles of a run in one process, with the recorded costs and lengths.

    Model scorers find a call worthwhile as they do on a CPU. Where the run's knobs are all at zero
    its roles share one worker, so here they share one device. Otherwise generators, scoring models
    and learner have a device each, and functions need none. Costs contain the time that roles at
    work side by side took from each other. Rewards are the recorded ones, whatever the schedule.

    Args:
        config: of the run; another schedule may be put into the result.
        rollouts: that ended in it.
        spans: of it; best without the first steps, which warm up.

    Raises:
        StateError: nothing was recorded to go by.
    """
    if not rollouts:
        raise StateError(
            "a run is replayed from its rollouts, and it has recorded none; let it take a few steps"
        )
    found = calibrate(spans)
    engines = config.rollout.engines
    apart = config.schedule.knobs.overlaps(engines)
    training = engines + 1 if apart else 0
    sources = sum(name not in _KINDS for name in found.scorers)  # which are summed up again
    by_id = {r.id: r.reward / max(sources, 1) for r in rollouts if r.reward is not None}
    mean = sum(by_id.values()) / len(by_id) if by_id else 0.0
    critic = config.algorithm.definition.critic
    trains: tuple[str, ...] = ("actor", "critic") if critic else ("actor",)
    return Cluster(
        generators=tuple(
            GeneratorRole(devices=(i,), cost=found.generator, slots=config.rollout.slots)
            for i in range(engines)
        ),
        scorers=_scorers(config, found.scorers, apart),
        learner=LearnerRole(devices=(training,), trains=trains, cost=found.learner),
        workload=Workload(
            batch=config.rollout.batch,
            samples_per_prompt=config.rollout.samples_per_prompt,
            group_at_least=config.algorithm.definition.group,
            steps=config.steps,
            max_new_tokens=config.rollout.max_new_tokens,
            prompt_tokens=Replayed.from_ledger({r.prompt: r.prompt_tokens for r in rollouts}),
            response_tokens=Replayed.from_ledger({r.id: r.tokens for r in rollouts}),
            learning=LearningCurve(first=mean, last=mean, versions=0, spread=0),
            rewards=tuple(by_id.get(i) for i in range(1 + max(by_id, default=-1))),
            on_failure=config.reward.on_failure,
            seed=config.seed,
        ),
        schedule=config.schedule,
    )


def _scorers(
    config: Config, costs: Mapping[str, PrefillCost | SampleCost], apart: bool
) -> tuple[ScorerRole, ...]:
    """Describe the run's scorers on the devices of the engines, or on one of their own."""
    engines, knobs = config.rollout.engines, config.schedule.knobs
    budget = config.training.microbatch_tokens or CPU_TOKEN_BUDGET
    worthwhile = worthwhile_tokens(budget, streaming=knobs.streams)
    roles = []
    for name, cost in costs.items():
        common: dict[str, Any] = {"name": name, "kind": _KINDS.get(name, "reward"), "cost": cost}
        if isinstance(cost, SampleCost):
            roles.append(ScorerRole(**common, devices=() if apart else (0,)))
            continue
        common["follows"] = "critic" if name == "critic" else ""
        common["worthwhile_tokens"] = worthwhile
        if knobs.hosts_scorers(engines):
            roles += [ScorerRole(**common, devices=(i,), host=i) for i in range(engines)]
        else:
            roles.append(ScorerRole(**common, devices=(engines if apart else 0,)))
    return tuple(roles)
