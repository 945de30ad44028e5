"""The run directory, the displays, the trackers, the spans."""

import contextlib
import html
import io
import json
import re
import socket
import sys
import threading
import types
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import ManualClock, check_trace_events, full_beyond
from raising import raises
from run_helpers import ended_rollout, lines
from stretto.config import Config, recipes
from stretto.config.sections import TRACKERS
from stretto.errors import ConfigError, MissingExtraError, StateError, StorageError
from stretto.machine import Machine
from stretto.observe import Recorder, RunDirectory, Sample, Spans, Window, make_progress
from stretto.observe.display import History, Progress, duration
from stretto.observe.idle import TimeSheet, seconds, subtract, time_of_roles, union
from stretto.observe.live import sparkline
from stretto.observe.progress import PlainProgress, headline
from stretto.observe.run_directory import RolloutRecord
from stretto.observe.spans import Span
from stretto.observe.trace import TracedStep, TraceFile
from stretto.observe.trackers import TrackedRun, open_trackers
from stretto.schedules.rollout import RolloutState

SAMPLE = Sample(prompt="1 + 1 = [/]", response="2 \ud800", reward=1.0, finish="stop", tokens=2)
STATS = {
    "objective/scores": 0.25,
    "objective/kl": 0.0012,
    "perf/throughput": 410.4,
    "timing_s/step": 2.0,
}


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
    with raises(ConfigError, "not-a-run", tmp_path):
        RunDirectory.open(tmp_path)
    (tmp_path / "file").touch()
    with raises(ConfigError, "cannot-make-folder", tmp_path / "file", "`out`"):
        RunDirectory.create(tmp_path / "file", "tiny", Config())


def test_records_are_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    run.append_metrics(1, {"a": 0.5, "bad": float("nan")})
    run.append_metrics(2, {"a": 1})
    run.append_samples(2, [SAMPLE, SAMPLE])
    assert lines(run.metrics_file) == [
        {"step": 1, "a": 0.5, "bad": None},
        {"step": 2, "a": 1.0},
    ]
    samples = lines(run.samples_file)
    assert len(samples) == 2
    assert samples[0] == {
        "step": 2,
        "prompt": "1 + 1 = [/]",
        "response": "2 ?",
        "reward": 1.0,
        "finish": "stop",
        "tokens": 2,
        "scores": {},
        "extra": {},
    }


def test_rewind_drops_later_steps_and_a_half_written_line(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    for step in (1, 2, 3):
        run.append_metrics(step, {"a": step})
    with run.metrics_file.open("a") as file:
        file.write('{"step": 4, "a"')
    assert [r["step"] for r in run.read_metrics()] == [1, 2, 3]
    assert run.rewind(2) == ["metrics.jsonl"]
    run.append_metrics(3, {"a": 30})
    assert [(r["step"], r["a"]) for r in lines(run.metrics_file)] == [(1, 1), (2, 2), (3, 30)]
    assert not list(run.path.glob("*.tmp"))


def test_rewind_refuses_a_damaged_file(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    run.metrics_file.write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with raises(StateError, "damaged-record", run.metrics_file, "line 2", "rubbish"):
        run.rewind(1)


def test_plain_lines_carry_the_figures() -> None:
    stream = io.StringIO()
    progress = make_progress("plain", stream)
    progress.start("the plan")
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
    assert isinstance(make_progress("off"), Progress)


def test_the_live_display_shows_reward_trend_and_sample() -> None:
    stream = io.StringIO()
    progress = make_progress("rich", stream)
    progress.start("the plan")
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


def test_displays_show_the_last_evaluation() -> None:
    """The live one until the next; lines where it comes."""
    figures = {"eval/step": 1.0, "eval/score": 0.6251, "eval/pass@1": 0.5}
    live, plain = io.StringIO(), io.StringIO()
    for mode, stream in (("rich", live), ("plain", plain)):
        progress = make_progress(mode, stream)  # type: ignore[arg-type]
        progress.start("the plan")
        progress.step(1, 9, {**STATS, **figures}, [])
        progress.step(2, 9, STATS, [])
        progress.close()
    _, _, second = live.getvalue().rpartition("step 2/9")
    assert "eval 0.625 (step 1)   pass@1 0.500" in second
    _, first, then = plain.getvalue().splitlines()
    assert "eval 0.625  pass@1 0.500" in first
    assert "eval" not in then


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what TensorBoard brings along
def test_tensorboard_writes_event_files_that_can_be_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    config = tracking("tensorboard")
    run = RunDirectory.create(tmp_path, "tiny", config)
    hostile = "a|b *c* <b>d</b>\n`e` [f](g)"
    with Recorder(config, run, Progress()) as recorder:
        shown = [Sample("2+2?", hostile, 0.75, "stop", 2, {"task": 0.5, "judge": None})]
        recorder.step(1, {"objective/kl": 0.5, "lr": 1e-3}, shown)
        recorder.step(2, {"objective/kl": 0.25})
    with Recorder(config, run, Progress(), resumed_step=1) as recorder:
        recorder.step(2, {"objective/kl": 0.75}, [Sample("3+3?", "6", 1.0, "stop", 2)])
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("objective/kl")] == [(1, 0.5), (2, 0.75)]

    def cells(tag: str) -> list[tuple[int, list[list[str]]]]:
        """Step and rows of each text, as TensorBoard shows it."""
        texts = [
            (e.step, e.tensor_proto.string_val[0]) for e in events.Tensors(f"{tag}/text_summary")
        ]
        pages = ((step, markdown_to_safe_html(text)) for step, text in texts)
        rows = ((step, re.findall("<tr>(.*?)</tr>", page, re.S)) for step, page in pages)
        return [(n, [re.findall("<t[hd]>(.*?)</t[hd]>", r, re.S) for r in own]) for n, own in rows]

    heads = ["reward", "task", "judge", "tokens", "finish", "prompt", "response"]
    plain = html.escape(hostile, quote=False).replace("\n", " ↵ ")
    first, second = cells("samples")
    assert first == (1, [heads, ["0.75", "0.5", "None", "2", "stop", "2+2?", plain]])
    assert second == (2, [[heads[0], *heads[3:]], ["1", "2", "stop", "3+3?", "6"]])
    assert ["rollout.batch", "32"] in cells("settings")[0][1]


def test_prometheus_reads_the_newest_metrics(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        config = recipes.build({"observe": {"prometheus_port": port}}, "here")
        run = RunDirectory.create(tmp_path, "tiny", config)
        with raises(StorageError, "port-taken", f"prometheus_port = {port}"):
            open_trackers(config.observe, TrackedRun(run.name, run.path, {}))
    with Recorder(config, run, Progress()) as recorder:
        recorder.step(1, {"objective/kl": 0.5, "lr": 1e-3})
        recorder.step(2, {"objective/kl": 0.25})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            lines = page.read().decode().splitlines()
    assert f'stretto_objective_kl{{run="{run.name}"}} 0.25' in lines
    assert f'stretto_step{{run="{run.name}"}} 2.0' in lines
    assert not any(line.startswith("stretto_lr{") for line in lines)  # the newest step has none
    with socket.create_server(("127.0.0.1", port)):
        pass  # nobody listens there any more


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_missing_tracker_names_the_extra(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    alone = tracker not in ("tensorboard", "wandb")
    remedy = f"pip install {tracker}" if alone else f"pip install -e '.[{tracker}]'"
    with raises(MissingExtraError, "missing-library", remedy):
        open_trackers(tracking(tracker).observe, TrackedRun("tiny-001", tmp_path, {}))


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
    assert [r["step"] for r in lines(run.metrics_file)] == [1]
    assert len(lines(run.samples_file)) == 1
    assert "step 1/100" in stream.getvalue()


def test_closing_the_recorder_closes_all_even_when_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def failing() -> None:
        closed.append("tracker")
        raise RuntimeError("no network")

    class Display(Progress):
        def close(self) -> None:
            closed.append("display")

    opened = {"mine": types.SimpleNamespace(log=lambda step, metrics: None, finish=failing)}
    monkeypatch.setattr("stretto.observe.recorder.open_trackers", lambda *_: opened)
    run = RunDirectory.create(tmp_path, "tiny", Config())
    recorder = Recorder(Config(), run, Display())
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
    spans.take()
    assert spans.totals() == {}


def work(role: str, name: str, start_s: float, end_s: float, **attributes: Any) -> Span:
    return Span(role, name, start_s, end_s, attributes)


def wait(role: str, cause: str, start_s: float, end_s: float) -> Span:
    return Span(role, "wait", start_s, end_s, {"cause": cause})


def test_waiting_is_no_work() -> None:
    spans = Spans(ManualClock())
    spans.add("generator", "gen", 0.0, 3.0)
    spans.add("learner", "wait", 0.0, 2.0, cause="data")
    spans.add("learner", "wait", 2.0, 3.0, cause="stragglers")
    spans.add("learner", "wait", 5.0, 6.0, cause="data")
    assert spans.totals() == {"gen": 3.0}
    waited = [(s.cause, s.end_s - s.start_s) for s in spans.records if s.waits]
    assert waited == [("data", 2.0), ("stragglers", 1.0), ("data", 1.0)]
    with pytest.raises(ValueError, match=r"2.0 s to 1.0 s"):
        spans.add("learner", "update", 2.0, 1.0)


def test_an_open_span_is_reported_cut_and_later_whole() -> None:
    clock = ManualClock(10.0)
    spans = Spans(clock)
    clock.advance(1.0)
    with spans.span("generator", "gen") as attributes:
        clock.advance(2.0)
        first = spans.take()
        attributes["tokens"] = 5
        clock.advance(4.0)
    second = spans.take()
    assert first == Window(10.0, 13.0, (), (work("generator", "gen", 11.0, 13.0),))
    assert second == Window(13.0, 17.0, (work("generator", "gen", 11.0, 17.0, tokens=5),))
    assert spans.records == ()


def test_no_span_is_lost_between_threads() -> None:
    spans = Spans(ManualClock())
    seen = 0

    def record(role: str) -> None:
        for i in range(2000):
            with spans.span(role, "gen"):
                spans.add(role, "score", i, i + 1)

    threads = [threading.Thread(target=record, args=(f"generator {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen += len(spans.take().ended)
    assert seen + len(spans.take().ended) == 4 * 2 * 2000


def test_intervals_against_sets_of_moments() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = (
            [(float(s), float(s + n)) for s, n in rng.integers(1, 12, size=(4, 2))] for _ in "ab"
        )
        moments = [{t for s, e in parts for t in range(int(s), int(e))} for parts in (a, b)]
        left = subtract(union(a), union(b))
        both = subtract(union(a), left)
        for parts, expected in (
            (union(a), moments[0]),
            (both, moments[0] & moments[1]),
            (left, moments[0] - moments[1]),
        ):
            covered = [t for s, e in parts for t in range(int(s), int(e))]
            assert sorted(covered) == sorted(expected)
            assert seconds(parts) == len(expected)


def test_idle_time_has_the_cause_that_the_others_give_it() -> None:
    spans = [
        work("generator", "gen", 0, 4),
        work("critic", "prefill", 2, 3),
        wait("learner", "stragglers", 3, 4),
        work("critic", "score", 4, 6),
        work("learner", "update", 6, 8),
        work("generator", "load", 8, 9),
    ]
    times = time_of_roles(spans, 0, 10, ["reference"])
    assert list(times) == ["generator", "critic", "reference", "learner"]
    assert times["generator"].busy == [(0, 4), (8, 9)]
    assert times["generator"].idle == {"scores": [(4, 6)], "weights": [(6, 8)], "other": [(9, 10)]}
    assert times["critic"].idle == {
        "data": [(0, 2)],
        "stragglers": [(3, 4)],
        "weights": [(6, 9)],
        "other": [(9, 10)],
    }
    assert times["reference"].idle["scores"] == [(4, 6)]
    assert times["learner"].idle == {
        "stragglers": [(3, 4)],
        "data": [(0, 3)],
        "scores": [(4, 6)],
        "weights": [(8, 9)],
        "other": [(9, 10)],
    }


def test_a_wait_of_ones_own_comes_first_and_work_before_any_wait() -> None:
    spans = [
        wait("generator 1", "weights", 0, 6),
        work("generator 1", "gen", 2, 3),
        wait("learner", "data", 0, 8),
        work("generator 0", "gen", 8, 9),
    ]
    times = time_of_roles(spans, 1, 9)
    assert times["generator 1"].busy == [(2, 3)]
    assert times["generator 1"].idle == {
        "weights": [(1, 2), (3, 6)],
        "data": [(6, 8)],
        "stragglers": [(8, 9)],
    }


def test_a_lost_process_is_the_cause_of_its_own_idle_time_and_of_others_that_nobody_explains() -> (
    None
):
    spans = [
        wait("generator 0", "data", 0, 8),
        Span("generator 0", "down", 1, 6, {"cause": "down"}),
        work("generator 1", "gen", 0, 4),
    ]
    times = time_of_roles(spans, 0, 8, ["learner"])
    assert times["generator 0"].idle == {"down": [(1, 6)], "data": [(0, 1), (6, 8)]}
    assert times["generator 1"].idle == {"data": [(4, 8)]}
    lost = time_of_roles([*spans[1:], wait("critic", "scores", 6, 7)], 0, 8, ["learner"])
    assert lost["learner"].idle == {
        "data": [(0, 4)],
        "down": [(4, 6)],
        "scores": [(6, 7)],
        "other": [(7, 8)],
    }


def test_the_time_sheet_adds_up() -> None:
    sheet = TimeSheet()
    assert sheet.table() == ""
    first = sheet.add(
        Window(0, 4, (work("generator", "gen", 0, 3),), (work("learner", "update", 3, 4),))
    )
    assert first == {
        "utilisation/generator": 0.75,
        "idle_s/generator/weights": 1.0,
        "utilisation/learner": 0.25,
        "idle_s/learner/data": 3.0,
    }
    second = sheet.add(Window(4, 8, (work("learner", "update", 3, 6), work("task", "score", 6, 8))))
    assert second == {
        "utilisation/generator": 0.0,
        "idle_s/generator/scores": 2.0,
        "idle_s/generator/weights": 2.0,
        "utilisation/task": 0.5,
        "idle_s/task/weights": 2.0,
        "utilisation/learner": 0.5,
        "idle_s/learner/scores": 2.0,
    }
    assert sheet.table().splitlines() == [
        "where time went (8.0 s; a role was busy, or idle for want of ...)",
        "               busy    data  scores  weights   other",
        "  generator  37.5 %       -  25.0 %   37.5 %       -",
        "  task       25.0 %       -       -   25.0 %  50.0 %",
        "  learner    37.5 %  37.5 %  25.0 %        -       -",
    ]


def test_roles_on_one_device_count_once_and_a_hand_over_is_on_none() -> None:
    spans = (
        work("generator 0", "gen", 0, 4),
        work("reference 0", "score", 4, 6),
        work("weights", "send", 0, 8),
        work("checkpoint", "checkpoint/write", 0, 8),
        work("learner", "update", 6, 8),
    )
    devices = {"generator 0": "first", "reference 0": "first", "learner": "second"}
    sheet = TimeSheet()
    metrics = sheet.add(Window(0, 8, spans, devices=devices))
    shares = {key: value for key, value in metrics.items() if key.startswith("utilisation/")}
    assert shares == {
        "utilisation/generator 0": 0.5,
        "utilisation/reference 0": 0.25,
        "utilisation/learner": 0.25,
        "utilisation/all devices": 0.5,  # the first 6 s of 8 s, the second 2 s
    }
    assert {k: v for k, v in metrics.items() if k.startswith("idle_s/all devices/")} == {
        "idle_s/all devices/data": 2.0,
        "idle_s/all devices/scores": 1.0,
        "idle_s/all devices/weights": 1.0,
    }
    assert sheet.table().splitlines()[1:] == [
        "                 busy    data  scores  weights  other",
        "  generator 0  50.0 %       -  25.0 %   25.0 %      -",
        "  reference 0  25.0 %  50.0 %       -   25.0 %      -",
        "  learner      25.0 %  50.0 %  25.0 %        -      -",
        "  all devices  50.0 %  25.0 %  12.5 %   12.5 %      -",
    ]


def test_a_device_with_a_generator_waits_for_stragglers_of_another() -> None:
    spans = [work("generator 1", "gen", 0, 2), work("reference 0", "score", 2, 3)]
    devices = {"generator 0": "a", "reference 0": "a", "generator 1": "b"}
    times = time_of_roles(spans, 0, 4, devices=devices)
    assert list(times) == ["a", "b"]
    assert times["a"].busy == [(2, 3)]
    assert times["a"].idle == {"stragglers": [(0, 2)], "other": [(3, 4)]}


def traced(file: Path, steps: Sequence[int] = (1, 2, 3)) -> TraceFile:
    """Steps of 2 s on a clock that starts at 100 s."""
    trace = TraceFile(file)
    for step in steps:
        start_s = 98.0 + 2 * step
        spans = (
            work("learner", "update", start_s + 1.0, start_s + 2.0, step=step, loss=float("nan")),
            work("critic", "score", start_s, start_s + 0.5, rollouts=list(range(20))),
            wait("generator", "weights", start_s - 0.25, start_s + 1.5),
        )
        assert trace.append(step, Window(start_s, start_s + 2, spans), 2.0 * (step - 1))
    return trace


def test_the_trace_is_whole_json_with_a_track_a_role(tmp_path: Path) -> None:
    trace = traced(tmp_path / "trace.json", [1])
    once = trace.path.read_bytes()
    events = json.loads(once)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {e["args"]["sort_index"]: e["tid"] for e in events if e["name"] == "thread_sort_index"}
    assert [names[order[i]] for i in sorted(order)] == ["steps", "generator", "critic", "learner"]
    waits = [e for e in events if e.get("cat") == "wait"]
    assert [(e["name"], e["ts"], e["dur"]) for e in waits] == [("wait: weights", 0.0, 1.5e6)]
    score = next(e for e in events if e["name"] == "score")
    assert score["args"] == {"rollouts": [0, 1, 2, 3, 4, 5, 6, 7], "rollouts_count": 20}
    update = next(e for e in events if e["name"] == "update")
    assert (update["cat"], update["ts"], update["dur"]) == ("work", 1e6, 1e6)
    assert update["args"] == {"step": 1, "loss": None}
    traced(tmp_path / "trace.json", [2])
    assert json.loads(trace.path.read_bytes())[: len(events)] == events
    assert trace.path.read_bytes().startswith(once[:-3])


def test_the_trace_can_be_read_back(tmp_path: Path) -> None:
    read = traced(tmp_path / "trace.json").read()
    assert read.steps == (TracedStep(1, 0.0, 2.0), TracedStep(2, 2.0, 4.0), TracedStep(3, 4.0, 6.0))
    assert len(read.spans) == 9
    assert read.spans[3] == work("learner", "update", 3.0, 4.0, step=2, loss=None)
    assert read.spans[5] == wait("generator", "weights", 1.75, 3.5)


def test_overlapping_spans_of_a_role_have_tracks_of_their_own(tmp_path: Path) -> None:
    first = (
        work("task", "score/task", 0.0, 0.5),
        work("task", "score/task", 0.25, 0.75),  # overlaps the first
        work("task", "score/task", 0.5, 1.0),  # starts where the first ends
        wait("task", "weights", 0.7, 1.5),  # overlaps both of the others
        work("critic", "prefill/critic", 0.25, 0.75),
        work("critic", "score/critic", 0.0, 1.0),  # around the one before it
    )
    second = (work("task", "score/task", 0.9, 2.5), work("task", "score/task", 1.25, 3.0))
    trace = TraceFile(tmp_path / "trace.json")
    trace.append(1, Window(0.0, 2.0, first), 0.0)
    trace.append(2, Window(2.0, 4.0, second), 2.0)
    check_trace_events(events := json.loads(trace.path.read_bytes()))
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [names[e["tid"]] for e in events if e["ph"] == "X" and e["tid"]] == [
        *("task", "task (lane 2)", "task", "task (lane 3)", "critic", "critic"),
        *("task (lane 2)", "task"),
    ]
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert len({order[tid] for tid, name in names.items() if name.startswith("task")}) == 1
    assert [s.role for s in trace.read().spans] == [s.role for s in (*first, *second)]
    found = TimeSheet().add(Window(0.0, 2.0, first))
    assert found["utilisation/task"] * 2 == pytest.approx(1.0)
    assert sum(v for k, v in found.items() if k.startswith("idle_s/task/")) == pytest.approx(1.0)


@pytest.mark.parametrize("cut", [1, 3, 5, 40, 200, 400])
def test_a_trace_that_was_cut_short_is_read_and_goes_on(cut: int, tmp_path: Path) -> None:
    trace = traced(tmp_path / "trace.json")
    whole = trace.read()
    trace.path.write_bytes(trace.path.read_bytes()[:-cut])
    read = TraceFile(trace.path).read()
    assert read.steps in (whole.steps, whole.steps[:2])
    assert read.spans == whole.spans[: len(read.spans)]
    resumed = TraceFile(trace.path)
    resumed.rewind(2)
    json.loads(trace.path.read_bytes())
    assert resumed.read().spans == whole.spans[:6]
    traced(trace.path, [3])
    assert resumed.read() == whole


def test_on_a_full_disk_a_trace_stays_as_it_was(tmp_path: Path) -> None:
    trace = traced(tmp_path / "trace.json", [1, 2])
    before = trace.path.read_bytes()
    with full_beyond(len(before) + 100), pytest.raises(StorageError, match="make room there"):
        traced(trace.path, [3])
    assert trace.path.read_bytes() == before
    with full_beyond(100), pytest.raises(StorageError):
        traced(tmp_path / "first.json", [1])
    assert (tmp_path / "first.json").read_bytes() == b""
    assert traced(trace.path, [3]).read().steps[2].step == 3


def test_rewinding_to_the_start_leaves_no_trace(tmp_path: Path) -> None:
    trace = traced(tmp_path / "trace.json")
    trace.rewind(0)
    assert not trace.path.exists()
    trace.path.write_text('[\n{"ph": broken}},\n{}}\n]\n')
    with raises(StateError, "damaged-trace", trace.path, "broken"):
        trace.read()


DAMAGED_EVENTS = [
    b'{"ph": broken}}',
    b'{"nome": "update", "ph": "X", "args": {}}',
    b"[" * 100_000 + b"}}",
    b'{"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"nome": {}}}',
    b'{"name": "step 1", "ph": "X", "pid": 1, "tid": 0, "cat": "step", "args": {"step": {}}}',
]


@pytest.mark.parametrize("event", DAMAGED_EVENTS)
def test_a_damaged_trace_is_put_aside_and_training_goes_on(event: bytes, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    run.append_metrics(1, {"time_s": 2.0})
    traced(run.trace.path, [1])
    head, rest = run.trace.path.read_bytes().split(b",\n", 1)
    damaged = head + b",\n" + event + b",\n" + rest
    run.trace.path.write_bytes(damaged)
    with raises(StateError, "damaged-trace", run.trace.path):
        run.trace.read()
    stream = io.StringIO()
    with Recorder(Config(), run, PlainProgress(stream), resumed_step=1) as recorder:
        window = Window(0.0, 10.0, (work("learner", "update", 1.0, 2.0),))
        recorder.step(2, STATS, window=window)
    assert [step.step for step in run.trace.read().steps] == [2]
    assert (run.path / "trace-damaged.json").read_bytes() == damaged
    assert "It is called trace-damaged.json now" in stream.getvalue()


@pytest.mark.parametrize("content", ["5", "[]", '{"starts": 5}', '{"starts": [5]}', "[" * 100_000])
def test_a_damaged_machine_file_ends_nothing(content: str, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    run.machine_file.write_text(content)
    with raises(StateError, "damaged-record", run.machine_file):
        run.read_machine()
    run.save_machine(Machine.here())
    assert len(run.read_starts()) == 1


def test_a_trace_too_long_for_viewers_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.observe.trace.LIMIT_BYTES", 1000)
    run = RunDirectory.create(tmp_path, "tiny", Config())
    stream = io.StringIO()
    with Recorder(Config(), run, PlainProgress(stream)) as recorder:
        for step in (1, 2, 3):
            spans = tuple(work("generator", "gen", i, i + 1) for i in range(10))
            recorder.step(step, STATS, window=Window(0, 10, spans))
    assert [s.step for s in run.trace.read().steps] == [1]
    assert stream.getvalue().count("as long as viewers can open") == 1
    assert [m["time_s"] for m in run.read_metrics()] == [10, 20, 30]


def test_rollouts_are_kept_and_read_back(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    assert run.read_rollouts() == []
    trained = ended_rollout(3, 9, versions=[3, *[4] * 8], group=2, carries=1)
    rejected = ended_rollout(4, 0, RolloutState.REJECTED, rejected_because="function failed")
    run.append_rollouts(1, [trained, rejected], {3: 0.5})
    run.append_rollouts(2, [ended_rollout(5)], {5: float("inf")})
    first = RolloutRecord(1, 3, 53, 2, 3, 9, "stop", "trained", "", 1, 3, 4, 0.5)
    second = RolloutRecord(
        1, 4, 54, 4, 3, 0, None, "rejected", "function failed", 0, None, None, None
    )
    third = RolloutRecord(2, 5, 55, 5, 3, 1, "stop", "trained", "", 0, 0, 0, None)
    assert run.read_rollouts() == [first, second, third]
    with run.rollouts_file.open("a") as file:
        file.write('{"step": 2, "id"')
    assert run.read_rollouts() == [first, second, third]
    run.rewind(1)
    assert run.read_rollouts() == [first, second]
    run.rollouts_file.write_text('{"step": 1, "colour": 3}\n')
    with raises(StateError, "damaged-record", run.rollouts_file, "colour"):
        run.read_rollouts()


def test_the_recorder_writes_all_records_and_time_goes_on_after_a_resume(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())

    def session(clock: ManualClock, steps: Sequence[int], resumed_step: int) -> str:
        spans = Spans(clock)
        with Recorder(Config(), run, Progress(), resumed_step=resumed_step) as recorder:
            for step in steps:
                with spans.span("generator", "gen"):
                    clock.advance(3.0)
                with spans.span("learner", "update"):
                    clock.advance(1.0)
                ended = [ended_rollout(step, 4)]
                recorder.step(
                    step, {"a": 1.0}, window=spans.take(), rollouts=ended, rewards={step: 0.5}
                )
            return recorder.where_time_went()

    session(ManualClock(), [1, 2, 3], 0)
    table = session(ManualClock(1000.0), [3, 4], 2)
    figures: Mapping[str, float] = {
        "a": 1.0,
        "utilisation/generator": 0.75,
        "utilisation/learner": 0.25,
        "idle_s/generator/weights": 1.0,
        "idle_s/learner/data": 3.0,
    }
    assert run.read_metrics() == [
        {"step": step, "time_s": 4.0 * step, **figures} for step in (1, 2, 3, 4)
    ]
    assert [(r.step, r.id, r.reward) for r in run.read_rollouts()] == [
        (step, step, 0.5) for step in (1, 2, 3, 4)
    ]
    trace = run.trace.read()
    assert [(s.step, s.start_s, s.end_s) for s in trace.steps] == [
        (step, 4.0 * step - 4, 4.0 * step) for step in (1, 2, 3, 4)
    ]
    assert [s.start_s for s in trace.spans if s.role == "learner"] == [3.0, 7.0, 11.0, 15.0]
    assert "8.0 s" in table


def test_a_lost_process_is_still_lost_when_the_trace_is_read(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    down = Span("critic", "down", 0.0, 1.0, {"cause": "down"})
    trace.append(1, Window(0.0, 2.0, (down, wait("critic", "data", 1.0, 2.0))), 0.0)
    assert [(s.name, s.cause) for s in trace.read().spans] == [("down", "down"), ("wait", "data")]


def test_throughput_is_also_that_of_a_device(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    devices = {"learner": "a", "generator": "b", "critic": "b"}
    with Recorder(Config(), run, Progress()) as recorder:
        recorder.step(1, {"perf/throughput": 90.0}, window=Window(0.0, 1.0, (), (), devices))
    (step,) = run.read_metrics()
    assert step["perf/throughput_per_device"] == 45.0


def test_the_trace_leads_from_process_to_process_and_counts(tmp_path: Path) -> None:
    """Two generators, a scorer and a learner in processes of their own; the second batch is decoded
    while the first is trained on; of three scored rollouts one is rejected."""
    processes = {"generator 0": "gpu-0", "generator 1": "gpu-1", "critic": "gpu-1"}
    processes["learner"] = "learner"
    first = (
        work("generator 0", "gen", 99.0, 102.0, rollouts=[0], version=0),  # from before the start
        work("generator 1", "gen", 100.0, 103.0, rollouts=[1, 2], version=0),
        work("critic", "score/critic", 103.0, 104.0, rollouts=[0, 1, 2]),
    )
    second = (
        work("generator 0", "gen", 104.0, 105.0, rollouts=[3], version=0),
        work("learner", "update", 104.0, 106.0, rollouts=[0, 1]),
        work("learner", "publish", 106.0, 107.0, version=1),
        work("generator 0", "load", 107.0, 108.0, version=1),
    )
    trace = TraceFile(tmp_path / "trace.json")
    window = Window(100.0, 104.0, first, processes=processes)
    trace.append(1, window, 0.0, {"staleness/mean": 0.5, "lr": 1.0})
    window = Window(104.0, 108.0, second, processes=processes)
    trace.append(2, window, 4.0, {"staleness/mean": float("nan")}, ended=[0, 1, 2])
    events = json.loads(trace.path.read_bytes())
    check_trace_events(events)

    pids = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert pids == {"stretto": 1, "gpu-0": 2, "gpu-1": 3, "learner": 4}
    of = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "thread_name"}
    assert of == {"steps": 1} | {role: pids[name] for role, name in processes.items()}

    flows: dict[str, list[tuple[str, int, float]]] = {}
    for e in events:
        if e["ph"] in "stf":
            flows.setdefault(e["id"], []).append((e["ph"], e["pid"], e["ts"]))
    update = ("f", 4, 4e6 + 1)
    assert flows == {
        "batch 4000000.0 generator 0 critic": [("s", 2, 2e6 - 1), ("t", 3, 3e6 + 1), update],
        "batch 4000000.0 generator 1 critic": [("s", 3, 3e6 - 1), ("t", 3, 3e6 + 1), update],
        "weights 1 generator 0 7000000.0": [("s", 4, 7e6 - 1), ("f", 2, 7e6 + 1)],
    }
    counts: dict[str, list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "C":
            counts.setdefault(e["name"], []).append((e["ts"] / 1e6, e["args"]["value"]))
    assert counts == {
        "running rollouts, generator 0": [(0, 1), (2, 0), (4, 1), (5, 0)],
        "running rollouts, generator 1": [(0, 2), (3, 0)],
        "scored rollouts that wait for the learner": [(4, 3), (4, 3), (4, 1), (8, 0)],
        "staleness/mean": [(4, 0.5)],
    }
    # A resumed run goes on with the numbers that the trace has.
    resumed = TraceFile(trace.path)
    resumed.append(3, Window(0.0, 1.0, (work("critic", "score", 0, 1),), processes=processes), 8.0)
    check_trace_events(again := json.loads(trace.path.read_bytes()))
    (score,) = [e for e in again if e["name"] == "score"]
    assert (score["pid"], sum(e["ph"] == "M" for e in again)) == (3, 17)
    assert [s.role for s in resumed.read().spans][-2:] == ["generator 0", "critic"]
