"""Stretto's own generation engine: continuous batching over KV slots, in plain torch.

Shapes: n rows, K key positions read, V vocabulary.

A rollout waits for a slot, is prefilled within a budget (:mod:`stretto.rollout.slots`), and then
gets one token per decode step with all other rows until it ends and frees its slot. A parked row
(its turn has ended) has its KV cache copied out of the slot, and into a slot again when it
continues. Until then no other row shares its prompt.

When few rows are left, a step may also read proposed tokens of a row and accept those that are
correct (:mod:`stretto.rollout.drafts`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from stretto.config.capabilities import ENGINES
from stretto.models.backend import backend_of
from stretto.models.cached import RowCache, SlotCache
from stretto.models.decoder_layers import DecodeLayers
from stretto.models.devices import PackedLinears
from stretto.models.forward import backbone, plain_states, positions, unwrapped
from stretto.models.lora import FusedAdapters
from stretto.models.shards import peers_of
from stretto.models.weights import load_weights
from stretto.rollout.base import CPU, Engine, EngineSettings
from stretto.rollout.drafts import DraftModel, PromptLookup, Proposer, SpeculativeDecoding
from stretto.rollout.sampling import stream_seed
from stretto.rollout.slots import SlotRow, Slots
from stretto.rollout.steps import (
    GraphedDecode,
    ModelPass,
    StepInputs,
    decode_each,
    decode_several,
    decoder,
    until_ends,
)
from stretto.types import (
    Chunk,
    FinishReason,
    FloatArray,
    Hold,
    IntArray,
    KVTransfer,
    Response,
    TopLogprobs,
    WeightsRef,
)
from stretto.weights.channel import fetched

COPIED = 64 << 20
"""Bytes copied to measure the bandwidth to the host."""


class TorchEngine(Engine):
    """An engine that generates with a transformers model in this process.

    The model is not copied. A learner that trains the same module syncs its weights by only a
    version number and a fingerprint. While the engine decodes on a CPU in bfloat16, or on a GPU
    with adapters, it changes the module's layers. Another thread that uses the module needs a copy
    (:func:`~stretto.models.weights.with_own_structure`). Many short calls of :meth:`decode` and one
    long call sample the same tokens, on a CPU in the same forward passes. On a GPU a row may stay
    in the passes after its end (:meth:`_steps_unread`).
    """

    capabilities = ENGINES["torch"]
    _held: dict[int, SlotRow]
    _parked: dict[int, SlotRow]

    def __init__(self, model: nn.Module, settings: EngineSettings) -> None:
        super().__init__(settings, positions(model, generating=True))
        self.model = model
        config = settings.rollout
        self._probe: ModelPass | None = None
        self.device = next(model.parameters()).device
        self._sliced = peers_of(model) is not None
        self._pass, self._steps = decoder(model, SlotCache(0), config)
        # Growth of the cache would drop all graphs, and needs memory for both caches.
        self._graphed = isinstance(self._steps, GraphedDecode)
        self._slots = Slots(self._pass, settings, fixed=self._graphed)
        backend = backend_of(self.device)
        self._most_unread = backend.steps_unread
        self._adapters = FusedAdapters(model, on=backend.fuses_adapters and not self._sliced)
        self._packed = PackedLinears(backbone(model), unwrapped(model).get_output_embeddings())
        self._layers = DecodeLayers(model)
        self._shares_weights = False  # with a learner that changes them in place
        self._speculation: SpeculativeDecoding | None = None
        if config.speculative_tokens:
            proposer: Proposer = PromptLookup(config.samples_per_prompt)
            if settings.draft is not None:
                proposer = DraftModel(settings.draft, model, config, settings.longest)
            self._speculation = SpeculativeDecoding(proposer, config)
            self.speculated = self._speculation.counts

    @classmethod
    def open(cls, model: nn.Module, settings: EngineSettings) -> Engine:
        return cls(model, settings)

    def load(self, weights: WeightsRef) -> None:
        tensors = fetched(self.settings.channel, weights)
        load_weights(self.model, weights, tensors, "the engine")
        self.version = weights.version
        self._shares_weights = not tensors
        self._packed.invalidate()
        for row in (*self._held.values(), *self._parked.values()):
            self._renew(row)
        if not any(row.cached for row in self._held.values()):
            self._slots.requeue()

    @torch.inference_mode()
    def hold(self, rollout_ids: Iterable[int], how: Hold) -> None:
        """See :meth:`Engine.hold`. On a CPU ``offload`` does nothing. The host caches at most as
        many tokens as the slots hold. The rest are recomputed.
        """
        for row in (self._parked[i] for i in rollout_ids if i in self._parked):
            if how == "remake":
                row.void(self.version)
            elif row.kv:
                row.kv = row.kv.to(self.device if how == "keep" else CPU)
        self._slots.bound_kept(self._parked.values(), self.version)

    @torch.inference_mode()
    def logprobs(self, sequences: IntArray) -> FloatArray:
        ids, columns = torch.from_numpy(sequences.astype(np.int64)).to(self.device), []
        if self._probe is None or self._probe.cache.slots != len(ids):
            self._probe = ModelPass(self.model, SlotCache(len(ids)), self._config)
        self._probe.cache.reserve(ids.shape[1])
        with self._packed, self._adapters, self._layers:
            for at in range(ids.shape[1] - 1):
                positions = torch.full_like(ids[:, at], at)
                logits = self._probe.next_logits(ids[:, at], positions, at + 1)
                logprobs = (logits.float() / self._config.temperature).log_softmax(-1)
                columns.append(logprobs.gather(1, ids[:, at + 1, None])[:, 0])
        matrix: FloatArray = torch.stack(columns, 1).cpu().numpy()
        return matrix

    @property
    def graphed_steps(self) -> int | None:
        return self._steps.replays if isinstance(self._steps, GraphedDecode) else None

    @property
    def kv_bytes_per_token(self) -> int:
        return max(p.cache.token_bytes for p in (self._pass, self._probe) if p)

    def _row(self, r: Response, tokens: list[int], transfer: KVTransfer | None) -> SlotRow:
        sampling = r.sampling or self._sampling
        row = SlotRow(
            id=r.id,
            prompt=r.prompt.tokens,
            tokens=tokens,
            reported=len(r),
            sampling=sampling,
            turn_start=r.turn_start,
            seed=stream_seed(*(sampling.seed or (self.settings.seed, r.id))),
            cache_version=self.version,
        )
        if transfer and transfer.cache is not None:
            kv: RowCache = transfer.cache
            row.cached, row.kv = transfer.cached_tokens, kv
            row.cache_version = kv.version
            if kv.version != self.version:
                self._renew(row)
        return row

    def _add(self, r: Response, transfer: KVTransfer | None = None) -> None:
        super()._add(r, transfer)
        if r.id in self._held:
            self._slots.waiting.append(self._held[r.id])
        if transfer and transfer.cache is not None:
            self._slots.bound_kept(self._parked.values(), self.version)

    @torch.inference_mode()
    def _decode_steps(self, max_tokens: int, stop_after: int) -> int:
        steps = 0
        try:
            with self._packed, self._adapters, self._layers:
                while steps < max_tokens and not 0 < stop_after <= self._finished:
                    self._slots.fill()
                    if not self._slots.rows:
                        break
                    self._mark_step(steps)
                    self.prefilled_tokens += self._slots.prefill(self.version)
                    count = self._steps_unread(max_tokens - steps)
                    remaining = stop_after and stop_after - self._finished
                    steps += self._take_unread(count, remaining) if count > 1 else self._step()
        finally:
            self._packed.restore()  # an interruption may come while they are entered or left
            self._adapters.restore()
            self._layers.restore()
            self._free_packed()
        return steps

    @torch.inference_mode()
    def _drop(self) -> None:
        self._slots.drop_except(self._held)
        self._free_packed()

    def _free_packed(self) -> None:
        """Free packed weights between rounds for a learner, which will change the weights. Rows
        that wait for an environment go on, so that packing again would cost more.
        """
        if self._shares_weights and not self.rollout_ids:
            self._packed.invalidate()

    @torch.inference_mode()
    def _read_prompt(self, tokens: int) -> None:
        ids = torch.ones(1, tokens, dtype=torch.long, device=self.device)
        plain_states(backbone(self.model), input_ids=ids)[0, -1, 0].item()

    def host_bytes_per_s(self) -> float:
        """See :meth:`Engine.host_bytes_per_s`. Times a round trip after a warm-up."""
        if self.device == CPU:
            return 0.0
        buffer = torch.zeros(COPIED, dtype=torch.uint8, device=self.device)
        buffer.to(CPU).to(self.device)[-1].item()
        start_s = time.perf_counter()
        buffer.to(CPU).to(self.device)[-1].item()
        return 2 * COPIED / (time.perf_counter() - start_s)

    def _renew(self, row: SlotRow) -> None:
        if self.settings.carry == "recompute" or not row.generated or not row.cached:
            row.void(self.version)

    @torch.inference_mode()
    def _transfer_of(self, row: SlotRow, with_cache: bool) -> KVTransfer:
        if not with_cache or not row.cached:
            return KVTransfer(row.id)
        return KVTransfer(row.id, self._slots.kv_of(row), row.cached)

    def _step(self) -> int:
        rows = self._slots.rows
        ready = [row.ready for row in rows]
        if not any(ready):
            return 0
        same_sampling = all(row.sampling.like(self._sampling) for row in rows)
        proposals: Sequence[Sequence[int]] = [()] * len(rows)
        if self._speculation and same_sampling and all(ready):
            proposals = self._speculation.propose(rows)
        inputs = self._inputs(proposals)
        ends = (row.cached + len(p) for row, p in zip(rows, proposals, strict=True) if row.ready)
        read = max(ends) + 1
        self.context_tokens += read * len(rows)
        likeliest: Sequence[TopLogprobs | None] = [None] * len(rows)
        if same_sampling:
            tokens, logprobs = (x.tolist() for x in self._steps.decode(inputs, read))
        else:
            samplings = [row.sampling for row in rows]
            tokens, logprobs, likeliest = decode_each(self._steps, inputs, read, samplings)
        last_chunks = {}
        for slot in reversed(range(len(rows))):
            if not ready[slot]:
                continue
            row = rows[slot]
            accepted = 0
            candidates = (*proposals[slot], None)
            for token, logprob, proposal in zip(
                tokens[slot], logprobs[slot], candidates, strict=False
            ):
                row.cached += 1
                chunk = self._append(row, token, logprob, likeliest[slot])
                if chunk or token != proposal:
                    break
                accepted += 1
            if self._speculation and proposals[slot]:
                rejected = proposal is not None and token != proposal
                self._speculation.verified(accepted, rejected=rejected)
            if chunk:
                last_chunks[row.id] = chunk
        self._leave(last_chunks)
        return 1

    def _steps_unread(self, limit: int) -> int:
        """Return how many steps to launch before the host reads their tokens, up to ``limit``.

        One if the host must see each token: because an end frees a slot for a waiting row, for stop
        strings, for proposals, and for rows with different sampling. At most the tokens left to any
        row, because its slot has no more room.
        """
        rows, stop = self._slots.rows, self.settings.stop
        if self._most_unread == 1 or self._slots.waiting or (stop and stop.strings):
            return 1
        if self._speculation:
            return 1
        for row in rows:
            sampling = row.sampling
            if not row.ready or sampling.stop or not sampling.like(self._sampling):
                return 1
        return min(limit, self._most_unread, *(row.tokens_left for row in rows))

    def _take_unread(self, count: int, stop_after: int) -> int:
        """Take ``count`` steps, then read their tokens. Return the number of steps that count.

        Drops tokens after the end of their row, and after the step in which ``stop_after`` rollouts
        have finished, so that the result is as if each step were read.
        """
        rows = list(self._slots.rows)
        inputs, read = self._inputs([()] * len(rows)), max(row.cached for row in rows) + 1
        replays = self.graphed_steps or 0
        tokens, logprobs = (x.tolist() for x in decode_several(self._steps, inputs, read, count))
        continues = [row.sampling.max_turn_tokens > 0 for row in rows]
        lengths = until_ends(tokens, self.settings.end_tokens, continues, stop_after)
        for step in range(max(lengths)):
            cached_tokens = [
                r.cached for r, length in zip(rows, lengths, strict=True) if step < length
            ]
            self.context_tokens += (max(cached_tokens) + step + 1) * len(cached_tokens)
        for row, length in zip(rows, lengths, strict=True):
            row.cached += length
        slots = {row.id: slot for slot, row in enumerate(rows)}
        for length in sorted(set(lengths)):
            last_chunks = {}
            for row in reversed(self._slots.rows):
                slot = slots[row.id]
                if lengths[slot] == length:
                    row.tokens += tokens[slot][: length - 1]
                    row.logprobs += logprobs[slot][: length - 1]
                    self.sampled_tokens += length - 1
                    newest = tokens[slot][length - 1], logprobs[slot][length - 1]
                    if chunk := self._append(row, *newest):
                        last_chunks[row.id] = chunk
            self._leave(last_chunks)
        if isinstance(self._steps, GraphedDecode):
            self._steps.replays = min(self._steps.replays, replays + max(lengths))
        return max(lengths)

    def _leave(self, last_chunks: Mapping[int, Chunk]) -> None:
        """Free the slots of rows that ended in a step, or whose turn ended."""
        for slot in reversed(range(len(self._slots.rows))):  # a vacated slot takes the last row
            row = self._slots.rows[slot]
            if not (chunk := last_chunks.get(row.id)):
                continue
            if chunk.finish is FinishReason.TURN:
                self._park(row)
            elif self._speculation:
                self._speculation.ended(row)
            self._slots.vacate(slot)
        self._done += sorted(last_chunks.values(), key=lambda chunk: chunk.rollout_id)
        if any(chunk.finish is FinishReason.TURN for chunk in last_chunks.values()):
            self._slots.bound_kept(self._parked.values(), self.version)

    def _inputs(self, proposals: Sequence[Sequence[int]]) -> StepInputs:
        width, idle = max(map(len, proposals)), self._slots.cache.capacity
        if width:
            if self._graphed:  # graphs have a fixed width
                width = self._config.speculative_tokens
            self.speculated["proposed"] += width * len(proposals)
        ids = []
        positions = []
        seeds = []
        draws = []
        for row, tokens in zip(self._slots.rows, proposals, strict=True):
            padding, first = width - len(tokens), row.cached if row.ready else idle
            ids.append([row.tokens[-1], *tokens] + [0] * padding)
            positions.append([*range(first, first + len(tokens) + 1)] + [idle] * padding)
            seeds.append([row.seed] * (width + 1))
            draws.append([*range(row.generated, row.generated + width + 1)])
        return StepInputs(*torch.tensor((ids, positions, seeds, draws), device=self.device))

    def _park(self, row: SlotRow) -> None:
        try:
            row.kv = self._slots.kv_of(row)
        except torch.OutOfMemoryError:
            if self._sliced:  # other ranks may have memory, and all must prefill the same
                raise
            row.void(self.version)
