"""Whole runs of a second, what they leave behind, and displays that note or end them."""

from __future__ import annotations

import json
import os
import signal
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from safetensors.torch import load_file

from stretto import runs
from stretto.config import Config, RewardModelConfig, SftConfig, recipes
from stretto.models.load import load_causal_lm
from stretto.models.tiny import make_tiny
from stretto.observe import RunDirectory, Sample
from stretto.observe.display import Progress
from stretto.planner.measuring import WorkSizes
from stretto.runs.checkpoint import Checkpointer
from stretto.runtime.run import Run
from stretto.schedules.rollout import Rollout, RolloutState
from stretto.types import FinishReason, Prompt
from stretto.workers.forkserver import NAME
from stretto.workers.threads import ThreadExecutor

S = TypeVar("S", SftConfig, RewardModelConfig)

UNTIMED = ("timing_s/", "perf/", "time_s", "utilisation/", "idle_s/")
OF_PROCESSES = ("cluster/", "weight_sync/", "memory/")
"""Metrics that runs over processes have besides."""
SMALL_SIZES = WorkSizes(
    length=16,
    prefill=(32, 64),
    decode=((2, 8), (4, 16)),
    steps=2,
    training=(32, 64),
    product=64,
    copies=(1,),
    moves=(4,),
    repeats=1,
)
"""Of a calibration that takes seconds."""


def worker_of(run: Run, role: str) -> Any:
    """The worker of a role on a thread, for plain calls."""
    executor = run.workers.executors[role]
    assert isinstance(executor, ThreadExecutor)
    return executor.service.worker


def scorers_of(run: Run) -> list[Any]:
    """The workers of all scorers on threads, for plain calls."""
    return [*run.functions, *(worker_of(run, place.role) for place in run.workers.scorers)]


def settings(folder: Path, **sections: Any) -> Config:
    """A run of a second: the tiny recipe, made smaller."""
    small: dict[str, Any] = {
        "steps": 2,
        "threads": 1,
        "warmup_examples": 0,
        "model": {"name": str(folder)},
        "rollout": {"batch": 4, "max_new_tokens": 6},
        "task": {
            "name": "chain_sum",
            "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "size": 0,
        },
        "reward": {"missing_eos_penalty": -1.0},
        "algorithm": {"lam": 0.95, "kl_coef": 0.05, "entropy_coef": 0.0},
        "training": {"lr": 1e-3, "critic_lr": 1e-3, "warmup_steps": 0},
        "observe": {"samples": 100, "progress": "off"},
    }
    data = recipes.load("tiny").model_dump()
    for changes in (small, sections):
        for name, value in changes.items():
            data[name] = data[name] | value if isinstance(value, dict) else value
    return Config.model_validate(data)


def make_teacher(folder: Path, seed: int, tokenizer: Any = None) -> Path:
    """Another tiny model, with a vocabulary that is padded further than that of a student, or with
    another tokenizer.
    """
    make_tiny(folder)
    model: Any = load_causal_lm(folder, torch.float32, torch.device("cpu"))
    torch.manual_seed(seed)
    model.resize_token_embeddings(512 if tokenizer else 272, mean_resizing=False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    if tokenizer:
        tokenizer.save_pretrained(folder)
    return folder


def write_rows(folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "rows.jsonl") -> str:
    """A file of rows."""
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def supervised(kind: type[S], tiny_folder: Path, rows: str, **sections: Any) -> S:
    """A supervised run of a second on rows of a file."""
    small: dict[str, Any] = {
        "model": {"name": str(tiny_folder), "dtype": "float32"},
        "data": {"name": rows, "held_out": 0.25},
        "training": {"lr": 5e-3, "epochs": 1},
        "threads": 1,
        "batch": 8,
    }
    for name, value in sections.items():
        small[name] = small.get(name, {}) | value if isinstance(value, dict) else value
    return kind.model_validate(small)


def run(config: Config, out: Path, progress: Any = None) -> tuple[RunDirectory, runs.TrainResult]:
    run_dir = RunDirectory.create(out, "run", config)
    return run_dir, runs.train(config, run_dir=run_dir, progress=progress or Progress())


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def untimed(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in step.items() if not k.startswith(UNTIMED + OF_PROCESSES)}
        for step in metrics
    ]


def weights(run_dir: RunDirectory, model: str = "model") -> dict[str, torch.Tensor]:
    return load_file(run_dir.path / model / "model.safetensors")


def assert_same_run(a: RunDirectory, b: RunDirectory, *, exact: bool = True) -> None:
    """The same records and weights, bit for bit, or but for rounding."""
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys()
    if exact:
        assert untimed(lines(a.metrics_file)) == untimed(lines(b.metrics_file))
        assert lines(a.samples_file) == lines(b.samples_file)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        return
    for one, two in zip(untimed(a.read_metrics()), untimed(b.read_metrics()), strict=True):
        assert one == pytest.approx(two, rel=1e-3, abs=1e-4)
    tokens = [[(r.id, r.tokens, r.finish) for r in run.read_rollouts()] for run in (a, b)]
    assert tokens[0] == tokens[1]
    assert all(torch.allclose(ours[name], theirs[name], atol=2e-4) for name in ours)


def ended_rollout(
    id_: int, tokens: int = 1, state: RolloutState = RolloutState.TRAINED, **other: Any
) -> Rollout:
    """A rollout with a prompt of three tokens, that was trained on or rejected."""
    made = Rollout(id_, Prompt(id_ + 50, (1, 2, 3), ""), id_)
    made.tokens, made.versions = array("i", [3] * tokens), array("i", [0] * tokens)
    made.logprobs, made.state = array("f", [-1.0] * tokens), state
    made.finish = FinishReason.STOP if state is RolloutState.TRAINED else None
    for name, value in other.items():
        setattr(made, name, value)
    return made


class Notes(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Kill(Progress):
    """Ctrl-C just after the records of a step are written."""

    def __init__(self, step: int) -> None:
        self._at = step

    def step(
        self, step: int, total: int, stats: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        if step == self._at:
            raise KeyboardInterrupt


@contextmanager
def killed_by_ctrl_c() -> Iterator[None]:
    """Expect Ctrl-C, which leaves no more than a kill would: no checkpoint of the last step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "lacks", lambda *_: False)
        with pytest.raises(KeyboardInterrupt):
            yield


class Killer(Progress):
    """Sends a signal to the process of a role after the first step."""

    def __init__(self, role: str, number: int = signal.SIGKILL) -> None:
        super().__init__()
        self.role, self.number, self.done = role, number, False
        self.notes: list[str] = []

    def step(self, *_: Any, **__: Any) -> None:
        if not self.done:
            self.done = True
            os.kill(processes()[self.role], self.number)

    def note(self, line: str) -> None:
        self.notes.append(line)


def processes() -> dict[str, int]:
    """Ids of the run's processes, by the name of their log."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        with suppress(OSError, psutil.NoSuchProcess):  # it may be ending
            log = Path(f"/proc/{child.pid}/fd/2").readlink()
            if child.name() == NAME and log.suffix == ".log":
                found[log.stem] = child.pid
    return found


def length(completions: Sequence[str], **_: Any) -> list[float]:
    """A reward that needs no process of its own."""
    return [float(len(completion)) for completion in completions]
