"""The loop of supervised training: batches in a seeded order, an update each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto import signals
from stretto.config import RewardModelConfig, SftConfig, SupervisedConfig
from stretto.config.training import token_budget
from stretto.errors import ModelError, TaskError
from stretto.models.forward import (
    backbone,
    by_token_budget,
    hidden_states,
    output_head,
    pad_right,
    text_config,
    unwrapped,
)
from stretto.models.heads import apply_scalar_head
from stretto.models.logits import token_logprobs
from stretto.tasks.pairs import PairTokens
from stretto.tasks.responses import Example
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


Row = Sequence[Example]
"""Examples that lie behind one another in one row of a pass; one alone without packing."""


def train(model: nn.Module, examples: Sequence[Example], config: SftConfig, after: After) -> None:
    """Train a causal language model in place.

    Args:
        model: with adapters where only those are to be trained.
        examples: at least one, each of at most ``config.data.max_tokens`` tokens.
        after: told of each update; what it raises ends the training after a whole update.

    Raises:
        LearnerError: a gradient is not finite.
        ModelError: the model cannot be packed, or its logits are not a plain head's.
    """
    objective = objective_of(model, config)
    trained = optimizer_of(model, config, len(examples))
    try:
        fit(trained, batches(examples, config), objective, after)
    finally:
        trained.close()


def objective_of(model: nn.Module, config: SftConfig) -> CrossEntropy:
    """Return the loss, as the settings say.

    Raises:
        ModelError: see :func:`train`.
    """
    device = next(model.parameters()).device
    budget = token_budget(config.training.microbatch_tokens, device)
    return CrossEntropy(model, budget, row_tokens=config.data.max_tokens * config.packing)


class CrossEntropy:
    """Mean negative log-likelihood of the learned tokens.

    Every token counts the same, whichever example, pass or row it is in.

    Args:
        row_tokens: pack examples into rows of at most so many tokens; 0 gives each its own row.

    Raises:
        ModelError: packed sequences see one another in this model.
    """

    def __init__(self, model: nn.Module, token_budget: int, *, row_tokens: int = 0) -> None:
        self._model, self._head = model, output_head(model)
        self._budget, self._row_tokens = token_budget, row_tokens
        if row_tokens:
            _check_packing(model)

    def learn(self, batch: Sequence[Example]) -> Stats:
        """Add the gradient of the batch's loss; return the loss and the token counts."""
        count = sum(sum(e.trained) for e in batch)
        total = torch.zeros((), dtype=torch.float64)
        for rows in self._passes(batch):
            loss = -self._logprobs(rows).sum()
            (loss / count).backward()
            total += loss.detach().double().cpu()
        return {
            "train/loss": total.item() / count,
            "data/tokens": float(sum(len(e.tokens) for e in batch)),
            "data/learned_tokens": float(count),
        }

    @torch.no_grad()
    def measure(self, examples: Sequence[Example]) -> float:
        """The loss of all examples together, in nats a learned token."""
        total = sum(-self._logprobs(rows).double().sum().item() for rows in self._passes(examples))
        return total / sum(sum(e.trained) for e in examples)

    def _passes(self, examples: Sequence[Example]) -> list[list[Row]]:
        rows = pack(examples, self._row_tokens) if self._row_tokens else [[e] for e in examples]
        lengths = [sum(map(_inputs, row)) for row in rows]
        return [[rows[i] for i in part] for part in by_token_budget(lengths, self._budget)]

    def _logprobs(self, rows: Sequence[Row]) -> Tensor:
        """Log-probabilities [N] of the learned tokens."""
        hidden = row_hidden(self._model, rows)
        states, targets = [], list[int]()
        for h, row in zip(hidden, rows, strict=True):
            learned = [t for e in row for t in e.trained[1:]]  # by the state that predicts it
            states.append(h[: len(learned)][torch.tensor(learned, device=h.device)])
            targets += [
                t for e in row for t, learn in zip(e.tokens, e.trained, strict=True) if learn
            ]
        return token_logprobs(
            self._head, torch.cat(states), torch.tensor(targets, device=hidden.device)
        )[0]


def _inputs(example: Example) -> int:
    return len(example.tokens) - 1


def pack(examples: Sequence[Example], row_tokens: int) -> list[list[Example]]:
    """Pack examples into as few rows as first-fit decreasing finds (Johnson 1973), longest first.

    Args:
        row_tokens: that a row holds at most; a longer example has a row of its own.
    """
    rows: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda e: -len(e.tokens)):
        size = _inputs(example)
        at = next((i for i, free in enumerate(room) if free >= size), None)
        if at is None:
            rows.append([example])
            room.append(row_tokens - size)
        else:
            rows[at].append(example)
            room[at] -= size
    return rows


def row_hidden(model: nn.Module, rows: Sequence[Row]) -> Tensor:
    """Hidden states [b, L, H] of rows in which no example sees another; its last token is not read.

    Positions start anew with each example, by which transformers' attention, of every kind, knows
    the examples of a row from one another.
    """
    device = next(model.parameters()).device
    ids = pad_right([[t for e in row for t in e.tokens[:-1]] for row in rows], device)
    if all(len(row) == 1 for row in rows):
        hidden: Tensor = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
        return hidden
    positions = pad_right([[p for e in row for p in range(_inputs(e))] for row in rows], device)
    packed: Tensor = backbone(model)(
        input_ids=ids, position_ids=positions, use_cache=False
    ).last_hidden_state
    return packed


@torch.no_grad()
def _check_packing(model: nn.Module) -> None:
    """Refuse a model in which the second example of a row has other states than alone.

    In bfloat16 the states differ by rounding, which is large for arbitrary tokens. So the
    difference is compared with that of an example that does see the first one.

    Raises:
        ModelError: the states differ by more than rounding.
    """
    config = text_config(model)
    first, second = (
        Example(tuple((start + 97 * i) % config.vocab_size for i in range(9)), (False,) * 9)
        for start in (config.vocab_size // 7, config.vocab_size // 3)
    )
    length = _inputs(second)
    alone = row_hidden(model, [[second]])[0].float()
    packed = row_hidden(model, [[first, second]])[0, -length:].float()
    joined = Example(first.tokens[:-1] + second.tokens, first.trained[:-1] + second.trained)
    seeing = row_hidden(model, [[joined]])[0, -length:].float()
    off = ((packed - alone).norm() / (seeing - alone).norm()).item()
    if not off <= max(1e-3, 64 * torch.finfo(next(model.parameters()).dtype).eps):
        raise ModelError(
            f"packing = true: in {type(unwrapped(model)).__name__} sequences of one row see one "
            f"another ({off:.0%} as much as within one sequence); set packing = false"
        )


@dataclass(frozen=True, slots=True)
class Preferences:
    """Metrics of a reward model on pairs.

    Attributes:
        loss: mean -log sigmoid(r_chosen - r_rejected), in nats a pair.
        accuracy: share of the pairs whose chosen response has the higher reward; a tie counts half.
        margin: mean r_chosen - r_rejected.
        reward_mean: mean reward of all responses, chosen and rejected.
        reward_std: standard deviation of the same.
        pairs: number of pairs.
    """

    loss: float
    accuracy: float
    margin: float
    reward_mean: float
    reward_std: float
    pairs: int

    @classmethod
    def of(cls, chosen: Tensor, rejected: Tensor) -> Preferences:
        """Compute the metrics from the rewards [pairs] of both sides."""
        chosen, rejected = chosen.detach().double(), rejected.detach().double()
        margin = chosen - rejected
        both = torch.cat([chosen, rejected])
        return cls(
            loss=-F.logsigmoid(margin).mean().item(),
            accuracy=((margin > 0).double() + 0.5 * (margin == 0)).mean().item(),
            margin=margin.mean().item(),
            reward_mean=both.mean().item(),
            reward_std=both.std(correction=0).item(),
            pairs=len(margin),
        )

    def stats(self, prefix: str) -> dict[str, float]:
        """Return them as metrics."""
        return {
            f"{prefix}/loss": self.loss,
            f"{prefix}/accuracy": self.accuracy,
            f"{prefix}/margin": self.margin,
            f"{prefix}/reward_mean": self.reward_mean,
            f"{prefix}/reward_std": self.reward_std,
        }


def train(
    model: nn.Module, pairs: Sequence[PairTokens], config: RewardModelConfig, after: After
) -> None:
    """Train a sequence classifier with one label in place.

    Args:
        model: a causal backbone with a scalar head; with adapters where only those and the head
            are to be trained.
        pairs: at least one.
        after: told of each update; what it raises ends the training after a whole update.

    Raises:
        LearnerError: a gradient is not finite.
    """
    objective = objective_of(model, config)
    trained = optimizer_of(model, config, len(pairs))
    try:
        fit(trained, batches(pairs, config), objective, after)
    finally:
        trained.close()


def objective_of(model: nn.Module, config: RewardModelConfig) -> BradleyTerry:
    """Return the loss, as the settings say."""
    device = next(model.parameters()).device
    budget = token_budget(config.training.microbatch_tokens, device)
    return BradleyTerry(model, budget, config.center_coef)


class BradleyTerry:
    """Mean over the pairs of -log sigmoid(r_c - r_r) + center_coef (r_c + r_r)^2.

    The second term fixes the constant that the first leaves free, at zero (Eisenstein et al. 2023,
    section 2). Subtracting the mean reward after the training would need a bias in the head, which
    sequence classifiers of most architectures have not; and there is no other weight that shifts
    all rewards by the same.

    Args:
        model: a causal backbone with a scalar head.
        center_coef: 0 leaves the second term out.
    """

    def __init__(self, model: nn.Module, token_budget: int, center_coef: float) -> None:
        self._model, self._budget, self._center_coef = model, token_budget, center_coef

    def learn(self, batch: Sequence[PairTokens]) -> Stats:
        """Add the gradient of the batch's loss; return metrics from before the update."""
        seen = []
        for part in self._passes(batch):
            chosen, rejected = self._rewards(part)
            loss = -F.logsigmoid(chosen - rejected)
            if self._center_coef:
                loss = loss + self._center_coef * (chosen + rejected).square()
            (loss.sum() / len(batch)).backward()
            seen.append(torch.stack([chosen, rejected]).detach().cpu())
        tokens = sum(2 * len(p.prompt) + len(p.chosen) + len(p.rejected) for p in batch)
        return {**Preferences.of(*torch.cat(seen, 1)).stats("train"), "data/tokens": float(tokens)}

    @torch.no_grad()
    def measure(self, pairs: Sequence[PairTokens]) -> Preferences:
        """Return the model's metrics on all of the pairs."""
        seen = [torch.stack(self._rewards(part)).cpu() for part in self._passes(pairs)]
        return Preferences.of(*torch.cat(seen, 1))

    def _passes(self, pairs: Sequence[PairTokens]) -> Iterator[list[PairTokens]]:
        for part in by_token_budget([2 * p.longest for p in pairs], self._budget):
            yield [pairs[i] for i in part]

    def _rewards(self, pairs: Sequence[PairTokens]) -> tuple[Tensor, Tensor]:
        """Rewards [b] of the chosen and of the rejected responses, read at the end token."""
        rows = [[*p.prompt, *p.chosen] for p in pairs]
        rows += [[*p.prompt, *p.rejected] for p in pairs]
        hidden = hidden_states(self._model, rows)
        last = torch.stack([h[len(row) - 1] for h, row in zip(hidden, rows, strict=True)])
        rewards = apply_scalar_head(self._model, last)
        return cast(tuple[Tensor, Tensor], rewards.split(len(pairs)))
