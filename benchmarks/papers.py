"""What the papers report, and what the simulator makes of their settings: docs/papers.md.

    python benchmarks/papers.py            # all tables
    python benchmarks/papers.py --only oppo
    python benchmarks/papers.py --write    # tables into docs/papers.md, pictures into docs/images

Nothing is measured, and nothing fitted to the reported figures.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import _ahead
import _async_tables
import _oppo
import _rlhfuse_tables
from _papers import Part
from _shared import parse

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "papers.md"
PARTS: Mapping[str, Callable[[bool], Part]] = {
    "oppo": lambda smoke: _oppo.part(2, smoke=True) if smoke else _oppo.part(),
    "async": lambda smoke: _async_tables.part(2, smoke=True) if smoke else _async_tables.part(),
    "rlhfuse": lambda smoke: _rlhfuse_tables.part(smoke=smoke),
    "ahead": lambda smoke: _ahead.part(5, smoke=True) if smoke else _ahead.part(),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--write", action="store_true", help="tables and pictures into docs/")
    args = parse(parser, {})
    for name in args.only:
        began_s = time.monotonic()
        made = PARTS[name](args.smoke)
        for mark, text in made.tables.items():
            print(f"### {mark}\n\n{text}\n", flush=True)
        if args.write:
            write(made)
        print(f"{name}: {time.monotonic() - began_s:.0f} s\n", flush=True)


def write(made: Part) -> None:
    """Put tables between their marks, and pictures where the page finds them."""
    page = PAGE.read_text(encoding="utf-8")
    for mark, text in made.tables.items():
        page = replaced(page, mark, text)
    PAGE.write_text(page, encoding="utf-8")
    for file, svg in made.pictures.items():
        (DOCS / "images" / file).write_text(svg, encoding="utf-8")


def replaced(page: str, mark: str, text: str) -> str:
    """Return the page with another table between a mark and the end of it.

    Raises:
        ValueError: the page lacks the mark.
    """
    between = re.compile(rf"(<!-- {mark} -->\n).*?(\n<!-- end -->)", re.DOTALL)
    found, count = between.subn(lambda m: m[1] + text + m[2], page)
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} places for '{mark}', and not one")
    return found


if __name__ == "__main__":
    main()
