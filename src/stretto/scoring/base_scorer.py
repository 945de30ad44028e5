"""Base of model scorers, which read rollouts at their end or during decoding.

Shapes: T sampled tokens of a response, n rows, q tokens per row of a streamed pass, H hidden size.

Streamed scoring is OPPO's intra-step overlap, here also for reference and critic, and not in
lockstep with decoding. Tokens run through the model as they arrive, so that little is left to do
when a rollout ends. As in the engine, the newest token is not cached. It runs with the tokens after
it, so that a hidden state and the token predicted by it are in one pass.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from stretto.bounds import ceil_div
from stretto.errors import EngineError, ModelError, first_line, is_out_of_memory
from stretto.models.cached import CachedPass, SlotCache, check_cache
from stretto.models.forward import by_token_budget, following_frequencies, positions, predicting
from stretto.models.layer_shards import GatheredPasses, computed
from stretto.models.shards import peers_of
from stretto.models.weights import load_weights
from stretto.saying import Say
from stretto.scoring.response_buffer import ResponseScorer, worthwhile_tokens
from stretto.scoring.retokenise import StablePrefix
from stretto.types import (
    Chunk,
    Prompt,
    Response,
    Score,
    ScoreKind,
    ScorerInfo,
    WeightsRef,
    sampled_of,
)
from stretto.weights.channel import WeightChannel, fetched

Scored = Iterator[tuple[Sequence[Response], Sequence[Tensor]]]
"""Micro-batches of responses with one tensor each: [1] for a reward, else [T]."""

warn: Say = logging.getLogger(__name__).warning
"""Logs a scorer's message, if nothing else shows it."""


class ModelScorer(ResponseScorer):
    """Base of scorers that run a model. It has no state to save.

    Args:
        token_budget: tokens of one forward pass, including padding.
        slots: rollouts to read during decoding. 0 scores all at their end. The same happens to
            rollouts that find no free slot or are finished when admitted, to all rollouts of a
            model that cannot be streamed, and to all after an out-of-memory error.
        say: reports each reason not to stream, once.
        follows: the trained model whose weights it loads. Empty if frozen.
        channel: source of these weights. ``None`` if the learner trains the same module.
        gathered: runs the passes of a model in shards, without slots.

    Attributes:
        read_tokens: tokens that went through the model so far, without padding.
    """

    reads_text = False

    def __init__(
        self,
        name: str,
        kind: ScoreKind,
        model: nn.Module,
        token_budget: int,
        *,
        slots: int = 0,
        say: Say = warn,
        follows: str = "",
        channel: WeightChannel | None = None,
        gathered: GatheredPasses | None = None,
    ) -> None:
        super().__init__(name)
        self.kind = kind
        self.model = model
        self.follows = follows
        self.read_tokens = 0
        self._budget = token_budget
        self._say = say
        self._channel = channel
        self._failures: dict[int, str] = {}
        self._said_full = False
        self._gathered = gathered
        self._positions = positions(model)
        self._rows = self._open_rows(slots) if slots else None

    @property
    def device(self) -> torch.device:
        if self._gathered:  # its shards may be on the host
            return self._gathered.device
        return next(self.model.parameters()).device

    @property
    def info(self) -> ScorerInfo:
        streams = self._rows is not None
        worthwhile = worthwhile_tokens(self._budget, streaming=streams)
        return ScorerInfo(self.name, self.kind, self.follows, streams, self.reads_text, worthwhile)

    def admit(self, responses: Sequence[Response]) -> None:
        self.release([r.id for r in responses])
        super().admit(responses)
        self._read_on(responses)

    def extend(self, chunks: Sequence[Chunk]) -> None:
        super().extend(chunks)
        self._read_on([self._responses[i] for i in dict.fromkeys(c.rollout_id for c in chunks)])

    def release(self, rollout_ids: Sequence[int]) -> None:
        super().release(rollout_ids)
        for rollout_id in rollout_ids:
            self._failures.pop(rollout_id, None)
        if self._rows:
            self._rows.close(rollout_ids)

    @torch.no_grad()
    def finish(self, rollout_ids: Sequence[int]) -> list[Score]:
        """Score finished rollouts. One that the model cannot read gets a ``failure``."""
        responses = self._take(rollout_ids)
        self._read_on(responses)
        numbers: dict[int, Tensor] = {}
        unstreamed = []
        for r in responses:
            row = self._rows.get(r.id) if self._rows else None
            if row is None:
                unstreamed.append(r)
            elif row.numbers:
                numbers[r.id] = torch.cat(row.numbers)
        if self._rows:
            self._rows.close(rollout_ids)
        for part, scores in self._score(unstreamed):
            numbers |= {r.id: s for r, s in zip(part, scores, strict=True)}
        arrays = {i: tensor.float().cpu().numpy() for i, tensor in numbers.items()}
        if self._gathered:
            arrays = self._gathered.merged(arrays)
        nothing = np.empty(0, np.float32)
        outputs = [arrays.get(r.id, nothing) for r in responses]
        return [
            Score(r.id, self.name, self.kind, values, self._failures.pop(r.id, None))
            for r, values in zip(responses, outputs, strict=True)
        ]

    def load(self, weights: WeightsRef) -> None:
        """Load weights. Rollouts in slots are read again with their next tokens."""
        if not self.follows:
            raise EngineError(f"scorer '{self.name}' is frozen: no weights", "scorer-frozen")
        tensors = fetched(self._channel, weights)
        if self._gathered:  # the channel has compared the learner's shards with the ticket
            return
        load_weights(self.model, weights, tensors, f"scorer '{self.name}'")
        if self._rows:
            self._rows.void()

    def _open_rows(self, slots: int) -> StreamedRows | None:
        try:
            with torch.no_grad():
                return StreamedRows(self.model, slots, self._budget)
        except (EngineError, ModelError) as error:
            self._say(f"'{self.name}' scores rollouts whole, at their end: {error}")
            return None

    @torch.no_grad()
    def _read_on(self, responses: Sequence[Response]) -> None:
        if self._rows is None:
            return
        try:
            rows = [row for r in responses if (row := self._row_of(self._rows, r)) is not None]
            self.read_tokens += self._rows.advance(rows, self._take_hidden)
            return
        except RuntimeError as error:
            # Ranks that hold slices must stay in step, so the role is replaced.
            if not is_out_of_memory(error) or peers_of(self.model):
                raise
            reason = first_line(error)
        # Outside the handler, because the error's traceback keeps the pass's memory.
        self._rows = None
        self._say(f"'{self.name}' scores rollouts whole from now on, at their end: {reason}")

    def _row_of(self, rows: StreamedRows, response: Response) -> StreamedRow | None:
        row = rows.get(response.id)
        if row is None:
            if response.finish:
                return None  # faster in one piece, without a cache
            if not rows.free:
                if not self._said_full:
                    self._said_full = True
                    self._say(
                        f"'{self.name}' has more rollouts than slots to read them in; it scores "
                        "those beyond its slots whole, at their end"
                    )
                return None
            row = self._open(rows, response)
        self._update(row, response)
        return row

    def _open(self, rows: StreamedRows, response: Response) -> StreamedRow:
        return rows.open(response.id, response.prompt.tokens)

    def _update(self, row: StreamedRow, response: Response) -> None:
        prompt, before = len(response.prompt.tokens), len(row.tokens)
        row.tokens += response.tokens[before - prompt :].tolist()
        row.predicting += predicting(sampled_of(response)[before - prompt :], before)
        row.goal = len(row.tokens) - 1

    def require_room(self, prompts: Sequence[Prompt]) -> None:
        """Raise ModelError if the model has no position left for a response to any prompt."""
        if self._positions is None:
            return
        nothing = np.empty(0, np.int32)
        shortest = min(len(self._tokens(Response(0, 0, prompt, nothing))) for prompt in prompts)
        if shortest >= self._positions:
            raise ModelError(
                f"'{self.name}' has {self._positions} positions, and of the first {len(prompts)} "
                f"prompts the shortest takes {shortest} of them without a response; lower "
                "task.max_prompt_tokens, or choose another model",
                "too-few-positions",
            )

    def _fits(self, response: Response, tokens: Sequence[int]) -> bool:
        if self._positions is None or len(tokens) <= self._positions:
            return True
        self._failures[response.id] = (
            f"'{self.name}' has {self._positions} positions, and reads rollout {response.id} with "
            f"its prompt as {len(tokens)} tokens. Lower rollout.max_new_tokens or "
            "task.max_prompt_tokens, or choose another model"
        )
        return False

    def _tokens(self, response: Response) -> list[int]:
        """Return the tokens that the model reads of a response and its prompt."""
        return [*response.prompt.tokens, *response.tokens.tolist()]

    def _passes(self, lengths: Sequence[int]) -> list[list[int]]:
        """Divide sequences into this rank's passes within the budget. Returns their indices."""
        if self._gathered is None:
            return by_token_budget(lengths, self._budget)
        rows = self._gathered.grid.layout.data_parallel
        per_row = ceil_div(sum(lengths), rows)  # so that all have a pass
        return self._gathered.share(by_token_budget(lengths, min(self._budget, per_row)))

    def _compute(self, work: Callable[[], Tensor]) -> Tensor:
        return computed(self._gathered, work)

    def _take_hidden(self, spans: Sequence[RowSpan], hidden: Tensor) -> None:
        raise NotImplementedError

    def _score(self, responses: Sequence[Response]) -> Scored:
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class StreamedRow:
    """A rollout in a slot.

    Attributes:
        prompt: its tokens except the last. Their keys and values are copied within a group.
        tokens: known tokens to read.
        goal: how many of the tokens to run through the model now.
        cached: how many have run.
        predicting: positions in ``tokens`` whose states predict sampled tokens, in order.
        numbers: outputs so far, each 1-dimensional.
        text: source of the tokens, if the model has another tokenizer.
    """

    slot: int
    prompt: tuple[int, ...]
    tokens: list[int]
    goal: int = 0
    cached: int = 0
    predicting: list[int] = field(default_factory=list)
    numbers: list[Tensor] = field(default_factory=list)
    text: StablePrefix | None = None

    def retokenise(self, tokens: Sequence[int], unchanged: int) -> int:
        """Replace all but the first tokens. Return how many had run already."""
        rolled_back = max(self.cached - unchanged, 0)
        self.cached -= rolled_back
        if unchanged < len(self.prompt):
            self.prompt = ()
        self.tokens[unchanged:] = tokens[unchanged:]
        self.goal = max(0, len(self.tokens) - 1)  # all of a short text may be held back
        self.cached = min(self.cached, self.goal)  # the last token's state will be needed
        return rolled_back


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Tokens ``start:stop`` of a row, in one forward pass."""

    row: StreamedRow
    start: int
    stop: int

    @property
    def predicting(self) -> list[int]:
        places = self.row.predicting
        return places[bisect_left(places, self.start) : bisect_left(places, self.stop)]


TakeHidden = Callable[[Sequence[RowSpan], Tensor], None]
"""Uses the last hidden states [n, q, H] of one pass over n spans."""


class StreamedRows:
    """The rollouts in a model's slots, with their keys and values.

    Memory for all slots is allocated in the first pass, and grows with the longest rollout.
    """

    def __init__(self, model: nn.Module, slots: int, token_budget: int) -> None:
        _check(model)
        self._pass = CachedPass(model, SlotCache(slots))
        self._budget = token_budget
        self.free = list(reversed(range(slots)))
        self._rows: dict[int, StreamedRow] = {}

    def get(self, rollout_id: int) -> StreamedRow | None:
        return self._rows.get(rollout_id)

    def open(
        self, rollout_id: int, tokens: Sequence[int], text: StablePrefix | None = None
    ) -> StreamedRow:
        row = StreamedRow(self.free.pop(), tuple(tokens[:-1]), list(tokens), text=text)
        self._rows[rollout_id] = row
        return row

    def close(self, rollout_ids: Iterable[int]) -> None:
        for rollout_id in rollout_ids:
            if row := self._rows.pop(rollout_id, None):
                self.free.append(row.slot)

    def void(self) -> None:
        for row in self._rows.values():
            row.cached = 0
            row.numbers.clear()

    def advance(self, rows: Sequence[StreamedRow], take: TakeHidden) -> int:
        """Run rows up to their goals, in passes within the budget. Return how many tokens ran."""
        pending = [row for row in rows if row.cached < row.goal]
        if pending:
            self._pass.cache.reserve(max(row.goal for row in pending))
        done = 0
        while pending:
            waiting = self._share(pending)
            ready = [row for row in pending if row.cached < row.goal and row not in waiting]
            # Separate passes: one of rows that all start at 0 needs no mask.
            for part in ([r for r in ready if not r.cached], [r for r in ready if r.cached]):
                lengths = [min(row.goal - row.cached, self._budget) for row in part]
                for indices in by_token_budget(lengths, self._budget):
                    done += self._run([part[i] for i in indices], take)
            pending = [row for row in pending if row.cached < row.goal]
        return done

    def _share(self, pending: Sequence[StreamedRow]) -> set[StreamedRow]:
        """Copy prompts that another row has run. Return rows that wait for a prompt to run."""
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
    forward = CachedPass(model, SlotCache(2))
    if kind := following_frequencies(forward.config_of_model):
        raise EngineError(
            f"the model's position frequencies ({kind}) follow the length of the whole sequence, "
            "which is not known before its end. Choose another model",
            "no-slots",
        )

    def newest(ids: Tensor, positions: Tensor, _: int) -> Tensor:
        return forward.prefill([*range(len(ids))], positions.tolist(), ids[:, None].tolist())[:, 0]

    check_cache(forward, newest, lambda hidden: hidden)
