"""Trackers of experiments: TensorBoard, Weights & Biases, MLflow, Trackio, SwanLab, Prometheus.
They use the libraries' own writers, because accelerate's trackers need accelerate's process state,
whose creation may join a process group, set the number of threads and change the environment."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stretto import files, outside
from stretto.config import ObserveConfig
from stretto.errors import StorageError, StrettoError, first_line, require
from stretto.observe.card import plain_markdown
from stretto.observe.run_directory import Sample

CELL_CHARS = 2000
"""Most characters of a text in a table of samples."""

PROJECT = "stretto"
"""Project or experiment of all runs, unless the library's own environment variable names one."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is made for.

    Attributes:
        name: of the run, for example ``tiny-001``.
        folder: of the run. A tracker may keep its id of the run there.
        settings: all settings, in the sections of config.toml.
        resumed_step: last step of the resumed checkpoint, 0 for a new run. Later steps are taken,
            and logged, again.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any]
    resumed_step: int = 0


class Tracker(Protocol):
    """A receiver of a run's metrics, which a callable makes from a :class:`TrackedRun`.
    ``observe.trackers`` names that callable, for example a class with these methods. A tracker may
    also have ``log_samples(step, columns, rows)``, which gets a table of the step's first responses
    after its metrics. If ``log`` raises an exception, the run goes on without the tracker."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step. The first step is 1."""

    def finish(self) -> None:
        """Close the tracker. Called once, even after an error or an interrupt."""


def send(
    tracker: Tracker, step: int, stats: Mapping[str, float], samples: Sequence[Sample]
) -> None:
    """Send a step's metrics, and a table of its samples with a column for each source of scores."""
    tracker.log(step, stats)
    if samples and hasattr(tracker, "log_samples"):
        sources = list(dict.fromkeys(name for sample in samples for name in sample.scores))
        columns = ["reward", *sources, "tokens", "finish", "prompt", "response"]
        rows = [
            [s.reward, *map(s.scores.get, sources), s.tokens, s.finish]
            + [text[:CELL_CHARS] for text in (s.prompt, s.response)]
            for s in samples
        ]
        tracker.log_samples(step, columns, rows)


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def line(cells: Iterable[Any]) -> str:
        texts = (f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells)
        return f"| {' | '.join(plain_markdown(text, ' ↵ ') for text in texts)} |"

    return "\n".join([line(columns), "|---" * len(columns) + "|", *map(line, rows)])


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of nested sections with their dotted names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def port_taken(port: int, error: OSError) -> StorageError:
    """Return the error for a port that is not available."""
    return StorageError(
        f"observe.prometheus_port = {port} cannot be listened on: {error.strerror}; another run "
        "may be there, choose another port",
        "port-taken",
    )


class TensorBoard:
    """Event files in ``tensorboard/``: metrics as scalars, settings and samples as tables."""

    def __init__(self, run: TrackedRun) -> None:
        library = importlib.import_module("torch.utils.tensorboard")
        # purge_step hides events that an interrupted run wrote after the resumed step.
        purge = run.resumed_step + 1 if run.resumed_step else None
        folder = str(run.folder / "tensorboard")
        self._writer: Any = library.SummaryWriter(log_dir=folder, purge_step=purge)
        self.finish = self._writer.close
        table = _markdown(["setting", "value"], flat_settings(run.settings))
        self._writer.add_text("settings", table, global_step=run.resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def log_samples(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._writer.add_text("samples", _markdown(columns, rows), global_step=step)
        self._writer.flush()


class _Remembered:
    """A tracker that keeps the library's run id in the run's folder, so that curves continue."""

    def __init__(self, run: TrackedRun, library: str) -> None:
        self._library: Any = importlib.import_module(library)
        self._file = run.folder / f"{library}.id"
        text = self._file.read_bytes().decode(errors="replace") if self._file.exists() else ""
        self._words = text.split()
        self._id = self._words[0] if self._words else None

    def _remember(self, *words: object) -> None:
        files.write_whole(self._file, "".join(f"{word}\n" for word in words).encode())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._library.log(dict(metrics), step=step)


class WandB(_Remembered):
    """A run of Weights & Biases: settings as its configuration, metrics, and tables of samples.
    Uploads follow ``wandb login``, ``WANDB_PROJECT`` and ``WANDB_MODE``."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run, "wandb")
        try:
            self._run = self._library.init(
                project=None if "WANDB_PROJECT" in os.environ else PROJECT,
                name=run.name,
                id=self._id,
                resume="allow",
                dir=str(run.folder),
                config=dict(run.settings),
            )
        except self._library.Error as error:
            raise StorageError(
                f"Weights & Biases cannot be used: {first_line(error)} Log in with 'wandb login' "
                "or WANDB_API_KEY, or write to this machine alone with WANDB_MODE=offline in the "
                "environment",
                "wandb-unusable",
            ) from error
        self.finish = self._run.finish
        # W&B drops values at an earlier step than its last one, for example after a resumption. So
        # curves are drawn over a metric, and W&B's own step never decreases. Offline, only the file
        # has the last step. If the file is damaged, W&B's own is used.
        last = self._words[1] if len(self._words) > 1 else ""
        self._at = int(last) if last.isdecimal() else getattr(self._run, "step", 0) - 1
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._at = max(step, self._at + 1)
        self._remember(self._run.id, self._at)
        self._run.log({"step": step, **metrics}, step=self._at)

    def log_samples(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = self._library.Table(columns=columns, data=rows)
        self._run.log({"step": step, "samples": table}, step=self._at)


class Trackio(_Remembered):
    """A run of Trackio, with the settings as its configuration, and metrics."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run, "trackio")
        experiment = self._library.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=self._id or run.name,
            resume="allow" if self._id else "never",
            config=dict(flat_settings(run.settings)),
        )
        self._remember(experiment.name)
        self.finish = self._library.finish


class SwanLab(_Remembered):
    """An experiment of SwanLab, with the settings as its configuration, and metrics. Uploads follow
    ``swanlab login``, ``SWANLAB_PROJ_NAME`` and ``SWANLAB_MODE``."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run, "swanlab")
        experiment = self._library.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", PROJECT),
            experiment_name=run.name,
            config=dict(run.settings),
            logdir=str(run.folder / "swanlab"),
            **({"id": self._id, "resume": "allow"} if self._id else {}),
        )
        self._remember(experiment.id)
        self.finish = self._library.finish


class MLflow(_Remembered):
    """A run of MLflow, with settings as parameters, and metrics. Underscores replace characters
    that MLflow refuses in names. ``MLFLOW_TRACKING_URI`` names the server."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run, "mlflow")
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
            self._library.set_experiment(PROJECT)
        active_run = self._library.start_run(run_id=self._id, run_name=run.name)
        self.finish = self._library.end_run
        self._remember(active_run.info.run_id)
        parameters = [(self._named(n), str(x)[:500]) for n, x in flat_settings(run.settings)]
        for start in range(0, 0 if self._id else len(parameters), 100):  # MLflow's limits
            self._library.log_params(dict(parameters[start : start + 100]))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._library.log_metrics({self._named(n): x for n, x in metrics.items()}, step=step)

    def _named(self, name: str) -> str:
        return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)


class Prometheus:
    """The newest metrics for a Prometheus server, on ``http://127.0.0.1:PORT/metrics``: gauges
    ``stretto_NAME`` (invalid characters as underscores), labelled with the run's name."""

    def __init__(self, run: TrackedRun, port: int) -> None:
        self._name = run.name
        self._gauges: dict[str, Any] = {}
        self._library = importlib.import_module("prometheus_client")
        self._registry = self._library.CollectorRegistry()
        try:
            self._server, _ = self._library.start_http_server(
                port, addr="127.0.0.1", registry=self._registry
            )
        except OSError as error:
            raise port_taken(port, error) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Replace the metrics of the previous step."""
        for gauge in self._gauges.values():
            gauge.clear()  # drops metrics that this step lacks
        for name, value in {"step": float(step), **metrics}.items():
            clean = "stretto_" + re.sub(r"\W", "_", name)
            if clean not in self._gauges:
                gauge = self._library.Gauge(clean, name, ["run"], registry=self._registry)
                self._gauges[clean] = gauge
            self._gauges[clean].labels(self._name).set(value)

    def finish(self) -> None:
        self._server.shutdown()
        self._server.server_close()


_MADE: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
    "swanlab": SwanLab,
}


def require_libraries(observe: ObserveConfig) -> None:
    """Raise MissingExtraError if the library of a tracker is not installed."""
    for name in observe.trackers:
        if name in _MADE:
            require(name, name, f"observe.trackers = '{name}'")
    if port := observe.prometheus_port:
        require("prometheus_client", "prometheus", f"observe.prometheus_port = {port}")


def open_trackers(observe: ObserveConfig, run: TrackedRun) -> dict[str, Tracker]:
    """Open the trackers of ``observe.trackers``, and the Prometheus server. Raises
    MissingExtraError if a library is not installed, ConfigError if there is no such code, and
    StorageError if a tracker cannot be opened."""
    require_libraries(observe)
    trackers: dict[str, Tracker] = {}
    for name in observe.trackers:
        make = _MADE.get(name) or outside.load(name, "observe.trackers", Callable)
        try:
            trackers[name] = make(run)
        except StrettoError:
            raise
        except Exception as error:
            raise StorageError(
                f"observe.trackers: '{name}' cannot be opened: {outside.describe(error, None)}; "
                "fix that, or leave the tracker out",
                "tracker-unusable",
            ) from error
    if observe.prometheus_port:
        trackers["prometheus"] = Prometheus(run, observe.prometheus_port)
    return trackers
