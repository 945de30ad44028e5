"""A trained model whose moments and masters rest on the host between updates."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from helpers import held_bytes
from stretto.config import OptimizerConfig
from stretto.models.offload import CopyStream, OffloadedTensors
from stretto.training.trained import LearningRate, TrainedModel


def trained(dtype: torch.dtype) -> TrainedModel:
    torch.manual_seed(0)
    return TrainedModel(nn.Linear(64, 64, dtype=dtype), LearningRate(1e-2, 9), OptimizerConfig())


def learn(model: TrainedModel, number: int) -> None:
    rows = torch.full((2, 64), float(number + 1), dtype=model.dtype)
    with model.training():
        model.model(rows).square().sum().backward()
    model.update()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_the_same_and_states_outlast_that_they_are_put_away(dtype: torch.dtype) -> None:
    plain, offloaded = trained(dtype), trained(dtype)
    moments = OffloadedTensors("learner", offloaded.of_updates, CopyStream(torch.device("cpu")))
    offloaded.before_update = moments.wait
    elements = 64 * 64 + 64
    for number in range(3):
        moments.offload()
        assert held_bytes(offloaded.of_updates()) <= 6 * 4  # an element each
        moments.load()
        moments.changed = True
        learn(plain, number)
        learn(offloaded, number)
    tensors = 3 if dtype == torch.bfloat16 else 2  # moments, and the master if it is another
    assert held_bytes(offloaded.of_updates()) == tensors * 4 * elements
    state, expected = offloaded.state_dict(), plain.state_dict()
    before = copy.deepcopy(state["moments"])
    moments.offload()  # while somebody may be writing them
    for name, held in state["moments"].items():
        for key, value in held.items():
            assert value.equal(before[name][key])
            assert value.equal(expected["moments"][name][key])
    for name, master in state["masters"].items():
        assert master.equal(expected["masters"][name])
    moments.wait()
    offloaded.load_state_dict(copy.deepcopy(expected))
    moments.offload()
    moments.load()
    learn(plain, 3)
    learn(offloaded, 3)
    for one, two in zip(plain.model.parameters(), offloaded.model.parameters(), strict=True):
        assert one.equal(two)
