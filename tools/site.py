"""Hooks of mkdocs: pages that stand elsewhere in the repository, and links to them.

The README is the site's first page; CONTRIBUTING, the changelog, the examples' README and the
measured tables of ``benchmarks/results`` are pages. Files are read where they are, so that none
stands twice. The reference of the settings is made of their classes.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent))

import settings_page  # noqa: E402

PAGES = {
    "index.md": "README.md",
    "examples.md": "examples/README.md",
    **{name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")},
}
"""Pages of the site that are files outside of ``docs/``."""

LINKS = (
    (re.compile(r"\]\((?:\.\./)*benchmarks/results/"), "results/"),
    (re.compile(r"\]\((?:\.\./)*examples/(?:README\.md)?(?=[)#])"), "examples.md"),
    (re.compile(r"\]\((?:\.\./)*docs/"), ""),
    (re.compile(r"\]\((?:\.\./)+(?=CONTRIBUTING\.md|CHANGELOG\.md)"), ""),
)
"""Links between files of the repository, and the page or folder of the site that they lead to."""

MODULES = ("stretto.api", "stretto.types", "stretto.protocols", "stretto.errors", "stretto.testing")
"""Where the names are looked for that docstrings of the reference mention without a module."""

MENTION = re.compile(r":\w+:<code>~?([\w.]+)</code>")
"""A cross-reference of a docstring, as it comes out of Markdown."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what stands outside of ``docs/``, or is made, as pages."""
    found = {name: ROOT / source for name, source in PAGES.items()}
    found |= {f"results/{t.name}": t for t in sorted((ROOT / "benchmarks/results").glob("*.md"))}
    for name, source in found.items():
        files.append(File.generated(config, name, abs_src_path=str(source)))
    settings = File.generated(config, "reference/settings.md", content=settings_page.page())
    files.append(settings)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to where the pages are."""
    up = "../" * page.file.src_uri.count("/")
    for pattern, folder in LINKS:
        markdown = pattern.sub(f"]({up}{folder}", markdown)
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Make links of the cross-references of docstrings; of those that lead nowhere, code."""
    return MENTION.sub(lambda found: _link(found[1]), html)


def _link(name: str) -> str:
    """A link to what a docstring mentions, for mkdocs-autorefs, which knows all that is shown."""
    homes = [m for m in MODULES if hasattr(importlib.import_module(m), name.partition(".")[0])]
    full = f"{homes[0]}.{name}" if homes else name
    shown = name.rpartition(".")[2]
    return f'<autoref identifier="{full}" optional><code>{shown}</code></autoref>'
