"""Settings of the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stretto.config.base import Fraction, NonNegativeInt, Positive, PositiveInt, Section
from stretto.config.knobs import KNOBS, PRESET_HELP, PRESETS, Knobs, PresetName, ScoreOn

if TYPE_CHECKING:
    from stretto.config.sections import RolloutConfig

_RULES: dict[str, tuple[str, ...]] = {
    "overcommit_start": ("equation4", "algorithm1"),
    "overcommit_window": ("equation4", "algorithm1"),
    "overcommit_increment": ("equation4",),
    "overcommit_decrement": ("equation4",),
}
"""Settings of over-commitment that only some rules for delta read, with these rules."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of :class:`~stretto.schedules.schedule.Schedule`.

    Attributes:
        batch: responses a step.
        samples_per_prompt: responses to each prompt.
        max_new_tokens: token limit of a response.
        steps: batches in the whole run; no round is begun for steps beyond.
        drop_failures: leave a response out whose reward function failed, instead of stopping.
        group_at_least: scored responses to one prompt without which the learner can do nothing with
            any of them; they are then left out together.
        reward_weights: factor of each reward source; ``None`` for 1 each.
        score_on: when scorers get to see a response.
        lag: versions that the generators may be behind the learner.
        weight_sync_interval: steps between two hand-overs of weights.
        max_carries: how often a rollout may be left for the next round.
        deadline_s: how long a role may take to answer a call.
        restarts: how many processes may come in the place of a generator's or scorer's own, each;
            with 0 the loss of one ends the run.
    """

    batch: int
    samples_per_prompt: int
    max_new_tokens: int
    steps: int
    drop_failures: bool = False
    group_at_least: int = 1
    reward_weights: Mapping[str, float] | None = None
    score_on: ScoreOn = "batch"
    lag: int = 0
    weight_sync_interval: int = 1
    max_carries: int = 8
    deadline_s: float = 1800.0
    restarts: int = 0


class ScheduleConfig(Section):
    """Order and overlap of the work: four knobs, and the settings that adapt them."""

    preset: PresetName = Field(default="sync", description=PRESET_HELP)
    score_on: Literal["preset", ScoreOn] = Field(
        default="preset", description=KNOBS["score_on"].help
    )
    overcommit: Literal["preset", "auto"] | NonNegativeInt = Field(
        default="preset", description=KNOBS["overcommit"].help
    )
    lag: Literal["preset"] | NonNegativeInt = Field(default="preset", description=KNOBS["lag"].help)
    migrate: Literal["preset", "off", "auto"] | Fraction = Field(
        default="preset", description=KNOBS["migrate"].help
    )
    chunk_tokens: NonNegativeInt = 0
    """Tokens that each response gets between two looks at what has ended, and that are streamed at a time; 0 tries several sizes and keeps the best."""
    chunk_window: Annotated[int, Field(gt=3)] = 50
    """Steps between two trials of chunk sizes."""
    overcommit_rule: Literal["equation4", "algorithm1", "throughput"] = "equation4"
    """Rule by which 'auto' adapts delta. equation4: up by overcommit_increment while rewards rise, else down by overcommit_decrement. algorithm1: by a quarter, down while rewards rise, up while they fall. throughput: to the delta that measured lengths and latencies predict to be fastest."""
    overcommit_start: NonNegativeInt = 0
    """Delta at the start of equation4 and algorithm1; 0 takes half of overcommit_max, or overcommit_min where that is more."""
    overcommit_max: NonNegativeInt = 0
    """Largest delta of 'auto'; 0 takes the batch size."""
    overcommit_min: NonNegativeInt = 0
    """Smallest delta of 'auto'."""
    overcommit_window: PositiveInt = 10
    """Steps over which equation4 and algorithm1 look at the reward."""
    overcommit_increment: NonNegativeInt = 1
    """Responses by which equation4 raises delta."""
    overcommit_decrement: NonNegativeInt = 1
    """Responses by which equation4 lowers delta."""
    max_carries: PositiveInt = 8
    """Largest number of times that a response is carried into a next step; at this number, the step waits for it. Bounds delta: at most max_carries times the responses between two hand-overs."""
    carry: Literal["recompute", "reuse"] = "recompute"
    """Treatment of a carried response's keys and values when the weights change. recompute: computed anew. reuse: kept as they are."""
    weight_sync_interval: PositiveInt = 1
    """Steps trained on responses of one version of the weights, before the next is handed over (the off-policy dial N). For several updates on one batch, set training.epochs."""
    threads: tuple[()] | tuple[PositiveInt, PositiveInt, PositiveInt] = ()
    """CPU threads of each engine, of scoring and of training where they overlap; empty shares the cores out."""
    deadline_s: Positive = 1800.0
    """Seconds that a role may take to answer one call. After that the run ends and names the role."""

    @property
    def knobs(self) -> Knobs:
        """The knobs; those set to 'preset' take the preset's values."""
        given = {name: getattr(self, name) for name in KNOBS}
        by_hand = {name: value for name, value in given.items() if value != "preset"}
        return replace(PRESETS[self.preset].knobs, **by_hand)

    def settings(
        self,
        rollout: RolloutConfig,
        steps: int,
        *,
        drop_failures: bool,
        group_at_least: int,
        reward_weights: Mapping[str, float] | None = None,
        restarts: int = 0,
    ) -> Settings:
        """Return the settings of a run's schedule; for arguments see :class:`Settings`."""
        return Settings(
            rollout.batch,
            rollout.samples_per_prompt,
            rollout.max_new_tokens,
            steps,
            drop_failures,
            group_at_least,
            reward_weights,
            self.knobs.score_on,
            self.knobs.lag,
            self.weight_sync_interval,
            self.max_carries,
            self.deadline_s,
            restarts,
        )

    @property
    def asks_to_migrate(self) -> bool:
        """Return whether migration is on by its own setting, not by the preset."""
        return self.migrate != "preset" and self.knobs.on("migrate")

    def largest_overcommit(self, batch: int) -> int:
        """The largest delta that a run with so many responses a step may come to."""
        delta = self.knobs.overcommit
        return self.overcommit_max or batch if delta == "auto" else delta

    def most_in_flight(self, batch: int, samples_per_prompt: int) -> int:
        """The most responses that are being decoded at one time.

        Args:
            samples_per_prompt: responses to each prompt, of which delta fills up the last group.
        """
        groups = -(-self.largest_overcommit(batch) // samples_per_prompt)
        return batch * self.weight_sync_interval + groups * samples_per_prompt

    def first_overcommit(self, batch: int) -> int:
        """Delta at the start of 'auto', under the rules that look at rewards."""
        half = self.largest_overcommit(batch) // 2
        return self.overcommit_start or max(half, self.overcommit_min)

    def check(self, batch: int) -> None:
        """See that the bounds of delta fit each other and the batch.

        Raises:
            ValueError: they do not.
        """
        low, high = self.overcommit_min, self.overcommit_max or batch
        if low > high:
            raise ValueError(
                f"schedule.overcommit_min = {low} is above the largest delta, {high} "
                "(schedule.overcommit_max, or else the batch); lower it"
            )
        start = self.overcommit_start or high
        if not low <= start <= high:
            raise ValueError(
                f"schedule.overcommit_start = {start} is not between the smallest delta, {low} "
                f"(schedule.overcommit_min), and the largest, {high} (schedule.overcommit_max, or "
                "else the batch); choose one between them, or 0"
            )
        delta, round_size = self.largest_overcommit(batch), batch * self.weight_sync_interval
        if delta > self.max_carries * round_size:
            name = "overcommit_max" if self.knobs.overcommit == "auto" else "overcommit"
            raise ValueError(
                f"schedule.{name} = {delta} and schedule.max_carries = {self.max_carries} "
                f"contradict each other: with {round_size} responses between two hand-overs of "
                f"weights, the last of {delta} more are carried {-(-delta // round_size)} times; "
                f"lower schedule.{name} to {self.max_carries * round_size}, or raise "
                "schedule.max_carries"
            )

    @property
    def remarks(self) -> list[str]:
        """Remarks on settings of over-commitment that have no effect."""
        fields, delta, rule = type(self).model_fields, self.knobs.overcommit, self.overcommit_rule
        changed = [
            name
            for name in fields
            if name.startswith("overcommit_") and getattr(self, name) != fields[name].default
        ]
        if delta != "auto":
            idle, where = changed, f"while schedule.overcommit is {delta}"
        else:
            idle = [name for name in changed if rule not in _RULES.get(name, (rule,))]
            where = f"on overcommit_rule = '{rule}'"
        names = ", ".join(f"schedule.{name}" for name in idle)
        return [f"without effect {where}: {names}"] if idle else []
