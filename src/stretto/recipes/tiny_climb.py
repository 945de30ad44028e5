"""The reward of the recipe 'tiny-climb'."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def right_share(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Numbers with the right letter and mark, of those that a response has or should have."""
    shares = []
    for text, right in zip(completions, answer, strict=True):
        given, wanted = _items(text), _items(right)
        shares.append(len(set(given) & set(wanted)) / max(len(given), len(wanted)))
    return shares


def _items(text: str) -> list[str]:
    return re.findall(r"\D*\d+|\D+$", text)
