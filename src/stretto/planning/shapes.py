"""Shapes of decoders, and their parameters by formula.

Layers are counted as Llama's (Touvron et al. 2023): RMS norms, no biases, a gated MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)  # no slots, as counts are kept
class Shape:
    """Shape of a decoder.

    Attributes:
        layers: number of layers.
        hidden: size of the hidden state.
        inner: size of the MLP's intermediate state.
        heads: attention heads.
        kv_heads: heads of keys and values; fewer than ``heads`` under grouped queries.
        vocabulary: rows of the embedding.
        outputs: of the last layer: as many as the vocabulary, or 1 in a critic or reward model.
        tied: embedding and output layer are one matrix.
        gated: the MLP has a gate, as Llama's, and so three matrices instead of two.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    outputs: int
    tied: bool = False
    gated: bool = True

    @cached_property
    def kv_width(self) -> int:
        """Width of the keys of a token; the same of its values."""
        return self.kv_heads * self.hidden // self.heads

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of a layer: Q and O, K and V, the MLP's matrices, two norms."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv_width
        mlp = (3 if self.gated else 2) * self.hidden * self.inner
        return attention + mlp + 2 * self.hidden

    @cached_property
    def root_parameters(self) -> int:
        """Parameters around the layers: embedding, last norm, output layer."""
        head = 0 if self.tied else self.outputs * self.hidden
        return self.vocabulary * self.hidden + self.hidden + head

    @cached_property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.layer_parameters + self.root_parameters

    def held(self, tensor: int) -> float:
        """Parameters on each of ``tensor`` devices: layers are cut, all else is on every one.

        So ``models/tensor_parallel.py`` does it. A layer's norms, a few in ten thousand of its
        parameters, are counted with what is cut.
        """
        return self.layers * self.layer_parameters / tensor + self.root_parameters

    def multiplied(self, tensor: int) -> float:
        """Parameters of these that a token is multiplied with: all but the embedding's."""
        around = self.outputs * self.hidden + self.hidden
        return self.layers * self.layer_parameters / tensor + around

    @property
    def largest_tensor(self) -> int:
        """Parameters of the largest matrix."""
        return self.hidden * max(self.vocabulary, self.inner, self.hidden)

    def valued(self) -> Shape:
        """Return the shape of a critic or reward model with the same body."""
        return replace(self, outputs=1, tied=False)


def _llama(layers: int, hidden: int, inner: int, heads: int, kv_heads: int) -> Shape:
    return Shape(layers, hidden, inner, heads, kv_heads, vocabulary=32_000, outputs=32_000)


LLAMAS: Mapping[str, Shape] = {
    "7B": _llama(32, 4096, 11_008, 32, 32),
    "13B": _llama(40, 5120, 13_824, 40, 40),
    "33B": _llama(60, 6656, 17_920, 52, 52),
    "70B": _llama(80, 8192, 28_672, 64, 8),
}
"""Llama 2 of 7B, 13B and 70B, and LLaMA of 33B, by the configurations published with them."""


@dataclass(frozen=True, slots=True)
class Models:
    """The four models of PPO."""

    actor: Shape
    critic: Shape
    reference: Shape
    reward: Shape

    @classmethod
    def of_one_size(cls, shape: Shape) -> Models:
        """Return four models with the same body."""
        return cls(shape, shape.valued(), shape, shape.valued())
