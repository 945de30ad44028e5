"""Part 4, compute: what each stage of a step took, and how many operations are in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from stretto.config import Config
from stretto.observe.run_directory import RolloutRecord
from stretto.types import short_name

FORWARD, TRAINING = 2, 6
"""Operations a parameter and token (Kaplan et al. 2020, section 2.1), as the simulator counts."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a step, means over steps.

    Attributes:
        seconds: measured.
        tokens: that come out of it: sampled, scored, or trained on (once for each epoch).
        operations: counted; 0 for what is no model's work.
    """

    name: str
    seconds: float
    tokens: float
    operations: float


def stages(
    metrics: Sequence[Mapping[str, Any]],
    rollouts: Sequence[RolloutRecord],
    config: Config,
    parameters: int,
) -> list[Stage]:
    """Return the stages of a run's mean step, without the first one, which warms up.

    Args:
        metrics: of each step, at least two.
        rollouts: all that were trained on.
        parameters: of the actor; the critic is counted as large.
    """
    warm = metrics[1:]
    steps = [step["step"] for step in warm]
    of_steps = [r for r in rollouts if r.step in steps]
    sampled = sum(r.tokens for r in of_steps) / len(steps)
    read = sampled + sum(r.prompt_tokens for r in of_steps) / len(steps)
    found = [Stage("generation", _mean(warm, "timing_s/gen"), sampled, FORWARD * parameters * read)]
    for source in config.reward.sources:
        name = short_name(source)
        found.append(Stage(f"score: {name}", _mean(warm, f"timing_s/score/{name}"), sampled, 0))
    for name, there in (
        ("reference", config.algorithm.has_reference),
        ("critic", config.algorithm.definition.critic),
    ):
        if there:
            seconds = _mean(warm, f"timing_s/score/{name}")
            found.append(Stage(f"score: {name}", seconds, read, FORWARD * parameters * read))
    trained = 2 if config.algorithm.definition.critic else 1
    passes = config.training.epochs * read
    operations = TRAINING * parameters * trained * passes
    found.append(Stage("training", _mean(warm, "timing_s/update"), passes, operations))
    rest = _mean(warm, "timing_s/step") - sum(stage.seconds for stage in found)
    return [*found, Stage("the rest", rest, 0, 0)]


def against_supervised(found: Sequence[Stage], epochs: int) -> tuple[float, float]:
    """Return the operations of a step over those of a supervised one on the same tokens.

    Args:
        found: as :func:`stages` gives them.

    Returns:
        As it is, and with one epoch.
    """
    training = next(stage for stage in found if stage.name == "training")
    generation = next(stage for stage in found if stage.name == "generation")
    supervised = generation.operations / FORWARD * TRAINING
    inference = sum(s.operations for s in found) - training.operations
    once = inference + training.operations / epochs
    return (inference + training.operations) / supervised, once / supervised


def _mean(metrics: Sequence[Mapping[str, Any]], name: str) -> float:
    return fmean(step[name] for step in metrics)
