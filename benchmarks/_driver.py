"""A generator and a scorer that cost nothing, for the processes of ``driver_cost.py``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stretto.types import (
    Chunk,
    Decoded,
    FinishReason,
    Reply,
    Response,
    Score,
    ScorerInfo,
    WeightsRef,
)


class IdleGenerator:
    """A generator whose tokens are all 1; every response has the same length.

    Args:
        length: of each response, in tokens.
    """

    def __init__(self, length: int) -> None:
        self._length, self._at = length, dict[int, int]()

    def admit(self, responses: Sequence[Response]) -> Reply[None]:
        """Take responses."""
        self._at.update((r.id, len(r)) for r in responses)
        return Reply(None)

    def decode(self, max_tokens: int, stop_after: int = 0) -> Reply[Decoded]:
        """Give each response so many tokens more."""
        chunks = []
        for id_, start in list(self._at.items()):
            end = min(start + max_tokens, self._length)
            finish = FinishReason.LENGTH if end == self._length else None
            tokens, logprobs = np.ones(end - start, np.int32), np.zeros(end - start, np.float32)
            chunks.append(Chunk(id_, start, tokens, logprobs, 0, finish))
            self._at[id_] = end
            if finish:
                del self._at[id_]
        return Reply(Decoded(chunks, max((len(c.tokens) for c in chunks), default=0)))

    def load(self, weights: WeightsRef) -> Reply[None]:
        """Take new weights."""
        return Reply(None)


class IdleScorer:
    """A reward model that streams, and gives each response a 0."""

    info = ScorerInfo("reward", "reward", "", True, False, 1)

    def admit(self, responses: Sequence[Response]) -> Reply[ScorerInfo]:
        """Take responses."""
        return Reply(self.info)

    def extend(self, chunks: Sequence[Chunk]) -> Reply[ScorerInfo]:
        """Take tokens."""
        return Reply(self.info)

    def finish(self, rollout_ids: Sequence[int]) -> Reply[list[Score]]:
        """Score responses."""
        zero = np.zeros(1, np.float32)
        return Reply([Score(id_, "reward", "reward", zero) for id_ in rollout_ids])
