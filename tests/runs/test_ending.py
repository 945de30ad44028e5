"""However a run ends, what it has learned is saved, whole or not at all."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

import stretto
from helpers import full_beyond, llama
from raising import raises
from run_helpers import Notes, length, settings, supervised, weights, write_rows
from stretto import runs, signals
from stretto.api.training import Begun, execute
from stretto.assembly.run_models import Overrides
from stretto.cli.main import main
from stretto.config import Config, RewardModelConfig, SftConfig, recipes
from stretto.errors import (
    LearnerError,
    OutOfMemoryError,
    RewardError,
    StateError,
    StorageError,
)
from stretto.models.load import load_tokenizer, save_model
from stretto.observe import Progress, RunDirectory, Sample
from stretto.runs import finetuning
from stretto.training.learner import PolicyLearner
from stretto.training.trained import Gate, LearningRate, TrainedModel, end_updates

ENDS: list[BaseException] = [
    OSError(errno.ENOSPC, "No space left on device"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ZeroDivisionError("division by zero"),
    SystemExit(3),
    KeyboardInterrupt(),
]


class End(Notes):
    """Raises once the records of a step are written."""

    def __init__(self, step: int, error: BaseException) -> None:
        super().__init__()
        self._at, self._error = step, error

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        if step == self._at:
            raise self._error


def reinforce(
    tiny_folder: Path,
    out: Path,
    display: Progress,
    *,
    resume: bool = False,
    **changes: Any,
) -> RunDirectory:
    """A run in ``out``, which may end otherwise."""
    given = Overrides(functions={"length": length})
    config = settings(tiny_folder, **{"reward": {"sources": ("length",)}, **changes})
    run_dir = RunDirectory(out) if resume else RunDirectory.create(out.parent, "run", config)
    if not resume:
        run_dir.path.rename(out)
        run_dir = RunDirectory(out)
    runs.train(config, run_dir=run_dir, resume=resume, progress=display, overrides=given)
    return run_dir


@pytest.fixture(scope="module")
def two_steps(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What is learned in two steps."""
    out = tmp_path_factory.mktemp("runs") / "two"
    return weights(reinforce(tiny_folder, out, Notes(), steps=2))


def assert_equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("error", ENDS, ids=lambda e: type(e).__name__)
def test_whatever_ends_a_run_leaves_what_was_learned(
    error: BaseException, two_steps: dict[str, Tensor], tiny_folder: Path, tmp_path: Path
) -> None:
    display, run_dir = End(2, error), RunDirectory(tmp_path / "run")
    with pytest.raises(type(error)):
        reinforce(tiny_folder, run_dir.path, display, steps=9)
    assert_equal(weights(run_dir), two_steps)
    said, where = display.notes[-2:]
    reason = {
        KeyboardInterrupt: "",
        SystemExit: " (SystemExit: 3)",
        OSError: " (OSError: [Errno 28] No space left on device)",
        torch.OutOfMemoryError: " (out of memory)",
    }.get(type(error), f" ({type(error).__name__}: {error})")
    assert said == f"stopped after step 2{reason}; saving the model as it is now"
    assert where == f"the model is saved in {run_dir.model}"
    assert sorted(p.name for p in run_dir.path.iterdir()) == [
        "checkpoints",
        "config.toml",
        "flight.log",
        "metrics.jsonl",
        "model",
        "rollouts.jsonl",
        "samples.jsonl",
        "trace.json",
    ]


@pytest.mark.parametrize("preset", ["sync", "async"])
def test_a_role_that_fails_leaves_what_was_learned(
    preset: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule: dict[str, Any] = {"schedule": {"preset": preset}}
    two = weights(reinforce(tiny_folder, tmp_path / "two", Notes(), steps=2, **schedule))
    learn, calls = PolicyLearner.train, list[int]()

    def failing(self: PolicyLearner, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return learn(self, batch)

    monkeypatch.setattr(PolicyLearner, "train", failing)
    with pytest.raises(torch.OutOfMemoryError):
        reinforce(tiny_folder, tmp_path / "run", Notes(), steps=9, **schedule)
    assert_equal(weights(RunDirectory(tmp_path / "run")), two)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"
        ),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_a_memory_that_is_used_up_is_said_with_what_takes_less(
    error: Exception, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn, calls = PolicyLearner.train, list[int]()

    def failing(self: PolicyLearner, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return learn(self, batch)

    monkeypatch.setattr(PolicyLearner, "train", failing)
    config = settings(tiny_folder, reward={"sources": ("length",)}, out=str(tmp_path), steps=9)
    with pytest.raises(OutOfMemoryError) as caught:
        stretto.train(config, reward=length, rollout={"batch": 32}, progress=Notes())
    said = str(caught.value)
    what = f" ({error})" if str(error) else ""
    assert said.startswith(f"out of memory{what}. Less is taken with training__")
    for option in (
        "training__microbatch_tokens=256",
        "model__gradient_checkpointing='on'",
        "model__lora_rank=16",
        "rollout__slots=8",
    ):
        assert option in said
    assert "\n" not in said
    assert (tmp_path / "run-001" / "model").is_dir()


def test_weights_of_half_an_update_are_not_saved(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints: dict[str, Any] = {"observe": {"checkpoint_every": 1}}
    run_dir = reinforce(tiny_folder, tmp_path / "run", Notes(), steps=1, **checkpoints)
    former = weights(run_dir)

    step, calls = torch.optim.AdamW.step, list[int]()

    def broken(self: torch.optim.AdamW, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # of the actor, in the second step after the resumption
            raise torch.OutOfMemoryError("in the midst of it")
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)
    notes = Notes()
    with pytest.raises(torch.OutOfMemoryError):
        reinforce(tiny_folder, run_dir.path, notes, resume=True, steps=9, **checkpoints)
    assert notes.notes[-1] == (
        "the model is not saved, as an update of its weights was broken off half-way"
    )
    assert_equal(weights(run_dir), former)


def test_records_that_cannot_be_written_end_the_run_in_one_line(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No file may have more than 40,000 bytes, but those of the model: a few steps of the trace."""
    config = settings(tiny_folder, steps=99, out=str(tmp_path), observe={"progress": "plain"})
    (tmp_path / "full.toml").write_text(recipes.dump(config))

    def where_there_is_room(*args: Any) -> None:
        with full_beyond(1 << 40):
            save_model(*args)

    monkeypatch.setattr("stretto.training.trained.save_model", where_there_is_room)
    with full_beyond(40_000):
        assert main(["train", str(tmp_path / "full.toml")]) == 2
    printed = capsys.readouterr()
    run_dir = RunDirectory.open(tmp_path / "full-001")
    assert printed.err.startswith(f"stretto: error: cannot write '{run_dir.path}/")
    assert "File too large; make room there" in printed.err
    assert f"the model is saved in {run_dir.model}" in printed.out
    steps = len(run_dir.read_metrics())
    assert 0 < steps < 99
    for file in (run_dir.metrics_file, run_dir.samples_file, run_dir.rollouts_file):
        assert file.read_bytes().endswith(b"}\n")
        assert all(json.loads(line) for line in file.read_text().splitlines())
    assert json.loads(run_dir.trace.path.read_text())
    assert len(run_dir.trace.read().steps) >= steps


# -- supervised training, and TRL's trainer ------------------------------------------------------


def supervised_config(kind: type[Any], tiny_folder: Path, folder: Path) -> Any:
    sides = {"completion": "ab"} if kind is SftConfig else {"chosen": "ab", "rejected": "c"}
    file = write_rows(folder, [{"prompt": f"{i}>", **sides} for i in range(8)])
    training = {"lr_schedule": "constant"}
    return supervised(kind, tiny_folder, file, training=training, steps=3)


@pytest.mark.parametrize("error", [ENDS[0], ENDS[-1]], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    ("kind", "train"),
    [(SftConfig, finetuning.sft), (RewardModelConfig, finetuning.train_reward_model)],
    ids=["sft", "reward"],
)
def test_whatever_ends_supervised_training_leaves_what_was_learned(
    kind: type[Any],
    train: Callable[..., Any],
    error: BaseException,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    config = supervised_config(kind, tiny_folder, tmp_path)
    run, two = (RunDirectory.create(tmp_path, name, config) for name in ("run", "two"))
    display = End(2, error)
    with pytest.raises(type(error)):
        train(config, run_dir=run, progress=display)
    train(config.model_copy(update={"steps": 2}), run_dir=two, progress=Notes())
    assert_equal(weights(run), weights(two))
    assert display.notes[-1] == f"the model is saved in {run.model}"


@pytest.mark.parametrize("half", [False, True], ids=["before an update", "half an update"])
def test_updates_of_supervised_training_are_saved_if_they_are_whole(
    half: bool, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = supervised_config(SftConfig, tiny_folder, tmp_path)
    run, two = (RunDirectory.create(tmp_path, name, config) for name in ("run", "two"))
    owner: Any = torch.optim.AdamW if half else TrainedModel
    method, notes, calls = "step" if half else "update", Notes(), list[int]()
    done = getattr(owner, method)

    def broken(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError
        return done(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, broken)
        with pytest.raises(MemoryError):
            finetuning.sft(config, run_dir=run, progress=notes)
    if half:
        assert "broken off half-way" in notes.notes[-1]
        assert not run.model.exists()
        return
    assert [step["step"] for step in run.read_metrics()] == [0, 1, 2]
    finetuning.sft(config.model_copy(update={"steps": 2}), run_dir=two, progress=Notes())
    assert_equal(weights(run), weights(two))


def test_ctrl_c_in_an_update_waits_for_its_end(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = torch.optim.AdamW.step, list[int]()

    def pressed(self: torch.optim.AdamW, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self, *args)

    config = supervised_config(SftConfig, tiny_folder, tmp_path)
    run, two = (RunDirectory.create(tmp_path, name, config) for name in ("run", "two"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", pressed)
        with pytest.raises(KeyboardInterrupt):
            finetuning.sft(config, run_dir=run, progress=Notes())
    finetuning.sft(config.model_copy(update={"steps": 2}), run_dir=two, progress=Notes())
    assert_equal(weights(run), weights(two))


# -- an update that is under way -----------------------------------------------------------------


def test_the_end_waits_for_an_update_and_lets_none_follow() -> None:
    gate, inside, go_on = Gate(), threading.Event(), threading.Event()

    def update() -> None:
        with gate.passing():
            inside.set()
            go_on.wait()

    thread = threading.Thread(target=update)
    thread.start()
    inside.wait()
    assert not gate.close(0.01)  # it is still under way
    go_on.set()
    thread.join()
    assert gate.close(0.01)
    with raises(LearnerError, "updates-ended"), gate.passing():
        pass


def test_a_model_can_be_trained_again_after_a_run() -> None:
    model, config = llama(), Config().training
    trained = TrainedModel(model, LearningRate(1e-3, 2), config)
    assert end_updates(model)
    with raises(LearnerError, "updates-ended"):
        trained.update()
    TrainedModel(model, LearningRate(1e-3, 2), config).update()
    assert end_updates(llama())  # that nobody trains


def live_parameters() -> int:
    return sum(type(each) is nn.Parameter for each in gc.get_objects())


@pytest.mark.parametrize("preset", ["sync", "stretto"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_leaves_no_models_behind(
    preset: str, fails: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    """Without a collection of reference cycles, which would come after the next run's models."""

    def score(completions: list[str]) -> list[float]:
        return [float(len(each)) for each in completions if not fails]

    config = settings(tiny_folder, schedule={"preset": preset})
    gc.collect()
    before = live_parameters()
    gc.disable()
    try:
        with suppress(RewardError):
            stretto.train(config, reward=score, out=str(tmp_path))
        assert live_parameters() == before
    finally:
        gc.enable()


# -- saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device"),
    ],
    ids=["OSError", "SafetensorError"],
)
@pytest.mark.parametrize("former", [False, True])
def test_a_save_that_fails_leaves_the_former_model_or_none(
    former: bool,
    error: Exception,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, tokenizer, model = tmp_path / "model", load_tokenizer(tiny_folder), llama(seed=1)
    if former:
        save_model(llama(seed=2), tokenizer, folder)
    before = {path.name: path.read_bytes() for path in folder.rglob("*")}

    def half(self: PreTrainedModel, to: Path, **_: Any) -> None:
        self.config.save_pretrained(to)
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", half)
    with pytest.raises(StorageError, match=r"cannot write '.*model': .*No space left on device"):
        save_model(model, tokenizer, folder)
    assert {path.name: path.read_bytes() for path in folder.rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if former else [])


def test_a_saved_model_takes_the_place_of_the_former_one_whole(
    tiny_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder, tokenizer = tmp_path / "model", load_tokenizer(tiny_folder)
    save_model(llama(seed=2), tokenizer, folder)
    (folder / "model-00002-of-00002.safetensors").write_text("of a larger model")
    model = llama(seed=1)
    save_model(model, tokenizer, folder)
    assert not list(folder.glob("*00002*"))
    found = AutoModelForCausalLM.from_pretrained(folder)
    assert_equal(dict(found.named_parameters()), dict(model.named_parameters()))


# -- signals -------------------------------------------------------------------------------------


def test_sigterm_ends_a_call_from_python_as_ctrl_c_does(tiny_folder: Path, tmp_path: Path) -> None:
    class Terminate(Notes):
        def step(self, step: int, *_: Any) -> None:
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    config, display = settings(tiny_folder, steps=10_000, out=str(tmp_path)), Terminate()
    with pytest.raises(KeyboardInterrupt) as stopped:
        stretto.train(config, reward=length, progress=display)
    assert isinstance(stopped.value, signals.Terminated)
    assert stopped.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    run_dir = RunDirectory.open(tmp_path / "run-001")
    assert display.notes[-2:] == [
        f"the model is saved in {run_dir.model}",
        f"stopped; what was done so far is in {run_dir.path}; the newest checkpoint in "
        f"{run_dir.checkpoints} is of step 2",
    ]
    assert (run_dir.model / "model.safetensors").is_file()


def test_a_stopped_run_without_checkpoints_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    display, never = Notes(), {"observe": {"checkpoint_minutes": 0.0}}
    config = settings(tiny_folder, steps=10_000, out=str(tmp_path), **never)
    stop = lambda step, stats: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        stretto.train(config, reward=length, progress=display, on_step=stop)
    run_dir = RunDirectory.open(tmp_path / "run-001")
    assert display.notes[-1].endswith("; it cannot be resumed, as it has no checkpoint")
    notes = [*display.notes]
    with raises(StateError, "no-checkpoint", run_dir.path):
        execute(Begun(config, run_dir, resuming=True), progress=display)
    assert display.notes == notes


def test_a_signal_while_the_model_is_being_saved_waits(
    two_steps: dict[str, Tensor],
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = PreTrainedModel.save_pretrained

    def slow(self: PreTrainedModel, *args: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return write(self, *args, **more)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", slow)
    with pytest.raises(KeyboardInterrupt):
        reinforce(tiny_folder, tmp_path / "run", Notes(), steps=2)
    assert_equal(weights(RunDirectory(tmp_path / "run")), two_steps)
