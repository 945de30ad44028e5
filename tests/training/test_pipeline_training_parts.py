"""Parts of training through pipelines, most of them without ranks."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

from helpers import critic_of, llama, make_rollouts, told
from loss_helpers import inputs_of, mask_of
from raising import raises
from stretto.assembly import parts
from stretto.assembly.controllers import share_cores
from stretto.cli import main as command_line
from stretto.cli.dry_run import describe_run
from stretto.config import Config, PipelineConfig
from stretto.errors import LearnerError, ModelError, RankError
from stretto.pipelines.executor.instructions import PipelineTask, Timings
from stretto.pipelines.executor.stages import cut, for_sending
from stretto.pipelines.problem import Problem
from stretto.runtime.run import start as start_run
from stretto.training import pipelined
from stretto.training.backprop import deal
from stretto.training.losses import MicroBatch, copied_at_once
from stretto.training.pipelined import Planner
from stretto.training.shard_files import in_memory
from stretto.training.trained import LearningRate, TrainedModel
from stretto.workers.rank import GroupSpec
from stretto.workers.threads import WorkerThread

RATES: Any = dict.fromkeys(("actor", "critic"), LearningRate(1e-3, 10))

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
KEPT = [(10, 20), (30, 40)]


class FakeRanks:
    """Two ranks that say what they are told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def call(self, method: Callable[..., Any], *_: Any) -> list[Any]:
        self.asked.append(method.__name__)
        metrics: dict[str, Any] = {"actor": pipelined.Metrics(), "critic": pipelined.Metrics()}
        return KEPT if self.asked[-1] == "saved_bytes" else [(ran, metrics) for ran in RAN]


def test_every_seed_of_a_run_serves_the_search() -> None:
    """Which takes seeds of 31 bits."""
    config = PipelineConfig(ranks=2, seconds=0.5)
    plan = Planner(config, {"actor": 1, "critic": 1}, seed=2**40 + 5).plan(2)
    assert plan.schedule


def test_what_ranks_measured_is_planned_with_and_reported() -> None:
    config = PipelineConfig(ranks=2, schedule="serial")
    planner = Planner(config, {"actor": 1, "critic": 1}, seed=0)
    ranks: Any = FakeRanks()
    passes = pipelined.PipelinedBackprop(
        ranks, {}, planner, pipelined.layout_of(config), config, budget=1
    )
    parts = [a_micro_batch()]
    passes.run(parts, 0.1, trains_actor=True)
    assert passes.finish() == {
        "pipeline/step_s": 7.0,
        "pipeline/bubble_fraction": pytest.approx(1 - (3.0 + 6.5) / 2 / 7.0),
    }
    assert not planner.measured
    passes.run(parts, 0.1, trains_actor=True)
    measured: Problem = planner.plan(1).problem
    assert measured.actor.activation == (10.0, 30.0)
    assert measured.critic.activation == (40.0, 20.0)
    assert measured.actor.backward == (500_000, 4_500_000)
    for _ in range(2):
        passes.run(parts, 0.1, trains_actor=True)
    assert ranks.asked == ["run", "run", "saved_bytes", "run", "run"]
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


def start(actor: Any, critic: Any, **pipeline: Any) -> pipelined.PipelinedBackprop:
    config = Config.model_validate({"pipeline": {"ranks": 2} | pipeline})
    return pipelined.start(actor, critic, config, RATES, 2)


def test_stages_that_cannot_be_cut_are_refused_before_the_warm_up(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "warm_up", lambda *_: pytest.fail("warmed up"))
    for given, fact in (
        ({"ranks": 3}, "pipeline.actor_stages = 3 (as many as pipeline.ranks): LlamaModel"),
        ({"ranks": 4, "actor_stages": 2, "critic_stages": 4}, "pipeline.critic_stages = 4: Llama"),
    ):
        config = Config.model_validate(
            {"warmup_examples": 1, "model": {"name": str(tiny_folder)}, "pipeline": given}
        )
        with ExitStack() as stack, raises(ModelError, "too-few-layers", fact):
            start_run(config, stack, lambda _: None)


def test_a_dry_run_counts_the_layers(tiny_folder: Path) -> None:
    def plan(**sections: Any) -> str:
        return describe_run(
            Config.model_validate({"model": {"name": str(tiny_folder)}, **sections})
        )

    with pytest.raises(
        ModelError, match=r"actor_stages = 3 \(as many as pipeline.ranks\): .*/tiny'"
    ):
        plan(pipeline={"ranks": 3})
    with pytest.raises(
        ModelError, match=r"critic_stages = 4: .* has 2 layers, too few for 4 stages"
    ):
        plan(pipeline={"ranks": 4, "actor_stages": 2, "critic_stages": 4})
    said = plan(pipeline={"ranks": 4, "actor_stages": 2, "critic_stages": 1})
    assert "actor: 2 pipelines of 2 stages\ncritic: 4 pipelines of 1 stage\n" in said
    assert "pipeline" not in plan()


def test_a_model_without_a_trained_weight_is_refused() -> None:
    config = Config().training
    frozen = llama().requires_grad_(False)
    with raises(LearnerError, "nothing-to-train", "LlamaForCausalLM"):
        TrainedModel(frozen, LearningRate(1e-3, 1), config)
    with raises(LearnerError, "nothing-to-train", "the critic"):
        start(llama(), critic_of(llama()).requires_grad_(False))


def test_models_that_cannot_be_sent_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, critic = llama(), critic_of(llama())
    handle = actor.model.layers[0].register_forward_hook(lambda module, given, output: output)
    with raises(ModelError, "unpicklable-model", "<lambda>"):
        start(actor, critic)
    handle.remove()

    class Mine(nn.Linear):
        pass

    monkeypatch.setattr(Mine, "__module__", "__main__")
    critic.score.__class__ = Mine
    with raises(ModelError, "class-in-script", "'score' of the critic", "Mine"):
        start(actor, critic)


# -- threads, devices, errors --------------------------------------------------------------------


def test_ranks_share_the_threads_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    class StartedError(Exception):
        pass

    def started(spec: GroupSpec, *_: Any, **__: Any) -> None:
        raise StartedError(spec.threads)

    monkeypatch.setattr(pipelined, "RankGroup", started)
    config = Config.model_validate({"pipeline": {"ranks": 2}, "threads": 64})
    for threads, each in ((1, 1), (6, 3), (7, 3)):
        with pytest.raises(StartedError) as caught:
            pipelined.start(llama(), critic_of(llama()), config, RATES, threads)
        assert caught.value.args == (each,)


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


def test_a_stage_is_sent_with_its_own_weights() -> None:
    stage = cut(llama(), 2, 1)
    sent = for_sending(stage)
    own = dict(stage.named_parameters())
    for name, weight in sent.named_parameters():
        assert weight.data_ptr() == own[name].data_ptr()  # nothing is copied on a CPU
        assert weight.requires_grad == own[name].requires_grad
    hidden = torch.randn(1, 3, 16)
    assert sent(hidden).equal(stage(hidden))
    assert sent.head.weight is sent.lm_head.weight
    assert sent.names == stage.names


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_from_a_gpu_copies_are_sent() -> None:
    model = llama().cuda()
    stage = cut(model, 2, 0)
    sent = pickle.loads(pickle.dumps(for_sending(stage)))
    assert {t.device.type for t in (*sent.parameters(), *sent.buffers())} == {"cpu"}
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cuda"}
    trained = TrainedModel(stage, LearningRate(1e-3, 1), Config().training)
    stage(torch.ones(1, 3, dtype=torch.long, device="cuda")).sum().backward()
    trained.update()
    state = in_memory(trained.state_dict())
    moments = next(iter(state["moments"].values()))
    tensors = [*state["masters"].values(), *moments.values()]
    assert {t.device.type for t in tensors} == {"cpu"}
    trained.load_state_dict(state)


def test_a_lane_that_has_failed_tells_all() -> None:
    worker, begun, stop = WorkerThread("here", 1), Event(), Event()
    error = RankError("gone")

    def hold() -> bool:
        begun.set()
        return stop.wait(10)

    async def work() -> None:
        waiting = [asyncio.create_task(worker.run(hold)) for _ in range(2)]
        assert await asyncio.to_thread(begun.wait, 10)
        await asyncio.get_running_loop().run_in_executor(None, worker.fail, error)
        for task in waiting:
            with pytest.raises(RankError) as caught:
                await task
            assert caught.value is error
        with pytest.raises(RankError):
            await worker.run(lambda: None)
        stop.set()

    asyncio.run(work())
    worker.interrupt()
    assert worker.join(5)


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
