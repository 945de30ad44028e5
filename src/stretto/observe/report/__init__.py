"""Reports of finished or live runs: one page to explore, or a picture of a step."""

from stretto.observe.report.page import MAX_RUNS, html_page
from stretto.observe.report.run_data import LoadedRun, load
from stretto.observe.report.server import RunServer
from stretto.observe.report.timeline import timeline_svg

__all__ = ["MAX_RUNS", "LoadedRun", "RunServer", "html_page", "load", "timeline_svg"]
