"""Checks, fingerprints, loading and copies of weights."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from stretto.errors import EngineError, ModelError
from stretto.layout import Bounds, FullParameter, Layout
from stretto.models.mapped import final, final_dtype
from stretto.models.shards import TensorPart, full_parameters, held_elements, peers_of
from stretto.types import WeightsRef

M = TypeVar("M", bound=nn.Module)

PRIME = 65521  # the largest below 2^16
PATTERNS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
"""Types of integers that have the bits of other types."""

SAMPLES = 256
"""Evenly spaced elements sampled from each tensor."""


@torch.no_grad()
def require_finite(model: nn.Module, what: str) -> None:
    """Raise ModelError for NaN or infinite weights. ``what`` is the message's subject."""
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
    """Raise ModelError for weights of a type not trained here."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(
                f"{what} has weights of {weight.dtype} ({name}), and models are trained in float32 "
                "or bfloat16, with float32 masters; load it with dtype=torch.bfloat16",
                "type-not-trained",
            )


class RunningFingerprint:
    """The fingerprint, in the order of names, of tensors that arrive one by one in any order."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._taken: dict[str, tuple[str, Tensor] | None] = dict.fromkeys(names)

    @torch.no_grad()
    def take(self, name: str, tensor: Tensor) -> None:
        """Sample a tensor. Replaces an earlier tensor of the same name."""
        flat = final(tensor).reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]
        head = f"{name}{tuple(tensor.shape)}{final_dtype(tensor)}"
        self._taken[name] = head, sample.to(torch.float32, copy=True)  # a view keeps all of it

    def mark(self) -> str:
        """Return the fingerprint of the latest tensor of each name seen so far."""
        entries = [entry for entry in self._taken.values() if entry]
        device = entries[-1][1].device if entries else None
        return _hash([head for head, _ in entries], [sample.to(device) for _, sample in entries])


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a short hash of the names, shapes, types and sampled elements of tensors."""
    running = RunningFingerprint()
    for name, tensor in tensors:
        running.take(name, tensor)
    return running.mark()


@torch.no_grad()
def bit_sums(
    tensors: Mapping[str, Tensor], add_up: Callable[[Tensor], Tensor] = lambda sums: sums
) -> dict[str, int]:
    """Return a checksum of 16 bits of all elements of each tensor, which changes with any one bit.

    It is the sum of the elements' bit patterns modulo a prime, and so depends neither on the order
    of the additions nor on the division into parts. ``add_up`` adds it up over ranks.
    """
    if not tensors:
        return {}
    sums = []
    for tensor in tensors.values():
        pattern = tensor.detach().contiguous().view(-1).view(PATTERNS[tensor.dtype])
        # In blocks, because torch on a CPU first converts all numbers of a sum to 64 bits.
        blocks = [block.sum(dtype=torch.int64) for block in pattern.split(1 << 22)]
        sums.append(torch.stack(blocks).sum())
    totals = add_up(torch.stack([total.to(sums[0].device) for total in sums])).tolist()
    return {name: total % PRIME for name, total in zip(tensors, totals, strict=True)}


@torch.no_grad()
def fingerprint_of_parts(
    full: Mapping[str, FullParameter],
    parts: Mapping[str, Tensor],
    own: Mapping[str, Bounds],
    add_up: Callable[[Tensor], Tensor],
) -> str:
    """Return the :func:`fingerprint` of a model divided over ranks. A collective. ``own`` are the
    bounds of parts that no earlier rank holds.
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
            elements = part.reshape(-1)[torch.from_numpy(at).to(part.device)]
            sample[torch.from_numpy(numbers).to(part.device)] = elements.to(parameter.dtype).float()
        spread.append(sample)
    return _hash(heads, [add_up(torch.cat(spread))])


def fingerprint_of(model: nn.Module) -> str:
    """Return the :func:`fingerprint` of a model's parameters. A collective for a sliced model."""
    parameters = dict(model.named_parameters())
    peers = peers_of(model)
    if peers is None:
        return fingerprint(parameters.items())
    full = full_parameters(model, {})
    own_bounds = Layout.independent(peers.size).own(full, peers.rank)
    return fingerprint_of_parts(full, parameters, own_bounds, peers.sum_)


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
    """Copy a ticket's tensors into a module. EngineError unless its fingerprint then matches."""
    if unknown := set(tensors) - {name for name, _ in module.named_parameters()}:
        raise EngineError(
            f"version {ref.version} brings '{min(unknown)}', which the model of {receiver} does "
            f"not have; learner and {receiver} must hold the same model",
            "unknown-tensor",
        )
    copy_into(module, tensors)
    require_fingerprint(ref, fingerprint_of(module), receiver)


def require_fingerprint(ref: WeightsRef, found: str, receiver: str) -> None:
    """Raise EngineError if the receiver's weights have another fingerprint than the ticket."""
    if found != ref.fingerprint:
        raise EngineError(
            f"version {ref.version} was synced with fingerprint {ref.fingerprint}, but {receiver} "
            f"holds {found}: it did not get the new weights. Nothing that it computes from here on "
            "could be trusted",
            "other-weights",
        )


def with_own_structure(model: M, replaced: Mapping[int, Tensor] = MappingProxyType({})) -> M:
    """Return another module tree over the same parameters and buffers, for a model not in use.
    Changes to a module (its mode, a replaced forward, whether adapters are on) affect only one of
    the trees, so that each can be used in its own thread. ``replaced`` holds other parameters, by
    the ids of the model's.
    """
    return _copied(model, chain(model.parameters(), model.buffers()), replaced)


def with_own_weights(model: M) -> M:
    """Return an inference copy of a model not in use, whose weights can be loaded separately.
    Trained weights and buffers are copied, tied weights stay tied, and frozen weights are shared.
    """
    clone = _copied(model, (p for p in model.parameters() if not p.requires_grad))
    return clone.requires_grad_(False)


def _copied(
    model: M, shared: Iterable[Tensor], replaced: Mapping[int, Tensor] = MappingProxyType({})
) -> M:
    memo = {**{id(tensor): tensor for tensor in shared}, **replaced}
    # bitsandbytes also keeps the scales of 4-bit weights next to them, on their modules.
    states = [t.quant_state for t in memo.values() if hasattr(t, "quant_state")]
    return copy.deepcopy(model, memo | {id(state): state for state in states}).eval()
