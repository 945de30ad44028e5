"""A reward function in this process, for functions that exist as objects only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stretto.errors import ConfigError
from stretto.scoring.conventions import recognise


class LocalFunction:
    """A function called here, with the methods of
    :class:`~stretto.workers.function.FunctionProcess`.

    Args:
        function: in TRL's, verl's or OpenRLHF's convention.

    Raises:
        ConfigError: its signature is not known.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        try:
            file = inspect.getsourcefile(function) or "Python"
        except TypeError:  # an object that can be called has no source of its own
            file = "Python"
        try:
            self._function = recognise(function, file, name)
        except (TypeError, ValueError) as error:  # some that are written in C do not tell
            raise ConfigError(
                f"reward.sources: '{name}' does not tell the names of its parameters ({error}); "
                "wrap it in a Python function of completions"
            ) from error

    def start(self) -> Mapping[str, Any]:
        """Return the columns that the function looks at, and those it cannot do without."""
        return {"columns": self._function.columns, "required": self._function.required}

    def ask(
        self, samples: Sequence[Mapping[str, Any]], timeout_s: float
    ) -> tuple[list[Mapping[str, Any]], str | None]:
        """Return verdicts on samples, and the error that concerns all of them, if any.

        ``timeout_s`` is ignored: nothing ends a call in one's own process.
        """
        answers: list[Mapping[str, Any]] = []
        trouble = self._function.run(samples, answers.append)
        return answers, trouble

    def close(self) -> None:
        """Do nothing: there is no process to end."""
