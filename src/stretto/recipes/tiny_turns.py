"""The environment of the recipe 'tiny-turns'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Boxes:
    """Asks for a box, which the policy must open by its number, and then name its content."""

    def reset(self, *, options: Mapping[str, Any]) -> None:
        """Start with the row of the dataset."""
        self._box = options["answer"]
        self._holds = options["holds"]
        self._opened = False

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Return the content of the box, then whether it was named. Each is worth half a point."""
        if self._opened:
            return "", 0.5 * (action == self._holds), True, {}
        self._opened = action == self._box
        return self._holds if self._opened else "?", 0.5 * self._opened, not self._opened, {}
