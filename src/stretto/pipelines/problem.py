"""The problem: two models, with pipelines in opposite directions over the same devices.

It generalizes RLHFuse, section 5. ``N`` devices form a row. The actor has ``K1`` pipelines of
``N1`` stages with ``K1 N1 = N``, the critic ``K2`` of ``N2`` with ``K2 N2 = N``. Each pipeline has
its own block of devices, and the critic's run the other way. So every device holds one stage of an
actor pipeline and one of a critic pipeline.

A micro-batch is a chain of tasks: forward down the stages, backward up again. The micro-batches of
a pipeline are identical. Latencies are integer ticks (of any length), so that a schedule's latency
and its bound can be equal. A forward takes its activation memory when it starts, and the backward
of the same stage frees it when it ends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, WrapValidator

from stretto.bounds import ceil_div
from stretto.config.recipes import code_of
from stretto.errors import ConfigError, RuleError, nearest

if TYPE_CHECKING:
    from pydantic import ValidationInfo

_MOST_MEMORY_UNITS = 2**40
"""Largest activation in units that make all activations integers. Sums of thousands stay exact."""
MOST_TASKS = 2_000_000
_MOST_TICKS = 2**31

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
