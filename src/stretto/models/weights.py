"""Checks, fingerprints, loading and copies of weights."""

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
from stretto.models.shards import Bounds, FullParameter, ShardLayout, TensorPart, held_elements
from stretto.models.tensor_parallel import full_parameters, slices_of
from stretto.types import WeightsRef

M = TypeVar("M", bound=nn.Module)

SAMPLES = 256
"""Elements looked at in each tensor, evenly spread."""


@torch.no_grad()
def require_finite(model: nn.Module, what: str) -> None:
    """Raise ModelError for weights that are NaN or infinite; ``what`` is the message's subject."""
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
            "first): it was broken where it was trained or saved. Load an earlier checkpoint",
            "weights-not-finite",
        )


def require_trainable(model: nn.Module, what: str) -> None:
    """Raise ModelError for weights of a type that is not trained here."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(
                f"{what} has weights of {weight.dtype} ({name}), and models are trained in float32 "
                "or bfloat16, with float32 masters; load it with dtype=torch.bfloat16",
                "type-not-trained",
            )


class RunningFingerprint:
    """The fingerprint, in the order of names, of tensors that come one by one in any order."""

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
    """Return a short hash of names, shapes, types and a spread of elements of each tensor."""
    running = RunningFingerprint()
    for name, tensor in tensors:
        running.take(name, tensor)
    return running.mark()


@torch.no_grad()
def fingerprint_of_parts(
    full: Mapping[str, FullParameter],
    parts: Mapping[str, Tensor],
    own: Mapping[str, Bounds],
    add_up: Callable[[Tensor], Tensor],
) -> str:
    """Return the :func:`fingerprint` of a model of which ranks hold parts. A collective.

    ``own`` are the bounds of parts that no rank before this one holds.
    """
    heads, spread = list[str](), list[Tensor]()
    for name, parameter in full.items():
        heads.append(f"{name}{parameter.shape}{parameter.dtype}")
        count = math.prod(parameter.shape)
        places = np.arange(0, count, max(1, count // SAMPLES), dtype=np.int64)[:SAMPLES]
        part = parts[name].detach()
        sample = torch.zeros(len(places), device=part.device)
        if name in own:
            numbers, at = held_elements(places, parameter.shape, own[name])
            held = part.reshape(-1)[torch.from_numpy(at).to(part.device)]
            sample[torch.from_numpy(numbers).to(part.device)] = held.to(parameter.dtype).float()
        spread.append(sample)
    return _hash(heads, [add_up(torch.cat(spread))])


def fingerprint_of(model: nn.Module) -> str:
    """Return the :func:`fingerprint` of a model's parameters; a collective if it is in slices."""
    named = dict(model.named_parameters())
    slices, dims = slices_of(model)
    if slices is None:
        return fingerprint(named.items())
    full = full_parameters(model, dims)
    held = {name: replace(parameter, by_rows=False) for name, parameter in full.items()}
    own = ShardLayout(tp=slices.size).own(held, slices.rank)
    return fingerprint_of_parts(full, named, own, slices.sum_)


def _hash(heads: Sequence[str], spread: Sequence[Tensor]) -> str:
    digest = hashlib.sha256("".join(heads).encode())
    if spread:
        digest.update(torch.cat(list(spread)).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def copy_into(module: nn.Module, tensors: Mapping[str, Tensor | TensorPart]) -> None:
    """Copy tensors, or parts of them, into the module's parameters of the same names."""
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        if isinstance(tensor, TensorPart):
            parameters[name][tensor.to].copy_(tensor.tensor)
        else:
            parameters[name].copy_(tensor)


def load_weights(
    module: nn.Module, ref: WeightsRef, tensors: Mapping[str, Tensor | TensorPart], receiver: str
) -> None:
    """Copy a ticket's tensors into a module; raise EngineError if it does not hold them then."""
    if unknown := set(tensors) - {name for name, _ in module.named_parameters()}:
        raise EngineError(
            f"version {ref.version} brings '{min(unknown)}', which the model of {receiver} does "
            f"not have; learner and {receiver} must hold the same model",
            "unknown-tensor",
        )
    copy_into(module, tensors)
    require_fingerprint(ref, fingerprint_of(module), receiver)


def require_fingerprint(ref: WeightsRef, found: str, receiver: str) -> None:
    """Raise EngineError if what the receiver holds has another fingerprint than its ticket."""
    if found != ref.fingerprint:
        raise EngineError(
            f"version {ref.version} was synced with fingerprint {ref.fingerprint}, but {receiver} "
            f"holds {found}: it did not get the new weights. Nothing that it computes from here on "
            "could be trusted",
            "other-weights",
        )


def with_own_structure(model: M) -> M:
    """Return another tree of modules over the same parameters and buffers of a model at rest.

    What is changed on a module (its mode, a forward pass put in place of its own, whether adapters
    are on) is seen by one of the two only, so that each can be used in a thread of its own.
    """
    return _copied(model, chain(model.parameters(), model.buffers()))


def with_own_weights(model: M) -> M:
    """Return a copy of a model at rest for inference, whose weights change when they are loaded.

    Weights that are trained, and buffers, are copied; tied weights stay tied, frozen ones shared.
    """
    clone = _copied(model, (p for p in model.parameters() if not p.requires_grad))
    return clone.requires_grad_(False)


def _copied(model: M, shared: Iterable[Tensor]) -> M:
    memo = {id(tensor): tensor for tensor in shared}
    # bitsandbytes keeps scales of weights in 4 bits at the side, on their modules too.
    states = [t.quant_state for t in memo.values() if hasattr(t, "quant_state")]
    return copy.deepcopy(model, memo | {id(state): state for state in states}).eval()
