"""Settings of the schedule: six knobs, their presets, and consequences of both.

A knob is a field of :class:`Knobs`, an entry of :data:`KNOBS`, and a setting of the same name
(:class:`ScheduleConfig`). All lists of knobs or presets are derived from these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from stretto.bounds import ceil_div
from stretto.config.sections import (
    Fraction,
    NonNegativeInt,
    PositiveInt,
    Rules,
    Seconds,
    Section,
    Workers,
)

if TYPE_CHECKING:
    from stretto.types import Sampling

ScoreOn = Literal["batch", "rollout", "chunk"]
TrainOn = Literal["batch", "group"]
Controlled = Literal["chunk_tokens", "overcommit", "migrate", "hold"]
"""Settings whose value a controller may choose."""
PresetName = Literal["sync", "oppo", "async", "rlhfuse", "stretto", "auto"]
Need = Literal["scoring worker", "training worker", "weights", "engines"]
"""Needs of a knob, in order: scorers that work during generation, a learner that works during
generation, separate weights for generators (and the critic as a scorer), several engines.
"""


@dataclass(frozen=True, slots=True)
class Knob:
    """A knob: help text, needs if it is on, and values that switch it off, the usual one first."""

    help: str
    needs: tuple[Need, ...] = ()
    off: tuple[object, ...] = (0,)


KNOBS: Mapping[str, Knob] = {
    "score_on": Knob(
        "When scorers see responses: once all have ended, each when it has ended, or chunk by "
        "chunk while they are decoded.",
        needs=("scoring worker",),
        off=("batch",),
    ),
    "overcommit": Knob(
        "Responses in flight beyond the batch (delta); the first to end are trained on, the rest "
        "is carried into the next step. auto: adapted by overcommit_rule."
    ),
    "lag": Knob(
        "Versions of the weights that generation may be behind training; 1 generates for the next "
        "step while training on this one.",
        needs=("training worker", "weights"),
    ),
    "migrate": Knob(
        "Gather the last responses on few engines when this share of the batch remains. auto: "
        "chosen by simulation. Needs rollout.engines > 1.",
        needs=("engines",),
        off=("off", 0),
    ),
    "hold": Knob(
        "What becomes of keys and values of a response that waits for its environment. keep: they "
        "stay. offload: they go to the host's memory, and come back. remake: they are dropped, "
        "and its tokens are read again. auto: they stay while there is room for all; beyond that, "
        "the way that costs least by measured rates, for those that are expected to wait longest.",
        off=("keep",),
    ),
    "train_on": Knob(
        "When the learner starts on a step: once its batch is complete, or with each prompt whose "
        "responses are all scored, while others are decoded. The update is the same. group needs "
        "score_on = rollout or chunk, lag = 0, and an algorithm that compares the responses to one "
        "prompt.",
        needs=("training worker", "weights"),
        off=("batch",),
    ),
}
"""Every knob, by the name of its setting."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """Values of the six knobs, and their consequences."""

    score_on: ScoreOn = "batch"
    overcommit: int | Literal["auto"] = 0
    lag: int = 0
    migrate: float | Literal["off", "auto"] = "off"
    hold: Literal["keep", "offload", "remake", "auto"] = "keep"
    train_on: TrainOn = "batch"

    def on(self, name: str) -> bool:
        return getattr(self, name) not in KNOBS[name].off

    def works(self, name: str, engines: int) -> bool:
        return self.on(name) and (engines > 1 or "engines" not in KNOBS[name].needs)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset(need for name in KNOBS if self.on(name) for need in KNOBS[name].needs)

    @property
    def streams(self) -> bool:
        return self.score_on == "chunk"

    @property
    def keeps_waiting(self) -> bool:
        """Whether episodes that wait for their environment may keep their KV cache."""
        return self.hold in ("keep", "auto")

    @property
    def scores_early(self) -> bool:
        """Whether scorers see responses while others are decoded. Each reward function then has a
        worker."""
        return "scoring worker" in self.needs

    @property
    def trains_beside(self) -> bool:
        """Whether the learner works while responses are decoded."""
        return "training worker" in self.needs

    @property
    def copies_weights(self) -> bool:
        """Whether generators, and the critic as a scorer, have separate weights."""
        return "weights" in self.needs

    def overlaps(self, engines: int) -> bool:
        """Return whether roles work at the same time. Otherwise all take turns on one worker."""
        return self.scores_early or self.trains_beside or engines > 1

    def migrates(self, engines: int) -> bool:
        return self.works("migrate", engines)

    def hosts_scorers(self, engines: int) -> bool:
        """Return whether engines have replicas of the model scorers, for when nothing is to decode.

        Scorers that stream have their own worker, because they work while all engines decode.
        """
        return self.migrates(engines) and not self.streams

    def scores_beside(self, engines: int) -> bool:
        """Return whether model scorers have their own worker while responses are decoded."""
        return self.scores_early and not self.hosts_scorers(engines)

    def describe(self, engines: int, *, episodes: bool = False) -> str:
        """Describe all knobs in one line, as they work with this number of engines. ``hold`` is
        only named for episodes, in which responses wait."""
        values = {name: getattr(self, name) for name in KNOBS if episodes or name != "hold"}
        for name in values:
            if self.on(name) and not self.works(name, engines):
                values[name] = f"{KNOBS[name].off[0]} (there is one engine)"
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


@dataclass(frozen=True, slots=True)
class Preset:
    """Values of all knobs, under a name.

    Attributes:
        parts: knobs that ``stretto compare`` can switch off one by one, by part names.
        several_engines: needs several engines, and is therefore only compared on request.
    """

    knobs: Knobs
    help: str
    parts: Mapping[str, str] = field(default_factory=dict)
    several_engines: bool = False


PRESETS: Mapping[PresetName, Preset] = {
    "sync": Preset(Knobs(), "each stage after the one before"),
    "oppo": Preset(
        Knobs(score_on="chunk", overcommit="auto"),
        "stream to scorers, over-commit",
        parts={"intra": "score_on", "inter": "overcommit"},
    ),
    "async": Preset(Knobs(score_on="rollout", lag=1), "one version behind"),
    "rlhfuse": Preset(
        Knobs(score_on="rollout", migrate="auto"), "gather stragglers", several_engines=True
    ),
    "stretto": Preset(
        Knobs(score_on="chunk", overcommit="auto", lag=1, migrate="auto", hold="auto"), "all of it"
    ),
    "auto": Preset(
        Knobs(score_on="chunk", overcommit="auto", lag=1, hold="auto"),
        "as the run's own simulation predicts to be fastest, within max_staleness",
    ),
}
"""Every preset, by name. docs/schedules.md names their sources. Those of
``auto`` are limits."""

_PRESET_HELP = "What the six knobs are where they say 'preset'. " + " ".join(
    f"{name}: {preset.help}." for name, preset in PRESETS.items()
)

_RULES: Mapping[str, tuple[str, ...]] = {
    "overcommit_start": ("equation4", "algorithm1"),
    "overcommit_window": ("equation4", "algorithm1"),
    "overcommit_increment": ("equation4",),
    "overcommit_decrement": ("equation4",),
}
"""Over-commitment settings that only some rules for delta read, with these rules."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of :class:`~stretto.schedules.schedule.Schedule`.

    Fields are explained in :class:`ScheduleConfig` and :class:`~stretto.config.RolloutConfig`.

    Attributes:
        steps: batches in the run. No round starts for later steps.
        failures_allowed: share of a step's responses that may be dropped because a reward function
            failed on them. With more the run stops.
        group_at_least: scored responses that a prompt needs. With fewer, all are dropped.
        most_skipped: responses of groups with equal scores that a round may replace.
        sources_apart: whether the algorithm normalizes each reward source, so that scores of a
            group are only equal if they are in every source.
        reward_weights: factor of each reward source. ``None`` for 1 each.
        restarts: replacements for each generator's or scorer's process. 0: losing one ends the run.
        episodes: sampling of the turns of episodes, if there is an environment.
        environment_rewards: reward sources whose scores come from the environment.
        cut_by: limits of turns and seconds whose episodes count as cut, as by a token limit.
        most_overcommit: responses beyond the batch for which engines have room. ``None``: any.
        score_on, lag, train_on: limits of a tuner, or the values without one.
    """

    batch: int
    samples_per_prompt: int
    max_new_tokens: int
    steps: int
    failures_allowed: float = 0.0
    group_at_least: int = 1
    most_skipped: int = 0
    sources_apart: bool = False
    reward_weights: Mapping[str, float] | None = None
    score_on: ScoreOn = "batch"
    lag: int = 0
    train_on: TrainOn = "batch"
    weight_sync_interval: int = 1
    max_carries: int = 8
    deadline_s: float = 1800.0
    restarts: int = 0
    episodes: Sampling | None = None
    environment_rewards: tuple[str, ...] = ()
    cut_by: tuple[str, ...] = ()
    most_overcommit: int | None = None


@dataclass(frozen=True, slots=True)
class RoundKnobs:
    """Values of the knobs that may change between two rounds."""

    score_on: ScoreOn = "batch"
    delta: int = 0
    lag: int = 0
    chunk_tokens: int = 512
    train_on: TrainOn = "batch"


def _from_preset(knob: str) -> Any:
    return Field(default="preset", description=KNOBS[knob].help)


class ScheduleConfig(Section):
    """Order and overlap of the work: six knobs, and the settings that adapt them."""

    preset: PresetName = Field(default="sync", description=_PRESET_HELP)
    score_on: Literal["preset", ScoreOn] = _from_preset("score_on")
    overcommit: Literal["preset", "auto"] | NonNegativeInt = _from_preset("overcommit")
    lag: Literal["preset"] | NonNegativeInt = _from_preset("lag")
    migrate: Literal["preset", "off", "auto"] | Fraction = _from_preset("migrate")
    hold: Literal["preset", "keep", "offload", "remake", "auto"] = _from_preset("hold")
    train_on: Literal["preset", TrainOn] = _from_preset("train_on")
    max_staleness: NonNegativeInt = 0
    """Versions of the weights by which tokens may be older than the learner's, with preset =
    "auto". 0: the data stay on-policy, so that neither lag nor overcommit is used."""
    chunk_tokens: NonNegativeInt = 0
    """Tokens that each response gets between two checks for ended ones, and that are streamed at a
    time; 0 tries several sizes and keeps the best."""
    chunk_window: Annotated[int, Field(gt=3, le=10**9)] = 50
    """Steps between two trials of chunk sizes."""
    overcommit_rule: Literal["equation4", "algorithm1", "throughput"] = "equation4"
    """Rule by which 'auto' adapts delta. equation4: up by overcommit_increment while rewards rise,
    else down by overcommit_decrement. algorithm1: by a quarter, down while rewards rise, up while
    they fall. throughput: to the delta that measured lengths and latencies predict to be
    fastest."""
    overcommit_start: NonNegativeInt = 0
    """Delta at the start of equation4 and algorithm1; 0 takes half of overcommit_max, or
    overcommit_min if that is more."""
    overcommit_max: NonNegativeInt = 0
    """Largest delta of 'auto'; 0 takes the batch size."""
    overcommit_min: NonNegativeInt = 0
    """Smallest delta of 'auto'."""
    overcommit_window: PositiveInt = 10
    """Steps whose rewards equation4 and algorithm1 compare."""
    overcommit_increment: NonNegativeInt = 1
    """Responses by which equation4 raises delta."""
    overcommit_decrement: NonNegativeInt = 1
    """Responses by which equation4 lowers delta."""
    max_carries: PositiveInt = 8
    """How often a response may be carried into the next step. At this number, the step waits for
    it. Limits delta to max_carries times the responses between two weight syncs."""
    carry: Literal["recompute", "reuse"] = "recompute"
    """KV cache of carried responses when the weights change. recompute: computed again. reuse: kept
    unchanged."""
    weight_sync_interval: PositiveInt = 1
    """Steps trained on responses of one version of the weights, before the next weight sync (the
    off-policy dial N). For several updates on one batch, set training.epochs."""
    controllers: dict[Controlled, str] = {}
    """Your own controllers, 'file.py:name' or 'package.module:name', by the settings whose
    automatic rule they replace (docs/schedules.md)."""
    threads: tuple[()] | tuple[Workers, Workers, Workers] = ()
    """CPU threads of each engine, of scoring and of training if they overlap; empty divides the
    cores."""
    deadline_s: Seconds = 1800.0
    """Time limit in seconds for a role to answer one call, and for an engine per 4,096 tokens to
    decode in one. After that the run ends and names the role. In other processes, a call that takes
    20 times as long as usual, and at least 300 seconds, is assumed to hang before that."""

    def __hash__(self) -> int:  # plans cache work by schedule, and controllers are a dict
        return hash(self.model_dump_json())

    @property
    def knobs(self) -> Knobs:
        """Values of the knobs, or limits of those that ``preset = "auto"`` chooses."""
        settings = {name: getattr(self, name) for name in KNOBS}
        by_hand = {name: value for name, value in settings.items() if value != "preset"}
        if self.preset == "auto":
            by_hand = {**self._most_allowed, **by_hand}
        return replace(PRESETS[self.preset].knobs, **by_hand)

    @property
    def _most_allowed(self) -> Mapping[str, object]:
        """Limits of the preset ``auto`` that are lower than those of :data:`PRESETS`, by knob."""
        limits: dict[str, object] = {}
        if self.migrate not in ("preset", *KNOBS["migrate"].off):
            limits["score_on"] = "rollout"  # scorers live with the engines, and cannot stream
        if self.max_staleness == 0:
            limits |= {"overcommit": 0, "lag": 0}
        return limits

    @property
    def carries(self) -> int:
        """``max_carries``, as far as ``max_staleness`` allows."""
        if self.preset != "auto":
            return self.max_carries
        return max(1, min(self.max_carries, self.max_staleness - self.knobs.lag))

    def round_knobs(self, batch: int, samples_per_prompt: int) -> Iterator[RoundKnobs]:
        """Yield the values that ``preset = "auto"`` may choose from, without chunk sizes."""
        limits = self.knobs
        by_hand = {name for name in KNOBS if getattr(self, name) != "preset"}
        events = [limits.score_on] if "score_on" in by_hand else get_args(ScoreOn)
        largest = self.largest_overcommit(batch)
        deltas = {0, largest}
        if limits.overcommit == "auto":
            deltas = {min(ceil_div(batch, part), largest) for part in (8, 4, 2, 1)}
            deltas = {
                0,
                *(ceil_div(delta, samples_per_prompt) * samples_per_prompt for delta in deltas),
            }
        elif "overcommit" in by_hand:
            deltas = {largest}
        lags = [limits.lag] if "lag" in by_hand else range(limits.lag + 1)
        starts: list[TrainOn] = ["batch", "group"] if limits.on("train_on") else ["batch"]
        for score_on, delta, lag, train_on in product(events, sorted(deltas), lags, starts):
            fresh = lag + (self.carries if delta else 0) <= self.max_staleness
            on_groups = train_on == "group" and (lag or score_on == "batch")
            if fresh and not on_groups and not (score_on == "chunk" and not limits.streams):
                yield RoundKnobs(score_on, delta, lag, train_on=train_on)

    @property
    def asks_to_migrate(self) -> bool:
        return self.migrate != "preset" and self.knobs.on("migrate")

    @property
    def own_controllers(self) -> Mapping[Controlled, str]:
        """The user's own controllers, for the settings left to a controller."""
        automatic = {"chunk_tokens": 0}
        tuned = ("chunk_tokens", "overcommit") if self.preset == "auto" else ()
        return {
            name: source
            for name, source in self.controllers.items()
            if getattr(self.knobs, name, self.chunk_tokens) == automatic.get(name, "auto")
            and name not in tuned
        }

    def largest_overcommit(self, batch: int) -> int:
        delta = self.knobs.overcommit
        return self.overcommit_max or batch if delta == "auto" else delta

    def most_in_flight(self, batch: int, samples_per_prompt: int) -> int:
        """Return the limit of responses in flight. Delta is rounded up to full groups."""
        groups = ceil_div(self.largest_overcommit(batch), samples_per_prompt)
        return batch * self.weight_sync_interval + groups * samples_per_prompt

    def first_overcommit(self, batch: int) -> int:
        half = self.largest_overcommit(batch) // 2
        return self.overcommit_start or max(half, self.overcommit_min)

    def rules(self, broken: Rules) -> None:
        """Check that a learner that starts on groups gets scored ones in time, and that values
        by hand are within ``max_staleness``."""
        knobs, interval = self.knobs, self.weight_sync_interval
        on_groups = knobs.on("train_on")
        age = knobs.lag if self.lag != "preset" else 0
        age += self.overcommit not in ("preset", 0)
        broken["beyond-max-staleness"] = (self.preset == "auto" and age > self.max_staleness) and (
            f"schedule.lag and schedule.overcommit, set by hand, train on tokens that are {age} "
            f"versions old, and schedule.max_staleness = {self.max_staleness}; raise it, or leave "
            "the knobs to schedule.preset = 'auto'"
        )
        broken["group-before-scores"] = (on_groups and not knobs.scores_early) and (
            "schedule.train_on = 'group' needs scores while other responses are decoded; set "
            "schedule.score_on = 'rollout' or 'chunk'"
        )
        lags = knobs.lag and (self.preset != "auto" or self.lag != "preset")
        broken["group-with-lag"] = (on_groups and lags) and (
            f"with schedule.lag = {knobs.lag} the learner trains on an earlier batch while "
            "responses are decoded; leave out schedule.train_on = 'group', or set schedule.lag = 0"
        )
        broken["group-of-several-steps"] = (on_groups and interval > 1) and (
            f"schedule.weight_sync_interval = {interval} decodes the responses of several steps "
            "together, and schedule.train_on = 'group' needs those of one; leave one of them out"
        )

    def overcommit_rules(self, batch: int) -> Rules:
        """Return the rules for the bounds of delta with this batch size."""
        broken: Rules = {}
        low, high = self.overcommit_min, self.overcommit_max or batch
        broken["overcommit-min"] = low > high and (
            f"schedule.overcommit_min = {low} is above the largest delta, {high} "
            "(schedule.overcommit_max, or else the batch); lower it"
        )
        start = self.overcommit_start or high
        broken["overcommit-start"] = not low <= start <= high and (
            f"schedule.overcommit_start = {start} is not between the smallest delta, {low} "
            f"(schedule.overcommit_min), and the largest, {high} (schedule.overcommit_max, or "
            "else the batch); choose one between them, or 0"
        )
        size, carries = batch * self.weight_sync_interval, self.carries
        delta = self.largest_overcommit(batch)
        name = "overcommit_max" if self.knobs.overcommit == "auto" else "overcommit"
        broken["overcommit-beyond-carries"] = delta > carries * size and (
            f"with schedule.{name} = {delta} and {size} responses between two weight syncs, some "
            f"are carried {ceil_div(delta, size)} times, and schedule.max_carries = {carries}; "
            f"lower schedule.{name} to {carries * size}, or raise schedule.max_carries"
        )
        return broken

    @property
    def remarks(self) -> list[str]:
        """Notes on settings of over-commitment and controllers without effect."""
        delta, rule = self.knobs.overcommit, self.overcommit_rule
        adapting = [key for key in type(self).model_fields if key.startswith("overcommit_")]
        changed = list(filter(self.is_set, adapting))
        if delta != "auto":
            idle, where = changed, f"while schedule.overcommit is {delta}"
        else:
            idle = [name for name in changed if rule not in _RULES.get(name, (rule,))]
            where = f"on overcommit_rule = '{rule}'"
        names = ", ".join(f"schedule.{name}" for name in idle)
        remarks = [f"without effect {where}: {names}"] if idle else []
        for name in self.controllers.keys() - self.own_controllers:
            auto = 0 if name == "chunk_tokens" else "'auto'"
            remarks.append(
                f"schedule.controllers: '{name}' has no effect unless schedule.{name} = {auto}, or "
                "with schedule.preset = 'auto', whose tuner replaces those of chunk_tokens and "
                "overcommit"
                if self.preset == "auto"
                else f"schedule.controllers: '{name}' has no effect unless schedule.{name} = {auto}"
            )
        if self.max_staleness and self.preset != "auto":
            remarks.append(
                "without effect unless schedule.preset is 'auto': schedule.max_staleness"
            )
        return remarks
