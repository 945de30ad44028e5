"""Trackers of experiments: by name, with stand-ins for libraries, and by code."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from docs_helpers import blocks
from raising import raises
from run_helpers import lines
from stretto.config import Config, recipes
from stretto.errors import ConfigError, StorageError
from stretto.observe import Recorder, RunDirectory, Sample
from stretto.observe.display import Progress
from stretto.observe.trackers import TrackedRun, open_trackers

SAMPLES = [Sample("2+2?", "4", 0.5, "stop", 2, {"task": 0.5})]


def tracking(*names: str) -> Config:
    return recipes.build({"observe": {"trackers": names}}, "here")


class Notes(Progress):
    """A display that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def two_runs(tracker: str, folder: Path) -> RunDirectory:
    """Log steps 1 and 2, and step 2 again as after a kill."""
    config = tracking(tracker)
    run = RunDirectory.create(folder, "tiny", config)
    with Recorder(config, run, Progress()) as recorder:
        recorder.step(1, {"eval/pass@1": 0.5}, SAMPLES)
        recorder.step(2, {"objective/kl": 0.25})
    with Recorder(config, run, Progress(), resumed_step=1) as recorder:
        recorder.step(2, {"objective/kl": 0.75})
    return run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    for name in ("TRACKIO_PROJECT", "SWANLAB_PROJ_NAME", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return []


def test_trackio_goes_on_with_the_run_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    def init(project: str, name: str, resume: str, config: dict[str, Any]) -> Any:
        calls.append((project, name, resume, config["rollout.batch"]))
        return types.SimpleNamespace(name=name)

    library = types.SimpleNamespace(
        init=init,
        log=lambda metrics, step: calls.append((step, metrics)),
        finish=lambda: calls.append("finish"),
    )
    monkeypatch.setitem(sys.modules, "trackio", library)
    two_runs("trackio", tmp_path)
    assert calls == [
        ("stretto", "tiny-001", "never", 32),
        (1, {"eval/pass@1": 0.5}),
        (2, {"objective/kl": 0.25}),
        "finish",
        ("stretto", "tiny-001", "allow", 32),
        (2, {"objective/kl": 0.75}),
        "finish",
    ]


def test_swanlab_goes_on_with_the_experiment_of_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    def init(**options: Any) -> Any:
        assert options.pop("config")["rollout"]["batch"] == 32
        calls.append(options)
        return types.SimpleNamespace(id="a1b2")

    library = types.SimpleNamespace(
        init=init,
        log=lambda data, step: calls.append((step, data)),
        finish=lambda: calls.append("finish"),
    )
    monkeypatch.setitem(sys.modules, "swanlab", library)
    run = two_runs("swanlab", tmp_path)
    first = {
        "project": "stretto",
        "experiment_name": "tiny-001",
        "logdir": str(run.path / "swanlab"),
    }
    assert calls == [
        first,
        (1, {"eval/pass@1": 0.5}),
        (2, {"objective/kl": 0.25}),
        "finish",
        {**first, "id": "a1b2", "resume": "allow"},
        (2, {"objective/kl": 0.75}),
        "finish",
    ]


def test_mlflow_gets_parameters_once_and_names_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    parameters: dict[str, str] = {}

    def log_params(params: dict[str, str]) -> None:
        assert len(params) <= 100
        assert not parameters.keys() & params.keys()  # MLflow refuses another value
        parameters.update(params)

    def start_run(run_id: str | None, run_name: str) -> Any:
        calls.append((run_id, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="f00"))

    library = types.SimpleNamespace(
        set_experiment=calls.append,
        start_run=start_run,
        log_params=log_params,
        log_metrics=lambda metrics, step: calls.append((step, metrics)),
        end_run=lambda: calls.append("end"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", library)
    two_runs("mlflow", tmp_path)
    assert calls == [
        "stretto",
        (None, "tiny-001"),
        (1, {"eval/pass_1": 0.5}),
        (2, {"objective/kl": 0.25}),
        "end",
        "stretto",
        ("f00", "tiny-001"),
        (2, {"objective/kl": 0.75}),
        "end",
    ]
    assert parameters["rollout.batch"] == "32"
    assert len(parameters) > 100


MINE = """
import json

class Tracker:
    def __init__(self, run):
        self.file = (run.folder / "mine.jsonl").open("a")
        self.put("start", run.name, run.settings["steps"], run.resumed_step)
    def put(self, *what):
        self.file.write(json.dumps(what) + chr(10))
    def log(self, step, metrics):
        self.put(step, metrics)
    def log_samples(self, step, columns, rows):
        self.put(columns, rows)
    def finish(self):
        self.put("finish")
        self.file.close()

class Lost(Tracker):
    def log(self, step, metrics):
        if step == 2:
            raise ConnectionError("no server")
        super().log(step, metrics)

class Closed:
    def __init__(self, run):
        raise OSError("no door")

number = 3
"""


def test_code_by_its_place_is_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tracked_by_me.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    for name in ("tracked_by_me.py:Tracker", "tracked_by_me:Tracker"):
        run = two_runs(name, tmp_path)
        columns = ["reward", "task", "tokens", "finish", "prompt", "response"]
        assert lines(run.path / "mine.jsonl") == [
            ["start", run.name, 100, 0],
            [1, {"eval/pass@1": 0.5}],
            [columns, [[0.5, 0.5, 2, "stop", "2+2?", "4"]]],
            [2, {"objective/kl": 0.25}],
            ["finish"],
            ["start", run.name, 100, 1],
            [2, {"objective/kl": 0.75}],
            ["finish"],
        ]


def test_the_documented_tracker_writes_rewards(tmp_path: Path) -> None:
    """Named in a settings file, from whose folder its path is."""
    (tmp_path / "mine.py").write_text(blocks("observing", "python")[0])
    (tmp_path / "mine.toml").write_text('[observe]\ntrackers = ["mine.py:Csv"]')
    config = recipes.load(tmp_path / "mine.toml")
    run = RunDirectory.create(tmp_path, "tiny", config)
    with Recorder(config, run, Progress()) as recorder:
        recorder.step(1, {"objective/scores": 0.5})
    assert (run.path / "reward.csv").read_text().split() == ["1,0.5"]


def test_a_run_outlives_its_tracker(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config, notes = tracking(f"{tmp_path / 'mine.py'}:Lost"), Notes()
    run = RunDirectory.create(tmp_path, "tiny", config)
    with Recorder(config, run, notes) as recorder:
        for step in (1, 2, 3):
            recorder.step(step, {"objective/kl": 0.5})
    assert [line for line in notes.lines if "tracker" in line and "no server" in line] != []
    assert len(notes.lines) == 1
    assert [line[0] for line in lines(run.path / "mine.jsonl")] == ["start", 1, "finish"]
    assert [row["step"] for row in lines(run.metrics_file)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("mine.py:Missing", "unknown-function"),
        ("none.py:Tracker", "no-reward-file"),
        ("nowhere.at_all:Tracker", "no-reward-module"),
        ("broken.py:Tracker", "import-failed"),
        ("mine.py:number", "wrong-kind-of-object"),
    ],
)
def test_code_that_is_no_tracker_is_refused(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("1 / 0\nclass Tracker: pass\n")
    monkeypatch.chdir(tmp_path)
    with raises(ConfigError, code, "observe.trackers"):
        open_trackers(tracking(name).observe, TrackedRun("tiny-001", tmp_path, {}))


def test_a_tracker_that_cannot_be_opened_ends_no_run_late(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    observe = tracking(f"{tmp_path / 'mine.py'}:Closed").observe
    with raises(StorageError, "tracker-unusable", "no door"):
        open_trackers(observe, TrackedRun("tiny-001", tmp_path, {}))


def test_a_name_that_no_tracker_has_is_refused() -> None:
    with raises(ConfigError, "literal_error", "Did you mean 'wandb'?"):
        tracking("wandbb")


def test_wandb_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, Any]]] = []
    axes: list[tuple[str, str | None]] = []

    def log(values: dict[str, Any], step: int) -> None:
        """As W&B's: values of one step are merged, and those of an earlier step are dropped."""
        if logged and logged[-1][0] == step:
            logged[-1][1].update(values)
        elif not logged or step > logged[-1][0]:
            logged.append((step, values))

    def init(**settings: Any) -> Any:
        started.append(settings)
        return types.SimpleNamespace(
            id=settings["id"] or "fresh",
            define_metric=lambda name, step_metric=None: axes.append((name, step_metric)),
            log=log,
            finish=lambda: None,
            step=logged[-1][0] + 1 if logged else 0,
        )

    library: Any = types.SimpleNamespace(init=init, Table=lambda **table: table)
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    config = tracking("wandb")
    run = RunDirectory.create(tmp_path, "tiny", config)
    for step in (1, 2):
        with Recorder(config, run, Progress(), resumed_step=step - 1) as recorder:
            shown = [Sample("2+2?", "4", 0.5, "stop", 2, {"task": 0.5})] * (step - 1)
            recorder.step(step, {"objective/kl": 0.5}, shown)
    assert [s["id"] for s in started] == [None, "fresh"]
    assert started[0]["name"] == "tiny-001"
    assert started[0]["project"] == "stretto"
    assert started[0]["config"]["rollout"]["batch"] == 32
    columns = ["reward", "task", "tokens", "finish", "prompt", "response"]
    table = {"columns": columns, "data": [[0.5, 0.5, 2, "stop", "2+2?", "4"]]}
    assert axes == [("step", None), ("*", "step")] * 2
    assert logged == [
        (1, {"step": 1, "objective/kl": 0.5}),
        (2, {"step": 2, "objective/kl": 0.5, "samples": table}),
    ]
    # A run that died after step 2 goes on from step 1: W&B drops what comes at an earlier step.
    with Recorder(config, run, Progress(), resumed_step=1) as recorder:
        recorder.step(2, {"objective/kl": 0.25})
    assert logged[2:] == [(3, {"step": 2, "objective/kl": 0.25})]
    # So does one whose file is damaged: W&B knows its own last step.
    for step, text in enumerate(("fresh many\n", "fresh\n", "fresh 7.5 \xff"), 4):
        (run.path / "wandb.id").write_bytes(text.encode("latin-1"))
        with Recorder(config, run, Progress(), resumed_step=1) as recorder:
            recorder.step(2, {"objective/kl": 0.125})
        assert logged[-1] == (step, {"step": 2, "objective/kl": 0.125})
        assert started[-1]["id"] == "fresh"


def test_wandb_without_a_login_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class UsageError(Exception):
        """As wandb raises it where no key is configured."""

    def init(**settings: Any) -> Any:
        raise UsageError("No API key configured. Use `wandb login` to log in.\nA second line")

    library = types.SimpleNamespace(init=init, Error=UsageError)
    monkeypatch.setitem(sys.modules, "wandb", library)
    with raises(StorageError, "wandb-unusable", "No API key", "WANDB_MODE=offline") as caught:
        open_trackers(tracking("wandb").observe, TrackedRun("tiny-001", tmp_path, {}))
    assert "\n" not in str(caught.value)
