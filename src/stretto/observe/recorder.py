"""Everything that is kept and shown of a run, behind one call a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from stretto.config import Config, SupervisedConfig
from stretto.observe.display import THROUGHPUT, Progress
from stretto.observe.idle import TimeSheet
from stretto.observe.remarks import Remarks
from stretto.observe.run_directory import RunDirectory, Sample
from stretto.observe.spans import Window
from stretto.observe.trackers import open_trackers
from stretto.schedules.rollout import Rollout
from stretto.types import Stats


class Recorder(ExitStack):
    """Writer of a run's records, which also hands them to the trackers and shows them.

    A context manager; leaving it, by Ctrl-C too, closes trackers and display, all of them, whatever
    one of them raises. Raises MissingExtraError if a tracker's library is not installed, StateError
    if the records of a resumed run are damaged, and StorageError, also later, if a record cannot be
    written.

    Args:
        run: where the records go.
        resumed_step: the last step of the checkpoint that the run goes on from; 0 for a new run.
            Records of later steps are dropped, as those steps will be taken again.
        total: steps of the run, where the settings alone do not say; else ``config.steps``.
    """

    def __init__(
        self,
        config: Config | SupervisedConfig,
        run: RunDirectory,
        progress: Progress,
        *,
        resumed_step: int = 0,
        total: int = 0,
    ) -> None:
        super().__init__()
        self._shown, self._total = config.observe.samples, total or config.steps
        self._run = run
        self._progress = progress
        if torn := run.rewind(resumed_step):
            self.note(f"dropped a last line that was never finished, of {', '.join(torn)}")
        records = run.read_metrics()
        self._time_s = float(records[-1].get("time_s") or 0.0) if records else 0.0
        self._tracing = True
        self._time_sheet = TimeSheet()
        self._remarks: Remarks | None = None
        if isinstance(config, Config):
            self._remarks = Remarks(config.reward, config.rollout.max_new_tokens)
        self._trackers = open_trackers(config.observe, run, config.model_dump(), resumed_step)
        for close in (progress.close, *(tracker.close for tracker in self._trackers)):
            self.callback(close)

    def step(
        self,
        step: int,
        stats: Stats,
        samples: Sequence[Sample] = (),
        *,
        window: Window | None = None,
        rollouts: Sequence[Rollout] = (),
        rewards: Mapping[int, float] | None = None,
    ) -> None:
        """Record step number ``step`` (the first is 1), and remark on its rewards where need be.

        Args:
            samples: responses of the step; the first ``observe.samples`` of them are kept.
            window: spans since the step before. It adds to the metrics: ``time_s``, seconds
                since the run's start, the share of work and waiting of each role, and, where
                devices are known, the throughput of one.
            rollouts: those that ended with the step, trained and rejected ones.
            rewards: of the trained ones, by rollout id.
        """
        rewards = rewards or {}
        if window is not None:
            stats = {**stats, **self._take_in(step, window)}
            if window.devices and THROUGHPUT in stats:
                count = len(set(window.devices.values()))
                stats[f"{THROUGHPUT}_per_device"] = stats[THROUGHPUT] / count
        self._run.append_rollouts(step, rollouts, rewards)
        kept = samples[: self._shown]
        self._run.append_samples(step, kept)
        # Last of the files: a step with metrics has all its records.
        self._run.append_metrics(step, stats)
        for tracker in self._trackers:
            tracker.log(step, stats)
        self._progress.step(step, self._total, stats, kept)
        batch = [r for r in rollouts if r.id in rewards]
        for text in self._remarks.of(step, batch, rewards) if self._remarks else ():
            self.note(text)

    def where_time_went(self) -> str:
        """Return a small table of work and waiting by role, since the run's start or its
        resumption."""
        return self._time_sheet.table()

    def note(self, text: str) -> None:
        """Show a message."""
        self._progress.note(text)

    def _take_in(self, step: int, window: Window) -> dict[str, float]:
        if self._tracing and not self._run.trace.append(step, window, self._time_s):
            self._tracing = False
            self.note(f"{self._run.trace.path} is as long as viewers can open, and ends here")
        self._time_s += window.end_s - window.start_s
        return {"time_s": self._time_s, **self._time_sheet.add(window)}
