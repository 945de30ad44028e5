"""The schedule: when each piece of work runs.

Three loops share one buffer and one ledger. ``_generate`` makes rounds of responses, ``_gather``
waits for their scores, and the caller of ``step`` trains on them, batch by batch. Five knobs decide
how far they run into each other: ``score_on`` (when scorers get to see a response), ``overcommit``
(prompts in flight beyond the batch), ``lag`` (versions that generation may be behind) and
``migrate`` (whether stragglers move together). With all of them at zero each stage waits for the
one before it. A fifth, ``hold``, decides what is kept of an episode that waits for its environment.

A *round* is what is generated between two weight syncs: ``weight_sync_interval`` batches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from stretto.config import ENVIRONMENT
from stretto.protocols import DRIVER, Clock, Environment, Generator, Learner, Tracer
from stretto.schedules.buffer import Buffer
from stretto.schedules.controller import Meter
from stretto.schedules.controls import Controls
from stretto.schedules.episode_metrics import episode_metrics
from stretto.schedules.episodes import Episodes
from stretto.schedules.evaluation import Evaluation
from stretto.schedules.fleet import Fleet, RoleContext, Sync, load_each, tickets_from, tickets_of
from stretto.schedules.pool import Pool
from stretto.schedules.rollout import (
    Ledger,
    Rollout,
    RolloutState,
    Step,
    by_episodes,
    reasons_to_reject,
    restored,
    train_batch,
)
from stretto.schedules.scoring import ScorerReplica, Scoring
from stretto.schedules.waits import Phases, Text, Waits, answered, first_of
from stretto.types import Chunk, Prompt, Sampling, Stats, TrainBatch, WeightsRef


class Schedule:
    """A schedule that takes steps, one at a time.

    Inside ``async with``, work that overlaps steps goes on between them.

    State: ledger, buffer, rounds that wait for scores or for the learner, counters, controllers. It
    is saved between two steps, while :attr:`weights_lock` is held. After a restart, rollouts that
    had not ended are decoded from where they were; tokens on the way are sampled again, the same.

    ``initial`` has tickets of the weights that roles start with, by model, for processes that come
    in the place of others before the first weight sync; without one they keep their own.
    """

    def __init__(
        self,
        next_prompt: Callable[[], Prompt],
        generators: Sequence[Generator],
        replicas: Sequence[ScorerReplica],
        learner: Learner,
        controls: Controls,
        clock: Clock,
        tracer: Tracer,
        initial: Mapping[str, WeightsRef] | None = None,
        sync: Sync = load_each,
        environment: Environment | None = None,
    ) -> None:
        s = self._settings = controls.settings
        self._next_prompt, self._learner = next_prompt, learner
        self._controls = controls
        self._migration, self._controllers = controls.migration, controls.controllers
        self._clock, self._tracer, self._phases = clock, tracer, Phases(clock, tracer)
        self.ledger = Ledger()
        self._buffer = Buffer(s.max_carries)
        self._fleet = Fleet(s.restarts, initial)
        self._waits, self._changed = Waits(), asyncio.Event()
        context = RoleContext(self._fleet, s.deadline_s, clock, self._phases, self._waits, sync)
        self._scoring = Scoring(replicas, s.score_on, context, s.environment_rewards)
        self._pool = Pool(
            roles=generators,
            round=self,
            scoring=self._scoring,
            controls=controls,
            context=context,
        )
        self._episodes: Episodes | None = None
        if environment is not None:
            roles = self._pool, self._scoring
            self._episodes = Episodes(environment, s, context, tracer, *roles, self)
        self._rollouts: dict[int, Rollout] = {}  # all in flight
        self._generated: deque[Sequence[Rollout]] = deque()  # rounds that wait for scores
        self._ready: deque[Sequence[Rollout]] = deque()  # batches that wait for the learner
        self._next_id, self._steps = 0, 0
        self._rounds, self._round_open = 0, False
        self._version, self._loaded = 0, 0  # published; in the generators
        self._filled: dict[str, float] = {}  # metrics of the round that is being generated
        self._metrics: deque[dict[str, float]] = deque()  # of each batch that was generated
        self.weights_lock = asyncio.Lock()  # held while weights are being loaded
        self.abandoned: Sequence[Rollout] = ()  # in flight at an error, rejected with the cause
        self.updating = False  # the learner may have left its state as of the last step
        self._ending = False  # see end_after_update
        self._weights: Mapping[str, WeightsRef] = {}  # published and not loaded
        self.evaluation: Evaluation | None = None  # set before the first step
        self._answers: dict[int, Rollout] = {}  # of the evaluation under way
        self._evaluated = self._reported = -1  # step of the last evaluation; as of the last step
        self._work = asyncio.TaskGroup()
        self._loops: list[asyncio.Task[None]] = []
        self._meter = Meter(clock)

    @property
    def loaded(self) -> int:
        return self._loaded

    @property
    def held(self) -> Mapping[str, WeightsRef]:
        return self._fleet.held

    @property
    def pending(self) -> Mapping[str, WeightsRef]:
        """Tickets for weights that are published and not loaded, by model."""
        return self._weights if self._loaded < self._version else {}

    @property
    def in_flight(self) -> Sequence[Rollout]:
        return list(self._rollouts.values())

    async def step(self) -> Step:
        """Take one batch from prompts to new weights."""
        batch = await self._next_batch()
        with self._own_work("batch", len(batch)):
            kept, rejected = self._sort_out(batch)
            columns = train_batch(kept)
        self._ready.popleft()
        self.updating = True
        stats, rewards = await self._train(kept, columns)
        await self._publish()
        if not self._settings.lag or self._steps == self._settings.steps:
            await self.evaluated()
        self._reported = self._evaluated
        self.updating = False
        rejections = {"rejected": float(self.ledger.rejected.total())}
        metrics = {**self._metrics.popleft(), **rejections, **self._meter.metrics(batch)}
        stats = {**stats, **metrics, **episode_metrics(kept), **self._fleet.metrics()}
        return Step(kept, rejected, stats, rewards, self._fleet.losses())

    async def evaluated(self) -> None:
        """Wait until the newest weights are evaluated, if that is due."""
        step = self._step_of(self._version)
        if step == self._steps and self._is_due(step):
            await self._until(
                lambda: self._ending or self._evaluated >= step,
                "training",
                f"the evaluation of step {step}",
            )
        self._reported = self._evaluated

    def end_after_update(self) -> None:
        """Have :meth:`step` return after its update, and not wait for an evaluation."""
        self._ending = True
        self._changed.set()

    async def _generate(self) -> None:
        """Make rounds of responses, and evaluate.

        Consumes prompts and weights. Waits for the learner when it is ``lag`` versions ahead of
        what was published, and for enough responses to end. Unblocked by :meth:`_publish`.
        """
        while self._rounds < self._rounds_in_all or self._round_open:
            if not self._round_open:  # else it was taken up again in the middle of one
                await self._until(self._may_generate, "generation", self._lacks_weights)
                delta = self._controls.delta
                await self._load()
                await self._evaluate()
                self._fill(delta)
            await self._admit()
            with self._meter.generating():
                await self._pool.decode()
            self._close_round()
            self._changed.set()
        if self.evaluation:
            last = self._rounds_in_all
            await self._until(lambda: self._version == last, "generation", "the last weights")
            await self._load()
            await self._evaluate()

    async def _gather(self) -> None:
        while True:
            await self._until(lambda: bool(self._generated), "scoring", "a round")
            await self._scoring.all_scored(self._generated[0])
            self._split(self._generated.popleft())
            self._changed.set()

    # -- generation ---------------------------------------------------------------------------

    @property
    def _round_size(self) -> int:
        return self._settings.batch * self._settings.weight_sync_interval

    @property
    def _rounds_in_all(self) -> int:
        return -(-self._settings.steps // self._settings.weight_sync_interval)

    def _may_generate(self) -> bool:
        return self._version >= self._rounds - self._settings.lag

    def _lacks_weights(self) -> str:
        wanted = self._rounds - self._settings.lag
        return f"version {wanted} of the weights ({self._version} is published)"

    async def _load(self) -> None:
        async with self._waits.holding(self.weights_lock, "generation", "the checkpoint"):
            if self._loaded < self._version:
                version, weights = self._version, self._weights
                await self._pool.load(weights["actor"])
                await self._scoring.load(weights)
                self._loaded, self._fleet.held = version, weights

    def _step_of(self, version: int) -> int:
        return version * self._settings.weight_sync_interval

    def _is_due(self, step: int) -> bool:
        lag, last = self._settings.lag, self._step_of(self._rounds_in_all)
        late = self._step_of(lag) + 1 if lag else 0
        evaluation = self.evaluation
        return evaluation is not None and evaluation.is_due(step, self._evaluated, last, late)

    async def _evaluate(self) -> None:
        """Have the weights that generators hold evaluated, if that is due.

        With nothing else to train on, the learner waits; where generation may lag, it goes on.
        """
        step = self._step_of(self._loaded)
        if self.evaluation is None or not self._is_due(step):
            return
        since_s = self._clock.now()
        greedy = Sampling(self._settings.max_new_tokens, temperature=0.0)
        prompts = enumerate(self.evaluation.prompts, 1)
        answers = [Rollout(-i, prompt, -i, sampling=greedy) for i, prompt in prompts]
        self._answers = {r.id: r for r in answers}
        self._decoding()  # carried ones go on beside it
        if self._episodes:
            self._episodes.add(answers, greedy=True)
            await self._open(answers)
        else:
            await self._pool.admit(answers)
        await self._pool.decode(gathers=False)
        answers, self._answers = list(self._answers.values()), {}
        if self._episodes:
            self._episodes.forget(answers)
        await self._scoring.evaluate(answers)
        await self.evaluation.take(step, answers, self._clock.now() - since_s)
        self._evaluated = step
        self._changed.set()

    def _fill(self, delta: int) -> None:
        """Start a round: draw prompts until the buffer holds a round's rollouts and ``delta``.

        An episode that waits takes no slot, so another one is drawn beside it: up to as many again,
        and as long as all can be trained on in time.
        """
        n, size = self._settings.samples_per_prompt, self._round_size
        waiting = sum(r.state is RolloutState.WAITING for r in self._buffer.open) if delta else 0
        most = (self._settings.max_carries + 1) * size
        waiting = max(0, min(waiting, size + delta, most - size - delta))
        missing = size + delta + waiting - len(self._buffer)
        with self._own_work("fill", max(missing, 0)):
            for _ in range(-(-missing // n)):
                prompt, first = self._next_prompt(), self._next_id
                group = [Rollout(first + k, prompt, group=first) for k in range(n)]
                self._next_id += n
                self.ledger.dispatch(group)
                self._rollouts.update((r.id, r) for r in group)
                self._buffer.add(group)
                if self._episodes:
                    self._episodes.add(group)
            for rollout in self._buffer.begin_round(size // n):
                self._scoring.chosen(rollout)
        self._rounds, self._round_open = self._rounds + 1, True
        self._meter.began(len(self._buffer) - waiting - size)
        self._filled = {
            "schedule/overcommit": float(delta),
            "schedule/chunk_tokens": float(self.chunk_tokens),
        }
        self._phases.enter("data")

    def _decoding(self) -> None:
        stays = (RolloutState.DECODING, RolloutState.WAITING)
        for rollout in self._buffer.open:
            if rollout.state not in stays and (rollout.log or not self._episodes):
                self.ledger.move(rollout, RolloutState.DECODING)

    async def _admit(self) -> None:
        self._decoding()
        if self._episodes:
            await self._open(self._buffer.open)
        decoding = [r for r in self._buffer.open if r.state is RolloutState.DECODING]
        new = [r for r in decoding if not self._pool.holds(r)]
        self._scoring.dispatched(new)
        await self._pool.admit(new)

    @property
    def chunk_tokens(self) -> int:
        return self._settings.max_new_tokens if self.lockstep else self._controls.chunk_tokens

    def missing(self) -> int:
        if self._answers:
            return sum(r.finish is None for r in self._answers.values())
        return 0 if self._buffer.complete else self._buffer.missing()

    # -- episodes -----------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._episodes.pending) if self._episodes else 0

    @property
    def lockstep(self) -> bool:
        """Whether this is the plain loop, which chance does not order."""
        unseen = self._settings.score_on == "batch" and self._migration is None
        plain = len(self._buffer) <= self._round_size
        return unseen and (plain or (self._pool.single and not self._episodes))

    async def _open(self, rollouts: Sequence[Rollout]) -> None:
        assert self._episodes
        for rollout in rollouts:
            if rollout.id not in self._episodes.pending and self._episodes.is_unanswered(rollout):
                self._wait(rollout)
        if self.lockstep:
            opening = {r.id for r in rollouts}
            pending = self._episodes.pending
            await self._until(lambda: not opening & pending, "generation", "openings of episodes")

    def _wait(self, rollout: Rollout) -> None:
        assert self._episodes
        if rollout.state is not RolloutState.WAITING:
            self.move(rollout, RolloutState.WAITING)
        self._episodes.ask(rollout, self._work)

    def move(self, rollout: Rollout, state: RolloutState) -> None:
        """See :class:`~stretto.schedules.episodes.Books`."""
        if rollout.id < 0:
            self._answers[rollout.id] = rollout
            rollout.move(state)
            return
        if rollout.id not in self._rollouts:
            self._rollouts[rollout.id] = rollout
            self.ledger.dispatch([rollout])
            self._buffer.join(rollout)
        self.ledger.move(rollout, state)

    def ended(self, rollout: Rollout) -> None:
        if rollout.id >= 0:
            self._end(rollout)

    def answered(self) -> None:
        self._pool.wake()
        self._changed.set()

    def drop(self, fork: Rollout) -> None:
        """See :class:`~stretto.schedules.episodes.Books`."""
        if fork.id < 0:
            del self._answers[fork.id]
            return
        self._buffer.drop(fork)
        self._finish(fork, RolloutState.REJECTED, "its episode is begun anew")

    # -- what was decoded ---------------------------------------------------------------------

    def take(self, chunks: Sequence[Chunk]) -> None:
        """Add what was decoded to its rollouts, and pass it on to scorers and environments."""
        with self._own_work("chunks", len(chunks)):
            for chunk in chunks:
                evaluated = chunk.rollout_id < 0
                rollout = (self._answers if evaluated else self._rollouts)[chunk.rollout_id]
                rollout.append(chunk)
                if not evaluated:
                    seen = replace(chunk, finish=None) if rollout.in_turns else chunk
                    self._scoring.extended(seen)
                if chunk.finish and rollout.in_turns:
                    self._wait(rollout)
                elif chunk.finish and not evaluated:
                    self._end(rollout)
        if 5 * self._buffer.chosen_size >= 4 * self._round_size:
            self._phases.enter("stragglers")

    def _end(self, rollout: Rollout) -> None:
        self.ledger.move(rollout, RolloutState.FINISHED)
        self._meter.ended(rollout)
        self._scoring.ended(rollout)
        for chosen in self._buffer.ended(rollout):
            self._scoring.chosen(chosen)

    def _close_round(self) -> None:
        batch, carried = self._buffer.take()
        for rollout in carried:
            if rollout.state is RolloutState.DECODING:
                self.ledger.move(rollout, RolloutState.CARRIED)
        metrics = {**self._filled, "schedule/carried": float(len(carried))}
        self._metrics.extend([metrics] * self._settings.weight_sync_interval)
        self._scoring.gathered(batch)
        self._generated.append(batch)
        self._round_open = False
        self._phases.enter("scores")

    def _split(self, scored: Sequence[Rollout]) -> None:
        self._ready.extend(by_episodes(scored, self._settings.batch))
        if not self._round_open:
            self._phases.enter("weights")

    # -- learning -----------------------------------------------------------------------------

    async def _next_batch(self) -> Sequence[Rollout]:
        since_s = self._clock.now()
        await self._until(lambda: bool(self._ready), "training", self._lacks_batch)
        self._phases.waited("learner", since_s)
        return self._ready[0]

    def _lacks_batch(self) -> str:
        done = f"{self._steps} of {self._settings.steps} steps are done"
        begun = f"{self._rounds} of {self._rounds_in_all} rounds begun"
        return f"a batch with all its scores ({done}, {begun})"

    def _sort_out(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], list[Rollout]]:
        reasons = reasons_to_reject(
            rollouts,
            failures_allowed=self._settings.failures_allowed,
            group_at_least=self._settings.group_at_least,
            weights=self._settings.reward_weights,
        )
        kept = [r for r in rollouts if r.id not in reasons]
        rejected = [r for r in rollouts if r.id in reasons]
        for rollout in rejected:
            self._finish(rollout, RolloutState.REJECTED, reasons[rollout.id])
        for rollout in kept:
            self.ledger.move(rollout, RolloutState.SCORED)
        return kept, rejected

    async def _train(
        self, batch: Sequence[Rollout], columns: TrainBatch
    ) -> tuple[Stats, Mapping[int, float]]:
        if not self._settings.lag:  # the learner's weights are the followers' own
            await self._scoring.pause_followers()
        ids = [r.id for r in batch]
        deadline_s = self._settings.deadline_s
        output = await answered(self._learner.train(columns), deadline_s, "the learner", ids)
        with self._own_work("books", len(batch)):
            for rollout in batch:
                self._finish(rollout, RolloutState.TRAINED)
            self._meter.trained(output.stats)
        return output.stats, dict(zip(ids, output.rewards.tolist(), strict=True))

    def _adapt(self) -> None:
        feedback = self._meter.feedback(self._pool.take_samples())
        self._controls.chunk.observe(feedback)
        self._controls.overcommit.observe(feedback)
        if self._migration is not None:
            self._migration.observe(feedback)

    async def _publish(self) -> None:
        self._steps += 1
        if self._steps % self._settings.weight_sync_interval == 0:
            with self._own_work("adapt", 1):
                self._adapt()
            work = self._learner.publish()
            self._weights = await answered(work, self._settings.deadline_s, "the learner")
            self._version += 1
            self._changed.set()

    def _finish(self, rollout: Rollout, state: RolloutState, because: str = "") -> None:
        self.ledger.move(rollout, state, because)
        del self._rollouts[rollout.id]
        if self._episodes:
            self._episodes.forget([rollout])

    def _own_work(self, name: str, items: int) -> AbstractContextManager[object]:
        return self._tracer.span(DRIVER, f"{DRIVER}/{name}", items=items)

    # -- the loops' life ----------------------------------------------------------------------

    async def _until(self, condition: Callable[[], bool], part: str, what: Text) -> None:
        await self._waits.until(condition, self._changed, part, what)

    async def __aenter__(self) -> Self:
        await self._work.__aenter__()
        self._ask_again()
        scorers = (queue.run for queue in self._scoring.queues)
        loops = (self._generate, self._gather, *scorers, *self._pool.keepers())
        self._loops = [self._waits.begin(loop, self._work) for loop in loops]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the loops; raise the first error that one ended with, which interrupted the step."""
        for loop in self._loops:
            loop.cancel()
        if self._episodes:
            self._episodes.cancel()
        try:
            await self._work.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            error = first_of(group)
            raise error from error.__cause__
        finally:
            if error is not None:
                cancelled = isinstance(error, asyncio.CancelledError)
                because = "cancelled" if cancelled else type(error).__name__
                self.abandoned = self.in_flight
                for rollout in self.abandoned:
                    self._finish(rollout, RolloutState.REJECTED, f"the run ended: {because}")

    def _ask_again(self) -> None:
        """Repeat the requests for scores and answers that a restart has cut off."""
        waiting = [r for r in self._buffer.open if r.state is RolloutState.WAITING]
        self._scoring.dispatched(r for r in waiting if r.log)
        for rollout in waiting:
            if Episodes.is_unanswered(rollout):
                self._wait(rollout)
        rounds = [r for batch in self._generated for r in batch]
        for rollout in (*self._buffer, *rounds):
            if rollout.finish and not self._scoring.is_scored(rollout):
                given = (*self._settings.environment_rewards, ENVIRONMENT)
                rollout.scores = {k: s for k, s in rollout.scores.items() if k in given}
                self._scoring.ended(rollout)
        for rollout in (*self._buffer.chosen, *rounds):
            if not self._scoring.is_scored(rollout):
                self._scoring.chosen(rollout)
        for batch in self._generated:
            self._scoring.gathered([r for r in batch if not self._scoring.is_scored(r)])

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and arrays that grow later. Call it between two steps."""
        return {
            "ledger": self.ledger.state_dict(),
            "buffer": self._buffer.state_dict(),
            "generated": [[r.state_dict() for r in batch] for batch in self._generated],
            "ready": [[r.state_dict() for r in batch] for batch in self._ready],
            "counts": [self._next_id, self._steps, self._rounds, self._version, self._loaded],
            "round_open": self._round_open,
            "evaluated": self._reported,
            "metrics": [dict(self._filled), *map(dict, self._metrics)],
            "meter": self._meter.state_dict(),
            "weights": tickets_of(self.pending),
            "fleet": self._fleet.state_dict(),
            **{name: each.state_dict() for name, each in self._controllers.items()},
        }

    def load_state_dict(
        self, state: Mapping[str, Any], prompt_by_id: Callable[[int], Prompt], channel: str = ""
    ) -> None:
        """Take up a state before the first step; weights not loaded yet are in the channel."""
        self.ledger.load_state_dict(state["ledger"])
        self._buffer.load_state_dict(state["buffer"], prompt_by_id)
        for batches, saved in ((self._generated, "generated"), (self._ready, "ready")):
            batches.extend(restored(batch, prompt_by_id) for batch in state[saved])
        waiting = (r for batch in (*self._generated, *self._ready) for r in batch)
        self._rollouts = {r.id: r for r in (*self._buffer, *waiting)}
        if self._episodes:
            self._episodes.add(self._rollouts.values())
        self._next_id, self._steps, self._rounds, self._version, self._loaded = state["counts"]
        self._round_open = state["round_open"]
        self._evaluated = self._reported = state.get("evaluated", -1)
        self._filled, *metrics = map(dict, state["metrics"])
        self._metrics = deque(metrics)
        self._meter.load_state_dict(state["meter"])
        self._weights = tickets_from(state["weights"], channel)
        self._fleet.load_state_dict(state["fleet"], channel)
        for name, controller in self._controllers.items():
            if state.get(name):
                controller.load_state_dict(state[name])
