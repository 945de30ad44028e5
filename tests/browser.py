"""Pages as a browser has them once their scripts have run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_browser = pytest.mark.skipif(not shutil.which("chromium"), reason="needs a browser")


def dom(page: str, folder: Path, script: str = "") -> str:
    """A page (its text, or its address) as a browser has it once its script, and then another, has
    run, without a complaint."""
    if not page.startswith("http:"):
        file = folder / "report.html"
        file.write_text(page + f"<script>{script}</script>", encoding="utf-8")
        page = file.as_uri()
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", page]
    command.insert(1, "--virtual-time-budget=2000")
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60)
    assert "CONSOLE" not in done.stderr
    return done.stdout
