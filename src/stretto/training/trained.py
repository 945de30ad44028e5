"""A model under training: float32 master weights behind a model that computes in its own type."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stretto.config import OptimizerConfig
from stretto.config.training_config import token_budget
from stretto.errors import LearnerError
from stretto.models.decoder_layers import RecomputingLayers
from stretto.models.forward import microbatches, output_head, response_hidden, response_tokens
from stretto.models.load import save_model
from stretto.models.logits import OutputHead, token_logprobs
from stretto.models.shards import TensorShard
from stretto.models.weights import bit_sums, fingerprint, with_own_structure
from stretto.training.optimizers import (
    decaying_names,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
)
from stretto.training.shard_files import STEP, Pieces, Stored
from stretto.types import Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

BLOCK = 1 << 20
"""Elements that a CPU adds at a time if types differ, because it converts them in a buffer. A GPU
converts them as it reads.
"""


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Enable gradient checkpointing, if configured, during forward and backward passes. Only the
    modules that recompute are in training mode. All others stay in evaluation mode, so that nothing
    random (dropout, noise on the inputs of a router, sampled experts) makes the trained policy
    differ from the one that sampled.
    """
    recomputing = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    try:
        try:
            for module in recomputing:
                module.training = True
            yield
        finally:
            model.eval()
    except BaseException:
        model.eval()  # an interrupt may have struck on the way there
        raise


def require_trained(name: str, model: nn.Module) -> None:
    """Raise LearnerError for a model without weights to train."""
    if not any(p.requires_grad for p in model.parameters()):
        raise LearnerError(
            f"{name} has nothing to train: all its weights are frozen. Leave some unfrozen "
            "(requires_grad)",
            "nothing-to-train",
        )


class _Snapshot(dict[str, Tensor]):
    """Copies of weights by name. A class, because a plain dict takes no weak references."""


class Snapshots:
    """Copies of weights, whose memory is reused."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._taken: list[tuple[list[Tensor], weakref.ref[_Snapshot]]] = []

    @torch.no_grad()
    def take(self) -> Mapping[str, Tensor]:
        """Return copies of the current weights, by name. Keep the mapping as long as the copies are
        needed: afterwards their memory is reused.
        """
        free = next((i for i, (_, snapshot) in enumerate(self._taken) if snapshot() is None), None)
        if free is None:
            tensors = [torch.empty_like(weight) for weight in self._weights.values()]
        else:
            tensors, _ = self._taken.pop(free)
        if tensors:
            torch._foreach_copy_(tensors, [*self._weights.values()])
        snapshot = _Snapshot(zip(self._weights, tensors, strict=True))
        self._taken.append((tensors, weakref.ref(snapshot)))
        return snapshot


PATIENCE_S = 30.0
"""How long shutdown waits for an optimizer step in progress, in seconds."""


class Gate:
    """Serializes in-place weight updates, and refuses new ones once closed. ``agree`` is called
    with whether this gate is open, and decides whether a change may start, so that ranks holding
    parts of one model change them together or not at all.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._closed = False
        self._broken = False
        self.agree: Callable[[bool], bool] = lambda is_open: is_open

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Change the weights in the body of a ``with`` statement. Raises LearnerError if closed.
        The gate remembers an error in the body, which may leave the weights half changed.
        """
        with self._lock:
            if not self.agree(not self._closed):
                raise LearnerError(
                    "the run has ended, and with it all updates; start another", "updates-ended"
                )
            self._broken = True
            yield
            self._broken = False

    def close(self, patience_s: float) -> bool:
        """Refuse all further changes. Return whether all changes so far completed."""
        free = self._lock.acquire(timeout=patience_s)
        self._closed = True
        if free:
            self._lock.release()
        return free and not self._broken


_GATES: weakref.WeakKeyDictionary[nn.Module, Gate] = weakref.WeakKeyDictionary()


def end_updates(model: nn.Module, patience_s: float = PATIENCE_S) -> bool:
    """End updates, from any thread. Return whether the weights are consistent."""
    gate = _GATES.get(model)
    return gate is None or gate.close(patience_s)


class WholeModel:
    """A model's uses by the learner, other than training."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._gate = _GATES[model] = Gate()  # replaces the gate of an earlier trainer

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @torch.no_grad()
    def logprobs(
        self, responses: Sequence[Response], mask: Tensor, temperature: float, budget: int = 0
    ) -> Tensor:
        """Return log-probs [B, T] of sampled tokens, 0 outside the mask, on the CPU in float32.
        ``budget`` limits a pass's tokens, padding included. 0 takes the device's default.
        """
        logprobs = torch.zeros(mask.shape)
        for rows in microbatches(responses, token_budget(budget, self.device)):
            flat = self._token_logprobs([responses[row] for row in rows], temperature)
            row_mask = mask[rows]
            logprobs[rows] = torch.zeros(row_mask.shape).masked_scatter(
                row_mask, flat.float().cpu()
            )
        return logprobs

    def _token_logprobs(self, responses: Sequence[Response], temperature: float) -> Tensor:
        """Return log-probs [N] of all sampled tokens, one response after another."""
        hidden = response_hidden(self.model, responses)
        targets = response_tokens(responses, hidden.device)
        return token_logprobs(self.head, hidden, targets, temperature)[0]

    @cached_property
    def head(self) -> OutputHead:
        """The output layer, checked by a small pass. That of shards is full only within a pass."""
        return output_head(self.model)

    def fingerprint(self) -> str:
        return fingerprint(self.model.named_parameters())

    def sums(self) -> dict[str, int]:
        """Return :func:`bit_sums` of the trained parameters."""
        return bit_sums({n: p for n, p in self.model.named_parameters() if p.requires_grad})

    def gathered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a snapshot's full tensors, on the first rank's CPU. A collective of all ranks."""
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    def pieces(self, tensors: Mapping[str, Tensor]) -> Pieces:
        return tensors

    def from_pieces(self, stored: Mapping[str, Stored]) -> Mapping[str, Tensor]:
        return {name: tensor.read().to(self.device) for name, tensor in stored.items()}

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        save_model(self.model, tokenizer, folder)

    def copied(self, weights: Mapping[str, Tensor] | None = None) -> nn.Module | None:
        """Copy the model with its trained weights or a snapshot's, to save it during training.
        Returns ``None`` on all ranks but the first. A collective. Frozen weights are shared. Copies
        are in host memory, except for adapters, which are merged into the weights on these weights'
        device.
        """
        copies = dict[int, Tensor]()
        adapters = hasattr(self.model, "merge_and_unload")
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                weight = p.detach() if weights is None else weights[name]
                home = p.device if adapters else "cpu"
                copies[id(p)] = nn.Parameter(weight.to(home, copy=True))
        return with_own_structure(self.model, copies)

    def end_updates(self) -> bool:
        return end_updates(self.model)


@dataclass(frozen=True, slots=True)
class LearningRate:
    """A model's learning rate schedule: peak, number of updates, and warm-up updates."""

    peak: float
    updates: int
    warmup: int = 0


class TrainedModel(WholeModel):
    """A model, the masters of its weights, and AdamW on the masters.

    A bfloat16 weight has a float32 master: gradients of all micro-batches are summed in float32,
    AdamW updates the master, and the rounded result is copied back. Otherwise an update of relative
    size 1e-3 or less would be rounded away. A float32 weight is its own master.

    ``requires_grad`` marks the weights to train. Raises LearnerError if there are none, unless
    ``may_be_frozen``, as in a stage of a partly frozen model. ``before_update`` is called before
    the tensors that only updates need are used. If other processes update some of the weights, they
    have the masters and moments of these.
    """

    def __init__(
        self,
        model: nn.Module,
        rate: LearningRate,
        config: OptimizerConfig,
        *,
        may_be_frozen: bool = False,
    ) -> None:
        from transformers import get_scheduler

        super().__init__(model)
        if not may_be_frozen:
            require_trained(type(model).__name__, model)
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._names, self._weights = list(trainable), list(trainable.values())
        self._hooks: list[RemovableHandle] = []
        self._snapshots = Snapshots(trainable)
        self._recomputing = RecomputingLayers(model)
        self._masters = [self._make_master(name, p) for name, p in trainable.items()]
        self._owned = [self._owns(name) for name in trainable]
        self._clip = config.grad_clip or math.inf
        decaying = decaying_names(model) if config.weight_decay else ()
        owned = dict(self._own_masters())
        self._decaying: list[Tensor] = [m for name, m in owned.items() if name in decaying]
        self._weight_decay = config.weight_decay
        self._optimizer = make_optimizer([*owned.values()], rate.peak, config)
        kind = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
        self.before_update: Callable[[], None] = lambda: None
        self._schedule = get_scheduler(kind, self._optimizer, rate.warmup, rate.updates)

    def _owns(self, name: str) -> bool:
        """Return whether this process updates a weight, by its name in ``model``."""
        return True

    def _make_master(self, name: str, weight: nn.Parameter) -> nn.Parameter:
        if weight.dtype in (torch.float32, torch.float64):
            return weight
        master = nn.Parameter(weight.detach().float())
        master.grad = torch.zeros_like(master)

        def collect(weight: Tensor) -> None:
            assert master.grad is not None
            assert weight.grad is not None
            totals, parts = master.grad.view(-1), weight.grad.reshape(-1)
            block = BLOCK if totals.device.type == "cpu" else max(len(totals), 1)
            for total, part in zip(totals.split(block), parts.split(block), strict=True):
                total.add_(part)
            weight.grad = None

        self._hooks.append(weight.register_post_accumulate_grad_hook(collect))
        return master

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return float(self._optimizer.param_groups[0]["lr"])

    @contextmanager
    def training(self) -> Iterator[None]:
        with training_mode(self.model), self._recomputing:
            yield

    def compute(self, work: Callable[[], T]) -> T:
        """Compute with the full weights, a collective with shards. Gradients flow back from the
        returned tensors, alone or in tuples.
        """
        return work()

    def before_pass(self, *, last: bool) -> None:
        """Prepare for a pass of a mini-batch. Gradients must be complete after the ``last`` one."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Return gradients since the last update by name. They may be changed in place."""
        pairs = zip(self._names, self._masters, strict=True)
        return {name: master.grad for name, master in pairs if master.grad is not None}

    def discard(self) -> None:
        if gradients := self._gradient_sums():
            torch._foreach_zero_(gradients)

    def scale_gradients(self, factor: float) -> None:
        if gradients := self._gradient_sums():
            torch._foreach_mul_(gradients, factor)

    def _gradient_sums(self) -> list[Tensor]:
        """Return the tensors to which passes add gradients."""
        return [*self.gradients().values()]

    def update(self, norm: float | None = None, scale: float = 1.0) -> float:
        """Take an optimizer step on the gradients since the last one and return their norm, which
        must be given if this model is one of several parts. ``scale`` multiplies the learning rate
        of this step. Raises LearnerError, with the weights unchanged, if the norm is not finite.
        """
        self.before_update()
        if norm is None:
            norm = float(nn.utils.clip_grad_norm_(self._masters, self._clip))
        else:
            total = torch.tensor(norm, device=self.device)
            nn.utils.clip_grads_with_norm_(self._masters, self._clip, total)
        if not math.isfinite(norm):
            raise LearnerError(
                f"the gradient norm is {norm}; stopping before it reaches the weights. Lower "
                "training.lr, or look at the rewards and ratios of the last steps",
                "gradient-not-finite",
            )
        with self._gate.passing():
            for group in self._optimizer.param_groups:
                group["lr"] *= scale  # until the schedule sets the next one
            if self._decaying:  # before the step, like AdamW (Loshchilov and Hutter 2019)
                with torch.no_grad():
                    torch._foreach_mul_(self._decaying, 1 - self.lr * self._weight_decay)
            self._optimizer.step()
            self._copy_back()
        self._schedule.step()
        self.discard()
        return norm

    def of_updates(self) -> list[Tensor]:
        """Return moments and masters, but not gradients, because passes add to those."""
        states = (self._optimizer.state.get(master, {}) for master in self._masters)
        moments = [value for state in states for key, value in state.items() if key != STEP]
        return [*(master for _, master in self._to_copy_back()), *moments]

    def skip(self) -> None:
        """Skip an update: only the learning rate schedule advances."""
        with warnings.catch_warnings():
            # torch warns if a schedule steps before the first update, but here none was due.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler")
            self._schedule.step()

    def close(self) -> None:
        """Remove the hooks and gradients, so that another trainer can take the model."""
        for hook in self._hooks:
            hook.remove()
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def _copy_back(self) -> None:
        """Round own masters to the weights' type."""
        if rounded := self._to_copy_back():
            torch._foreach_copy_([w for w, _ in rounded], [m for _, m in rounded])

    def _to_copy_back(self) -> list[tuple[Tensor, Tensor]]:
        pairs = compress(zip(self._weights, self._masters, strict=True), self._owned)
        return [(w, m) for w, m in pairs if w is not m]

    def _own_masters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return compress(zip(self._names, self._masters, strict=True), self._owned)

    def snapshot(self) -> Mapping[str, Tensor]:
        """Return copies of the trained weights by name, or of this rank's parts of them. See
        :meth:`Snapshots.take`.
        """
        return self._snapshots.take()

    def state_dict(self) -> dict[str, Any]:
        """Return masters, AdamW's moments and the schedule's position, or this rank's pieces.
        Tensors share memory with those under training, and stay in place if those are offloaded.
        """
        named_masters = zip(self._names, self._masters, strict=True)
        own_names = [name for name, _ in self._own_masters()]
        moments = optimizer_state(self._optimizer, own_names)
        return {
            "masters": {name: self._for_files(name, m.detach()) for name, m in named_masters},
            "moments": _converted(moments, self._for_files),
            "schedule": {"last_epoch": self._schedule.last_epoch},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a full model, whose tensors may be in files."""
        masters, saved = dict(self._own_masters()), state["moments"]
        for name, master in masters.items():
            master.copy_(self._from_files(name, state["masters"][name]))
        own_moments = {name: saved[name] for name in masters if name in saved}
        moments = _converted(own_moments, self._from_files)
        load_optimizer_state(self._optimizer, [*masters], moments)
        self._schedule.last_epoch = state["schedule"]["last_epoch"] - 1
        self.skip()  # sets the learning rate of these settings
        self._copy_back()

    def _for_files(self, name: str, tensor: Tensor) -> Tensor | TensorShard:
        return tensor.detach()

    def _from_files(self, name: str, value: Tensor | Stored) -> Tensor:
        return value.read() if isinstance(value, Stored) else value


def _converted(
    moments: Mapping[str, Mapping[str, Any]], convert: Callable[[str, Any], Any]
) -> dict[str, dict[str, Any]]:
    return {
        name: {key: v if key == STEP else convert(name, v) for key, v in entry.items()}
        for name, entry in moments.items()
    }
