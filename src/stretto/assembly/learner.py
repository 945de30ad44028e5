"""The learner, as the settings ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from stretto.config import Config
from stretto.pipelines.executor.stages import Name
from stretto.training.learner import PolicyLearner
from stretto.training.passes import LocalPasses, Passes, Trained
from stretto.training.trained import Course, TrainedModel
from stretto.weights.channel import WeightChannel
from stretto.workers.ranks import Ranks

if TYPE_CHECKING:
    from stretto.training.grid import Grid

T = TypeVar("T")


def make_learner(
    config: Config,
    actor: nn.Module,
    critic: nn.Module | None,
    stack: ExitStack,
    *,
    snapshots: Sequence[str],
    channel: WeightChannel,
    threads: int,
    lends: bool = False,
    grid: Grid | None = None,
) -> tuple[PolicyLearner, Ranks | None]:
    """Make the learner, and the ranks that train for it, where there are any.

    Args:
        config: of the run.
        actor, critic: to train.
        snapshots: the models of which copies are published.
        channel: takes them to the roles that follow.
        threads: CPU threads of training, for the ranks together.
        lends: whether who follows reads the weights themselves and no copies; of shards.
        grid: the ranks that hold shards of the models, of which this process is one; ``None``
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
    ranks: Ranks | None = None
    made: tuple[Trained, Trained | None, Passes]
    if grid is not None:
        made = _sharded(config, actor, critic, of_actor, of_critic, grid, lends)
    elif not config.pipeline.ranks or critic is None:
        made = (
            _trained(TrainedModel, actor, of_actor, config),
            _trained(TrainedModel, critic, of_critic, config) if critic else None,
            LocalPasses(actor, critic, config),
        )
    else:
        # Imported here, as planning brings a compiler that nothing else needs.
        from stretto.training import pipelined

        courses: dict[Name, Course] = {"actor": of_actor, "critic": of_critic}
        staged = pipelined.start(actor, critic, config, courses, threads)
        stack.callback(staged.ranks.close)
        made, ranks = (staged.actor, staged.critic, staged.passes), staged.ranks
    factors = config.reward.factors
    learner = PolicyLearner(*made, config, factors, snapshots=snapshots, channel=channel)
    return learner, ranks


def _sharded(
    config: Config,
    actor: nn.Module,
    critic: nn.Module | None,
    of_actor: Course,
    of_critic: Course,
    grid: Grid,
    lends: bool,
) -> tuple[Trained, Trained | None, Passes]:
    """Cut the models into shards, of which this rank keeps its own."""
    from stretto.training.sharded import Sharded, ShardedModel
    from stretto.training.sharded_passes import ShardedPasses

    shards = Sharded(actor, grid, lends=lends)
    others = Sharded(critic, grid, lends=lends) if critic else None
    return (
        _trained(ShardedModel, shards, of_actor, config),
        _trained(ShardedModel, others, of_critic, config) if others else None,
        ShardedPasses(shards, others, config),
    )


def _trained(make: Callable[..., T], model: Any, course: Course, config: Config) -> T:
    return make(model, course.lr, config.training, updates=course.updates, warmup=course.warmup)
