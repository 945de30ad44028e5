"""The report: what it computes of runs, and the page and the picture that it makes."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import unescape
from html.parser import HTMLParser
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import dom, needs_browser
from helpers import ManualClock
from raising import raises
from step_picture import seconds_text, timeline_svg
from stretto.cli.main import main
from stretto.config import Config
from stretto.errors import ConfigError, StateError, StorageError
from stretto.machine import Machine
from stretto.observe import Recorder, RunDirectory, Sample, Spans, report
from stretto.observe.display import Progress
from stretto.observe.report.page import html_page, length_edges, news, payload
from stretto.observe.report.run_data import (
    LoadedRun,
    about,
    differing_settings,
    load,
    off_policy,
    pareto,
    shares,
)
from stretto.observe.report.timeline import Bar, bars, waits
from stretto.observe.spans import Span
from stretto.observe.trace import TracedStep
from stretto.schedules.rollout import Rollout, RolloutState
from stretto.types import FinishReason, Prompt

BATCH = 16
SCORERS = ("reference", "critic")


class FakeRun:
    """A run with made-up costs: a decode step takes 20 ms and more with more rows, chunks of 64.

    The plain one does each stage after the one before it. The overlapped one streams chunks to the
    scorers and keeps ``delta`` responses in flight beyond the batch.
    """

    def __init__(self, overlapped: bool, seed: int) -> None:
        self.clock = ManualClock()
        self.spans = Spans(self.clock)
        self.rng = np.random.default_rng(seed)
        self.overlapped = overlapped
        self.next_id = 0
        self.flight: list[tuple[Rollout, int]] = []

    def admit(self, wanted: int) -> None:
        while len(self.flight) < wanted:
            prompt = Prompt(self.next_id, (1,) * int(self.rng.integers(20, 60)), "")
            length = int(np.clip(self.rng.lognormal(5.0, 0.8), 8, 2000))
            self.flight.append((Rollout(self.next_id, prompt, self.next_id), length))
            self.next_id += 1

    def step(self, step: int, delta: int) -> list[Rollout]:
        self.admit(BATCH + delta)
        done: list[Rollout] = []
        fed = {name: self.clock.now() for name in SCORERS}
        waiting_since_s: float | None = None
        while len(done) < BATCH:
            start_s, ids = self.clock.now(), [r.id for r, _ in self.flight]
            seconds = 64 * (0.02 + 0.001 * len(ids))
            tokens = 0
            for rollout, length in self.flight:
                new = min(64, length - len(rollout))
                tokens += new
                rollout.tokens.extend([0] * new)
                rollout.versions.extend([step] * new)
            self.clock.advance(seconds)
            now_s = self.clock.now()
            self.spans.add(
                "generator", "gen", start_s, now_s, rollouts=ids, tokens=tokens, version=step
            )
            done += [r for r, length in self.flight if len(r) == length]
            self.flight = [(r, length) for r, length in self.flight if len(r) < length]
            if self.overlapped:
                for name in SCORERS:
                    fed[name] = max(fed[name], now_s) + tokens * 0.0004
                    start = fed[name] - tokens * 0.0004
                    self.spans.add(name, "prefill", start, fed[name], rollouts=ids, tokens=tokens)
            if waiting_since_s is None and len(done) >= 0.8 * BATCH:
                waiting_since_s = now_s
        batch, late = done[:BATCH], done[BATCH:]
        self.flight = [(r, len(r)) for r in late] + self.flight
        now_s = self.clock.now()
        if waiting_since_s is not None:
            self.spans.add("learner", "wait", waiting_since_s, now_s, cause="stragglers")
        self.finish(step, batch, fed)
        return batch

    def finish(self, step: int, batch: list[Rollout], fed: Mapping[str, float]) -> None:
        tokens, ids = sum(map(len, batch)), [r.id for r in batch]
        scored_s = self.clock.now()
        for name in SCORERS:
            start_s = max(fed[name], self.clock.now()) if self.overlapped else scored_s
            end_s = start_s + 64 * BATCH * 0.0001 if self.overlapped else start_s + tokens * 0.0004
            self.spans.add(name, "score", start_s, end_s, rollouts=ids, tokens=tokens)
            scored_s = max(scored_s, end_s)
        self.spans.add("learner", "wait", self.clock.now(), scored_s, cause="scores")
        self.clock.advance(scored_s - self.clock.now())
        for name, seconds in (("update", tokens * 0.0012), ("publish", 0.15)):
            with self.spans.span("learner", name, rollouts=ids, tokens=tokens, version=step):
                self.clock.advance(seconds)
        with self.spans.span("generator", "load", version=step):
            self.clock.advance(0.2)


def fake_run(
    folder: Path, name: str, overlapped: bool, steps: int = 12, seed: int = 0
) -> RunDirectory:
    config = Config.model_validate(
        {"steps": steps, "rollout": {"batch": BATCH}, "seed": 7 if overlapped else 8}
    )
    run = RunDirectory.create(folder, name, config)
    fake = FakeRun(overlapped, seed)
    rng = np.random.default_rng(seed + 100)
    with Recorder(config, run, Progress()) as recorder:
        for step in range(1, steps + 1):
            delta = max(0, 8 - step // 40) if overlapped else 0
            start_s = fake.clock.now()
            batch = fake.step(step, delta)
            rewards = {}
            for rollout in batch:
                rollout.state, rollout.finish = RolloutState.TRAINED, FinishReason.STOP
                rewards[rollout.id] = float(4 * (1 - np.exp(-step / 120)) + rng.normal(0, 0.9))
            seconds = fake.clock.now() - start_s
            stats = {
                "objective/scores": float(np.mean(list(rewards.values()))),
                "timing_s/step": seconds,
                "perf/samples_per_s": BATCH / seconds,
                "schedule/overcommit": float(delta),
                "schedule/carried": float(len(fake.flight)),
                "schedule/chunk_tokens": float((128, 256, 512)[step % 3] if step % 50 < 9 else 256),
                "staleness/mean": float(np.mean([step - min(r.versions) for r in batch])),
            }
            recorder.step(step, stats, window=fake.spans.take(), rollouts=batch, rewards=rewards)
    return run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [fake_run(folder, name, name == "oppo").path for name in ("sync", "oppo")]


def made(name: str = "run", **given: Any) -> LoadedRun:
    return LoadedRun(**{"name": name, "settings": {}, "metrics": [], "rollouts": [], **given})


def span(role: str, name: str, start_s: float, end_s: float, **attributes: Any) -> Span:
    return Span(role, name, start_s, end_s, attributes)


def embedded(html: str) -> tuple[Any, list[str]]:
    """The page's data as a browser would find it, and all tags that it would see."""
    tags: list[str] = []
    data: list[str] = []

    class Reader(HTMLParser):
        inside = False

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)
            self.inside = ("id", "data") in attrs

        def handle_data(self, text: str) -> None:
            if self.inside:
                data.append(text)

        def handle_endtag(self, tag: str) -> None:
            self.inside = False

    Reader().feed(html)
    return json.loads("".join(data)), tags


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    for folder in ("a/tiny-001", "b/tiny-001", "b/tiny-002"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "metrics.jsonl").touch()
    runs = load([tmp_path / f for f in ("a/tiny-001", "b/tiny-001", "b/tiny-002")])
    assert [run.name for run in runs] == ["a/tiny-001", "b/tiny-001", "tiny-002"]


def test_what_cannot_be_reported_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "not-a-run", tmp_path):
        load([tmp_path])
    with raises(ConfigError, "no-run-named"):
        load([])
    run = RunDirectory.create(tmp_path, "tiny", Config()).path
    with raises(ConfigError, "run-twice"):
        load([run, run / ".." / run.name])
    with raises(ConfigError, "too-many-timelines", 6, 7):
        html_page([made()] * 7, 1)
    with raises(ConfigError, "step-not-traced", 1):
        html_page([made()], 1)


def test_a_run_of_before_there_were_traces_says_what_it_lacks(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    for step in (1, 2, 3):
        run.append_metrics(step, {"objective/scores": step / 2, "timing_s/step": 2.0})
    data, _ = embedded(html_page(load([run.path])))
    assert [text.partition(":")[0] for text in data["runs"][0]["missing"]] == [
        "trace.json",
        "rollouts.jsonl",
    ]
    values = {"objective/scores": [0.5, 1, 1.5], "timing_s/step": [2, 2, 2]}
    assert data["runs"][0]["curves"] == {"steps": [1, 2, 3], "times": [2, 4, 6], "values": values}
    assert data["runs"][0]["timeline"] == {}
    assert data["runs"][0]["lengths"] is None


def test_spans_belong_to_every_step_that_they_touch(pair: list[Path]) -> None:
    run = load(pair[1:])[0]
    everything = RunDirectory(pair[1]).trace.read().spans
    assert list(run.steps) == list(range(1, 13))
    for step in run.steps.values():
        start_s, end_s = step.start_s, step.end_s
        naive = [s for s in everything if s.start_s < end_s and s.end_s > start_s]
        assert list(step.spans) == naive
    assert run.roles == ["generator", "critic", "reference", "learner"]


def test_shares_are_weighted_by_time() -> None:
    metrics = [
        {"step": 1, "time_s": 10.0, "utilisation/generator": 0.5, "idle_s/generator/scores": 5.0},
        {"step": 2, "time_s": 40.0, "utilisation/generator": 0.8, "idle_s/generator/scores": 4.0}
        | {"idle_s/generator/data": 2.0, "utilisation/a/b.py:f": 1.0},
    ]
    generator, judge = shares(made(metrics=metrics))
    assert (generator.role, generator.busy_s) == ("generator", 29.0)
    assert list(generator.idle_s.items()) == [("data", 2.0), ("scores", 9.0)]
    assert (judge.role, judge.busy_s, judge.idle_s) == ("a/b.py:f", 30.0, {})


def test_shares_agree_with_the_table_of_the_run(pair: list[Path]) -> None:
    run = load(pair[:1])[0]
    total_s = run.times_s()[12]
    for share in shares(run):
        assert share.busy_s + sum(share.idle_s.values()) == pytest.approx(total_s)
        busy = [s for s in RunDirectory(pair[0]).trace.read().spans if s.role == share.role]
        naive = sum(s.end_s - s.start_s for s in busy if not s.waits)
        assert share.busy_s == pytest.approx(naive)


def test_roles_of_several_runs_are_in_one_order() -> None:
    def run(*roles: str) -> LoadedRun:
        return made(metrics=[{"step": 1, "time_s": 1.0} | {f"utilisation/{r}": 1.0 for r in roles}])

    runs = [run("all devices", "learner", "critic"), run("critic 0", "generator 1", "generator 0")]
    assert payload(runs)["roles"] == [
        *("generator 0", "generator 1", "critic", "critic 0", "learner", "all devices"),
    ]


def test_only_settings_that_differ_are_listed() -> None:
    runs = [
        made(settings={"seed": 3, "out": "a", "observe.samples": 1, "rollout.batch": 8}),
        made(settings={"seed": 0, "out": "b", "observe.samples": 2, "rollout.batch": 16, "new": 1}),
        made(),
    ]
    assert differing_settings(runs) == [
        ("new", [None, 1, None]),
        ("rollout.batch", [8, 16, None]),
    ]
    assert differing_settings(runs[:1]) == []


def test_lengths_are_counted_in_bins_three_to_a_doubling(pair: list[Path]) -> None:
    assert length_edges(9) == [0, 1, 2, 3, 4, 5, 6, 8, 10]
    assert length_edges(0) == [0, 1]
    assert length_edges(4) == [0, 1, 2, 3, 4, 5]
    assert length_edges(16)[-3:] == [13, 16, 17]  # not 20: no response has 17 tokens
    data = payload(load(pair))
    for path, run in zip(pair, data["runs"], strict=True):
        lengths = [r.tokens for r in RunDirectory(path).read_rollouts()]
        counts, _ = np.histogram(lengths, data["edges"])
        assert run["lengths"]["counts"] == counts.tolist()
        assert run["lengths"]["total"] == 12 * BATCH
        assert run["lengths"]["median"] == pytest.approx(np.quantile(lengths, 0.5))
        assert run["lengths"]["p95"] == pytest.approx(np.quantile(lengths, 0.95))
        assert run["lengths"]["max"] == max(lengths)


def test_bars_are_cut_to_the_step_and_waits_fill_the_rest() -> None:
    step = TracedStep(
        3,
        10.0,
        20.0,
        (
            span("learner", "update", 16.0, 20.0, rollouts=[1, 2], rollouts_count=9, tokens=70),
            span("generator", "gen", 8.0, 16.0, version=2),
            span("task", "score/task", 15.0, 16.0),
            span("learner", "wait", 9.0, 16.0, cause="stragglers"),
        ),
    )
    assert bars(step) == [
        Bar("generator", "gen", 10.0, 16.0, version=2),
        Bar("task", "score", 15.0, 16.0),
        Bar("learner", "update", 16.0, 20.0, 70, None, [1, 2], 9),
    ]
    assert waits(step, ["generator", "task", "learner"]) == [
        Bar("generator", "weights", 16.0, 20.0),
        Bar("task", "stragglers", 10.0, 15.0),
        Bar("task", "weights", 16.0, 20.0),
        Bar("learner", "stragglers", 10.0, 16.0),
    ]


def test_too_many_bars_are_joined_with_their_neighbours() -> None:
    calls = [span("critic", "prefill", i / 100, (i + 1) / 100, tokens=2) for i in range(400)]
    pause = [span("critic", "prefill", 6 + i / 100, 6 + (i + 1) / 100, tokens=1) for i in range(50)]
    step = TracedStep(1, 0.0, 10.0, (*calls, *pause, span("learner", "update", 8, 9)))
    first, second, update = bars(step)
    assert (first.start_s, first.end_s, first.tokens, first.spans) == (0.0, 4.0, 800, 400)
    assert (second.start_s, second.end_s, second.tokens, second.spans) == (6.0, 6.5, 50, 50)
    assert update == Bar("learner", "update", 8, 9)


def test_throughput_is_the_mean_over_time_not_over_steps() -> None:
    metrics = [
        {"step": 1, "time_s": 1.0, "perf/samples_per_s": 10.0},
        {"step": 2, "time_s": 10.0, "perf/samples_per_s": 1.0},
    ]
    assert payload([made(metrics=metrics)])["runs"][0]["rate"] == pytest.approx(1.9)
    assert payload([made()])["runs"][0]["rate"] is None


def test_the_most_that_a_gpu_held_is_shown_by_process() -> None:
    own = "memory/learner/peak_gb", "memory/learner/reserved_gb"
    metrics: list[dict[str, Any]] = [
        {"step": i, "memory/learner_gb": 9.0, own[0]: peak, own[1]: 8.0 - i}
        for i, peak in ((1, 3.0), (2, 4.0))
    ]
    (shown,) = payload([made(metrics=metrics)])["runs"]
    assert shown["gpu_memory"] == [("learner", 4.0, 7.0)]
    (without,) = payload([made(metrics=[{"step": 1, "memory/learner_gb": 9.0}])])["runs"]
    assert without["gpu_memory"] == []


def test_long_curves_are_averaged() -> None:
    metrics = [
        {"step": i, "time_s": 2.0 * i, "objective/scores": float(i % 2)} for i in range(1, 4001)
    ]
    curves = payload([made(metrics=metrics)])["runs"][0]["curves"]
    steps, times_s, values = curves["steps"], curves["times"], curves["values"]["objective/scores"]
    assert steps == list(range(4, 4001, 4))
    assert times_s == [2 * step for step in steps]
    assert values == [0.5] * 1000


def test_long_timelines_show_every_nth_step(
    pair: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = load(pair)
    whole = payload(runs)["runs"]
    assert [list(map(int, run["timeline"])) for run in whole] == [list(range(1, 13))] * 2
    size = sum(len(json.dumps(rows)) for run in whole for rows in run["timeline"].values())
    monkeypatch.setattr("stretto.observe.report.page.TIMELINE_CHARS", size * 0.4)
    thinned = payload(runs, step=7)["runs"]
    assert [list(map(int, run["timeline"])) for run in thinned] == [[1, 3, 6, 7, 9, 12]] * 2
    assert thinned[0]["timeline"]["6"] == whole[0]["timeline"]["6"]


def test_a_timeline_row_says_where_a_bar_stands(pair: list[Path]) -> None:
    run = load(pair[:1])[0]
    data = payload([run])
    start_s, length_s, drawn, idle = data["runs"][0]["timeline"]["5"]
    step = run.steps[5]
    assert start_s == pytest.approx(step.start_s, rel=1e-5)
    assert length_s == pytest.approx(step.end_s - step.start_s, rel=1e-5)
    for row, bar in zip(drawn, bars(step), strict=True):
        assert run.roles[row[0]] == bar.role
        assert data["kinds"][row[1]][0] == f"var(--kind-{bar.kind})"
        unit_s = length_s / data["resolution"]
        assert row[2] * unit_s == pytest.approx(bar.start_s - start_s, abs=unit_s)
        assert row[3] * unit_s == pytest.approx(bar.end_s - bar.start_s, abs=unit_s)
        assert row[4:8] == [bar.tokens, bar.version, bar.count, bar.rollouts][: len(row) - 4]
    assert sum(row[3] for row in [*drawn, *idle]) == pytest.approx(4 * data["resolution"], rel=0.01)


def evaluated(
    rate: float, kl: float | None = None, by: str = "model:gold", sft: str = "sft", **more: Any
) -> dict[str, Any]:
    """A record of an evaluation."""
    figures: dict[str, Any] = {"win_rate": {"by": by, "rate": rate, "standard_error": 0.1}, **more}
    if kl is not None:
        figures["kl"] = {"sft": sft, "kl": kl, "standard_error": 0.5, "perplexity": 2 * kl}
    return {"model": "m", "what": list(figures), "figures": figures, "settings": {}}


def dialled(
    algorithm: str, n: int, rewards: list[float], *evaluations: dict[str, Any], name: str = "run"
) -> LoadedRun:
    """A run with an algorithm and an off-policyness."""
    return made(
        name,
        settings={"algorithm.name": algorithm, "schedule.weight_sync_interval": n},
        metrics=[{"step": i, "objective/scores": r} for i, r in enumerate(rewards, start=1)],
        evaluations=evaluations,
    )


def test_evaluations_are_kept_with_their_run(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    assert run.read_evaluations() == []
    for rate in (0.25, 0.5):
        run.append_evaluation(evaluated(rate, 3.0))
    assert load([run.path])[0].evaluations == [evaluated(0.25, 3.0), evaluated(0.5, 3.0)]
    with pytest.raises(StorageError, match=r"cannot write '.*evaluations.jsonl'"):
        RunDirectory(tmp_path / "nowhere").append_evaluation(evaluated(0.5))
    with run.evaluations_file.open("a") as file:
        file.write('{"model": "m", "fig')  # a crash
    assert len(run.read_evaluations()) == 2
    assert run.append_evaluation(evaluated(0.75, 3.0))
    assert len(run.read_evaluations()) == 3
    with run.evaluations_file.open("a") as file:
        file.write('{"model": "m"}\n')
    with raises(StateError, "damaged-record", run.evaluations_file, "line 4", "figures"):
        load([run.path])


def test_the_latest_pass_at_1_stands_with_its_error_and_overlap() -> None:
    figures = {"pass@1": 0.75, "pass@1_standard_error": 0.0625, "overlap": None}
    figures |= {"mean_score": 0.875, "mean_score_standard_error": 0.03125}
    later = {**figures, "pass@1": 0.5, "overlap": 0.25}
    runs = [
        made("a", evaluations=[{"figures": f} for f in (figures, later)] + [evaluated(0.5)]),
        made("b", evaluations=[{"figures": figures}]),
        made("c", evaluations=[evaluated(0.5), {"figures": {"accuracy": 0.5}}]),  # an old record
    ]
    found = [run["verified"] for run in payload(runs)["runs"]]
    scores = {"mean_score": [0.875, 0.03125]}
    assert found == [
        {"pass_at_1": [0.5, 0.0625], **scores, "overlap": 0.25},
        {"pass_at_1": [0.75, 0.0625], **scores, "overlap": None},
        None,
    ]


def test_win_rates_stand_with_the_kl_of_the_same_samples() -> None:
    judged: dict[str, Any] = {"judge": {"judge": "llm", "rate": 0.75, "standard_error": 0.2}}
    runs = [
        made(evaluations=[evaluated(0.5, 3.0, sft="runs/sft-001/model"), evaluated(0.9)]),
        made(
            evaluations=[
                evaluated(0.25, 4.0, sft="runs/sft-001/model", **judged),
                evaluated(0.1, 5.0, sft="other"),
            ]
        ),
        made(),
    ]

    def point(run: int, rate: float, kl: float, error: float = 0.1) -> dict[str, float]:
        return {
            "run": run,
            "rate": rate,
            "rate_error": error,
            "kl": kl,
            "kl_error": 0.5,
            "perplexity": 2 * kl,
        }

    assert pareto(runs) == [
        {"by": "model:gold", "sft": "sft-001", "points": [point(0, 0.5, 3.0), point(1, 0.25, 4.0)]},
        {"by": "LLM judge llm", "sft": "sft-001", "points": [point(1, 0.75, 4.0, 0.2)]},
        {"by": "model:gold", "sft": "other", "points": [point(1, 0.1, 5.0)]},
    ]
    assert pareto([made()]) == []


def test_outcomes_by_off_policyness_are_means_over_runs() -> None:
    runs = [
        dialled("ppo", 16, [0.0] * 18 + [2.0, 4.0], evaluated(0.4, 9.0)),
        dialled("ppo", 1, [1.0], evaluated(0.9, 1.0), evaluated(0.5, 3.0)),
        dialled("ppo", 1, [2.0]),
        dialled("copg", 4, [], evaluated(0.6)),
    ]
    charts = {chart["title"]: chart for chart in off_policy(runs)}
    reward, rate, kl, perplexity = charts.values()
    assert reward["lines"] == [
        {
            "algorithm": "ppo",
            "points": [[1, 1.5], [16, 3.0]],
            "runs": [[1, 1.0, 1], [1, 2.0, 2], [16, 3.0, 0]],
        }
    ]
    assert [(line["algorithm"], line["points"]) for line in rate["lines"]] == [
        ("ppo", [[1, 0.5], [16, 0.4]]),
        ("copg", [[4, 0.6]]),
    ]
    assert (rate["is_share"], reward["is_share"]) == (True, False)
    assert kl["lines"][0]["points"] == [[1, 3.0], [16, 9.0]]
    assert perplexity["lines"][0]["points"] == [[1, 6.0], [16, 18.0]]
    assert off_policy(runs[1:3]) == []
    assert off_policy([made(), runs[0]]) == []


def test_of_many_runs_only_what_they_came_to_is_shown(pair: list[Path]) -> None:
    runs = load(pair)
    many = [dataclasses.replace(runs[i % 2], name=f"r{i}") for i in range(5)]
    many += [dialled("copg", n, [0.5], evaluated(0.5, 3.0)) for n in (1, 4)]
    data, _ = embedded(html_page(many))
    assert data["in_brief"] is True
    assert data["algorithms"] == ["ppo", "copg"]
    assert all(run["timeline"] == {} for run in data["runs"])
    assert [point["run"] for point in data["pareto"][0]["points"]] == [5, 6]
    colours = [f"--run-{i}:var(--group-{int(i > 4)});" for i in range(7)]
    assert "".join(colours) in html_page(many)
    assert embedded(html_page(many[:6]))[0]["in_brief"] is False


def test_the_page_needs_nothing_else_and_data_cannot_break_it(pair: list[Path]) -> None:
    runs = load(pair)
    _, plain = embedded(html_page(runs))
    evil = "</script><img src=x onerror=alert(1)><!-- $title {{data}} &amp;"
    runs[0] = dataclasses.replace(runs[0], name=evil, settings={"stop": evil})
    html = html_page(runs)
    data, tags = embedded(html)
    assert tags == plain
    assert data["runs"][0]["name"] == evil
    assert dict(data["settings"])["stop"] == [evil, None]
    assert set(re.findall(r"https?://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href)=|@import|url\((?!#)", re.sub(r"src=x", "", html))


def test_curves_are_of_all_metrics_and_have_gaps_where_those_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics: list[dict[str, Any]] = [
        {"step": 1, "time_s": 1.5, "objective/kl": 0.5, "utilisation/learner": 0.5},
        {"step": 2, "time_s": 2.5, "objective/kl": None, "eval/pass@1": 0.25},
        {"step": 3, "time_s": 4.5, "objective/kl": 1.5, "eval/pass@1": 0.75, "lr": None},
    ]
    run = made(metrics=metrics)
    kl, passed = [0.5, None, 1.5], [None, 0.25, 0.75]
    assert payload([run])["runs"][0]["curves"] == {
        "steps": [1, 2, 3],
        "times": [1.5, 2.5, 4.5],
        "values": {"objective/kl": kl, "eval/pass@1": passed},
    }
    (new,) = news([run], [2])["runs"]
    values = {"objective/kl": [1.5], "eval/pass@1": [0.75]}
    assert new["curves"] == {"steps": [3], "times": [4.5], "values": values}
    assert new["steps"] == 3
    (first,) = news([made(metrics=[{"step": 0, "time_s": 0, "eval/score": 0.5}])])["runs"]
    assert (first["curves"]["steps"], first["steps"]) == ([0], 0)
    monkeypatch.setattr("stretto.observe.report.page._POINTS", 2)
    assert payload([run])["runs"][0]["curves"] == {
        "steps": [2, 3],
        "times": [2.5, 4.5],
        "values": {"objective/kl": [0.5, 1.5], "eval/pass@1": [0.25, 0.75]},
    }


def sample(step: int, prompt: str = "2+2?", reward: float = 1.0, **more: Any) -> dict[str, Any]:
    row = {"step": step, "prompt": prompt, "response": "4", "reward": reward, "finish": "stop"}
    return {**row, "tokens": 2, "scores": {"task": reward, "judge": None}, **more}


def test_samples_are_those_of_every_nth_step_where_all_were_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = {k: v for k, v in sample(1).items() if k != "scores"}
    second = sample(2, reward=float("nan"), extra={"judge/why": "rude", "judge/all": [1, 2]})
    run = made(samples=[old, second, *map(sample, range(3, 10))])
    row = ["2+2?", "4", 1.0, "stop", 2]
    shown = payload([run])["runs"][0]["samples"]
    assert list(shown) == [str(step) for step in range(1, 10)]
    assert shown["1"] == [[*row, {}]]
    scores = {"task": None, "judge": None, "judge/why": "rude", "judge/all": None}
    assert shown["2"] == [["2+2?", "4", None, "stop", 2, scores]]
    assert shown["3"] == [[*row, {"task": 1.0, "judge": None}]]
    assert list(news([run], [7])["runs"][0]["samples"]) == ["8", "9"]
    monkeypatch.setattr("stretto.observe.report.page.SAMPLE_CHARS", 200)
    assert list(payload([run])["runs"][0]["samples"]) == ["1", "3", "6", "9"]


def test_a_run_is_told_with_what_repeats_it(tmp_path: Path) -> None:
    folder = RunDirectory.create(tmp_path, "tiny", Config.model_validate({"seed": 7}))
    folder.save_machine(Machine("a CPU", 2, 2, (), "2.0"))
    folder.save_machine(Machine("a CPU", 4, 4, (), "2.0"))
    begun, resumed = folder.read_starts()
    told = dict(about([*load([folder.path]), made()]))
    versions = ", ".join(f"{name} {version}" for name, version in begun["versions"].items())
    assert told == {
        "begun": [begun["date"], None],
        "resumed": [resumed["date"], None],
        "command": [begun["command"], None],
        "seed": [7, None],
        "versions": [versions, None],
        "machine": ["a CPU, 4 cores, torch 2.0", None],
    }
    assert about([made()]) == []


def test_four_runs_of_500_steps_stay_small(tmp_path: Path) -> None:
    (run,) = load([fake_run(tmp_path, "long", True, 500).path])
    html = html_page([dataclasses.replace(run, name=f"run {i}") for i in range(4)])
    assert len(html.encode()) < 5e6
    data, _ = embedded(html)
    assert [run["steps"] for run in data["runs"]] == [500] * 4


def test_the_picture_is_to_scale(pair: list[Path]) -> None:
    runs = load(pair)
    root = ET.fromstring(timeline_svg(runs, 5))
    ns = "{http://www.w3.org/2000/svg}"
    rects = [r.attrib for r in root.findall(f"{ns}rect") if "x" in r.attrib]
    trains = [r for r in rects if r["fill"] == "var(--kind-update)" and r["height"] == "18"]
    updates = [next(b for b in bars(run.steps[5]) if b.kind == "update") for run in runs]
    longest_s = max(run.steps[5].end_s - run.steps[5].start_s for run in runs)
    scale = (960 - 112 - 20) / longest_s
    for rect, run, bar in zip(trains, runs, updates, strict=True):
        start_s = run.steps[5].start_s
        assert float(rect["x"]) == pytest.approx(112 + (bar.start_s - start_s) * scale, abs=0.01)
        assert float(rect["width"]) + 0.6 == pytest.approx(
            (bar.end_s - bar.start_s) * scale, abs=0.01
        )
    texts = ["".join(t.itertext()) for t in root.iter(f"{ns}text")]
    assert [t for t in texts if t.startswith(("sync", "oppo"))] == [
        f"{run.name}step 5, {seconds_text(run.steps[5].end_s - run.steps[5].start_s)}"
        for run in runs
    ]
    assert {"generate", "prefill", "train", "waits for stragglers"} <= set(texts)
    with raises(ConfigError, "step-not-traced", 99, "sync-001", "1 to 12"):
        timeline_svg(runs, 99)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.25, "250 ms"),
        (1.2345, "1.23 s"),
        (599, "599 s"),
        (720, "12 min"),
        (11520, "3.2 h"),
        (3.6e6, "1000 h"),
    ],
)
def test_times_are_written_with_three_digits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


PREDICTED: dict[str, Any] = {
    "title": "seconds a step, means of steps 4 to 40",
    "phases": [["generation", 0.25, 0.2], ["moving responses", 0.0, 0.5], ["whole step", 2.0, 2.1]],
}


def test_predictions_are_handed_on_to_the_page(pair: list[Path]) -> None:
    told = [PREDICTED, {"why": "the run took <3> steps"}]
    data, _ = embedded(html_page(load(pair), None, told))
    assert data["predictions"] == told
    assert embedded(html_page(load(pair)))[0]["predictions"] == []


def test_the_command_writes_what_is_asked(
    pair: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = list(map(str, pair))
    assert main(["report", *runs]) == 0
    page = embedded((tmp_path / "report.html").read_text())[0]
    printed = capsys.readouterr().out
    assert page["step"] is None
    assert "report.html" in printed
    for run, told in zip(load(pair), page["predictions"], strict=True):
        assert f"{run.name}, measured and as the simulator predicts it" in printed
        name, measured_s, predicted_s = told["phases"][-1]
        assert re.search(f"{name} +{measured_s:.4f} +{predicted_s:.4f} ", printed)
    assert main(["report", runs[0], "--out", "one.html", "--step", "7"]) == 0
    assert embedded((tmp_path / "one.html").read_text())[0]["step"] == 7
    for arguments, message in (
        ([*runs, "--step", "99"], "step 99 is in no run's trace"),
        ([*runs, "--step", "-1"], "--step -1: must be"),
        ([*runs, "--out", "no/such/folder.html"], "cannot write"),
        ([str(tmp_path)], "not a run directory"),
    ):
        assert main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err


@needs_browser
def test_a_browser_draws_the_page(pair: list[Path], tmp_path: Path) -> None:
    runs = load(pair)
    page = dom(html_page(runs, 5, [PREDICTED, {"why": "the run took <3> steps"}]), tmp_path)
    drawn = sum(len(bars(run.steps[5])) for run in runs)
    assert page.count('class="work"') == drawn
    for title in ("Reward", "Chunk size [tokens]", "responses", "rollout", "waits for data"):
        assert title in page
    assert "Win-rate against KL" not in page
    assert "How off-policy" not in page
    for row in (
        "<td>generation</td><td>250 ms</td><td>200 ms</td><td>0.80</td>",
        "<td>moving responses</td><td>0 s</td><td>500 ms</td><td>-</td>",
        "<td>whole step</td><td>2 s</td><td>2.1 s</td><td>1.05</td>",
    ):
        assert row in page
    assert f"<li>{PREDICTED['title']}</li>" in page
    assert f"<li>{runs[1].name}: no prediction: the run took &lt;3&gt; steps</li>" in page


@needs_browser
def test_a_browser_draws_outcomes(tmp_path: Path) -> None:
    verified: dict[str, Any] = {"pass@1": 0.5, "pass@1_standard_error": 0.0625, "overlap": 0.25}
    verified |= {"mean_score": 0.75, "mean_score_standard_error": 0.125}
    runs = [
        dialled(name, n, [0.1, 0.5], evaluated(0.6 - n / 100, n, **verified), name=f"{name}-{n}")
        for name in ("ppo", "online-dpo")
        for n in (1, 2, 4, 8)
    ]
    page = dom(html_page(runs), tmp_path)
    # Each run is a point against KL and against perplexity, and one in each of four charts by N.
    assert page.count('class="work"') == len(runs) * (2 + 4)
    for text in ("Win-rate against KL", "KL to sft [nats a response]", ">online-dpo-8<", "8 runs:"):
        assert text in page
    for cell in ("50.0 % ± 6.3 %", "0.75 ± 0.125", "25.0 %"):
        assert page.count(f"<td>{cell}</td>") == len(runs)
    assert ">Curves<" not in page


@needs_browser
def test_a_page_opens_at_a_step_of_all_runs_and_compares_like_with_like(tmp_path: Path) -> None:
    runs = load([fake_run(tmp_path, f"of-{n}", False, steps=n).path for n in (3, 12)])
    page = dom(html_page(runs), tmp_path)
    assert "is not in its trace<" not in page
    assert "<td>another task</td>" not in page
    other = dataclasses.replace(runs[1], settings={**runs[1].settings, "task.name": "other"})
    assert "<td>another task</td>" in dom(html_page([runs[0], other]), tmp_path)


EXPLORED = """
const told = {smoothed: smoothed([1, 3, 2], 0.5), charts: at("curves").children.length};
const ranges = [[1, 30, 2], [5.551, 5.559, 5], [10, 10.02, 5], [-2e-7, 2e-7, 3], [0, 1500, 5]];
told.axes = ranges.map((range) => labelled(ticks(...range)).map(([, text]) => text));
told.marked = marked("<|im_start|>user: 1 < 2<|im_end|>").map((part) => part.className ?? part);
told.numbers = [-2e-7, 1.5e-7, 1e6, 1234567, 0.25, 100].map((value) => number(value));
const all = (query) => [...document.querySelectorAll(query)];
const lines = () => all("#curves path.curve").map((p) => p.getAttribute("d"));
const chart = document.querySelector("#curves svg"), box = chart.getBoundingClientRect();
chart.setPointerCapture = () => {};
view.painted = curveCharts;
for (const [type, x] of [["down", 150], ["move", 250], ["up", 250]]) {
  const place = {clientX: box.left + x, clientY: box.top + 50, pointerId: 1};
  chart.dispatchEvent(new PointerEvent("pointer" + type, place));
}
told.range = view.range;
const narrow = lines();
at("whole").click();
told.whole = [view.range, lines().join() !== narrow.join()];
at("smoothing").value = 0;
at("smoothing").dispatchEvent(new Event("input"));
told.raw = document.querySelectorAll("#curves path[stroke-opacity]").length;
const cells = (n) => all(`#samples td:nth-child(${n})`).map((c) => c.textContent);
const type = (id, text) => {
  at(id).value = text;
  at(id).dispatchEvent(new Event("input"));
};
told.steps = cells(1);
type("sample-search", "TWO");
told.found = cells(7);
type("sample-search", "");
all("#samples th button").find((b) => b.textContent === "reward").click();
told.rewards = cells(2);
type("sample-step", 1);
told.first = cells(1);
document.title = JSON.stringify(told);
"""


@needs_browser
def test_curves_zoom_and_smooth_and_samples_are_found(tmp_path: Path) -> None:
    metrics = [
        {"step": s, "time_s": s, "objective/kl": s % 5, "eval/score": s} for s in range(1, 41)
    ]
    rows = [sample(1, "one"), sample(1, "two", 0.5), sample(2, "three", -1.0)]
    page = dom(html_page([made(metrics=metrics, samples=rows)]), tmp_path, EXPLORED)
    found = re.search("<title>(.*?)</title>", page)
    assert found
    told = json.loads(unescape(found[1]))
    # Averages by hand, without their bias: 1; (0.25 + 1.5) / 0.75; (1.75 / 2 + 1) / 0.875.
    assert told["smoothed"] == pytest.approx([1.0, 1.75 / 0.75, 1.875 / 0.875])
    assert told["charts"] == 2
    assert told["numbers"] == ["-2e-7", "1.5e-7", "1e+6", "1.23e+6", "0.25", "100"]
    assert told["axes"] == [
        ["10", "20", "30"],  # two ticks would fit, and one says too little
        ["5.552", "5.554", "5.556", "5.558"],
        ["10", "10.005", "10.01", "10.015", "10.02"],
        ["-2e-7", "0", "2e-7"],
        ["0", "500", "1000", "1500"],
    ]
    assert told["marked"] == ["", "mark", "user: 1 < 2", "mark", ""]
    low, high = told["range"]
    assert 1 < low < high < 40
    assert told["whole"] == [None, True]
    assert told["raw"] == 0
    assert told["steps"] == ["2", "1", "1"]
    assert told["found"] == ["two"]
    assert told["rewards"] == ["1", "0.5", "-1"]
    assert told["first"] == ["1", "1"]


@contextmanager
def served(*runs: Path) -> Iterator[report.RunServer]:
    with report.RunServer(list(map(str, runs))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(
    server: report.RunServer, path: str, method: str = "GET", host: str = ""
) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.server_port)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_a_watched_run_is_served_as_it_grows_and_to_the_loopback_alone(tmp_path: Path) -> None:
    later = tmp_path / "later-001"
    run = RunDirectory.create(tmp_path, "tiny", Config())
    run.append_metrics(1, {"objective/kl": 0.5})
    with served(run.path, later) as server:
        assert server.server_address[0] == "127.0.0.1"
        status, page = asked(server, "/")
        data, _ = embedded(page)
        assert (status, data["live"]) == (200, 2000)
        assert [r["steps"] for r in data["runs"]] == [1, 0]
        assert data["runs"][1]["missing"] == ["everything so far: it has not begun"]
        assert "connect-src 'self'" in page
        assert "connect-src" not in html_page([made()])

        assert asked(server, "/data?after=1&after=0") == (204, "")
        run.append_samples(2, [Sample("2+2?", "4", 1.0, "stop", 2, {"task": 1.0})])
        run.append_metrics(2, {"objective/kl": 0.75})
        RunDirectory(later).path.mkdir()
        RunDirectory(later).append_metrics(1, {"lr": 1.0})
        first, second = json.loads(asked(server, "/data?after=1&after=0")[1])["runs"]
        assert first["curves"]["steps"] == [2]
        assert first["curves"]["values"] == {"objective/kl": [0.75]}
        assert first["samples"] == {"2": [["2+2?", "4", 1.0, "stop", 2, {"task": 1.0}]]}
        assert (first["steps"], second["steps"]) == (2, 1)
        run.rewind(1)  # as a resumed run does
        (first, _) = json.loads(asked(server, "/data?after=2&after=1")[1])["runs"]
        assert (first["steps"], first["curves"]["steps"]) == (1, [])

        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1.evil", "["):
            assert asked(server, "/", host=host)[0] >= 400
        for host in ("localhost", f"127.0.0.1:{server.server_port}", "[::1]:80", "LOCALHOST:9"):
            assert asked(server, "/data?after=1&after=1", host=host)[0] == 204
        for path in ("/config.toml", "/../tiny-001/config.toml", "//etc/passwd", "/index.html"):
            assert asked(server, path)[0] == 404
        for path in ("/data", "/data?after=1", "/data?after=x&after=0"):
            assert asked(server, path)[0] == 400
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert asked(server, "/", method)[0] == 501
        run.metrics_file.write_text('{"colour": 3}\n')
        for _ in range(2):
            status, text = asked(server, "/data?after=1&after=1")
            assert (status, "line 1 has no 'step'" in text) == (500, True)
        run.metrics_file.write_text("")
        run.append_metrics(1, {"lr": 1.0})
        run.config_file.write_text("no TOML")
        status, text = asked(server, "/")
        assert (status, "line 1" in text) == (500, True)
    with pytest.raises(ConnectionRefusedError):
        asked(server, "/")


def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "too-many-runs", 6, 7):
        report.RunServer([str(tmp_path / str(i)) for i in range(7)])
    with raises(ConfigError, "no-run-named"):
        report.RunServer([])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for none in (port, -1, 70_000):
            with raises(ConfigError, "port-taken", f"`port = {none}`"):
                report.RunServer([tmp_path], none)


def test_a_page_that_is_closed_before_its_answer_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(server: report.RunServer) -> str:
        raise BrokenPipeError

    monkeypatch.setattr(report.RunServer, "page", closed)
    with served(tmp_path) as server, pytest.raises(RemoteDisconnected):
        asked(server, "/")
    assert capsys.readouterr().err == ""


def test_watching_ends_in_order_on_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[report.RunServer] = []

    def stopped(server: report.RunServer) -> None:
        seen.append(server)
        raise KeyboardInterrupt

    monkeypatch.setattr(report.RunServer, "serve_forever", stopped)
    (tmp_path / "tiny-001").mkdir()
    assert main(["watch", str(tmp_path / "tiny-001")]) == 130
    out = capsys.readouterr()
    assert re.search(r"watching .*tiny-001 at http://127\.0\.0\.1:\d+/ ", out.out)
    assert out.err == "stretto: interrupted\n"
    assert seen[0].socket.fileno() == -1


@needs_browser
@pytest.mark.parametrize("steps", [0, 1])
def test_a_browser_follows_a_run(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a step the page has no place for curves; it gets one with the first step."""
    monkeypatch.setattr("stretto.observe.report.server.POLL_MS", 20)
    run = RunDirectory.create(tmp_path, "tiny", Config())

    def step(number: int) -> None:
        run.append_samples(number, [Sample("2+2?", "four", 1.0, "stop", 2)])
        run.append_metrics(
            number, {"objective/kl": 0.5, "eval/score" if number > 1 else "lr": 0.25}
        )

    if steps:
        step(1)
    given = report.RunServer.data

    def growing(server: report.RunServer, after: Sequence[int]) -> str:
        if after[0] < 3:
            step(after[0] + 1)
        return given(server, after)

    monkeypatch.setattr(report.RunServer, "data", growing)
    with served(run.path) as server:
        page = dom(server.url, tmp_path)
    assert "live: step 3; timelines" in page
    assert ">Evaluations, mean score</h3>" in page
    assert page.count('<div class="text">four</div>') == 3
