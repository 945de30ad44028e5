"""The schedule: when each piece of work runs.

Loops share one buffer and one ledger. ``_generate`` makes rounds of responses, ``_gather`` waits
for their scores, and the caller of ``step`` trains on them, batch by batch. Five knobs decide how
far they overlap: ``score_on`` (when scorers see a response), ``overcommit`` (responses in flight
beyond the batch), ``lag`` (versions that generation may be behind), ``migrate`` (whether stragglers
move together) and ``train_on`` (whether ``_accumulate`` lets the learner start on groups). With all
of them off, each stage waits for the one before it. A sixth knob, ``hold``, decides on the KV cache
of episodes that wait for their environment.

A *round* is the generation between two weight syncs: ``weight_sync_interval`` batches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from stretto.bounds import ceil_div
from stretto.protocols import DRIVER, Clock, Environment, Generator, Learner, Tracer
from stretto.schedules.controls import Controls
from stretto.schedules.episode_metrics import episode_metrics
from stretto.schedules.evaluation import Evaluation
from stretto.schedules.fleet import Fleet, RoleContext, Sync, load_each, tickets_from
from stretto.schedules.rollout import (
    EQUAL_SCORES,
    Rollout,
    RolloutState,
    Step,
    by_episodes,
    restored,
    train_batch,
)
from stretto.schedules.rounds import Rounds
from stretto.schedules.scoring import ScorerReplica, Scoring
from stretto.schedules.waits import Phases, Text, Waits, deadline, first_of
from stretto.stateful import to_plain
from stretto.types import Prompt, Stats, TrainBatch, WeightsRef


class Schedule:
    """Takes steps, one at a time. Inside ``async with``, overlapping work continues between them.

    State: ledger, buffer, rounds that wait for scores or for the learner, counters, controllers. It
    must be saved between two steps, while :attr:`weights_lock` is held. After a restart, unfinished
    rollouts continue after their last token. Tokens lost on the way are sampled again, identically.

    ``initial`` has tickets of the initial weights, by model, for processes replaced before the
    first weight sync. Without a ticket they keep their own weights.
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
        self._learner = learner
        self._controls = controls
        self._clock = clock
        self._tracer = tracer
        self._phases = Phases(clock, tracer)
        self.fleet = Fleet(s.restarts, initial)
        self._waits = Waits()
        context = RoleContext(
            self.fleet, s.deadline_s, clock, tracer, self._phases, self._waits, sync
        )
        self._work, self._changed = context.work, context.changed
        self._scoring = Scoring(replicas, s.score_on, context, s.environment_rewards)
        self.ledger = self._rounds = Rounds(
            next_prompt=next_prompt,
            generators=generators,
            environment=environment,
            controls=controls,
            scoring=self._scoring,
            context=context,
        )
        self._pool, self._episodes = self._rounds.pool, self._rounds.episodes
        self._buffer, self._meter = self._rounds.buffer, self._rounds.meter
        self._accumulation = self._rounds.accumulation
        self._generated: deque[Sequence[Rollout]] = deque()  # rounds that wait for scores
        self._ready: deque[Sequence[Rollout]] = deque()  # batches that wait for the learner
        self._steps = 0
        self._lag = controls.knobs.lag  # of the next round
        self._version, self.loaded = 0, 0  # published, and in the generators
        self._metrics: deque[Mapping[str, float]] = deque()  # of each generated batch
        self.weights_lock = asyncio.Lock()  # held while weights are being loaded
        self.abandoned: Sequence[Rollout] = ()  # in flight at an error, rejected with the cause
        self.updating = False  # whether the learner may have left the last step's state
        self._idle_since_s: float | None = None  # of the learner, while a step waits for its batch
        self._ending = False  # see end_after_update
        self._weights: Mapping[str, WeightsRef] = {}  # published and not loaded
        self.evaluation: Evaluation | None = None  # set before the first step
        self._evaluated = self._reported = -1  # last evaluated step: now, and after step()
        self._loops: list[asyncio.Task[None]] = []

    @property
    def pending(self) -> Mapping[str, WeightsRef]:
        """Tickets of weights published but not loaded, by model."""
        return self._weights if self.loaded < self._version else {}

    @property
    def in_flight(self) -> Sequence[Rollout]:
        return list(self.ledger.rollouts.values())

    async def step(self) -> Step:
        """Train on the next batch, and publish the weights if due."""
        batch = await self._next_batch()
        with self._tracer.span(DRIVER, f"{DRIVER}/batch", items=len(batch)):
            trainable, rejected = self._rounds.sort_out(batch)
            columns = train_batch(trainable)
        self._ready.popleft()
        self.updating = True
        stats, rewards = await self._train(trainable, columns)
        await self._publish()
        if not self._settings.lag or self._steps == self._settings.steps:
            await self.evaluated()
        self._reported = self._evaluated
        self.updating = False
        if self._accumulation.on:
            self._accumulation.end_step()
            self._changed.set()
        skipped, self._rounds.skipped = self._rounds.skipped, []
        rejected_so_far = self.ledger.rejected.total() - self.ledger.rejected[EQUAL_SCORES]
        rejections = {"rejected": float(rejected_so_far)}
        metrics = {**self._metrics.popleft(), **rejections, **self._meter.metrics(batch)}
        stats = {**stats, **metrics, **episode_metrics(trainable), **self.fleet.metrics()}
        losses, decisions = self.fleet.losses(), self._controls.take_news()
        return Step(trainable, rejected, skipped, stats, rewards, losses, decisions)

    async def evaluated(self) -> None:
        """Wait for the evaluation of the newest weights, if due."""
        step = self._step_of(self._version)
        if step == self._steps and self._is_due(step):
            what = f"the evaluation of step {step}"
            await self._until(lambda: self._ending or self._evaluated >= step, "training", what)
        self._reported = self._evaluated

    def end_after_update(self) -> None:
        """Let :meth:`step` return after its update, without waiting for an evaluation."""
        self._ending = True
        self._changed.set()

    async def _generate(self) -> None:
        """Generate rounds, and evaluate. Waits for enough responses to end, and for
        :meth:`_publish` while weights are more than ``lag`` versions behind the next round.
        """
        rounds = self._rounds
        while rounds.begun < self._rounds_in_all or rounds.is_open:
            if not rounds.is_open:  # otherwise resumed in the middle of one
                await self._until(self._may_generate, "generation", self._lacks_weights)
                delta = self._controls.delta
                await self._load()
                await self._evaluate()
                rounds.fill(delta)
            while True:
                await rounds.admit()
                with self._meter.generating():
                    await self._pool.decode()
                if await rounds.settle():
                    break
            batch, metrics = rounds.close()
            self._metrics.extend([metrics] * self._settings.weight_sync_interval)
            self._scoring.gathered([r for r in batch if not self._scoring.is_scored(r)])
            self._generated.append(batch)
            self._phases.enter("scores")
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
            self._ready.extend(by_episodes(self._generated.popleft(), self._settings.batch))
            if not self._rounds.is_open:
                self._phases.enter("weights")
            self._changed.set()

    async def _accumulate(self) -> None:
        """Let the learner start on finished groups, one call at a time, until their batch is
        complete.
        """
        while True:
            await self._until(lambda: bool(self._to_accumulate()), "accumulation", "a full group")
            rollouts = self._to_accumulate()
            self._accumulation.begin(rollouts)
            if self._idle_since_s is not None:
                self._phases.waited("learner", self._idle_since_s)
            ids = [r.id for r in rollouts]
            async with deadline(self._settings.deadline_s, "the learner", ids):
                await self._learner.accumulate(train_batch(rollouts))
            if self._idle_since_s is not None:
                self._idle_since_s = self._clock.now()
            self._accumulation.running = False
            self._changed.set()

    def _to_accumulate(self) -> list[Rollout]:
        if self.updating or self._ready or not self._accumulation.on:
            return []
        return self._accumulation.ready(self._generated[0] if self._generated else ())

    @property
    def _rounds_in_all(self) -> int:
        return ceil_div(self._settings.steps, self._settings.weight_sync_interval)

    def _may_generate(self) -> bool:
        return self._version >= self._rounds.begun - self._lag

    def _lacks_weights(self) -> str:
        version = self._rounds.begun - self._lag
        return f"version {version} of the weights ({self._version} is published)"

    async def _load(self) -> None:
        async with self._waits.holding(self.weights_lock, "generation", "the checkpoint"):
            if self.loaded < self._version:
                version, weights = self._version, self._weights
                await self._pool.load(weights["actor"])
                await self._scoring.load(weights)
                self.loaded, self.fleet.held = version, weights

    def _step_of(self, version: int) -> int:
        return version * self._settings.weight_sync_interval

    def _is_due(self, step: int) -> bool:
        lag, last = self._settings.lag, self._step_of(self._rounds_in_all)
        late = self._step_of(lag) + 1 if lag else 0
        evaluation = self.evaluation
        return evaluation is not None and evaluation.is_due(step, self._evaluated, last, late)

    async def _evaluate(self) -> None:
        """Evaluate the generators' weights, if due. Without ``lag``, the learner waits for this."""
        step = self._step_of(self.loaded)
        if self.evaluation is None or not self._is_due(step):
            return
        since_s = self._clock.now()
        answers = await self._rounds.answer(self.evaluation.prompts)
        await self._scoring.evaluate(answers)
        await self.evaluation.take(step, answers, self._clock.now() - since_s)
        self._evaluated = step
        self._changed.set()

    async def _next_batch(self) -> Sequence[Rollout]:
        self._idle_since_s = self._clock.now()
        await self._until(
            lambda: bool(self._ready) and not self._accumulation.running,
            "training",
            self._lacks_batch,
        )
        self._phases.waited("learner", self._idle_since_s)
        self._idle_since_s = None
        return self._ready[0]

    def _lacks_batch(self) -> str:
        steps = f"{self._steps} of {self._settings.steps} steps are done"
        rounds = f"{self._rounds.begun} of {self._rounds_in_all} rounds begun"
        return f"a batch with all its scores ({steps}, {rounds})"

    async def _train(
        self, batch: Sequence[Rollout], columns: TrainBatch
    ) -> tuple[Stats, Mapping[int, float]]:
        if not self._lag:  # followers may share the learner's weights
            await self._scoring.pause_followers()
        ids = [r.id for r in batch]
        async with deadline(self._settings.deadline_s, "the learner", ids):
            output = await self._learner.train(columns)
        with self._tracer.span(DRIVER, f"{DRIVER}/books", items=len(batch)):
            for rollout in batch:
                self._rounds.move(rollout, RolloutState.TRAINED)
            self._meter.trained(batch, output.stats)
        return output.stats, dict(zip(ids, output.rewards.tolist(), strict=True))

    async def _publish(self) -> None:
        self._steps += 1
        if self._steps % self._settings.weight_sync_interval == 0:
            with self._tracer.span(DRIVER, f"{DRIVER}/adapt", items=1):
                self._controls.observe(self._meter.feedback(self._pool.take_samples()))
            async with deadline(self._settings.deadline_s, "the learner"):
                self._weights = await self._learner.publish()
            self._version += 1
            self._lag = self._controls.knobs.lag
            self._changed.set()

    async def _until(self, condition: Callable[[], bool], part: str, what: Text) -> None:
        await self._waits.until(condition, self._changed, part, what)

    async def __aenter__(self) -> Self:
        await self._work.__aenter__()
        self._rounds.ask_again(self._generated)
        scorers = (queue.run for queue in self._scoring.queues)
        loops = [self._generate, self._gather, *scorers, *self._pool.keepers()]
        if self._settings.train_on == "group":
            loops.append(self._accumulate)
        self._loops = [self._waits.begin(loop, self._work) for loop in loops]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the loops, and raise the first error of one, which interrupted the step."""
        for loop in self._loops:
            loop.cancel()
        self._episodes.cancel()
        try:
            await self._work.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            error = first_of(group)
            raise error from error.__cause__
        finally:
            if error is not None:
                cancelled = isinstance(error, asyncio.CancelledError)
                cause = "cancelled" if cancelled else type(error).__name__
                self.abandoned = self.in_flight
                for rollout in self.abandoned:
                    self._rounds.move(rollout, RolloutState.REJECTED, f"the run ended: {cause}")

    def state_dict(self) -> dict[str, Any]:
        """Return plain data, and arrays that grow later. Must be called between two steps."""
        r = self._rounds
        return {
            "ledger": self.ledger.state_dict(),
            "buffer": self._buffer.state_dict(),
            "generated": [[r.state_dict() for r in batch] for batch in self._generated],
            "skipped": [r.state_dict() for r in self._rounds.skipped],
            "ready": [[r.state_dict() for r in batch] for batch in self._ready],
            "counts": [r.next_id, self._steps, r.begun, self._version, self.loaded],
            "round_open": r.is_open,
            "score_on": r.score_on,
            "evaluated": self._reported,
            "metrics": [dict(r.metrics), *map(dict, self._metrics)],
            "meter": self._meter.state_dict(),
            "weights": to_plain(self.pending),
            "fleet": self.fleet.state_dict(),
            **{
                name: controller.state_dict()
                for name, controller in self._controls.controllers.items()
            },
        }

    def load_state_dict(
        self, state: Mapping[str, Any], prompt_by_id: Callable[[int], Prompt], channel: str = ""
    ) -> None:
        """Restore a state before the first step. Pending weights must be in the channel."""
        self.ledger.load_state_dict(state["ledger"])
        self._buffer.load_state_dict(state["buffer"], prompt_by_id)
        for batches, key in ((self._generated, "generated"), (self._ready, "ready")):
            batches.extend(restored(batch, prompt_by_id) for batch in state[key])
        waiting = (r for batch in (*self._generated, *self._ready) for r in batch)
        rounds = self._rounds
        rounds.rollouts = {r.id: r for r in (*self._buffer, *waiting)}
        self._episodes.add(rounds.rollouts.values(), rounds)
        rounds.next_id, self._steps, rounds.begun, self._version, self.loaded = state["counts"]
        rounds.is_open = state["round_open"]
        rounds.skipped = restored(state.get("skipped", ()), prompt_by_id)
        self._evaluated = self._reported = state.get("evaluated", -1)
        rounds.metrics, *metrics = map(dict, state["metrics"])
        self._metrics = deque(metrics)
        self._meter.load_state_dict(state["meter"])
        self._weights = tickets_from(state["weights"], channel)
        self.fleet.load_state_dict(state["fleet"], channel)
        for name, controller in self._controls.controllers.items():
            if state.get(name):
                controller.load_state_dict(state[name])
        self._lag = self._controls.knobs.lag
        self._accumulation.on = self._controls.knobs.train_on == "group"
        rounds.score_on = state.get("score_on", self._settings.score_on)
        self._scoring.begin_round(rounds.score_on, ())
