"""A model's config and the shapes of its weights, read from its files without torch.

This is fast, and enough for checks before a run and for plans of memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto import hub
from stretto.config import ModelConfig
from stretto.errors import ConfigError, ModelError, first_line, nearest
from stretto.models import shapes
from stretto.models.resolve import (
    adapter_base,
    adapter_folder,
    cached,
    hub_name,
    is_known,
    quiet_transformers,
    read_json,
    resolve,
)
from stretto.models.shapes import SIZES, Config, Shape
from stretto.saying import Say

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TensorShapes = Mapping[str, tuple[int, ...]]

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""File names of tokenizers. A tokenizer has at least one of them."""
_INDEX = "model.safetensors.index.json"

WHOLE = 64 << 20
"""Files up to this many bytes are read completely for their fingerprint."""
HEAD = 1 << 20
BLOCKS = 64
BLOCK = 16 << 10
"""For longer files: bytes read at the start, then number and size of blocks spread over the rest.
"""


@dataclass(frozen=True)  # no slots, as counts are cached
class ModelInfo:
    """A model's config and the shapes of its weights.

    Attributes:
        source: ``config.json``.
        weights: shapes by name, empty if the weights are not here.
        folder: of the files, ``None`` if they are not on this machine.
    """

    name: str
    source: Config
    weights: TensorShapes = field(default_factory=dict)
    folder: Path | None = None

    @cached_property
    def config(self) -> Config:
        return shapes.decoder_config(self.source)

    @cached_property
    def tensors(self) -> TensorShapes:
        """Shapes of all weights. Empty if neither files nor transformers provide them."""
        return self.weights or read_by_transformers(self.name, json.dumps(self.source))[1]

    def number(self, *names: str) -> int | None:
        entries = (self.config.get(name) for name in names)
        return next((int(n) for n in entries if isinstance(n, int | float)), None)

    @property
    def layers(self) -> int | None:
        return self.number("num_hidden_layers", "n_layer")

    @property
    def positions(self) -> int | None:
        limit = self.number("max_position_embeddings", "n_positions")
        return limit if limit and limit > 0 else None

    @cached_property
    def parameters(self) -> int:
        """Number of parameters. ModelError if neither weights nor config give it."""
        return _count(self.tensors) or round(self._shape(self.config, {}).parameters)

    def adapter_parameters(self, rank: int, targets: Collection[str]) -> int | None:
        layers = self.adapted(targets)
        return None if layers is None else rank * sum(map(sum, layers))

    def adapted(self, targets: Collection[str]) -> list[tuple[int, ...]] | None:
        """Return the shapes [outputs, inputs] of layers with adapters. ``None`` without weights."""
        if not self.tensors:
            return None
        layers = {n.removesuffix(".weight"): s for n, s in self.tensors.items() if len(s) > 1}
        if tuple(targets) == ("all-linear",):  # those inside the blocks
            vocabulary, outer_parts = self.number("vocab_size"), ("embed", "wte", "wpe", "lm_head")
            return [
                shape
                for name, shape in layers.items()
                if len(shape) == 2 and f"{name}.weight" in self.tensors
                if shape[0] != vocabulary and not any(part in name for part in outer_parts)
            ]
        classes = self.config.get("architectures")
        kind = str(classes[0]) if isinstance(classes, list) and classes else f"'{self.name}'"
        require_targets(targets, {**layers, "lm_head": ()}, kind)
        if "lm_head" in targets and not any(n.endswith("lm_head") for n in layers):
            inputs = next((n for n in layers if "embed" in n or "wte" in n), "the embeddings")
            raise tied_error("lm_head", inputs)
        layer_names = [n for n in layers for t in targets if n == t or n.endswith(f".{t}")]
        return [layers[name] for name in set(layer_names)]

    @cached_property
    def shape(self) -> Shape:
        """The text decoder's shape, for plans on GPUs. ModelError if its layers differ."""
        shapes.require_one_shape(self.config, self.name)
        if self.folder is None:  # a public model, with complete entries
            return self._shape(self.config, {})
        in_files = {} if "text_config" in self.source else self.weights
        with suppress(ModelError):  # transformers may supply sizes missing in the config
            if in_files:
                return self._shape(self.config, in_files)
        source = json.dumps(self.source)
        config, weights = read_by_transformers(self.name, source, decoder=True)
        return self._shape(config or self.config, in_files or weights)

    def _shape(self, config: Config, weights: TensorShapes) -> Shape:
        """Raises ModelError if the shape's parameter count is over 1% off that of the weights."""
        tied = bool(config.get("tie_word_embeddings", True))
        if weights:
            heads = ("lm_head.weight", "embed_out.weight")
            tied = not any(name.endswith(heads) for name in weights)
        try:
            shape = Shape.of_config(config, tied=tied, name=self.name)
        except KeyError as error:
            raise ModelError(
                f"'{self.name}' says nothing of its shape: no {error}", "no-shape"
            ) from error
        if not weights:
            return shape
        parameters = _count(weights)
        variants = (replace(shape, gated=gated) for gated in (True, False))
        shape = min(variants, key=lambda shape: abs(shape.parameters - parameters))
        if abs(shape.parameters - parameters) > parameters / 100:
            raise ModelError(
                f"'{self.name}' has {parameters:,} parameters; by its layers' sizes it would "
                f"have {shape.parameters:,}. Plans on GPUs are for models built like Llama, Qwen "
                "or GPT-NeoX",
                "other-architecture",
            )
        return shape


def _count(weights: TensorShapes) -> int:
    return sum(map(math.prod, weights.values()))


@lru_cache(maxsize=32)
def read_by_transformers(
    name: str, source: str, *, decoder: bool = False
) -> tuple[Config, TensorShapes]:
    """Read a model's config (as JSON), with its defaults, and the shapes of its weights.

    Allocates no weights. Both results are empty if transformers does not know the model type.

    Args:
        decoder: read only the text decoder.
    """
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    entries = {k: v for k, v in json.loads(source).items() if k != "quantization_config"}
    if entries.get("model_type") not in CONFIG_MAPPING:
        return {}, {}
    with explained(name, "the config", fetches=False), quiet_transformers(), torch.device("meta"):
        config = CONFIG_MAPPING[entries["model_type"]].from_dict(entries)
        config = config.get_text_config(decoder=True) if decoder else config
        auto = language_auto(type(config))
        weights = dict(auto.from_config(config).named_parameters()) if auto else {}
    full = config.to_dict()
    full |= {size: full.get(config.attribute_map.get(size, size)) for size in SIZES}
    full = {entry: value for entry, value in full.items() if value is not None}
    return full, {name: tuple(weight.shape) for name, weight in weights.items()}


def model_info(name: str) -> ModelInfo | None:
    """Return a model, or an adapter's base, if its files are here and need not be made."""
    if adapter := adapter_folder(name):
        return model_info(adapter_base(adapter))
    folder = cached(name) if is_known(name) else resolve(name)
    if isinstance(folder, str):
        from huggingface_hub import try_to_load_from_cache

        config_file = try_to_load_from_cache(folder, "config.json")
        folder = Path(config_file).parent if isinstance(config_file, str) else None
    if folder:
        config = read_json(folder / "config.json", f"the config of '{name}'")
        return ModelInfo(name, config, _tensor_shapes(folder), folder)
    entries = shapes.known_config(name)
    return ModelInfo(name, entries, dict(shapes.weight_shapes(entries))) if entries else None


def described(name: str) -> ModelInfo:
    """Describe a folder, config.json, public model or hub model. ModelError if there is none."""
    file = Path(name).expanduser()
    if file.name == "config.json" and file.is_file():
        name = str(file.parent)
    is_public_name = "/" not in name and not is_known(name) and not file.exists()
    if not is_public_name and (info := model_info(name)):
        return info
    if config := shapes.public_config(name):
        weights = dict(shapes.weight_shapes(config)) if config["model_type"] in shapes.PLAIN else {}
        return ModelInfo(name, config, weights)
    if not hub_name(name):
        remedy = "A hub name (owner/name), a folder or a config.json is read too"
        raise ModelError(
            f"unknown model '{name}'. {shapes.near_public(name)} {remedy}", "model-not-here"
        )
    if (reason := hub.fetch_config(name)) or not (info := model_info(name)):
        raise ModelError(
            f"the shape of '{name}' is not known, as its config.json is not on this machine and "
            f"cannot be fetched: {reason}. Give a config.json, a folder with one, or a public "
            "model of that shape, such as qwen3-8b",
            "model-not-here",
        )
    return info


def with_adapter_settings(config: ModelConfig) -> ModelConfig:
    """Return settings with rank, alpha, kind and targets of the PEFT adapter that they name. Raises
    ConfigError if they contradict the adapter, or if it cannot be trained that way.
    """
    folder = adapter_folder(config.name)
    if folder is None:
        return config
    adapter = read_json(folder / "adapter_config.json", f"the adapter of '{config.name}'")
    parts = {"peft_type": "LORA", "bias": "none", "modules_to_save": None}
    for key, trained in parts.items():
        if (value := adapter.get(key) or trained) != trained:
            raise ConfigError(
                f"the adapter '{config.name}' has {key} = {value!r}, and adapters here are LoRA's "
                "alone. Merge it into its model (merge_and_unload), and train that",
                "adapter-not-trained",
            )
    targets = adapter["target_modules"]
    names = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
    kind = next((k for k in ("dora", "rslora") if adapter.get(f"use_{k}")), "lora")
    settings = {
        "lora_rank": adapter["r"],
        "lora_alpha": float(adapter["lora_alpha"]),
        "lora_targets": names,
        "lora_kind": kind,
    }
    for name, value in settings.items():
        current, default = getattr(config, name), ModelConfig.model_fields[name].default
        if current not in (value, default):
            raise ConfigError(
                f"model.{name} = {current!r}, and the adapter '{config.name}' that training goes "
                f"on with has {value!r}; leave the setting out",
                "adapter-contradicted",
            )
    if kind == "dora" and config.load_in_4bit:
        raise ConfigError(
            f"the adapter '{config.name}' is DoRA's, and model.load_in_4bit = true is not "
            "supported with those; leave load_in_4bit out",
            "4bit-with-dora",
        )
    return config.model_copy(update=settings)


def measure(config: ModelConfig) -> tuple[int, int | None]:
    """Count the parameters of a model, and of its LoRA adapters if any, without loading it."""
    info = described(config.name)
    if not config.lora_rank:
        return info.parameters, None
    return info.parameters, info.adapter_parameters(config.lora_rank, config.lora_targets)


def tied_error(one: str, other: str) -> ConfigError:
    """Return the error for an adapter on a weight that two layers share."""
    return ConfigError(
        f"model.lora_targets: {one} and {other} are one weight (tied), so that an adapter "
        "on the one could not be merged without changing the other; leave them out",
        "adapter-on-tied",
    )


def require_targets(
    targets: Collection[str],
    modules: Collection[str],
    model: str,
    layers: Collection[str] | None = None,
) -> None:
    """Raise ConfigError for a LoRA target without a module, suggesting one of ``layers``."""
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            ends = {name.rpartition(".")[2] for name in (layers or modules)}
            raise ConfigError(
                f"model.lora_targets = '{target}' is no layer of {model}. {nearest(target, ends)}",
                "unknown-lora-target",
            )


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("model*.safetensors"))
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX, f"the model of '{folder}'").get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(
                f"'{folder}': {_INDEX} has no weight_map; download it again", "damaged-weights"
            )
        files = sorted({folder / file for file in weight_map.values()})
    tensors: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, "np") as weights:
                names = weights.keys()
                tensors |= {name: tuple(weights.get_slice(name).get_shape()) for name in names}
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"'{file}' is missing, damaged or not complete ({error}); download the model again",
                "damaged-weights",
            ) from error
    return tensors


NOT_ON_HUB = (
    "There is no such folder either. Check the name and the network (HF_HUB_OFFLINE=1 forbids it, "
    "a gated model needs HF_TOKEN), or give the folder of a download in place of the name"
)


def load_config(path: Path | str, trust_remote_code: bool) -> PreTrainedConfig:
    """Return the config of a model or an adapter's base. ModelError if it cannot be read."""
    from transformers import AutoConfig

    if base := adapter_base(path):
        path = resolve(base)
    with explained(path, "the config"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(path), trust_remote_code=trust_remote_code
        )
    return config


def language_auto(kind: type[PreTrainedConfig]) -> Any:
    """Return transformers' auto class of the language models for a config class. It may be the one
    for multimodal models that generate text. ``None`` if there is neither.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    autos: tuple[Any, ...] = AutoModelForCausalLM, AutoModelForImageTextToText
    return next((auto for auto in autos if kind in auto._model_mapping), None)


@contextmanager
def explained(path: Path | str, what: str, *, fetches: bool = True) -> Iterator[None]:
    """Turn errors of transformers about a bad checkpoint into a ModelError with a remedy."""
    from huggingface_hub.errors import StrictDataclassError

    from_hub: AbstractContextManager[None] = nullcontext()
    if fetches and isinstance(path, str) and not Path(path).is_dir():
        if not hub.is_cached("models", path):
            hub.require(f"the model '{path}'", ModelError, NOT_ON_HUB)
        from_hub = hub.loading()
    try:
        with from_hub:
            yield
    except (OSError, ValueError, ImportError, StrictDataclassError) as error:
        # A config that contradicts itself: its check's error is the reason.
        inner = error.__cause__ if isinstance(error, StrictDataclassError) else None
        reason, remedy = first_line(inner or error).rstrip("."), NOT_ON_HUB
        if isinstance(path, Path):
            remedy = "Give a folder with config.json, *.safetensors and the tokenizer's files"
        if "dtype" in str(error):
            remedy = "Choose another type, such as float32 or bfloat16"
        if "trust_remote_code" in str(error):
            remedy = "If you trust its code, set 'model.trust_remote_code = true'"
        raise ModelError(
            f"cannot load {what} of '{path}': {reason}. {remedy}", "model-not-loaded"
        ) from error


def identity(name: str, trust_remote_code: bool, say: Say) -> Mapping[str, str]:
    """Return fingerprints of a model's config and weights, by file name.

    Files over :data:`WHOLE` bytes are fingerprinted by their size, their start (where safetensors
    keeps names, types and shapes) and blocks spread over the rest. A training step, another model
    or another type change all of it, but an edit of a few numbers between two blocks is not
    detected. A model on the hub is identified by its commit.
    """
    path, below = resolve(name, say), dict[str, str]()
    if base := adapter_base(path):
        below = {
            f"base {key}": mark for key, mark in identity(base, trust_remote_code, say).items()
        }
    if isinstance(path, str):
        return {"commit": str(load_config(path, trust_remote_code)._commit_hash)}
    try:
        settings = "adapter_config.json" if base else "config.json"
        config = json.loads((path / settings).read_bytes())
        config.pop("transformers_version", None)
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        weights = {file.name: _fingerprint(file) for file in sorted(path.glob("*.safetensors"))}
        return {settings: _shortened(digest), **weights, **below}
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the files of '{name}' cannot be read: {error}", "unreadable-model"
        ) from error


def _fingerprint(file: Path) -> str:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= WHOLE:
            return _shortened(hashlib.file_digest(stream, "sha256"))
        digest = hashlib.sha256(str(size).encode())
        digest.update(os.pread(stream.fileno(), HEAD, 0))
        for i in range(1, BLOCKS + 1):
            start = HEAD + (size - HEAD) * i // BLOCKS - BLOCK
            digest.update(os.pread(stream.fileno(), BLOCK, start))
    return _shortened(digest)


def _shortened(digest: hashlib._Hash) -> str:
    return f"sha256:{digest.hexdigest()[:16]}"
