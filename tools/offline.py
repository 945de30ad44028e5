"""Collect the wheels that an image without a network lacks, for example a container on a GPU node.

    python -m pip list --format=freeze > image.txt                  # in the image
    python tools/offline.py image.txt --extras ray,serve            # here, with a package index

Packages of the image keep their versions, unless one is too old for Stretto or for a package that
it brings along. Their own dependencies are not looked at: the image has them. Run this on Linux,
with the image's kind of CPU and version of Python, because pip resolves for itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLIBC = (34, 31, 28, 27, 24, 17)
"""Minor versions of glibc 2 that wheels are built for."""


def requirements(extras: list[str]) -> list[str]:
    """Return what pyproject.toml requires, with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    if unknown := [extra for extra in extras if extra not in optional]:
        raise SystemExit(f"unknown extras: {', '.join(unknown)}; known: {', '.join(optional)}")
    return project["dependencies"] + [r for extra in extras for r in optional[extra]]


def pretend_installed(site: Path, image: str) -> None:
    """Write metadata without dependencies into ``site`` for each ``name==version`` of a list."""
    for line in filter(None, map(str.strip, image.splitlines())):
        name, equals, version = line.partition("==")
        if not equals:
            raise SystemExit(
                f"'{line}' is not name==version; make the list by: pip list --format=freeze"
            )
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(metadata, encoding="utf-8")


def missing(image: str, wanted: list[str]) -> list[str]:
    """Return ``name==version`` of all packages to add to an image, by pip's resolver.

    Pip sees an environment in which the image's packages seem to be installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "bin" / "python"
        venv.create(folder, with_pip=False, symlinks=True)
        (site,) = Path(folder).glob("lib/python*/site-packages")
        pretend_installed(site, image)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        plan = Path(folder) / "plan.json"
        options = ["--dry-run", "--only-binary=:all:", "--report", str(plan)]
        subprocess.run([*pip, *options, *wanted], check=True)
        added = [each["metadata"] for each in json.loads(plan.read_text("utf-8"))["install"]]
    return sorted(f"{each['name']}=={each['version']}" for each in added)


def main(words: list[str] | None = None) -> None:
    """Download the wheels that are missing, and print how to install them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("image", type=Path, help="the output of: pip list --format=freeze")
    parser.add_argument("--extras", default="", help="Stretto's extras, divided by commas")
    parser.add_argument("--glibc", type=int, default=28, help="the image has glibc 2.GLIBC")
    parser.add_argument("--into", type=Path, default=Path("wheels"), help="a folder for the wheels")
    options = parser.parse_args(words)
    names = [f"manylinux_2_{minor}" for minor in GLIBC if minor <= options.glibc]
    platforms = [f"--platform={name}_{platform.machine()}" for name in [*names, "manylinux2014"]]
    wanted = requirements([extra for extra in options.extras.split(",") if extra])
    added = missing(options.image.read_text(encoding="utf-8"), wanted)
    if not added:
        print("the image lacks nothing")
        return
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, *platforms, "--dest", str(options.into), *added], check=True)
    size = sum(each.stat().st_size for each in options.into.glob("*.whl"))
    print(*added, sep="\n")
    print(f"{len(added)} packages; {options.into} has {size / 1e6:.1f} MB of wheels. In the image:")
    print(f"    pip install --no-index --no-deps {options.into}/*.whl")


if __name__ == "__main__":
    main()
