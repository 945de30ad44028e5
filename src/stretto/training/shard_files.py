"""A learner's state in files: each rank writes its pieces, and any number of ranks reads them.

A folder has ``rank-0-of-4.safetensors`` and so on. A single process writes ``rank-0-of-1``. Tensors
are named by model, kind and parameter: ``actor/masters/<parameter>``,
``actor/exp_avg/<parameter>``, ``actor/exp_avg_sq/<parameter>``. Weights of a version that other
roles still use, or do not use yet, are ``actor/published/<version>/<parameter>``. If several ranks
hold a piece, the first one writes it. Each file has JSON metadata under ``stretto``::

    {
        "rank": of the writer, "ranks": their number,
        "pieces": {tensor: [full shape, box]},
        "state": everything that is not a tensor, the same in each file but for names of stages,
        "published": [[model, version]],
    }
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stretto import files
from stretto.errors import StateError
from stretto.files import FileSum
from stretto.layout import Bounds, full_bounds
from stretto.models.shards import TensorShard, overlap, shape, within

STEP = "step"
"""The only entry of AdamW's per-parameter state that is not shaped like the parameter."""

Pieces = Mapping[str, Tensor | TensorShard]
"""Tensors by parameter, either full or a rank's parts."""

PUBLISHED = "published"
_MASTERS, _MOMENTS = "masters", ("exp_avg", "exp_avg_sq")
_ABOUT = "stretto"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def file_name(rank: int = 0, ranks: int = 1) -> str:
    return f"rank-{rank}-of-{ranks}.safetensors"


# -- writing -------------------------------------------------------------------------------------


def packed(
    state: Mapping[str, Any],
    rank: int = 0,
    ranks: int = 1,
    published: Mapping[tuple[str, int], Pieces] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a learner's state and weights in the form that :func:`write` takes. Shares memory."""
    models, tensors = {}, dict[str, Tensor | TensorShard]()
    for model, model_state in state["models"].items():
        masters, moments = model_state["masters"], model_state["moments"]
        tensors |= {f"{model}/{_MASTERS}/{name}": master for name, master in masters.items()}
        for key in _MOMENTS:
            tensors |= {f"{model}/{key}/{name}": entry[key] for name, entry in moments.items()}
        models[model] = {
            "names": [*masters],
            "steps": {name: float(entry[STEP]) for name, entry in moments.items()},
            "schedule": model_state["schedule"],
        }
    for (model, version), entry in published.items():
        tensors |= {f"{model}/{PUBLISHED}/{version}/{name}": piece for name, piece in entry.items()}
    shards = {
        name: TensorShard(p, tuple(p.shape), full_bounds(p.shape)) if isinstance(p, Tensor) else p
        for name, p in tensors.items()
    }
    pieces = {name: p for name, p in shards.items() if p.tensor.numel()}
    about = {
        "rank": rank,
        "ranks": ranks,
        "pieces": {name: (p.shape, p.bounds) for name, p in pieces.items()},
        "state": {**state, "models": models},
        PUBLISHED: list(published),
    }
    return {"tensors": {n: p.tensor for n, p in pieces.items()}, "about": json.dumps(about)}


def write(file: Path, state: Mapping[str, Any]) -> FileSum:
    """Write a result of :func:`packed` and sync it to disk. Raises OSError."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in state["tensors"].items()}
    try:
        save_file(tensors, file, {_ABOUT: state["about"]})
    except SafetensorError as error:
        match = _OS_ERROR.search(str(error))
        if match is None:
            raise OSError(str(error)) from error
        raise OSError(int(match[1]), os.strerror(int(match[1]))) from error
    files.sync(file)  # only this machine can, if the folder is on another one
    return files.sum_of(file)


# -- reading -------------------------------------------------------------------------------------


class Stored:
    """A tensor stored in pieces over several files. ``held`` counts the elements in them."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.shape, self.held = shape, 0
        self._name, self._parts = name, list[tuple[Any, Bounds]]()

    def add(self, file: Any, box: Bounds) -> None:
        self._parts.append((file, box))
        self.held += math.prod(shape(box))

    def read(self, box: Bounds | None = None) -> Tensor:
        """Read the part in ``box``, and no more, or by default the full tensor."""
        box = full_bounds(self.shape) if box is None else box
        tensor = torch.empty(shape(box))
        for file, has in self._parts:
            common = overlap(box, has)
            if common is not None:
                part = file.get_slice(self._name)[within(common, has)]
                tensor = tensor.to(part.dtype)  # dtype of the first part; nothing is written yet
                tensor[within(common, box)] = part
        return tensor


def read(path: Path) -> dict[str, Any]:
    """Return a learner's state with :class:`Stored` tensors. ``published`` holds other weights by
    model and version. Raises StateError if a file is damaged or missing.
    """
    tensors = dict[str, Stored]()
    states = dict[int, Any]()
    ranks = 1
    published: list[tuple[str, int]] = []
    for file in sorted(path.glob("*.safetensors")):
        handle, about = _opened(file)
        for name, (full_shape, box) in about["pieces"].items():
            tensor = tensors.setdefault(name, Stored(name, tuple(full_shape)))
            tensor.add(handle, tuple((start, end) for start, end in box))
        states[about["rank"]], ranks = about["state"], about["ranks"]
        published = [(model, version) for model, version in about[PUBLISHED]]
    for rank in range(ranks):
        if rank not in states:
            missing = path / file_name(rank, ranks)
            raise StateError(f"'{missing}' is missing; {_REMEDY}", "missing-file")
    for name, tensor in tensors.items():
        if tensor.held != math.prod(tensor.shape):
            raise StateError(
                f"the files in '{path}' have {tensor.held} elements of '{name}', which is "
                f"{tensor.shape}; {_REMEDY}",
                "missing-pieces",
            )
    state = states[0]
    models = {
        model: _unpacked(model, [states[rank]["models"][model] for rank in range(ranks)], tensors)
        for model in state["models"]
    }
    published_weights = {
        (m, v): {name: tensors[f"{m}/{PUBLISHED}/{v}/{name}"] for name in models[m]["masters"]}
        for m, v in published
    }
    return {**state, "models": models, PUBLISHED: published_weights}


_REMEDY = "remove its checkpoint to go on from the one before, or start the run anew"


def _opened(file: Path) -> tuple[Any, Any]:
    try:
        handle: Any = safe_open(file, "pt")
        return handle, json.loads((handle.metadata() or {})[_ABOUT])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise StateError(f"'{file}' is damaged: {error!r}; {_REMEDY}", "damaged-file") from error


def _unpacked(
    model: str, by_rank: Sequence[Mapping[str, Any]], tensors: Mapping[str, Stored]
) -> Any:
    """Return a model's part of the state, as it was passed to :func:`packed`. Ranks that hold
    pipeline stages name the parameters of their stages only.
    """
    about = by_rank[0]
    names = dict.fromkeys(name for part in by_rank for name in part["names"])
    steps = {name: step for part in by_rank for name, step in part["steps"].items()}
    moments = {
        n: {STEP: torch.tensor(step)} | {k: tensors[f"{model}/{k}/{n}"] for k in _MOMENTS}
        for n, step in steps.items()
    }
    return {
        "masters": {name: tensors[f"{model}/{_MASTERS}/{name}"] for name in names},
        "moments": moments,
        "schedule": about["schedule"],
    }
