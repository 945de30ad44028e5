"""Progress of a run: a live display on a terminal, else one plain line a step."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import fmean
from typing import IO, Literal, Protocol, TextIO
from weakref import WeakKeyDictionary

from stretto.config import Config, RewardModelConfig, SupervisedConfig
from stretto.observe.run_directory import Sample
from stretto.observe.working import FIRST_S, SOON_S, Work, duration, repeated
from stretto.saying import Advance, Saying, Shows, unseen
from stretto.types import short_name

REWARD = "objective/scores"
KL = "objective/kl"
LENGTH = "response/length_mean"
THROUGHPUT = "perf/throughput"
STEP_TIME = "timing_s/step"
LOSS = "train/loss"

SUPERVISED = (
    ("loss", LOSS, ".4f"),
    ("accuracy", "train/accuracy", ".3f"),
    ("held-out loss", "held_out/loss", ".4f"),
    ("held-out accuracy", "held_out/accuracy", ".3f"),
)
"""Label, metric and format of the metrics that supervised training shows, as far as they exist."""

FIGURES = (
    ("reward", REWARD, ".3f"),
    ("kl", KL, ".4f"),
    ("length", LENGTH, ".1f"),
    *SUPERVISED,
    ("tokens/s", THROUGHPUT, ".0f"),
    ("step_s", STEP_TIME, ".2f"),
)
"""Label, metric and format of the metrics in a plain line."""

WINDOW = 10
"""Steps over which the trend and the time left are taken."""


class Progress(Shows, Protocol):
    """Receiver of a run's reports."""

    def start(self, headline: str) -> None:
        """Show what will run; ``headline`` says it in a few lines, see :func:`headline`."""
        ...

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Show the metrics of a step that is done; ``step`` counts from 1 to ``total``."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was. May be called more than once."""
        ...


class NoProgress:
    """A display that shows nothing."""

    def start(self, headline: str) -> None:
        """Do nothing."""

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def working(self, what: str, total: int = 0) -> AbstractContextManager[Advance]:
        """Do nothing."""
        return nullcontext(unseen)

    def close(self) -> None:
        """Do nothing."""


class PlainProgress:
    """One line a step, each flushed; for files, pipes and continuous integration.

    Work gets lines, too, once nothing was said for :data:`~stretto.observe.working.FIRST_S`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._history = History()

    def start(self, headline: str) -> None:
        """Print what will run, but for what the run before it has said."""
        self.note(news(self._stream, headline))

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Print one line; metrics that are not there are left out."""
        self._history.add(stats)
        shown = [f"{label} {stats[name]:{form}}" for label, name, form in FIGURES if name in stats]
        if (eta_s := self._history.eta_s(step, total)) is not None:
            shown.append(f"eta {duration(eta_s)}")
        self.note(f"step {step}/{total}  " + "  ".join(shown))

    def note(self, text: str) -> None:
        """Print a message."""
        if text:
            _silent_s[self._stream] = 0.0
            print(text, file=self._stream, flush=True)

    @contextmanager
    def working(self, what: str, total: int = 0) -> Iterator[Advance]:
        """Print a line about work now and then."""
        work, told = Work(what, total), False
        before_s = _silent_s.get(self._stream, 0.0)

        def tell() -> float:
            nonlocal told
            told = True
            self.note(work.line())
            return work.pause_s

        try:
            with repeated(tell, max(FIRST_S - before_s, SOON_S)):
                yield work.advance
        finally:
            if not told:
                _silent_s[self._stream] = _silent_s.get(self._stream, 0.0) + work.took_s

    def close(self) -> None:
        """Do nothing: there is nothing to undo."""


class History:
    """The last metrics, as far as trends and the time left need them."""

    def __init__(self) -> None:
        self.curve: deque[float] = deque(maxlen=40)  # of the reward, or else of the loss
        self._step_times_s: deque[float] = deque(maxlen=WINDOW)

    def add(self, stats: Mapping[str, float]) -> None:
        """Take in a step."""
        for name in (REWARD, LOSS):
            if name in stats:
                self.curve.append(stats[name])
        if STEP_TIME in stats:
            self._step_times_s.append(stats[STEP_TIME])

    def trend(self) -> float | None:
        """The curve's mean over the last :data:`WINDOW` steps minus that of as many before them."""
        curve = list(self.curve)
        if len(curve) < 2 * WINDOW:
            return None
        return fmean(curve[-WINDOW:]) - fmean(curve[-2 * WINDOW : -WINDOW])

    def eta_s(self, step: int, total: int) -> float | None:
        """Seconds left after ``step``, if the coming steps take as long as the last ones."""
        if not self._step_times_s:
            return None
        return (total - step) * fmean(self._step_times_s)


def headline(config: Config | SupervisedConfig, model: str = "", where: str = "") -> str:
    """Describe what will run, in three lines, and remark on settings that work otherwise than one
    might expect.

    Args:
        model: what is known of the model besides its name.
        where: what is said of where the results go.
    """
    lines = _reinforced(config) if isinstance(config, Config) else _supervised(config)
    ends = (model and f": {model}", "", where and f"; {where}")
    remarks = config.remarks if isinstance(config, Config) else []
    return "\n".join(
        [
            *(line + end for line, end in zip(lines, ends, strict=True)),
            *(f"note: {text}" for text in remarks),
        ]
    )


def _reinforced(config: Config) -> list[str]:
    rollout, schedule, training = config.rollout, config.schedule, config.training
    prompts = rollout.batch // rollout.samples_per_prompt
    rewards = ", ".join(short_name(source) for source in config.reward.sources)
    return [
        f"{config.algorithm.name} with {config.model.name}",
        f"{config.steps} steps on {config.task.kind} {config.task.name}, rewards by {rewards}; "
        f"a step: {rollout.batch} responses ({prompts} prompts x {rollout.samples_per_prompt}), "
        f"{training.epochs} epoch(s) x {training.minibatches} mini-batch(es) of "
        f"{rollout.batch // training.minibatches}",
        f"schedule: {schedule.preset}: {schedule.knobs.describe(rollout.engines)}; runtime "
        f"{config.runtime}",
    ]


def _supervised(config: SupervisedConfig) -> list[str]:
    pairs = isinstance(config, RewardModelConfig)
    what, rows = ("a reward model", "pairs") if pairs else ("supervised fine-tuning", "sequences")
    length = f"{config.steps} steps" if config.steps else f"{config.training.epochs} epoch(s)"
    return [
        f"{what} from {config.model.name}",
        f"{length} on {config.data.name}",
        f"a step: {config.batch} {rows}",
    ]


_silent_s: WeakKeyDictionary[IO[str], float] = WeakKeyDictionary()
"""Seconds of work since the last line, by the stream of the lines: of much that takes a second each
there is a line, too."""

_said: WeakKeyDictionary[IO[str], Sequence[str]] = WeakKeyDictionary()
"""The lines of the last headline, by the stream that it went to."""


def news(stream: IO[str], headline: str) -> str:
    """Leave out lines of a headline that the one before it has: a notebook has runs in a row."""
    lines = headline.splitlines()
    before = _said.get(stream, ())
    _said[stream] = lines
    return "\n".join(line for line in lines if line not in before)


class _Stderr:
    """A display on standard error, whatever that is when something is shown."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def working(self, what: str, total: int = 0) -> AbstractContextManager[Advance]:
        return make_progress("auto", sys.stderr).working(what, total)


on_stderr = Saying(_Stderr())
"""What commands tell of work whose results go to standard output."""


def make_progress(
    mode: Literal["auto", "rich", "plain", "off"], stream: TextIO | None = None
) -> Progress:
    """The display that ``observe.progress`` asks for, on ``stream`` (standard output)."""
    stream = stream or sys.stdout
    if mode == "off":
        return NoProgress()
    if mode == "plain":
        return PlainProgress(stream)

    from rich.console import Console

    from stretto.observe.live import RichProgress

    console = Console(file=stream, force_terminal=True if mode == "rich" else None)
    if mode == "auto" and (not console.is_terminal or console.is_dumb_terminal):
        return PlainProgress(stream)
    return RichProgress(console)
