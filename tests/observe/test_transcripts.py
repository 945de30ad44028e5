"""Episodes as records, transcripts, traces, timelines and pages have them."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import dom, needs_browser
from docs_helpers import ROOT
from helpers import ManualClock
from stretto.config import Config
from stretto.observe import RunDirectory
from stretto.observe.idle import CAUSES, time_of_roles
from stretto.observe.report import html_page, load
from stretto.observe.report.run_data import LoadedRun
from stretto.observe.report.style import CAUSES as TITLES
from stretto.observe.report.style import HATCHINGS, KINDS
from stretto.observe.report.timeline import MAX_BARS, bars
from stretto.observe.run_directory import RolloutRecord, Sample
from stretto.observe.spans import Span, Spans, Window
from stretto.observe.trace import COUNTS, TracedStep
from stretto.observe.transcripts import MOST_CHARS, cut, plain, transcript, turn_sizes
from stretto.observe.waiting import LANES, Lanes, profile
from stretto.schedules.rollout import Rollout
from stretto.types import Chunk, FinishReason, Message, Observation, Prompt, Sampling

TEXTS = {1: "17*3=", 2: "<call>", 3: "<|im_end|>", 4: "\n<|tool|>51", 5: "It is 51."}


def decode(tokens: Any) -> str:
    return "".join(TEXTS[token] for token in tokens)


def drawn(rollout: Rollout, tokens: list[int], finish: FinishReason) -> None:
    logprobs = np.zeros(len(tokens), np.float32)
    chunk = Chunk(rollout.id, len(rollout), np.array(tokens, np.int32), logprobs, 4, finish)
    rollout.append(chunk)


def calculation() -> Rollout:
    """Two turns: a call of a calculator, and the answer."""
    prompt = Prompt(0, (9, 9), "17*3?")
    rollout = Rollout(7, prompt, 0, sampling=Sampling(64, max_turn_tokens=8))
    rollout.observe(Observation(7, 0, np.empty(0, np.int32)))
    drawn(rollout, [1, 2, 3], FinishReason.TURN)
    call = {"name": "calculator", "arguments": {"expression": "17*3"}, "status": "ok"}
    said = Message(role="assistant", content="17*3=<call>")
    answer = Message(role="tool", content="51")
    record = {"seconds": 0.25, "calls": [{**call, "seconds": 0.2, "error": ""}]}
    context = np.array([4, 4], np.int32)
    observed = Observation(7, 1, context, reward=0.5, messages=(said, answer), record=record)
    rollout.append(rollout.observe(observed))
    rollout.turn_rewards.append(0.5)
    drawn(rollout, [5, 3], FinishReason.TURN)
    rollout.observe(Observation(7, 2, np.empty(0, np.int32), ended_by="environment"))
    rollout.ended_by = "environment"
    return rollout


def test_a_transcript_has_turns_calls_rewards_and_what_was_trained_on() -> None:
    told = transcript(calculation(), decode)
    assert (told["episode"], told["ended_by"]) == (7, "environment")
    first, second = told["turns"]
    assert [m["role"] for m in first["messages"]] == ["assistant", "tool"]
    assert first["calls"][0]["arguments"] == {"expression": "17*3"}
    assert first["calls"][0]["result"] == "51"
    assert (first["tokens"], first["context"], first["wait_s"]) == (3, 2, 0.25)
    assert (first["reward"], second["reward"]) == (0.5, None)
    assert (second["tokens"], second["context"], second["wait_s"], second["calls"]) == (2, 0, 0, [])
    assert told["pieces"] == [
        {"text": "17*3=<call><|im_end|>", "tokens": 3, "turn": 0, "sampled": True},
        {"text": "\n<|tool|>51" * 2, "tokens": 2, "turn": 0, "sampled": False},
        {"text": "It is 51.<|im_end|>", "tokens": 2, "turn": 1, "sampled": True},
    ]
    json.dumps(told, allow_nan=False)


def test_pieces_are_the_whole_response() -> None:
    rollout = calculation()
    pieces = transcript(rollout, decode)["pieces"]
    assert "".join(piece["text"] for piece in pieces) == decode(rollout.tokens)
    trained = [p["sampled"] for p in pieces for _ in range(p["tokens"])]
    assert trained == rollout.sampled.tolist()


def test_a_plain_response_is_recorded_as_ever(tmp_path: Path) -> None:
    rollout = Rollout(0, Prompt(0, (1,), ""), 0)
    assert transcript(rollout, decode) == {}
    run = RunDirectory.create(tmp_path, "tiny", Config())
    run.append_samples(1, [Sample("2+2?", "4", 1.0, "stop", 2)])
    run.append_rollouts(1, [rollout], {})
    for file in (run.samples_file, run.rollouts_file):
        assert not {"episode", "turns", "pieces", "ended_by"} & json.loads(file.read_text()).keys()


def test_a_rollouts_record_has_what_a_replay_needs(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    run.append_rollouts(1, [calculation()], {7: 1.0})
    (record,) = run.read_rollouts(in_flight=True)
    assert record.turns == [
        {"tokens": 3, "wait_s": 0.25, "context": 2},
        {"tokens": 2, "wait_s": 0.0, "context": 0},
    ]
    assert record.ended_by == "environment"
    assert (record.oldest_version, record.newest_version, record.tokens) == (4, 4, 7)
    assert record == RolloutRecord.of(1, calculation(), 1.0)


def test_context_that_comes_in_several_chunks_is_one_answer() -> None:
    rollout = calculation()
    rollout.context = [(3, 4), (4, 5)]
    assert turn_sizes(rollout) == turn_sizes(calculation())


def test_records_of_tools_become_plain_and_short() -> None:
    hostile = {"a": float("nan"), 1: [b"\xff", {"deep": [[[[[[[[1]]]]]]]]}], "x": {1}}
    json.dumps(plain(hostile), allow_nan=False)
    megabyte = cut("a" * 500_000 + "b" * 500_000)
    assert len(megabyte) < MOST_CHARS + 50
    assert megabyte.startswith("aaa")
    assert megabyte.endswith("bbb")
    assert "980,000 characters left out" in megabyte
    assert cut("a" * MOST_CHARS) == "a" * MOST_CHARS


def test_calls_at_once_are_counted() -> None:
    calls = [step(0.0, 4.0), step(1.0, 2.0), step(2.0, 3.0), step(6.0, 9.0)]
    whole = profile(calls, 0.0, 8.0, 10)
    assert whole == [(0, 1, 1), (1, 2, 2), (2, 3, 2), (3, 4, 1), (6, 8, 1)]
    assert profile(calls, 0.0, 8.0, 2) == [(0, 4, 2), (6, 8, 1)]
    assert profile([], 0.0, 8.0, 2) == []


def test_lanes_do_not_overlap_and_lose_no_time() -> None:
    rng = np.random.default_rng(0)
    starts = rng.uniform(0, 10, 200)
    calls = [step(s, s + d) for s, d in zip(starts, rng.exponential(1.0, 200), strict=True)]
    lanes = Lanes()
    early = [call for call in calls if call.end_s <= 5]
    placed = lanes.place(early) + lanes.place([call for call in calls if call.end_s > 5])
    by_lane: dict[str, list[Span]] = {}
    for lane, call in placed:
        by_lane.setdefault(lane, []).append(call)
    assert len(by_lane) == LANES + 1
    covered = profile([call for _, call in Lanes().place(calls)], 0.0, 99.0, 10_000)
    assert sum((b - a) * n for a, b, n in covered) == pytest.approx(
        sum(call.end_s - call.start_s for call in calls)
    )
    for own in by_lane.values():
        for before, after in pairwise(own):
            assert before.end_s <= after.start_s


def step(start_s: float, end_s: float, **more: Any) -> Span:
    return Span("environment", "step", start_s, end_s, {"rollout": 1, "turn": 0, **more})


def test_a_thousand_waiting_rollouts_stay_readable(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    ends = 1 + rng.exponential(2.0, 1000)
    calls = [step(1.0, float(end)) for end in ends]
    gen = Span("generator", "gen", 0.0, 1.0, {"rollouts": [1], "tokens": 5})
    run = RunDirectory.create(tmp_path, "tiny", Config())
    assert run.trace.append(1, Window(0.0, 20.0, (gen, *calls)), 0.0)
    events = json.loads(run.trace.path.read_text())
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert Counter(name.partition(" ")[0] for name in tracks)["environment"] == LANES + 1
    counter = [e for e in events if e["name"] == "rollouts that wait for their environment"]
    assert max(e["args"]["value"] for e in counter) == 1000
    assert counter[-1]["args"]["value"] == 0
    assert len(counter) <= 2 * COUNTS + 2
    read = run.trace.read()
    assert {span.role for span in read.spans} == {"generator", "environment"}
    (traced,) = read.steps
    drawn = bars(TracedStep(1, traced.start_s, traced.end_s, read.spans))
    waiting = [bar for bar in drawn if bar.role == "environment"]
    assert max(bar.count for bar in waiting) == 1000
    assert max(bar.height for bar in waiting) == 1.0
    assert len(waiting) <= 2 * MAX_BARS


def test_a_resumed_trace_goes_on_with_the_same_tracks(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    window = Window(0.0, 2.0, (step(0.0, 1.0), step(0.5, 1.5)))
    run.trace.append(1, window, 0.0)
    again = RunDirectory(run.path)
    again.rewind(1)
    again.trace.append(2, window, 2.0)
    events = json.loads(run.trace.path.read_text())
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert tracks == ["steps", "environment", "environment 2"]


def test_waiting_for_the_environment_is_a_cause_of_idleness() -> None:
    table = (ROOT / "docs" / "observing.md").read_text().partition("| cause | the role waits for |")
    documented = re.findall(r"^\| (\w+) \|", table[2].partition("\n\n")[0], re.MULTILINE)
    assert set(TITLES) == set(CAUSES) == {*documented, "other"}
    assert {"environment"} <= set(HATCHINGS) & set(KINDS)
    spans = [
        Span("generator", "gen", 0.0, 2.0, {}),
        Span("environment", "step", 1.0, 4.0, {}),
        Span("generator", "wait", 2.0, 3.0, {"cause": "environment"}),
        Span("learner", "update", 5.0, 6.0, {}),
    ]
    times = time_of_roles(spans, 0.0, 6.0)
    assert set(times) == {"generator", "learner"}  # an environment is no device
    # From 3 s on no role says why it waits, and the environment still answers until 4 s.
    assert times["generator"].idle == {
        "environment": [(2.0, 4.0)],
        "other": [(4.0, 5.0)],
        "weights": [(5.0, 6.0)],
    }
    assert times["learner"].idle == {
        "data": [(0.0, 2.0)],
        "environment": [(2.0, 4.0)],
        "other": [(4.0, 5.0)],
    }


def test_a_call_of_an_environment_is_no_step_of_the_run() -> None:
    spans = Spans(ManualClock())
    spans.add("environment", "step", 0.0, 2.0)
    spans.add("environment", "step", 1.0, 2.0)
    spans.add("generator", "gen", 0.0, 1.0)
    assert spans.totals() == {"environment/step": 3.0, "gen": 1.0}


HOSTILE = "</script><img src=x onerror=alert(1)>\u202e<|im_end|>"


def looked_at(tmp_path: Path) -> list[LoadedRun]:
    run = RunDirectory.create(tmp_path, "turns", Config())
    rollout = calculation()
    told = transcript(rollout, decode)
    long = {**told["pieces"][1], "text": HOSTILE + "long " * 200}
    failed = {"name": HOSTILE, "arguments": HOSTILE, "status": "invalid", "error": HOSTILE}
    pieces = [told["pieces"][0], long, told["pieces"][2]]
    turns = [{**told["turns"][0], "calls": [*told["turns"][0]["calls"], failed]}, told["turns"][1]]
    scores = {"environment": 0.5}
    sample = Sample(
        "17*3?", "It is 51.", 0.5, "stop", 7, scores, {}, 7, turns, pieces, "environment"
    )
    run.append_samples(1, [sample, Sample("2+2?", "4", 1.0, "stop", 2, scores)])
    run.append_metrics(1, {"objective/scores": 0.5, "episode/turns_mean": 2.0})
    run.append_rollouts(1, [rollout], {7: 0.5})
    return load([run.path])


@needs_browser
def test_a_browser_shows_transcripts(tmp_path: Path) -> None:
    page = dom(html_page(looked_at(tmp_path)), tmp_path)
    shown = page[page.index('id="samples"') : page.index('id="sample-count"')]
    assert shown.count('class="transcript"') == 1
    assert "2 turns, 2 calls, 5 tokens trained on, 2 tokens of context" in shown
    assert "ended by: the environment" in shown
    assert shown.count('class="piece sampled"') == 2
    end = '<span class="mark">&lt;|im_end|&gt;</span>'
    assert f'<div class="piece sampled">17*3=&lt;call&gt;{end}</div>' in shown
    assert re.search(r'<details class="piece context"><summary>[^<]*1,0\d\d characters', shown)
    assert "turn 1, 3 tokens, reward 0.5, answered after 250 ms" in shown
    assert 'calculator({"expression":"17*3"})' in shown
    assert "invalid, not run" in shown
    assert "\u202e" not in shown  # it would turn round what follows
    assert "\\u202e&lt;|im_end|&gt;" in shown
    assert "<img" not in page
