"""Runs beside what the simulator makes of their own records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.planner.prediction import Prediction


@dataclass(frozen=True, slots=True)
class Predicted:
    """A run's prediction, or why there is none.

    Attributes:
        prediction: its phases, measured and predicted; ``None`` for none.
        why: there is none, in one line.
    """

    prediction: Prediction | None
    why: str = ""

    def data(self) -> dict[str, Any]:
        """The same as plain data, for a page."""
        return self.prediction.data() if self.prediction else {"why": self.why}

    def text(self, name: str) -> str:
        """A small table, or the reason for none, in the terminal."""
        if self.prediction is None:
            return f"{name}: no prediction: {self.why}"
        title = f"{name}, measured and as the simulator predicts it from its own records"
        return f"{title} ({self.prediction.title}):\n{self.prediction.table()}"


def predicted(folders: Sequence[str | Path]) -> list[Predicted]:
    """Predict each run from its own records; one that recorded too little is told, not refused."""
    from stretto.planner.prediction import predict

    found = []
    for folder in folders:
        try:
            found.append(Predicted(predict(folder)))
        except StrettoError as error:
            found.append(Predicted(None, " ".join(str(error).split())))
    return found
