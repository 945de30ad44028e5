"""On-policy distillation: values by hand, runs with a teacher, refused settings."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import critic_of, left_padded_logprobs, llama, make_rollouts, told
from loss_helpers import inputs_of, mask_of, randn
from raising import raises
from rounding import GRADIENT_TERMS, rounding
from run_helpers import assert_same_run, make_teacher, run, settings
from scorer_helpers import trained
from stretto import runs
from stretto.algorithms.distill import divided
from stretto.algorithms.experience import Scored
from stretto.algorithms.registry import FUNCTIONS, prepare
from stretto.assembly.roles import RoleFactory
from stretto.config import AlgorithmConfig, Config, RewardConfig, recipes
from stretto.errors import ConfigError, LearnerError, StateError
from stretto.models.tiny import byte_tokenizer
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.planner.fitting import plan_for
from stretto.planner.replay import Recording
from stretto.runtime.placement import model_scorers
from stretto.saying import silent
from stretto.scoring.model_scorers import reference_scorer
from stretto.testing.contracts import chunk_of
from stretto.types import INSIDE_SPAN

TOLERANCE = rounding(GRADIENT_TERMS)
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher"), 5)


def distilled(tiny_folder: Path, teacher: Path | str, **sections: Any) -> Config:
    algorithm = {"name": "distill", "teacher": str(teacher), **sections.pop("algorithm", {})}
    sections = {"rollout": {"samples_per_prompt": 2}, "steps": 2} | sections
    return settings(tiny_folder, algorithm=algorithm, **sections)


# -- values --------------------------------------------------------------------------------------


def scored(**changes: Any) -> Scored:
    mask = mask_of((3, 1))
    values = {
        "mask": mask,
        "logprobs": torch.tensor([[-1.0, -2.0, -0.5], [-3.0, 9.0, 9.0]]),
        "ref_logprobs": torch.tensor([[-0.5, -4.0, -0.5], [-1.0, 7.0, 7.0]]),
        "values": None,
        "scores": torch.tensor([1.0, 3.0]),
        "ended": torch.ones(2, dtype=torch.bool),
        "groups": torch.zeros(2, dtype=torch.long),
    }
    return Scored(**values | changes)


OFF = RewardConfig(missing_eos="off")


def test_advantages_by_hand() -> None:
    """Log ratios of teacher and student, a token at a time, and none beyond a response's end."""
    e = prepare(scored(), AlgorithmConfig(name="distill", teacher="t"), OFF, 1.0)
    assert e.advantages.tolist() == [[0.5, -2.0, 0.0], [2.0, 0.0, 0.0]]
    assert e.stats["distill/reverse_kl"] == pytest.approx((-0.5 + 2 + 0 - 2) / 4)
    assert e.stats["objective/kl"] == pytest.approx((-0.5 + 2 + 0 - 2) / 2)
    assert e.stats["objective/scores"] == 2.0
    assert e.stats["objective/rlhf_reward"] == 2.0  # the KL is no cost of the reward
    assert "group/reward_std" not in e.stats


def test_rewards_beside_the_teacher_by_hand() -> None:
    """Scores 1 and 3 of one prompt are 1 from their mean, and deviate by the root of 2."""
    a = AlgorithmConfig(name="distill", teacher="t", reward_coef=0.5, scale_rewards="none")
    e = prepare(scored(), a, OFF, 1.0)
    assert e.advantages.tolist() == [[0.0, -2.5, -0.5], [2.5, 0.0, 0.0]]
    e = prepare(scored(), a.model_copy(update={"scale_rewards": "group"}), OFF, 1.0)
    assert e.advantages[1, 0].item() == pytest.approx(2 + 0.5 / 2**0.5, rel=1e-5)
    assert e.stats["group/reward_std"] == pytest.approx(2**0.5)
    with raises(LearnerError, "one-response-to-prompt"):
        prepare(scored(groups=torch.arange(2)), a, OFF, 1.0)


def test_a_batch_without_the_teachers_scores_is_refused() -> None:
    with raises(LearnerError, "reference-missing"):
        prepare(scored(ref_logprobs=None), AlgorithmConfig(name="distill", teacher="t"), OFF, 1.0)


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Over all tokens of a vocabulary, each as often as the student samples it, in float64."""
    a = AlgorithmConfig(name="distill", teacher="t")
    logits = randn(1, 6, dtype=torch.float64).requires_grad_()
    of_teacher = torch.log_softmax(randn(2, 6, dtype=torch.float64), 0)
    of_student = torch.log_softmax(logits, 0)
    (want,) = torch.autograd.grad((of_student.exp() * (of_student - of_teacher)).sum(), logits)

    of_student = torch.log_softmax(logits, 0)
    old = of_student.detach()
    data = scored(
        mask=mask_of((1,) * 6),
        logprobs=old[:, None],
        ref_logprobs=of_teacher[:, None],
        scores=torch.zeros(6),
        ended=torch.ones(6, dtype=torch.bool),
        groups=torch.arange(6),
    )
    e = prepare(data, a, OFF, 1.0)
    inputs = inputs_of(e.mask, advantages=e.advantages, old_logprobs=e.old_logprobs)
    inputs = replace(inputs, weights=old.exp()[:, None])
    loss = FUNCTIONS["distill"].policy_loss(of_student[:, None], inputs, a).loss
    (got,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


# -- the teacher as a scorer ---------------------------------------------------------------------


def naive(model: Any, rollouts: Any, temperature: float) -> list[Tensor]:
    with torch.no_grad():
        return left_padded_logprobs(model, rollouts, temperature)


@pytest.mark.parametrize("slots", [0, 8])
def test_a_token_that_the_teacher_does_not_know_fails_alone(slots: int) -> None:
    """Ids that pad the student's vocabulary, read whole and as they arrive."""
    model = llama()
    rollouts = make_rollouts(model, critic_of(model), [(4, 9), (4, 5), (7, 3)])
    for rollout, place in zip(rollouts, (0, 4, None), strict=True):
        rollout.tokens = rollout.tokens[:]
        for t, token in enumerate(rollout.tokens):
            rollout.tokens[t] = token % 30 + 3
        if place is not None:
            rollout.tokens[place] = 70
    scorer = reference_scorer(model, 0.7, 64, name="teacher", vocabulary=64, slots=slots)
    for size in (0, 2, 4):
        begun = [copy.copy(r) for r in rollouts]
        if not size:
            for r in begun:
                r.tokens, r.finish = r.tokens[:0], None
            scorer.admit(told(begun))
            continue
        scorer.extend([chunk_of(r, size - 2, min(size, len(r))) for r in rollouts])
    rest = [chunk_of(r, 4, len(r)) for r in rollouts if len(r) > 4]
    scorer.extend(rest)
    scores = scorer.finish([r.id for r in rollouts])
    assert [s.failure is None for s in scores] == [False, False, True]
    assert "the id 70" in str(scores[0].failure)
    assert not len(scores[0].values)
    (want,) = naive(model, rollouts[2:], 0.7)
    torch.testing.assert_close(
        torch.from_numpy(scores[2].values), want, rtol=TOLERANCE, atol=TOLERANCE
    )


# -- runs ----------------------------------------------------------------------------------------


def test_a_teacher_needs_no_rewards_and_no_reference(
    tiny_folder: Path, teacher: Path, tmp_path: Path
) -> None:
    reward = {"sources": (), "missing_eos": "off"}
    run_dir, result = run(distilled(tiny_folder, teacher, reward=reward), tmp_path)
    assert result.stats["objective/scores"] == 0
    assert result.stats["distill/reverse_kl"] != 0
    scoring = {s.name for s in run_dir.trace.read().spans if s.name.startswith("score/")}
    assert scoring == {"score/teacher"}


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher(
    tiny_folder: Path, teacher: Path, tmp_path: Path
) -> None:
    config = distilled(
        tiny_folder,
        teacher,
        steps=40,
        rollout={"batch": 64, "max_new_tokens": 6},
        training={"lr": 1e-2},
    )
    run_dir, _ = run(config, tmp_path)
    kls = [m["distill/reverse_kl"] for m in run_dir.read_metrics()]
    assert fmean(kls[-8:]) < 0.7 * fmean(kls[:8])


STREAMED = {"preset": "oppo", "overcommit": 0, "chunk_tokens": 2}
WHOLE = STREAMED | {"score_on": "rollout"}


@pytest.mark.parametrize("lora", [0, 2])
def test_a_streamed_teacher_teaches_what_a_teacher_of_whole_responses_does(
    lora: int, tiny_folder: Path, teacher: Path, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {"model": {"lora_rank": lora}, "algorithm": {"reward_coef": 0.3}}
    finished = distilled(tiny_folder, teacher, schedule=WHOLE, **copy.deepcopy(sections))
    whole, _ = run(finished, tmp_path / "whole")
    streamed = distilled(tiny_folder, teacher, schedule=STREAMED, **sections)
    run_dir, _ = run(streamed, tmp_path / "streamed")
    assert_same_run(whole, run_dir, exact=False)
    assert "prefill/teacher" in {s.name for s in run_dir.trace.read().spans}


def place(roles: str, ranks: int = 1, **layouts: dict[str, int]) -> dict[str, Any]:
    return {"roles": roles.split("+"), "ranks": ranks, "layout": layouts}


@pytest.mark.parametrize(
    ("runtime", "places", "exact"),
    [
        ("local", [], True),
        ("local", [place("teacher", 2, teacher={"fsdp": 2})], False),
        pytest.param("local", [place("teacher", 2, teacher={"tp": 2})], False, marks=SLOW),
        pytest.param("local", [place("teacher 0"), place("teacher 1")], False, marks=SLOW),
        pytest.param("ray", [], True, marks=SLOW),
    ],
)
def test_a_teacher_in_processes_teaches_the_same(
    runtime: str, places: list[Any], exact: bool, tiny_folder: Path, teacher: Path, tmp_path: Path
) -> None:
    """Alone, in shards, slices or copies; so exactly that weights agree but for rounding."""
    schedule = {"schedule": STREAMED if not exact else {}}
    here, _ = run(distilled(tiny_folder, teacher, **copy.deepcopy(schedule)), tmp_path / "here")
    cluster = {"runtime": runtime, "cluster": {"processes": places}}
    there, _ = run(distilled(tiny_folder, teacher, **schedule, **cluster), tmp_path / "there")
    assert_same_run(here, there, exact=exact)


def test_a_run_with_a_teacher_is_replayed_in_virtual_time(
    tiny_folder: Path, teacher: Path, tmp_path: Path
) -> None:
    run_dir, _ = run(distilled(tiny_folder, teacher, steps=4), tmp_path)
    cluster = Recording.read(run_dir.path).cluster()
    assert {s.name: s.kind for s in cluster.scorers} == {"task": "reward", "teacher": "logprobs"}


def test_a_run_with_a_teacher_resumes_and_refuses_another_teacher(
    tiny_folder: Path, teacher: Path, tmp_path: Path
) -> None:
    config = distilled(tiny_folder, teacher, steps=3, observe={"checkpoint_every": 1})
    whole, _ = run(config, tmp_path / "whole")
    shorter, _ = run(config.model_copy(update={"steps": 2}), tmp_path / "short")
    runs.train(config, run_dir=shorter, resume=True, progress=Progress())
    assert_same_run(whole, shorter)

    weights = teacher / "model.safetensors"
    kept = weights.read_bytes()
    try:
        weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        again = RunDirectory.open(shorter.path)
        longer = config.model_copy(update={"steps": 4})
        with raises(StateError, "other-inputs", "algorithm.teacher"):
            runs.train(longer, run_dir=again, resume=True, progress=Progress())
    finally:
        weights.write_bytes(kept)


def test_the_teacher_is_a_role_and_takes_memory(tiny_folder: Path, teacher: Path) -> None:
    config = distilled(tiny_folder, teacher)
    assert model_scorers(config.algorithm, config.reward) == ["teacher"]
    plan = plan_for(config.model, config.algorithm, config.reward)
    assert set(plan.mixed) == {"actor", "teacher"}
    assert plan.mixed["teacher"] > 4 * plan.parameters  # a larger vocabulary


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "code"),
    [
        ({"name": "distill"}, "teacher-missing"),
        ({"name": "grpo", "teacher": "t"}, "teacher-without-distill"),
        ({"name": "distill", "teacher": "t", "kl_in": "loss"}, "teacher-kl-placed"),
        ({"name": "distill", "teacher": "t", "kl_target": 1.0}, "teacher-kl-placed"),
    ],
)
def test_settings_that_contradict_are_refused(algorithm: dict[str, Any], code: str) -> None:
    with raises(ConfigError, code):
        recipes.build({"algorithm": algorithm}, "here")


def test_rewards_are_needed_only_where_they_teach(tiny_folder: Path) -> None:
    alone = {"reward": {"sources": ()}}
    assert distilled(tiny_folder, "t", **alone).reward.sources == ()
    beside = {"name": "distill", "teacher": "t", "reward_coef": 1.0}
    with raises(ConfigError, "no-reward-source"):
        recipes.build({"algorithm": beside, "rollout": {"samples_per_prompt": 2}, **alone}, "here")
    with raises(ConfigError, "no-reward-source"):
        recipes.build(alone, "here")
    with raises(ConfigError, "group-too-small"):
        recipes.build({"algorithm": beside}, "here")


def test_a_teacher_of_another_tokenizer_cannot_read_episodes(tiny_folder: Path) -> None:
    config = distilled(tiny_folder, "t")
    environment = config.environment.model_copy(update={"sources": ("tools.py:add",)})
    factory = RoleFactory(config.model_copy(update={"environment": environment}), silent)
    with raises(ConfigError, "teacher-of-other-tokenizer", "episode", "stretto sft"):
        factory.teacher_scorer("teacher", (llama(), trained("bytes")), byte_tokenizer(), [])


# -- a teacher with another tokenizer ------------------------------------------------------------


SPANS = {
    "mask": mask_of((4, 1)),
    "logprobs": torch.tensor([[-1.0, -2.0, -0.5, -4.0], [-3.0, 9.0, 9.0, 9.0]]),
}


def of_spans() -> Scored:
    """A span of two tokens, one of one, a cut character; a response of one token."""
    reference = torch.tensor([[INSIDE_SPAN, -4.0, -0.75, INSIDE_SPAN], [-1.0, 7.0, 7.0, 7.0]])
    apart, tokens = divided(reference, SPANS["logprobs"], SPANS["mask"])
    return scored(**SPANS, ref_logprobs=apart, span_tokens=tokens)


def test_each_token_of_a_span_has_the_spans_log_ratio_by_hand() -> None:
    e = prepare(of_spans(), AlgorithmConfig(name="distill", teacher="t"), OFF, 1.0)
    assert e.advantages.tolist() == [[-1.0, -1.0, -0.25, 0.0], [2.0, 0.0, 0.0, 0.0]]
    assert e.stats["distill/reverse_kl"] == pytest.approx((1 + 0.25 - 2) / 5)
    assert e.stats["objective/kl"] == pytest.approx((1 + 0.25 - 2) / 2)
    assert e.stats["distill/span_tokens"] == pytest.approx(5 / 4)


@pytest.mark.parametrize("at", [1, 2], ids=["a span of two tokens", "one token"])
def test_a_number_of_a_broken_teacher_is_no_span(at: int) -> None:
    reference = torch.tensor([[INSIDE_SPAN, -4.0, -0.75, INSIDE_SPAN], [-1.0, 7.0, 7.0, 7.0]])
    reference[0, at] = torch.nan
    apart, tokens = divided(reference, SPANS["logprobs"], SPANS["mask"])
    data = scored(**SPANS, ref_logprobs=apart, span_tokens=tokens)
    with pytest.raises(LearnerError, match=r"must be finite"):
        prepare(data, AlgorithmConfig(name="distill", teacher="t"), OFF, 1.0)


def test_spans_of_one_token_change_nothing() -> None:
    reference = torch.tensor([[-0.5, -4.0, -0.5, -1.0], [-1.0, 7.0, 7.0, 7.0]])
    apart, tokens = divided(reference, SPANS["logprobs"], SPANS["mask"])
    assert apart is reference
    assert tokens is None


def test_the_expected_gradient_over_spans_is_that_of_the_reverse_kl() -> None:
    """Over all spans of two tokens out of three, each as often as the student samples it."""
    a = AlgorithmConfig(name="distill", teacher="t")
    first, second = randn(1, 3, dtype=torch.float64), randn(2, 3, 3, dtype=torch.float64)
    of_teacher = torch.log_softmax(randn(3, 9, dtype=torch.float64), 0)
    logits = [first.requires_grad_(), second.requires_grad_()]

    def student() -> Tensor:
        """Log-probabilities [9, 2] of the tokens of each span."""
        one, two = (torch.log_softmax(x, -1) for x in logits)
        return torch.stack([one.repeat_interleave(3), two.flatten()], dim=1)

    spans = student().sum(1)
    want = torch.autograd.grad((spans.exp() * (spans - of_teacher)).sum(), logits)

    logprobs = student()
    old, mask = logprobs.detach(), mask_of((2,) * 9)
    reference = torch.stack([torch.full_like(of_teacher, INSIDE_SPAN), of_teacher], dim=1)
    apart, tokens = divided(reference, old, mask)
    data = scored(
        mask=mask,
        logprobs=old,
        ref_logprobs=apart,
        span_tokens=tokens,
        scores=torch.zeros(9),
        ended=torch.ones(9, dtype=torch.bool),
        groups=torch.arange(9),
    )
    e = prepare(data, a, OFF, 1.0)
    inputs = inputs_of(e.mask, advantages=e.advantages, old_logprobs=e.old_logprobs)
    inputs = replace(inputs, weights=old.sum(1).exp()[:, None].expand(9, 2))
    loss = FUNCTIONS["distill"].policy_loss(logprobs, inputs, a).loss
    for got, expected in zip(torch.autograd.grad(loss, logits), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def other_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("other"), 5, trained("bytes"))


def test_a_streamed_teacher_of_another_tokenizer_teaches_what_a_whole_one_does(
    tiny_folder: Path, other_teacher: Path, tmp_path: Path
) -> None:
    """Also in shards, in processes of their own."""
    whole, _ = run(distilled(tiny_folder, other_teacher, schedule=dict(WHOLE)), tmp_path / "whole")
    assert whole.read_metrics()[0]["distill/span_tokens"] > 1
    config = distilled(tiny_folder, other_teacher, schedule=dict(STREAMED))
    run_dir, _ = run(config, tmp_path / "streamed")
    assert_same_run(whole, run_dir, exact=False)
    assert "prefill/teacher" in {s.name for s in run_dir.trace.read().spans}


@pytest.mark.parametrize("layout", [{"fsdp": 2}, pytest.param({"tp": 2}, marks=SLOW)])
def test_a_divided_teacher_of_another_tokenizer_teaches_the_same(
    layout: dict[str, int], tiny_folder: Path, other_teacher: Path, tmp_path: Path
) -> None:
    here, _ = run(distilled(tiny_folder, other_teacher, schedule=dict(STREAMED)), tmp_path / "here")
    cluster = {"runtime": "local", "cluster": {"processes": [place("teacher", 2, teacher=layout)]}}
    config = distilled(tiny_folder, other_teacher, schedule=dict(STREAMED), **cluster)
    there, _ = run(config, tmp_path / "there")
    assert_same_run(here, there, exact=False)
