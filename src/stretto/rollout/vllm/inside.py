"""Classes that vLLM calls: an executor, and a backend for its weight transfer.

The executor is for a process that is one of several ranks or has a GPU. The backend takes tensors
from Stretto's channels. vLLM's worker calls it to start, receive and finish, like its own backends.
Layers are reloaded one by one, because on a CPU and with quantized weights each must be packed
again: data written into a packed layer is ignored.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from stretto.errors import EngineError

BACKEND = "stretto"
"""Name of the backend in ``WeightTransferConfig``."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """No arguments, because the channel already exists."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """All tensors of the model for one update, named as in its files, in order of arrival."""

    tensors: Iterable[tuple[str, Tensor]]


class ChannelTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """A weight transfer engine in the process of vLLM's worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Prepare each layer to wait for its tensors."""
        # vLLM warns of layers without weights, but missing weights are checked for below.
        logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        # First, because the reload makes each of several tied layers wait for its own weight.
        self._wrapped = list(_adapted(self.model))
        for parent, name, layer in self._wrapped:  # vLLM's loader does not know LoRA layers
            setattr(parent, name, layer.base_layer)
        self._wanted = {name for name, _ in self.model.named_parameters()}
        self._tied = list(_tied(self.model))
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the tensors. Raises EngineError if some of the model's weights are missing."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the tensors layer by layer."""
        try:
            loaded_names = self.model.load_weights(iter(update_info.tensors))
        except BaseException:
            # Otherwise the next update would find half-loaded layers.
            self.finish_weight_update()
            raise
        can_check = loaded_names is not None and not self.model_config.quantization
        if can_check and (missing := self._wanted - loaded_names):
            self.finish_weight_update()
            raise EngineError(
                f"vLLM's {type(self.model).__name__} has weights that the learner's model does not "
                f"bring ('{min(missing)}' is one of {len(missing)}): the two do not name them "
                "alike; set rollout.engine = 'torch'",
                "missing-weights",
            )

    def finish_weight_update(self) -> None:
        """Restore each layer. A tied head on a CPU has a packed copy of its weight to update."""
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self._tied:
            layer.quant_method.process_weights_after_loading(layer)
        for parent, name, layer in self._wrapped:
            setattr(parent, name, layer)

    def shutdown(self) -> None:
        """Do nothing, because the channel was opened elsewhere."""


def _adapted(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """Yield LoRA layers, each with its parent module and its name there."""
    for parent in model.modules():
        for name, layer in parent.named_children():
            if isinstance(layer, BaseLayerWithLoRA):
                yield parent, name, layer


def _tied(model: torch.nn.Module) -> Iterator[Any]:
    seen = set()
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if id(weight) in seen and isinstance(
            getattr(layer, "quant_method", None), QuantizeMethodBase
        ):
            yield layer
        seen |= {id(weight)} if weight is not None else set()


def register() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ChannelTransfer)


_names: list[str] = []


class RankExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
    """An executor whose ranks have already joined their process group.

    On CPUs vLLM names shared memory by the init method, which here is the same for all groups of a
    machine, so a unique name is added.
    """

    def _distributed_args(self) -> tuple[str, int, int]:
        method, rank, local_rank = super()._distributed_args()
        name = [f"stretto-{uuid.uuid4().hex}"]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(name)
        _names.extend(name)
        return f"{method}:{name[0]}", rank, local_rank


def forget_shared_memory() -> None:
    """Unlink vLLM's shared memory, including its queues, once all ranks have mapped it."""
    dist.barrier()
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, separator, name = line.partition("/dev/shm/")
        if separator and (name.startswith("psm_") or any(shm_name in name for shm_name in _names)):
            Path("/dev/shm", name).unlink(missing_ok=True)
