"""The protocol of a run that has been put together, for those who take its steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stretto.observe.spans import Spans
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

    async def state_dict(self) -> dict[str, Any]:
        """Return all that changes during the run; to be called between two steps."""
        ...

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        ...

    def save(self, folder: Path) -> None:
        """Write the trained model, whole or not at all."""
        ...

    def halt(self) -> bool:
        """End all work, after an error; return whether the actor's weights are whole."""
        ...
