"""Generation outside a schedule: rollouts decoded to their ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.rollout.engine import TorchEngine
from stretto.types import Rollout


def completed(
    engine: TorchEngine, rollouts: Sequence[Rollout], chunk_tokens: int = 16
) -> Iterator[Rollout]:
    """Decode rollouts to their ends; each is yielded as soon as it has finished.

    Args:
        engine: admits them first.
        rollouts: with ids of their own; whatever else the engine holds must have ended.
        chunk_tokens: decoded of each between two looks at which have finished.
    """
    by_id = {r.id: r for r in rollouts}
    engine.admit(rollouts)
    left = len(rollouts)
    while left:
        for chunk in engine.decode(chunk_tokens):
            rollout = by_id[chunk.rollout_id]
            rollout.append(chunk)
            if rollout.finish:
                left -= 1
                yield rollout
