"""Digests of what short runs compute: a change that should change nothing leaves them the same.

    python tools/digests.py --save before.json       # on the old code
    python tools/digests.py --against before.json    # on the new code; status 1 where they differ

Trains the recipes `tiny` and `tiny-tail` for a few steps under every preset of the schedule and
under every algorithm, on one thread. Each run is made twice; one that does not repeat itself on
this machine is shown as such and not compared. Where roles overlap, timing may give one of two
results: make such a variant again, with --only, before a difference is believed. A digest is a
SHA-256 over the trained model's tensors, over what became of each rollout, or over the metrics that
are no times. Takes about three minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from stretto import api
from stretto.config import PRESETS
from stretto.config.algorithm import ALGORITHMS
from stretto.observe.display import Progress

Digest = Mapping[str, str]
"""SHA-256, shortened, of weights, rollouts and metrics."""

SHORT = {
    "steps": 4,
    "warmup_examples": 256,
    "threads": 1,
    "rollout__batch": 16,
    "training__microbatch_tokens": 1024,  # a default of 0 would change the digests with it
}
"""What all runs change: enough steps that some have carried and off-policy responses."""

LENGTHS = {"tiny": {}, "tiny-tail": {"rollout__max_new_tokens": 96}}
"""What each recipe changes besides."""

UNSTEADY = "does not repeat"
"""In place of a digest that is another each time."""

TIMES = ("timing_s/", "time_s", "perf/", "utilisation/", "idle_s/")
"""How the metrics begin that hold times, which differ from run to run."""


def variants() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, recipe and changed settings of each run."""
    for recipe, lengths in LENGTHS.items():
        for preset in PRESETS:
            engines = {"rollout__engines": 2} if preset in ("rlhfuse", "stretto") else {}
            schedule = {"schedule__preset": preset, "schedule__chunk_tokens": 4}
            yield f"{recipe} {preset}", recipe, {**SHORT, **lengths, **engines, **schedule}
        for algorithm in (name for name, spec in ALGORITHMS.items() if not spec.teacher):
            several = {} if algorithm == "ppo" else {"rollout__samples_per_prompt": 4}
            changes = {"algorithm__name": algorithm, "training__minibatches": 2}
            yield f"{recipe} {algorithm}", recipe, {**SHORT, **lengths, **several, **changes}
        resumed = {"observe__checkpoint_every": 2, "schedule__overcommit": 8}
        yield f"{recipe} resumed", recipe, {**SHORT, **lengths, **resumed}


def digest(name: str, recipe: str, changes: Mapping[str, Any]) -> Digest:
    """Train once; a variant that is resumed stops half-way and goes on from its checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = Progress()
        if name.endswith("resumed"):
            half = {**changes, "steps": changes["steps"] // 2}
            run = api.train(recipe, out=folder, progress=quiet, **half).model.parent
            api.resume(run, progress=quiet, steps=changes["steps"])
        else:
            run = api.train(recipe, out=folder, progress=quiet, **changes).model.parent
        return {
            "weights": _of_weights(run / "model"),
            "rollouts": _of_lines(run / "rollouts.jsonl"),
            "metrics": _of_lines(run / "metrics.jsonl"),
        }


def _of_weights(model: Path) -> str:
    """Of all tensors by name, whatever files they are in."""
    tensors = {n: t for f in model.glob("*.safetensors") for n, t in load_file(f).items()}
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode() + tensors[name].tobytes())
    return whole.hexdigest()[:16]


def _of_lines(file: Path) -> str:
    """Of records without their times; the order of rollouts within a step is left out too."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in records]
    kept.sort(key=lambda r: (r["step"], r.get("id", 0)))
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def main() -> int:
    """Print all digests; 1 where one differs from the file's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--save", type=Path, help="write the digests here")
    parser.add_argument("--against", type=Path, help="compare with these")
    parser.add_argument("--only", default="", help="run the variants whose names contain this")
    options = parser.parse_args()
    known = json.loads(options.against.read_text()) if options.against else {}
    found: dict[str, Digest] = {}
    differing = 0
    for name, recipe, changes in variants():
        if options.only not in name:
            continue
        first, second = (digest(name, recipe, changes) for _ in range(2))
        found[name] = {k: v if v == second[k] else UNSTEADY for k, v in first.items()}
        before = known.get(name, found[name])
        both = {k: {v, before.get(k, v)} for k, v in found[name].items()}
        differs = [k for k, values in both.items() if len(values) > 1 and UNSTEADY not in values]
        differing += bool(differs)
        parts = "  ".join(f"{k} {v}" for k, v in found[name].items())
        remark = f"  DIFFERS: {', '.join(differs)}" if differs else ""
        print(f"{name:26}{parts}{remark}", flush=True)
    if options.save:
        options.save.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
