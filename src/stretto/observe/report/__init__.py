"""Runs, looked at afterwards: one page to explore, or a picture of a step."""

from stretto.observe.report.page import MAX_RUNS, html_page
from stretto.observe.report.picture import timeline_svg
from stretto.observe.report.runs import Run, load

__all__ = ["MAX_RUNS", "Run", "html_page", "load", "timeline_svg"]
