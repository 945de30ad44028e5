"""Our own generation engine: continuous batching over KV slots, in plain torch.

A rollout waits, takes a slot, has its tokens prefilled within a budget, and then gets one token a
decode step together with everyone else, until it ends and its slot goes to the next. The newest
token of a row is never in the cache: the step that samples its successor puts it there. So prefill
needs no logits, and a prompt, a carried response and a fresh set of weights are all the same case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stretto.config import RolloutConfig
from stretto.errors import EngineError
from stretto.models.forward import backbone, unwrapped
from stretto.models.weights import fingerprint
from stretto.rollout.cache import SlotCache
from stretto.rollout.packed import PackedLinears
from stretto.rollout.sampling import stream_seed
from stretto.rollout.step import GraphedDecode, ModelPass, StepInputs, check_cached_pass
from stretto.rollout.stop import StopStrings
from stretto.types import Chunk, FinishReason, Rollout, Weights


@dataclass(slots=True)
class _Row:
    """A rollout in the engine: prompt and response tokens, of which ``cached`` have keys."""

    id: int
    prompt: tuple[int, ...]
    tokens: list[int]
    seed: int
    cached: int = 0
    reported: int = 0
    logprobs: list[float] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return self.cached == len(self.tokens) - 1

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)


class TorchEngine:
    """Generates with a transformers model in this process.

    The model is used as it is, without a copy: a learner that trains the very same module hands
    over its weights by a version number and a fingerprint alone. Stored log-probabilities are of
    the distribution that was sampled (temperature and truncation applied).

    State: the version. Rollouts in flight are the schedule's to save: admitted again with the
    tokens they have, they go on as if nothing had happened. The KV cache is derived.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RolloutConfig,
        *,
        end_tokens: frozenset[int],
        seed: int,
        stop: StopStrings | None = None,
    ) -> None:
        self._model, self._config, self._seed = model, config, seed
        self._end_tokens, self._stop = end_tokens, stop
        self._slots = config.slots or config.batch
        self._cache = SlotCache(self._slots)
        check_cached_pass(model, config)
        self._pass = ModelPass(model, self._cache, config)
        self._packed = PackedLinears(backbone(model), unwrapped(model).get_output_embeddings())
        graphs = config.cuda_graphs and self._pass.device.type == "cuda"
        self._decode = GraphedDecode(self._pass) if graphs else self._pass.decode
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []  # a row's index is its slot
        self._done: list[Chunk] = []
        self.version = 0
        limit = getattr(self._pass.config_of_model, "max_position_embeddings", None)
        self._longest = int(limit) if limit else 1 << 62
        rope = getattr(self._pass.config_of_model, "rope_parameters", None) or {}
        if rope.get("rope_type") in ("longrope", "dynamic"):
            # Beyond these positions the frequencies follow the longest sequence in the batch.
            self._longest = int(rope.get("original_max_position_embeddings") or self._longest)

    def admit(self, rollouts: Sequence[Rollout]) -> None:
        """Queue rollouts; each goes on after the tokens it already has.

        Raises:
            EngineError: a rollout is here already, has ended, has an empty prompt, or does not fit
                the model's positions.
        """
        known = {row.id for row in (*self._waiting, *self._rows)}
        for r in rollouts:
            self._check(r, known)
            known.add(r.id)
            tokens = [*r.prompt.tokens, *r.tokens]
            seed = stream_seed(self._seed, r.id)
            self._waiting.append(_Row(r.id, r.prompt.tokens, tokens, seed, reported=len(r)))

    @torch.inference_mode()
    def decode(self, max_tokens: int) -> list[Chunk]:
        """Give every rollout in a slot up to ``max_tokens`` more; admit others as slots free."""
        steps = 0
        with self._packed:
            while steps < max_tokens:
                self._fill_slots()
                if not self._rows:
                    break
                self._prefill()
                steps += self._step()
        done, self._done = self._done, []
        return done + [self._chunk(row, None) for row in self._rows if row.logprobs]

    @torch.inference_mode()
    def release(self, rollout_ids: Sequence[int]) -> None:
        """Forget rollouts; unknown ids are ignored."""
        gone = set(rollout_ids)
        self._waiting = deque(row for row in self._waiting if row.id not in gone)
        for row in [row for row in self._rows if row.id in gone]:
            self._vacate(self._rows.index(row))

    def load(self, weights: Weights) -> None:
        """Decode with these weights from now on. Rows in flight are prefilled anew under them.

        Raises:
            EngineError: the model's fingerprint is not the one handed over.
        """
        parameters = dict(self._model.named_parameters())
        if unknown := set(weights.tensors or ()) - set(parameters):
            raise EngineError(
                f"version {weights.version} brings '{min(unknown)}', which the engine's model does "
                "not have; learner and engine must hold the same model"
            )
        with torch.no_grad():
            for name, tensor in (weights.tensors or {}).items():
                parameters[name].copy_(tensor)
        found = fingerprint(parameters.items())
        if found != weights.fingerprint:
            raise EngineError(
                f"version {weights.version} was handed over with fingerprint "
                f"{weights.fingerprint}, but the engine holds {found}: it did not get the new "
                "weights. Nothing generated from here on could be trusted"
            )
        self.version = weights.version
        self._packed.invalidate()
        for row in self._rows:
            row.cached = 0

    def state_dict(self) -> dict[str, Any]:
        """See the class: only the version."""
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.version = state["version"]

    def _check(self, r: Rollout, known: Set[int]) -> None:
        if r.id in known:
            raise EngineError(f"rollout {r.id} is in the engine already; release it first")
        if not r.prompt.tokens:
            raise EngineError(f"prompt {r.prompt.id} has no tokens; put a start token before it")
        if r.finish or len(r) >= self._config.max_new_tokens:
            raise EngineError(
                f"rollout {r.id} has ended, at {len(r)} tokens; admit only those that go on"
            )
        if len(r.prompt.tokens) + self._config.max_new_tokens > self._longest:
            raise EngineError(
                f"prompt {r.prompt.id} has {len(r.prompt.tokens)} tokens and may get "
                f"{self._config.max_new_tokens} more, but the model has positions for "
                f"{self._longest}; lower rollout.max_new_tokens or task.max_prompt_tokens"
            )

    def _fill_slots(self) -> None:
        while self._waiting and len(self._rows) < self._slots:
            row = self._waiting.popleft()
            self._cache.reserve(len(row.prompt) + self._config.max_new_tokens)
            self._rows.append(row)

    def _prefill(self) -> None:
        """One bounded forward pass over rows that are not ready, if there are any."""
        pending = [slot for slot, row in enumerate(self._rows) if not row.ready]
        if not pending:
            return
        if picked := self._pick_prefill(pending):
            rows = [self._rows[slot] for slot in picked]
            width = self._config.prefill_tokens
            parts = [row.tokens[row.cached : -1][:width] for row in rows]
            self._pass.prefill(picked, [row.cached for row in rows], parts)
            for row, part in zip(rows, parts, strict=True):
                row.cached += len(part)
        self._copy_shared_prompts(pending)

    def _copy_shared_prompts(self, pending: Sequence[int]) -> None:
        """Rollouts of one prompt prefill it once: the others copy its keys and values."""
        have = {r.prompt: s for s, r in enumerate(self._rows) if r.cached >= len(r.prompt) - 1}
        for slot in pending:
            row = self._rows[slot]
            if row.cached == 0 and row.prompt in have:
                row.cached = len(row.prompt) - 1
                self._cache.copy_row(have[row.prompt], slot, row.cached)

    def _pick_prefill(self, pending: Sequence[int]) -> list[int]:
        """Slots for one pass: the longest first, padded width times rows within the budget.

        Fresh rows and rows that go on do not mix, as fresh ones need no mask; of several rows with
        one prompt the others wait until the first has it.
        """
        picked: list[int] = []
        taken = {row.prompt for row in self._rows if row.cached and len(row.prompt) > 1}
        width = 0
        left = {
            slot: len(self._rows[slot].tokens) - 1 - self._rows[slot].cached for slot in pending
        }
        for slot in sorted(pending, key=lambda s: -left[s]):
            row = self._rows[slot]
            if row.cached == 0 and row.prompt in taken:
                continue
            width = width or min(left[slot], self._config.prefill_tokens)
            if picked and (len(picked) + 1) * width > self._config.prefill_tokens:
                break
            if picked and (row.cached == 0) != (self._rows[picked[0]].cached == 0):
                continue
            if row.cached == 0 and len(row.prompt) > 1:
                taken.add(row.prompt)
            picked.append(slot)
        return picked

    def _step(self) -> bool:
        """One token for every ready row; whether there was one."""
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
        tokens, logprobs = (x.tolist() for x in self._decode(inputs, read))
        for slot in reversed(range(len(rows))):  # from the end: a vacated slot takes the last row
            if ready[slot]:
                self._append(slot, tokens[slot], logprobs[slot])
        return True

    def _append(self, slot: int, token: int, logprob: float) -> None:
        row = self._rows[slot]
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.cached += 1
        if finish := self._finish(row):
            self._done.append(self._chunk(row, finish))
            self._vacate(slot)

    def _finish(self, row: _Row) -> FinishReason | None:
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

    def _chunk(self, row: _Row, finish: FinishReason | None) -> Chunk:
        start, row.reported = row.reported, row.generated
        logprobs, row.logprobs = tuple(row.logprobs), []
        tokens = tuple(row.tokens[len(row.prompt) + start :])
        return Chunk(row.id, start, tokens, logprobs, self.version, finish)
