"""Overlap beyond the four papers, before it is built: gains on five clusters, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import _oppo
import _rlhfuse
from _papers import Part, scheduled, step_s, table
from stretto.layout import Layout
from stretto.models.shapes import shape_of
from stretto.planner import memory_model
from stretto.planner.formulas import (
    TrainingPasses,
    broadcast_bytes,
    generator_cost,
    prefill_cost,
    train_cost,
)
from stretto.planner.hardware import Hardware
from stretto.runtime.sim.cluster import Cluster, GeneratorRole, LearnerRole, ScorerRole, Workload
from stretto.runtime.sim.costs import Efficiency, SampleCost
from stretto.runtime.sim.lengths import Lognormal, Uniform
from stretto.runtime.sim.turns import AnswerLatency, SimEpisodes

SKIPPED = 2  # first steps, which have nothing to overlap with
GROUP = 8
"""Responses to a prompt. A third of the prompts is always solved, a third never, and a third in
half of the responses."""
ON_POLICY: Sequence[Mapping[str, Any]] = (
    {"preset": "sync"},
    {"score_on": "rollout"},
    {"preset": "oppo", "overcommit_rule": "throughput"},
)
"""Schedules without lag. Gains are over the best of them, in the best layout."""
CHUNK = 512
"""Tokens between two looks at ended responses."""


def reasoning(steps: int) -> Workload:
    """GRPO with long answers: a median of 3,000 tokens, one in twenty beyond 12,000."""
    return Workload(
        batch=256,
        samples_per_prompt=GROUP,
        steps=steps,
        max_new_tokens=16_384,
        prompt_tokens=Uniform(low=100, high=400),
        response_tokens=Lognormal(median=3000, p95=12_000),
    )


def agents(steps: int) -> Workload:
    """Episodes of 3 to 10 turns, with a tool that takes 2 s, and 10 s in one call of twenty."""
    return Workload(
        batch=128,
        samples_per_prompt=GROUP,
        steps=steps,
        max_new_tokens=8192,
        prompt_tokens=Uniform(low=200, high=1000),
        response_tokens=Lognormal(median=150, p95=600),
        episodes=SimEpisodes(
            turns=Uniform(low=3, high=10),
            answer_tokens=Lognormal(median=200, p95=1000),
            wait_s=AnswerLatency(median=2, p95=10),
        ),
    )


def divided(w: Workload, generators: int, learners: int, teachers: int = 0) -> Cluster:
    """Return eight H100 with Qwen2.5-7B, whose reference is in the learner's shards, as in verl.

    Without learners of their own, all GPUs generate, and then all score and train. A teacher of
    32B, sliced over its GPUs, replaces reward and reference.
    """
    on, shape, teacher = Hardware.of("h100", Efficiency()), shape_of("qwen2.5-7b"), "qwen2.5-32b"
    generating = tuple(range(generators))
    training = tuple(range(generators, generators + learners)) or generating
    teaching = tuple(range(8 - teachers, 8))
    mean, shards = w.mean_tokens, Layout(fsdp=len(training))
    passes = TrainingPasses(w.batch * mean, mean, micro_tokens=16_384, checkpointing=True)
    states = 0 if learners else memory_model.STATE * shape.parameters / generators
    free = on.usable_bytes - memory_model.weight_bytes(shape, 1) - states
    cost = generator_cost(shape, 1, on, length=400, free_bytes=free)
    link = on.links.within_bytes_per_s * on.assumed.link
    cost = cost.model_copy(update={"load_s": broadcast_bytes(shape) / link})
    scorers: tuple[ScorerRole, ...] = (
        ScorerRole(name="rule", cost=SampleCost(sample_s=0.001)),
        ScorerRole(
            name="reference",
            kind="logprobs",
            devices=training,
            streams=False,
            cost=prefill_cost(shape, shards, on, length=mean),
        ),
    )
    if teachers:
        read = prefill_cost(shape_of(teacher), Layout(tp=teachers), on, length=mean)
        scorers = (ScorerRole(name="teacher", kind="logprobs", devices=teaching, cost=read),)
    return Cluster(
        call_s=0.001,
        generators=(GeneratorRole(devices=generating, cost=cost),),
        scorers=scorers,
        learner=LearnerRole(devices=training, cost=train_cost([shape], shards, on, passes)),
        workload=w,
    )


def divisions(w: Workload) -> Mapping[str, Cluster]:
    parts = {f"{n} + {8 - n}": divided(w, n, 8 - n) for n in (4, 5)}
    return {"all on all": divided(w, 8, 0), **parts}


def taught(cluster: Cluster) -> Cluster:
    """Return OPPO's cluster with a teacher in place of the reward model, and no other scorer."""
    role = cluster.scorers[0].model_copy(update={"name": "teacher", "kind": "logprobs"})
    learner = {"trains": ("actor",), "models": cluster.learner.models[:1]}
    return cluster.model_copy(
        update={"scorers": (role,), "learner": cluster.learner.model_copy(update=learner)}
    )


def of_rlhfuse(steps: int) -> Cluster:
    run = _rlhfuse.Run("33B", "13B", 1024, fused=True)
    return run.cluster.model_copy(
        update={"workload": run.workload.model_copy(update={"steps": steps})}
    )


def with_solved(cluster: Cluster, *, skip: bool) -> Cluster:
    """Return a cluster whose rewards are 0 and 1, by groups that are easy, hard or between."""
    draw, w = random.Random(0), cluster.workload
    count = 6 * w.batch * w.steps
    shares = [draw.choice([0.0, 0.5, 1.0]) for _ in range(count)]
    rewards = tuple(float(draw.random() < shares[i // GROUP]) for i in range(count))
    update = {"rewards": rewards, "most_skipped": 10 * w.batch if skip else 0}
    return cluster.model_copy(update={"workload": w.model_copy(update=update)})


def best(clusters: Iterable[Cluster], *knobs: Mapping[str, Any]) -> float:
    """Return the mean seconds of a step in the best layout under the best schedule."""
    return min(
        step_s(scheduled(cluster, chunk_tokens=CHUNK, deadline_s=86_400.0, **schedule), SKIPPED)
        for cluster in clusters
        for schedule in knobs
    )


def streaming_gains(cluster: Cluster) -> list[str]:
    """Return the gains of a teacher that reads along over one that reads ended responses, without
    lag and with over-commitment, and with both."""
    gains = []
    for shared in ({"overcommit": "auto"}, {"overcommit": "auto", "lag": 1}):
        shared = {**shared, "overcommit_rule": "throughput"}
        early = [{**shared, "score_on": score_on} for score_on in ("batch", "rollout")]
        gain = best([cluster], *early) / best([cluster], {**shared, "score_on": "chunk"})
        gains.append(f"{gain:.2f}")
    return gains


def skipping_gain(clusters: Sequence[Cluster]) -> str:
    """Return the gain in groups with different scores per second."""
    useful = (1 - 2 * 0.5**GROUP) / 3  # of the groups between
    before_s = best([with_solved(c, skip=False) for c in clusters], *ON_POLICY) / useful
    return f"{before_s / best([with_solved(c, skip=True) for c in clusters], *ON_POLICY):.2f}"


def streamed_learner_gain(clusters: Sequence[Cluster]) -> str:
    """Return the gain of a learner that starts on finished groups, in the best layout of each."""
    groups = [{**knobs, "train_on": "group"} for knobs in ON_POLICY[1:]]
    return f"{best(clusters, *ON_POLICY) / best(clusters, *ON_POLICY, *groups):.2f}"


def part(steps: int = 10, *, smoke: bool = False) -> Part:
    """Return the table."""
    oppo = [_oppo.LEAN.cluster(task, steps) for task in _oppo.TASKS[:2]]
    rows = [
        [task.name, streamed_learner_gain([cluster]), *streaming_gains(taught(cluster)), "-"]
        for task, cluster in zip(_oppo.TASKS, oppo, strict=False)
    ]
    if not smoke:
        fused = of_rlhfuse(steps=5)
        rows.append(["RLHFuse, 33B, 13B, 256 H100", streamed_learner_gain([fused]), "-", "-", "-"])
        for name, w in {"long answers": reasoning(steps), "agents": agents(steps)}.items():
            layouts = list(divisions(w).values())
            streaming = streaming_gains(divided(w, 4, 2, 2))
            gains = [streamed_learner_gain(layouts), *streaming, skipping_gain(layouts)]
            rows.append([f"GRPO, 7B, {name}, 8 H100", *gains])
    head = [
        "setting",
        "learner starts on finished groups",
        "teacher reads along",
        "the same, lag 1",
        "groups with equal scores replaced",
    ]
    return Part({"ahead-gains": table(head, rows)})
