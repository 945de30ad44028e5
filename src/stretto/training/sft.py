"""Supervised fine-tuning: cross-entropy on what the assistant says.

Shapes: b rows of a pass, L padded tokens, N learned tokens of all of them, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stretto.config import SftConfig
from stretto.config.training import token_budget
from stretto.errors import ModelError
from stretto.models.forward import (
    backbone,
    by_token_budget,
    output_head,
    pad_right,
    text_config,
    unwrapped,
)
from stretto.models.logits import token_logprobs
from stretto.tasks.responses import Example
from stretto.training.epochs import After, batches, fit, optimizer_of
from stretto.types import Stats

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
