"""The page of runs from a loopback server, which updates it while the runs go on."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from stretto.errors import ConfigError, StrettoError
from stretto.observe.records import Growing
from stretto.observe.report.page import MAX_RUNS, html_page, news
from stretto.observe.report.run_data import LoadedRun, load
from stretto.observe.run_directory import RunDirectory

HOST = "127.0.0.1"

POLL_MS = 2000  # milliseconds between a page's polls for updates

_NAMES = frozenset({HOST, "localhost", "::1"})


class RunServer(ThreadingHTTPServer):
    """A server of the page ``/`` and of its updates ``/data``, for this machine only.

    A request must name the loopback as its host, because otherwise a page of another site could
    read the runs (DNS rebinding). Raises ConfigError if the port is taken or invalid, or there are
    too many runs for curves.

    Args:
        runs: run directories, which may not exist yet.
        port: 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[str | Path], port: int = 0) -> None:
        if len(runs) > MAX_RUNS:
            text = f"at most {MAX_RUNS} runs can be watched on one page; got {len(runs)}"
            raise ConfigError(text, "too-many-runs")
        self._folders = runs
        self.names = [run.name for run in load(runs, begun=False)]
        directories = [RunDirectory(Path(run)) for run in runs]
        self._files = [(Growing(d.metrics_file), Growing(d.samples_file)) for d in directories]
        self._lock = Lock()
        try:
            super().__init__((HOST, port), _ReportHandler)
        except (OSError, OverflowError) as error:
            text = f"`port = {port}` cannot be listened on: {error}; choose another"
            raise ConfigError(text, "port-taken") from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def page(self) -> str:
        return html_page(load(self._folders, begun=False), poll_ms=POLL_MS)

    def data(self, after: Sequence[int]) -> str:
        """Return updates as JSON for a page with each run up to ``after``, empty if none."""
        with self._lock:
            runs = [
                LoadedRun(name, {}, metrics.read(), (), samples=samples.read())
                for name, (metrics, samples) in zip(self.names, self._files, strict=True)
            ]
            newest = [run.metrics[-1]["step"] if run.metrics else 0 for run in runs]
            return "" if newest == list(after) else json.dumps(news(runs, after))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a page that was closed before its answer arrived."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _ReportHandler(BaseHTTPRequestHandler):
    server: RunServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        after = parse_qs(url.query).get("after", [])
        try:
            if urlsplit(f"//{self.headers.get('Host', '')}").hostname not in _NAMES:
                self._send(403, "text/plain", "only the loopback is served")
            elif url.path == "/":
                self._send(200, "text/html", self.server.page())
            elif url.path != "/data":
                self._send(404, "text/plain", "there is nothing else")
            elif len(after) != len(self.server.names) or not all(map(str.isdecimal, after)):
                self._send(400, "text/plain", "one step for each run is needed")
            else:
                text = self.server.data(list(map(int, after)))
                self._send(200 if text else 204, "application/json", text)
        except (StrettoError, ValueError) as error:  # ValueError: invalid TOML settings
            self._send(500, "text/plain", str(error))

    def _send(self, status: int, kind: str, text: str) -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing, because pages poll every other second."""
