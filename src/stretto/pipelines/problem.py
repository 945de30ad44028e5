"""The problem: two models, with pipelines in opposite directions over the same devices.

It generalizes RLHFuse, section 5. ``N`` devices form a row. The actor has ``K1`` pipelines of
``N1`` stages with ``K1 N1 = N``, the critic ``K2`` of ``N2`` with ``K2 N2 = N``. Each pipeline has
its own block of devices, and the critic's run the other way. So every device holds one stage of an
actor pipeline and one of a critic pipeline.

A micro-batch is a chain of tasks: forward down the stages, backward up again. The micro-batches of
a pipeline are identical. Latencies are integer ticks (of any length), so that a schedule's latency
and its bound can be equal. A forward takes its activation memory when it starts, and the backward
of the same stage frees it when it ends.

A problem is read from JSON, or made from the sizes and the parallelism of two models.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WrapValidator,
)

from stretto.bounds import ceil_div
from stretto.config.recipes import code_of
from stretto.errors import ConfigError, RuleError, nearest

_MOST_MEMORY_UNITS = 2**40
"""Largest activation in units that make all activations integers. Sums of thousands stay exact."""
MOST_TASKS = 2_000_000
_MOST_TICKS = 2**31
_SIZES = {"7B": "32x4096", "13B": "40x5120", "33B": "60x6656", "65B": "80x8192"}
_LAYER_PARAMETERS = 12  # parameters of a transformer layer, in units of its width squared
_BACKWARD_RATIO = 2.0  # forwards that take as long as a backward
_LAYER_ACTIVATION_BYTES = 34
"""Bytes that a layer keeps for its backward, per token and unit of width, at 16 bits and with
attention recomputed (Korthikanti et al. 2022, section 4)."""

T = TypeVar("T")


def _as_given(value: float, check: Callable[[Any], float]) -> float:
    """Keep a number as written, so that 2 does not become 2.0."""
    check(value)
    return value


def _per_stage(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str) or "stages" not in info.data:
        return value
    stages = info.data["stages"]
    values = tuple(value) if isinstance(value, Sequence) else (value,) * stages
    if len(values) != stages:
        raise RuleError(
            f"has {len(values)} numbers for {stages} stages: give one number, or one a stage",
            "not-one-a-stage",
        )
    return values


_Number = Annotated[float, Field(strict=True), WrapValidator(_as_given)]
_Count = Annotated[int, Field(strict=True, ge=1, le=_MOST_TICKS)]
_Ticks = Annotated[tuple[_Count, ...], BeforeValidator(_per_stage)]
_Memory = Annotated[tuple[Annotated[_Number, Field(ge=0)], ...], BeforeValidator(_per_stage)]
_PLAIN = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class ModelPipelines:
    """One of the two models, and its pipelines, one after the other along the devices. A
    micro-batch holds a stage's ``activation`` from its forward to its backward, in any memory unit
    that both models share. ``communication`` is the ticks from the end of a task to the start of
    its chain's next task on another stage, while devices are free."""

    __pydantic_config__ = _PLAIN

    stages: Annotated[int, Field(strict=True, ge=1, le=MOST_TASKS)]
    pipelines: _Count
    micro_batches: _Count  # of each pipeline
    forward: _Ticks  # of each stage
    backward: _Ticks  # of each stage
    activation: _Memory  # of each stage
    communication: Annotated[int, Field(strict=True, ge=0, le=_MOST_TICKS)] = 0

    @classmethod
    def of(cls, stages: int, pipelines: int, micro_batches: int, **others: Any) -> ModelPipelines:
        """Use one number for all stages, or one a stage. Raises ConfigError if they do not fit."""
        counts = {"stages": stages, "pipelines": pipelines, "micro_batches": micro_batches}
        return _validated(cls, {**counts, **others})

    @property
    def devices(self) -> int:
        return self.stages * self.pipelines

    @property
    def longest(self) -> int:
        ticks = max(self.forward) + max(self.backward)
        return (self.micro_batches + self.stages) * ticks + 2 * self.stages * self.communication

    def merged(self, by: int) -> ModelPipelines:
        """Merge each ``by`` consecutive stages into one, on all of their devices. This makes the
        stages of both models equally large if the other model has ``by`` times the tensor
        parallelism. The devices share a merged stage's work evenly, so its latency is the mean of
        the merged ones (rounded up), as is its memory on each device (to a thousandth)."""
        if self.stages % by:
            raise ConfigError(
                f"{self.stages} stages cannot be merged by {by}: the ratio of the two tensor "
                "parallelisms must divide the stages of the model with the smaller one",
                "stages-not-mergeable",
            )
        groups = range(0, self.stages, by)
        return replace(
            self,
            stages=self.stages // by,
            forward=tuple(ceil_div(sum(self.forward[i : i + by]), by) for i in groups),
            backward=tuple(ceil_div(sum(self.backward[i : i + by]), by) for i in groups),
            activation=tuple(_mean_above(self.activation[i : i + by]) for i in groups),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with a single number for equal values of all stages."""
        data = {
            key: value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value
            for key, value in asdict(self).items()
        }
        return data if self.communication else {k: data[k] for k in data if k != "communication"}


@dataclass(frozen=True, slots=True)
class Problem:
    """Actor and critic on the same devices, with an optional capacity for activation memory. Raises
    ConfigError if they do not cover the same devices, or a micro-batch does not fit."""

    __pydantic_config__ = _PLAIN

    actor: ModelPipelines
    critic: ModelPipelines
    capacity: _Number | None = None

    def __post_init__(self) -> None:
        a, b = self.models
        if a.devices != b.devices:
            raise ConfigError(
                f"actor: {a.pipelines} pipelines x {a.stages} stages = {a.devices} devices, "
                f"critic: {b.pipelines} x {b.stages} = {b.devices}; both must cover the same "
                "devices, so change pipelines or stages of one of them",
                "other-devices",
            )
        tasks = sum(2 * model.devices * model.micro_batches for model in self.models)
        if tasks > MOST_TASKS:
            raise ConfigError(
                f"{tasks:,} tasks are more than the {MOST_TASKS:,} that can be planned for; a "
                "schedule of so many repeats itself: plan fewer micro-batches",
                "too-many-tasks",
            )
        if a.longest + b.longest > _MOST_TICKS:
            raise ConfigError(
                f"the work of a device and the way through its pipelines take over {_MOST_TICKS:,} "
                "ticks; give latencies and communication in longer ticks",
                "too-many-ticks",
            )
        if self.memory_scale * max(a.activation + b.activation) > _MOST_MEMORY_UNITS:
            raise ConfigError(
                "activation memory has too many digits to be counted exactly; give it in whole "
                "units, such as MiB, or round it",
                "memory-too-fine",
            )
        for name, model in (("actor", a), ("critic", b)):
            if self.capacity is not None and not max(model.activation) <= self.capacity < math.inf:
                raise ConfigError(
                    f"capacity {self.capacity:g} is below the {max(model.activation):g} that one "
                    f"micro-batch of the {name} takes, or no number; raise it, make micro-batches "
                    "smaller, or leave it out",
                    "capacity-below-micro-batch",
                )

    @property
    def devices(self) -> int:
        return self.actor.devices

    @property
    def models(self) -> tuple[ModelPipelines, ModelPipelines]:
        return self.actor, self.critic

    @property
    def memory_scale(self) -> int:
        """The smallest factor that makes all activation memories integers."""
        values = self.actor.activation + self.critic.activation
        return math.lcm(*(Fraction(str(v)).denominator for v in values))

    def reversed(self) -> Problem:
        """Return the problem with time reversed, where forwards and backwards change places. A
        schedule of one, read from its end with forwards and backwards exchanged, is a schedule of
        the other with the same latency and peak memory."""
        a, b = (replace(m, forward=m.backward, backward=m.forward) for m in self.models)
        return replace(self, actor=a, critic=b)

    def to_json(self) -> dict[str, Any]:
        models = {"actor": self.actor.to_json(), "critic": self.critic.to_json()}
        return {**models, "capacity": self.capacity}

    @classmethod
    def from_json(cls, data: object) -> Problem:
        return _validated(cls, data)

    @classmethod
    def read(cls, file: str | Path) -> Problem:
        """Read a problem from its own or a schedule's JSON. Raises ConfigError if there is none."""
        try:
            data = json.loads(Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"cannot read '{file}': {error.strerror or error}; check the path",
                "unreadable-file",
            ) from error
        except ValueError as error:
            raise ConfigError(f"'{file}' is not JSON: {error}", "not-json") from error
        return cls.from_json(
            data["problem"] if isinstance(data, dict) and "problem" in data else data
        )


def _validated(kind: type[T], data: object) -> T:
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        fault = error.errors()[0]
    key, code = ".".join(map(str, fault["loc"])), code_of(fault)
    message = f"{key or 'a problem'}: {fault['msg'].removeprefix('Value error, ')}"
    if code == "unexpected_keyword_argument":
        names = [field.name for cls in (Problem, ModelPipelines) for field in fields(cls)]
        message = f"unknown key '{key}'. {nearest(key.rpartition('.')[2], names)}"
    elif code != "missing":
        message += f", not {fault['input']!r}"
    raise ConfigError(message, code)


def _mean_above(values: Sequence[float]) -> float:
    return math.ceil(1000 * sum(Fraction(str(v)) for v in values) / len(values)) / 1000


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
    if not layer_us * _BACKWARD_RATIO < _MOST_TICKS:
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
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST_TICKS:
        rule = f"must be a whole number from {least} to {_MOST_TICKS:,}"
        raise ConfigError(f"{name} {value!r}: {rule}; {remedy}", "not-whole")
