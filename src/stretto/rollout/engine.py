"""Stretto's own generation engine: continuous batching over KV slots, in plain torch.

A rollout waits, takes a slot, has its tokens prefilled within a budget, and then gets one token a
decode step together with everyone else, until it ends and its slot goes to the next. The newest
token of a row is never in the cache: the step that samples its successor puts it there. So prefill
needs no logits, and a prompt, a carried response and a fresh set of weights are all the same case.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from stretto.config import RolloutConfig
from stretto.errors import EngineError
from stretto.models.backend import backend_of
from stretto.models.forward import backbone, positions, unwrapped
from stretto.models.weights import load_weights
from stretto.rollout.admission import check_admission, check_transfer
from stretto.rollout.probe import Probe
from stretto.rollout.rows import Row, RowCache, RowSlots, pick_prefill
from stretto.rollout.sampling import stream_seed
from stretto.rollout.step import GraphedDecode, ModelPass, StepInputs, check_cached_pass
from stretto.rollout.stop import StopStrings
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


class TorchEngine:
    """An engine that generates with a transformers model in this process.

    The model is used as it is, without a copy: a learner that trains the very same module hands
    over its weights by a version number and a fingerprint alone. While the engine decodes on a CPU
    in bfloat16, the module's linear layers are changed for that time; an engine that decodes in one
    thread while another thread uses the module needs a copy out of ``models/clone.py``. Stored
    log-probabilities are of the distribution that was sampled (temperature and truncation applied).

    State: the version. Rollouts in flight are the schedule's to save: admitted again with the
    tokens they have, they go on as if nothing had happened. The KV cache is derived.

    Args:
        end_tokens: ids that end a response.
        stop: strings that end a response.
        slots: rollouts decoded together; ``None`` takes the config's number. Memory is allocated
            for as many as there have been at one time.
        carry: what becomes of the keys and values of unfinished rollouts when new weights arrive.
            ``recompute`` makes them again, so that every token is sampled from the present policy.
            ``reuse`` keeps them, which costs nothing, but then the later tokens of these rollouts
            are sampled from a mixture of policies, and a resumed run does not repeat them exactly.
        channel: where new weights come from; ``None`` where the learner trains the same module.

    Raises:
        EngineError: the model cannot be driven over slots, or ``slots`` is below 1.
    """

    capabilities = Capabilities(
        moves_cache=True, deterministic=True, interruptible=True, logprobs="sampled"
    )

    def __init__(
        self,
        model: nn.Module,
        config: RolloutConfig,
        *,
        end_tokens: frozenset[int],
        seed: int,
        stop: StopStrings | None = None,
        slots: int | None = None,
        carry: Literal["recompute", "reuse"] = "recompute",
        channel: WeightChannel | None = None,
    ) -> None:
        self.model, self._config, self._seed = model, config, seed
        self._probe: Probe | None = None
        self._end_tokens, self._stop, self._carry = end_tokens, stop, carry
        self._channel = channel
        self._slots = (config.slots or config.batch) if slots is None else slots
        if self._slots < 1:
            raise EngineError(f"an engine needs at least one slot; got slots = {slots}")
        check_cached_pass(model, config)
        device = next(model.parameters()).device
        self._cache = RowSlots(self._slots, device)
        self._pass = ModelPass(model, self._cache, config)
        backend = backend_of(device)
        self._packed = backend.packed(backbone(model), unwrapped(model).get_output_embeddings())
        self._graphs = config.cuda_graphs and backend.graphs
        self._decode: Callable[[StepInputs, int], tuple[Tensor, Tensor]] = self._pass.decode
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []  # a row's index is its slot
        self._ids: set[int] = set()  # of all rows, waiting or not
        self._done: list[Chunk] = []
        self.version = 0
        self.prefilled_tokens = 0
        """Tokens put into the cache without sampling, in all."""
        self.context_tokens = 0
        """Cache positions read by decode steps, in all; padding up to the longest row counted."""
        self._longest = positions(model, generating=True)

    def admit(self, responses: Sequence[Response]) -> None:
        """Queue responses; each goes on after the tokens it already has.

        Raises:
            EngineError: a rollout is here already, has ended, has an empty prompt, or does not fit
                the model's positions.
        """
        for r in responses:
            self._admit(r)

    @torch.inference_mode()
    def decode(self, max_tokens: int, stop_after: int = 0) -> list[Chunk]:
        """Give every rollout in a slot up to ``max_tokens`` more; admit others as slots free.

        Many short calls and one long call sample the same tokens, in the same forward passes.

        Args:
            max_tokens: decode steps of this call, at most.
            stop_after: return after the step in which this many rollouts have finished; 0 goes on.

        Returns:
            A chunk for each rollout that advanced: first the finished ones in the order in which
            they ended (those of one step by id), then the others by id.

        An interrupted call leaves the model as it was, but the rollouts in doubt: release them, and
        admit them again with the tokens that earlier calls have returned.
        """
        steps = 0
        try:
            with self._packed:
                while steps < max_tokens and not 0 < stop_after <= len(self._done):
                    self._fill_slots()
                    if not self._rows:
                        break
                    self._prefill()
                    steps += self._step()
        finally:
            self._packed.restore()  # an interruption may strike on the way into or out of it
        done, self._done = self._done, []
        going_on = sorted((row for row in self._rows if row.logprobs), key=lambda row: row.id)
        return done + [self._chunk(row, None) for row in going_on]

    @torch.inference_mode()
    def release(self, rollout_ids: Iterable[int]) -> None:
        """Forget rollouts; unknown ids are ignored."""
        gone = set(rollout_ids)
        self._done = [c for c in self._done if c.rollout_id not in gone]  # of an interrupted call
        if gone.isdisjoint(self._ids):
            return
        self._ids -= gone
        self._waiting = deque(row for row in self._waiting if row.id not in gone)
        for slot in reversed(range(len(self._rows))):
            if self._rows[slot].id in gone:
                self._vacate(slot)

    @torch.inference_mode()
    def export(self, rollout_ids: Sequence[int], with_cache: bool) -> list[KVTransfer]:
        """Let go of unfinished rollouts that go on in another engine, in the order asked.

        Args:
            rollout_ids: which; all must be here.
            with_cache: copy their keys and values out of the slots. Without them the other engine
                prefills prompt and response again.

        Raises:
            EngineError: a rollout is not here, or is named twice; nothing has been let go.
        """
        at = {row.id: slot for slot, row in enumerate(self._rows)}
        rows = {row.id: row for row in (*self._rows, *self._waiting)}
        if wrong := [i for i, n in Counter(rollout_ids).items() if n > 1 or i not in rows]:
            raise EngineError(
                f"rollouts {wrong} are not in this engine, or were named twice; export only those "
                "that were admitted and have not finished, each once"
            )
        transfers = [self._transfer_of(rows[i], at.get(i), with_cache) for i in rollout_ids]
        self.release(rollout_ids)
        return transfers

    def accept(self, responses: Sequence[Response], transfers: Sequence[KVTransfer]) -> None:
        """Go on with rollouts that another engine of the same model has exported.

        They join the queue; one that brought its keys and values is decoded as soon as it has a
        slot. What was computed with older weights than this engine's is treated as at a hand-over.

        Raises:
            EngineError: a transfer is not its rollout's, or one cannot be admitted.
        """
        for r, transfer in zip(responses, transfers, strict=True):
            check_transfer(r, transfer)
            self._admit(r, transfer)

    def load(self, weights: WeightsRef) -> None:
        """Decode with these weights from now on; ``carry`` says what becomes of rows in flight.

        Raises:
            EngineError: a tensor has no parameter to go to, or the model's fingerprint is then not
                the one handed over.
        """
        load_weights(self.model, weights, fetched(self._channel, weights), "the engine")
        self.version = weights.version
        self._packed.invalidate()
        rows = [*self._rows, *self._waiting]
        for row in rows:
            self._renew(row)
        if not any(row.cached for row in rows):
            # In the order in which they would be admitted to another engine, such as that of a
            # resumed run: the same rows are then prefilled together, and all bits are the same.
            self._rows, self._waiting = [], deque(sorted(rows, key=lambda row: row.id))

    def logprobs(self, sequences: IntArray) -> FloatArray:
        """Log-probs [n, t - 1] of given tokens [n, t], all but the first of each sequence.

        They come from the steps by which the engine decodes, under the distribution that it samples
        from; rollouts in flight stay as they are.
        """
        if self._probe is None or not np.array_equal(self._probe.sequences, sequences):
            self._probe = Probe(self.model, self._packed, self._config, sequences)
        return self._probe.logprobs()

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values; 0 before anything was decoded or probed."""
        return max(self._cache.token_bytes, self._probe.cache.token_bytes if self._probe else 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the version, which is all the state there is."""
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.version = state["version"]

    def _admit(self, r: Response, transfer: KVTransfer | None = None) -> None:
        check_admission(r, self._ids, self._config.max_new_tokens, self._longest)
        tokens = [*r.prompt.tokens, *r.tokens.tolist()]
        row = Row(
            r.id, r.prompt.tokens, tokens, stream_seed(self._seed, r.id), len(r), self.version
        )
        if transfer and transfer.cache is not None:
            kv: RowCache = transfer.cache
            row.cached, row.kv = transfer.cached_tokens, kv
            row.cache_version = kv.version
            if kv.version != self.version:
                self._renew(row)
        self._ids.add(r.id)
        self._waiting.append(row)

    def _renew(self, row: Row) -> None:
        """Void a row's cache now that there are new weights, unless it is carried.

        A prompt is never carried: a response whose tokens are all of one version is then wholly
        that policy's, and a learner may call it on-policy.
        """
        if self._carry == "recompute" or not row.generated or not row.cached:
            row.void(self.version)

    def _transfer_of(self, row: Row, slot: int | None, with_cache: bool) -> KVTransfer:
        if not with_cache or not row.cached:
            return KVTransfer(row.id)
        cache = row.kv
        if slot is not None:
            cache = self._cache.take(slot, row.cached, row.cache_version)
        return KVTransfer(row.id, cache, row.cached)

    def _fill_slots(self) -> None:
        coming = min(len(self._waiting), self._slots - len(self._rows))
        if coming and self._cache.hold(len(self._rows) + coming) and self._graphs:
            self._decode = GraphedDecode(self._pass)  # the graphs so far write to freed memory
        for _ in range(coming):
            row = self._waiting.popleft()
            self._cache.reserve(len(row.prompt) + self._config.max_new_tokens)
            if row.kv:
                self._cache.put(len(self._rows), row.kv)
                row.kv = None
            self._rows.append(row)

    def _prefill(self) -> None:
        """Run forward passes over rows that are not ready, if there are any, within the budget."""
        left = budget = self._config.prefill_tokens
        while left > 0 and (pending := [s for s, row in enumerate(self._rows) if not row.ready]):
            picked = pick_prefill(self._rows, pending, left, self.version)
            rows = [self._rows[slot] for slot in picked]
            missing = [row.tokens[row.cached : -1] for row in rows]
            width = max(map(len, missing), default=left)
            if left < budget and width > left:
                return  # what a first pass leaves over is for whole rows
            if rows:
                parts = [tokens[:left] for tokens in missing]
                self._pass.prefill(picked, [row.cached for row in rows], parts)
                for row, part in zip(rows, parts, strict=True):
                    row.cached += len(part)
                    self.prefilled_tokens += len(part)
            self._copy_shared_prompts(pending)
            left -= width * max(len(rows), 1)

    def _copy_shared_prompts(self, pending: Sequence[int]) -> None:
        """Copy a prompt's keys and values to its other rollouts, so that it is prefilled once."""
        have = {
            row.prompt: slot
            for slot, row in enumerate(self._rows)
            if row.cached >= len(row.prompt) - 1 and row.cache_version == self.version
        }
        for slot in pending:
            row = self._rows[slot]
            if row.cached == 0 and row.prompt in have:
                row.cached = len(row.prompt) - 1
                self._cache.copy_row(have[row.prompt], slot, row.cached)

    def _step(self) -> bool:
        """Decode one token for every ready row; return whether there was one."""
        rows, device = self._rows, self._pass.device
        ready = [row.ready for row in rows]
        if not any(ready):
            return False
        idle = self._cache.capacity
        inputs = StepInputs(
            ids=torch.tensor([row.tokens[-1] for row in rows], device=device),
            positions=torch.tensor(
                [row.cached if row.ready else idle for row in rows], device=device
            ),
            seeds=torch.tensor([row.seed for row in rows], device=device),
            index=torch.tensor([row.generated for row in rows], device=device),
        )
        read = max(row.cached for row in rows if row.ready) + 1
        self.context_tokens += read * len(rows)
        tokens, logprobs = (x.tolist() for x in self._decode(inputs, read))
        ended = []
        for slot in reversed(range(len(rows))):  # from the end: a vacated slot takes the last row
            if ready[slot] and (chunk := self._append(slot, tokens[slot], logprobs[slot])):
                ended.append(chunk)
        self._done += sorted(ended, key=lambda chunk: chunk.rollout_id)
        return True

    def _append(self, slot: int, token: int, logprob: float) -> Chunk | None:
        """Add a token to a row; if that ends the row, free its slot and return its last chunk."""
        row = self._rows[slot]
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.cached += 1
        finish = self._finish(row)
        if finish is None:
            return None
        self._ids.remove(row.id)
        self._vacate(slot)
        return self._chunk(row, finish)

    def _finish(self, row: Row) -> FinishReason | None:
        if row.tokens[-1] in self._end_tokens:
            return FinishReason.STOP
        if self._stop and self._stop.ends(row.tokens, len(row.prompt)):
            return FinishReason.STOP
        return FinishReason.LENGTH if row.generated >= self._config.max_new_tokens else None

    def _vacate(self, slot: int) -> None:
        last = self._rows.pop()
        if slot < len(self._rows):
            self._rows[slot] = last
            self._cache.copy_row(len(self._rows), slot, last.cached)

    def _chunk(self, row: Row, finish: FinishReason | None) -> Chunk:
        start, row.reported = row.reported, row.generated
        logprobs, row.logprobs = np.array(row.logprobs, np.float32), []
        tokens = np.array(row.tokens[len(row.prompt) + start :], np.int32)
        return Chunk(row.id, start, tokens, logprobs, self.version, finish)
