"""Linear layers with their weights laid out for decoding on a CPU.

A plain matrix product of few rows spends a third of its time on bringing the weight into the layout
that the CPU's kernels read. oneDNN can keep it in that layout: here once for every version of the
weights, for as long as the engine decodes. The products are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOST_ROWS = 64
"""Rows up to which the packed product is used; with more the layout no longer matters."""


class PackedLinears:
    """The bfloat16 linear layers of a model on a CPU, packed; none anywhere else.

    A context manager: inside, the layers' forward passes use the packed weights. Weights that have
    changed since are packed again on entry.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._layers: list[nn.Linear] = []
        if _supported():
            self._layers = [
                m
                for module in modules
                for m in module.modules()
                if type(m) is nn.Linear
                and m.weight.dtype == torch.bfloat16
                and m.weight.device.type == "cpu"
            ]
        self._packed: list[Callable[[Tensor], Tensor]] = []
        self._versions: list[int] = []

    def __enter__(self) -> None:
        # torch counts the in-place changes of a tensor, of which an optimizer's update is one.
        versions = [layer.weight._version for layer in self._layers]
        if versions != self._versions:
            self._packed = [_pack(layer) for layer in self._layers]
            self._versions = versions
        for layer, forward in zip(self._layers, self._packed, strict=True):
            layer.forward = forward  # type: ignore[method-assign, assignment]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Give the layers their own forward passes back; a second call does nothing.

        A caller that may be interrupted calls this once more after leaving the context: an
        interruption can strike within ``__enter__`` or ``__exit__`` themselves.
        """
        for layer in self._layers:
            vars(layer).pop("forward", None)

    def invalidate(self) -> None:
        """Pack everything again on the next entry: there are new weights."""
        self._versions = []


def _supported() -> bool:
    ops: Any = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and hasattr(ops, "_linear_pointwise")


def _pack(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The layer's forward pass with its present weight packed."""
    weight, bias, width = layer.weight, layer.bias, layer.in_features
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), MOST_ROWS)

    def forward(x: Tensor) -> Tensor:
        if x.numel() > MOST_ROWS * width:
            return F.linear(x, weight, bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out

    return forward
