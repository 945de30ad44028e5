"""The contract of generation engines, and the bookkeeping that they share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn

from stretto.config import RolloutConfig
from stretto.errors import EngineError
from stretto.types import (
    Capabilities,
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
"""What becomes of the keys and values of unfinished rollouts when new weights arrive.

``recompute`` makes them again, so that every token is sampled from the present policy. ``reuse``
keeps those of responses, which costs nothing, but then later tokens are sampled from a mixture of
policies, and a resumed run does not repeat them exactly.
"""

CPU = torch.device("cpu")

PREFILLED = 256
"""Tokens of the prompt by which prefilling is measured, at most."""


_TURN = FinishReason.TURN


class StopStrings:
    """A check whether the newest token completed one of several strings."""

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self.strings, self._tokenizer = tuple(strings), tokenizer

    def ends(self, tokens: Sequence[int], start: int = 0, more: tuple[str, ...] = ()) -> bool:
        """Return whether ``tokens[start:]`` has a stop string, or one of ``more``, near its end."""
        strings = self.strings + more
        # Every token stands for at least one byte of text, so a string that was just completed
        # lies within this many tokens; a few more keep multi-byte characters whole.
        window = max((len(s.encode()) for s in strings), default=0) + 4
        tail = tokens[max(start, len(tokens) - window) :]
        text = self._tokenizer.decode(list(tail), skip_special_tokens=False) if strings else ""
        return any(s in text for s in strings)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings that an engine is opened with, besides its model.

    Attributes:
        rows: decoded at a time, at most; ``None`` takes the number in ``rollout``.
        channel: where new weights come from; ``None`` where the learner trains the same module.
        longest: tokens of prompt and response, at most.
        folder: of the model's config.
        threads: of the CPU; 0 leaves the engine's choice.
        draft: a smaller model of the same tokens, by which Stretto's own engine proposes them.
        sleep_level: of an engine that sleeps while it holds no rollouts: 2 drops its weights, as a
            weight sync comes before the next decode; 1 keeps them in the host's memory.
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
        """Rollouts decoded at a time, at most."""
        return (self.rollout.slots or self.rollout.batch) if self.rows is None else self.rows


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """A rollout that an engine holds.

    Attributes:
        tokens: prompt and response so far.
        reported: response tokens that earlier calls have returned, or that it came with.
        turn_start: index of the response token with which its turn begins; 0 without turns.
        logprobs: of the response tokens that no call has returned yet.
        top_logprobs: of the same, where they are asked for.
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
        """Tokens until a limit ends it: of the response, or of its turn."""
        return _tokens_left(self.sampling, self.generated, self.turn_start)


class Engine(ABC):
    """A generation engine: it decodes the rollouts that it holds, chunk by chunk.

    Stored log-probabilities are of the distribution that was sampled (temperature and truncation
    applied). There is no state to save: rollouts in flight are the schedule's.

    In an episode, whose responses have a limit of tokens a turn, an end token or a stop string ends
    a turn (``FinishReason.TURN``), and the engine parks the rollout: others get its slot, and it
    goes on when it is admitted again, with more tokens. A limit ends turn and episode
    (``FinishReason.LENGTH``), and the rollout leaves.

    Attributes:
        check: raises MissingExtraError where a library is missing, ConfigError for one too old.
        own_weights: whether it has weights of its own, all of which the first weight sync brings.
            The model then stays on the CPU, and says what travels.
        longest: tokens of prompt and response that it can hold; ``None`` for no limit.
        prefilled_tokens: read without sampling, in all; those found in a cache not counted.
        context_tokens: that decode steps have looked back on, in all.
        speculated: counts, where an engine proposes tokens: rows that were ``eligible``, a row
            counted in each step; tokens that were ``proposed``, with padding; ``accepted`` ones.
    """

    capabilities: ClassVar[Capabilities]
    own_weights: ClassVar = False
    check: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    @classmethod
    @abstractmethod
    def open(cls, model: nn.Module, settings: EngineSettings) -> Engine:
        """Make an engine over a model."""

    def __init__(self, settings: EngineSettings, longest: int | None) -> None:
        self.settings, self.longest = settings, longest
        self._config = config = settings.rollout
        self._sampling = Sampling(
            config.max_new_tokens, config.temperature, config.top_k, config.top_p
        )
        self._held: dict[int, Any] = {}  # rows by rollout
        self._parked: dict[int, Any] = {}  # those whose turn has ended, as they ended
        self._done: list[Chunk] = []
        self.version = self.prefilled_tokens = self.context_tokens = 0
        self.speculated: dict[str, int] = {}

    def admit(self, responses: Sequence[Response]) -> None:
        """Queue responses; each goes on after the tokens it already has.

        Those of a parked rollout begin with the ones that it was parked with. A response that waits
        itself, with ``FinishReason.TURN``, is parked.
        """
        for r in responses:
            self._add(r)

    def decode(self, max_tokens: int, stop_after: int = 0) -> Decoded:
        """Decode up to ``max_tokens`` more for each rollout that there is room for, one a step, and
        proposed ones (``speculative_tokens``) besides.

        Return after the step in which ``stop_after`` rollouts have finished, if that is not 0, or
        none is left that goes on: the number of steps in which tokens came, and a chunk for each
        rollout that advanced. Those that have finished, or ended a turn, come first, as they ended
        (those of one step by id), then the others by id. The end of a turn does not count for
        ``stop_after``, as the rollout has not finished.

        An interrupted call leaves the model as it was, but the rollouts in doubt: release them, and
        admit them again with the tokens that earlier calls have returned.
        """
        steps = self._decode_steps(max_tokens, stop_after)
        done, self._done = self._done, []
        going_on = sorted((r for r in self._held.values() if r.logprobs), key=lambda row: row.id)
        return Decoded([*done, *(self._chunk(row, None) for row in going_on)], steps)

    def release(self, rollout_ids: Iterable[int]) -> None:
        """Forget rollouts, parked ones too; unknown ids are ignored."""
        gone = set(rollout_ids)
        self._done = [c for c in self._done if c.rollout_id not in gone]  # of an interrupted call
        self._held = {id_: row for id_, row in self._held.items() if id_ not in gone}
        self._parked = {id_: row for id_, row in self._parked.items() if id_ not in gone}
        self._drop()

    @abstractmethod
    def hold(self, rollout_ids: Iterable[int], how: Hold) -> None:
        """Say what becomes of the keys and values of parked rollouts, which are kept until then.

        Others are ignored. It changes no token.
        """

    def export(self, rollout_ids: Sequence[int], with_cache: bool) -> list[KVTransfer]:
        """Let go of unfinished rollouts that go on in another engine, in the order asked; of parked
        ones too.

        Their keys and values are copied if asked, where the engine can. Raises EngineError, and
        lets go of none, if one is not here or named twice.
        """
        here = self._held | self._parked
        if wrong := [i for i, n in Counter(rollout_ids).items() if n > 1 or i not in here]:
            raise EngineError(
                f"rollouts {wrong} are not in this engine, or were named twice; export only those "
                "that were admitted and have not finished, each once",
                "not-in-engine",
            )
        transfers = [self._transfer_of(here[i], with_cache) for i in rollout_ids]
        self.release(rollout_ids)
        return transfers

    def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> None:
        """Queue rollouts that another engine of the same model has exported, each by its transfer.

        Keys and values of other weights are treated as at a weight sync. A parked one may come with
        the answer to its turn, or as it was, with ``FinishReason.TURN``, and is parked here.
        """
        for r, transfer in zip(responses, transfers, strict=True):
            if transfer.rollout_id != r.id or transfer.cached_tokens >= r.total_tokens:
                raise EngineError(
                    f"rollout {r.id} with {r.total_tokens} tokens came with the "
                    f"transfer of rollout {transfer.rollout_id}, whose cache covers "
                    f"{transfer.cached_tokens}; give each rollout its own transfer, and append "
                    "every chunk before it moves",
                    "other-transfer",
                )
            self._add(r, transfer)

    @abstractmethod
    def load(self, weights: WeightsRef) -> None:
        """Decode with these weights from now on. ``carry`` says what rows keep, parked ones too."""

    @abstractmethod
    def logprobs(self, sequences: IntArray) -> FloatArray:
        """Return log-probs [n, t - 1] of tokens [n, t], but the first ones, as they are sampled."""

    def prefill_tokens_per_s(self) -> float:
        """Measure how fast one prompt is read, after a rehearsal."""
        tokens = PREFILLED if self.longest is None else min(PREFILLED, self.longest - 1)
        self._read_prompt(tokens)
        start_s = time.perf_counter()
        self._read_prompt(tokens)
        return tokens / (time.perf_counter() - start_s)

    def host_bytes_per_s(self) -> float:
        """Measure how fast keys and values go to the host, or come back; 0 where they do not."""
        return 0.0

    @property
    def _finished(self) -> int:
        return sum(chunk.finish is not _TURN for chunk in self._done)

    @property
    def graphed_steps(self) -> int | None:
        """Decode steps that were CUDA graphs, in all; ``None`` if none is to be one."""
        return None

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values; 0 while they are not known."""

    @abstractmethod
    def _row(self, r: Response, tokens: list[int], transfer: KVTransfer | None) -> Row:
        """Make the row of a response; if it was parked, it still is."""

    @abstractmethod
    def _decode_steps(self, max_tokens: int, stop_after: int) -> int:
        """Take steps, until there are enough of them or of :attr:`_done`; return how many."""

    @abstractmethod
    def _drop(self) -> None:
        """Stop decoding rows that are no longer held."""

    @abstractmethod
    def _read_prompt(self, tokens: int) -> None:
        """Read a prompt of so many tokens, and wait for that."""

    def _transfer_of(self, row: Any, with_cache: bool) -> KVTransfer:
        return KVTransfer(row.id)

    def _add(self, r: Response, transfer: KVTransfer | None = None) -> None:
        prompt, sampling = r.prompt, r.sampling or self._sampling
        length, most, waits = len(prompt.tokens), sampling.max_new_tokens, r.finish is _TURN
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
        if self.longest is not None and length + most > self.longest:
            raise EngineError(
                f"prompt {prompt.id} has {length} tokens and may get {most} more, but the model "
                f"has positions for {self.longest}; lower rollout.max_new_tokens or "
                "task.max_prompt_tokens",
                "too-few-positions",
            )
        if parked:
            stand = parked.tokens
            if parked.prompt != prompt.tokens or tokens[: len(stand)] != stand:
                raise EngineError(
                    f"rollout {r.id} goes on from other tokens than the {len(stand)} that its turn "
                    "ended with; append to these alone, or release it first",
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
    left = sampling.max_new_tokens - generated
    if most := sampling.max_turn_tokens:
        left = min(left, most - (generated - turn_start))
    return left
