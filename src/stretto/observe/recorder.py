"""Everything that is kept and shown of a run, behind one call a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from stretto.config import Config
from stretto.observe.progress import Progress
from stretto.observe.run_directory import RunDirectory, Sample
from stretto.observe.trackers import open_trackers
from stretto.types import Stats


class Recorder:
    """Writes a run's records, hands them to the trackers, and shows them.

    A context manager; leaving it, by Ctrl-C too, closes trackers and display.

    Args:
        config: of the run.
        run: where the records go.
        progress: the display, already started.
        resumed_step: the last step of the checkpoint that the run goes on from; 0 for a new run.
            Records of later steps are dropped, as those steps will be taken again.

    Raises:
        MissingExtraError: a tracker's library is not installed.
        StateError: the records of the resumed run are damaged.
    """

    def __init__(
        self, config: Config, run: RunDirectory, progress: Progress, *, resumed_step: int = 0
    ) -> None:
        self._config = config
        self._run = run
        self._progress = progress
        run.rewind(resumed_step)
        self._trackers = open_trackers(config, run, resumed_step)

    def step(self, step: int, stats: Stats, samples: Sequence[Sample] = ()) -> None:
        """Record step number ``step`` (the first is 1).

        Args:
            step: counts from 1 to the run's steps.
            stats: figures by metric name.
            samples: responses of the step; the first ``observe.samples`` of them are kept.
        """
        kept = samples[: self._config.observe.samples]
        self._run.append_samples(step, kept)
        # Last of the files: a step with metrics has all its records.
        self._run.append_metrics(step, stats)
        for tracker in self._trackers:
            tracker.log(step, stats)
        self._progress.step(step, self._config.steps, stats, kept)

    def note(self, text: str) -> None:
        """Show a message."""
        self._progress.note(text)

    def close(self) -> None:
        """Close trackers and display, all of them, whatever one of them raises."""
        with ExitStack() as stack:
            stack.callback(self._progress.close)
            for tracker in self._trackers:
                stack.callback(tracker.close)
            self._trackers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
