"""Progress of a run: a live display on a terminal, else one plain line a step."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal, Protocol, TextIO

from stretto.config import Config, RewardModelConfig, SupervisedConfig
from stretto.observe.run_directory import Sample

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


class Progress(Protocol):
    """Receiver of a run's reports."""

    def start(self, config: Config | SupervisedConfig, plan_text: str) -> None:
        """Show what will run, and the memory it plans for."""
        ...

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Show the metrics of a step that is done; ``step`` counts from 1 to ``total``."""
        ...

    def note(self, text: str) -> None:
        """Show a message."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was. May be called more than once."""
        ...


class NoProgress:
    """A display that shows nothing."""

    def start(self, config: Config | SupervisedConfig, plan_text: str) -> None:
        """Do nothing."""

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class PlainProgress:
    """One line a step, each flushed; for files, pipes and continuous integration."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._history = History()

    def start(self, config: Config | SupervisedConfig, plan_text: str) -> None:
        """Print what will run."""
        self.note(headline(config))
        self.note(plan_text)

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
            print(text, file=self._stream, flush=True)

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


def headline(config: Config | SupervisedConfig) -> str:
    """Describe what will run: the numbers that follow from the settings, and remarks on these."""
    if isinstance(config, SupervisedConfig):
        return _supervised(config)
    rollout, schedule, training = config.rollout, config.schedule, config.training
    task = f"{config.task.kind} {config.task.name}"
    prompts = rollout.batch // rollout.samples_per_prompt
    return (
        f"{config.algorithm.name} on {task} with {config.model.name}, {config.steps} steps\n"
        f"a step: {rollout.batch} responses ({prompts} prompts x {rollout.samples_per_prompt}), "
        f"{training.epochs} epoch(s) x {training.minibatches} mini-batch(es) of "
        f"{rollout.batch // training.minibatches} responses\n"
        f"schedule: {schedule.preset}: {schedule.knobs.describe(rollout.engines)}"
        + "".join(f"\nnote: {text}" for text in config.remarks)
    )


def _supervised(config: SupervisedConfig) -> str:
    pairs = isinstance(config, RewardModelConfig)
    what, rows = ("a reward model", "pairs") if pairs else ("supervised fine-tuning", "sequences")
    length = f"{config.steps} steps" if config.steps else f"{config.training.epochs} epoch(s)"
    return f"{what} from {config.model.name}, {length}\na step: {config.batch} {rows}"


def duration(seconds: float) -> str:
    """Write a duration as '42s', '3m05s' or '1h02m'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


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
