"""``stretto plan`` and the settings that it writes."""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from raising import raises
from run_helpers import SMALL_SIZES
from stretto.api import calibrating
from stretto.api.calibrating import calibrate
from stretto.api.planning import (
    PLANNED,
    Plan,
    PlanOptions,
    plan,
    settings_of,
    spec_of,
    variants_of,
)
from stretto.cli.main import main as stretto
from stretto.cli.plan import plan_lines
from stretto.config import Config, ScheduleConfig, changes, recipes
from stretto.errors import ConfigError
from stretto.models.shapes import public_config, shape_of
from stretto.planner.candidates import candidates, memory_by_phase
from stretto.planner.fitting import RunMemory
from stretto.planner.hardware import GPUS, read_hardware
from stretto.planner.plan_search import search
from stretto.runtime.placement import places
from stretto.runtime.sim.lengths import Lognormal, Uniform
from stretto.runtime.sim.turns import AnswerLatency

PPO = recipes.build(
    {
        "model": {"name": "Qwen/Qwen2.5-3B-Instruct"},
        "rollout": {"batch": 32, "max_new_tokens": 256},
        "reward": {"sources": ["model:org/some-reward"]},
        "task": {"name": "rows.jsonl"},
    },
    "a test",
)


def asked(gpus: int, **more: Any) -> PlanOptions:
    return PlanOptions(gpus=gpus, **{"workers": 1, "response_tokens": (40, 200), **more})


# -- what is asked ---------------------------------------------------------------------------------


def test_models_work_and_lengths_come_from_the_settings() -> None:
    spec, assumed = spec_of(PPO, PlanOptions(gpus=8, prompt_tokens=100))
    body = shape_of("qwen2.5-3b")
    assert spec.models.actor == spec.models.reference == body
    assert spec.models.critic == spec.models.reward == body.valued()
    assert (spec.workload.batch, spec.workload.max_new_tokens) == (32, 256)
    assert spec.workload.mean_tokens == pytest.approx(100 + 60, abs=10)
    assert any("'org/some-reward' has the actor's body" in line for line in assumed)
    assert any("median of 38 tokens and a 95th percentile of 192" in line for line in assumed)


def test_what_the_algorithm_leaves_out_is_not_planned_for() -> None:
    grpo = {
        "algorithm": {"name": "grpo", "kl_coef": 0.0},
        "rollout": {"batch": 32, "samples_per_prompt": 8},
        "reward": {"sources": ["task"]},
    }
    spec, _ = spec_of(changes.changed(PPO, grpo, "a test"), asked(8))
    assert spec.models.trained == (shape_of("qwen2.5-3b"),)
    assert spec.models.frozen == ()
    assert list(spec.functions) == ["task"]
    assert spec.workload.samples_per_prompt == 8


def test_teachers_are_planned_for_by_their_rows(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{i}", "of": "sums" if i % 4 else "words"}) for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    teachers = {"words": "org/words", "sums": "org/sums"}
    taught = {"algorithm": {"name": "distill", "teachers": teachers}, "reward": {"sources": []}}
    config = changes.changed(PPO, taught, "a test")
    spec, assumed = spec_of(config, asked(8))
    assert [(t.name, t.share) for t in spec.models.teachers] == [
        ("teacher-words", 0.5),
        ("teacher-sums", 0.5),
    ]
    assert any("each of 2 teachers" in line for line in assumed)
    file = str(tmp_path / "rows.jsonl")
    rows = {"kind": "dataset", "name": file, "columns": {"teacher": "of"}}
    spec, assumed = spec_of(changes.changed(config, {"task": rows}, "a test"), asked(8))
    assert [t.share for t in spec.models.teachers] == [0.25, 0.75]
    assert spec.models.frozen == (shape_of("qwen2.5-3b"),) * 2
    assert not any("each of" in line for line in assumed)


def test_shapes_by_name_or_from_files(tmp_path: Path) -> None:
    spec, _ = spec_of(PPO, asked(8, model_shape="llama-3.1-8b", reward_shape="qwen2.5-0.5b"))
    assert spec.models.actor == shape_of("llama-3.1-8b")
    assert spec.models.reward == shape_of("qwen2.5-0.5b").valued()
    assert spec.models.critic == shape_of("llama-3.1-8b").valued()
    like = changes.changed(PPO, {"critic": {"init": "reward"}}, "a test")
    spec, _ = spec_of(like, asked(8, reward_shape="qwen2.5-0.5b"))
    assert spec.models.critic == shape_of("qwen2.5-0.5b").valued()
    folder = tmp_path / "qwen3"
    folder.mkdir()
    config = {**public_config("qwen3-8b"), "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    for name in (str(folder), str(folder / "config.json"), "Qwen/Qwen3-8B"):
        spec, _ = spec_of(PPO, asked(8, model_shape=name, reward_shape=str(folder)))
        assert spec.models.actor == shape_of("qwen3-8b")
        assert spec.models.reward == shape_of("qwen3-8b").valued()
    own = changes.changed(PPO, {"model": {"name": str(tmp_path)}}, "a test")
    with raises(ConfigError, "shape-unknown", tmp_path, "`model_shape`"):
        spec_of(own, asked(8))


def test_turns_and_waits_are_those_that_are_asked_for_or_assumed() -> None:
    spec, assumed = spec_of(PPO, asked(8, turns=(3, 5), wait=(0.2, 2.0), answer_tokens=(30, 90)))
    episodes = spec.workload.episodes
    assert episodes
    assert episodes.turns == Uniform(low=3, high=5)
    assert episodes.wait_s == AnswerLatency(median=0.2, p95=2.0)
    assert episodes.answer_tokens == Lognormal(median=30, p95=90)
    assert not any("`turns`" in line or "`wait`" in line for line in assumed)
    spec, _ = spec_of(PPO, asked(8))
    assert spec.workload.episodes is None
    with_tools = {"environment": {"sources": ["tools.py:add"], "max_turns": 3}}
    spec, assumed = spec_of(changes.changed(PPO, with_tools, "a test"), asked(8))
    assert spec.workload.episodes
    assert spec.workload.episodes.turns == Uniform(low=2, high=3)
    assert "2 to 3 turns (`turns`, or `like = RUN`)" in assumed


def test_what_is_impossible_is_refused() -> None:
    with raises(ConfigError, "greater_than", "`gpus = 0`"):
        plan(PPO, asked(0))
    with raises(ConfigError, "two-percentiles", "`response_tokens = 40`:"):
        spec_of(PPO, PlanOptions(gpus=8, response_tokens=(40,)))
    with raises(ConfigError, "two-percentiles", "`turns = 3`: give two, the fewest and the most"):
        spec_of(PPO, PlanOptions(gpus=8, turns=(3,)))
    with raises(ConfigError, "p95-below-median", "`wait = 5 2`"):
        spec_of(PPO, PlanOptions(gpus=8, wait=(5.0, 2.0)))
    with raises(ConfigError, "one-percentile", "`response_tokens = 40 20`"):
        spec_of(PPO, PlanOptions(gpus=8, response_tokens=(40, 20)))


# -- what is written -------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "engine"), [(2, "torch"), (8, "torch"), (8, "vllm")])
def test_train_takes_every_plan(gpus: int, engine: str) -> None:
    """Its processes take exactly the GPUs of the plan, and roles sit where the layout says."""
    own = changes.changed(PPO, {"runtime": "local", "rollout": {"engine": engine}}, "a test")
    spec, _ = spec_of(own, asked(gpus, gpu="h200"))
    seen = set()
    for candidate in candidates(spec):
        config = changes.changed(own, settings_of(own, candidate, spec), "the plan")
        layout = candidate.layout
        found = places(config, 8, gpus)
        devices = [device for place in found for device in place.devices]
        assert len(set(devices)) == gpus
        assert len(devices) == gpus + (layout.generator.ranks if layout.sleeping else 0)
        assert config.schedule.knobs == candidate.schedule.knobs
        seats = {seat.role: (place, seat) for place in found for seat in place.roles}
        learner, _ = seats["learner"]
        assert learner.offload == layout.offload
        assert len(learner.devices) == layout.learner.ranks
        assert config.learner_layout == layout.learner
        expected = {"learner": (layout.learner, 1)}
        if layout.in_place or layout.sharing == "learner":
            in_place = layout.in_place and config.cluster.processes
            frozen = "model:org/some-reward", "reference"
            expected |= dict.fromkeys(frozen, (layout.scorer, layout.scorer.dp))
            expected["critic"] = layout.critic, layout.critic.dp
            expected |= {"generator": (layout.generator, layout.generator.dp)} if in_place else {}
        if layout.learner.pp > 1:
            del expected["learner"]
            pipeline = config.pipeline
            assert (pipeline.ranks, pipeline.schedule) == (
                layout.learner.ranks,
                "fused" if layout.fused else "serial",
            )
            assert pipeline.stages_of("actor") == pipeline.stages_of("critic") == layout.learner.pp
            assert pipeline.stage_slices == (layout.learner.tp, layout.learner.tp)
        for role, (on, copies) in expected.items():
            names = [f"{role} {i}" for i in range(copies)] if copies > 1 else [role]
            assert {seats[name][0] for name in names} == {learner}
            assert {seats[name][1].layout for name in names} == {replace(on, dp=1)}
        assert config.rollout.engines == layout.generator.dp
        assert sum(role.startswith("generator") for role in seats) == layout.generator.dp
        kind = "pipeline" if layout.learner.pp > 1 else "shards" if layout.scorer.fsdp > 1 else ""
        seen.add((layout.sharing, kind))
    if gpus == 8:
        # Engines that sleep need a critic in slices, and eight do not divide two key-value heads.
        sharings = ("all", "learner") if engine == "torch" else ("learner",)
        shards = {(sharing, "shards") for sharing in sharings}
        pipelines = {("none", "pipeline"), ("generators", "pipeline")}
        pipelines |= {("all", "pipeline")} if engine == "torch" else set()
        whole = {(sharing, "") for sharing in ("all", "none", "generators", "learner")}
        assert seen == shards | pipelines | whole


GPU_PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()


def page_blocks() -> list[dict[str, Any]]:
    blocks = re.findall(r"```toml\n(.*?)```", GPU_PAGE, re.DOTALL)
    return [tomllib.loads(block) for block in blocks]


def test_the_page_on_gpus_has_the_plan_of_all_roles_on_eight() -> None:
    """7B with a reference: no eight slices, as there are four key-value heads."""
    own, plan, *_ = page_blocks()[-4:]
    config = recipes.build({**own, "rollout": plan["rollout"], "cluster": {}}, "the page")
    spec, _ = spec_of(config, PlanOptions(gpus=8, gpu="h100"))
    baseline = search(replace(spec, variants={"sync": config.schedule}), keep=1, workers=1).baseline
    assert baseline
    assert baseline.step_s == pytest.approx(17.5, abs=0.05)
    phases = memory_by_phase(spec, baseline.candidate).values()
    assert max(sum(parts.values()) for parts in phases) == pytest.approx(70e9, abs=0.5e9)
    settings = settings_of(config, baseline.candidate, spec)
    assert settings["rollout"]["engines"] == plan["rollout"]["engines"]
    assert settings["cluster"]["processes"] == plan["cluster"]["processes"]


def test_the_page_on_gpus_has_the_plan_of_fused_pipelines_on_64() -> None:
    """33B with a critic of 13B. With shards of the learner, a synchronous step takes longer."""
    own, written = page_blocks()[-2:]
    config = recipes.build(own, "the page")
    options = PlanOptions(gpus=64, gpu="h100", reward_shape="llama-13b")
    spec, _ = spec_of(config, options)
    spec = replace(spec, variants={"sync": config.schedule})
    outcome = search(spec, keep=1, workers=1)
    assert outcome.baseline
    settings = settings_of(config, outcome.baseline.candidate, spec)
    for section, entries in written.items():
        found = settings[section]
        if isinstance(entries, dict):
            found = {name: found[name] for name in entries}
        assert json.loads(json.dumps(found)) == entries
    changes.changed(config, settings, "the plan")  # is what train takes
    lines = plan_lines(6, outcome.baseline, Plan(config, spec, outcome))
    assert "\n".join(lines) in GPU_PAGE
    shards = search(replace(spec, pipelines=False), keep=1, workers=1).baseline
    assert shards
    assert shards.step_s == pytest.approx(24.9, abs=0.05)


def test_what_a_recipe_says_of_processes_is_replaced() -> None:
    own = {
        "runtime": "local",
        "cluster": {"processes": [{"roles": ["learner"], "ranks": 2}]},
        "rollout": {"batch": 32, "engines": 2},
    }
    config = changes.changed(PPO, own, "a test")
    spec, _ = spec_of(config, asked(1, model_shape="qwen2.5-0.5b"))
    (first, *_) = candidates(spec)
    found = changes.changed(config, settings_of(config, first, spec), "the plan")
    assert (found.runtime, found.rollout.engines, found.cluster.processes) == ("inline", 1, ())
    piped = changes.changed(PPO, {"pipeline": {"ranks": 2}}, "a test")
    data = settings_of(piped, first, spec)
    assert changes.changed(piped, data, "the plan").pipeline.ranks == 0


def test_knobs_of_a_recipe_do_not_survive_in_a_plan() -> None:
    own = {"schedule": {"score_on": "chunk", "overcommit": 8, "lag": 1}}
    config = changes.changed(PPO, own, "a test")
    spec, _ = spec_of(config, asked(4, gpu="h200"))
    for candidate in candidates(spec):
        trained = changes.changed(config, settings_of(config, candidate, spec), "the plan")
        assert trained.schedule.knobs == candidate.schedule.knobs


def test_memory_is_no_less_than_what_train_counts() -> None:
    """Of the learner, whose processes hold nothing else here; train counts CUDA's own, too."""
    spec, _ = spec_of(PPO, asked(6))
    for candidate in candidates(spec):
        place = candidate.layout
        if place.sharing != "none" or place.learner.ranks < 2:
            continue
        config = changes.changed(PPO, settings_of(PPO, candidate, spec), "the plan")
        assert spec.models.critic is not None
        shapes = {"actor": spec.models.actor, "critic": spec.models.critic}
        first = RunMemory(config).loads(places(config, 8, 6), shapes, 2)[0]
        own = ("contexts", "communicators")
        counted = sum(size for what, size in first.held.items() if what not in own)
        counted += max(sum(work.values()) for work in first.work.values())
        planned = sum(memory_by_phase(spec, candidate)["weight sync"].values())
        assert counted <= planned * 1.02


def overlaid(config: Config, file: Path | str) -> Config:
    return changes.changed(config, recipes.read(file), str(file))


def test_settings_of_a_file_take_the_place_of_a_recipes(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text('steps = 7\n[rollout]\nbatch = 8\n[[cluster.processes]]\nroles = ["learner"]\n')
    changed = overlaid(PPO, file)
    assert (changed.steps, changed.rollout.batch) == (7, 8)
    assert changed.rollout.max_new_tokens == 256
    assert changed.cluster.processes[0].roles == ("learner",)
    assert changed.model == PPO.model
    file.write_text("[rollout]\nbatsch = 8\n")
    with pytest.raises(ConfigError, match="batsch"):
        overlaid(PPO, file)
    file.write_text("[rollout\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        overlaid(PPO, file)
    with pytest.raises(ConfigError, match="cannot read the settings"):
        overlaid(PPO, tmp_path / "absent.toml")


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_plans_and_writes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    (tmp_path / "my.toml").write_text(recipes.dump(PPO))
    assert stretto(["plan", "my.toml", "--gpus", "2", "--gpu", "h200", "--write", "c.toml"]) == 0
    out = capsys.readouterr().out
    assert "my on 2 H200: 32 responses a step" in out
    assert "1. " in out
    assert "samples/s" in out
    assert "(the baseline)" in out
    assert "GB of a GPU, of 126.9 GB that can be filled: generation" in out
    assert "wrote c.toml: stretto train my.toml --overrides c.toml" in out
    written = tomllib.loads((tmp_path / "c.toml").read_text())
    assert written["runtime"] == "local"
    assert written["cluster"]["processes"][0]["roles"][0] == "learner"


def test_public_models_are_planned_for_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    experts = ["memory", "openai/gpt-oss-20b"]
    plan = ["plan", "tiny", "--gpus", "2", "--gpu", "B200", "--minutes", "0.01", "--model-shape"]
    for arguments, facts in (
        (experts, ["20.91B parameters a model", "334.6 GB"]),  # 16 bytes a parameter
        (["memory", "google/gemma-3-4b-it", "--gpus", "8"], ["Memory of each of 8 GPUs"]),
        (["train", "tiny", "--model.name", "Qwen/Qwen3-8B", "--dry-run"], ["8.191B parameters"]),
        ([*plan, "meta-llama/Llama-3.2-1B-Instruct"], ["tiny on 2 B200", "1. "]),
    ):
        assert stretto(arguments) == 0
        out = capsys.readouterr().out
        assert [fact for fact in facts if fact not in out] == []
    assert stretto([*experts, "--gpus", "8"]) == 2
    assert "'openai/gpt-oss-20b' has a mixture of experts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tiny"], "--gpus 0: give 1 or more"),
        (["tiny", "--gpu", "b2000"], "unknown GPU 'b2000'"),
        (["tiny", "--gpus", "2", "--gpu", "h1000"], "unknown GPU 'h1000'"),
        (["tiny", "--gpus", "2", "--model-shape", "qwen"], "unknown model 'qwen'"),
        (["tiny", "--gpus", "2", "--minutes", "-1"], "must be greater than or equal to 0"),
        (
            ["tiny", "--gpus", "2", "--response-tokens", "0", "0"],
            "error: --response-tokens 0.0: must be greater than 0\n",
        ),
        (
            ["tiny", "--gpus", "2", "--response-tokens", "9", "3"],
            "error: --response-tokens 9 3: a lognormal is fitted to its median and either p95",
        ),
        (["nothing", "--gpus", "2"], "there is no recipe 'nothing'"),
    ],
)
def test_the_command_refuses(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stretto(["plan", *options]) == 2
    assert message in capsys.readouterr().err


def test_options_of_the_command_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    (tmp_path / "my.toml").write_text(recipes.dump(PPO))
    options = ["--gpus", "2", "--gpu", "h200", "--rollout.batch", "16", "--write", "c.toml"]
    assert stretto(["plan", "my.toml", *options]) == 0
    trained = overlaid(recipes.load("my.toml"), "c.toml")
    assert trained.rollout.batch == 16
    capsys.readouterr()
    assert stretto(["plan", "my.toml", "--gpus", "2", "--write", "absent/c.toml"]) == 2
    assert capsys.readouterr().out == ""  # before the search


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_a_written_plan_is_taken_by_train_as_printed(
    gpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    options = ["--gpus", gpus, "--minutes", "0.02", "--rollout.batch", "32", "--write", "c.toml"]
    assert stretto(["plan", "tiny", *options]) == 0
    command = capsys.readouterr().out.splitlines()[-1].partition(": stretto ")[2]
    assert command == "train tiny --overrides c.toml"
    assert stretto([*command.split(), "--dry-run"]) == 0
    assert overlaid(recipes.load("tiny"), "c.toml").rollout.batch == 32


@pytest.mark.parametrize(
    ("recipe", "options", "fact"),
    [
        ("gsm8k", ["--model-shape", "qwen2.5-7b"], "--task.name"),
        ("tiny", ["--model-shape", "qwen2.5-7b"], "--model.name"),
    ],
)
def test_a_plan_that_train_would_refuse_is_not_written(
    recipe: str,
    options: list[str],
    fact: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert stretto(["plan", recipe, "--gpus", "16", *options, "--write", "c.toml"]) == 2
    said = capsys.readouterr()
    assert fact in said.err
    assert said.out == ""  # before the search
    assert not (tmp_path / "c.toml").exists()


def test_every_variant_has_its_schedule() -> None:
    found = variants_of(ScheduleConfig())
    assert tuple(found) == PLANNED
    assert found["async-overcommit"].knobs.lag == 1
    assert found["async-overcommit"].knobs.overcommit == "auto"
    assert "h100" in GPUS


# -- measured figures ------------------------------------------------------------------------------


def test_a_calibration_is_what_plans_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    found = calibrate("tiny", "here.toml", sizes=SMALL_SIZES, command="a test", say=told.append)
    assert read_hardware("here.toml") == found
    for figures in (astuple(found.gpu), astuple(found.links), tuple(dict(found.assumed).values())):
        numbers = [value for value in figures if not isinstance(value, str)]
        assert all(math.isfinite(value) and value >= 0 for value in numbers)
    assert min(astuple(found.gpu)[1:]) > 0
    measured = tomllib.loads(Path("here.toml").read_text())["measured"]
    assert (measured["command"], measured["model"], measured["dtype"]) == (
        "a test",
        "tiny",
        "float32",
    )
    kinds = [point["kind"] for point in measured["points"]]
    assert len(kinds) == 12
    assert [line.split()[0] for line in told if line.startswith("  ")][: len(kinds)] == kinds
    options = ["--response-tokens", "1", "4", "--minutes", "0.01", "--workers", "1"]
    assert stretto(["plan", "tiny", "--gpus", "2", "--hardware", "here.toml", *options]) == 0
    assert f"tiny on 2 {found.gpu.name}: " in capsys.readouterr().out


def test_the_command_calibrates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        calibrating,
        "calibrate",
        lambda config, file, *, command, say: asked.append((config.model.name, file, command)),
    )
    assert stretto(["plan", "tiny", "--calibrate", "my box.toml"]) == 0
    assert asked == [("tiny", "my box.toml", "stretto plan tiny --calibrate 'my box.toml'")]
    assert "stretto plan tiny --gpus N --hardware my box.toml" in capsys.readouterr().out
