"""Part 4: data flow, compute and placements of the run that part 3 has recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from stretto.config import Config, recipes
from stretto.observe import RunDirectory
from stretto.observe.progress import STEP_TIME
from stretto.observe.run_directory import RolloutRecord
from stretto.saying import format_size
from stretto.tour.costs import FORWARD, TRAINING, Stage, against_supervised, stages
from stretto.tour.flows import Flow, flows, trained_models
from stretto.tour.page import heading, onward, paragraph, table
from stretto.tour.placements import PLACEMENTS, Outcome, file_of, outcomes


def page(run: RunDirectory, kept: bool) -> Iterator[str]:
    """Yield the text of the part.

    Args:
        run: with at least three steps.
        kept: whether its folder stays.

    Raises:
        StateError: the run has recorded too little.
    """
    yield heading("4. Data flow, compute and placements")
    config, rollouts = recipes.load(run.path), run.read_rollouts()
    models = trained_models(run, config)
    last = [r for r in rollouts if r.step == config.steps]
    yield from _data_flow(last, flows(last, config, models))
    parameters = sum(p.numel() for p in models["actor"].parameters())
    metrics = run.read_metrics()
    found = stages(metrics, rollouts, config, parameters)
    yield from _compute(found, config, parameters)
    yield from _placements(run, median(step[STEP_TIME] for step in metrics[1:]))
    yield "\n" + _onward(run, kept)


def _data_flow(records: Sequence[RolloutRecord], found: Sequence[Flow]) -> Iterator[str]:
    tokens, prompts = sum(r.tokens for r in records), sum(r.prompt_tokens for r in records)
    yield paragraph(
        f"(a) Data flow of the last step, {len(records)} responses: {prompts:,} tokens of prompts "
        f"and {tokens:,} of responses. Roles of one process are handed these by reference; between "
        "processes they travel."
    )
    rows = [["from", "to", "what", "bytes"]]
    rows += [[f.sender, f.receiver, f.what, f"{f.size_bytes:,}"] for f in found]
    yield table(rows, left=3)
    weights = sum(f.size_bytes for f in found if f.sender == "learner")
    whole = sum(f.size_bytes for f in found)
    yield paragraph(f"{weights / whole:.0%} of {format_size(whole)} are weights.") + "\n"


def _compute(found: Sequence[Stage], config: Config, parameters: int) -> Iterator[str]:
    whole = sum(stage.seconds for stage in found)
    yield paragraph(
        "(b) Compute of a step, measured, means without the first step. Operations are counted: "
        f"{FORWARD} a parameter and token forward, {TRAINING} in training; a model has "
        f"{parameters:,} parameters."
    )
    rows = [["stage", "seconds", "share", "tokens", "tokens/s", "operations", "a second"]]
    for stage in found:
        rows.append(_cells(stage, whole))
    yield table(rows)
    sampled, scored = (_seconds_a_token(found, n) for n in ("generation", "score: reference"))
    as_it_is, once = against_supervised(found, config.training.epochs)
    text = (
        f"A token takes {sampled / scored:.0f} times as long to sample, prompts read, as to score: "
        "scorers read a response in one pass, and sampling makes a pass for each of its tokens. "
        "So long responses move the time to generation. In operations the step is "
        f"{as_it_is:.1f} times a supervised one on the same tokens; with one epoch it would be "
        f"{once:.1f} times."
    )
    yield paragraph(text) + "\n"


def _cells(stage: Stage, whole_s: float) -> list[str]:
    """Return a stage's row of the table; what it has not stays empty."""
    cells = [f"{stage.seconds:.3f}", f"{stage.seconds / whole_s:.0%}"]
    if stage.tokens:
        cells += [f"{stage.tokens:,.0f}", f"{stage.tokens / stage.seconds:,.0f}"]
    if stage.operations:
        cells += [f"{stage.operations:.2e}", f"{stage.operations / stage.seconds:.1e}"]
    return [stage.name, *cells, *[""] * (6 - len(cells))]


def _seconds_a_token(found: Sequence[Stage], name: str) -> float:
    stage = next(stage for stage in found if stage.name == name)
    return stage.seconds / stage.tokens


def _placements(run: RunDirectory, measured_s: float) -> Iterator[str]:
    yield paragraph(
        "(c) Placements, by the simulator: the costs and lengths of this run, with the roles "
        "elsewhere. A device is a process; all share the cores of this machine."
    )
    found = list(outcomes(run.path, run.path))
    yield table(_rows(found), left=2)
    first = found[0]
    yield paragraph(
        f"Check: the run's own step took {measured_s:.3f} s (median), and the simulator says "
        f"{first.step_s:.3f} s. Idle is the mean share of the devices' time: {found[1].idle:.0%} "
        f"of {found[1].devices} devices where each stage waits for the one before it, "
        f"{found[2].idle:.0%} once generation goes on beside training, {found[3].idle:.0%} where "
        "roles that are seldom busy share a device."
    )


def _rows(found: Sequence[Outcome]) -> list[list[str]]:
    rows = [["placement", "", "devices", "step", "speed-up", "idle"]]
    base = found[0].step_s
    for o in found:
        figures = [str(o.devices), f"{o.step_s:.3f} s", f"{base / o.step_s:.2f}x", f"{o.idle:.0%}"]
        rows.append([o.placement.name, o.placement.text, *figures])
    return rows


def _onward(run: RunDirectory, kept: bool) -> str:
    if not kept:
        return onward("simulator", "stretto compare --sim RUN, on a run that --out FOLDER keeps")
    placement = file_of(PLACEMENTS[-1], run.path)
    return onward("simulator", f"stretto compare --sim {run.path} --placement {placement}")
