"""Results in notebooks."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from stretto.config import Config
from stretto.observe import RunDirectory
from stretto.observe.run_directory import TrainResult
from stretto.runs import SftResult


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create("r & <b>", "a'b\"<i>", Config())
    for step, reward in ((1, 0.0), (2, float("nan")), (3, 1.0), (5, 0.5)):
        run.append_metrics(step, {"objective/scores": reward, "objective/kl": 0.25})
    run.model.mkdir()
    return run


def test_a_result_draws_its_curves_and_links_its_files(run: RunDirectory) -> None:
    page = TrainResult(5, {}, run.path, "<script>x")._repr_html_()
    parsed = ElementTree.fromstring(page.replace("<br>", "<br/>"))  # so all text is escaped
    lines = [line.get("points") for line in parsed.iter("polyline")]
    assert lines[0] == "0.0,70.0 110.0,0.0 220.0,35.0"  # a gap is bridged
    assert lines[1] == "0.0,35.0 55.0,35.0 110.0,35.0 220.0,35.0"  # a constant is in the middle
    assert [svg.get("aria-label") for svg in parsed.iter("svg")] == [
        "objective/scores",
        "objective/kl",
    ]
    hrefs = [link.get("href") for link in parsed.iter("a")]
    assert hrefs == ["r%20%26%20%3Cb%3E/a%27b%22%3Ci%3E-001" + end for end in ("", "/model")]
    text = "".join(parsed.itertext())
    assert "5 steps, stopped: <script>x" in text
    assert f"stretto report {run.path}" in text
    assert list(parsed.iter("script")) == []
    (run.path / "report.html").touch()
    assert ">report</a>" in TrainResult(5, {}, run.path)._repr_html_()


def test_a_run_without_steps_and_one_with_a_single_step_are_shown(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", Config())
    assert "svg" not in TrainResult(0, {}, run.path)._repr_html_()
    run.append_metrics(1, {"train/loss": 0.5})
    assert "<circle" in SftResult(run.model, 1, 0.5, None, None)._repr_html_()
