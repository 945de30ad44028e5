"""Checks, fingerprints and loading of weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from stretto.errors import EngineError, ModelError
from stretto.types import WeightsRef

SAMPLES = 256
"""Elements looked at in each tensor, evenly spread."""


TRAINED_TYPES = (torch.float32, torch.bfloat16)
"""Types in which models are trained; the masters of weights are float32."""


@torch.no_grad()
def require_finite(model: nn.Module, what: str) -> None:
    """Refuse weights that are NaN or infinite.

    Args:
        model: any.
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
        model: any.
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


@torch.no_grad()
def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A short hash of names, shapes, types and a spread of elements of each tensor, bit for bit.

    Whoever holds the same weights finds the same; it is a proof that a hand-over happened, not a
    defence against a forger.
    """
    digest = hashlib.sha256()
    spread: list[Tensor] = []
    for name, tensor in tensors:
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES]
        spread.append(sample.to(torch.float32, copy=True))  # a view would keep all of it
    if spread:
        digest.update(torch.cat(spread).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def copy_into(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the module's parameters of the same names."""
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


@torch.no_grad()
def load_weights(
    module: nn.Module, ref: WeightsRef, tensors: Mapping[str, Tensor], who: str
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
    parameters = dict(module.named_parameters())
    if unknown := set(tensors) - set(parameters):
        raise EngineError(
            f"version {ref.version} brings '{min(unknown)}', which the model of {who} does not "
            f"have; learner and {who} must hold the same model"
        )
    copy_into(module, tensors)
    found = fingerprint(parameters.items())
    if found != ref.fingerprint:
        raise EngineError(
            f"version {ref.version} was handed over with fingerprint {ref.fingerprint}, "
            f"but {who} holds {found}: it did not get the new ref. Nothing that it computes "
            "from here on could be trusted"
        )
