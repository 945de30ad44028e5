"""Costs of work, in virtual seconds.

Each is linear in the amounts of work, or the maximum of two linear terms. Legend: R rows (rollouts
decoded together), C context (tokens whose keys and values a step reads), n decode steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf, sqrt
from typing import Annotated

from pydantic import Field

from stretto.config.sections import NonNegative, NonNegativeInt, Positive, Section

Share = Annotated[float, Field(gt=0, le=1)]


class Efficiency(Section):
    """Shares of a device's peaks that software reaches. All are assumptions to vary."""

    memory: Share = 0.7
    """Share of the memory bandwidth that a decode step reaches."""
    prefill: Share = 0.5
    """Share of the peak operations in a forward pass over known tokens."""
    training: Share = 0.4
    """Share of the peak operations in forward and backward passes."""
    link: Share = 0.7
    """Share of the link's bandwidth."""
    usable: Share = 0.9
    """Usable share of a device's memory. CUDA, NCCL and fragmentation take the rest."""
    optimizer: Share = 0.7
    """Share of the memory bandwidth that a weight update reaches."""
    step_s: NonNegative = 0.002
    """Seconds of overhead per decode step: scheduling, sampling, launches. About 0.002 with CUDA
    graphs. Launching every kernel from Python takes about 0.0008 per layer.
    """
    reduce_s: NonNegative = 0.00002
    """Seconds of one all-reduce among tensor-parallel devices. A decode step has two per layer."""
    call_s: NonNegative = 0.005
    """Seconds of overhead per prefill call."""


class DecodeCost(Section):
    """The cost of decoding, by a roofline (Williams et al. 2009): a step takes
    ``step_s + row_s * R + context_s * C`` seconds, plus the maximum of its memory reads,
    ``weights_s + cache_s * C``, and its computation, ``product_s * R + attention_s * C``. Costs
    fitted to a run have only the first three terms. C grows by R per step while no row ends.
    """

    step_s: NonNegative = 0.0
    """Seconds per step, independent of its content."""
    row_s: NonNegative = 0.0
    """Seconds per row."""
    context_s: NonNegative = 0.0
    """Seconds per token of context."""
    weights_s: NonNegative = 0.0
    """Seconds to read the weights."""
    cache_s: NonNegative = 0.0
    """Seconds to read a token's keys and values."""
    product_s: NonNegative = 0.0
    """Seconds of a row's products with the weights."""
    attention_s: NonNegative = 0.0
    """Seconds of a row's attention to one token."""

    def seconds(self, rows: float, context: float, steps: int) -> float:
        """Seconds of n steps of R rows whose context is C before the first."""
        total, steps_left = 0.0, steps
        for stretch_steps, first, more in self._stretches(rows, context):
            n = int(min(steps_left, stretch_steps))
            total, steps_left = total + n * first + more * (n * (n - 1) // 2), steps_left - n
        return total

    def at_least(self, steps: float, tokens: float, context: float) -> float:
        """A lower bound on the seconds of steps with these totals of tokens and context."""
        reads = steps * self.weights_s + context * self.cache_s
        computes = tokens * self.product_s + context * self.attention_s
        overhead_s = steps * self.step_s + tokens * self.row_s + context * self.context_s
        return overhead_s + max(reads, computes)

    def speculating(self, s: SimSpeculation) -> DecodeCost:
        """Return the cost per token and row if steps read proposed tokens and accept some."""
        read = {"row_s", "product_s", "attention_s"}
        costs = {
            name: value * (1 + s.proposed if name in read else 1)
            for name, value in self.model_dump().items()
        }
        costs["step_s"] += s.draft_s
        return DecodeCost(**{name: value / (1 + s.accepted) for name, value in costs.items()})

    def rows_within(self, seconds: float, context: float) -> float:
        """Return the most rows of that context each with which a step fits in ``seconds``."""
        reads = self.step_s + self.weights_s, self.context_s + self.cache_s, self.row_s
        computes = self.step_s, self.context_s + self.attention_s, self.row_s + self.product_s
        bounds = [(once, token_s * context + row_s) for once, token_s, row_s in (reads, computes)]
        return min((seconds - once) / row_s if row_s else inf for once, row_s in bounds)

    def steps_within(self, rows: int, context: int, seconds: float) -> int:
        """Return the fewest steps that take at least ``seconds``. A step must cost something."""
        done, left_s = 0, seconds
        for stretch_steps, first, more in self._stretches(rows, context):
            if left_s <= 0:
                break
            steps = _steps_within(first, more, left_s)
            if steps <= stretch_steps:
                return done + steps
            done += int(stretch_steps)
            left_s = seconds - self.seconds(rows, context, done)
        return done

    def _stretches(self, rows: float, context: float) -> Iterator[tuple[float, float, float]]:
        beside_s = self.step_s + self.row_s * rows + self.context_s * context
        reads = self.weights_s + self.cache_s * context, self.cache_s
        computes = self.product_s * rows + self.attention_s * context, self.attention_s
        (longer_s, token_s), (other_s, other_token_s) = max(reads, computes), min(reads, computes)
        closing_s = rows * (other_token_s - token_s)
        turn = (longer_s - other_s) // closing_s + 1 if closing_s > 0 else inf
        yield turn, beside_s + longer_s, rows * (self.context_s + token_s)
        if turn < inf:
            more_s = rows * (self.context_s + other_token_s)
            yield inf, beside_s + other_s + turn * more_s, more_s


def _steps_within(first: float, more: float, seconds: float) -> int:
    """Return the fewest steps that take at least ``seconds``, each ``more`` longer."""
    # more / 2 n^2 + (first - more / 2) n = seconds
    once = first - more / 2
    root = 2 * seconds / (once + sqrt(once * once + 2 * more * seconds))
    return ceil(root * (1 - 1e-12))  # so that rounding does not add a step


class SimSpeculation(Section):
    """Steps that verify proposed tokens, while few rows are decoded."""

    rows: NonNegativeInt = 0
    """Rows of a replica up to which steps speculate. 0: never."""
    proposed: NonNegative = 0.0
    """Proposed tokens that such a step reads per row, in addition to the newest token."""
    accepted: NonNegative = 0.0
    """Proposed tokens that it accepts, per row on average."""
    draft_s: NonNegative = 0.0
    """Seconds per step for the draft model's proposals."""


class PrefillCost(Section):
    """A forward pass over known tokens takes ``call_s + token_s * tokens`` seconds."""

    call_s: NonNegative = 0.0
    """Seconds per call."""
    token_s: NonNegative = 0.0
    """Seconds per token."""

    def seconds(self, tokens: int) -> float:
        return self.call_s + self.token_s * tokens if tokens else 0.0


class SampleCost(Section):
    """A function, verifier or service takes ``call_s + sample_s * responses`` seconds."""

    call_s: NonNegative = 0.0
    """Seconds per call."""
    sample_s: NonNegative = 0.0
    """Seconds per response."""

    def seconds(self, samples: int) -> float:
        return self.call_s + self.sample_s * samples if samples else 0.0


class DriverCost(Section):
    """The driver's own work of one kind takes ``call_s + item_s * items`` seconds."""

    call_s: NonNegative = 0.0
    """Seconds each time."""
    item_s: NonNegative = 0.0
    """Seconds per item, which is a rollout or a chunk."""

    def seconds(self, items: int) -> float:
        return self.call_s + self.item_s * items


class TrainCost(Section):
    """A step of the learner takes ``step_s + token_s * tokens`` seconds."""

    step_s: NonNegative = 0.0
    """Fixed seconds per step: optimizer states, communication."""
    token_s: NonNegative = 0.0
    """Seconds per token (prompt and response): forward and backward, all models, all epochs."""
    publish_s: NonNegative = 0.0
    """Seconds to prepare a version of the weights for the other roles."""

    def seconds(self, tokens: int) -> float:
        return self.step_s + self.token_s * tokens


class TransferCost(Section):
    """Moving bytes takes ``latency_s + bytes / bytes_per_s`` seconds."""

    latency_s: NonNegative = 0.0
    """Seconds before the first byte."""
    bytes_per_s: Positive = 1e11
    """Bandwidth in one direction."""

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s if size_bytes else 0.0


class GeneratorCost(Section):
    """The costs of a generator."""

    decode: DecodeCost = DecodeCost()
    prefill: PrefillCost = PrefillCost()
    padded: bool = False
    """Whether a step reads as much context for each row as for the longest one."""
    transfer: TransferCost = TransferCost()
    """The cost of moving keys and values to another generator."""
    offload: TransferCost = TransferCost(bytes_per_s=2e10)
    """The cost of moving them to host memory, and back."""
    cache_bytes: NonNegative = 0.0
    """Bytes of keys and values per token."""
    cache_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens whose keys and values fit into a replica's memory. 0: unlimited."""
    load_s: NonNegative = 0.0
    """Seconds to load a version of the weights."""
