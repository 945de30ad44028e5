"""How well virtual time predicts a real run: runs of 'stretto train', against themselves, and the
runs of other schedules, predicted from those of 'sync'.

python benchmarks/simulated.py --replay RUN ...
python benchmarks/simulated.py --across --out runs/across     # --groups: with GRPO
python benchmarks/simulated.py --auto     # the preset 'auto' and fixed knobs, in virtual time
python benchmarks/simulated.py --measured --steps 36 --seeds 0 1 2     # the same in real runs
"""

from __future__ import annotations

import argparse
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, product
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any, NamedTuple

import _tuned
from _shared import parse
from stretto.api.runs import ONE_ENGINE
from stretto.api.settings import changed, config_of
from stretto.api.training import begin, execute
from stretto.assembly.run_models import Overrides
from stretto.config import Config, recipes
from stretto.observe import RunDirectory
from stretto.planner.replay import LEAST_STEPS, WARM_STEPS, Recording, predict
from stretto.protocols import DRIVER
from stretto.runtime.sim.simulate import simulate

REFERENCE = "sync"
UNLEARNED = {"training__lr": 1e-12, "training__critic_lr": 1e-12}
"""So that all schedules decode the same responses: policies that learn differ in their lengths."""
SMALL = {"warmup_examples": 0, "rollout__batch": 4}
"""For "--smoke"."""
TUNED = ("score_on", "overcommit", "lag", "chunk_tokens", "predicted", "measured")
"""Metrics of 'auto' for each step."""
COMPARING = {"algorithm__name": "grpo", "rollout__samples_per_prompt": 4}
"""Settings of an algorithm that compares the responses to a prompt."""

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    name: {f"schedule__{knob}": value for knob, value in knobs.items()}
    for name, knobs in ONE_ENGINE.items()
}
GROUPS: Mapping[str, Mapping[str, Any]] = {
    "sync": {},
    "sync, train_on": {"schedule__score_on": "rollout", "schedule__train_on": "group"},
    "oppo": {"schedule__preset": "oppo"},
    "oppo, train_on": {"schedule__preset": "oppo", "schedule__train_on": "group"},
    "skip_equal_groups": {"rollout__skip_equal_groups": True},
    "oppo, skip_equal_groups": {
        "schedule__preset": "oppo",
        "rollout__skip_equal_groups": True,
    },
}
"""Variants of GRPO, with the knobs of 2026."""


OVERCOMMITTED = "overcommit 16"
"""Or the batch, if that is smaller."""
MEASURED: Mapping[str, Mapping[str, Any]] = {
    REFERENCE: SCHEDULES[REFERENCE],
    "auto, 0": {"schedule__preset": "auto"},
    "auto, 1": {"schedule__preset": "auto", "schedule__max_staleness": 1},
    "sync again": SCHEDULES[REFERENCE],
    "async": SCHEDULES["async"],
    "oppo-no-intra": {**SCHEDULES["oppo-no-intra"], "schedule__max_carries": 1},
    OVERCOMMITTED: {"schedule__max_carries": 1},
    "sync at the end": SCHEDULES[REFERENCE],
}
"""'auto' with its bounds on data age, and fixed knobs within the second one. Each is compared with
the runs of 'sync' before and after it, because the machine may become slower or faster."""


class Pair(NamedTuple):
    """A schedule's seconds a step, measured and predicted from the run of ``sync``."""

    variant: str
    measured_s: float
    predicted_s: float
    reward: float  # mean of the last ten steps
    drift: float = 1.0  # seconds of the 'sync' beside it, relative to the one that predicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replay", nargs="+", type=Path, metavar="RUN", default=[])
    parser.add_argument("--across", action="store_true", help="predict schedules from 'sync'")
    parser.add_argument("--auto", action="store_true", help="the preset 'auto' in virtual time")
    parser.add_argument("--measured", action="store_true", help="the preset 'auto' in real runs")
    parser.add_argument("--groups", action="store_true", help="likewise, the knobs for groups")
    parser.add_argument("--learning", action="store_true", help="train at the recipe's rate")
    parser.add_argument(
        "--recipes", nargs="+", default=["tiny-tail", "tiny-climb", "tiny-turns", "tiny"]
    )
    parser.add_argument("--runtimes", nargs="+", default=["inline", "local"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/across"))
    parser.add_argument("--bounds", nargs="+", type=int, default=[0, 1], help="of --auto")
    parser.add_argument("--workloads", nargs="+", default=[], help="of --auto; default: all")
    small = {"steps": WARM_STEPS + LEAST_STEPS, "recipes": ["tiny"], "runtimes": ["inline"]}
    args = parse(parser, small)
    if args.replay:
        replay(args.replay)
        return
    if args.auto or args.smoke:
        _tuned.table(args.bounds, args.workloads, smoke=args.smoke)
    if not (args.across or args.groups or args.measured or args.smoke):
        if not args.auto:
            parser.error("give --replay, --across, --groups, --auto or --measured")
        return
    with tempfile.TemporaryDirectory() as scratch:
        if args.smoke:
            args.out = Path(scratch)
            replay([recorded(args.out)])
        if args.measured or args.smoke:
            measured_auto(args)
        if not args.measured:
            across(args)


def recorded(out: Path) -> Path:
    """The folder of a short run, for ``--smoke``."""
    config = changed(config_of("tiny"), {"steps": WARM_STEPS + LEAST_STEPS, "out": str(out)})
    return trained(config, SMALL, "smoke", None)


def trained(config: Config, changes: Mapping[str, Any], name: str, warm: Path | None) -> Path:
    """The folder of a run."""
    quiet = {"observe__progress": "off", "observe__checkpoint_minutes": 0.0}
    run = begin(changed(config, {**changes, **quiet}), name, overrides=Overrides(warmup=warm))
    execute(run)
    return run.run_dir.path


def warmed(config: Config) -> Path:
    """The file with a recipe's warm-up, made by a run of one step, whose time does not count. Its
    name depends on the settings, so that files of other ones stay."""
    settings = config.model_dump(
        mode="json", include={"model", "task", "seed", "warmup_examples", "warmup_lr", "training"}
    )
    name = f"warm-up-{zlib.crc32(str(settings).encode()):08x}"
    file = Path(config.out) / f"{name}.safetensors"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        trained(config, {"steps": 1}, name, file)
    return file


def measured_auto(args: argparse.Namespace) -> None:
    """Speeds of the schedules relative to 'sync', in turn, and the knobs that 'auto' chose."""
    late = min(_tuned.LATE, args.steps - 2)
    print(f"| recipe | seed | {' | '.join(MEASURED)} |\n|---|---{'|---' * len(MEASURED)}|")
    chosen: list[str] = []
    for recipe, seed in product(args.recipes, args.seeds):
        changes = {**UNLEARNED, "steps": args.steps, "seed": seed, "out": str(args.out)}
        config = changed(config_of(recipe), changes | (SMALL if args.smoke else {}))
        warm = warmed(config)
        speeds: dict[str, list[float]] = {}
        for name, variant in MEASURED.items():
            if name == OVERCOMMITTED:
                variant = {**variant, "schedule__overcommit": min(16, config.rollout.batch)}
            folder = trained(config, variant, f"measured-{recipe}-{seed}-{name}", warm)
            steps = [m for m in RunDirectory.open(folder).read_metrics() if m["step"]]
            speeds[name] = [_tuned.rate(steps), _tuned.rate(steps, late)]
            if name.startswith("auto"):
                share = f"decisions take {deciding(folder):.1%} of the time"
                lines = [share, *choices(steps)]
                chosen += [f"{recipe}, {seed}, {name}, {line}" for line in lines]
        cells = map(" / ".join, relative(speeds))
        print(f"| {recipe} | {seed} | {' | '.join(cells)} |", flush=True)
    print(f"\nwhole run / from step {late + 1}; load {os.getloadavg()}\n", *chosen, sep="\n")


def deciding(folder: Path) -> float:
    """The share of a run's time in which 'auto' simulates: its cost if it changes nothing."""
    trace = RunDirectory.open(folder).trace.read()
    spans_s = sum(s.end_s - s.start_s for s in trace.spans if s.name == f"{DRIVER}/adapt")
    return spans_s / (trace.steps[-1].end_s - trace.steps[0].start_s)


def relative(speeds: Mapping[str, Sequence[float]]) -> Iterator[list[str]]:
    """Each schedule's speeds, relative to the mean of the runs of 'sync' before and after it. Those
    of 'sync' itself are relative to its first run."""
    names = list(speeds)
    plain = [i for i, name in enumerate(names) if name.startswith(REFERENCE)]
    for i, name in enumerate(names):
        beside = plain[:1]
        if i not in plain:
            beside = [max(k for k in plain if k < i), min(k for k in plain if k > i)]
        means = [fmean(pair) for pair in zip(*(speeds[names[k]] for k in beside), strict=True)]
        yield [f"{a / b:.2f}" for a, b in zip(speeds[name], means, strict=True)]


def choices(steps: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """The knobs of a run with a tuner, at the steps at which they changed."""
    before: list[float] = []
    for step in steps:
        values = [step.get(f"schedule/{name}", 0.0) for name in TUNED]
        if values != before:
            before = values
            pairs = zip(TUNED, values, strict=True)
            yield f"step {step['step']:.0f}: " + ", ".join(f"{k} {v:g}" for k, v in pairs)


def across(args: argparse.Namespace) -> None:
    """Every schedule, measured, and predicted from the run of ``sync`` beside it. A measured run
    has the noise of the machine, which means over seeds reduce."""
    variants = GROUPS if args.groups else SCHEDULES
    common = {"steps": args.steps, **(COMPARING if args.groups else {})}
    common |= {} if args.learning else UNLEARNED
    if args.smoke:
        common |= SMALL
        variants = {name: variants[name] for name in (REFERENCE, "oppo")}
    columns = "recipe, runtime, seed, schedule, s a step, predicted, ratio, x sync, drift, reward"
    print(f"| {columns.replace(', ', ' | ')} |")
    print(f"{'|---' * 10}|", flush=True)
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for recipe in args.recipes:
        for seed in args.seeds:
            for runtime in args.runtimes:
                config = changed(config_of(recipe), {**common, "seed": seed, "runtime": runtime})
                config = changed(config, {"out": str(args.out)})
                found = compared(config, variants, f"{recipe}-{runtime}-{seed}", warmed(config))
                for pair in found:
                    ratio = pair.predicted_s * pair.drift / pair.measured_s
                    ratios.setdefault((recipe, runtime, pair.variant), []).append(ratio)
                    print(
                        f"| {recipe} | {runtime} | {seed} | {pair.variant} | {pair.measured_s:.4f} "
                        f"| {pair.predicted_s:.4f} | {ratio:.2f} "
                        f"| {found[0].measured_s * pair.drift / pair.measured_s:.2f} "
                        f"| {pair.drift:.2f} | {pair.reward:.3f} |",
                        flush=True,
                    )
    report_errors("each run", list(chain(*ratios.values())))
    if len(args.seeds) > 1:
        means = {key: geometric_mean(seeds) for key, seeds in ratios.items()}
        for (recipe, runtime, variant), mean in means.items():
            print(f"{recipe}, {runtime}, {variant}: {mean:.2f}")
        report_errors("means of the seeds", list(means.values()))
    print(f"load {os.getloadavg()}")


def report_errors(name: str, ratios: Sequence[float]) -> None:
    errors = [abs(ratio - 1) for ratio in ratios]
    print(f"\nerror, {name}: median {median(errors):.1%}, worst {max(errors):.1%}")


def compared(
    config: Config, variants: Mapping[str, Mapping[str, Any]], name: str, warm: Path
) -> list[Pair]:
    """The pairs of all variants. The first one predicts, and is run again after each other one, so
    that a machine that becomes slower or faster is told from a wrong prediction. It takes twice
    the steps, as variants that skip groups read more prompts. Costs are of the first half, like the
    seconds that its later runs are compared with."""

    def folder_of(variant: str, steps: int = config.steps) -> Path:
        changes = {**variants[variant], "steps": steps}
        return trained(config, changes, f"{name}-{variant.replace(', ', '-')}", warm)

    reference, *others = variants
    first = folder_of(reference, 2 * config.steps)
    trace = RunDirectory.open(first).trace.read(config.steps)
    recording = Recording.read(first, WARM_STEPS, trace)
    pairs = [pair_of(reference, first, recording, config.steps)]
    first_s = before_s = pairs[0].measured_s
    for variant in others:
        pair = pair_of(variant, folder_of(variant), recording, config.steps)
        again = pair_of(reference, folder_of(reference), recording, config.steps)
        pairs.append(pair._replace(drift=(before_s + again.measured_s) / 2 / first_s))
        before_s = again.measured_s
    return pairs


def pair_of(variant: str, folder: Path, recording: Recording, most_steps: int) -> Pair:
    """A run's seconds a step after the warm-up, and what ``recording`` says of them. Policies that
    learn write responses of their own. Only the costs of ``recording`` then tell something."""
    run = RunDirectory.open(folder)
    steps = run.trace.read().steps[:most_steps]
    if recipes.load(folder).training.lr != UNLEARNED["training__lr"]:
        recording = replace(recording, rollouts=run.read_rollouts(in_flight=True))
    measured_s = (steps[-1].end_s - steps[WARM_STEPS].start_s) / (len(steps) - WARM_STEPS)
    result = simulate(recording.cluster(recipes.load(folder)), steps=len(steps))
    ends_s = list(accumulate(step["timing_s/step"] for step in result.steps))
    predicted_s = (ends_s[-1] - ends_s[WARM_STEPS - 1]) / (len(steps) - WARM_STEPS)
    scores = [m["objective/scores"] for m in run.read_metrics() if m["step"]][:most_steps]
    rewards = scores[-10:]
    return Pair(variant, measured_s, predicted_s, sum(rewards) / len(rewards))


def replay(runs: Sequence[Path]) -> None:
    """Seconds a step as measured, and as the simulator has them after calibration; by phase."""
    found = [(path, predict(path)) for path in runs]
    print("| run | schedule | measured | predicted | ratio |")
    print("|---|---|---|---|---|")
    for path, prediction in found:
        preset, step = recipes.load(path).schedule.preset, prediction.phases[-1]
        print(
            f"| {path.name} | {preset} | {step.measured_s:.4f} s "
            f"| {step.predicted_s:.4f} s | {step.ratio or 0:.2f} |",
            flush=True,
        )
    for path, prediction in found:
        print(f"\n{path.name}: {prediction.title}\n{prediction.table()}")


if __name__ == "__main__":
    main()
