"""``TrainerCallback`` objects of transformers, told of the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from stretto.errors import StrettoError
from stretto.observe import Progress, Sample
from stretto.saying import Advance

if TYPE_CHECKING:
    from stretto.trl.config import PPOConfig


class StopTrainingError(StrettoError):
    """Error that ends training, as a callback has asked for it."""


class CallbackProgress(Progress):
    """A display that also tells callbacks: of the beginning, of each step with its figures, and of
    the end. A callback that sets ``control.should_training_stop`` ends the run after the step.

    Args:
        objects: what callbacks get besides, by the names that transformers gives them.
    """

    def __init__(
        self,
        display: Progress,
        args: PPOConfig,
        callbacks: Sequence[Any],
        steps: int,
        episodes: int,
        **objects: Any,
    ) -> None:
        from transformers import TrainerControl, TrainerState

        self._display, self._args, self._callbacks = display, args, callbacks
        self._episodes, self._objects = episodes, objects
        self.state, self._control = TrainerState(), TrainerControl()
        self.state.max_steps = steps

    def start(self, headline: str) -> None:
        """Show what will run."""
        self._display.start(headline)
        self._call("on_train_begin")

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Show a step, and tell the callbacks.

        Raises:
            StopTrainingError: one of them wants no more.
        """
        self._display.step(step, total, stats, samples)
        self.state.global_step = step
        logs = {**stats, "episode": step * self._episodes}
        self.state.log_history.append({**logs, "step": step})
        self._call("on_log", logs=logs)
        self._call("on_step_end")
        if self._control.should_training_stop:
            raise StopTrainingError(f"a callback ended training after step {step}")

    def note(self, text: str) -> None:
        """Show a message."""
        self._display.note(text)

    def working(self, what: str, total: int = 0) -> AbstractContextManager[Advance]:
        """Show work."""
        return self._display.working(what, total)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._display.close()

    def end(self) -> None:
        """Tell the callbacks that training has ended."""
        self._call("on_train_end")

    def _call(self, event: str, **more: Any) -> None:
        for callback in self._callbacks:
            answer = getattr(callback, event)(
                self._args, self.state, self._control, **self._objects, **more
            )
            self._control = answer or self._control
