"""Forward and backward passes of a mini-batch, behind one small interface.

The learner divides a mini-batch with its :class:`Backprop`, lets it accumulate gradients in the
models, and then updates the models. Passes run in this process, on ranks that hold shards
(:mod:`stretto.training.sharded`) or on ranks that hold pipeline stages
(:mod:`stretto.training.pipelined`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from stretto.algorithms.experience import LossTerm
from stretto.algorithms.policy import POLICY_LOSS
from stretto.algorithms.reductions import Metrics
from stretto.bounds import ceil_div
from stretto.config.training_config import token_budget
from stretto.models.cpu_threads import side_by_side
from stretto.models.forward import by_token_budget, packs, packs_rightly, unwrapped
from stretto.training.losses import Losses, MicroBatch
from stretto.training.optimal_baseline import passes_with_optimal_baseline
from stretto.training.trained import TrainedModel
from stretto.types import Stats


class Backprop(Protocol):
    """Computes the gradients of mini-batches."""

    def divide(self, tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        """Divide a mini-batch into micro-batches: lists of indices into ``tokens``, each index
        once. ``tokens`` are the sizes of the units, including the padding within each.
        """
        ...

    def run(
        self, batches: Sequence[MicroBatch], kl_coef: float, *, trains_actor: bool
    ) -> Mapping[str, Metrics]:
        """Leave the gradients of the losses, summed over micro-batches, in the models. The actor
        must get gradients only with ``trains_actor``. Returns metrics by model name.
        """
        ...

    def finish(self) -> Stats:
        """Return metrics of the passes since the last call, after a step's last update."""
        ...


@dataclass(eq=False)
class LocalBackprop:
    """Passes in this process, one by one. A CPU trains actor and critic in parallel."""

    actor: TrainedModel
    critic: TrainedModel | None
    losses: Losses
    microbatch_tokens: int

    def __post_init__(self) -> None:
        _ = self.actor.head  # fails here rather than in the first step
        for trained in filter(None, (self.actor, self.critic)):
            if packs(trained.model) and not trained.compute(partial(packs_rightly, trained.model)):
                unwrapped(trained.model).set_attn_implementation("sdpa")
        self._budget = token_budget(self.microbatch_tokens, self.actor.device, self._at_once)

    @property
    def _at_once(self) -> int:
        """The number of models that are trained at the same time."""
        return 2 if self.critic is not None and self.actor.device.type == "cpu" else 1

    def divide(self, tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        if self.losses.algorithm.has_optimal_baseline:
            return [[i] for i in range(len(tokens))]
        return by_token_budget(tokens, self._budget)

    def run(
        self, batches: Sequence[MicroBatch], kl_coef: float, *, trains_actor: bool
    ) -> Mapping[str, Metrics]:
        batches = [batch.to(self.actor.device) for batch in batches]
        passes = {}
        if self.critic is not None:
            loss = partial(self.losses.of_critic, self.critic.model)
            passes["critic"] = partial(_passes, self.critic, batches, loss)
        if trains_actor:
            passes["actor"] = partial(self._actor_passes, batches, kl_coef)
        return dict(zip(passes, self._make([*passes.values()]), strict=True))

    def _actor_passes(self, batches: Sequence[MicroBatch], kl_coef: float) -> Metrics:
        def run(losses: Losses, batches: Sequence[MicroBatch]) -> Metrics:
            def of_actor(states: Tensor, batch: MicroBatch) -> LossTerm:
                return losses.of_actor(self.actor.head, states, batch, kl_coef)

            return _passes(self.actor, batches, of_actor)

        if not self.losses.algorithm.has_optimal_baseline:
            return run(self.losses, batches)
        of_policy = partial(run, self.losses.of_policy)
        metrics = passes_with_optimal_baseline(self.actor, batches, of_policy)
        a = self.losses.algorithm
        if a.entropy_coef or (a.kl_place == "loss" and a.kl_coef):  # terms without advantages
            rest = run(self.losses, [batch.with_advantages(0.0) for batch in batches])
            metrics = replace(rest, sums={**rest.sums, POLICY_LOSS: metrics.sums[POLICY_LOSS]})
        return metrics

    def _make(self, passes: Sequence[Callable[[], Metrics]]) -> Sequence[Metrics]:
        if self._at_once > 1:
            return side_by_side(passes)
        return [run_pass() for run_pass in passes]

    def finish(self) -> Stats:
        return {}


def _passes(
    trained: TrainedModel,
    batches: Sequence[MicroBatch],
    loss: Callable[[Tensor, MicroBatch], LossTerm],
) -> Metrics:
    def forward(batch: MicroBatch) -> tuple[Tensor, LossTerm]:
        term = loss(batch.read(trained.model), batch)
        return term.loss, term  # shards find losses in tuples, but not in other objects

    metrics = Metrics()
    with trained.training():
        for i, batch in enumerate(batches, 1):
            trained.before_pass(last=i == len(batches))
            _, term = trained.compute(partial(forward, batch))
            term.loss.backward()
            metrics += term.metrics
    return metrics


def divided(tokens: Sequence[int], wanted: int, hands: int) -> list[Sequence[int]]:
    """Divide sequences into the same number of similarly sized micro-batches for each worker.
    ``hands`` is the number of workers, ``wanted`` the desired total. With fewer sequences than
    workers, each sequence is a micro-batch. Returns indices into ``tokens``: the micro-batches of
    the first worker, then of the second, ...
    """
    if len(tokens) < hands:
        return [[i] for i in range(len(tokens))]
    count = min(ceil_div(wanted, hands), len(tokens) // hands) * hands
    # Workers take consecutive parts of the list, so deal out the long micro-batches.
    return deal(into_micro_batches(tokens, count), hands)


def into_micro_batches(tokens: Sequence[int], count: int) -> list[list[int]]:
    """Divide sequences into ``count`` micro-batches, minimizing the size of the largest. Sequences
    of similar length go together. Returns indices into ``tokens``, longest sequences first.
    """
    budgets = range(1, max(tokens) * len(tokens) + 1)
    smallest = bisect_left(budgets[:-1], -count, key=lambda b: -len(by_token_budget(tokens, b)))
    groups = by_token_budget(tokens, budgets[smallest])
    while len(groups) < count:  # sequences of equal length can skip several counts at once
        largest = max(
            (i for i, group in enumerate(groups) if len(group) > 1),
            key=lambda i: tokens[groups[i][0]] * len(groups[i]),
        )
        group = groups[largest]
        groups[largest : largest + 1] = [group[: len(group) // 2], group[len(group) // 2 :]]
    return groups


def deal(groups: Sequence[Sequence[int]], hands: int) -> list[Sequence[int]]:
    """Deal micro-batches, longest first, to as many workers in alternating direction. Returns the
    first worker's micro-batches, then the second's, ...
    """
    dealt: list[list[Sequence[int]]] = [[] for _ in range(hands)]
    for i, group in enumerate(groups):
        turn, at = divmod(i, hands)
        dealt[hands - 1 - at if turn % 2 else at].append(group)
    return [group for hand in dealt for group in hand]
