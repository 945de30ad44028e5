"""Progress of a run: a live display on a terminal, otherwise one plain line a step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import inf
from typing import IO, Literal, TextIO
from weakref import WeakKeyDictionary

from stretto.config import Config, RewardModelConfig, SupervisedConfig
from stretto.interfaces import worded
from stretto.observe.display import FIGURES, History, Progress, duration, news, repeated
from stretto.observe.run_directory import Sample
from stretto.protocols import Clock, RealClock
from stretto.saying import Advance, Display
from stretto.types import short_name

FIRST_S = 2.0  # seconds without a line until the first one about work in progress
SOON_S = 0.5  # the same, after other work without a line

EVERY_S, SPARSER = 10.0, 0.25
"""Least seconds between lines about work in progress, also as a share of its time so far."""

_silent_s: WeakKeyDictionary[IO[str], float] = WeakKeyDictionary()
"""Seconds of work since the last line, by stream, so that many short works get a line too."""


class WorkProgress:
    """Work in progress, ``done`` of ``total`` (0: unknown). It ends by ``limit_s``."""

    def __init__(
        self, what: str, total: int = 0, clock: Clock | None = None, limit_s: float = inf
    ) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self._limit_s = limit_s
        self._clock = clock or RealClock()
        self._since_s = self._clock.now()

    def advance(self, count: int) -> None:
        self.done += count

    @property
    def took_s(self) -> float:
        return self._clock.now() - self._since_s

    @property
    def pause_s(self) -> float:
        return max(EVERY_S, SPARSER * self.took_s)

    def line(self) -> str:
        """Return progress and, if the total is known, the time left at the average pace."""
        if not self.total:
            return f"{self.what} ({duration(self.took_s)} so far)"
        share = f"{self.what}: {self.done:,} of {self.total:,}"
        if not self.done:
            return share
        left_s = self.took_s * max(self.total - self.done, 0) / self.done
        return f"{share}, {duration(max(min(left_s, self._limit_s - self.took_s), 0.0))} left"


class PlainProgress(Progress):
    """One flushed line a step, for files, pipes and continuous integration. Other work gets lines
    too, once there was no line for :data:`FIRST_S`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._history = History()

    def start(self, headline: str) -> None:
        self.note(news(self._stream, headline))

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Print one line of the available metrics."""
        self._history.add(stats)
        fields = [f"{label} {stats[name]:{form}}" for label, name, form in FIGURES if name in stats]
        if (eta_s := self._history.eta_s(step, total)) is not None:
            fields.append(f"eta {duration(eta_s)}")
        self.note(f"step {step}/{total}  " + "  ".join(fields))

    def note(self, text: str) -> None:
        if text:
            _silent_s[self._stream] = 0.0
            print(worded(text), file=self._stream, flush=True)

    @contextmanager
    def working(self, what: str, total: int = 0, limit_s: float = inf) -> Iterator[Advance]:
        """Print a line about the work from time to time."""
        work, has_printed = WorkProgress(what, total, limit_s=limit_s), False
        before_s = _silent_s.get(self._stream, 0.0)

        def tell() -> float:
            nonlocal has_printed
            has_printed = True
            self.note(work.line())
            return work.pause_s

        try:
            with repeated(tell, max(FIRST_S - before_s, SOON_S)):
                yield work.advance
        finally:
            if not has_printed:
                _silent_s[self._stream] = _silent_s.get(self._stream, 0.0) + work.took_s


def headline(config: Config | SupervisedConfig, model: str = "", where: str = "") -> str:
    """Describe a run in three lines, with facts about the model and the place of the results,
    followed by notes on settings with surprising effects."""
    remarks = config.remarks if isinstance(config, Config) else ()
    if isinstance(config, Config):
        rollout = config.rollout
        schedule = config.schedule
        training = config.training
        prompts = rollout.batch // rollout.samples_per_prompt
        rewards = ", ".join(short_name(source) for source in config.reward.sources)
        title = f"{config.algorithm.name} with {config.model.name}"
        step = (
            f"{config.steps} steps on {config.task.kind} {config.task.name}, rewards by {rewards}; "
            f"a step: {rollout.batch} responses ({prompts} prompts x {rollout.samples_per_prompt})"
            f", {training.epochs} epoch(s) x {training.minibatches} mini-batch(es) of "
            f"{rollout.batch // training.minibatches}"
        )
        knobs = schedule.knobs.describe(rollout.engines, episodes=bool(config.environment.sources))
        most = "at most " if schedule.preset == "auto" else ""
        last = f"schedule: {schedule.preset}: {most}{knobs}; runtime {config.runtime}"
    else:
        pairs = isinstance(config, RewardModelConfig)
        kind = "a reward model" if pairs else "supervised fine-tuning"
        length = f"{config.steps} steps" if config.steps else f"{config.training.epochs} epoch(s)"
        title, step = f"{kind} from {config.model.name}", f"{length} on {config.data.name}"
        last = f"a step: {config.batch} {'pairs' if pairs else 'sequences'}"
    lines = [title + (model and f": {model}"), step, last + (where and f"; {where}")]
    return "\n".join([*lines, *(f"note: {text}" for text in remarks)])


class _Stderr(Display):
    """A display on the current standard error."""

    def note(self, text: str) -> None:
        print(worded(text), file=sys.stderr, flush=True)

    def working(
        self, what: str, total: int = 0, limit_s: float = inf
    ) -> AbstractContextManager[Advance]:
        return make_progress("auto", sys.stderr).working(what, total, limit_s)


on_stderr = _Stderr()  # for commands whose results go to standard output


def make_progress(
    mode: Literal["auto", "rich", "plain", "off"], stream: TextIO | None = None
) -> Progress:
    """Return the display for ``observe.progress`` on ``stream`` (default: standard output)."""
    stream = stream or sys.stdout
    if mode == "off":
        return Progress()
    if mode == "plain":
        return PlainProgress(stream)

    from stretto.observe.live import RichProgress, TerminalConsole

    console = TerminalConsole(file=stream, force_terminal=True if mode == "rich" else None)
    if mode == "auto" and (not console.is_terminal or console.is_dumb_terminal):
        return PlainProgress(stream)
    return RichProgress(console)
