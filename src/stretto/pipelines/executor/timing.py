"""Times of a rank's tasks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stretto.pipelines.executor.instructions import PipelineTask


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of a rank's tasks, in seconds from a start that all ranks share.

    Attributes:
        word: its tasks in order.
        asked: when the rank was free for each task, and began to wait for its input.
        start: when its input was there.
        end: when it was done.
    """

    word: tuple[PipelineTask, ...]
    asked: tuple[float, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]


class Stopwatch:
    """A recorder of this rank's moments; made on all ranks at once, which is their common start.

    Ranks share the machine's clock. On a GPU the moments are those of its stream, so that nothing
    has to wait for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        latest = torch.tensor(time.monotonic(), dtype=torch.float64, device=device)
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        self._zero = latest.item()
        self._moments: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._begin_s = 0.0
        if self._cuda:
            torch.cuda.synchronize(device)
            self.mark()
            self._begin_s = time.monotonic() - self._zero

    def mark(self) -> None:
        """Mark this moment."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._moments.append(time.monotonic() - self._zero)

    def timings(self, word: Sequence[PipelineTask]) -> Timings:
        """Make the timings from three marks a task: free for it, input there, done."""
        if self._cuda:
            begin = self._events[0]
            self._events[-1].synchronize()
            self._moments = [
                self._begin_s + begin.elapsed_time(event) / 1000 for event in self._events[1:]
            ]
        asked, start, end = (tuple(self._moments[k::3]) for k in range(3))
        return Timings(tuple(word), asked, start, end)
