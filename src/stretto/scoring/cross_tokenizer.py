"""Log-probabilities of a teacher with another tokenizer than the student.

The teacher reads the text. Where a token of the student and one of the teacher end at the same
character, a span ends. It is the smallest part of a response to which both give a probability: the
product over their tokens in it. TRL's GOLD also merges the tokens between common ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from stretto.scoring.base_scorer import Scored, StreamedRow, StreamedRows
from stretto.scoring.model_scorers import TokenScorer
from stretto.scoring.response_buffer import GrowingPieces, spelt_out
from stretto.scoring.retokenise import ConversationReader, StablePrefix
from stretto.tasks.encode import MARK, Pieces
from stretto.tasks.responses import turn_of
from stretto.types import INSIDE_SPAN, FinishReason, Prompt, Response, Score


class TeacherReader(ConversationReader):
    """Reads rollouts for a teacher, as if it had written the response to its own prompt.

    - The prompt is rendered by the teacher's chat template, like that of a reward model.
    - The response is the student's text, which no template changes. It has the stop string, and
      control tokens spelled out, so that the teacher can disapprove of them.
    - The student's end token is read as the tokens that end a turn of the teacher.
    """

    def open(self, prompt: Prompt) -> TeacherText:
        opening = (
            self._asked(prompt) or self._render(prompt, "", unfinished=True).partition(MARK)[0]
        )
        text = StablePrefix(self._encoding(prompt), fixed=len(opening))
        text.grow(opening)
        # A leading space of the response counts only if it continues the prompt's text.
        before = () if prompt.messages else prompt.tokens[-1:]
        pieces = GrowingPieces(partial(spelt_out, self._actor_tokenizer), before)
        return TeacherText(self, prompt, opening, text, pieces)

    def escape(self, text: str) -> str:
        return self._encoder.escape(text)

    def has_end(self, response: Response) -> bool:
        """Return whether an end token, and no stop string, ended a response."""
        if not len(response) or response.finish is not FinishReason.STOP:
            return False
        text = spelt_out(self._actor_tokenizer, response.tokens.tolist()) if self._stop else ""
        return not any(stop in text for stop in self._stop)

    def answer(self, prompt: Prompt, opening: str, prompt_ids: list[int], text: str) -> Pieces:
        """Return a response's tokens, after those of the prompt. Spans count from its start."""
        ids, spans = self._encoder.pieces(opening + text, special=not self._templated(prompt))
        start = len(prompt_ids)
        if ids[:start] != prompt_ids:  # in one text the prompt has other tokens
            return self._encoder.pieces(text)
        return ids[start:], [(a - len(opening), b - len(opening)) for a, b in spans[start:]]

    def end(self, prompt: Prompt) -> list[int]:
        """Return the tokens that end a turn, empty if the teacher has none."""
        closing = self._render(prompt, "", unfinished=True).partition(MARK)[2]
        ids = turn_of(self._encoder.ids(closing, special=False), self._ends)
        return ids or [end for end in (self._end, *self._ends) if end is not None][:1]

    def knows(self, ids: Sequence[int]) -> bool:
        return self._tokenizer.unk_token_id not in ids


class TeacherText:
    """The growing text of a rollout, and its tokens for a teacher.

    Attributes:
        stable: the tokens that will not change; of a finished response, all.
        prompt_tokens: how many of them are the prompt's.
        sampled_tokens: of the student's response so far.
        ends: of the spans of a finished response, as counts of the student's and of the teacher's
            tokens up to them. Tokens of the student after the last one begin a
            character that the token limit cut off.
        problem: why the teacher cannot read the text. Empty: it can.
    """

    def __init__(
        self,
        reader: TeacherReader,
        prompt: Prompt,
        opening: str,
        stable: StablePrefix,
        pieces: GrowingPieces,
    ) -> None:
        self._reader = reader
        self._prompt = prompt
        self._opening = opening
        self._pieces = pieces
        self._prompt_ids = list(stable.tokens)
        self._text = ""
        self._decoded = 0  # of the student's tokens
        self._cuts: dict[int, int] = {}  # counts of them, by the length of their text
        self.stable = stable
        self.prompt_tokens = len(self._prompt_ids)
        self.sampled_tokens = 0
        self.ends: list[tuple[int, int]] = []
        self.problem = "" if self._prompt_ids else "reads nothing before it; give prompts some text"

    def read(self, response: Response) -> int:
        """Update to a response so far. Return how many leading tokens did not change."""
        self.sampled_tokens = len(response)
        has_end = self._reader.has_end(response)
        for token in response.tokens[self._decoded : len(response) - has_end].tolist():
            self._decoded += 1
            self._add(self._pieces.piece([token]))
        if response.finish is FinishReason.STOP:  # a character that no token will complete
            self._add(self._pieces.piece([], last=True))
        text = self._reader.escape(self._text)
        if response.finish is None:
            return self.stable.grow(self._opening + text)
        ids, spans = self._reader.answer(self._prompt, self._opening, self._prompt_ids, text)
        if not self._reader.knows(ids):
            self.problem = "has no tokens for some of its characters; choose another teacher"
        counts = dict(_cuts(spans))
        self.ends = [(n, counts[end]) for end, n in self._cuts.items() if end in counts]
        if has_end and (end_ids := self._reader.end(self._prompt)):
            ids = [*ids, *end_ids]
            self.ends.append((len(response), len(ids)))
        return self.stable.close([*self._prompt_ids, *ids])

    def _add(self, piece: str) -> None:
        if piece:
            self._text += piece
            self._cuts[len(self._text)] = self._decoded

    def translated(self, response: Response) -> Response:
        """Return a finished response in the teacher's tokens."""
        ids = self.stable.tokens
        prompt = replace(response.prompt, tokens=tuple(ids[: self.prompt_tokens]))
        return replace(
            response, prompt=prompt, tokens=np.array(ids[self.prompt_tokens :], np.int32)
        )


def _cuts(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield where tokens end before all later ones begin, and how many end there or before."""
    next_start = math.inf
    last_end = math.inf
    for count in range(len(spans), 0, -1):
        start, end = spans[count - 1]
        if end <= next_start and end < last_end:
            yield end, count
            last_end = end
        next_start = min(next_start, start)


class CrossTokenizerScorer(TokenScorer):
    """A teacher's log-probabilities of spans. Each is at the student's last token of its span, and
    the other tokens have INSIDE_SPAN.
    """

    def __init__(self, *args: Any, reader: TeacherReader, **options: Any) -> None:
        self._reader = reader
        self._texts: dict[int, TeacherText] = {}
        super().__init__(*args, **options)
        self.reads_text = True

    def release(self, rollout_ids: Sequence[int]) -> None:
        super().release(rollout_ids)
        for rollout_id in rollout_ids:
            self._texts.pop(rollout_id, None)

    def finish(self, rollout_ids: Sequence[int]) -> list[Score]:
        return [self._by_spans(score) for score in super().finish(rollout_ids)]

    def _by_spans(self, score: Score) -> Score:
        text = self._texts.pop(score.rollout_id, None)
        if text is None or score.failure:
            return score
        values = np.full(text.sampled_tokens, INSIDE_SPAN, np.float32)
        if text.ends:
            of_student, of_teacher = np.array(text.ends).T
            starts = [0, *of_teacher[:-1]]
            values[of_student - 1] = np.add.reduceat(score.values[: of_teacher[-1]], starts)
        return replace(score, values=values)

    def _open(self, rows: StreamedRows, response: Response) -> StreamedRow:
        text = self._texts[response.id] = self._reader.open(response.prompt)
        return rows.open(response.id, text.stable.tokens)

    def _update(self, row: StreamedRow, response: Response) -> None:
        text = self._texts[response.id]
        unchanged = text.read(response)
        row.retokenise(text.stable.tokens, unchanged)
        row.cached = min(row.cached, max(unchanged - 1, 0))  # its state predicts a new token
        first = text.prompt_tokens - 1
        row.predicting = [*range(first, row.goal)]
        if row.numbers:
            row.numbers = [torch.cat(row.numbers)[: max(row.cached - first, 0)]]
        if response.finish and not self._can_read(response, text):
            row.goal = 0
            row.numbers = []
        elif self._positions is not None:
            row.goal = min(row.goal, self._positions)

    def _score(self, responses: Sequence[Response]) -> Scored:
        translated = []
        for response in filter(self._reads, responses):
            text = self._texts.get(response.id) or self._reader.open(response.prompt)
            self._texts[response.id] = text
            text.read(response)
            if self._can_read(response, text):
                translated.append(text.translated(response))
        return super()._score(translated)

    def _can_read(self, response: Response, text: TeacherText) -> bool:
        if text.problem:
            self._failures[response.id] = f"'{self.name}', rollout {response.id}: it {text.problem}"
            return False
        return self._fits(response, text.stable.tokens)

    def _tokens(self, response: Response) -> list[int]:
        prompt = response.prompt
        return [*self._reader.open(prompt).stable.tokens, *self._reader.end(prompt)]
