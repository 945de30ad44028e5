"""A problem from the sizes and the parallelism of two models."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from stretto.errors import ConfigError
from stretto.pipelines.problem import ModelPipelines, Problem

_SIZES = {"7B": "32x4096", "13B": "40x5120", "33B": "60x6656", "65B": "80x8192"}
_LAYER_PARAMETERS = 12  # parameters of a transformer layer, in units of its width squared
_BACKWARD_RATIO = 2.0  # forwards that take as long as a backward
_LAYER_ACTIVATION_BYTES = 34
"""Bytes that a layer keeps for its backward, per token and unit of width, at 16 bits and with
attention recomputed (Korthikanti et al. 2022, section 4)."""
_MOST = 2**31  # limit of any integer, and of the microseconds of a layer


@dataclass(frozen=True, slots=True)
class Units:
    """Plural name of a problem's ticks, and its unit of memory, empty if unknown."""

    time: str = "ticks"
    memory: str = ""

    def of_memory(self, memory: float) -> str:
        number = f"{memory:,.6g}" if memory < 1e6 else f"{memory:,.0f}"
        return f"{number} {self.memory}".strip()


UNITS = Units("µs", "MiB")  # units of the problems made by :func:`make_problem`


@dataclass(frozen=True, slots=True)
class Parallel:
    """A transformer's layers and width, its pipelines' stages, and the devices of each stage."""

    layers: int
    width: int
    stages: int
    devices: int = 1

    @classmethod
    def of(cls, shape: str, stages: int, devices: int = 1) -> Parallel:
        """Read a LLaMA size (``13B``), or layers and width (``40x5120``). Raises ConfigError."""
        match = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", _SIZES.get(shape.upper(), shape))
        if not match:
            raise ConfigError(
                f"'{shape}' is no model's shape: give layers and width, such as 40x5120, or one of "
                f"{', '.join(_SIZES)}",
                "not-a-shape",
            )
        return cls(int(match[1]), int(match[2]), stages, devices)


def make_problem(
    actor: Parallel,
    critic: Parallel,
    *,
    micro_batches: int,
    tokens: int,
    teraflops: float,
    communication_us: int = 0,
    capacity_gib: float | None = None,
) -> Problem:
    """Make a problem by formula, with latencies in microseconds and memory in MiB.

    A forward costs two operations a parameter and token, at ``teraflops`` on each device. A
    backward takes twice as long. Each model's pipelines fill the least common multiple of both
    numbers of stages. If stages of one model have fewer devices, its consecutive stages are merged
    until stages of both models take equally many devices.
    ``micro_batches``, of ``tokens`` tokens, are those of all pipelines of a model. The capacity is
    for each device's activations. Raises ConfigError if a number is out of range, or does not
    divide.
    """
    _require_whole("tokens", tokens, 1, "give those of one micro-batch, such as 2048")
    _require_whole("micro_batches", micro_batches, 1, "give those of all pipelines of a model")
    _require_whole("communication_us", communication_us, 0, "0 is none")
    if not 0 < teraflops < math.inf:
        raise ConfigError(
            f"teraflops {teraflops!r}: must be more than 0, and finite; give what a device "
            "achieves, such as 200",
            "not-positive",
        )
    devices = _devices_of_a_stage(actor, critic)
    models = []
    for parallel in (actor, critic):
        costs = _costs(parallel, tokens, teraflops)
        model = ModelPipelines.of(
            parallel.stages, 1, micro_batches, communication=communication_us, **costs
        )
        models.append(model.merged(devices // parallel.devices))
    stages = math.lcm(*(model.stages for model in models))
    for i, model in enumerate(models):
        pipelines = stages // model.stages
        if micro_batches % pipelines:
            raise ConfigError(
                f"{micro_batches} micro-batches cannot be dealt out to {pipelines} pipelines of "
                f"{model.stages} stages: take a multiple of {pipelines}",
                "micro-batches-not-divisible",
            )
        models[i] = replace(model, pipelines=pipelines, micro_batches=micro_batches // pipelines)
    least = max(models[0].activation + models[1].activation)
    if capacity_gib is not None and capacity_gib * 1024 < least:
        raise ConfigError(
            f"capacity {capacity_gib:g} GiB is below the {UNITS.of_memory(least)} that one "
            f"micro-batch takes: give {math.ceil(least / 10.24) / 100:g} GiB or more, or make "
            "micro-batches smaller",
            "capacity-below-micro-batch",
        )
    return Problem(models[0], models[1], None if capacity_gib is None else capacity_gib * 1024)


def _costs(parallel: Parallel, tokens: int, teraflops: float) -> dict[str, list[int]]:
    stages, devices = parallel.stages, parallel.devices
    width = parallel.width
    layers = [parallel.layers // stages + (s < parallel.layers % stages) for s in range(stages)]
    layer_us = 2 * _LAYER_PARAMETERS * width**2 * tokens / (teraflops * 1e6)
    if not layer_us * _BACKWARD_RATIO < _MOST:
        raise ConfigError(
            f"a layer would take {layer_us:g} µs with {tokens} tokens at {teraflops:g} teraflops: "
            "that is too long to be planned for; check both numbers",
            "layer-too-long",
        )
    layer_mib = _LAYER_ACTIVATION_BYTES * tokens * width / 2**20
    return {
        "forward": [max(1, round(n * layer_us / devices)) for n in layers],
        "backward": [max(1, round(n * layer_us * _BACKWARD_RATIO / devices)) for n in layers],
        "activation": [max(1, math.ceil(n * layer_mib / devices)) for n in layers],
    }


def _devices_of_a_stage(actor: Parallel, critic: Parallel) -> int:
    """Return the devices of a stage, after merging stages of the model with fewer."""
    for name, parallel in (("actor", actor), ("critic", critic)):
        what = f"tensor parallelism of the {name}"
        _require_whole(what, parallel.devices, 1, "1 does not divide its layers")
        if not 1 <= parallel.stages <= parallel.layers:
            raise ConfigError(
                f"{parallel.stages} stages of the {name}, which has {parallel.layers} layers: take "
                f"1 to {parallel.layers}",
                "stages-not-layers",
            )
    group = math.lcm(actor.devices, critic.devices)
    if group != max(actor.devices, critic.devices):
        raise ConfigError(
            f"stages on {actor.devices} and {critic.devices} devices: one must be a multiple of "
            "the other, so that stages can be merged",
            "tensor-parallelism-not-multiple",
        )
    return group


def _require_whole(name: str, value: object, least: int, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        rule = f"must be a whole number from {least} to {_MOST:,}"
        raise ConfigError(f"{name} {value!r}: {rule}; {remedy}", "not-whole")
