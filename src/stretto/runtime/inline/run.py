"""A run in this process: its parts, placed on threads, behind a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from stretto.assembly.controls import controls_of
from stretto.assembly.learner import make_learner
from stretto.assembly.models import NOTHING, Given, Say
from stretto.assembly.parts import make_parts
from stretto.assembly.scorers import model_scorers
from stretto.clock import RealClock
from stretto.config import Config
from stretto.observe.spans import Spans
from stretto.runtime.inline.placement import ThreadPlacement
from stretto.schedules.schedule import Schedule
from stretto.tasks.prompts import PromptSource
from stretto.training.learner import PolicyLearner
from stretto.weights.channel import SharedChannel
from stretto.workers.protocols import ScorerWorker


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

    async def state_dict(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts.state_dict(),
            "learner": self.learner.state_dict(),
            "placement": self.placement.state_dict(),
            "weights": self.weights.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        self.prompts.load_state_dict(state["prompts"])
        self.learner.load_state_dict(state["learner"])
        self.placement.load_state_dict(state["placement"])
        self.weights.load_state_dict(state["weights"])
        self.schedule.load_state_dict(state["schedule"], self.prompts.prompt_by_id)

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
    place = ThreadPlacement(config, actor, critic, parts.tokenizer, stack, end_tokens, weights)
    models = [
        [*own, *model_scorers(config, parts.models.reference, values, weights, say)]
        for own, values in zip(parts.rewards, place.critics, strict=True)
    ]
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
