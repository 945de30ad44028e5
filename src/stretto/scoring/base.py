"""The common part of model scorers, which read rollouts whole or while they are being decoded.

Shapes: T tokens of one response; n rows and q tokens a row of one streamed pass; H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from stretto.errors import EngineError, ModelError, first_line, is_out_of_memory
from stretto.models.forward import predicting
from stretto.models.tensor_parallel import slices_of
from stretto.models.weights import load_weights
from stretto.saying import Say
from stretto.scoring.responses import ResponseScorer, worthwhile_tokens
from stretto.scoring.streamed import RowSpan, StreamedRow, StreamedRows
from stretto.types import Chunk, Response, Score, ScoreKind, ScorerInfo, WeightsRef, sampled_of
from stretto.weights.channel import WeightChannel, fetched


def warn(text: str) -> None:
    """Log a scorer's message as a warning, if nothing else shows it."""
    logging.getLogger(__name__).warning(text)


class ModelScorer(ResponseScorer):
    """The part that all model scorers share.

    Nothing in it is state: rollouts are the schedule's to save, and caches are derived.

    Args:
        token_budget: tokens of one forward pass, padding counted.
        slots: rollouts read while they are being decoded. 0 scores all of them whole at their end.
            So are rollouts that find no free slot or have ended when they are admitted, all
            rollouts of a model that cannot be streamed, and all that follow an out-of-memory error.
        say: told once of each reason to score whole what should have been streamed.
        follows: the trained model whose weights it loads; empty when it is frozen.
        channel: where those come from; ``None`` where the learner trains the same module.

    Attributes:
        reads_text: whether it looks at prompts' text, and not at the actor's tokens alone.
        read_tokens: tokens that went through the model so far, padding not counted.
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
    ) -> None:
        super().__init__(name)
        self.kind, self.model, self.follows = kind, model, follows
        self.read_tokens = 0
        self._budget, self._say, self._channel = token_budget, say, channel
        self._failures: dict[int, str] = {}
        self._said_full = False
        self._rows = self._open_rows(slots) if slots else None

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
        """Score finished rollouts, in the order asked, and forget them.

        One that the model cannot read gets a score with ``failure`` set and no values. Raises
        LifecycleError, and forgets none, if a rollout is unknown or has not ended.
        """
        responses = self._take(rollout_ids)
        self._read_on(responses)
        numbers: dict[int, Tensor] = {}
        whole = []
        for r in responses:
            row = self._rows.get(r.id) if self._rows else None
            if row is None:
                whole.append(r)
            elif row.numbers:
                numbers[r.id] = torch.cat(row.numbers)
        if self._rows:
            self._rows.close(rollout_ids)
        for part, scores in self._score(whole):
            numbers |= {r.id: s for r, s in zip(part, scores, strict=True)}
        found = [numbers.get(r.id, torch.empty(0)).float().cpu().numpy() for r in responses]
        return [
            Score(r.id, self.name, self.kind, values, self._failures.pop(r.id, None))
            for r, values in zip(responses, found, strict=True)
        ]

    def load(self, weights: WeightsRef) -> None:
        """Score with these weights from now on; what was computed with older ones is void.

        What rollouts in slots have so far is read again with their next tokens. Raises EngineError
        if the scorer is frozen, or does not hold the weights of the ticket then.
        """
        if not self.follows:
            raise EngineError(
                f"scorer '{self.name}' is frozen and takes no weights", "scorer-frozen"
            )
        tensors = fetched(self._channel, weights)
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
        """Run what is new of those responses that have a slot, or can have one."""
        if self._rows is None:
            return
        try:
            rows = [row for r in responses if (row := self._row_of(self._rows, r)) is not None]
            self.read_tokens += self._rows.advance(rows, self._take_hidden)
            return
        except RuntimeError as error:
            # Ranks that hold slices must go on alike: the role is replaced.
            if not is_out_of_memory(error) or slices_of(self.model)[0] is not None:
                raise
            reason = first_line(error)
        # Outside the handler: the error's traceback holds on to what the pass had allocated.
        self._rows = None
        self._say(f"'{self.name}' scores rollouts whole from now on, at their end: {reason}")

    def _row_of(self, rows: StreamedRows, response: Response) -> StreamedRow | None:
        """Return the row of a response, up to date with its tokens."""
        row = rows.get(response.id)
        if row is None:
            if response.finish:
                return None  # in one piece it is scored faster without a cache
            if rows.full:
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
        prompt = response.prompt.tokens
        return rows.open(response.id, prompt[:-1], prompt)

    def _update(self, row: StreamedRow, response: Response) -> None:
        prompt, before = len(response.prompt.tokens), len(row.tokens)
        row.tokens += response.tokens[before - prompt :].tolist()
        row.predicting += predicting(sampled_of(response)[before - prompt :], before)
        row.goal = len(row.tokens) - 1

    def _take_hidden(self, spans: Sequence[RowSpan], hidden: Tensor) -> None:
        """Add to the numbers of each span's row, out of hidden states [n, q, H]."""
        raise NotImplementedError

    def _score(
        self, responses: Sequence[Response]
    ) -> Iterator[tuple[Sequence[Response], Sequence[Tensor]]]:
        """Yield micro-batches of responses with one tensor each: [1] for a reward, else [T]."""
        raise NotImplementedError
