"""A model under training that several ranks divide: its weights, files and copies.

Everything that reads full weights is a collective: every rank must call it, in the same order.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.config import OptimizerConfig
from stretto.layout import Bounds, FullParameter, Owners
from stretto.models.load import save_model
from stretto.models.lora import trained_names
from stretto.models.mapped import final_dtype
from stretto.models.shards import TensorShard, index, shape
from stretto.models.weights import bit_sums, fingerprint_of_parts
from stretto.training.shard_files import Pieces, Stored
from stretto.training.trained import LearningRate, TrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Division:
    """Who holds which part of a full model's parameters. Must be made before the model is cut, on
    all ranks at once. ``beside`` is a gloo group of all ranks for copies next to other work.
    """

    def __init__(
        self,
        model: nn.Module,
        wholes: Mapping[str, FullParameter],
        owners: Owners,
        beside: dist.ProcessGroup,
    ) -> None:
        self.wholes = wholes
        self.owners = owners
        self.trained = trained_names(model)
        self.empty = _without_weights(model)
        self._beside = beside
        self._parts = [owners.own(wholes, rank) for rank in range(owners.ranks)]

    @property
    def own(self) -> Mapping[str, Bounds]:
        """The bounds of this rank's parts that no earlier rank holds."""
        return self._parts[dist.get_rank()]

    def on_first(self, name: str, part: Tensor) -> Tensor | None:
        """Return the full tensor on the first rank's CPU, otherwise ``None``. A collective."""
        block = part.detach().cpu()
        if dist.get_rank():
            if name in self.own:
                dist.send(block.contiguous(), 0, group=self._beside)
            return None
        tensor = torch.empty(self.wholes[name].shape, dtype=block.dtype)
        for rank, parts in enumerate(self._parts):
            if name not in parts:
                continue
            if rank:
                block = torch.empty(shape(parts[name]), dtype=tensor.dtype)
                dist.recv(block, rank, group=self._beside)
            tensor[index(parts[name])] = block
        return tensor


class DividedModel(TrainedModel):
    """A rank's part of a model under training, and AdamW on it. ``part`` is the module to train.

    Its state is that of a full model, with this rank's pieces of the tensors, and can be that of
    any number of ranks when restored.
    """

    def __init__(
        self,
        part: nn.Module,
        division: Division,
        rate: LearningRate,
        config: OptimizerConfig,
        *,
        may_be_frozen: bool = False,
    ) -> None:
        super().__init__(part, rate, config, may_be_frozen=may_be_frozen)
        self.division = division
        self.wholes = division.wholes
        self._gate.agree = self._all_agree

    @abstractmethod
    def shard(self, name: str) -> Tensor:
        """Return this rank's part of a parameter. It shares memory."""

    @property
    def trained_wholes(self) -> dict[str, FullParameter]:
        trained = self.division.trained
        return {name: parameter for name, parameter in self.wholes.items() if name in trained}

    def fingerprint(self) -> str:
        return self._fingerprint_of(self.wholes)

    def frozen_fingerprint(self) -> str:
        """Return the fingerprint of the weights that are not trained. A collective."""
        trained = self.division.trained
        return self._fingerprint_of({n: p for n, p in self.wholes.items() if n not in trained})

    def sums(self) -> dict[str, int]:
        """Return :func:`bit_sums` of the full trained parameters. A collective."""
        bounds, nothing = self.division.own, torch.empty(0, device=self.device)
        parts = {
            name: self.shard(name).to(parameter.dtype) if name in bounds else nothing
            for name, parameter in self.trained_wholes.items()
        }
        return bit_sums(parts, _sum)

    def _fingerprint_of(self, wholes: Mapping[str, FullParameter]) -> str:
        bounds, nothing = self.division.own, torch.empty(0, device=self.device)
        parts = {n: self.shard(n).to(self.device) if n in bounds else nothing for n in wholes}
        return fingerprint_of_parts(wholes, parts, bounds, _sum)

    def gathered(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        no_weight = torch.empty(0)
        return self._gathered(self.trained_wholes, lambda name: tensors.get(name, no_weight))

    def _gathered(self, names: Iterable[str], part: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return full tensors by name, in the model's types, on the first rank's CPU."""
        tensors = {}
        for name in names:
            tensors[name] = self.division.on_first(name, part(name).to(self.wholes[name].dtype))
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def pieces(self, tensors: Mapping[str, Tensor]) -> Pieces:
        return {name: self._for_files(name, tensor) for name, tensor in tensors.items()}

    def from_pieces(self, stored: Mapping[str, Stored]) -> Mapping[str, Tensor]:
        bounds = self.division.own
        return {name: self._from_files(name, stored[name]) for name in stored if name in bounds}

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        model = self.copied()
        if model is not None:
            save_model(model, tokenizer, folder)

    def copied(self, weights: Mapping[str, Tensor] | None = None) -> nn.Module | None:
        """Copy the model with its own or a snapshot's full weights to the CPU. Returns ``None`` on
        all ranks but the first. A collective that may run next to other work of the ranks, but not
        during an update.
        """
        trained: Iterable[str] = self.division.trained if weights is not None else ()
        bounds, no_weight = self.division.own, torch.empty(0)

        def part(name: str) -> Tensor:
            if weights is not None and name in trained:
                return weights.get(name, no_weight)
            return self.shard(name) if name in bounds else no_weight

        gathered = self._gathered(self.wholes, part)
        if dist.get_rank():
            return None
        empty = self.division.empty
        parameters: dict[int, Any] = {
            id(parameter): nn.Parameter(gathered[name], parameter.requires_grad)
            for name, parameter in empty.named_parameters()
        }
        return copy.deepcopy(empty, parameters)

    def _for_files(self, name: str, tensor: Tensor) -> TensorShard:
        full_shape, bounds = self.wholes[name].shape, self.division.own
        if name in bounds:
            return TensorShard(tensor, full_shape, bounds[name])
        return TensorShard(tensor.new_empty(0), full_shape, ((0, 0),) * len(full_shape))

    def _from_files(self, name: str, value: Tensor | Stored) -> Tensor:
        box = self.division.owners.bounds(self.wholes[name], dist.get_rank())
        part = value.read(box) if isinstance(value, Stored) else value[index(box)].clone()
        return part.to(self.device)

    def _all_agree(self, is_open: bool) -> bool:
        closed = torch.tensor(float(not is_open), device=self.device)
        dist.all_reduce(closed)
        return closed.item() == 0


def _without_weights(model: nn.Module) -> nn.Module:
    empty = {
        id(p): nn.Parameter(p.to("meta", final_dtype(p)), p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, cast(dict[int, Any], empty))


def _sum(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor
