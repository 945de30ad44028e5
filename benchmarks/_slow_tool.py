"""A tool that takes its time: log-normal seconds, the same for the same call."""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from math import exp, log
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

NORMAL = NormalDist()


def latency(call: str, median_s: float, p95_s: float) -> float:
    """Seconds of a call, drawn from a log-normal by what is called."""
    digest = blake2b(call.encode(errors="replace"), digest_size=8).digest()
    u = (int.from_bytes(digest, "little") + 0.5) * 2.0**-64
    sigma = log(p95_s / median_s) / NORMAL.inv_cdf(0.95)
    return median_s * exp(sigma * NORMAL.inv_cdf(u))


class SlowTool:
    """Answers every turn with some text, for as many turns as the row says, and rewards vowels."""

    def open(self, row: dict[str, Any]) -> None:
        self._row = row

    async def step(self, turn: SimpleNamespace) -> tuple[str, float, bool, dict[str, Any]]:
        row, last = self._row, turn.index + 1 >= self._row["turns"]
        if not last:
            call = f"{row['number']} {turn.index} {turn.text}"
            await asyncio.sleep(latency(call, row["median_s"], row["p95_s"]))
        vowels = sum(turn.text.count(letter) for letter in "aeiou")
        return "x" * row["answer"], vowels / max(len(turn.text), 1), last, {}

    def close(self) -> None:
        """Nothing is held."""
