"""Episodes whose tool is slow: what each schedule makes of the waits, for real and in virtual time.

Each variant trains for the same steps, on the same rows: PPO with reference and critic, Stretto's
own engine, and a tool whose seconds are log-normal. The model has random weights and hardly learns,
so all variants meet the same turns. The run of 'sync' is then replayed in virtual time with every
schedule, and so is a described cluster with turns and waits like these.

    python benchmarks/episodes.py
    python benchmarks/episodes.py --model DIR --steps 8 --variants sync oppo stretto
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from _shared import parse
from stretto import api
from stretto.config import Config, ScheduleConfig, changes
from stretto.models.tiny import byte_tokenizer
from stretto.observe.display import Progress
from stretto.planner.formulas import priced
from stretto.planner.replay import Recording
from stretto.runtime.sim.cluster import Cluster
from stretto.runtime.sim.simulate import SimResult, simulate
from stretto.runtime.sim.turns import AnswerLatency, SimEpisodes

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "sync": {"preset": "sync"},
    "oppo-score-batch": {"preset": "oppo", "score_on": "batch"},
    "oppo-score-rollout": {"preset": "oppo", "score_on": "rollout"},
    "oppo": {"preset": "oppo"},
    "async": {"preset": "async"},
    "async-score-chunk": {"preset": "async", "score_on": "chunk"},
    "stretto-score-batch": {"preset": "stretto", "score_on": "batch"},
    "stretto-score-rollout": {"preset": "stretto", "score_on": "rollout"},
    "stretto-hold-keep": {"preset": "stretto", "hold": "keep"},
    "stretto-hold-remake": {"preset": "stretto", "hold": "remake"},
    "stretto": {"preset": "stretto"},
}
"""Settings of the schedule by name."""
PAIRS = (
    ("streamed scoring", "oppo", "oppo-score-batch"),
    ("streamed scoring", "oppo", "oppo-score-rollout"),
    ("streamed scoring", "async-score-chunk", "async"),
    ("streamed scoring", "stretto", "stretto-score-batch"),
    ("streamed scoring", "stretto", "stretto-score-rollout"),
    ("hold auto", "stretto", "stretto-hold-keep"),
    ("hold auto", "stretto", "stretto-hold-remake"),
)
"""What is compared: two variants that differ in one thing."""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
STOPS = tuple("bcdfg")
"""Letters that end a turn, beside the end token: of 259 random tokens, about one in 43."""
CLUSTER = Path(__file__).parent / "clusters" / "oppo-7b-h200.toml"
WARM = 2
"""First steps, which do not count."""


class Measured(NamedTuple):
    """A variant's seconds a step, and shares of the time in which roles worked."""

    step_s: float
    busy: Mapping[str, float]


def made(folder: Path, width: int, layers: int) -> Path:
    """A Llama of random weights, whose tokenizer has a template for chats."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=256,
        bos_token_id=257,
        eos_token_id=258,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prompts, each with the turns of its episodes and how long the tool takes."""
    return [
        {
            "prompt": [{"role": "user", "content": f"Task {i}: say something, and ask."}],
            "number": i,
            "turns": 2 + i % 3,
            "answer": 20 + 17 * i % 60,
            "median_s": args.median,
            "p95_s": args.p95,
        }
        for i in range(args.batch * (args.steps + WARM + 8))
    ]


def settings(args: argparse.Namespace, folder: Path) -> Config:
    """The run, but for its schedule."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(args)))
    model = args.model or made(folder / "model", args.width, args.layers)
    given = {
        "steps": args.steps + WARM,
        "out": str(folder / "runs"),
        "model": {"name": str(model), "dtype": "float32"},
        "task": {"kind": "dataset", "name": str(data), "max_prompt_tokens": 128},
        "rollout": {
            "engine": "torch",
            "batch": args.batch,
            "slots": args.slots,
            "max_new_tokens": args.new_tokens,
            "stop": STOPS if not args.model else (),
        },
        "environment": {"sources": [f"{Path(__file__).parent / '_slow_tool.py'}:SlowTool"]},
        "reward": {"sources": ["environment"], "missing_eos": "off"},
        "algorithm": {"name": "ppo", "kl_coef": 0.01},
        "training": {"lr": 1e-9, "critic_lr": 1e-9},
        "observe": {"checkpoint_minutes": 0},
    }
    return Config.model_validate(given)


def real(config: Config) -> tuple[Measured, Path]:
    """Train; the measured steps, and the run's folder."""
    run = api.train(config, progress=Progress()).model.parent
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if step["step"] > WARM]
    busy = {
        key.removeprefix("utilisation/"): fmean(step.get(key, 0.0) for step in steps)
        for key in steps[-1]
        if key.startswith("utilisation/")
    }
    return Measured(fmean(step["timing_s/step"] for step in steps), busy), run


def predicted(recording: Recording, config: Config) -> Measured:
    """The same steps in virtual time."""
    result: SimResult = simulate(recording.cluster(config))
    steps = result.steps[WARM:]
    return Measured(fmean(step["timing_s/step"] for step in steps), result.utilisation)


def at_scale(args: argparse.Namespace, name: str) -> Measured:
    """The described cluster in virtual time, with turns and waits like these."""
    cluster = priced(Cluster.read(args.cluster))
    waits = {"median": args.median, "p95": args.p95}
    workload = {"steps": args.steps + WARM, "episodes": SimEpisodes(wait_s=AnswerLatency(**waits))}
    changed = {
        "workload": cluster.workload.model_copy(update=workload),
        "schedule": ScheduleConfig.model_validate(VARIANTS[name]),
    }
    result = simulate(cluster.model_copy(update=changed))
    steps = result.steps[WARM:]
    return Measured(fmean(step["timing_s/step"] for step in steps), result.utilisation)


def tables(names: list[str], found: Mapping[str, Mapping[str, Measured]]) -> Iterator[str]:
    """Seconds a step and ratios of each variant, and of pairs that differ in one thing."""
    kinds = list(found)
    heads = [head for kind in kinds for head in (f"s a step, {kind}", "x sync", "generator busy")]
    yield f"| schedule | {' | '.join(heads)} |"
    yield "|---" * (1 + len(heads)) + "|"
    for name in names:
        cells = []
        for kind in kinds:
            own, base = found[kind][name], found[kind][names[0]]
            busy = own.busy.get("generator", 0.0)
            cells += [f"{own.step_s:.3g}", f"{base.step_s / own.step_s:.2f}", f"{busy:.0%}"]
        yield f"| {name} | {' | '.join(cells)} |"
    yield f"\n| what | with | without | {' | '.join(f'gain, {kind}' for kind in kinds)} |"
    yield "|---" * (3 + len(kinds)) + "|"
    for what, one, other in PAIRS:
        if one in names and other in names:
            gains = (found[k][other].step_s / found[k][one].step_s for k in kinds)
            yield f"| {what} | {one} | {other} | {' | '.join(f'{g:.2f}' for g in gains)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="default: a Llama of random weights")
    parser.add_argument("--width", type=int, default=256, help="of that Llama")
    parser.add_argument("--layers", type=int, default=6, help="of that Llama")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--cluster", type=Path, default=CLUSTER, help="simulated beside it")
    parser.add_argument("--steps", type=int, default=12, help=f"after {WARM} that warm up")
    parser.add_argument("--batch", type=int, default=32, help="episodes a step")
    parser.add_argument("--slots", type=int, default=0, help="rows of the engine; 0: all in flight")
    parser.add_argument("--new-tokens", type=int, default=1024, help="of an episode")
    parser.add_argument("--median", type=float, default=0.5, help="seconds of the tool")
    parser.add_argument(
        "--p95", type=float, default=5.0, help="seconds that one call in 20 exceeds"
    )
    small = {"steps": 1, "batch": 4, "median": 0.005, "p95": 0.05, "new_tokens": 128}
    small |= {"width": 64, "layers": 2}
    args = parse(parser, {**small, "variants": ["sync", "stretto-score-rollout", "stretto"]})
    if args.variants[0] != "sync":
        args.variants = ["sync", *(name for name in args.variants if name != "sync")]
    found: dict[str, dict[str, Measured]] = {"real": {}, "predicted": {}, args.cluster.stem: {}}
    with tempfile.TemporaryDirectory(prefix="stretto-episodes-") as scratch:
        base = settings(args, Path(scratch))
        recording = None
        for name in args.variants:
            config = changes.changed(base, {"schedule": dict(VARIANTS[name])}, name)
            found["real"][name], run = real(config)
            recording = recording or Recording.read(run)
            found["predicted"][name] = predicted(recording, config)
            found[args.cluster.stem][name] = at_scale(args, name)
            for kind, measured in found.items():
                print(name, kind, measured[name], file=sys.stderr, flush=True)
    print("\n".join(tables(args.variants, found)))


if __name__ == "__main__":
    main()
