"""Errors that Stretto raises on purpose, and the check for optional libraries.

Each message states the rule, the value that broke it, and the remedy. The command line prints only
the message (after the traceback of a rank's bug, a note of :class:`RankError`) and exits with
status 2. Any other escaping error is a bug and keeps its traceback.
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
"""In a clone: the file with Stretto's requirements."""


class StrettoError(Exception):
    """Base of every error raised on purpose. Programs can rely on ``code``, which names the broken
    rule. Messages may be reworded.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class ConfigError(StrettoError):
    """A setting is unknown, out of range, or contradicts another."""


class RuleError(ConfigError, ValueError):
    """Settings contradict each other. Pydantic collects it like any ``ValueError``."""


class MissingExtraError(StrettoError):
    """An optional library is not installed. The message names the extra to install."""

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
    """A model cannot be found, fetched, loaded or run."""


class OutOfMemoryError(StrettoError):
    """The memory of the machine or of a GPU is used up."""


class TaskError(StrettoError):
    """A dataset cannot be read, or lacks something that the task needs."""


class _RolloutsError(StrettoError):
    def __init__(self, message: str, rollout_ids: Iterable[int] = (), code: str = "") -> None:
        super().__init__(message, code)
        self.rollout_ids = tuple(rollout_ids)


class RewardError(_RolloutsError):
    """A reward source failed on the samples ``rollout_ids``."""


class JudgeError(StrettoError):
    """An LLM judge gave no verdict."""


class EngineError(StrettoError):
    """The generation engine cannot do what was requested."""


class TransferError(StrettoError):
    """Tensors did not arrive in time, or one side is gone. They may be sent again."""


class LearnerError(StrettoError):
    """Training found invalid numbers, and stops before learning from them."""


class StateError(StrettoError):
    """Saved state is damaged, or does not fit the component that loads it."""


class StorageError(StrettoError):
    """A file cannot be written, for example on a full disk, or another process uses a folder."""


class RankError(StrettoError):
    """A process that holds a part of the models failed. All of them have been ended.

    An error of Stretto's in the process is the ``__cause__``. For other errors a note has the
    traceback. ``rank`` is the first to fail, ``None`` if none did.
    """

    def __init__(self, message: str, rank: int | None = None, code: str = "") -> None:
        super().__init__(message, code)
        self.rank = rank


class RoleLostError(RankError):
    """A process of ``role`` died, hung, or raised a fatal error. Restarted if the run allows it."""

    def __init__(self, role: str, cause: str, code: str = "") -> None:
        super().__init__(f"{role} was lost: {cause}", code=code)
        self.args = role, cause  # both, so that the error can be pickled
        self.role = role

    def __str__(self) -> str:
        return " was lost: ".join(self.args)


class EpisodeLostError(_RolloutsError):
    """Episodes ``rollout_ids`` cannot continue: their environment was lost and is not replayed."""


class StalledError(_RolloutsError):
    """A role did not answer in time about ``rollout_ids``, or all roles wait for each other."""


class LifecycleError(StrettoError):
    """A rollout or role made a state transition that does not exist."""


_MEMORY_IS_SHORT = re.compile(r"DefaultCPUAllocator|[Cc]an('t|not) allocate memory|out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch or Python means that memory is used up."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_MEMORY_IS_SHORT.search(str(error)))


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


ADVICE = "; fix the cause"  # begins the advice in the text of a RankError


def without_advice(text: str) -> str:
    """Return the text of a RankError for a run that restarts the process by itself."""
    return text.partition(ADVICE)[0]


MANY = 30  # with more names than this, a message lists none


def near(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return known names that ``name`` may be a misspelling of, the most similar first.

    Case and kinds of dashes are ignored. Numbers must match: b200 and h200, or k9 and k1, are
    different things instead of misspellings.
    """
    spellings = {_plain_spelling(candidate): candidate for candidate in sorted(known)}
    spelling = _plain_spelling(name)
    similar = [candidate for candidate in spellings if _same_thing(spelling, candidate)]
    # Another letter of three makes another word: dpo is not ppo, gpu is not cpu.
    cutoff = 0.7 if len(spelling) == 3 else 0.6
    matches = get_close_matches(spelling, similar, n=count, cutoff=cutoff)
    return [spellings[candidate] for candidate in matches]


def _plain_spelling(name: str) -> str:
    return name.lower().replace("-", "_")


def _same_thing(first: str, second: str) -> bool:
    numbers = [set(re.findall(r"\d+", text)) for text in (first, second)]
    if not (numbers[0] <= numbers[1] or numbers[1] <= numbers[0]):
        return False
    if not all(numbers):
        return True
    letters = [re.sub(r"[\d\W_]", "", text) for text in (first, second)]
    return letters == ["", ""] or bool(get_close_matches(letters[0], letters[1:], cutoff=0.6))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the most similar known one, or all unless too many."""
    known = sorted(known)
    if matches := near(name, known):
        return f"Did you mean '{matches[0]}'?"
    if len(known) > MANY:
        return f"None of the {len(known)} known names is similar."
    return f"Known: {', '.join(known)}."


def is_installed(library: str) -> bool:
    """Return whether a library is installed, by its import name."""
    if sys.modules.get(library) is not None:
        return True
    spec = find_spec(library)
    return bool(spec and spec.origin)  # a folder of that name, for example ./wandb, has no origin


def require(library: str, extra: str, purpose: str) -> None:
    """Raise MissingExtraError if a library (by import name) is missing. ``purpose`` needs it."""
    if not is_installed(library):
        raise MissingExtraError(library, extra, purpose)


def requirements(extra: str = "") -> list[Requirement]:
    """Return the requirements of the package, or those that an extra adds, sorted by name."""
    from packaging.requirements import Requirement

    declared = [Requirement(text) for text in _declared()[0]]
    matches = [r for r in declared if _asks_for(r, extra) and not (extra and _asks_for(r, ""))]
    return sorted(matches, key=lambda r: r.name.lower())


def extras() -> list[str]:
    return [name for name in _declared()[1] if name != "dev"]


def _declared() -> tuple[list[str], list[str]]:
    """Return requirements and extras as installed, or of a source tree, or empty without both."""
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
    return f"'{requirement.name}{requirement.specifier}'"


def remedy(extra: str) -> str:
    """Return the commands that install an extra.

    The first one names the libraries themselves, so that it works for a clone and for the file of a
    wheel. Stretto is on no package index.
    """
    clone = f"pip install -e '.[{extra}]'"
    if extra in ("mlflow", "trackio", "swanlab"):  # any version will do
        return f"pip install {extra}"
    libraries = " ".join(map(plain, requirements(extra)))
    return f"pip install {libraries} (or, in a clone of Stretto: {clone})" if libraries else clone
