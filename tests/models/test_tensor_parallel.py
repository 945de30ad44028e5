"""Plans of cuts, and models that have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PhiConfig,
    PhiForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from helpers import critic_of, llama
from raising import raises
from sharded_workers import qwen
from stretto.config import ModelConfig
from stretto.errors import ModelError
from stretto.models.lora import add_lora
from stretto.models.tensor_parallel import Cuts, Slices, cut_linears, plan_cuts


def with_experts() -> Qwen2MoeForCausalLM:
    """Experts as planned in transformers 5.23; in 5.17 the plan leaves them whole."""
    config = Qwen2MoeConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_experts=2, intermediate_size=8, moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )  # fmt: skip
    config.base_model_tp_plan = {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}
    return Qwen2MoeForCausalLM(config)


def test_linear_layers_are_cut_by_outputs_and_by_inputs_in_turn() -> None:
    cuts = plan_cuts(llama(), 2)
    layer = {n.removeprefix("model.layers.0."): d for n, d in cuts.dims.items() if ".0." in n}
    assert layer == {
        "self_attn.q_proj.weight": 0,
        "self_attn.k_proj.weight": 0,
        "self_attn.v_proj.weight": 0,
        "self_attn.o_proj.weight": 1,
        "mlp.gate_proj.weight": 0,
        "mlp.up_proj.weight": 0,
        "mlp.down_proj.weight": 1,
    }
    assert not cuts.partial


def test_biases_are_cut_with_outputs_and_norms_of_heads_are_partial() -> None:
    cuts = plan_cuts(qwen(), 2)
    assert cuts.dims["model.layers.1.self_attn.q_proj.bias"] == 0
    assert "model.layers.1.self_attn.o_proj.bias" not in cuts.dims
    assert cuts.partial == {
        f"model.layers.{i}.self_attn.{norm}.weight" for i in (0, 1) for norm in ("q_norm", "k_norm")
    }


def test_adapters_are_cut_where_their_layer_is() -> None:
    cuts = plan_cuts(add_lora(critic_of(llama()), ModelConfig(lora_rank=2), "SEQ_CLS"), 2)
    prefix = "base_model.model.model.layers.0"
    adapters = {n.removeprefix(f"{prefix}."): d for n, d in cuts.dims.items() if "lora" in n}
    assert adapters["self_attn.q_proj.lora_B.default.weight"] == 0
    assert adapters["self_attn.o_proj.lora_A.default.weight"] == 1
    assert "self_attn.q_proj.lora_A.default.weight" not in adapters
    assert "self_attn.o_proj.lora_B.default.weight" not in adapters
    assert cuts.dims[f"{prefix}.mlp.down_proj.base_layer.weight"] == 1


@pytest.mark.parametrize("make", [llama, qwen])
def test_entries_of_embeddings_cut_nothing(make: Any) -> None:
    """Plans have them in transformers 5.17, and not in 5.23; each rank keeps all of the vocabulary.

    Both versions are tried here by adding the entry and by taking it away.
    """
    model = make()
    plan = {k: v for k, v in model.config.base_model_tp_plan.items() if k != "embed_tokens"}
    model.config.base_model_tp_plan = plan
    without = plan_cuts(model, 2)
    model.config.base_model_tp_plan = {"embed_tokens": "embedding_rowwise", **plan}
    assert plan_cuts(model, 2) == without
    assert not any("embed_tokens" in name for name in without.dims)


def test_one_rank_cuts_nothing() -> None:
    assert plan_cuts(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)), 1) == Cuts()


@pytest.mark.parametrize(
    ("model", "size", "code", "fact"),
    [
        (llama, 4, "tp-divides", "2 attention heads"),
        (qwen, 4, "tp-divides", "2 key-value heads"),
        (
            lambda: add_lora(llama(), ModelConfig(lora_rank=2, lora_kind="dora"), "CAUSAL_LM"),
            2,
            "dora-in-slices",
            "q_proj",
        ),
        (
            lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16)),
            2,
            "no-tp-plan",
            "GPT2",
        ),
        (
            with_experts,
            2,
            "no-tp-plan",
            "'packed_colwise'",
        ),
        (
            lambda: PhiForCausalLM(
                PhiConfig(
                    vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=8, qk_layernorm=True,
                )
            ),
            2,
            "no-tp-plan",
            "'model.layers.0.self_attn.q_layernorm.weight'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(model: Any, size: int, code: str, fact: str) -> None:
    with torch.device("cpu"), raises(ModelError, code, fact):
        plan_cuts(model(), size)


def test_layers_that_read_the_same_add_up_their_gradients_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer of a Llama has four sums: behind attention and MLP forward, before them backward."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    sums = list[int]()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: sums.append(tensor.numel()))
    model = llama()
    cut_linears(model, plan_cuts(model, 2), Slices())
    logits = model(input_ids=torch.arange(6)[None], use_cache=False).logits
    assert len(sums) == 2 * 2
    logits.sum().backward()
    assert len(sums) == 2 * 4
    with torch.no_grad():
        model(input_ids=torch.arange(6)[None], use_cache=False)
    assert len(sums) == 2 * 4 + 2 * 2
