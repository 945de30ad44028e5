"""Norms and MLPs that recompute in the backward pass, with the bits of transformers' layers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from engine_helpers import GROUPED, from_config
from stretto.models.decoder_layers import FAMILIES, RecomputingLayers

CONFIGS: dict[str, Any] = {
    "Llama": hf.LlamaConfig(**GROUPED),
    "Mistral": hf.MistralConfig(**GROUPED),
    "Qwen2": hf.Qwen2Config(**GROUPED),
    "Qwen3": hf.Qwen3Config(**GROUPED, head_dim=16),
}
TOKENS = torch.arange(24).view(3, 8)


def states_of(model: Any) -> Tensor:
    states: Tensor = model.model(TOKENS, use_cache=False).last_hidden_state
    return states


def gradients(model: Any, *, recomputed: bool) -> dict[str, Tensor]:
    """With the states under ''."""
    model.zero_grad()
    with RecomputingLayers(model) if recomputed else nullcontext():
        states = states_of(model)
        states.float().square().sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"": states.detach(), **found}


def kept_bytes(model: Any, *, recomputed: bool) -> int:
    """Of all tensors that the backward pass needs, parameters included."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        RecomputingLayers(model) if recomputed else nullcontext(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        states = states_of(model)
    assert states.grad_fn is not None
    return sum(sizes.values())


def test_all_families_are_covered() -> None:
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.parametrize("frozen", [(), ("norm", "down_proj")])
@pytest.mark.parametrize("name", CONFIGS)
def test_states_and_gradients_keep_their_bits(name: str, frozen: tuple[str, ...]) -> None:
    model = from_config(CONFIGS[name]).bfloat16()
    for parameter, weight in model.named_parameters():
        weight.requires_grad = not any(part in parameter for part in frozen)
    plain, recomputed = (gradients(model, recomputed=flag) for flag in (False, True))
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[key], recomputed[key]) for key in plain)
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_kept_are_six_bytes_fewer_for_a_norm_and_four_for_an_mlp() -> None:
    """A norm keeps its float32 and normalized inputs per token; instead, it keeps its input, which
    is the residual stream's. An MLP keeps the activated gate and the product."""
    model = from_config(CONFIGS["Llama"]).bfloat16()
    config = model.config
    norms = (6 - 2) * config.hidden_size * (2 * config.num_hidden_layers + 1)
    products = 4 * config.intermediate_size * config.num_hidden_layers
    fewer = kept_bytes(model, recomputed=False) - kept_bytes(model, recomputed=True)
    assert fewer == TOKENS.numel() * (norms + products)


def test_float32_other_code_and_other_families_keep_their_layers() -> None:
    layers = [RecomputingLayers(from_config(CONFIGS["Llama"]))]
    layers.append(RecomputingLayers(from_config(hf.GemmaConfig(**GROUPED)).bfloat16()))
    model = from_config(CONFIGS["Llama"]).bfloat16()
    for module in model.modules():
        kind = type(module)
        if kind.__name__ in ("LlamaRMSNorm", "LlamaMLP"):
            module.__class__ = type(kind.__name__, (kind,), {"__module__": "someones.modeling"})
    layers.append(RecomputingLayers(model))
    assert [found.layers for found in layers] == [[], [], []]
