"""Optimizers of bitsandbytes: refused where they cannot be, and with states of AdamW's form."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from raising import raises
from stretto.config import recipes
from stretto.config.training_config import OptimizerConfig, TrainingConfig
from stretto.errors import ConfigError, MissingExtraError
from stretto.training.optimizers import make_optimizer
from stretto.training.trained import LearningRate, TrainedModel

RATE = LearningRate(1e-2, 100)


def trained(optim: str) -> tuple[nn.Linear, TrainedModel]:
    """A layer of so many weights that bitsandbytes keeps its moments in 8 bits."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 128, bias=False)
    return linear, TrainedModel(linear, RATE, TrainingConfig(optim=optim, grad_clip=0))


def steps(linear: nn.Linear, model: TrainedModel, first: int, last: int) -> None:
    for seed in range(first, last):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
        linear(x).square().sum().backward()
        model.update()


def moments(model: TrainedModel) -> Mapping[str, Any]:
    found: Mapping[str, Any] = model.state_dict()["moments"]["weight"]
    return found


def test_bitsandbytes_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with raises(MissingExtraError, "missing-library", "training.optim = 'adamw_8bit'"):
        trained("adamw_8bit")


@pytest.mark.parametrize(
    "sections",
    [
        {"cluster": {"processes": [{"roles": ["learner"], "ranks": 2}]}},
        {"cluster": {"processes": [{"roles": ["learner", "reference"], "offload": True}]}},
        {"pipeline": {"ranks": 2}, "runtime": "inline"},
    ],
)
def test_moments_of_other_forms_are_for_one_process(sections: dict[str, Any]) -> None:
    given = {"runtime": "local", **sections, "training": {"optim": "adamw_8bit"}}
    with raises(ConfigError, "optimizer-of-one-process", "adamw_8bit"):
        recipes.build(given, "here")


@pytest.mark.parametrize("optim", ["adamw_8bit", "adamw_32bit"])
def test_on_a_cpu_nothing_is_paged(optim: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weights = [nn.Parameter(torch.zeros(2))]
    made = make_optimizer(
        weights, 1e-3, OptimizerConfig.model_validate({"optim": f"paged_{optim}"})
    )
    plain = {"adamw_8bit": "AdamW8bit", "adamw_32bit": "AdamW32bit"}[optim]
    assert type(made) is getattr(bitsandbytes.optim, plain)


def test_moments_in_8_bits_are_near_adamws_and_go_on_from_them() -> None:
    """bitsandbytes' dynamic code has steps of up to 1 / 64 of its block's largest number."""
    pytest.importorskip("bitsandbytes")
    (exact, adamw), (linear, eight) = trained("adamw_torch_fused"), trained("adamw_8bit")
    steps(exact, adamw, 0, 1)
    steps(linear, eight, 0, 1)
    held = eight._optimizer.state[linear.weight]
    assert held["state1"].dtype == held["state2"].dtype == torch.uint8
    for name, want in moments(adamw).items():
        if name != "step":
            got = moments(eight)[name]
            assert got.dtype == torch.float32
            assert (got - want).abs().max() <= want.abs().max() / 64
    for source in (adamw, eight):
        other, resumed = trained("adamw_8bit")
        resumed.load_state_dict(source.state_dict())
        assert moments(resumed)["step"] == 1
        for name in ("exp_avg", "exp_avg_sq"):
            want = moments(source)[name]
            assert (moments(resumed)[name] - want).abs().max() <= want.abs().max() / 64
        steps(other, resumed, 1, 3)
    _, back = trained("adamw_torch_fused")
    back.load_state_dict(eight.state_dict())
    assert moments(back)["exp_avg"].equal(moments(eight)["exp_avg"])


class Small(nn.Module):
    """Weights, biases and norms by layer and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 3)
        self.ln_f = nn.LayerNorm(3)
        self.input_layernorm = nn.Linear(3, 3, bias=False)
        self.norm = nn.Linear(3, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.input_layernorm(self.ln_f(self.up(x))))


def test_weight_decay_leaves_norms_and_biases_alone() -> None:
    """Without a gradient, AdamW's update is the decay: 1 - 0.5 * 0.2 after one update."""
    small = Small()
    start = {name: p.detach().clone() for name, p in small.named_parameters()}
    config = TrainingConfig(weight_decay=0.2, grad_clip=0)
    model = TrainedModel(small, LearningRate(0.5, 100), config)
    saved = model.state_dict()
    (0.0 * small(torch.ones(1, 2)).sum()).backward()
    model.update()
    for name, p in small.named_parameters():
        factor = 0.9 if name == "up.weight" else 1.0
        torch.testing.assert_close(p.detach(), factor * start[name], msg=name)
    saved["masters"] = start
    model.load_state_dict(saved)
    (0.0 * small(torch.ones(1, 2)).sum()).backward()
    model.update()
    torch.testing.assert_close(small.up.weight.detach(), 0.9 * start["up.weight"])


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_a_state_is_continued_with_other_settings(kind: str) -> None:
    """Equal to torch's AdamW whose settings change after three updates, without a copy between."""
    before = TrainingConfig.model_validate({"lr_schedule": kind, "grad_clip": 0})
    after = before.model_copy(update={"betas": (0.5, 0.6)})
    linears = [nn.Linear(64, 128, bias=False) for _ in range(3)]
    for linear in linears[1:]:
        linear.load_state_dict(linears[0].state_dict())
    first = TrainedModel(linears[0], LearningRate(1e-2, 10, warmup=2), before)
    steps(linears[0], first, 0, 3)
    second = TrainedModel(linears[1], LearningRate(5e-2, 10, warmup=2), after)
    second.load_state_dict(first.state_dict())
    steps(linears[1], second, 3, 6)

    plain = torch.optim.AdamW(
        linears[2].parameters(), 1e-2, betas=before.betas, weight_decay=0.0, fused=True
    )
    (group,) = plain.param_groups
    for step in range(6):
        if step == 3:
            group["betas"] = after.betas
        peak = 1e-2 if step < 3 else 5e-2
        progress = (step - 2) / 8
        cosine = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1.0
        group["lr"] = peak * (step / 2 if step < 2 else cosine)
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        linears[2](x).square().sum().backward()
        plain.step()
        plain.zero_grad()
    assert linears[1].weight.equal(linears[2].weight)
    assert second.lr == pytest.approx(
        5e-2 * (1 + math.cos(math.pi / 2)) / 2 if kind == "cosine" else 5e-2
    )
