"""The run directory, the displays, the trackers, the spans."""

import contextlib
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from stretto import recipes
from stretto.clock import ManualClock
from stretto.config import Config
from stretto.errors import ConfigError, MissingExtraError, StateError
from stretto.observe import Recorder, RunDirectory, Sample, Spans, make_progress
from stretto.observe.live import sparkline
from stretto.observe.progress import History, NoProgress, PlainProgress, duration, headline
from stretto.observe.trackers import open_trackers

SAMPLE = Sample(prompt="1 + 1 = [/]", response="2 \ud800", reward=1.0, finish="stop", tokens=2)
STATS = {
    "objective/scores": 0.25,
    "objective/kl": 0.0012,
    "perf/throughput": 410.4,
    "timing_s/step": 2.0,
}


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def tracking(*names: str) -> Config:
    return Config.model_validate({"observe": {"trackers": names}})


def test_a_second_run_never_overwrites_the_first(tmp_path: Path) -> None:
    runs = [RunDirectory.create(tmp_path / "runs", "tiny", Config()) for _ in range(2)]
    assert [run.name for run in runs] == ["tiny-001", "tiny-002"]
    (tmp_path / "runs" / "tiny-041").mkdir()
    (tmp_path / "runs" / "tiny-own-099").mkdir()
    assert RunDirectory.create(tmp_path / "runs", "tiny", Config()).name == "tiny-042"


def test_the_settings_of_a_run_can_be_loaded_again(tmp_path: Path) -> None:
    config = recipes.load("arithmetic")
    run = RunDirectory.create(tmp_path, "arithmetic", config)
    assert recipes.load(run.path) == config
    assert run.config_file.read_text() == recipes.dump(config)
    assert RunDirectory.open(run.path).path == run.path


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        RunDirectory.open(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out"):
        RunDirectory.create(tmp_path / "file", "tiny", Config())


def test_records_are_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    run.append_metrics(1, {"a": 0.5, "bad": float("nan")})
    run.append_metrics(2, {"a": 1})
    run.append_samples(2, [SAMPLE, SAMPLE])
    assert lines_of(run.metrics_file) == [
        {"step": 1, "a": 0.5, "bad": None},
        {"step": 2, "a": 1.0},
    ]
    samples = lines_of(run.samples_file)
    assert len(samples) == 2
    assert samples[0] == {
        "step": 2,
        "prompt": "1 + 1 = [/]",
        "response": "2 ?",
        "reward": 1.0,
        "finish": "stop",
        "tokens": 2,
    }


def test_rewind_drops_later_steps_and_a_half_written_line(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    for step in (1, 2, 3):
        run.append_metrics(step, {"a": step})
    with run.metrics_file.open("a") as file:
        file.write('{"step": 4, "a"')
    run.rewind(2)
    run.append_metrics(3, {"a": 30})
    assert [(r["step"], r["a"]) for r in lines_of(run.metrics_file)] == [(1, 1), (2, 2), (3, 30)]
    assert not list(run.path.glob("*.tmp"))


def test_rewind_refuses_a_damaged_file(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    run.metrics_file.write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(StateError, match="rubbish"):
        run.rewind(1)


def test_plain_lines_carry_the_figures() -> None:
    stream = io.StringIO()
    progress = make_progress("plain", stream)
    progress.start(Config(), "the plan")
    progress.step(1, 100, STATS, [SAMPLE])
    progress.note("done")
    progress.close()
    assert stream.getvalue().splitlines()[-3:] == [
        "the plan",
        "step 1/100  reward 0.250  kl 0.0012  tokens/s 410  step_s 2.00  eta 3m18s",
        "done",
    ]


def test_without_a_terminal_auto_is_plain_and_off_is_silent() -> None:
    assert isinstance(make_progress("auto", io.StringIO()), PlainProgress)
    assert isinstance(make_progress("off"), NoProgress)


def test_the_live_display_shows_reward_trend_and_sample() -> None:
    stream = io.StringIO()
    progress = make_progress("rich", stream)
    progress.start(Config(), "the plan")
    for step in range(1, 21):
        reward = 0.1 if step <= 10 else 0.4
        progress.step(step, 100, {**STATS, "objective/scores": reward}, [SAMPLE])
    progress.close()
    progress.close()
    text = stream.getvalue()
    assert "the plan" in text
    assert "▲ +0.300" in text
    assert "step 20/100" in text
    assert "2m40s left" in text
    assert "1 + 1 = [/]" in text  # shown, not read as markup


def test_the_headline_prints_what_follows_from_the_settings() -> None:
    config = Config.model_validate(
        {"rollout": {"batch": 32, "samples_per_prompt": 4}, "training": {"minibatches": 2}}
    )
    text = headline(config)
    assert "32 responses (8 prompts x 4)" in text
    assert "2 mini-batch(es) of 16" in text


def test_trend_compares_the_last_ten_with_the_ten_before() -> None:
    history = History()
    for reward in [9.0] * 5 + [0.0] * 10:
        history.add({"objective/scores": reward})
    assert history.trend() is None
    for _ in range(10):
        history.add({"objective/scores": 0.5, "timing_s/step": 3.0})
    assert history.trend() == pytest.approx(0.5)
    assert history.eta_s(25, 30) == pytest.approx(15.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(41.6, "42s"), (59.9, "1m00s"), (185, "3m05s"), (3725, "1h02m")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sparkline() -> None:
    assert sparkline([0.0, float("nan"), 1.0, 0.5]) == "▁ █▅"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


def test_tensorboard_writes_event_files_that_can_be_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tracking("tensorboard")
    run = RunDirectory.create(tmp_path, "tiny", config)
    with Recorder(config, run, NoProgress()) as recorder:
        recorder.step(1, {"objective/kl": 0.5})
        recorder.step(2, {"objective/kl": 0.25})
    with Recorder(config, run, NoProgress(), resumed_step=1) as recorder:
        recorder.step(2, {"objective/kl": 0.75})
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("objective/kl")] == [(1, 0.5), (2, 0.75)]


@pytest.mark.parametrize(
    ("tracker", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")]
)
def test_a_missing_tracker_names_the_extra(
    tracker: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = tracking(tracker)
    with pytest.raises(MissingExtraError, match=rf"pip install 'stretto\[{tracker}\]'"):
        open_trackers(config, RunDirectory.create(tmp_path, "tiny", config))


def test_wandb_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, float]]] = []

    def init(**settings: Any) -> Any:
        started.append(settings)
        return types.SimpleNamespace(
            id=settings["id"] or "fresh",
            log=lambda values, step: logged.append((step, values)),
            finish=lambda: None,
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))  # type: ignore[arg-type]
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    config = tracking("wandb")
    run = RunDirectory.create(tmp_path, "tiny", config)
    for step in (1, 2):
        with Recorder(config, run, NoProgress(), resumed_step=step - 1) as recorder:
            recorder.step(step, {"objective/kl": 0.5})
    assert [s["id"] for s in started] == [None, "fresh"]
    assert started[0]["name"] == "tiny-001"
    assert started[0]["project"] == "stretto"
    assert started[0]["config"]["rollout"]["batch"] == 32
    assert logged == [(1, {"objective/kl": 0.5}), (2, {"objective/kl": 0.5})]


def test_the_recorder_keeps_valid_files_through_an_interrupt(tmp_path: Path) -> None:
    config = Config.model_validate({"observe": {"samples": 1}})
    run = RunDirectory.create(tmp_path, "tiny", config)
    stream = io.StringIO()

    def interrupted() -> None:
        with Recorder(config, run, PlainProgress(stream)) as recorder:
            recorder.step(1, STATS, [SAMPLE, SAMPLE])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [r["step"] for r in lines_of(run.metrics_file)] == [1]
    assert len(lines_of(run.samples_file)) == 1
    assert "step 1/100" in stream.getvalue()


def test_closing_the_recorder_closes_all_even_when_one_fails(tmp_path: Path) -> None:
    closed: list[str] = []

    class Failing:
        def log(self, step: int, stats: object) -> None: ...

        def close(self) -> None:
            closed.append("tracker")
            raise RuntimeError("no network")

    class Display(NoProgress):
        def close(self) -> None:
            closed.append("display")

    run = RunDirectory.create(tmp_path, "tiny", Config())
    recorder = Recorder(Config(), run, Display())
    recorder._trackers = [Failing()]
    with pytest.raises(RuntimeError, match="no network"):
        recorder.close()
    assert closed == ["tracker", "display"]


def test_spans_measure_by_the_given_clock() -> None:
    clock = ManualClock()
    spans = Spans(clock)
    with spans.span("actor", "generate", batch=4) as attributes:
        clock.advance(2.0)
        with spans.span("reward", "score"):
            clock.advance(0.5)
        attributes["tokens"] = 7
    with contextlib.suppress(ValueError), spans.span("actor", "generate"):
        clock.advance(1.0)
        raise ValueError("a span that fails still counts")
    assert spans.totals() == {"generate": 3.5, "score": 0.5}
    score, generate, _ = spans.records
    assert (score.role, score.start_s, score.end_s) == ("reward", 2.0, 2.5)
    assert generate.attributes == {"batch": 4, "tokens": 7}
    spans.reset()
    assert spans.totals() == {}
