"""Sizes of decoders: of any by its config, of known models by name; their parameters by formula.

Layers are counted as Llama's (Touvron et al. 2023): RMS norms, no biases, a gated MLP.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Self

from stretto.errors import ConfigError, ModelError, near, nearest
from stretto.saying import format_count


@dataclass(frozen=True)  # no slots, as counts are kept
class Shape:
    """Shape of a decoder.

    Attributes:
        layers: a fraction where pipeline stages share one.
        inner: size of the MLP's intermediate state.
        outputs: of the last layer: as many as the vocabulary, or 1 in a critic or reward model.
        tied: embedding and output layer are one matrix.
        gated: the MLP has a gate, as Llama's, and so three matrices instead of two.
        in_4bit: the layers' matrices are in 4 bits (``model.load_in_4bit``).
        head_dim: of a head's queries, keys and values; 0 means ``hidden / heads``.
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
    def of_config(cls, config: Mapping[str, Any], *, tied: bool) -> Self:
        """Return the shape by the entries of a ``config.json``, or raise KeyError without one.

        Raises ModelError for layers that differ, such as those of experts.
        """
        if any(config.get(name) for name in _EXPERTS):
            raise unplanned("a mixture of experts")
        if "linear_attention" in (config.get("layer_types") or ()):
            raise unplanned("linear attention in some layers")
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

    def held(self, tensor: int) -> float:
        """Parameters on each of ``tensor`` devices: layers, their norms too, are counted as cut."""
        return self.layers * self.layer_parameters / tensor + self.root_parameters

    def multiplied(self, tensor: int) -> float:
        """Parameters of these that a token is multiplied with: all but the embedding's."""
        around = self.outputs * self.hidden + self.hidden
        return self.layers * self.layer_parameters / tensor + around

    def stage(self, stages: int) -> Shape:
        return self if stages == 1 else replace(self, layers=self.layers / stages)

    def valued(self) -> Shape:
        return replace(self, outputs=1, tied=False)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

Config = Mapping[str, Any]
"""The entries of a ``config.json``."""

_SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim"),
)


def _config(kind: str, *sizes: int, tied: bool = False) -> Config:
    config = {"model_type": kind, **{k: n for k, n in zip(_SIZES, sizes, strict=False) if n}}
    return {**config, "tie_word_embeddings": True} if tied else config


_CONFIGS: Mapping[str, Config] = {
    "tiny": _config("llama", 2, 64, 192, 4, 2, 259, tied=True),
    "tiny-2-heads": _config("llama", 2, 64, 192, 2, 1, 259, tied=True),
    "tiny-chat": _config("llama", 2, 64, 192, 4, 2, 261, tied=True),
    "smollm2-135m": _config("llama", 30, 576, 1536, 9, 3, 49_152, tied=True),
    "qwen2.5-0.5b": _config("qwen2", 24, 896, 4864, 14, 2, 151_936, tied=True),
    "qwen2.5-1.5b": _config("qwen2", 28, 1536, 8960, 12, 2, 151_936, tied=True),
    "qwen2.5-3b": _config("qwen2", 36, 2048, 11_008, 16, 2, 151_936, tied=True),
    "qwen2.5-7b": _config("qwen2", 28, 3584, 18_944, 28, 4, 152_064),
    "qwen2.5-32b": _config("qwen2", 64, 5120, 27_648, 40, 8, 152_064),
    "qwen3-0.6b": _config("qwen3", 28, 1024, 3072, 16, 8, 151_936, 128, tied=True),
    "qwen3-1.7b": _config("qwen3", 28, 2048, 6144, 16, 8, 151_936, 128, tied=True),
    "qwen3-4b": _config("qwen3", 36, 2560, 9728, 32, 8, 151_936, 128, tied=True),
    "qwen3-8b": _config("qwen3", 36, 4096, 12_288, 32, 8, 151_936, 128),
    "qwen3-14b": _config("qwen3", 40, 5120, 17_408, 40, 8, 151_936, 128),
    "qwen3-32b": _config("qwen3", 64, 5120, 25_600, 64, 8, 151_936, 128),
    "gemma-3-1b": _config("gemma3_text", 26, 1152, 6912, 4, 1, 262_144, 256, tied=True),
    "smollm3-3b": _config("smollm3", 36, 2048, 11_008, 16, 4, 128_256, tied=True),
    "mistral-7b-v0.3": _config("mistral", 32, 4096, 14_336, 32, 8, 32_768),
    "llama-3.2-1b": _config("llama", 16, 2048, 8192, 32, 8, 128_256, tied=True),
    "llama-3.2-3b": _config("llama", 28, 3072, 8192, 24, 8, 128_256, tied=True),
    "llama-3.1-8b": _config("llama", 32, 4096, 14_336, 32, 8, 128_256),
    "llama-3.1-70b": _config("llama", 80, 8192, 28_672, 64, 8, 128_256),
    "pythia-410m": _config("gpt_neox", 24, 1024, 4096, 16, 0, 50_304),
    "pythia-1b": _config("gpt_neox", 16, 2048, 8192, 8, 0, 50_304),
    "pythia-2.8b": _config("gpt_neox", 32, 2560, 10_240, 32, 0, 50_304),
    "rho-1b": _config("llama", 22, 2048, 5632, 32, 4, 32_000),
    "llama-7b": _config("llama", 32, 4096, 11_008, 32, 32, 32_000),
    "llama-13b": _config("llama", 40, 5120, 13_824, 40, 40, 32_000),
    "llama-33b": _config("llama", 60, 6656, 17_920, 52, 52, 32_000),
    "llama-65b": _config("llama", 80, 8192, 22_016, 64, 64, 32_000),
    "llama-2-70b": _config("llama", 80, 8192, 28_672, 64, 8, 32_000),
}
"""Models as their published configurations have them."""

_NAMES: Mapping[str, str] = {
    **{name: name for name in ("tiny", "tiny-2-heads", "tiny-chat", "smollm2-135m")},
    "EleutherAI/pythia-410m-deduped": "pythia-410m",
    "EleutherAI/pythia-1b-deduped": "pythia-1b",
    "EleutherAI/pythia-2.8b-deduped": "pythia-2.8b",
    "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr": "pythia-1b",
    "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr": "pythia-1b",
    "huggyllama/llama-7b": "llama-7b",
    "huggyllama/llama-13b": "llama-13b",
    "huggyllama/llama-30b": "llama-33b",
    "huggyllama/llama-65b": "llama-65b",
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": "llama-3.1-8b",
    "microsoft/rho-math-1b-v0.1": "rho-1b",
    "realtreetune/rho-1b-sft-GSM8K": "rho-1b",
    **{
        f"Qwen/Qwen2.5-{size}B{kind}": f"qwen2.5-{size}b"
        for size in ("0.5", "1.5", "3", "7", "32")
        for kind in ("", "-Instruct")
    },
}
"""Names of models in settings, whose config is known before they are fetched."""

SHAPES: Mapping[str, Shape] = {
    name: Shape.of_config(config, tied="tie_word_embeddings" in config)
    for name, config in _CONFIGS.items()
    if not name.startswith("tiny")
}
"""Shapes of models by a short name."""

LLAMAS: Mapping[str, Shape] = {
    "7B": SHAPES["llama-7b"],
    "13B": SHAPES["llama-13b"],
    "33B": SHAPES["llama-33b"],
    "70B": SHAPES["llama-2-70b"],
}
"""Llama 2 of 7B, 13B and 70B, and LLaMA of 33B."""


_UNPLANNED: Mapping[str, str] = {
    "gpt-oss": "a mixture of experts",
    "qwen3-30b-a3b": "a mixture of experts",
    "qwen3-235b-a22b": "a mixture of experts",
    "qwen3.5": "linear attention in some layers",
}
"""Models that have no :class:`Shape`, by the beginning of their names."""


def unplanned(what: str, name: str = "the model") -> ModelError:
    problem = f"{name} has {what}, which plans by layers of one shape cannot count"
    return ModelError(problem, "other-architecture")


def public_config(name: str) -> Config:
    """Return the config of a public model; owner and endings such as "-instruct" do not count.

    Raises ConfigError for an unknown name, and ModelError for a model without a :class:`Shape`.
    """
    return _CONFIGS[_public(name)]


def shape_of(name: str) -> Shape:
    """Return a public model's shape, or raise as :func:`public_config` does."""
    return SHAPES[_public(name)]


def _public(name: str) -> str:
    short = re.sub(r"(-(instruct|chat|hf|base|it))+$", "", name.lower().rpartition("/")[2])
    if short in SHAPES:
        return short
    for start, what in _UNPLANNED.items():
        if short.startswith(start):
            raise unplanned(what, f"'{name}'")
    sizes = (f"{key} ({format_count(round(s.parameters))})" for key, s in SHAPES.items())
    hint = nearest(short, SHAPES) if near(short, SHAPES) else f"Known: {', '.join(sizes)}"
    raise ConfigError(f"unknown model '{name}'. {hint.rstrip('.')}", "unknown-shape")


def known_config(name: str) -> Config | None:
    return _CONFIGS.get(_NAMES.get(name, ""))


def weight_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a known model's weights by its config."""
    kind, tied = config["model_type"], config.get("tie_word_embeddings", False)
    shape, neox = Shape.of_config(config, tied=tied), kind == "gpt_neox"
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


def undivided(tp: int, count: int, what: str) -> ModelError:
    """Return the error of a number that tensor parallelism does not divide."""
    return ModelError(
        f"tp = {tp} does not divide the {count} {what}; choose a divisor, or more fsdp",
        "tp-divides",
    )
