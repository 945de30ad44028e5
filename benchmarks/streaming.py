"""What scoring responses while others are decoded gains where something else is idle.

All overlap is off but ``schedule.score_on``: 'batch' scores once all responses have ended,
'rollout' each as it ends, 'chunk' every few tokens. 'models': PPO on GSM8K, with model scorers in a
process of their own on a thread of its own, beside a generator on one: so each has a device, as on
separate GPUs. 'judge': the recipe tiny-tail, most of whose responses are short, and a judge that
takes its time for every response. Each variant is a run of its own; what the simulator makes of the
run with 'batch' is beside it.

    python benchmarks/streaming.py --model DIR --data gsm8k_train.jsonl

With ``--python .venv-vllm/bin/python`` vLLM generates in 'models'.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from _shared import parse
from episodes import WARM, Measured, predicted, real
from ppo_step import save_reward_model
from stretto.config import Config, changes, recipes
from stretto.machine import Machine
from stretto.planner.replay import Recording

SMOKE = {
    "steps": 1, "judge_steps": 1, "batch": 2, "new_tokens": 12, "judge_s": 0.01,
    "dtype": "float32",
}  # fmt: skip
SCORED = ("batch", "rollout", "chunk")


def models(args: argparse.Namespace, scratch: Path) -> Config:
    """Three models that score, and a generator, on a thread each."""
    scorers = ["reference", "critic", f"model:{scratch / 'reward-model'}"]
    generator: dict[str, Any] = {"roles": ["generator"], "threads": 1}
    if args.python:
        generator["python"] = args.python
    given: dict[str, Any] = {
        "model": {"name": str(args.model), "dtype": args.dtype},
        "task": {"kind": "gsm8k", "name": str(args.data)},
        "rollout": {
            "batch": args.batch,
            "max_new_tokens": args.new_tokens,
            "engine": "vllm" if args.python else "torch",
        },
        "reward": {"sources": scorers[-1:], "missing_eos": "off"},
        "runtime": "local",
        "cluster": {
            "processes": [
                {"roles": ["learner"], "threads": 2},
                generator,
                {"roles": scorers, "threads": 1},
            ]
        },
    }
    return Config.model_validate(given)


def judge(args: argparse.Namespace, scratch: Path) -> Config:
    """A judge beside tiny models."""
    given = {"sources": [f"{Path(__file__).parent / '_slow_judge.py'}:judge"]}
    few = {"rollout": {"batch": 8}, "warmup_examples": 0} if args.smoke else {}
    return changes.changed(recipes.load("tiny-tail"), {"reward": given, **few}, "judge")


CASES = {"models": models, "judge": judge}


def settings(args: argparse.Namespace, scratch: Path, case: str, score_on: str) -> Config:
    """A run, in which all variants meet the same responses: the policy hardly moves."""
    steps = (args.steps if case == "models" else args.judge_steps) + WARM
    given = {
        "steps": steps,
        "out": str(scratch / "runs"),
        "schedule": {"score_on": score_on, "chunk_tokens": args.chunk},
        "training": {"lr": 1e-9, "critic_lr": 1e-9},
        "observe": {"checkpoint_minutes": 0},
    }
    return changes.changed(CASES[case](args, scratch), given, case)


def rows(args: argparse.Namespace, scratch: Path, case: str) -> Iterator[str]:
    """Rows of a table, each as soon as it is measured."""
    first: Mapping[str, Measured] = {}
    recording = None
    for score_on in SCORED:
        config = settings(args, scratch, case, score_on)
        measured, run = real(config)
        recording = recording or Recording.read(run)
        now = {"real": measured, "predicted": predicted(recording, config)}
        first = first or now
        gains = (first[kind].step_s / found.step_s for kind, found in now.items())
        busy = (measured.busy.get(role, 0.0) for role in ("generator", "learner"))
        cells = [case, score_on, f"{measured.step_s:.3g}"]
        cells += [f"{gain:.2f}" for gain in gains] + [f"{share:.0%}" for share in busy]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder in HF format")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train file")
    parser.add_argument("--python", default="", help="an interpreter that has vLLM, to generate")
    parser.add_argument("--steps", type=int, default=3, help=f"after {WARM} that warm up")
    parser.add_argument("--judge-steps", type=int, default=10, help="likewise, with the judge")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=32, help="tokens that are streamed at a time")
    parser.add_argument("--judge-s", type=float, default=0.05, help="the judge's, for a response")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--out", type=Path, help="where to write the table as well")
    args = parse(parser, SMOKE, model="model", data="data")
    os.environ["JUDGE_S"] = str(args.judge_s)
    lines = [
        f"Machine: {Machine.here()}, {args.dtype}; generator: "
        f"{'vLLM' if args.python else 'own engine'}.",
        "",
        "| scorers | score_on | s a step | gain | simulated | generator busy | learner busy |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory(prefix="stretto-streaming-") as folder:
        scratch = Path(folder)
        save_reward_model(str(args.model), scratch / "reward-model", 0)
        for case in args.cases:
            for line in rows(args, scratch, case):
                lines.append(line)
                print(line, flush=True)
                if args.out:
                    args.out.write_text("\n".join(lines) + "\n")
    print("busy: a role's share of the time of a step", file=sys.stderr)


if __name__ == "__main__":
    main()
