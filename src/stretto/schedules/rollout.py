"""Rollouts: the schedule's record of each response, and the ledger of all."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from typing import Any

import numpy as np

from stretto.config.capabilities import ENVIRONMENT
from stretto.errors import LifecycleError, RewardError, StateError
from stretto.plain import is_finite
from stretto.stateful import Stateful, Unsaved, from_plain, to_plain
from stretto.types import (
    CONTEXT,
    BoolArray,
    Chunk,
    FinishReason,
    FloatArray,
    Message,
    Observation,
    Prompt,
    Response,
    Sampling,
    Score,
    ScoreKind,
    Stats,
    TrainBatch,
    episode_of,
)

FUNCTION_FAILED = "reward function failed"
NOTHING_APPLIES = "no reward source applies"
NOT_FINITE = "reward not finite"
EQUAL_SCORES = "equal scores"  # of all responses to its prompt
GROUP_TOO_SMALL = "group too small"  # it has a reward, but too few responses to its prompt have one


class RolloutState(StrEnum):
    """State of a rollout from queue to gradient."""

    QUEUED = "queued"
    DECODING = "decoding"
    WAITING = "waiting"
    CARRIED = "carried"
    FINISHED = "finished"
    SCORED = "scored"
    TRAINED = "trained"
    REJECTED = "rejected"


_S = RolloutState

_EDGES: Mapping[RolloutState, tuple[RolloutState, ...]] = {
    _S.QUEUED: (_S.DECODING, _S.WAITING, _S.REJECTED),
    _S.DECODING: (_S.CARRIED, _S.WAITING, _S.FINISHED, _S.REJECTED),
    _S.WAITING: (_S.DECODING, _S.FINISHED, _S.REJECTED),
    _S.CARRIED: (_S.DECODING, _S.REJECTED),
    _S.FINISHED: (_S.SCORED, _S.REJECTED),
    _S.SCORED: (_S.TRAINED, _S.REJECTED),
    _S.TRAINED: (),
    _S.REJECTED: (),
}


@dataclass(slots=True)
class Rollout:
    """A response to one prompt, from queue to gradient. In an episode, turns alternate with context
    (answers of the environment), and all its rollouts (samples) have the same :func:`episode_of`.

    - Tokens are only ever added, unless an episode starts again.
    - Arrays hold them, because lists take 100 instead of 12 bytes per token and copy slowly.
    """

    id: int  # stable over the run, in dispatch order
    prompt: Unsaved[Prompt]
    group: int  # shared by the rollouts of one prompt in one draw
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))  # as sampled
    versions: array[int] = field(default_factory=lambda: array("i"))
    finish: FinishReason | None = None
    state: RolloutState = RolloutState.QUEUED
    scores: Unsaved[dict[str, Score]] = field(default_factory=dict)
    carries: int = 0  # rounds that ended without it since dispatch
    rejected_because: str = ""
    sampling: Unsaved[Sampling | None] = None  # its own, for evaluations and episodes
    asked: Unsaved[Prompt | None] = None  # the task's prompt, if ``prompt`` is another
    context: list[tuple[int, int]] = field(default_factory=list)  # spans of context
    log: list[Observation] = field(default_factory=list)  # that opened, continued or ended it
    turns: list[int] = field(default_factory=list)  # tokens at the end of each turn
    turn_rewards: list[float] = field(default_factory=list)  # of the answered turns
    ended_by: str = ""  # as in Observation
    left: tuple[Message, ...] = ()  # the last turn, if another sample continued after it
    samples: Unsaved[list[Rollout]] = field(  # of an episode
        default_factory=list, repr=False, compare=False
    )

    def __len__(self) -> int:
        return len(self.tokens)

    def move(self, state: RolloutState, because: str = "") -> None:
        """Change the state. LifecycleError if the present one does not lead there."""
        if state not in _EDGES[self.state]:
            raise LifecycleError(
                f"rollout {self.id} cannot go from {self.state} to {state}", "no-such-edge"
            )
        self.state = state
        self.rejected_because = because

    def append(self, chunk: Chunk) -> None:
        """Add a chunk's tokens. LifecycleError if they do not follow the present ones."""
        if chunk.rollout_id != self.id or chunk.start != len(self.tokens) or self.finish:
            raise LifecycleError(
                f"rollout {self.id} holds {len(self.tokens)} tokens (finish: {self.finish}) and "
                f"cannot take a chunk of rollout {chunk.rollout_id} that starts at {chunk.start}",
                "chunk-does-not-follow",
            )
        self.tokens.frombytes(np.asarray(chunk.tokens, np.int32).tobytes())
        self.logprobs.frombytes(np.asarray(chunk.logprobs, np.float32).tobytes())
        self.versions.extend([chunk.version] * len(chunk.tokens))
        if chunk.version == CONTEXT and len(chunk.tokens):
            self.context.append((chunk.start, len(self.tokens)))
        if chunk.finish and self.in_turns:
            self.turns.append(len(self.tokens))
            if chunk.finish is FinishReason.LENGTH:
                at_limit = len(self.tokens) >= self.most_tokens
                self.ended_by = "tokens" if at_limit else "turn_tokens"
        else:
            self.finish = chunk.finish

    def begin_anew(self) -> None:
        """Reset a rollout whose episode starts again with the task's prompt."""
        self.prompt = self.asked or self.prompt
        self.asked = None
        self.ended_by = ""
        self.left = ()
        for column in (self.tokens, self.logprobs, self.versions):
            del column[:]
        for items in (self.context, self.log, self.turns, self.turn_rewards):
            items.clear()

    @property
    def in_turns(self) -> bool:
        return self.sampling is not None and self.sampling.max_turn_tokens > 0

    @property
    def most_tokens(self) -> int:
        assert self.sampling
        return self.sampling.max_new_tokens

    def observe(self, observation: Observation) -> Chunk:
        """Log an answer of the environment, and return its context as a chunk."""
        if self.left:
            observation = replace(observation, messages=(*self.left, *observation.messages))
            self.left = ()
        self.log.append(observation)
        n = len(observation.tokens)
        zeros, context = np.zeros(n, np.float32), np.zeros(n, np.bool_)
        start = len(self.tokens)
        return Chunk(self.id, start, observation.tokens, zeros, CONTEXT, sampled=context)

    @property
    def total_tokens(self) -> int:
        return len(self.prompt.tokens) + len(self.tokens)

    @property
    def sampled_tokens(self) -> int:
        return len(self.tokens) - sum(end - start for start, end in self.context)

    @property
    def sampled(self) -> BoolArray:
        """Whether the policy sampled each response token, [T]."""
        mask = np.ones(len(self.tokens), np.bool_)
        for start, end in self.context:
            mask[start:end] = False
        return mask

    @property
    def messages(self) -> tuple[Message, ...] | None:
        if not self.log:
            return None
        return (*(m for o in self.log for m in o.messages), *self.left)

    def response(self, *, text: bool = False) -> Response:
        """Return a copy for roles, with text, messages and data only if they read ``text``."""
        return Response(
            self.id,
            self.group,
            self.prompt if text else self.prompt.bare,
            np.array(self.tokens, np.int32),
            next((v for v in reversed(self.versions) if v != CONTEXT), 0),
            self.finish,
            self.sampled if self.context else None,
            self._turns_sampling,
            self.messages if text else None,
            np.array(self.logprobs, np.float32) if text and self.in_turns else None,
        )

    @property
    def ends_episode(self) -> bool:
        return len(self.samples) < 2 or bool(self.log and self.log[-1].ended_by)

    def episode(self) -> Response:
        """Return all turns of an episode as one response, for roles that score it once."""
        if len(self.samples) < 2:
            return self.response(text=True)
        parts = [
            (o, r.tokens[start:end], r.sampled[start:end], start == 0)
            for r in self.samples
            for o, start, end in zip(r.log, [0, *r.turns], r.turns, strict=False)
        ]
        parts.sort(key=lambda part: part[0].number)
        joints, at = dict[int, str](), 0
        for o, tokens, _, begins in parts:
            if at and begins:
                joints[at] = "\n".join(["", *(m["content"] for m in o.left[1:]), ""])
            at += len(tokens)
        return replace(
            self.response(text=True),
            prompt=self.samples[0].prompt,
            tokens=np.concatenate([np.array(tokens, np.int32) for _, tokens, *_ in parts]),
            sampled=np.concatenate([mask for *_, mask, _ in parts]),
            messages=_messages_of(self.samples),
            joints=joints,
        )

    @property
    def _turns_sampling(self) -> Sampling | None:
        last = self.log[-1] if self.log else None
        if not (last and self.sampling and (last.max_turn_tokens or last.stop)):
            return self.sampling
        max_turn_tokens = self.sampling.max_turn_tokens
        max_turn_tokens = min(last.max_turn_tokens or max_turn_tokens, max_turn_tokens)
        return replace(self.sampling, max_turn_tokens=max_turn_tokens, stop=last.stop)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and the arrays themselves. Prompts become an id and a fingerprint."""
        opening = self.asked and (self.prompt.tokens, self.prompt.text, self.prompt.messages)
        return {
            **to_plain(self),
            "prompt": self.prompt.id,
            "prompt_mark": (self.asked or self.prompt).fingerprint,
            "opened": opening,
            "scores": [to_plain(score) for score in self.scores.values()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], prompt: Prompt) -> Rollout:
        """Restore a rollout. StateError if its prompt has changed."""
        if state.get("prompt_mark", "") not in ("", prompt.fingerprint):
            raise StateError(
                f"rollout {state['id']} has {len(state['tokens'])} tokens of a response to another "
                f"prompt than {prompt.text[:80]!r}, which has its place {prompt.id} now. Restore "
                "the rows and the tokenizer that the run was started with, or start a new run; "
                "rows in the order of Python sets need PYTHONHASHSEED=0 in the environment",
                "prompt-changed",
            )
        scores = [from_plain(Score, score) for score in state["scores"]]
        rollout = from_plain(cls, state, prompt=prompt, scores={s.source: s for s in scores})
        if opening := state.get("opened"):
            tokens, text, messages = opening
            rollout.asked = prompt
            rollout.prompt = replace(prompt, tokens=tokens, text=text, messages=messages)
            rollout.log[0] = replace(rollout.log[0], prompt=rollout.prompt)
        return rollout


def _messages_of(samples: Sequence[Rollout]) -> tuple[Message, ...]:
    """Return the messages of an episode in order. A turn is not repeated if it is logged twice: in
    ``left`` when another sample continued, and before the next answer to its own sample.
    """
    log = sorted((o for r in samples for o in r.log), key=lambda o: o.number)
    messages = list[Message]()
    logged_ids = set[int]()
    last_id = samples[0].id
    for o in log:
        messages += (*o.left, *o.messages[o.rollout_id in logged_ids :])
        logged_ids.discard(o.rollout_id)
        if o.left:
            logged_ids.add(last_id)
        last_id = o.rollout_id
    return tuple(messages)


def restored(
    states: Iterable[Mapping[str, Any]], prompt_by_id: Callable[[int], Prompt]
) -> list[Rollout]:
    return [Rollout.from_state(state, prompt_by_id(state["prompt"])) for state in states]


class Ledger(Stateful):
    """Checks at every move of a rollout that dispatched = in flight + trained + rejected. Used
    directly by evaluations. Training overrides its events, so that scorers follow rollouts.
    """

    saved = ("dispatched", "trained", "rejected", "_in_flight")

    def __init__(self) -> None:
        self.rollouts: dict[int, Rollout] = {}  # in flight, by id
        self.dispatched = 0
        self.trained = 0
        self.rejected: Counter[str] = Counter()
        self._in_flight: dict[int, str] = {}  # states, by id

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def dispatch(self, rollouts: Sequence[Rollout]) -> None:
        """Take rollouts from the queue. LifecycleError if one is not new."""
        for rollout in rollouts:
            if rollout.id in self._in_flight or rollout.state is not RolloutState.QUEUED:
                raise LifecycleError(
                    f"rollout {rollout.id} was dispatched twice", "dispatched-twice"
                )
            self._in_flight[rollout.id] = rollout.state
            self.rollouts[rollout.id] = rollout
            self.dispatched += 1
        self._check()

    def move(self, rollout: Rollout, state: RolloutState, because: str = "") -> None:
        """Change a rollout's state. LifecycleError if its present one differs from the ledger's."""
        recorded_state = self._in_flight.get(rollout.id)
        if recorded_state != rollout.state:
            raise LifecycleError(
                f"rollout {rollout.id} is {rollout.state}, but the books have it as "
                f"{recorded_state or 'not in flight'}",
                "not-as-booked",
            )
        rollout.move(state, because)
        self._in_flight[rollout.id] = state
        if state in (RolloutState.TRAINED, RolloutState.REJECTED):
            del self._in_flight[rollout.id]
            self.rollouts.pop(rollout.id, None)
        if state is RolloutState.TRAINED:
            self.trained += 1
        if state is RolloutState.REJECTED:
            self.rejected[because] += 1
        self._check()

    def join(self, fork: Rollout) -> None:
        self.dispatch([fork])

    def drop(self, fork: Rollout) -> None:
        self.move(fork, RolloutState.REJECTED, "its episode is begun anew")

    def started(self, rollout: Rollout) -> None:
        """Called when a sample of an episode is opened."""

    def extended(self, chunk: Chunk) -> None:
        """Called with new tokens of a rollout."""

    def ended(self, rollout: Rollout) -> None:
        """Called when a rollout has all its tokens."""

    def _check(self) -> None:
        rejections = self.rejected.total()
        if self.dispatched != self.in_flight + self.trained + rejections:
            raise LifecycleError(
                f"the books do not balance: {self.dispatched} dispatched, but {self.in_flight} in "
                f"flight + {self.trained} trained + {rejections} rejected",
                "books-unbalanced",
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, without the rollouts."""
        super().load_state_dict(state)
        self._check()


def of_kind(rollout: Rollout, kind: ScoreKind) -> list[Score]:
    return [s for s in rollout.scores.values() if s.kind == kind]


def total_reward(rollout: Rollout, weights: Mapping[str, float] | None = None) -> float:
    """Return the weighted sum of a rollout's rewards that apply. No weights: 1 each."""
    return sum(
        reward * (1.0 if weights is None else weights[score.source])
        for score in of_kind(rollout, "reward")
        if (reward := score.scalar) is not None
    )


def scores_are_equal(
    group: Sequence[Rollout], weights: Mapping[str, float] | None, *, apart: bool
) -> bool:
    """Return whether the scored responses of a group all have the same reward.

    ``apart``: in each source, and not only in sum. Rewards of turns are compared as well. A group
    with a response without reward is not equal, see :func:`reasons_to_reject`.
    """
    if without_reward(group, weights):
        return False
    by_episode: dict[int, list[Any]] = {}
    for rollout in group:
        rewards = by_episode.setdefault(episode_of(rollout.id), [])
        rewards += filter(None, rollout.turn_rewards)
        if rollout.ends_episode:
            scores = [s.scalar for s in of_kind(rollout, "reward")]
            rewards.append(scores if apart else total_reward(rollout, weights))
    first = next(iter(by_episode.values()))
    return all(rewards == first for rewards in by_episode.values())


def train_batch(rollouts: Sequence[Rollout]) -> TrainBatch:
    """Return scored rollouts as columns. At least one, all with scores of the same scorers."""
    sources = dict.fromkeys(s.source for r in rollouts for s in of_kind(r, "reward"))
    columns = {
        source: [r.scores[source].scalar if source in r.scores else None for r in rollouts]
        for source in sources
    }
    kinds: tuple[ScoreKind, ...] = ("logprobs", "values")
    sampled_mask = np.concatenate([r.sampled for r in rollouts])
    rewarded = any(any(r.turn_rewards) for r in rollouts)
    episodes = np.array([episode_of(r.id) for r in rollouts], np.int64)
    return TrainBatch(
        ids=np.array([r.id for r in rollouts], np.int64),
        prompts=tuple(r.prompt.tokens for r in rollouts),
        prompt_ids=np.array([r.prompt.id for r in rollouts], np.int64),
        lengths=np.array([len(r) for r in rollouts], np.int64),
        ended=np.array([r.finish is FinishReason.STOP for r in rollouts], np.bool_),
        tokens=np.concatenate([r.tokens for r in rollouts], dtype=np.int32),
        logprobs=np.concatenate([r.logprobs for r in rollouts], dtype=np.float32),
        versions=np.concatenate([r.versions for r in rollouts], dtype=np.int32),
        rewards={
            s: np.array([v or 0.0 for v in scores], np.float32) for s, scores in columns.items()
        },
        applies={s: np.array([v is not None for v in scores]) for s, scores in columns.items()},
        per_token={
            kind: np.concatenate([_per_token(r, kind) for r in rollouts])
            for kind in kinds
            if of_kind(rollouts[0], kind)
        },
        sampled=None if sampled_mask.all() else sampled_mask,
        turn_rewards=np.concatenate([_turn_rewards(r) for r in rollouts]) if rewarded else None,
        episodes=episodes if len(set(episodes.tolist())) < len(episodes) else None,
    )


def _turn_rewards(rollout: Rollout) -> FloatArray:
    """Return rewards per sampled token, each at the last token of its turn."""
    column = np.zeros(len(rollout), np.float32)
    for end, reward in zip(rollout.turns, rollout.turn_rewards, strict=False):
        if end:  # otherwise the turn has no token, and only counts in the episode's total
            column[end - 1] += reward
    return column[rollout.sampled]


def _per_token(rollout: Rollout, kind: ScoreKind) -> FloatArray:
    scores = of_kind(rollout, kind)
    n_tokens = rollout.sampled_tokens
    if len(scores) > 1:  # scorers that divide the prompts
        scores = [s for s in scores if len(s.values)] if n_tokens else scores[:1]
    if len(scores) != 1 or len(scores[0].values) != n_tokens:
        lengths = [len(s.values) for s in scores]
        raise LifecycleError(
            f"rollout {rollout.id} needs one score of kind '{kind}' with {n_tokens} numbers, "
            f"one a sampled token; got {lengths or 'none'}",
            "scores-per-token",
        )
    return scores[0].values


def reasons_to_reject(
    rollouts: Sequence[Rollout],
    *,
    failures_allowed: float,
    group_at_least: int,
    weights: Mapping[str, float] | None = None,
) -> Mapping[int, str]:
    """Return the reasons to drop rollouts, by id.

    A rollout is dropped if it has no reward, or fewer than ``group_at_least`` responses to its
    prompt have one. It has no reward if a reward function failed on it, no source applies to it,
    or the weighted sum is not finite as float32. Samples of an episode are dropped together.

    Raises RewardError if more than the share ``failures_allowed`` have no reward, or none is left.
    """
    failures = without_reward(rollouts, weights)
    if not failures:
        return {}
    by_episode = {episode_of(id_): why for id_, why in failures.items()}  # for all its samples
    failures = {
        r.id: by_episode[episode_of(r.id)] for r in rollouts if episode_of(r.id) in by_episode
    }
    group_sizes = Counter(
        p for p, _ in {(r.prompt.id, episode_of(r.id)) for r in rollouts if r.id not in failures}
    )
    small_groups = [
        r for r in rollouts if r.id not in failures and group_sizes[r.prompt.id] < group_at_least
    ]
    allowed = len(failures) <= failures_allowed * len(rollouts)
    if len(failures) + len(small_groups) < len(rollouts) and allowed:
        return {i: reason for i, (reason, _) in failures.items()} | dict.fromkeys(
            (r.id for r in small_groups), GROUP_TOO_SMALL
        )
    problem = remedy = ""
    if not allowed:
        if failures_allowed:
            problem = f", more than the share reward.on_failure = {failures_allowed:g}"
        remedy = (
            ", or set reward.on_failure = 'drop' to leave such responses out (they are reported). "
            "A resumed run may change it"
        )
    elif small_groups:
        problem = f", and no prompt has the {group_at_least} left that the algorithm compares"
    sources = {s.source for r in rollouts for s in r.scores.values() if s.failure}
    at_fault = "the environment or program" if sources == {ENVIRONMENT} else "the reward function"
    raise RewardError(
        f"{len(failures)} of {len(rollouts)} responses could not be scored{problem}. The first:\n"
        f"{next(iter(failures.values()))[1]}\n"
        f"Fix {at_fault}{remedy}",
        list(failures),
        "responses-without-reward",
    )


def without_reward(
    rollouts: Sequence[Rollout], weights: Mapping[str, float] | None
) -> dict[int, tuple[str, str]]:
    """Return a short and a full reason for each rollout without a reward, by id."""
    scored = {episode_of(r.id) for r in rollouts for s in of_kind(r, "reward") if len(s.values)}
    reasons = {r.id: _no_reward(r, weights, scored) for r in rollouts}
    return {id_: reason for id_, reason in reasons.items() if reason is not None}


def _no_reward(
    rollout: Rollout, weights: Mapping[str, float] | None, scored: Collection[int]
) -> tuple[str, str] | None:
    """Return a short and a full reason if a rollout has no reward. ``scored``: episodes with a
    sample to which some source applies.
    """
    if failures := [s.failure for s in rollout.scores.values() if s.failure]:
        return FUNCTION_FAILED, "; ".join(failures)
    rewards = of_kind(rollout, "reward")
    if rewards and episode_of(rollout.id) not in scored:
        return NOTHING_APPLIES, (
            f"no reward source applies to rollout {rollout.id}: "
            f"{', '.join(s.source for s in rewards)} gave None\n"
            f"  prompt: {rollout.prompt.text[:400]!r}"
        )
    total = total_reward(rollout, weights)
    if is_finite(total):
        return None
    terms = [(s.scalar, 1.0 if weights is None else weights[s.source], s.source) for s in rewards]
    return NOT_FINITE, (
        f"the reward of rollout {rollout.id} is {total}, not finite as float32: "
        + " + ".join(f"{weight:g} x {score} ({source})" for score, weight, source in terms)
    )


def by_episodes(rollouts: Sequence[Rollout], size: int) -> list[list[Rollout]]:
    """Split rollouts into parts of ``size`` episodes, whose samples follow each other."""
    episodes: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        episodes.setdefault(episode_of(rollout.id), []).append(rollout)
    episode_samples = list(episodes.values())
    return [[*chain(*episode_samples[i : i + size])] for i in range(0, len(episode_samples), size)]


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one step."""

    batch: Sequence[Rollout]  # trained on
    rejected: Sequence[Rollout]  # dropped, with a reason
    skipped: Sequence[Rollout]  # replaced since the last step, because a group had equal scores
    stats: Stats  # metrics of learner and schedule
    rewards: Mapping[int, float]  # of the batch, by id, as trained on
    losses: Sequence[str] = ()  # a line about each process lost since the last step
    decisions: Sequence[str] = ()  # a line about each one of a tuner since then
