"""The pages of the documentation, and what stands in them to be run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.glob("*.md"))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, kind: str) -> list[str]:
    """The fenced blocks of one kind, such as ``python``; kind '' is that of fences without one."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return [block for name, block in _FENCE.findall(text) if name == kind]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def shell_lines(page: Path) -> list[str]:
    """What is to be typed: indented lines, and those of fences of bash or of no kind."""
    name = page.stem
    indented = re.findall(r"^    (.*)$", prose(page), re.MULTILINE)
    text = "\n".join([*indented, *blocks(name, ""), *blocks(name, "bash")])
    return [line.removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines()]


def commands(page: Path) -> list[str]:
    """The page's lines that begin with ``stretto``, without their comments."""
    lines = [line for line in shell_lines(page) if line.startswith("stretto ")]
    return [shlex.join(shlex.split(re.split(r" >>? ", line)[0], comments=True)) for line in lines]


def arguments(command: str) -> list[str]:
    """A command's arguments as a shell in the working directory gives them."""
    found = []
    for word in shlex.split(command)[1:]:
        found += sorted(map(str, Path().glob(word))) if "*" in word else [word]
    return found
