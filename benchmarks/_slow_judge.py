"""A reward function that takes its time, as a judge behind a rate limit does."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any


def judge(completions: Sequence[str], **given: Any) -> list[float]:
    """Wait the seconds in ``JUDGE_S`` for each completion, and reward short ones."""
    time.sleep(float(os.environ.get("JUDGE_S", "0.5")) * len(completions))
    return [-len(text) / 1000 for text in completions]
