"""Streamed scoring: a model reads responses while they are still being decoded.

Each rollout has a slot of a key-value cache. Tokens are run through the model as they arrive, of
many rollouts at once, so that little is left to do when a rollout ends: the intra-step overlap of
OPPO, here for reference and critic too, and not in lock-step with decoding.

Shapes: n rows, q tokens a row, H hidden size.

As in the engine, the newest token of a rollout is not in the cache: it is run together with the
tokens that follow it. So each hidden state is at hand in the very pass that has the token which it
predicts, and none has to be kept from one pass for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stretto.errors import EngineError
from stretto.models.cached import CHECKED, CachedPass, SlotCache, check_cache
from stretto.models.forward import by_token_budget, following_frequencies
from stretto.scoring.retokenise import StablePrefix


@dataclass(slots=True, eq=False)
class Stream:
    """A rollout in a slot.

    Attributes:
        slot: its row of the cache.
        prompt: the first tokens, which other rollouts of its group have too; their keys and values
            are copied from one to another.
        tokens: what the model is to read, as far as it is known.
        goal: how many of the tokens to run through the model now.
        cached: how many have been.
        predicting: places in ``tokens`` whose states predict sampled tokens.
        numbers: what came out so far: log-probabilities or values of the response's first tokens,
            or, at the end, the one reward; 1-dimensional each.
        text: where the tokens come from, if the model has a tokenizer of its own.
    """

    slot: int
    prompt: tuple[int, ...]
    tokens: list[int]
    goal: int = 0
    cached: int = 0
    predicting: list[int] = field(default_factory=list)
    numbers: list[Tensor] = field(default_factory=list)
    text: StablePrefix | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``start:stop`` of a stream, in one forward pass."""

    stream: Stream
    start: int
    stop: int


Read = Callable[[Sequence[Piece], Tensor], None]
"""Takes what it needs from the last hidden states [n, q, H] of one pass over n pieces."""


class Streams:
    """The rollouts that one model is reading, and their keys and values.

    Everything here is derived from weights and tokens; nothing is state.

    Args:
        slots: rollouts that can be read at one time. Memory for all of them is allocated in the
            first pass, at the length needed then, and grows with the longest rollout.

    Raises:
        EngineError: the model does not run over a cache in slots.
        ModelError: its decoder cannot be found.
    """

    def __init__(self, model: nn.Module, slots: int, token_budget: int) -> None:
        _check(model)
        self._pass = CachedPass(model, SlotCache(slots))
        self._budget = token_budget
        self._free = list(reversed(range(slots)))
        self._streams: dict[int, Stream] = {}

    @property
    def full(self) -> bool:
        """Return whether all slots are taken."""
        return not self._free

    def get(self, rollout_id: int) -> Stream | None:
        """The stream of a rollout, if it has one."""
        return self._streams.get(rollout_id)

    def open(
        self,
        rollout_id: int,
        prompt: Sequence[int],
        tokens: Sequence[int],
        text: StablePrefix | None = None,
    ) -> Stream:
        """Give a rollout a slot; not to be asked for when full."""
        stream = Stream(self._free.pop(), tuple(prompt), list(tokens), text=text)
        self._streams[rollout_id] = stream
        return stream

    def close(self, rollout_ids: Iterable[int]) -> None:
        """Free the slots of rollouts; unknown ids are ignored."""
        for rollout_id in rollout_ids:
            stream = self._streams.pop(rollout_id, None)
            if stream is not None:
                self._free.append(stream.slot)

    def void(self) -> None:
        """Forget all that was computed, because the weights have changed."""
        for stream in self._streams.values():
            stream.cached = 0
            stream.numbers.clear()

    def advance(self, streams: Sequence[Stream], read: Read) -> int:
        """Bring each stream to its goal; return how many tokens went through the model.

        Passes hold up to the budget. A stream with more left than that takes part in several.
        Prompts that are shared are run once.
        """
        pending = [s for s in streams if s.cached < s.goal]
        if pending:
            self._pass.cache.reserve(max(s.goal for s in pending))
        done = 0
        while pending:
            waiting = self._share(pending)
            ready = [s for s in pending if s.cached < s.goal and s not in waiting]
            # Rows that start at 0 need no mask as long as no others are among them.
            for part in ([s for s in ready if not s.cached], [s for s in ready if s.cached]):
                lengths = [min(s.goal - s.cached, self._budget) for s in part]
                for chosen in by_token_budget(lengths, self._budget):
                    done += self._run([part[i] for i in chosen], read)
            pending = [s for s in pending if s.cached < s.goal]
        return done

    def _share(self, pending: Sequence[Stream]) -> set[Stream]:
        """Copy prompts that some stream has run; return streams whose prompt is about to be run."""
        fresh = [s for s in pending if not s.cached and s.prompt]
        if not fresh:
            return set()
        have = {s.prompt: s for s in self._streams.values() if s.cached >= len(s.prompt)}
        first = {s.prompt for s in pending if 0 < s.cached < len(s.prompt)}
        waiting = set()
        for stream in fresh:
            source = have.get(stream.prompt)
            if source is not None:
                stream.cached = len(stream.prompt)
                self._pass.cache.copy_row(source.slot, stream.slot, stream.cached)
            elif stream.prompt in first:
                waiting.add(stream)
            else:
                first.add(stream.prompt)
        return waiting

    def _run(self, streams: Sequence[Stream], read: Read) -> int:
        """Run one forward pass; return the number of tokens that went through the model."""
        pieces = [Piece(s, s.cached, min(s.goal, s.cached + self._budget)) for s in streams]
        hidden = self._pass.prefill(
            [p.stream.slot for p in pieces],
            [p.start for p in pieces],
            [p.stream.tokens[p.start : p.stop] for p in pieces],
        )
        read(pieces, hidden)
        for piece in pieces:
            piece.stream.cached = piece.stop
        return sum(p.stop - p.start for p in pieces)


def _check(model: nn.Module) -> None:
    """Refuse a model whose passes over a cache are not its plain passes.

    Raises:
        EngineError, ModelError: see :class:`Streams`.
    """
    own = CachedPass(model, SlotCache(2))
    own.cache.reserve(CHECKED)
    if kind := following_frequencies(own.config_of_model):
        raise EngineError(
            f"the model's position frequencies ({kind}) follow the length of the whole sequence, "
            "which is not known before its end. Choose another model"
        )
    check_cache(own, lambda ids, at, _: _newest(own, ids, at), lambda hidden: hidden)


def _newest(own: CachedPass, ids: Tensor, positions: Tensor) -> Tensor:
    """Hidden states [n, H] of the newest tokens of slots 0..n."""
    return own.prefill([*range(len(ids))], positions.tolist(), ids[:, None].tolist())[:, 0]


def out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch could not get memory; on a CPU only the message says so."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
