"""Shapes of decoders, and their parameters by formula.

Layers are counted as Llama's (Touvron et al. 2023): RMS norms, no biases, a gated MLP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from stretto.errors import ConfigError, nearest


@dataclass(frozen=True)  # no slots, as counts are kept
class Shape:
    """Shape of a decoder.

    Attributes:
        layers: number of layers; a fraction where pipeline stages share one.
        hidden: size of the hidden state.
        inner: size of the MLP's intermediate state.
        heads: attention heads.
        kv_heads: heads of keys and values; fewer than ``heads`` under grouped queries.
        vocabulary: rows of the embedding.
        outputs: of the last layer: as many as the vocabulary, or 1 in a critic or reward model.
        tied: embedding and output layer are one matrix.
        gated: the MLP has a gate, as Llama's, and so three matrices instead of two.
    """

    layers: float
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
    def parameters(self) -> float:
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

    def stage(self, stages: int) -> Shape:
        """Return what one of ``stages`` pipeline stages holds: a share of the layers.

        Embedding and output layer are on the first and the last stage; each stage is counted with
        both, so that no stage has more.
        """
        return self if stages == 1 else replace(self, layers=self.layers / stages)

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


def _tied(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, words: int) -> Shape:
    return Shape(layers, hidden, inner, heads, kv_heads, words, words, tied=True)


def _neox(layers: int, hidden: int, heads: int) -> Shape:
    words = 50_304
    return Shape(layers, hidden, 4 * hidden, heads, heads, words, words, gated=False)


SHAPES: Mapping[str, Shape] = {
    "smollm2-135m": _tied(30, 576, 1536, 9, 3, 49_152),
    "qwen2.5-0.5b": _tied(24, 896, 4864, 14, 2, 151_936),
    "qwen2.5-1.5b": _tied(28, 1536, 8960, 12, 2, 151_936),
    "qwen2.5-3b": _tied(36, 2048, 11_008, 16, 2, 151_936),
    "qwen2.5-7b": Shape(28, 3584, 18_944, 28, 4, 152_064, 152_064),
    "qwen2.5-32b": Shape(64, 5120, 27_648, 40, 8, 152_064, 152_064),
    "llama-3.1-8b": Shape(32, 4096, 14_336, 32, 8, 128_256, 128_256),
    "llama-3.1-70b": Shape(80, 8192, 28_672, 64, 8, 128_256, 128_256),
    "pythia-410m": _neox(24, 1024, 16),
    "pythia-1b": _neox(16, 2048, 8),
    "pythia-2.8b": _neox(32, 2560, 32),
    "rho-1b": _llama(22, 2048, 5632, 32, 4),
    "llama-7b": LLAMAS["7B"],
    "llama-13b": LLAMAS["13B"],
    "llama-33b": LLAMAS["33B"],
    "llama-65b": _llama(80, 8192, 22_016, 64, 64),
    "llama-2-70b": LLAMAS["70B"],
}
"""Models by name, as their published configurations have them."""


def shape_of(name: str) -> Shape:
    """Return the shape of a known model.

    Names are compared without what stands before a slash, and without "instruct", "chat" or "hf" at
    the end.

    Raises:
        ConfigError: none has this name.
    """
    short = re.sub(r"(-(instruct|chat|hf|base))+$", "", name.lower().rpartition("/")[2])
    if short not in SHAPES:
        raise ConfigError(f"unknown model '{name}'. {nearest(short, SHAPES)}")
    return SHAPES[short]
