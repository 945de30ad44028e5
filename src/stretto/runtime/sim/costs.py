"""Costs of work, in virtual seconds.

Each cost is linear in the amounts of work. Its coefficients are given, derived from public figures
of a device and a model (``hardware.py``), or fitted to a real run (``calibration.py``).

Legend: R rows (rollouts decoded together), C context (tokens in all rows whose keys and values a
step reads), n decode steps.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import Annotated

from pydantic import Field

from stretto.config import NonNegative, NonNegativeInt, Section

Positive = Annotated[float, Field(gt=0)]


class DecodeCost(Section):
    """The cost of decoding: a step takes ``step_s + row_s * R + context_s * C`` seconds.

    The three terms are reading the weights, the arithmetic of a token, and reading the cache. Over
    n steps in which no row ends, C grows by R a step.
    """

    step_s: NonNegative = 0.0
    """Seconds a step, whatever is in it."""
    row_s: NonNegative = 0.0
    """Seconds a row."""
    context_s: NonNegative = 0.0
    """Seconds a token of context."""

    def seconds(self, rows: int, context: int, steps: int) -> float:
        """Seconds of n steps of R rows whose context is C before the first."""
        first = self.step_s + self.row_s * rows + self.context_s * context
        return steps * first + self.context_s * rows * (steps * (steps - 1) // 2)

    def steps_within(self, rows: int, context: int, seconds: float) -> int:
        """Return the fewest steps that take at least so long; a step must cost something."""
        if seconds <= 0:
            return 0
        # grow n^2 + first n = seconds, with the step's share of the growth in ``first``
        grow = self.context_s * rows / 2
        first = self.step_s + self.row_s * rows + self.context_s * context - grow
        root = (
            2 * seconds / (first + sqrt(first * first + 4 * grow * seconds))
            if grow
            else seconds / first
        )
        return ceil(root * (1 - 1e-12))  # a whole number of steps must not become one more


class PrefillCost(Section):
    """A forward pass over known tokens takes ``call_s + token_s * tokens`` seconds."""

    call_s: NonNegative = 0.0
    """Seconds a call."""
    token_s: NonNegative = 0.0
    """Seconds a token."""

    def seconds(self, tokens: int) -> float:
        """Seconds of a call with so many tokens; 0 for none."""
        return self.call_s + self.token_s * tokens if tokens else 0.0


class SampleCost(Section):
    """A function, verifier or service takes ``call_s + sample_s * responses`` seconds."""

    call_s: NonNegative = 0.0
    """Seconds a call."""
    sample_s: NonNegative = 0.0
    """Seconds a response."""

    def seconds(self, samples: int) -> float:
        """Seconds of a call with so many responses; 0 for none."""
        return self.call_s + self.sample_s * samples if samples else 0.0


class DriverCost(Section):
    """The driver's own work of one kind takes ``call_s + item_s * items`` seconds."""

    call_s: NonNegative = 0.0
    """Seconds each time."""
    item_s: NonNegative = 0.0
    """Seconds an item: a rollout, or a chunk."""

    def seconds(self, items: int) -> float:
        """Seconds of work on so many items."""
        return self.call_s + self.item_s * items


class TrainCost(Section):
    """A step of the learner takes ``step_s + token_s * tokens`` seconds."""

    step_s: NonNegative = 0.0
    """Seconds a step, whatever is in it: optimizer states, communication."""
    token_s: NonNegative = 0.0
    """Seconds a token (prompt and response): forward and backward, all models, all epochs."""
    publish_s: NonNegative = 0.0
    """Seconds to get a version of the weights ready for the others."""

    def seconds(self, tokens: int) -> float:
        """Seconds of a step on so many tokens."""
        return self.step_s + self.token_s * tokens


class TransferCost(Section):
    """Moving bytes takes ``latency_s + bytes / bytes_per_s`` seconds."""

    latency_s: NonNegative = 0.0
    """Seconds before the first byte."""
    bytes_per_s: Positive = 1e11
    """Bandwidth in one direction."""

    def seconds(self, size_bytes: float) -> float:
        """Seconds of moving so many bytes; 0 for none."""
        return self.latency_s + size_bytes / self.bytes_per_s if size_bytes else 0.0


class GeneratorCost(Section):
    """The costs of a generator."""

    decode: DecodeCost = DecodeCost()
    prefill: PrefillCost = PrefillCost()
    padded: bool = False
    """Whether a step reads as much context for each row as for the longest one."""
    transfer: TransferCost = TransferCost()
    """The cost of moving keys and values to another generator."""
    cache_bytes: NonNegative = 0.0
    """Bytes of keys and values a token."""
    cache_tokens: NonNegativeInt = 0
    """Tokens whose keys and values fit into a replica's memory; 0: any number."""
    load_s: NonNegative = 0.0
    """Seconds to take over a version of the weights."""
