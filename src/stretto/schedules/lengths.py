"""A model of response lengths: recent ones tell about the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.errors import ConfigError, StateError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

HALF_LIVES = 4
"""Half-lives that a window spans: at its far end a length counts 1/16."""
GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio less 1; its multiples, modulo 1, are spread evenly."""


class LengthModel:
    """The distribution of response lengths in tokens, from the responses that finished lately.

    Lengths drift as a policy learns, so the newest count most: a length counts half as much as one
    that came a quarter of the window later. Lengths of one step count the same, as their order is
    that of finishing, the short ones first.

    The lengths are of responses that finished. While the number of unfinished ones grows, long
    responses are missing among them, as the short ones finish first; while it stays the same, as
    many long ones come in as go out, and the lengths are those of all responses.

    State: the lengths, step by step.

    Args:
        window: lengths that are remembered, at least.

    Raises:
        ConfigError: the window is not positive.
    """

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ConfigError(f"a length window holds at least 1 length; got {window}")
        self._window = window
        self._steps: list[list[int]] = []
        self._table: tuple[IntArray, FloatArray] | None = None

    def __len__(self) -> int:
        """Lengths remembered."""
        return sum(map(len, self._steps))

    def observe(self, lengths: Sequence[int]) -> None:
        """Take in the responses that finished during a step."""
        self._steps.append([int(length) for length in lengths])
        while len(self) - len(self._steps[0]) >= self._window:
            del self._steps[0]
        self._table = None

    def mean(self) -> float:
        """Mean length in tokens."""
        lengths, weights = self._weighted()
        return float(lengths @ weights)

    def quantile(self, share: float) -> float:
        """The shortest length that at least ``share`` of the responses do not exceed."""
        lengths, weights = self._weighted()
        place = int(np.searchsorted(np.cumsum(weights), share - 1e-12))
        return float(lengths[min(place, len(lengths) - 1)])

    def sample(self, uniform: FloatArray) -> IntArray:
        """Draw lengths by inversion, for numbers of any shape, uniform in [0, 1)."""
        lengths, weights = self._weighted()
        places = np.searchsorted(np.cumsum(weights), uniform, side="right")
        return lengths[np.minimum(places, len(lengths) - 1)]

    def state_dict(self) -> dict[str, Any]:
        """Return the remembered lengths, as plain data."""
        return {"steps": [list(step) for step in self._steps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._steps = [list(step) for step in state["steps"]]
        self._table = None

    def _weighted(self) -> tuple[IntArray, FloatArray]:
        """Lengths in ascending order and their weights, which add up to 1; both of shape [n]."""
        if self._table is None:
            if not len(self):
                raise StateError("no response has finished yet; ask after the first step")
            self._table = self._tabulate()
        return self._table

    def _tabulate(self) -> tuple[IntArray, FloatArray]:
        counts = np.array([len(step) for step in self._steps])
        newer = counts[::-1].cumsum()[::-1] - counts
        of_step = 0.5 ** (newer * HALF_LIVES / self._window)
        lengths = np.concatenate([np.array(step, np.int64) for step in self._steps])
        order = np.argsort(lengths, kind="stable")
        weights = np.repeat(of_step, counts)[order]
        return lengths[order], weights / weights.sum()


def under_way(
    draws: IntArray, wanted: int, carried: int, max_carries: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Draw groups as met at a random moment, so that a simulation need not start afresh.

    A point thrown on all groups laid end to end is the likelier to hit a group the longer it is,
    and says how far it has come. How often it was carried follows from the steps of a round: the
    tokens of a batch, over the rows that decode them.

    Args:
        draws: lengths; shape [replicas, groups drawn, group].
        carried: groups to return for each replica.

    Returns:
        Tokens so far, and tokens left, shape [replicas, carried, group] each; times carried, shape
        [replicas, carried].
    """
    replicas, _, n = draws.shape
    groups = draws.reshape(-1, n)
    lengths = groups.max(axis=1)
    ends = lengths.cumsum()
    points = (np.arange(replicas * carried) * GOLDEN % 1.0) * ends[-1]
    hit = np.searchsorted(ends, points, side="right")
    reached = points - (ends[hit] - lengths[hit])
    left = np.maximum(0, np.ceil(groups[hit] - reached[:, None])).astype(np.int64)
    steps = lengths.mean() * wanted / (carried + wanted / 2)
    carries = 1 + np.minimum(reached / steps, reached / lengths[hit] * max_carries).astype(np.int64)
    shape = replicas, carried, n
    return (groups[hit] - left).reshape(shape), left.reshape(shape), carries.reshape(shape[:2])
