"""Decoder layers for one token per row, whose bits are transformers'."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from engine_helpers import GROUPED, from_config, with_adapters
from stretto.config import RolloutConfig
from stretto.models.attention import use_attention
from stretto.models.cached import SlotCache
from stretto.models.decoder_layers import FAMILIES, DecodeLayers, _scripted
from stretto.rollout.steps import ModelPass

CONFIGS: dict[str, Any] = {
    "Llama": hf.LlamaConfig(**GROUPED),
    "Mistral": hf.MistralConfig(**GROUPED, sliding_window=6),
    "Qwen2": hf.Qwen2Config(**GROUPED),
    "Qwen3": hf.Qwen3Config(**GROUPED, head_dim=16),
}
LENGTHS = (9, 3, 12, 7)


def logits(model: Any, *, replaced: bool) -> Tensor:
    """Of six steps after rows of different lengths, of which the last one reads two tokens."""
    draws = torch.Generator().manual_seed(0)
    rows = [torch.randint(90, (n,), generator=draws).tolist() for n in LENGTHS]
    own = ModelPass(model, SlotCache(len(rows)), RolloutConfig())
    own.cache.reserve(max(LENGTHS) + 8)
    layers = DecodeLayers(model)
    assert len(layers.layers) == model.config.num_hidden_layers
    steps = []
    at = torch.tensor(LENGTHS)[:, None]
    with torch.inference_mode():
        own.prefill(range(len(rows)), [0] * len(rows), rows)
        with layers if replaced else nullcontext():
            for width in (1, 1, 1, 1, 1, 2):
                positions = at + torch.arange(width)
                steps.append(own.logits(positions, positions, int(positions.max()) + 1))
                at = at + 1
    assert not any("forward" in vars(layer) for layer in layers.layers)
    return torch.cat(steps, 1)


def test_all_kinds_are_covered() -> None:
    assert set(CONFIGS) == set(FAMILIES)


def test_layers_of_other_code_are_left_alone() -> None:
    model = from_config(CONFIGS["Llama"])
    use_attention(model)
    kind = type(model.model.layers[0])
    remote = type(kind.__name__, (kind,), {"__module__": "transformers_modules.someones.modeling"})
    model.model.layers[0].__class__ = remote
    assert DecodeLayers(model).layers == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_are_those_of_transformers_layers(name: str, dtype: torch.dtype) -> None:
    model = from_config(CONFIGS[name]).to(dtype)
    use_attention(model)
    assert torch.equal(logits(model, replaced=True), logits(model, replaced=False))


@pytest.mark.parametrize(
    ("config", "attention"), [(hf.LlamaConfig(**GROUPED), "eager"), (hf.GemmaConfig(**GROUPED), "")]
)
def test_other_attention_and_other_families_keep_their_layers(config: Any, attention: str) -> None:
    model = from_config(config)
    use_attention(model)
    if attention:
        model.set_attn_implementation(attention)
    assert not DecodeLayers(model).layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_adapters_have_the_same_bits(dtype: torch.dtype) -> None:
    """They run in Python, as their products are not plain."""
    model = from_config(CONFIGS["Qwen3"]).to(dtype)
    use_attention(model)
    adapted = with_adapters(model)
    assert torch.equal(logits(adapted, replaced=True), logits(adapted, replaced=False))


def test_layers_run_in_python_if_torch_cannot_script_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = from_config(CONFIGS["Llama"])
    use_attention(model)
    scripted = logits(model, replaced=True)
    _scripted.cache_clear()
    monkeypatch.setattr("torch.jit.script", lambda function: function)  # as with PYTORCH_JIT=0
    try:
        assert _scripted() is None
        assert torch.equal(logits(model, replaced=True), scripted)
    finally:
        _scripted.cache_clear()


def test_transposed_slots_are_as_long_as_the_longest_row_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stretto.models.cached.cpu_has_bfloat16", lambda: True)
    model = from_config(CONFIGS["Llama"]).to(torch.bfloat16)
    use_attention(model)
    own = ModelPass(model, SlotCache(3), RolloutConfig())
    cache = own.cache
    cache.reserve(60)

    def length() -> int:
        return cache._keys[0].shape[2]

    draws = torch.Generator().manual_seed(0)
    rows = [torch.randint(90, (n,), generator=draws).tolist() for n in (60, 5, 3)]
    lengths = []
    with torch.inference_mode():
        own.prefill([1, 2], [0, 0], rows[1:])
        lengths.append(length())
        own.prefill([0], [0], [rows[0][:20]])
        own.prefill([0], [20], [rows[0][20:31]])
        lengths.append(length())  # 31 positions and the one for padding
        kept = cache.take(0, 31, 0)
        own.prefill([0, 1], [31, 5], [rows[0][31:], [7]])
        lengths.append(length())  # never beyond the capacity of 64, and padding
        ids, at = torch.tensor([[4], [5], [6]]), torch.tensor([[60], [6], [3]])
        got = own.logits(ids, at, 61)
        cache.trim(7)
        lengths.append(length())
        cache.put(0, kept, torch.device("cpu"))
        lengths.append(length())
        moved = own.logits(torch.tensor([[rows[0][31]]]), torch.tensor([[31]]), 32)
        lengths.append(length())
        plain = [
            model(torch.tensor([row])).logits[0, -1].float()
            for row in ([*rows[0], 4], [*rows[1], 7, 5], [*rows[2], 6], rows[0][:32])
        ]
    assert lengths == [32, 32, 64, 32, 32, 64]
    for found, expected in zip([*got[:, 0], *moved[:, 0]], plain, strict=True):
        assert torch.allclose(found, expected, rtol=0.05, atol=0.1)
