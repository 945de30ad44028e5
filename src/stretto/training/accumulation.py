"""Gradients of groups whose batch is not complete yet, and the scale that completes them.

The loss of an update is a sum over responses, divided by the number of its tokens or responses.
Passes of single groups leave out the division, and the gradients are scaled once the numbers are
known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from stretto.algorithms.experience import Experience
from stretto.algorithms.policy import POLICY_LOSS, SQUARED_WEIGHT, SQUARES, SUM, TOKENS, WEIGHT
from stretto.algorithms.reductions import Metrics, count_responses
from stretto.config import AlgorithmConfig
from stretto.types import TrainBatch

OF_RESPONSES = (WEIGHT, SQUARED_WEIGHT, "policy/sequence_ratio", "dpo/margin", "dpo/accuracy")
"""Metrics that are means over responses."""


class Accumulated:
    """The groups whose gradients the actor holds, and the metrics of their passes."""

    def __init__(self) -> None:
        self._ids: dict[int, set[int]] = {}  # by prompt
        self.sums = Metrics()

    def add(self, batch: TrainBatch, sums: Metrics) -> None:
        self._ids |= _ids_by_prompt(batch)
        self.sums += sums

    def __bool__(self) -> bool:
        return bool(self._ids)

    def fit(self, batch: TrainBatch) -> bool:
        """Return whether a batch holds these groups as they were. Otherwise a response was dropped,
        or a prompt was drawn again, which changes the advantages of both draws.
        """
        ids = _ids_by_prompt(batch)
        return all(ids.get(prompt) == of_group for prompt, of_group in self._ids.items())

    def others(self, batch: TrainBatch, units: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the units of a batch whose prompts were not accumulated."""
        return [unit for unit in units if int(batch.prompt_ids[unit[0]]) not in self._ids]


def _ids_by_prompt(batch: TrainBatch) -> dict[int, set[int]]:
    ids: defaultdict[int, set[int]] = defaultdict(set)
    for prompt, id_ in zip(batch.prompt_ids.tolist(), batch.ids.tolist(), strict=True):
        ids[prompt].add(id_)
    return dict(ids)


def divided_sums(
    sums: Metrics, experience: Experience, algorithm: AlgorithmConfig
) -> tuple[float, Metrics]:
    """Return the factor of gradients that are sums over an update's units, and its metrics."""
    inputs = experience.pick([row for unit in experience.units for row in unit])
    of_token = 1 / max(int(inputs.mask.sum()), 1)
    of_response = 1 / max(int(count_responses(inputs.mask.any(dim=1), inputs.episodes)), 1)
    factor = of_token if algorithm.averaging == "token_mean" else of_response
    factors = {POLICY_LOSS: factor, **dict.fromkeys((SUM, SQUARES, TOKENS), 1.0)}
    factors |= dict.fromkeys(OF_RESPONSES, of_response)
    if algorithm.definition.aggregation is None:
        factors["policy/clipfrac_avg"] = of_response
    means = {name: total * factors.get(name, of_token) for name, total in sums.sums.items()}
    return factor, replace(sums, sums=means)
