"""The environment of the recipe 'tiny-turns'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Boxes:
    """A box is asked for; the policy opens it by its number, and then says what was in it."""

    def reset(self, *, options: Mapping[str, Any]) -> None:
        """Begin, with the row of the dataset."""
        self._box, self._holds, self._opened = options["answer"], options["holds"], False

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Return what the box holds, then whether that was said; a half point for either."""
        if self._opened:
            return "", 0.5 * (action == self._holds), True, {}
        self._opened = action == self._box
        return self._holds if self._opened else "?", 0.5 * self._opened, not self._opened, {}
