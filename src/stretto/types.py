"""Data that flows between roles: prompts, responses, chunks, scores, batches, weights.

All of it is frozen and can be pickled. No torch here, and no clock.

A *batch size* counts responses, everywhere. A *step* takes one batch to the learner, whatever
mini-batches and epochs happen inside. A *version* counts weight syncs to the generator.
A rollout's *staleness* is the learner's version minus the oldest version among its tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Generic, Literal, NamedTuple, NotRequired, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
ScoreKind = Literal["reward", "logprobs", "values"]
Stats = Mapping[str, float]
"""Metrics of one step, by name."""
TopLogprobs = Sequence[tuple[int, float]]
"""Tokens and their log-probabilities."""
T = TypeVar("T", bound=np.generic)
V = TypeVar("V", covariant=True)


class Message(TypedDict):
    """A turn of a conversation, as chat templates take it; other keys belong to calls of tools."""

    role: str
    content: str
    tool_calls: NotRequired[list[Any]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that the actor answers.

    Attributes:
        id: stable over the whole run: the prompt's place in the task's (shuffled) order.
        tokens: the prompt as the actor reads it.
        text: before tokenisation (chat template applied where there is one).
        messages: the conversation, where the prompt is one; ``None`` for plain text.
        from_text: whether the row's own prompt is text, whatever template was applied to it.
        data: the dataset row that the prompt came from; what reward functions look at.
    """

    id: int
    tokens: tuple[int, ...]
    text: str
    messages: tuple[Message, ...] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    from_text: bool = False

    @property
    def bare(self) -> Prompt:
        """The prompt with its id and tokens alone, which is all that models read."""
        return Prompt(self.id, self.tokens, "")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one response is sampled, in place of what the engine's settings say.

    Attributes:
        max_new_tokens, temperature, top_k, top_p: as in the settings ``rollout``.
        seed: a seed, and which of its random streams (of a run: the rollout with that id) gives the
            response's random numbers; ``None``: those of the run's seed and the response's id.
        top_logprobs: likeliest tokens that are reported beside each sampled one.
        max_turn_tokens: of one turn of an episode, whose tokens ``max_new_tokens`` counts, context
            among them. 0: the response is no episode, and what would end a turn ends it.
        stop: strings that end a turn of an episode, besides those of the settings.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: tuple[int, int] | None = None
    top_logprobs: int = 0
    max_turn_tokens: int = 0
    stop: tuple[str, ...] = ()

    @property
    def distribution(self) -> tuple[float, int, float]:
        """What the distribution depends on: temperature, top_k, top_p."""
        return self.temperature, self.top_k, self.top_p

    def like(self, other: Sampling) -> bool:
        """Return whether tokens are drawn as another one's, and nothing is reported beside them."""
        return self is other or (self.distribution == other.distribution and not self.top_logprobs)


CONTEXT = -1
"""The version of tokens that no policy sampled; their log-probability is 0."""

FORKS = 1 << 40
"""Ids of an episode's samples are apart by this number; the first has the episode's id."""


def episode_of(rollout_id: int) -> int:
    """Return the id of the episode that a rollout is a sample of."""
    return rollout_id % FORKS if rollout_id >= 0 else -(-rollout_id % FORKS)


def fork_id(root: int, number: int) -> int:
    """Return the id of the sample of an episode that begins as its fork of this number, from 1."""
    return root + number * (FORKS if root >= 0 else -FORKS)


class FinishReason(StrEnum):
    """The reason why a response ended: an end token or a stop string, or the token limit.

    It comes from the engine, never from the padding. In an episode an end token or a stop string
    ends a turn; the response then waits for its environment. A limit, a turn's too, ends both.
    """

    STOP = "stop"
    LENGTH = "length"
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens that one decode call added to one rollout.

    Attributes:
        start: index of the first token in the response.
        tokens: token ids [t]; none only when ``finish`` is set.
        logprobs: [t], of each token under the distribution it was sampled from.
        version: of the policy that sampled them; :data:`CONTEXT` for those of an environment.
        finish: why the rollout, or its turn, ended with this chunk; ``None`` while it goes on.
        sampled: [t], true where the policy drew the token; ``None``: it drew all of them.
        top_logprobs: for each token, the likeliest ones in its place with their log-probabilities,
            the likeliest first; empty where none were asked for.
    """

    rollout_id: int
    start: int
    tokens: IntArray
    logprobs: FloatArray
    version: int
    finish: FinishReason | None = None
    sampled: BoolArray | None = None
    top_logprobs: Sequence[TopLogprobs] = ()


class Decoded(NamedTuple):
    """The outcome of a decode call: a chunk of each rollout that advanced, and the decode steps.

    A rollout may have been part of fewer steps.
    """

    chunks: Sequence[Chunk]
    steps: int


@dataclass(frozen=True, slots=True)
class Response:
    """A rollout as roles are told of it: a prompt, and the response to it so far.

    Attributes:
        id: of the rollout.
        group: shared by the rollouts of one prompt in one draw.
        prompt: with text, messages and data only for roles that read them.
        tokens: ids of the response so far, [T].
        version: of the policy that sampled the last token; 0 where there is none.
        finish, sampled: as in :class:`Chunk`.
        sampling: how it goes on, where that is its own; ``None``: as the engine's settings say.
        messages: what an episode's response says, for roles that read text; ``None`` for others.
        joints: where a further sample of an episode begins, the text that answered the turn before;
            by places in ``tokens``. Only for roles that score an episode once.
        logprobs: of an episode's tokens, for its environment; ``None`` for others.
    """

    id: int
    group: int
    prompt: Prompt
    tokens: IntArray
    version: int = 0
    finish: FinishReason | None = None
    sampled: BoolArray | None = None
    sampling: Sampling | None = None
    messages: tuple[Message, ...] | None = None
    logprobs: FloatArray | None = None
    joints: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total_tokens(self) -> int:
        """Prompt and response tokens so far."""
        return len(self.prompt.tokens) + len(self.tokens)

    @property
    def turn_start(self) -> int:
        """The place in the response where its present turn begins: behind the last context."""
        if self.sampled is None:
            return 0
        context = np.flatnonzero(~self.sampled)
        return int(context[-1]) + 1 if len(context) else 0


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer of an environment to a turn: what the policy reads next, or the episode's end.

    Attributes:
        rollout_id: the sample that goes on, or ends: the one whose turn it was, another one of the
            episode that waits, or a new one (a fork), whose id no sample has.
        number: 0 for the opening of an episode, and 1 more for each that follows.
        tokens: context for that sample, [t]; none where the episode is over.
        prompt: of a sample that begins: where an opening changes it, and of each fork.
        reward: of the turn; of the last one, with what the whole episode earns.
        ended_by: why the episode is over: ``environment``, ``turn_tokens``, ``tokens``, ``turns``
            or ``seconds``; empty while it goes on.
        messages: the turn as a message, and those that answer it.
        left: the same of the sample whose turn it was, where another one goes on: that sample reads
            its turn alone.
        max_turn_tokens: of the turn that is asked for, where that is less than the run's; else 0.
        stop: strings that end that turn, besides the run's.
        record: plain data on what was called: names, arguments, statuses, seconds, errors.
    """

    rollout_id: int
    number: int
    tokens: IntArray
    prompt: Prompt | None = None
    reward: float | None = None
    ended_by: str = ""
    messages: tuple[Message, ...] = ()
    left: tuple[Message, ...] = ()
    max_turn_tokens: int = 0
    stop: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data, without the prompt, which its rollout keeps."""
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "prompt"}
        return {
            **state,
            "tokens": self.tokens.tolist(),
            "messages": list(self.messages),
            "left": list(self.left),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Observation:
        """Make an observation of what :meth:`state_dict` returned."""
        tokens = np.array(state["tokens"], np.int32)
        told = {name: tuple(state.get(name, ())) for name in ("messages", "left", "stop")}
        return cls(**{**state, "tokens": tokens, **told})


def short_name(scorer: str) -> str:
    """Return a scorer's name without the folder of the file it may come from, for people."""
    return scorer.rpartition("/")[2]


def is_finite(number: float) -> bool:
    """Return whether a reward is finite as float32, which it is trained on as."""
    return abs(number) < 2.0**128 - 2.0**103  # half a step beyond the largest number


@dataclass(frozen=True, slots=True)
class Score:
    """The answer of one scorer on one finished rollout.

    Attributes:
        source: the scorer's name, unique in a run.
        kind: ``reward`` (a scalar), ``logprobs`` or ``values`` (one number a sampled token).
        values: [1] for a reward, [T] for the others, T the response's sampled tokens. Empty for a
            reward that does not apply to the rollout.
        failure: why there is no score; ``values`` is then empty. Never a silent zero.
        extra: what a reward function gave beside its score, by name; plain data.
    """

    rollout_id: int
    source: str
    kind: ScoreKind
    values: FloatArray
    failure: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scalar(self) -> float | None:
        """The value of a scalar score; ``None`` where it does not apply, or failed."""
        return float(self.values[0]) if len(self.values) else None

    def state_dict(self) -> dict[str, Any]:
        """Return all fields, values as an array; :meth:`from_state` makes the score again."""
        values = array("f")
        values.frombytes(np.ascontiguousarray(self.values, np.float32).view(np.uint8).data)
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"values": values}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Score:
        """Make a score of fields, whose values may be of any kind that numpy takes."""
        return cls(**{**state, "values": np.asarray(state["values"], np.float32)})


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """A ticket for one version of one model's weights, from the learner to those who load them.

    Attributes:
        model: ``actor`` or ``critic``.
        version: how many weight syncs came before.
        fingerprint: of the tensors, as the learner sees them. The role that loads them computes it
            again and refuses to go on if the two differ.
        channel: where the tensors are; empty where both sides share memory, and none travel.
    """

    model: str
    version: int
    fingerprint: str
    channel: str = ""


Hold = Literal["keep", "offload", "remake"]
"""What becomes of the keys and values of a parked rollout, whose environment is at work.

``keep`` leaves them on the device, ``offload`` takes them to the host's memory, and ``remake``
drops them: what the rollout goes on with is then prefilled as a whole.
"""


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """A rollout on its way from one generator to another.

    Attributes:
        cache: its keys and values, in a form that generators of one kind understand; ``None`` when
            the receiver is to prefill the tokens again.
        cached_tokens: prompt and response tokens that ``cache`` covers.
    """

    rollout_id: int
    cache: Any = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Scored responses on their way to the learner, in columns.

    B responses; N tokens of them all, those of one response after those of another; M of them are
    sampled.

    Attributes:
        ids: [B], of the rollouts.
        prompts: token ids of each prompt.
        prompt_ids: [B]; responses to one prompt share one id.
        lengths: [B], in tokens.
        ended: [B], true where the response ended by itself.
        tokens: [N].
        logprobs: [N], of the distribution that each token was sampled from.
        versions: [N], of the policy that sampled each token; :data:`CONTEXT` for the others.
        rewards: [B], by reward source; 0 where a source does not apply.
        applies: [B], by reward source.
        per_token: [M], by the kind of the score: ``logprobs`` of the reference, ``values``.
        sampled: [N], true where the policy drew the token; ``None``: it drew all of them.
        turn_rewards: [M], what an environment gave for turns, at the last token of each, and 0
            elsewhere; part of the rewards of its source. ``None`` where it gave none.
        episodes: [B], shared by the samples of one episode; ``None``: each has one of its own.
    """

    ids: LongArray
    prompts: Sequence[tuple[int, ...]]
    prompt_ids: LongArray
    lengths: LongArray
    ended: BoolArray
    tokens: IntArray
    logprobs: FloatArray
    versions: IntArray
    rewards: Mapping[str, FloatArray] = field(default_factory=dict)
    applies: Mapping[str, BoolArray] = field(default_factory=dict)
    per_token: Mapping[ScoreKind, FloatArray] = field(default_factory=dict)
    sampled: BoolArray | None = None
    turn_rewards: FloatArray | None = None
    episodes: LongArray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def response_count(self) -> int:
        """Responses, the samples of an episode counted once."""
        return len(self) if self.episodes is None else len(np.unique(self.episodes))

    @property
    def total_tokens(self) -> int:
        """Tokens of all prompts and responses."""
        return sum(map(len, self.prompts)) + len(self.tokens)

    def split(self, column: npt.NDArray[T]) -> list[npt.NDArray[T]]:
        """Split a column of tokens [N] into one array a response."""
        return np.split(column, np.cumsum(self.lengths)[:-1])

    def split_sampled(self, column: npt.NDArray[T]) -> list[npt.NDArray[T]]:
        """Split the sampled tokens of a column, [N] or [M], into one array a response."""
        drawn = sampled_of(self)
        lengths = [int(d.sum()) for d in self.split(drawn)]
        of_drawn = column if len(column) < len(drawn) else column[drawn]
        return np.split(of_drawn, np.cumsum(lengths)[:-1])

    def responses(self) -> list[Response]:
        """Return each response with its prompt, tokens alone."""
        masks = [None] * len(self) if self.sampled is None else self.split(self.sampled)
        columns = self.ids, self.prompt_ids, self.prompts, self.split(self.tokens), masks
        return [
            Response(int(id_), int(group), Prompt(int(group), prompt, ""), tokens, sampled=sampled)
            for id_, group, prompt, tokens, sampled in zip(*columns, strict=True)
        ]

    def totals(self, weights: Mapping[str, float] | None = None) -> npt.NDArray[np.float64]:
        """Return the sum of each response's rewards, [B], weighted by source if so asked."""
        total = np.zeros(len(self))
        for source in self.rewards:
            total += self._of_episodes(source) * (1.0 if weights is None else weights[source])
        return total

    def by_source(self) -> npt.NDArray[np.float64]:
        """Return each response's reward of each source, [B, S]; NaN if the source does not apply to
        it, or to any sample of its episode."""
        columns = []
        for source in self.rewards:
            applies = self.applies.get(source, np.ones(len(self), np.bool_))
            if self.episodes is not None:
                places = np.unique(self.episodes, return_inverse=True)[1]
                applies = np.bincount(places, applies)[places] > 0
            columns.append(np.where(applies, self._of_episodes(source), np.nan))
        return np.stack(columns, axis=1)

    def _of_episodes(self, source: str) -> npt.NDArray[np.float64]:
        """Return a source's rewards [B]; all samples of an episode have the mean of those of its
        samples that the source applies to.
        """
        values = self.rewards[source].astype(np.float64)
        if self.episodes is None:
            return values
        applies, places = self.applies[source], np.unique(self.episodes, return_inverse=True)[1]
        counts = np.maximum(np.bincount(places, applies), 1)
        return (np.bincount(places, values * applies) / counts)[places]


def sampled_of(tokens: Chunk | Response | TrainBatch) -> BoolArray:
    """Return which of the tokens the policy drew, one bool each."""
    everything = np.ones(len(tokens.tokens), np.bool_)
    return everything if tokens.sampled is None else tokens.sampled


@dataclass(frozen=True, slots=True)
class TrainOutput:
    """The outcome of a step of training: metrics, and the rewards [B] as trained on.

    These are the weighted sums, after the rule for missing ends.
    """

    stats: Stats
    rewards: FloatArray


@dataclass(frozen=True, slots=True)
class ScorerInfo:
    """The facts about a scorer that a schedule needs.

    Attributes:
        name: unique in a run; the key of its scores.
        follows: the trained model whose weights it loads at each weight sync; empty when it is
            frozen.
        streams: whether it works on rollouts before they end; if not, it gets whole ones.
        reads_text: whether it reads prompts' text, messages and data, and not tokens alone.
        worthwhile_tokens: that make a call worth its fixed cost; it gets fewer only when a role
            waits.
        whole_episodes: whether it scores an episode once, on the sample that ends it, and not each
            of its samples.
    """

    name: str
    kind: ScoreKind
    follows: str = ""
    streams: bool = True
    reads_text: bool = False
    worthwhile_tokens: int = 0
    whole_episodes: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """A stretch of work, by the clock of the worker that did it.

    Attributes:
        name: gen, prefill/ROLE, score/ROLE, update, publish, load, migrate; swap; or wait.
        attributes: further facts, such as rollouts, tokens, version.
        beside: whether it went on beside calls, and may have begun before this one was made.
    """

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Any] = field(default_factory=dict)
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Reply(Generic[V]):
    """A worker's answer, and the work that was done for it."""

    value: V
    work: Sequence[Work] = ()

    def shifted(self, by_s: float) -> Reply[V]:
        """Return the reply by a clock that is ``by_s`` seconds ahead of the worker's."""
        moved = (replace(w, start_s=w.start_s + by_s, end_s=w.end_s + by_s) for w in self.work)
        return Reply(self.value, tuple(moved))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a generation engine.

    Attributes:
        moves_cache: hands keys and values of a rollout to another engine of its kind.
        deterministic: samples the same tokens from the same seed, whatever is decoded beside.
        interruptible: stops after any token, and goes on later where it was.
        logprobs: ``sampled``: of the distribution that tokens are drawn from, with temperature and
            truncation; ``raw``: of the model's own.
    """

    moves_cache: bool
    deterministic: bool
    interruptible: bool
    logprobs: Literal["sampled", "raw"]
