"""The plain schedule: generate, score, train, hand over; each after the one before it.

Consumes prompts and the three roles. Waits, in turn, for every response to end, for every scorer,
for the learner, and for the generator to hold the new weights. Whatever overlaps does so by
changing when these calls are made, never what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.clock import Clock
from stretto.errors import JudgeError, LifecycleError
from stretto.protocols import Generator, Learner, Scorer, Tracer
from stretto.schedules.ledger import Ledger
from stretto.types import Prompt, Rollout, RolloutState, Stats


@dataclass(frozen=True, slots=True)
class Settings:
    """What the schedule has to know.

    Attributes:
        batch: responses a step.
        samples_per_prompt: responses to each prompt.
        max_new_tokens: token limit of a response.
        drop_failures: leave a response out whose judge failed, instead of stopping.
    """

    batch: int
    samples_per_prompt: int
    max_new_tokens: int
    drop_failures: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What came of one step.

    Attributes:
        batch: the rollouts that were trained on, with their scores.
        rejected: the rollouts that were left out, each with its reason.
        stats: the learner's figures, and the schedule's own.
    """

    batch: Sequence[Rollout]
    rejected: Sequence[Rollout]
    stats: Stats


class SyncSchedule:
    """Runs steps, one at a time.

    State: the ledger and the next rollout's id. Between two steps nothing is in flight.
    """

    def __init__(
        self,
        next_prompt: Callable[[], Prompt],
        generator: Generator,
        scorers: Sequence[Scorer],
        learner: Learner,
        settings: Settings,
        clock: Clock,
        tracer: Tracer,
    ) -> None:
        self._next_prompt = next_prompt
        self._generator, self._scorers, self._learner = generator, scorers, learner
        self._settings, self._clock, self._tracer = settings, clock, tracer
        self.ledger = Ledger()
        self._next_id = 0

    async def step(self) -> Step:
        """Take one batch from prompts to new weights."""
        start_s = self._clock.now()
        rollouts = self._draw()
        await self._generate(rollouts)
        await self._score(rollouts)
        batch, rejected = self._sort_out(rollouts)
        stats = await self._train(batch)
        await self._hand_over()
        self.ledger.close(rollouts)
        return Step(batch, rejected, {**stats, **self._figures(rollouts, start_s)})

    def state_dict(self) -> dict[str, Any]:
        """See the class."""
        return {"ledger": self.ledger.state_dict(), "next_id": self._next_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.ledger.load_state_dict(state["ledger"])
        self._next_id = state["next_id"]

    def _draw(self) -> list[Rollout]:
        s = self._settings
        rollouts = []
        for _ in range(s.batch // s.samples_per_prompt):
            prompt, group = self._next_prompt(), self._next_id
            for _ in range(s.samples_per_prompt):
                rollouts.append(Rollout(self._next_id, prompt, group))
                self._next_id += 1
        self.ledger.dispatch(rollouts)
        return rollouts

    async def _generate(self, rollouts: Sequence[Rollout]) -> None:
        by_id = {r.id: r for r in rollouts}
        with self._tracer.span("generator", "gen") as span:
            for r in rollouts:
                r.move(RolloutState.DECODING)
            await self._generator.admit(rollouts)
            while any(r.finish is None for r in rollouts):
                chunks = await self._generator.decode(self._settings.max_new_tokens)
                if not chunks:
                    left = [r.id for r in rollouts if r.finish is None]
                    raise LifecycleError(f"the generator is idle, but rollouts {left} never ended")
                for chunk in chunks:
                    by_id[chunk.rollout_id].append(chunk)
            span["tokens"] = sum(map(len, rollouts))
        for r in rollouts:
            r.move(RolloutState.FINISHED)

    async def _score(self, rollouts: Sequence[Rollout]) -> None:
        ids = [r.id for r in rollouts]
        for scorer in self._scorers:
            with self._tracer.span(scorer.name, f"score/{scorer.name}"):
                await scorer.admit(rollouts)
                for rollout, score in zip(rollouts, await scorer.finish(ids), strict=True):
                    rollout.scores[scorer.name] = score

    def _sort_out(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], list[Rollout]]:
        """Scored rollouts, and those that a judge failed on.

        Raises:
            JudgeError: a judge failed on a response, and failures are not to be dropped.
        """
        failures = {
            r.id: "; ".join(s.failure for s in r.scores.values() if s.failure) for r in rollouts
        }
        bad = [r for r in rollouts if failures[r.id]]
        if len(bad) == len(rollouts) or (bad and not self._settings.drop_failures):
            raise JudgeError(
                f"{len(bad)} of {len(rollouts)} responses could not be judged. The first:\n"
                f"{failures[bad[0].id]}\n"
                "Mend the reward function, or set reward.on_failure = 'drop' to leave such "
                "responses out (they are reported)",
                [r.id for r in bad],
            )
        for r in rollouts:
            if failures[r.id]:
                r.move(RolloutState.REJECTED, "judge failed")
            else:
                r.move(RolloutState.SCORED)
        return [r for r in rollouts if not failures[r.id]], bad

    async def _train(self, batch: Sequence[Rollout]) -> Stats:
        with self._tracer.span("learner", "update"):
            stats = await self._learner.train(batch)
        for r in batch:
            r.move(RolloutState.TRAINED)
        return stats

    async def _hand_over(self) -> None:
        with self._tracer.span("learner", "publish"):
            await self._generator.load(await self._learner.publish())

    def _figures(self, rollouts: Sequence[Rollout], start_s: float) -> dict[str, float]:
        step_s = self._clock.now() - start_s
        tokens = sum(len(r.prompt.tokens) + len(r) for r in rollouts)
        return {
            "timing_s/step": step_s,
            "perf/throughput": tokens / step_s if step_s else 0.0,
            "perf/samples_per_s": len(rollouts) / step_s if step_s else 0.0,
            "rejected": float(self.ledger.rejected.total()),
        }
