"""Step time of Stretto's PPO in the setting of peers/trl_ppo.py.

One step: prompts (16 GSM8K questions under the model's chat template) are sampled to exactly 64
tokens each (nothing ends a response), scored by the reference, the critic and a reward model, and
trained on for one epoch of one mini-batch with AdamW. Actor and reference are the given model;
critic and reward model are the same one with a scalar head (the reward model's random). bfloat16,
with fp32 master weights. The figures are those of the peer: see there.

    python benchmarks/ppo_step.py --model DIR --data gsm8k_train.jsonl
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stretto.models.backend import keep_freed_memory

keep_freed_memory()  # before torch is imported, as the command line does

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from _shared import parse
from stretto.assembly.run_models import Overrides
from stretto.config import Config
from stretto.runtime.run import start
from stretto.workers.drive import drive

SMOKE = {"steps": 2, "prompts_per_step": 2, "response_tokens": 4}


def save_reward_model(model: str, folder: Path, seed: int) -> None:
    """A sequence classifier of the model's backbone and a random head."""
    torch.manual_seed(seed)
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def settings(args: argparse.Namespace, reward_model: Path) -> Config:
    return Config.model_validate(
        {
            "seed": args.seed,
            "steps": args.steps,
            "model": {"name": str(args.model), "dtype": args.dtype},
            "task": {"kind": "gsm8k", "name": str(args.data)},
            "reward": {"sources": [f"model:{reward_model}"], "missing_eos": "off"},
            "rollout": {
                "batch": args.prompts_per_step,
                "max_new_tokens": args.response_tokens,
                "temperature": args.temperature,
            },
            "training": {"microbatch_tokens": args.microbatch_tokens},
        }
    )


NEVER_ENDS = Overrides(end_tokens=frozenset())
"""As in the peer: responses have exactly as many tokens as are allowed."""


def timed(
    config: Config, overrides: Overrides = NEVER_ENDS
) -> tuple[list[float], list[dict[str, float]]]:
    """Seconds of each step, and of its parts by name."""
    step_s: list[float] = []
    phases: list[dict[str, float]] = []

    async def steps() -> None:
        async with run.schedule as schedule:
            for _ in range(config.steps):
                start = time.perf_counter()
                step = await schedule.step()
                step_s.append(time.perf_counter() - start)
                phases.append(run.spans.totals())
                run.spans.take()
                most = config.rollout.max_new_tokens
                assert overrides.end_tokens or all(len(r) == most for r in step.batch)

    with ExitStack() as stack:
        run = start(config, stack, lambda text: print(text, file=sys.stderr), overrides)
        drive(steps())
    return step_s, phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--microbatch-tokens", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the JSON as well")
    args = parse(parser, SMOKE, model="model", data="data")
    with tempfile.TemporaryDirectory() as scratch:
        reward_model = Path(scratch) / "reward-model"
        save_reward_model(args.model, reward_model, args.seed)
        step_s, phases = timed(settings(args, reward_model))
    rest = step_s[1:] or step_s
    result: dict[str, Any] = {
        "name": f"stretto {version('stretto')}",
        "settings": {
            k: v for k, v in vars(args).items() if k not in ("model", "data", "out", "smoke")
        },
        "step_s": step_s,
        "samples_per_s": args.prompts_per_step / statistics.median(rest),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "phase_s": {
            name: statistics.median(p[name] for p in phases[1:] or phases) for name in phases[0]
        },
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
