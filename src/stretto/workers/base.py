"""What all launchers of ranks share: calls and their answers, and what is said of a failure."""

from __future__ import annotations

import contextlib
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

from stretto.errors import RankError
from stretto.workers.preflight import Facts
from stretto.workers.rank import Done, Failed
from stretto.workers.side import SideClient

START = "its start"
PATIENCE_S = 2.0
"""Seconds to wait for what a rank that may hang says on the side."""
NO_WORDS: Mapping[str, str] = MappingProxyType({})
_LAST_LINES = 20
"""Lines of a rank's log that are shown when it has died."""


class BaseRanks(ABC):
    """Ranks that form a ``torch.distributed`` group; all end when one fails. One call at a time.

    A launcher starts them, with a side channel to each, carries messages and says how one ended.

    Attributes:
        remedy: what to do when one has failed and the cause is mended; for messages.
        facts: what each rank found at its place.

    Args:
        patience_s: after a rank raised, how long to look whether it did so because another died.
        role: the role of a process that is alone, for messages.
        words: plain words for the methods' work, for messages: nouns, by the method's name.
        logs: files for what each rank prints; empty without any.
    """

    def __init__(
        self,
        size: int,
        patience_s: float,
        role: str,
        words: Mapping[str, str],
        logs: Sequence[Path],
    ) -> None:
        self.remedy = "start again"
        self._size, self._patience_s, self._words = size, patience_s, words
        self._role, self._logs, self._closed = role, logs, False
        self._calling = Lock()
        self._died: RankError | None = None
        self._tell: Callable[[RankError], None] = lambda _: None
        self._sides: list[SideClient] = []
        self.facts: list[Facts] = []

    @abstractmethod
    def _send(self, rank: int, message: bytes) -> None:
        """Send a rank its next message; nothing if the rank is gone."""

    @abstractmethod
    def _awaited(self, ranks: Sequence[int]) -> dict[Any, int]:
        """Return what the ranks' answers come by, each with its rank."""

    @abstractmethod
    def _wait(self, handles: Sequence[Any], seconds: float | None) -> Sequence[Any]:
        """Wait for answers or ends; return the handles that have one, none after that time."""

    @abstractmethod
    def _read(self, rank: int, handle: Any) -> Done | Failed:
        """Return an answer.

        Raises:
            EOFError: the rank ended without one.
        """

    @abstractmethod
    def _how(self, rank: int) -> str:
        """Say how a rank ended, as in 'ended with exit code 3'."""

    @abstractmethod
    def _where(self, rank: int) -> str:
        """Say where a rank is, as in 'pid 17'."""

    @abstractmethod
    def _end(self) -> None:
        """End all ranks, at work or not; from any thread, any number of times."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on all ranks at once; return the results by rank.

        Raises:
            RankError: a rank failed, and all have been ended, or they had been before. What the
                rank raised is its ``__cause__``, where that was an error of Stretto; the traceback
                of any other is a note.
            PicklingError: an argument cannot be sent.
        """
        return self._call(method, repeat(pickled(method, args), self._size))

    def call_each(self, method: str, per_rank: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Call a method with arguments of its own for each rank, which are sent one by one."""
        return self._call(method, (pickled(method, args) for args in per_rank))

    def aside(self, rank: int, method: str, *args: Any, timeout_s: float = PATIENCE_S) -> Any:
        """Call a method of a rank while another is under way; see :class:`SideClient`."""
        side = self._sides[rank]
        try:
            return side.call(method, *args, timeout_s=timeout_s)
        except RankError as error:
            if not side.gone:
                raise
            raise self._died or self._death(rank, f"in the middle of '{method}'") from error

    def stacks(self) -> str:
        """Return what every thread of every rank is doing, for people; for those that answer."""
        parts = []
        for rank in range(len(self._sides)):
            who = f"{self._who(rank)} ({self._where(rank)})"
            try:
                parts.append(f"{who}:\n{self.aside(rank, 'stacks')}")
            except RankError as error:
                parts.append(f"{who}: {error}")
        return "\n\n".join(parts)

    def used_bytes(self) -> list[int]:
        """Return each rank's resident memory; 0 for one that does not answer."""
        used = []
        for rank in range(len(self._sides)):
            try:
                used.append(int(self.aside(rank, "used_bytes")))
            except RankError:
                used.append(0)
        return used

    def watch(self, tell: Callable[[RankError], None]) -> None:
        """Have the death of a rank between two calls told at once; the next call raises it too.

        Args:
            tell: called with the error when all have been ended; on a thread of its own.
        """
        self._tell = tell
        if self._died:
            tell(self._died)

    def close(self) -> None:
        """End all ranks, at work or not; from any thread, any number of times."""
        self._closed = True
        self._end()
        for side in self._sides:
            side.close()

    def _call(self, method: str, messages: Iterable[bytes]) -> list[Any]:
        with self._calling:
            if self._closed:
                raise self._died or RankError("the ranks have been ended; start new ones")
            try:
                sent = 0
                for sent, message in enumerate(messages, 1):
                    self._send(sent - 1, message)
                return self._answers(self._words.get(method, f"'{method}'"), range(sent))
            except BaseException:  # Ctrl-C too: ranks in the middle of work are of no more use
                self.close()
                raise

    def _answers(
        self, doing: str, ranks: Sequence[int], timeout_s: float | None = None
    ) -> list[Any]:
        """Wait for an answer of each, or for a failure of any rank."""
        silent = self._awaited(ranks)
        if self._closed:
            raise RankError("the ranks have been ended; start new ones")
        results: dict[int, Any] = {}
        raised: list[tuple[int, Failed]] = []
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while silent:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            ready = self._wait(list(silent), left_s)
            for handle in ready:
                rank = silent.pop(handle)
                try:
                    answer = self._read(rank, handle)
                except EOFError:
                    raise self._death(rank, f"in the middle of {doing}", raised) from None
                if isinstance(answer, Done):
                    results[rank] = answer.result
                else:
                    raised.append((rank, answer))
                    until_s = until_s if raised[1:] else time.monotonic() + self._patience_s
            if not ready:
                break
        if raised:
            raise self._failure(*_first(raised), doing)
        if silent:
            raise self._silence(sorted(silent.values()), doing, timeout_s)
        return [results[rank] for rank in ranks]

    def _failure(self, rank: int, failed: Failed, doing: str) -> RankError:
        error = self._error(rank, f"failed in {doing}: {failed.what}")
        _explain(error, rank, failed)
        return error

    def _silence(self, ranks: Sequence[int], doing: str, timeout_s: float | None) -> RankError:
        listed = ", ".join(map(str, ranks))
        error = self._error(ranks[0], f"did not come to the end of {doing} in {timeout_s:g} s")
        error.add_note(f"Silent: rank {listed}.\n{self.stacks()}")
        return error

    def _death(self, rank: int, when: str, raised: Sequence[tuple[int, Failed]] = ()) -> RankError:
        """Return the error of a rank that closed its end without an answer.

        Args:
            rank: the one that ended.
            when: in words, for the message.
            raised: errors of others by then; maybe the cause, maybe a consequence.
        """
        if self._closed:
            return RankError(f"the ranks were ended {when}")
        how = self._how(rank)
        if not raised:
            error = self._error(rank, f"{how} {when}")
            for note in self._notes(rank):
                error.add_note(note)
            return error
        other, failed = _first(raised)
        error = self._error(rank, f"{how} {when}; rank {other} had raised: {failed.what}")
        _explain(error, other, failed)
        return error

    def _error(self, rank: int, what: str) -> RankError:
        ended = "" if self._role else ". All ranks have been ended"
        return RankError(
            f"{self._who(rank)} {what}{ended}; mend the cause, and {self.remedy}", rank
        )

    def _who(self, rank: int) -> str:
        if not self._role:
            return f"rank {rank} of {self._size}"
        of = f"rank {rank} of " if self._size > 1 else "the process of "
        return f"{of}the {self._role}"

    def _notes(self, rank: int) -> Iterator[str]:
        if self._logs:
            with contextlib.suppress(OSError):
                lines = self._logs[rank].read_text(errors="replace").splitlines(True)[-_LAST_LINES:]
                if lines:
                    yield f"The end of {self._logs[rank]}:\n{''.join(lines)}"

    def _has_ended(self, rank: int) -> None:
        """Tell of a rank that ended between two calls; a call under way finds out by itself."""
        with self._calling:
            if self._closed:
                return
            self._died = error = self._death(rank, "between two calls")
            self.close()
        self._tell(error)


def pickled(what: object, args: tuple[Any, ...]) -> bytes:
    """Return a method or function with its arguments, as they are sent.

    Raises:
        PicklingError: they cannot be sent.
    """
    try:
        return pickle.dumps((what, args))
    except (AttributeError, TypeError) as error:  # of local functions, and of locks and the like
        raise pickle.PicklingError(str(error)) from error


def _first(raised: Sequence[tuple[int, Failed]]) -> tuple[int, Failed]:
    return min(raised, key=lambda each: each[1].at_s)


def _explain(error: RankError, rank: int, failed: Failed) -> None:
    error.__cause__ = failed.error
    if failed.error is None:
        error.add_note(f"On rank {rank}:\n{failed.trace}")
