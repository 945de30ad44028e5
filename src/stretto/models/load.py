"""Load models in Hugging Face format, refuse untrainable ones, and save them."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stretto import files
from stretto.config import ModelConfig
from stretto.errors import ModelError, first_line, require
from stretto.models import mapped
from stretto.models.backend import backend_of
from stretto.models.forward import freeze_unread, unwrapped
from stretto.models.heads import register_classifier
from stretto.models.info import explained, language_auto, load_config
from stretto.models.lora import load_lora, merge_lora, trained_names
from stretto.models.resolve import adapter_base, name_base, quiet_transformers, resolve
from stretto.models.shapes import known_config
from stretto.models.weights import require_finite
from stretto.saying import Say, silent, working

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(
    path: Path | str, trust_remote_code: bool = False, say: Say = silent
) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer. ModelError if it cannot be found or fetched."""
    with working(say, "loading the tokenizer"), explained(path, "the tokenizer"):
        from transformers import AutoTokenizer

        if (base := adapter_base(path)) and not (Path(path) / "tokenizer_config.json").is_file():
            path = resolve(base)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code
        )
    return tokenizer


def load_causal_lm(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    *,
    in_files: bool = False,
    load_in_4bit: bool = False,
    merged: bool = True,
) -> PreTrainedModel:
    """Return a decoder-only language model, in eval mode and with every dropout at 0.

    Args:
        path: a folder in Hugging Face format, with safetensors, or a hub name, or a folder of a
            PEFT adapter, which is merged into its model, or if not ``merged`` left out.
        in_files: leave weights in their files if possible. See :mod:`stretto.models.mapped`.
        load_in_4bit: load linear layers except the head in 4 bits. Overrides ``in_files``.

    Raises:
        MissingExtraError: 4 bits are requested without bitsandbytes.
        ModelError: the model cannot be found, fetched or read, lacks some weights, looks ahead, or
            has no key-value cache.
    """
    from transformers import AutoModelForCausalLM

    # transformers has no entry for the config of a model with custom code.
    auto_class = language_auto(type(load_config(path, trust_remote_code)))
    kind = auto_class or AutoModelForCausalLM
    base = adapter_base(path)
    source, in_files = resolve(base) if base else path, in_files and not (base and merged)
    model = _load(kind, source, dtype, device, trust_remote_code, in_files, load_in_4bit)
    if fault := _fault(model):
        raise ModelError(
            "only decoder-only models with a key-value cache can be trained; "
            f"'{path}' is a {type(model).__name__}, which {fault}. Give a causal language model, "
            "such as a Llama, Qwen or GPT-NeoX",
            "no-decoder",
        )
    if base and merged:
        trained = trained_names(model)
        merge_lora(load_lora(model, Path(path)), trained)
    return model


def load_sequence_classifier(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    *,
    in_files: bool = False,
) -> PreTrainedModel:
    """Return a model with one score per sequence (a reward model). See :func:`load_causal_lm`."""
    from transformers import AutoModelForSequenceClassification

    if adapter_base(path):
        raise ModelError(
            f"'{path}' is a folder of a PEFT adapter, and a reward model or critic is a whole "
            "model; merge the adapter into its model (merge_and_unload), and give that folder",
            "adapter-of-classifier",
        )
    config = load_config(path, trust_remote_code)
    if (labels := config.num_labels) != 1:
        raise ModelError(
            f"a reward model gives one score (num_labels = 1); '{path}' has num_labels = {labels}. "
            "Give a sequence-classification checkpoint trained with a single label",
            "several-scores",
        )
    register_classifier(type(config))
    kind = AutoModelForSequenceClassification
    return _load(kind, path, dtype, device, trust_remote_code, in_files)


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    return named_ends(model.generation_config, tokenizer)


def named_ends(config: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    ids: Any = getattr(config, "eos_token_id", None)
    ids = [*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id]
    return frozenset(int(i) for i in ids if i is not None)


def architecture(name: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Return a model's configuration by name. A known model need not be downloaded."""
    from transformers import AutoConfig

    if (entries := known_config(name)) is None:
        return load_config(resolve(name), trust_remote_code)
    config: PreTrainedConfig = AutoConfig.for_model(**entries)
    return config


def _load(
    auto_class: Any,
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    in_files: bool,
    load_in_4bit: bool = False,
) -> PreTrainedModel:
    read = partial(_read, auto_class, path, trust_remote_code)
    if load_in_4bit:
        in_files, model = False, _read_in_4bit(read, dtype, device)
    elif in_files:
        with explained(path, "the model"):
            file_dtype = mapped.stored_dtype(path) or dtype
        model = read(file_dtype)
        late = file_dtype != dtype and _converts_late(model, auto_class, dtype, trust_remote_code)
        if file_dtype != dtype and not late:
            model = read(dtype)
        mapped.leave_in_files(model, dtype if late else None)
    else:
        model = read(dtype)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    require_finite(model, f"'{path}'")
    freeze_unread(model)
    loaded: PreTrainedModel = (model if in_files else model.to(device)).eval()
    backend_of(loaded.device).use_fastest_attention(loaded)
    return loaded


def _read_in_4bit(read: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> Any:
    """Load a model as QLoRA does (Dettmers et al. 2023): NF4 with double quantization."""
    require("bitsandbytes", "bitsandbytes", "model.load_in_4bit = true")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    model = read(dtype, quantization_config=config, device_map={"": device})
    let_gradients_through(model)
    return model


def let_gradients_through(model: Any) -> None:
    """Keep 4-bit layers from repacking weights on a CPU, which would stop gradients."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _read(
    auto_class: Any, path: Path | str, trust_remote_code: bool, dtype: torch.dtype, **options: Any
) -> Any:
    config = load_config(path, trust_remote_code)
    _zero_dropout(config)
    with explained(path, "the model"), quiet_transformers():
        model, report = auto_class.from_pretrained(
            str(path),
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"every weight of {type(model).__name__} must be in the checkpoint; '{path}' lacks "
            f"{len(missing)} of them ({', '.join(missing[:3])}), which would start from random "
            "numbers. Give a checkpoint saved from a model of this class",
            "missing-weights",
        )
    return model


def _converts_late(
    model: PreTrainedModel, auto_class: Any, dtype: torch.dtype, trust_remote_code: bool
) -> bool:
    """Return whether converting a loaded model to ``dtype`` equals loading it in that type."""
    if getattr(model, "_keep_in_fp32_modules_strict", None):
        return False
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        reference = auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    types = [{name: b.dtype for name, b in m.named_buffers()} for m in (model, reference)]
    return types[0] == types[1]


def _zero_dropout(config: PreTrainedConfig) -> None:
    from transformers import PreTrainedConfig

    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _zero_dropout(value)
        elif isinstance(value, float) and "drop" in key:
            setattr(config, key, 0.0)


@torch.no_grad()
def _fault(model: PreTrainedModel) -> str:
    ids = torch.tensor([[0, 1, 2], [0, 1, 3]], device=model.device)
    try:
        outputs = model(input_ids=ids, use_cache=True)
    except Exception as error:
        return f"cannot read two rows of three tokens with a cache: {first_line(error)}"
    logits = outputs.logits.float()
    difference = (logits[0, :2] - logits[1, :2]).abs().max()
    if difference > max(1e-4, 4 * torch.finfo(model.dtype).eps) * logits.abs().max():
        return "looks ahead"
    cache = getattr(outputs, "cache", None) or getattr(outputs, "past_key_values", None)
    with suppress(ValueError, IndexError):  # of a cache without any layer of keys and values
        if cache is not None and cache.get_seq_length() == 3:
            return ""
    return "keeps no such cache"


def set_checkpointing(model: torch.nn.Module, config: ModelConfig) -> None:
    """Recompute activations in the backward pass, if configured."""
    if config.gradient_checkpointing == "on":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the new name is not in all of 5.x
            unwrapped(model).gradient_checkpointing_enable({"use_reentrant": False})


def save_model(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a transformers or peft model so that ``from_pretrained(folder)`` restores it.

    LoRA adapters are merged into a copy, and also saved separately in ``folder / "adapter"``. In
    that copy 4-bit weights have the type that they were loaded from. Raises ModelError or
    StorageError if the model cannot be saved, and keeps the old folder. If only the tokenizer
    cannot be saved, the model is kept and ModelError is raised.
    """
    from safetensors import SafetensorError

    lacking: ModelError | None = None
    with files.explained(folder), files.new_folder(folder) as scratch:
        try:
            _write(model, scratch)
            for card in ("README.md", "adapter/README.md"):  # may have been edited
                if (folder / card).is_file() and (scratch / card).parent.is_dir():
                    shutil.copy2(folder / card, scratch / card)
        except SafetensorError as error:  # it has no errno
            raise OSError(str(error)) from error
        except ValueError as error:
            raise ModelError(
                f"cannot save the model to '{folder}': {error}. Correct generation_config.json in "
                "the folder that the model was loaded from",
                "model-not-saved",
            ) from error
        try:
            save_tokenizer(tokenizer, scratch)
        except ModelError as error:
            lacking = ModelError(f"the model is in '{folder}', but {error}", error.code)
    if lacking:
        raise lacking


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path | None = None) -> None:
    """Write a tokenizer. Without a folder, only try to, so that training does not start in vain.
    Constructor arguments that have no JSON form, such as a dtype, are left out. Raises ModelError
    if it cannot be saved.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as scratch:
            return save_tokenizer(tokenizer, Path(scratch))
    init_kwargs: dict[str, Any] = getattr(tokenizer, "init_kwargs", {})
    try:
        try:
            tokenizer.save_pretrained(folder)
        except TypeError:
            tokenizer.init_kwargs = {key: v for key, v in init_kwargs.items() if _is_written(v)}
            tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # a tokenizer may be custom code
        raise ModelError(
            f"the tokenizer ({type(tokenizer).__name__}) cannot be saved: {type(error).__name__}: "
            f"{first_line(error)}. See that its save_pretrained works",
            "tokenizer-not-saved",
        ) from error
    finally:
        if init_kwargs:
            tokenizer.init_kwargs = init_kwargs


def _is_written(value: Any) -> bool:
    from transformers import AddedToken

    try:
        json.dumps(value, default=lambda part: str(part) if isinstance(part, AddedToken) else part)
    except (TypeError, ValueError):
        return False
    return True


@torch.no_grad()
def _dequantized(model: Any) -> Any:
    """Replace 4-bit layers by plain ones on the host, with their adapters merged. Merging into 4
    bits would round the adapters away. Changes the model's modules, not its weights.
    """
    for name, module in [*model.named_modules()]:
        layer = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        weight: Any = getattr(layer, "weight", None)
        if name.endswith(".base_layer") or not hasattr(weight, "quant_state"):
            continue
        from transformers.integrations import bitsandbytes

        full_weight = bitsandbytes.dequantize_bnb_weight(weight)
        for adapter in getattr(module, "active_adapters", ()):
            full_weight = (full_weight + module.get_delta_weight(adapter)).to(full_weight.dtype)
        plain = torch.nn.Linear(1, 1, bias=False, device="meta")
        plain.weight, plain.bias = torch.nn.Parameter(full_weight.cpu()), layer.bias
        model.set_submodule(name, plain)
    return model


def _write(model: Any, folder: Path) -> None:
    if hasattr(model, "merge_and_unload"):
        # The embeddings are not trained, and checking them for changes would query the hub.
        model.save_pretrained(folder / "adapter", save_embedding_layers=False)
        (folder / "adapter" / "README.md").unlink(missing_ok=True)  # peft's, without content
        name_base(folder / "adapter")
        in_4bit = {id(p): p for p in model.parameters() if hasattr(p, "quant_state")}
        model = _dequantized(copy.deepcopy(model, in_4bit)).merge_and_unload()
        if quantizer := getattr(model, "hf_quantizer", None):
            quantizer.remove_quantization_config(model)
    generation: Any = getattr(model, "generation_config", None)  # a classifier has none
    try:
        if generation is not None:
            generation.validate(strict=True)
    except ValueError:
        # Published checkpoints set a temperature without do_sample, which loads but does not save.
        generation.do_sample = True
    with quiet_transformers():
        model.save_pretrained(folder)
