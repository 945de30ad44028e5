"""``stretto report``: runs as a page to explore, or a step of theirs as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from stretto.errors import ConfigError
from stretto.observe import report
from stretto.observe.progress import on_stderr
from stretto.planner.replay import predicted
from stretto.saying import working

DEFAULT_OUT = "report.html"


def command(
    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN...")],
    /,
    out: str = "",
    step: int = 0,
    timeline: str = "",
) -> None:
    """Make one HTML page of one run or several: timelines, rewards, utilisation, lengths, settings;
    win-rate against KL, and what became of rewards with the off-policyness N. Of up to six runs the
    page, and a table here, also show each phase of a step as measured and as the simulator predicts
    it from the run's own records.

    The page holds all it needs and opens without a network. Runs that are still going can be
    reported too.

    Args:
        runs: Run directories; the first is what the others are compared with.
        out: File for the page. Without it: report.html, unless --timeline asks for a picture alone.
        step: Step whose timeline is shown; without it, one from the middle.
        timeline: File for an SVG picture of the step, the runs one below the other over the same
            time axis.
    """
    if step < 0:
        raise ConfigError(f"--step {step}: steps count from 1")
    with working(on_stderr, "reading the runs"):
        loaded = report.load(runs)
    if out or not timeline:
        with working(on_stderr, "predicting the runs from their own records"):
            found = predicted(runs) if len(runs) <= report.MAX_RUNS else []
        data = [each.data() for each in found]
        _write(out or DEFAULT_OUT, report.html_page(loaded, step or None, data))
        for run, each in zip(loaded, found, strict=False):
            print(each.text(run.name))
    if timeline:
        _write(timeline, report.timeline_svg(loaded, step or None))


def _write(name: str, text: str) -> None:
    file = Path(name)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write '{name}': {error}; choose another file") from error
    print(f"wrote {file}")
