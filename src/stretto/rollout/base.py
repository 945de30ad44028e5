"""The contract of generation engines and their common bookkeeping."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from stretto.config import Capabilities, RolloutConfig
from stretto.errors import EngineError
from stretto.types import (
    Chunk,
    Decoded,
    FinishReason,
    FloatArray,
    Hold,
    IntArray,
    KVTransfer,
    Response,
    Sampling,
    TopLogprobs,
    WeightsRef,
)
from stretto.weights.channel import WeightChannel

Carry = Literal["recompute", "reuse"]
"""Treatment of unfinished rollouts' KV caches when new weights arrive.

``recompute`` recomputes them, so that every token is sampled from the current policy. ``reuse``
keeps those of rollouts with response tokens, at no cost. Later tokens are then sampled from a
mixture of policies, and a resumed run does not repeat them exactly.
"""

CPU = torch.device("cpu")

PREFILLED = 256
"""Maximum tokens of the prompt that measures prefill speed."""

MARK_RATIO = 4
"""Ratio of the steps of a decode call at two marks."""


_TURN = FinishReason.TURN


class StopStrings:
    """Checks whether the newest token completes a stop string."""

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self.strings, self._tokenizer = tuple(strings), tokenizer

    def ends(self, tokens: Sequence[int], start: int = 0, more: tuple[str, ...] = ()) -> bool:
        """Return whether ``tokens[start:]`` has a stop string, or one of ``more``, near its end."""
        strings = self.strings + more
        # A token has at least one byte of text, so a string that was just completed lies within
        # this many tokens. A few more keep multi-byte characters complete.
        window = max((len(s.encode()) for s in strings), default=0) + 4
        tail = tokens[max(start, len(tokens) - window) :]
        text = self._tokenizer.decode(list(tail), skip_special_tokens=False) if strings else ""
        return any(s in text for s in strings)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings to open an engine, in addition to its model.

    Attributes:
        rows: maximum rollouts decoded at a time. ``None`` takes the number in ``rollout``.
        channel: source of new weights, or ``None`` if the learner trains the same module.
        longest: maximum tokens of prompt and response.
        folder: folder of the model's config.
        threads: CPU threads (0: the engine's choice).
        draft: a smaller model with the same tokens, for proposals of the torch engine.
        sleep_level: for an engine that sleeps while it holds no rollouts. 2 drops the weights,
            because a weight sync comes before the next decode. 1 moves them to host memory.
    """

    rollout: RolloutConfig
    seed: int = 0
    end_tokens: frozenset[int] = frozenset()
    stop: StopStrings | None = None
    rows: int | None = None
    carry: Carry = "recompute"
    channel: WeightChannel | None = None
    longest: int = 0
    folder: str = ""
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    threads: int = 0
    trust_remote_code: bool = False
    draft: nn.Module | None = None
    sleep_level: Literal[1, 2] = 1

    @property
    def slots(self) -> int:
        """Maximum rollouts decoded at a time."""
        return (self.rollout.slots or self.rollout.batch) if self.rows is None else self.rows


class Mark(NamedTuple):
    """A moment of a decode call. Counts are the call's steps and the engine's totals."""

    at_s: float
    counts: Mapping[str, int]


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """A rollout that an engine holds.

    Attributes:
        tokens: prompt and response so far.
        reported: response tokens admitted with the rollout or returned by earlier calls.
        turn_start: index of the first response token of its turn (0 without turns).
        logprobs: log-probs of response tokens that no call has returned yet.
        top_logprobs: likeliest tokens at the same positions, if requested.
    """

    id: int
    prompt: tuple[int, ...]
    tokens: list[int]
    reported: int
    sampling: Sampling
    turn_start: int = 0
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def tokens_left(self) -> int:
        """Tokens until the limit of the response or of its turn."""
        return _tokens_left(self.sampling, self.generated, self.turn_start)


class Engine(ABC):
    """A generation engine that decodes its rollouts in chunks.

    - Stored log-probabilities are of the sampled distribution (temperature and truncation applied).
    - There is no state to save, because the schedule keeps rollouts in flight.
    - In an episode (responses with a limit of tokens per turn), an end token or a stop string ends
      a turn (``FinishReason.TURN``). The engine parks the rollout and frees its slot until it is
      admitted again with more tokens. A limit ends turn and episode (``FinishReason.LENGTH``).

    Attributes:
        check: raises MissingExtraError for a missing library, ConfigError for one too old.
        longest: maximum tokens of prompt and response, or ``None`` for no limit.
        prefilled_tokens: total tokens read without sampling, except those found in a cache.
        context_tokens: total context read by decode steps.
        sampled_tokens: total tokens sampled.
        marks: the latest decode call's counts of work until its start, some steps and its end.
        speculated: counts if the engine proposes tokens: ``eligible`` rows (once per step),
            ``proposed`` tokens (with padding) and ``accepted`` ones.
    """

    capabilities: ClassVar[Capabilities]
    check: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    @classmethod
    @abstractmethod
    def open(cls, model: nn.Module, settings: EngineSettings) -> Engine:
        """Make an engine for a model."""

    def __init__(self, settings: EngineSettings, longest: int | None) -> None:
        self.settings, self.longest = settings, longest
        self._config = config = settings.rollout
        self._sampling = Sampling(
            config.max_new_tokens, config.temperature, config.top_k, config.top_p
        )
        self._held: dict[int, Any] = {}  # rows by rollout
        self._parked: dict[int, Any] = {}  # rows whose turn has ended, in that order
        self._done: list[Chunk] = []
        self.version = self.prefilled_tokens = self.context_tokens = self.sampled_tokens = 0
        self.speculated: dict[str, int] = {}
        self.marks: list[Mark] = []

    @property
    def rollout_ids(self) -> list[int]:
        return [*self._held, *self._parked]

    def admit(self, responses: Sequence[Response]) -> None:
        """Queue responses, which continue after their tokens. Those of a parked rollout must begin
        with its parked tokens. A response with ``FinishReason.TURN`` is parked.
        """
        for r in responses:
            self._add(r)

    def decode(self, max_tokens: int, stop_after: int = 0) -> Decoded:
        """Decode up to ``max_tokens`` steps. Each step adds a token to every rollout that has room,
        and accepted proposals (``speculative_tokens``).

        Stops early once ``stop_after`` rollouts have finished (0: never) or none is still decoding.
        The end of a turn does not count, because the rollout has not finished. Returns the number
        of steps with tokens, and a chunk for each rollout that advanced. Rollouts that finished or
        ended a turn come first, in that order (by id within a step). The rest follow by id.

        An interrupted call leaves the model unchanged but the rollouts undefined: release them, and
        admit them again with the tokens that earlier calls have returned.
        """
        self.marks = [self._mark(0)]
        steps = self._decode_steps(max_tokens, stop_after)
        self.marks.append(self._mark(steps))
        chunks, self._done = self._done, []
        unfinished = sorted((r for r in self._held.values() if r.logprobs), key=lambda row: row.id)
        return Decoded([*chunks, *(self._chunk(row, None) for row in unfinished)], steps)

    def release(self, rollout_ids: Iterable[int]) -> None:
        """Drop rollouts, including parked ones. Unknown ids are ignored."""
        ids = set(rollout_ids)
        self._done = [c for c in self._done if c.rollout_id not in ids]  # of an interrupted call
        self._held = {id_: row for id_, row in self._held.items() if id_ not in ids}
        self._parked = {id_: row for id_, row in self._parked.items() if id_ not in ids}
        self._drop()

    @abstractmethod
    def hold(self, rollout_ids: Iterable[int], how: Hold) -> None:
        """Decide the treatment of parked rollouts' KV caches, which are kept until then. Ignores
        other rollouts. Never changes sampled tokens.
        """

    def export(self, rollout_ids: Sequence[int], with_cache: bool) -> list[KVTransfer]:
        """Release unfinished or parked rollouts to another engine. Returns transfers in order.

        With ``with_cache`` their KV caches are copied, if the engine can. Raises EngineError, and
        releases none, if an id is unknown or named twice.
        """
        rows = self._held | self._parked
        if invalid_ids := [i for i, n in Counter(rollout_ids).items() if n > 1 or i not in rows]:
            raise EngineError(
                f"rollouts {invalid_ids} are not in this engine, or were named twice; export only "
                "those that were admitted and have not finished, each once",
                "not-in-engine",
            )
        transfers = [self._transfer_of(rows[i], with_cache) for i in rollout_ids]
        self.release(rollout_ids)
        return transfers

    def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> None:
        """Queue rollouts that another engine of the same model has exported, with their transfers.

        KV caches of other weights are treated as at a weight sync. A parked rollout may come with
        the answer to its turn, or with ``FinishReason.TURN``, and is then parked here.
        """
        for r, transfer in zip(responses, transfers, strict=True):
            if transfer.rollout_id != r.id or transfer.cached_tokens >= r.total_tokens:
                raise EngineError(
                    f"rollout {r.id} with {r.total_tokens} tokens came with the transfer of "
                    f"rollout {transfer.rollout_id}, whose cache covers {transfer.cached_tokens}; "
                    "give each rollout its own transfer, and append every chunk before it moves",
                    "other-transfer",
                )
            self._add(r, transfer)

    @abstractmethod
    def load(self, weights: WeightsRef) -> None:
        """Load weights. ``carry`` decides which KV caches stay, including parked ones."""

    @abstractmethod
    def logprobs(self, sequences: IntArray) -> FloatArray:
        """Return log-probs [n, t - 1] of tokens [n, t] but the first, at the run's temperature."""

    def prefill_tokens_per_s(self) -> float:
        """Measure the prefill speed of one prompt after a warm-up."""
        tokens = PREFILLED if self.longest is None else min(PREFILLED, self.longest - 1)
        self._read_prompt(tokens)
        start_s = time.perf_counter()
        self._read_prompt(tokens)
        return tokens / (time.perf_counter() - start_s)

    def host_bytes_per_s(self) -> float:
        """Measure the bandwidth between device and host. 0 if caches cannot be offloaded."""
        return 0.0

    @property
    def _finished(self) -> int:
        return sum(chunk.finish is not _TURN for chunk in self._done)

    @property
    def graphed_steps(self) -> int | None:
        """Total decode steps replayed as CUDA graphs, or ``None`` if graphs are not in use."""
        return None

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """KV cache bytes per token, or 0 while unknown."""

    @abstractmethod
    def _row(self, r: Response, tokens: list[int], transfer: KVTransfer | None) -> Row:
        """Make the row of a response. A parked one is still in ``_parked``."""

    @abstractmethod
    def _decode_steps(self, max_tokens: int, stop_after: int) -> int:
        """Take steps as :meth:`decode` describes. Return their number."""

    def _mark_step(self, steps: int) -> None:
        """Add a mark before a step of a call, after the first and then ever fewer."""
        if steps >= max(1, MARK_RATIO * self.marks[-1].counts["steps"]):
            self.marks.append(self._mark(steps))

    def _mark(self, steps: int) -> Mark:
        counts = {
            "steps": steps,
            "tokens": self.sampled_tokens,
            "context": self.context_tokens,
            "prefilled": self.prefilled_tokens,
            **self.speculated,
        }
        if self.graphed_steps is not None:
            counts["graphed"] = self.graphed_steps
        return Mark(time.perf_counter(), counts)

    @abstractmethod
    def _drop(self) -> None:
        """Stop decoding rows that are no longer held."""

    @abstractmethod
    def _read_prompt(self, tokens: int) -> None:
        """Prefill a prompt of so many tokens, synchronously."""

    def _transfer_of(self, row: Any, with_cache: bool) -> KVTransfer:
        return KVTransfer(row.id)

    def _add(self, r: Response, transfer: KVTransfer | None = None) -> None:
        prompt, sampling = r.prompt, r.sampling or self._sampling
        length = len(prompt.tokens)
        limit = sampling.max_new_tokens
        waits = r.finish is _TURN
        parked, tokens = self._parked.get(r.id), [*prompt.tokens, *r.tokens.tolist()]
        if r.id in self._held or (parked and (transfer or waits)):
            raise EngineError(
                f"rollout {r.id} is in the engine already; release it first", "already-in-engine"
            )
        if not length:
            raise EngineError(
                f"prompt {prompt.id} has no tokens; put a start token before it", "empty-prompt"
            )
        if not waits and (r.finish or _tokens_left(sampling, len(r), r.turn_start) <= 0):
            raise EngineError(
                f"rollout {r.id} has ended, at {len(r)} tokens; admit only those that go on",
                "rollout-ended",
            )
        if self.longest is not None and length + limit > self.longest:
            raise EngineError(
                f"prompt {prompt.id} has {length} tokens and may get {limit} more, but the model "
                f"has positions for {self.longest}; lower rollout.max_new_tokens or "
                "task.max_prompt_tokens",
                "too-few-positions",
            )
        if parked:
            prefix = parked.tokens
            if parked.prompt != prompt.tokens or tokens[: len(prefix)] != prefix:
                raise EngineError(
                    f"rollout {r.id} goes on from other tokens than the {len(prefix)} that its "
                    "turn ended with; append to these alone, or release it first",
                    "other-transcript",
                )
            transfer = self._transfer_of(parked, with_cache=True)
        row = self._row(r, tokens, transfer)
        self._parked.pop(r.id, None)
        (self._parked if waits else self._held)[r.id] = row

    def _append(
        self, row: Row, token: int, logprob: float, top_logprobs: TopLogprobs | None = None
    ) -> Chunk | None:
        """Add a token. If its turn ends, free or park the row and return its last chunk."""
        row.tokens.append(token)
        row.logprobs.append(logprob)
        self.sampled_tokens += 1
        if top_logprobs is not None:
            row.top_logprobs.append(top_logprobs)
        stop, turn = self.settings.stop, len(row.prompt) + row.turn_start
        if token in self.settings.end_tokens or (
            stop and stop.ends(row.tokens, turn, row.sampling.stop)
        ):
            finish = _TURN if row.sampling.max_turn_tokens else FinishReason.STOP
        elif row.tokens_left <= 0:
            finish = FinishReason.LENGTH
        else:
            return None
        del self._held[row.id]
        if finish is _TURN:
            self._parked[row.id] = row
        return self._chunk(row, finish)

    def _chunk(self, row: Row, finish: FinishReason | None) -> Chunk:
        start, row.reported = row.reported, row.generated
        logprobs, row.logprobs = np.array(row.logprobs, np.float32), []
        top_logprobs, row.top_logprobs = row.top_logprobs, []
        tokens = np.array(row.tokens[len(row.prompt) + start :], np.int32)
        return Chunk(
            row.id, start, tokens, logprobs, self.version, finish, top_logprobs=top_logprobs
        )


def _tokens_left(sampling: Sampling, generated: int, turn_start: int) -> int:
    remaining = sampling.max_new_tokens - generated
    if limit := sampling.max_turn_tokens:
        remaining = min(remaining, limit - (generated - turn_start))
    return remaining
