"""Hooks of mkdocs: pages that stand elsewhere in the repository, and links to them.

The README is the site's first page; CONTRIBUTING, the changelog and the measured tables of
``benchmarks/results`` are pages.
Files are read where they are, so that none stands twice.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent

LINKS = (
    (re.compile(r"\]\((?:\.\./)*benchmarks/results/"), "results/"),
    (re.compile(r"\]\((?:\.\./)*docs/"), ""),
    (re.compile(r"\]\((?:\.\./)+(?=CONTRIBUTING\.md|CHANGELOG\.md)"), ""),
)
"""Links between files of the repository, and the folder of the site that they lead to."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what stands outside of ``docs/`` as pages."""
    files.append(_page("index.md", ROOT / "README.md", config))
    for table in sorted((ROOT / "benchmarks/results").glob("*.md")):
        files.append(_page(f"results/{table.name}", table, config))
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        files.append(_page(name, ROOT / name, config))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to where the pages are."""
    up = "../" * page.file.src_uri.count("/")
    for pattern, folder in LINKS:
        markdown = pattern.sub(f"]({up}{folder}", markdown)
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Show cross-references of docstrings as code, by their last part."""
    return re.sub(r":\w+:<code>~?([\w.]*?)(\w+)</code>", r"<code>\2</code>", html)


def _page(name: str, source: Path, config: MkDocsConfig) -> File:
    return File.generated(config, name, abs_src_path=str(source))
