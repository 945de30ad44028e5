"""Exchange between a whole model and its stages: micro-batches as tensors, state by names.

Shapes: b responses and T columns of a micro-batch, L padded tokens; N response tokens, flattened;
H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.algorithms.experience import Part
from stretto.config import PipelineConfig
from stretto.errors import ModelError
from stretto.models.forward import (
    by_token_budget,
    inputs,
    pad_right,
    predicting_response,
    response_tokens,
)
from stretto.pipelines.executor.stages import Name, check_cut
from stretto.training.losses import MicroBatch

Names = Mapping[str, str]
"""A stage's names of trained parameters, in its order, to those in the whole model."""


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A micro-batch as stages take it.

    Attributes:
        tokens: [b, L] ids of prompts and responses, right-padded; the last response token is never
            an input, as nothing is predicted from it.
        places: of the states in each sequence that predict sampled tokens.
        targets: [N], the sampled tokens.
        part: what the losses need besides.
    """

    tokens: Tensor
    places: Sequence[Sequence[int]]
    targets: Tensor
    part: Part

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> PaddedBatch:
        """Make a padded batch of responses, on the CPU."""
        cpu, responses = torch.device("cpu"), micro_batch.responses
        return cls(
            tokens=pad_right(inputs(responses), cpu),
            places=[predicting_response(r) for r in responses],
            targets=response_tokens(responses, cpu),
            part=micro_batch.part.to(cpu),
        )

    @classmethod
    def blank(cls, like: Part) -> PaddedBatch:
        """Make a batch of a token and no response; its losses and gradients are zero.

        Args:
            like: the part of another micro-batch, for the kinds of tensors that losses take.
        """
        return cls.of(MicroBatch.blank(like))


def into_micro_batches(tokens: Sequence[int], count: int) -> list[list[int]]:
    """Divide sequences into ``count`` micro-batches, the largest as small as it can be.

    Neighbours in length go together, as in :func:`~stretto.models.forward.by_token_budget`.

    Args:
        tokens: of each sequence; at least ``count`` sequences.

    Returns:
        Indices into ``tokens``, longest sequences first.
    """
    low, high = 1, max(tokens) * len(tokens)
    while low < high:
        budget = (low + high) // 2
        if len(by_token_budget(tokens, budget)) <= count:
            high = budget
        else:
            low = budget + 1
    groups = by_token_budget(tokens, low)
    while len(groups) < count:  # where sequences of one length take a step of several groups
        largest = max(
            (i for i, group in enumerate(groups) if len(group) > 1),
            key=lambda i: tokens[groups[i][0]] * len(groups[i]),
        )
        group = groups[largest]
        groups[largest : largest + 1] = [group[: len(group) // 2], group[len(group) // 2 :]]
    return groups


def divided(tokens: Sequence[int], wanted: int, hands: int) -> list[Sequence[int]]:
    """Divide sequences into equally many micro-batches for each hand, of like sizes.

    With too few sequences for each to get one, each sequence is a micro-batch.

    Args:
        tokens: of each sequence.
        hands: that get equally many.

    Returns:
        Indices into ``tokens``: the micro-batches of the first hand, then of the second, ...
    """
    if len(tokens) < hands:
        return [[i] for i in range(len(tokens))]
    count = min(-(-wanted // hands), len(tokens) // hands) * hands
    # Hands take consecutive parts of the list: the long ones are dealt out.
    return deal(into_micro_batches(tokens, count), hands)


def deal(groups: Sequence[Sequence[int]], hands: int) -> list[Sequence[int]]:
    """Share micro-batches out to as many hands, the longest first, to and fro.

    Args:
        hands: that get equally many.

    Returns:
        Those of the first hand, then those of the second, ...
    """
    dealt: list[list[Sequence[int]]] = [[] for _ in range(hands)]
    for i, group in enumerate(groups):
        turn, at = divmod(i, hands)
        dealt[hands - 1 - at if turn % 2 else at].append(group)
    return [group for hand in dealt for group in hand]


def on_cpu(state: Any) -> Any:
    """Return the same state with all tensors on the CPU, where another process can read them."""
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, Mapping):
        return {key: on_cpu(value) for key, value in state.items()}
    return state


def check_stages(config: PipelineConfig, name: Name, model: nn.Module) -> None:
    """Check that a model can be cut as the settings say.

    Args:
        config: with ``ranks`` above 0.

    Raises:
        ModelError: it cannot; see :func:`~stretto.pipelines.executor.stages.check_cut`.
    """
    try:
        check_cut(model, config.stages(name))
    except ModelError as error:
        raise ModelError(f"{config.describe_stages(name)}: {error}") from None


def whole_state(
    states: Iterable[tuple[Names, Mapping[str, Any]]], order: Sequence[str]
) -> dict[str, Any]:
    """Put the states of the stages' trainers together to that of the whole model's trainer.

    Args:
        states: of each stage's :class:`~stretto.training.trained.TrainedModel`, with its names.
        order: names of the whole model's trained parameters, as it lists them.
    """
    masters: dict[str, Tensor] = {}
    moments: dict[str, Any] = {}
    last: Mapping[str, Any] = {}
    for names, last in states:
        held = last["optimizer"]["state"]
        for number, (own, name) in enumerate(names.items()):
            masters[name] = last["masters"][own]
            if number in held:
                moments[name] = held[number]
    (group,) = last["optimizer"]["param_groups"]
    return {
        "masters": {name: masters[name] for name in order},
        "optimizer": {
            "state": {i: moments[name] for i, name in enumerate(order) if name in moments},
            "param_groups": [{**group, "params": list(range(len(order)))}],
        },
        "schedule": last["schedule"],
    }


def stage_state(state: Mapping[str, Any], order: Sequence[str], names: Names) -> dict[str, Any]:
    """Take a stage's state out of that of the whole model's trainer; see :func:`whole_state`."""
    number = {name: i for i, name in enumerate(order)}
    moments = state["optimizer"]["state"]
    (group,) = state["optimizer"]["param_groups"]
    return {
        "masters": {own: state["masters"][name] for own, name in names.items()},
        "optimizer": {
            "state": {
                i: moments[number[name]]
                for i, name in enumerate(names.values())
                if number[name] in moments
            },
            "param_groups": [{**group, "params": list(range(len(names)))}],
        },
        "schedule": state["schedule"],
    }
