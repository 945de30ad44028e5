"""The learner, as the settings ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from stretto.config import Config
from stretto.pipelines.executor.stages import Name
from stretto.training.learner import PolicyLearner
from stretto.training.losses import Losses
from stretto.training.passes import LocalPasses, Passes, Trained
from stretto.training.trained import Course, TrainedModel
from stretto.weights.channel import SharedChannel
from stretto.workers.ranks import Ranks

if TYPE_CHECKING:
    from stretto.training.sharded import Grid

T = TypeVar("T")


def make_learner(
    config: Config,
    actor: nn.Module,
    critic: nn.Module | None,
    stack: ExitStack,
    *,
    snapshots: Sequence[str],
    channel: SharedChannel,
    threads: int,
    lends: bool = False,
    grid: Grid | None = None,
) -> tuple[PolicyLearner, Ranks | None]:
    """Make the learner, and the ranks that train for it, where there are any.

    Args:
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
    courses: dict[Name, Course] = {
        "actor": Course(t.lr, updates - frozen, warmup),
        "critic": Course(t.critic_lr, updates, warmup),
    }
    losses = Losses(config.algorithm, config.rollout.temperature)

    def trained(make: Callable[..., T], name: Name, model: Any) -> T:
        course = courses[name]
        return make(model, course.lr, t, updates=course.updates, warmup=course.warmup)

    ranks: Ranks | None = None
    made: tuple[Trained, Trained | None, Passes]
    if grid is not None:
        from stretto.training.sharded import Sharded, ShardedModel, ShardedPasses

        shards = Sharded(actor, grid, lends=lends)
        others = Sharded(critic, grid, lends=lends) if critic else None
        made = (
            trained(ShardedModel, "actor", shards),
            trained(ShardedModel, "critic", others) if others else None,
            ShardedPasses(shards, others, losses, t.microbatch_tokens),
        )
    elif not config.pipeline.ranks or critic is None:
        made = (
            trained(TrainedModel, "actor", actor),
            trained(TrainedModel, "critic", critic) if critic else None,
            LocalPasses(actor, critic, losses, t.microbatch_tokens),
        )
    else:
        # Imported here, as planning brings a compiler that nothing else needs.
        from stretto.training import pipelined

        staged = pipelined.start(actor, critic, config, courses, threads)
        stack.callback(staged.ranks.close)
        made, ranks = (staged.actor, staged.critic, staged.passes), staged.ranks
    factors = config.reward.factors
    first, second, passes = made
    learner = PolicyLearner(
        first, second, passes, config, factors, snapshots=snapshots, channel=channel
    )
    return learner, ranks
