"""A run in this process: its parts, placed on threads, behind a schedule."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto.assembly.controls import controls_of
from stretto.assembly.learner import make_learner
from stretto.assembly.models import NOTHING, Given
from stretto.assembly.parts import make_parts
from stretto.assembly.scorers import model_scorers
from stretto.clock import RealClock
from stretto.config import Config
from stretto.observe.spans import Spans
from stretto.runtime.inline.placement import ThreadPlacement
from stretto.runtime.state import DRIVER, LEARNER, Staged, copied, offer, offered, staged
from stretto.saying import Say, working
from stretto.schedules.schedule import Schedule
from stretto.tasks.prompts import PromptSource
from stretto.training import shard_files
from stretto.training.learner import PolicyLearner
from stretto.weights.channel import SharedChannel
from stretto.workers.protocols import ScorerWorker
from stretto.workers.side import stacks


@dataclass(frozen=True)
class InlineRun:
    """A run in this process; see :class:`~stretto.runtime.base.Running`."""

    actor: nn.Module
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource
    scorers: Sequence[ScorerWorker]
    learner: PolicyLearner
    placement: ThreadPlacement
    weights: SharedChannel
    schedule: Schedule
    spans: Spans

    async def stage(self, *, copy: bool = True) -> Staged:
        weights = {
            "followers": self.placement.follower_weights(),
            "offered": offered(self.schedule, self.weights) if self.placement.snapshots else {},
        }
        return await asyncio.to_thread(
            staged,
            copied(self.prompts.state_dict()),
            copied(self.schedule.state_dict()),
            weights,
            self.learner.state_dict(),
            copy=copy,
        )

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        driver, channel = state[DRIVER], self.weights.name if self.placement.snapshots else ""
        self.prompts.load_state_dict(driver["prompts"])
        self.learner.load_state_dict(shard_files.read(state[LEARNER]))
        self.schedule.load_state_dict(driver["schedule"], self.prompts.prompt_by_id, channel)
        if self.placement.snapshots:
            offer(self.schedule, driver["weights"]["offered"], self.weights)
        self.placement.load_followers(driver["weights"]["followers"], self.schedule.loaded)

    def metrics(self) -> Mapping[str, float]:
        return {}

    def stacks(self) -> str:
        return stacks()

    def save(self, folder: Path) -> None:
        self.learner.save(folder, self.tokenizer)

    def halt(self) -> bool:
        whole = self.learner.end_updates()  # before a worker is broken off in the midst of one
        self.placement.close()
        return whole


def start(config: Config, stack: ExitStack, say: Say, given: Given = NOTHING) -> InlineRun:
    """Put a run together; arguments as those of :func:`~stretto.assembly.parts.make_parts`."""
    parts = make_parts(config, stack, say, given)
    actor, critic, end_tokens = parts.models.actor, parts.models.critic, parts.models.end_tokens
    weights = SharedChannel()
    with working(say, "starting the engines"):
        place = ThreadPlacement(config, actor, critic, parts.tokenizer, stack, end_tokens, weights)
    models = [
        [*own, *model_scorers(config, parts.models.reference, values, weights, say)]
        for own, values in zip(parts.rewards, place.critics, strict=True)
    ]
    with working(say, "starting the learner"):  # maybe with processes of its own
        learner, ranks = make_learner(
            config,
            actor,
            critic,
            stack,
            snapshots=place.snapshots,
            channel=weights,
            threads=place.training_threads,
        )
    spans = Spans(RealClock())
    schedule = Schedule(
        parts.prompts.next,
        place.generators(spans),
        place.replicas(parts.functions, models, spans),
        place.learner(learner, spans, ranks),
        controls_of(config, place.migrating(config)),
        RealClock(),
        spans,
    )
    scorers: list[ScorerWorker] = [*parts.functions]
    scorers += [scorer for replica in models for scorer in replica]
    return InlineRun(
        actor, parts.tokenizer, parts.prompts, scorers, learner, place, weights, schedule, spans
    )
