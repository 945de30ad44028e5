"""The errors that Stretto raises on purpose, in one tree.

::

    StrettoError
    ├── ConfigError            a setting is unknown, out of range, or contradicts another
    │   └── RuleError              ... as a validator of the settings finds
    ├── MissingExtraError      an optional library is needed; names the extra to install
    ├── ModelError             a model cannot be found, fetched, loaded or driven
    ├── OutOfMemoryError       the memory of the machine or of a GPU is used up
    ├── TaskError              a dataset cannot be read, or lacks a column
    ├── RewardError            a reward source failed on a sample (carries the samples)
    ├── EngineError            the generation engine was asked for what it cannot do
    ├── TransferError          weights or keys and values did not arrive; they may be sent again
    ├── LearnerError           training found its own numbers wrong
    ├── StateError             saved state is damaged, or does not fit what it is put back into
    ├── StorageError           a file cannot be written, or a folder is in use
    ├── RankError              a process that works for a run failed, and its group with it
    │   └── RoleLostError      ... and with it a role, which may be started again
    ├── StalledError           a role did not answer in time, or everyone waits for everyone
    └── LifecycleError         a rollout or a role was moved along an edge that does not exist

Each message says the rule, the value that broke it, and the remedy. The command line prints the
message alone (and before it the traceback of a rank's bug, a note of :class:`RankError`) and exits
with status 2; anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec

from stretto.extras import remedy


class StrettoError(Exception):
    """Base of every error raised on purpose.

    Attributes:
        code: names the rule that was broken, for programs; the message may be reworded.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class ConfigError(StrettoError):
    """A setting is unknown, out of range, or contradicts another."""


class RuleError(ConfigError, ValueError):
    """Settings contradict each other; pydantic collects it, as it does any ``ValueError``."""


class MissingExtraError(StrettoError):
    """An optional library is needed and not installed."""

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        self._parts = library, extra, purpose
        super().__init__(
            f"{purpose} needs the library '{library}', which is not installed. "
            f"Install it with: {remedy(extra)}",
            "missing-library",
        )

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str]]:
        """Be made of the same parts where it comes out of a pickle."""
        return type(self), self._parts


class ModelError(StrettoError):
    """A model cannot be found, fetched, loaded or driven."""


class OutOfMemoryError(StrettoError):
    """The memory of the machine or of a GPU is used up."""


class TaskError(StrettoError):
    """A dataset cannot be read, or lacks what the task needs."""


class RewardError(StrettoError):
    """A reward source failed on at least one sample.

    Attributes:
        rollout_ids: the rollouts whose samples could not be scored.
    """

    def __init__(self, message: str, rollout_ids: Iterable[int] = (), code: str = "") -> None:
        super().__init__(message, code)
        self.rollout_ids = tuple(rollout_ids)


class JudgeError(StrettoError):
    """An LLM judge gave no verdict."""


class EngineError(StrettoError):
    """The generation engine was asked for what it cannot do."""


class TransferError(StrettoError):
    """Tensors did not arrive in time, or one side of their transfer is gone."""


class LearnerError(StrettoError):
    """Training found its own numbers wrong, and stops rather than learn from them."""


class StateError(StrettoError):
    """Saved state is damaged, or does not fit the component it is put back into."""


class StorageError(StrettoError):
    """A file cannot be written, as on a full disk, or another process is at work in a folder."""


class RankError(StrettoError):
    """A process that holds a part of the models failed; all of them have been ended.

    Where the process raised an error of Stretto, that is the ``__cause__``; of any other error a
    note has the traceback.

    Attributes:
        rank: the one that failed first, or ``None`` where none did.
    """

    def __init__(self, message: str, rank: int | None = None, code: str = "") -> None:
        super().__init__(message, code)
        self.rank = rank


class RoleLostError(RankError):
    """A process that works for a role has died, hung, or raised what it cannot survive.

    Where the run allows restarts, another one is started in its place.

    Attributes:
        role: its name.
    """

    def __init__(self, role: str, cause: str, code: str = "") -> None:
        super().__init__(f"{role} was lost: {cause}", code=code)
        self.args = role, cause  # both, so that the error can be pickled
        self.role, self._message = role, f"{role} was lost: {cause}"

    def __str__(self) -> str:
        return self._message


class StalledError(StrettoError):
    """A role did not answer within its deadline, or everyone waits for everyone.

    Attributes:
        rollout_ids: the rollouts that were waited for.
    """

    def __init__(self, message: str, rollout_ids: Iterable[int] = (), code: str = "") -> None:
        super().__init__(message, code)
        self.rollout_ids = tuple(rollout_ids)


class LifecycleError(StrettoError):
    """A rollout or a role was moved along an edge that its life does not have."""


_MEMORY_IS_SHORT = re.compile(r"DefaultCPUAllocator|[Cc]an('t|not) allocate memory|out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, of torch's or Python's, says that memory is used up."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_MEMORY_IS_SHORT.search(str(error)))


def is_installed(library: str) -> bool:
    """Return whether a library, by the name under which it is imported, is installed."""
    if sys.modules.get(library) is not None:
        return True
    found = find_spec(library)
    return bool(found and found.origin)  # a folder of that name, such as ./wandb, has no origin


def require(library: str, extra: str, purpose: str) -> None:
    """Make sure that an optional library is installed.

    Args:
        library: by the name under which it is imported.
        extra: asks for it.
        purpose: of the library, as the subject of a message.

    Raises:
        MissingExtraError: it is not.
    """
    if not is_installed(library):
        raise MissingExtraError(library, extra, purpose)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's message, to be quoted within a line."""
    return str(error).strip().partition("\n")[0]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence that helps with an unknown name: the closest known one, or all of them."""
    known = sorted(known)
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(known)}."
