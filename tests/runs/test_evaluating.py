"""Evaluation while training: figures, the best model, early stops; training stays as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stretto
from helpers import llama
from raising import raises
from run_helpers import (
    Kill,
    Notes,
    ended_rollout,
    killed_by_ctrl_c,
    length,
    lines,
    run,
    settings,
    untimed,
    weights,
)
from stretto import errors, runs
from stretto.assembly.run_models import Overrides
from stretto.config import Config
from stretto.errors import MissingExtraError, RewardError, StorageError
from stretto.models.load import load_tokenizer
from stretto.observe import RunDirectory
from stretto.observe.run_directory import SCORE, TrainResult
from stretto.runs import evaluating
from stretto.runtime.run import Run
from stretto.types import FinishReason, Score

DIVIDED = {"processes": [{"roles": ["learner", "generator", "reference", "critic"], "ranks": 2}]}
WORDS = {"name": "spell_backward", "settings": {}, "size": 50}


def evaluated(tiny_folder: Path, **changes: Any) -> Config:
    """A run with an evaluation every second step."""
    observe = {"eval_every": 2, "eval_prompts": 5, **changes.pop("observe", {})}
    return settings(tiny_folder, **{"steps": 5, "task": WORDS, "observe": observe, **changes})


def evaluations(run_dir: RunDirectory) -> list[dict[str, Any]]:
    """The figures of all evaluations, without times, with the number of the step that has them."""
    found = [m for m in untimed(run_dir.read_metrics()) if SCORE in m]
    return [{k: v for k, v in m.items() if k == "step" or k.startswith("eval/")} for m in found]


def without(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of training."""
    steps = [m for m in metrics if m["step"]]
    return [{k: v for k, v in m.items() if not k.startswith("eval/")} for m in steps]


def scripted(monkeypatch: pytest.MonkeyPatch, scores: Sequence[float]) -> None:
    """Have evaluations find these mean scores, one after the other."""
    left = iter(scores)
    monkeypatch.setattr(evaluating, "figures", lambda *_: {SCORE: next(left)})


# -- training stays as it is ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"runtime": "local"},
        {"schedule": {"weight_sync_interval": 2}, "steps": 4},
        {"rollout": {"engines": 2}},
    ],
    ids=["inline", "local", "two batches a sync", "two engines"],
)
def test_training_is_the_same_with_and_without(
    changes: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    """Weights, rollouts and metrics of training, bit for bit; each evaluation is of its step."""
    config = evaluated(tiny_folder, **changes)
    one, _ = run(config, tmp_path)
    two, _ = run(config.changed_in("observe", eval_every=0), tmp_path)
    ours, theirs = weights(one), weights(two)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert lines(one.rollouts_file) == lines(two.rollouts_file)
    assert lines(one.samples_file) == lines(two.samples_file)
    assert without(untimed(one.read_metrics())) == untimed(two.read_metrics())
    steps = [0, 2, 4, 5] if config.steps == 5 else [0, 2, 4]
    found = evaluations(one)
    assert [(m["step"], m["eval/step"]) for m in found] == [(s, s) for s in steps]
    assert [m["eval/count"] for m in found] == [5] * len(steps)
    assert not (two.path / "model-best").exists()


def test_processes_find_what_threads_find(tiny_folder: Path, tmp_path: Path) -> None:
    config = evaluated(tiny_folder, steps=2)
    one, _ = run(config, tmp_path)
    two, _ = run(config.model_copy(update={"runtime": "local"}), tmp_path)
    assert evaluations(one) == evaluations(two)
    assert one.best() is not None
    assert lines(one.rollouts_file) == lines(two.rollouts_file)


@pytest.mark.parametrize("preset", ["async", "oppo", "stretto"])
def test_schedules_that_overlap_evaluate_too(
    preset: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Figures come some steps later where the learner goes on meanwhile."""
    engines = {"engines": 2} if preset == "stretto" else {}
    config = evaluated(tiny_folder, schedule={"preset": preset}, rollout=engines, steps=6)
    run_dir, result = run(config, tmp_path)
    assert result.steps == 6
    found = evaluations(run_dir)
    assert found[0]["eval/step"] == 0
    assert found[0]["step"] == 0
    assert found[-1]["eval/step"] == found[-1]["step"] == 6
    late = 2 if preset != "oppo" else 0
    assert all(0 <= m["step"] - m["eval/step"] <= late for m in found)
    assert [m["step"] for m in without(run_dir.read_metrics())] == [1, 2, 3, 4, 5, 6]


# -- figures -------------------------------------------------------------------------------------


def test_figures_of_three_answers_by_hand(tiny_folder: Path) -> None:
    """0.5 x task + 2 x other: 0.5, 1.25 and 2; the third has full credit, the second no end."""
    sources = {"sources": ("task", "f.py:other"), "weights": (0.5, 2.0)}
    config = settings(tiny_folder, reward=sources)
    answers = [ended_rollout(-1 - i, 2 * i + 1) for i in range(3)]
    answers[1].finish = FinishReason.LENGTH
    for r, task, other in zip(answers, (0.0, 0.5, 1.0), (0.25, 0.5, 0.75), strict=True):
        for source, value in (("task", task), ("f.py:other", other)):
            r.scores[source] = Score(r.id, source, "reward", np.array([value], np.float32))
    assert evaluating.figures(config, answers) == pytest.approx(
        {
            "eval/score": 1.25,
            "eval/pass@1": 1 / 3,
            "eval/reward/task": 0.5,
            "eval/reward/f.py:other": 0.5,
            "eval/length_mean": 3.0,
            "eval/ended": 2 / 3,
            "eval/count": 3.0,
        }
    )
    nothing = np.array([], np.float32)
    answers[0].scores["task"] = Score(-1, "task", "reward", nothing, "it raised")
    with raises(RewardError, "responses-without-reward"):
        evaluating.figures(config, answers)
    dropping = config.changed_in("reward", on_failure="drop")
    assert evaluating.figures(dropping, answers)["eval/score"] == pytest.approx(1.625)
    with raises(RewardError, "responses-without-reward"):
        evaluating.figures(dropping, answers[:1])


@pytest.mark.parametrize("held_out", [0.0, 0.25], ids=["another seed", "a share"])
def test_the_last_figures_are_those_of_stretto_eval(
    held_out: float, tiny_folder: Path, tmp_path: Path
) -> None:
    warm_up = {"warmup_examples": 900, "warmup_lr": 3e-3, "training": {"lr": 1e-6}}
    task, observe = WORDS | {"held_out": held_out}, {"eval_prompts": 40}
    config = evaluated(tiny_folder, task=task, observe=observe, steps=3, **warm_up)
    run_dir, result = run(config, tmp_path)
    measured = stretto.evaluate(run_dir.path, samples=40)
    last = result.stats
    assert last[SCORE] == pytest.approx(measured.mean_score)
    assert last["eval/pass@1"] == measured.pass_at_1
    assert last["eval/length_mean"] == measured.mean_tokens
    assert last["eval/ended"] == measured.ended
    assert measured.mean_score > 0


def test_held_out_prompts_are_scored_by_the_runs_own_functions(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Every other prompt; without a verifier there is no pass@1. Answers are the same prompts'."""
    rows = [{"prompt": f"{n}?"} for n in range(40)]
    asked: list[tuple[list[str], list[float]]] = []

    def judge(prompts: list[str], completions: list[str]) -> list[float]:
        found = [float(len(text)) for text in completions]
        asked.append((prompts, found))
        return found

    result = stretto.train(
        settings(tiny_folder, steps=2, reward={"missing_eos": "off"}),
        dataset=rows,
        reward=judge,
        out=str(tmp_path),
        task__held_out=0.5,
        observe={"eval_every": 1, "eval_prompts": 7},
        rollout__batch=4,
    )
    held_out = [call for call in asked if len(call[0]) == 7]
    trained = {prompt for prompts, _ in asked if len(prompts) == 4 for prompt in prompts}
    assert {tuple(prompts) for prompts, _ in held_out} == {tuple(held_out[0][0])}
    assert not trained & {*held_out[0][0]}
    figures = [m for m in result.history if SCORE in m]
    assert [m[SCORE] for m in figures] == [sum(scores) / 7 for _, scores in held_out]
    assert "eval/pass@1" not in figures[0]


# -- the best model ------------------------------------------------------------------------------


def brought(tiny_folder: Path, out: Path, **changes: Any) -> tuple[TrainResult, list[Any]]:
    """A run of a model that is an object, and its weights after each step."""
    tokenizer = load_tokenizer(tiny_folder)
    model = llama(vocabulary=len(tokenizer))
    after = [{n: p.clone() for n, p in model.state_dict().items()}]

    def keep(step: int, stats: Any) -> None:
        after.append({n: p.clone() for n, p in model.state_dict().items()})

    task = WORDS | {"max_prompt_tokens": 200}
    config = evaluated(tiny_folder, task=task, **changes)
    result = stretto.train(config, model=model, tokenizer=tokenizer, out=str(out), on_step=keep)
    return result, after


@pytest.mark.parametrize("preset", ["sync", "async"])
def test_the_best_model_is_that_of_its_step(
    preset: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the learner has gone on when it is known that it is the best."""
    scripted(monkeypatch, [0.5, 0.75, 0.75, 0.25, 0.25, 0.25])
    result, after = brought(tiny_folder, tmp_path, steps=8, schedule={"preset": preset})
    best, found = result.best, [m for m in result.history if SCORE in m]
    assert best is not None
    assert [m[SCORE] for m in found][:2] == [0.5, 0.75]
    assert (best.step, best.score) == (found[1]["eval/step"], 0.75)
    assert best.step in (2, 3)
    saved = weights(RunDirectory(result.run_dir), "model-best")
    assert all(torch.equal(saved[name], after[best.step][name]) for name in saved)
    last = weights(RunDirectory(result.run_dir))
    assert any(not torch.equal(saved[name], last[name]) for name in saved)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"lora_rank": 2}},
        {"runtime": "local"},
        pytest.param({"runtime": "local", "cluster": DIVIDED}, marks=pytest.mark.slow),
    ],
    ids=["lora", "local", "shards"],
)
def test_the_best_model_of_adapters_and_of_processes(
    changes: dict[str, Any],
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is what a run of so many steps saves."""
    scripted(monkeypatch, [0.0, 1.0, 0.5])
    whole, result = run(evaluated(tiny_folder, steps=4, **changes), tmp_path)
    monkeypatch.undo()
    short, _ = run(evaluated(tiny_folder, steps=2, **changes), tmp_path)
    assert result.best is not None
    assert result.best.step == 2
    assert json.loads(whole.best_file.read_text()) == {"step": 2, "eval/score": 1.0}
    ours, theirs = weights(whole, "model-best"), weights(short)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_model_that_cannot_be_written_leaves_the_one_before_it(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model and record stay together; the next evaluation is compared with that one."""
    scripted(monkeypatch, [0.5, 0.9, 0.4, 0.7])
    written, save = list[dict[str, Any]](), Run.save_staged
    notes, config = Notes(), evaluated(tiny_folder, steps=6)
    run_dir = RunDirectory.create(tmp_path, "run", config)

    def failing(running: Run, use: str, folder: Path) -> None:
        save(running, use, folder)
        if run_dir.best_file.is_file():
            written.append(json.loads(run_dir.best_file.read_text()))
        if len(written) == 1:
            raise StorageError("the disk is full", "cannot-write")

    monkeypatch.setattr(Run, "save_staged", failing)
    runs.train(config, run_dir=run_dir, progress=notes)
    assert written == [{"step": 0, "eval/score": 0.5}] * 2
    assert json.loads(run_dir.best_file.read_text()) == {"step": 6, "eval/score": 0.7}
    assert sum("The model of the best evaluation is not kept" in n for n in notes.notes) == 1


# -- ends ----------------------------------------------------------------------------------------


def test_a_run_ends_when_its_patience_is_spent(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two evaluations after the best one, that of step 1; one as good is not better."""
    scripted(monkeypatch, [1.0, 3.0, 2.0, 3.0])
    notes = Notes()
    every = {"eval_every": 1, "eval_patience": 2}
    run_dir, result = run(evaluated(tiny_folder, steps=9, observe=every), tmp_path, notes)
    assert result.steps == 3
    assert result.best is not None
    assert result.best.step == 1
    why = "no evaluation of the last 2 was better than that of step 1; observe.eval_patience = 2"
    assert result.stopped == why
    assert f"stopped after step 3: {why}" in notes.notes
    monkeypatch.undo()
    short, _ = run(settings(tiny_folder, steps=3, task=WORDS), tmp_path)
    ours, theirs = weights(run_dir), weights(short)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step-000003"]
    scripted(monkeypatch, [2.0, 1.0])  # counted from the two before
    again = stretto.resume(run_dir.path, observe__eval_patience=4)
    assert (again.steps, again.best) == (5, result.best)
    assert again.stopped.startswith("no evaluation of the last 4 was better than that of step 1")


@pytest.mark.parametrize("changes", [{}, {"runtime": "local"}], ids=["inline", "local"])
def test_a_function_that_says_stop_ends_the_run_in_order(
    changes: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    """The model is saved, the result is there, and the run can go on as if nothing had been."""
    whole, _ = run(settings(tiny_folder, steps=4, **changes), tmp_path)
    seen: list[tuple[int, float]] = []

    def on_step(step: int, stats: Any) -> Any:
        seen.append((step, stats["objective/scores"]))
        return "stop" if step == 2 else None

    config = settings(tiny_folder, steps=4, **changes)
    result = stretto.train(config, out=str(tmp_path), on_step=on_step)
    assert (result.steps, result.stopped) == (2, "on_step returned 'stop'")
    assert seen == [(m["step"], m["objective/scores"]) for m in result.history]
    assert (result.model / "config.json").is_file()
    again = stretto.resume(result.run_dir)
    assert (again.steps, again.stopped) == (4, "")
    ours, theirs = weights(RunDirectory(result.run_dir)), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_resumed_run_evaluates_each_step_once(tiny_folder: Path, tmp_path: Path) -> None:
    """Interrupted after the records of an evaluation, with a checkpoint before and behind it."""
    observe = {"checkpoint_every": 1}
    whole, _ = run(evaluated(tiny_folder, steps=6, observe=observe), tmp_path)
    for step in (2, 3):
        config = evaluated(tiny_folder, steps=6, observe=observe)
        run_dir = RunDirectory.create(tmp_path, "cut", config)
        with killed_by_ctrl_c():
            runs.train(config, run_dir=run_dir, progress=Kill(step))
        runs.train(config, run_dir=run_dir, resume=True, progress=Notes())
        assert evaluations(run_dir) == evaluations(whole)
        best, theirs_best = run_dir.best(), whole.best()
        assert best is not None
        assert theirs_best is not None
        assert (best.step, best.score) == (theirs_best.step, theirs_best.score)
        ours, theirs = weights(run_dir), weights(whole)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_evaluations_that_a_resumed_run_repeats_do_not_wear_out_its_patience(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is of step 3, the best evaluation of step 5."""
    observe = {"eval_every": 1, "eval_patience": 1, "checkpoint_every": 3}
    config = evaluated(tiny_folder, steps=9, observe=observe)
    run_dir = RunDirectory.create(tmp_path, "cut", config)
    scripted(monkeypatch, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    with killed_by_ctrl_c():
        runs.train(config, run_dir=run_dir, progress=Kill(5))
    scripted(monkeypatch, [4.0, 5.0, 4.5])
    result = runs.train(config, run_dir=run_dir, resume=True, progress=Notes())
    assert result.steps == 6
    assert result.stopped.startswith("no evaluation of the last 1 was better than that of step 5")


# -- results and settings ------------------------------------------------------------------------


def test_a_result_has_the_history(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, result = run(evaluated(tiny_folder, steps=2), tmp_path)
    assert result.run_dir == run_dir.path
    assert result.history == lines(run_dir.metrics_file)
    frame = result.frame()
    assert list(frame.index) == [0, 1, 2]
    assert TrainResult(0, {}, tmp_path / "none").frame().index.name == "step"
    assert frame["eval/score"].notna().tolist() == [True, False, True]
    assert frame["objective/scores"].tolist()[1:] == [
        m["objective/scores"] for m in result.history[1:]
    ]
    monkeypatch.setattr(errors, "is_installed", lambda library: library != "pandas")
    with raises(MissingExtraError, "missing-library", "pandas"):
        result.frame()


def test_rows_without_held_out_prompts_say_so(tiny_folder: Path, tmp_path: Path) -> None:
    notes, functions = Notes(), {"length": length}
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(4)))
    task = {"kind": "dataset", "name": str(rows), "settings": {}}
    config = evaluated(tiny_folder, task=task, steps=1, reward={"sources": ("length",)})
    run_dir = RunDirectory.create(tmp_path, "run", config)
    given = Overrides(functions=functions)
    runs.train(config, run_dir=run_dir, progress=notes, overrides=given)
    (said,) = [line for line in notes.notes if line.startswith("evaluated every")]
    assert said == (
        f"evaluated every 2 steps on 4 prompts of {rows}; 4 of 4 prompts (100.0%) are asked in "
        "training"
    )
