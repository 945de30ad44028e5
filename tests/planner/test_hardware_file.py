"""Figures of GPUs in a file: read, written, refused."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from raising import raises
from stretto.errors import ConfigError
from stretto.planner.hardware import Gpu, Hardware, Links, read_hardware, write_hardware
from stretto.runtime.sim.costs import Efficiency

GPU = """
[gpu]
name = "one of mine"
flops = 1e14
memory_bytes_per_s = 1e12
memory_bytes = 48000000000
link_bytes_per_s = 3e10
host_bytes_per_s = 2e10
"""
MINE = Gpu("one of mine", 1e14, 1e12, 48e9, 3e10, 2e10)


def file_with(folder: Path, text: str) -> Path:
    file = folder / "mine.toml"
    file.write_text(text)
    return file


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    hardware = Hardware(
        MINE,
        Links(3e10, 1e9, 2e10, 4),
        Efficiency(
            memory=0.1,
            prefill=0.2,
            training=0.3,
            link=0.4,
            usable=0.5,
            optimizer=0.6,
            step_s=0.7,
            reduce_s=0.8,
            call_s=0.0,
        ),
    )
    file = tmp_path / "mine.toml"
    write_hardware(file, hardware, {"points": [{"kind": "copy"}]}, "Mine.\nOf today.")
    assert read_hardware(file) == hardware
    assert file.read_text().startswith("# Mine.\n# Of today.\n\n[gpu]\n")
    assert tomllib.loads(file.read_text())["measured"] == {"points": [{"kind": "copy"}]}


def test_links_and_shares_may_be_left_out(tmp_path: Path) -> None:
    assert read_hardware(file_with(tmp_path, GPU)) == Hardware(MINE, Links.of(MINE))
    some = f"{GPU}[links]\ngpus_per_node = 2\n[assumed]\nlink = 1\n[measured]\nwhatever = true\n"
    found = read_hardware(file_with(tmp_path, some))
    assert found == Hardware(MINE, Links.of(MINE, gpus_per_node=2), Efficiency(link=1.0))


@pytest.mark.parametrize(
    ("text", "code", "facts"),
    [
        ("[gpu", "no-hardware-file", ["mine.toml"]),
        ("", "missing", ["[gpu]", "name, flops, memory_bytes_per_s", "data sheet"]),
        (GPU.replace("flops = 1e14\n", ""), "missing", ["lacks flops;"]),
        (f"{GPU}[link]", "extra_forbidden", ["[link]", "'links'"]),
        (f"gpu = 3\n{GPU.replace('[gpu]', '[links]')}", "not-a-table", ["'gpu'", "[gpu]"]),
        (f"{GPU}memory = 2", "extra_forbidden", ["'memory' of [gpu]", "'memory_bytes'"]),
        (GPU.replace("1e14", "0"), "greater_than", ["gpu.flops = 0"]),
        (GPU.replace("1e14", "true"), "float_type", ["gpu.flops = True"]),
        (GPU.replace("1e14", "inf"), "finite_number", ["gpu.flops = inf"]),
        (GPU.replace('"one of mine"', "1"), "string_type", ["gpu.name = 1"]),
        (f"{GPU}[links]\ngpus_per_node = 1.5", "int_type", ["links.gpus_per_node = 1.5"]),
        (f"{GPU}[assumed]\nstep_s = -1", "greater_than_equal", ["assumed.step_s = -1"]),
        (f"{GPU}[assumed]\nlink = 1.5", "less_than_equal", ["assumed.link = 1.5"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, code: str, facts: Sequence[str]) -> None:
    with raises(ConfigError, code, *facts):
        read_hardware(file_with(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with raises(ConfigError, "no-hardware-file", "none.toml` makes one", "--calibrate"):
        read_hardware(tmp_path / "none.toml")
