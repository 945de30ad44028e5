"""The reward of the recipe 'tiny-tail'."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any


def right_share(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Length of each response's correct prefix, relative to the longer of answer and response."""
    return [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, right, strict=False)))
        / max(len(text), len(right))
        for text, right in zip(completions, answer, strict=True)
    ]
