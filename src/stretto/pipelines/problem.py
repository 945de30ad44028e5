"""The problem: two models, their pipelines in opposite directions over the same devices.

The problem is that of RLHFuse, section 5, in a more general form. ``N`` devices stand in a row. The
actor has ``K1`` pipelines of ``N1`` stages with ``K1 N1 = N``, the critic ``K2`` of ``N2`` with
``K2 N2 = N``. Each pipeline has a block of devices of its own; the critic's run the other way. So
every device holds one stage of an actor pipeline and one of a critic pipeline.

A micro-batch is a chain of tasks: forward down the stages, backward up again. The micro-batches of
a pipeline are all alike. Latencies are whole ticks (of any length), so that a schedule's latency
and its bound can be equal; a forward takes its activation memory when it starts, and the backward
of the same stage frees it when it ends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from stretto.errors import ConfigError, nearest

_MOST_MEMORY_UNITS = 2**40
"""Largest activation, in units in which all are whole; sums of thousands stay exact."""
MOST_TASKS = 2_000_000
_MOST_TICKS = 2**31
PerStage = int | float | Sequence[int] | Sequence[float]


@dataclass(frozen=True, slots=True)
class ModelPipelines:
    """One of the two models.

    Attributes:
        stages: of each pipeline.
        pipelines: how many there are (data parallelism), one after the other along the devices.
        micro_batches: of each pipeline.
        forward: ticks of a forward, one number a stage.
        backward: ticks of a backward, one number a stage.
        activation: memory that a micro-batch holds from its forward to its backward, one number
            a stage, in any unit that both models share.
        communication: ticks from the end of a task to the start of the next one of its chain on
            another stage; devices are free meanwhile.
    """

    stages: int
    pipelines: int
    micro_batches: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    activation: tuple[float, ...]
    communication: int = 0

    @classmethod
    def of(
        cls,
        stages: int,
        pipelines: int,
        micro_batches: int,
        *,
        forward: PerStage,
        backward: PerStage,
        activation: PerStage,
        communication: int = 0,
    ) -> ModelPipelines:
        """A side whose latencies and memory are one number for all stages, or one a stage.

        Raises:
            ConfigError: a number is out of range, or there are not as many as stages.
        """
        _require_whole("stages", stages, 1)
        if stages > MOST_TASKS:
            raise ConfigError(f"stages {stages!r}: must be at most {MOST_TASKS:,}")
        return cls(
            stages,
            pipelines,
            micro_batches,
            _per_stage("forward", forward, stages),
            _per_stage("backward", backward, stages),
            _per_stage("activation", activation, stages),
            communication,
        )

    def __post_init__(self) -> None:
        for name in ("stages", "pipelines", "micro_batches"):
            _require_whole(name, getattr(self, name), 1)
        _require_whole("communication", self.communication, 0)
        for name in ("forward", "backward", "activation"):
            values = getattr(self, name)
            if len(values) != self.stages:
                raise ConfigError(
                    f"{name} has {len(values)} numbers for {self.stages} stages: give one number, "
                    "or one a stage"
                )
        for name in ("forward", "backward"):
            for ticks in getattr(self, name):
                _require_whole(name, ticks, 1)
        for memory in self.activation:
            if not 0 <= memory < math.inf:
                raise ConfigError(
                    f"activation {memory!r}: memory must be a finite number, 0 or more"
                )

    @property
    def devices(self) -> int:
        """Number of devices on which its pipelines stand."""
        return self.stages * self.pipelines

    def merged(self, by: int) -> ModelPipelines:
        """Merge each ``by`` consecutive stages of the model into one, on their devices.

        Where the other model has ``by`` times the tensor parallelism, this is how the two get
        stages of one size. The devices of a merged stage share its work evenly: its latency is the
        mean of what is merged (rounded up), its memory on each device too (to a thousandth).

        Raises:
            ConfigError: the stages cannot be divided so.
        """
        _require_whole("stages to merge into one", by, 1)
        if self.stages % by:
            raise ConfigError(
                f"{self.stages} stages cannot be merged by {by}: the ratio of the two tensor "
                "parallelisms must divide the stages of the model with the smaller one"
            )
        groups = range(0, self.stages, by)
        return replace(
            self,
            stages=self.stages // by,
            forward=tuple(-(-sum(self.forward[i : i + by]) // by) for i in groups),
            backward=tuple(-(-sum(self.backward[i : i + by]) // by) for i in groups),
            activation=tuple(_mean_above(self.activation[i : i + by]) for i in groups),
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """Actor and critic on the same devices.

    Attributes:
        actor: its pipelines run along the devices.
        critic: its pipelines run the other way.
        capacity: activation memory of each device; ``None`` for as much as it takes.

    Raises:
        ConfigError: the two do not cover the same devices, or the capacity holds no micro-batch.
    """

    actor: ModelPipelines
    critic: ModelPipelines
    capacity: float | None = None

    def __post_init__(self) -> None:
        a, b = self.actor, self.critic
        if a.devices != b.devices:
            raise ConfigError(
                f"actor: {a.pipelines} pipelines x {a.stages} stages = {a.devices} devices, "
                f"critic: {b.pipelines} x {b.stages} = {b.devices}; both must cover the same "
                "devices, so change pipelines or stages of one of them"
            )
        tasks = sum(2 * s.devices * s.micro_batches for s in (a, b))
        if tasks > MOST_TASKS:
            raise ConfigError(
                f"{tasks:,} tasks are more than the {MOST_TASKS:,} that can be planned for; a "
                "schedule of so many repeats itself: plan fewer micro-batches"
            )
        if sum(_longest(s) for s in (a, b)) > _MOST_TICKS:
            raise ConfigError(
                f"the work of a device and the way through its pipelines take over {_MOST_TICKS:,} "
                "ticks; give latencies and communication in longer ticks"
            )
        self._check_memory()

    def _check_memory(self) -> None:
        most = self.memory_scale * max(self.actor.activation + self.critic.activation)
        if most > _MOST_MEMORY_UNITS:
            raise ConfigError(
                "activation memory has too many digits to be counted exactly; give it in whole "
                "units, such as MiB, or round it"
            )
        if self.capacity is None:
            return
        if not self.capacity < math.inf:
            raise ConfigError(f"capacity {self.capacity!r}: must be a finite number; leave it out")
        for name, side in (("actor", self.actor), ("critic", self.critic)):
            if self.capacity < max(side.activation):
                raise ConfigError(
                    f"capacity {self.capacity:g} is below the {max(side.activation):g} that one "
                    f"micro-batch of the {name} takes; raise it, or make micro-batches smaller"
                )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.actor.devices

    @property
    def models(self) -> tuple[ModelPipelines, ModelPipelines]:
        """Actor and critic."""
        return self.actor, self.critic

    @property
    def memory_scale(self) -> int:
        """The smallest factor that makes all activation memories whole."""
        values = self.actor.activation + self.critic.activation
        return math.lcm(*(Fraction(str(v)).denominator for v in values))

    def reversed(self) -> Problem:
        """The problem with time running backwards: forwards and backwards change places.

        A schedule of one, read from its end with forwards and backwards exchanged, is a schedule of
        the other with the same latency and the same peak of memory.
        """
        a, b = (replace(s, forward=s.backward, backward=s.forward) for s in self.models)
        return replace(self, actor=a, critic=b)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; numbers that are the same for all stages are written once."""
        return {
            "actor": _side_to_json(self.actor),
            "critic": _side_to_json(self.critic),
            "capacity": self.capacity,
        }

    @classmethod
    def from_json(cls, data: object) -> Problem:
        """Make a problem from plain data, as :meth:`to_json` returns it.

        Raises:
            ConfigError: a key is unknown or missing, or a value is out of range.
        """
        fields = _fields("a problem", data, ("actor", "critic"), ("capacity",))
        capacity = fields.get("capacity")
        if capacity is not None and not _is_number(capacity):
            raise ConfigError(f"capacity {capacity!r}: must be a number, or null for no limit")
        return cls(
            _side_from_json("actor", fields["actor"]),
            _side_from_json("critic", fields["critic"]),
            capacity,
        )

    @classmethod
    def read(cls, file: str | Path) -> Problem:
        """Read a JSON file, of a problem or of a schedule that was written with its problem.

        Raises:
            ConfigError: the file cannot be read, is no JSON, or describes no problem.
        """
        data = read_json(file)
        if isinstance(data, dict) and "problem" in data:
            data = data["problem"]
        return cls.from_json(data)


def read_json(file: str | Path) -> Any:
    """The contents of a JSON file.

    Raises:
        ConfigError: the file cannot be read, or is no JSON.
    """
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read '{file}': {error.strerror or error}; check the path"
        ) from error
    except ValueError as error:
        raise ConfigError(f"'{file}' is not JSON: {error}") from error


_SIDE_KEYS = ("stages", "pipelines", "micro_batches", "forward", "backward", "activation")


def _side_from_json(name: str, data: object) -> ModelPipelines:
    fields = _fields(f"the {name}", data, _SIDE_KEYS, ("communication",))
    try:
        return ModelPipelines.of(**fields)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _side_to_json(side: ModelPipelines) -> dict[str, Any]:
    data: dict[str, Any] = {name: getattr(side, name) for name in _SIDE_KEYS}
    for name in ("forward", "backward", "activation"):
        values = data[name]
        data[name] = values[0] if len(set(values)) == 1 else list(values)
    if side.communication:
        data["communication"] = side.communication
    return data


def _fields(
    what: str, data: object, needed: Sequence[str], optional: Sequence[str]
) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(f"{what} must be a JSON object with {', '.join(needed)}, not {data!r}")
    for key in data:
        if key not in (*needed, *optional):
            raise ConfigError(
                f"{what} has an unknown key '{key}'. {nearest(str(key), (*needed, *optional))}"
            )
    for key in needed:
        if key not in data:
            raise ConfigError(f"{what} lacks '{key}'; it needs {', '.join(needed)}")
    return data


def _longest(side: ModelPipelines) -> int:
    each = max(side.forward) + max(side.backward)
    return (side.micro_batches + side.stages) * each + 2 * side.stages * side.communication


def _mean_above(values: Sequence[float]) -> float:
    return math.ceil(1000 * sum(Fraction(str(v)) for v in values) / len(values)) / 1000


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _per_stage(name: str, value: Any, stages: int) -> tuple[Any, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        values = tuple(value)
    else:
        values = (value,) * stages
    for each in values:
        if not _is_number(each):
            raise ConfigError(f"{name} {each!r}: must be a number")
    return values


def _require_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} {value!r}: must be a whole number, {least} or more")
    if value > _MOST_TICKS:
        raise ConfigError(f"{name} {value!r}: must be at most {_MOST_TICKS:,}")
