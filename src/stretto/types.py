"""Data that flows between roles: prompts, responses, chunks, scores, batches, weights.

All types are frozen and can be pickled. They use no torch and no clock.

A *batch size* always counts responses. A *step* trains on one batch, with any number of
mini-batches and epochs. A *version* counts weight syncs to the generator. A rollout's *staleness*
is the learner's version minus the oldest version among its tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Generic, Literal, NamedTuple, NotRequired, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from stretto.stateful import Unsaved

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
ScoreKind = Literal["reward", "logprobs", "values"]
INSIDE_SPAN = math.inf
"""In log-probabilities of spans, at tokens before a span's last one. NaN would hide a broken model,
and no log-probability is positive.
"""
Stats = Mapping[str, float]
"""Metrics of one step, by name."""
TopLogprobs = Sequence[tuple[int, float]]
"""Tokens and their log-probabilities."""
T = TypeVar("T", bound=np.generic)
V = TypeVar("V", covariant=True)


class Message(TypedDict):
    """A turn of a conversation for chat templates. The optional keys belong to tool calls."""

    role: str
    content: str
    tool_calls: NotRequired[list[Any]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that the actor answers.

    Attributes:
        id: the prompt's place in the task's (shuffled) order, stable during the run.
        tokens: the prompt as the actor reads it.
        text: the prompt before tokenisation, with the chat template applied if any.
        messages: the conversation, ``None`` for plain text.
        from_text: whether the row's own prompt is text, even if a template was applied to it.
        data: the dataset row of the prompt, for reward functions.
    """

    id: int
    tokens: tuple[int, ...]
    text: str
    messages: tuple[Message, ...] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    from_text: bool = False

    @property
    def bare(self) -> Prompt:
        """The prompt with only its id and tokens, which is all that models read."""
        return Prompt(self.id, self.tokens, "")

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens."""
        return hashlib.sha256(np.array(self.tokens, np.int32).tobytes()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of one response, overriding the engine's settings.

    Attributes:
        max_new_tokens, temperature, top_k, top_p: as in the settings ``rollout``.
        seed: a seed and the number of its random stream (in a run: the rollout id). ``None``: the
            run's seed and the response's id.
        top_logprobs: number of likeliest tokens to report with each sampled one.
        max_turn_tokens: token limit of one turn of an episode. ``max_new_tokens`` counts all its
            tokens, including context. 0: not an episode. An end of turn ends the response.
        stop: strings that end a turn of an episode, in addition to those of the settings.
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
        """Parameters of the distribution: temperature, top_k, top_p."""
        return self.temperature, self.top_k, self.top_p

    def like(self, other: Sampling) -> bool:
        """Return whether tokens have the same distribution as ``other``'s, without top_logprobs."""
        return self is other or (self.distribution == other.distribution and not self.top_logprobs)


CONTEXT = -1
"""Version of tokens that no policy sampled. Their log-probability is 0."""

FORKS = 1 << 40
"""Distance between ids of an episode's samples. The first has the episode's id."""


def episode_of(rollout_id: int) -> int:
    return rollout_id % FORKS if rollout_id >= 0 else -(-rollout_id % FORKS)


def fork_id(root: int, number: int) -> int:
    """Return the id of the sample that is fork ``number`` (from 1) of an episode."""
    return root + number * (FORKS if root >= 0 else -FORKS)


class FinishReason(StrEnum):
    """Why a response ended: an end token or stop string, or the token limit.

    The engine sets it. It is never inferred from padding. In an episode an end token or stop string
    ends a turn, and the response waits for its environment. Any limit ends both.
    """

    STOP = "stop"
    LENGTH = "length"
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens that one decode call added to one rollout.

    Attributes:
        start: index of the first token in the response.
        tokens: token ids [t]. Empty only if ``finish`` is set.
        logprobs: [t], of each token under the distribution it was sampled from.
        version: version of the policy that sampled them. :data:`CONTEXT` for an environment's.
        finish: why the rollout, or its turn, ended with this chunk. ``None`` while it continues.
        sampled: [t], true if the policy sampled the token. ``None``: it sampled all of them.
        top_logprobs: for each token, the likeliest tokens at its place with their
            log-probabilities, in descending order. Empty if not requested.
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
    """Result of a decode call: a chunk of each rollout that advanced, and the decode steps. Single
    rollouts may have taken part in fewer steps.
    """

    chunks: Sequence[Chunk]
    steps: int


@dataclass(frozen=True, slots=True)
class Response:
    """A rollout as roles see it: a prompt, and the response to it so far.

    Attributes:
        id: id of the rollout.
        group: shared by the rollouts of one prompt in one draw.
        prompt: with text, messages and data only for roles that read them.
        tokens: ids of the response so far, [T].
        version: version of the policy that sampled the last token. 0 without tokens.
        finish, sampled: as in :class:`Chunk`.
        sampling: its own sampling. ``None``: as the engine's settings.
        messages: an episode's response as messages, for roles that read text, otherwise ``None``.
        joints: text of the observation before each further sample of an episode, by its start in
            ``tokens``. Only for roles that score an episode once.
        logprobs: of an episode's tokens, for its environment, otherwise ``None``.
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
        """Index in the response at which its present turn begins, after the last context token."""
        if self.sampled is None:
            return 0
        context = np.flatnonzero(~self.sampled)
        return int(context[-1]) + 1 if len(context) else 0


@dataclass(frozen=True, slots=True)
class Observation:
    """An environment's answer to a turn: context for the policy, or the episode's end.

    Attributes:
        rollout_id: the sample that continues or ends: the one whose turn it was, another waiting
            one of the episode, or a fork with a new id.
        number: 0 for the opening of an episode, then increasing by 1.
        tokens: context for that sample, [t]. Empty if the episode is over.
        prompt: prompt of a new sample: of each fork, and of an opening that changes it. Not saved,
            because the rollout keeps it.
        reward: reward of the turn. For the last turn, plus the reward of the episode.
        ended_by: why the episode is over: ``environment``, ``turn_tokens``, ``tokens``, ``turns``
            or ``seconds``. Empty while it continues.
        messages: the turn as a message, and the messages that answer it.
        left: ``messages`` for the sample whose turn it was, if another one continues. The sample
            keeps only the turn of them.
        max_turn_tokens: limit of the next turn if below the run's, else 0.
        stop: strings that end that turn, in addition to the run's.
        record: plain data on calls: names, arguments, statuses, seconds, errors.
    """

    rollout_id: int
    number: int
    tokens: IntArray
    prompt: Unsaved[Prompt | None] = None
    reward: float | None = None
    ended_by: str = ""
    messages: tuple[Message, ...] = ()
    left: tuple[Message, ...] = ()
    max_turn_tokens: int = 0
    stop: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)


def short_name(scorer: str) -> str:
    """Return a scorer's name for display, without the folder of its file."""
    return scorer.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Score:
    """One scorer's result for one finished rollout.

    Attributes:
        source: the scorer's name, unique in a run.
        kind: ``reward`` (a scalar), ``logprobs`` or ``values`` (one number per sampled token).
        values: [1] for a reward, otherwise [T] with the T sampled tokens. Empty for a reward that
            does not apply to the rollout. Log-probabilities may be of spans of several tokens, each
            at its last one. The others have INSIDE_SPAN.
        failure: why there is no score. ``values`` is then empty. Never a silent zero.
        extra: further values of a reward function, by name; plain data.
    """

    rollout_id: int
    source: str
    kind: ScoreKind
    values: FloatArray
    failure: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scalar(self) -> float | None:
        """The value of a scalar score. ``None`` if it does not apply, or failed."""
        return float(self.values[0]) if len(self.values) else None


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """Reference to one version of a model's weights, from the learner to roles that load them.

    Attributes:
        model: ``actor`` or ``critic``.
        version: number of preceding weight syncs.
        fingerprint: of the tensors at the learner. The loading role computes it again and raises an
            error if the two differ.
        channel: location of the tensors. Empty if both sides share memory and none are sent. Not
            saved, because it depends on the runtime.
        sums: checksums of all elements of each trained tensor at the learner, by name, for the
            flight recorder (``observe.flight``).
    """

    model: str
    version: int
    fingerprint: str
    channel: Unsaved[str] = ""
    sums: Unsaved[Mapping[str, int]] = field(default_factory=dict, compare=False)


Hold = Literal["keep", "offload", "remake"]
"""Treatment of a parked rollout's KV cache while its environment works.

``keep`` leaves it on the device, ``offload`` moves it to host memory, and ``remake`` drops it: the
full sequence is prefilled when the rollout continues.
"""


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """A rollout that moves from one generator to another.

    Attributes:
        cache: its KV cache, in a format of generators of one kind. ``None`` if the receiver must
            prefill the tokens again.
        cached_tokens: number of prompt and response tokens in ``cache``.
    """

    rollout_id: int
    cache: Any = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Scored responses for the learner, in columns.

    B responses have N tokens, concatenated response by response. M of the tokens are sampled.

    Attributes:
        ids: [B], rollout ids.
        prompts: token ids of each prompt.
        prompt_ids: [B]. Responses to one prompt share one id.
        lengths: [B], in tokens.
        ended: [B], true if the response ended by itself.
        tokens: [N].
        logprobs: [N], under the distribution that each token was sampled from.
        versions: [N], of the policy that sampled each token, or :data:`CONTEXT`.
        rewards: [B], by reward source. 0 if a source does not apply.
        applies: [B], by reward source.
        per_token: [M], by the kind of the score: ``logprobs`` of the reference, ``values``.
        sampled: [N], true if the policy sampled the token. ``None``: it sampled all of them.
        turn_rewards: [M], an environment's rewards of turns, each at the turn's last token, and 0
            elsewhere. They are part of the rewards of its source. ``None`` if there are none.
        episodes: [B], shared by the samples of one episode. ``None``: each is its own episode.
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
        """Number of responses, counting the samples of an episode once."""
        return len(self) if self.episodes is None else len(np.unique(self.episodes))

    @property
    def total_tokens(self) -> int:
        """Tokens of all prompts and responses."""
        return sum(map(len, self.prompts)) + len(self.tokens)

    def split(self, column: npt.NDArray[T]) -> list[npt.NDArray[T]]:
        """Split a column of tokens [N] into one array per response."""
        return np.split(column, np.cumsum(self.lengths)[:-1])

    def split_sampled(self, column: npt.NDArray[T]) -> list[npt.NDArray[T]]:
        """Split the sampled tokens of a column, [N] or [M], into one array per response."""
        sampled = sampled_of(self)
        lengths = [int(d.sum()) for d in self.split(sampled)]
        sampled_column = column if len(column) < len(sampled) else column[sampled]
        return np.split(sampled_column, np.cumsum(lengths)[:-1])

    def responses(self) -> list[Response]:
        """Return each response with its prompt, with tokens only."""
        masks = [None] * len(self) if self.sampled is None else self.split(self.sampled)
        columns = self.ids, self.prompt_ids, self.prompts, self.split(self.tokens), masks
        return [
            Response(int(id_), int(group), Prompt(int(group), prompt, ""), tokens, sampled=sampled)
            for id_, group, prompt, tokens, sampled in zip(*columns, strict=True)
        ]

    def totals(self, weights: Mapping[str, float] | None = None) -> npt.NDArray[np.float64]:
        """Return the sum of each response's rewards, [B], optionally weighted by source."""
        total = np.zeros(len(self))
        for source in self.rewards:
            total += self._of_episodes(source) * (1.0 if weights is None else weights[source])
        return total

    def by_source(self) -> npt.NDArray[np.float64]:
        """Return rewards by source, [B, S]. NaN if a source applies to no sample of the episode."""
        columns = []
        for source in self.rewards:
            applies = self.applies.get(source, np.ones(len(self), np.bool_))
            if self.episodes is not None:
                places = np.unique(self.episodes, return_inverse=True)[1]
                applies = np.bincount(places, applies)[places] > 0
            columns.append(np.where(applies, self._of_episodes(source), np.nan))
        return np.stack(columns, axis=1)

    def _of_episodes(self, source: str) -> npt.NDArray[np.float64]:
        """Return a source's rewards [B], for an episode the mean over samples that have one."""
        values = self.rewards[source].astype(np.float64)
        if self.episodes is None:
            return values
        applies, places = self.applies[source], np.unique(self.episodes, return_inverse=True)[1]
        counts = np.maximum(np.bincount(places, applies), 1)
        return (np.bincount(places, values * applies) / counts)[places]


def sampled_of(tokens: Chunk | Response | TrainBatch) -> BoolArray:
    """Return which of the tokens the policy sampled, one bool each."""
    return np.ones(len(tokens.tokens), np.bool_) if tokens.sampled is None else tokens.sampled


@dataclass(frozen=True, slots=True)
class TrainStepOutput:
    """Result of a training step: metrics, and the rewards [B] that were trained on, which are
    weighted sums after the rule for missing ends.
    """

    stats: Stats
    rewards: FloatArray


@dataclass(frozen=True, slots=True)
class ScorerInfo:
    """Facts about a scorer that a schedule needs.

    Attributes:
        name: unique in a run, and the key of its scores.
        follows: the trained model whose weights it loads at each weight sync. Empty if frozen.
        streams: whether it works on rollouts before they end. Otherwise it gets complete ones.
        reads_text: whether it reads prompts' text, messages and data in addition to tokens.
        worthwhile_tokens: tokens that make a call worth its fixed cost. Fewer only if a role waits.
        whole_episodes: whether it scores an episode once, on the sample that ends it.
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
        name: gen, prefill/ROLE, score/ROLE, accumulate, update, publish, load, migrate, swap or
            wait.
        attributes: further facts, for example rollouts, tokens, version.
        beside: whether it ran in parallel with calls, and may have begun before this one.
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
        work = (replace(w, start_s=w.start_s + by_s, end_s=w.end_s + by_s) for w in self.work)
        return Reply(self.value, tuple(work))
