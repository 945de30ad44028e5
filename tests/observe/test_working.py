"""Work that takes a while, as it is shown: as lines, or as bars on a terminal."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from helpers import ManualClock
from stretto.config import Config, SftConfig
from stretto.observe import make_progress, progress
from stretto.observe.progress import WorkProgress, headline
from stretto.saying import working

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
"""What Rich writes where it begins and ends to draw."""


class Watched(io.StringIO):
    """A stream that tells when something is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


def test_a_line_says_how_far_work_is() -> None:
    clock = ManualClock()
    counted, open_ended = (
        WorkProgress("warming up", 4500, clock),
        WorkProgress("loading m", clock=clock),
    )
    assert counted.line() == "warming up: 0 of 4,500"
    clock.advance(4)
    counted.advance(1000)
    counted.advance(500)
    assert counted.line() == "warming up: 1,500 of 4,500, 8s left"
    assert open_ended.line() == "loading m (4s so far)"
    counted.advance(3001)  # more than was known
    assert counted.line() == "warming up: 4,501 of 4,500, 0s left"


def test_the_time_left_ends_with_the_limit() -> None:
    clock = ManualClock()
    work = WorkProgress("plans", 27_538, clock, limit_s=24)
    clock.advance(4)
    work.advance(1)
    assert work.line() == "plans: 1 of 27,538, 20s left"
    clock.advance(30)
    assert work.line() == "plans: 1 of 27,538, 0s left"


def test_lines_get_sparser() -> None:
    clock = ManualClock()
    work, at = WorkProgress("x", clock=clock), []
    while clock.now() < 3600:
        clock.advance(work.pause_s)
        at.append(clock.now())
    assert at[:5] == [10, 20, 30, 40, 50]
    assert len(at) == 25  # in an hour


def test_without_a_terminal_long_work_gets_lines_and_short_work_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Watched()
    display = make_progress("auto", stream)
    with display.working("quick"):
        pass
    assert stream.getvalue() == ""
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "SOON_S", 0.0)
    with display.working("warming up", 10) as advance:
        advance(5)
        assert stream.written.wait(30)
    assert stream.getvalue().startswith("warming up: ")
    assert "of 10" in stream.getvalue()


def test_of_many_short_pieces_of_work_one_gets_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds without a line add up over them, and a line ends them."""
    clock, firsts = ManualClock(), list[float]()

    @contextmanager
    def recorded(_: Any, first_s: float) -> Iterator[None]:
        firsts.append(first_s)
        yield

    monkeypatch.setattr(progress, "repeated", recorded)
    monkeypatch.setattr(progress, "WorkProgress", partial(WorkProgress, clock=clock))
    stream = io.StringIO()
    for _ in range(4):
        with make_progress("plain", stream).working("short"):  # a display each, as commands have
            clock.advance(0.75)
    make_progress("plain", stream).note("a line")
    with make_progress("plain", stream).working("short"):
        pass
    assert firsts == [2.0, 1.25, 0.5, 0.5, 2.0]


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_a_stream_that_is_gone_does_not_end_the_work(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it change standard output, which Rich would send to /dev/null."""

    class Gone(Watched):
        def write(self, text: str) -> int:
            super().write(text)
            if threading.current_thread().name == "progress":
                raise BrokenPipeError
            return len(text)

    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "SOON_S", 0.0)
    stream, before = Gone(), os.fstat(sys.stdout.fileno())
    with make_progress(mode, stream).working("loading"):
        assert stream.written.wait(30)
    assert os.path.samestat(before, os.fstat(sys.stdout.fileno()))


def test_on_a_terminal_there_is_a_bar_while_work_goes_on() -> None:
    """Before the run has started, beside its panel, and not afterwards."""
    stream = io.StringIO()
    display = make_progress("rich", stream)
    with display.working("loading libraries"):
        pass
    assert stream.getvalue().count(SHOW_CURSOR) == 1  # nothing is left open
    display.start("the headline")
    with display.working("warming up", 100) as advance, display.working("reading"):
        advance(30)
        display.note("a note")
    display.step(1, 3, {"objective/scores": 0.5}, [])
    display.note("a [bold]note[/]")  # is shown as it is, and the panel beside it is not
    display.close()
    text = stream.getvalue()
    for shown in ("loading libraries", "the headline", "warming up", "30/100", "a note", "reading"):
        assert shown in text
    both = text[text.index("a note") : text.index("step 1/3")]
    assert both.index("warming up") < both.index("reading")
    assert text.count("[bold]") == 1
    assert "a [bold]note[/]" in text
    last = text[text.rindex("step 1/3") :]
    assert "warming up" not in last
    assert "reading" not in last
    assert text.count(SHOW_CURSOR) == text.count(HIDE_CURSOR) == 2


def test_work_is_handed_down_with_what_shows_lines() -> None:
    stream, lines = Watched(), list[str]()
    say = make_progress("rich", stream)
    say("a line")
    with working(say, "loading", 3) as advance:
        advance(1)
    with working(lines.append, "loading", 3) as advance:  # nobody shows it
        advance(1)
    assert "a line" in stream.getvalue()
    assert "loading" in stream.getvalue()
    assert lines == []


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_runs_in_a_row_say_only_what_is_new(mode: Any) -> None:
    stream = io.StringIO()

    def said(text: str) -> list[str]:
        before = len(stream.getvalue())
        display = make_progress(mode, stream)
        display.start(text)
        display.close()
        found = stream.getvalue()[before:]
        return [line for line in text.splitlines() if line in found]

    assert said("model\ntask\nin runs/a") == ["model", "task", "in runs/a"]
    assert said("model\ntask\nin runs/b") == ["in runs/b"]
    assert said("other\ntask\nin runs/c") == ["other", "in runs/c"]
    assert said("model\ntask\nin runs/d") == ["model", "in runs/d"]
    stream = io.StringIO()
    assert said("model\ntask\nin runs/e") == ["model", "task", "in runs/e"]


def test_three_lines_say_what_runs_on_what_and_where_results_go() -> None:
    config = Config.model_validate(
        {
            "steps": 7,
            "model": {"name": "./m"},
            "task": {"kind": "dataset", "name": "sums.jsonl"},
            "reward": {"sources": ("task", "/some/where/r.py:brief")},
            "rollout": {"batch": 32, "samples_per_prompt": 4},
            "training": {"minibatches": 2},
            "runtime": "local",
        }
    )
    about = "135M parameters, bfloat16 on cpu"
    assert headline(config, about, "results in runs/m-001").splitlines() == [
        "ppo with ./m: 135M parameters, bfloat16 on cpu",
        "7 steps on dataset sums.jsonl, rewards by task, r.py:brief; a step: 32 responses "
        "(8 prompts x 4), 1 epoch(s) x 2 mini-batch(es) of 16",
        "schedule: sync: score on batch, overcommit 0, lag 0, migrate off, train on batch; "
        "runtime local; results in runs/m-001",
    ]
    tuning = SftConfig.model_validate({"data": {"name": "chats.jsonl"}, "steps": 3, "batch": 8})
    assert headline(tuning, about, "results in runs/s-001").splitlines() == [
        f"supervised fine-tuning from {tuning.model.name}: {about}",
        "3 steps on chats.jsonl",
        "a step: 8 sequences; results in runs/s-001",
    ]


def test_plain_lines_show_what_supervised_runs_have() -> None:
    stream = io.StringIO()
    progress = make_progress("plain", stream)
    progress.start("the headline")
    progress.step(0, 9, {"held_out/loss": 2.0}, [])
    progress.step(3, 9, {"train/loss": 1.25, "perf/throughput": 50.0, "timing_s/step": 2.0}, [])
    assert stream.getvalue().splitlines() == [
        "the headline",
        "step 0/9  held-out loss 2.0000",
        "step 3/9  loss 1.2500  tokens/s 50  step_s 2.00  eta 12s",
    ]
