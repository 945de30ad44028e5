"""Sizes of decoders, from any config or a known model's name, and their parameter counts.

Layers are counted like Llama's (Touvron et al. 2023): RMS norms, no biases, a gated MLP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any, Self

from stretto.errors import ConfigError, ModelError, near, nearest
from stretto.saying import format_count


@dataclass(frozen=True)  # no slots, as counts are cached
class Shape:
    """Shape of a decoder.

    Attributes:
        inner: size of the MLP's intermediate state.
        layers: a fraction in the mean of uneven pipeline stages.
        outputs: of the last layer: the vocabulary, or 1 in a critic or reward model.
        tied: embedding and output layer are one matrix.
        gated: the MLP has a gate, like Llama's, and thus three matrices instead of two.
        in_4bit: the layers' matrices are in 4 bits (``model.load_in_4bit``).
        head_dim: of a head's queries, keys and values. 0 means ``hidden / heads``.
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
    in_4bit: bool = False
    head_dim: int = 0

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *, tied: bool, name: str) -> Self:
        """Return the shape from the entries of a decoder's config. KeyError if they have none. Also
        raises like :func:`require_one_shape`.
        """
        require_one_shape(config, name)
        heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            vocabulary=vocabulary,
            outputs=vocabulary,
            tied=tied,
            gated=config.get("model_type") != "gpt_neox",
            head_dim=config.get("head_dim") or 0,
        )

    @cached_property
    def q_width(self) -> int:
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @cached_property
    def kv_width(self) -> int:
        return self.kv_heads * (self.head_dim or self.hidden // self.heads)

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of a layer: Q and O, K and V, the MLP's matrices, two norms."""
        attention = 2 * self.hidden * (self.q_width + self.kv_width)
        mlp = (3 if self.gated else 2) * self.hidden * self.inner
        return attention + mlp + 2 * self.hidden

    @cached_property
    def root_parameters(self) -> int:
        head = 0 if self.tied else self.outputs * self.hidden
        return self.vocabulary * self.hidden + self.hidden + head

    @cached_property
    def parameters(self) -> float:
        return self.layers * self.layer_parameters + self.root_parameters

    def cuts_into(self, slices: int) -> bool:
        """Whether tensor parallelism can divide the heads."""
        return self.heads % slices == self.kv_heads % slices == 0

    def held(self, tensor: int) -> float:
        """Parameters on each of ``tensor`` devices. Layers count as divided, even their norms."""
        return self.layers * self.layer_parameters / tensor + self.root_parameters

    def multiplied(self, tensor: int) -> float:
        """The subset of these parameters that multiplies a token: all but the embedding."""
        head_and_norm = self.outputs * self.hidden + self.hidden
        return self.layers * self.layer_parameters / tensor + head_and_norm

    def stage(self, stages: int) -> Shape:
        """Return the fullest of pipeline stages, of which only the first has the embedding, and
        only the last the output layer.
        """
        if stages == 1:
            return self
        return replace(self, layers=ceil(self.layers / stages), tied=True)

    def valued(self) -> Shape:
        return replace(self, outputs=1, tied=False)


Config = Mapping[str, Any]
"""The entries of a ``config.json``."""

_UNLIKE: Mapping[str, str] = {
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "linear_num_value_heads": "linear attention in some layers",
    "hidden_size_per_layer_input": "embeddings in each layer",
    "global_head_dim": "attention of two sizes",
    "per_layer_config": "attention of two sizes",
}
"""Parts of models that have no :class:`Shape`, by the config entries that enable them."""


def require_one_shape(config: Config, name: str) -> None:
    """Raise ModelError, with the model's name, for layers that differ, such as those of experts."""
    parts = next((parts for entry, parts in _UNLIKE.items() if config.get(entry)), "")
    if "linear_attention" in (config.get("layer_types") or ()):
        parts = parts or "linear attention in some layers"
    if parts:
        raise ModelError(
            f"'{name}' has {parts}, and plans on GPUs are for models whose layers have one "
            "shape. `stretto memory` without GPUs counts its parameters",
            "other-architecture",
        )


SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim"),
)
"""Entries that define a :class:`Shape`."""


def decoder_config(config: Config) -> Config:
    """Merge in the entries of the text decoder, which multimodal models keep separately."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


_PUBLIC = json.loads(Path(__file__).with_name("public.json").read_bytes())
_CONFIGS: Mapping[str, Config] = _PUBLIC["models"]
"""Entries of published configs: from litgpt's ``config.py``, the conversion scripts of transformers
for Gemma, its defaults for gpt-oss and Mistral Small, and slime's ``scripts/models`` for Qwen3.5.
"""

_NAMES: Mapping[str, str] = {
    name: model for model, names in _PUBLIC["names"].items() for name in names
}
"""Model names in settings whose config is known before download."""

PUBLIC = tuple(name for name in _CONFIGS if not name.startswith("tiny"))

PLAIN = ("gemma3_text", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Model types whose weights :func:`weight_shapes` lists."""

SHAPES: Mapping[str, Shape] = {
    name: Shape.of_config(text, tied=text["tie_word_embeddings"], name=name)
    for name, text in ((name, decoder_config(_CONFIGS[name])) for name in PUBLIC)
    if text["model_type"] in PLAIN
}
"""Shapes of models by a short name."""

LLAMAS: Mapping[str, Shape] = {
    "7B": SHAPES["llama-7b"],
    "13B": SHAPES["llama-13b"],
    "33B": SHAPES["llama-33b"],
    "70B": SHAPES["llama-2-70b"],
}
"""Llama 2 of 7B, 13B and 70B, and LLaMA of 33B."""


def public_config(name: str) -> Config | None:
    """Look up a public model, ignoring the owner, dates and parts such as "instruct"."""
    left_out = r"-(instruct|chat|hf|base|it|pt|deduped|thinking|\d{4})(?=-|$)"
    short = re.sub(left_out, "", name.lower().rpartition("/")[2]).removeprefix("meta-")
    short = {"mistral-small-3.2-24b": "mistral-small-3.1-24b"}.get(short, short)
    return _CONFIGS[short] if short in PUBLIC else None


def near_public(name: str) -> str:
    """Return a sentence with the public models that a name may mean, or with all of them."""
    if near(name, PUBLIC):
        return nearest(name, PUBLIC)
    sizes = (f"{key} ({format_count(round(s.parameters))})" for key, s in SHAPES.items())
    return f"Known shapes: {', '.join(sizes)}."


def shape_of(name: str) -> Shape:
    """Return a public model's shape. ConfigError for an unknown name, ModelError if it has none."""
    config = public_config(name)
    if config is None:
        raise ConfigError(f"unknown model '{name}'. {near_public(name)}", "unknown-shape")
    text = decoder_config(config)
    return Shape.of_config(text, tied=text["tie_word_embeddings"], name=name)


def known_config(name: str) -> Config | None:
    return _CONFIGS.get(_NAMES.get(name, ""))


def weight_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a known model's weights from its config."""
    kind, tied = config["model_type"], config["tie_word_embeddings"]
    shape, neox = Shape.of_config(config, tied=tied, name=kind), kind == "gpt_neox"
    hidden, inner = shape.hidden, shape.inner
    if neox:
        layer = {
            "attention.query_key_value": (3 * hidden, hidden),
            "attention.dense": (hidden, hidden),
            "mlp.dense_h_to_4h": (inner, hidden),
            "mlp.dense_4h_to_h": (hidden, inner),
        }
    else:
        layer = {
            "self_attn.q_proj": (shape.q_width, hidden),
            "self_attn.k_proj": (shape.kv_width, hidden),
            "self_attn.v_proj": (shape.kv_width, hidden),
            "self_attn.o_proj": (hidden, shape.q_width),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
    of_qkv = ("q_proj", "k_proj", "v_proj")
    biased = [name for name in layer if neox or (kind == "qwen2" and name.endswith(of_qkv))]
    norms, parts = ["input_layernorm", "post_attention_layernorm"], ["weight"]
    parts += ["bias"] if neox else []
    if kind == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    of_heads = ("q_norm", "k_norm") if kind in ("qwen3", "gemma3_text") else ()
    yield "model.embed_tokens.weight", (shape.vocabulary, hidden)
    for i in range(config["num_hidden_layers"]):
        for name, size in layer.items():
            yield f"model.layers.{i}.{name}.weight", size
            if name in biased:
                yield f"model.layers.{i}.{name}.bias", size[:1]
        for norm, part in product(norms, parts):
            yield f"model.layers.{i}.{norm}.{part}", (hidden,)
        for norm in of_heads:
            yield f"model.layers.{i}.self_attn.{norm}.weight", (shape.head_dim,)
    yield from ((f"model.norm.{part}", (hidden,)) for part in parts)
    if not tied:
        yield "lm_head.weight", (shape.vocabulary, hidden)
