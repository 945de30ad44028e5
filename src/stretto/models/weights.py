"""Weights as things to hand over: fingerprints, and loading what was handed over."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stretto.errors import EngineError
from stretto.types import Weights

SAMPLES = 256
"""Elements looked at in each tensor, evenly spread."""


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
        spread.append(flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].float())
    if spread:
        digest.update(torch.cat(spread).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def load_weights(module: nn.Module, weights: Weights, who: str) -> None:
    """Copy the tensors that were handed over into a module, and prove that it holds them.

    Where learner and module share memory, nothing is handed over but the proof.

    Args:
        module: the receiving copy; tensors go to its parameters of the same names.
        weights: from the learner.
        who: the receiver, as the subject of a message.

    Raises:
        EngineError: a tensor has no parameter to go to, or the module's fingerprint is then not the
            one handed over.
    """
    parameters = dict(module.named_parameters())
    if unknown := set(weights.tensors or ()) - set(parameters):
        raise EngineError(
            f"version {weights.version} brings '{min(unknown)}', which the model of {who} does not "
            f"have; learner and {who} must hold the same model"
        )
    for name, tensor in (weights.tensors or {}).items():
        parameters[name].copy_(tensor)
    found = fingerprint(parameters.items())
    if found != weights.fingerprint:
        raise EngineError(
            f"version {weights.version} was handed over with fingerprint {weights.fingerprint}, "
            f"but {who} holds {found}: it did not get the new weights. Nothing that it computes "
            "from here on could be trusted"
        )
