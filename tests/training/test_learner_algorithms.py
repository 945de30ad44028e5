"""The learner with every algorithm: its steps against whole losses out of naive forward passes."""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import (
    critic_of,
    llama,
    make_learner,
    told,
    train_on,
)
from learner_helpers import (
    CORRECTED,
    PROMPTS,
    Grads,
    NoHostSync,
    assert_close,
    engine_rollouts,
    learned_gradients,
    learner_of,
    make_batch,
    now,
    rows_in,
)
from loss_helpers import VARIANTS, inputs_of, loss_of, named
from raising import raises
from rounding import GRADIENT_TERMS, rounding
from stretto.algorithms.correction import settled
from stretto.algorithms.registry import FUNCTIONS
from stretto.config.algorithm import ALGORITHMS
from stretto.errors import LearnerError
from stretto.models.weights import fingerprint
from stretto.schedules.rollout import Rollout, train_batch
from stretto.training import backprop
from stretto.training.collate import collate
from stretto.training.learner import PolicyLearner
from stretto.types import FinishReason, Score


def naive_gradients(learner: PolicyLearner, actor: Any, batch: Sequence[Rollout]) -> Grads:
    """Of the policy's loss on the whole batch at once."""
    a = learner.config.algorithm
    logprobs = now(actor, batch)
    proximal = logprobs.detach().float() if a.old_policy == "proximal" else None
    e = learner.experience_of(train_batch(batch))
    if proximal is not None:
        e = replace(e, old_logprobs=proximal)
    rows = [row for unit in e.units for row in unit]
    names = ("advantages", "old_logprobs", "behaviour_logprobs", "ref_logprobs")
    inputs = inputs_of(
        e.mask[rows],
        a.averaging,
        16,
        **{n: None if (t := getattr(e, n)) is None else t[rows].to(logprobs) for n in names},
    )
    # The beta of the losses' tests is their own.
    seen, _ = settled(inputs, logprobs[rows].detach(), a)
    term = FUNCTIONS[a.name].policy_loss(logprobs[rows], seen, a)
    if a.kl_place == "loss" and a.kl_coef:
        extra = loss_of(a, logprobs[rows], inputs).loss - term.loss
        loss = term.loss + extra * a.kl_coef / 0.3
    else:
        loss = term.loss
    loss.backward()
    grads = {}
    for name, p in actor.named_parameters():
        assert p.grad is not None
        grads[f"actor.{name}"], p.grad = p.grad.clone(), None
    return grads


@pytest.mark.parametrize("budget", [1, 70, 100_000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_those_of_the_whole_loss(variant: str, budget: int) -> None:
    """Whatever the micro-batches, with groups scattered over the batch."""
    algorithm = VARIANTS[variant]
    actor = llama(dtype=torch.float64)
    learner = learner_of(algorithm, actor, training={"microbatch_tokens": budget})
    batch = make_batch(actor, algorithm)
    expected = naive_gradients(learner, actor, batch)
    got, stats = learned_gradients(learner, batch)
    assert_close({k: g for k, g in got.items() if k in expected}, expected)
    assert ("loss/value_avg" in stats) == ("critic/lr" in stats) == (algorithm["name"] == "ppo")
    assert ("group/reward_std" in stats) == (learner.config.algorithm.group > 1)


@pytest.mark.parametrize("variant", ["ppo", "rloo", "proximal-rloo", "grpo", "copg"])
def test_corrected_gradients_equal_those_of_the_whole_loss(variant: str) -> None:
    """The proximal policy is the learner's own before the step."""
    algorithm = VARIANTS[variant] | CORRECTED | {"correction_cap": 1.1}
    actor = llama(dtype=torch.float64)
    learner = learner_of(algorithm, actor, training={"microbatch_tokens": 70})
    batch = make_batch(actor, algorithm)
    expected = naive_gradients(learner, actor, batch)
    got, stats = learned_gradients(learner, batch)
    assert_close({k: g for k, g in got.items() if k in expected}, expected)
    assert stats["val/ratio_max"] == pytest.approx(1, abs=1e-6)  # to itself
    assert 0.8 < stats["correction/weight_mean"] < 1.1


@pytest.mark.parametrize("name", ["rloo", "online-dpo"])
def test_effective_sample_size_is_the_mean_over_updates(name: str) -> None:
    """Of the responses of each mini-batch. DPO trains on one pair of each group."""
    actor, algorithm = llama(dtype=torch.float64), {"name": name}
    learner = learner_of(algorithm, actor, training={"microbatch_tokens": 70, "minibatches": 2})
    batch = make_batch(actor, algorithm)
    units = learner.experience_of(train_batch(batch)).units
    logprobs, shares = now(actor, batch), []
    for part in learner.minibatches(len(batch), units):
        weights = []
        for row in (row for unit in part for row in unit if len(batch[row])):
            difference = logprobs[row].sum().item() - sum(batch[row].logprobs)
            weights.append(math.exp(difference))
        shares.append(sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)))
    _, stats = learned_gradients(learner, batch)
    assert stats["staleness/ess"] == pytest.approx(sum(shares) / 2, rel=1e-5)
    assert len(shares) == 2
    assert min(shares) < 0.999


@pytest.mark.parametrize("scaling", ["sqrt", "linear"])
def test_the_effective_sample_size_scales_the_learning_rate(scaling: str) -> None:
    """Weights equal those of a learning rate that was scaled by hand, also the decay of weights,
    and the next update has the full rate again.
    """
    algorithm = {"name": "rloo", "kl_coef": 0.0}
    training = {"lr": 1e-2, "weight_decay": 0.1}
    actor = llama(dtype=torch.float64)
    batch = make_batch(actor, algorithm)
    learner = learner_of(algorithm | {"ess_scaling": scaling}, actor, training=training)
    share = train_on(learner, batch)["staleness/ess"]
    assert 0.1 < share < 0.99
    factor = math.sqrt(share) if scaling == "sqrt" else share
    by_hand = llama(dtype=torch.float64)
    other = learner_of(algorithm, by_hand, training=training | {"lr": 1e-2 * factor})
    assert train_on(other, batch)["staleness/ess"] == share
    weights = dict(by_hand.named_parameters())
    for name, found in actor.named_parameters():
        torch.testing.assert_close(found, weights[name], rtol=0, atol=1e-15)
    assert learner.trained["actor"].lr == 1e-2


def test_updates_on_current_weights_are_not_scaled() -> None:
    """To rounding: all importance weights are 1."""
    actor, scaled = llama(dtype=torch.float64), llama(dtype=torch.float64)
    algorithm = {"name": "rloo"}
    batch = make_batch(actor, algorithm)
    for rollout, row in zip(batch, now(actor, batch), strict=True):
        rollout.logprobs = array("f", row[: len(rollout)].tolist())
    train_on(learner_of(algorithm, actor), batch)
    stats = train_on(learner_of(algorithm | {"ess_scaling": "sqrt"}, scaled), batch)
    assert stats["staleness/ess"] == pytest.approx(1, abs=1e-6)
    weights = dict(actor.named_parameters())
    for name, found in scaled.named_parameters():
        torch.testing.assert_close(found, weights[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_steps_do_not_depend_on_the_split_or_the_order(name: str) -> None:
    """Two whole steps; a batch in another order has the same groups, pairs and updates."""
    ends = []
    for budget, order in ((100_000, range(8)), (1, range(8)), (60, [3, 7, 0, 6, 1, 5, 2, 4])):
        actor = llama(dtype=torch.float64)
        algorithm = named(name)
        learner = learner_of(algorithm, actor, training={"microbatch_tokens": budget})
        batch = make_batch(actor, algorithm)
        stats = [train_on(learner, [batch[i] for i in order]) for _ in range(2)]
        ends.append((stats, {n: p.detach() for n, p in actor.named_parameters()}))
    (first, weights), *others = ends
    start = dict(llama(dtype=torch.float64).named_parameters())
    assert not any(torch.equal(weights[n], start[n]) for n in weights)
    for stats, found in others:
        for ours, theirs in zip(stats, first, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        for n in weights:
            torch.testing.assert_close(found[n], weights[n], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_passes_of_micro_batches_make_no_host_wait(
    variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, made = backprop._passes, []

    def spied(*given: Any) -> Any:
        with NoHostSync():
            made.append(given)
            return passes(*given)

    monkeypatch.setattr(backprop, "_passes", spied)
    actor = llama(dtype=dtype)
    algorithm = VARIANTS[variant] | {"entropy_coef": 0.01}
    if variant in ("ppo", "grpo"):
        algorithm |= CORRECTED
    learner = learner_of(algorithm, actor, training={"microbatch_tokens": 60})
    train_on(learner, make_batch(actor, algorithm))
    assert len(made) == len(learner.trained)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_empty_responses_count_in_their_group_and_nowhere_else(name: str) -> None:
    algorithm = named(name)
    shapes = [(3, 7), (40, 5), (5, 0), (2, 9), (8, 6), (3, 4), (6, 0), (4, 8)]
    for budget in (1, 100_000):
        actor = llama(dtype=torch.float64)
        learner = learner_of(algorithm, actor, training={"microbatch_tokens": budget})
        batch = make_batch(actor, algorithm, shapes)
        expected = naive_gradients(learner, actor, batch)
        got, stats = learned_gradients(learner, batch)
        assert_close({k: g for k, g in got.items() if k in expected}, expected)
        assert stats["staleness/max"] == 0


@pytest.mark.parametrize("old_policy", ["behaviour", "proximal"])
def test_a_batch_of_nothing_is_refused(old_policy: str) -> None:
    actor = llama()
    algorithm = {"name": "rloo", "old_policy": old_policy}
    batch = make_batch(actor, algorithm, [(3, 0)] * 8)
    with raises(LearnerError, "no-response-tokens", 8):
        train_on(learner_of(algorithm, actor), batch)


def test_a_mini_batch_without_a_token_moves_nothing_by_itself() -> None:
    """The best of each group may be an empty response."""
    actor = llama()
    algorithm = {"name": "best-of-n", "kl_coef": 0}
    batch = make_batch(actor, algorithm, [(3, 7), (3, 0)] * 4)
    for r, prompt, score in zip(batch, [0, 0, 1, 1, 2, 2, 3, 3], [0.0, 1.0] * 4, strict=True):
        r.prompt, r.finish = replace(r.prompt, id=prompt), batch[1].finish
        r.scores["task"] = replace(r.scores["task"], values=torch.tensor([score]).numpy())
    before = fingerprint(actor.named_parameters())
    stats = train_on(learner_of(algorithm, actor), batch)
    assert stats["policy/grad_norm"] == 0
    assert fingerprint(actor.named_parameters()) == before


# -- the same step where the gradient is the same ------------------------------------------------


def test_four_algorithms_take_the_same_step_on_policy() -> None:
    """PPO with the leave-one-out baseline for its critic's values, lambda 1 and sums over responses
    has RLOO's advantages; CoPG and Proximal RLOO have them anyway.
    """
    same = {"kl_coef": 0}
    as_rloo = {
        "aggregation": "sequence_sum",
        "lam": 1.0,
        "whiten_advantages": False,
    }
    ends: dict[str, dict[str, Tensor]] = {}
    for name, more in (("ppo", as_rloo), ("rloo", {}), ("copg", {}), ("proximal-rloo", {})):
        actor = llama(dtype=torch.float64)
        rollouts = engine_rollouts(actor, None, temperature=1.0)
        scores = {r.id: r.scores["task"].scalar for r in rollouts}
        for i, r in enumerate(rollouts):
            r.prompt = replace(r.prompt, id=i // 4)
            others = [
                scores[x.id] for j, x in enumerate(rollouts) if j // 4 == i // 4 and x is not r
            ]
            del r.scores["reference"], r.scores["critic"]
            if name == "ppo":
                baseline = torch.full((len(r),), sum(others) / 3).numpy()
                r.scores["critic"] = Score(r.id, "critic", "values", baseline)
        algorithm = {"name": name, **same, **more}
        learner = learner_of(algorithm, actor, reward={"missing_eos": "off"})
        stats = train_on(learner, rollouts)
        assert stats["policy/grad_norm"] > 0.1
        ends[name] = {n: p.detach() for n, p in actor.named_parameters()}
    start = dict(llama(dtype=torch.float64).named_parameters())
    for name, weights in ends.items():
        for n in weights:
            assert (weights[n] - start[n]).abs().max() > 5e-4, name
            torch.testing.assert_close(
                weights[n] - start[n],
                ends["rloo"][n] - start[n],
                rtol=1e-3,
                atol=rounding(GRADIENT_TERMS),
            )


# -- units ---------------------------------------------------------------------------------------


def test_pairs_stay_together() -> None:
    actor = llama()
    algorithm = {"name": "online-dpo"}
    learner = learner_of(algorithm, actor, training={"minibatches": 2, "microbatch_tokens": 1})
    batch = make_batch(actor, algorithm)
    e = learner.experience_of(train_batch(batch))
    score = [r.scores["task"].scalar for r in batch]
    cut = [r.finish == "length" for r in batch]
    score = [-1.0 if c else s for s, c in zip(score, cut, strict=True)]
    pairs = []
    for prompt in (2, 5, 8):
        rows = [i for i, p in enumerate(PROMPTS) if p == prompt]
        pair = max(rows, key=lambda i: score[i]), min(rows, key=lambda i: score[i])
        pairs += [pair] if score[pair[0]] > score[pair[1]] else []
    assert list(e.units) == pairs
    assert len(pairs) == 3
    parts = list(learner.minibatches(8, e.units))
    assert sorted(len(p) for p in parts) == [1, 2]
    assert sorted(unit for part in parts for unit in part) == sorted(pairs)
    for units in parts:
        made = learner.microbatches(told(batch), units, e)
        assert sorted(tuple(r.id for r in rows_in(m, batch)) for m in made) == sorted(units)
        assert sum(m.inputs.response_weights.sum().item() for m in made) == pytest.approx(1)
        for m in made:
            rows = [r.id for r in rows_in(m, batch)]
            assert torch.equal(m.inputs.mask, e.mask[rows])
            assert torch.equal(m.inputs.ref_logprobs, e.ref_logprobs[rows])


@pytest.mark.parametrize("budget", [30, 60, 90])
def test_micro_batches_of_pairs_keep_to_the_budget(budget: int) -> None:
    """Padding counted; a pair that is larger by itself goes alone."""
    actor = llama()
    algorithm = {"name": "online-dpo"}
    learner = learner_of(algorithm, actor, training={"microbatch_tokens": budget})
    batch = make_batch(actor, algorithm)
    e = learner.experience_of(train_batch(batch))
    made = learner.microbatches(told(batch), e.units, e)
    sizes = [[len(r.prompt.tokens) + len(r) for r in rows_in(m, batch)] for m in made]
    assert sum(map(len, sizes)) == 6
    assert all(max(s) * len(s) <= budget or len(s) == 2 for s in sizes)
    assert len(sizes) == {30: 3, 60: 2, 90: 2}[budget]


@pytest.mark.parametrize("name", ["online-dpo", "best-of-n"])
def test_fewer_units_than_mini_batches_make_one_update_each(name: str) -> None:
    actor = llama()
    algorithm = named(name)
    learner = learner_of(algorithm, actor, training={"minibatches": 4, "epochs": 2})
    updates = []
    take = learner.trained["actor"].update
    learner.trained["actor"].update = lambda norm=None, scale=1.0: updates.append(1) or take(norm)  # type: ignore[method-assign]
    stats = train_on(learner, make_batch(actor, algorithm))
    assert len(updates) == 2 * 3
    assert stats["policy/grad_norm"] > 0


def test_equal_scores_under_online_dpo_make_a_step_without_an_update() -> None:
    actor = llama()
    algorithm = {"name": "online-dpo"}
    learner = learner_of(algorithm, actor, training={"lr_schedule": "linear"})
    batch = make_batch(actor, algorithm)
    equal = copy.deepcopy(batch)
    for r in equal:
        r.finish = batch[1].finish
        r.scores["task"] = replace(r.scores["task"], values=torch.ones(1).numpy())
    before = fingerprint(actor.named_parameters())
    stats = train_on(learner, equal)
    assert fingerprint(actor.named_parameters()) == before
    assert stats["dpo/pairs"] == 0
    assert stats["group/all_equal"] == 1
    assert stats["objective/scores"] == 1
    assert stats["policy/grad_norm"] == 0
    assert "loss/policy_avg" not in stats
    assert learner.state_dict()["steps"] == 1
    assert learner.publish()["actor"].version == 1
    again = train_on(learner, batch)
    assert again["dpo/pairs"] == 3
    assert again["lr"] == pytest.approx(1e-3 * 9 / 10)  # of ten updates planned one has gone by
    assert fingerprint(actor.named_parameters()) != before


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_step_without_an_update_moves_the_schedules_of_the_models_it_trains(frozen: int) -> None:
    """All responses are cut and masked, so that nothing is learned. Ten steps are planned."""
    actor = llama()
    algorithm = {"name": "ppo", "mask_truncated_completions": True}
    sections = {"critic": {"freeze_steps": frozen}, "training": {"lr_schedule": "linear"}}
    learner = learner_of(algorithm, actor, **sections)
    cut = make_batch(actor, algorithm)
    for r in cut:
        r.finish = FinishReason.LENGTH
    actors, critics = [], []
    for _ in range(10):
        actors.append(learner.trained["actor"].lr)
        critics.append(learner.trained["critic"].lr)
        assert train_on(learner, cut)["critic/grad_norm"] == 0
    actors.append(learner.trained["actor"].lr)
    critics.append(learner.trained["critic"].lr)
    falling = [1 - step / 10 for step in range(11)]
    assert critics == pytest.approx([critics[0] * share for share in falling])
    later = [1.0] * frozen + falling[: 11 - frozen]
    assert actors == pytest.approx([actors[0] * share for share in later])


# -- the proximal policy -------------------------------------------------------------------------


def test_a_disagreeing_engine_is_found_out_under_the_proximal_policy_too() -> None:
    """There every ratio to the proximal policy is 1, whatever the engine says."""
    actor = llama()
    algorithm = {"name": "ppo", "old_policy": "proximal"}
    rollouts = engine_rollouts(actor, critic_of(actor), temperature=1.0)
    given = {"rollout": {"batch": 8, "temperature": 0.7}, "algorithm": algorithm}
    learner = make_learner(actor, critic_of(actor), given)
    before = fingerprint(actor.named_parameters())
    with raises(LearnerError, "policies-disagree"):
        train_on(learner, rollouts)
    assert fingerprint(actor.named_parameters()) == before
    honest = engine_rollouts(actor, critic_of(actor), temperature=0.7)
    train_on(learner, honest)


def test_ratios_are_to_the_policy_before_the_step_in_all_its_updates() -> None:
    """Not to the one before the update: the second epoch's ratios have moved."""
    actor = llama(dtype=torch.float64)
    algorithm = {"name": "ppo", "old_policy": "proximal", "kl_coef": 0}
    learner = learner_of(algorithm, actor, training={"epochs": 2, "lr": 1e-2})
    batch = make_batch(actor, algorithm)
    mask = collate(train_batch(batch), {"task": 1.0}).mask
    with torch.no_grad():
        before = now(actor, batch)
    seen = []
    run = learner.backprop.run

    def watch(batches: Any, kl_coef: float, *, trains_actor: bool) -> Any:
        with torch.no_grad():
            seen.append(now(actor, batch))
        return run(batches, kl_coef, trains_actor=trains_actor)

    learner.backprop.run = watch  # type: ignore[method-assign]
    stats = train_on(learner, batch)
    ratios = [(x - before).exp()[mask] for x in seen]
    assert ratios[0].max() == pytest.approx(1)
    assert stats["val/ratio_max"] == pytest.approx(ratios[1].max().item(), rel=1e-5)
    assert stats["val/ratio_min"] == pytest.approx(ratios[1].min().item(), rel=1e-5)
    assert stats["val/ratio_max"] > 1.01


# -- without a critic ----------------------------------------------------------------------------


def test_without_a_critic_the_actor_alone_is_handed_over_and_kept() -> None:
    actor = llama()
    algorithm = {"name": "grpo", "kl_target": 0.1}
    learner = learner_of(algorithm, actor, training={"lr_schedule": "cosine", "minibatches": 2})
    batch = make_batch(actor, algorithm)
    stats = train_on(learner, batch)
    assert not [k for k in stats if "critic" in k or "value" in k]
    assert {"policy/clipfrac_avg", "loss/kl_avg", "group/reward_std"} < stats.keys()
    assert set(learner.publish()) == {"actor"}
    state = copy.deepcopy(learner.state_dict())
    assert set(state["models"]) == {"actor"}
    other_actor = llama()
    other = learner_of(algorithm, other_actor, training={"lr_schedule": "cosine", "minibatches": 2})
    other.load_state_dict(state)
    for _ in range(2):
        assert train_on(learner, batch) == train_on(other, batch)
    assert learner.publish() == other.publish()
    for p, q in zip(actor.parameters(), other_actor.parameters(), strict=True):
        assert torch.equal(p, q)
    with raises(LearnerError, "unknown-model", "'critic'"):
        PolicyLearner(
            learner.trained["actor"],
            None,
            learner.backprop,
            learner.config,
            {},
            snapshots=["critic"],
        )


def test_a_beta_that_adapts_is_the_one_in_the_loss() -> None:
    """KL in the loss: the coefficient of the next step is what the KL of this one made it."""
    actor = llama()
    algorithm = {"name": "grpo", "kl_coef": 0.5, "kl_target": 1e-6, "kl_horizon": 40}
    learner = learner_of(algorithm, actor)
    batch = make_batch(actor, algorithm)
    assert train_on(learner, batch)["objective/kl_coef"] == 0.5
    beta = 0.5 * (1 + 0.2 * 8 / 40)
    expected = naive_gradients_with_beta(learner, actor, batch, beta)
    got, stats = learned_gradients(learner, batch)
    assert stats["objective/kl_coef"] == pytest.approx(beta)
    assert_close(got, expected, 1e-3)


def naive_gradients_with_beta(
    learner: PolicyLearner, actor: Any, batch: Sequence[Rollout], beta: float
) -> Grads:
    config = learner.config
    changed = config.algorithm.model_copy(update={"kl_coef": beta})
    learner.config = config.model_copy(update={"algorithm": changed})
    try:
        return naive_gradients(learner, actor, batch)
    finally:
        learner.config = config
