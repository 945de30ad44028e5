"""Ranks that fail; in a file of its own, which imports little."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from stretto.errors import LearnerError


class SlowError(ValueError):
    """Takes its time to be told."""

    def __str__(self) -> str:
        time.sleep(0.4)
        return super().__str__()


class Misbehaving:
    """Fails in every way that a rank can."""

    def __init__(self, rank: int, greeting: str) -> None:
        self.rank, self.greeting = rank, greeting
        self.hangs = threading.Event()

    def greet(self, name: str) -> str:
        return f"{self.greeting} {name}, from {self.rank}"

    def pid(self) -> int:
        return os.getpid()

    def threads(self) -> int:
        return torch.get_num_threads()

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def take(self, what: object) -> None:
        """Something."""

    def total(self, number: int) -> float:
        value = torch.tensor(float(number))
        dist.all_reduce(value)
        return value.item()

    def fail(self, how: str, rank: int) -> None:
        """On one rank; the others wait for a tensor from it."""
        dist.barrier()
        if self.rank == rank:
            if how == "raise":
                raise ValueError("no such luck")
            if how == "own":
                raise LearnerError("the loss is not finite")
            if how == "exit":
                os._exit(3)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            dist.recv(torch.zeros(1), rank)

    def late(self) -> None:
        """Both raise; rank 0, which does so later, is heard first."""
        if self.rank == 0:
            time.sleep(0.2)
            raise ValueError("late on rank 0")
        raise SlowError("early on rank 1")

    def both(self) -> None:
        """Rank 0 raises, and rank 1 dies a little later."""
        if self.rank == 0:
            raise ValueError("the true cause")
        time.sleep(0.4)
        os.abort()

    def hang(self) -> None:
        self.hangs.set()
        threading.Event().wait(1000)

    def hanging(self) -> bool:
        return self.hangs.wait(60)
