"""A folder for each run: its records, trace, checkpoints and trained model."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import tomli_w

from stretto import files
from stretto.config import Section
from stretto.errors import ConfigError, StateError, StorageError, require
from stretto.machine import Machine, current_start
from stretto.observe import records, transcripts
from stretto.observe.lock import locked
from stretto.observe.notebook import html_of
from stretto.observe.trace import TraceFile
from stretto.schedules.rollout import Rollout, RolloutState
from stretto.types import CONTEXT, Stats

if TYPE_CHECKING:
    from pandas import DataFrame

METRICS = "metrics.jsonl"

CHECKPOINTS = "checkpoints"

SCORE = "eval/score"  # the metric that ranks evaluations
EVALUATED = "eval/step"  # the metric with the step after which the policy was evaluated

KEPT = 2
"""Most checkpoints of an unfinished run that stay, newest first, as far as the disk has room."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One response, as shown and recorded.

    Attributes:
        reward: the weighted sum of its scores, after the missing-EOS rule.
        scores: by reward source, before weights and that rule; ``None`` if one does not apply.
        extra: values that the sources returned in addition to scores, by 'source/name'.
        context: tokens of an episode that answered turns.
        episode, turns, pieces, ended_by: of an episode, see ``observe.transcripts.Transcript``.
    """

    prompt: str
    response: str
    reward: float
    finish: str  # 'stop' or 'length'
    tokens: int  # sampled by the policy
    scores: Mapping[str, float | None] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    episode: int = -1
    turns: Sequence[Mapping[str, Any]] = ()
    pieces: Sequence[Mapping[str, Any]] = ()
    ended_by: str = ""
    context: int = 0


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """The record of one rollout."""

    step: int  # at whose end it ended
    id: int
    prompt: int  # the prompt's id
    group: int
    prompt_tokens: int
    tokens: int  # of the response
    finish: str | None  # 'stop' or 'length', None if it never ended
    state: str  # 'trained', 'rejected', or its state in flight when the run ended
    because: str  # reason for its rejection
    carries: int  # rounds without it since it was dispatched
    oldest_version: int | None  # of the policies that sampled its tokens, if any
    newest_version: int | None
    reward: float | None  # as trained on, None without one
    # Of an episode, by turn: ``tokens`` sampled by the policy, tokens of ``context`` that answered
    # it, and ``wait_s``, the seconds until the answer.
    turns: Sequence[Mapping[str, Any]] = ()
    ended_by: str = ""  # reason for the episode's end

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled. The rest of an episode is context."""
        return sum(turn["tokens"] for turn in self.turns) or self.tokens

    @property
    def in_flight(self) -> bool:
        return self.state not in (RolloutState.TRAINED, RolloutState.REJECTED)

    @classmethod
    def of(cls, step: int, rollout: Rollout, reward: float | None) -> Self:
        """Make the record of a rollout that ended with ``step``."""
        versions = [version for version in rollout.versions if version != CONTEXT]
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
            oldest_version=min(versions, default=None),
            newest_version=max(versions, default=None),
            reward=reward if reward is not None and math.isfinite(reward) else None,
            turns=transcripts.turn_sizes(rollout),
            ended_by=rollout.ended_by,
        )


@dataclass(frozen=True, slots=True)
class Best:
    """The evaluation of a run with the highest mean score.

    Attributes:
        step: the step after which it took place.
        score: its mean score.
        model: folder of the model at that step, in Hugging Face format.
    """

    step: int
    score: float
    model: Path


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The outcome of a run.

    Attributes:
        steps: taken over all resumptions.
        stats: of the last step.
        run_dir: the run's folder.
        stopped: the reason why the run ended before its last step; empty if it did not.
    """

    steps: int
    stats: Stats
    run_dir: Path
    stopped: str = ""

    @property
    def model(self) -> Path:
        """The folder of the trained model, in Hugging Face format."""
        return RunDirectory(self.run_dir).model

    @property
    def best(self) -> Best | None:
        """The best evaluation and its model; ``None`` without ``observe.eval_every``."""
        return RunDirectory(self.run_dir).best()

    @property
    def history(self) -> list[dict[str, Any]]:
        """The metrics of each step with its ``step``, over all resumptions. Evaluations are with
        the step before them. Non-finite values are ``None``."""
        return RunDirectory(self.run_dir).read_metrics()

    def frame(self) -> DataFrame:
        """Return the history as a DataFrame by step. Raises MissingExtraError without pandas."""
        require("pandas", "hub", "TrainResult.frame()")
        import pandas as pd

        return pd.DataFrame(self.history or {"step": []}).set_index("step")

    def _repr_html_(self) -> str:
        stop_note = f", stopped: {self.stopped}" if self.stopped else ""
        return html_of(self.run_dir, f"{self.steps} steps{stop_note}", self.history, self.model)


class RunDirectory:
    """The files of one run. A record is complete on disk when the call that writes it returns.
    Methods raise StorageError if they cannot write, StateError if they read a damaged record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"  # every setting, to repeat or resume the run
        self.machine_file = path / "machine.json"  # of the last start, and all starts
        self.metrics_file = path / METRICS  # JSON Lines: one object a step
        self.samples_file = path / "samples.jsonl"  # some responses of each step, with scores
        self.rollouts_file = path / "rollouts.jsonl"  # each, once trained on or rejected
        self.evaluations_file = path / "evaluations.jsonl"  # one object for each 'stretto eval'
        self.flight_file = path / "flight.log"  # order of events, for replays
        self.branch_file = path / "branch.json"  # the run and step it branched off from, if any
        self.trace = TraceFile(path / "trace.json")  # all spans, for Perfetto
        self.checkpoints = path / CHECKPOINTS  # for resuming
        self.warmup = path / "warmup.safetensors"  # the model after its warm-up, written once
        self.model = path / "model"  # the trained model in Hugging Face format
        self.best_model = path / "model-best"  # the model of the best evaluation
        self.best_file = self.best_model / "evaluation.json"  # its step and metrics

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def create(cls, out: str | Path, name: str, config: Section) -> Self:
        """Make ``<out>/<name>-<NNN>`` with the next number. Raises ConfigError if that fails."""
        run = cls(new_folder(Path(out), name))
        try:
            with files.explained(run.path):
                run.checkpoints.mkdir()
            run.save_config(config)
        except StorageError:
            shutil.rmtree(run.path, ignore_errors=True)
            raise
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Return the directory of an earlier run. Raises ConfigError if it is none."""
        run = cls(Path(path))
        if not run.config_file.is_file():
            raise ConfigError(
                f"'{path}' is not a run directory: it has no config.toml", "not-a-run"
            )
        with files.explained(run.path):
            run.checkpoints.mkdir(exist_ok=True)
        return run

    def locked(self, note: Callable[[str], None]) -> AbstractContextManager[None]:
        return locked(self.path, note)

    def save_config(self, config: Section) -> None:
        files.write_whole(self.config_file, tomli_w.dumps(config.model_dump()).encode())

    def save_machine(self, machine: Machine, **facts: str) -> None:
        """Write the run's machine, and append this start or resumption, with more ``facts``."""
        starts = list[dict[str, Any]]()
        with suppress(StateError):  # no or damaged record of earlier starts
            starts = self.read_starts()
        record = {**asdict(machine), "starts": [*starts, current_start() | facts]}
        files.write_whole(self.machine_file, json.dumps(record, indent=2).encode())

    def add_to_machine(self, **measured: Any) -> None:
        """Add facts that were measured after the start, if it was recorded."""
        if not self.machine_file.is_file():
            return
        machine, starts = self._read_machine()
        record = {**asdict(machine), **measured, "starts": starts}
        files.write_whole(self.machine_file, json.dumps(record, indent=2).encode())

    def read_machine(self) -> Machine:
        return self._read_machine()[0]

    def read_starts(self) -> list[dict[str, Any]]:
        """Return the date, command and versions of each start or resumption (none in old runs)."""
        return self._read_machine()[1]

    def _read_machine(self) -> tuple[Machine, list[dict[str, Any]]]:
        try:
            record = json.loads(self.machine_file.read_bytes())
            starts = [dict(start) for start in record.pop("starts", [])]
            scaling = record.get("thread_scaling", (0.0, 0.0))  # not in files of version 0.1.0
            tuples = {"gpus": tuple(record["gpus"]), "thread_scaling": tuple(scaling)}
            return Machine(**{**record, **tuples}), starts
        except files.UNREADABLE as error:
            text = f"'{self.machine_file}' cannot be read: {error}"
            raise StateError(text, "damaged-record") from error

    def append_metrics(self, step: int, stats: Mapping[str, float]) -> None:
        """Add a step's metrics. NaN and infinity become ``null``, because JSON lacks them."""
        metrics = {n: float(value) if math.isfinite(value) else None for n, value in stats.items()}
        records.append(self.metrics_file, [{"step": step, **metrics}])

    def append_samples(self, step: int, samples: Sequence[Sample]) -> None:
        records.append(self.samples_file, [{"step": step, **_record(s)} for s in samples])

    def append_rollouts(
        self, step: int, rollouts: Sequence[Rollout], rewards: Mapping[int, float]
    ) -> None:
        """Add the rollouts that ended with a step. ``rewards`` are by rollout id, as trained on.
        Rollouts in flight at the end of the run are recorded with the step after the last one."""
        rollout_records = (RolloutRecord.of(step, r, rewards.get(r.id)) for r in rollouts)
        records.append(self.rollouts_file, list(map(_record, rollout_records)))

    def append_evaluation(self, record: Mapping[str, Any]) -> bool:
        return records.append(self.evaluations_file, [record])

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each step with its ``step``. Non-finite values are ``None``."""
        return records.read(self.metrics_file)

    def last_step(self) -> int:
        return max((int(record["step"]) for record in self.read_metrics()), default=0)

    def read_evaluations(self) -> list[dict[str, Any]]:
        return records.read(self.evaluations_file, "figures", dict)

    def read_samples(self) -> list[dict[str, Any]]:
        return records.read(self.samples_file)

    def read_rollouts(self, *, in_flight: bool = False) -> list[RolloutRecord]:
        """Return ended rollouts in order, with ``in_flight`` also those left at the run's end."""
        try:
            rollouts = [RolloutRecord(**record) for record in records.read(self.rollouts_file)]
        except TypeError as error:
            text = f"'{self.rollouts_file}' has other fields than this version writes: {error}"
            raise StateError(text, "damaged-record") from error
        return [record for record in rollouts if in_flight or not record.in_flight]

    def ended(self, steps: int) -> TrainResult | None:
        """Return a run's outcome if it has taken ``steps`` steps and saved its model after them."""
        last = records.last(self.metrics_file)
        if last is None or last["step"] < steps or not (self.model / "config.json").is_file():
            return None
        if self.model.stat().st_mtime_ns < self.metrics_file.stat().st_mtime_ns:
            return None  # the model is older
        step = last.pop("step")
        stats = {name: math.nan if value is None else value for name, value in last.items()}
        return TrainResult(step, stats, self.path)

    def best(self) -> Best | None:
        """Return the evaluation whose model is kept, if any."""
        try:
            evaluation = json.loads(self.best_file.read_bytes())
            return Best(evaluation["step"], evaluation[SCORE], self.best_model)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            text = f"'{self.best_file}' cannot be read: {error}; remove '{self.best_model}'"
            raise StateError(text, "damaged-record") from error

    def rewind(self, step: int) -> list[str]:
        """Drop the records after ``step``, and unfinished last lines left by a crash. Returns the
        names of the files that had such a line."""
        record_files = (self.metrics_file, self.samples_file, self.rollouts_file)
        torn_files = [file.name for file in record_files if records.rewind(file, step)]
        self.trace.rewind(step)
        return torn_files


def _record(entry: Sample | RolloutRecord) -> dict[str, Any]:
    record = asdict(entry)
    if not entry.turns:  # no episode
        for name in {"context", "episode", "turns", "pieces", "ended_by"} & record.keys():
            del record[name]
    return record


def new_folder(out: Path, name: str) -> Path:
    """Make ``<out>/<name>-<NNN>`` with a number above the highest there. Concurrent runs get one
    each. Raises ConfigError if that fails.
    """
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    try:
        out.mkdir(parents=True, exist_ok=True)
        while True:
            numbers = [int(m[1]) for entry in out.iterdir() if (m := pattern.fullmatch(entry.name))]
            path = out / f"{name}-{max(numbers, default=0) + 1:03d}"
            with suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        text = f"cannot make a folder in '{out}': {error}; choose another with `out`"
        raise ConfigError(text, "cannot-make-folder") from error
