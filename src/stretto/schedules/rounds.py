"""The rounds of a schedule: its rollouts in flight, and the flow of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from stretto.bounds import ceil_div
from stretto.config import ENVIRONMENT
from stretto.protocols import DRIVER, Environment, Generator
from stretto.schedules.buffer import Buffer
from stretto.schedules.controller import Meter
from stretto.schedules.controls import Controls
from stretto.schedules.early_groups import Accumulation
from stretto.schedules.episodes import Episodes
from stretto.schedules.fleet import RoleContext
from stretto.schedules.pool import Pool
from stretto.schedules.rollout import (
    EQUAL_SCORES,
    Ledger,
    Rollout,
    RolloutState,
    reasons_to_reject,
    scores_are_equal,
)
from stretto.schedules.scoring import Scoring
from stretto.types import Chunk, Prompt, Sampling


class Rounds(Ledger):
    """Ledger of training, and rounds of the pool. Evaluations between these have another ledger."""

    def __init__(
        self,
        *,
        next_prompt: Callable[[], Prompt],
        generators: Sequence[Generator],
        environment: Environment | None,
        controls: Controls,
        scoring: Scoring,
        context: RoleContext,
    ) -> None:
        super().__init__()
        self._settings = controls.settings
        self.controls = controls
        self._next_prompt = next_prompt
        self.scoring = scoring
        self.context = context
        self.pool = Pool(generators, self)
        self.episodes = Episodes(environment, self._settings, context, self.pool, scoring)
        self.meter = Meter(context.clock)
        self.buffer = Buffer(self._settings.max_carries)
        self.answers = Ledger()  # of the current evaluation
        self.size = self._settings.batch * self._settings.weight_sync_interval
        self.begun = 0
        self.is_open = False
        self.score_on = controls.knobs.score_on  # of the current round
        self.next_id = 0
        self.metrics: dict[str, float] = {}  # of the current round
        self.skipped: list[Rollout] = []  # since the last step
        self._gathered: set[int] = set()  # chosen rollouts whose scores are under way
        self.accumulation = Accumulation(self._settings, self.buffer, scoring)
        if self._skips or self._settings.train_on == "group":
            scoring.on_scored = self._scored

    @property
    def chunk_tokens(self) -> int:
        """Tokens that a call may add to a rollout."""
        return self._settings.max_new_tokens if self.lockstep else self.controls.chunk_tokens

    @property
    def waiting(self) -> int:
        """Number of rollouts that wait for environments."""
        return len(self.episodes.pending)

    @property
    def lockstep(self) -> bool:
        """Whether this is the plain loop, whose order is not random."""
        unseen = self.score_on == "batch" and self.controls.migration is None
        plain = len(self.buffer) <= self.size
        return unseen and (plain or (self.pool.single and not self.episodes.exist))

    def missing(self) -> int:
        """Return the smallest number of rollouts that must end before decoding may stop."""
        if answers := self.answers.rollouts:
            return sum(r.finish is None for r in answers.values())
        return 0 if self.buffer.complete else self.buffer.missing()

    def take(self, chunks: Sequence[Chunk]) -> None:
        """Add chunks to their rollouts, and pass them on to scorers and environments."""
        with self.context.tracer.span(DRIVER, f"{DRIVER}/chunks", items=len(chunks)):
            for chunk in chunks:
                ledger = self.answers if chunk.rollout_id in self.answers.rollouts else self
                rollout = ledger.rollouts[chunk.rollout_id]
                rollout.append(chunk)
                ledger.extended(replace(chunk, finish=None) if rollout.in_turns else chunk)
                if chunk.finish and rollout.in_turns:
                    self.episodes.ask(rollout)
                elif chunk.finish:
                    ledger.ended(rollout)
        if 5 * self.buffer.chosen_size >= 4 * self.size:
            self.context.phases.enter("stragglers")

    def fill(self, delta: int) -> None:
        """Start a round: draw prompts until the buffer holds a round and ``delta`` more rollouts.
        If ``delta`` is above 0, another one is drawn for each waiting episode, because that takes
        no slot: up to twice as many, and no more than can be trained on in time.
        """
        self.begun, self.is_open = self.begun + 1, True
        self.metrics = {"schedule/overcommit": float(delta), **self.controls.metrics}
        self.score_on = self.controls.knobs.score_on
        self.accumulation.on = self.controls.knobs.train_on == "group"
        self.scoring.begin_round(self.score_on, (r for r in self.buffer if r.finish))
        self._gathered = set()
        if self._skips:
            self.metrics["schedule/skipped"] = 0.0
            self._skip(self.buffer)
        n, size = self._settings.samples_per_prompt, self.size
        waiting = sum(r.state is RolloutState.WAITING for r in self.buffer.open) if delta else 0
        limit = (self._settings.max_carries + 1) * size
        waiting = max(0, min(waiting, size + delta, limit - size - delta))
        missing = size + delta + waiting - len(self.buffer)
        with self.context.tracer.span(DRIVER, f"{DRIVER}/fill", items=max(missing, 0)):
            self._draw(missing)
            for rollout in self.buffer.begin_round(size // n):
                self.scoring.chosen(rollout)
        self.meter.began(len(self.buffer) - waiting - size)
        self.metrics["schedule/chunk_tokens"] = float(self.chunk_tokens)
        self.context.phases.enter("data")

    def _draw(self, missing: int) -> None:
        """Draw prompts for so many rollouts, rounded up to full groups."""
        n = self._settings.samples_per_prompt
        for _ in range(ceil_div(missing, n)):
            prompt, first = self._next_prompt(), self.next_id
            group = [Rollout(first + k, prompt, group=first) for k in range(n)]
            self.next_id += n
            self.dispatch(group)
            self.buffer.add(group)
            self.episodes.add(group, self)

    @property
    def _skips(self) -> bool:
        return self._settings.most_skipped > 0

    def _scored(self, rollout: Rollout) -> None:
        """Skip a rollout's group if it turns out to have equal scores while others are decoded."""
        if self.accumulation.on:
            self.context.changed.set()
        if self._skips and self.is_open and not self.lockstep and rollout.id in self.rollouts:
            self._skip([rollout])
            if self.episodes.exist:  # they are placed once they are open
                self.episodes.request(self.buffer.open)
            else:
                self._decoding()
                new = [r for r in self.buffer.open if not self.pool.holds(r)]
                self.scoring.dispatched(new)
                self.pool.place(new)

    def _skip(self, rollouts: Iterable[Rollout]) -> None:
        """Leave out the groups of rollouts that are scored equally, and draw others instead."""
        delta = int(self.metrics["schedule/overcommit"])
        for number in dict.fromkeys(r.group for r in rollouts):
            group = self.buffer.of_group(number)
            skipped = self.metrics["schedule/skipped"] + len(group)
            if (
                group
                and skipped <= self._settings.most_skipped
                and all(map(self.scoring.is_scored, group))
                and scores_are_equal(
                    group, self._settings.reward_weights, apart=self._settings.sources_apart
                )
            ):
                self.metrics["schedule/skipped"] = skipped
                for chosen_rollout in self.buffer.remove(number):
                    self.scoring.chosen(chosen_rollout)
                self.skipped += group
                for rollout in group:
                    self.move(rollout, RolloutState.REJECTED, EQUAL_SCORES)
                self._draw(self.size + delta - len(self.buffer))

    async def settle(self) -> bool:
        """Wait for the scores of a round if some of its groups may be skipped. Returns whether it
        is complete, and otherwise needs more responses.
        """
        while self._skips:
            new = [r for r in self.buffer.chosen if r.id not in self._gathered]
            if not new:
                break
            self._gathered.update(r.id for r in new)
            self.scoring.gathered([r for r in new if not self.scoring.is_scored(r)])
            await self.scoring.all_scored(new)
            self._skip(new)  # which may choose others
        return self.buffer.complete

    def _decoding(self) -> None:
        stays = (RolloutState.DECODING, RolloutState.WAITING)
        for rollout in self.buffer.open:
            if rollout.state not in stays and (rollout.log or not self.episodes.exist):
                self.move(rollout, RolloutState.DECODING)

    async def admit(self) -> None:
        """Give the round's rollouts to the generators, and open new episodes."""
        self._decoding()
        await self.episodes.open(self.buffer.open, lockstep=self.lockstep)
        decoding = [r for r in self.buffer.open if r.state is RolloutState.DECODING]
        new = [r for r in decoding if not self.pool.holds(r)]
        self.scoring.dispatched(new)
        await self.pool.admit(new)

    def close(self) -> tuple[Sequence[Rollout], Mapping[str, float]]:
        """End the round. Returns its rollouts and metrics."""
        batch, carried = self.buffer.take()
        for rollout in carried:
            if rollout.state is RolloutState.DECODING:
                self.move(rollout, RolloutState.CARRIED)
        self.is_open = False
        return batch, {**self.metrics, "schedule/carried": float(len(carried))}

    async def answer(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        """Return greedy answers to an evaluation's prompts, while carried rollouts continue. Ids of
        answers are negative, so that training's random numbers do not depend on them.
        """
        greedy = Sampling(self._settings.max_new_tokens, temperature=0.0)
        answers = [Rollout(-i, prompt, -i, sampling=greedy) for i, prompt in enumerate(prompts, 1)]
        self.answers.dispatch(answers)
        self._decoding()
        self.episodes.add(answers, self.answers, greedy=True)
        await self.episodes.open(answers, lockstep=self.lockstep)
        if not self.episodes.exist:
            await self.pool.admit(answers)
        await self.pool.decode(gathers=False)
        answers, self.answers = list(self.answers.rollouts.values()), Ledger()
        self.episodes.forget(answers)
        return answers

    def move(self, rollout: Rollout, state: RolloutState, because: str = "") -> None:
        super().move(rollout, state, because)
        if rollout.id not in self.rollouts:
            self.episodes.forget([rollout])

    def join(self, fork: Rollout) -> None:
        super().join(fork)
        self.buffer.join(fork)

    def drop(self, fork: Rollout) -> None:
        self.buffer.drop(fork)
        super().drop(fork)

    def started(self, rollout: Rollout) -> None:
        self.scoring.dispatched([rollout])

    def extended(self, chunk: Chunk) -> None:
        self.scoring.extended(chunk)

    def ended(self, rollout: Rollout) -> None:
        """Request a rollout's scores. If its group is now chosen, also those of followers."""
        self.move(rollout, RolloutState.FINISHED)
        self.meter.ended(rollout)
        self.scoring.ended(rollout)
        for chosen_rollout in self.buffer.ended(rollout):
            self.scoring.chosen(chosen_rollout)
        if self.scoring.is_scored(rollout):  # by its environment alone
            self._scored(rollout)

    def sort_out(self, batch: Sequence[Rollout]) -> tuple[list[Rollout], list[Rollout]]:
        """Split a scored batch into rollouts to train on and rejected ones."""
        reasons = reasons_to_reject(
            batch,
            failures_allowed=self._settings.failures_allowed,
            group_at_least=self._settings.group_at_least,
            weights=self._settings.reward_weights,
        )
        trainable = [r for r in batch if r.id not in reasons]
        rejected = [r for r in batch if r.id in reasons]
        for rollout in rejected:
            self.move(rollout, RolloutState.REJECTED, reasons[rollout.id])
        for rollout in trainable:
            self.move(rollout, RolloutState.SCORED)
        return trainable, rejected

    def ask_again(self, generated: Iterable[Sequence[Rollout]]) -> None:
        """Repeat requests for scores and answers that a restart interrupted."""
        scoring, rounds = self.scoring, [r for batch in generated for r in batch]
        waiting = [r for r in self.buffer.open if r.state is RolloutState.WAITING]
        scoring.dispatched(r for r in waiting if r.log)
        for rollout in waiting:
            if self.episodes.is_unanswered(rollout):
                self.episodes.ask(rollout)
        for rollout in (*self.buffer, *rounds):
            if rollout.finish and not scoring.is_scored(rollout):
                environment_sources = (*self._settings.environment_rewards, ENVIRONMENT)
                rollout.scores = {
                    k: s for k, s in rollout.scores.items() if k in environment_sources
                }
                scoring.ended(rollout)
        for rollout in (*self.buffer.chosen, *rounds):
            if not scoring.is_scored(rollout):
                scoring.chosen(rollout)
        for batch in generated:
            scoring.gathered([r for r in batch if not scoring.is_scored(r)])
