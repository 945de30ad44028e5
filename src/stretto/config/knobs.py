"""The four knobs of the schedule and its presets: one entry each, and all that follows from them.

A knob is a field of :class:`Knobs`, an entry of :data:`KNOBS`, and a setting of the same name
(:class:`~stretto.config.schedule.ScheduleConfig`). Whatever lists knobs or presets reads them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ScoreOn = Literal["batch", "rollout", "chunk"]
PresetName = Literal["sync", "oppo", "async", "rlhfuse", "stretto"]
Need = Literal["scoring worker", "training worker", "weights", "engines"]
"""Needs of a knob, in order: scorers that work beside generation, a learner that works beside
generation, generators (and the critic as a scorer) with weights of their own, several engines."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A knob, whatever its value.

    Attributes:
        label: name shown before its value.
        help: help text of its setting.
        needs: what it needs when it is on.
        off: values that switch it off, the usual one first.
    """

    label: str
    help: str
    needs: frozenset[Need]
    off: tuple[object, ...]


KNOBS: Mapping[str, Knob] = {
    "score_on": Knob(
        "score on",
        "When scorers see responses: once all have ended, each when it has ended, or chunk by chunk while they are decoded.",
        frozenset({"scoring worker"}),
        off=("batch",),
    ),
    "overcommit": Knob(
        "overcommit",
        "Responses in flight beyond the batch (delta); the first to end are trained on, the rest is carried into the next step. auto: adapted by overcommit_rule.",
        frozenset(),
        off=(0,),
    ),
    "lag": Knob(
        "lag",
        "Versions of the weights that generation may be behind training; 1 generates for the next step while training on this one.",
        frozenset({"training worker", "weights"}),
        off=(0,),
    ),
    "migrate": Knob(
        "migrate",
        "Gather the last responses on few engines when this share of the batch remains. auto: chosen by simulation. Needs rollout.engines > 1.",
        frozenset({"engines"}),
        off=("off", 0),
    ),
}
"""Every knob, by the name of its setting."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """Values of the four knobs, and what follows from them."""

    score_on: ScoreOn = "batch"
    overcommit: int | Literal["auto"] = 0
    lag: int = 0
    migrate: float | Literal["off", "auto"] = "off"

    def on(self, name: str) -> bool:
        """Return whether the knob of this name is on."""
        return getattr(self, name) not in KNOBS[name].off

    def works(self, name: str, engines: int) -> bool:
        """Return whether the knob of this name is on and has the engines that it needs."""
        return self.on(name) and (engines > 1 or "engines" not in KNOBS[name].needs)

    @property
    def needs(self) -> frozenset[Need]:
        """Needs of all knobs that are on."""
        return frozenset(need for name in KNOBS if self.on(name) for need in KNOBS[name].needs)

    @property
    def streams(self) -> bool:
        """Return whether scorers read responses chunk by chunk while these are decoded."""
        return self.score_on == "chunk"

    @property
    def scores_early(self) -> bool:
        """Return whether scorers see responses while others are still decoded; each reward function then has a worker."""
        return "scoring worker" in self.needs

    @property
    def trains_beside(self) -> bool:
        """Return whether the learner works while the next responses are decoded."""
        return "training worker" in self.needs

    @property
    def copies_weights(self) -> bool:
        """Return whether generators, and the critic as a scorer, have weights of their own."""
        return "weights" in self.needs

    def overlaps(self, engines: int) -> bool:
        """Return whether roles work at the same time; else all take turns on one worker."""
        return self.scores_early or self.trains_beside or engines > 1

    def migrates(self, engines: int) -> bool:
        """Return whether stragglers are gathered on few engines; this needs several."""
        return self.works("migrate", engines)

    def hosts_scorers(self, engines: int) -> bool:
        """Return whether model scorers sit with the engines, and work on those that have nothing left to decode.

        Scorers that stream have a worker of their own, as they work while all engines decode.
        """
        return self.migrates(engines) and not self.streams

    def scores_beside(self, engines: int) -> bool:
        """Return whether model scorers work on a worker of their own while responses are decoded."""
        return self.scores_early and not self.hosts_scorers(engines)

    def model_replicas(self, engines: int) -> int:
        """Number of replicas of each model scorer: one, or one with each engine that may be freed."""
        return engines if self.hosts_scorers(engines) else 1

    def describe(self, engines: int) -> str:
        """Describe all knobs in one line, as they work with so many engines."""
        return ", ".join(f"{KNOBS[name].label} {self._shown(name, engines)}" for name in KNOBS)

    def _shown(self, name: str, engines: int) -> str:
        if self.on(name) and not self.works(name, engines):
            return f"{KNOBS[name].off[0]} (there is one engine)"
        return str(getattr(self, name))


@dataclass(frozen=True, slots=True)
class Preset:
    """Values of all knobs, under a name.

    Attributes:
        knobs: their values.
        help: what it does, in a few words.
        parts: knobs that ``stretto compare`` can switch off one by one, by the names of these parts.
        several_engines: it is about several engines, so it is not compared unless asked for.
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
        Knobs(score_on="chunk", overcommit="auto", lag=1, migrate="auto"), "all of it"
    ),
}
"""Every preset, by name. docs/schedules.md says where they come from."""

PRESET_HELP = " ".join(
    [
        "What the four knobs are where they say 'preset'.",
        *(f"{name}: {preset.help}." for name, preset in PRESETS.items()),
    ]
)
