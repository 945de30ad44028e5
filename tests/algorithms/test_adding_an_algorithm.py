"""An algorithm is a file and two entries: the example of docs/algorithms.md, trained."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import critic_of, llama, make_learner
from learner_helpers import algorithm_settings, assert_close, learned_gradients, make_batch, now
from stretto.algorithms import ppo
from stretto.algorithms.experience import LossInputs, LossTerm
from stretto.algorithms.registry import FUNCTIONS, Functions
from stretto.config import AlgorithmConfig, recipes
from stretto.config.algorithm import ALGORITHMS, AlgorithmSpec
from stretto.schedules.rollout import train_batch

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The file that the docs show."""
    section = DOCS.read_text().partition("\n## Adding an algorithm\n")[2].partition("\n## ")[0]
    file = tmp_path / "surprise.py"
    file.write_text(section.partition("```python\n")[2].partition("```")[0])
    return file


def listed(
    called: str, spec: AlgorithmSpec, functions: Functions, monkeypatch: pytest.MonkeyPatch
) -> AlgorithmConfig:
    """Settings that name an algorithm which is in the lists from now on.

    The names that settings take are those of the list as it was when they were imported.
    """
    monkeypatch.setitem(ALGORITHMS, called, spec)  # type: ignore[misc]
    monkeypatch.setitem(FUNCTIONS, called, functions)  # type: ignore[misc]

    class Named(AlgorithmConfig):
        name: str = called

    return Named()


def imported(file: Path) -> Any:
    spec = spec_from_file_location(f"stretto.algorithms.{file.stem}", file)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DERIVED = """
import sys
from importlib.machinery import SourceFileLoader

read, after = SourceFileLoader.get_data, b'    "best-of-n": AlgorithmSpec'
sys.pycache_prefix = sys.argv[1]

def with_an_entry(self, path):
    data = read(self, path)
    if path.endswith("config/algorithm.py"):
        assert data.count(after) == 1
        start, _, end = data.partition(after)
        line, _, rest = end.partition(b"\\n")
        data = start + after + line + b'\\n    "surprise": AlgorithmSpec(),\\n' + rest
    return data

SourceFileLoader.get_data = with_an_entry
from stretto.config import recipes
from stretto.errors import ConfigError

def built(samples, **algorithm):
    given = {"name": "surprise", **algorithm}
    return recipes.build({"algorithm": given, "rollout": {"samples_per_prompt": samples}}, "here")

config = built(2, clip=0.1)
print(config.remarks)
print(config.algorithm.kl_place, config.algorithm.averaging, config.algorithm.definition.critic)
for wrong in ({"samples": 1}, {"samples": 2, "name": "zzz"}):
    try:
        built(**wrong)
    except ConfigError as error:
        print(error)
assert "torch" not in sys.modules
from stretto.cli.main import main
main(["train", "tiny", "--help-all"])
"""


def test_settings_derive_from_the_entry_and_load_no_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DERIVED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    remarks, traits, group, unknown, *shown = done.stdout.splitlines()
    assert remarks == "[\"without effect on 'surprise': algorithm.clip\"]"
    assert traits == "reward sequence_sum False"
    assert "'surprise' compares the responses to one prompt and needs" in group
    assert "'best-of-n' or 'surprise'" in unknown
    text = " ".join(" ".join(shown).replace("│", " ").split())
    assert "online-dpo,best-of-n,surprise}" in text.replace(", ", ",")
    assert "sequence_sum for rloo, copg, surprise;" in text


@pytest.mark.parametrize("budget", [1, 100_000])
def test_the_example_trains_with_its_own_tensor(
    example: Path, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = llama(dtype=torch.float64)
    batch = make_batch(actor, {"name": "rloo"})
    module = imported(example)
    functions = Functions(module.targets, module.policy_loss)
    a = listed("surprise", AlgorithmSpec(), functions, monkeypatch)
    learner = make_learner(
        actor,
        None,
        algorithm_settings(a, training={"microbatch_tokens": budget}),  # type: ignore[arg-type]
    )
    advantages = learner.experience_of(train_batch(batch)).advantages

    logprobs, loss = now(actor, batch), torch.zeros((), dtype=torch.float64)
    for b, rollout in enumerate(batch):
        surprise = 1 - torch.tensor(rollout.logprobs).exp()
        n = len(rollout)
        loss = loss - (surprise * advantages[b, :n] * logprobs[b, :n]).sum() / len(batch)
    loss.backward()
    expected = {}
    for name, p in actor.named_parameters():
        assert p.grad is not None
        expected[f"actor.{name}"], p.grad = p.grad.clone(), None

    got, stats = learned_gradients(learner, batch)
    assert_close({k: got[k] for k in expected}, expected)
    assert stats["loss/policy_avg"] == pytest.approx(loss.item(), rel=1e-5)


def test_the_critic_is_trained_with_the_algorithms_own_value_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def doubled(values: Tensor, inputs: LossInputs, settings: AlgorithmConfig) -> LossTerm:
        once = ppo.value_loss(values, inputs, settings)
        return once + once

    gradients = []
    functions = FUNCTIONS["ppo"]
    for changed in (functions, replace(functions, value_loss=doubled)):
        actor = llama(dtype=torch.float64)
        batch = make_batch(actor, {"name": "ppo"})
        a = listed("as-ppo", ALGORITHMS["ppo"], changed, monkeypatch)
        learner = make_learner(actor, critic_of(actor).double(), algorithm_settings(a))  # type: ignore[arg-type]
        gradients.append(learned_gradients(learner, batch)[0])
    once, twice = gradients
    factors = {name: 2 if name.startswith("critic.") else 1 for name in once}
    assert set(factors.values()) == {1, 2}
    assert_close(twice, {name: factors[name] * g for name, g in once.items()})


def test_own_settings_are_settings() -> None:
    assert set(ALGORITHMS) == set(FUNCTIONS)
    for name, spec in ALGORITHMS.items():
        assert set(spec.settings) <= set(recipes.setting_names())
        looked_at = {"critic.init", "training.critic_lr"} & set(spec.settings)
        assert len(looked_at) == (2 if spec.critic else 0)
        assert spec.critic == (FUNCTIONS[name].value_loss is not None)
