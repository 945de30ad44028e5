"""Speculative decoding: proposes a row's next tokens by prompt lookup or by a draft model.

A pass over a row's newest token and k proposed tokens samples k + 1 tokens with the random numbers
of single steps (:mod:`stretto.rollout.sampling`). A sampled token equals that of a single step if
all proposals before it equal the sampled tokens. Proposals are accepted by equality, so no token
changes. (Speculative sampling, Leviathan et al. 2023, accepts them with a probability.) Prompt
lookup (Saxena 2023) proposes the tokens after the last occurrence of the text's longest suffix, in
the same row or else in texts with the same prompt. A draft model proposes its likeliest tokens.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Protocol

import numpy as np
import torch
from torch import nn

from stretto.config import RolloutConfig
from stretto.models.cached import SlotCache
from stretto.models.devices import PackedLinears
from stretto.models.forward import backbone, positions, unwrapped
from stretto.rollout.base import Row
from stretto.rollout.steps import StepInputs, decoder
from stretto.types import IntArray

TOKEN_COST = 0.022
"""Extra duration of a step per proposed token and row, as a share of a step of few rows without
proposals. Measured on a CPU (benchmarks/drafts.py). It is less on a GPU."""

TRIED = 32
"""Proposed tokens after which older ones weigh a third (1 / e) in the acceptance rate."""

TRY_EVERY = 16
"""Steps without proposals after which one token is proposed to test whether it pays again."""

LONGEST = 6
"""Maximum tokens of a suffix for lookup."""

REMEMBERED = 1 << 24
"""Maximum tokens of finished responses kept for later responses to the same prompts."""


class Proposer(Protocol):
    """Proposes tokens for the rows of an engine.

    Attributes:
        cost: cost of proposing one token per row, in steps.
    """

    cost: float

    def propose(self, rows: Sequence[Row], most: int) -> list[Sequence[int]]:
        """Return up to ``most`` tokens for each row, within the row's limit of tokens."""

    def ended(self, row: Row) -> None:
        """Record that a row has finished."""


class ProposalLength:
    """Chooses the number of proposed tokens that gives most tokens per second.

    If a share a of proposals is accepted and a proposal costs c, a step with k of them gives
    (1 - a^(k+1)) / (1 - a) tokens in time 1 + c k (Leviathan et al. 2023, theorem 3.8). The share
    is estimated from verified tokens. Nothing is timed, so that a repeated run proposes the same.

    Args:
        most: maximum tokens per row.
        cost: cost of proposing one token per row, in steps.
    """

    def __init__(self, most: int, cost: float) -> None:
        self._most, self._cost = most, cost
        self._accepted, self._verified = 1.0, 2.0  # prior
        self._without = 0

    def next(self, rows: int) -> int:
        """Return the number of tokens to propose for each row in the next step."""
        rate, cost = self._accepted / self._verified, self._cost + TOKEN_COST * rows
        tokens = accumulate(rate**k for k in range(self._most + 1))
        gains = [n / (1 + cost * k) for k, n in enumerate(tokens)]
        best = gains.index(max(gains))
        self._without = 0 if best else self._without + 1
        if self._without > TRY_EVERY:
            self._without, best = 0, 1
        return best

    def verified(self, accepted: int, *, rejected: bool) -> None:
        for token in [1.0] * accepted + [0.0] * rejected:
            self._accepted += token - self._accepted / TRIED
            self._verified += 1 - self._verified / TRIED


class SpeculativeDecoding:
    """Proposes tokens for an engine's rows, while few rows decode.

    Attributes:
        counts: as :attr:`~stretto.rollout.base.Engine.speculated`.
    """

    def __init__(self, proposer: Proposer, config: RolloutConfig) -> None:
        self._length = ProposalLength(config.speculative_tokens, proposer.cost)
        self._most_rows = config.speculative_rows
        self._proposer = proposer
        self.ended = proposer.ended
        self.counts = dict.fromkeys(("eligible", "proposed", "accepted"), 0)

    def propose(self, rows: Sequence[Row]) -> Sequence[Sequence[int]]:
        """Propose tokens for each row, or none."""
        if len(rows) <= self._most_rows:
            self.counts["eligible"] += len(rows)
            if count := self._length.next(len(rows)):
                return self._proposer.propose(rows, count)
        return [()] * len(rows)

    def verified(self, accepted: int, *, rejected: bool) -> None:
        self.counts["accepted"] += accepted
        self._length.verified(accepted, rejected=rejected)


Ends = dict[tuple[int, ...], tuple[Sequence[int], int]]
"""Last occurrence of n-grams: a text, and the index of the next token."""


class NgramIndex:
    """Numbered texts with the same prompt, and the last occurrences of their n-grams."""

    def __init__(self, prompt: Sequence[int], responses: Iterable[IntArray]) -> None:
        self._read: defaultdict[int, int] = defaultdict(lambda: len(prompt))  # tokens of each text
        self._prompt: Ends = {}
        self._own: defaultdict[int, Ends] = defaultdict(dict)
        self._all: Ends = {}
        _enter(prompt, 1, self._prompt)
        for response in responses:
            _enter([*prompt, *response.tolist()], len(prompt), self._all)

    def read(self, number: int, text: Sequence[int]) -> None:
        _enter(text, self._read[number], self._own[number], self._all)
        self._read[number] = len(text)

    def after(self, number: int, text: Sequence[int], most: int) -> Sequence[int]:
        """Return up to ``most`` tokens after the longest suffix, searching the same text first."""
        suffixes = [tuple(text[-n:]) for n in range(min(LONGEST, len(text)), 0, -1)]
        for tables in ((self._own[number], self._prompt), (self._all,)):
            for suffix, ends in product(suffixes, tables):
                if match := ends.get(suffix):
                    source, at = match
                    continuation = source[at : at + most]
                    # If the match is in this text, assume that it repeats beyond its end.
                    return ([*continuation] * most)[:most] if source is text else continuation
        return ()


def _enter(text: Sequence[int], begin: int, *into: Ends) -> None:
    for at in range(max(begin, 1), len(text)):
        for n in range(1, min(LONGEST, at) + 1):
            suffix = tuple(text[at - n : at])
            for ends in into:
                ends[suffix] = text, at


class PromptLookup(Proposer):
    """Proposals from a row's own text, its group's and finished responses to its prompt.

    Args:
        kept: number of newest finished responses to keep per prompt.
    """

    cost = 0.0

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._texts: dict[tuple[int, ...], NgramIndex] = {}
        self._past: OrderedDict[tuple[int, ...], deque[IntArray]] = OrderedDict()
        self._tokens = 0  # in _past

    def propose(self, rows: Sequence[Row], most: int) -> list[Sequence[int]]:
        prompts = {row.prompt for row in rows}
        self._texts = {prompt: t for prompt, t in self._texts.items() if prompt in prompts}
        for prompt in prompts - self._texts.keys():
            self._texts[prompt] = NgramIndex(prompt, self._past.get(prompt, ()))
        for row in rows:
            self._texts[row.prompt].read(row.id, row.tokens)
        return [
            self._texts[row.prompt].after(row.id, row.tokens, min(most, row.tokens_left - 1))
            for row in rows
        ]

    def ended(self, row: Row) -> None:
        past = self._past.setdefault(row.prompt, deque())
        past.append(np.array(row.tokens[len(row.prompt) :], np.int32))
        self._tokens += row.generated
        self._past.move_to_end(row.prompt)
        while len(past) > self._kept:
            self._tokens -= len(past.popleft())
        while self._tokens > REMEMBERED:
            self._tokens -= sum(map(len, self._past.popitem(last=False)[1]))


@dataclass(slots=True, eq=False)
class Drafted:
    """A row in a draft model's slot: number of tokens read, and the proposals after them."""

    row: Row
    read: int = 0
    proposed: list[int] = field(default_factory=list)  # all but the last have keys

    def valid(self) -> int:
        """Return how many of the row's tokens have valid keys."""
        count = self.read
        for proposal, token in zip(self.proposed[:-1], self.row.tokens[count:], strict=False):
            if proposal != token:
                break
            count += 1
        return count


class DraftModel(Proposer):
    """Greedy proposals of a smaller model, which is never trained.

    They are not sampled with the row's random numbers. Sampled proposals would be accepted less
    often if the two models differ much, and hardly more often if they are similar.

    Args:
        model: the smaller model, with the engine's tokens.
        drafted: the engine's model.
        longest: maximum tokens of prompt and response, if known.
    """

    def __init__(
        self, model: nn.Module, drafted: nn.Module, config: RolloutConfig, longest: int = 0
    ) -> None:
        draft_size, model_size = (sum(p.numel() for p in m.parameters()) for m in (model, drafted))
        self.cost = draft_size / model_size  # a step reads all weights
        self._cache = SlotCache(max(config.speculative_rows, 1))
        likeliest = config.model_copy(update={"temperature": 0.0})
        self._pass, self._steps = decoder(model, self._cache, likeliest)
        self._cache.reserve(longest)
        self._packed = PackedLinears(backbone(model), unwrapped(model).get_output_embeddings())
        with torch.inference_mode():
            self._packed.__enter__()  # permanently
        self._positions = positions(model, generating=True) or sys.maxsize
        tables = (unwrapped(m).get_input_embeddings().weight for m in (model, drafted))
        self._own_last, self._last = (len(table) - 1 for table in tables)
        self._rows: list[Drafted] = []  # a row's index is its slot

    def propose(self, rows: Sequence[Row], most: int) -> list[Sequence[int]]:
        self._keep(rows)
        cache, ready = self._cache, []
        for slot, drafted in enumerate(self._rows):
            row = drafted.row
            drafted.read, drafted.proposed = drafted.valid(), []
            room = min(most, row.tokens_left - 1, self._positions - len(row.tokens))
            if room > 0:
                cache.reserve(len(row.tokens) + row.tokens_left)
                ready.append((slot, room))
        if ready:
            self._draft(ready)
        proposals = {id(drafted.row): drafted.proposed for drafted in self._rows}
        return [proposals[id(row)] for row in rows]

    def ended(self, row: Row) -> None:
        pass

    def _keep(self, rows: Sequence[Row]) -> None:
        for slot in reversed(range(len(self._rows))):
            if self._rows[slot].row not in rows:  # from the end, because the last row moves here
                last = self._rows.pop()
                if slot < len(self._rows):
                    self._rows[slot] = last
                    self._cache.copy_row(len(self._rows), slot, last.valid())
        drafted_ids = {id(drafted.row) for drafted in self._rows}
        self._rows += [Drafted(row) for row in rows if id(row) not in drafted_ids]

    def _draft(self, ready: Sequence[tuple[int, int]]) -> None:
        device, scratch = self._pass.device, self._cache.capacity
        ids, ends = [[0, 0] for _ in self._rows], [[0, 0] for _ in self._rows]
        for slot, room in ready:
            drafted = self._rows[slot]
            row_tokens = [min(token, self._own_last) for token in drafted.row.tokens]
            if missing := row_tokens[drafted.read : -2]:
                self._pass.prefill([slot], [drafted.read], [missing])
            # If all proposals were accepted, the last one has no keys yet.
            ids[slot] = [0, *row_tokens][-2:]
            drafted.read, ends[slot] = len(row_tokens), [len(row_tokens), room]
        newest, room_of = torch.tensor(ends, device=device).T[:, :, None]
        tokens = torch.tensor(ids, device=device)
        at = newest + torch.tensor([-2, -1], device=device)
        columns = []
        for step in range(max(room for _, room in ready)):
            places = at.masked_fill((at < 0) | (room_of <= step), scratch)
            zeros = torch.zeros_like(tokens)
            inputs = StepInputs(tokens, places, zeros, zeros)
            read = min(max(length for length, _ in ends) + step, scratch)
            likeliest = self._steps.decode(inputs, read)[0][:, -1:].clamp_max(self._last)
            columns.append(likeliest)
            tokens, at = likeliest.clamp_max(self._own_last), at[:, -1:] + 1
        proposals = torch.cat(columns, 1).tolist()
        for slot, room in ready:
            self._rows[slot].proposed = proposals[slot][:room]
