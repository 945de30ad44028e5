"""Saves the model at the end of a run, after success, an error or an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from stretto import signals
from stretto.errors import StrettoError, first_line, is_out_of_memory


class StoppedError(StrettoError):
    """Ends the run in order after a step that is not its last. The message says why."""


@contextmanager
def saved_at_the_end(
    folder: Path,
    save: Callable[[], None],
    learned: Callable[[], str],
    halt: Callable[[], bool],
    note: Callable[[str], None],
    checkpoint: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Save the model when the ``with`` block ends, also by an error or an interruption.

    - StoppedError ends the block like an error but is not raised further.
    - A signal during saving waits for it. A second one, or one after Ctrl-C, does not wait.
    - An interruption or error is raised again, after a line that says where the model is or why it
      was not saved.

    Args:
        folder: the model's folder, for that line.
        save: saves the model completely or not at all.
        learned: training progress ("step 12"), empty if there is nothing to save.
        halt: stops everything that could change the weights. Returns whether they are intact.
        checkpoint: writes one after the model, if an error or a signal stopped the block.
    """

    def show(line: str) -> None:
        with suppress(OSError, ValueError):
            note(line)

    saving = False
    try:
        try:
            yield
        except StoppedError as reason:
            show(f"stopped after {learned()}: {reason}")
            halt()
        with signals.held():
            saving = True
            save()
    except BaseException as error:
        if not saving:
            interrupted = isinstance(error, KeyboardInterrupt)
            why = "" if interrupted else f" ({_described(error)})"
            with nullcontext() if interrupted else signals.held():
                if _stop(folder, save, learned(), halt, why, show) and checkpoint:
                    _write(checkpoint, show)
        raise


def _write(checkpoint: Callable[[], None], show: Callable[[str], None]) -> None:
    try:
        checkpoint()
    except Exception as error:
        show(f"no checkpoint is written: {_described(error)}")


def _stop(
    folder: Path,
    save: Callable[[], None],
    learned: str,
    halt: Callable[[], bool],
    why: str,
    show: Callable[[str], None],
) -> bool:
    """Save the model. Return whether the weights are intact and were trained."""
    if not learned:
        halt()
        return False
    show(f"stopped after {learned}{why}; saving the model as it is now")
    if not halt():
        show("the model is not saved, as an update of its weights was broken off half-way")
        return False
    try:
        save()
    except Exception as error:
        show(f"the model is not saved: {_described(error)}")
    else:
        show(f"the model is saved in {folder}")
    return True


def _described(error: BaseException) -> str:
    if is_out_of_memory(error) or is_out_of_memory(error.__cause__ or error):
        return "out of memory"
    text = first_line(error)
    if isinstance(error, StrettoError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
