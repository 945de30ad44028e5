"""The gold reward of the recipe 'posts': a controlled stand-in for summaries of Reddit posts.

It knows the facts of a post and replaces human preferences, so that errors of a learned reward
model can be measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

ENOUGH_WORDS = 10
"""All facts fit into this number of words. Further words cost score."""


def gold(completions: Sequence[Any], facts: Sequence[Sequence[str]], **_: Any) -> list[float]:
    """Count the facts in a summary, of five, minus a tenth per word beyond :data:`ENOUGH_WORDS`."""
    scores = []
    for completion, told in zip(completions, facts, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        words = re.findall(r"\w+", text)
        scores.append(sum(fact in words for fact in told) - 0.1 * max(len(words) - ENOUGH_WORDS, 0))
    return scores
