"""Episodes: requests to the environment, and the effects of its answers on rollouts.

Each answer is awaited in a task of its own, in parallel with everything else. Meanwhile the rollout
is ``WAITING``: it takes memory but no slot, scorers may read all its tokens, and weights may
change. A restart repeats the requests for unanswered turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from stretto.config import ENVIRONMENT
from stretto.config.knobs import Settings
from stretto.errors import EpisodeLostError, LifecycleError
from stretto.protocols import Environment
from stretto.schedules.episode_metrics import tools_called
from stretto.schedules.fleet import RoleContext
from stretto.schedules.pool import Pool
from stretto.schedules.rollout import Ledger, Rollout, RolloutState
from stretto.schedules.scoring import Scoring
from stretto.schedules.waits import deadline
from stretto.types import Chunk, FinishReason, Observation, Score, episode_of

TOKEN_LIMITS = ("turn_tokens", "tokens")  # ends of an episode that cut its last turn
MOST_BEGINNINGS = 3  # starts of an episode, if its environment is lost and cannot be replayed


@dataclass(eq=False)
class Episodes:
    """The episodes of a run, and the environment that answers their turns."""

    environment: Environment | None
    settings: Settings
    context: RoleContext
    pool: Pool
    scoring: Scoring

    def __post_init__(self) -> None:
        self._samples: dict[int, list[Rollout]] = {}  # by episode
        self._ledgers: dict[int, Ledger] = {}  # by episode
        self._open: set[int] = set()  # episodes open in the environment
        self._beginnings: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.pending: set[int] = set()  # rollouts whose request is in progress

    @property
    def exist(self) -> bool:
        return self.environment is not None

    def add(self, samples: Iterable[Rollout], ledger: Ledger, *, greedy: bool = False) -> None:
        """Make rollouts samples of the episodes in their ids, which may be new."""
        sampling = self.settings.episodes
        if self.environment is None or sampling is None:
            return
        for sample in samples:
            episode = episode_of(sample.id)
            self._ledgers[episode] = ledger
            sample.sampling = replace(sampling, temperature=0.0) if greedy else sampling
            sample.samples = self._samples.setdefault(episode, [])
            sample.samples.append(sample)

    async def open(self, rollouts: Sequence[Rollout], *, lockstep: bool) -> None:
        """Request missing openings and answers of rollouts. In lockstep, wait for all."""
        self.request(rollouts)
        if lockstep and self.exist:
            opening, changed = {r.id for r in rollouts}, self.context.changed
            await self.context.waits.until(
                lambda: not opening & self.pending, changed, "generation", "openings of episodes"
            )

    def request(self, rollouts: Iterable[Rollout]) -> None:
        """Request missing openings and answers of rollouts."""
        if self.exist:
            for rollout in rollouts:
                if rollout.id not in self.pending and self.is_unanswered(rollout):
                    self.ask(rollout)

    def ask(self, rollout: Rollout) -> None:
        """Request the answer to a rollout's turn, or its opening, in a new task."""
        if rollout.state is not RolloutState.WAITING:
            self._ledgers[episode_of(rollout.id)].move(rollout, RolloutState.WAITING)
        self.pending.add(rollout.id)
        task = self.context.waits.begin(partial(self._answer, rollout), self.context.work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def is_unanswered(rollout: Rollout) -> bool:
        return len(rollout.turns) > len(rollout.turn_rewards) or not (rollout.turns or rollout.log)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close(self, rollouts: Iterable[Rollout]) -> None:
        """Close the episodes of rollouts in the environment."""
        ids = [r.id for r in rollouts if episode_of(r.id) in self._open]
        self._open -= {episode_of(id_) for id_ in ids}
        if ids and self.environment:
            await self.environment.release(ids)

    def forget(self, rollouts: Iterable[Rollout]) -> None:
        """Forget rollouts that were trained on, rejected or evaluated."""
        for rollout in rollouts:
            rollout.samples = []  # otherwise rollouts refer to themselves
            for by_episode in (self._samples, self._ledgers, self._beginnings):
                by_episode.pop(episode_of(rollout.id), None)

    async def _answer(self, rollout: Rollout) -> None:
        try:
            while True:
                try:
                    observation = await self._observation(rollout)
                except EpisodeLostError as error:
                    rollout = self._begin_anew(rollout, error)
                else:
                    break
            await self._take(rollout, observation)
        finally:
            self.pending.discard(rollout.id)
            self.pool.wake()
            self.context.changed.set()

    async def _observation(self, rollout: Rollout) -> Observation:
        assert self.environment
        episode = episode_of(rollout.id)
        samples = self._samples[episode]
        if episode not in self._open:
            root = samples[0]
            task_prompt = root.asked or root.prompt
            response = replace(root.response(text=True), prompt=task_prompt)
            log = sorted((o for r in samples for o in r.log), key=lambda o: o.number)
            opening = self.environment.open(response, log)
            observation = await self._asked("open", opening, rollout)
            self._open.add(episode)
            if not log:
                return observation
        finish = FinishReason.LENGTH if rollout.ended_by else FinishReason.TURN
        response = replace(rollout.response(text=True), finish=finish)
        return await self._asked("step", self.environment.step(response), rollout)

    async def _asked(
        self, name: str, answer: Awaitable[Observation], rollout: Rollout
    ) -> Observation:
        clock, start_s = self.context.clock, self.context.clock.now()
        with self.context.tracer.awaiting(ENVIRONMENT, name):
            async with deadline(self.context.deadline_s, "the environment", [rollout.id]):
                observation = await answer
        now_s = clock.now()
        facts = {
            "rollout": rollout.id,
            "turn": len(rollout.turns),
            "tool": tools_called(observation),
        }
        self.context.tracer.add(ENVIRONMENT, name, start_s, now_s, **facts)
        return replace(observation, record={**observation.record, "seconds": now_s - start_s})

    async def _take(self, rollout: Rollout, o: Observation) -> None:
        if len(rollout.turns) > len(rollout.turn_rewards):
            rollout.turn_rewards.append(o.reward or 0.0)
        episode = episode_of(rollout.id)
        samples, ledger = list(self._samples[episode]), self._ledgers[episode]
        sample = next((r for r in samples if r.id == o.rollout_id), None)
        fork = sample is None
        if sample is None:
            sample = self._fork(samples[0], o)
            ledger.join(sample)
            ledger.move(sample, RolloutState.WAITING)
        elif o.prompt is not None and o.prompt.tokens != sample.prompt.tokens:
            sample.asked, sample.prompt = sample.prompt, o.prompt
        if fork or o.number == 0:
            ledger.started(sample)
        if o.ended_by:
            rollout.log.append(o)
            self._end(o)
            await self.close(samples)
            return
        rollout.left = o.left[:1]
        ledger.move(sample, RolloutState.DECODING)
        context = sample.observe(o)
        if len(context.tokens):
            sample.append(context)
            ledger.extended(context)
        await self.pool.resume(sample)

    def _fork(self, root: Rollout, o: Observation) -> Rollout:
        if o.prompt is None or episode_of(o.rollout_id) != episode_of(root.id):
            raise LifecycleError(
                f"the environment answered an episode of rollout {root.id} with rollout "
                f"{o.rollout_id}, which is no sample of it, and has no prompt of its own",
                "no-such-sample",
            )
        task_prompt = root.asked or root.prompt
        fork = Rollout(
            o.rollout_id, replace(o.prompt, id=task_prompt.id), root.group, asked=task_prompt
        )
        ledger = self._ledgers[episode_of(root.id)]
        self.add([fork], ledger, greedy=not root.sampling or root.sampling.temperature == 0)
        return fork

    def _end(self, observation: Observation) -> None:
        samples = self._samples[episode_of(observation.rollout_id)]
        ledger = self._ledgers[episode_of(observation.rollout_id)]
        total = sum(sum(r.turn_rewards) for r in samples)
        failure = observation.record.get("failure")
        verdicts = {ENVIRONMENT: {"error": failure} if failure else {"value": total}}
        verdicts |= observation.record.get("scores", {})
        names = set(self.settings.environment_rewards)
        cuts = (*TOKEN_LIMITS, *self.settings.cut_by)
        if failure and not any(r.turns for r in samples):  # the episode was never opened
            names.add(ENVIRONMENT)
        for rollout in samples:
            rollout.ended_by = observation.ended_by
            rollout.finish = (
                FinishReason.LENGTH if observation.ended_by in cuts else FinishReason.STOP
            )
            for name in names:
                verdict = verdicts.get(name, {"error": failure})
                rollout.scores[name] = _score(rollout.id, name, verdict)
            self.pool.release(rollout)
            ledger.extended(_last_chunk(rollout))
            ledger.ended(rollout)

    def _begin_anew(self, rollout: Rollout, error: EpisodeLostError) -> Rollout:
        episode = episode_of(rollout.id)
        self._beginnings[episode] = self._beginnings.get(episode, 1) + 1
        if self._beginnings[episode] > MOST_BEGINNINGS:
            raise error
        self._open.discard(episode)
        samples, ledger = self._samples[episode], self._ledgers[episode]
        root, forks = samples[0], samples[1:]
        del samples[1:]  # in place, because the root has this list
        for fork in forks:
            self.pool.release(fork)
            self.scoring.drop(fork)
            ledger.drop(fork)
        self._samples[episode], self._ledgers[episode] = samples, ledger
        self.pool.release(root)
        self.scoring.anew(root)
        root.begin_anew()
        self.pending.discard(rollout.id)
        self.pending.add(root.id)
        return root


def _score(rollout_id: int, source: str, verdict: Mapping[str, Any]) -> Score:
    failure, value = verdict.get("error"), verdict.get("value")
    values = np.array([] if failure or value is None else [value], np.float32)
    return Score(rollout_id, source, "reward", values, failure, verdict.get("extra", {}))


def _last_chunk(rollout: Rollout) -> Chunk:
    """Return an empty chunk, which tells scorers that an episode's sample has ended."""
    none = np.empty(0, np.int32), np.empty(0, np.float32)
    version = rollout.response().version
    return Chunk(rollout.id, len(rollout), *none, version, rollout.finish)
