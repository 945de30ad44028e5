"""Attention on a CPU against torch's own, in float64 and through a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.nn import functional as F

from engine_helpers import EXPERTS, GROUPED, LATENT, SMALL, from_config
from helpers import llama
from rounding import rounding
from stretto.models import attention, devices, forward
from stretto.models.attention import _CausalAttention, attend_from_last, use_attention
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
    got = attend_from_last(query, key, value, mask, 0.3)
    transposed = key.transpose(2, 3).contiguous().transpose(2, 3)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    by_products = attend_from_last(query, transposed, value, additive, 0.3)
    expected = F.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), mask, scale=0.3, enable_gqa=True
    )
    for result in (got, by_products):
        torch.testing.assert_close(
            result.double(), expected, rtol=rounding(100), atol=rounding(100)
        )


def test_a_model_goes_on_after_a_cache_with_it(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for gradients."""
    model = load_causal_lm(tiny_folder, torch.float32, torch.device("cpu"))
    calls = []
    original = attention.attend_from_last

    def attend(*given: Any) -> Tensor:
        calls.append(given[0].shape[2])
        return original(*given)

    monkeypatch.setattr(attention, "attend_from_last", attend)
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


def test_a_gpus_model_has_no_copies_of_keys_and_no_plans_of_cudnn(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's attention is off once a GPU is computed with, and stays on where a user wants it."""
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", (set_to := []).append)
    devices._turn_off_cudnn_attention.cache_clear()
    backend = CudaBackend(torch.device("cuda", 0))
    backend.use_cudnn_attention()
    CudaBackend(torch.device("cuda", 1))
    assert set_to == [False, True]
    model = llama()
    backend.use_fastest_attention(model)
    assert model.config._attn_implementation == attention.NAME


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    ends_k: Tensor,
    longest: int,
    longest_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """Attention [M, heads, d] as torch documents it, a sequence after the other."""
    assert torch.equal(ends, ends_k)
    assert longest == longest_k == ends.diff().max()
    assert window_size[1] == 0
    assert ends.dtype == torch.int32
    out = []
    for first, end in itertools.pairwise(ends.tolist()):
        q, k, v = (x[first:end].transpose(0, 1)[None] for x in (query, key, value))
        back = torch.arange(end - first)[:, None] - torch.arange(end - first)
        seen = (back >= 0) & ((window_size[0] < 0) | (back <= window_size[0]))
        got = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        out.append(got[0].transpose(0, 1))
    return torch.cat(out)


WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
MIXED = {**GROUPED, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
PACKED: dict[str, Callable[[], Any]] = {
    "qwen2, windows": lambda: hf.Qwen2Config(**GROUPED, **WINDOW),
    "mistral, all windows": lambda: hf.MistralConfig(**GROUPED, sliding_window=6),
    "gemma3": lambda: hf.Gemma3TextConfig(**MIXED, sliding_window=5),
}
PADDED: dict[str, Callable[[], Any]] = {
    "gemma2, caps": lambda: hf.Gemma2Config(**MIXED, sliding_window=5, attn_logit_softcapping=2.0),
    "gpt-oss, sinks": lambda: hf.GptOssConfig(**MIXED, sliding_window=5, **EXPERTS),
    "deepseek, latent": lambda: hf.DeepseekV3Config(**SMALL, num_key_value_heads=4, **LATENT),
    "mamba": lambda: hf.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=97),
}


@pytest.mark.parametrize("name", PACKED)
def test_sequences_laid_end_to_end_are_computed_as_padded_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States and gradients, with grouped heads and sliding windows; in float64."""
    monkeypatch.setattr(attention, "_varlen_attention", lambda: varlen)
    model = from_config(PACKED[name]()).double()
    rows = [torch.randint(3, 97, (n,)).tolist() for n in (23, 5, 1, 14)]
    found = []
    for packed in (False, True):
        model.zero_grad()
        if packed:
            use_attention(model, attention.PACKED)
            assert forward.packs(model)
            assert forward.packs_rightly(model)
        states = forward.hidden_states(model, rows)
        states = torch.cat([states[i, : len(row)] for i, row in enumerate(rows)])
        states.square().sum().backward()
        found.append([states, *(p.grad for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PADDED)
def test_what_torchs_kernel_does_not_compute_is_not_packed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_varlen_attention", lambda: varlen)
    model = from_config(PADDED[name]())
    use_attention(model, attention.PACKED)
    assert not (forward.packs(model) and forward.packs_rightly(model))


def test_a_gpus_model_that_trains_alone_is_packed_where_torchs_kernel_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In 16 bits and from sm_80 on. CPUs, and attention that a user chose, stay as they are."""
    backend = CudaBackend(torch.device("cuda", 0))
    for dtype, generation, expected in (
        (torch.bfloat16, 9, attention.PACKED),
        (torch.bfloat16, 7, "sdpa"),
        (torch.float32, 9, "sdpa"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, n=generation: (n, 0))
        model = llama(dtype=dtype)
        backend.pack_sequences(model)
        assert model.config._attn_implementation == expected
    model = llama(dtype=torch.bfloat16)
    Backend(torch.device("cpu")).pack_sequences(model)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    use_attention(model, attention.PACKED)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["llama", "qwen2, windows", "gemma3"])
def test_rows_of_one_sequence_are_not_searched_for_several(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU would make the host wait for the search. Without it all states are the same bits."""
    windows = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    model = from_config(
        {
            "llama": lambda: hf.LlamaConfig(**GROUPED),
            "qwen2, windows": lambda: hf.Qwen2Config(
                **GROUPED, use_sliding_window=True, sliding_window=5, max_window_layers=1
            ),
            "gemma3": lambda: hf.Gemma3TextConfig(**GROUPED, head_dim=8, **windows),
        }[kind]()
    )
    search, searched = hf.masking_utils.find_packed_sequence_indices, []

    def noted(position_ids: Tensor) -> Tensor | None:
        searched.append(position_ids)
        found: Tensor | None = search(position_ids)
        return found

    monkeypatch.setattr(hf.masking_utils, "find_packed_sequence_indices", noted)
    attention._let_passes_skip_the_search.cache_clear()
    rows = [[3, 4, 5, 6, 7, 8, 9, 10], [5, 3, 4]]
    states = forward.hidden_states(model, rows)
    forward.output_head(model)
    assert not searched
    ids = forward.pad_right(rows, torch.device("cpu"))
    assert torch.equal(states, model.model(input_ids=ids, use_cache=False).last_hidden_state)
    assert len(searched) > 0  # passes of other code, whose rows may have several sequences
    attention._let_passes_skip_the_search.cache_clear()
