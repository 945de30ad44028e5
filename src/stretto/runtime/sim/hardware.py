"""Costs from public figures: a roofline model of decoding, scoring and training.

Decoding reads all weights and the keys and values of its rows once a step, at memory bandwidth;
prefill and training are bound by arithmetic, at 2 and 6 operations a parameter and token (Kaplan et
al. 2020, section 2.1; attention's own share, a few per cent at these lengths, is left out). The
share of the peak that a real system reaches is an assumption, and so a setting of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from stretto.config import NonNegative, PositiveInt, Section
from stretto.errors import ConfigError, nearest
from stretto.planning.compute import OPTIMIZER
from stretto.planning.hardware import GPUS, Gpu
from stretto.runtime.sim.costs import (
    DecodeCost,
    GeneratorCost,
    PrefillCost,
    TrainCost,
    TransferCost,
)

_USABLE = 0.9
"""Share of a device's memory that weights and cache may take; the rest is for activations."""


@dataclass(frozen=True, slots=True)
class Transformer:
    """A model's size.

    Attributes:
        parameters: all of them.
        layers, kv_heads, head_dim: the shape of its key and value cache.
    """

    parameters: float
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, in bfloat16."""
        return 2 * self.parameters

    @property
    def cache_bytes(self) -> float:
        """Keys and values of one token, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


MODELS: Mapping[str, Transformer] = {
    "smollm2-135m": Transformer(134.5e6, 30, 3, 64),
    "qwen2.5-0.5b": Transformer(0.494e9, 24, 2, 64),
    "qwen2.5-1.5b": Transformer(1.54e9, 28, 2, 128),
    "qwen2.5-3b": Transformer(3.09e9, 36, 2, 128),
    "qwen2.5-7b": Transformer(7.61e9, 28, 4, 128),
    "llama-3.1-8b": Transformer(8.03e9, 32, 8, 128),
    "llama-13b": Transformer(13.0e9, 40, 40, 128),
    "llama-33b": Transformer(32.5e9, 60, 52, 128),
    "llama-65b": Transformer(65.2e9, 80, 64, 128),
    "llama-3.1-70b": Transformer(70.6e9, 80, 8, 128),
}


Share = Annotated[float, Field(gt=0, le=1)]


class Efficiency(Section):
    """Shares of a device's peak that software reaches. Assumptions, every one; vary them."""

    memory: Share = 0.7
    """Share of the memory bandwidth that a decode step reaches."""
    prefill: Share = 0.5
    """Share of the peak operations in a forward pass over known tokens."""
    training: Share = 0.4
    """Share of the peak operations in forward and backward passes."""
    link: Share = 0.7
    """Share of the link's bandwidth."""
    step_s: NonNegative = 0.002
    """Seconds of a decode step beside the device's own work: scheduling, sampling, launches.

    About 0.002 with CUDA graphs; launching every kernel from Python takes about 0.0008 a layer.
    """
    call_s: NonNegative = 0.005
    """Seconds of a prefill call beside the device's own work."""
    reduce_s: NonNegative = 0.00002
    """Seconds of one all-reduce among tensor-parallel devices; a decode step has two a layer."""


class DevicePlacement(Section):
    """A model on devices: ``replicas`` copies, each split over ``tensor_parallel`` devices."""

    model: str
    """The model's name, one of the known ones."""
    gpu: str
    """The device's name, one of the known ones."""
    tensor_parallel: PositiveInt = 1
    """Devices that one copy is split over."""
    replicas: PositiveInt = 1
    """Copies."""

    @property
    def size(self) -> Transformer:
        """The model's size.

        Raises:
            ConfigError: the model is unknown.
        """
        if self.model not in MODELS:
            raise ConfigError(f"unknown model '{self.model}'. {nearest(self.model, MODELS)}")
        return MODELS[self.model]

    @property
    def device(self) -> Gpu:
        """The figures of one device.

        Raises:
            ConfigError: the device is unknown.
        """
        if self.gpu not in GPUS:
            raise ConfigError(f"unknown GPU '{self.gpu}'. {nearest(self.gpu, GPUS)}")
        return GPUS[self.gpu]


def generator_cost(place: DevicePlacement, efficiency: Efficiency) -> GeneratorCost:
    """Return the cost of one copy: rows of different copies do not share a step.

    All memory beside the weights is taken to be free for the cache; give the cost in numbers where
    a learner's states share the devices.

    Raises:
        ConfigError: the weights leave no memory for keys and values.
    """
    model, gpu, split = place.size, place.device, place.tensor_parallel
    free_bytes = _USABLE * gpu.memory_bytes * split - model.weight_bytes
    if free_bytes < model.cache_bytes:
        raise ConfigError(
            f"{place.model} has {model.weight_bytes / 1e9:.0f} GB of weights, which does not fit "
            f"into {split} x {gpu.memory_bytes / 1e9:.0f} GB; raise tensor_parallel"
        )
    read = gpu.memory_bytes_per_s * efficiency.memory * split
    work = gpu.flops * efficiency.prefill * split
    reduce_s = 2 * model.layers * efficiency.reduce_s if split > 1 else 0.0
    token_s = 2 * model.parameters / work
    transfer = TransferCost(latency_s=1e-4, bytes_per_s=gpu.link_bytes_per_s * efficiency.link)
    return GeneratorCost(
        decode=DecodeCost(
            step_s=efficiency.step_s + reduce_s + model.weight_bytes / read,
            row_s=token_s,
            context_s=model.cache_bytes / read,
        ),
        prefill=PrefillCost(call_s=efficiency.call_s + reduce_s, token_s=token_s),
        transfer=transfer,
        cache_bytes=model.cache_bytes,
        cache_tokens=int(free_bytes / model.cache_bytes),
        load_s=transfer.seconds(model.weight_bytes / split),
    )


def prefill_cost(place: DevicePlacement, efficiency: Efficiency) -> PrefillCost:
    """Return the cost of scoring by a model; its copies share a call's tokens evenly."""
    work = place.device.flops * efficiency.prefill * place.tensor_parallel * place.replicas
    return PrefillCost(call_s=efficiency.call_s, token_s=2 * place.size.parameters / work)


def train_cost(
    models: Sequence[str], gpu: str, devices: int, epochs: int, updates: int, efficiency: Efficiency
) -> TrainCost:
    """Return the cost of training on all of the devices, data parallel with sharded states.

    Args:
        models: actor, critic; one after the other.
        gpu: one of the known devices.
        devices: how many.
        epochs: passes over a batch.
        updates: optimizer updates a step.
        efficiency: the shares of the peak that are reached.
    """
    places = [DevicePlacement(model=name, gpu=gpu) for name in models]
    device = DevicePlacement(model=models[0], gpu=gpu).device
    parameters = sum(p.size.parameters for p in places)
    read = device.memory_bytes_per_s * efficiency.memory * devices
    link = device.link_bytes_per_s * efficiency.link
    # Sharded states: weights are gathered for forward and backward, gradients are reduced.
    traffic_s = 3 * 2 * parameters / link if devices > 1 else 0.0
    return TrainCost(
        step_s=updates * (parameters * OPTIMIZER / read + traffic_s),
        token_s=epochs * 6 * parameters / (device.flops * efficiency.training * devices),
        publish_s=places[0].size.weight_bytes / link,
    )
