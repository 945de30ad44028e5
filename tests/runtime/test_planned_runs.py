"""Every kind of plan, started with tiny shapes, gives the responses and rewards of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from run_helpers import run, settings
from scorer_helpers import reward_model
from stretto.api.planning import PlanOptions, settings_of, spec_of
from stretto.config import Config, changes
from stretto.layout import Layout
from stretto.models.tiny import byte_tokenizer
from stretto.observe import RunDirectory
from stretto.planner.candidates import Candidate, PlanSpec, candidates
from stretto.planner.run_layout import RunLayout

pytestmark = pytest.mark.slow

FSDP, TP = Layout(fsdp=2), Layout(tp=2)
PASSES: dict[str, Any] = {"micro_tokens": 8192, "checkpointing": True}
KINDS = {
    "engines and shards in the learner's ranks": RunLayout(
        Layout(fsdp=4), Layout(dp=2, tp=2), Layout(fsdp=4), "all"
    ),
    "copies in the learner's ranks": RunLayout(
        Layout(fsdp=2, tp=2), Layout(dp=4), Layout(dp=2, tp=2), "all"
    ),
    "offloaded": RunLayout(Layout(fsdp=4), Layout(dp=4), Layout(dp=4), "all", offload=True),
    "apart": RunLayout(FSDP, Layout(), Layout(), "none"),
    "scorers with generators": RunLayout(FSDP, Layout(dp=2), Layout(dp=2), "generators"),
    "copies with the learner": RunLayout(FSDP, TP, Layout(dp=2), "learner"),
    "shards with the learner": RunLayout(FSDP, TP, FSDP, "learner"),
    "serial pipelines apart": RunLayout(Layout(pp=2), Layout(), Layout(), "none"),
    "fused pipelines": RunLayout(
        Layout(pp=2), Layout(dp=2), Layout(dp=2), "generators", fused=True
    ),
    "sliced pipelines, engines and shards in the same ranks": RunLayout(
        Layout(pp=2, tp=2), Layout(dp=2, tp=2), Layout(fsdp=4), "all", fused=True
    ),
    "copies in the ranks of sliced pipelines": RunLayout(
        Layout(pp=2, tp=2), Layout(dp=4), Layout(dp=4), "all", fused=True
    ),
    "two pipelines, engines and copies in the same ranks, offloaded": RunLayout(
        *(Layout(dp=2, pp=2), Layout(dp=4), Layout(dp=2, tp=2), "all"), offload=True, fused=True
    ),
}


def kind(candidate: Candidate) -> tuple[object, ...]:
    layout = candidate.layout
    return layout.sharing, layout.learner.pp > 1, layout.scorer.fsdp > 1, layout.offload


@pytest.fixture(scope="module")
def config(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("rewards")
    reward_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    reward = {"sources": (f"model:{folder}",), "missing_eos": "off"}
    model = {"name": str(tiny_folder), "dtype": "float32"}
    own = {"reward": reward, "model": model, "pipeline": {"seconds": 0.1}}
    return settings(tiny_folder, task={"max_prompt_tokens": 200}, **own)


@pytest.fixture(scope="module")
def spec(config: Config) -> PlanSpec:
    spec, _ = spec_of(config, PlanOptions(gpus=4, gpu="h100"))
    return replace(spec, variants={"sync": config.schedule})


@pytest.fixture(scope="module")
def here(config: Config, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return run(config, tmp_path_factory.mktemp("inline"))[0]


def planned(spec: PlanSpec, name: str) -> Candidate:
    """The candidate of a kind's layout, whatever the passes. Serial pipelines need less memory, of
    which there is enough here."""
    layout = KINDS[name]
    alike = [
        candidate
        for candidate in candidates(spec)
        if replace(candidate.layout, **PASSES, fused=layout.fused) == layout
    ]
    return replace(alike[0], layout=replace(alike[0].layout, fused=layout.fused))


def test_every_kind_is_started(spec: PlanSpec) -> None:
    started = {kind(planned(spec, name)) for name in KINDS}
    assert started == {kind(c) for c in candidates(spec)}


@pytest.mark.parametrize("name", KINDS)
def test_a_plan_trains_as_one_process(
    name: str, config: Config, spec: PlanSpec, here: RunDirectory, tmp_path: Path
) -> None:
    candidate = planned(spec, name)
    plan = changes.changed(config, settings_of(config, candidate, spec), name)
    there, _ = run(plan, tmp_path)
    assert {(r.id, r.tokens) for r in here.read_rollouts()} == {
        (r.id, r.tokens) for r in there.read_rollouts()
    }
    for one, two in zip(here.read_metrics(), there.read_metrics(), strict=True):
        for metric in ("objective/scores", "objective/kl", "policy/grad_norm"):
            assert two[metric] == pytest.approx(one[metric], rel=1e-4, abs=1e-5)
