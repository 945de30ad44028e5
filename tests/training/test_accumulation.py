"""A step whose gradients are accumulated group by group, against one of the full batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from episode_helpers import as_episodes
from helpers import llama, make_learner
from learner_helpers import (
    PROMPTS,
    SHAPES,
    Grads,
    algorithm_settings,
    assert_close,
    learned_gradients,
    learner_of,
    make_batch,
)
from loss_helpers import VARIANTS
from raising import raises
from rounding import GRADIENT_TERMS, rounding
from stretto.config import AlgorithmConfig, ModelConfig
from stretto.config.algorithm import ALGORITHMS
from stretto.errors import LearnerError
from stretto.models.load import set_checkpointing
from stretto.models.lora import add_lora
from stretto.schedules.rollout import Rollout, train_batch
from stretto.training.learner import PolicyLearner
from stretto.types import FinishReason

ORDERS: Mapping[str, Sequence[Sequence[int]]] = {
    "one by one": ((8,), (5,), (2,)),
    "two at once": ((2, 5),),
    "the last one waits": ((5,), (8,)),
}
"""Prompts of each call before the step, which trains on the others."""
BY_GROUP = [
    name for name, settings in VARIANTS.items() if AlgorithmConfig.model_validate(settings).by_group
]
LEARNED = rounding(GRADIENT_TERMS)
"""Of weights after some steps of AdamW, relative and absolute."""


def accumulate(
    learner: PolicyLearner, batch: Sequence[Rollout], calls: Sequence[Sequence[int]]
) -> None:
    for prompts in calls:
        learner.accumulate(train_batch([r for r in batch if r.prompt.id in prompts]))


def first_update(
    learner: PolicyLearner, batch: Sequence[Rollout], calls: Sequence[Sequence[int]] = ()
) -> tuple[Grads, dict[str, Any]]:
    accumulate(learner, batch, calls)
    return learned_gradients(learner, batch)


def assert_same_stats(got: Mapping[str, float], want: Mapping[str, float]) -> None:
    """Means over 42 tokens of what models in float64 give, with weights in float32."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=rounding(42), abs=rounding(42)), name


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", BY_GROUP)
def test_gradients_and_metrics_are_those_of_the_full_batch(variant: str, order: str) -> None:
    """Also with micro-batches of a single unit."""
    algorithm = VARIANTS[variant]
    training = {"microbatch_tokens": 1 if order == "two at once" else 70}
    actor = llama(dtype=torch.float64)
    batch = make_batch(actor, algorithm)
    batch[3].finish = batch[5].finish = FinishReason.LENGTH
    want, expected = first_update(learner_of(algorithm, actor, training=training), batch)
    learner = learner_of(algorithm, actor, training=training)
    got, stats = first_update(learner, batch, ORDERS[order])
    assert_close(got, want)
    assert_same_stats(stats, expected)


def test_all_algorithms_that_compare_are_by_group() -> None:
    names = {VARIANTS[variant]["name"] for variant in BY_GROUP}
    assert names == {name for name, spec in ALGORITHMS.items() if spec.group > 1}


@pytest.mark.parametrize("name", ["rloo", "proximal-rloo", "grpo", "online-dpo", "best-of-n"])
def test_gradients_of_episodes_are_those_of_the_full_batch(name: str) -> None:
    """Several rows a response, of which forks count as one."""
    algorithm = {"name": name}
    actor = llama(dtype=torch.float64)
    batch = as_episodes(make_batch(actor, algorithm))
    prompts = sorted({r.prompt.id for r in batch})
    want, expected = first_update(learner_of(algorithm, actor), batch)
    got, stats = first_update(learner_of(algorithm, actor), batch, [prompts[1:], prompts[:1]])
    assert_close(got, want)
    assert_same_stats(stats, expected)


@pytest.mark.parametrize(
    ("algorithm", "training"),
    [
        ({"name": "grpo"}, {"epochs": 2}),
        ({"name": "rloo"}, {"epochs": 2, "grad_clip": 0.1}),
        ({"name": "grpo", "old_policy": "proximal"}, {"epochs": 2}),
        ({"name": "grpo", "old_policy": "proximal", "correction": "truncate"}, {}),
        ({"name": "grpo", "entropy_coef": 0.1, "kl_target": 1.0}, {}),
    ],
)
def test_weights_after_steps_are_those_of_full_batches(
    algorithm: dict[str, Any], training: dict[str, Any]
) -> None:
    """Three steps; only the first update of each begins early."""
    ends = []
    for orders in ([()] * 3, list(ORDERS.values())):
        actor = llama()
        batch = make_batch(actor, algorithm)
        learner = learner_of(algorithm, actor, training=training)
        for calls in orders:
            accumulate(learner, batch, calls)
            stats = learner.train(train_batch(batch)).stats
            learner.publish()
        ends.append((stats, actor.state_dict()))
    (want, weights), (got, accumulated_weights) = ends
    assert got == pytest.approx(want, rel=LEARNED, abs=LEARNED)
    for name, weight in weights.items():
        torch.testing.assert_close(accumulated_weights[name], weight, rtol=LEARNED, atol=LEARNED)


def trained_weights(kind: str, calls: Sequence[Sequence[int]]) -> dict[str, Any]:
    """After a step of GRPO on eight responses, each in a micro-batch of its own: its gradients are
    exactly an eighth of those that are accumulated, in bfloat16 too.
    """
    actor = llama(dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    batch = make_batch(actor, {"name": "grpo"})
    if kind == "lora":
        actor = add_lora(actor, ModelConfig(lora_rank=2), "CAUSAL_LM")
        for parameter in actor.parameters():
            if parameter.requires_grad:  # otherwise one of the two factors is 0
                torch.nn.init.normal_(parameter, std=0.1)
    if kind == "checkpointing":
        set_checkpointing(actor, ModelConfig(gradient_checkpointing="on"))
    learner = make_learner(
        actor, None, algorithm_settings({"name": "grpo"}, training={"microbatch_tokens": 1})
    )
    accumulate(learner, batch, calls)
    grads: dict[str, Any] = {}
    trained = learner.trained["actor"]
    update = trained.update

    def keep(norm: float | None = None, scale: float = 1.0) -> float:
        grads.update({name: grad.clone() for name, grad in trained.gradients().items()})
        return update(norm, scale)

    trained.update = keep  # type: ignore[method-assign]
    learner.train(train_batch(batch))
    return grads


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "checkpointing", "lora"])
def test_models_of_every_kind_sum_the_same_gradients(kind: str) -> None:
    want = trained_weights(kind, ())
    got = trained_weights(kind, ORDERS["one by one"])
    assert_close(got, want, rounding(8))
    again = trained_weights(kind, ORDERS["one by one"])
    assert all(torch.equal(grad, again[name]) for name, grad in got.items())


@pytest.mark.parametrize("change", ["dropped", "drawn again", "unknown"])
def test_groups_that_changed_are_trained_on_again(change: str) -> None:
    """Nothing of the accumulated gradients is left: not one bit differs."""
    ends = []
    for calls in ((), ORDERS["one by one"]):
        actor = llama()
        batch = make_batch(actor, {"name": "grpo"})
        learner = learner_of({"name": "grpo"}, actor)
        accumulate(learner, batch, calls)
        if change == "dropped":
            del batch[4]
        elif change == "drawn again":
            batch[5].prompt = batch[7].prompt = batch[0].prompt
        else:
            batch[:] = [r for r in batch if r.prompt.id != 8]
        for _ in range(2):  # the second has accumulated nothing
            stats = learner.train(train_batch(batch)).stats
        ends.append((stats, actor.state_dict()))
    (want, weights), (got, other_weights) = ends
    assert got == want
    assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())


def test_a_group_without_tokens_waits_for_the_batch() -> None:
    """Alone it would be an error, so that a schedule does not hand it over."""
    actor = llama(dtype=torch.float64)
    shapes = [
        (prompt, 0 if id_ == 8 else n) for (prompt, n), id_ in zip(SHAPES, PROMPTS, strict=True)
    ]
    batch = make_batch(actor, {"name": "grpo"}, shapes)
    want, expected = first_update(learner_of({"name": "grpo"}, actor), batch)
    got, stats = first_update(learner_of({"name": "grpo"}, actor), batch, [(5,)])
    assert_close(got, want)
    assert_same_stats(stats, expected)


def test_gradients_that_are_not_finite_change_no_weight() -> None:
    actor = llama()
    batch = make_batch(actor, {"name": "grpo"})
    learner = learner_of({"name": "grpo"}, actor)
    accumulate(learner, batch, [(5,)])
    for gradient in learner.trained["actor"].gradients().values():
        gradient.fill_(float("nan"))
    before = {name: weight.clone() for name, weight in actor.state_dict().items()}
    with raises(LearnerError, "gradient-not-finite"):
        learner.train(train_batch(batch))
    assert all(torch.equal(weight, before[name]) for name, weight in actor.state_dict().items())


def test_the_order_of_calls_changes_nothing_but_rounding() -> None:
    """And not the state that a checkpoint has."""
    found = []
    for order in ORDERS.values():
        actor = llama()
        batch = make_batch(actor, {"name": "rloo"})
        learner = learner_of({"name": "rloo"}, actor)
        before = repr({k: v for k, v in learner.state_dict().items() if k != "models"})
        accumulate(learner, batch, order)
        assert before == repr({k: v for k, v in learner.state_dict().items() if k != "models"})
        found.append(learned_gradients(learner, batch)[0])
    for one, other in pairwise(found):
        assert_close(other, one)
