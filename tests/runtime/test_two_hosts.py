"""A run over two hosts: network namespaces of this machine, each with an address of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 6379
BIN = Path(sys.executable).parent
SETTINGS = """
runtime = "ray"
steps = 40
threads = 1
[model]
name = "tiny"
device = "cpu"
[task]
kind = "procedural"
name = "spell_backward"
size = 200
[schedule]
preset = "oppo"
[rollout]
batch = 16
max_new_tokens = 6
engines = 2
[cluster]
address = "auto"
[[cluster.processes]]
roles = ["learner"]
ranks = 2
"""


class Host:
    """A network namespace. All its processes can be killed at once, like a machine's."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"stretto-{os.getpid()}-{number}"
        self.address = ADDRESSES[number]
        self.environment = {
            **os.environ,
            "HOME": str(folder),  # has Ray's token
            "RAY_AUTH_MODE": "token",
            "RAY_ADDRESS": f"{ADDRESSES[0]}:{PORT}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        _ip("netns", "add", self.name)

    def start(self, *command: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Start a program of the environment on this host, with its output in one pipe."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
        )

    def join(self, cpus: int) -> None:
        """Start a node of Ray. The first host has the head."""
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        if self.address != ADDRESSES[0]:
            where = [f"--address={ADDRESSES[0]}:{PORT}"]
        options = [f"--node-ip-address={self.address}", f"--num-cpus={cpus}"]
        node = self.start(BIN / "ray", "start", *where, *options, "--object-store-memory=80000000")
        output, _ = node.communicate(timeout=180)
        assert node.returncode == 0, output

    @property
    def processes(self) -> list[psutil.Process]:
        pids = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        ).stdout.split()
        return [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]

    @property
    def ranks(self) -> int:
        return sum("RankActor" in " ".join(p.cmdline()) for p in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        self.kill()
        _ip("netns", "del", self.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    subprocess.run([BIN / "ray", "get-auth-token", "--generate"], check=True, capture_output=True,
                   env={**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token"})  # fmt: skip
    first, second = (Host(number, tmp_path) for number in range(2))
    try:
        _ip("link", "add", "veth0", "netns", first.name, "type", "veth", "peer", "name", "veth0",
            "netns", second.name)  # fmt: skip
        for host in (first, second):
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "veth0")
            for link in ("lo", "veth0"):
                _ip("-n", host.name, "link", "set", link, "up")
        first.join(2)
        second.join(4)
        yield first, second
    finally:
        first.close()
        second.close()


def test_a_run_goes_on_after_a_host_has_died_and_come_back(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    first, second = hosts
    (tmp_path / "my.toml").write_text(SETTINGS)
    run = first.start(BIN / "stretto", "train", "my.toml", "--out", "runs", cwd=tmp_path)
    try:
        metrics = tmp_path / "runs" / "my-001" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 5):
            assert run.poll() is None, run.stdout and run.stdout.read()
            time.sleep(0.1)
        assert (first.ranks, second.ranks) == (2, 4)  # the learner; two engines and two scorers
        second.kill()
        time.sleep(2)  # Ray does not know yet that its node is dead
        second.join(4)
        output, _ = run.communicate(timeout=400)
    finally:
        run.kill()
    assert run.returncode == 0, output
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 41))
    assert steps[-1]["cluster/restarts"] == steps[-1]["cluster/deaths"] == 4
    rollouts = [json.loads(line) for line in (metrics.parent / "rollouts.jsonl").open()]
    trained = [r["id"] for r in rollouts if r["state"] == "trained"]
    assert len(trained) == len(set(trained)) == 40 * 16
