"""Every link between files of the repository leads to a file, and to a heading of it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from docs_helpers import ROOT

toc = pytest.importorskip("markdown.extensions.toc")

PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
)
ELSEWHERE = {"docs/index.md": "README.md", "docs/examples.md": "examples/README.md"}
"""Pages of the site that are files outside of docs/."""

MADE = {f"docs/reference/{name}.md" for name in ("settings", "clusters")}
"""Pages that exist in the site only; 'make docs' checks links to them."""

CODE = re.compile(r"^```.*?^```|``[^\n]*?``|`[^`\n]*`", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


@cache
def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as the site and code hosts derive them."""
    used: set[str] = set()
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        if named := re.search(r"\{#([\w.-]+)\}", heading):
            used.add(named[1])
        else:
            shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
            toc.unique(toc.slugify(shown, "-"), used)
    return used


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = unquote(link).partition("#")
        if re.match(r"\w+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        name = target.relative_to(ROOT).as_posix()
        target = ROOT / ELSEWHERE.get(name, name)
        if name in MADE:
            continue
        headings = target.suffix == ".md" and "/reference/" not in name
        if not target.exists() or (anchor and headings and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []
