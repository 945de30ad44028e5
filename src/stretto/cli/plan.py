"""``stretto plan``: where the roles of a run best go on many GPUs, before it is started."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from stretto.api import calibrating, planning
from stretto.api.planning import Plan, Question
from stretto.cli.settings import Recipe, leading_recipe, parse_with_config
from stretto.config import Config, recipes
from stretto.errors import ConfigError
from stretto.observe import make_progress
from stretto.observe.progress import on_stderr
from stretto.planner.hardware import GPUS, read_hardware
from stretto.planner.layout import Mesh
from stretto.saying import Saying, format_size

if TYPE_CHECKING:
    from stretto.planner.candidates import Candidate
    from stretto.planner.outcome import Outcome

MINUTES = (0.75, 8.0)
"""Minutes that a search may take, on up to 64 GPUs and on more."""

_SHARING = {
    "all": "all roles on all GPUs",
    "none": "learner, generators and scorers apart",
    "generators": "scorers with the generators",
    "learner": "scorers with the learner",
}


@dataclass
class Options:
    """Search for the layout of a run's roles on GPUs, and for the schedule, that train on most
    responses a second; no GPU is needed. Each plan is run in virtual time. Settings come from the
    recipe and from options, which come after it: stretto plan my.toml --gpus 16 --gpu h100
    """

    recipe: Recipe = tyro.MISSING
    gpus: int = 0
    """Number of GPUs; a plan uses all of them."""
    gpu: Annotated[str, tyro.conf.arg(help=f"Kind of GPU: {', '.join(GPUS)}.", metavar="NAME")] = (
        "h100"
    )
    hardware: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """A file with the GPUs' figures, in place of --gpu."""
    calibrate: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Measure this machine's figures instead of planning, and write them."""
    write: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Write the best plan's settings, for 'stretto train --overrides'."""
    model_shape: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """A known model whose shape the actor has; empty: model.name."""
    reward_shape: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """The same of the reward model; 'actor' for the actor's."""
    prompt_tokens: int = 0
    """Tokens of a prompt, on average; 0 assumes some."""
    response_tokens: Annotated[tuple[float, ...], tyro.conf.arg(metavar="MEDIAN P95")] = ()
    """Median and 95th percentile of responses' tokens; else shares of the limit."""
    like: Annotated[str, tyro.conf.arg(metavar="RUN_DIR")] = ""
    """A run whose lengths of prompts and responses are taken."""
    on_paper: Annotated[bool, tyro.conf.arg(metavar="")] = False
    """Also plans that 'stretto train' cannot run, such as pipelines."""
    workers: int = 0
    """Processes that simulate; 0: one a core."""
    minutes: Annotated[
        float,
        tyro.conf.arg(
            help=f"Longest search; 0: {MINUTES[0]:g} up to 64 GPUs, {MINUTES[1]:g} beyond."
        ),
    ] = 0.0


def run(arguments: Sequence[str]) -> int:
    """Print the best plans, and write the first that ``stretto train`` takes if asked to.

    Or measure this machine for plans.
    """
    recipe = leading_recipe(arguments)
    # Without a recipe the parser answers: with the help, or by what it misses.
    start = recipes.load(recipe or "arithmetic")
    config, given = parse_with_config("plan", arguments, start, Options, _offered())
    own = vars(given)
    if own["calibrate"]:
        return _calibrate(config, own["calibrate"], arguments)
    question = _question(own)
    if own["write"]:
        planning.check_writable(own["write"])
    found = planning.plan(config, question, say=on_stderr)
    print("\n".join(_lines(found, question, recipes.name_of(recipe))))
    if own["write"]:
        _write(found, own["write"], recipe, start)
    return 0


def _calibrate(config: Config, file: str, arguments: Sequence[str]) -> int:
    command = shlex.join(["stretto", "plan", *arguments])
    calibrating.calibrate(config, file, command=command, say=Saying(make_progress("auto")))
    print(f"wrote {file}: stretto plan {leading_recipe(arguments)} --gpus N --hardware {file}")
    return 0


def _question(own: dict[str, Any]) -> Question:
    if own["gpus"] < 1:
        raise ConfigError(f"--gpus {own['gpus']}: say how many there are, 1 or more")
    if min(own["minutes"], own["workers"]) < 0:
        raise ConfigError(
            f"--minutes {own['minutes']} --workers {own['workers']}: must be 0 or more"
        )
    minutes = own["minutes"] or MINUTES[own["gpus"] > 64]
    return Question(
        gpus=own["gpus"],
        gpu=own["gpu"],
        hardware=read_hardware(own["hardware"]) if own["hardware"] else None,
        model=own["model_shape"],
        reward_model=own["reward_shape"],
        prompt_tokens=own["prompt_tokens"],
        response_tokens=own["response_tokens"],
        like=own["like"],
        on_paper=own["on_paper"],
        limit_s=60 * minutes,
        workers=own["workers"],
    )


def _write(found: Plan, file: str, recipe: str, start: Config) -> None:
    best = found.found.runnable
    if best is None:
        raise ConfigError(
            f"'{file}' is not written: none of these plans is one that 'stretto train' can run; "
            "give more GPUs"
        )
    planning.write(file, found.config, best.candidate, found.setting, start)
    print(f"wrote {file}: stretto train {recipe} --overrides {file}")


def _lines(plan: Plan, question: Question, name: str) -> Iterator[str]:
    found, w = plan.found, plan.setting.workload
    gpus = f"{question.gpus} {plan.setting.hardware.gpu.name}"
    yield (
        f"{name} on {gpus}: {w.batch} responses a step of {w.mean_tokens:.0f} tokens on average, "
        f"prompts included, and up to {w.max_new_tokens}"
    )
    shown = list(found.best)
    for further in (found.runnable, found.baseline):
        if further and further not in shown:
            shown.append(further)
    for number, outcome in enumerate(shown, 1):
        yield from _plan(number, outcome, plan)
    if found.baseline is None:
        yield "   No layout with all roles on all GPUs, one after another, fits."
    yield (
        f"{found.candidates:,} candidates; {found.simulated:,} simulated in {found.seconds:.0f} s, "
        f"{found.unfit:,} looked at that do not fit"
    )
    if found.bound_s < shown[0].step_s:
        yield (
            "   Not all were simulated: one that was left out might take "
            f"{_brief(found.bound_s)} s a step (--minutes for a longer search)"
        )
    for assumption in plan.assumed:
        yield f"Assumed: {assumption}"


def _plan(number: int, outcome: Outcome, plan: Plan) -> Iterator[str]:
    candidate = outcome.candidate
    place = candidate.layout
    scored = plan.setting.models.scoring
    where = _SHARING[place.sharing]
    if not scored and not place.colocated:
        where = "learner and generators apart"
    sync = " (the baseline)" if outcome is plan.found.baseline else ""
    yield (
        f"{number}. {_brief(outcome.step_s)} s a step, {_brief(outcome.samples_per_s)} samples/s: "
        f"{candidate.variant}, {where}{sync}"
    )
    yield f"   {_roles(candidate, plan)}"
    held = ", ".join(
        f"{phase} {_gb(sum(parts.values()))}"
        for phase, parts in outcome.memory.items()
        if scored or phase != "scoring"
    )
    usable = format_size(round(plan.setting.hardware.usable_bytes))
    host = f"; host {_gb(outcome.host_bytes)} for each" if place.offload else ""
    yield f"   GB of a GPU, of {usable} that can be filled: {held}{host}"
    idle = ", ".join(
        f"{cause} {100 * share:.0f} %"
        for cause, share in sorted(outcome.idle.items(), key=lambda item: -item[1])
        if share >= 0.005
    )
    waits = f"; wait for {idle}" if idle else ""
    stale = f"staleness {outcome.staleness_mean:.2f}, at most {outcome.staleness_max:.0f}"
    yield f"   GPUs work {100 * outcome.busy:.0f} % of the time{waits}; {stale}"
    if candidate.on_paper:
        yield f"   On paper only: {candidate.on_paper}."


def _roles(candidate: Candidate, plan: Plan) -> str:
    place = candidate.layout
    again = ", layers computed again" if place.checkpointing else ""
    offload = ", roles offloaded" if place.offload else ""
    learner = f"learner {_mesh(place.learner, 'fsdp')}"
    if place.learner.stages > 1:
        learner += f" ({candidate.pipelining})"
    parts = [f"{learner}, {place.micro_tokens:,} tokens a micro-batch{again}{offload}"]
    parts.append(f"generators {_mesh(place.generator, 'copies')}")
    if plan.setting.models.scoring:
        parts.append(f"scorers {_mesh(place.scorer, 'copies')}")
    return "; ".join(parts)


def _brief(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.0f}" if size >= 10e9 else f"{size / 1e9:.1f}"


def _mesh(mesh: Mesh, data: str) -> str:
    stages = f" x {mesh.stages} stages" if mesh.stages > 1 else ""
    return f"{data} {mesh.data} x tp {mesh.tensor}{stages}"


def _offered() -> list[str]:
    sections = ("threads", "model", "reward", "rollout", "algorithm", "schedule", "training")
    return [name for name in recipes.setting_names() if name.partition(".")[0] in sections]
