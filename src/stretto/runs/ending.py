"""The end of a run: the model is saved, however the end comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from stretto import signals
from stretto.errors import StrettoError, first_line, is_out_of_memory


class StoppedError(StrettoError):
    """The run ends in order after a step, before its last one; the message says why."""


@contextmanager
def saved_at_the_end(
    folder: Path,
    save: Callable[[], None],
    learned: Callable[[], str],
    halt: Callable[[], bool],
    note: Callable[[str], None],
    checkpoint: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Save the model when the ``with`` statement ends, by itself, by an error or an interruption.

    StoppedError ends the work like any error, and goes no further.

    A signal that comes while the model is being saved waits until it is; a second one, or one
    after Ctrl-C, does not wait. The interruption or the error goes on, once a line has reported
    where the model is, or why it was not saved.

    Args:
        folder: of the model, for that line.
        save: the model, in one step: whole or not at all.
        learned: how far training has come ("step 12"); empty where nothing is worth saving.
        halt: stops all that could still change the weights; returns whether they are whole.
        checkpoint: writes one after the model, if the work was stopped by an error or a signal.
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
    """Return whether the weights are whole and have learned something."""
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
