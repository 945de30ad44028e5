"""Hooks of mkdocs: pages that stand elsewhere in the repository, and links to them.

The README is the first page. CONTRIBUTING, the changelog, the security policy, the examples'
README and the measured tables of ``benchmarks/results`` are pages. Files are read where they are,
so that none stands twice. The reference of the settings is made of their classes.
"""

from __future__ import annotations

import importlib
import json
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
    **{name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE")},
}
"""Pages of the site that are files outside of ``docs/``."""

LINKS = (
    (re.compile(r"\]\((?:\.\./)*benchmarks/results/"), "results/"),
    (re.compile(r"\]\((?:\.\./)*examples/(?:README\.md)?(?=[)#])"), "examples.md"),
    (re.compile(r"\]\((?:\.\./)*examples/(?=[\w.-]+\))"), "examples.md#"),
    (re.compile(r"\]\((?:\.\./)*docs/"), ""),
    (re.compile(r"\]\((?:\.\./)+(?=CONTRIBUTING\.md|CHANGELOG\.md|SECURITY\.md)"), ""),
)
"""Links between files of the repository, and the page or folder of the site that they lead to."""

MODULES = ("stretto.api", "stretto.types", "stretto.protocols", "stretto.errors", "stretto.testing")
"""Where the names are looked for that docstrings of the reference mention without a module."""

WHOLE = re.compile(r"<code>(?=[^<]{1,36}</code>)")
"""Code within a line that is short enough for a phone's width, and is not broken."""

MENTION = re.compile(r":\w+:<code>~?([\w.]+)</code>")
"""A cross-reference of a docstring, as it comes out of Markdown."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what stands outside of ``docs/``, or is made, as pages."""
    found = {name: ROOT / source for name, source in PAGES.items()}
    found |= {f"results/{t.name}": t for t in sorted((ROOT / "benchmarks/results").glob("*.md"))}
    for name, source in found.items():
        files.append(File.generated(config, name, abs_src_path=str(source)))
    made = {"settings": settings_page.page, "clusters": settings_page.clusters}
    for page, text in made.items():
        files.append(File.generated(config, f"reference/{page}.md", content=text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to where the pages are, show the examples, and weigh the page for the search."""
    page.meta["search"] = {"boost": _boost(page)}
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]  # its section has no other page to list
    if page.file.src_uri == "examples.md":
        markdown = _with_sources(markdown)
    if page.file.src_uri == "tour.md":
        cells = _cells(ROOT / "examples/tour/tour.ipynb")
        markdown = "\n\n".join([markdown, *cells[1:]])  # the page has a title of its own
    up = "../" * page.file.src_uri.count("/")
    for pattern, folder in LINKS:
        markdown = pattern.sub(f"]({up}{folder}", markdown)
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Make links of the cross-references of docstrings; of those that lead nowhere, code."""
    return WHOLE.sub('<code class="whole">', MENTION.sub(lambda found: _link(found[1]), html))


def on_env(env: Any, config: MkDocsConfig, files: Files) -> None:
    """Write ``llms.txt`` (https://llmstxt.org): every page, with its title and first sentence."""
    pages = [f.page for f in files.documentation_pages() if f.page]
    lines = [
        f"- [{p.title}]({p.file.url or '.'}): {_first_sentence(p.markdown or '')}" for p in pages
    ]
    text = "\n".join([f"# {config.site_name}", "", f"> {config.site_description}", "", *lines, ""])
    Path(config.site_dir).mkdir(parents=True, exist_ok=True)
    (Path(config.site_dir) / "llms.txt").write_text(text, encoding="utf-8")


def _first_sentence(markdown: str) -> str:
    """The first sentence of a page's first paragraph, without links."""
    for part in markdown.split("\n\n"):
        if re.match(r"[\w`*\[]", part):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(part.split()))
            return re.split(r"(?<=[.:]) ", plain)[0]
    return ""


def _boost(page: Page) -> float:
    """How much the search prefers a page: what a newcomer needs comes before what was measured."""
    tab = page.ancestors[-1].title if page.ancestors else "Home"
    return {"Get started": 4, "Guides": 2, "Measured": 0.5, "Project": 0.25}.get(str(tab), 1)


def _with_sources(markdown: str) -> str:
    """The examples' README with the text of each file that it links to below."""
    names = list(dict.fromkeys(re.findall(r"\]\(([\w.-]+)\)", markdown)))
    shown = [f"## {name} {{#{name}}}\n\n{_source(ROOT / 'examples' / name)}" for name in names]
    linked = re.sub(r"\]\(([\w.-]+)\)", r"](#\1)", markdown)
    return "\n\n".join([linked, *shown])


def _source(file: Path) -> str:
    """A file as a block of code; of a notebook its cells."""
    if file.suffix == ".ipynb":
        return "\n\n".join(re.sub("^#+ (.*)", r"**\1**", cell) for cell in _cells(file))
    kind = file.suffix[1:].replace("jsonl", "json")
    text = file.read_text(encoding="utf-8").rstrip("\n")
    return f"```{kind}\n{text}\n```"


def _cells(notebook: Path) -> list[str]:
    """The cells of a notebook as Markdown, each with the output that is stored with it."""
    shown = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            printed = ["".join(output["text"]).strip() for output in cell["outputs"]]
            blocks = [("python", text), *(("text", output) for output in printed)]
            text = "\n\n".join(f"```{kind}\n{block}\n```" for kind, block in blocks)
        shown.append(text)
    return shown


def _link(name: str) -> str:
    """A link to what a docstring mentions, for mkdocs-autorefs, which knows all that is shown."""
    homes = [m for m in MODULES if hasattr(importlib.import_module(m), name.partition(".")[0])]
    full = f"{homes[0]}.{name}" if homes else name
    shown = name.rpartition(".")[2]
    return f'<autoref identifier="{full}" optional><code>{shown}</code></autoref>'
