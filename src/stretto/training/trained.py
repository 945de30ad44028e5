"""A model under training: fp32 master weights behind a model that computes in its own type."""

from __future__ import annotations

import math
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stretto.config import OptimizerConfig
from stretto.config.training import token_budget
from stretto.errors import LearnerError
from stretto.models.forward import microbatches, output_head, response_hidden, response_tokens
from stretto.models.load import save_model
from stretto.models.logits import OutputHead, token_logprobs
from stretto.models.shards import TensorShard
from stretto.models.weights import fingerprint, with_own_structure
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
"""Elements that a CPU adds at a time where types differ: it converts them in a buffer; a GPU does
so as it reads."""


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Turn gradient checkpointing on, where asked for, during forward and backward passes.

    Only the modules that recompute are in training mode. All others stay in evaluation mode, so
    that nothing random (dropout, noise on the inputs of a router, sampled experts) makes the policy
    that is trained another than the one that sampled.
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
        model.eval()  # an interruption may have struck on the way there
        raise


def require_finite_norm(norm: float) -> None:
    """Refuse gradients that would spoil the weights; raises LearnerError."""
    if not math.isfinite(norm):
        raise LearnerError(
            f"the gradient norm is {norm}; stopping before it reaches the weights. Lower "
            "training.lr, or look at the rewards and ratios of the last steps",
            "gradient-not-finite",
        )


def require_trained(name: str, model: nn.Module) -> None:
    """Refuse a model without weights to train; raises LearnerError."""
    if not any(p.requires_grad for p in model.parameters()):
        raise LearnerError(
            f"{name} has nothing to train: all its weights are frozen. Leave some unfrozen "
            "(requires_grad)",
            "nothing-to-train",
        )


class _Snapshot(dict[str, Tensor]):
    """Copies of weights by name; a class, as a plain dict takes no weak references."""


class Snapshots:
    """Copies of weights, whose memory is used again."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._taken: list[tuple[list[Tensor], weakref.ref[_Snapshot]]] = []

    @torch.no_grad()
    def take(self) -> Mapping[str, Tensor]:
        """Return copies of the weights as they are now, by name; good as long as the mapping is
        held, as the memory is used again afterwards.
        """
        free = next((i for i, (_, taken) in enumerate(self._taken) if taken() is None), None)
        if free is None:
            tensors = [torch.empty_like(weight) for weight in self._weights.values()]
        else:
            tensors, _ = self._taken.pop(free)
        if tensors:
            torch._foreach_copy_(tensors, [*self._weights.values()])
        taken = _Snapshot(zip(self._weights, tensors, strict=True))
        self._taken.append((tensors, weakref.ref(taken)))
        return taken


PATIENCE_S = 30.0
"""Seconds that the end of a run waits for an update that is under way."""


class Gate:
    """The gate that all changes of a model's weights in place go through, until it is closed.

    A change may begin where ``agree`` says so, told whether this gate is open: of ranks that hold
    parts of one model, all change or none.
    """

    def __init__(self) -> None:
        self._lock, self._closed, self._broken = Lock(), False, False
        self.agree: Callable[[bool], bool] = lambda is_open: is_open

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Change the weights in the body of a ``with`` statement; raises LearnerError if the gate
        is closed. It remembers an error, which leaves them neither old nor new.
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
        """Let nothing through any more; return whether all changes so far are whole."""
        free = self._lock.acquire(timeout=patience_s)
        self._closed = True
        if free:
            self._lock.release()
        return free and not self._broken


_GATES: weakref.WeakKeyDictionary[nn.Module, Gate] = weakref.WeakKeyDictionary()


def end_updates(model: nn.Module, patience_s: float = PATIENCE_S) -> bool:
    """End updates, from any thread. Return whether the weights are whole."""
    gate = _GATES.get(model)
    return gate is None or gate.close(patience_s)


class WholeModel:
    """A model as the learner uses it, besides training it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._gate = _GATES[model] = Gate()  # for the trainer that trains it from now on

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
        """Return log-probs [B, T] of sampled tokens, 0 outside the mask, on the CPU in float32. The
        budget is of a pass's tokens, padding counted; 0 takes what suits the device.
        """
        logprobs = torch.zeros(mask.shape)
        for rows in microbatches(responses, token_budget(budget, self.device)):
            flat = self._token_logprobs([responses[row] for row in rows], temperature)
            here = mask[rows]
            logprobs[rows] = torch.zeros(here.shape).masked_scatter(here, flat.float().cpu())
        return logprobs

    def _token_logprobs(self, responses: Sequence[Response], temperature: float) -> Tensor:
        """Return log-probs [N] of all sampled tokens, one response after another."""
        hidden = response_hidden(self.model, responses)
        targets = response_tokens(responses, hidden.device)
        return token_logprobs(self.head, hidden, targets, temperature)[0]

    @cached_property
    def head(self) -> OutputHead:
        """The output layer, checked with a small pass; of shards, whole within a pass alone."""
        return output_head(self.model)

    def fingerprint(self) -> str:
        return fingerprint(self.model.named_parameters())

    def gathered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the whole of a snapshot, on the first rank's CPU; a collective of all ranks."""
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    def pieces(self, tensors: Mapping[str, Tensor]) -> Pieces:
        return tensors

    def from_pieces(self, stored: Mapping[str, Stored]) -> Mapping[str, Tensor]:
        return {name: tensor.read().to(self.device) for name, tensor in stored.items()}

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        save_model(self.model, tokenizer, folder)

    def copied(self, weights: Mapping[str, Tensor] | None = None) -> nn.Module | None:
        """Return a copy of the model, with its trained weights or those of a snapshot, to be saved
        while training goes on; ``None`` on all ranks but the first. A collective.

        Frozen weights are shared. Copies are in the host's memory, but for adapters, which are
        merged into weights where these are.
        """
        model, found = with_own_structure(self.model), dict[int, nn.Parameter]()
        adapters = hasattr(self.model, "merge_and_unload")
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                weight = p.detach() if weights is None else weights[name]
                home = p.device if adapters else "cpu"
                found[id(p)] = nn.Parameter(weight.to(home, copy=True))
        for module in model.modules():
            own = {name: found.get(id(p)) for name, p in module._parameters.items()}
            module._parameters.update({name: p for name, p in own.items() if p is not None})
        return model

    def end_updates(self) -> bool:
        return end_updates(self.model)


class Trained(WholeModel, ABC):
    """A model under training, as the learner sees it, wherever it is."""

    @property
    @abstractmethod
    def lr(self) -> float:
        """The learning rate of the next update."""

    @abstractmethod
    def update(self) -> float:
        """Take an optimizer step on the gradients collected since the last; return their norm.
        Raises LearnerError if that is not finite; the weights are left as they were.
        """

    @abstractmethod
    def skip(self) -> None:
        """Let an update go by without a gradient: the learning rate moves on, nothing else does."""

    @abstractmethod
    def snapshot(self) -> Mapping[str, Tensor]:
        """Return copies of the trained weights by name, or of this rank's parts; see
        :meth:`Snapshots.take`.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return masters, AdamW's moments and the schedule's position, or this rank's pieces of
        them. Tensors share memory with what is trained, and stay when that is put elsewhere.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a whole model, whose tensors may be in files."""


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The learning rate of a model: its peak, the run's updates, and those over which it rises."""

    peak: float
    updates: int
    warmup: int = 0


class TrainedModel(Trained):
    """A model, the masters of its weights, and AdamW on the masters.

    A weight kept in bfloat16 has a float32 master: gradients of all micro-batches are summed in
    float32, AdamW moves the master, and the rounded result is copied back. Without it an update of
    relative size 1e-3 or less would be rounded away. A float32 weight is its own master.

    Weights say by ``requires_grad`` whether they are trained. Raises LearnerError if none are,
    unless that may be, as in a stage of a model that is frozen in part. ``before_update`` is called
    before the tensors that only updates need are used.
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
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._names, self._weights = list(named), list(named.values())
        self._hooks: list[RemovableHandle] = []
        self._snapshots = Snapshots(named)
        self._masters = [self._make_master(p) for p in self._weights]
        self._clip = config.grad_clip or math.inf
        decaying = decaying_names(model) if config.weight_decay else ()
        named_masters = zip(self._names, self._masters, strict=True)
        self._decaying: list[Tensor] = [
            master for name, master in named_masters if name in decaying
        ]
        self._weight_decay = config.weight_decay
        self._optimizer = make_optimizer(self._masters, rate.peak, config)
        kind = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
        self.before_update: Callable[[], None] = lambda: None
        self._schedule = get_scheduler(kind, self._optimizer, rate.warmup, rate.updates)

    def _make_master(self, weight: nn.Parameter) -> nn.Parameter:
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
        return float(self._optimizer.param_groups[0]["lr"])

    def training(self) -> AbstractContextManager[None]:
        return training_mode(self.model)

    def compute(self, work: Callable[[], T]) -> T:
        """Compute with the whole weights, of shards as a collective; gradients of the tensors that
        are returned, alone or in tuples, reach what is trained.
        """
        return work()

    def before_pass(self, *, last: bool) -> None:
        """Prepare for a pass of a mini-batch: gradients are to be whole after its ``last`` one."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Return gradients since the last update by name, to be changed in place."""
        pairs = zip(self._names, self._masters, strict=True)
        return {name: master.grad for name, master in pairs if master.grad is not None}

    def discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=False)

    def update(self, norm: float | None = None) -> float:
        """Take an optimizer step; the norm is given where this model is a part of several."""
        self.before_update()
        if norm is None:
            norm = float(nn.utils.clip_grad_norm_(self._masters, self._clip))
        else:
            total = torch.tensor(norm, device=self.device)
            nn.utils.clip_grads_with_norm_(self._masters, self._clip, total)
        require_finite_norm(norm)
        with self._gate.passing():
            if self._decaying:  # as AdamW does before its update (Loshchilov and Hutter 2019)
                with torch.no_grad():
                    torch._foreach_mul_(self._decaying, 1 - self.lr * self._weight_decay)
            self._optimizer.step()
            self._copy_back()
        self._schedule.step()
        self.discard()
        return norm

    def of_updates(self) -> list[Tensor]:
        """Return moments and masters, but not gradients, to which passes add."""
        states = (self._optimizer.state.get(master, {}) for master in self._masters)
        moments = [value for state in states for key, value in state.items() if key != STEP]
        return [*(master for _, master in self._to_copy_back()), *moments]

    def skip(self) -> None:
        with warnings.catch_warnings():
            # torch warns of a schedule that moves before the first update; here none was due.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler")
            self._schedule.step()

    def snapshot(self) -> Mapping[str, Tensor]:
        return self._snapshots.take()

    def close(self) -> None:
        """Leave the model to another trainer: no hooks of this one, and no gradients."""
        for hook in self._hooks:
            hook.remove()
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def _copy_back(self) -> None:
        if rounded := self._to_copy_back():
            torch._foreach_copy_([w for w, _ in rounded], [m for _, m in rounded])

    def _to_copy_back(self) -> list[tuple[Tensor, Tensor]]:
        pairs = zip(self._weights, self._masters, strict=True)
        return [(w, m) for w, m in pairs if w is not m]

    def state_dict(self) -> dict[str, Any]:
        named = zip(self._names, self._masters, strict=True)
        return {
            "masters": {name: self._for_files(name, m.detach()) for name, m in named},
            "optimizer": self._with_moments(optimizer_state(self._optimizer), self._for_files),
            "schedule": self._schedule.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, master in zip(self._names, self._masters, strict=True):
            master.copy_(self._from_files(name, state["masters"][name]))
        optimizer = self._with_moments(state["optimizer"], self._from_files)
        load_optimizer_state(self._optimizer, optimizer)
        self._schedule.load_state_dict(state["schedule"])
        self._copy_back()

    def _with_moments(
        self, optimizer: Mapping[str, Any], change: Callable[[str, Any], Any]
    ) -> dict[str, Any]:
        """Return AdamW's state with the moments, tensors like the parameter of a name, changed."""
        moments = {
            number: {k: v if k == STEP else change(self._names[number], v) for k, v in own.items()}
            for number, own in optimizer["state"].items()
        }
        return {**optimizer, "state": moments}

    def _for_files(self, name: str, tensor: Tensor) -> Tensor | TensorShard:
        return tensor.detach()

    def _from_files(self, name: str, value: Tensor | Stored) -> Tensor:
        return value.read() if isinstance(value, Stored) else value
