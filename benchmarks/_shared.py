"""What the benchmarks share, peers in environments of their own included.

``--smoke`` makes a run of seconds out of any of them: a tiny random model, small sizes, nothing
fetched. Its figures mean nothing; it shows that the program still runs (tests/test_benchmarks.py).
"""

from __future__ import annotations

import argparse
import atexit
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

MISSING = 77
"""Exit status of a program whose packages are not installed; test runners read it as 'skipped'."""


def parse(
    parser: argparse.ArgumentParser, small: dict[str, Any], *, model: str = "", data: str = ""
) -> argparse.Namespace:
    """Parse the command line, to which ``--smoke`` is added.

    Args:
        parser: with all other options.
        small: defaults under ``--smoke``.
        model: option that names a model's folder, if there is one; a tiny model under ``--smoke``.
        data: likewise, of a file of questions and answers as GSM8K has them.
    """
    parser.add_argument(
        "--smoke", action="store_true", help="seconds on a tiny random model: does it run at all?"
    )
    if "--smoke" in sys.argv[1:]:
        folder = Path(tempfile.mkdtemp(prefix="stretto-smoke-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        found = {model: _tiny_model(folder)} if model else {}
        found |= {data: _questions(folder)} if data else {}
        for action in parser._actions:
            if action.dest in small | found:
                action.required = False
        parser.set_defaults(**small, **found)
    return parser.parse_args()


def _tiny_model(folder: Path) -> Path:
    """A Llama of 115,200 random weights; its tokenizer has a chat template."""
    # For the peers, in whose environments this package is not installed.
    sys.path.append(str(Path(__file__).parents[1] / "src"))
    from stretto.models.tiny import byte_tokenizer, make_tiny

    make_tiny(folder / "tiny")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "tiny")
    return folder / "tiny"


def _questions(folder: Path) -> Path:
    file = folder / "questions.jsonl"
    rows = ({"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(64))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def random_prompts(count: int, length: int, seed: int, vocabulary: int) -> list[list[int]]:
    """Seeded token ids from 100 to 39,999, where the vocabulary has as many: no special tokens, the
    same for every peer.
    """
    rng = random.Random(seed)
    return [
        [rng.randrange(100, min(40_000, vocabulary)) for _ in range(length)] for _ in range(count)
    ]


def leave_out(error: ImportError, remedy: str) -> NoReturn:
    """End a program whose packages are not there, with a line that says so."""
    print(f"skipped: {error}; {remedy}", file=sys.stderr)
    raise SystemExit(MISSING)
