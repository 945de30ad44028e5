"""The learner on episodes: gradients against naive passes and loops, and what must not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from episode_helpers import (
    as_episodes,
    episodes_of,
    naive_loss,
    naive_now,
    naive_value_loss,
)
from helpers import llama, make_learner, naive_values, train_on
from learner_helpers import (
    CORRECTED,
    Grads,
    NoHostSync,
    assert_close,
    learned_gradients,
    learner_of,
    make_batch,
)
from loss_helpers import VARIANTS, named
from raising import raises
from stretto.config import AlgorithmConfig, RolloutConfig
from stretto.config.algorithm import ALGORITHMS
from stretto.errors import LearnerError
from stretto.models.weights import fingerprint
from stretto.rollout.base import EngineSettings
from stretto.rollout.engine import TorchEngine
from stretto.schedules.rollout import Rollout, train_batch
from stretto.testing.contracts import episodes, play
from stretto.training import backprop
from stretto.training.learner import PolicyLearner
from stretto.types import CONTEXT, FinishReason, Sampling, Score


def naive_gradients(learner: PolicyLearner, actor: Any, batch: list[Rollout]) -> Grads:
    """Of actor and critic, by a pass for each response and loops over the tokens drawn in it."""
    a = learner.config.algorithm
    now, entropies = naive_now(actor, batch)
    proximal = a.old_policy == "proximal"
    episodes = episodes_of(batch, now, entropies, proximal=proximal, penalty=lambda _: -1.0)
    naive_loss(a, episodes, beta=a.beta, longest=16).backward()
    models = {"actor": actor}
    if "critic" in learner.trained:
        models["critic"] = learner.trained["critic"].model  # type: ignore[attr-defined]
        for e in episodes:
            for row, sample in zip(e.rows, e.samples, strict=True):
                values = naive_values(models["critic"], batch[row])[batch[row].sampled]
                for token, value in zip(sample, values, strict=True):
                    token.new_value = value
        naive_value_loss(a, episodes).backward()
    grads = {}
    for model, module in models.items():
        for name, p in module.named_parameters():
            if p.grad is not None:
                grads[f"{model}.{name}"], p.grad = p.grad.clone(), None
    return grads


@pytest.mark.parametrize("budget", [1, 100_000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_those_of_loops_over_tokens(variant: str, budget: int) -> None:
    """In micro-batches of a response or an episode each, and in one."""
    algorithm = VARIANTS[variant] | {"entropy_coef": 0.01}
    actor = llama(dtype=torch.float64)
    learner = learner_of(algorithm, actor, training={"microbatch_tokens": budget})
    batch = as_episodes(make_batch(actor, algorithm))
    expected = naive_gradients(learner, actor, batch)
    got, stats = learned_gradients(learner, batch)
    assert_close(got, expected)
    assert stats["staleness/max"] == 0
    assert stats["response/length_mean"] == (6 + 5 + 6 + 6 + 3 + 4) / 6


@pytest.mark.parametrize("variant", ["ppo", "rloo", "proximal-rloo", "gspo", "copg"])
def test_corrected_gradients_equal_those_of_loops_over_tokens(variant: str) -> None:
    """Importance weights are of the tokens drawn, of an episode over all its samples."""
    algorithm = VARIANTS[variant] | CORRECTED | {"correction_cap": 1.1}
    actor = llama(dtype=torch.float64)
    learner = learner_of(algorithm, actor, training={"microbatch_tokens": 70})
    batch = as_episodes(make_batch(actor, algorithm))
    expected = naive_gradients(learner, actor, batch)
    got, stats = learned_gradients(learner, batch)
    assert_close(got, expected)
    assert stats["val/ratio_max"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_nothing_that_stands_beside_context_is_read(name: str) -> None:
    """Log-probs and versions of context may be anything, NaN too."""
    found = []
    for beside in (0.0, float("nan")):
        actor = llama(dtype=torch.float64)
        batch = train_batch(as_episodes(make_batch(actor, named(name))))
        assert batch.sampled is not None
        logprobs, versions = batch.logprobs.copy(), batch.versions.copy()
        logprobs[~batch.sampled] = beside
        versions[~batch.sampled] = CONTEXT if beside == 0 else 10_000
        learner = learner_of(named(name) | {"old_policy": "behaviour"}, actor)
        out = learner.train(replace(batch, logprobs=logprobs, versions=versions))
        found.append((dict(out.stats), fingerprint(actor.named_parameters())))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_turn_is_learned_from_bit_for_bit(name: str) -> None:
    """With a mask that says that all was drawn."""
    ends = []
    for masked in (False, True):
        actor = llama()
        batch = train_batch(make_batch(actor, named(name)))
        if masked:
            batch = replace(batch, sampled=np.ones(len(batch.tokens), np.bool_))
        stats = dict(learner_of(named(name), actor).train(batch).stats)
        ends.append((stats, fingerprint(actor.named_parameters())))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("budget", [1, 60, 100_000])
def test_the_order_of_samples_and_micro_batches_does_not_matter(name: str, budget: int) -> None:
    ends = []
    for size, rows in ((100_000, range(8)), (budget, [3, 7, 0, 6, 1, 5, 2, 4])):
        actor = llama(dtype=torch.float64)
        batch = as_episodes(make_batch(actor, named(name)))
        learner = learner_of(named(name), actor, training={"microbatch_tokens": size})
        stats = train_on(learner, [batch[i] for i in rows])
        ends.append((stats, {n: p.detach() for n, p in actor.named_parameters()}))
    (stats, weights), (others, found) = ends
    assert others == pytest.approx(stats, rel=1e-4, abs=1e-6)
    for n in weights:
        torch.testing.assert_close(found[n], weights[n], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_mini_batches_keep_an_episode_together(name: str) -> None:
    actor = llama()
    learner = learner_of(named(name), actor, training={"minibatches": 2})
    batch = train_batch(as_episodes(make_batch(actor, named(name))))
    e = learner.experience_of(batch)
    parts = list(learner.minibatches(8, e.units))
    assert len(parts) == 2
    for pair in ((0, 2), (1, 6)):
        holding = [sum({*pair} <= {*unit} for unit in units) for units in parts]
        split = [sum(len({*pair} & {*unit}) == 1 for unit in units) for units in parts]
        assert sum(holding) <= 1
        assert not any(split)


@pytest.mark.parametrize("name", ["rloo", "grpo", "proximal-rloo"])
def test_samples_share_a_pass_only_where_the_loss_is_of_whole_responses(name: str) -> None:
    """An episode of many long samples would not fit into one pass."""
    actor = llama()
    learner = learner_of(named(name), actor, training={"microbatch_tokens": 1})
    batch = train_batch(as_episodes(make_batch(actor, named(name))))
    e = learner.experience_of(batch)
    made = learner.microbatches(batch.responses(), e.units, e)
    sizes = sorted(len(m.tokens) for m in made)
    assert sizes == ([1, 1, 1, 1, 2, 2] if name == "proximal-rloo" else [1] * 8)


def test_the_kl_and_its_coefficient_count_an_episode_once() -> None:
    """KL in nats a response, whose samples' tokens are summed; six responses."""
    actor = llama(dtype=torch.float64)
    algorithm = {"name": "rloo", "kl_coef": 0.1, "kl_target": 1e-6, "kl_horizon": 40}
    learner = learner_of(algorithm, actor)
    batch = as_episodes(make_batch(actor, algorithm))
    e = learner.experience_of(train_batch(batch))
    assert AlgorithmConfig.model_validate(algorithm).estimator == "k1"
    total = 0.0
    for r in batch:
        own = np.array(r.logprobs)[r.sampled] - r.scores["reference"].values
        total += float(own.sum())
    assert e.stats["objective/kl"] == pytest.approx(total / 6, rel=1e-5)
    train_on(learner, batch)
    moved = 0.2 if total > 0 else -0.2
    assert learner.state_dict()["kl"]["coef"] == pytest.approx(0.1 * (1 + moved * 6 / 40))


@pytest.mark.parametrize("variant", VARIANTS)
def test_passes_over_samples_make_no_host_wait(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, made = backprop._passes, []

    def spied(*given: Any) -> Any:
        with NoHostSync():
            made.append(given)
            return passes(*given)

    monkeypatch.setattr(backprop, "_passes", spied)
    actor = llama()
    algorithm = VARIANTS[variant] | (CORRECTED if variant in ("ppo", "gspo") else {})
    learner = learner_of(algorithm, actor, training={"microbatch_tokens": 60})
    train_on(learner, as_episodes(make_batch(actor, algorithm)))
    assert len(made) == len(learner.trained)


@torch.no_grad()
def test_the_policy_before_the_step_is_of_the_tokens_drawn() -> None:
    """A step of several updates makes a pass for it, over context, too."""
    actor = llama(dtype=torch.float64)
    algorithm = {"name": "ppo", "old_policy": "proximal", "kl_coef": 0}
    learner = learner_of(algorithm, actor, training={"minibatches": 2})
    batch = as_episodes(make_batch(actor, algorithm))
    now, _ = naive_now(actor, batch)
    e = learner.experience_of(train_batch(batch))
    for row, r in enumerate(batch):
        drawn = now[row][torch.from_numpy(r.sampled)].float()
        assert e.mask[row].sum() == len(drawn)
        torch.testing.assert_close(e.old_logprobs[row, : len(drawn)], drawn, rtol=1e-5, atol=1e-5)


# -- on-policy data of the engine ----------------------------------------------------------------


def decoded(actor: Any, temperature: float) -> list[Rollout]:
    """Episodes that the engine decoded turn by turn, with waits between them, and rewards."""
    config = RolloutConfig(batch=8, max_new_tokens=40, temperature=temperature)
    ends = frozenset(range(3, 9))
    engine = TorchEngine(actor, EngineSettings(rollout=config, seed=5, end_tokens=ends, rows=3))
    made = episodes(
        [[11 + i, 2, 9] for i in range(8)], Sampling(40, temperature, max_turn_tokens=9)
    )
    play(engine, made)
    rng = np.random.default_rng(1)
    for r in made:
        r.finish = FinishReason.STOP if r.ended_by == "turns" else FinishReason.LENGTH
        r.prompt = replace(r.prompt, id=r.id // 4)
        r.scores["task"] = Score(r.id, "task", "reward", rng.normal(size=1).astype(np.float32))
    assert max(len(r.turns) for r in made) > 1
    return made


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_learner_agree_over_several_turns(temperature: float) -> None:
    actor = llama()
    made = decoded(actor, temperature)
    given = {
        "rollout": {"batch": 8, "temperature": temperature, "samples_per_prompt": 4},
        "algorithm": {"name": "grpo", "kl_coef": 0},
    }
    stats = train_on(make_learner(actor, None, given), made)
    assert abs(stats["val/ratio_max"] - 1) < 1e-5
    assert abs(stats["val/ratio_min"] - 1) < 1e-5
    assert stats["sampling/logp_difference_max"] < 1e-5
    assert stats["staleness/off_policy_tokens"] == 0


def test_an_engine_that_disagrees_after_the_first_turn_is_found_out() -> None:
    """As one that read another context than the transcript has."""
    actor = llama()
    made = decoded(actor, 1.0)
    first = next(r for r in made if r.context)
    start, _ = first.context[0]
    first.tokens[start] = (first.tokens[start] + 7) % 61
    given = {
        "rollout": {"batch": 8, "samples_per_prompt": 4},
        "algorithm": {"name": "grpo", "kl_coef": 0},
    }
    before = fingerprint(actor.named_parameters())
    with raises(LearnerError, "policies-disagree"):
        train_on(make_learner(actor, None, given), made)
    assert fingerprint(actor.named_parameters()) == before
