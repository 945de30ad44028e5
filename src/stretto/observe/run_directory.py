"""A folder for each run.

::

    runs/arithmetic-001/
    ├── config.toml      every setting, resolved; load it to repeat or resume the run
    ├── machine.json     the machine it works on, or was resumed on last
    ├── metrics.jsonl    one JSON object a step
    ├── samples.jsonl    some responses of each step, with their scores and rewards
    ├── rollouts.jsonl   one JSON object a rollout, once trained on or rejected, or at the end
    ├── trace.json       who did what, and when; open it in Perfetto
    ├── checkpoints/     what a run is resumed from
    ├── warmup.safetensors   the model after its warm-up, where it has one; written once
    ├── model/           the trained model in Hugging Face format
    └── run.lock         who is writing here, while somebody is
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import tomli_w

from stretto import files
from stretto.config import Section
from stretto.errors import ConfigError, StateError, StorageError
from stretto.machine import Machine
from stretto.observe import records
from stretto.observe.lock import locked
from stretto.observe.trace import TraceFile
from stretto.schedules.rollout import Rollout, RolloutState
from stretto.types import Stats

METRICS = "metrics.jsonl"
"""The file of a run's metrics."""

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints."""

KEPT = 2
"""Checkpoints of a run under way that stay, where the disk has room; older ones go."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One response, as it is shown and kept.

    Attributes:
        reward: the weighted sum of its scores, after the missing-EOS rule.
        finish: why it ended, 'stop' or 'length'.
        tokens: the response's length.
        scores: from each reward source, by name, before its weight and the missing-EOS rule;
            ``None`` where a source does not apply.
    """

    prompt: str
    response: str
    reward: float
    finish: str
    tokens: int
    scores: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """The life of one rollout, as it is kept.

    Attributes:
        step: that it ended with.
        prompt: the prompt's id.
        prompt_tokens, tokens: lengths of prompt and response.
        finish: why the response ended, 'stop' or 'length'; ``None`` for one that never did.
        state: 'trained' or 'rejected'; another for one that was in flight when the run ended.
        because: why it was rejected.
        carries: rounds that went by without it since it was dispatched.
        oldest_version, newest_version: of the policies that sampled its tokens; ``None`` for a
            response without tokens.
        reward: as trained on; ``None`` for one that got none.
    """

    step: int
    id: int
    prompt: int
    group: int
    prompt_tokens: int
    tokens: int
    finish: str | None
    state: str
    because: str
    carries: int
    oldest_version: int | None
    newest_version: int | None
    reward: float | None

    @property
    def in_flight(self) -> bool:
        """Return whether nothing had come of it when the run ended."""
        return self.state not in (RolloutState.TRAINED, RolloutState.REJECTED)

    @classmethod
    def of(cls, step: int, rollout: Rollout, reward: float | None) -> Self:
        """Make the record of a rollout that ended with ``step``."""
        return cls(
            step=step,
            id=rollout.id,
            prompt=rollout.prompt.id,
            group=rollout.group,
            prompt_tokens=len(rollout.prompt.tokens),
            tokens=len(rollout),
            finish=str(rollout.finish) if rollout.finish else None,
            state=str(rollout.state),
            because=rollout.rejected_because,
            carries=rollout.carries,
            oldest_version=min(rollout.versions, default=None),
            newest_version=max(rollout.versions, default=None),
            reward=reward if reward is not None and math.isfinite(reward) else None,
        )


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The outcome of a run.

    Attributes:
        steps: taken in all, over all resumptions.
        stats: of the last step.
        model: folder of the trained model, in Hugging Face format.
    """

    steps: int
    stats: Stats
    model: Path


class RunDirectory:
    """The files of one run; a record is on disk, whole, when the call that writes it returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.machine_file = path / "machine.json"
        self.metrics_file = path / METRICS
        self.samples_file = path / "samples.jsonl"
        self.rollouts_file = path / "rollouts.jsonl"
        self.trace = TraceFile(path / "trace.json")
        self.checkpoints = path / CHECKPOINTS
        self.warmup = path / "warmup.safetensors"
        self.model = path / "model"

    @property
    def name(self) -> str:
        """The run's name: its folder's."""
        return self.path.name

    @classmethod
    def create(cls, out: str | Path, name: str, config: Section) -> Self:
        """Make ``<out>/<name>-<NNN>`` with the number after the highest there is.

        Raises:
            ConfigError: the folder cannot be made.
        """
        root = Path(out)
        try:
            root.mkdir(parents=True, exist_ok=True)
            path = claim(root, name)
        except OSError as error:
            raise ConfigError(
                f"cannot make a run directory in '{root}': {error}; choose another with --out"
            ) from error
        run = cls(path)
        try:
            with files.explained(path):
                run.checkpoints.mkdir()
            run.save_config(config)
        except StorageError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """The directory of an earlier run.

        Raises:
            ConfigError: it is not a run directory.
            StorageError: it cannot be written to.
        """
        run = cls(Path(path))
        if not run.config_file.is_file():
            raise ConfigError(f"'{path}' is not a run directory: it has no config.toml")
        with files.explained(run.path):
            run.checkpoints.mkdir(exist_ok=True)
        return run

    def locked(self, note: Callable[[str], None]) -> AbstractContextManager[None]:
        """Keep other processes from writing here; see :func:`stretto.observe.lock.locked`."""
        return locked(self.path, note)

    def save_config(self, config: Section) -> None:
        """Write the resolved settings, every one of them."""
        files.write_whole(self.config_file, tomli_w.dumps(config.model_dump()).encode())

    def save_machine(self, machine: Machine) -> None:
        """Write what the run works on."""
        files.write_whole(self.machine_file, json.dumps(asdict(machine), indent=2).encode())

    def read_machine(self) -> Machine:
        """The machine that the run worked on.

        Raises:
            StateError: there is no such file, or it is damaged.
        """
        try:
            found = json.loads(self.machine_file.read_bytes())
            return Machine(**{**found, "gpus": tuple(found["gpus"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StateError(f"'{self.machine_file}' cannot be read: {error}") from error

    def append_metrics(self, step: int, stats: Mapping[str, float]) -> None:
        """Add a step's metrics. JSON has no NaN or infinity; those are written as ``null``."""
        metrics = {
            name: float(value) if math.isfinite(value) else None for name, value in stats.items()
        }
        records.append(self.metrics_file, [{"step": step, **metrics}])

    def append_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Add a step's responses."""
        records.append(self.samples_file, [{"step": step, **asdict(sample)} for sample in samples])

    def append_rollouts(
        self, step: int, rollouts: Sequence[Rollout], rewards: Mapping[int, float]
    ) -> None:
        """Add the rollouts that ended with a step.

        Args:
            step: its number; after the last one, what is in flight has the next.
            rollouts: trained and rejected ones, or those in flight.
            rewards: by rollout id, as trained on; a rejected rollout has none.
        """
        ended = (RolloutRecord.of(step, r, rewards.get(r.id)) for r in rollouts)
        records.append(self.rollouts_file, [asdict(record) for record in ended])

    def read_metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step, under ``step`` its number; ``None`` for what was not finite.

        Raises:
            StateError: the file is damaged.
        """
        return records.read(self.metrics_file)

    def ended(self, steps: int) -> TrainResult | None:
        """Return the outcome of a run that has taken so many steps and saved its model after them;
        ``None`` for one that has not.

        Raises:
            StateError: the metrics are damaged.
        """
        last = records.last(self.metrics_file)
        if last is None or last["step"] < steps or not (self.model / "config.json").is_file():
            return None
        if self.model.stat().st_mtime_ns < self.metrics_file.stat().st_mtime_ns:
            return None  # it is of fewer steps
        taken = last.pop("step")
        stats = {name: math.nan if value is None else value for name, value in last.items()}
        return TrainResult(taken, stats, self.model)

    def read_rollouts(self, *, in_flight: bool = False) -> list[RolloutRecord]:
        """The rollouts that were trained on or rejected, in the order in which that happened.

        Args:
            in_flight: then come those of which nothing had come when the run ended.

        Raises:
            StateError: the file is damaged, or was written by another version.
        """
        try:
            found = [RolloutRecord(**record) for record in records.read(self.rollouts_file)]
        except TypeError as error:
            raise StateError(
                f"'{self.rollouts_file}' has other fields than this version writes: {error}"
            ) from error
        return [record for record in found if in_flight or not record.in_flight]

    def rewind(self, step: int) -> list[str]:
        """Drop the records of steps after ``step``, and a last line that a crash left unfinished.

        Returns:
            The names of the files of records that had such a line.

        Raises:
            StateError: a line before the last is not JSON.
            StorageError: a file cannot be written.
        """
        kept = (self.metrics_file, self.samples_file, self.rollouts_file)
        torn = [file.name for file in kept if records.rewind(file, step)]
        self.trace.rewind(step)
        return torn


def claim(root: Path, name: str) -> Path:
    """Make the next free folder; two runs that start at the same time get one each."""
    while True:
        pattern = re.compile(re.escape(name) + r"-(\d+)")
        taken = [int(m[1]) for entry in root.iterdir() if (m := pattern.fullmatch(entry.name))]
        path = root / f"{name}-{max(taken, default=0) + 1:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
