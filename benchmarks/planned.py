"""Plans for three papers' settings: the example and a table of docs/planning.md.

    python benchmarks/planned.py                  # all three, some minutes
    python benchmarks/planned.py --settings oppo-7b

Prints what ``stretto plan`` prints, and how long it took. Nothing is measured: no GPU is there.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from _shared import parse
from stretto.cli.main import main as stretto

SETTINGS = Path(__file__).parent / "plans"
ASKED = {
    "oppo-7b": ["--gpus", "8", "--gpu", "h200"],
    "async-8b": ["--gpus", "8", "--gpu", "h100"],
    "rlhfuse-33b-13b": ["--gpus", "256", "--gpu", "h100", "--reward-shape", "llama-13b"],
}
"""GPUs of each setting, and what its file does not say."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=ASKED, default=list(ASKED))
    parser.add_argument("--minutes", type=float, default=0.0, help="longest search; 0: as it comes")
    args = parse(parser, {"settings": ["oppo-7b"], "minutes": 0.001})
    took: dict[str, float] = {}
    for name in args.settings:
        options = [*ASKED[name], *(["--minutes", str(args.minutes)] if args.minutes else [])]
        print(f"    $ stretto plan benchmarks/plans/{name}.toml {' '.join(options)}", flush=True)
        start_s = time.monotonic()
        if stretto(["plan", str(SETTINGS / f"{name}.toml"), *options]):
            raise SystemExit(f"no plan for {name}")
        took[name] = time.monotonic() - start_s
        print(flush=True)
    print("| setting | seconds of the command |\n|---|---|")
    for name, seconds in took.items():
        print(f"| {name} | {seconds:.0f} |")


if __name__ == "__main__":
    main()
