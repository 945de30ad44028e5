"""TensorBoard, Weights & Biases and Prometheus, by their own writers.

accelerate's trackers would do the same behind one face, but their logging refuses to work until
accelerate's process state exists, and creating that may join a process group, set the number of
threads and change the environment: too much to happen because somebody wanted curves.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from typing import Any, Protocol

from stretto.config import ObserveConfig
from stretto.errors import StorageError, require
from stretto.observe.run_directory import RunDirectory


def port_taken(port: int, error: OSError) -> StorageError:
    """Return the error of a port that cannot be listened on."""
    return StorageError(
        f"observe.prometheus_port = {port} cannot be listened on: {error.strerror}; another run "
        "may be there, choose another port"
    )


class Tracker(Protocol):
    """A receiver of a run's metrics besides its folder."""

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        """Hand over a step's metrics."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoard:
    """Event files under ``tensorboard/`` in the run directory."""

    def __init__(self, run: RunDirectory, resumed_step: int) -> None:
        require("tensorboard", "tensorboard", "observe.trackers = 'tensorboard'")
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        # purge_step hides what an interrupted run wrote past the step it is resumed from.
        purge = resumed_step + 1 if resumed_step else None
        self._writer: Any = tensorboard.SummaryWriter(
            log_dir=str(run.path / "tensorboard"), purge_step=purge
        )

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        """Write the metrics, and flush."""
        for name, value in stats.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandB:
    """A Weights & Biases run of the run directory's name, in the project 'stretto'.

    Its id is kept beside the metrics so that a resumed run goes on with its curves. Where, as whom
    and whether at all it uploads is Weights & Biases' own business (``wandb login``,
    ``WANDB_PROJECT``, ``WANDB_MODE``).
    """

    def __init__(self, run: RunDirectory, settings: Mapping[str, Any]) -> None:
        require("wandb", "wandb", "observe.trackers = 'wandb'")
        wandb = importlib.import_module("wandb")
        id_file = run.path / "wandb.id"
        run_id = id_file.read_text().strip() if id_file.exists() else None
        self._run: Any = wandb.init(
            project=None if "WANDB_PROJECT" in os.environ else "stretto",
            name=run.name,
            id=run_id,
            resume="allow",
            dir=str(run.path),
            config=dict(settings),
        )
        id_file.write_text(self._run.id)

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        """Hand over the metrics."""
        self._run.log(dict(stats), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Prometheus:
    """A page of the newest metrics that a Prometheus server can read, on the loopback.

    Each metric is a gauge ``stretto_NAME`` with the run's name as a label; what a name of
    Prometheus cannot have becomes an underscore.

    Args:
        port: of the page, ``http://127.0.0.1:PORT/metrics``.

    Raises:
        StorageError: the port is taken.
    """

    def __init__(self, run: RunDirectory, port: int) -> None:
        require("prometheus_client", "prometheus", f"observe.prometheus_port = {port}")
        self._library = importlib.import_module("prometheus_client")
        self._run, self._gauges = run.name, dict[str, Any]()
        self._registry = self._library.CollectorRegistry()
        try:
            self._server, _ = self._library.start_http_server(
                port, addr="127.0.0.1", registry=self._registry
            )
        except OSError as error:
            raise port_taken(port, error) from error

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        """Show the metrics in the place of the last step's."""
        for gauge in self._gauges.values():
            gauge.clear()  # of those that this step has not
        for name, value in {"step": float(step), **stats}.items():
            clean = "stretto_" + re.sub(r"\W", "_", name)
            if clean not in self._gauges:
                self._gauges[clean] = self._library.Gauge(
                    clean, name, ["run"], registry=self._registry
                )
            self._gauges[clean].labels(self._run).set(value)

    def close(self) -> None:
        """Take the page away."""
        self._server.shutdown()
        self._server.server_close()


def open_trackers(
    observe: ObserveConfig, run: RunDirectory, settings: Mapping[str, Any], resumed_step: int = 0
) -> list[Tracker]:
    """The trackers that ``observe.trackers`` names, and the page for Prometheus.

    Raises:
        MissingExtraError: the library of one is not installed.
        StorageError: the page's port is taken.
    """
    made: list[Tracker] = []
    for name in observe.trackers:
        board = name == "tensorboard"
        made.append(TensorBoard(run, resumed_step) if board else WandB(run, settings))
    if observe.prometheus_port:
        made.append(Prometheus(run, observe.prometheus_port))
    return made
