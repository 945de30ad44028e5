"""The CPU cores of a machine, shared out among roles that work at the same time."""

from __future__ import annotations

from typing import NamedTuple

from stretto.config import Config


class Threads(NamedTuple):
    """CPU threads of each generator, of scoring and of training."""

    generating: int
    scoring: int
    training: int


def share_cores(config: Config, cores: int) -> Threads:
    """Share the cores out, unless the settings do.

    Roles that work at the same time get cores of their own, as threads of two roles on one core
    wait for each other.
    """
    if config.schedule.threads:
        return Threads(*config.schedule.threads)
    knobs, engines = config.schedule.knobs, config.rollout.engines
    training = max(cores // 2, 1) if knobs.trains_beside else cores
    left = cores - training if knobs.trains_beside else cores
    beside = knobs.scores_beside(engines)
    scoring = max(left // 2, 1) if beside else max(left, 1)
    generating = max((left - scoring if beside else left) // engines, 1)
    return Threads(generating, scoring, training)
