"""Responses that a scorer of whole responses keeps until they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stretto.errors import LifecycleError
from stretto.types import Chunk, Response


class Pending:
    """Responses that a scorer was told of, by rollout id; they grow chunk by chunk."""

    def __init__(self, scorer: str) -> None:
        self._scorer = scorer
        self._responses: dict[int, Response] = {}

    def admit(self, responses: Sequence[Response]) -> None:
        """Learn of responses; tokens that one already has are kept."""
        self._responses.update((r.id, r) for r in responses)

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Add tokens.

        Raises:
            LifecycleError: the rollout is unknown, has ended, or the chunk leaves a gap.
        """
        for chunk in chunks:
            known = self._responses.get(chunk.rollout_id)
            if known is None or known.finish or chunk.start != len(known):
                raise LifecycleError(
                    f"scorer '{self._scorer}' cannot take tokens {chunk.start} and on of rollout "
                    f"{chunk.rollout_id}: it was not admitted, has ended, or has a gap there"
                )
            tokens = np.concatenate([known.tokens, chunk.tokens])
            self._responses[known.id] = replace(
                known, tokens=tokens, version=chunk.version, finish=chunk.finish
            )

    def __getitem__(self, rollout_id: int) -> Response:
        """A response as it is now."""
        return self._responses[rollout_id]

    def take(self, rollout_ids: Sequence[int]) -> list[Response]:
        """Hand out responses that have ended, and forget them.

        Raises:
            LifecycleError: one is unknown or has not ended; nothing is forgotten then.
        """
        for rollout_id in rollout_ids:
            known = self._responses.get(rollout_id)
            if known is None or known.finish is None:
                raise LifecycleError(
                    f"scorer '{self._scorer}' cannot score rollout {rollout_id}: it was not "
                    "admitted, or its last chunk has not come"
                )
        return [self._responses.pop(rollout_id) for rollout_id in rollout_ids]

    def release(self, rollout_ids: Sequence[int]) -> None:
        """Forget responses; unknown ids are ignored."""
        for rollout_id in rollout_ids:
            self._responses.pop(rollout_id, None)
