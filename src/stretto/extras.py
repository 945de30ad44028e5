"""Libraries that Stretto can do without: which extra asks for which, and how they are installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def requirements(extra: str = "") -> list[Requirement]:
    """Return what the installed package requires, or what an extra adds to that; by name."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        found = [Requirement(text) for text in metadata.requires("stretto") or ()]
    except metadata.PackageNotFoundError:  # run from its source
        return []
    chosen = [r for r in found if _asks_for(r, extra) and not (extra and _asks_for(r, ""))]
    return sorted(chosen, key=lambda r: r.name.lower())


def _asks_for(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def plain(requirement: Requirement) -> str:
    """Return a requirement as pip takes it on a command line."""
    return f"'{requirement.name}{requirement.specifier}'"


def remedy(extra: str) -> str:
    """Return the commands that install what an extra asks for.

    The first names the libraries themselves, and so is right wherever Stretto was installed from:
    a clone, or the file of a wheel. Stretto is on no package index.
    """
    clone = f"pip install -e '.[{extra}]'"
    libraries = " ".join(map(plain, requirements(extra)))
    return f"pip install {libraries} (or, in a clone of Stretto: {clone})" if libraries else clone
