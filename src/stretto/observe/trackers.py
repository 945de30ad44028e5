"""TensorBoard, Weights & Biases and Prometheus, by their own writers.

accelerate's trackers need accelerate's process state, and creating that may join a process group,
set the number of threads and change the environment: too much to happen for some curves.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from stretto.config import ObserveConfig
from stretto.errors import StorageError, require
from stretto.observe.run_directory import RunDirectory


class Tracker(NamedTuple):
    """A receiver of a run's metrics besides its folder."""

    log: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


def port_taken(port: int, error: OSError) -> StorageError:
    """Return the error of a port that cannot be listened on."""
    return StorageError(
        f"observe.prometheus_port = {port} cannot be listened on: {error.strerror}; another run "
        "may be there, choose another port",
        "port-taken",
    )


def tensorboard(run: RunDirectory, resumed_step: int) -> Tracker:
    """Write event files under ``tensorboard/`` in the run directory."""
    require("tensorboard", "tensorboard", "observe.trackers = 'tensorboard'")
    library = importlib.import_module("torch.utils.tensorboard")
    # purge_step hides what an interrupted run wrote past the step it is resumed from.
    purge = resumed_step + 1 if resumed_step else None
    writer: Any = library.SummaryWriter(log_dir=str(run.path / "tensorboard"), purge_step=purge)

    def log(step: int, stats: Mapping[str, float]) -> None:
        for name, value in stats.items():
            writer.add_scalar(name, value, global_step=step)
        writer.flush()

    return Tracker(log, writer.close)


def wandb(run: RunDirectory, settings: Mapping[str, Any]) -> Tracker:
    """Open a Weights & Biases run of the run directory's name, in the project 'stretto'.

    Its id is kept beside the metrics so that a resumed run goes on with its curves. Uploads follow
    ``wandb login``, ``WANDB_PROJECT`` and ``WANDB_MODE``.
    """
    require("wandb", "wandb", "observe.trackers = 'wandb'")
    id_file = run.path / "wandb.id"
    opened: Any = importlib.import_module("wandb").init(
        project=None if "WANDB_PROJECT" in os.environ else "stretto",
        name=run.name,
        id=id_file.read_text().strip() if id_file.exists() else None,
        resume="allow",
        dir=str(run.path),
        config=dict(settings),
    )
    id_file.write_text(opened.id)
    return Tracker(lambda step, stats: opened.log(dict(stats), step=step), opened.finish)


def prometheus(run: RunDirectory, port: int) -> Tracker:
    """Serve the newest metrics to a Prometheus server on ``http://127.0.0.1:PORT/metrics``: gauges
    ``stretto_NAME`` with the run's name as a label, and underscores for what names cannot have."""
    require("prometheus_client", "prometheus", f"observe.prometheus_port = {port}")
    library = importlib.import_module("prometheus_client")
    registry, gauges = library.CollectorRegistry(), dict[str, Any]()
    try:
        server, _ = library.start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise port_taken(port, error) from error

    def log(step: int, stats: Mapping[str, float]) -> None:
        for gauge in gauges.values():
            gauge.clear()  # of those that this step has not
        for name, value in {"step": float(step), **stats}.items():
            clean = "stretto_" + re.sub(r"\W", "_", name)
            if clean not in gauges:
                gauges[clean] = library.Gauge(clean, name, ["run"], registry=registry)
            gauges[clean].labels(run.name).set(value)

    def close() -> None:
        server.shutdown()
        server.server_close()

    return Tracker(log, close)


def open_trackers(
    observe: ObserveConfig, run: RunDirectory, settings: Mapping[str, Any], resumed_step: int = 0
) -> list[Tracker]:
    """Open the trackers that ``observe.trackers`` names, and the page for Prometheus. Raises
    MissingExtraError if a library is not installed, StorageError if the page's port is taken."""
    made = [
        tensorboard(run, resumed_step) if name == "tensorboard" else wandb(run, settings)
        for name in observe.trackers
    ]
    if observe.prometheus_port:
        made.append(prometheus(run, observe.prometheus_port))
    return made
