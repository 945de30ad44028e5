"""Settings of the schedule."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stretto.config.base import Fraction, NonNegativeInt, Positive, PositiveInt, Section

PRESETS: dict[str, dict[str, Any]] = {
    "sync": {"score_on": "batch", "overcommit": 0, "lag": 0, "migrate": "off"},
    "oppo": {"score_on": "chunk", "overcommit": "auto", "lag": 0, "migrate": "off"},
    "async": {"score_on": "rollout", "overcommit": 0, "lag": 1, "migrate": "off"},
    "rlhfuse": {"score_on": "rollout", "overcommit": 0, "lag": 0, "migrate": "auto"},
    "stretto": {"score_on": "chunk", "overcommit": "auto", "lag": 1, "migrate": "auto"},
}
"""What each preset sets the four knobs of the schedule to."""


class ScheduleConfig(Section):
    """When each piece of work runs: four knobs, and how they are turned."""

    preset: Literal["sync", "oppo", "async", "rlhfuse", "stretto"] = "sync"
    """What the four knobs are where they say 'preset'. sync: each stage after the one before. oppo: stream to scorers, over-commit. async: one version behind. rlhfuse: gather stragglers. stretto: all of it."""
    score_on: Literal["preset", "batch", "rollout", "chunk"] = "preset"
    """When scorers see responses: once all have ended, each when it has ended, or chunk by chunk while they are decoded."""
    overcommit: Literal["preset", "auto"] | NonNegativeInt = "preset"
    """Responses in flight beyond the batch (delta); the first to end are trained on, the rest is carried into the next step. auto: adapted by overcommit_rule."""
    lag: Literal["preset"] | NonNegativeInt = "preset"
    """Versions of the weights that generation may be behind training; 1 generates for the next step while training on this one."""
    migrate: Literal["preset", "off", "auto"] | Fraction = "preset"
    """Gather the last responses on few engines when this share of the batch remains. auto: chosen by simulation. Needs rollout.engines > 1."""
    chunk_tokens: NonNegativeInt = 0
    """Tokens that each response gets between two looks at what has ended, and that are streamed at a time; 0 tries several sizes and keeps the best."""
    chunk_window: Annotated[int, Field(gt=3)] = 50
    """Steps between two trials of chunk sizes."""
    overcommit_rule: Literal["equation4", "algorithm1", "throughput"] = "equation4"
    """How 'auto' adapts delta. equation4: up by one while rewards rise, else down. algorithm1: by a quarter, the other way round. throughput: what the lengths and latencies seen predict to be fastest."""
    overcommit_start: NonNegativeInt = 0
    """Delta at the start of 'auto'; 0 takes half of overcommit_max."""
    overcommit_max: NonNegativeInt = 0
    """Largest delta of 'auto'; 0 takes the batch size."""
    overcommit_window: PositiveInt = 10
    """Steps over which equation4 and algorithm1 look at the reward."""
    max_carries: PositiveInt = 8
    """A response that was carried this often is waited for."""
    carry: Literal["recompute", "reuse"] = "recompute"
    """What happens to the keys and values of a carried response when the weights change: computed anew, or kept as they are."""
    batches_per_handover: PositiveInt = 1
    """Steps taken on what one version of the weights has generated (the off-policy dial N); for several updates on one batch see training.epochs."""
    threads: tuple[()] | tuple[PositiveInt, PositiveInt, PositiveInt] = ()
    """CPU threads of each engine, of scoring and of training where they overlap; empty shares the cores out."""
    deadline_s: Positive = 1800.0
    """Seconds that a role may take to answer one call; then the run ends and says who did not answer."""

    def knob(self, name: Literal["score_on", "overcommit", "lag", "migrate"]) -> Any:
        """The value of one of the four knobs, from the preset where that is left to it."""
        value = getattr(self, name)
        return PRESETS[self.preset][name] if value == "preset" else value
