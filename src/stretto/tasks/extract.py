"""Extract the answer from a response."""

from __future__ import annotations

import re
from typing import Literal

Extraction = Literal["full", "last_number", "answer_tag"]

# A minus sign belongs to the number unless it stands right behind an operand, as in "5-3".
# Thousands must be grouped by three, so that the list "1,2,3" ends in 3.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-\u2212])?(?:(?<![\d,.])\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def extract(response: str, how: Extraction) -> str | None:
    """The part of ``response`` that is scored; ``None`` when there is no such part.

    ``full`` is all of it without surrounding blanks. ``last_number`` is the last number, written
    plainly: '1,234.' becomes '1234'. ``answer_tag`` is what stands in the last
    ``<answer>...</answer>``.
    """
    if how == "full":
        return response.strip()
    if how == "answer_tag":
        tagged = _ANSWER.findall(response)
        return tagged[-1].strip() if tagged else None
    numbers = _NUMBER.findall(response)
    return numbers[-1].replace(",", "").replace("\u2212", "-") if numbers else None
