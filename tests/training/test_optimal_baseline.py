"""VCPO's optimal baseline, against gradients of single responses in float64."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from episode_helpers import as_episodes
from helpers import left_padded_logprobs, llama, train_on
from learner_helpers import (
    SHAPES,
    Grads,
    algorithm_settings,
    assert_close,
    learned_gradients,
    learner_of,
    make_batch,
)
from raising import raises
from rounding import GRADIENT_TERMS, rounding
from stretto.config import ModelConfig, recipes
from stretto.errors import ConfigError
from stretto.models.lora import add_lora
from stretto.schedules.rollout import Rollout, train_batch
from stretto.training.learner import PolicyLearner
from stretto.types import episode_of

PLAIN = {"baseline": "optimal", "kl_coef": 0.0}
TRUNCATED = {"old_policy": "proximal", "correction": "truncate", "correction_cap": 1.05}
SEQUENCES = {**TRUNCATED, "correction_level": "sequence"}
BETA = 0.3
LEARNED = rounding(GRADIENT_TERMS)
KL_AND_ENTROPY = {"kl_in": "loss", "kl_coef": BETA, "kl_estimator": "k2", "entropy_coef": 0.2}


def learner_on(algorithm: dict[str, Any], actor: Any) -> PolicyLearner:
    """Rewards of responses that were cut are as they are."""
    return learner_of(algorithm, actor, reward={"missing_eos": "off"})


@dataclass
class Naive:
    """A response, of one rollout or all samples of an episode, by a pass for each."""

    reward: float
    loss: float
    gradients: list[Tensor]

    @property
    def squares(self) -> float:
        return sum(float(gradient.double().square().sum()) for gradient in self.gradients)


def naive_response(actor: Any, samples: Sequence[Rollout], algorithm: Mapping[str, Any]) -> Naive:
    """Of ``-sum_t w_t log pi(a_t)``, with importance weights that have no gradient."""
    parts = [left_padded_logprobs(actor, [r])[0][torch.from_numpy(r.sampled)] for r in samples]
    behaviour = [torch.tensor(r.logprobs)[torch.from_numpy(r.sampled)] for r in samples]
    logprobs = torch.cat(parts)
    weights = torch.ones_like(logprobs)
    if "correction" in algorithm:
        ratio = logprobs.detach() - torch.cat(behaviour).to(logprobs)
        if algorithm.get("correction_level") == "sequence":
            ratio = ratio.sum().expand_as(ratio)
        weights = ratio.exp().clamp(max=algorithm["correction_cap"])
    loss = -(weights * logprobs).sum()
    trained = [p for p in actor.parameters() if p.requires_grad]
    scores = samples[0].scores
    reward = float(scores["task"].values[0])
    if "environment" in scores:
        reward += 0.5 * float(scores["environment"].values[0])
    return Naive(reward, float(loss.detach()), list(torch.autograd.grad(loss, trained)))


def naive(
    actor: Any, batch: Sequence[Rollout], algorithm: Mapping[str, Any]
) -> tuple[Grads, float]:
    """Gradients and value of ``sum_i (R_i - b) L_i / B``, each group by itself."""
    samples: dict[tuple[int, int], list[Rollout]] = defaultdict(list)
    for rollout in batch:
        if len(rollout):
            samples[rollout.prompt.id, episode_of(rollout.id)].append(rollout)
    groups: dict[int, list[Naive]] = defaultdict(list)
    for (group, _), of_response in samples.items():
        groups[group].append(naive_response(actor, of_response, algorithm))
    names = [f"actor.{name}" for name, p in actor.named_parameters() if p.requires_grad]
    total: Grads = {}
    value = 0.0
    for responses in groups.values():
        squares = sum(r.squares for r in responses)
        baseline = sum(r.squares * r.reward for r in responses) / squares
        for response in responses:
            factor = (response.reward - baseline) / len(samples)
            value += factor * response.loss
            for name, gradient in zip(names, response.gradients, strict=True):
                total[name] = total.get(name, torch.zeros(())) + factor * gradient.double()
    return total, value


@pytest.mark.parametrize("name", ["rloo", "copg"])
@pytest.mark.parametrize("changes", [{}, TRUNCATED, SEQUENCES], ids=["plain", "tokens", "whole"])
def test_gradients_are_those_of_the_formula(name: str, changes: dict[str, Any]) -> None:
    """With groups of three and two in no order, and a response without a token."""
    algorithm = {"name": name, **PLAIN, **changes}
    actor = llama(dtype=torch.float64)
    shapes = [(prompt, 0 if i == 4 else n) for i, (prompt, n) in enumerate(SHAPES)]
    batch = make_batch(actor, algorithm, shapes)
    got, stats = learned_gradients(learner_on(algorithm, actor), batch)
    want, loss = naive(actor, batch, algorithm)
    assert_close(got, want)
    if name == "rloo":
        assert stats["loss/policy_avg"] == pytest.approx(loss, rel=1e-5)


def test_other_terms_of_the_loss_are_those_without_a_baseline() -> None:
    """KL and entropy have no reward, and the metrics are those of one pass."""
    actor = llama(dtype=torch.float64)
    both = {"name": "rloo", "baseline": "optimal", **KL_AND_ENTROPY}
    batch = make_batch(actor, both)
    got, stats = learned_gradients(learner_on(both, actor), batch)
    for rollout in batch:  # rewards without a difference leave nothing but these terms
        rollout.scores["task"].values[:] = 1.0
    terms, expected = learned_gradients(learner_on({**both, "baseline": "mean"}, actor), batch)
    batch = make_batch(actor, both)
    policy, _ = naive(actor, batch, both)
    assert_close(got, {name: gradient + policy[name] for name, gradient in terms.items()})
    for key in ("policy/entropy_avg", "loss/kl_avg", "policy/approxkl_avg", "staleness/ess"):
        assert stats[key] == pytest.approx(expected[key], rel=1e-6), key


def test_groups_may_be_accumulated_before_their_step() -> None:
    actor = llama(dtype=torch.float64)
    algorithm = {"name": "rloo", "baseline": "optimal", "kl_coef": 0.05}
    batch = make_batch(actor, algorithm)
    want, expected = learned_gradients(learner_on(algorithm, actor), batch)
    learner = learner_on(algorithm, actor)
    for prompts in ((8,), (5,)):
        learner.accumulate(train_batch([r for r in batch if r.prompt.id in prompts]))
    got, stats = learned_gradients(learner, batch)
    assert_close(got, want)
    assert stats == pytest.approx(expected, rel=rounding(42), abs=rounding(42))


@pytest.mark.parametrize("changes", [{}, SEQUENCES], ids=["rows apart", "rows together"])
def test_an_episode_of_several_samples_is_one_response(changes: dict[str, Any]) -> None:
    actor = llama(dtype=torch.float64)
    algorithm = {"name": "rloo", **PLAIN, **changes}
    batch = as_episodes(make_batch(actor, algorithm))
    got, _ = learned_gradients(learner_on(algorithm, actor), batch)
    assert_close(got, naive(actor, batch, algorithm)[0])


@pytest.mark.parametrize("kind", ["bfloat16", "lora"])
def test_sums_are_those_of_the_trained_weights(kind: str) -> None:
    """In float32 behind weights in bfloat16, whose passes round by 3 %, and of adapters alone."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    actor = llama(dtype=dtype)
    algorithm = {"name": "rloo", **PLAIN}
    batch = make_batch(actor, algorithm)
    if kind == "lora":
        actor = add_lora(actor, ModelConfig(lora_rank=2), "CAUSAL_LM")
        for parameter in actor.parameters():
            if parameter.requires_grad:  # otherwise one of the two factors is 0
                torch.nn.init.normal_(parameter, std=0.1)
    learner = learner_on(algorithm, actor)
    trained = learner.trained["actor"]
    got: Grads = {}

    def keep(norm: float | None = None, scale: float = 1.0) -> float:
        got.update({f"actor.{name}": g.clone() for name, g in trained.gradients().items()})
        return 0.0

    trained.update = keep  # type: ignore[method-assign]
    train_on(learner, batch)
    exact = copy.deepcopy(actor).float()
    want, _ = naive(exact, batch, algorithm)
    assert_close(got, want, 0.1 if kind == "bfloat16" else LEARNED)


def test_it_is_off_by_default_and_for_other_losses() -> None:
    """Losses that are not linear in the advantages say so, and train as without it."""
    assert recipes.build({}, "here").algorithm.baseline == "mean"
    grouped = {"rollout": {"samples_per_prompt": 2}}
    for name in ("grpo", "proximal-rloo"):
        config = recipes.build({"algorithm": {"name": name, **PLAIN}, **grouped}, "here")
        assert not config.algorithm.has_optimal_baseline
        assert f"without effect on '{name}': algorithm.baseline" in config.remarks


@pytest.mark.parametrize(
    ("sections", "code"),
    [
        ({"training": {"minibatches": 2}}, "optimal-baseline-among-minibatches"),
        (
            {
                "runtime": "local",
                "cluster": {"processes": [{"roles": ["learner"], "ranks": 2}]},
            },
            "optimal-baseline-in-parts",
        ),
    ],
)
def test_gradients_of_single_responses_need_a_whole_batch_and_model(
    sections: dict[str, Any], code: str
) -> None:
    algorithm = {"name": "rloo", "baseline": "optimal"}
    with raises(ConfigError, code):
        recipes.build({**algorithm_settings(algorithm), **sections}, "here")
