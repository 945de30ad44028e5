"""What vLLM is given to load, out of parts and adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import llama
from stretto.config import ModelConfig
from stretto.models.lora import add_lora, trained_names
from stretto.models.shards import ShardLayout, TensorPart, index
from stretto.models.tensor_parallel import full_parameters
from stretto.models.weights import fingerprint_of
from stretto.rollout.vllm.engine import source_of


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
        for name, box in ShardLayout(fsdp=ranks).own(wholes, rank).items():
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


def test_adapters_are_merged_under_the_names_of_the_plain_model() -> None:
    settings = ModelConfig(lora_rank=2, lora_targets=("q_proj", "embed_tokens"))
    learner = add_lora(llama(tied=False), settings, "CAUSAL_LM")
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
