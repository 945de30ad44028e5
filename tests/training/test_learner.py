"""The learner: its gradients against a naive PPO, and what must not change them."""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import (
    VOCABULARY,
    critic_of,
    left_padded_logprobs,
    llama,
    make_learner,
    make_rollouts,
    naive_values,
    ticket,
    told,
    train_on,
)
from learner_helpers import Grads, assert_close, engine_rollouts, learned_gradients, rows_in
from raising import raises
from rounding import rounding
from stretto.config import ModelConfig, TrainingConfig
from stretto.errors import EngineError, LearnerError, LifecycleError
from stretto.models import forward
from stretto.models.cpu_threads import set_threads
from stretto.models.load import load_causal_lm, set_checkpointing
from stretto.models.lora import add_lora
from stretto.models.weights import fingerprint, load_weights, with_own_weights
from stretto.schedules.rollout import Rollout, total_reward, train_batch
from stretto.training import agreement
from stretto.training import collate as collating
from stretto.training.collate import collate, describe
from stretto.training.learner import PolicyLearner
from stretto.training.losses import MicroBatch
from stretto.training.trained import LearningRate, TrainedModel
from stretto.training.warmup import warm_up
from stretto.types import FinishReason, Prompt, Score

SHAPES = [(3, 7), (40, 5), (5, 1), (2, 9), (8, 6), (3, 4)]
"""Prompt and response lengths: 32 response tokens, so that 1 / 32 is exact."""
ANY_RATIO = {"ratio_tolerance": 100.0}


def settings(**sections: Any) -> dict[str, Any]:
    """Settings of a batch of six whose old policy is not the present one."""
    sections["training"] = {**ANY_RATIO, **sections.get("training", {})}
    sections.setdefault("rollout", {})["batch"] = 6
    return sections


def naive_experience(batch: Sequence[Rollout], config: Any) -> list[dict[str, list[float]]]:
    """Advantages and returns, token by token, in Python's floats."""
    a, r = config.algorithm, config.reward
    out = []
    for rollout in batch:
        score = total_reward(rollout, {"task": 1.0})
        if rollout.finish is FinishReason.LENGTH and r.missing_eos == "replace":
            score = r.missing_eos_penalty
        if rollout.finish is FinishReason.LENGTH and r.missing_eos == "subtract":
            score -= abs(r.missing_eos_penalty)
        values = [float(v) for v in rollout.scores["critic"].values]
        reference = [float(v) for v in rollout.scores["reference"].values]
        rewards = []
        for old, ref in zip(rollout.logprobs, reference, strict=True):
            d = old - ref
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[a.estimator]
            rewards.append(-a.kl_coef * kl)
        rewards[-1] += score
        advantages, ahead = [0.0] * len(values), 0.0
        for t in reversed(range(len(values))):
            after = values[t + 1] if t + 1 < len(values) else 0.0
            ahead = rewards[t] + a.gamma * after - values[t] + a.gamma * a.lam * ahead
            advantages[t] = ahead
        returns = [x + v for x, v in zip(advantages, values, strict=True)]
        out.append({"advantages": advantages, "returns": returns, "values": values})
    if a.whiten_advantages:
        everything = [x for row in out for x in row["advantages"]]
        mean = sum(everything) / len(everything)
        variance = sum((x - mean) ** 2 for x in everything) / (len(everything) - 1)
        for row in out:
            row["advantages"] = [(x - mean) / math.sqrt(variance + 1e-8) for x in row["advantages"]]
    return out


def given_experience(
    learner: PolicyLearner, batch: Sequence[Rollout]
) -> list[dict[str, list[float]]]:
    """The learner's own advantages and returns (float32), for comparisons beyond its precision."""
    e = learner.experience_of(train_batch(batch))
    return [
        {
            "advantages": e.advantages[b, : len(r)].tolist(),
            "returns": e.tensors["returns"][b, : len(r)].tolist(),
            "values": e.tensors["old_values"][b, : len(r)].tolist(),
            "old": e.old_logprobs[b, : len(r)].tolist(),
        }
        for b, r in enumerate(batch)
    ]


def minibatches(learner: PolicyLearner, size: int) -> list[list[int]]:
    """Rows of each mini-batch, where every response stands for itself."""
    units = [(row,) for row in range(size)]
    return [[row for (row,) in part] for part in learner.minibatches(size, units)]


def naive_loss(
    actor: Any,
    critic: Any,
    batch: Sequence[Rollout],
    experience: Sequence[Mapping[str, list[float]]],
    config: Any,
) -> Tensor:
    """The whole loss of one mini-batch, a token at a time, out of full logits."""
    a = config.algorithm
    loss = torch.zeros((), dtype=torch.float64)
    tokens = sum(map(len, batch))
    temperature = config.rollout.temperature
    for r, e in zip(batch, experience, strict=True):
        row = torch.tensor([[*r.prompt.tokens, *r.tokens]])
        table = torch.log_softmax(actor(input_ids=row).logits[0] / temperature, -1)
        values = naive_values(critic, r)
        old = e.get("old", r.logprobs)
        for t, token in enumerate(r.tokens):
            w = 1 / tokens if a.averaging == "token_mean" else 1 / (len(r) * len(batch))
            at = table[len(r.prompt.tokens) + t - 1]
            ratio = (at[token] - old[t]).exp()
            adv = e["advantages"][t]
            policy = -torch.minimum(ratio * adv, ratio.clamp(1 - a.clip, 1 + a.clip) * adv)
            entropy = -(at.exp() * at).sum()
            v, v_old, target = values[t], e["values"][t], e["returns"][t]
            square = (v - target) ** 2
            if a.value_clip:
                near = v_old + (v - v_old).clamp(-a.value_clip, a.value_clip)
                square = torch.maximum(square, (near - target) ** 2)
            loss = loss + w * (policy - a.entropy_coef * entropy + square / 2)
    return loss


def naive_gradients(
    actor: Any,
    critic: Any,
    batch: Sequence[Rollout],
    experience: Sequence[Mapping[str, list[float]]],
    config: Any,
) -> Grads:
    naive_loss(actor, critic, batch, experience, config).backward()
    grads = {}
    for name, model in (("actor", actor), ("critic", critic)):
        for key, p in model.named_parameters():
            grads[f"{name}.{key}"] = p.grad.clone()
            p.grad = None
    return grads


def models(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    actor = llama(dtype=dtype)
    return actor, critic_of(actor)


VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "others": {
        "algorithm": {
            "aggregation": "sequence_mean",
            "entropy_coef": 0.03,
            "kl_estimator": "k3",
            "kl_coef": 0.3,
            "value_clip": 0.05,
            "clip": 0.05,
            "gamma": 0.97,
            "lam": 0.8,
        },
        "reward": {"missing_eos": "subtract", "missing_eos_penalty": 0.7},
        "rollout": {"temperature": 0.7},
    },
    "plain": {
        "algorithm": {"whiten_advantages": False, "value_clip": 0.0, "kl_estimator": "k2"},
        "reward": {"missing_eos": "off"},
    },
}


# -- the gradient is that of the naive loss ------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_a_naive_ppo(variant: str) -> None:
    actor, critic = models()
    given = settings(**{k: dict(v) for k, v in VARIANTS[variant].items()})
    learner = make_learner(actor, critic, given)
    temperature = learner.config.rollout.temperature
    batch = make_rollouts(actor, critic, SHAPES, temperature=temperature)
    got, stats = learned_gradients(learner, batch)
    assert 0 < stats["policy/clipfrac_avg"] < 1  # otherwise the comparison says little
    experience = naive_experience(batch, learner.config)
    assert_close(got, naive_gradients(actor, critic, batch, experience, learner.config), 1e-4)


@pytest.mark.parametrize("budget", [1, 60, 100_000])
def test_gradients_equal_a_naive_ppo_in_float64(budget: int) -> None:
    actor, critic = models(torch.float64)
    given = settings(algorithm={"entropy_coef": 0.03}, training={"microbatch_tokens": budget})
    learner = make_learner(actor, critic, given)
    batch = make_rollouts(actor, critic, SHAPES)
    got, _ = learned_gradients(learner, batch)
    experience = given_experience(learner, batch)
    expected = naive_gradients(actor, critic, batch, experience, learner.config)
    assert_close(
        {k: g for k, g in got.items() if "critic" not in k},
        {k: g for k, g in expected.items() if "critic" not in k},
        1e-9,
    )
    # A value is read in float32, whatever the model's type.
    assert_close(
        {k: g for k, g in got.items() if "critic" in k},
        {k: g for k, g in expected.items() if "critic" in k},
        1e-5,
    )


def test_losses_and_figures_equal_the_naive_ones() -> None:
    actor, critic = models()
    learner = make_learner(actor, critic, settings(training={"microbatch_tokens": 50}))
    batch = make_rollouts(actor, critic, SHAPES)
    _, stats = learned_gradients(learner, batch)
    experience = naive_experience(batch, learner.config)
    with torch.no_grad():
        total = naive_loss(actor, critic, batch, experience, learner.config).item()
        logs = [
            torch.log_softmax(actor(torch.tensor([[*r.prompt.tokens, *r.tokens]])).logits[0], -1)[
                len(r.prompt.tokens) - 1 : -1
            ]
            for r in batch
        ]
        new = torch.cat([x[range(len(r)), r.tokens] for x, r in zip(logs, batch, strict=True)])
        entropy = -torch.cat([(x.exp() * x).sum(-1) for x in logs])
    assert stats["loss/policy_avg"] + stats["loss/value_avg"] == pytest.approx(total, rel=1e-4)
    log_ratio = new - torch.tensor([x for r in batch for x in r.logprobs])
    assert stats["policy/entropy_avg"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert stats["policy/approxkl_avg"] == pytest.approx((log_ratio**2 / 2).mean().item(), rel=1e-3)
    assert stats["val/ratio"] == pytest.approx(log_ratio.exp().mean().item(), rel=1e-4)
    assert stats["val/ratio_max"] == pytest.approx(log_ratio.exp().max().item(), rel=1e-4)
    assert stats["val/ratio_min"] == pytest.approx(log_ratio.exp().min().item(), rel=1e-4)
    kl = sum(
        old - float(ref)
        for r in batch
        for old, ref in zip(r.logprobs, r.scores["reference"].values, strict=True)
    )
    assert stats["objective/kl"] == pytest.approx(kl / len(batch), rel=1e-4)
    assert stats["response/length_mean"] == pytest.approx(32 / 6)
    assert stats["response/length_max"] == 9
    assert stats["response/ended"] == pytest.approx(4 / 6)
    rewards = [r.scores["task"].scalar for r in batch]
    assert stats["reward/task"] == pytest.approx(sum(rewards) / 6)


# -- what must not change it ---------------------------------------------------------------------


def gradients_with(batch_order: Sequence[int] = range(6), **training: Any) -> Grads:
    actor, critic = models()
    learner = make_learner(actor, critic, settings(training=training))
    batch = make_rollouts(actor, critic, SHAPES)
    return learned_gradients(learner, [batch[i] for i in batch_order])[0]


@pytest.mark.parametrize("budget", [1, 20, 60, 100, 100_000])
def test_micro_batches_do_not_matter(budget: int) -> None:
    assert_close(gradients_with(microbatch_tokens=budget), gradients_with())


def test_models_trained_side_by_side_share_the_tokens_of_a_pass() -> None:
    """A CPU takes 1,024 for one model. A setting holds for each pass."""
    tokens = [100] * 20
    for algorithm, budget, rows in (("rloo", 0, 10), ("ppo", 0, 5), ("ppo", 1000, 10)):
        actor, critic = models()
        changes = {"algorithm": {"name": algorithm}, "training": {"microbatch_tokens": budget}}
        changes["rollout"] = {"samples_per_prompt": 2}
        learner = make_learner(actor, critic if algorithm == "ppo" else None, settings(**changes))
        assert [len(part) for part in learner.backprop.divide(tokens)] == [rows] * (20 // rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_trained_side_by_side_get_the_gradients_of_one_after_the_other(
    dtype: torch.dtype,
) -> None:
    """Bit for bit, as each pass has one thread in both cases."""
    grads, batch = [], make_rollouts(*models(), SHAPES)
    for threads in (1, 2):
        before = torch.get_num_threads()
        set_threads(threads)
        try:
            actor, critic = (model.to(dtype) for model in models())
            learner = make_learner(actor, critic, settings(training={"microbatch_tokens": 20}))
            learned = learner.trained
            for model in learned.values():
                model.update = lambda norm=None, scale=1.0: 0.0  # type: ignore[method-assign]
            train_on(learner, batch)
            found = {f"{n}.{k}": g for n, m in learned.items() for k, g in m.gradients().items()}  # type: ignore[attr-defined]
            grads.append(found)
        finally:
            set_threads(before)
    one, other = grads
    assert {name.partition(".")[0] for name in one} == {"actor", "critic"}
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_order_of_rollouts_does_not_matter() -> None:
    assert_close(gradients_with([4, 2, 0, 5, 3, 1], microbatch_tokens=50), gradients_with())


def test_garbage_in_padding_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gradients_with()

    def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        width = max(map(len, rows))
        return torch.tensor([[*r, *range(3, 3 + width - len(r))] for r in rows]) % VOCABULARY

    def pad(rows: Sequence[Tensor], *, batch_first: bool) -> Tensor:
        width = max(map(len, rows)) + 3
        garbage = False if rows[0].dtype == torch.bool else float("nan")
        return torch.stack([torch.cat([r, r.new_full((width - len(r),), garbage)]) for r in rows])

    monkeypatch.setattr("stretto.models.forward.pad_right", pad_right)
    monkeypatch.setattr(collating, "pad_sequence", pad)
    assert_close(gradients_with(), plain)


@pytest.mark.parametrize("budget", [60, 100_000])
def test_sequences_laid_end_to_end_give_the_gradients_of_padded_ones(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As flash attention reads them; on a CPU, transformers masks them by their positions."""
    plain, read = gradients_with(microbatch_tokens=budget), list[tuple[int, ...]]()
    states = forward.Packing.states

    def noted(packing: forward.Packing, *args: Any) -> Tensor:
        found = states(packing, *args)
        read.append(tuple(found.shape))
        assert packing.ends[-1] == len(found) == len(packing.kept)
        return found

    monkeypatch.setattr(forward.Packing, "states", noted)
    monkeypatch.setattr(forward, "packs", lambda _: True)
    assert_close(gradients_with(microbatch_tokens=budget), plain)
    longest = max(prompt + response - 1 for prompt, response in SHAPES)
    tokens = sum(prompt + response - 1 for prompt, response in SHAPES)
    assert sum(count for count, _ in read[-2:]) <= 2 * tokens  # and none of padding
    assert tokens < longest * len(SHAPES)


def test_padded_states_of_sequences_laid_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, _ = models()
    rows = [[3, 4, 5, 6], [7], [8, 9, 3]]
    padded = forward.hidden_states(actor, rows)
    monkeypatch.setattr(forward, "packs", lambda _: True)
    packed = forward.hidden_states(actor, rows)
    for one, two, row in zip(padded, packed, rows, strict=True):
        torch.testing.assert_close(two[: len(row)], one[: len(row)])
        assert not two[len(row) :].any()


def test_a_model_that_is_not_packed_rightly_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, critic = models()
    taken: list[tuple[Any, str]] = []
    for model in (actor, critic):
        note = partial(lambda model, name: taken.append((model, name)), model)
        monkeypatch.setattr(model, "set_attn_implementation", note)
    monkeypatch.setattr("stretto.training.backprop.packs", lambda model: model is actor)
    monkeypatch.setattr("stretto.training.backprop.packs_rightly", lambda _: False)
    make_learner(actor, critic, settings())
    assert taken == [(actor, "sdpa")]


def test_the_side_and_the_width_of_padding_do_not_matter() -> None:
    """The learner's right-padded log-probabilities are those of a left-padded forward pass."""
    actor, critic = models()
    short, long = SHAPES, [*SHAPES, (90, 20)]
    for shapes in (short, long):
        rollouts = make_rollouts(actor, critic, shapes)
        with torch.no_grad():
            hidden = forward.response_hidden(actor, told(rollouts))
            ours = [
                h.log_softmax(-1)
                for h in (hidden @ actor.lm_head.weight.T).split([len(r) for r in rollouts])
            ]
            naive = left_padded_logprobs(actor, rollouts)
        for r, table, expected in zip(rollouts, ours, naive, strict=True):
            torch.testing.assert_close(table[range(len(r)), r.tokens], expected)


def test_a_long_companion_does_not_change_a_gradient() -> None:
    """One token of no advantage beside the others: only the width of the padding differs."""
    actor, critic = models()
    algorithm = {"whiten_advantages": False, "aggregation": "token_mean"}
    batch = make_rollouts(actor, critic, [*SHAPES[:4], (100, 1)])
    batch[4].scores["task"] = Score(batch[4].id, "task", "reward", batch[4].scores["critic"].values)
    batch[4].scores["reference"] = Score(
        batch[4].id, "reference", "logprobs", torch.tensor(batch[4].logprobs).numpy()
    )
    batch[4].finish = FinishReason.STOP  # reward = value and no KL: advantage 0

    def actor_gradients(rollouts: Sequence[Rollout]) -> Grads:
        learner = make_learner(actor, critic, settings(algorithm=algorithm))
        grads, _ = learned_gradients(learner, rollouts)
        return {k: g * sum(map(len, rollouts)) for k, g in grads.items() if k.startswith("actor")}

    assert_close(actor_gradients(batch), actor_gradients(batch[:4]))


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    plain = gradients_with()
    actor, critic = models()
    batch = make_rollouts(actor, critic, SHAPES)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    learner = make_learner(actor, critic, settings())
    for model in (actor, critic):
        set_checkpointing(model, ModelConfig(gradient_checkpointing="on"))
        model.base_model.layers[0].self_attn.register_forward_hook(count)
    got, _ = learned_gradients(learner, batch)
    assert_close(got, plain)
    assert calls == 4  # forward and again for backward, of actor and critic
    assert not actor.training
    assert not critic.training


# -- updates -------------------------------------------------------------------------------------


def test_epochs_of_minibatches_equal_a_naive_loop() -> None:
    """Two epochs of three mini-batches: six AdamW updates, each on the weights of the last."""
    torch.manual_seed(0)
    training = {"epochs": 2, "minibatches": 3, "lr": 1e-3, "critic_lr": 2e-3, "grad_clip": 0.5}
    training |= {"weight_decay": 0.01, "microbatch_tokens": 30}
    given = settings(training=training)
    actor, critic = models(torch.float64)
    learner = make_learner(actor, critic, given)
    batch = make_rollouts(actor, critic, SHAPES)
    naive_actor, naive_critic = models(torch.float64)
    optimizers = [
        torch.optim.AdamW(
            [
                {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.01},
                {"params": [p for p in m.parameters() if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=lr,
            betas=(0.9, 0.999),
        )
        for m, lr in ((naive_actor, 1e-3), (naive_critic, 2e-3))
    ]
    experience = given_experience(learner, batch)
    order = list(minibatches(learner, 6))
    assert sorted(chain(*order[:3])) == sorted(chain(*order[3:])) == list(range(6))
    assert order[:3] != order[3:]
    norms = []
    for rows in order:
        part, given_part = [batch[i] for i in rows], [experience[i] for i in rows]
        naive_loss(naive_actor, naive_critic, part, given_part, learner.config).backward()
        norms.append(
            [
                nn.utils.clip_grad_norm_(m.parameters(), 0.5).item()
                for m in (naive_actor, naive_critic)
            ]
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    stats = train_on(learner, batch)
    for ours, naive in ((actor, naive_actor), (critic, naive_critic)):
        for (name, p), q in zip(ours.named_parameters(), naive.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-6, msg=name)
    assert stats["policy/grad_norm"] == pytest.approx(sum(n[0] for n in norms) / 6, rel=1e-4)
    assert stats["critic/grad_norm"] == pytest.approx(sum(n[1] for n in norms) / 6, rel=1e-4)


def test_a_batch_smaller_than_its_minibatches_is_refused() -> None:
    actor, critic = models()
    learner = make_learner(actor, critic, settings(training={"minibatches": 3}))
    batch = make_rollouts(actor, critic, SHAPES[:2])
    with raises(LearnerError, "fewer-responses-than-minibatches", 2, "minibatches = 3"):
        train_on(learner, batch)


def test_a_thinned_batch_splits_into_parts_that_cover_it() -> None:
    actor, critic = models()
    learner = make_learner(actor, critic, settings(training={"minibatches": 3}))
    parts = list(minibatches(learner, 5))
    assert [len(p) for p in parts] == [2, 2, 1]
    assert sorted(chain(*parts)) == list(range(5))


def test_the_critic_alone_trains_while_the_actor_is_frozen() -> None:
    actor, critic = models()
    learner = make_learner(actor, critic, settings(critic={"freeze_steps": 1}))
    batch = make_rollouts(actor, critic, SHAPES)
    before = [fingerprint(m.named_parameters()) for m in (actor, critic)]
    stats = train_on(learner, batch)
    after = [fingerprint(m.named_parameters()) for m in (actor, critic)]
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)
    assert "loss/value_avg" in stats
    assert "loss/policy_avg" not in stats
    train_on(learner, batch)
    assert fingerprint(actor.named_parameters()) != before[0]


def test_kl_coefficient_adapts_and_is_used_next_step() -> None:
    actor, critic = models()
    algorithm = {"kl_coef": 0.5, "kl_target": 1e-6, "kl_horizon": 60}
    learner = make_learner(actor, critic, settings(algorithm=algorithm))
    batch = make_rollouts(actor, critic, SHAPES)
    first = train_on(learner, batch)
    kl = first["objective/kl"]
    error = min(max(kl / 1e-6 - 1, -0.2), 0.2)
    assert first["objective/kl_coef"] == 0.5
    assert train_on(learner, batch)["objective/kl_coef"] == pytest.approx(
        0.5 * (1 + error * 6 / 60)
    )


def test_an_infinite_gradient_stops_the_run_and_leaves_the_weights() -> None:
    linear = nn.Linear(2, 1)
    trained = TrainedModel(linear, LearningRate(0.1, 5), TrainingConfig())
    before = linear.weight.detach().clone()
    (linear(torch.tensor([[torch.inf, 1.0]]))).sum().backward()
    with raises(LearnerError, "gradient-not-finite"):
        trained.update()
    assert torch.equal(linear.weight, before)


# -- optimizer and schedules ---------------------------------------------------------------------


def lr_series(kind: str, updates: int, warmup: int) -> list[float]:
    config = TrainingConfig(lr_schedule=kind)  # type: ignore[arg-type]
    linear = nn.Linear(1, 1)
    trained = TrainedModel(linear, LearningRate(2.0, updates, warmup), config)
    series = []
    for _ in range(updates):
        series.append(trained.lr)
        linear(torch.ones(1, 1)).sum().backward()
        trained.update()
    return [*series, trained.lr]


def test_schedules() -> None:
    assert lr_series("constant", 3, 0) == [2.0, 2.0, 2.0, 2.0]
    assert lr_series("constant", 6, 4) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert lr_series("linear", 4, 0) == [2.0, 1.5, 1.0, 0.5, 0.0]
    assert lr_series("linear", 6, 2) == [0.0, 1.0, 2.0, 1.5, 1.0, 0.5, 0.0]
    assert lr_series("cosine", 4, 0) == pytest.approx(
        [1 + math.cos(math.pi * i / 4) for i in range(5)], abs=1e-12
    )


def test_gradient_clipping_scales_to_the_norm_and_reports_it() -> None:
    for clip, factor in ((1.0, 1 / 5), (10.0, 1.0), (0.0, 1.0)):
        linear = nn.Linear(2, 1, bias=False)
        trained = TrainedModel(linear, LearningRate(0.1, 5), TrainingConfig(grad_clip=clip))
        linear(torch.tensor([[3.0, 4.0]])).sum().backward()
        assert trained.update() == pytest.approx(5.0)
        moment = trained.state_dict()["moments"]["weight"]["exp_avg"]
        expected = 0.1 * factor * torch.tensor([[3.0, 4.0]])
        torch.testing.assert_close(moment, expected, rtol=1e-5, atol=0)


def bf16_unit(updates: int = 1000) -> tuple[nn.Linear, TrainedModel]:
    linear = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(linear.weight)
    return linear, TrainedModel(linear, LearningRate(1e-4, updates), TrainingConfig())


def test_updates_below_bf16_resolution_add_up_in_the_master() -> None:
    linear, trained = bf16_unit()
    for _ in range(60):
        linear(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        trained.update()
    master = trained.state_dict()["masters"]["weight"]
    assert master.dtype == torch.float32
    # AdamW moves by lr each time where the gradient never changes; 1e-4 alone is under half of
    # bf16's step below 1, which is 0.0039.
    assert master.item() == pytest.approx(1 - 60e-4, abs=rounding(60))
    assert linear.weight.item() == master.bfloat16().item() == 0.9921875


def test_one_small_update_leaves_the_bf16_weight_where_it_was() -> None:
    linear, trained = bf16_unit()
    linear(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    trained.update()
    assert linear.weight.item() == 1.0
    assert trained.state_dict()["masters"]["weight"].item() == pytest.approx(
        0.9999, abs=rounding(1)
    )


def test_bf16_gradients_are_summed_in_fp32() -> None:
    linear, trained = bf16_unit()
    for _ in range(300):  # in bf16 the sum would stay at 256
        linear(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    assert linear.weight.grad is None
    assert trained._masters[0].grad is not None
    assert trained._masters[0].grad.item() == 300.0


def test_bf16_micro_batches_give_the_fp32_gradient_within_rounding() -> None:
    """All masters of a bf16 model get a gradient, and it points where the fp32 model's does."""

    def flat(dtype: torch.dtype, budget: int) -> Tensor:
        actor = llama(dtype=dtype)
        critic = critic_of(actor)
        plain_actor, plain_critic = models()
        batch = make_rollouts(plain_actor, plain_critic, SHAPES)
        algorithm = {"old_policy": "behaviour"}  # in either type
        given = settings(algorithm=algorithm, training={"microbatch_tokens": budget})
        learner = make_learner(actor, critic, given)
        trained: Any = learner.trained["actor"]
        grads: list[Tensor] = []

        def update(norm: float | None = None, scale: float = 1.0) -> float:
            grads.extend(m.grad.flatten() for m in trained._masters if m.grad is not None)
            return 0.0

        learner.trained["actor"].update = update  # type: ignore[method-assign]
        train_on(learner, batch)
        return torch.cat(grads)

    exact = flat(torch.float32, 4096)
    for budget in (1, 4096):
        rounded = flat(torch.bfloat16, budget)
        assert rounded.dtype == torch.float32
        assert nn.functional.cosine_similarity(rounded, exact, dim=0).item() > 0.98


def test_a_closed_trainer_leaves_nothing_on_the_model() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        linear = nn.Linear(1, 1, dtype=dtype)
        trained = TrainedModel(linear, LearningRate(0.1, 5), TrainingConfig())
        linear(torch.ones(1, 1, dtype=dtype)).sum().backward()
        trained.update()
        trained.close()
        assert [p.grad for p in linear.parameters()] == [None, None]
        linear(torch.ones(1, 1, dtype=dtype)).sum().backward()
        assert all(p.grad is not None for p in linear.parameters())


def test_state_put_back_goes_on_as_if_nothing_had_happened() -> None:
    given = settings(training={"lr": 1e-3, "lr_schedule": "cosine"}, algorithm={"kl_target": 0.1})
    actor, critic = models()
    batch = make_rollouts(actor, critic, SHAPES)
    learner = make_learner(actor, critic, given)
    train_on(learner, batch)
    learner.publish()
    state = copy.deepcopy(learner.state_dict())
    other_actor, other_critic = models()
    other = make_learner(other_actor, other_critic, given)
    other.load_state_dict(state)
    for _ in range(2):
        assert train_on(learner, batch) == train_on(other, batch)
    assert learner.publish() == other.publish()
    for ours, theirs in ((actor, other_actor), (critic, other_critic)):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q)


# -- memory --------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def test_no_tensor_grows_with_tokens_times_vocabulary() -> None:
    vocabulary = 70_000
    actor = llama(vocabulary=vocabulary)
    critic = critic_of(actor)
    batch = make_rollouts(actor, critic, [(3, 100), (4, 80), (2, 120)], noise=0.0)
    learner = make_learner(actor, critic, settings(algorithm={"entropy_coef": 0.01}))
    with Largest() as largest:
        train_on(learner, batch)
    slice_elements = (8 << 20) // 4  # what the head works on at a time
    assert largest.numel <= slice_elements
    assert largest.numel < 300 * vocabulary / 10
    assert largest.numel >= 16 * vocabulary  # the head's gradient: the mode did see the backward


# -- on-policy data ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_every_ratio_is_one_on_what_the_engine_just_made(temperature: float) -> None:
    actor, critic = models()
    rollouts = engine_rollouts(actor, critic, temperature=temperature)
    assert {r.finish for r in rollouts} == {FinishReason.STOP, FinishReason.LENGTH}
    given = {"rollout": {"batch": 8, "temperature": temperature}}
    stats = train_on(make_learner(actor, critic, given), rollouts)
    assert abs(stats["val/ratio_max"] - 1) < 1e-5
    assert abs(stats["val/ratio_min"] - 1) < 1e-5
    assert stats["policy/approxkl_avg"] < 1e-10
    assert stats["policy/clipfrac_avg"] == 0


def test_a_learner_that_disagrees_with_the_engine_stops_before_the_actor_moves() -> None:
    actor, critic = models()
    rollouts = engine_rollouts(actor, critic, temperature=1.0)
    learner = make_learner(actor, critic, {"rollout": {"batch": 8, "temperature": 0.7}})
    before = fingerprint(actor.named_parameters())
    with raises(LearnerError, "policies-disagree"):
        train_on(learner, rollouts)
    assert fingerprint(actor.named_parameters()) == before


def test_older_data_may_differ_and_is_not_checked() -> None:
    actor, critic = models()
    rollouts = engine_rollouts(actor, critic, temperature=1.0)
    learner = make_learner(actor, critic, {"rollout": {"batch": 8, "temperature": 0.7}})
    learner.publish()
    assert train_on(learner, rollouts)["val/ratio_max"] > 1.01


def test_publish_counts_and_proves_and_the_engine_checks() -> None:
    actor, critic = models()
    learner = make_learner(actor, critic, settings())
    one, two = learner.publish(), learner.publish()
    for name, model in (("actor", actor), ("critic", critic)):
        assert (one[name].version, two[name].version) == (1, 2)
        expected = fingerprint(model.named_parameters())
        assert one[name].fingerprint == two[name].fingerprint == expected
        assert not two[name].channel
    train_on(learner, make_rollouts(actor, critic, SHAPES))
    three = learner.publish()
    assert all(three[name].fingerprint != two[name].fingerprint for name in ("actor", "critic"))


def test_only_the_first_update_after_a_hand_over_is_checked() -> None:
    """The version stays the same while the actor moves away from what it published."""
    actor, critic = models()
    given = {
        "rollout": {"batch": 8, "temperature": 0.7},
        "training": {"lr": 0.1, "minibatches": 2},
        "critic": {"freeze_steps": 1},
    }
    learner = make_learner(actor, critic, given)
    rollouts = engine_rollouts(actor, critic, temperature=0.7)
    train_on(learner, rollouts)  # the critic alone: what the actor published is still what it is
    assert abs(train_on(learner, rollouts)["val/ratio_max"] - 1) > 0.01  # in its second mini-batch
    state = learner.state_dict()
    assert abs(train_on(learner, rollouts)["val/ratio_min"] - 1) > 0.01
    other = make_learner(*models(), given)
    other.load_state_dict(state)
    train_on(other, rollouts)
    learner.publish()
    train_on(learner, rollouts)  # of version 0, and now the version is 1
    learner.publish()
    lying = engine_rollouts(actor, critic, temperature=1.0, version=2)
    with raises(LearnerError, "policies-disagree"):
        train_on(learner, lying)


def with_older(honest: list[Rollout], other: list[Rollout]) -> list[Rollout]:
    """A batch in which responses 3 and 5 begin with tokens of older versions."""
    batch = [*honest[:3], other[3], honest[4], other[5], *honest[6:]]
    batch[3].versions[0], batch[5].versions[:2] = 1, array("i", [0, 1])
    return batch


def test_responses_with_a_stale_token_are_not_checked_and_all_others_are() -> None:
    actor, critic = models()
    learner = make_learner(actor, critic, {"rollout": {"batch": 8, "temperature": 0.7}})
    learner.publish()
    learner.publish()
    told, lying = (engine_rollouts(actor, critic, temperature=t, version=2) for t in (0.7, 1.0))
    before = fingerprint(actor.named_parameters())
    with raises(LearnerError, "policies-disagree"):
        train_on(learner, with_older(copy.deepcopy(lying), copy.deepcopy(told)))
    assert fingerprint(actor.named_parameters()) == before
    rollouts = with_older(told, lying)
    stats = train_on(learner, rollouts)
    assert stats["sampling/logp_difference_max"] < 1e-5 < stats["val/ratio_max"] - 1
    tokens = sum(map(len, rollouts))
    assert stats["staleness/mean"] == pytest.approx((1 + 2) / 8)
    assert stats["staleness/max"] == 2
    assert stats["staleness/off_policy_tokens"] == pytest.approx(3 / tokens)


@pytest.mark.parametrize(
    ("dtype", "lr", "before"), [(torch.float32, 3e-6, 1e-3), (torch.bfloat16, 1e-3, 0.2)]
)
def test_an_engine_one_version_behind_is_refused_once_rounding_is_measured(
    dtype: torch.dtype, lr: float, before: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It claims the version that it did not get; ``before`` would let it pass."""
    monkeypatch.setattr(agreement, "CALIBRATION_TOKENS", 60)
    for tolerance in (before, 0.0):
        actor, critic = models(dtype)
        given = {"rollout": {"batch": 8}, "training": {"lr": lr, "ratio_tolerance": tolerance}}
        learner = make_learner(actor, critic, given)
        for version in range(2):
            stale = copy.deepcopy(actor)
            train_on(learner, engine_rollouts(actor, critic, temperature=1.0, version=version))
            learner.publish()
        state = copy.deepcopy(learner.state_dict())  # what was measured is part of it
        for trained in (learner.trained["actor"], learner.trained["critic"]):
            trained.close()  # type: ignore[attr-defined]
        other = make_learner(actor, critic, given)
        other.load_state_dict(state)
        late = engine_rollouts(stale, critic, temperature=1.0, version=2)
        if tolerance:
            train_on(other, late)
        else:
            with raises(LearnerError, "policies-disagree"):
                train_on(other, late)


# -- the policy that ratios are taken to ---------------------------------------------------------


def watched_batches(learner: PolicyLearner) -> list[MicroBatch]:
    """What the learner's passes will be given."""
    seen: list[MicroBatch] = []
    run = learner.backprop.run

    def watch(batches: Any, kl_coef: float, *, trains_actor: bool) -> Any:
        seen.extend(batches)
        return run(batches, kl_coef, trains_actor=trains_actor)

    learner.backprop.run = watch  # type: ignore[method-assign]
    return seen


def test_in_bfloat16_a_step_of_one_update_takes_the_ratio_to_itself() -> None:
    """No rounding between engine and learner is in it; how much there was is reported."""

    def step(**sections: Any) -> dict[str, float]:
        actor, critic = models(torch.bfloat16)
        rollouts = engine_rollouts(actor, critic, temperature=1.0)
        rng = np.random.default_rng(0)
        for r in rollouts:  # as kernels that round otherwise; here there may be none
            r.logprobs = array("f", [x + 0.01 * rng.normal() for x in r.logprobs])
        return train_on(
            make_learner(actor, critic, {"rollout": {"batch": 8}, **sections}), rollouts
        )

    stats = step()
    assert stats["val/ratio_min"] == stats["val/ratio_max"] == 1.0
    assert stats["policy/approxkl_avg"] == stats["policy/clipfrac_avg"] == 0.0
    rms = stats["sampling/logp_difference_rms"]
    assert 5e-3 < rms < stats["sampling/logp_difference_max"] < 0.2
    engines = step(algorithm={"old_policy": "behaviour"})
    assert engines["policy/approxkl_avg"] == pytest.approx(rms**2 / 2)
    assert engines["val/ratio_max"] > 1.001
    two = step(training={"minibatches": 2, "lr": 1e-12})
    assert two["val/ratio_max"] == pytest.approx(engines["val/ratio_max"])


def test_responses_of_older_weights_keep_the_policy_that_sampled_them() -> None:
    """By version, token by token, and by whether the actor has moved on from its version."""
    actor, critic = models(torch.bfloat16)
    learner = make_learner(actor, critic, {"rollout": {"batch": 8}, "training": ANY_RATIO})
    learner.publish()
    learner.publish()
    seen = watched_batches(learner)
    rollouts = engine_rollouts(actor, critic, temperature=1.0, version=2)
    train_on(learner, with_older(rollouts, rollouts))
    train_on(learner, rollouts)  # weight_sync_interval: of this version, but not of these weights
    sampled = {r.id: r.logprobs for r in rollouts}
    own = []
    for batch in seen:
        rows, inputs = rows_in(batch, rollouts), batch.inputs
        own.append({r.id: bool(flag) for r, flag in zip(rows, inputs.own, strict=True)})
        for row, r in enumerate(rows):
            assert inputs.behaviour_logprobs is not None
            behaviour = inputs.behaviour_logprobs[row, : len(r)].tolist()
            assert behaviour == pytest.approx(sampled[r.id])
    assert own == [{i: i not in (3, 5) for i in range(8)}, dict.fromkeys(range(8), False)]


def test_in_float32_nothing_but_the_engines_log_probs_is_the_default() -> None:
    ends = []
    for algorithm in ({}, {"old_policy": "behaviour"}):
        actor, critic = models()
        learner = make_learner(actor, critic, {"rollout": {"batch": 8}, "algorithm": algorithm})
        stats = train_on(learner, engine_rollouts(actor, critic, temperature=1.0))
        ends.append((stats, fingerprint(actor.named_parameters())))
    assert ends[0] == ends[1]
    assert ends[0][0]["val/ratio_max"] != 1.0


@pytest.mark.parametrize(("minibatches", "passes"), [(1, 1), (2, 3)])
def test_the_proximal_policy_costs_a_pass_only_where_a_step_is_several_updates(
    minibatches: int, passes: int
) -> None:
    actor, critic = models()
    given = settings(algorithm={"old_policy": "proximal"}, training={"minibatches": minibatches})
    learner = make_learner(actor, critic, given)
    batch = make_rollouts(actor, critic, SHAPES)
    train_on(learner, batch)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    actor.get_input_embeddings().register_forward_hook(count)
    stats = train_on(learner, batch)
    assert calls == passes
    if minibatches == 1:
        assert stats["val/ratio_min"] == stats["val/ratio_max"] == 1.0


def test_older_data_is_learned_from_by_the_ratio_to_the_policy_that_sampled_it() -> None:
    """Worked by hand: no critic, no KL, gamma and lambda 1, so each advantage is the reward.

    ==========  ======  =========  ==================  =================
    response    reward  ratio      min(rho A, clip A)  d/d log pi
    ==========  ======  =========  ==================  =================
    0, token 0  2       1.5        1.2 * 2             0 (clipped)
    0, token 1  2       0.5        0.5 * 2             0.5 * 2
    1, token 0  -1      1.1        -1.1                -1.1
    1, token 1  -1      0.5        -0.8                0 (clipped)
    ==========  ======  =========  ==================  =================
    """
    actor, critic = models()
    nn.init.zeros_(critic.score.weight)
    algorithm = {"kl_coef": 0, "lam": 1.0, "whiten_advantages": False}
    given = settings(algorithm=algorithm, reward={"missing_eos": "off"})
    learner = make_learner(actor, critic, given)
    for _ in range(2):
        learner.publish()
    batch = make_rollouts(actor, critic, [(4, 2), (3, 2)])
    now = left_padded_logprobs(actor, batch)
    for r, new, ratios, reward, versions in zip(
        batch, now, [[1.5, 0.5], [1.1, 0.5]], [2.0, -1.0], [[0, 1], [1, 2]], strict=True
    ):
        shifted = [x - math.log(rho) for x, rho in zip(new.tolist(), ratios, strict=True)]
        r.logprobs = array("f", shifted)
        r.versions = array("i", versions)
        r.scores = {
            "task": Score(r.id, "task", "reward", torch.tensor([reward]).numpy()),
            "critic": Score(r.id, "critic", "values", torch.zeros(2).numpy()),
        }
    got, stats = learned_gradients(learner, batch)
    assert stats["loss/policy_avg"] == pytest.approx(-(2.4 + 1.0 - 1.1 - 0.8) / 4, rel=1e-4)
    assert stats["policy/clipfrac_avg"] == pytest.approx(2 / 4)
    assert stats["staleness/max"] == 2
    assert stats["staleness/mean"] == pytest.approx(1.5)
    assert stats["staleness/off_policy_tokens"] == pytest.approx(3 / 4)
    (-(1.0 * now[0][1] - 1.1 * now[1][0]) / 4).backward()
    expected = {f"actor.{n}": p.grad for n, p in actor.named_parameters()}
    assert_close({n: g for n, g in got.items() if n in expected}, expected, 1e-4)


# -- what is handed over -------------------------------------------------------------------------


def publisher(
    actor: Any, critic: Any, given: Mapping[str, Any], snapshots: Sequence[str]
) -> PolicyLearner:
    plain = make_learner(actor, critic, given)
    return PolicyLearner(
        plain.trained["actor"],
        plain.trained.get("critic"),
        plain.backprop,
        plain.config,
        {"task": 1.0},
        snapshots=snapshots,
    )


def lora_models() -> tuple[Any, Any]:
    actor = llama()
    critic = add_lora(critic_of(actor), ModelConfig(lora_rank=2), "SEQ_CLS")
    return add_lora(actor, ModelConfig(lora_rank=2), "CAUSAL_LM"), critic


@pytest.mark.parametrize("make", [models, lora_models])
def test_a_snapshot_stays_while_training_goes_on(make: Callable[[], tuple[Any, Any]]) -> None:
    """It has the trained weights alone, and with it a copy becomes the model that was published."""
    actor, critic = make()
    copies = {"actor": with_own_weights(actor), "critic": with_own_weights(critic)}
    given = settings(training={"lr": 0.1, "critic_lr": 0.1})
    learner = publisher(actor, critic, given, ["critic", "actor"])
    batch = make_rollouts(actor, critic, SHAPES)
    train_on(learner, batch)
    train_on(
        learner, batch
    )  # the B matrices of adapters begin at zero: now the A matrices move, too
    published = learner.publish()
    then = {n: copy.deepcopy(m.state_dict()) for n, m in (("actor", actor), ("critic", critic))}
    train_on(learner, batch)
    for name, model in (("actor", actor), ("critic", critic)):
        weights, tensors = published[name], learner.channel.get(published[name])
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert set(tensors) == trained
        for n in trained:
            assert torch.equal(tensors[n], then[name][n])
            assert not torch.equal(tensors[n], model.get_parameter(n))
        load_weights(copies[name], weights, tensors, "the test")
        held = copies[name].state_dict()
        assert held.keys() == then[name].keys()
        assert all(torch.equal(held[n], then[name][n]) for n in held)
        with pytest.raises(EngineError, match="fingerprint"):
            load_weights(copies[name], ticket(9, "other"), {}, "the test")


def test_an_engine_generates_with_a_snapshot_while_the_learner_trains_on() -> None:
    actor, critic = models()
    generating = with_own_weights(actor)
    given = {"rollout": {"batch": 8}, "training": {"lr": 0.1, "ratio_tolerance": 100.0}}
    learner = publisher(actor, critic, given, ["actor"])
    train_on(learner, engine_rollouts(generating, critic, temperature=1.0))
    published = learner.publish()
    assert not published["critic"].channel
    first = copy.deepcopy(actor)
    train_on(learner, engine_rollouts(generating, critic, temperature=1.0))
    actor_ref = published["actor"]
    load_weights(generating, actor_ref, learner.channel.get(actor_ref), "the engine")
    rollouts = engine_rollouts(generating, critic, temperature=1.0, version=1)
    for r, expected in zip(rollouts, left_padded_logprobs(first, rollouts), strict=True):
        torch.testing.assert_close(torch.tensor(r.logprobs), expected, rtol=0, atol=1e-4)


def test_the_memory_of_a_snapshot_is_used_again_once_nobody_holds_it() -> None:
    linear = nn.Linear(3, 2)
    trained = TrainedModel(linear, LearningRate(0.1, 5), TrainingConfig())
    first = trained.snapshot()
    kept, where = first["weight"].clone(), first["weight"].data_ptr()
    nn.init.ones_(linear.weight)
    second = trained.snapshot()
    assert torch.equal(first["weight"], kept)
    assert torch.equal(second["weight"], torch.ones(2, 3))
    del first
    nn.init.zeros_(linear.weight)
    third = trained.snapshot()
    assert third["weight"].data_ptr() == where
    assert torch.equal(third["weight"], torch.zeros(2, 3))
    assert torch.equal(second["weight"], torch.ones(2, 3))
    where = third["weight"].data_ptr()
    del third  # the newer one, while an older one is held
    assert trained.snapshot()["weight"].data_ptr() == where


def test_snapshots_are_of_trained_models() -> None:
    with raises(LearnerError, "unknown-model", "'criti'", "'critic'"):
        publisher(*models(), {}, ["criti"])


def test_an_interruption_leaves_the_model_in_evaluation_mode() -> None:
    actor, critic = models()
    learner = make_learner(actor, critic, settings())
    batch = make_rollouts(actor, critic, SHAPES)
    for model in (actor, critic):

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = model.get_input_embeddings().register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            train_on(learner, batch)
        handle.remove()
        assert not any(m.training for m in model.modules())


# -- collation -----------------------------------------------------------------------------------


def test_whole_weights_are_handed_over_in_the_hosts_memory() -> None:
    """Pickled where a GPU has them, they would be allocated on it again, by whoever reads them."""
    model = llama()
    actor = make_learner(model, critic_of(model)).trained["actor"]
    host = torch.zeros(1)
    on_gpu: Any = SimpleNamespace(cpu=lambda: host)
    assert actor.gathered({"w": on_gpu})["w"] is host


def finished(values: Mapping[str, Sequence[float]], length: int = 2) -> Rollout:
    r = Rollout(4, Prompt(0, (1,), ""), 4, array("i", [1] * length))
    r.logprobs, r.versions = array("f", [-1.0] * length), array("i", [0] * length)
    r.finish = FinishReason.STOP
    for name, numbers in values.items():
        kind: Any = {"critic": "values", "reference": "logprobs"}.get(name, "reward")
        r.scores[name] = Score(4, name, kind, torch.tensor(numbers).numpy())
    return r


def test_rewards_are_summed_with_their_weights() -> None:
    r = finished({"task": [2.0], "model:x": [3.0], "critic": [0.1, 0.2]})
    assert total_reward(r, {"task": 0.5, "model:x": -2.0}) == -5.0
    data = collate(train_batch([r]), {"task": 0.5, "model:x": -2.0})
    assert data.scores.tolist() == [-5.0]
    assert data.ref_logprobs is None
    assert describe(train_batch([r]))["reward/model:x"] == 3.0


@pytest.mark.parametrize("values", [[0.1], [0.1, 0.2, 0.3]])
def test_values_that_do_not_fit_the_response_are_refused(values: list[float]) -> None:
    with pytest.raises(LifecycleError, match="rollout 4 needs one score of kind 'values' with 2"):
        train_batch([finished({"task": [1.0], "critic": values})])


def test_a_batch_has_values_for_all_or_for_none() -> None:
    valued, bare = finished({"task": [1.0], "critic": [0.1, 0.2]}), finished({"task": [1.0]})
    with pytest.raises(LifecycleError, match=r"kind 'values' with 2 numbers.*; got none"):
        train_batch([valued, bare])
    assert collate(train_batch([bare]), {"task": 1.0}).values is None
    with raises(LearnerError, "critic-values-missing"):
        train_on(make_learner(*models(), {"algorithm": {"kl_coef": 0}}), [bare])


def test_groups_are_prompts() -> None:
    rollouts = [finished({"task": [1.0]}) for _ in range(4)]
    for r, prompt in zip(rollouts, [7, 3, 7, 3], strict=True):
        r.prompt = Prompt(prompt, (1,), "")
    assert collate(train_batch(rollouts), {"task": 1.0}).groups.tolist() == [7, 3, 7, 3]


# -- LoRA ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatch_tokens", [0, 1])
def test_warm_up_is_cross_entropy_on_the_answers(
    microbatch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss it returns is that of its last batch, before that batch's update; in one pass, or an
    example a pass.
    """
    if microbatch_tokens:
        monkeypatch.setattr("stretto.training.warmup.SMALL", 0)
    config = TrainingConfig(microbatch_tokens=microbatch_tokens)
    model = llama()
    critic = critic_of(model)
    examples = make_rollouts(model, critic, SHAPES)
    with torch.no_grad():
        before = -torch.cat(left_padded_logprobs(model, examples)).mean()
    assert warm_up(model, told(examples), 1e-2, config) == pytest.approx(before.item(), rel=1e-5)
    assert warm_up(model, told(examples * 200), 1e-2, config) < 0.5 * before.item()


def test_lora_trains_adapters_alone(tiny_folder: Path) -> None:
    actor = load_causal_lm(tiny_folder, torch.float32, torch.device("cpu"))
    lora = ModelConfig(lora_rank=4)
    critic = add_lora(critic_of(actor), lora, "SEQ_CLS")
    rollouts = make_rollouts(actor, critic, SHAPES)
    wrapped = add_lora(actor, lora, "CAUSAL_LM")
    before = {n: p.detach().clone() for m in (wrapped, critic) for n, p in m.named_parameters()}
    learner = make_learner(wrapped, critic, settings(training={"lr": 1e-2, "critic_lr": 1e-2}))
    train_on(learner, rollouts)  # B is zero: A has no gradient yet
    train_on(learner, rollouts)
    moved = {
        n
        for m in (wrapped, critic)
        for n, p in m.named_parameters()
        if not torch.equal(p, before[n])
    }
    trainable = {n for m in (wrapped, critic) for n, p in m.named_parameters() if p.requires_grad}
    assert moved == trainable
    assert all("lora_" in n or "score.modules_to_save" in n for n in moved)
    assert any("score.modules_to_save" in n for n in moved)
