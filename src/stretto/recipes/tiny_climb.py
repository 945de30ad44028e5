"""The reward of the recipe 'tiny-climb'."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def right_share(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Share of correct numbers with letter and mark, of all in the response or the answer."""
    shares = []
    for text, right in zip(completions, answer, strict=True):
        given, wanted = _items(text), _items(right)
        shares.append(len(set(given) & set(wanted)) / max(len(given), len(wanted)))
    return shares


def _items(text: str) -> list[str]:
    return re.findall(r"\D*\d+|\D+$", text)
