"""A model under training: fp32 master weights behind a model that computes in its own type."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stretto.config import OptimizerConfig
from stretto.config.training import token_budget
from stretto.errors import LearnerError
from stretto.models.forward import microbatches, output_head, response_hidden, response_tokens
from stretto.models.load import save_model
from stretto.models.logits import OutputHead, token_logprobs
from stretto.models.weights import fingerprint
from stretto.training.shard_files import STEP, in_memory
from stretto.types import Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK = 1 << 20
"""Elements added at a time where types differ: torch converts them in a buffer of its own."""


def _add_into(total: Tensor, part: Tensor) -> None:
    blocks = zip(total.view(-1).split(BLOCK), part.reshape(-1).split(BLOCK), strict=True)
    for a, b in blocks:
        a.add_(b)


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Turn gradient checkpointing on, where asked for, during forward and backward passes.

    Only the modules that recompute are in training mode. All others stay in evaluation mode, so
    that nothing random (dropout, noise on the inputs of a router, sampled experts) makes the policy
    that is trained another than the one that sampled. Outside of the ``with`` statement the same
    module generates, with a cache.
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
    """Refuse gradients that would spoil the weights.

    Raises:
        LearnerError: their norm is not finite.
    """
    if not math.isfinite(norm):
        raise LearnerError(
            f"the gradient norm is {norm}; stopping before it reaches the weights. Lower "
            "training.lr, or look at the rewards and ratios of the last steps"
        )


class _Snapshot(dict[str, Tensor]):
    """Copies of weights by name; a class of its own, as a plain dict takes no weak references."""


class Snapshots:
    """Copies of weights, whose memory is used again.

    Args:
        weights: by name.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._taken: list[tuple[list[Tensor], weakref.ref[_Snapshot]]] = []

    @torch.no_grad()
    def take(self) -> Mapping[str, Tensor]:
        """Copies of the weights as they are now, by name.

        The memory of an earlier snapshot is written over once nobody holds its mapping any more,
        so hold the mapping for as long as its tensors are read.
        """
        free = next((s for s in self._taken if s[1]() is None), None)
        if free:
            self._taken = [taken for taken in self._taken if taken is not free]
        tensors = free[0] if free else [torch.empty_like(w) for w in self._weights.values()]
        if tensors:
            torch._foreach_copy_(tensors, [*self._weights.values()])
        taken = _Snapshot(zip(self._weights, tensors, strict=True))
        self._taken.append((tensors, weakref.ref(taken)))
        return taken


PATIENCE_S = 30.0
"""Seconds that the end of a run waits for an update that is under way."""


class Gate:
    """The gate that all changes of a model's weights in place go through, until it is closed.

    Attributes:
        agree: called with whether this gate is open, returns whether a change may begin; for
            ranks that hold parts of one model, of which all change or none.
    """

    def __init__(self) -> None:
        self._lock, self._closed, self._broken = Lock(), False, False
        self.agree: Callable[[bool], bool] = lambda is_open: is_open

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Change the weights in the body of a ``with`` statement.

        An error within it leaves them neither old nor new; the gate remembers that.

        Raises:
            LearnerError: the gate is closed.
        """
        with self._lock:
            if not self.agree(not self._closed):
                raise LearnerError("the run has ended, and with it all updates; start another")
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


def new_gate(model: nn.Module) -> Gate:
    """Make the gate for the trainer that trains the model from now on."""
    gate = _GATES[model] = Gate()
    return gate


def end_updates(model: nn.Module, patience_s: float = PATIENCE_S) -> bool:
    """Let no update of a model begin any more, and wait for one under way; from any thread.

    Args:
        model: that is trained.
        patience_s: seconds to wait for that update.

    Returns:
        Whether the weights are whole, and stay as they are.
    """
    gate = _GATES.get(model)
    return gate is None or gate.close(patience_s)


class WholeModel:
    """A model as the learner uses it, besides training it.

    Args:
        model: with or without adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self._gate = model, new_gate(model)

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in."""
        return next(self.model.parameters()).dtype

    @torch.no_grad()
    def logprobs(
        self, responses: Sequence[Response], mask: Tensor, temperature: float, budget: int = 0
    ) -> Tensor:
        """Log-probs [B, T] of sampled tokens, 0 outside the mask, on the CPU in float32.

        Args:
            mask: [B, T] bool, true where there is a sampled token.
            budget: tokens of a forward pass, padding counted; 0 takes what suits the device.
        """
        logprobs = torch.zeros(mask.shape)
        for rows in microbatches(responses, token_budget(budget, self.device)):
            part = [responses[row] for row in rows]
            hidden = response_hidden(self.model, part)
            targets = response_tokens(part, hidden.device)
            flat = token_logprobs(self._head, hidden, targets, temperature)[0].float().cpu()
            here = mask[rows]
            logprobs[rows] = torch.zeros(here.shape).masked_scatter(here, flat)
        return logprobs

    @cached_property
    def _head(self) -> OutputHead:
        return output_head(self.model)  # which checks it with a small pass

    def fingerprint(self) -> str:
        """A short hash of all parameters, frozen ones too."""
        return fingerprint(self.model.named_parameters())

    def gathered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a snapshot, which is whole."""
        return tensors

    def divided(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return whole tensors, all of which are this process's."""
        return tensors

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write model and tokenizer in Hugging Face format, whole or not at all."""
        save_model(self.model, tokenizer, folder)

    def end_updates(self) -> bool:
        """End the updates; return whether the weights are whole, and stay as they are."""
        return end_updates(self.model)


@dataclass(frozen=True, slots=True)
class Course:
    """The learning rate of a model over a run.

    Attributes:
        lr: its peak.
        updates: over which the schedule runs.
        warmup: updates over which it rises.
    """

    lr: float
    updates: int
    warmup: int


class TrainedModel(WholeModel):
    """A model, the masters of its weights, and AdamW on the masters.

    A weight kept in bfloat16 has a float32 master: gradients of all micro-batches are summed in
    float32, AdamW moves the master, and the rounded result is copied back. Without it an update of
    relative size 1e-3 or less would be rounded away. A float32 weight is its own master.

    State: masters, AdamW's moments, the schedule's position. Derived: the weights in the model.

    Attributes:
        before_update: called before the tensors that only updates need are used.

    Args:
        model: its weights say by ``requires_grad`` whether they are trained.
        updates: over which the learning rate's schedule runs.
        warmup: updates over which it rises.
        may_be_frozen: whether there may be nothing to train, as in a stage of a model that is
            frozen in part: then only the learning rate's schedule moves.

    Raises:
        LearnerError: there is nothing to train.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        config: OptimizerConfig,
        *,
        updates: int,
        warmup: int,
        may_be_frozen: bool = False,
    ) -> None:
        from transformers import get_scheduler

        super().__init__(model)
        self._clip = config.grad_clip
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._names = [n for n, _ in named]
        self._weights = [p for _, p in named]
        if not named and not may_be_frozen:
            raise LearnerError(
                f"{type(model).__name__} has nothing to train: all its weights are frozen. Leave "
                "some unfrozen (requires_grad)"
            )
        self._hooks: list[RemovableHandle] = []
        self._snapshots = Snapshots(dict(named))
        self._masters = [self._make_master(p) for p in self._weights]
        self._optimizer = torch.optim.AdamW(
            [{"params": self._masters}],  # a group, as a list may be empty only there
            lr=lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        kind = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
        self.before_update: Callable[[], None] = lambda: None
        self._schedule = get_scheduler(
            kind, self._optimizer, num_warmup_steps=warmup, num_training_steps=updates
        )

    def _make_master(self, weight: nn.Parameter) -> nn.Parameter:
        if weight.dtype in (torch.float32, torch.float64):
            return weight
        master = nn.Parameter(weight.detach().float())
        master.grad = torch.zeros_like(master)

        def collect(weight: Tensor) -> None:
            assert master.grad is not None
            assert weight.grad is not None
            _add_into(master.grad, weight.grad)
            weight.grad = None

        self._hooks.append(weight.register_post_accumulate_grad_hook(collect))
        return master

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return float(self._optimizer.param_groups[0]["lr"])

    def training(self) -> AbstractContextManager[None]:
        """Prepare for forward and backward passes; see :func:`training_mode`."""
        return training_mode(self.model)

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients collected since the last update, by the model's parameter names.

        They may be changed in place. A weight that no pass has reached has none.
        """
        pairs = zip(self._names, self._masters, strict=True)
        return {name: master.grad for name, master in pairs if master.grad is not None}

    def discard(self) -> None:
        """Forget the gradients collected since the last update."""
        self._optimizer.zero_grad(set_to_none=False)

    def update(self, norm: float | None = None) -> float:
        """Take an optimizer step on the gradients collected since the last; return their norm.

        Args:
            norm: of the gradients of all stages, where the model is one stage of several.

        Raises:
            LearnerError: the norm is not finite; the weights are left as they were.
        """
        self.before_update()
        if norm is None:
            norm = float(nn.utils.clip_grad_norm_(self._masters, self._clip or math.inf))
        else:
            total = torch.tensor(norm, device=self.device)
            nn.utils.clip_grads_with_norm_(self._masters, self._clip or math.inf, total)
        require_finite_norm(norm)
        with self._gate.passing():
            self._optimizer.step()
            self._copy_back()
        self._schedule.step()
        self._optimizer.zero_grad(set_to_none=False)
        return norm

    def of_updates(self) -> list[Tensor]:
        """Return the tensors that only updates and states need: moments, and masters of copies.

        Gradients are not among them: passes add to these.
        """
        moments = [
            value
            for master in self._masters
            for key, value in self._optimizer.state.get(master, {}).items()
            if isinstance(value, Tensor) and key != STEP
        ]
        return [*(master for _, master in self._to_copy_back()), *moments]

    def skip(self) -> None:
        """Let an update go by without a gradient: the learning rate moves on, nothing else does."""
        with warnings.catch_warnings():
            # torch warns of a schedule that moves before the first update; here none was due.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler")
            self._schedule.step()

    def snapshot(self) -> Mapping[str, Tensor]:
        """Copies of the trained weights as they are now; see :meth:`Snapshots.take`."""
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
        """Return masters, AdamW's moments and the schedule's position.

        Tensors share memory with what is trained, and stay when that is put elsewhere.
        """
        masters = (m.detach() for m in self._masters)
        optimizer = self._optimizer.state_dict()
        moments = {
            number: {k: v.detach() if isinstance(v, Tensor) else v for k, v in held.items()}
            for number, held in optimizer["state"].items()
        }
        return {
            "masters": dict(zip(self._names, masters, strict=True)),
            "optimizer": {**optimizer, "state": moments},
            "schedule": self._schedule.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; tensors may be in files, too."""
        state = in_memory(state)
        for name, master in zip(self._names, self._masters, strict=True):
            master.copy_(state["masters"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self._copy_back()
