"""The generator in virtual time: it costs what a cost model says, and samples nothing.

Tokens are placeholders, and lengths come from a distribution. Calls that break the order of things
(a rollout admitted twice, or after its end) are errors here as with a real engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from heapq import merge
from typing import Literal

import numpy as np

from stretto.errors import EngineError
from stretto.runtime.sim.costs import GeneratorCost
from stretto.runtime.sim.decoding import Replica, SimRow, decode
from stretto.runtime.sim.devices import SimWorker
from stretto.types import Chunk, Decoded, FinishReason, KVTransfer, Response, WeightsRef

_TOKENS, _LOGPROBS = np.zeros(1 << 17, np.int32), np.full(1 << 17, -1.0, np.float32)
"""Stand-ins for sampled tokens and their log-probabilities; longer than any response."""
for _stand_in in (_TOKENS, _LOGPROBS):
    _stand_in.flags.writeable = False


class SimGenerator:
    """A generator that decodes to lengths known beforehand, with continuous batching.

    Rollouts go to the replica with the fewest, and stay there.

    State: the version. Rollouts in flight are the schedule's to save, as with a real engine.
    """

    def __init__(
        self,
        worker: SimWorker,
        cost: GeneratorCost,
        lengths: Callable[[int], int],
        *,
        max_new_tokens: int,
        slots: int | None = None,
        replicas: int = 1,
        carry: Literal["recompute", "reuse"] = "recompute",
    ) -> None:
        """Make a generator without rollouts.

        Args:
            worker: its devices; a call occupies all of them.
            lengths: response tokens of a rollout, without a limit.
            slots: rollouts that a replica decodes together; ``None`` for all that it has.
            replicas: copies of the model that decode side by side.
            carry: whether cached keys and values are made again after new weights.
        """
        self._worker, self._cost, self._lengths = worker, cost, lengths
        self._max_new_tokens, self._carry = max_new_tokens, carry
        self._slots = slots
        self._replicas = [Replica(cost, slots) for _ in range(replicas)]
        self._home: dict[int, Replica] = {}
        self.version = 0

    async def admit(self, responses: Sequence[Response]) -> None:
        """Queue responses; each goes on after the tokens it already has.

        Raises:
            EngineError: a rollout is here already, or has ended.
        """
        async with self._worker.turn:
            for response in responses:
                self._add(response, 0)

    async def decode(self, max_tokens: int, stop_after: int = 0) -> Decoded:
        """Give every rollout in a slot up to ``max_tokens`` more; admit others as slots free."""
        async with self._worker.turn:
            ended, work = decode(self._replicas, max_tokens, stop_after)
            chunks = [self._last_chunk(row) for row in ended]
            chunks += self._chunks()
            if chunks:
                await self._worker.work(
                    "gen",
                    work.seconds,
                    rollouts=[c.rollout_id for c in chunks],
                    tokens=work.tokens,
                    version=self.version,
                    steps=work.steps,
                    prefilled=work.prefilled,
                    context=work.context,
                    uneven_s=work.uneven_s,
                )
            return Decoded(chunks, work.steps)

    async def release(self, rollout_ids: Sequence[int]) -> None:
        """Forget rollouts; unknown ids are ignored."""
        async with self._worker.turn:
            for id_ in rollout_ids:
                if replica := self._home.pop(id_, None):
                    replica.take_out(id_)

    async def export(self, rollout_ids: Sequence[int], with_cache: bool) -> Sequence[KVTransfer]:
        """Let go of rollouts; the time that moving a cache takes is the receiver's.

        Raises:
            EngineError: a rollout is not here, or is named twice; nothing has been let go.
        """
        async with self._worker.turn:
            wrong = [i for i, n in Counter(rollout_ids).items() if n > 1 or i not in self._home]
            if wrong:
                problem = f"rollouts {wrong} are not in this engine, or were named twice"
                raise EngineError(problem, "not-in-engine")
            transfers = []
            for id_ in rollout_ids:
                replica = self._home.pop(id_)
                decoded = id_ in replica.rows
                row = replica.take_out(id_)
                cached = row.prompt + row.tokens if decoded else row.cached
                moved = with_cache and cached > 0
                transfers.append(
                    KVTransfer(id_, "cache" if moved else None, cached if moved else 0)
                )
            return transfers

    async def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> None:
        """Go on with rollouts that another generator exported, one transfer each.

        Raises:
            EngineError: a rollout is here already, or has ended.
        """
        async with self._worker.turn:
            for response, transfer in zip(responses, transfers, strict=True):
                self._add(response, transfer.cached_tokens)
            size_bytes = self._cost.cache_bytes * sum(p.cached_tokens for p in transfers)
            await self._worker.work(
                "migrate",
                self._cost.transfer.seconds(size_bytes),
                rollouts=[r.id for r in responses],
                bytes=size_bytes,
            )

    async def load(self, weights: WeightsRef) -> None:
        """Decode with these weights from now on."""
        async with self._worker.turn:
            await self._worker.work("load", self._cost.load_s, version=weights.version)
            self.version = weights.version
            if self._carry == "recompute":
                for replica in self._replicas:
                    replica.void_cache()

    async def restart(self) -> None:
        """Forget all rollouts and weights; the time it takes is not this role's."""
        async with self._worker.turn:
            self._replicas = [Replica(self._cost, self._slots) for _ in self._replicas]
            self._home.clear()
            self.version = 0

    def _add(self, response: Response, cached: int) -> None:
        wanted = self._lengths(response.id)
        length = min(wanted, self._max_new_tokens)
        if response.id in self._home:
            problem = f"rollout {response.id} is in the engine already; release it first"
            raise EngineError(problem, "already-in-engine")
        if response.finish or len(response) >= length:
            raise EngineError(
                f"rollout {response.id} has ended, at {len(response)} tokens; admit only those "
                "that go on",
                "rollout-ended",
            )
        replica = min(self._replicas, key=lambda r: r.load)
        row = SimRow(
            id=response.id,
            group=response.group,
            prompt=len(response.prompt.tokens),
            tokens=len(response),
            length=length,
            finish=FinishReason.LENGTH if wanted > length else FinishReason.STOP,
            cached=cached,
        )
        replica.waiting.append(row)
        self._home[response.id] = replica

    def _last_chunk(self, row: SimRow) -> Chunk:
        del self._home[row.id]
        new = row.length - row.tokens
        return Chunk(row.id, row.tokens, _TOKENS[:new], _LOGPROBS[:new], self.version, row.finish)

    def _chunks(self) -> list[Chunk]:
        """Make chunks of the rollouts that go on, by id."""
        found = []
        for replica in self._replicas:
            chunks, step = [], replica.step
            for row in replica.rows.values():
                start, now = row.tokens, step - row.base
                if now > start:
                    row.tokens = now
                    new = now - start
                    chunk = Chunk(row.id, start, _TOKENS[:new], _LOGPROBS[:new], self.version)
                    chunks.append(chunk)
            found.append(sorted(chunks, key=lambda c: c.rollout_id))
        return list(merge(*found, key=lambda c: c.rollout_id)) if len(found) > 1 else found[0]
