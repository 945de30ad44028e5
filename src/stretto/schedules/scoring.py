"""The schedule's side of all scorers: which rollout goes to whom, and when.

Every scorer is fed at its own pace: it gets whatever has arrived since its last call, so that none
of them is in lock-step with the generator or with another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stretto.clock import Clock
from stretto.errors import LifecycleError
from stretto.protocols import Scorer
from stretto.schedules.rollout import Rollout
from stretto.schedules.settings import ScoreOn
from stretto.schedules.waits import Phases, answered
from stretto.types import Chunk, Score, WeightsRef, short_name


@dataclass(frozen=True, slots=True)
class ScorerReplica:
    """A scorer and where it sits. Several replicas with one scorer name share its work.

    Attributes:
        host: the generator on whose device it lives, so that it gets to work on whole rollouts when
            that one has nothing left to decode; ``None`` for a scorer that is always free to work.
    """

    scorer: Scorer
    host: int | None = None


class Feed:
    """A feed that hands one scorer whatever has arrived.

    Consumes admissions, chunks and requests for scores. Waits for the scorer, one call at a time,
    and until there is enough to make a call worth its cost. Unblocked by that, by :meth:`hurry`
    when someone waits for a score, and by :meth:`load_weights` after a :meth:`pause`. A replica
    that draws whole rollouts looks when the backlog is worth it, and when its host becomes free.
    """

    def __init__(
        self,
        replica: ScorerReplica,
        deliver: Callable[[Sequence[Score]], None],
        deadline_s: float,
        clock: Clock,
        phases: Phases,
    ) -> None:
        self.scorer, self.host = replica.scorer, replica.host
        self.free = replica.host is None
        self.load = 0  # rollouts given to it and not scored
        self.draw: Callable[[], Sequence[Rollout]] = list
        self._deliver, self._deadline_s = deliver, deadline_s
        self._clock, self._phases = clock, phases
        self._admitted: dict[int, Rollout] = {}
        self._chunks: list[Chunk] = []
        self._wanted: list[int] = []
        self._tokens = 0  # in all of these
        self._worthwhile = asyncio.Event()
        self._turn = asyncio.Lock()
        self.paused = False

    def admit(self, rollout: Rollout) -> None:
        """Take a rollout whose chunks will follow; the tokens it has now are in it already."""
        self._admitted[rollout.id] = rollout
        self.load += 1
        self._arrived(rollout.total_tokens)

    def extend(self, chunk: Chunk) -> None:
        """Add tokens of an admitted rollout."""
        if chunk.rollout_id not in self._admitted:  # else it will be admitted with them
            self._chunks.append(chunk)
        self._arrived(len(chunk.tokens))

    def finish(self, rollout_id: int) -> None:
        """Ask for the score of an admitted rollout, all of which is there."""
        self._wanted.append(rollout_id)
        self._arrived(0)

    def look(self) -> None:
        """Look for rollouts to draw, if the replica is free."""
        if self.free:
            self._worthwhile.set()

    def hurry(self) -> None:
        """Ask for the wanted scores now, as someone waits for them."""
        if self._wanted:
            self._worthwhile.set()

    def _arrived(self, tokens: int) -> None:
        self._tokens += tokens
        if self._tokens >= self.scorer.worthwhile_tokens:  # fewer while it streams
            self._worthwhile.set()

    async def run(self) -> None:
        """Serve for ever."""
        while True:
            idle_since_s = self._clock.now()
            await self._worthwhile.wait()
            async with self._turn:
                self._phases.waited(short_name(self.scorer.name), idle_since_s)
                self._worthwhile.clear()
                await self.serve()

    async def serve(self) -> None:
        """Hand over what has arrived, now. The caller must hold the scorer's turn."""
        for rollout in self.draw() if self.free else ():
            self.admit(rollout)
            self.finish(rollout.id)
            self._worthwhile.set()  # look again afterwards: there may be more
        scorer = self.scorer
        admitted = [r.response(text=scorer.reads_text) for r in self._admitted.values()]
        chunks, wanted = self._chunks, self._wanted
        self._admitted, self._chunks, self._wanted, self._tokens = {}, [], [], 0
        if admitted:
            ids = [r.id for r in admitted]
            await answered(scorer.admit(admitted), self._deadline_s, scorer.name, ids)
        if chunks:
            ids = [c.rollout_id for c in chunks]
            await answered(scorer.extend(chunks), self._deadline_s, scorer.name, ids)
        if wanted:
            scores = await answered(scorer.finish(wanted), self._deadline_s, scorer.name, wanted)
            if [s.rollout_id for s in scores] != wanted:
                raise LifecycleError(
                    f"scorer '{scorer.name}' was asked for rollouts {wanted} and answered for "
                    f"{[s.rollout_id for s in scores]}; a scorer answers for each, in order"
                )
            self.load -= len(wanted)
            self._deliver(scores)

    async def pause(self) -> None:
        """Return when the scorer is idle, and keep it so."""
        if not self.paused:
            await self._turn.acquire()
            self.paused = True

    async def load_weights(self, weights: WeightsRef) -> None:
        """Give the paused scorer new weights, and let it work again."""
        await answered(self.scorer.load(weights), self._deadline_s, self.scorer.name)
        self.paused = False
        self._turn.release()

    @property
    def asked(self) -> bool:
        """Return whether scores are wanted that the scorer has not been asked for."""
        return bool(self._wanted)


class _ScorerGroup:
    """The replicas of one scorer.

    They follow rollouts chunk by chunk if ``score_on`` is ``chunk``, the scorer streams and none of
    them has a host, whose decoding it would hold up. Otherwise they draw whole rollouts from a
    backlog.
    """

    def __init__(self, feeds: Sequence[Feed], score_on: ScoreOn) -> None:
        self.feeds = feeds
        self.follows = feeds[0].scorer.follows
        self.streams = score_on == "chunk" and all(
            f.host is None and f.scorer.streams for f in feeds
        )
        self.replica_of: dict[int, Feed] = {}
        self._backlog: deque[Rollout] = deque()
        self._tokens = 0  # in the backlog
        for feed in feeds:
            feed.draw = self._draw

    def admit(self, rollout: Rollout) -> None:
        """Give a rollout that will grow to the replica with the least to do."""
        feed = min(self.feeds, key=lambda f: f.load)
        self.replica_of[rollout.id] = feed
        feed.admit(rollout)

    def finish(self, rollout: Rollout) -> None:
        """Have a rollout scored: by the replica that knows it, or by whoever is free first."""
        if feed := self.replica_of.pop(rollout.id, None):
            feed.finish(rollout.id)
        else:
            self._backlog.append(rollout)
            self._tokens += rollout.total_tokens
            if self._tokens >= self.feeds[0].scorer.worthwhile_tokens:
                self.wake()

    def wake(self) -> None:
        """Let free replicas look at the backlog."""
        if self._backlog:
            for feed in self.feeds:
                feed.look()

    def hurry(self) -> None:
        """Ask for the wanted scores now, as someone waits for them."""
        self.wake()
        for feed in self.feeds:
            feed.hurry()

    async def load(self, weights: WeightsRef) -> None:
        """Give new weights to all replicas at once.

        Scores that were asked for before are computed with the old weights first. Paused replicas
        have nothing of that kind: nobody waits for them.
        """
        late = [feed for feed in self.feeds if not feed.paused]
        for feed in late:
            await feed.pause()
        while late and (self._backlog or any(feed.asked for feed in late)):
            for feed in late:
                await feed.serve()
        for feed in self.feeds:
            await feed.load_weights(weights)

    def _draw(self) -> list[Rollout]:
        """A replica's next share: small enough that another replica, free later, finds work too."""
        share = -(-len(self._backlog) // len(self.feeds))
        drawn = [self._backlog.popleft() for _ in range(share)]
        self._tokens -= sum(r.total_tokens for r in drawn)
        return drawn


class Scoring:
    """All scorers of a run.

    With ``chunk`` a scorer learns of rollouts when they are dispatched and follows their tokens;
    with ``rollout`` it gets each when it has ended, with ``batch`` when all have. A frozen scorer
    is asked for a score as soon as the rollout has ended; one that follows a trained model only
    once the rollout is chosen for a round, so that all values of a batch come from one version.
    """

    def __init__(
        self,
        replicas: Sequence[ScorerReplica],
        score_on: ScoreOn,
        deadline_s: float,
        clock: Clock,
        phases: Phases,
    ) -> None:
        self._score_on = score_on
        self._rollouts: dict[int, Rollout] = {}
        self._delivered = asyncio.Event()
        self.feeds = [Feed(s, self._deliver, deadline_s, clock, phases) for s in replicas]
        by_name: dict[str, list[Feed]] = {}
        for feed in self.feeds:
            by_name.setdefault(feed.scorer.name, []).append(feed)
        self._groups = [_ScorerGroup(feeds, score_on) for feeds in by_name.values()]
        self._streaming = [t for t in self._groups if t.streams]

    async def pause_followers(self) -> None:
        """Keep scorers idle that follow a trained model, until they load its next weights."""
        for group in self._groups:
            for feed in group.feeds if group.follows else ():
                await feed.pause()

    async def load(self, weights: Mapping[str, WeightsRef]) -> None:
        """Give new weights to scorers that follow a trained model."""
        for group in self._groups:
            if group.follows:
                await group.load(weights[group.follows])

    def dispatched(self, rollouts: Iterable[Rollout]) -> None:
        """Note that rollouts are about to be decoded."""
        for rollout in rollouts if self._streaming else ():
            for group in self._streaming:
                group.admit(rollout)

    def extended(self, chunk: Chunk) -> None:
        """Note that a rollout has got more tokens."""
        for group in self._streaming:
            group.replica_of[chunk.rollout_id].extend(chunk)

    def ended(self, rollout: Rollout) -> None:
        """Note that a rollout has ended."""
        if self._score_on != "batch":
            self._ask(rollout, (t for t in self._groups if not t.follows))

    def chosen(self, rollout: Rollout) -> None:
        """Note that a rollout that has ended is going to be trained on."""
        if self._score_on != "batch":
            self._ask(rollout, (t for t in self._groups if t.follows))

    def gathered(self, batch: Iterable[Rollout]) -> None:
        """Note that all rollouts of a round have ended, and are waited for."""
        if self._score_on == "batch":
            for rollout in batch:
                self._ask(rollout, self._groups)
        for group in self._groups:
            group.hurry()

    def freed(self, host: int, free: bool = True) -> None:
        """Note that a generator's device is free for scoring, or no longer so."""
        for feed in self.feeds:
            if feed.host == host:
                feed.free = free
        for group in self._groups:
            group.wake()

    def is_scored(self, rollout: Rollout) -> bool:
        """Return whether every scorer has answered on the rollout."""
        return len(rollout.scores) == len(self._groups)

    async def all_scored(self, rollouts: Sequence[Rollout]) -> None:
        """Wait until every scorer has answered on each of these."""
        missing = list(rollouts)
        while missing := [r for r in missing if not self.is_scored(r)]:
            self._delivered.clear()
            await self._delivered.wait()

    def _ask(self, rollout: Rollout, groups: Iterable[_ScorerGroup]) -> None:
        self._rollouts[rollout.id] = rollout
        for group in groups:
            group.finish(rollout)

    def _deliver(self, scores: Sequence[Score]) -> None:
        for score in scores:
            rollout = self._rollouts[score.rollout_id]
            if score.source in rollout.scores:
                raise LifecycleError(f"rollout {rollout.id} got a second score of {score.source}")
            rollout.scores[score.source] = score
            if self.is_scored(rollout):
                del self._rollouts[rollout.id]
        self._delivered.set()
