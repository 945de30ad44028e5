"""Weights left in their files until a rank takes its part.

A model that several ranks divide need not fit into the memory of any one. It is loaded in the type
of its files: the weights are then the files, mapped into memory, whose pages all processes of a
machine share. Every weight records the type that it gets when it is divided, and must not be
changed until then. Some weights are loaded as usual: weights that transformers builds from several
tensors, weights of types other than float32 and bfloat16, and models in which the type also changes
other tensors, for example buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

_DTYPE = "_stretto_dtype"
"""The attribute of a weight left in its file: its later type."""


def stored_dtype(path: Path | str) -> torch.dtype | None:
    """Return the single type of a model's stored weights, if it is float32 or bfloat16."""
    from safetensors import safe_open

    dtype_names = set[str]()
    for file in _files(str(path)):
        with safe_open(file, "pt") as weights:
            types = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
            dtype_names |= {name for name in types if "F" in name}  # other types are not weights
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    return dtypes.get(min(dtype_names)) if len(dtype_names) == 1 else None


def _files(path: str) -> Sequence[str]:
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    quietly: Any = {"_raise_exceptions_for_missing_entries": False}
    file = cached_file(path, SAFE_WEIGHTS_NAME, **quietly)
    if file is not None:
        return [file]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **quietly)
    if index is None:
        return []
    files: Any = get_checkpoint_shard_files(path, index)  # type: ignore[no-untyped-call]
    return cast(Sequence[str], files[0])


def leave_in_files(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    for weight in model.parameters():
        setattr(weight, _DTYPE, dtype or weight.dtype)


def final_dtype(weight: Tensor) -> torch.dtype:
    return cast(torch.dtype, getattr(weight, _DTYPE, weight.dtype))


def final(weight: Tensor) -> Tensor:
    return weight.detach().to(final_dtype(weight))


def copied(model: M) -> M:
    """Return a deep copy that shares weights left in files, through its own parameters."""
    shared: dict[int, Any] = {}
    for weight in model.parameters():
        if hasattr(weight, _DTYPE):
            parameter = nn.Parameter(weight.detach(), weight.requires_grad)
            setattr(parameter, _DTYPE, final_dtype(weight))
            shared[id(weight)] = parameter
    return copy.deepcopy(model, shared)


def convert(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.data = final(weight)


def take(model: M, device: torch.device) -> M:
    """Load all weights left in files into memory, in place. Return the model."""
    for weight in model.parameters():
        if hasattr(weight, _DTYPE):
            weight.data = weight.detach().to(device, final_dtype(weight), copy=True)
            delattr(weight, _DTYPE)
    return model.to(device)


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of weights in this process's own memory, without mapped files."""
    weights = {id(p): p for p in model.parameters()}.values()
    return sum(p.nbytes for p in weights if p.untyped_storage().resizable())
