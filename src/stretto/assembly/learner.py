"""The learner, as the settings ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from stretto.config import Config
from stretto.pipelines.executor.layout import Name
from stretto.training.learner import PolicyLearner
from stretto.training.passes import LocalPasses
from stretto.training.trained import Course, TrainedModel
from stretto.weights.channel import WeightChannel
from stretto.workers.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from stretto.training.sharded import Sharded, ShardedModel


def make_learner(
    config: Config,
    actor: nn.Module,
    critic: nn.Module | None,
    stack: ExitStack,
    *,
    snapshots: Sequence[str],
    channel: WeightChannel,
    threads: int,
    mesh: DeviceMesh | None = None,
) -> tuple[PolicyLearner, Ranks | None]:
    """Make the learner, and the ranks that train for it, where there are any.

    Args:
        config: of the run.
        actor, critic: to train.
        stack: ends the ranks.
        snapshots: the models of which copies are published.
        channel: takes them to the roles that follow.
        threads: CPU threads of training, for the ranks together.
        mesh: of the ranks that hold shards of the models, of which this process is one; ``None``
            where this process holds them whole.
    """
    t = config.training
    per_step = t.epochs * t.minibatches
    updates, warmup = config.steps * per_step, t.warmup_steps * per_step
    frozen = min(config.critic.freeze_steps, config.steps) * per_step
    of_actor, of_critic = (
        Course(t.lr, updates - frozen, warmup),
        Course(t.critic_lr, updates, warmup),
    )
    factors = config.reward.factors
    if mesh is not None:
        from stretto.training import sharded

        beside = dist.new_group(backend="gloo")
        actor_shards = sharded.Sharded(actor, mesh, beside)
        critic_shards = sharded.Sharded(critic, mesh, beside) if critic else None
        learner = PolicyLearner(
            _sharded(actor_shards, of_actor, config),
            _sharded(critic_shards, of_critic, config) if critic_shards else None,
            sharded.ShardedPasses(actor_shards, critic_shards, config),
            config,
            factors,
            snapshots=snapshots,
            channel=channel,
        )
        return learner, None
    if not config.pipeline.ranks or critic is None:
        learner = PolicyLearner(
            _trained(actor, of_actor, config),
            _trained(critic, of_critic, config) if critic else None,
            LocalPasses(actor, critic, config),
            config,
            factors,
            snapshots=snapshots,
            channel=channel,
        )
        return learner, None
    # Imported here, as planning brings a compiler that nothing else needs.
    from stretto.training import pipelined

    courses: dict[Name, Course] = {"actor": of_actor, "critic": of_critic}
    staged = pipelined.start(actor, critic, config, courses, threads)
    stack.callback(staged.ranks.close)
    learner = PolicyLearner(
        staged.actor,
        staged.critic,
        staged.passes,
        config,
        factors,
        snapshots=snapshots,
        channel=channel,
    )
    return learner, staged.ranks


def _sharded(model: Sharded, course: Course, config: Config) -> ShardedModel:
    from stretto.training.sharded import ShardedModel

    return ShardedModel(
        model, course.lr, config.training, updates=course.updates, warmup=course.warmup
    )


def _trained(model: nn.Module, course: Course, config: Config) -> TrainedModel:
    return TrainedModel(
        model, course.lr, config.training, updates=course.updates, warmup=course.warmup
    )
