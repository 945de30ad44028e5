"""Layout of two models on the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stretto.errors import ConfigError
from stretto.pipelines.problem import Problem, Side

Name = Literal["actor", "critic"]
NAMES: tuple[Name, Name] = ("actor", "critic")


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Layout of the two models on the ranks; rank r is device r of the problem.

    Raises:
        ConfigError: the two do not cover the same ranks.
    """

    actor_stages: int
    actor_pipelines: int
    critic_stages: int
    critic_pipelines: int

    def __post_init__(self) -> None:
        self.problem(self.actor_pipelines, self.critic_pipelines)  # which checks it

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.actor_stages * self.actor_pipelines

    def of(self, name: Name) -> tuple[int, int]:
        """Stages and pipelines of a model."""
        if name == "actor":
            return self.actor_stages, self.actor_pipelines
        return self.critic_stages, self.critic_pipelines

    def place(self, name: Name, rank: int) -> tuple[int, int]:
        """Pipeline (from 0 in its model) and stage of a model on a rank."""
        stages, _ = self.of(name)
        pipeline, along = divmod(rank, stages)
        return pipeline, along if name == "actor" else stages - 1 - along

    def rank(self, name: Name, pipeline: int, stage: int) -> int:
        """The inverse of :meth:`place`."""
        stages, _ = self.of(name)
        return pipeline * stages + (stage if name == "actor" else stages - 1 - stage)

    def problem(self, actor: int, critic: int) -> Problem:
        """The problem of so many micro-batches (of all pipelines) where nothing is measured yet.

        A backward takes as long as two forwards, all stages are alike, as are the two models.

        Raises:
            ConfigError: micro-batches do not divide evenly among the pipelines.
        """
        return Problem(self._side("actor", actor), self._side("critic", critic))

    def require(self, problem: Problem, actor: int, critic: int) -> None:
        """See that a problem is of this layout and of so many micro-batches.

        Raises:
            ConfigError: it is not, or they do not divide evenly among the pipelines.
        """
        for name, side, mine in zip(
            NAMES, problem.sides, self.problem(actor, critic).sides, strict=True
        ):
            given, wanted = (
                f"{s.pipelines} pipelines x {s.stages} stages x {s.micro_batches} micro-batches"
                for s in (side, mine)
            )
            if given != wanted:
                raise ConfigError(
                    f"the problem's {name} has {given}, but what runs has {wanted}; give the "
                    "problem of this run"
                )

    def _side(self, name: Name, micro_batches: int) -> Side:
        stages, pipelines = self.of(name)
        if pipelines > 0 and micro_batches % pipelines:
            raise ConfigError(
                f"{micro_batches} micro-batches of the {name} do not divide evenly among its "
                f"{pipelines} pipelines; make them a multiple"
            )
        each = micro_batches // max(pipelines, 1)
        return Side.of(stages, pipelines, each, forward=1, backward=2, activation=1.0)
