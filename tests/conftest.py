"""What several test files start from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stretto.models.tiny import make_tiny

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # tests share some of its tables


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, in Hugging Face format; not to be written to."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(folder)
    return folder
