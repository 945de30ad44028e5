"""Figures of GPUs in a file: read, written, refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

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
    ("text", "message"),
    [
        ("[gpu", "is no TOML file"),
        ("", r"\[gpu\] in .* lacks name, flops, memory_bytes_per_s, .*; a data sheet has them"),
        (GPU.replace("flops = 1e14\n", ""), r"\[gpu\] in .* lacks flops;"),
        (f"{GPU}[link]", r"unknown table \[link\] in .* Did you mean 'links'"),
        (f"gpu = 3\n{GPU.replace('[gpu]', '[links]')}", "'gpu' in .* is a table"),
        (f"{GPU}memory = 2", r"unknown key 'memory' of \[gpu\] in .*Did you mean 'memory_bytes'"),
        (GPU.replace("1e14", "0"), "gpu.flops = 0 in .* greater than 0"),
        (GPU.replace("1e14", "true"), "gpu.flops = True in .* a valid number"),
        (GPU.replace("1e14", "inf"), "gpu.flops = inf in .* a finite number"),
        (GPU.replace('"one of mine"', "1"), "gpu.name = 1 in .* a valid string"),
        (f"{GPU}[links]\ngpus_per_node = 1.5", "links.gpus_per_node = 1.5 in .* a valid integer"),
        (f"{GPU}[assumed]\nstep_s = -1", "assumed.step_s = -1 in .* greater than or equal to 0"),
        (f"{GPU}[assumed]\nlink = 1.5", r"assumed.link = 1.5 in .* less than or equal to 1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hardware(file_with(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'stretto plan --calibrate .*none\.toml' makes one"):
        read_hardware(tmp_path / "none.toml")
