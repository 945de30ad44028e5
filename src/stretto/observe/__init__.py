"""Display and records of runs: run directory, metrics, trace, progress, trackers, spans, report."""

from stretto.observe.display import Progress as Progress
from stretto.observe.progress import make_progress as make_progress
from stretto.observe.recorder import Recorder as Recorder
from stretto.observe.run_directory import RolloutRecord as RolloutRecord
from stretto.observe.run_directory import RunDirectory as RunDirectory
from stretto.observe.run_directory import Sample as Sample
from stretto.observe.spans import Span as Span
from stretto.observe.spans import Spans as Spans
from stretto.observe.spans import Window as Window
