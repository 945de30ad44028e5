"""The protocol of a run that has been put together, for those who take its steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stretto.observe.spans import Spans
    from stretto.runtime.state import Staged
    from stretto.schedules.schedule import Schedule
    from stretto.tasks.prompts import PromptSource


class Running(Protocol):
    """A run that has been put together, wherever its parts are.

    Attributes:
        schedule: takes its steps.
        prompts: the source of its prompts.
        tokenizer: the actor's.
        spans: the records of who worked on what, and when.
    """

    @property
    def schedule(self) -> Schedule: ...
    @property
    def prompts(self) -> PromptSource: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def spans(self) -> Spans: ...

    async def stage(self, *, copy: bool = True) -> Staged:
        """Take all that changes during the run, in the form of :mod:`stretto.runtime.state`.

        To be called between two steps, while the schedule's ``weights_lock`` is held. What is
        returned writes it while this event loop runs.

        Args:
            copy: what training changes, so that it may go on while files are written; there is no
                copy where memory is short.
        """
        ...

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state that :meth:`stage` wrote, maybe on another runtime.

        Args:
            state: what is in ``driver.pt``, and the path of the learner's, by their names.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return the runtime's own metrics, as they are after a step."""
        ...

    def stacks(self) -> str:
        """Return what every thread of every process of the run is doing, for people."""
        ...

    def save(self, folder: Path) -> None:
        """Write the trained model, whole or not at all."""
        ...

    def halt(self) -> bool:
        """End all work, after an error; return whether the actor's weights are whole."""
        ...
