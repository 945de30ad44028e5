"""Part 4: data flow, compute and placements of the run that part 3 has recorded.

The data flow follows from the recorded lengths, the operations of each phase from them and the
size of the models, and the seconds of a step on other placements from the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import tomli_w
from torch import nn

from examples.tour import heading, onward, paragraph
from stretto.api import simulated
from stretto.api.runs import Job
from stretto.config import AlgorithmConfig, RewardConfig, recipes
from stretto.files import write_whole
from stretto.models.backend import pick_device, pick_dtype
from stretto.models.heads import critic_from_actor
from stretto.models.load import load_causal_lm
from stretto.observe import RolloutRecord, RunDirectory
from stretto.observe.display import STEP_TIME
from stretto.protocols import DRIVER
from stretto.runtime.sim.simulate import simulate
from stretto.saying import aligned, format_size
from stretto.types import ScoreKind, short_name

_WORD = 4
"""Bytes of a token's id, log-probability, value or version, and of a reward."""

FORWARD, TRAINING = 2, 6
"""Operations a parameter and token (Kaplan et al. 2020, section 2.1), as the simulator counts."""


def page(run: RunDirectory, kept: bool) -> Iterator[str]:
    """Yield the text of the part on a run of at least three steps; ``kept``: its folder stays."""
    yield heading("4. Data flow, compute and placements")
    config, rollouts, metrics = recipes.load(run.path), run.read_rollouts(), run.read_metrics()
    device = pick_device("cpu")
    actor = load_causal_lm(run.model, pick_dtype(config.model.dtype, device), device)
    models: dict[str, nn.Module] = {"actor": actor}
    if config.algorithm.definition.critic:
        models["critic"] = critic_from_actor(actor)
    scorers = scorers_of(config.reward, config.algorithm)
    last = [r for r in rollouts if r.step == config.steps]
    yield from _data_flow(last, flows(last, scorers, models))
    parameters = sum(p.numel() for p in models["actor"].parameters())
    found = phase_costs(metrics, rollouts, scorers, parameters, config.training.epochs)
    yield from _compute(found, parameters, config.training.epochs)
    yield from _placements(run, median(step[STEP_TIME] for step in metrics[1:]))
    own = f"{run.path} --placement {run.path / 'two.toml'}"
    further = own if kept else "RUN, on a run that --out FOLDER keeps"
    yield onward("simulator", f"stretto compare --sim {further}")


# -- data flow -----------------------------------------------------------------------------------


def _data_flow(
    records: Sequence[RolloutRecord], found: Mapping[tuple[str, str, str], int]
) -> Iterator[str]:
    tokens, prompts = sum(r.tokens for r in records), sum(r.prompt_tokens for r in records)
    yield paragraph(
        f"(a) Data flow of the last step, {len(records)} responses: {prompts:,} tokens of prompts "
        f"and {tokens:,} of responses; by reference within a process."
    )
    rows = [[*flow, f"{size:,}"] for flow, size in found.items()]
    yield aligned([["from", "to", "what", "bytes"], *rows], left=3)
    weights = sum(size for (sender, _, _), size in found.items() if sender == "learner")
    whole = sum(found.values())
    yield f"{weights / whole:.0%} of {format_size(whole)} are weights.\n"


def flows(
    records: Sequence[RolloutRecord],
    scorers: Mapping[str, ScoreKind],
    models: Mapping[str, nn.Module],
) -> dict[tuple[str, str, str], int]:
    """Return the bytes of the arrays that roles send in a step, by sender, receiver and content;
    token ids of prompts are counted as an array. ``models`` are those that are trained, by name."""
    n, prompts = len(records), sum(record.prompt_tokens for record in records) * _WORD
    a_token = sum(record.tokens for record in records) * _WORD  # an id, log-prob, value or version
    found = {
        (DRIVER, "generator", "prompts"): prompts,
        ("generator", DRIVER, "tokens, log-probs"): 2 * a_token,
    }
    # Ids, prompts, prompt ids, lengths, ends; then tokens, log-probs and versions.
    batch = 3 * 8 * n + prompts + n + 3 * a_token
    for source, kind in scorers.items():
        what = {"reward": "rewards", "logprobs": "log-probs", "values": "values"}[kind]
        answers = n * _WORD if kind == "reward" else a_token
        batch += answers + (n if kind == "reward" else 0)  # and whether a reward applies
        found[DRIVER, short_name(source), "prompts, responses"] = prompts + a_token
        found[short_name(source), DRIVER, what] = answers
    found[DRIVER, "learner", "the batch"] = batch
    for name, model in models.items():
        follower = "generator" if name == "actor" else name
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        found["learner", follower, f"weights: {name}"] = weights
    return found


def scorers_of(reward: RewardConfig, algorithm: AlgorithmConfig) -> dict[str, ScoreKind]:
    """Return the scorers of a run, and what each of them gives."""
    found: dict[str, ScoreKind] = dict.fromkeys(reward.sources, "reward")
    found |= {"reference": "logprobs"} if algorithm.has_reference else {}
    found |= {"critic": "values"} if algorithm.definition.critic else {}
    return found


# -- compute -------------------------------------------------------------------------------------


class PhaseCost(NamedTuple):
    """A phase of a step, means over steps: tokens sampled, scored, or trained on (once for each
    epoch), and operations counted; 0 for what is no model's work."""

    name: str
    seconds: float
    tokens: float
    operations: float


def phase_costs(
    metrics: Sequence[Mapping[str, Any]],
    rollouts: Sequence[RolloutRecord],
    scorers: Mapping[str, ScoreKind],
    parameters: int,
    epochs: int,
) -> list[PhaseCost]:
    """Return the phases of a run's mean step, without the first one, which warms up; the critic is
    counted as large as the actor."""
    warm = metrics[1:]
    steps = [step["step"] for step in warm]

    def seconds(name: str) -> float:
        return fmean(step[f"timing_s/{name}"] for step in warm)

    of_steps = [r for r in rollouts if r.step in steps]
    sampled = sum(r.tokens for r in of_steps) / len(steps)
    read = sampled + sum(r.prompt_tokens for r in of_steps) / len(steps)
    forward = FORWARD * parameters * read
    found = [PhaseCost("generation", seconds("gen"), sampled, forward)]
    for source, kind in scorers.items():
        name = short_name(source)
        cost = (sampled, 0.0) if kind == "reward" else (read, forward)
        found.append(PhaseCost(f"score: {name}", seconds(f"score/{name}"), *cost))
    trained = 2 if "critic" in scorers else 1
    passes = epochs * read
    learned = TRAINING * parameters * trained * passes
    found.append(PhaseCost("training", seconds("update"), passes, learned))
    return [*found, PhaseCost("the rest", seconds("step") - sum(c.seconds for c in found), 0, 0)]


def against_supervised(found: Sequence[PhaseCost], epochs: int) -> tuple[float, float]:
    """Return the operations of a step over those of a supervised one on the same tokens: as it is,
    and with one epoch."""
    operations = {cost.name: cost.operations for cost in found}
    training, supervised = operations["training"], operations["generation"] / FORWARD * TRAINING
    inference = sum(operations.values()) - training
    return (inference + training) / supervised, (inference + training / epochs) / supervised


def _compute(found: Sequence[PhaseCost], parameters: int, epochs: int) -> Iterator[str]:
    whole = sum(cost.seconds for cost in found)
    yield paragraph(
        "(b) Compute of a step, measured, means without the first step. Operations are counted: "
        f"{FORWARD} a parameter and token forward, {TRAINING} in training; a model has "
        f"{parameters:,} parameters."
    )
    rows = [["stage", "seconds", "share", "tokens", "tokens/s", "operations", "a second"]]
    for name, seconds, tokens, operations in found:
        cells = [name, f"{seconds:.3f}", f"{seconds / whole:.0%}"]
        cells += [f"{tokens:,.0f}", f"{tokens / seconds:,.0f}"] if tokens else ["", ""]
        cells += [f"{operations:.2e}", f"{operations / seconds:.1e}"] if operations else ["", ""]
        rows.append(cells)
    yield aligned(rows)
    token_s = {cost.name: cost.seconds / cost.tokens for cost in found if cost.tokens}
    times = token_s["generation"] / token_s["score: reference"]
    as_it_is, once = against_supervised(found, epochs)
    yield paragraph(
        f"A token takes {times:.0f} times as long to sample as to score: scorers read a response "
        "in one pass, sampling makes a pass for each token. In operations the step is "
        f"{as_it_is:.1f} times a supervised one on the same tokens; with one epoch it would be "
        f"{once:.1f} times."
    )


# -- placements ----------------------------------------------------------------------------------


_APART: dict[str, object] = {"runtime": "local"}
_TWO = _APART | {"cluster": {"processes": [{"roles": ["generator", "reference", "critic"]}]}}

PLACEMENTS: Mapping[str, tuple[str, dict[str, object], str]] = {
    "colocated": ("all roles take turns on one device", {}, "sync"),
    "apart": ("a device a role; only scorers side by side", _APART, "sync"),
    "overlapping": ("the same, generation a version ahead", _APART, "async"),
    "two": ("learner on one, all others on the other", _TWO, "async"),
}
"""From one device to one for each role, and back to two, by name: a description, settings as a file
for ``--placement`` has them (none: the run's own), and the variant of the schedule."""


class PlacementResult(NamedTuple):
    """A placement in virtual time: its devices, the mean seconds of a step without the first, and
    the mean share of the devices' time in which they had nothing to do."""

    name: str
    devices: int
    step_s: float
    idle: float


def placement_results(run: Path, files: Path) -> Iterator[PlacementResult]:
    """Simulate the run on each of :data:`PLACEMENTS`, whose files are written into a folder."""
    for name, (_, settings, variant) in PLACEMENTS.items():
        file = str(files / f"{name}.toml") if settings else ""
        if settings:
            write_whole(Path(file), tomli_w.dumps(settings).encode())
        simulation = simulated.recorded(str(run), file)
        assert simulation.seed is not None
        cluster = simulation.asked(Job(variant, simulation.seed))
        result = simulate(cluster)
        step_s = fmean(step[STEP_TIME] for step in result.steps[1:])
        idle = 1 - fmean(result.device_utilisation)
        yield PlacementResult(name, cluster.device_count, step_s, idle)


def _placements(run: RunDirectory, measured_s: float) -> Iterator[str]:
    yield "\n" + paragraph(
        "(c) Placements, by the simulator: the costs and lengths of this run, with the roles "
        "elsewhere. A device is a process; all share the cores of this machine."
    )
    found = list(placement_results(run.path, run.path))
    base_s = found[0].step_s
    rows = [["placement", "", "devices", "step", "speed-up", "idle"]]
    for name, devices, step_s, idle in found:
        figures = [f"{devices}", f"{step_s:.3f} s", f"{base_s / step_s:.2f}x", f"{idle:.0%}"]
        rows.append([name, PLACEMENTS[name][0], *figures])
    yield aligned(rows, left=2)
    yield paragraph(
        f"Check: the run's own step took {measured_s:.3f} s (median), and the simulator says "
        f"{base_s:.3f} s. Idle is the mean share of the devices' time."
    )
