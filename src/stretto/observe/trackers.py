"""TensorBoard, Weights & Biases and Prometheus, by their own writers.

accelerate's trackers need accelerate's process state, and creating that may join a process group,
set the number of threads and change the environment: too much to happen for some curves.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from stretto import files
from stretto.config import ObserveConfig
from stretto.errors import StorageError, first_line, require
from stretto.observe.run_directory import RunDirectory, Sample

CELL_CHARS = 2000
"""Longest text in a table of samples; more of it is cut off."""


class Tracker(NamedTuple):
    """A receiver of a run's metrics and samples besides its folder."""

    log: Callable[[int, Mapping[str, float], Sequence[Sample]], None]
    close: Callable[[], None]


def sample_table(samples: Sequence[Sample]) -> tuple[list[str], list[list[Any]]]:
    """Return samples as columns and rows, with a column for each source of scores."""
    sources = list(dict.fromkeys(name for sample in samples for name in sample.scores))
    rows = [
        [s.reward, *map(s.scores.get, sources), s.tokens, s.finish]
        + [text[:CELL_CHARS] for text in (s.prompt, s.response)]
        for s in samples
    ]
    return ["reward", *sources, "tokens", "finish", "prompt", "response"], rows


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def line(cells: Iterable[Any]) -> str:
        texts = (f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells)
        plain = (re.sub(r"([\\`*_\[\]|])", r"\\\1", escape(text, quote=False)) for text in texts)
        return f"| {' | '.join(' ↵ '.join(text.splitlines()) for text in plain)} |"

    return "\n".join([line(columns), "|---" * len(columns) + "|", *map(line, rows)])


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def port_taken(port: int, error: OSError) -> StorageError:
    """Return the error of a port that cannot be listened on."""
    return StorageError(
        f"observe.prometheus_port = {port} cannot be listened on: {error.strerror}; another run "
        "may be there, choose another port",
        "port-taken",
    )


def tensorboard(run: RunDirectory, settings: Mapping[str, Any], resumed_step: int) -> Tracker:
    """Write event files under ``tensorboard/`` in the run directory: metrics as scalars, settings
    and each step's samples as text, in tables."""
    require("tensorboard", "tensorboard", "observe.trackers = 'tensorboard'")
    library = importlib.import_module("torch.utils.tensorboard")
    # purge_step hides what an interrupted run wrote past the step it is resumed from.
    purge = resumed_step + 1 if resumed_step else None
    writer: Any = library.SummaryWriter(log_dir=str(run.path / "tensorboard"), purge_step=purge)

    table = _markdown(["setting", "value"], _flat(settings))
    writer.add_text("settings", table, global_step=resumed_step)

    def log(step: int, stats: Mapping[str, float], samples: Sequence[Sample]) -> None:
        for name, value in stats.items():
            writer.add_scalar(name, value, global_step=step)
        if samples:
            writer.add_text("samples", _markdown(*sample_table(samples)), global_step=step)
        writer.flush()

    return Tracker(log, writer.close)


def wandb(run: RunDirectory, settings: Mapping[str, Any]) -> Tracker:
    """Open a Weights & Biases run of the run directory's name, in the project 'stretto': with the
    settings as its configuration, metrics, and a table of each step's samples.

    Its id and last step are kept beside the metrics, so that a resumed run continues its curves.
    Uploads follow ``wandb login``, ``WANDB_PROJECT`` and ``WANDB_MODE``.
    """
    require("wandb", "wandb", "observe.trackers = 'wandb'")
    id_file = run.path / "wandb.id"
    library: Any = importlib.import_module("wandb")
    known = id_file.read_text().split() if id_file.exists() else []
    at = int(known[1]) if len(known) > 1 else -1
    try:
        opened = library.init(
            project=None if "WANDB_PROJECT" in os.environ else "stretto",
            name=run.name,
            id=known[0] if known else None,
            resume="allow",
            dir=str(run.path),
            config=dict(settings),
        )
    except library.Error as error:
        raise StorageError(
            f"Weights & Biases cannot be used: {first_line(error)} Log in with 'wandb login' or "
            "WANDB_API_KEY, or write to this machine alone with WANDB_MODE=offline in the "
            "environment",
            "wandb-unusable",
        ) from error
    # W&B drops what is logged at an earlier step than before, as after a resumption. So curves are
    # drawn over a metric, and W&B's own step never falls.
    opened.define_metric("step")
    opened.define_metric("*", step_metric="step")

    def log(step: int, stats: Mapping[str, float], samples: Sequence[Sample]) -> None:
        nonlocal at
        columns, rows = sample_table(samples)
        table = {"samples": library.Table(columns=columns, data=rows)} if samples else {}
        at = max(step, at + 1)
        files.write_whole(id_file, f"{opened.id}\n{at}\n".encode())
        opened.log({"step": step, **stats, **table}, step=at)

    return Tracker(log, opened.finish)


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

    def log(step: int, stats: Mapping[str, float], samples: Sequence[Sample]) -> None:
        del samples  # Prometheus has numbers alone
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
        tensorboard(run, settings, resumed_step) if name == "tensorboard" else wandb(run, settings)
        for name in observe.trackers
    ]
    if observe.prometheus_port:
        made.append(prometheus(run, observe.prometheus_port))
    return made
