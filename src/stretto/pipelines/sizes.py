"""A problem from the sizes of two models and how they are parallelised."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from stretto.errors import ConfigError
from stretto.pipelines.problem import Problem, Side

_SIZES = {"7B": (32, 4096), "13B": (40, 5120), "33B": (60, 6656), "65B": (80, 8192)}
_LAYER_PARAMETERS = 12
"""Of a transformer layer, times its width squared."""
_LAYER_ACTIVATION_BYTES = 34
"""That a layer keeps for its backward, a token and unit of width, at 16 bits and with attention
recomputed (Korthikanti et al. 2022, section 4)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What counts of a model.

    Attributes:
        layers: how many.
        width: of the hidden state.
    """

    layers: int
    width: int

    @classmethod
    def parse(cls, text: str) -> ModelShape:
        """Read a LLaMA size (``13B``), or layers and width (``40x5120``).

        Raises:
            ConfigError: it is neither.
        """
        if text.upper() in _SIZES:
            return cls(*_SIZES[text.upper()])
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if not match:
            raise ConfigError(
                f"'{text}' is no model's shape: give layers and width, such as 40x5120, or one of "
                f"{', '.join(_SIZES)}"
            )
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class Parallel:
    """How one model is spread.

    Attributes:
        shape: of the model.
        stages: of a pipeline.
        tensor_parallel: devices of a stage.
    """

    shape: ModelShape
    stages: int
    tensor_parallel: int = 1


def make_problem(
    actor: Parallel,
    critic: Parallel,
    *,
    micro_batches: int,
    tokens: int,
    teraflops: float,
    backward_ratio: float = 2.0,
    communication_us: int = 0,
    capacity_gib: float | None = None,
) -> Problem:
    """Latencies in microseconds and memory in MiB, both by formula.

    A forward costs two operations a parameter and token, at ``teraflops`` on each device. Each
    model has as many pipelines as fill the devices of the least common multiple of both numbers of
    stages. If one model has a smaller tensor parallelism, its consecutive stages are merged until a
    stage of both takes the same devices.

    Args:
        actor: how it is spread.
        critic: how it is spread.
        micro_batches: of all pipelines of a model together.
        tokens: of a micro-batch.
        teraflops: that a device achieves.
        backward_ratio: time of a backward to that of a forward.
        communication_us: microseconds from a stage to the next.
        capacity_gib: activation memory of each device; ``None`` for as much as it takes.

    Raises:
        ConfigError: a number is out of range, or does not divide.
    """
    for name, value in (
        ("tokens", tokens),
        ("teraflops", teraflops),
        ("backward_ratio", backward_ratio),
    ):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} {value!r}: must be more than 0")
    group = math.lcm(actor.tensor_parallel, critic.tensor_parallel)
    if group != max(actor.tensor_parallel, critic.tensor_parallel):
        raise ConfigError(
            f"tensor parallelism {actor.tensor_parallel} and {critic.tensor_parallel}: one must be "
            "a multiple of the other, so that stages can be merged"
        )
    sides = []
    merged = [p.stages * p.tensor_parallel // group for p in (actor, critic)]
    for parallel, stages in zip((actor, critic), merged, strict=True):
        ratio = group // parallel.tensor_parallel
        if parallel.stages % ratio or stages == 0:
            raise ConfigError(
                f"{parallel.stages} stages with tensor parallelism {parallel.tensor_parallel} "
                f"cannot be merged to {group}: {ratio} must divide the stages"
            )
        pipelines = math.lcm(*merged) // stages
        if micro_batches < 1 or micro_batches % pipelines:
            raise ConfigError(
                f"{micro_batches} micro-batches cannot be dealt out to {pipelines} pipelines of "
                f"{stages} stages: take a multiple of {pipelines}"
            )
        sides.append(
            _side(
                parallel, pipelines, micro_batches // pipelines, tokens, teraflops,
                backward_ratio, communication_us,
            ).merged(ratio)
        )  # fmt: skip
    capacity = None if capacity_gib is None else capacity_gib * 1024
    return Problem(sides[0], sides[1], capacity)


def _side(
    parallel: Parallel,
    pipelines: int,
    micro_batches: int,
    tokens: int,
    teraflops: float,
    backward_ratio: float,
    communication_us: int,
) -> Side:
    """One model before stages are merged; layers are dealt out as evenly as can be."""
    shape, stages = parallel.shape, parallel.stages
    if not 1 <= stages <= shape.layers:
        raise ConfigError(
            f"{stages} stages of a model with {shape.layers} layers: take 1 to {shape.layers}"
        )
    if parallel.tensor_parallel < 1:
        raise ConfigError(f"tensor parallelism {parallel.tensor_parallel}: must be 1 or more")
    layers = [shape.layers // stages + (s < shape.layers % stages) for s in range(stages)]
    layer_us = 2 * _LAYER_PARAMETERS * shape.width**2 * tokens / (teraflops * 1e6)
    layer_mib = _LAYER_ACTIVATION_BYTES * tokens * shape.width / 2**20
    tp = parallel.tensor_parallel
    return Side.of(
        stages,
        pipelines,
        micro_batches,
        forward=[max(1, round(n * layer_us / tp)) for n in layers],
        backward=[max(1, round(n * layer_us * backward_ratio / tp)) for n in layers],
        activation=[max(1, math.ceil(n * layer_mib / tp)) for n in layers],
        communication=communication_us,
    )
