"""Model cards: the README.md of a model's folder, with metadata that the Hub reads."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from stretto import files
from stretto.errors import StateError
from stretto.models.resolve import hub_name
from stretto.observe import records
from stretto.observe.run_directory import RunDirectory

NAME = "README.md"
_SHOWN = ("objective/", "reward/", "loss/", "policy/", "eval/", "train/", "held_out/")
"""Prefixes of metrics that a card lists."""
_SIGNED = re.compile(r"<!-- stretto: ([0-9a-f]{64}) -->\n")


def write_card(
    run: RunDirectory, method: str, rows: int | None = None, folder: Path | None = None
) -> None:
    """Write the card of a run's model, and of the adapter in its subfolder.

    An edited card is kept. To detect edits, a card's last line has the SHA-256 of the lines above.

    Args:
        method: an algorithm, 'sft' or 'reward'.
        rows: trained on, if known.
        folder: of the model, by default the run's own.
    """
    folder = folder or run.model
    for place, library in ((folder, "transformers"), (folder / "adapter", "peft")):
        if place.is_dir() and not is_edited(place):
            text = "\n".join(_lines(run, method, rows, library)) + "\n"
            signature = f"<!-- stretto: {hashlib.sha256(text.encode()).hexdigest()} -->\n"
            files.write_whole(place / NAME, (text + signature).encode())


def is_edited(folder: Path) -> bool:
    """Return whether a folder has a card that a person has written or changed."""
    if not (folder / NAME).is_file():
        return False
    text = (folder / NAME).read_text(encoding="utf-8", errors="replace")
    above, _, last = text.rstrip("\n").rpartition("\n")
    match = _SIGNED.fullmatch(f"{last}\n")
    return not match or match[1] != hashlib.sha256(f"{above}\n".encode()).hexdigest()


def _lines(run: RunDirectory, method: str, rows: int | None, library: str) -> Iterator[str]:
    settings = tomllib.loads(run.config_file.read_text(encoding="utf-8"))
    base = str(settings["model"]["name"])
    data = settings.get("task") or settings["data"]
    dataset = str(data["name"])
    yield "---"
    yield "# license: fill in, as the licences of the base model and of the data allow"
    if hub_name(base):
        yield f"base_model: {json.dumps(hub_name(base))}"
    yield f"library_name: {library}"
    yield f"pipeline_tag: {'text-classification' if method == 'reward' else 'text-generation'}"
    if hub_name(dataset):
        yield f"datasets: [{json.dumps(hub_name(dataset))}]"
    # A path to the user's own code is not a tag.
    yield f"tags: {json.dumps(['stretto', *([] if ':' in method else [method])])}"
    yield "---"
    yield f"\n# {plain_markdown(run.name)}\n"
    kind = "An adapter of" if library == "peft" else "A model trained from"
    yield f"{kind} {_code(base)} by {plain_markdown(method)}, with Stretto.\n"
    yield from _table("", _facts(run, dataset or str(data.get("kind", "")), rows))
    last = records.last(run.metrics_file) or {}
    metrics = {n: f"{v:.5g}" for n, v in last.items() if n.startswith(_SHOWN) and v is not None}
    if metrics:
        yield f"\n## Metrics after step {last['step']}\n"
        yield from _table("metric", metrics)
    yield "\n## Licence\n\nTo be filled in, here and in the metadata above."


def _facts(run: RunDirectory, data: str, rows: int | None) -> Mapping[str, str]:
    start: dict[str, Any] = {}
    with suppress(StateError, IndexError):  # ignore a damaged record of the machine
        start = run.read_starts()[-1]
    command = str(start.get("command", ""))
    facts = {"data": _code(data)}
    if rows is not None:
        facts["rows"] = str(rows)
    facts["command"] = _code(command) if command.startswith("stretto ") else "Python"
    versions = {"stretto": "", "torch": "", "transformers": "", **start.get("versions", {})}
    version_list = ", ".join(f"{name} {version or 'unknown'}" for name, version in versions.items())
    return facts | {"versions": plain_markdown(version_list), "date": str(start.get("date", ""))}


def _table(head: str, cells: Mapping[str, str]) -> Iterator[str]:
    yield f"| {head} | |\n|---|---|"
    for name, value in cells.items():
        yield f"| {plain_markdown(name)} | {value} |"


def plain_markdown(text: str, line_break: str = " ") -> str:
    """Escape text for Markdown, in one line. Entities replace < and >, because Python-Markdown,
    which TensorBoard uses, knows no backslash before them."""
    lines = line_break.join(text.splitlines())
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", escape(lines, quote=False))


def _code(text: str) -> str:
    """Return any text as code in a table cell."""
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence} {' '.join(text.split())} {fence}".replace("|", "\\|") if text else "none"
