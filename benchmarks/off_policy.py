"""How far off-policy each algorithm can learn: N batches of one policy, then N updates on them.

The recipe ``tiny``, with the settings of tests/algorithms/tiny_algorithms.toml; the learning
rate of an algorithm is the same for every N, and so is the number of updates. Rewards are those of
the batches that were trained on. Finished runs found in the folder are not run again, so that an
experiment that was stopped goes on where it was.

    python benchmarks/off_policy.py --out runs/off-policy --svg docs/images/off-policy.svg
"""

from __future__ import annotations

import argparse
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from stretto.models.backend import keep_freed_memory

keep_freed_memory()  # before torch is imported, as the command line does

from _old_data import REMEDIES
from _shared import parse
from stretto.config import Config, recipes
from stretto.observe import RunDirectory
from stretto.observe.display import Progress
from stretto.observe.report import style
from stretto.runs import train

SETTINGS = Path(__file__).parents[1] / "tests" / "algorithms" / "tiny_algorithms.toml"
STEPS = 400
"""Updates of a run, a multiple of each N."""
SHORT = 96
"""Updates of a run that compares remedies: six rounds of N = 16."""
WINDOW = 10
"""Steps that rewards are averaged over."""

MAIN = ("ppo", "rloo", "proximal-rloo", "online-dpo")
DIAL = (1, 4, 16)


@dataclass(frozen=True)
class Variant:
    """One algorithm at one N.

    Attributes:
        old_policy, correction, level, cap, ess_scaling, baseline: as in ``[algorithm]``.
        remedy: a key of REMEDIES.
        lr: instead of that of the file; 0 keeps it.
        steps: updates of a run.
    """

    algorithm: str
    n: int
    old_policy: str = "behaviour"
    correction: str = "off"
    level: str = "token"
    cap: float = 2.0
    ess_scaling: str = "off"
    baseline: str = "mean"
    remedy: str = ""
    lr: float = 0.0
    steps: int = STEPS

    @property
    def title(self) -> str:
        """The algorithm, with what was changed in it."""
        parts = [self.algorithm]
        parts += [self.old_policy] if self.old_policy != "behaviour" else []
        parts += [self.correction] if self.correction != "off" else []
        parts += [self.level] if self.level != "token" else []
        parts += [self.remedy] if self.remedy else []
        parts += [f"{self.baseline} baseline"] if self.baseline != "mean" else []
        parts += [f"cap {self.cap:g}"] if self.cap != 2.0 else []
        parts += [f"ess {self.ess_scaling}"] if self.ess_scaling != "off" else []
        parts += [f"lr {self.lr:g}"] if self.lr else []
        return ", ".join(parts)

    def name(self, seed: int) -> str:
        """Of a run's folder."""
        title = self.title.replace(", ", "-").replace(" ", "")
        return f"{title}-n{self.n}-seed{seed}"


PLAIN = ("behaviour", "off")
CORRECTED = (("proximal", "off"), ("proximal", "truncate"), ("proximal", "mask"))
"""Old policy and correction."""
PPO_LR = 2e-3
"""Twice the recipe's, which is chosen for another number of steps."""
SMALL_LR = 5e-4
"""A quarter of it."""

VARIANTS = (
    *(Variant(algorithm, n) for algorithm, n in product(MAIN, DIAL)),
    Variant("copg", 16),
    *(Variant("ppo", 16, *how) for how in CORRECTED),
    *(Variant("ppo", 16, *how, lr=SMALL_LR) for how in (PLAIN, *CORRECTED)),
)
"""The curves; what the corrections make of PPO at N = 16, there also with smaller steps."""

TRUNCATED: dict[str, Any] = {
    "old_policy": "proximal",
    "correction": "truncate",
    "level": "sequence",
}
MASKED: dict[str, Any] = {
    "old_policy": "proximal",
    "correction": "mask",
    "level": "sequence",
    "cap": 1.01,
    "remedy": "geometric mean",
}
OF_RLOO: tuple[dict[str, Any], ...] = (
    {},
    TRUNCATED,
    {"ess_scaling": "sqrt"},
    TRUNCATED | {"ess_scaling": "sqrt"},
    TRUNCATED | {"baseline": "optimal"},
    MASKED,
)
OF_RLOO_4 = tuple(how for how in OF_RLOO if how not in ({"ess_scaling": "sqrt"}, MASKED))
OF_PPO: tuple[dict[str, Any], ...] = ({}, {"ess_scaling": "sqrt"}, MASKED)
OLD_DATA = (
    *(Variant("rloo", 16, steps=SHORT, **how) for how in OF_RLOO),
    *(Variant("rloo", 4, steps=SHORT, **how) for how in OF_RLOO_4),
    *(Variant("ppo", 16, steps=SHORT, **how) for how in OF_PPO),
    *(Variant("grpo", 16, steps=SHORT, **how) for how in OF_PPO[:2]),
)
"""Remedies for old data."""


SMOKE: dict[str, Any] = {"steps": 16, "warmup_examples": 0, "rollout": {"batch": 4}}
"""Changes of the settings under ``--smoke``."""


def settings(variant: Variant, seed: int, changed: Mapping[str, Any]) -> Config:
    """The recipe, the algorithm's changes, the variant's, N, and other changes; in this order."""
    data = recipes.load("tiny").model_dump()
    of_algorithm = tomllib.loads(SETTINGS.read_text())[variant.algorithm]
    corrections = {
        "old_policy": variant.old_policy,
        "correction": variant.correction,
        "correction_level": variant.level,
        "correction_cap": variant.cap,
        "ess_scaling": variant.ess_scaling,
        "baseline": variant.baseline,
    }
    observe = {"progress": "off", "checkpoint_minutes": 0}
    for changes in (
        of_algorithm,
        {"algorithm": corrections, "schedule": {"weight_sync_interval": variant.n}},
        {"seed": seed, "steps": variant.steps, "observe": observe},
        changed,
    ):
        for key, value in changes.items():
            data[key] = data[key] | value if isinstance(value, Mapping) else value
    if lr := variant.lr or (PPO_LR if variant.algorithm == "ppo" else 0.0):
        data["training"] |= {"lr": lr}
    return Config.model_validate(data)


def metrics(config: Config, out: Path, name: str, remedy: str = "") -> list[dict[str, Any]]:
    """The figures of every step of a run, which is taken if neither it nor a longer one has been.
    The learning rate is constant, so a longer run starts with the same steps.
    """
    for folder in sorted(out.glob(f"{name}-[0-9][0-9][0-9]")):
        run_dir = RunDirectory.open(folder)
        rows = run_dir.read_metrics()
        same = recipes.load(folder).model_copy(update={"steps": config.steps}) == config
        if len(rows) >= config.steps and same:
            return rows[: config.steps]
    run_dir = RunDirectory.create(out, name, config)
    with REMEDIES[remedy]():
        train(config, run_dir=run_dir, progress=Progress())
    return run_dir.read_metrics()


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        rewards: mean reward of each step's batch.
        kl: nats a response to the reference, mean of the last steps.
        clipped: share of tokens (of responses, for proximal-rloo) beyond the clip range, mean of
            all steps; ``None`` where nothing is clipped.
        ess: effective sample size, mean of all steps; ``None`` in runs older than the metric.
    """

    rewards: Sequence[float]
    kl: float
    clipped: float | None
    ess: float | None

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Curve:
        clipped = [r["policy/clipfrac_avg"] for r in rows if "policy/clipfrac_avg" in r]
        ess = [r["staleness/ess"] for r in rows if "staleness/ess" in r]
        return cls(
            rewards=[row["objective/scores"] for row in rows],
            kl=fmean(row["objective/kl"] for row in rows[-WINDOW:]),
            clipped=fmean(clipped) if clipped else None,
            ess=fmean(ess) if ess else None,
        )

    @property
    def smoothed(self) -> list[float]:
        """Means of WINDOW consecutive steps, from the first such on."""
        r = self.rewards
        return [fmean(r[i : i + WINDOW]) for i in range(len(r) - WINDOW + 1)]


def table(curves: Mapping[Variant, Sequence[Curve]]) -> Iterator[str]:
    """Markdown, a row for each variant; single runs in the order of their seeds."""
    yield (
        "| algorithm | N | reward, last 10 | of each seed | best | first at 0.7 | KL | clipped | "
        "ESS |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for variant, runs in curves.items():
        lasts = [c.smoothed[-1] for c in runs]
        clipped = [c.clipped for c in runs if c.clipped is not None]
        ess = [c.ess for c in runs if c.ess is not None]
        cells = (
            variant.title,
            str(variant.n),
            f"{fmean(lasts):.3f}",
            ", ".join(f"{x:.3f}" for x in lasts),
            f"{fmean(max(c.smoothed) for c in runs):.3f}",
            ", ".join(_reached(c, 0.7) for c in runs),
            f"{fmean(c.kl for c in runs):.2f}",
            f"{fmean(clipped):.1%}" if clipped else "",
            f"{fmean(ess):.2f}" if ess else "",
        )
        yield f"| {' | '.join(cells)} |"


def _reached(curve: Curve, reward: float) -> str:
    """The step at which the smoothed reward is first there."""
    found = (i + WINDOW for i, r in enumerate(curve.smoothed) if r >= reward)
    return str(next(found, "never"))


# The picture: a panel for each algorithm, a line for each N, a band from the lowest seed to the
# highest.
_PANEL_W, _PANEL_H, _LEFT, _TOP, _GAP_X, _GAP_Y = 400, 190, 52, 66, 44, 62
_LOW, _HIGH = 0.0, 0.95


def picture(curves: Mapping[Variant, Sequence[Curve]]) -> str:
    """The curves as an SVG file that follows the viewer's preference for light or dark."""
    body = [_legend()]
    for place, algorithm in enumerate(MAIN):
        x = _LEFT + (place % 2) * (_PANEL_W + _GAP_X)
        y = _TOP + (place // 2) * (_PANEL_H + _GAP_Y)
        body += _axes(algorithm, x, y)
        for i, n in enumerate(DIAL):
            runs = curves.get(Variant(algorithm, n), ())
            body.append(_line(runs, f"var(--run-{i})", x, y))
    width = _LEFT + 2 * _PANEL_W + _GAP_X + 20
    height = _TOP + 2 * _PANEL_H + _GAP_Y + 50
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" '
        f'aria-label="Reward by update for N = 1, 4, 16: {", ".join(MAIN)}">'
        f"<style>svg{{{style.variables(dark=False)}"
        "font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
        f"@media(prefers-color-scheme:dark){{svg{{{style.variables(dark=True)}}}}}"
        "text{fill:var(--ink)}.muted{fill:var(--muted)}.title{font-weight:600;font-size:14px}"
        ".rule{stroke:var(--rule)}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="var(--paper)"/>{"".join(body)}</svg>\n'
    )


def _legend() -> str:
    parts = [
        f'<text x="{_LEFT}" y="28" class="muted">Reward of the batch (mean of {WINDOW} steps, '
        "band: seeds) by update</text>"
    ]
    for i, n in enumerate(DIAL):
        x = _LEFT + 560 + i * 90
        parts.append(
            f'<path d="M{x} 23.5h22" stroke="var(--run-{i})" stroke-width="3"/>'
            f'<text x="{x + 29}" y="28">N = {n}</text>'
        )
    return "".join(parts)


def _axes(algorithm: str, x: int, y: int) -> Iterator[str]:
    yield f'<text class="title" x="{x}" y="{y - 9}">{escape(algorithm)}</text>'
    for reward in (0.0, 0.2, 0.4, 0.6, 0.8):
        level = _height(reward, y)
        yield (
            f'<path class="rule" d="M{x} {level:.1f}h{_PANEL_W}"/><text class="muted" '
            f'x="{x - 8}" y="{level + 4.5:.1f}" text-anchor="end">{reward}</text>'
        )
    for step in range(0, STEPS + 1, 100):
        at = x + _PANEL_W * step / STEPS
        yield (
            f'<text class="muted" x="{at:.1f}" y="{y + _PANEL_H + 18}" '
            f'text-anchor="middle">{step}</text>'
        )


def _height(reward: float, y: int) -> float:
    return y + _PANEL_H * (_HIGH - min(max(reward, _LOW), _HIGH)) / (_HIGH - _LOW)


def _line(runs: Sequence[Curve], colour: str, x: int, y: int) -> str:
    each = list(zip(*(c.smoothed for c in runs), strict=True))

    def points(rewards: Sequence[float]) -> list[str]:
        return [
            f"{x + _PANEL_W * (i + WINDOW) / STEPS:.1f} {_height(r, y):.1f}"
            for i, r in enumerate(rewards)
            if i % 4 == 0 or i == len(rewards) - 1
        ]

    lowest, highest = points([min(e) for e in each]), points([max(e) for e in each])
    return (
        f'<path d="M{"L".join(lowest + highest[::-1])}Z" fill="{colour}" fill-opacity=".16"/>'
        f'<path d="M{"L".join(points([fmean(e) for e in each]))}" fill="none" '
        f'stroke="{colour}" stroke-width="2"/>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/off-policy"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--svg", type=Path, help="where to draw the curves")
    parser.add_argument("--old-data", action="store_true", help="compare remedies for old data")
    args = parse(parser, {"seeds": [0]})
    variants, changed = OLD_DATA if args.old_data else VARIANTS, dict[str, Any]()
    if args.smoke:
        scratch = tempfile.TemporaryDirectory()
        args.out = Path(scratch.name)
        args.svg = args.out / "curves.svg"
        variants = (
            Variant("ppo", 1),
            Variant("ppo", 16, *CORRECTED[-1]),
            OLD_DATA[4],
            OLD_DATA[-1],
        )
        changed = SMOKE
    args.out.mkdir(parents=True, exist_ok=True)

    curves: dict[Variant, list[Curve]] = {v: [] for v in variants}
    for seed, variant in product(args.seeds, curves):
        if variant.lr and seed != args.seeds[0]:
            continue  # a side question: one seed
        config = settings(variant, seed, changed)
        rows = metrics(config, args.out, variant.name(seed), variant.remedy)
        curves[variant].append(Curve.of(rows))
        print(f"{variant.name(seed)}: {curves[variant][-1].smoothed[-1]:.3f}", flush=True)
    print()
    print("\n".join(table(curves)))
    if args.svg:
        args.svg.write_text(picture(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
