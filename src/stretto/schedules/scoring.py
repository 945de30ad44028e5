"""Distribution of rollouts over scorer replicas, and the loops that call these."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from stretto.bounds import ceil_div
from stretto.config import ENVIRONMENT
from stretto.config.knobs import ScoreOn
from stretto.errors import LifecycleError, StrettoError
from stretto.protocols import Scorer
from stretto.schedules.fleet import GoneError, Guard, RoleContext
from stretto.schedules.rollout import Rollout
from stretto.schedules.waits import Work
from stretto.types import Chunk, Score, WeightsRef, short_name


@dataclass(frozen=True, slots=True)
class ScorerReplica:
    """A scorer and its placement. Replicas with the same scorer name share its work."""

    scorer: Scorer
    host: int | None = None  # the generator whose device it shares
    role: str = ""  # its name in traces, or empty for the scorer's own
    held_out: bool = False  # whether it only scores evaluations, and replaces its name's scorers


class ReplicaQueue:
    """Queued work for one replica of a scorer, and the loop that sends it.

    The loop waits until a call is worth its cost, or :meth:`call` because a score is awaited, and
    while paused until :meth:`resume`. If the scorer is lost, a new process gets all unscored
    rollouts with their present tokens and all requests again, or other replicas take over.
    """

    def __init__(
        self,
        replica: ScorerReplica,
        deliver: Callable[[Sequence[Score]], None],
        context: RoleContext,
    ) -> None:
        scorer = self.scorer = replica.scorer
        self.host = replica.host
        self._context = context
        self._deliver = deliver
        self._role = replica.role or short_name(scorer.info.name)
        name, follows = replica.role or scorer.info.name, scorer.info.follows
        self.guard = Guard(scorer, name, follows, context, self._begin_anew)
        self.group: _ScorerGroup
        self.unscored: dict[int, Rollout] = {}  # all rollouts of this replica
        self.asked_for: dict[int, None] = {}  # ids in unscored whose score is requested
        self._admitted: dict[int, Rollout] = {}
        self._chunks: list[Chunk] = []
        self._dropped: list[int] = []
        self.wanted: list[int] = []  # requests for scores not yet sent to the scorer
        self._tokens = 0  # of queued rollouts and chunks
        self._changed = asyncio.Event()
        self._worthwhile = self._serving = self.paused = self._left = False

    @property
    def free(self) -> bool:
        """Whether it may draw complete rollouts, because its host has nothing to decode."""
        return self.host not in self._context.decoding

    def admit(self, rollout: Rollout) -> None:
        """Queue a rollout with all tokens that it has when sent. Later ones follow as chunks."""
        self._admitted[rollout.id] = self.unscored[rollout.id] = rollout
        self._arrived(rollout.total_tokens)

    def extend(self, chunk: Chunk) -> None:
        if chunk.rollout_id not in self._admitted:  # otherwise admitted with these
            self._chunks.append(chunk)
        self._arrived(len(chunk.tokens))

    def finish(self, rollout_id: int) -> None:
        self.wanted.append(rollout_id)
        self.asked_for[rollout_id] = None
        self._arrived(0)

    def _arrived(self, tokens: int) -> None:
        self._tokens += tokens
        if self._tokens >= self.scorer.info.worthwhile_tokens:  # a lower limit if it streams
            self.call()

    def call(self) -> None:
        self._worthwhile = True
        self._changed.set()

    async def run(self) -> None:
        """Serve until the scorer is given up and other replicas take over, if ever."""
        context = self._context
        while not self._left:
            idle_since_s = context.clock.now()
            await context.waits.until(
                lambda: self._worthwhile and not self.paused,
                self._changed,
                self._role,
                self._lacks,
                lambda: (*self.unscored, *(r.id for r in self.group.backlog)),
            )
            context.phases.waited(self._role, idle_since_s)
            self._worthwhile, self._serving = False, True
            await (self.catch_up() if self.free else self._serve())
            self._serving = False
            self._changed.set()

    def _lacks(self) -> str:
        if self.paused:
            return "its next weights"
        if self.group.backlog and not self.free:
            return f"generator {self.host}, beside which it sits, to have nothing left to decode"
        return "enough to make a call worth its cost" if self.unscored else "something to score"

    async def catch_up(self) -> None:
        """Draw a share of the backlog, and send everything queued. The scorer must be idle."""
        if not self._left:
            for rollout in self.group.draw():
                self.admit(rollout)
                self.finish(rollout.id)
                self.call()  # because there may be more
        await self._serve()

    async def _serve(self) -> None:
        while not self._left:
            if not self.guard.member.serves:
                await self._replace()
            with suppress(GoneError):
                await self._pass_on()
                break

    async def _pass_on(self) -> None:
        """Send everything queued to the scorer. GoneError if it is lost."""
        scorer, ask = self.scorer, self.guard.ask
        info, rollouts = scorer.info, self._admitted.values()
        responses = [
            r.episode() if info.whole_episodes else r.response(text=info.reads_text)
            for r in rollouts
        ]
        chunks = self._chunks
        ids = self.wanted
        dropped_ids = self._dropped
        self._admitted = {}
        self._chunks = []
        self.wanted = []
        self._tokens = 0
        self._dropped = []
        if dropped_ids:
            await ask(scorer.release(dropped_ids), dropped_ids)
        if responses:
            await ask(scorer.admit(responses), [r.id for r in responses])
        if chunks:
            await ask(scorer.extend(chunks), [c.rollout_id for c in chunks])
        if ids:
            scores = await ask(scorer.finish(ids), ids)
            if [s.rollout_id for s in scores] != ids:
                raise LifecycleError(
                    f"scorer '{scorer.info.name}' was asked for rollouts {ids} and answered for "
                    f"{[s.rollout_id for s in scores]}; a scorer answers for each, in order",
                    "scores-not-as-asked",
                )
            for id_ in ids:
                del self.unscored[id_], self.asked_for[id_]
            self._deliver(scores)

    def anew(self, rollout: Rollout) -> None:
        """Admit a rollout again, because its episode starts again, without its old chunks."""
        self._chunks = [c for c in self._chunks if c.rollout_id != rollout.id]
        self._admitted[rollout.id] = rollout

    def drop(self, rollout_id: int) -> None:
        """Drop an admitted rollout that needs no score."""
        self._chunks = [c for c in self._chunks if c.rollout_id != rollout_id]
        self._admitted.pop(rollout_id, None)
        del self.unscored[rollout_id]
        self._dropped.append(rollout_id)

    def read_on(self) -> None:
        if self._admitted or self._chunks:
            self.call()

    def _begin_anew(self) -> None:
        self._admitted, self._chunks = dict(self.unscored), []
        self.wanted = list(self.asked_for)
        self._tokens = sum(r.total_tokens for r in self.unscored.values())
        self._arrived(0)

    async def _replace(self) -> None:
        try:
            await self.guard.replace()
        except StrettoError:
            if not self.guard.member.retired or not self.group.leave(self):
                raise
            self._left = True
            self.unscored, self.asked_for = {}, {}
            self._begin_anew()

    async def pause(self, part: str) -> None:
        """Stop calls to the scorer, and wait as ``part`` until it is idle."""
        self.paused = True
        idle = f"{self._role} to end its call"
        await self._context.waits.until(lambda: not self._serving, self._changed, part, idle)

    async def resume(self, loaded: Work) -> None:
        """Unpause the scorer once it has loaded its next weights."""
        try:
            await loaded()
        except GoneError:
            await self._replace()
        self.paused = False
        self._changed.set()


class _ScorerGroup:
    """The replicas of one scorer. They can follow rollouts chunk by chunk if the scorer streams and
    no replica delays the decoding of a host. Otherwise they draw complete rollouts from a backlog.
    """

    def __init__(self, queues: Sequence[ReplicaQueue], context: RoleContext) -> None:
        self.queues, self._context = queues, context
        self.follows = queues[0].scorer.info.follows
        self.streams = all(queue.host is None and queue.scorer.info.streams for queue in queues)
        self.queue_of: dict[int, ReplicaQueue] = {}
        self.backlog: deque[Rollout] = deque()
        self._tokens = 0  # in the backlog
        self._rounds: deque[int] = deque()  # of the backlog, by round with score_on = "batch"
        for queue in queues:
            queue.group = self

    def admit(self, rollout: Rollout) -> None:
        queue = min(self.queues, key=lambda queue: len(queue.unscored))
        self.queue_of[rollout.id] = queue
        queue.admit(rollout)

    def scores(self, rollout: Rollout) -> bool:
        return rollout.ends_episode or not self.queues[0].scorer.info.whole_episodes

    def finish(self, rollout: Rollout) -> None:
        if queue := self.queue_of.pop(rollout.id, None):
            queue.finish(rollout.id)
        else:
            self.backlog.append(rollout)
            self._tokens += rollout.total_tokens
            if self._tokens >= self.queues[0].scorer.info.worthwhile_tokens:
                self.wake()

    def wake(self) -> None:
        if self.backlog:
            for queue in self.queues:
                if queue.free:
                    queue.call()

    def hurry(self) -> None:
        self.wake()
        for queue in self.queues:
            if queue.wanted:
                queue.call()

    async def load(self, weights: WeightsRef) -> None:
        """Load weights into all replicas in parallel, after all scores due under the old ones."""
        queues = list(self.queues)
        late = [queue for queue in queues if not queue.paused]
        for queue in late:
            await queue.pause("generation")
        while late and (self.backlog or any(queue.wanted for queue in queues)):
            for queue in queues:
                await queue.catch_up()
        loads = self._context.load([queue.guard for queue in queues], weights)
        first_resume, *other_resumes = map(ReplicaQueue.resume, queues, loads)
        async with asyncio.TaskGroup() as group:
            for resume in other_resumes:
                group.create_task(resume)
            await first_resume

    def leave(self, lost: ReplicaQueue) -> bool:
        other_queues = [queue for queue in self.queues if queue is not lost]
        if not other_queues:
            return False
        self.queues = other_queues
        for id_, rollout in lost.unscored.items():
            self.admit(rollout)
            if id_ in lost.asked_for:
                new_queue = self.queue_of.pop(id_)
                new_queue.finish(id_)
                new_queue.call()
        return True

    def end_round(self) -> None:
        if new := len(self.backlog) - sum(self._rounds):
            self._rounds.append(new)

    def draw(self) -> list[Rollout]:
        """Return one replica's share of a round, so that replicas free later get work, too."""
        round_size = self._rounds[0] if self._rounds else len(self.backlog)
        share = ceil_div(round_size, len(self.queues))
        if self._rounds:
            self._rounds[0] -= share
            if not self._rounds[0]:
                self._rounds.popleft()
        rollouts = [self.backlog.popleft() for _ in range(share)]
        self._tokens -= sum(r.total_tokens for r in rollouts)
        return rollouts


class Scoring:
    """All scorers of a run. With ``chunk`` they get rollouts at dispatch and follow their tokens,
    with ``rollout`` each when it has ended, with ``batch`` when all have. A frozen scorer gets the
    request for a score when a rollout ends. One that follows a trained model gets it when the
    rollout is chosen for a round, so that all values of a batch come from one version. ``score_on``
    may change between rounds.
    """

    def __init__(
        self,
        replicas: Sequence[ScorerReplica],
        score_on: ScoreOn,
        context: RoleContext,
        given: Sequence[str] = (),  # sources whose scores come from the environment
    ) -> None:
        self._score_on = score_on
        self._waits = context.waits
        self._given = given
        self.on_scored: Callable[[Rollout], None] | None = None  # called once it has all scores
        self._rollouts: dict[int, Rollout] = {}
        self._answers: set[int] = set()  # ids of the newest evaluation
        self._early: set[int] = set()  # ids of unscored rollouts requested at their end
        self._delivered = asyncio.Event()
        self.queues = [ReplicaQueue(replica, self._deliver, context) for replica in replicas]
        by_name: dict[tuple[bool, str], list[ReplicaQueue]] = {}
        for replica, queue in zip(replicas, self.queues, strict=True):
            by_name.setdefault((replica.held_out, queue.scorer.info.name), []).append(queue)
        groups = {key: _ScorerGroup(queues, context) for key, queues in by_name.items()}
        self._groups = [group for (held_out, _), group in groups.items() if not held_out]
        self._evaluating = [  # the groups that score evaluations
            groups.get((True, name), group)
            for (held_out, name), group in groups.items()
            if not held_out and group.queues[0].scorer.info.kind == "reward"
        ]
        self._streaming = [group for group in self._groups if group.streams]
        self._following = [group for group in self._groups if group.follows]
        self._frozen = [group for group in self._groups if not group.follows]

    def begin_round(self, score_on: ScoreOn, ended: Iterable[Rollout]) -> None:
        """Score rollouts on this event from now on, including ``ended`` ones of earlier rounds."""
        if score_on == self._score_on:
            return
        self._score_on = score_on
        for rollout in ended:
            if rollout.id not in self._early and not self.is_scored(rollout):
                self.ended(rollout)

    async def pause_followers(self) -> None:
        """Pause scorers that follow a trained model, until they load its next weights."""
        for queue in (queue for group in self._following for queue in group.queues):
            await queue.pause("training")

    async def load(self, weights: Mapping[str, WeightsRef]) -> None:
        for group in self._following:
            await group.load(weights[group.follows])

    def dispatched(self, rollouts: Iterable[Rollout]) -> None:
        """Admit rollouts about to be decoded to streaming scorers."""
        groups = self._streaming if self._score_on == "chunk" else ()
        for rollout in rollouts:
            for group in groups:
                if rollout.id not in group.queue_of:  # otherwise its episode has started again
                    group.admit(rollout)

    def anew(self, rollout: Rollout) -> None:
        for group in self._streaming:
            if queue := group.queue_of.get(rollout.id):
                queue.anew(rollout)

    def drop(self, rollout: Rollout) -> None:
        for group in self._streaming:
            if queue := group.queue_of.pop(rollout.id, None):
                queue.drop(rollout.id)

    def read_on(self) -> None:
        for group in self._streaming:
            for queue in group.queues:
                queue.read_on()

    def extended(self, chunk: Chunk) -> None:
        for group in self._streaming:
            if queue := group.queue_of.get(chunk.rollout_id):  # otherwise dispatched earlier
                queue.extend(chunk)

    def ended(self, rollout: Rollout) -> None:
        """Request the scores of frozen scorers, unless a full round is scored together."""
        if self._score_on != "batch":
            if self._frozen:
                self._early.add(rollout.id)
            self._ask(rollout, self._frozen)

    def chosen(self, rollout: Rollout) -> None:
        if self._score_on != "batch":
            self._ask(rollout, self._following)

    def gathered(self, batch: Sequence[Rollout]) -> None:
        """Request (for ``batch``) or hurry the scores of a round whose rollouts have all ended."""
        if self._score_on == "batch":
            for rollout in batch:
                early = rollout.id in self._early
                self._ask(rollout, self._following if early else self._groups)
            for group in self._groups:
                group.end_round()
        for group in self._groups:
            group.hurry()

    async def evaluate(self, answers: Sequence[Rollout]) -> None:
        """Score an evaluation's answers with all sources of rewards, and wait for the scores."""
        self._answers = {rollout.id for rollout in answers}
        for rollout in answers:
            self._ask(rollout, self._evaluating)
        for group in self._evaluating:
            if self._score_on == "batch":
                group.end_round()
            group.hurry()
        await self.all_scored(answers)

    def look(self) -> None:
        for group in self._groups:
            group.wake()

    def is_scored(self, rollout: Rollout) -> bool:
        groups = self._evaluating if rollout.id in self._answers else self._groups
        unopened = ENVIRONMENT in rollout.scores and ENVIRONMENT not in self._given
        return len(rollout.scores) == len(groups) + len(self._given) + unopened

    async def all_scored(self, rollouts: Sequence[Rollout]) -> None:
        """Wait until rollouts have all their scores."""
        unscored = list(rollouts)

        def all_delivered() -> bool:
            unscored[:] = [r for r in unscored if not self.is_scored(r)]
            return not unscored

        what = "the last scores of a round"
        await self._waits.until(
            all_delivered, self._delivered, "scoring", what, lambda: [r.id for r in unscored]
        )

    def _ask(self, rollout: Rollout, groups: Sequence[_ScorerGroup]) -> None:
        if not groups:
            return
        self._rollouts[rollout.id] = rollout
        for group in groups:
            if group.scores(rollout):
                group.finish(rollout)
            else:
                info = group.queues[0].scorer.info
                self._deliver([Score(rollout.id, info.name, info.kind, np.empty(0, np.float32))])

    def _deliver(self, scores: Sequence[Score]) -> None:
        for score in scores:
            rollout = self._rollouts[score.rollout_id]
            if score.source in rollout.scores:
                raise LifecycleError(f"rollout {rollout.id} got a second score of {score.source}")
            rollout.scores[score.source] = score
            if self.is_scored(rollout):
                del self._rollouts[rollout.id]
                self._early.discard(rollout.id)
                if self.on_scored:
                    self.on_scored(rollout)
        self._delivered.set()
