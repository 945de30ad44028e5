"""TRL's checkpoint folders, saved adapters, and the rows in a run's folder."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

import stretto
from raising import raises
from run_helpers import lines
from stretto import GRPOConfig, GRPOTrainer
from stretto.errors import ConfigError, StateError

ROWS = [{"prompt": f"say {word}", "answer": word} for word in ("cat", "dog", "horse", "cow")]
TOKENS = torch.tensor([[3, 40, 5, 60, 7]])


def letters(completions: Sequence[str], **_: Any) -> list[float]:
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def make_trainer(
    folder: Path,
    out: Path,
    rows: Any = ROWS,
    peft: Any = None,
    reward: Any = letters,
    **given: Any,
) -> Any:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "num_iterations": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_strategy": "steps",
        "save_steps": 2,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "use_cpu": True,
        "report_to": "none",
    }
    args = GRPOConfig(str(out), **{**settings, **given})
    return GRPOTrainer(str(folder), reward, args, rows, peft_config=peft)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one: Any, other: Any) -> bool:
    theirs = weights(other)
    return all(torch.equal(p, theirs[name]) for name, p in weights(one).items())


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_checkpoints_are_read_by_from_pretrained_and_resumed(
    schedule: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """A checkpoint has the weights of a run that ends there; one before the newest is resumed."""
    out, how = tmp_path / "out", {"schedule": schedule}
    trainer = make_trainer(tiny_folder, out, save_total_limit=2, **how)
    trainer.train()
    assert sorted(path.name for path in out.glob("checkpoint-*")) == [
        "checkpoint-4",
        "checkpoint-6",
    ]
    assert same(AutoModelForCausalLM.from_pretrained(out / "checkpoint-6"), trainer.model)
    assert lines(out / "checkpoint-4" / "run.json")[0]["run"] == f"../{trainer.run_dir.name}"
    if schedule == "sync":
        shorter = make_trainer(tiny_folder, tmp_path / "shorter", max_steps=4)
        shorter.train()
        assert same(AutoModelForCausalLM.from_pretrained(out / "checkpoint-4"), shorter.model)

    # The run keeps the last step's checkpoint alone; the one to resume from comes back.
    assert [path.name for path in trainer.run_dir.checkpoints.iterdir()] == ["step-000003"]
    resumed = make_trainer(tiny_folder, out, **how)
    output = resumed.train(resume_from_checkpoint=str(out / "checkpoint-4"))
    assert output.run_dir == trainer.run_dir.path
    assert [row["step"] for row in resumed.state.log_history] == [6, 6]
    if schedule == "sync":
        assert same(resumed.model, trainer.model)

    shutil.rmtree(trainer.run_dir.path)
    with raises(StateError, "no-run-of-checkpoint", "checkpoint-4"):
        make_trainer(tiny_folder, out, **how).train(resume_from_checkpoint=out / "checkpoint-4")


def test_a_resume_that_is_refused_leaves_the_newest_checkpoint(
    tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    trainer = make_trainer(tiny_folder, out)
    trainer.train()
    other = make_trainer(tiny_folder, out, learning_rate=1e-3)
    with raises(ConfigError, "resumed-differs", "learning_rate"):
        other.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert [path.name for path in trainer.run_dir.checkpoints.iterdir()] == ["step-000003"]


def test_adapters_are_saved_where_peft_looks(tiny_folder: Path, tmp_path: Path) -> None:
    """peft's model, transformers' and the merged one in its subfolder compute the same."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    saved = tmp_path / "saved"
    make_trainer(tiny_folder, tmp_path / "plain", max_steps=2).save_model(saved)
    assert (saved / "config.json").is_file()
    trainer = make_trainer(tiny_folder, tmp_path / "out", peft=lora)
    trainer.train()
    trainer.save_model(saved)
    with torch.no_grad():
        wanted = trainer.model(TOKENS).logits
        for folder in (saved, tmp_path / "out" / "checkpoint-6"):
            base = AutoModelForCausalLM.from_pretrained(tiny_folder)
            assert (base(TOKENS).logits - wanted).abs().max() > 1e-3
            for model in (
                PeftModel.from_pretrained(base, folder),
                AutoModelForCausalLM.from_pretrained(folder),
                AutoModelForCausalLM.from_pretrained(folder / "merged"),
            ):
                torch.testing.assert_close(model(TOKENS).logits, wanted, rtol=1e-4, atol=1e-5)
        make_trainer(tiny_folder, tmp_path / "plain", max_steps=2).save_model(saved)
        start, again = map(AutoModelForCausalLM.from_pretrained, (tiny_folder, saved))
        assert torch.equal(again(TOKENS).logits, start(TOKENS).logits)


def test_a_runs_folder_is_evaluated_and_keeps_its_rows(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(tiny_folder, tmp_path / "out", max_steps=2, save_strategy="no")
    trainer.train()
    folder = trainer.run_dir.path
    assert lines(folder / "dataset.jsonl") == ROWS
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    found = stretto.evaluate(folder, samples=3, task__columns={"answer": "answer"})
    assert (found.samples, found.rows) == (3, str(folder / "dataset.jsonl"))

    def length(completions: Sequence[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    objects = [{**row, "key": object()} for row in ROWS]
    args = make_trainer(tiny_folder, tmp_path / "other", max_steps=2, save_strategy="no").args
    other: Any = GRPOTrainer(str(tiny_folder), length, args, objects)
    other.train()
    assert "no copy of the rows" in capsys.readouterr().out
    assert not (other.run_dir.path / "dataset.jsonl").exists()


def test_ctrl_c_names_the_call_that_resumes(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint of the last complete step is resumed; no step is taken twice."""

    def stop_third(completions: Sequence[str], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == 2 and not stopped:
            stopped.append(True)
            signal.raise_signal(signal.SIGINT)
        return letters(completions)

    stopped: list[bool] = []
    seldom = {"reward": stop_third, "save_steps": 100}  # so that only the stop writes a checkpoint
    trainer = make_trainer(tiny_folder, tmp_path, **seldom)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    where = str(trainer.run_dir.path)
    call = f"trainer.train(resume_from_checkpoint={where!r}) goes on after step 2"
    assert call in capsys.readouterr().out
    again = make_trainer(tiny_folder, tmp_path, **seldom)
    assert again.train(resume_from_checkpoint=where).steps == 3
    assert [m["step"] for m in again.run_dir.read_metrics()] == [1, 2, 3]
