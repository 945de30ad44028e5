"""The engine over vLLM: a rollout is a request, and a call is so many of vLLM's iterations.

Between two calls nothing runs, so weight syncs and moves fall between iterations by construction.
All tokens of a request are taken in the iteration that samples them, so that ending it loses none.
A rollout goes on, here or in another engine, as a new request whose prompt is all that it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from stretto.errors import EngineError
from stretto.models.forward import text_config
from stretto.models.weights import require_fingerprint
from stretto.rollout.base import Engine, EngineSettings, Row
from stretto.rollout.sampling import stream_seed
from stretto.rollout.vllm.llm import LlmRequests, Output, open_requests
from stretto.rollout.vllm.source import Source, source_of
from stretto.types import (
    Capabilities,
    Chunk,
    FloatArray,
    IntArray,
    KVTransfer,
    Response,
    WeightsRef,
)
from stretto.weights.channel import fetched

SEEDS = 1 << 63
"""Seeds are below this number: what the libraries behind vLLM take."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRow(Row):
    """A rollout that is decoded as a request.

    Attributes:
        salt: of its request; see :meth:`VllmEngine.load`.
        request: name of its request; empty while it has none.
        prompted: tokens that the request began with.
        counted: whether they are among the prefilled ones.
    """

    salt: str
    request: str = ""
    prompted: int = 0
    counted: bool = False


def open_engine(model: nn.Module, settings: EngineSettings) -> VllmEngine:
    """Start vLLM in this process, with random weights: the first weight sync brings all of them.

    Raises the errors of :func:`~.llm.open_requests`.

    Args:
        model: as training starts, on the CPU, to learn what travels.
    """
    config = text_config(model)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    token_bytes = int(2 * config.num_hidden_layers * kv_heads * width * settings.dtype.itemsize)
    source = source_of(model)
    return VllmEngine(open_requests(settings, token_bytes), source, settings)


class VllmEngine(Engine):
    """An engine that generates with vLLM in this process, over weights of its own.

    Sampling is seeded by run, rollout and position, but kernels add up in an order that depends on
    the batch: the same seed may give other tokens in other company. Keys and values stay behind
    when a rollout moves. Those that are carried over to new weights are read from the prefix cache,
    as far as its whole blocks are still there.

    Args:
        source: turns what the learner sends into what vLLM loads.
    """

    capabilities = Capabilities(
        moves_cache=False, deterministic=False, interruptible=True, logprobs="sampled"
    )
    _held: dict[int, RequestRow]

    def __init__(self, requests: LlmRequests, source: Source, settings: EngineSettings) -> None:
        super().__init__(settings, requests.longest)
        self._requests, self._source = requests, source
        self._by_request: dict[str, RequestRow] = {}
        self._named, self._loads, self._salt = 0, 0, "0"
        self._asleep = False

    def load(self, weights: WeightsRef) -> None:
        """See :class:`~stretto.rollout.base.Engine`.

        Each weight sync begins a new salt. It is part of the name of every cached block, so that a
        request finds none of older weights. Rows whose keys and values are carried keep theirs.
        """
        rows = sorted(self._held.values(), key=lambda row: row.id)
        self._withdraw(rows)
        self._held = {row.id: row for row in rows}
        arriving = fetched(self.settings.channel, weights)
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
            if self.settings.carry == "recompute" or not row.generated:
                row.salt = self._salt

    def logprobs(self, sequences: IntArray) -> FloatArray:
        """See :class:`~stretto.rollout.base.Engine`; each comes from a request of its own."""
        self._make_idle()
        rows = [row.tolist() for row in sequences]
        prefixes = [row[:at] for row in rows for at in range(1, len(row))]
        following = [token for row in rows for token in row[1:]]
        found = self._requests.logprobs(prefixes, following)
        return found.reshape(len(rows), -1)

    def prefill_tokens_per_s(self) -> float:
        self._make_idle()
        return self._requests.prefill_tokens_per_s()

    @property
    def kv_bytes_per_token(self) -> int:
        return self._requests.kv_bytes_per_token

    def _row(self, r: Response, tokens: list[int], transfer: KVTransfer | None) -> RequestRow:
        return RequestRow(
            id=r.id, prompt=r.prompt.tokens, tokens=tokens, reported=len(r), salt=self._salt
        )

    def _decode_steps(self, max_tokens: int, stop_after: int) -> int:
        for row in self._held.values():
            if not row.request:
                self._wake()
                self._submit(row)
        steps = 0
        while self._held and steps < max_tokens and not 0 < stop_after <= len(self._done):
            steps += self._step()
        self._rest()
        return steps

    def _drop(self) -> None:
        self._withdraw([row for row in self._by_request.values() if row.id not in self._held])
        self._rest()

    def _submit(self, row: RequestRow) -> None:
        self._named += 1
        row.request, row.prompted, row.counted = f"{row.id}.{self._named}", len(row.tokens), False
        self._by_request[row.request] = row
        seed = stream_seed(self.settings.seed, row.id)
        if not self._requests.seeds_positions:  # else its first numbers would be drawn once more
            seed = stream_seed(seed, row.generated)
        left = self._config.max_new_tokens - row.generated
        self._requests.add(row.request, row.tokens, row.salt, seed % SEEDS, left)

    def _withdraw(self, rows: Iterable[RequestRow]) -> None:
        running = [row for row in rows if row.request]
        self._requests.abort([row.request for row in running])
        for row in running:
            del self._by_request[row.request]
            row.request = ""

    def _make_idle(self) -> None:
        self._withdraw(self._held.values())
        self._wake()

    def _rest(self) -> None:
        if self._requests.sleeps and not self._held and not self._asleep:
            self._requests.sleep()
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            self._requests.wake(["weights", "kv_cache"])
            self._asleep = False

    def _step(self) -> bool:
        """Make an iteration; return whether any rollout got a token."""
        if not self._requests.busy:
            raise EngineError(
                f"vLLM has no request left, and rollouts {sorted(self._held)} go on", "no-requests"
            )
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

    def _take(self, row: RequestRow, output: Output) -> Chunk | None:
        """Take what a request has got; return the last chunk of a rollout that ends with it."""
        for token, logprob in zip(output.tokens, output.logprobs, strict=True):
            self.context_tokens += len(row.tokens)
            if chunk := self._append(row, token, logprob):
                break
        else:
            if output.ended:
                raise EngineError(
                    f"vLLM has ended rollout {row.id} after {row.generated} tokens "
                    f"({output.ended}), before an end token, a stop string or the limit of "
                    f"{self._config.max_new_tokens}",
                    "ended-early",
                )
            return None
        if output.ended:
            del self._by_request[row.request]
        else:
            self._withdraw([row])
        return chunk
