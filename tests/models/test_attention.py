"""Attention on a CPU against torch's own, in float64 and through a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from helpers import llama
from rounding import rounding
from stretto.models import attention
from stretto.models.attention import _CausalAttention, _masked
from stretto.models.cached import CachedPass, SlotCache
from stretto.models.devices import Backend, CudaBackend
from stretto.models.load import load_causal_lm

TERMS = 200
"""Added for a gradient: 8 features of a head and up to 33 positions, forwards and backwards."""


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("length", [2, 7, 33])
def test_values_and_gradients_equal_torchs(heads: tuple[int, int], length: int) -> None:
    torch.manual_seed(0)
    sizes = [(2, n, length, 8) for n in (heads[0], heads[1], heads[1])]
    out = []
    weight = torch.randn(sizes[0], dtype=torch.float32)
    given = [torch.randn(size) for size in sizes]
    for ours in (True, False):
        q, k, v = ((t if ours else t.double()).clone().requires_grad_() for t in given)
        if ours:
            result = _CausalAttention.apply(q, k, v, 0.3)
        else:
            result = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=0.3, enable_gqa=True
            )
        (result * weight.to(result.dtype)).sum().backward()
        out.append([result, q.grad, k.grad, v.grad])
    for a, b in zip(*out, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=rounding(TERMS), atol=rounding(TERMS))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("length", [1, 2, 17])
def test_tokens_after_a_cache_attend_as_torchs(heads: tuple[int, int], length: int) -> None:
    """With a mask for each row; a row of padding sees all keys."""
    torch.manual_seed(0)
    keys = 40
    query = torch.randn(3, heads[0], length, 8)
    key, value = torch.randn(2, 3, heads[1], keys, 8)
    first = torch.tensor([33, 5, keys])
    at = first[:, None] + torch.arange(length)
    mask = torch.arange(keys) <= at[:, None, :, None]
    got = _masked(query, key, value, mask, 0.3)
    expected = F.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(got.double(), expected, rtol=rounding(100), atol=rounding(100))


def test_a_model_goes_on_after_a_cache_with_it(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for gradients."""
    model = load_causal_lm(tiny_folder, torch.float32, torch.device("cpu"))
    calls = []
    original = attention._masked
    monkeypatch.setattr(
        attention, "_masked", lambda *given: calls.append(given[0].shape[2]) or original(*given)
    )
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    own = CachedPass(model, SlotCache(2))
    own.cache.reserve(ids.shape[1])
    ends = [5, 9, 10, 40]  # of passes: of 5 tokens, which are without a cache, of 4, of 1, of 30
    with torch.no_grad():
        parts, begin = [], 0
        for end in ends:
            parts.append(own.prefill([0, 1], [begin] * 2, ids[:, begin:end].tolist()))
            begin = end
        plain = own.backbone(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(torch.cat(parts, 1), plain, rtol=1e-4, atol=1e-5)
    assert set(calls) == {4, 1, 30}
    calls.clear()
    own.prefill([0, 1], [5, 5], ids[:, 5:9].tolist())
    assert not calls


def test_a_model_computes_the_same_with_it(tiny_folder: Path, monkeypatch) -> None:
    """Short sequences take the new path, long ones and cached ones the old one."""
    cpu = torch.device("cpu")
    model = load_causal_lm(tiny_folder, torch.float32, cpu)
    assert model.config._attn_implementation == attention.NAME
    plain = load_causal_lm(tiny_folder, torch.float32, cpu)
    plain.set_attn_implementation("sdpa")
    calls = []
    original = _CausalAttention.apply
    monkeypatch.setattr(
        _CausalAttention, "apply", lambda *args: calls.append(args[0].shape[2]) or original(*args)
    )
    for length in (5, attention.LONGEST[torch.float32] + 1):
        ids = torch.randint(0, 256, (3, length), generator=torch.Generator().manual_seed(length))
        gradients = []
        for m in (model, plain):
            m.zero_grad()
            m(input_ids=ids).logits.square().mean().backward()
            gradients.append([p.grad for p in m.parameters()])
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    assert set(calls) == {5}


def test_the_choice_is_not_saved(tiny_folder: Path, tmp_path: Path) -> None:
    load_causal_lm(tiny_folder, torch.float32, torch.device("cpu")).save_pretrained(tmp_path)
    assert attention.NAME not in (tmp_path / "config.json").read_text()


def test_a_gpus_model_that_trains_alone_takes_flash_attention_if_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It computes in 16 bits; families without it, and CPUs, keep what they have."""
    taken: list[str] = []
    backend = CudaBackend(torch.device("cuda", 0))
    coarse, fine = llama(dtype=torch.bfloat16), llama()
    for model in (coarse, fine):
        monkeypatch.setattr(model, "set_attn_implementation", taken.append)
    backend.pack_sequences(coarse)
    assert not taken  # it is not installed
    monkeypatch.setattr("transformers.utils.import_utils.is_flash_attn_2_available", lambda: True)
    backend.pack_sequences(fine)
    Backend(torch.device("cpu")).pack_sequences(coarse)
    assert not taken
    backend.pack_sequences(coarse)
    assert taken == ["flash_attention_2"]

    def refuses(_: str) -> None:
        raise ValueError("this family has none")

    monkeypatch.setattr(coarse, "set_attn_implementation", refuses)
    backend.pack_sequences(coarse)
