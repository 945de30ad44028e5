"""What a run shows and keeps: run directory, metrics, progress, trackers, spans."""

from stretto.observe.progress import Progress, make_progress
from stretto.observe.recorder import Recorder
from stretto.observe.run_directory import RunDirectory, Sample
from stretto.observe.spans import Span, Spans

__all__ = ["Progress", "Recorder", "RunDirectory", "Sample", "Span", "Spans", "make_progress"]
