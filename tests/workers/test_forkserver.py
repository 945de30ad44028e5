"""The server that forks: its children's surroundings, their ends, and its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from raising import raises
from stretto.errors import RankError
from stretto.workers.forkserver import NAME, SERVER, UNKNOWN, ForkedProcesses, ForkServer
from stretto.workers.group import RankGroup
from stretto.workers.rank import GroupSpec


class Looking:
    """Says where it is."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def look(self) -> tuple[int, str | None, str, str]:
        """Return process id, a variable, folder and name."""
        here = psutil.Process()
        return os.getpid(), os.environ.get("STRETTO_TEST"), str(Path.cwd()), here.name()


def test_children_have_this_process_s_surroundings_as_they_are_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SERVER.start()
    monkeypatch.setenv("STRETTO_TEST", "set after the server's start")
    monkeypatch.chdir(tmp_path)
    ranks = RankGroup(GroupSpec(2), Looking).start()
    try:
        seen = ranks.call(Looking.look)
        assert len({pid for pid, *_ in seen}) == 2
        assert {tuple(rest) for _, *rest in seen} == {
            ("set after the server's start", str(tmp_path), NAME)
        }
    finally:
        ranks.close()


def test_exit_codes_are_told_and_told_again() -> None:
    ranks = RankGroup(GroupSpec(1), Looking).start()
    launched = ranks._launched
    assert isinstance(launched, ForkedProcesses)
    (process,) = launched.processes
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.01)
    os.kill(process.pid, signal.SIGTERM)  # which ranks ignore
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(timeout=5.0) == process.poll() == -signal.SIGKILL
    with raises(RankError, "rank-died", "SIGKILL"):
        ranks.call(Looking.look)


def test_a_server_that_died_is_replaced_and_its_children_live_on() -> None:
    server = ForkServer(preloaded=())
    server.start()
    ranks = RankGroup(GroupSpec(1), Looking).start()  # of the common server
    first = server._process
    assert first is not None
    first.kill()
    first.wait()
    server.start()
    assert server._process is not None
    assert server._process.pid != first.pid
    assert server.exit_code(os.getpid()) == UNKNOWN  # no child of its own
    assert ranks.call(Looking.look)
    ranks.close()
    server._process.kill()


def test_a_forked_process_starts_a_server_of_its_own(tmp_path: Path) -> None:
    """As user code may fork the process that drives a run."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys
            from stretto.workers.forkserver import ForkServer
            server = ForkServer(preloaded=())
            server.start()
            mine = server._process.pid
            pid = os.fork()
            if not pid:
                server.start()
                os._exit(0 if server._process.pid != mine else 1)
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "from stretto.workers.forkserver import ForkServer; server = ForkServer(preloaded=()); "
        "server.start(); print(server._process.pid)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(timeout=30)
