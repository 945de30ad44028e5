"""Models whose weights stay in their files until they are divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from helpers import llama
from run_helpers import settings
from stretto.assembly.run_models import load_actor
from stretto.models.heads import critic_from_actor
from stretto.models.load import load_causal_lm
from stretto.models.mapped import copied, final, final_dtype, held_bytes, stored_dtype, take
from stretto.models.tiny import byte_tokenizer
from stretto.models.weights import fingerprint
from stretto.saying import format_size

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16


def moe() -> Any:
    """A model whose experts transformers puts together from several tensors of the files."""
    config = Qwen2MoeConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, intermediate_size=8,
        moe_intermediate_size=8, shared_expert_intermediate_size=8,
    )  # fmt: skip
    return Qwen2MoeForCausalLM(config)


def gemma() -> Any:
    """A model with a buffer in the model's own type."""
    config = Gemma3TextConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, intermediate_size=8,
    )  # fmt: skip
    return Gemma3ForCausalLM(config)


def mixed() -> Any:
    """A model with norms in float32 whatever the type of the others."""
    model = llama()
    cast = model.to

    def to(dtype: torch.dtype) -> Any:
        cast(dtype).model.norm.float()
        return model

    model.to = to
    return model


def assert_as_whole(folder: Path, dtype: torch.dtype) -> Any:
    """Load a model both ways, and compare what they are to be; return the one in its files."""
    whole = load_causal_lm(folder, dtype, CPU)
    model = load_causal_lm(folder, dtype, CPU, in_files=True)
    assert fingerprint(model.named_parameters()) == fingerprint(whole.named_parameters())
    for (name, one), (_, two) in zip(
        model.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert final_dtype(one) == two.dtype, name
        assert final(one).equal(two), name
    for (name, one), (_, two) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        assert one.dtype == two.dtype, name
        assert one.equal(two), name
    return model


@pytest.mark.parametrize("stored", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_stay_in_files_in_the_files_type(
    stored: torch.dtype, dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    llama(tied=tied).to(stored).save_pretrained(tmp_path, max_shard_size="4KB")
    assert stored_dtype(tmp_path) == stored
    model = assert_as_whole(tmp_path, dtype)
    assert {p.dtype for p in model.parameters()} == {stored}
    assert held_bytes(model) == 0


def test_what_is_taken_is_held_in_its_type(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    whole = load_causal_lm(tmp_path, BF16, CPU)
    model = take(load_causal_lm(tmp_path, BF16, CPU, in_files=True), CPU)
    assert held_bytes(model) == sum(p.nbytes for p in whole.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    assert all(one.dtype == BF16 and one.equal(two) for one, two in pairs)


def test_copies_share_what_stays_in_files_and_nothing_else(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path, BF16, CPU, in_files=True)
    critic: Any = critic_from_actor(model)
    head = critic.score.weight
    assert head.dtype == BF16
    assert held_bytes(critic) == head.nbytes
    twin = copied(critic).requires_grad_(False)
    assert all(p.requires_grad for p in critic.parameters())
    assert {final_dtype(p) for p in twin.parameters()} == {BF16}
    assert twin.score.weight.data_ptr() != head.data_ptr()
    assert {id(p) for p in twin.parameters()}.isdisjoint(map(id, critic.parameters()))


@pytest.mark.parametrize(
    ("make", "stored", "dtype", "whole"),
    [
        (moe, F32, F32, False),  # the experts alone
        (gemma, F32, BF16, True),
        (gemma, BF16, BF16, False),
        (llama, torch.float16, F32, True),
        (mixed, F32, F32, False),
        (mixed, BF16, F32, False),
    ],
)
def test_what_cannot_stay_in_files_is_loaded_as_before_and_it_is_said(
    make: Any, stored: torch.dtype, dtype: torch.dtype, whole: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    make().to(stored).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model = assert_as_whole(tmp_path, dtype)
    held, everything = held_bytes(model), sum(p.nbytes for p in model.parameters())
    assert held == everything if whole else held < everything
    said = list[str]()
    name = str(dtype).removeprefix("torch.")
    config = settings(tmp_path, model={"name": str(tmp_path), "dtype": name})
    load_actor(config.model, said.append, in_files=True)
    assert [f"loads {format_size(held)} of" in line for line in said] == [True] * bool(held)


def test_adapters_take_weights_of_another_type_out_of_their_files(tmp_path: Path) -> None:
    """As they are made in the type of the weights beside them."""
    llama().save_pretrained(tmp_path)
    config = settings(tmp_path, model={"name": str(tmp_path), "dtype": "bfloat16", "lora_rank": 2})
    said = list[str]()
    model = load_actor(config.model, said.append, in_files=True)
    assert {p.dtype for p in model.parameters()} == {BF16}
    assert "every rank loads" in said[-1]
