"""Part 4: data flow, compute and placements of the run that part 3 has recorded.

- Data flow: the messages are the very objects that roles exchange, made again with the lengths that
  a run has recorded; their arrays are counted, and token ids of prompts as arrays of them would be.
- Compute: what each stage of a step took, and how many operations are in it.
- Placements: what the run would have taken elsewhere, by the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import tomli_w
from torch import Tensor, nn

from stretto.api import simulated
from stretto.api.runs import Job
from stretto.config import Config, recipes
from stretto.files import write_whole
from stretto.models.backend import pick_device, pick_dtype
from stretto.models.heads import critic_from_actor
from stretto.models.load import load_causal_lm
from stretto.observe import RunDirectory
from stretto.observe.display import STEP_TIME
from stretto.observe.run_directory import RolloutRecord
from stretto.runtime.sim.simulate import simulate
from stretto.saying import format_size
from stretto.schedules.rollout import Rollout, train_batch
from stretto.tour.page import heading, onward, paragraph, table
from stretto.types import Chunk, FinishReason, Prompt, Score, ScoreKind, short_name

TOKEN_BYTES = np.dtype(np.int32).itemsize
"""Bytes of a token's id, as all arrays of them have it."""

FORWARD, TRAINING = 2, 6
"""Operations a parameter and token (Kaplan et al. 2020, section 2.1), as the simulator counts."""

DRIVER = "driver"


def page(run: RunDirectory, kept: bool) -> Iterator[str]:
    """Yield the text of the part.

    Args:
        run: with at least three steps.
        kept: whether its folder stays.

    Raises:
        StateError: the run has recorded too little.
    """
    yield heading("4. Data flow, compute and placements")
    config, rollouts, metrics = recipes.load(run.path), run.read_rollouts(), run.read_metrics()
    device = pick_device("cpu")
    actor = load_causal_lm(run.model, pick_dtype(config.model.dtype, device), device)
    models: dict[str, nn.Module] = {"actor": actor}
    if config.algorithm.definition.critic:
        models["critic"] = critic_from_actor(actor)
    yield from _data_flow([r for r in rollouts if r.step == config.steps], config, models)
    parameters = sum(p.numel() for p in models["actor"].parameters())
    yield from _compute(stages(metrics, rollouts, config, parameters), config, parameters)
    yield from _placements(run, median(step[STEP_TIME] for step in metrics[1:]))
    said = "stretto compare --sim RUN, on a run that --out FOLDER keeps"
    if kept:
        last = run.path / f"{PLACEMENTS[-1].name}.toml"
        said = f"stretto compare --sim {run.path} --placement {last}"
    yield "\n" + onward("simulator", said)


# -- data flow -----------------------------------------------------------------------------------


class Flow(NamedTuple):
    """All that one role is sent by another in a step."""

    sender: str
    receiver: str
    what: str
    size_bytes: int


def _data_flow(
    records: Sequence[RolloutRecord], config: Config, models: Mapping[str, nn.Module]
) -> Iterator[str]:
    found = flows(records, config, models)
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


def payload(message: Any) -> int:
    """Return the bytes of all arrays, tensors and token ids in a message.

    Single numbers and texts count nothing.
    """
    if isinstance(message, np.ndarray):
        return message.nbytes
    if isinstance(message, Tensor):
        return message.numel() * message.element_size()
    if isinstance(message, tuple) and message and all(isinstance(m, int) for m in message):
        return len(message) * TOKEN_BYTES
    if isinstance(message, Mapping):
        return sum(map(payload, message.values()))
    if isinstance(message, list | tuple):
        return sum(map(payload, message))
    if is_dataclass(message):
        return sum(payload(getattr(message, f.name)) for f in fields(message))
    return 0


def flows(
    records: Sequence[RolloutRecord], config: Config, models: Mapping[str, nn.Module]
) -> list[Flow]:
    """Count what is sent in a step; ``models`` are those that are trained, by name."""
    rollouts = [_rollout(record, config) for record in records]
    asked = [Rollout(r.id, r.prompt, r.group).response() for r in rollouts]
    whole = [r.response() for r in rollouts]
    found = [
        Flow(DRIVER, "generator", "prompts", payload(asked)),
        Flow("generator", DRIVER, "tokens, log-probs", payload([_chunk(r) for r in rollouts])),
    ]
    for source, kind in _scorers(config):
        name = short_name(source)
        answers = [r.scores[source] for r in rollouts]
        what = {"reward": "rewards", "logprobs": "log-probs", "values": "values"}[kind]
        found.append(Flow(DRIVER, name, "prompts, responses", payload(whole)))
        found.append(Flow(name, DRIVER, what, payload(answers)))
    found.append(Flow(DRIVER, "learner", "the batch", payload(train_batch(rollouts))))
    followers = {"actor": "generator", "critic": "critic"}
    for name, model in models.items():
        weights = payload(list(model.parameters()))
        found.append(Flow("learner", followers[name], f"weights: {name}", weights))
    return found


def _scorers(config: Config) -> Iterator[tuple[str, ScoreKind]]:
    for source in config.reward.sources:
        yield source, "reward"
    if config.algorithm.has_reference:
        yield "reference", "logprobs"
    if config.algorithm.definition.critic:
        yield "critic", "values"


def _chunk(rollout: Rollout) -> Chunk:
    tokens, logprobs = np.array(rollout.tokens, np.int32), np.array(rollout.logprobs, np.float32)
    return Chunk(rollout.id, 0, tokens, logprobs, rollout.versions[0], rollout.finish)


def _rollout(record: RolloutRecord, config: Config) -> Rollout:
    """Make a rollout of the recorded lengths; what stands in it is made up."""
    n = record.tokens
    rollout = Rollout(
        record.id,
        Prompt(record.prompt, (0,) * record.prompt_tokens, ""),
        record.group,
        tokens=[0] * n,
        logprobs=[0.0] * n,
        versions=[0] * n,
        finish=FinishReason(record.finish or FinishReason.LENGTH),
    )
    for source, kind in _scorers(config):
        values = np.zeros(1 if kind == "reward" else n, np.float32)
        rollout.scores[source] = Score(record.id, source, kind, values)
    return rollout


# -- compute -------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """A stage of a step, means over steps.

    Attributes:
        seconds: measured.
        tokens: that come out of it: sampled, scored, or trained on (once for each epoch).
        operations: counted; 0 for what is no model's work.
    """

    name: str
    seconds: float
    tokens: float
    operations: float


def stages(
    metrics: Sequence[Mapping[str, Any]],
    rollouts: Sequence[RolloutRecord],
    config: Config,
    parameters: int,
) -> list[Stage]:
    """Return the stages of a run's mean step, without the first one, which warms up.

    Args:
        metrics: of each step, at least two.
        rollouts: all that were trained on.
        parameters: of the actor; the critic is counted as large.
    """
    warm = metrics[1:]
    steps = [step["step"] for step in warm]

    def seconds(name: str) -> float:
        return fmean(step[f"timing_s/{name}"] for step in warm)

    of_steps = [r for r in rollouts if r.step in steps]
    sampled = sum(r.tokens for r in of_steps) / len(steps)
    read = sampled + sum(r.prompt_tokens for r in of_steps) / len(steps)
    found = [Stage("generation", seconds("gen"), sampled, FORWARD * parameters * read)]
    for source, kind in _scorers(config):
        name = f"score/{short_name(source)}"
        tokens, operations = (sampled, 0.0) if kind == "reward" else (read, FORWARD * parameters)
        said = name.replace("/", ": ", 1)
        found.append(Stage(said, seconds(name), tokens, operations * read))
    trained = 2 if config.algorithm.definition.critic else 1
    passes = config.training.epochs * read
    learned = TRAINING * parameters * trained * passes
    found.append(Stage("training", seconds("update"), passes, learned))
    return [*found, Stage("the rest", seconds("step") - sum(s.seconds for s in found), 0, 0)]


def against_supervised(found: Sequence[Stage], epochs: int) -> tuple[float, float]:
    """Return the operations of a step over those of a supervised one on the same tokens: as it is,
    and with one epoch."""
    named = {stage.name: stage for stage in found}
    training = named["training"].operations
    supervised = named["generation"].operations / FORWARD * TRAINING
    inference = sum(s.operations for s in found) - training
    return (inference + training) / supervised, (inference + training / epochs) / supervised


def _compute(found: Sequence[Stage], config: Config, parameters: int) -> Iterator[str]:
    whole = sum(stage.seconds for stage in found)
    yield paragraph(
        "(b) Compute of a step, measured, means without the first step. Operations are counted: "
        f"{FORWARD} a parameter and token forward, {TRAINING} in training; a model has "
        f"{parameters:,} parameters."
    )
    rows = [["stage", "seconds", "share", "tokens", "tokens/s", "operations", "a second"]]
    for name, seconds, tokens, operations in found:
        cells = [name, f"{seconds:.3f}", f"{seconds / whole:.0%}"]
        if tokens:
            cells += [f"{tokens:,.0f}", f"{tokens / seconds:,.0f}"]
        if operations:
            cells += [f"{operations:.2e}", f"{operations / seconds:.1e}"]
        rows.append([*cells, *[""] * (7 - len(cells))])
    yield table(rows)
    a_token = {stage.name: stage.seconds / stage.tokens for stage in found if stage.tokens}
    as_it_is, once = against_supervised(found, config.training.epochs)
    yield (
        paragraph(
            f"A token takes {a_token['generation'] / a_token['score: reference']:.0f} times as "
            "long to sample, prompts read, as to score: scorers read a response in one pass, and "
            "sampling makes a pass for each of its tokens. So long responses move the time to "
            f"generation. In operations the step is {as_it_is:.1f} times a supervised one on the "
            f"same tokens; with one epoch it would be {once:.1f} times."
        )
        + "\n"
    )


# -- placements ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """A way to place the roles of a run, and the schedule on it.

    Attributes:
        settings: that say so, as a file for ``--placement`` has them; empty for the run's own.
        variant: of the schedule.
    """

    name: str
    text: str
    settings: dict[str, object]
    variant: str


_APART: dict[str, object] = {"runtime": "local"}
_TWO = _APART | {"cluster": {"processes": [{"roles": ["generator", "reference", "critic"]}]}}

PLACEMENTS = (
    Placement("colocated", "all roles take turns on one device", {}, "sync"),
    Placement("apart", "a device a role; only scorers side by side", _APART, "sync"),
    Placement("overlapping", "the same, generation a version ahead", _APART, "async"),
    Placement("two", "learner on one, all others on the other", _TWO, "async"),
)
"""From one device to one for each role, and back to two."""


class Outcome(NamedTuple):
    """A placement in virtual time.

    Attributes:
        devices: processes of models; here each is a device.
        step_s: mean seconds of a step, without the first.
        idle: mean share of the devices' time in which they had nothing to do.
    """

    placement: Placement
    devices: int
    step_s: float
    idle: float


def outcomes(run: Path, files: Path) -> Iterator[Outcome]:
    """Simulate the run on each of :data:`PLACEMENTS`, of which files are written into a folder.

    Raises:
        StateError: the run has recorded too little.
        StorageError: a placement's file cannot be written.
    """
    for placement in PLACEMENTS:
        file = files / f"{placement.name}.toml" if placement.settings else ""
        if isinstance(file, Path):
            write_whole(file, tomli_w.dumps(placement.settings).encode())
        simulation = simulated.recorded(str(run), str(file))
        assert simulation.seed is not None
        cluster = simulation.asked(Job(placement.variant, simulation.seed))
        result = simulate(cluster)
        step_s = fmean(step[STEP_TIME] for step in result.steps[1:])
        idle = 1 - fmean(result.device_utilisation)
        yield Outcome(placement, cluster.device_count, step_s, idle)


def _placements(run: RunDirectory, measured_s: float) -> Iterator[str]:
    yield paragraph(
        "(c) Placements, by the simulator: the costs and lengths of this run, with the roles "
        "elsewhere. A device is a process; all share the cores of this machine."
    )
    found = list(outcomes(run.path, run.path))
    base = found[0].step_s
    rows = [["placement", "", "devices", "step", "speed-up", "idle"]]
    for o in found:
        figures = [str(o.devices), f"{o.step_s:.3f} s", f"{base / o.step_s:.2f}x", f"{o.idle:.0%}"]
        rows.append([o.placement.name, o.placement.text, *figures])
    yield table(rows, left=2)
    yield paragraph(
        f"Check: the run's own step took {measured_s:.3f} s (median), and the simulator says "
        f"{base:.3f} s. Idle is the mean share of the devices' time: {found[1].idle:.0%} "
        f"of {found[1].devices} devices where each stage waits for the one before it, "
        f"{found[2].idle:.0%} once generation goes on beside training, {found[3].idle:.0%} where "
        "roles that are seldom busy share a device."
    )
