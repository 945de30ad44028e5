"""Reports of finished or live runs: one page to explore."""

from stretto.observe.report.page import MAX_RUNS, html_page
from stretto.observe.report.run_data import LoadedRun, load
from stretto.observe.report.server import RunServer

__all__ = ["MAX_RUNS", "LoadedRun", "RunServer", "html_page", "load"]
