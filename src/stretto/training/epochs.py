"""The loop of supervised training: batches in a seeded order, an update each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
from torch import nn

from stretto import signals
from stretto.config import SupervisedConfig
from stretto.errors import TaskError
from stretto.training.trained import TrainedModel
from stretto.types import Stats

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

After = Callable[[int, Stats], None]
"""Called after each update with its number, from 1, and its metrics."""


class Objective(Protocol[T_contra]):
    """A loss that is a mean over a batch, however the batch is split into passes."""

    def learn(self, batch: Sequence[T_contra]) -> Stats:
        """Add the gradient of the batch's loss to the model's; returns metrics."""
        ...


def fit(
    trained: TrainedModel, batches: Iterable[Sequence[T]], objective: Objective[T], after: After
) -> None:
    """Make one update for each batch.

    Args:
        trained: the model that ``objective`` is a loss of.
        batches: of whatever the objective learns from.
        after: called after each update, with the objective's metrics, the gradient norm and the
            learning rate.

    Raises:
        LearnerError: a gradient is not finite.
    """
    for step, batch in enumerate(batches, start=1):
        with trained.training():
            metrics = objective.learn(batch)
        lr = trained.lr
        with signals.held():  # the weights of half an update would be worth nothing
            norm = trained.update()
        after(step, {**metrics, "optimizer/lr": lr, "optimizer/grad_norm": norm})


def updates(config: SupervisedConfig, rows: int) -> int:
    """Return how many updates a run takes on ``rows`` rows."""
    return config.steps or config.training.epochs * -(-rows // config.batch)


def batches(rows: Sequence[T], config: SupervisedConfig) -> Iterator[list[T]]:
    """Yield the batches of a run.

    An epoch is all rows in a seeded order of its own; its last batch may be smaller.
    """
    left = updates(config, len(rows))
    epoch = 0
    while left:
        order = np.random.default_rng([config.seed % 2**64, epoch]).permutation(len(rows))
        epoch += 1
        for start in range(0, len(rows), config.batch)[:left]:
            left -= 1
            yield [rows[i] for i in order[start : start + config.batch]]


def hold_out(
    rows: Sequence[T], key: Callable[[T], Hashable], share: float, seed: int
) -> tuple[list[T], list[T]]:
    """Split rows into those to train on and those to measure on.

    Rows with one key (a prompt) go to one side, so that what is measured on has not been seen.

    Args:
        rows: at least one.
        share: of the rows to hold out, rounded up; at least so many are.
        seed: of the choice, which does not depend on the order of training.

    Returns:
        Rows to train on and rows held out, each in their order.

    Raises:
        TaskError: nothing is left to train on.
    """
    keys = [key(row) for row in rows]
    groups: dict[Hashable, list[int]] = {}
    for index, k in enumerate(keys):
        groups.setdefault(k, []).append(index)
    members = list(groups.values())
    wanted, held = share * len(rows), set[int]()
    for at in np.random.default_rng([seed % 2**64, 2**32]).permutation(len(members)):
        if len(held) >= wanted:
            break
        held.update(members[at])
    if len(held) == len(rows):
        raise TaskError(
            f"data.held_out = {share} of {len(rows)} rows with {len(members)} different prompts "
            "leaves nothing to train on; lower it (0 holds none out), or give more rows"
        )
    return (
        [row for i, row in enumerate(rows) if i not in held],
        [row for i, row in enumerate(rows) if i in held],
    )


def optimizer_of(model: nn.Module, config: SupervisedConfig, rows: int) -> TrainedModel:
    """Return the model with its optimizer, for a run on ``rows`` rows."""
    t = config.training
    return TrainedModel(model, t.lr, t, updates=updates(config, rows), warmup=t.warmup_steps)
