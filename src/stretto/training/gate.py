"""Gates that let a model's weights be changed in place until the run ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from torch import nn

from stretto.errors import LearnerError

PATIENCE_S = 30.0
"""Seconds that the end of a run waits for an update that is under way."""


class Gate:
    """The gate that all changes of a model's weights in place go through, until it is closed.

    Attributes:
        agree: called with whether this gate is open, returns whether a change may begin; for
            ranks that hold parts of one model, of which all change or none.
    """

    def __init__(self) -> None:
        self._lock, self._closed, self._broken = Lock(), False, False
        self.agree: Callable[[bool], bool] = lambda is_open: is_open

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Change the weights in the body of a ``with`` statement.

        An error within it leaves them neither old nor new; the gate remembers that.

        Raises:
            LearnerError: the gate is closed.
        """
        with self._lock:
            if not self.agree(not self._closed):
                raise LearnerError("the run has ended, and with it all updates; start another")
            self._broken = True
            yield
            self._broken = False

    def close(self, patience_s: float) -> bool:
        """Let nothing through any more; return whether all changes so far are whole."""
        free = self._lock.acquire(timeout=patience_s)
        self._closed = True
        if free:
            self._lock.release()
        return free and not self._broken


_GATES: weakref.WeakKeyDictionary[nn.Module, Gate] = weakref.WeakKeyDictionary()


def new_gate(model: nn.Module) -> Gate:
    """Make the gate for the trainer that trains the model from now on."""
    gate = _GATES[model] = Gate()
    return gate


def end_updates(model: nn.Module, patience_s: float = PATIENCE_S) -> bool:
    """Let no update of a model begin any more, and wait for one under way; from any thread.

    Args:
        model: that is trained.
        patience_s: seconds to wait for that update.

    Returns:
        Whether the weights are whole, and stay as they are.
    """
    gate = _GATES.get(model)
    return gate is None or gate.close(patience_s)
