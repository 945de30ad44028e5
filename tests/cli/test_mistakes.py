"""Mistakes at the command line are answered in words, and before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from mistakes import MISTAKES, Mistake, write_files

HEAVY = ("torch", "transformers", "ray", "datasets", "numba")

ASK = """
import contextlib, io, json, os, sys
import stretto.api
from stretto.cli.main import main

def execute(*arguments, **keywords):
    print("a run would begin")

stretto.api.execute = execute
answers = []
for arguments, environment in json.load(sys.stdin):
    outside = dict(os.environ)
    os.environ.update(environment)
    said, before = io.StringIO(), set(sys.modules)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    os.environ.clear()
    os.environ.update(outside)
    heavy = [name for name in sys.argv[1:] if name in sys.modules and name not in before]
    answers.append({"status": status, "said": said.getvalue(), "heavy": heavy})
json.dump(answers, sys.stdout)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers to all mistakes, one after another in one process."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_files(folder)
    asked = [(m.arguments.split(), m.environment) for m in MISTAKES]
    done = subprocess.run(
        [sys.executable, "-c", ASK, *HEAVY],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"},
        check=False,
    )
    assert not done.returncode, done.stderr
    return dict(zip((m.name for m in MISTAKES), json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_answered_before_torch_is_imported(
    mistake: Mistake, answers: dict[str, Any]
) -> None:
    answer = answers[mistake.name]
    for piece in mistake.says:
        assert piece in " ".join(answer["said"].split())
    assert answer["status"] == 2
    assert not answer["heavy"]


def test_mistakes_have_names_of_their_own() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 70
