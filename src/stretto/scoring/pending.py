"""What a scorer that looks at whole rollouts keeps of them until they end."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.errors import LifecycleError
from stretto.types import Chunk, Rollout


class Pending:
    """Rollouts that a scorer was told of, growing chunk by chunk; its own copies of them."""

    def __init__(self, scorer: str) -> None:
        self._scorer = scorer
        self._rollouts: dict[int, Rollout] = {}

    def admit(self, rollouts: Sequence[Rollout]) -> None:
        """Learn of rollouts; tokens that one already has are kept."""
        for r in rollouts:
            self._rollouts[r.id] = Rollout(
                r.id,
                r.prompt,
                r.group,
                list(r.tokens),
                list(r.logprobs),
                list(r.versions),
                r.finish,
            )

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Add tokens.

        Raises:
            LifecycleError: the rollout is unknown, has ended, or the chunk leaves a gap.
        """
        for chunk in chunks:
            rollout = self._rollouts.get(chunk.rollout_id)
            if rollout is None or rollout.finish or chunk.start != len(rollout):
                raise LifecycleError(
                    f"scorer '{self._scorer}' cannot take tokens {chunk.start} and on of rollout "
                    f"{chunk.rollout_id}: it was not admitted, has ended, or has a gap there"
                )
            rollout.append(chunk)

    def __getitem__(self, rollout_id: int) -> Rollout:
        """A rollout as it is now; not to be changed."""
        return self._rollouts[rollout_id]

    def take(self, rollout_ids: Sequence[int]) -> list[Rollout]:
        """Hand out finished rollouts and forget them.

        Raises:
            LifecycleError: one is unknown or has not ended; nothing is forgotten then.
        """
        for rollout_id in rollout_ids:
            known = self._rollouts.get(rollout_id)
            if known is None or known.finish is None:
                raise LifecycleError(
                    f"scorer '{self._scorer}' cannot score rollout {rollout_id}: it was not "
                    "admitted, or its last chunk has not come"
                )
        return [self._rollouts.pop(rollout_id) for rollout_id in rollout_ids]

    def release(self, rollout_ids: Sequence[int]) -> None:
        """Forget rollouts; unknown ids are ignored."""
        for rollout_id in rollout_ids:
            self._rollouts.pop(rollout_id, None)
