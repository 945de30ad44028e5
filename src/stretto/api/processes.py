"""Runs to be compared, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stretto import signals
from stretto.api.variants import Job, config_of, outcome_of
from stretto.config import Config, recipes
from stretto.observe import records
from stretto.observe.compare import Outcome
from stretto.observe.run_directory import METRICS
from stretto.observe.working import repeated
from stretto.saying import Advance, unseen

STOP_S = 30.0
"""Seconds that an interrupted run gets to end in order and save its model."""

WARMUP = "warmup.safetensors"
"""File with the result of a seed's warm-up, kept while runs with that seed are to come."""

LOOK_S = 0.5
"""Seconds between two looks how far a run is."""

_LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class Failure:
    """Message about a run that failed."""

    text: str


class Trainings:
    """The runs of a comparison, each a ``stretto train`` in a process of its own.

    Those with one seed have a folder in ``folder``, and share a warm-up.

    Args:
        config: the settings that all runs share.
        jobs: all of them, in the order in which they will be run.

    Attributes:
        folders: of the runs that took all their steps.
    """

    def __init__(self, config: Config, jobs: Iterable[Job], folder: Path) -> None:
        self.folders: dict[Job, Path] = {}
        self._config, self._folder = config, folder
        self._last = {job.seed: job for job in jobs}

    def run(self, job: Job, advance: Advance = unseen) -> Outcome | Failure:
        """Train to the end.

        What the run prints goes into a log beside its folder, as one that fails early leaves no
        folder.

        Raises:
            KeyboardInterrupt: of this process; the run has been ended in order, or killed.
        """
        out = self._folder / f"seed{job.seed}"
        found = _train(config_of(self._config, job, str(out)), job, out, advance)
        if job == self._last[job.seed]:
            (out / WARMUP).unlink(missing_ok=True)
        if isinstance(found, Failure):
            return found
        self.folders[job] = found
        return outcome_of(job, found)


def _train(config: Config, job: Job, out: Path, advance: Advance) -> Path | Failure:
    """Train a run; return its folder, or a message on how it failed."""
    out.mkdir(exist_ok=True)
    recipe, log = out / f"{job.variant}.toml", out / f"{job.variant}.log"
    recipe.write_text(recipes.dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "stretto", "train", str(recipe)]
    if config.warmup_examples:
        command += ["--warmup-file", str(out / WARMUP)]
    with repeated(_Steps(out, job.variant, advance).look, LOOK_S):
        status = run_command(command, log)
    if status:
        with log.open(encoding="utf-8", errors="replace") as lines:
            last = "".join(f"    {line}" for line in deque(lines, _LAST_LINES))
        return Failure(f"exit status {status}; the end of {log}:\n{last.rstrip()}")
    (folder,) = out.glob(f"{job.variant}-[0-9]*/")
    return folder


class _Steps:
    """The steps of a run in another process, by the records in its folder."""

    def __init__(self, out: Path, name: str, advance: Advance) -> None:
        self._out, self._name, self._advance = out, name, advance
        self._seen = 0

    def look(self) -> float:
        """Tell of new steps; return the seconds until the next look."""
        for file in self._out.glob(f"{self._name}-[0-9]*/{METRICS}"):
            last = records.last(file)
            steps = last["step"] if last else 0
            self._advance(steps - self._seen)
            self._seen = steps
        return LOOK_S


def run_command(command: Sequence[str], log: Path) -> int:
    """Run to the end, and return the exit status; Ctrl-C and what stands for it stop the command
    and are passed on. It ends with this process too, however that ends.
    """
    ours, theirs = os.pipe()  # nothing is said there: it closes when this process ends
    with os.fdopen(ours, "rb") as read, os.fdopen(theirs, "wb"), log.open("wb") as stream:
        # In a process group of its own: the terminal would send Ctrl-C to both, and the second
        # one, from here, would cut off what the run does to end in order.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=[read.fileno()],
            env={**os.environ, signals.PARENT: str(read.fileno())},
        )
        read.close()
        try:
            return process.wait()
        except BaseException:
            _stop(process)
            raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
