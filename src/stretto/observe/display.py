"""What displays have in common: their methods, metrics and trends, and a thread to redraw them."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from statistics import fmean
from typing import IO
from weakref import WeakKeyDictionary

from stretto.observe.run_directory import SCORE, Sample
from stretto.saying import Advance, unseen

REWARD = "objective/scores"
THROUGHPUT = "perf/throughput"
STEP_TIME = "timing_s/step"
TIME_LEFT = "timing_s/left"
"""Seconds until the time limit of a run that has one."""
LOSS = "train/loss"

FIGURES = (
    ("reward", REWARD, ".3f"),
    ("eval", SCORE, ".3f"),
    ("pass@1", "eval/pass@1", ".3f"),
    ("kl", "objective/kl", ".4f"),
    ("length", "response/length_mean", ".1f"),
    ("turns", "episode/turns_mean", ".1f"),
    ("wait_s", "episode/wait_s_mean", ".2f"),
    ("loss", LOSS, ".4f"),
    ("accuracy", "train/accuracy", ".3f"),
    ("held-out loss", "held_out/loss", ".4f"),
    ("held-out accuracy", "held_out/accuracy", ".3f"),
    ("tokens/s", THROUGHPUT, ".0f"),
    ("step_s", STEP_TIME, ".2f"),
)
"""Label, metric and format of the metrics that displays show, as far as they exist."""

WINDOW = 10
"""Steps over which the trend and the time left are taken."""


class Progress:
    """Receiver of a run's reports. This one shows nothing; displays override its methods."""

    def start(self, headline: str) -> None:
        """Show what will run, described in a few lines."""

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Show the metrics of a step that is done; ``step`` counts from 1 to ``total``."""

    def note(self, text: str) -> None:
        """Show a message."""

    def working(
        self, what: str, total: int = 0, limit_s: float = math.inf
    ) -> AbstractContextManager[Advance]:
        return nullcontext(unseen)

    def close(self) -> None:
        """Leave the terminal as it was. May be called more than once."""


class History:
    """The last metrics, as far as trends and the time left need them."""

    def __init__(self) -> None:
        self.curve: deque[float] = deque(maxlen=40)  # of the reward, or else of the loss
        self._step_times_s: deque[float] = deque(maxlen=WINDOW)
        self._limit_s = math.inf

    def add(self, stats: Mapping[str, float]) -> None:
        """Take in a step."""
        self.curve += [stats[name] for name in (REWARD, LOSS) if name in stats]
        if STEP_TIME in stats:
            self._step_times_s.append(stats[STEP_TIME])
        self._limit_s = stats.get(TIME_LEFT, math.inf)

    def trend(self) -> float | None:
        """Return the curve's mean over the last :data:`WINDOW` steps minus that of as many before
        them."""
        curve = list(self.curve)
        if len(curve) < 2 * WINDOW:
            return None
        return fmean(curve[-WINDOW:]) - fmean(curve[-2 * WINDOW : -WINDOW])

    def eta_s(self, step: int, total: int) -> float | None:
        if not self._step_times_s:
            return None
        return min((total - step) * fmean(self._step_times_s), self._limit_s)


@contextmanager
def repeated(act: Callable[[], float], first_s: float) -> Iterator[None]:
    """Call a function now and then, on a thread, while the body of a ``with`` statement runs. It
    returns the seconds until the next call; a terminal that is gone ends the calls."""
    ended = threading.Event()

    def work() -> None:
        wait_s = first_s
        with suppress(OSError, ValueError, SystemExit):  # the last by Rich, of a closed pipe
            while not ended.wait(wait_s):
                wait_s = act()

    thread = threading.Thread(target=work, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def duration(seconds: float) -> str:
    """Write a duration as '42s', '3m05s' or '1h02m'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


_shown: WeakKeyDictionary[IO[str], Sequence[str]] = WeakKeyDictionary()
"""The lines of the last headline, by the stream that it went to."""


def news(stream: IO[str], headline: str) -> str:
    """Leave out lines of a headline that the one before it has: a notebook has runs in a row."""
    lines = headline.splitlines()
    before = _shown.get(stream, ())
    _shown[stream] = lines
    return "\n".join(line for line in lines if line not in before)
