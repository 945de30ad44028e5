"""The errors that Stretto raises on purpose, in one tree, and the libraries that it can do without.

Each message says the rule, the value that broke it, and the remedy. The command line prints the
message alone (and before it the traceback of a rank's bug, a note of :class:`RankError`) and exits
with status 2; anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
"""In a clone: the file that lists what Stretto requires."""


class StrettoError(Exception):
    """Base of every error raised on purpose.

    For programs, ``code`` names the rule that was broken; the message may be reworded.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class ConfigError(StrettoError):
    """A setting is unknown, out of range, or contradicts another."""


class RuleError(ConfigError, ValueError):
    """Settings contradict each other; pydantic collects it, as it does any ``ValueError``."""


class MissingExtraError(StrettoError):
    """An optional library is needed and not installed; the message names the extra to install."""

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        self._parts = library, extra, purpose
        super().__init__(
            f"{purpose} needs the library '{library}', which is not installed. "
            f"Install it with: {remedy(extra)}",
            "missing-library",
        )

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str]]:
        return type(self), self._parts


class ModelError(StrettoError):
    """A model cannot be found, fetched, loaded or driven."""


class OutOfMemoryError(StrettoError):
    """The memory of the machine or of a GPU is used up."""


class TaskError(StrettoError):
    """A dataset cannot be read, or lacks what the task needs."""


class _RolloutsError(StrettoError):
    def __init__(self, message: str, rollout_ids: Iterable[int] = (), code: str = "") -> None:
        super().__init__(message, code)
        self.rollout_ids = tuple(rollout_ids)


class RewardError(_RolloutsError):
    """A reward source failed on samples, those of ``rollout_ids``."""


class JudgeError(StrettoError):
    """An LLM judge gave no verdict."""


class EngineError(StrettoError):
    """The generation engine was asked for what it cannot do."""


class TransferError(StrettoError):
    """Tensors did not arrive in time, or one side is gone; they may be sent again."""


class LearnerError(StrettoError):
    """Training found its own numbers wrong, and stops rather than learn from them."""


class StateError(StrettoError):
    """Saved state is damaged, or does not fit the component it is put back into."""


class StorageError(StrettoError):
    """A file cannot be written, as on a full disk, or another process is at work in a folder."""


class RankError(StrettoError):
    """A process that holds a part of the models failed; all of them have been ended.

    Where the process raised an error of Stretto, that is the ``__cause__``; of any other error a
    note has the traceback. ``rank`` failed first; it is ``None`` where none did.
    """

    def __init__(self, message: str, rank: int | None = None, code: str = "") -> None:
        super().__init__(message, code)
        self.rank = rank


class RoleLostError(RankError):
    """A process that works for ``role`` has died, hung, or raised what it cannot survive.

    Where the run allows restarts, another one is started in its place.
    """

    def __init__(self, role: str, cause: str, code: str = "") -> None:
        super().__init__(f"{role} was lost: {cause}", code=code)
        self.args = role, cause  # both, so that the error can be pickled
        self.role = role

    def __str__(self) -> str:
        return " was lost: ".join(self.args)


class EpisodeLostError(_RolloutsError):
    """Episodes of ``rollout_ids`` cannot go on: their environment was lost and is not replayed."""


class StalledError(_RolloutsError):
    """A role did not answer in time about ``rollout_ids``, or all roles wait for each other."""


class LifecycleError(StrettoError):
    """A rollout or a role was moved along an edge that its life does not have."""


_MEMORY_IS_SHORT = re.compile(r"DefaultCPUAllocator|[Cc]an('t|not) allocate memory|out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, of torch's or Python's, says that memory is used up."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_MEMORY_IS_SHORT.search(str(error)))


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


MANY = 30
"""Names that are too many for a message; none of them is listed then."""


def near(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return known names that ``name`` may be a misspelling of, the most similar first.

    Case and the kind of dashes make no difference. Numbers do: b200 and h200, or k9 and k1, are
    different things rather than misspellings of one.
    """
    spellings = {_plain_spelling(each): each for each in sorted(known)}
    wanted = _plain_spelling(name)
    similar = [each for each in spellings if _same_thing(wanted, each)]
    # One other letter of three is another word: dpo is not ppo, nor gpu cpu.
    cutoff = 0.7 if len(wanted) == 3 else 0.6
    matches = get_close_matches(wanted, similar, n=count, cutoff=cutoff)
    return [spellings[each] for each in matches]


def _plain_spelling(name: str) -> str:
    return name.lower().replace("-", "_")


def _same_thing(first: str, second: str) -> bool:
    numbers = [set(re.findall(r"\d+", each)) for each in (first, second)]
    if not (numbers[0] <= numbers[1] or numbers[1] <= numbers[0]):
        return False
    if not all(numbers):
        return True
    letters = [re.sub(r"[\d\W_]", "", each) for each in (first, second)]
    return letters == ["", ""] or bool(get_close_matches(letters[0], letters[1:], cutoff=0.6))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence that helps with an unknown name: the closest known one, or all of them
    unless they are too many to read.
    """
    known = sorted(known)
    if matches := near(name, known):
        return f"Did you mean '{matches[0]}'?"
    if len(known) > MANY:
        return f"None of the {len(known)} known names is similar."
    return f"Known: {', '.join(known)}."


def is_installed(library: str) -> bool:
    """Return whether a library, by the name under which it is imported, is installed."""
    if sys.modules.get(library) is not None:
        return True
    found = find_spec(library)
    return bool(found and found.origin)  # a folder of that name, such as ./wandb, has no origin


def require(library: str, extra: str, purpose: str) -> None:
    """Raise MissingExtraError if an optional library, by its name in imports, is not installed.

    ``extra`` asks for it; ``purpose`` is the subject of the message.
    """
    if not is_installed(library):
        raise MissingExtraError(library, extra, purpose)


def requirements(extra: str = "") -> list[Requirement]:
    """Return what the package requires, or what an extra adds to that; by name."""
    from packaging.requirements import Requirement

    declared = [Requirement(text) for text in _declared()[0]]
    chosen = [r for r in declared if _asks_for(r, extra) and not (extra and _asks_for(r, ""))]
    return sorted(chosen, key=lambda r: r.name.lower())


def extras() -> list[str]:
    """Return the names of the extras that users install."""
    return [name for name in _declared()[1] if name != "dev"]


def _declared() -> tuple[list[str], list[str]]:
    """Return requirements and extras: the installed distribution's, or those of pyproject.toml if
    Stretto runs from its source; without both, nothing.
    """
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        extras = metadata.metadata("stretto").get_all("Provides-Extra")
        return metadata.requires("stretto") or [], extras or []
    try:
        project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    except FileNotFoundError:
        return [], []
    optional = project["optional-dependencies"]
    added = [f"{r}; extra == '{extra}'" for extra, listed in optional.items() for r in listed]
    return project["dependencies"] + added, list(optional)


def _asks_for(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def plain(requirement: Requirement) -> str:
    """Return a requirement as pip takes it on a command line."""
    return f"'{requirement.name}{requirement.specifier}'"


def remedy(extra: str) -> str:
    """Return the commands that install what an extra asks for.

    The first names the libraries themselves, and so is right wherever Stretto was installed from:
    a clone, or the file of a wheel. Stretto is on no package index.
    """
    clone = f"pip install -e '.[{extra}]'"
    if extra in ("mlflow", "trackio", "swanlab"):  # of which no version is needed
        return f"pip install {extra}"
    libraries = " ".join(map(plain, requirements(extra)))
    return f"pip install {libraries} (or, in a clone of Stretto: {clone})" if libraries else clone
