"""Parts of training through pipelines, most of them without ranks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import critic_of, llama, make_rollouts, told
from loss_helpers import inputs_of, mask_of
from raising import raises
from stretto.assembly import parts
from stretto.assembly.controllers import share_cores
from stretto.assembly.run_models import NO_OVERRIDES, Overrides
from stretto.cli import main as command_line
from stretto.cli.dry_run import describe_run
from stretto.config import Config, PipelineConfig
from stretto.errors import ConfigError, LearnerError, ModelError, RankError
from stretto.pipelines.executor.instructions import PipelineTask, Timings
from stretto.pipelines.executor.stages import layout_of
from stretto.pipelines.problem import Problem
from stretto.runtime.placement import places
from stretto.runtime.run import start as start_run
from stretto.saying import silent
from stretto.training import pipelined
from stretto.training.backprop import deal
from stretto.training.losses import MicroBatch, copied_at_once
from stretto.training.pipelined import Planner
from stretto.training.trained import LearningRate, TrainedModel

# -- figures and measures ------------------------------------------------------------------------


def timings(rows: dict[PipelineTask, tuple[float, float]]) -> Timings:
    starts, ends = zip(*rows.values(), strict=True)
    return Timings(tuple(rows), starts, starts, ends)


F, G, B, C = (
    PipelineTask("F", 0, 0),
    PipelineTask("F", 1, 0),
    PipelineTask("B", 0, 0),
    PipelineTask("B", 1, 0),
)
RAN = [
    timings({F: (1.0, 2.0), G: (3.0, 3.5), C: (4.0, 5.0), B: (7.5, 8.0)}),  # 3.0 s of work
    timings({G: (1.5, 2.5), F: (2.5, 3.0), B: (3.0, 7.5), C: (7.5, 8.0)}),  # 6.5 s
]


class OneExecutor:
    """An executor that says what it is told to, for both ranks."""

    layout, rank = layout_of(PipelineConfig(ranks=2)), 0

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run(self, *_: Any) -> Any:
        self.asked.append("run")
        return RAN


def test_every_seed_of_a_run_serves_the_search() -> None:
    """Which takes seeds of 31 bits."""
    config = PipelineConfig(ranks=2, seconds=0.5)
    plan = Planner(config, {"actor": 1, "critic": 1}, seed=2**40 + 5).plan(2)
    assert plan.schedule


def test_what_ranks_measured_is_planned_with_and_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What is gathered of all ranks is said by one here.
    monkeypatch.setattr(
        pipelined, "of_all_ranks", lambda value: [value] if isinstance(value, dict) else value
    )
    config = PipelineConfig(ranks=2, schedule="serial")
    planner = Planner(config, {"actor": 1, "critic": 1}, seed=0)
    ranks: Any = OneExecutor()
    actor = llama()
    rate, settings = LearningRate(1e-3, 10), Config().training
    whole: Any = {
        "actor": TrainedModel(actor, rate, settings),
        "critic": TrainedModel(critic_of(actor), rate, settings),
    }
    losses: Any = None
    passes = pipelined.PipelinedBackprop(whole, ranks, losses, planner, config, budget=1)
    parts = [a_micro_batch()]
    passes.run(parts, 0.1, trains_actor=True)
    assert passes.finish() == {
        "pipeline/step_s": 7.0,
        "pipeline/bubble_fraction": pytest.approx(1 - (3.0 + 6.5) / 2 / 7.0),
    }
    assert not planner.measured
    passes.run(parts, 0.1, trains_actor=True)
    measured: Problem = planner.plan(1).problem
    assert measured.actor.activation == measured.critic.activation == (1000, 1000)
    assert measured.actor.backward == (500_000, 4_500_000)
    for _ in range(2):
        passes.run(parts, 0.1, trains_actor=True)
    assert ranks.asked == ["run"] * 4
    # Of the three mini-batches the first was not planned by measured latencies.
    assert "pipeline/predicted_s" not in passes.finish()
    passes.run(parts, 0.1, trains_actor=True)
    predicted_us = planner.plan(1).predicted_us
    assert passes.finish()["pipeline/predicted_s"] == predicted_us / 1e6


def a_micro_batch() -> MicroBatch:
    actor = llama()
    rollouts = make_rollouts(actor, critic_of(actor), [(3, 2)])
    inputs = inputs_of(mask_of((2,)), "sequence_sum", tensors={"own": torch.ones(1, 2)})
    return MicroBatch.of(told(rollouts), inputs)


def test_tensors_are_copied_at_once() -> None:
    """Of any types, shapes and strides, without elements, and without dimensions."""
    given = [
        torch.rand(3, 5) < 0.5,
        torch.randn(4, 3).T,
        torch.arange(7, dtype=torch.int32),
        torch.zeros(0, 2),
        torch.arange(6).view(2, 3),
        torch.tensor(2.5, dtype=torch.float64),
        torch.randn(3).bfloat16(),
    ]
    for got, expected in zip(copied_at_once(given, torch.device("cpu")), given, strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
        assert got.data_ptr() != expected.data_ptr() or not expected.numel()


def test_a_micro_batch_moves_with_all_that_its_losses_read() -> None:
    batch = a_micro_batch()
    moved = batch.to(torch.device("cpu", 0))  # a name that its tensors' device has not
    assert moved is not batch
    found: list[list[torch.Tensor]] = []
    for one in (batch, moved):
        found.append([one.tokens, one.places, one.targets])
        one.inputs.each(lambda tensor, of=found[-1]: of.append(tensor) or tensor)
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert moved.lengths == batch.lengths
    assert batch.to(torch.device("cpu")) is batch


def test_a_blank_micro_batch_has_a_token_and_no_response() -> None:
    batch = a_micro_batch()
    blank = MicroBatch.blank(batch)
    assert blank.tokens.shape == (1, 1)
    assert blank.states(torch.ones(1, 1, 4)).shape == (0, 4)
    assert (blank.targets.numel(), int(blank.inputs.mask.sum())) == (0, 0)
    assert (blank.inputs.weights.shape, float(blank.inputs.weights.sum())) == ((1, 2), 0.0)
    assert blank.inputs.ref_logprobs is None
    assert blank.inputs.tensors["own"].tolist() == [[0.0, 0.0]]
    assert batch.inputs.tensors["own"].tolist() == [[1.0, 1.0]]
    assert float(batch.inputs.weights.sum()) == 2.0


def test_micro_batches_are_dealt_to_and_fro() -> None:
    groups = [[i] for i in range(8)]
    assert deal(groups, 2) == [[0], [3], [4], [7], [1], [2], [5], [6]]
    assert deal(groups[:6], 3) == [[0], [5], [1], [4], [2], [3]]
    assert deal(groups[:2], 1) == [[0], [1]]


# -- what is refused, and when -------------------------------------------------------------------


def test_stages_that_cannot_be_cut_are_refused_before_the_warm_up(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "warm_up", lambda *_: pytest.fail("warmed up"))
    for given, fact in (
        ({"ranks": 3}, "pipeline.stage_counts of the actor (3, as many as ranks): LlamaModel"),
        ({"ranks": 4, "stage_counts": (2, 4)}, "pipeline.stage_counts of the critic (4): Llama"),
    ):
        config = Config.model_validate(
            {"warmup_examples": 1, "model": {"name": str(tiny_folder)}, "pipeline": given}
        )
        prompts = parts.open_prompts(config, NO_OVERRIDES, silent)
        with ExitStack() as stack, raises(ModelError, "too-few-layers", fact):
            parts.trained_models(config, prompts, [], stack, silent, NO_OVERRIDES)


def test_a_dry_run_counts_the_layers(tiny_folder: Path) -> None:
    def plan(**sections: Any) -> str:
        return describe_run(
            Config.model_validate({"model": {"name": str(tiny_folder)}, **sections})
        )

    with pytest.raises(
        ModelError, match=r"stage_counts of the actor \(3, as many as ranks\): .*/tiny'"
    ):
        plan(pipeline={"ranks": 3})
    with pytest.raises(
        ModelError, match=r"stage_counts of the critic \(4\): .* has 2 layers, too few for 4 stages"
    ):
        plan(pipeline={"ranks": 4, "stage_counts": (2, 4)})
    said = plan(pipeline={"ranks": 4, "stage_counts": (2, 1)})
    assert "actor: 2 pipelines of 2 stages\ncritic: 4 pipelines of 1 stage\n" in said
    assert "pipeline" not in plan()


def test_a_model_without_a_trained_weight_is_refused() -> None:
    config = Config().training
    frozen = llama().requires_grad_(False)
    with raises(LearnerError, "nothing-to-train", "LlamaForCausalLM"):
        TrainedModel(frozen, LearningRate(1e-3, 1), config)


def test_objects_that_cannot_be_sent_are_refused(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the ranks of stages, beside which the run is in one process."""

    def start(**objects: Any) -> None:
        config = Config.model_validate({"model": {"name": str(tiny_folder)}, "pipeline": STAGES})
        with ExitStack() as stack:
            start_run(config, stack, lambda _: None, Overrides(**objects))

    actor, critic = llama(), critic_of(llama())
    actor.model.layers[0].register_forward_hook(lambda module, given, output: output)
    with raises(ConfigError, "cannot-be-pickled", "<lambda>", "set pipeline.ranks = 0"):
        start(actor=actor)

    class Mine(nn.Linear):
        pass

    monkeypatch.setattr(Mine, "__module__", "__main__")
    critic.score.__class__ = Mine
    with raises(ModelError, "class-in-script", "'score' of the critic", "Mine"):
        start(critic=critic)


STAGES = {"ranks": 2}


# -- threads, devices, errors --------------------------------------------------------------------


def test_ranks_share_the_threads_of_training() -> None:
    for threads, each in ((1, 1), (6, 3), (7, 3)):
        config = Config.model_validate({"pipeline": {"ranks": 2}, "threads": threads})
        learner, other = places(config, cores=64, gpus=0)
        assert (learner.threads, learner.devices) == (each, ("cpu", "cpu"))
        assert other.threads == threads
        assert [placed.role for placed in other.roles] == ["generator", "reference", "critic"]
    overlapping = Config.model_validate({"pipeline": {"ranks": 2}, "schedule": {"preset": "async"}})
    assert len(places(overlapping, cores=64, gpus=0)) == 4


@pytest.mark.parametrize(
    ("schedule", "threads"),
    [
        ({}, 16),
        ({"preset": "async"}, 8),
        ({"preset": "async", "threads": (2, 3, 4)}, 4),
        ({"preset": "oppo"}, 16),
    ],
)
def test_what_trains_beside_generation_gets_its_share(
    schedule: dict[str, Any], threads: int
) -> None:
    config = Config.model_validate({"threads": 16, "schedule": schedule})
    assert share_cores(config.schedule, config.rollout.engines, 16).training == threads


def test_the_command_line_shows_the_traceback_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = RankError("rank 1 of 2 failed in a step")
    error.add_note("On rank 1:\nTraceback ...\nValueError: no")

    def fail(_: list[str]) -> int:
        raise error

    monkeypatch.setattr(command_line, "dispatch", fail)
    assert command_line.main([]) == 2
    assert capsys.readouterr().err == (
        "On rank 1:\nTraceback ...\nValueError: no\nstretto: error: rank 1 of 2 failed in a step\n"
    )
