"""What flows: prompts, rollouts, chunks, scores, weights. No torch here, and no clock.

A *batch size* counts responses, everywhere. A *step* takes one batch to the learner, whatever
mini-batches and epochs happen inside. A *version* counts hand-overs of weights to the generator.
A rollout's *staleness* is the learner's version minus the oldest version among its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from stretto.errors import LifecycleError

FloatArray = npt.NDArray[np.float32]


class Message(TypedDict):
    """One turn of a conversation, as chat templates take it."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the actor answers.

    Attributes:
        id: stable over the whole run: the prompt's place in the task's (shuffled) order.
        tokens: the prompt as the actor reads it.
        text: the same, before tokenisation (chat template applied where there is one).
        messages: the conversation, where the prompt is one; ``None`` for plain text.
        data: the dataset row that the prompt came from; what judges look at.
    """

    id: int
    tokens: tuple[int, ...]
    text: str
    messages: tuple[Message, ...] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


class FinishReason(StrEnum):
    """Why a response ended. Comes from the engine, never from the padding."""

    STOP = "stop"
    """An end-of-sequence token or a stop string."""
    LENGTH = "length"
    """The token limit."""


class RolloutState(StrEnum):
    """Where a rollout stands between the queue and the gradient."""

    QUEUED = "queued"
    DECODING = "decoding"
    CARRIED = "carried"
    FINISHED = "finished"
    SCORED = "scored"
    TRAINED = "trained"
    REJECTED = "rejected"


_EDGES: Mapping[RolloutState, frozenset[RolloutState]] = {
    RolloutState.QUEUED: frozenset({RolloutState.DECODING, RolloutState.REJECTED}),
    RolloutState.DECODING: frozenset(
        {RolloutState.CARRIED, RolloutState.FINISHED, RolloutState.REJECTED}
    ),
    RolloutState.CARRIED: frozenset({RolloutState.DECODING, RolloutState.REJECTED}),
    RolloutState.FINISHED: frozenset({RolloutState.SCORED, RolloutState.REJECTED}),
    RolloutState.SCORED: frozenset({RolloutState.TRAINED, RolloutState.REJECTED}),
    RolloutState.TRAINED: frozenset(),
    RolloutState.REJECTED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens that one decode call added to one rollout.

    Attributes:
        rollout_id: whose tokens these are.
        start: index of the first of them in the response.
        tokens: token ids; may be empty only when ``finish`` is set.
        logprobs: log-probability of each token under the distribution it was sampled from.
        version: the policy version that sampled them.
        finish: why the rollout ended with this chunk; ``None`` while it goes on.
    """

    rollout_id: int
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: FinishReason | None = None


ScoreKind = Literal["reward", "logprobs", "values"]


def short_name(scorer: str) -> str:
    """A scorer's name without the folder of the file it may come from, for people to read."""
    return scorer.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Score:
    """What one scorer says of one finished rollout.

    Attributes:
        rollout_id: whose score it is.
        source: the scorer's name, unique in a run.
        kind: ``reward`` (a scalar), ``logprobs`` or ``values`` (one number a response token).
        values: shape [1] for a reward, [T] for the others, T the response's tokens. Empty for a
            reward that does not apply to the rollout.
        failure: why there is no score; ``values`` is then empty. Never a silent zero.
    """

    rollout_id: int
    source: str
    kind: ScoreKind
    values: FloatArray
    failure: str | None = None

    @property
    def scalar(self) -> float | None:
        """The value of a scalar score; ``None`` where it does not apply, or failed."""
        return float(self.values[0]) if len(self.values) else None

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain data."""
        return {**asdict(self), "values": self.values.tolist()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Score:
        """The inverse of :meth:`state_dict`."""
        return cls(**{**state, "values": np.array(state["values"], np.float32)})


@dataclass(slots=True)
class Rollout:
    """One response to one prompt, from queue to gradient.

    Append-only: tokens are only ever added, so that the per-token fields always have one length.

    Attributes:
        id: stable over the run, in dispatch order.
        group: shared by the rollouts of one prompt in one draw.
        tokens, logprobs, versions: one entry a response token. The log-probability is the
            behaviour policy's: of the distribution the token was sampled from.
        carries: rounds that went by without it since it was dispatched.
        rejected_because: set when the state is ``REJECTED``.
    """

    id: int
    prompt: Prompt
    group: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    state: RolloutState = RolloutState.QUEUED
    scores: dict[str, Score] = field(default_factory=dict)
    carries: int = 0
    rejected_because: str = ""

    def __len__(self) -> int:
        """Response tokens so far."""
        return len(self.tokens)

    def move(self, state: RolloutState, because: str = "") -> None:
        """Go to ``state``.

        Raises:
            LifecycleError: there is no such edge from the present state.
        """
        if state not in _EDGES[self.state]:
            raise LifecycleError(f"rollout {self.id} cannot go from {self.state} to {state}")
        self.state = state
        self.rejected_because = because

    def append(self, chunk: Chunk) -> None:
        """Add a chunk's tokens at the end.

        Raises:
            LifecycleError: the chunk is another rollout's, leaves a gap, or comes after the end.
        """
        if chunk.rollout_id != self.id or chunk.start != len(self.tokens) or self.finish:
            raise LifecycleError(
                f"rollout {self.id} holds {len(self.tokens)} tokens (finish: {self.finish}) and "
                f"cannot take a chunk of rollout {chunk.rollout_id} that starts at {chunk.start}"
            )
        self.tokens.extend(chunk.tokens)
        self.logprobs.extend(chunk.logprobs)
        self.versions.extend([chunk.version] * len(chunk.tokens))
        self.finish = chunk.finish

    @property
    def total_tokens(self) -> int:
        """Prompt and response tokens so far."""
        return len(self.prompt.tokens) + len(self.tokens)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the prompt (known by its id), as plain data."""
        return {
            "id": self.id,
            "prompt": self.prompt.id,
            "group": self.group,
            "tokens": list(self.tokens),
            "logprobs": list(self.logprobs),
            "versions": list(self.versions),
            "finish": self.finish and str(self.finish),
            "state": str(self.state),
            "carries": self.carries,
            "scores": [score.state_dict() for score in self.scores.values()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], prompt: Prompt) -> Rollout:
        """The inverse of :meth:`state_dict`."""
        return cls(
            id=state["id"],
            prompt=prompt,
            group=state["group"],
            tokens=list(state["tokens"]),
            logprobs=list(state["logprobs"]),
            versions=list(state["versions"]),
            finish=FinishReason(state["finish"]) if state["finish"] else None,
            state=RolloutState(state["state"]),
            carries=state["carries"],
            scores={s["source"]: Score.from_state(s) for s in state["scores"]},
        )


def of_kind(rollout: Rollout, kind: ScoreKind) -> list[Score]:
    """A rollout's scores of one kind."""
    return [s for s in rollout.scores.values() if s.kind == kind]


def total_reward(rollout: Rollout, weights: Mapping[str, float] | None = None) -> float:
    """The weighted sum of a rollout's rewards; those that do not apply are left out.

    Args:
        rollout: with its scores.
        weights: factor of each reward source, by name; without them each counts once.
    """
    return sum(
        reward * (1.0 if weights is None else weights[score.source])
        for score in of_kind(rollout, "reward")
        if (reward := score.scalar) is not None
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """One hand-over of one model's weights from the learner to a generator or a scorer.

    Attributes:
        version: how many hand-overs came before.
        fingerprint: of the tensors, as the learner sees them; who loads them computes its own
            afterwards and refuses to go on if they differ.
        tensors: by parameter name; ``None`` when both share memory.
    """

    version: int
    fingerprint: str
    tensors: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Parcel:
    """A rollout on its way from one generator to another.

    Attributes:
        rollout_id: whose it is.
        cache: its keys and values, in a form that generators of one kind understand; ``None`` when
            the receiver is to prefill the tokens again.
        cached_tokens: prompt and response tokens that ``cache`` covers.
    """

    rollout_id: int
    cache: Any = None
    cached_tokens: int = 0


Stats = Mapping[str, float]
"""Figures of one step, by metric name."""

Batch = Sequence[Rollout]
"""Scored rollouts on their way to the learner."""
