"""The weights that vLLM loads, out of what the learner sends.

vLLM wants full tensors under the names of the model's files. What arrives may be parts of them, one
after another, or adapters alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from stretto.models.lora import trained_names
from stretto.models.mapped import final
from stretto.models.shards import TensorPart
from stretto.models.weights import RunningFingerprint, copy_into, fingerprint_of


class FullWeights:
    """The weights of a model that is trained as it is: what travels is what is loaded.

    Args:
        model: only what is not trained is kept of it.
    """

    def __init__(self, model: nn.Module) -> None:
        trained = trained_names(model)
        named = dict(model.named_parameters())
        self._shapes = {n: tuple(p.shape) for n, p in named.items()}
        self._still = {n: final(p) for n, p in named.items() if n not in trained}
        self._running = RunningFingerprint(named)

    def tensors(self, arriving: Mapping[str, Tensor | TensorPart]) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, each the taker's: those that do not change, then those that arrive."""
        for name, tensor in chain(self._still.items(), self._full(arriving)):
            self._running.take(name, tensor)
            yield name, tensor

    def fingerprint(self) -> str:
        """Return the fingerprint of the learner's model, of what was yielded last."""
        return self._running.mark()

    def _full(self, arriving: Mapping[str, Tensor | TensorPart]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor once all its parts are here."""
        begun: dict[str, Tensor] = {}
        left: dict[str, int] = {}
        for name, part in arriving.items():
            tensor, to = part if isinstance(part, TensorPart) else (part, ())
            shape = self._shapes[name]
            if tensor.shape == shape:
                yield name, tensor.clone()  # what it came in is written to again
                continue
            if name not in begun:
                begun[name] = tensor.new_empty(shape)
                left[name] = math.prod(shape)
            begun[name][to] = tensor
            left[name] -= tensor.numel()
            if not left[name]:
                yield name, begun.pop(name)


class MergedWeights:
    """The weights of a model in adapters (LoRA): adapters travel, and their sum is loaded.

    Args:
        model: of peft; its adapters become those that arrive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model

    @torch.no_grad()
    def tensors(self, arriving: Mapping[str, Tensor | TensorPart]) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, after the adapters have arrived."""
        for name, part in arriving.items():
            copy_into(self._model, {name: part})
        inside = self._model.get_base_model()
        layers = {n: m for n, m in inside.named_modules() if hasattr(m, "get_delta_weight")}
        for name, weight in inside.named_parameters():
            layer, _, tail = name.rpartition(".base_layer.")
            if tail == "weight" and layer in layers:
                delta = sum(
                    layers[layer].get_delta_weight(adapter).float()
                    for adapter in layers[layer].active_adapters
                    if adapter in layers[layer].scaling
                )
                yield f"{layer}.weight", (weight.float() + delta).to(weight.dtype)
            elif ".lora_" not in name:
                yield name.replace(".base_layer.", "."), weight.detach().clone()

    def fingerprint(self) -> str:
        """Return the fingerprint of the model with its adapters."""
        return fingerprint_of(self._model)


Source = FullWeights | MergedWeights


def source_of(model: nn.Module) -> Source:
    """Return the source of the weights of a model on the CPU; one in adapters is changed."""
    return MergedWeights(model) if hasattr(model, "peft_config") else FullWeights(model)
