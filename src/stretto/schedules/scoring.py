"""The schedule's side of all scorers: which rollout goes to whom, and when.

Every scorer is fed at its own pace: it gets whatever has arrived since its last call, so that none
of them is in lock-step with the generator or with another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stretto.config.schedule import ScoreOn
from stretto.errors import LifecycleError, StrettoError
from stretto.protocols import Scorer
from stretto.schedules.fleet import GoneError, Guard, RoleContext
from stretto.schedules.rollout import Rollout
from stretto.types import Chunk, Score, WeightsRef, short_name


@dataclass(frozen=True, slots=True)
class ScorerReplica:
    """A scorer and where it sits. Several replicas with one scorer name share its work.

    Attributes:
        host: the generator on whose device it lives, so that it gets to work on whole rollouts when
            that one has nothing left to decode; ``None`` for a scorer that is always free to work.
        role: its name in traces; empty for the scorer's own.
    """

    scorer: Scorer
    host: int | None = None
    role: str = ""


class Feed:
    """A feed that hands one scorer whatever has arrived.

    Consumes admissions, chunks and requests for scores. Waits until there is enough to make a call
    worth its cost. Unblocked by that, by :meth:`hurry` when someone waits for a score, and by
    :meth:`load_weights` after a :meth:`pause`. A replica that draws whole rollouts looks when the
    backlog is worth it, and when its host becomes free.

    If the scorer is lost, a new one is given all rollouts that have no score, with the tokens that
    they have by then, and is asked again. If none comes in its place, other replicas take over.
    """

    def __init__(
        self,
        replica: ScorerReplica,
        deliver: Callable[[Sequence[Score]], None],
        context: RoleContext,
    ) -> None:
        scorer = self.scorer = replica.scorer
        self.host, self._decoding = replica.host, context.decoding
        self._role = replica.role or short_name(scorer.info.name)
        self._guard = Guard(
            scorer, replica.role or scorer.info.name, scorer.info.follows, context, self._begin_anew
        )
        self.group: _ScorerGroup
        self.load = 0  # rollouts given to it and not scored
        self._deliver, self._clock, self._phases = deliver, context.clock, context.phases
        self.unscored: dict[int, Rollout] = {}  # all that it was given
        self.asked_for: dict[int, None] = {}  # those of them whose score is wanted
        self._admitted: dict[int, Rollout] = {}
        self._chunks: list[Chunk] = []
        self._wanted: list[int] = []
        self._tokens = 0  # in all of these
        self._waits, self._changed = context.waits, asyncio.Event()
        self._worthwhile = self._serving = self.paused = self._left = False

    @property
    def free(self) -> bool:
        """Return whether it may draw whole rollouts: its host has nothing to decode."""
        return self.host not in self._decoding

    def admit(self, rollout: Rollout) -> None:
        """Take a rollout whose chunks will follow; the tokens it has now are in it already."""
        self._admitted[rollout.id] = self.unscored[rollout.id] = rollout
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
        self.asked_for[rollout_id] = None
        self._arrived(0)

    def look(self) -> None:
        """Look for rollouts to draw, if the replica is free."""
        if self.free:
            self._call()

    def hurry(self) -> None:
        """Ask for the wanted scores now, as someone waits for them."""
        if self._wanted:
            self._call()

    def _arrived(self, tokens: int) -> None:
        self._tokens += tokens
        if self._tokens >= self.scorer.info.worthwhile_tokens:  # fewer while it streams
            self._call()

    def _call(self) -> None:
        self._worthwhile = True
        self._changed.set()

    async def run(self) -> None:
        """Serve for ever, or until the scorer is given up and other replicas go on."""
        while not self._left:
            idle_since_s = self._clock.now()
            await self._waits.until(
                self._may_serve, self._changed, self._role, self._lacks, self._unscored
            )
            self._phases.waited(self._role, idle_since_s)
            self._worthwhile, self._serving = False, True
            await (self.catch_up() if self.free else self._serve())
            self._serving = False
            self._changed.set()

    def _may_serve(self) -> bool:
        return self._worthwhile and not self.paused

    def _unscored(self) -> Sequence[int]:
        return [*self.unscored, *self.group.backlog]

    def _lacks(self) -> str:
        if self.paused:
            return "its next weights"
        if self.group.backlog and not self.free:
            return f"generator {self.host}, beside which it sits, to have nothing left to decode"
        return "enough to make a call worth its cost" if self.unscored else "something to score"

    async def catch_up(self) -> None:
        """Draw a share of the backlog, and hand over all that has arrived. It must be idle."""
        for rollout in () if self._left else self.group.draw():
            self.admit(rollout)
            self.finish(rollout.id)
            self._call()  # look again afterwards: there may be more
        await self._serve()

    async def _serve(self) -> None:
        while not self._left:
            if not self._guard.serves:
                await self._replace()
            with suppress(GoneError):
                await self._hand_over()
                break

    async def _hand_over(self) -> None:
        """Tell the scorer what it has not been told.

        Raises:
            GoneError: it was lost; all of it is to be told anew.
        """
        scorer, ask = self.scorer, self._guard.ask
        admitted = [r.response(text=scorer.info.reads_text) for r in self._admitted.values()]
        chunks, wanted = self._chunks, self._wanted
        self._admitted, self._chunks, self._wanted, self._tokens = {}, [], [], 0
        if admitted:
            await ask(scorer.admit(admitted), [r.id for r in admitted])
        if chunks:
            await ask(scorer.extend(chunks), [c.rollout_id for c in chunks])
        if wanted:
            scores = await ask(scorer.finish(wanted), wanted)
            if [s.rollout_id for s in scores] != wanted:
                raise LifecycleError(
                    f"scorer '{scorer.info.name}' was asked for rollouts {wanted} and answered for "
                    f"{[s.rollout_id for s in scores]}; a scorer answers for each, in order"
                )
            self.load -= len(wanted)
            for id_ in wanted:
                del self.unscored[id_], self.asked_for[id_]
            self._deliver(scores)

    def _begin_anew(self) -> None:
        self._admitted, self._chunks = dict(self.unscored), []
        self._wanted = list(self.asked_for)
        self._tokens = sum(r.total_tokens for r in self.unscored.values())
        self._arrived(0)

    async def _replace(self) -> None:
        """Have a new process take the lost one's place, or give the scorer up.

        Raises:
            StrettoError: the loss, where no other replica can go on.
        """
        try:
            await self._guard.replace()
        except StrettoError:
            if not self._guard.retired or not self.group.leave(self):
                raise
            self._left = True
            self.unscored, self.asked_for = {}, {}
            self._begin_anew()

    async def pause(self, who: str) -> None:
        """Return when the scorer is idle, and keep it so; ``who`` waits for that."""
        self.paused = True
        idle = f"{self._role} to end its call"
        await self._waits.until(lambda: not self._serving, self._changed, who, idle)

    async def load_weights(self, weights: WeightsRef) -> None:
        """Give the paused scorer new weights, and let it work again."""
        try:
            await self._guard.load(weights)
        except GoneError:
            await self._replace()
        self.paused = False
        self._changed.set()

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
        self.follows = feeds[0].scorer.info.follows
        self.streams = score_on == "chunk" and all(
            f.host is None and f.scorer.info.streams for f in feeds
        )
        self.replica_of: dict[int, Feed] = {}
        self._backlog: deque[Rollout] = deque()
        self._tokens = 0  # in the backlog
        self._rounds: deque[int] = deque()  # its rollouts by rounds, where they come so
        for feed in feeds:
            feed.group = self

    @property
    def backlog(self) -> Sequence[int]:
        return [r.id for r in self._backlog]

    def admit(self, rollout: Rollout) -> None:
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
            if self._tokens >= self.feeds[0].scorer.info.worthwhile_tokens:
                self.wake()

    def wake(self) -> None:
        if self._backlog:
            for feed in self.feeds:
                feed.look()

    def hurry(self) -> None:
        self.wake()
        for feed in self.feeds:
            feed.hurry()

    async def load(self, weights: WeightsRef) -> None:
        """Give new weights to all replicas at once.

        Scores that were asked for before are computed with the old weights first. Paused replicas
        have nothing of that kind: nobody waits for them.
        """
        feeds = list(self.feeds)
        late = [feed for feed in feeds if not feed.paused]
        for feed in late:
            await feed.pause("generation")
        while late and (self._backlog or any(feed.asked for feed in feeds)):
            for feed in feeds:
                await feed.catch_up()
        async with asyncio.TaskGroup() as group:  # together: it may be one broadcast to all
            for feed in feeds[1:]:
                group.create_task(feed.load_weights(weights))
            await feeds[0].load_weights(weights)

    def leave(self, lost: Feed) -> bool:
        """Give the work of a replica that is not replaced to the others, if there are any."""
        others = [feed for feed in self.feeds if feed is not lost]
        if not others:
            return False
        self.feeds = others
        for id_, rollout in lost.unscored.items():
            if id_ in lost.asked_for:
                heir = min(others, key=lambda f: f.load)
                heir.admit(rollout)
                heir.finish(id_)
                heir.hurry()
            else:
                self.admit(rollout)
        return True

    def end_round(self, rollouts: int) -> None:
        self._rounds.append(rollouts)

    def draw(self) -> list[Rollout]:
        """A replica's next share: small enough that another replica, free later, finds work too.

        It is of one round, where they come so: what is scored together does not depend on timing.
        """
        found = self._rounds[0] if self._rounds else len(self._backlog)
        share = -(-found // len(self.feeds))
        if self._rounds:
            self._rounds[0] -= share
            if not self._rounds[0]:
                self._rounds.popleft()
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
        context: RoleContext,
    ) -> None:
        self._score_on = score_on
        self._rollouts: dict[int, Rollout] = {}
        self._waits, self._delivered = context.waits, asyncio.Event()
        self.feeds = [Feed(s, self._deliver, context) for s in replicas]
        by_name: dict[str, list[Feed]] = {}
        for feed in self.feeds:
            by_name.setdefault(feed.scorer.info.name, []).append(feed)
        self._groups = [_ScorerGroup(feeds, score_on) for feeds in by_name.values()]
        self._streaming = [t for t in self._groups if t.streams]

    async def pause_followers(self) -> None:
        """Keep scorers idle that follow a trained model, until they load its next weights."""
        for group in self._groups:
            for feed in group.feeds if group.follows else ():
                await feed.pause("training")

    @property
    def following(self) -> list[Scorer]:
        """Scorers that follow a trained model, and are not being replaced."""
        feeds = [feed for group in self._groups if group.follows for feed in group.feeds]
        return [feed.scorer for feed in feeds if feed._guard.serves]

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

    def gathered(self, batch: Sequence[Rollout]) -> None:
        """Note that all rollouts of a round have ended, and are waited for."""
        if self._score_on == "batch":
            for rollout in batch:
                self._ask(rollout, self._groups)
            for group in self._groups if batch else ():
                group.end_round(len(batch))
        for group in self._groups:
            group.hurry()

    def look(self) -> None:
        """Note that a generator's device has become free for scoring."""
        for group in self._groups:
            group.wake()

    def is_scored(self, rollout: Rollout) -> bool:
        """Return whether every scorer has answered on the rollout."""
        return len(rollout.scores) == len(self._groups)

    async def all_scored(self, rollouts: Sequence[Rollout]) -> None:
        """Wait until every scorer has answered on each of these."""
        left = list(rollouts)

        def scored() -> bool:
            left[:] = [r for r in left if not self.is_scored(r)]
            return not left

        what = "the last scores of a round"
        await self._waits.until(
            scored, self._delivered, "scoring", what, lambda: [r.id for r in left]
        )

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
