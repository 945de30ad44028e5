"""The page of runs as a server on the loopback keeps it up to date while they go on."""

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
from stretto.observe.report.runs import LoadedRun, load
from stretto.observe.run_directory import RunDirectory

HOST = "127.0.0.1"

POLL_MS = 2000
"""Pause of a page between two looks for news."""

_NAMES = frozenset({HOST, "localhost", "::1"})


class RunServer(ThreadingHTTPServer):
    """A server of the page ``/`` and of what is new in it, ``/data``, to this machine alone.

    A request must name the loopback as its host, so that no page of another site, whose name was
    made to lead here, can read the runs. Raises ConfigError if the port is taken or none, or there
    are too many runs for curves.

    Args:
        runs: run directories, which a run that begins later may have yet to make.
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
        self._files = [
            (Growing(run.metrics_file), Growing(run.samples_file)) for run in directories
        ]
        self._lock = Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            text = f"`port = {port}` cannot be listened on: {error}; choose another"
            raise ConfigError(text, "port-taken") from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def page(self) -> str:
        return html_page(load(self._folders, begun=False), poll_ms=POLL_MS)

    def data(self, after: Sequence[int]) -> str:
        """Return what a page lacks that has the runs up to these steps, one for each run, as JSON;
        empty if it lacks nothing."""
        with self._lock:
            runs = [
                LoadedRun(name, {}, metrics.read(), (), samples=samples.read())
                for name, (metrics, samples) in zip(self.names, self._files, strict=True)
            ]
            newest = [run.metrics[-1]["step"] if run.metrics else 0 for run in runs]
            return "" if newest == list(after) else json.dumps(news(runs, after))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a page that was closed before it had its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: RunServer

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        after = parse_qs(asked.query).get("after", [])
        try:
            if urlsplit(f"//{self.headers.get('Host', '')}").hostname not in _NAMES:
                self._send(403, "text/plain", "only the loopback is served")
            elif asked.path == "/":
                self._send(200, "text/html", self.server.page())
            elif asked.path != "/data":
                self._send(404, "text/plain", "there is nothing else")
            elif len(after) != len(self.server.names) or not all(map(str.isdecimal, after)):
                self._send(400, "text/plain", "one step for each run is needed")
            else:
                text = self.server.data(list(map(int, after)))
                self._send(200 if text else 204, "application/json", text)
        except (StrettoError, ValueError) as error:  # a ValueError: settings that are no TOML
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
        """Say nothing: a page asks every other second."""
