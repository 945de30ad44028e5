"""Checks, fingerprints and loading of weights."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from stretto.errors import EngineError, ModelError
from stretto.models.mapped import final, final_dtype
from stretto.models.pieces import Box, Layout, Part, Whole, held_elements, wholes_of
from stretto.models.tensor_parallel import slices_of
from stretto.types import WeightsRef

SAMPLES = 256
"""Elements looked at in each tensor, evenly spread."""


TRAINED_TYPES = (torch.float32, torch.bfloat16)
"""Types in which models are trained; the masters of weights are float32."""


@torch.no_grad()
def require_finite(model: nn.Module, what: str) -> None:
    """Refuse weights that are NaN or infinite.

    Args:
        what: it is, as the subject of a message.

    Raises:
        ModelError: a weight is NaN or infinite.
    """
    bad = [
        name
        for name, weight in model.named_parameters()
        if weight.is_floating_point()
        and weight.numel()
        and not all(math.isfinite(bound) for bound in map(Tensor.item, weight.aminmax()))
    ]
    if bad:
        raise ModelError(
            f"{what} has weights that are NaN or infinite, in {len(bad)} tensors ({bad[0]} is the "
            "first): it was broken where it was trained or saved. Load an earlier checkpoint"
        )


def require_trainable(model: nn.Module, what: str) -> None:
    """Refuse weights of a type that is not trained here.

    Args:
        what: it is, as the subject of a message.

    Raises:
        ModelError: a weight is neither float32 nor bfloat16.
    """
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.dtype not in TRAINED_TYPES:
            raise ModelError(
                f"{what} has weights of {weight.dtype} ({name}), and models are trained in float32 "
                "or bfloat16, with float32 masters; load it with dtype=torch.bfloat16"
            )


class Spread:
    """The fingerprint of tensors that come one by one, whatever their order.

    Args:
        names: of all tensors, in the order in which the fingerprint has them; others come after.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._taken: dict[str, tuple[str, Tensor] | None] = dict.fromkeys(names)

    @torch.no_grad()
    def take(self, name: str, tensor: Tensor) -> None:
        """Look at a tensor; one of a name that has come before takes its place."""
        flat = final(tensor).reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]
        head = f"{name}{tuple(tensor.shape)}{final_dtype(tensor)}"
        self._taken[name] = head, sample.to(torch.float32, copy=True)  # a view keeps all of it

    def mark(self) -> str:
        """Return the fingerprint of the newest tensors of all names that have come."""
        taken = [found for found in self._taken.values() if found]
        device = taken[-1][1].device if taken else None
        return _hash([head for head, _ in taken], [sample.to(device) for _, sample in taken])


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A short hash of names, shapes, types and a spread of elements of each tensor, bit for bit.

    Whoever holds the same weights finds the same; it is a proof that a hand-over happened, not a
    defence against a forger.
    """
    spread = Spread()
    for name, tensor in tensors:
        spread.take(name, tensor)
    return spread.mark()


@torch.no_grad()
def fingerprint_of_parts(
    wholes: Mapping[str, Whole],
    parts: Mapping[str, Tensor],
    boxes: Mapping[str, Box],
    add_up: Callable[[Tensor], Tensor],
) -> str:
    """The :func:`fingerprint` of a model of which each of several ranks holds parts.

    Args:
        parts: of them that this rank holds, by name.
        boxes: the place of each part that no rank before it holds.
        add_up: adds up the ranks' tensors. A collective.
    """
    heads, spread = list[str](), list[Tensor]()
    for name, whole in wholes.items():
        heads.append(f"{name}{whole.shape}{whole.dtype}")
        count = math.prod(whole.shape)
        places = np.arange(0, count, max(1, count // SAMPLES), dtype=np.int64)[:SAMPLES]
        part = parts[name].detach()
        sample = torch.zeros(len(places), device=part.device)
        if name in boxes:
            numbers, at = held_elements(places, whole.shape, boxes[name])
            own = part.reshape(-1)[torch.from_numpy(at).to(part.device)]
            sample[torch.from_numpy(numbers).to(part.device)] = own.to(whole.dtype).float()
        spread.append(sample)
    return _hash(heads, [add_up(torch.cat(spread))])


def fingerprint_of(model: nn.Module) -> str:
    """The :func:`fingerprint` of all parameters of a model; a collective where it is in slices."""
    named = dict(model.named_parameters())
    slices, dims = slices_of(model)
    if slices is None:
        return fingerprint(named.items())
    wholes = wholes_of(model, dims)
    held = {name: replace(whole, by_rows=False) for name, whole in wholes.items()}
    boxes = Layout(tp=slices.size).own(held, slices.rank)
    return fingerprint_of_parts(wholes, named, boxes, slices.sum_)


def _hash(heads: Sequence[str], spread: Sequence[Tensor]) -> str:
    digest = hashlib.sha256("".join(heads).encode())
    if spread:
        digest.update(torch.cat(list(spread)).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def copy_into(module: nn.Module, tensors: Mapping[str, Tensor | Part]) -> None:
    """Copy tensors, or parts of them, into the module's parameters of the same names."""
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        if isinstance(tensor, Part):
            parameters[name][tensor.to].copy_(tensor.tensor)
        else:
            parameters[name].copy_(tensor)


@torch.no_grad()
def load_weights(
    module: nn.Module, ref: WeightsRef, tensors: Mapping[str, Tensor | Part], who: str
) -> None:
    """Copy the tensors that were handed over into a module, and prove that it holds them.

    Args:
        module: the receiving copy; tensors go to its parameters of the same names.
        ref: their ticket, from the learner.
        tensors: by parameter name; none where learner and module share memory.
        who: the receiver, as the subject of a message.

    Raises:
        EngineError: a tensor has no parameter to go to, or the module's fingerprint is then not the
            one handed over.
    """
    known = {name for name, _ in module.named_parameters()}
    if unknown := set(tensors) - known:
        raise EngineError(
            f"version {ref.version} brings '{min(unknown)}', which the model of {who} does not "
            f"have; learner and {who} must hold the same model"
        )
    copy_into(module, tensors)
    require_fingerprint(ref, fingerprint_of(module), who)


def require_fingerprint(ref: WeightsRef, found: str, who: str) -> None:
    """Refuse to go on with other weights than were handed over.

    Args:
        ref: their ticket, from the learner.
        found: the fingerprint of what the receiver holds.
        who: the receiver, as the subject of a message.

    Raises:
        EngineError: it is not the ticket's.
    """
    if found != ref.fingerprint:
        raise EngineError(
            f"version {ref.version} was handed over with fingerprint {ref.fingerprint}, "
            f"but {who} holds {found}: it did not get the new ref. Nothing that it computes "
            "from here on could be trusted"
        )


M = TypeVar("M", bound=nn.Module)


def with_own_structure(model: M) -> M:
    """Make another tree of modules over the very same parameters and buffers.

    What is changed on a module (its mode, a forward pass put in place of its own, whether adapters
    are on) is then seen by one of the two only, so that each can be used in a thread of its own.
    Weights are never seen apart: an update of one is an update of the other.

    Args:
        model: at rest: what is changed on its modules at this moment is copied along.
    """
    return _copied(model, chain(model.parameters(), model.buffers()))


def with_own_weights(model: M) -> M:
    """A copy for inference alone, whose weights change only when they are loaded.

    Trained weights and buffers are copied and take no gradients; tied weights stay tied. Frozen
    weights, those below LoRA adapters for one, never change and are shared. Parameters have the
    names that they have in ``model``.

    Args:
        model: at rest, as above; its parameters say by ``requires_grad`` which of them are trained.
    """
    clone = _copied(model, (p for p in model.parameters() if not p.requires_grad))
    return clone.requires_grad_(False)


def _copied(model: M, shared: Iterable[Tensor]) -> M:
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared}).eval()
