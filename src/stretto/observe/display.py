"""Shared parts of displays: their interface, metrics and trends, and a redrawing thread."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from statistics import fmean
from typing import IO
from weakref import WeakKeyDictionary

from stretto.observe.run_directory import SCORE, Sample
from stretto.saying import Display

REWARD = "objective/scores"
THROUGHPUT = "perf/throughput"
STEP_TIME = "timing_s/step"
TIME_LEFT = "timing_s/left"  # seconds until a run's time limit, if it has one
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
"""Label, metric and format of the metrics that displays show, if they exist."""

WINDOW = 10  # steps that the trend and the time left are averaged over


class Progress(Display):
    """Receiver of a run's reports. This one shows nothing. Displays override its methods."""

    def start(self, headline: str) -> None:
        """Show a description of the run, in a few lines."""

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Show the metrics of a finished step. ``step`` counts from 1 to ``total``."""

    def close(self) -> None:
        """Restore the terminal. May be called more than once."""


class History:
    """Recent metrics, for trends and the time left."""

    def __init__(self) -> None:
        self.curve: deque[float] = deque(maxlen=40)  # of the reward, otherwise of the loss
        self._step_times_s: deque[float] = deque(maxlen=WINDOW)
        self._limit_s = math.inf

    def add(self, stats: Mapping[str, float]) -> None:
        """Add the metrics of a step."""
        self.curve += [stats[name] for name in (REWARD, LOSS) if name in stats]
        if STEP_TIME in stats:
            self._step_times_s.append(stats[STEP_TIME])
        self._limit_s = stats.get(TIME_LEFT, math.inf)

    def trend(self) -> float | None:
        """Return the mean of the last :data:`WINDOW` steps minus that of as many before them."""
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
    """Call a function repeatedly, on a thread, during the body of a ``with`` statement. It returns
    the seconds until the next call. Calls end if the terminal is gone."""
    stop = threading.Event()

    def work() -> None:
        wait_s = first_s
        with suppress(OSError, ValueError):
            while not stop.wait(wait_s):
                wait_s = act()

    thread = threading.Thread(target=work, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def duration(seconds: float) -> str:
    """Format a duration as '42s', '3m05s' or '1h02m'."""
    total_s = round(seconds)
    if total_s < 60:
        return f"{total_s}s"
    if total_s < 3600:
        return f"{total_s // 60}m{total_s % 60:02d}s"
    return f"{total_s // 3600}h{total_s % 3600 // 60:02d}m"


_shown: WeakKeyDictionary[IO[str], Sequence[str]] = WeakKeyDictionary()
"""The lines of the last headline, by stream."""


def news(stream: IO[str], headline: str) -> str:
    """Drop lines that the previous headline had too, because a notebook has runs in a row."""
    lines = headline.splitlines()
    previous_lines = _shown.get(stream, ())
    _shown[stream] = lines
    return "\n".join(line for line in lines if line not in previous_lines)
