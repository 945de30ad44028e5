"""Figures of GPUs in a file: measured by ``stretto plan --calibrate``, or written by hand."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import tomli_w

from stretto.errors import ConfigError, nearest
from stretto.files import write_whole
from stretto.planner.hardware import Assumptions, Gpu, Hardware, Links

MEASURED = "measured"
"""The table of what was measured, which is for people: nothing reads it back."""
TABLES = ("gpu", "links", "assumed", MEASURED)


def read(file: str | Path) -> Hardware:
    """Read GPUs, their links and what software reaches of both.

    ``[gpu]`` needs all of its keys. Links that are not given follow from it, as
    :meth:`~stretto.planner.hardware.Links.of` has them; shares and seconds that are not given in
    ``[assumed]`` take their defaults.

    Raises:
        ConfigError: the file cannot be read, or a key or a value in it is wrong.
    """
    try:
        tables = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read '{file}': {error.strerror or error}; 'stretto plan --calibrate {file}' "
            "makes one"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{file}' is no TOML file: {error}") from error
    for name in tables:
        if name not in TABLES:
            raise ConfigError(f"unknown table [{name}] in '{file}'. {nearest(name, TABLES)}")
    gpu = Gpu(**_values(file, "gpu", tables.get("gpu", {}), Gpu))
    links = {**asdict(Links.of(gpu)), **_values(file, "links", tables.get("links", {}), Links, {})}
    assumed = _values(file, "assumed", tables.get("assumed", {}), Assumptions)
    try:
        return Hardware(gpu, Links(**links), Assumptions(**assumed))
    except ConfigError as error:
        raise ConfigError(f"[assumed] in '{file}': {error}") from error


def write(
    file: str | Path, hardware: Hardware, measured: Mapping[str, Any], head: str = ""
) -> None:
    """Write a file for :func:`read`.

    Args:
        measured: what they come from, as plain data.

    Raises:
        StorageError: it cannot be written.
    """
    tables = {
        "gpu": asdict(hardware.gpu),
        "links": asdict(hardware.links),
        "assumed": asdict(hardware.assumed),
        MEASURED: dict(measured),
    }
    comments = "".join(f"# {line}\n" for line in head.splitlines())
    write_whole(Path(file), f"{comments}\n{tomli_w.dumps(tables)}".encode())


def _values(
    file: str | Path, table: str, given: Any, kind: Any, required: Any = None
) -> dict[str, Any]:
    """Return the values of a table, each checked.

    Args:
        file: for messages.
        kind: the class with its keys as fields.
        required: keys that must be there; ``None`` for the fields without a default.
    """
    if not isinstance(given, dict):
        raise ConfigError(f"'{table}' in '{file}' is a table: write [{table}] on a line of its own")
    keys = {field.name: field for field in fields(kind)}
    if required is None:
        required = [name for name, field in keys.items() if field.default is MISSING]
    for name in given:
        if name not in keys:
            raise ConfigError(
                f"unknown key '{name}' of [{table}] in '{file}'. {nearest(name, keys)}"
            )
    if missing := [name for name in required if name not in given]:
        raise ConfigError(
            f"[{table}] in '{file}' lacks {', '.join(missing)}; a data sheet has them, or "
            "'stretto plan --calibrate'"
        )
    return {name: _checked(file, f"{table}.{name}", value) for name, value in given.items()}


def _checked(file: str | Path, key: str, value: Any) -> Any:
    if key == "gpu.name":
        if not isinstance(value, str):
            raise ConfigError(f"{key} = {value!r} in '{file}': must be text, in quotes")
        return value
    if key == "links.gpus_per_node":
        if type(value) is not int or value < 1:
            raise ConfigError(f"{key} = {value!r} in '{file}': must be a whole number, 1 or more")
        return value
    least = 0 if key.startswith("assumed.") else math.ulp(0)
    number = type(value) in (int, float) and math.isfinite(value)
    if not number or value < least:
        above = "0 or more" if least == 0 else "above 0"
        raise ConfigError(f"{key} = {value!r} in '{file}': must be a number, {above}")
    return float(value)
