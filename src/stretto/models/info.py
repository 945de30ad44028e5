"""What a model's files say of it: its config and the shapes of its weights, read without torch.

Checks before a run and plans of memory need no more, and so answer at once. Nothing is loaded, and
of weights only the header is read, in which safetensors lists names and shapes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stretto.config import ModelConfig
from stretto.errors import ConfigError, ModelError, nearest
from stretto.models.resolve import cached, is_known, resolve
from stretto.models.shapes import Shape
from stretto.saying import Say

Shapes = Mapping[str, tuple[int, ...]]

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Files of which a tokenizer has one at least."""
INDEX = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100 << 20
_BLOCKS = ("embed", "wte", "wpe", "lm_head")


@dataclass(frozen=True)  # no slots, as counts are kept
class ModelInfo:
    """What the files of a model say.

    Attributes:
        name: as the settings name it.
        config: ``config.json``; of a model with several parts that of its text decoder.
        weights: shapes by name; empty where the weights are not here.
        folder: of the files; ``None`` where they are not here.
    """

    name: str
    config: Mapping[str, Any]
    weights: Shapes = field(default_factory=dict)
    folder: Path | None = None

    def number(self, *names: str) -> int | None:
        """Return the first of several entries of the config that is a number."""
        found = (self.config.get(name) for name in names)
        return next((int(n) for n in found if isinstance(n, int | float)), None)

    @property
    def kind(self) -> str:
        """The class of the model, where the config says it."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else f"'{self.name}'"

    @property
    def layers(self) -> int | None:
        """Number of layers, where the config says it."""
        return self.number("num_hidden_layers", "n_layer")

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sequence, where the config says it."""
        limit = self.number("max_position_embeddings", "n_positions")
        return limit if limit and limit > 0 else None

    @cached_property
    def parameters(self) -> int:
        """All parameters.

        Raises:
            ModelError: the weights are not here, and the config is none of a known shape.
        """
        if self.weights:
            return sum(map(math.prod, self.weights.values()))
        return round(self._shape().parameters)

    @cached_property
    def linears(self) -> Shapes:
        """The linear layers inside the blocks, by name: those that "all-linear" adapters go on."""
        matrices = {
            name.removesuffix(".weight"): shape
            for name, shape in self.weights.items()
            if len(shape) == 2 and name.endswith(".weight")
        }
        vocabulary = self.number("vocab_size")
        return {
            name: shape
            for name, shape in matrices.items()
            if shape[0] != vocabulary and not any(part in name for part in _BLOCKS)
        }

    def adapter_parameters(self, rank: int, targets: Collection[str]) -> int | None:
        """Count the parameters of LoRA adapters; ``None`` where the weights are not here.

        Args:
            targets: layers by the end of their name, or "all-linear".

        Raises:
            ConfigError: a target is no layer.
        """
        if not self.weights:
            return None
        if tuple(targets) == ("all-linear",):
            chosen = self.linears
        else:
            layers = {n.removesuffix(".weight"): s for n, s in self.weights.items() if len(s) > 1}
            require_targets(targets, {**layers, "lm_head": ()}, self.kind)
            chosen = {
                name: shape
                for name, shape in layers.items()
                if any(name == t or name.endswith(f".{t}") for t in targets)
            }
        return rank * sum(map(sum, chosen.values()))

    @cached_property
    def shape(self) -> Shape:
        """The shape, for plans on many GPUs.

        Raises:
            ModelError: the config has none, or other parameters than such a shape, to one in a
                hundred.
        """
        shape = self._shape()
        if self.weights and abs(shape.parameters - self.parameters) > self.parameters / 100:
            raise ModelError(
                f"'{self.name}' has {self.parameters:,} parameters; by its layers' sizes it would "
                f"have {shape.parameters:,}. Plans on GPUs are for models built like Llama, Qwen "
                "or GPT-NeoX"
            )
        return shape

    def _shape(self) -> Shape:
        c = self.config
        try:
            heads, vocabulary = c["num_attention_heads"], c["vocab_size"]
            shapes = [
                Shape(
                    layers=c["num_hidden_layers"],
                    hidden=c["hidden_size"],
                    inner=c["intermediate_size"],
                    heads=heads,
                    kv_heads=c.get("num_key_value_heads") or heads,
                    vocabulary=vocabulary,
                    outputs=vocabulary,
                    tied=self._tied,
                    gated=gated,
                )
                for gated in (True, False)
            ]
        except KeyError as error:
            raise ModelError(f"'{self.name}' says nothing of its shape: no {error}") from error
        if not self.weights:
            return shapes[c.get("model_type") == "gpt_neox"]
        count = sum(map(math.prod, self.weights.values()))
        return min(shapes, key=lambda shape: abs(shape.parameters - count))

    @property
    def _tied(self) -> bool:
        if self.weights:
            heads = ("lm_head.weight", "embed_out.weight")
            return not any(name.endswith(heads) for name in self.weights)
        return bool(self.config.get("tie_word_embeddings", True))


def model_info(name: str) -> ModelInfo | None:
    """Return what a model's files say; ``None`` where they would have to be fetched or made.

    Args:
        name: as of :func:`~stretto.models.resolve.resolve`.

    Raises:
        ModelError: there is no such model, or its folder lacks a file or has a damaged one.
    """
    folder = cached(name) if is_known(name) else resolve(name)
    if isinstance(folder, str):
        folder = _fetched(folder)
    if folder:
        return _of_folder(name, folder)
    config = known(name)
    return None if config is None else ModelInfo(name, config, dict(built(config)))


def require_targets(
    targets: Collection[str],
    modules: Collection[str],
    what: str,
    layers: Collection[str] | None = None,
) -> None:
    """Refuse a name of LoRA's targets that is no part of a model.

    Args:
        what: the model, as it stands in a message.
        layers: of them, those that may be meant; without it all.

    Raises:
        ConfigError: one is none.
    """
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            ends = {name.rpartition(".")[2] for name in (layers or modules)}
            raise ConfigError(
                f"model.lora_targets = '{target}' is no layer of {what}. {nearest(target, ends)}"
            )


def _fetched(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def undivided(tp: int, count: int, what: str) -> ModelError:
    """Return the error of a number that tensor parallelism does not divide."""
    return ModelError(
        f"tp = {tp} does not divide the {count} {what}; choose a divisor, or more fsdp"
    )


def _of_folder(name: str, folder: Path) -> ModelInfo:
    config = _json(folder / "config.json", f"the config of '{name}'")
    text = config.get("text_config")
    decoder = {**config, **text} if isinstance(text, Mapping) else config
    return ModelInfo(name, decoder, dict(_shapes(folder)), folder)


def _json(file: Path, what: str) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load {what}: {file.name} cannot be read ({error})") from error
    if not isinstance(data, dict):
        raise ModelError(f"cannot load {what}: {file.name} holds no object")
    return data


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the weights in a folder's safetensors files.

    Raises:
        ModelError: a file is missing or damaged.
    """
    if (folder / INDEX).is_file():
        listed = _json(folder / INDEX, f"the model of '{folder}'").get("weight_map")
        if not isinstance(listed, dict):
            raise ModelError(f"'{folder}': {INDEX} has no weight_map; download it again")
        files = sorted({folder / file for file in listed.values()})
    else:
        files = sorted(folder.glob("model*.safetensors"))
    for file in files:
        yield from _header(file)


def _header(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    damaged = f"'{file}' is damaged or not complete"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length)) if length < _MOST_HEADER_BYTES else {}
        header.pop("__metadata__", None)
        end = 8 + length + max((t["data_offsets"][1] for t in header.values()), default=0)
    except FileNotFoundError:
        raise ModelError(f"'{file}' is missing; download the model again") from None
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelError(f"{damaged} ({error}); download it again") from error
    if end != size:
        raise ModelError(f"{damaged}: it has {size:,} of {end:,} bytes; download it again")
    yield from ((name, tuple(tensor["shape"])) for name, tensor in header.items())


def built(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the weights of a Llama, Qwen2 or GPT-NeoX that is not here."""
    hidden, inner, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    keys = config.get("num_key_value_heads", heads) * hidden // heads
    neox, qwen = config["model_type"] == "gpt_neox", config["model_type"] == "qwen2"
    if neox:
        layer = {
            "attention.query_key_value": (3 * hidden, hidden),
            "attention.dense": (hidden, hidden),
            "mlp.dense_h_to_4h": (inner, hidden),
            "mlp.dense_4h_to_h": (hidden, inner),
        }
    else:
        layer = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
    yield "model.embed_tokens.weight", (words, hidden)
    for i in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            yield f"model.layers.{i}.{name}.weight", shape
            if neox or (qwen and name.endswith(("q_proj", "k_proj", "v_proj"))):
                yield f"model.layers.{i}.{name}.bias", shape[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{i}.{norm}.weight", (hidden,)
            if neox:
                yield f"model.layers.{i}.{norm}.bias", (hidden,)
    yield "model.norm.weight", (hidden,)
    if neox:
        yield "model.norm.bias", (hidden,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (words, hidden)


WHOLE = 64 << 20
"""Bytes of a file that is read whole."""

HEAD, BLOCKS, BLOCK = 1 << 20, 64, 16 << 10
"""Bytes that are read at the beginning of a longer file; number and size of blocks that are read
of the rest, spread evenly."""

_CONFIG, _WEIGHTS = "config.json", "*.safetensors"


def identity(name: str, trust_remote_code: bool, say: Say) -> Mapping[str, str]:
    """Tell what a model is: fingerprints of its config and its weights, by the names of the files.

    Files of up to :data:`WHOLE` bytes are read whole. Of longer ones, as many as gigabytes, come
    the size, the beginning (where safetensors has names, types and shapes) and blocks spread over
    the rest: a step of training, another model or another type are seen, as they change all of it;
    a few numbers that are edited between two blocks are not. A model of the hub is known by its
    commit.

    Args:
        name: as settings name it; see :func:`~stretto.models.resolve.resolve`.

    Raises:
        ModelError: it is not there, or cannot be read.
    """
    path = resolve(name, say)
    if isinstance(path, str):
        from stretto.models.load import load_config

        return {"commit": str(load_config(path, trust_remote_code)._commit_hash)}
    try:
        files = {file.name: _digest(file) for file in sorted(path.glob(_WEIGHTS))}
        return {_CONFIG: _config_digest(path / _CONFIG), **files}
    except (OSError, ValueError) as error:
        raise ModelError(f"the files of '{name}' cannot be read: {error}") from error


def _config_digest(file: Path) -> str:
    known = json.loads(file.read_bytes())
    known.pop("transformers_version", None)
    return _named(hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest())


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= WHOLE:
            return _named(hashlib.file_digest(stream, "sha256").hexdigest())
        digest = hashlib.sha256(str(size).encode())
        for start, length in _parts(size):
            digest.update(os.pread(stream.fileno(), length, start))
    return _named(digest.hexdigest())


def _parts(size: int) -> Iterator[tuple[int, int]]:
    yield 0, HEAD
    for i in range(1, BLOCKS + 1):
        yield HEAD + (size - HEAD) * i // BLOCKS - BLOCK, BLOCK


def _named(digest: str) -> str:
    return f"sha256:{digest[:16]}"


def _llama(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
    }


def _pythia(hidden: int, layers: int, heads: int, vocab: int = 50304) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
    }


def _qwen2(hidden: int, inner: int, layers: int, heads: int, kv: int, tied: bool) -> dict[str, Any]:
    return {
        **_llama(hidden, inner, layers, heads, kv, 151_936 if tied else 152_064),
        "model_type": "qwen2",
        "tie_word_embeddings": tied,
    }


_SMOLLM2_135M = {**_llama(576, 1536, 30, 9, 3, 49_152), "tie_word_embeddings": True}
_LLAMA_8B = _llama(4096, 14_336, 32, 32, 8, 128_256)
_LLAMA_70B = _llama(8192, 28_672, 80, 64, 8, 128_256)
_RHO_1B = _llama(2048, 5632, 22, 32, 4, 32_000)

_BY_NAME: Mapping[str, Mapping[str, Any]] = {
    "tiny": {**_llama(64, 192, 2, 4, 2, 259), "tie_word_embeddings": True},
    "tiny-2-heads": {**_llama(64, 192, 2, 2, 1, 259), "tie_word_embeddings": True},
    "smollm2-135m": _SMOLLM2_135M,
    "EleutherAI/pythia-410m-deduped": _pythia(1024, 24, 16),
    "EleutherAI/pythia-1b-deduped": _pythia(2048, 16, 8),
    "EleutherAI/pythia-2.8b-deduped": _pythia(2560, 32, 32),
    "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr": _pythia(2048, 16, 8),
    "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr": _pythia(2048, 16, 8),
    "huggyllama/llama-7b": _llama(4096, 11_008, 32, 32, 32, 32_000),
    "huggyllama/llama-13b": _llama(5120, 13_824, 40, 40, 40, 32_000),
    "huggyllama/llama-30b": _llama(6656, 17_920, 60, 52, 52, 32_000),
    "huggyllama/llama-65b": _llama(8192, 22_016, 80, 64, 64, 32_000),
    "meta-llama/Llama-3.1-8B": _LLAMA_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_8B,
    "meta-llama/Llama-3.1-70B": _LLAMA_70B,
    "meta-llama/Llama-3.1-70B-Instruct": _LLAMA_70B,
    "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": _LLAMA_8B,
    "microsoft/rho-math-1b-v0.1": _RHO_1B,
    "realtreetune/rho-1b-sft-GSM8K": _RHO_1B,
    "Qwen/Qwen2.5-3B-Instruct": _qwen2(2048, 11_008, 36, 16, 2, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(3584, 18_944, 28, 28, 4, tied=False),
}


def known(name: str) -> Mapping[str, Any] | None:
    """The config of a model by its name, or ``None`` where it is not among those known."""
    return _BY_NAME.get(name)


def measure(config: ModelConfig) -> tuple[int, int | None]:
    """Count a model's parameters without loading it: in all, and of its LoRA adapters.

    The second is ``None`` when there are no adapters.

    Raises:
        ModelError: there is no such model, or its files say nothing of its parameters.
        ConfigError: the model takes no such adapters.
    """
    info = described(config.name)
    if not config.lora_rank:
        return info.parameters, None
    return info.parameters, info.adapter_parameters(config.lora_rank, config.lora_targets)


def described(name: str) -> ModelInfo:
    """What a model's files say, which must be here.

    Raises:
        ModelError: there is no such model, or it would have to be fetched.
    """
    info = model_info(name)
    if info is None:
        raise ModelError(
            f"the model '{name}' is not on this machine, and its shape is not known; download it, "
            "or name one that is"
        )
    return info
