"""Adapters and quantization of a script for TRL become the settings of the section model."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from raising import raises
from stretto import GRPOConfig, GRPOTrainer
from stretto.errors import ConfigError, MissingExtraError
from stretto.trl import trainer_inputs

ROWS = [{"prompt": "say cat"}, {"prompt": "say dog"}]
LINEAR = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
FIRST = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder)


TARGETS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"target_modules": r".*\.(q_proj|v_proj)"}, ("q_proj", "v_proj")),
    ({"target_modules": r"model\.layers\.0\..*\.q_proj"}, (FIRST,)),
    ({"target_modules": ["v_proj", "q_proj"]}, ("q_proj", "v_proj")),
    ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, (FIRST,)),
    ({"target_modules": ["q_proj"], "exclude_modules": r".*\.[1-9]\..*"}, (FIRST,)),
    ({"target_modules": "all-linear"}, ("all-linear",)),
    (
        {"target_modules": "all-linear", "exclude_modules": ["q_proj"]},
        tuple(name for name in LINEAR if name != "q_proj"),
    ),
    ({"target_modules": "all-linear", "exclude_modules": ["vision_tower"]}, LINEAR),
    ({}, ("q_proj", "v_proj")),
]


@pytest.mark.parametrize(("given", "targets"), TARGETS, ids=str)
def test_targets_are_the_layers_that_peft_would_adapt(
    given: dict[str, Any], targets: tuple[str, ...], policy: Any
) -> None:
    found = trainer_inputs.lora_settings(LoraConfig(**given), policy)["lora_targets"]
    assert found == tuple(sorted(targets))


def test_a_pattern_that_fits_no_layer_is_refused(policy: Any) -> None:
    with raises(ConfigError, "no-adapters-there", "'q_proj'", "lm_head"):
        trainer_inputs.lora_settings(LoraConfig(target_modules="q_proj"), policy)


def trainer(folder: Path, out: Path, model: Any = "", **parts: Any) -> GRPOTrainer:
    args = GRPOConfig(
        str(out), per_device_train_batch_size=4, num_generations=4, max_completion_length=4,
        max_steps=1, use_cpu=True, save_strategy="no", gradient_checkpointing=False,
        disable_tqdm=True, learning_rate=1e-2, **parts.pop("args", {}),
    )  # fmt: skip
    return GRPOTrainer(
        model or str(folder), lambda completions, **_: [float(len(set(c))) for c in completions],
        args=args, train_dataset=ROWS, **parts,
    )  # fmt: skip


def test_dropout_of_adapters_is_said_to_have_no_effect(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tiny_folder, tmp_path, peft_config=LoraConfig(r=2, lora_dropout=0.05)).train()
    assert "without effect: lora_dropout = 0.05" in "".join(capsys.readouterr())
    assert trainer_inputs.lora_notes(LoraConfig()) == trainer_inputs.lora_notes(None) == []


IN_4_BITS = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")  # type: ignore[no-untyped-call]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for bitsandbytes: nothing is quantized. Returns what models were loaded with."""
    given, read = list[dict[str, Any]](), AutoModelForCausalLM.from_pretrained

    def spy(*args: Any, quantization_config: Any = None, device_map: Any = None, **k: Any) -> Any:
        given.append({**k, "quantization_config": quantization_config, "device_map": device_map})
        model: Any = read(*args, **k)
        if quantization_config is not None:
            model.quantization_method = "bitsandbytes"
            model.is_loaded_in_4bit = quantization_config.load_in_4bit
        return model

    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    return given


@pytest.mark.parametrize(
    "parts",
    [
        {"quantization_config": IN_4_BITS},
        {"args": {"model_init_kwargs": {"quantization_config": IN_4_BITS}}},
        {"quantization_config": IN_4_BITS, "args": {"bf16": True}},
    ],
    ids=["argument", "init", "bfloat16"],
)
def test_adapters_train_beside_weights_in_4_bits(
    parts: dict[str, Any], loads: list[dict[str, Any]], tiny_folder: Path, tmp_path: Path
) -> None:
    dtype = "bfloat16" if "bf16" in parts.get("args", {}) else "float32"
    made = trainer(tiny_folder, tmp_path, peft_config=LoraConfig(r=2), **parts)
    (how,) = loads
    assert how["quantization_config"] is IN_4_BITS
    assert (how["device_map"], how["dtype"]) == ({"": torch.device("cpu")}, dtype)
    settings = made.config.model
    assert (settings.load_in_4bit, settings.lora_rank, settings.dtype) == (True, 2, dtype)
    made.train()
    assert made.run_dir is not None
    assert (made.run_dir.model / "adapter" / "adapter_config.json").is_file()


def test_a_quantized_model_needs_adapters_and_4_bits(
    loads: list[dict[str, Any]], tiny_folder: Path, tmp_path: Path
) -> None:
    with raises(ConfigError, "4bit-without-adapters", "peft_config"):
        trainer(tiny_folder, tmp_path, quantization_config=IN_4_BITS)
    in_8_bits = BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    with raises(ConfigError, "quantization-refused", "load_in_4bit=True"):
        trainer(tiny_folder, tmp_path, quantization_config=in_8_bits, peft_config=LoraConfig(r=2))
    loaded = AutoModelForCausalLM.from_pretrained(tiny_folder)
    with raises(ConfigError, "4bit-of-loaded", "quantization_config"):
        trainer(tiny_folder, tmp_path, loaded, quantization_config=IN_4_BITS)
    assert len(loads) == 3


def test_weights_in_4_bits_need_their_library(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with raises(MissingExtraError, "missing-library", "quantization_config"):
        trainer(tiny_folder, tmp_path, quantization_config=IN_4_BITS, peft_config=LoraConfig(r=2))


def test_real_weights_in_4_bits_get_trained_adapters(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    parts = {"quantization_config": IN_4_BITS, "peft_config": LoraConfig(r=2)}
    made = trainer(tiny_folder, tmp_path, **parts)
    made.train()
    assert made.run_dir is not None
    plain = AutoModelForCausalLM.from_pretrained(made.run_dir.model)
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
