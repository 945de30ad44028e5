"""Learners over ranks that hold shards (FSDP2), against one that holds all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from episode_helpers import as_episodes
from helpers import make_learner, make_rollouts
from learner_helpers import SHAPES, algorithm_settings, in_memory, make_batch
from loss_helpers import named
from rank_helpers import call_each
from rounding import GRADIENT_TERMS, rounding
from sharded_workers import UPDATES, ShardedRank, first_gradients, models, scored, scorers_of
from stretto.config.algorithm import ALGORITHMS
from stretto.models.lora import starting_policy
from stretto.schedules.rollout import train_batch
from stretto.scoring.model_scorers import critic_scorer, reference_scorer
from stretto.training import shard_files
from stretto.training.learner import PolicyLearner
from stretto.types import FinishReason, Response, Score, TrainBatch
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec

ROUNDING = {"val/clipfrac_avg"}
"""Not compared: counts values whose clipped error is larger, be it by a rounding error."""
OF_NORMS = rounding(16)
"""Of gradients: of models in float64, whose norms over 16 features are in float32 all the same."""
LEARNED = rounding(GRADIENT_TERMS)
"""Of figures and weights after some steps, relative and absolute, as of models in float32: AdamW
makes more of differences in the smallest gradients."""


@pytest.fixture(scope="module")
def two() -> Iterator[RankGroup]:
    ranks = RankGroup(GroupSpec(2), ShardedRank).start()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def three() -> Iterator[RankGroup]:
    """More than divides the rows of most weights, and than the layers there are."""
    ranks = RankGroup(GroupSpec(3), ShardedRank).start()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def sliced() -> Iterator[RankGroup]:
    """Two slices of each linear layer."""
    ranks = RankGroup(GroupSpec(2), ShardedRank, (2,)).start()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def both() -> Iterator[RankGroup]:
    """Two slices, each in two shards."""
    ranks = RankGroup(GroupSpec(4), ShardedRank, (2,)).start()
    yield ranks
    ranks.close()


def whole_learner(kind: str, given: Mapping[str, Any]) -> PolicyLearner:
    actor, critic = models(kind)
    with_critic = ALGORITHMS[given["algorithm"]["name"]].critic
    return make_learner(actor, critic if with_critic else None, given, updates=UPDATES)


def assert_same_learning(
    ranks: RankGroup,
    kind: str,
    given: Mapping[str, Any],
    batches: Sequence[TrainBatch],
    tolerance: float = LEARNED,
    spare: Sequence[int] = (),
) -> None:
    """Figures of each step, and the weights after the last."""
    ranks.call(ShardedRank.make, kind, given, spare)
    whole = whole_learner(kind, given)
    expected = [whole.train(batch).stats for batch in batches]
    for stats in ranks.call(ShardedRank.train, batches):
        for got, want in zip(stats, expected, strict=True):
            assert got.keys() - {"passes/balance"} == want.keys()
            for name in want.keys() - ROUNDING:
                assert got[name] == pytest.approx(want[name], rel=tolerance, abs=tolerance), name
    (weights, marks), *others = ranks.call(ShardedRank.weights)
    assert all(not any(own.values()) for own, _ in others)
    assert all(other == marks for _, other in others)
    for model, tensors in whole.weights().items():
        assert weights[model].keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(
                weights[model][name], tensor, rtol=tolerance, atol=tolerance, msg=name
            )


def batches_of(given: Mapping[str, Any], count: int = 3) -> list[TrainBatch]:
    actor, _ = models("plain")
    return [train_batch(make_batch(actor, given["algorithm"]))] * count


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", ["two", "sliced", "both"])
def test_every_algorithm_learns_the_same(
    algorithm: str, layout: str, request: pytest.FixtureRequest
) -> None:
    given = algorithm_settings(
        named(algorithm), training={"microbatch_tokens": 60, "grad_clip": 0.5}
    )
    ranks = request.getfixturevalue(layout)
    assert_same_learning(ranks, "plain", given, batches_of(given))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", ["two", "both"])
def test_every_algorithm_learns_the_same_of_episodes(
    algorithm: str, layout: str, request: pytest.FixtureRequest
) -> None:
    """Turns with context between them, their rewards, and forks."""
    given = algorithm_settings(named(algorithm), training={"microbatch_tokens": 60})
    batch = train_batch(as_episodes(make_batch(models("plain")[0], given["algorithm"])))
    ranks = request.getfixturevalue(layout)
    assert_same_learning(ranks, "plain", given, [batch] * 2)


@pytest.mark.parametrize("layout", ["two", "both"])
@pytest.mark.parametrize("reduces", ["each pass", "once"])
def test_groups_that_come_first_teach_the_same(
    layout: str, reduces: str, request: pytest.FixtureRequest
) -> None:
    """Gradients of shards are added over the calls, and those of a changed group are discarded."""
    ranks: RankGroup = request.getfixturevalue(layout)
    given = algorithm_settings({"name": "grpo"}, training={"microbatch_tokens": 60, "epochs": 2})
    rollouts = make_batch(models("plain")[0], given["algorithm"])
    batch = train_batch(rollouts)
    parts = [train_batch([r for r in rollouts if r.prompt.id == prompt]) for prompt in (8, 5)]
    spare = [1 << 40] * 4 if reduces == "once" else []
    ranks.call(ShardedRank.make, "plain", given, spare)
    whole = whole_learner("plain", given)
    fewer = train_batch([r for r in rollouts if r.id != 0])  # of prompt 5
    for each, steps in ((batch, 2), (fewer, 2)):
        expected = [whole.train(each).stats for _ in range(steps)]
        for stats in ranks.call(ShardedRank.train_on_groups, parts, each, steps):
            for got, want in zip(stats, expected, strict=True):
                for name in want.keys() - ROUNDING:
                    assert got[name] == pytest.approx(want[name], rel=LEARNED, abs=LEARNED), name
    (weights, _), *_ = ranks.call(ShardedRank.weights)
    for name, tensor in whole.weights()["actor"].items():
        torch.testing.assert_close(weights["actor"][name], tensor, rtol=LEARNED, atol=LEARNED)


def test_ranks_learn_the_same_of_episodes_in_several_updates(two: RankGroup) -> None:
    """Ratios to the policy before the step, of which ranks share out the passes."""
    algorithm = {
        "name": "ppo",
        "old_policy": "proximal",
        "correction": "truncate",
        "ess_scaling": "linear",
    }
    given = algorithm_settings(algorithm, training={"microbatch_tokens": 60, "minibatches": 2})
    batch = train_batch(as_episodes(make_batch(models("plain")[0], given["algorithm"])))
    assert_same_learning(two, "plain", given, [batch] * 2)


@pytest.mark.parametrize("layout", ["two", "three", "sliced", "both"])
@pytest.mark.parametrize("kind", ["plain", "lora", "norms of heads"])
def test_gradients_are_those_of_one_process(
    kind: str, layout: str, request: pytest.FixtureRequest
) -> None:
    """Relative to each weight's largest."""
    ranks: RankGroup = request.getfixturevalue(layout)
    given = algorithm_settings({"name": "grpo"}, training={"microbatch_tokens": 60})
    (batch,) = batches_of(given, 1)
    ranks.call(ShardedRank.make, kind, given)
    got, *_ = ranks.call(ShardedRank.first_gradients, batch)
    expected = first_gradients(whole_learner(kind, given), "update", batch)
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        assert (got[name] - want).abs().max() <= OF_NORMS * want.abs().max(), name


KINDS = ["plain", "untied", "lora", "partly frozen", "checkpointing", "norms of heads"]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *product(["two", "three", "sliced", "both"], KINDS),
        *product(["two", "three"], ["dora"]),
    ],
)
def test_every_kind_of_model_learns_the_same(
    kind: str, layout: str, request: pytest.FixtureRequest
) -> None:
    """Ragged micro-batches, several updates a step, a learning rate that falls."""
    training = {
        "epochs": 2,
        "minibatches": 2,
        "microbatch_tokens": 40,
        "lr_schedule": "linear",
        "weight_decay": 0.01,
    }
    given = algorithm_settings({"name": "ppo", "old_policy": "proximal"}, training=training)
    ranks = request.getfixturevalue(layout)
    assert_same_learning(ranks, kind, given, batches_of(given, 2))


@pytest.mark.parametrize("kind", ["plain", "lora", "checkpointing"])
def test_gradients_reduced_once_a_mini_batch_are_the_same(kind: str, two: RankGroup) -> None:
    given = algorithm_settings({"name": "ppo"}, training={"microbatch_tokens": 40})
    assert_same_learning(two, kind, given, batches_of(given), spare=[10**9] * 2)


def test_gradients_are_reduced_once_where_all_ranks_have_room(two: RankGroup) -> None:
    """From the second update on, when the peak is known: three groups of weights, by pass."""
    given = algorithm_settings({"name": "grpo"}, training={"microbatch_tokens": 40})
    batches = batches_of(given)
    counts = {}
    for spare in ([], [10**9] * 2, [10**9, 0]):
        two.call(ShardedRank.make, "plain", given, spare)
        counts[len(spare), sum(spare)], other = two.call(ShardedRank.reductions, batches)
        assert other == counts[len(spare), sum(spare)]
    each, once, one_without = counts.values()
    groups = 3  # two layers, and what is around them
    passes = each[0] // groups
    assert passes > 1
    assert each == one_without == [groups * passes] * len(batches)
    assert once == [groups * passes, groups, groups]


def test_a_rank_without_a_response_takes_part(three: RankGroup) -> None:
    given = algorithm_settings({"name": "ppo"}, training={"microbatch_tokens": 1000})
    actor, _ = models("plain")
    batch = make_batch(actor, given["algorithm"])
    assert_same_learning(three, "plain", given, [train_batch(batch[:2]), train_batch(batch[:1])])


def test_passes_are_shared_out_by_tokens(two: RankGroup) -> None:
    """Responses of 20, 10, 9 and 8 tokens, each a micro-batch: 28 tokens for one rank, 19 else."""
    given = algorithm_settings({"name": "rloo"}, training={"microbatch_tokens": 1})
    given["rollout"] = {"batch": 4, "samples_per_prompt": 2, "max_new_tokens": 16}
    actor, critic = models("plain")
    rollouts = make_rollouts(actor, critic, [(12, 8), (4, 6), (4, 5), (4, 4)])
    for i, rollout in enumerate(rollouts):
        rollout.prompt = replace(rollout.prompt, id=i // 2)
        del rollout.scores["critic"]
    two.call(ShardedRank.make, "plain", given)
    (stats, *_), *_ = two.call(ShardedRank.train, [train_batch(rollouts)])
    assert stats["passes/balance"] == pytest.approx((20 + 10 + 9 + 8) / 2 / (20 + 8))


@pytest.mark.parametrize("kind", ["bfloat16", "bfloat16 lora"])
def test_bfloat16_models_have_float32_shards(kind: str, two: RankGroup, tmp_path: Path) -> None:
    """Passes round as those of one process, gradients of all ranks are summed in float32."""
    each_alone = {"microbatch_tokens": 1}  # so that passes have the same shapes
    given = algorithm_settings({"name": "ppo"}, training=each_alone)
    assert_same_learning(two, kind, given, batches_of(given), tolerance=1e-4)
    two.call(ShardedRank.write, tmp_path)
    masters = in_memory(shard_files.read(tmp_path))["models"]["actor"]["masters"]
    assert {t.dtype for t in masters.values()} == {torch.float32}
    weights, _ = two.call(ShardedRank.weights)[0]
    own = torch.float32 if kind == "bfloat16 lora" else torch.bfloat16  # of adapters
    assert all(t.dtype == own for t in weights["actor"].values())
    assert all(weights["actor"][n].equal(t.to(own)) for n, t in masters.items())


def test_each_rank_holds_its_part_alone(two: RankGroup) -> None:
    given = algorithm_settings({"name": "rloo"})
    two.call(ShardedRank.make, "plain", given)
    whole = models("plain")[0].parameters()
    rows = [(len(p), p[0].numel()) for p in whole]
    assert two.call(ShardedRank.shard_elements) == [
        sum(-(-count // 2) * size for count, size in rows),
        sum(count // 2 * size for count, size in rows),
    ]


@pytest.mark.parametrize("layout", ["sliced", "both"])
def test_weights_that_are_not_divided_stay_the_same_on_all_slices(
    layout: str, request: pytest.FixtureRequest
) -> None:
    """Of ranks 0 and 1, which have the same rows of two slices."""
    given = algorithm_settings({"name": "rloo"})
    (batch,) = batches_of(given, 1)
    ranks: RankGroup = request.getfixturevalue(layout)
    for apart in (0.0, 2.0**-12):
        ranks.call(ShardedRank.make, "plain", given)
        (first, _), (second, said), *_ = ranks.call(ShardedRank.train_apart, batch, apart)
        assert first.keys() == second.keys() >= {"model.norm.weight", "model.embed_tokens.weight"}
        assert all(tensor.equal(second[name]) for name, tensor in first.items())
        assert len(said) == (1 if apart else 0)


def test_logprobs_are_those_of_the_whole_model(two: RankGroup, three: RankGroup) -> None:
    given = algorithm_settings({"name": "rloo"})
    actor, critic = models("plain")
    rollouts = make_rollouts(actor, critic, [(n, 4) for n, _ in SHAPES])
    responses = train_batch(rollouts).responses()
    expected = whole_learner("plain", given).logprobs(responses)
    for ranks in (two, three):
        ranks.call(ShardedRank.make, "plain", given)
        for got in ranks.call(ShardedRank.logprobs, responses):
            assert got == pytest.approx(expected, abs=OF_NORMS)
        assert ranks.call(ShardedRank.logprobs, responses[:1])[0] == pytest.approx(
            expected[:1], abs=OF_NORMS
        )


@pytest.mark.parametrize("kind", ["plain", "lora", "partly frozen"])
def test_a_run_goes_on_with_other_ranks(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """From one process to two ranks, to two slices of two, to three ranks, two slices, and back."""
    given = algorithm_settings({"name": "ppo"}, training={"lr_schedule": "linear"})
    (batch,) = batches_of(given, 1)
    whole = whole_learner(kind, given)
    path = tmp_path / "one"
    path.mkdir()
    shard_files.write(path / shard_files.file_name(), shard_files.packed(whole.state_dict()))
    for layout in ("two", "both", "three", "sliced"):
        ranks: RankGroup = request.getfixturevalue(layout)
        ranks.call(ShardedRank.make, kind, given)
        ranks.call(ShardedRank.load, path)
        ranks.call(ShardedRank.train, [batch])
        path = tmp_path / layout
        path.mkdir()
        ranks.call(ShardedRank.write, path)
        whole.train(batch)
    last = whole_learner(kind, given)
    last.load_state_dict(shard_files.read(path))
    expected = whole.train(batch).stats
    assert last.train(batch).stats == pytest.approx(expected, rel=LEARNED, abs=LEARNED)


@pytest.mark.parametrize("kind", ["plain", "lora", "norms of heads"])
@pytest.mark.parametrize("layout", ["two", "three", "sliced", "both"])
def test_each_ranks_file_has_its_pieces_alone(
    kind: str, layout: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Masters and two moments of each trained element, once; all together are what was read."""
    given = algorithm_settings({"name": "ppo"})
    whole = whole_learner(kind, given)
    (batch,) = batches_of(given, 1)
    whole.train(batch)
    one = tmp_path / "one"
    one.mkdir()
    shard_files.write(one / shard_files.file_name(), shard_files.packed(whole.state_dict()))
    ranks: RankGroup = request.getfixturevalue(layout)
    ranks.call(ShardedRank.make, kind, given)
    ranks.call(ShardedRank.load, one)
    ranks.call(ShardedRank.write, tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"rank-{rank}-of-{len(files)}.safetensors" for rank in range(len(ranks.facts))
    ]
    sizes = [sum(t.numel() for t in load_file(file).values()) for file in files]
    elements = sum(t.numel() for tensors in whole.weights().values() for t in tensors.values())
    assert sum(sizes) == 3 * elements
    if kind != "lora":  # adapters are whole on all ranks of a slice
        assert max(sizes) < 3 * elements
    before, after = (shard_files.packed(in_memory(shard_files.read(f))) for f in (one, tmp_path))
    assert before["about"] == after["about"]
    assert all(t.equal(after["tensors"][name]) for name, t in before["tensors"].items())


@pytest.mark.parametrize(("writing", "reading"), [("both", "two"), ("two", "sliced")])
@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_published_weights_are_written_in_pieces_and_read_by_other_ranks(
    kind: str, writing: str, reading: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Each element is in one file; one process may read them, too."""
    given = algorithm_settings({"name": "rloo"})
    ranks: RankGroup = request.getfixturevalue(writing)
    ranks.call(ShardedRank.make, kind, given)
    (batch,) = batches_of(given, 1)
    ranks.call(ShardedRank.train, [batch])
    ranks.call(ShardedRank.write, tmp_path, 3)
    whole = whole_learner(kind, given)
    whole.load_state_dict(shard_files.read(tmp_path))
    actor = whole.trained["actor"]
    weights = actor.snapshot()
    held = [
        sum(t.numel() for n, t in load_file(file).items() if n.startswith("actor/published/3/"))
        for file in tmp_path.iterdir()
    ]
    assert sum(held) == sum(t.numel() for t in weights.values())
    assert max(held) < sum(held) or kind == "lora"
    found = actor.from_pieces(shard_files.read(tmp_path)["published"]["actor", 3])
    assert found.keys() == weights.keys()
    assert all(t.equal(weights[name]) for name, t in found.items())
    others: RankGroup = request.getfixturevalue(reading)
    others.call(ShardedRank.make, kind, given)
    others.call(ShardedRank.load, tmp_path)
    assert all(others.call(ShardedRank.holds, tmp_path, 3))


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_the_model_is_saved_whole(kind: str, two: RankGroup, tmp_path: Path) -> None:
    given = algorithm_settings({"name": "rloo"})
    two.call(ShardedRank.make, kind, given)
    (batch,) = batches_of(given, 1)
    two.call(ShardedRank.train, [batch])
    two.call(ShardedRank.save, tmp_path / "model")
    responses = [r for r in batch.responses() if len(r) == 4]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    plain = make_learner(saved, None, given)
    assert two.call(ShardedRank.logprobs, responses)[0] == pytest.approx(
        plain.logprobs(responses), abs=1e-4
    )
    assert (tmp_path / "model" / "adapter").exists() == (kind == "lora")


def test_the_model_can_be_saved_in_the_middle_of_a_pass(three: RankGroup, tmp_path: Path) -> None:
    """As on Ctrl-C: layers are whole on some ranks then, and the weights are those before it."""
    given = algorithm_settings({"name": "ppo"}, training={"microbatch_tokens": 1})
    three.call(ShardedRank.make, "plain", given)
    before, _ = three.call(ShardedRank.weights)[0]
    (batch,) = batches_of(given, 1)
    assert all(
        "has ended" in error
        for error in three.call(ShardedRank.save_beside_passes, batch, tmp_path)
    )
    for folder in sorted(tmp_path.iterdir()):
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert all(before["actor"][name].equal(p) for name, p in saved.named_parameters())


def test_an_update_begins_on_all_ranks_or_on_none(two: RankGroup) -> None:
    """As when the end of a run reaches one of them sooner."""
    given = algorithm_settings({"name": "rloo"})
    two.call(ShardedRank.make, "plain", given)
    (_, marks), _ = two.call(ShardedRank.weights)
    call_each(two, ShardedRank.end_updates, [(False,), (True,)])
    (batch,) = batches_of(given, 1)
    assert all("the run has ended" in error for error in two.call(ShardedRank.refused, batch))
    assert [own for _, own in two.call(ShardedRank.weights)] == [marks, marks]


def test_all_ranks_refuse_an_infinite_gradient_and_keep_their_weights(two: RankGroup) -> None:
    given = algorithm_settings({"name": "rloo"}, training={"lr": 1e-3})
    two.call(ShardedRank.make, "plain", given)
    (_, marks), _ = two.call(ShardedRank.weights)
    (batch,) = batches_of(given, 1)
    batch.logprobs[:] = -1e30
    one, other = two.call(ShardedRank.refused, batch)
    assert one == other != ""
    assert two.call(ShardedRank.weights)[0][1] == marks


def responses_of(count: int) -> list[Response]:
    rollouts = make_rollouts(*models("plain"), [(3, 2 + i) for i in range(count)])
    return [replace(r.response(), finish=FinishReason.STOP) for r in rollouts]


def assert_same_scores(got: list[list[Score]], expected: list[list[Score]]) -> None:
    for scores, wanted in zip(got, expected, strict=True):
        for score, want in zip(scores, wanted, strict=True):
            assert (score.rollout_id, score.failure) == (want.rollout_id, None)
            np.testing.assert_allclose(score.values, want.values, rtol=LEARNED, atol=LEARNED)


@pytest.mark.parametrize("layout", ["two", "three", "sliced", "both"])
@pytest.mark.parametrize(("count", "budget"), [(1, 4096), (2, 4096), (7, 16), (7, 4096)])
def test_ranks_share_the_passes_of_scorers_in_shards(
    layout: str, count: int, budget: int, request: pytest.FixtureRequest
) -> None:
    """Fewer responses than ranks, as many passes, and many more."""
    ranks: RankGroup = request.getfixturevalue(layout)
    responses = responses_of(count)
    scorers = scorers_of(budget)
    expected = [scored(scorer, responses) for scorer in scorers]
    whole = sum(p.nbytes for scorer in scorers for p in scorer.model.parameters())
    outcomes = ranks.call(ShardedRank.score, responses, budget, count == 1)
    if layout in ("two", "three"):
        assert sum(held for _, _, held in outcomes) == whole
    for by_scorer, read, held in outcomes:
        assert read == sum(scorer.read_tokens for scorer in scorers)
        assert held < 0.9 * whole  # matrices have few rows, and slices are of layers alone
        assert_same_scores(by_scorer, expected)


@pytest.mark.parametrize("layout", ["two", "three", "sliced", "both"])
@pytest.mark.parametrize("kind", ["plain", "lora", "adapted lora"])
def test_scorers_use_the_shards_of_the_learner(
    layout: str, kind: str, request: pytest.FixtureRequest
) -> None:
    """The critic after each update, and a reference that no update of the adapters changes."""
    ranks: RankGroup = request.getfixturevalue(layout)
    given = algorithm_settings({"name": "ppo"}, training={"microbatch_tokens": 60})
    (batch,) = batches_of(given, 1)
    whole = whole_learner(kind.split()[-1], given)
    ranks.call(ShardedRank.make, kind.split()[-1], given)
    actor, critic = (model.model for model in whole.trained.values())
    if kind == "adapted lora":  # the adapters of the start are not those of a new model
        ranks.call(ShardedRank.train, [batch])
        whole.train(batch)
    scorers = [critic_scorer(critic, 32)]
    if kind != "plain":
        start = starting_policy(actor) if kind == "adapted lora" else actor
        scorers += [reference_scorer(start, 0.7, 32)]
    start_kind = None if kind == "plain" else kind == "adapted lora"
    more = ranks.call(ShardedRank.lend, 32, start_kind)
    adapters = sum(p.nbytes for p in actor.parameters() if p.requires_grad)
    slices = 2 if layout in ("sliced", "both") else 1
    assert max(more) <= (adapters if kind == "adapted lora" else 0)
    assert max(more) >= (adapters / slices if kind == "adapted lora" else 0)
    for count in (1, 2, 7):
        responses = responses_of(count)
        expected = [scored(scorer, responses) for scorer in scorers]
        for got in ranks.call(ShardedRank.score_by_lent, responses):
            assert_same_scores(got, expected)
        whole.train(batch)
        ranks.call(ShardedRank.train, [batch])
