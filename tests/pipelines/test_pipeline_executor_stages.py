"""Cutting models into stages."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline_models import critic_of, language_model
from raising import raises
from stretto.config import ModelConfig
from stretto.errors import ModelError
from stretto.models.attention import use_attention
from stretto.models.forward import backbone, output_head
from stretto.models.heads import apply_scalar_head
from stretto.models.lora import add_lora
from stretto.pipelines.executor.stages import check_cut, cut

IDS = torch.arange(21).reshape(3, 7) * 2


def chain(model: Any, stages: int, ids: Tensor = IDS) -> Tensor:
    x = ids
    for index in range(stages):
        x = cut(model, stages, index)(x)
    return x


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 4}),
        ("gpt_neox", {}),
        ("gemma", {}),
        ("gemma2", {"sliding_window": 3}),
        ("olmo2", {}),
        ("cohere", {}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("starcoder2", {}),
        ("phi", {}),
    ],
)
def test_stages_compute_what_the_model_does(kind: str, settings: dict[str, Any]) -> None:
    model = language_model(kind, layers=5, **settings)
    check_cut(model, 3)
    whole = backbone(model)(input_ids=IDS, use_cache=False).last_hidden_state
    torch.testing.assert_close(chain(model, 3), whole, rtol=0, atol=1e-6)


def test_layers_are_shared_out_evenly_and_parameters_are_the_models_own() -> None:
    model = language_model("llama", layers=5)
    stages: list[Any] = [cut(model, 3, index) for index in range(3)]
    assert [len(s.body.layers) for s in stages] == [2, 2, 1]
    whole = dict(model.named_parameters())
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter is whole[stage.names[name]]
    names = [name for stage in stages for name in stage.names.values()]
    assert sorted(names) == sorted([*whole, "model.embed_tokens.weight"])
    assert all(s.tied == {"model.embed_tokens.weight"} for s in stages)
    assert [s.first for s in stages] == [True, False, False]
    assert [s.last for s in stages] == [False, False, True]
    assert {(s.hidden_size, s.dtype) for s in stages} == {(32, torch.float32)}
    untied = cut(language_model("llama", tied=False), 2, 1)
    assert not untied.tied
    assert untied.names["lm_head.weight"] == "lm_head.weight"


def test_the_last_stage_has_the_head_that_losses_take() -> None:
    model = language_model("cohere", layers=2, logit_scale=0.5)
    hidden = chain(model, 2)
    logits = model(input_ids=IDS).logits
    torch.testing.assert_close(cut(model, 2, 1).head.logits(hidden), logits)
    assert cut(model, 2, 1).head == output_head(model)
    with raises(ModelError, "stage-without-head", "stage 0 of 2"):
        _ = cut(model, 2, 0).head
    critic = critic_of(language_model("llama", layers=2))
    stage = cut(critic, 2, 1)
    values = apply_scalar_head(stage, chain(critic, 2))
    assert values.equal(apply_scalar_head(critic, backbone(critic)(IDS).last_hidden_state))
    assert stage.names["score.weight"] == "score.weight"


def test_a_stage_travels_with_its_own_attention() -> None:
    model = language_model("llama", layers=2)
    use_attention(model)
    stage = cut(model, 2, 0)
    sent = pickle.loads(pickle.dumps(stage))
    assert sent.body.config._attn_implementation == "stretto"
    assert sent(IDS).equal(stage(IDS))
    assert sent.names == stage.names


def test_lora_adapters_are_cut_with_their_layers() -> None:
    config = ModelConfig(lora_rank=2)
    actor = add_lora(language_model("llama", layers=3), config, "CAUSAL_LM")
    critic = add_lora(critic_of(language_model("llama", layers=3)), config, "SEQ_CLS")
    for model in (actor, critic):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3)
        check_cut(model, 3)
        whole = backbone(model)(input_ids=IDS, use_cache=False).last_hidden_state
        torch.testing.assert_close(chain(model, 3), whole, rtol=0, atol=1e-6)
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert trained <= {name for i in range(3) for name in cut(model, 3, i).names.values()}
    values = apply_scalar_head(cut(critic, 3, 2), chain(critic, 3))
    assert values.equal(apply_scalar_head(critic, backbone(critic)(IDS).last_hidden_state))


def test_models_that_cannot_be_cut_are_refused() -> None:
    with raises(ModelError, "too-few-layers", "LlamaModel has 2 layers", 3):
        check_cut(language_model("llama", layers=2), 3)
    with raises(ModelError, "no-plan-of-parts", "GPT2Model"):
        check_cut(language_model("gpt2", layers=2), 2)
    scaled = language_model("granite", layers=2, embedding_multiplier=6.0)
    with raises(ModelError, "stages-compute-otherwise"):
        check_cut(scaled, 2)


def test_a_parameter_of_two_stages_is_refused() -> None:
    model = language_model("llama", layers=2)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with raises(ModelError, "parameter-on-other-stages", "layers.0.mlp.gate_proj.weight", "2 of 2"):
        check_cut(model, 2)
