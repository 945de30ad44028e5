"""Supervised training: one loop and two losses.

Fine-tuning learns the assistant's messages (:class:`CrossEntropy`). A reward model learns
preferences (:class:`BradleyTerry`; Bradley and Terry 1952; Stiennon et al. 2020, section 3.4).

Shapes: b rows or pairs of a pass, L padded tokens, N learned tokens of the pass, H hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto import signals
from stretto.bounds import ceil_div
from stretto.config import RewardModelConfig, SftConfig, SupervisedConfig
from stretto.config.training_config import token_budget
from stretto.errors import ModelError, TaskError
from stretto.models import forward
from stretto.models.heads import apply_scalar_head
from stretto.models.logits import token_logprobs
from stretto.tasks.responses import Example
from stretto.tasks.supervised_rows import PairTokens
from stretto.training.trained import LearningRate, TrainedModel
from stretto.types import Stats

T = TypeVar("T")


# -- the loop ------------------------------------------------------------------------------------


def train(
    model: nn.Module,
    rows: Sequence[T],
    learn: Callable[[Sequence[T]], Stats],
    config: SupervisedConfig,
    after: Callable[[int, Stats], None],
) -> None:
    """Train a model in place, with one update per batch of at least one row. ``learn`` adds the
    gradient of a batch's loss to the model's and returns metrics. ``after`` is called after each
    update with its number, from 1, and the metrics, gradient norm and learning rate. An exception
    raised by ``after`` ends the training.
    """
    t = config.training
    trained = TrainedModel(model, LearningRate(t.lr, updates(config, len(rows)), t.warmup_steps), t)
    try:
        for step, batch in enumerate(batches(rows, config), start=1):
            with trained.training():
                metrics = learn(batch)
            lr = trained.lr
            with signals.held():  # half an update would leave useless weights
                norm = trained.update()
            after(step, {**metrics, "optimizer/lr": lr, "optimizer/grad_norm": norm})
    finally:
        trained.close()


def updates(config: SupervisedConfig, rows: int) -> int:
    return config.steps or config.training.epochs * ceil_div(rows, config.batch)


def batches(rows: Sequence[T], config: SupervisedConfig) -> Iterator[list[T]]:
    """Yield batches of epochs in seeded random order. An epoch's last batch may be smaller."""
    remaining, epoch = updates(config, len(rows)), 0
    while remaining:
        order = np.random.default_rng([config.seed % 2**64, epoch]).permutation(len(rows))
        epoch += 1
        for start in range(0, len(rows), config.batch)[:remaining]:
            remaining -= 1
            yield [rows[i] for i in order[start : start + config.batch]]


def hold_out(
    rows: Sequence[T], key: Callable[[T], Hashable], share: float, seed: int
) -> tuple[list[T], list[T]]:
    """Split rows into a training and a held-out set, keeping their order. Rows with the same key (a
    prompt) stay together, so that held-out prompts were not trained on. At least ``share`` of the
    rows is held out. The seed does not change the order of training. Raises TaskError if nothing is
    left to train on.
    """
    groups = defaultdict[Hashable, list[int]](list)
    for index, row in enumerate(rows):
        groups[key(row)].append(index)
    members = list(groups.values())
    min_rows, held_out = share * len(rows), set[int]()
    for at in np.random.default_rng([seed % 2**64, 2**32]).permutation(len(members)):
        if len(held_out) >= min_rows:
            break
        held_out.update(members[at])
    if len(held_out) == len(rows):
        raise TaskError(
            f"data.held_out = {share} of {len(rows)} rows with {len(members)} different prompts "
            "leaves nothing to train on; lower it (0 holds none out), or give more rows",
            "nothing-to-train-on",
        )
    training_rows = [row for i, row in enumerate(rows) if i not in held_out]
    return training_rows, [row for i, row in enumerate(rows) if i in held_out]


# -- fine-tuning ---------------------------------------------------------------------------------

PackedRow = Sequence[Example]
"""Examples packed behind one another in one row of a pass. A single one without packing."""


class CrossEntropy:
    """Mean negative log-likelihood of the learned tokens of a causal language model. Every token
    counts the same, whichever example, pass or row it is in. Examples are packed into rows of at
    most ``row_tokens``. With 0 each gets its own row. Raises ModelError if this model's packed
    sequences attend to one another, or if its logits are not a plain head's.
    """

    def __init__(self, model: nn.Module, token_budget: int, *, row_tokens: int = 0) -> None:
        self._model, self._head = model, forward.output_head(model)
        self._budget, self._row_tokens = token_budget, row_tokens
        if row_tokens:
            _check_packing(model)

    @classmethod
    def of(cls, model: nn.Module, config: SftConfig) -> CrossEntropy:
        row_tokens = config.data.max_tokens * config.packing
        return cls(model, _budget(model, config), row_tokens=row_tokens)

    def learn(self, batch: Sequence[Example]) -> Stats:
        """Add the gradient of the batch's loss. Return the loss and the token counts."""
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
        """Return the loss over all examples, in nats per learned token."""
        total = sum(-self._logprobs(rows).double().sum().item() for rows in self._passes(examples))
        return total / sum(sum(e.trained) for e in examples)

    def _passes(self, examples: Sequence[Example]) -> list[list[PackedRow]]:
        rows = pack(examples, self._row_tokens) if self._row_tokens else [[e] for e in examples]
        lengths = [sum(map(_inputs, row)) for row in rows]
        return [[rows[i] for i in part] for part in forward.by_token_budget(lengths, self._budget)]

    def _logprobs(self, rows: Sequence[PackedRow]) -> Tensor:
        hidden = row_hidden(self._model, rows)
        # The first token of an example is never learned, and its last one is never an input.
        places = [forward.predicting([f for e in row for f in e.trained[1:]], 1) for row in rows]
        targets = [t for row in rows for e in row for t in compress(e.tokens, e.trained)]
        tokens = torch.tensor(targets, device=hidden.device)
        return token_logprobs(self._head, forward.states_at(hidden, places), tokens)[0]


def _inputs(example: Example) -> int:
    return len(example.tokens) - 1


def _budget(model: nn.Module, config: SupervisedConfig) -> int:
    return token_budget(config.training.microbatch_tokens, next(model.parameters()).device)


def pack(examples: Sequence[Example], row_tokens: int) -> list[list[Example]]:
    """Pack examples by first-fit decreasing (Johnson 1973). Too long ones get their own row."""
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


def row_hidden(model: nn.Module, rows: Sequence[PackedRow]) -> Tensor:
    """Return hidden states [b, L, H] of rows whose examples do not attend to one another. An
    example's last token is not an input. Positions restart with each example, from which every
    attention implementation of transformers recognises the boundaries.
    """
    device = next(model.parameters()).device
    ids = forward.pad_right([[t for e in row for t in e.tokens[:-1]] for row in rows], device)
    decoder = forward.backbone(model)
    if all(len(row) == 1 for row in rows):
        return forward.plain_states(decoder, input_ids=ids)
    starts = [[p for e in row for p in range(_inputs(e))] for row in rows]
    places = forward.pad_right(starts, device)
    out = decoder(input_ids=ids, position_ids=places, use_cache=False)
    return cast(Tensor, out.last_hidden_state)


@torch.no_grad()
def _check_packing(model: nn.Module) -> None:
    """Raise ModelError if a row's second example has other states than when it is alone. The
    difference must be rounding: it is compared with that of an example that does attend to the
    first one.
    """
    config = forward.text_config(model)
    first, second = (
        Example(tuple((start + 97 * i) % config.vocab_size for i in range(9)), (False,) * 9)
        for start in (config.vocab_size // 7, config.vocab_size // 3)
    )
    length = _inputs(second)
    unpacked = row_hidden(model, [[second]])[0].float()
    packed = row_hidden(model, [[first, second]])[0, -length:].float()
    joined = Example(first.tokens[:-1] + second.tokens, first.trained[:-1] + second.trained)
    seeing = row_hidden(model, [[joined]])[0, -length:].float()
    leak = ((packed - unpacked).norm() / (seeing - unpacked).norm()).item()
    if not leak <= max(1e-3, 64 * torch.finfo(next(model.parameters()).dtype).eps):
        name = type(forward.unwrapped(model)).__name__
        raise ModelError(
            f"packing = true: in {name} sequences of one row see one another ({leak:.0%} as much "
            "as within one sequence); set packing = false",
            "packing-leaks",
        )


# -- reward models -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Preferences:
    """Metrics of a reward model on pairs.

    Attributes:
        loss: mean -log sigmoid(r_chosen - r_rejected), in nats per pair.
        accuracy: share of pairs whose chosen response has the higher reward. A tie counts half.
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
        return {f"{prefix}/{k}": v for k, v in asdict(self).items() if k != "pairs"}


class BradleyTerry:
    """Mean over the pairs of -log sigmoid(r_c - r_r) + center_coef (r_c + r_r)^2. The second term
    sets to zero the constant that the first leaves free (Eisenstein et al. 2023, section 2).
    Subtracting the mean reward after the training would need a bias in the head, which sequence
    classifiers of most architectures lack.
    """

    def __init__(self, model: nn.Module, token_budget: int, center_coef: float) -> None:
        self._model = model
        self._budget = token_budget
        self._center_coef = center_coef

    @classmethod
    def of(cls, model: nn.Module, config: RewardModelConfig) -> BradleyTerry:
        return cls(model, _budget(model, config), config.center_coef)

    def learn(self, batch: Sequence[PairTokens]) -> Stats:
        """Add the gradient of the batch's loss. Return metrics from before the update."""
        rewards = []
        for part in self._passes(batch):
            chosen_rewards, rejected_rewards = self._rewards(part)
            loss = -F.logsigmoid(chosen_rewards - rejected_rewards)
            if self._center_coef:
                loss = loss + self._center_coef * (chosen_rewards + rejected_rewards).square()
            (loss.sum() / len(batch)).backward()
            rewards.append(torch.stack([chosen_rewards, rejected_rewards]).detach().cpu())
        tokens = sum(2 * len(p.prompt) + len(p.chosen) + len(p.rejected) for p in batch)
        return {
            **Preferences.of(*torch.cat(rewards, 1)).stats("train"),
            "data/tokens": float(tokens),
        }

    @torch.no_grad()
    def measure(self, pairs: Sequence[PairTokens]) -> Preferences:
        rewards = [torch.stack(self._rewards(part)).cpu() for part in self._passes(pairs)]
        return Preferences.of(*torch.cat(rewards, 1))

    def _passes(self, pairs: Sequence[PairTokens]) -> Iterator[list[PairTokens]]:
        for part in forward.by_token_budget([2 * p.longest for p in pairs], self._budget):
            yield [pairs[i] for i in part]

    def _rewards(self, pairs: Sequence[PairTokens]) -> tuple[Tensor, Tensor]:
        """Return rewards [b] of the chosen and rejected responses, read at the last token."""
        rows = [[*p.prompt, *p.chosen] for p in pairs]
        rows += [[*p.prompt, *p.rejected] for p in pairs]
        rewards = apply_scalar_head(self._model, forward.last_hidden(self._model, rows))
        return cast(tuple[Tensor, Tensor], rewards.split(len(pairs)))
