"""What vLLM is given to load, out of parts and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from helpers import llama
from stretto.config import ModelConfig
from stretto.layout import Layout
from stretto.models.lora import add_lora, trained_names
from stretto.models.shards import TensorPart, full_parameters, index
from stretto.models.weights import fingerprint_of
from stretto.rollout.vllm.vllm_engine import source_of
from stretto.weights.buckets import BucketPlan


def other(model: Any, seed: int = 5) -> dict[str, Tensor]:
    """New values of the trained parameters, which the model gets."""
    drawn = torch.Generator().manual_seed(seed)
    new = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                new[name] = torch.randn(p.shape, generator=drawn)
                p.copy_(new[name])
    return new


class Parts(dict[str, Any]):
    """Parts of tensors in the order of an fsdp learner's ranks: several may have one name."""

    def __init__(self, parts: list[tuple[str, TensorPart]]) -> None:
        super().__init__()
        self._parts = parts

    def items(self) -> Any:
        return iter(self._parts)


@pytest.mark.parametrize("frozen", [0, 3])
@pytest.mark.parametrize("ranks", [1, 3])
def test_whole_tensors_come_out_of_the_parts_of_several_ranks(ranks: int, frozen: int) -> None:
    learner = llama()
    for p in list(learner.parameters())[:frozen]:
        p.requires_grad_(False)
    source = source_of(llama() if not frozen else learner)
    new = other(learner)
    wholes = {n: w for n, w in full_parameters(learner, {}).items() if n in trained_names(learner)}
    parts = []
    for rank in range(ranks):
        for name, box in Layout(fsdp=ranks).own(wholes, rank).items():
            values = new[name][index(box)].clone()
            parts.append((name, TensorPart(values, index(box))))
    came = {}
    for name, tensor in source.tensors(Parts(parts)):
        came[name] = tensor
    for _, part in parts:
        part.tensor.zero_()  # what it came in is written to again
    named = dict(learner.named_parameters())
    assert came.keys() == named.keys()
    assert all(came[n].equal(p) for n, p in named.items())
    assert source.fingerprint() == fingerprint_of(learner)


def test_a_tensor_is_handed_on_before_the_next_one_arrives() -> None:
    """No second copy of the model is made on the way."""
    model, came = llama(), list[str]()

    class Arriving(dict[str, Any]):
        def items(self) -> Any:
            for name, p in model.named_parameters():
                came.append(name)
                yield name, p.detach()

    for count, (name, _) in enumerate(source_of(llama()).tensors(Arriving()), 1):
        assert (len(came), came[-1]) == (count, name)


def test_of_parts_that_come_from_four_ranks_one_parameter_is_held() -> None:
    """Bytes of parameters that have begun to come and are not handed on, at each part."""
    model = llama()
    wholes, layout = full_parameters(model, {}), Layout(fsdp=4)
    sources = [layout.own(wholes, rank) for rank in range(4)]
    dtypes = {name: full.dtype for name, full in wholes.items()}
    named, waiting, held = dict(model.named_parameters()), dict[str, int](), list[int]()

    class Arriving(dict[str, Any]):
        def items(self) -> Any:
            for bucket in BucketPlan.of_sources(sources, dtypes, 256).buckets:
                for part in sorted(bucket, key=lambda part: part.source):
                    waiting.setdefault(part.name, named[part.name].nbytes)
                    held.append(sum(waiting.values()))
                    place = index(part.bounds)
                    yield part.name, TensorPart(named[part.name].detach()[place], place)

    for name, tensor in source_of(llama()).tensors(Arriving()):
        assert tensor.equal(named[name])
        del waiting[name]
    largest = max(p.nbytes for p in model.parameters())
    assert not waiting
    assert max(held) <= largest + 4 * 256  # a bucket's small parameters may begin together


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_experts_come_as_they_are_in_files(kind: str, tmp_path: Path) -> None:
    """transformers keeps a layer's experts in two tensors, and files have three an expert."""
    config = AutoConfig.for_model(
        kind, vocab_size=13, hidden_size=8, intermediate_size=12, moe_intermediate_size=6,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_experts=3,
        num_local_experts=3, num_experts_per_tok=2, head_dim=4, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    source = source_of(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    came = dict(source.tensors({n: p.detach() for n, p in model.named_parameters()}))
    assert came.keys() == files.keys() != dict(model.named_parameters()).keys()
    assert all(came[name].equal(tensor) for name, tensor in files.items())
    assert source.fingerprint() == fingerprint_of(model)


def test_adapters_are_merged_under_the_names_of_the_plain_model() -> None:
    settings = ModelConfig(lora_rank=2, lora_targets=("q_proj", "embed_tokens"))
    learner = add_lora(llama(tied=False), settings, "CAUSAL_LM")
    with pytest.warns(UserWarning, match="embed_tokens has one"):
        source = source_of(add_lora(llama(tied=False), settings, "CAUSAL_LM"))
    new = other(learner)
    came = dict(source.tensors(new))
    assert source.fingerprint() == fingerprint_of(learner)
    plain = learner.merge_and_unload()  # type: ignore[operator]
    named = dict(plain.named_parameters())
    assert came.keys() == named.keys()
    for name, p in named.items():
        torch.testing.assert_close(came[name], p.detach())
    again = dict(source.tensors(new))
    assert all(again[n].equal(t) for n, t in came.items())


def test_adapters_that_vllm_takes_are_written_as_they_are() -> None:
    """The weights below come once; the folder has what PEFT would load."""
    from peft import PeftModel

    settings = ModelConfig(lora_rank=2)
    learner = add_lora(llama(), settings, "CAUSAL_LM")
    source = source_of(add_lora(llama(), settings, "CAUSAL_LM"))
    new = other(learner)
    came = dict(source.tensors(new))
    plain = llama()
    assert {name: came[name].equal(p) for name, p in plain.named_parameters()} == dict.fromkeys(
        came, True
    )
    assert source.fingerprint() == fingerprint_of(learner)
    assert source.lora_rank == 2
    again = other(learner, seed=6)
    assert not dict(source.tensors(again))
    there = PeftModel.from_pretrained(plain, source.adapters)
    found = {name.replace(".default", ""): p for name, p in there.named_parameters()}
    assert all(found[n.replace(".default", "")].equal(p) for n, p in again.items())


def test_a_small_update_survives_as_adapters_alone() -> None:
    """B of one step at 1e-5 on weights of bfloat16: below half a unit in their last place.

    As adapters both factors are rounded, each by at most 2^-9 of itself: their product is within
    2^-7 of the update's norm. Merged, a weight of 0.02 moves only where the update exceeds half of
    2^-13, while its standard deviation is some 8e-6: only the smallest weights take any of it.
    """
    drawn = torch.Generator().manual_seed(0)
    weight = (0.02 * torch.randn(512, 512, generator=drawn)).bfloat16().float()
    a = torch.randn(16, 512, generator=drawn) / 512**0.5
    b = 1e-5 * torch.randn(512, 16, generator=drawn).sign()
    update = 2.0 * b @ a
    as_adapters = 2.0 * b.bfloat16().float() @ a.bfloat16().float()
    merged = (weight + update).bfloat16().float() - weight
    assert (as_adapters - update).norm() < 2**-7 * update.norm()
    assert (merged * update).sum() < 0.5 * update.square().sum()
