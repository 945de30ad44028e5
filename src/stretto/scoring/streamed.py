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

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from stretto.errors import EngineError
from stretto.models.cached import CHECKED, CachedPass, SlotCache, check_cache
from stretto.models.forward import by_token_budget, following_frequencies
from stretto.scoring.retokenise import StablePrefix


@dataclass(slots=True, eq=False)
class StreamedRow:
    """A rollout in a slot.

    Attributes:
        slot: its row of the cache.
        prompt: the first tokens, which other rollouts of its group have too; their keys and values
            are copied from one to another.
        tokens: what the model is to read, as far as it is known.
        goal: how many of the tokens to run through the model now.
        cached: how many have been.
        predicting: places in ``tokens`` whose states predict sampled tokens, in order.
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
class RowSpan:
    """Tokens ``start:stop`` of a row, in one forward pass."""

    row: StreamedRow
    start: int
    stop: int

    @property
    def predicting(self) -> list[int]:
        """Those of the row's places that lie here."""
        places = self.row.predicting
        return places[bisect_left(places, self.start) : bisect_left(places, self.stop)]


TakeHidden = Callable[[Sequence[RowSpan], Tensor], None]
"""Takes what it needs from the last hidden states [n, q, H] of one pass over n spans."""


class StreamedRows:
    """The rollouts that one model is reading, and their keys and values.

    Everything here is derived from weights and tokens; nothing is state. Raises EngineError if the
    model does not run over a cache in slots, ModelError if its decoder cannot be found.

    Args:
        slots: rollouts that can be read at one time. Memory for all of them is allocated in the
            first pass, at the length needed then, and grows with the longest rollout.
    """

    def __init__(self, model: nn.Module, slots: int, token_budget: int) -> None:
        _check(model)
        self._pass = CachedPass(model, SlotCache(slots))
        self._budget = token_budget
        self._free = list(reversed(range(slots)))
        self._rows: dict[int, StreamedRow] = {}

    @property
    def full(self) -> bool:
        """Return whether all slots are taken."""
        return not self._free

    def get(self, rollout_id: int) -> StreamedRow | None:
        """Return the row of a rollout, if it has one."""
        return self._rows.get(rollout_id)

    def open(
        self,
        rollout_id: int,
        prompt: Sequence[int],
        tokens: Sequence[int],
        text: StablePrefix | None = None,
    ) -> StreamedRow:
        """Give a rollout a slot; not to be asked for when full."""
        row = StreamedRow(self._free.pop(), tuple(prompt), list(tokens), text=text)
        self._rows[rollout_id] = row
        return row

    def close(self, rollout_ids: Iterable[int]) -> None:
        """Free the slots of rollouts; unknown ids are ignored."""
        for rollout_id in rollout_ids:
            if row := self._rows.pop(rollout_id, None):
                self._free.append(row.slot)

    def void(self) -> None:
        """Forget all that was computed, because the weights have changed."""
        for row in self._rows.values():
            row.cached = 0
            row.numbers.clear()

    def advance(self, rows: Sequence[StreamedRow], take: TakeHidden) -> int:
        """Bring each row to its goal; return how many tokens went through the model.

        Passes hold up to the budget. A row with more left than that takes part in several. Prompts
        that are shared are run once.
        """
        pending = [row for row in rows if row.cached < row.goal]
        if pending:
            self._pass.cache.reserve(max(row.goal for row in pending))
        done = 0
        while pending:
            waiting = self._share(pending)
            ready = [row for row in pending if row.cached < row.goal and row not in waiting]
            # Rows that start at 0 need no mask as long as no others are among them.
            for part in ([r for r in ready if not r.cached], [r for r in ready if r.cached]):
                lengths = [min(row.goal - row.cached, self._budget) for row in part]
                for chosen in by_token_budget(lengths, self._budget):
                    done += self._run([part[i] for i in chosen], take)
            pending = [row for row in pending if row.cached < row.goal]
        return done

    def _share(self, pending: Sequence[StreamedRow]) -> set[StreamedRow]:
        """Copy prompts that some row has run; return rows whose prompt is about to be run."""
        fresh = [row for row in pending if not row.cached and row.prompt]
        if not fresh:
            return set()
        have = {row.prompt: row for row in self._rows.values() if row.cached >= len(row.prompt)}
        first = {row.prompt for row in pending if 0 < row.cached < len(row.prompt)}
        waiting = set()
        for row in fresh:
            if source := have.get(row.prompt):
                row.cached = len(row.prompt)
                self._pass.cache.copy_row(source.slot, row.slot, row.cached)
            elif row.prompt in first:
                waiting.add(row)
            else:
                first.add(row.prompt)
        return waiting

    def _run(self, rows: Sequence[StreamedRow], take: TakeHidden) -> int:
        """Run one forward pass; return the number of tokens that went through the model."""
        spans = [RowSpan(r, r.cached, min(r.goal, r.cached + self._budget)) for r in rows]
        hidden = self._pass.prefill(
            [span.row.slot for span in spans],
            [span.start for span in spans],
            [span.row.tokens[span.start : span.stop] for span in spans],
        )
        take(spans, hidden)
        for span in spans:
            span.row.cached = span.stop
        return sum(span.stop - span.start for span in spans)


def _check(model: nn.Module) -> None:
    """Refuse a model whose passes over a cache are not its plain passes."""
    own = CachedPass(model, SlotCache(2))
    own.cache.reserve(CHECKED)
    if kind := following_frequencies(own.config_of_model):
        raise EngineError(
            f"the model's position frequencies ({kind}) follow the length of the whole sequence, "
            "which is not known before its end. Choose another model",
            "no-slots",
        )

    def newest(ids: Tensor, positions: Tensor, _: int) -> Tensor:
        """Return hidden states [n, H] of the newest tokens of slots 0..n."""
        return own.prefill([*range(len(ids))], positions.tolist(), ids[:, None].tolist())[:, 0]

    check_cache(own, newest, lambda hidden: hidden)
