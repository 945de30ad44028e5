"""Decoder layers for one token per row, whose bits are transformers'."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from engine_helpers import GROUPED, from_config
from stretto.config import RolloutConfig
from stretto.models.attention import use_short_attention
from stretto.models.cached import SlotCache
from stretto.models.decoder_layers import KINDS, DecodeLayers
from stretto.rollout.steps import ModelPass

FAMILIES: dict[str, Any] = {
    "LlamaDecoderLayer": hf.LlamaConfig(**GROUPED),
    "MistralDecoderLayer": hf.MistralConfig(**GROUPED, sliding_window=6),
    "Qwen2DecoderLayer": hf.Qwen2Config(**GROUPED),
    "Qwen3DecoderLayer": hf.Qwen3Config(**GROUPED, head_dim=16),
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
    assert set(FAMILIES) == set(KINDS)


def test_layers_of_other_code_are_left_alone() -> None:
    model = from_config(FAMILIES["LlamaDecoderLayer"])
    use_short_attention(model)
    kind = type(model.model.layers[0])
    remote = type(kind.__name__, (kind,), {"__module__": "transformers_modules.someones.modeling"})
    model.model.layers[0].__class__ = remote
    assert DecodeLayers(model).layers == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_are_those_of_transformers_layers(name: str, dtype: torch.dtype) -> None:
    model = from_config(FAMILIES[name]).to(dtype)
    use_short_attention(model)
    assert torch.equal(logits(model, replaced=True), logits(model, replaced=False))


@pytest.mark.parametrize(
    ("config", "attention"), [(hf.LlamaConfig(**GROUPED), "eager"), (hf.GemmaConfig(**GROUPED), "")]
)
def test_other_attention_and_other_families_keep_their_layers(config: Any, attention: str) -> None:
    model = from_config(config)
    use_short_attention(model)
    if attention:
        model.set_attn_implementation(attention)
    assert not DecodeLayers(model).layers
