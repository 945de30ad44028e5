"""The engine over vLLM: a rollout is a request, and a call is so many of vLLM's iterations.

Between two calls nothing runs, so hand-overs and moves fall between iterations by construction. All
tokens of a request are taken in the iteration that samples them, so that ending it loses none. A
rollout goes on, here or in another engine, as a new request whose prompt is all that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from stretto.config import RolloutConfig
from stretto.errors import EngineError
from stretto.models.weights import require_fingerprint
from stretto.rollout.admission import check_admission, check_transfer
from stretto.rollout.sampling import stream_seed
from stretto.rollout.stop import StopStrings
from stretto.rollout.vllm.source import Source
from stretto.types import (
    Capabilities,
    Chunk,
    FinishReason,
    FloatArray,
    IntArray,
    KVTransfer,
    Response,
    WeightsRef,
)
from stretto.weights.channel import WeightChannel, fetched

SEEDS = 1 << 63
"""Seeds are below this number: what the libraries behind vLLM take."""


class Output(NamedTuple):
    """The part of one iteration that is a request's.

    Attributes:
        request: its name.
        tokens: that it got.
        logprobs: of each, under the distribution that was sampled.
        cached: of its prompt's tokens, how many were read from the prefix cache.
        ended: why vLLM ended it; empty while it goes on.
    """

    request: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    cached: int
    ended: str


class Requests(Protocol):
    """vLLM, as far as the engine asks it.

    Attributes:
        longest: tokens of prompt and response that a request may have.
        kv_bytes_per_token: of keys and values.
        seeds_positions: whether a random number is a function of the seed and the token's position.
            If not, a new request with an old one's seed draws its numbers again.
        sleeps: whether it leaves its memory to others while it holds no request.
    """

    longest: int
    kv_bytes_per_token: int
    seeds_positions: bool
    sleeps: bool

    def add(
        self, request: str, tokens: Sequence[int], salt: str, seed: int, max_tokens: int
    ) -> None:
        """Queue a request; only those of one salt share a prefix."""
        ...

    def abort(self, requests: Sequence[str]) -> None:
        """End requests that vLLM has not ended itself."""
        ...

    def step(self) -> Sequence[Output]:
        """Make one iteration."""
        ...

    @property
    def busy(self) -> bool:
        """Return whether any request has not ended."""
        ...

    def logprobs(self, prefixes: Sequence[Sequence[int]], tokens: Sequence[int]) -> FloatArray:
        """Log-probs [n], under the distribution that is sampled, of a token after each prefix."""
        ...

    def prefill_tokens_per_s(self) -> float:
        """Measure how fast one prompt is read."""
        ...

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights, whole tensors by their names in the model's files."""
        ...

    def sleep(self) -> None:
        """Move weights to the host's memory, and drop keys and values."""
        ...

    def wake(self, what: Sequence[Literal["weights", "kv_cache"]]) -> None:
        """Take memory again."""
        ...


@dataclass(slots=True)
class Row:
    """A rollout that the engine holds.

    Attributes:
        id: of the rollout.
        prompt: its tokens.
        tokens: prompt and response so far.
        reported: response tokens that earlier calls have returned.
        salt: of its request; see :meth:`VllmEngine.load`.
        logprobs: of the response tokens that no call has returned yet.
        request: name of its request; empty while it has none.
        prompted: tokens that the request began with.
        counted: whether they are among the prefilled ones.
    """

    id: int
    prompt: tuple[int, ...]
    tokens: list[int]
    reported: int
    salt: str
    logprobs: list[float] = field(default_factory=list)
    request: str = ""
    prompted: int = 0
    counted: bool = False

    @property
    def generated(self) -> int:
        """Response tokens so far."""
        return len(self.tokens) - len(self.prompt)


class VllmEngine:
    """An engine that generates with vLLM in this process, over weights of its own.

    Stored log-probabilities are of the distribution that was sampled (temperature and truncation
    applied). Sampling is seeded by run, rollout and position, but kernels add up in an order that
    depends on the batch: the same seed may give other tokens in other company.

    State: the version. Rollouts in flight are the schedule's to save: admitted again with the
    tokens they have, they go on.

    Args:
        source: turns what the learner hands over into what vLLM loads.
        end_tokens: ids that end a response.
        stop: strings that end a response.
        carry: what becomes of the keys and values of unfinished rollouts when new weights arrive.
            ``recompute`` makes them again, so that every token is sampled from the present policy.
            ``reuse`` reads them from the prefix cache, as far as its whole blocks are still there.
        channel: where new weights come from.
    """

    capabilities = Capabilities(
        moves_cache=False, deterministic=False, interruptible=True, logprobs="sampled"
    )

    def __init__(
        self,
        requests: Requests,
        source: Source,
        config: RolloutConfig,
        *,
        end_tokens: frozenset[int],
        seed: int,
        stop: StopStrings | None = None,
        carry: Literal["recompute", "reuse"] = "recompute",
        channel: WeightChannel | None = None,
    ) -> None:
        self._requests, self._source, self._config = requests, source, config
        self._end_tokens, self._seed, self._stop = end_tokens, seed, stop
        self._carry, self._channel = carry, channel
        self._rows: dict[int, Row] = {}
        self._by_request: dict[str, Row] = {}
        self._done: list[Chunk] = []
        self._named, self._loads, self._salt = 0, 0, "0"
        self._asleep = False
        self.version = 0
        self.prefilled_tokens = 0
        """Tokens of prompts that vLLM has read, in all; those from its prefix cache not counted."""
        self.context_tokens = 0
        """Tokens that decode steps have looked back on, in all."""

    def admit(self, responses: Sequence[Response]) -> None:
        """Queue responses; each goes on after the tokens it already has.

        Raises:
            EngineError: a rollout is here already, has ended, has an empty prompt, or does not fit
                the model's positions.
        """
        for r in responses:
            limit = self._config.max_new_tokens
            check_admission(r, self._rows, limit, self._requests.longest)
            tokens = [*r.prompt.tokens, *r.tokens.tolist()]
            self._rows[r.id] = Row(r.id, r.prompt.tokens, tokens, len(r), self._salt)

    def decode(self, max_tokens: int, stop_after: int = 0) -> list[Chunk]:
        """Give every rollout that vLLM has room for up to ``max_tokens`` more.

        Args:
            max_tokens: iterations of this call in which tokens come, at most.
            stop_after: return after the iteration in which this many rollouts have finished; 0 goes
                on.

        Returns:
            A chunk for each rollout that advanced: first the finished ones in the order in which
            they ended (those of one iteration by id), then the others by id.

        Raises:
            EngineError: vLLM has ended a request that goes on by the rules for responses.
        """
        for row in self._rows.values():
            if not row.request:
                self._wake()
                self._submit(row)
        steps = 0
        while self._rows and steps < max_tokens and not 0 < stop_after <= len(self._done):
            steps += self._step()
        self._rest()
        done, self._done = self._done, []
        going_on = sorted((r for r in self._rows.values() if r.logprobs), key=lambda row: row.id)
        return done + [self._chunk(row, None) for row in going_on]

    def release(self, rollout_ids: Iterable[int]) -> None:
        """Forget rollouts; unknown ids are ignored."""
        gone = set(rollout_ids)
        self._done = [c for c in self._done if c.rollout_id not in gone]  # of an interrupted call
        self._withdraw([row for id_, row in self._rows.items() if id_ in gone])
        self._rows = {id_: row for id_, row in self._rows.items() if id_ not in gone}
        self._rest()

    def export(self, rollout_ids: Sequence[int], with_cache: bool) -> list[KVTransfer]:
        """Let go of unfinished rollouts that go on in another engine, in the order asked.

        Keys and values stay behind whatever is asked: the other engine prefills all tokens.

        Raises:
            EngineError: a rollout is not here, or is named twice; nothing has been let go.
        """
        if len(set(rollout_ids)) < len(rollout_ids) or not set(rollout_ids) <= self._rows.keys():
            raise EngineError(
                f"of the rollouts {list(rollout_ids)} some are not in this engine, or were named "
                "twice; export only those that were admitted and have not finished, each once"
            )
        self.release(rollout_ids)
        return [KVTransfer(id_) for id_ in rollout_ids]

    def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> None:
        """Go on with rollouts that another engine has exported.

        Raises:
            EngineError: a transfer is not its rollout's, or one cannot be admitted.
        """
        for r, transfer in zip(responses, transfers, strict=True):
            check_transfer(r, transfer)
        self.admit(responses)

    def load(self, weights: WeightsRef) -> None:
        """Decode with these weights from now on; ``carry`` says what becomes of rows in flight.

        Each hand-over begins a new salt. It is part of the name of every cached block, so that a
        request finds none of older weights. Rows whose keys and values are carried keep theirs.

        Raises:
            EngineError: vLLM does not know a tensor or has not got all, or what came is not what
                the learner sees.
        """
        rows = sorted(self._rows.values(), key=lambda row: row.id)
        self._withdraw(rows)
        self._rows = {row.id: row for row in rows}
        arriving = fetched(self._channel, weights)
        if self._asleep:  # keys and values come when the copies of the weights are gone
            self._requests.wake(["weights"])
        self._requests.load(self._source.tensors(arriving), weights.version)
        if self._asleep:
            self._requests.wake(["kv_cache"])
            self._asleep = False
        require_fingerprint(weights, self._source.fingerprint(), "the engine")
        self.version = weights.version
        self._loads += 1
        self._salt = str(self._loads)
        for row in rows:
            # A prompt is never carried: a response whose tokens are all of one version is then
            # wholly that policy's, and a learner may call it on-policy.
            if self._carry == "recompute" or not row.generated:
                row.salt = self._salt

    def logprobs(self, sequences: IntArray) -> FloatArray:
        """Log-probs [n, t - 1] of given tokens [n, t], all but the first of each sequence.

        They are of the distribution that the engine samples from. Each comes from a request of its
        own; rollouts in flight go on with the next call of :meth:`decode`.
        """
        self._withdraw(self._rows.values())
        self._wake()
        rows = [row.tolist() for row in sequences]
        prefixes = [row[:at] for row in rows for at in range(1, len(row))]
        following = [token for row in rows for token in row[1:]]
        found = self._requests.logprobs(prefixes, following)
        return found.reshape(len(rows), -1)

    def prefill_tokens_per_s(self) -> float:
        """Measure how fast vLLM reads a prompt; rollouts in flight as in :meth:`logprobs`."""
        self._withdraw(self._rows.values())
        self._wake()
        return self._requests.prefill_tokens_per_s()

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values."""
        return self._requests.kv_bytes_per_token

    def state_dict(self) -> dict[str, Any]:
        """Return the version, which is all the state there is."""
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.version = state["version"]

    def _submit(self, row: Row) -> None:
        self._named += 1
        row.request, row.prompted, row.counted = f"{row.id}.{self._named}", len(row.tokens), False
        self._by_request[row.request] = row
        left = self._config.max_new_tokens - row.generated
        self._requests.add(row.request, row.tokens, row.salt, self._seed_of(row), left)

    def _withdraw(self, rows: Iterable[Row]) -> None:
        running = [row for row in rows if row.request]
        self._requests.abort([row.request for row in running])
        for row in running:
            del self._by_request[row.request]
            row.request = ""

    def _rest(self) -> None:
        if self._requests.sleeps and not self._rows and not self._asleep:
            self._requests.sleep()
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            self._requests.wake(["weights", "kv_cache"])
            self._asleep = False

    def _seed_of(self, row: Row) -> int:
        seed = stream_seed(self._seed, row.id)
        if not self._requests.seeds_positions:  # else its first numbers would be drawn once more
            seed = stream_seed(seed, row.generated)
        return seed % SEEDS

    def _step(self) -> bool:
        """Make an iteration; return whether any rollout got a token."""
        if not self._requests.busy:
            raise EngineError(f"vLLM has no request left, and rollouts {sorted(self._rows)} go on")
        ended, advanced = [], False
        for output in self._requests.step():
            row = self._by_request[output.request]
            if not row.counted:
                row.counted = True
                self.prefilled_tokens += row.prompted - output.cached
            if chunk := self._take(row, output):
                ended.append(chunk)
            advanced |= bool(output.tokens)
        self._done += sorted(ended, key=lambda chunk: chunk.rollout_id)
        return advanced

    def _take(self, row: Row, output: Output) -> Chunk | None:
        """Take what a request has got; return the last chunk of a rollout that ends with it."""
        for token, logprob in zip(output.tokens, output.logprobs, strict=True):
            self.context_tokens += len(row.tokens)
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if finish := self._finish(row):
                break
        else:
            if output.ended:
                raise EngineError(
                    f"vLLM has ended rollout {row.id} after {row.generated} tokens "
                    f"({output.ended}), before an end token, a stop string or the limit of "
                    f"{self._config.max_new_tokens}"
                )
            return None
        if output.ended:
            del self._by_request[row.request]
        else:
            self._withdraw([row])
        del self._rows[row.id]
        return self._chunk(row, finish)

    def _finish(self, row: Row) -> FinishReason | None:
        if row.tokens[-1] in self._end_tokens:
            return FinishReason.STOP
        if self._stop and self._stop.ends(row.tokens, len(row.prompt)):
            return FinishReason.STOP
        return FinishReason.LENGTH if row.generated >= self._config.max_new_tokens else None

    def _chunk(self, row: Row, finish: FinishReason | None) -> Chunk:
        start, row.reported = row.reported, row.generated
        logprobs, row.logprobs = np.array(row.logprobs, np.float32), []
        tokens = np.array(row.tokens[len(row.prompt) + start :], np.int32)
        return Chunk(row.id, start, tokens, logprobs, self.version, finish)
