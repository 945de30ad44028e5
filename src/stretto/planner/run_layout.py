"""Layouts: which GPUs hold which role, and how each model is divided among them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice
from typing import Literal, NamedTuple

from stretto.errors import ConfigError
from stretto.layout import Layout
from stretto.models.shapes import Shape
from stretto.planner.hardware import Links


class TeacherShape(NamedTuple):
    """A teacher by the name of its scorer, and the share of the prompts that it teaches."""

    name: str
    shape: Shape
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Shapes of the actor and of the other models that a run has."""

    actor: Shape
    critic: Shape | None = None
    reference: Shape | None = None
    reward: Shape | None = None
    teachers: tuple[TeacherShape, ...] = ()

    @classmethod
    def of_one_size(cls, shape: Shape) -> ModelShapes:
        return cls(shape, shape.valued(), shape, shape.valued())

    @property
    def trained(self) -> tuple[Shape, ...]:
        return (self.actor,) if self.critic is None else (self.actor, self.critic)

    @property
    def frozen(self) -> tuple[Shape, ...]:
        return tuple(shape for shape in (*self.with_logits, self.reward) if shape is not None)

    @property
    def with_logits(self) -> tuple[Shape, ...]:
        """Frozen models that score with log-probabilities."""
        teachers = [teacher.shape for teacher in self.teachers]
        return (*teachers, self.reference) if self.reference else (*teachers,)

    @property
    def scoring(self) -> tuple[Shape, ...]:
        return (*self.frozen, *self.trained[1:])


Sharing = Literal["all", "none", "generators", "learner"]
"""Roles that share devices: all, none, or scorers with the generators or with the learner."""


@dataclass(frozen=True, slots=True)
class RunLayout:
    """The devices of a run's roles, and each role's layout on its devices.

    With ``sleeping`` generators, engines free their devices outside their phases, and have
    processes and weights of their own.
    """

    learner: Layout
    generator: Layout
    scorer: Layout
    sharing: Sharing
    offload: bool = False  # moments and frozen weights of idle roles are on the host
    checkpointing: bool = True
    micro_tokens: int = 8192  # of a micro-batch of one shard of the learner
    prefill_tokens: int = 8192  # of a pass without gradients of one generator or scorer
    sleeping: bool = False
    fused: bool = False  # pipelines of actor and critic run at once, in opposite directions

    def __post_init__(self) -> None:
        counts = [self.layouts[role].ranks for role in self.shared]
        if len(set(counts)) > 1:
            subject = f"{', '.join(self.shared)} on {', '.join(map(str, counts))} devices"
            problem = f"{subject}: give roles that share devices as many, or set them apart"
            raise ConfigError(problem, "colocated-sizes-differ")
        if self.offload and not self.colocated:
            problem = "offload moves roles that take turns: leave it out, or colocate all roles"
            raise ConfigError(problem, "offload-without-turns")
        if min(self.micro_tokens, self.prefill_tokens) < 1:
            tokens = f"{self.micro_tokens} and {self.prefill_tokens} tokens"
            raise ConfigError(f"passes of {tokens}: give 1 or more", "empty-passes")

    @property
    def layouts(self) -> dict[str, Layout]:
        return {"learner": self.learner, "generators": self.generator, "scorers": self.scorer}

    @property
    def colocated(self) -> bool:
        return self.sharing == "all"

    @property
    def in_place(self) -> bool:
        """Whether all roles are in the learner's processes, so that none waits for published
        weights.
        """
        return self.colocated and not self.sleeping

    @property
    def lends_critic(self) -> bool:
        """Whether the critic scores by the learner's own shards, which stages cannot."""
        return self.in_place and not self.learner.has_stages

    @property
    def critic(self) -> Layout:
        """The layout of the critic as a scorer. A copy of it is not sharded."""
        if self.lends_critic:
            return self.learner
        if not self.scorer.gathers:
            return self.scorer
        return self.generator if self.in_place else Layout.independent(self.scorer.ranks)

    @property
    def shared(self) -> tuple[str, ...]:
        if self.sharing == "all":
            return "learner", "generators", "scorers"
        return () if self.sharing == "none" else (self.sharing, "scorers")

    @property
    def devices(self) -> dict[str, tuple[int, ...]]:
        """Device numbers by role. Roles that share devices have the same numbers."""
        numbers, by_role = count(), dict[str, tuple[int, ...]]()
        for role, layout in self.layouts.items():
            shares = role in self.shared[1:]
            by_role[role] = by_role[self.shared[0]] if shares else (*islice(numbers, layout.ranks),)
        return by_role

    @property
    def gpus(self) -> int:
        return sum(n.ranks for role, n in self.layouts.items() if role not in self.shared[1:])

    def check(self, models: ModelShapes, links: Links) -> None:
        """Raise ConfigError if the layout cannot divide the models."""
        pairs = [
            *((self.learner, shape) for shape in models.trained),
            (self.generator, models.actor),
            *((self.scorer, shape) for shape in models.frozen),
            *((self.critic, shape) for shape in models.trained[1:]),
        ]
        for layout, shape in pairs:
            layout.check(shape.layers, shape.heads, shape.kv_heads, links.gpus_per_node)
