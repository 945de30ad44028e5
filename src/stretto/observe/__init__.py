"""Display and records of runs: run directory, metrics, trace, progress, trackers, spans, report."""

from stretto.observe.display import Progress
from stretto.observe.progress import make_progress
from stretto.observe.recorder import Recorder
from stretto.observe.run_directory import RolloutRecord, RunDirectory, Sample
from stretto.observe.spans import Span, Spans, Window

__all__ = [
    "Progress",
    "Recorder",
    "RolloutRecord",
    "RunDirectory",
    "Sample",
    "Span",
    "Spans",
    "Window",
    "make_progress",
]
