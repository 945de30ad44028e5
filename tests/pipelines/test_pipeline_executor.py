"""Fused pipelines on real ranks: gradients, memory, timings, failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from _published import greedy
from pipeline_helpers import problem_of
from pipeline_models import (
    RAGGED,
    critic_of,
    language_model,
    load_stages,
    make_batches,
    serial_gradients,
)
from pipeline_workers import Trainer, value_loss
from raising import raises
from stretto.config import ModelConfig
from stretto.errors import ConfigError
from stretto.models.attention import use_attention
from stretto.models.load import set_checkpointing
from stretto.models.lora import add_lora
from stretto.pipelines.baselines import one_f_one_b
from stretto.pipelines.executor.executor import PipelineExecutor, TaskWork
from stretto.pipelines.executor.instructions import Timings, makespan_us, profile
from stretto.pipelines.executor.stages import StageLayout, cut
from stretto.pipelines.pipeline_schedule import PipelineSchedule, evaluate
from stretto.pipelines.problem import ModelPipelines, Problem
from stretto.pipelines.solve import solve
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec


def require_close(ours: Tensor, serial: Tensor, most: float = 1e-6) -> None:
    far = (ours.double() - serial.double()).norm() / serial.double().norm()
    assert far <= most, far.item()


def require_equal_gradients(ranks: RankGroup, layout: StageLayout, expected: Any) -> None:
    """Of all ranks, after a step; together they are all of both models'."""
    answers = ranks.call(Trainer.gradients)
    for name, serial in expected.items():
        seen = set()
        whole = torch.stack([g.double().norm() for g in serial.values()]).norm().item()
        for answer in answers:
            gradients, norm = answer[name]
            assert norm == pytest.approx(whole, rel=1e-6)
            assert norm == answers[0][name][1]
            for key, gradient in gradients.items():
                require_close(gradient, serial[key])
            seen |= set(gradients)
        assert seen == set(serial)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks have: sums of other parts round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def two() -> Iterator[RankGroup]:
    ranks = RankGroup(GroupSpec(2), Trainer).start()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[RankGroup]:
    ranks = RankGroup(GroupSpec(4), Trainer).start()
    yield ranks
    ranks.close()


def schedules(problem: Problem) -> list[PipelineSchedule]:
    return [one_f_one_b(problem), greedy(problem), solve(problem, seconds=0.3).schedule]


def most_held(word: Sequence[str], pipelines: range) -> int:
    held = most = 0
    for letter in word:
        if int(letter[:-1]) in pipelines:
            held += 1 if letter[-1] == "F" else -1
            most = max(most, held)
    return most


def require_equal_steps(
    ranks: RankGroup, layout: StageLayout, actor: Any, critic: Any, counts: tuple[int, int]
) -> None:
    """Every kind of schedule has the serial gradients, and keeps what its word says."""
    batches = [make_batches([RAGGED[i % 4] for i in range(n)], seed=n) for n in counts]
    expected = {
        "actor": serial_gradients(actor, batches[0]),
        "critic": serial_gradients(critic, batches[1]),
    }
    load_stages(ranks, layout, actor, critic)
    actors = range(layout.actor_pipelines)
    critics = range(layout.actor_pipelines, layout.actor_pipelines + layout.critic_pipelines)
    for schedule in schedules(problem_of(layout, *counts)):
        timings = ranks.call(Trainer.step, schedule, batches[0], batches[1], None)
        require_equal_gradients(ranks, layout, expected)
        for rank, (word, held) in enumerate(
            zip(schedule.words, ranks.call(Trainer.held), strict=True)
        ):
            assert held == {
                "actor": (most_held(word, actors), 0),
                "critic": (most_held(word, critics), 0),
            }
            assert [f"{t.pipeline}{t.kind}" for t in timings[rank].word] == list(word)


@pytest.mark.parametrize(
    ("kind", "tied", "layers"), [("llama", True, 3), ("qwen2", False, 4), ("gpt_neox", False, 2)]
)
def test_two_stages_have_serial_gradients(
    two: RankGroup, kind: str, tied: bool, layers: int
) -> None:
    actor = language_model(kind, tied=tied, layers=layers)
    require_equal_steps(two, StageLayout(2, 1, 2, 1), actor, critic_of(actor), (4, 4))


def test_stages_and_whole_models_have_serial_gradients(two: RankGroup) -> None:
    actor = language_model("llama", layers=2)
    require_equal_steps(two, StageLayout(2, 1, 1, 2), actor, critic_of(actor), (3, 4))


@pytest.mark.parametrize("tied", [True, False])
def test_four_stages_have_serial_gradients(four: RankGroup, tied: bool) -> None:
    actor = language_model("llama", tied=tied, layers=5)
    require_equal_steps(four, StageLayout(4, 1, 4, 1), actor, critic_of(actor), (4, 6))


def test_four_stages_and_two_pipelines_have_serial_gradients(four: RankGroup) -> None:
    actor = language_model("qwen2", layers=4)
    critic = critic_of(language_model("llama", layers=3))
    require_equal_steps(four, StageLayout(4, 1, 2, 2), actor, critic, (4, 8))
    require_equal_steps(four, StageLayout(2, 2, 4, 1), actor, critic_of(actor), (6, 4))


def test_adapters_over_frozen_weights_have_serial_gradients(two: RankGroup) -> None:
    """The first stage's ids, and its frozen embeddings, need no gradient."""
    config = ModelConfig(lora_rank=2)
    actor = add_lora(language_model("llama", layers=2), config, "CAUSAL_LM")
    critic = add_lora(critic_of(language_model("llama", layers=2)), config, "SEQ_CLS")
    generator = torch.Generator().manual_seed(2)
    for name, parameter in [*actor.named_parameters(), *critic.named_parameters()]:
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    require_equal_steps(two, StageLayout(2, 1, 2, 1), actor, critic, (2, 3))


def test_a_first_stage_that_is_frozen_altogether_keeps_nothing(two: RankGroup) -> None:
    layout = StageLayout(2, 1, 2, 1)
    actor = language_model("qwen2", layers=2, tied=False)
    critic = critic_of(actor)
    for model in (actor, critic):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1." in name)
    load_stages(two, layout, actor, critic)
    batches = make_batches(RAGGED, seed=3)
    two.call(Trainer.step, greedy(problem_of(layout, 4, 4)), batches, batches)
    expected = {
        "actor": serial_gradients(actor, batches),
        "critic": serial_gradients(critic, batches),
    }
    require_equal_gradients(two, layout, expected)
    first, second = two.call(Trainer.held)
    assert (first["actor"][0], second["critic"][0]) == (1, 1)


def test_bfloat16_and_checkpointed_layers_have_serial_gradients(two: RankGroup) -> None:
    layout = StageLayout(2, 1, 2, 1)
    actor = language_model("llama", layers=2).to(torch.bfloat16)
    critic = critic_of(actor).to(torch.bfloat16)
    batches = make_batches(RAGGED, seed=3)
    expected = serial_gradients(critic, batches)
    for model in (actor, critic):
        set_checkpointing(model, ModelConfig(gradient_checkpointing="on"))
    load_stages(two, layout, actor, critic)
    two.call(Trainer.train)
    two.call(Trainer.step, greedy(problem_of(layout, 4, 4)), batches, batches)
    for answer in two.call(Trainer.gradients):
        for key, gradient in answer["critic"][0].items():
            assert gradient.dtype == torch.bfloat16
            require_close(gradient, expected[key])  # the same operations in the same order


def test_what_is_sent_is_kept_until_it_has_left(two: RankGroup) -> None:
    assert two.call(Trainer.post) == [(True, False), (True, False)]


def test_gradients_add_up_over_runs(two: RankGroup) -> None:
    layout = StageLayout(2, 1, 2, 1)
    actor = language_model("llama", layers=2)
    use_attention(actor)  # which the ranks have not heard of before
    critic = critic_of(actor)
    load_stages(two, layout, actor, critic)
    batches = make_batches(RAGGED, seed=3)
    for part in (batches[:1], batches[1:]):
        two.call(Trainer.step, greedy(problem_of(layout, len(part), 2)), part, batches[:2])
    expected = {
        "actor": serial_gradients(actor, batches),
        "critic": serial_gradients(critic, [*batches[:2], *batches[:2]]),
    }
    require_equal_gradients(two, layout, expected)


def test_transfers_may_be_ordered_by_other_latencies(two: RankGroup) -> None:
    """A critic that is much slower: its forwards, made early, are asked for late."""
    layout = StageLayout(2, 1, 2, 1)
    actor = language_model("llama", layers=2)
    critic = critic_of(actor)
    load_stages(two, layout, actor, critic)
    batches = make_batches(RAGGED, seed=3)
    problem = Problem(
        ModelPipelines.of(
            2, 1, 4, forward=[1, 3], backward=[2, 5], activation=1.0, communication=2
        ),
        ModelPipelines.of(2, 1, 4, forward=[9, 30], backward=[20, 50], activation=1.0),
    )
    two.call(Trainer.step, solve(problem, seconds=0.2).schedule, batches, batches, problem)
    expected = {
        "actor": serial_gradients(actor, batches),
        "critic": serial_gradients(critic, batches),
    }
    require_equal_gradients(two, layout, expected)


def test_a_measured_run_becomes_a_problem(two: RankGroup) -> None:
    layout = StageLayout(2, 1, 2, 1)
    actor = language_model("llama", layers=4)
    load_stages(two, layout, actor, critic_of(language_model("llama", layers=2)))
    batches = make_batches([(16,) * 8] * 4, seed=3)
    schedule = one_f_one_b(problem_of(layout, 4, 4))
    for _ in range(2):
        timings: list[Timings] = two.call(Trainer.step, schedule, batches, batches)
    for t in timings:
        moments = [m for each in zip(t.asked, t.start, t.end, strict=True) for m in each]
        assert moments == sorted(moments)
        assert moments[0] >= 0
    guess = problem_of(layout, 4, 4)
    problem = profile(layout, timings, guess)
    assert (problem.actor.micro_batches, problem.critic.micro_batches) == (4, 4)
    for side in problem.models:
        assert all(1 <= ticks <= makespan_us(timings) for ticks in side.forward + side.backward)
    assert problem.actor.activation == guess.actor.activation
    assert problem.critic.activation == guess.critic.activation
    assert evaluate(problem, schedule).latency <= 1.5 * makespan_us(timings)
    two.call(Trainer.gradients)


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_does_not_fit_is_refused(alone: None) -> None:
    actor = language_model("llama", layers=2)
    critic = critic_of(actor)
    cpu = torch.device("cpu")
    with raises(ConfigError, "other-ranks", 2, 1):
        PipelineExecutor(cut(actor, 2, 0), cut(critic, 2, 1), StageLayout(2, 1, 2, 1), cpu)
    layout = StageLayout(1, 1, 1, 1)
    with raises(ConfigError, "other-stage", "stage 0 of 1 of the critic", "stage 1 of 2"):
        PipelineExecutor(cut(actor, 1, 0), cut(critic, 2, 1), layout, cpu)
    executor = PipelineExecutor(cut(actor, 1, 0), cut(critic, 1, 0), layout, cpu)
    work = [TaskWork(torch.ones(1, 3, dtype=torch.long), Tensor.sum)]
    one, two = problem_of(layout, 1, 1), problem_of(layout, 2, 1)
    with raises(ConfigError, "other-problem", "words"):
        executor.run(greedy(two), one, work, work)
    with raises(ConfigError, "other-problem", "actor", "2 micro-batches", "1 micro-batches"):
        executor.run(greedy(two), two, work, work)


def test_one_rank_runs_both_models_whole(alone: None) -> None:
    actor = language_model("llama", layers=2)
    critic = critic_of(actor)
    layout = StageLayout(1, 1, 1, 1)
    batches = make_batches(RAGGED, seed=3)
    expected = serial_gradients(critic, batches)
    stage = cut(critic, 1, 0)
    executor = PipelineExecutor(cut(actor, 1, 0), stage, layout, torch.device("cpu"))
    problem = problem_of(layout, 1, 4)
    executor.run(
        greedy(problem),
        problem,
        [TaskWork(batches[0].tokens, Tensor.sum)],
        [TaskWork(b.tokens, partial(value_loss, stage, batch=b)) for b in batches],
    )
    for name, parameter in critic.named_parameters():
        require_close(parameter.grad, expected[name])
