"""An algorithm of the user's own, the example of docs/algorithms.md, and entries of the lists."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from docs_helpers import blocks
from helpers import critic_of, llama, make_learner
from learner_helpers import algorithm_settings, assert_close, learned_gradients, make_batch, now
from raising import raises
from stretto import runs
from stretto.algorithms import ppo
from stretto.algorithms.experience import LossInputs, LossTerm
from stretto.algorithms.registry import FUNCTIONS, Functions
from stretto.checks.user_functions import check_algorithm
from stretto.config import AlgorithmConfig, Config, recipes
from stretto.config.algorithm import ALGORITHMS, AlgorithmSpec
from stretto.errors import ConfigError
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.schedules.rollout import train_batch

SURPRISE = "surprise.py:surprise"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the docs show, in the working directory."""
    code = next(code for code in blocks("algorithms", "python") if "surprise = " in code)
    (tmp_path / "surprise.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "surprise.py"


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

built(1, name="surprise.py:surprise")
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
    assert "online-dpo,distill,best-of-n,surprise}" in text.replace(", ", ",")
    assert "sequence_sum for rloo, copg, surprise;" in text


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("budget", [1, 100_000])
def test_the_example_trains_with_its_own_tensor(budget: int) -> None:
    actor = llama(dtype=torch.float64)
    batch = make_batch(actor, {"name": "rloo"})
    a = AlgorithmConfig(name=SURPRISE)
    settings = algorithm_settings(a, training={"microbatch_tokens": budget})  # type: ignore[arg-type]
    learner = make_learner(actor, None, settings)
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


def settings(folder: Path, name: str, **changes: Any) -> Config:
    data: dict[str, Any] = {
        "steps": 1,
        "threads": 1,
        "model": {"name": str(folder), "dtype": "float32"},
        "task": {"settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}},
        "rollout": {"batch": 4, "samples_per_prompt": 2, "max_new_tokens": 6},
        "reward": {"missing_eos": "off"},
        "algorithm": {"name": name},
        "training": {"lr": 1e-3},
    }
    return recipes.build({**data, **changes}, "here")


@pytest.mark.usefixtures("example")
def test_the_example_trains_alike_in_one_process_and_in_several(
    tiny_folder: Path, tmp_path: Path
) -> None:
    weights = []
    for runtime in ("inline", "local"):
        config = settings(tiny_folder, SURPRISE, runtime=runtime)
        run = RunDirectory.create(tmp_path / "runs", runtime, config)
        runs.train(config, run_dir=run, progress=Progress())
        weights.append(load_file(run.model / "model.safetensors"))
    inline, local = weights
    assert all(inline[name].equal(local[name]) for name in inline)

    kept = RunDirectory.open(tmp_path / "runs" / "inline-001")
    assert recipes.load(kept.path).algorithm.name == SURPRISE
    assert "surprise.py:surprise" in (kept.model / "README.md").read_text()


def test_a_file_next_to_the_settings_is_found(example: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "surprise").mkdir(parents=True)  # is no file of code
    example.rename(folder / "surprise.py")
    for name, located in (
        (SURPRISE, f"{folder}/surprise.py:surprise"),
        ("surprise:surprise", "surprise:surprise"),
        ("rloo", "rloo"),
    ):
        (folder / "run.toml").write_text(
            f'algorithm.name = "{name}"\nrollout.samples_per_prompt = 2\n'
        )
        assert recipes.load(folder / "run.toml").algorithm.name == located


OTHERS = """
from dataclasses import replace
from stretto.algorithms import Algorithm, rloo

def two(data, rewards):
    return data

def flat(data, rewards, settings):
    made = rloo.targets(data, rewards, settings)
    return replace(made, advantages=made.advantages[:, 0])

def tensor(logprobs, inputs, settings):
    return logprobs.sum()

def vector(logprobs, inputs, settings):
    return replace(rloo.policy_loss(logprobs, inputs, settings), loss=inputs.weights)

def missing(logprobs, inputs, settings):
    return inputs.tensors["missing"]

two_parameters = Algorithm(two, rloo.policy_loss)
critic = Algorithm(rloo.targets, rloo.policy_loss, critic=True)
implicit = Algorithm(rloo.targets, rloo.policy_loss, kl_in="implicit")
four = Algorithm(rloo.targets, rloo.policy_loss, group=4)
shape = Algorithm(flat, rloo.policy_loss)
kind = Algorithm(rloo.targets, tensor)
losses = Algorithm(rloo.targets, vector)
raising = Algorithm(rloo.targets, missing)
"""


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "others.py").write_text(OTHERS)
    (tmp_path / "broken.py").write_text("spec = 1 / 0\n")
    (tmp_path / "lacking.py").write_text("import not_installed\nspec = 1\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(
    ("name", "changes", "code", "fact"),
    [
        ("missing.py:spec", {}, "no-reward-file", "missing.py"),
        ("no_module:spec", {}, "no-reward-module", "no_module"),
        ("others.py:critics", {}, "unknown-function", "'critic'"),
        ("others.py:two", {}, "wrong-kind-of-object", "Algorithm"),
        ("broken.py:spec", {}, "import-failed", "line 1"),
        ("lacking.py:spec", {}, "reward-import-missing", "not_installed"),
        ("others.py:two_parameters", {}, "algorithm-signature", "targets"),
        ("others.py:critic", {}, "algorithm-critic", "value_loss"),
        ("others.py:four", {}, "group-too-small", "4"),
        ("others.py:implicit", {"kl_in": "loss"}, "implicit-kl-placed", "kl_coef"),
    ],
)
def test_code_that_is_no_algorithm_or_does_not_fit_the_run_is_refused(
    name: str, changes: dict[str, Any], code: str, fact: str
) -> None:
    given = {"algorithm": {"name": name, **changes}, "rollout": {"samples_per_prompt": 2}}
    config = recipes.build(given, "here")  # imports nothing
    with raises(ConfigError, code, "algorithm.", fact):
        check_algorithm(config)


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(
    ("name", "code", "fact"),
    [
        ("shape", "algorithm-shape", "advantages of shape [8]"),
        ("losses", "algorithm-shape", "loss of shape [8"),
        ("kind", "wrong-kind-of-object", "LossTerm"),
        ("raising", "outside-raised", "in missing"),
    ],
)
def test_functions_that_fail_in_a_step_are_named(name: str, code: str, fact: str) -> None:
    actor = llama()
    batch = make_batch(actor, {"name": "rloo"})
    a = AlgorithmConfig(name=f"others.py:{name}")
    learner = make_learner(actor, None, algorithm_settings(a))  # type: ignore[arg-type]
    with raises(ConfigError, code, f"others.py:{name}", fact):
        learned_gradients(learner, batch)
