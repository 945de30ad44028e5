"""The executor without its processes: instructions, and what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from pipeline_helpers import model, problem_of, problems, random_schedule
from pipeline_models import language_model
from raising import raises
from stretto.config import ModelConfig
from stretto.errors import ConfigError
from stretto.models.load import set_checkpointing
from stretto.pipelines.executor.instructions import (
    Instruction,
    PipelineTask,
    Receive,
    Send,
    Timings,
    instructions,
    makespan_us,
    profile,
)
from stretto.pipelines.executor.stages import Name, Stage, StageLayout, cut
from stretto.pipelines.graph import make_graph
from stretto.pipelines.pipeline_schedule import PipelineSchedule, evaluate
from stretto.pipelines.problem import ModelPipelines, Problem

# Instructions


def transfers(programs: Sequence[Sequence[Instruction]]) -> dict[tuple[int, int], list[Any]]:
    """What each rank starts with each other, in order: receiver and task."""
    pairs: dict[tuple[int, int], list[Any]] = {}
    for rank, program in enumerate(programs):
        for step in program:
            if not isinstance(step, PipelineTask):
                to = step.peer if isinstance(step, Send) else rank
                pairs.setdefault((rank, step.peer), []).append((to, step.task))
    return pairs


def simulate(programs: Sequence[Sequence[Instruction]], strict: bool) -> bool:
    """Whether all programs end where a send lasts until its receiver has asked for the tensor.

    With ``strict``, it also lasts until all earlier transfers of its pair of ranks have happened,
    as if they went through one pipe.
    """
    at = [0] * len(programs)
    asked: set[Any] = set()
    came: set[Any] = set()
    pairs = transfers(programs)
    arriving = {each for pair in pairs.values() for each in pair}

    def passes(rank: int, step: Instruction) -> bool:
        if isinstance(step, Receive):
            asked.add((rank, step.task))
            return True
        if isinstance(step, PipelineTask):
            return (rank, step) not in arriving or (rank, step) in came
        sent = (step.peer, step.task)
        pair = pairs[rank, step.peer]
        if sent not in asked or (strict and not came.issuperset(pair[: pair.index(sent)])):
            return False
        came.add(sent)
        return True

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program) and passes(rank, program[at[rank]]):
                at[rank] += 1
                moved = True
    return all(a == len(p) for a, p in zip(at, programs, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_rank_ends_whatever_the_schedule(data: st.DataObject) -> None:
    problem = data.draw(problems())
    schedule = random_schedule(problem, lambda ready: data.draw(st.sampled_from(ready)))
    programs = instructions(problem, schedule)
    for word, program in zip(schedule.words, programs, strict=True):
        tasks = [step for step in program if isinstance(step, PipelineTask)]
        assert [f"{t.pipeline}{t.kind}" for t in tasks] == list(word)
        assert len(set(tasks)) == len(tasks)
    started = transfers(programs)
    for (rank, peer), mine in started.items():
        assert mine == started[peer, rank]
    assert simulate(programs, strict=False)
    assert simulate(programs, strict=True)


def test_the_simulator_sees_a_deadlock() -> None:
    f, g = PipelineTask("F", 0, 0), PipelineTask("F", 1, 0)
    late = ((f, Send(f, 1), Receive(g, 1), g), (g, Send(g, 0), Receive(f, 0), f))
    assert not simulate(late, strict=False)
    early = ((Receive(g, 1), f, Send(f, 1), g), (Receive(f, 0), g, Send(g, 0), f))
    assert simulate(early, strict=False)
    assert not simulate(early, strict=True)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_instructions_hold_for_latencies_other_than_the_schedule_was_made_for(
    data: st.DataObject,
) -> None:
    problem = data.draw(problems())
    schedule = random_schedule(problem, lambda ready: data.draw(st.sampled_from(ready)))
    plain = [
        ModelPipelines.of(
            s.stages, s.pipelines, s.micro_batches, forward=1, backward=2, activation=1.0
        )
        for s in problem.models
    ]
    assert simulate(instructions(Problem(plain[0], plain[1]), schedule), strict=True)


def test_instructions_of_two_ranks_by_hand() -> None:
    side = model(2, 1, 1)
    schedule = PipelineSchedule((("0F", "1F", "1B", "0B"), ("1F", "0F", "0B", "1B")))
    # Time    0   1   2   3   4   5
    # rank 0  0F  1F  1B  1B  0B  0B
    # rank 1  1F  0F  0B  0B  1B  1B
    # Of what is made at one time (4), that of the first pipeline goes first.
    f, g, b, c = (
        PipelineTask("F", 0, 0),
        PipelineTask("F", 1, 0),
        PipelineTask("B", 0, 0),
        PipelineTask("B", 1, 0),
    )
    assert instructions(Problem(side, side), schedule) == (
        (f, Send(f, 1), Receive(g, 1), g, Receive(b, 1), c, Send(c, 1), b),
        (Receive(f, 0), g, Send(g, 0), f, b, Send(b, 0), Receive(c, 0), c),
    )


def test_what_is_made_while_a_rank_works_is_asked_for_before() -> None:
    quick = ModelPipelines.of(2, 1, 2, forward=1, backward=1, activation=1.0)
    slow = ModelPipelines.of(2, 1, 2, forward=9, backward=9, activation=1.0)
    schedule = PipelineSchedule(
        (
            ("0F", "0F", "1F", "1F", "1B", "1B", "0B", "0B"),
            ("1F", "1F", "0F", "0B", "0F", "0B", "1B", "1B"),
        )
    )
    program = instructions(Problem(quick, slow), schedule)[1]
    first, second = PipelineTask("F", 0, 0), PipelineTask("F", 0, 1)
    g = PipelineTask("F", 1, 0)
    # Rank 1 is at work on its long 1F from 0 to 9, when both forwards of 0 are made, at 1 and 2.
    assert program[:4] == (Receive(first, 0), Receive(second, 0), g, Send(g, 0))


def test_a_schedule_that_cannot_run_has_no_instructions() -> None:
    side = model(2, 1, 1)
    with raises(ConfigError, "deadlock", "0B of micro-batch 0 on device 0"):
        instructions(
            Problem(side, side),
            PipelineSchedule((("0B", "0F", "1F", "1B"), ("1F", "0F", "0B", "1B"))),
        )


# StageLayout


def test_places_are_those_of_the_problem() -> None:
    layout = StageLayout(4, 1, 2, 2)
    graph = make_graph(problem_of(layout, 3, 4))
    for q in range(graph.length.size):
        pipeline, stage, rank = graph.pipeline[q], graph.stage[q], graph.device[q]
        name: Name = "actor" if pipeline == 0 else "critic"
        first = 0 if pipeline == 0 else 1
        assert layout.place(name, rank) == (pipeline - first, stage)
        assert layout.rank(name, pipeline - first, stage) == rank


def test_layouts_that_do_not_fit_are_refused() -> None:
    with raises(ConfigError, "other-devices"):
        StageLayout(4, 1, 3, 1)
    layout = StageLayout(4, 1, 2, 2)
    for count in (6, 5):  # the latter do not divide evenly
        with raises(ConfigError, "other-problem", "critic", "4 micro-batches", f"{count} micro"):
            layout.require(problem_of(layout, 4, 4), 4, count)


# Measures


def saved_bytes(stage: Stage, ids: torch.Tensor) -> int:
    """Bytes that autograd saves in a forward pass, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in chain(stage.parameters(), stage.buffers())}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    # While the output lives, all saved tensors do, so each has its own address.
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage(ids)
    del output
    return sum(sizes.values())


def test_checkpointed_layers_keep_their_inputs_alone() -> None:
    model = language_model("llama", layers=4)
    set_checkpointing(model, ModelConfig(gradient_checkpointing="on"))
    stage = cut(model, 2, 0)
    ids = torch.arange(21).reshape(3, 7) * 2
    plain = saved_bytes(stage, ids)  # in evaluation mode nothing is checkpointed
    layer = ids.numel() * 32 * 4
    assert plain > 10 * layer
    # Besides, the ids that the embedding is differentiated by.
    assert 2 * layer <= saved_bytes(stage.train(), ids) <= 2 * layer + ids.nbytes


def test_a_profile_says_what_was_timed() -> None:
    layout = StageLayout(2, 1, 2, 1)
    f, g, b, c = (
        PipelineTask("F", 0, 0),
        PipelineTask("F", 1, 0),
        PipelineTask("B", 0, 0),
        PipelineTask("B", 1, 0),
    )
    # asked, start, end; each transfer that is waited for takes 1 ms.
    zero = {f: (0, 0, 2), g: (2, 5, 6), c: (6, 6, 10), b: (10, 12, 15)}
    one = {g: (0, 0, 4), f: (4, 4, 5), b: (5, 5, 11), c: (11, 11, 13)}
    timings = [
        Timings(tuple(ms), *(tuple(each[k] / 1000 for each in ms.values()) for k in range(3)))
        for ms in (zero, one)
    ]
    actor, critic = (
        ModelPipelines.of(2, 1, 1, forward=1, backward=2, activation=kept)
        for kept in ([10.0, 30.0], [40.0, 20.0])
    )
    problem = profile(layout, timings, Problem(actor, critic))
    assert problem.actor == ModelPipelines.of(
        2,
        1,
        1,
        forward=[2000, 1000],
        backward=[3000, 6000],
        activation=[10.0, 30.0],
        communication=1000,
    )
    assert problem.critic == ModelPipelines.of(
        2,
        1,
        1,
        forward=[4000, 1000],
        backward=[2000, 4000],
        activation=[40.0, 20.0],
        communication=1000,
    )
    assert makespan_us(timings) == 15_000
    schedule = PipelineSchedule((("0F", "1F", "1B", "0B"), ("1F", "0F", "0B", "1B")))
    assert evaluate(problem, schedule).latency == 15_000


def test_latencies_are_medians_over_micro_batches_and_pipelines() -> None:
    layout = StageLayout(1, 2, 1, 2)
    timings = []
    for rank in range(2):
        tasks = [
            PipelineTask(k, p, i) for p in (rank, 2 + rank) for i in range(3) for k in ("F", "B")
        ]
        starts = [float(i) for i in range(len(tasks))]
        ms = [1, 2, 3, 4, 90, 6] if rank == 0 else [5, 8, 7, 8, 9, 8]
        ends = [s + d / 1000 for s, d in zip(starts, ms * 2, strict=True)]
        timings.append(Timings(tuple(tasks), tuple(starts), tuple(starts), tuple(ends)))
    one = ModelPipelines.of(1, 2, 1, forward=1, backward=2, activation=1.0)
    problem = profile(layout, timings, Problem(one, one))
    assert problem.actor == ModelPipelines.of(1, 2, 3, forward=6000, backward=7000, activation=1.0)
