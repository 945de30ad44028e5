"""Distillation from several teachers, each of its own prompts."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest

from raising import raises
from rounding import GRADIENT_TERMS, rounding
from run_helpers import assert_same_run, make_teacher, run, settings, write_rows
from scorer_helpers import trained
from stretto.assembly.roles import RoleFactory
from stretto.assembly.run_models import NO_OVERRIDES
from stretto.checks import check_run
from stretto.config import Config, recipes
from stretto.errors import ConfigError, TaskError
from stretto.models.load import load_tokenizer
from stretto.planner.fitting import plan_for
from stretto.planner.replay import Recording
from stretto.runtime.placement import model_scorers
from stretto.saying import silent
from stretto.schedules import schedule
from stretto.types import TrainBatch

TOLERANCE = rounding(GRADIENT_TERMS)
NAMES = ("words", "sums")
"""Of the teachers, in the order of the rows."""
STREAMED = {"preset": "oppo", "overcommit": 0, "chunk_tokens": 2}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("teachers")
    paths = {name: folder / name for name in NAMES}
    for path in paths.values():
        path.mkdir()
    tokenizers = None, trained("bytes")  # the second is a stranger
    made = enumerate(zip(paths.items(), tokenizers, strict=True))
    return {name: str(make_teacher(path, n, other)) for n, ((name, path), other) in made}


def of_sources(
    tiny_folder: Path, rows: Path, teachers: Any, sources: Sequence[Any] = NAMES, **sections: Any
) -> Config:
    """A run whose prompts name their teachers in turn, in the column 'source'."""
    data = [{"prompt": f"{i} + {i}", "source": s} for i, s in enumerate([*sources, *sources])]
    several = isinstance(teachers, dict)
    given: dict[str, Any] = {
        "algorithm": {"name": "distill", "teachers" if several else "teacher": teachers},
        "reward": {"sources": (), "missing_eos": "off"},
        "rollout": {"samples_per_prompt": 2, "batch": 8},
        "task": {
            "kind": "dataset",
            "name": write_rows(rows, data),
            "columns": {"teacher": "source"},
            "settings": {},
            "shuffle": False,
        },
    }
    return settings(tiny_folder, **given, **sections)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[TrainBatch]:
    """Of all steps from here on."""
    recorded: list[TrainBatch] = []
    collect = schedule.train_batch

    def recording(*args: Any) -> TrainBatch:
        recorded.append(collect(*args))
        return recorded[-1]

    monkeypatch.setattr(schedule, "train_batch", recording)
    return recorded


@pytest.mark.parametrize("how", [{}, STREAMED], ids=["whole", "streamed"])
def test_each_response_has_the_log_probs_of_its_own_teacher(
    how: dict[str, Any],
    tiny_folder: Path,
    teachers: dict[str, str],
    tmp_path: Path,
    batches: list[TrainBatch],
) -> None:
    """As in runs with that teacher alone, whose first step has the same responses."""
    for taught_by in (teachers, *teachers.values()):
        config = of_sources(tiny_folder, tmp_path, taught_by, steps=1, schedule=dict(how))
        run(config, tmp_path)
    both, *alone = batches
    order = np.argsort(both.ids)
    tokens = both.split_sampled(both.tokens)
    for i in order.tolist():
        single = alone[int(both.prompt_ids[i]) % 2]
        (row,) = np.flatnonzero(single.ids == both.ids[i])
        np.testing.assert_array_equal(tokens[i], single.split_sampled(single.tokens)[row])
        got = both.split_sampled(both.per_token["logprobs"])[i]
        want = single.split_sampled(single.per_token["logprobs"])[row]
        np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE)
    first, second = (b.per_token["logprobs"] for b in alone)
    assert np.isfinite(first).all()
    assert np.isposinf(second).any()


@pytest.mark.parametrize("layout", [{"fsdp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.slow)])
def test_teachers_in_processes_teach_the_same(
    layout: dict[str, int], tiny_folder: Path, teachers: dict[str, str], tmp_path: Path
) -> None:
    """One of them divided, so exactly that weights agree but for rounding."""
    schedule: dict[str, Any] = {"schedule": STREAMED}
    same = copy.deepcopy(schedule)
    here, _ = run(of_sources(tiny_folder, tmp_path, teachers, **same), tmp_path / "here")
    role = f"teacher-{NAMES[0]}"
    place = {"roles": [role], "ranks": 2, "layout": {role: layout}}
    cluster: dict[str, Any] = {"runtime": "local", "cluster": {"processes": [place]}}
    config = of_sources(tiny_folder, tmp_path, teachers, **schedule, **cluster)
    there, _ = run(config, tmp_path / "there")
    assert_same_run(here, there, exact=False)


def test_teachers_are_roles_and_take_memory(
    tiny_folder: Path, teachers: dict[str, str], tmp_path: Path
) -> None:
    config = of_sources(tiny_folder, tmp_path, teachers)
    roles = [f"teacher-{name}" for name in NAMES]
    assert model_scorers(config.algorithm, config.reward) == roles
    assert set(plan_for(config.model, config.algorithm).mixed) == {"actor", *roles}
    run_dir, _ = run(config, tmp_path)
    cluster = Recording.read(run_dir.path).cluster()
    assert {s.name: s.kind for s in cluster.scorers} == dict.fromkeys(roles, "logprobs")
    first, second = (s.prompts for s in cluster.scorers)
    assert (first[0], first[1], second[1]) == (0.0, second[0], 1.0)
    assert first[1] == pytest.approx(0.5, abs=0.2)  # by tokens


@pytest.mark.parametrize(
    ("sources", "code", "facts"),
    [
        (("words", "poems"), "row-of-unknown-teacher", ["row 1", "poems"]),
        (("words", 3), "row-of-unknown-teacher", ["row 1", "'3'"]),
    ],
)
def test_a_row_of_no_teacher_is_refused_at_the_start_and_by_a_dry_run(
    sources: Sequence[Any],
    code: str,
    facts: list[str],
    tiny_folder: Path,
    teachers: dict[str, str],
    tmp_path: Path,
) -> None:
    config = of_sources(tiny_folder, tmp_path, teachers, sources)
    with raises(TaskError, code, *facts):
        run(config, tmp_path)
    with raises(TaskError, code, *facts):
        check_run(config, ask_hub=False)


def test_a_teachers_tokenizer_is_refused_by_a_dry_run_and_before_its_weights_are_read(
    tiny_folder: Path, teachers: dict[str, str], tmp_path: Path
) -> None:
    """The stranger cannot read an episode's turns."""
    lines = ['"""Turn.', "", "Args:", "    n: Degrees.", '"""', "return n"]
    tool = "def turn(n: int) -> int:\n" + indent("\n".join(lines), "    ")
    (tmp_path / "tools.py").write_text(tool)
    environment = {"sources": (f"{tmp_path / 'tools.py'}:turn",)}
    stranger = shutil.copytree(teachers[NAMES[1]], tmp_path / "stranger")
    both = {NAMES[0]: teachers[NAMES[0]], NAMES[1]: str(stranger)}
    config = of_sources(tiny_folder, tmp_path, both, environment=environment)
    with raises(ConfigError, "teacher-of-other-tokenizer", f"teacher-{NAMES[1]}", "episode"):
        check_run(config, ask_hub=False)
    (stranger / "model.safetensors").write_bytes(b"")
    with raises(ConfigError, "teacher-of-other-tokenizer"):
        RoleFactory(config, silent).teachers(NO_OVERRIDES, load_tokenizer(tiny_folder))


def test_prompts_must_name_their_teachers(
    tiny_folder: Path, teachers: dict[str, str], tmp_path: Path
) -> None:
    """Generated problems have no column that could."""
    algorithm = {"name": "distill", "teachers": teachers}
    with raises(TaskError, "row-without-teacher", "task.columns"):
        run(settings(tiny_folder, algorithm=algorithm), tmp_path)


@pytest.mark.parametrize(
    ("algorithm", "code"),
    [
        ({"name": "distill", "teacher": "t", "teachers": {"a": "t"}}, "teacher-and-teachers"),
        ({"name": "distill", "teachers": {"a b": "t"}}, "teacher-name"),
        ({"name": "distill", "teachers": {"": "t"}}, "teacher-name"),
        ({"name": "grpo", "teachers": {"a": "t"}}, "teacher-without-distill"),
    ],
)
def test_settings_of_teachers_that_contradict_are_refused(
    algorithm: dict[str, Any], code: str
) -> None:
    grouped = {"rollout": {"samples_per_prompt": 2}}
    with raises(ConfigError, code):
        recipes.build({"algorithm": algorithm, **grouped}, "here")
