"""The learner, as the settings ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import nn

from stretto.config import Config
from stretto.pipelines.executor.stages import Name
from stretto.training.backprop import Backprop, LocalBackprop
from stretto.training.learner import PolicyLearner
from stretto.training.losses import Losses
from stretto.training.trained import LearningRate, Trained, TrainedModel
from stretto.weights.channel import SharedChannel
from stretto.workers.ranks import Ranks

if TYPE_CHECKING:
    from stretto.training.sharded import Grid


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
    rates: dict[Name, LearningRate] = {
        "actor": LearningRate(t.lr, updates - frozen, warmup),
        "critic": LearningRate(t.critic_lr, updates, warmup),
    }
    losses = Losses(config.algorithm, config.rollout.temperature)
    ranks: Ranks | None = None
    made: tuple[Trained, Trained | None, Backprop]
    if grid is not None:
        from stretto.training.sharded import ShardedBackprop, ShardedModel

        first = ShardedModel(actor, grid, rates["actor"], t, lends=lends)
        second = ShardedModel(critic, grid, rates["critic"], t, lends=lends) if critic else None
        made = first, second, ShardedBackprop(first, second, losses, t.microbatch_tokens)
    elif not config.pipeline.ranks or critic is None:
        whole = TrainedModel(actor, rates["actor"], t)
        other = TrainedModel(critic, rates["critic"], t) if critic else None
        made = whole, other, LocalBackprop(whole, other, losses, t.microbatch_tokens)
    else:
        # Imported here, as planning brings a compiler that nothing else needs.
        from stretto.training import pipelined

        staged = pipelined.start(actor, critic, config, rates, threads)
        stack.callback(staged.ranks.close)
        made, ranks = (staged.models["actor"], staged.models["critic"], staged), staged.ranks
    factors = config.reward.factors
    trained_actor, trained_critic, backprop = made
    learner = PolicyLearner(
        trained_actor,
        trained_critic,
        backprop,
        config,
        factors,
        snapshots=snapshots,
        channel=channel,
    )
    return learner, ranks
