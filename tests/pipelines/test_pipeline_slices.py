"""Fused pipelines whose stages are sliced, merged and repeated, against one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline_helpers import problem_of
from pipeline_models import (
    RAGGED,
    critic_of,
    language_model,
    load_stages,
    make_batches,
    serial_gradients,
)
from pipeline_workers import Trainer
from raising import raises
from rank_helpers import call_each
from stretto.bounds import shares
from stretto.errors import ConfigError
from stretto.models.tensor_parallel import Cuts, plan_cuts
from stretto.pipelines.baselines import one_f_one_b
from stretto.pipelines.executor.stages import NAMES, Name, StageLayout
from stretto.pipelines.solve import solve
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec

LAYOUTS = {
    "(2, 1, 1)": StageLayout(1, 1, 1, 1, replicas=2),
    "(1, 2, 2)": StageLayout(2, 1, 2, 1, 2, 2),
    "(2, 2, 1)": StageLayout(2, 1, 2, 1, replicas=2),
    "critic merged": StageLayout(2, 1, 4, 1, 2, 1),
    "actor merged": StageLayout(4, 1, 2, 1, 1, 2),
    "(2, 2, 2)": StageLayout(2, 1, 2, 1, 2, 2, replicas=2),
    "merged, two pipelines": StageLayout(2, 2, 8, 1, 2, 1),
}
MOST = 1e-12
"""Largest relative difference: 4 layers of sums of up to 48 products, in another order."""


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_gradients_and_norms_are_those_of_one_process(layout: StageLayout) -> None:
    """Of ragged micro-batches, with tied embeddings, and a critic of another width."""
    actor = language_model("qwen2", layers=4, tied=True).double()
    critic = critic_of(language_model("qwen3", layers=8, hidden_size=24, head_dim=8)).double()
    models: dict[Name, Any] = {"actor": actor, "critic": critic}
    counts = {name: 2 * layout.of(name)[1] for name in NAMES}
    in_all = {name: count * layout.replicas for name, count in counts.items()}
    batches = {n: make_batches([RAGGED[i % 4] for i in range(m)], m) for n, m in in_all.items()}
    expected = {name: serial_gradients(models[name], batches[name]) for name in NAMES}
    cuts: dict[Name, Cuts] = {name: plan_cuts(models[name], layout.tp(name)) for name in NAMES}
    problem = problem_of(layout, counts["actor"], counts["critic"])
    ranks = RankGroup(GroupSpec(layout.ranks), Trainer).start()
    try:
        load_stages(ranks, layout, actor, critic)
        for schedule in (one_f_one_b(problem), solve(problem, seconds=0.2).schedule):
            steps = (
                (
                    schedule,
                    shares(batches["actor"], layout.replicas)[layout.replica(rank)],
                    shares(batches["critic"], layout.replicas)[layout.replica(rank)],
                    problem,
                )
                for rank in range(layout.ranks)
            )
            call_each(ranks, Trainer.step, steps)
            answers = ranks.call(Trainer.gradients)
            for name in NAMES:
                _require_gradients(layout, name, cuts[name], answers, expected[name])
    finally:
        ranks.close()


def _require_gradients(
    layout: StageLayout, name: Name, cuts: Cuts, answers: Any, expected: dict[str, Tensor]
) -> None:
    """Of all ranks: those of their slices. Together they are those of all parameters."""
    whole = torch.stack([g.norm() for g in expected.values()]).norm().item()
    seen = set()
    for rank, answer in enumerate(answers):
        gradients, norm = answer[name]
        assert norm == pytest.approx(whole, rel=MOST)
        assert norm == answers[0][name][1]
        for key, gradient in gradients.items():
            serial = expected[key]
            if key in cuts.dims:
                slices = serial.chunk(layout.tp(name), cuts.dims[key])
                serial = slices[layout.column(name, rank)]
            assert (gradient - serial).norm() <= MOST * expected[key].norm(), key
        seen |= set(gradients)
    assert seen == set(expected)


def test_ranks_and_places_are_inverse() -> None:
    for layout in LAYOUTS.values():
        for name in NAMES:
            places = [
                (*layout.place(name, r), layout.column(name, r), layout.replica(r))
                for r in range(layout.ranks)
            ]
            assert [layout.rank(name, *place) for place in places] == list(range(layout.ranks))
    # The actor's stages 0 and 1 in two slices each. The critic's stages 3, 2 are beside stage 0.
    merged = LAYOUTS["critic merged"]
    assert [merged.place("actor", r)[1] for r in range(4)] == [0, 0, 1, 1]
    assert [merged.place("critic", r)[1] for r in range(4)] == [2, 3, 0, 1]


@pytest.mark.parametrize("layout", [(2, 1, 2, 1, 2, 1), (2, 1, 3, 1, 3, 2), (1, 1, 3, 1, 2, 1)])
def test_models_that_do_not_cover_the_same_ranks_are_refused(layout: tuple[int, ...]) -> None:
    with raises(ConfigError, "other-devices"):
        StageLayout(*layout)
