"""Rows and models that a run was started with: one that is resumed must have the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.assembly.models import Overrides
from stretto.config import Config
from stretto.errors import StateError
from stretto.models.info import identity
from stretto.saying import Say
from stretto.tasks.base import SHA256
from stretto.tasks.prompts import PromptSource

SHOWN = 4
"""Differences that a message names."""

Identities = Mapping[str, Mapping[str, str]]
"""What is known of each subject, by name: fingerprints of files and rows, and plain facts."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Rows and models of a run.

    Methods raise StateError if a subject is not what it was; the message says what differs.

    Attributes:
        before: as they were when the run began; empty for a new run.
        found: as they are, as far as that is known yet.
    """

    before: Identities = field(default_factory=dict)
    found: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def take(self, subject: str, own: Mapping[str, str]) -> None:
        """Take note of what a subject is."""
        had = self.before.get(subject, own)
        if had != own:
            raise StateError(
                f"{subject} is not what the run was started with; of it, this differs: "
                f"{_differences(had, own)}. Restore it, or start a new run",
                "other-inputs",
            )
        self.found[subject] = own

    def take_models(self, config: Config, overrides: Overrides, say: Say) -> None:
        """Take note of the models that are loaded by name; the reference is the actor at the
        start."""
        named = [("reward.sources", s.name, s.model) for s in config.reward.models]
        named = [each for each in named if each[1] not in overrides.reward_models]
        critic = config.critic.model if config.algorithm.definition.critic else ""
        if critic and overrides.critic is None:
            named.insert(0, ("critic.init", critic, critic))
        if overrides.actor is None:
            named.insert(0, ("model.name", config.model.name, config.model.name))
        for setting, name, model in named:
            own = identity(model, config.model.trust_remote_code, say)
            self.take(f"{setting} = '{name}'", own)

    def take_rows(self, name: str, prompts: PromptSource) -> None:
        """Take note of the rows that are trained on, of the task with this name."""
        self.take(f"task.name = '{name}'", prompts.identity)


def _differences(had: Mapping[str, str], own: Mapping[str, str]) -> str:
    """Name what differs: plain facts with both values, or else what fingerprints are of."""
    differing = [name for name in {**had, **own} if had.get(name) != own.get(name)]
    facts = [
        f"{name} ({had.get(name, 'none')} then, {own.get(name, 'none')} now)"
        for name in differing
        if not had.get(name, own.get(name, "")).startswith(SHA256)
    ]
    named = facts or differing
    more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
    return ", ".join(named[:SHOWN]) + more
