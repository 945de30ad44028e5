"""The common part of model scorers, which read rollouts whole or while they are being decoded.

Shapes: T tokens of one response; n rows and q tokens a row of one streamed pass; H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from stretto.errors import EngineError, ModelError, first_line
from stretto.models.forward import predicting_response
from stretto.models.tensor_parallel import slices_of
from stretto.models.weights import load_weights
from stretto.saying import Say
from stretto.scoring.responses import Pending, worthwhile_tokens
from stretto.scoring.streamed import Piece, Stream, Streams, out_of_memory
from stretto.types import Chunk, Response, Score, ScoreKind, ScorerInfo, WeightsRef
from stretto.weights.channel import WeightChannel, fetched


def warn(text: str) -> None:
    """Log a scorer's message as a warning, if nobody else listens to it."""
    logging.getLogger(__name__).warning(text)


class ModelScorer:
    """The part that all model scorers share; methods as in :class:`~stretto.protocols.Scorer`.

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
        self.name, self.kind, self.model, self.follows = name, kind, model, follows
        self.read_tokens = 0
        self._budget, self._say, self._channel = token_budget, say, channel
        self._pending = Pending(name)
        self._failures: dict[int, str] = {}
        self._said_full = False
        self._streams = self._open_streams(slots) if slots else None

    @property
    def info(self) -> ScorerInfo:
        """The facts about it that a schedule needs."""
        streams = self._streams is not None
        worthwhile = worthwhile_tokens(self._budget, streaming=streams)
        return ScorerInfo(self.name, self.kind, self.follows, streams, self.reads_text, worthwhile)

    def admit(self, responses: Sequence[Response]) -> None:
        """Learn of responses whose chunks will follow; with slots, read their prompts."""
        self.release([r.id for r in responses])
        self._pending.admit(responses)
        self._read_on(responses)

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Take more tokens of admitted rollouts, in order for each; with slots, read them.

        Raises:
            LifecycleError: a chunk is of an unknown rollout, leaves a gap, or comes after the end.
        """
        self._pending.extend(chunks)
        self._read_on([self._pending[i] for i in dict.fromkeys(c.rollout_id for c in chunks)])

    def release(self, rollout_ids: Sequence[int]) -> None:
        """Forget rollouts without a score; unknown ids are ignored."""
        self._pending.release(rollout_ids)
        for rollout_id in rollout_ids:
            self._failures.pop(rollout_id, None)
        if self._streams:
            self._streams.close(rollout_ids)

    @torch.no_grad()
    def finish(self, rollout_ids: Sequence[int]) -> list[Score]:
        """Score finished rollouts, in the order asked, and forget them.

        One that the model cannot read gets a score with ``failure`` set and no values.

        Raises:
            LifecycleError: a rollout is unknown or has not ended; nothing is forgotten then.
        """
        responses = self._pending.take(rollout_ids)
        self._read_on(responses)
        values: dict[int, Tensor] = {}
        whole = []
        for r in responses:
            stream = self._streams.get(r.id) if self._streams else None
            if stream is None:
                whole.append(r)
            else:
                values[r.id] = torch.cat(stream.numbers) if stream.numbers else torch.empty(0)
        if self._streams:
            self._streams.close(rollout_ids)
        for part, scores in self._score(whole):
            values |= {r.id: s for r, s in zip(part, scores, strict=True)}
        scored = []
        for r in responses:
            numbers, failure = values.get(r.id, torch.empty(0)), self._failures.pop(r.id, None)
            numpy = numbers.float().cpu().numpy()
            scored.append(Score(r.id, self.name, self.kind, numpy, failure))
        return scored

    def load(self, weights: WeightsRef) -> None:
        """Score with these weights from now on; what was computed with older ones is void.

        What rollouts in slots have so far is read again with their next tokens.

        Raises:
            EngineError: the scorer is frozen, or does not hold the weights handed over.
        """
        if not self.follows:
            raise EngineError(f"scorer '{self.name}' is frozen and takes no weights")
        tensors = fetched(self._channel, weights)
        load_weights(self.model, weights, tensors, f"scorer '{self.name}'")
        if self._streams:
            self._streams.void()

    def _open_streams(self, slots: int) -> Streams | None:
        try:
            with torch.no_grad():
                return Streams(self.model, slots, self._budget)
        except (EngineError, ModelError) as error:
            self._say(f"'{self.name}' scores rollouts whole, at their end: {error}")
            return None

    @torch.no_grad()
    def _read_on(self, responses: Sequence[Response]) -> None:
        """Run what is new of those responses that have a slot, or can have one."""
        if self._streams is None:
            return
        try:
            streams = [s for r in responses if (s := self._stream_of(self._streams, r)) is not None]
            self.read_tokens += self._streams.advance(streams, self._take)
            return
        except RuntimeError as error:
            # Ranks that hold slices must go on alike: the role is replaced.
            if not out_of_memory(error) or slices_of(self.model)[0] is not None:
                raise
            reason = first_line(error)
        # Outside the handler: the error's traceback holds on to what the pass had allocated.
        self._streams = None
        self._say(f"'{self.name}' scores rollouts whole from now on, at their end: {reason}")

    def _stream_of(self, streams: Streams, response: Response) -> Stream | None:
        """The stream of a response, up to date with its tokens."""
        stream = streams.get(response.id)
        if stream is None:
            if response.finish:
                return None  # in one piece it is scored faster without a cache
            if streams.full:
                self._say_full()
                return None
            stream = self._open(streams, response)
        self._update(stream, response)
        return stream

    def _say_full(self) -> None:
        if not self._said_full:
            self._said_full = True
            self._say(
                f"'{self.name}' has more rollouts than slots to read them in; it scores those "
                "beyond its slots whole, at their end"
            )

    def _open(self, streams: Streams, response: Response) -> Stream:
        prompt = response.prompt.tokens
        return streams.open(response.id, prompt[:-1], prompt)

    def _update(self, stream: Stream, response: Response) -> None:
        known = len(stream.tokens) - len(response.prompt.tokens)
        stream.tokens += response.tokens[known:].tolist()
        stream.predicting = predicting_response(response)
        stream.goal = len(stream.tokens) - 1

    def _take(self, pieces: Sequence[Piece], hidden: Tensor) -> None:
        """Add to the numbers of each piece's stream, out of hidden states [n, q, H]."""
        raise NotImplementedError

    def _score(
        self, responses: Sequence[Response]
    ) -> Iterator[tuple[Sequence[Response], Sequence[Tensor]]]:
        """Micro-batches of responses with one tensor each: [1] for a reward, else [T]."""
        raise NotImplementedError
