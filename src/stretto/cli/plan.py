"""``stretto plan``: searches for layouts of a run on many GPUs, before it is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto import files
from stretto.api import calibrating, planning
from stretto.api.planning import Plan, PlanOptions
from stretto.cli.options import Recipe, call_with_config
from stretto.cli.parsing import File, takes
from stretto.config import Config, changes, recipes
from stretto.interfaces import command_line, worded
from stretto.observe import make_progress
from stretto.observe.progress import on_stderr
from stretto.planner.memory_model import host_bytes
from stretto.saying import format_size

if TYPE_CHECKING:
    from stretto.planner.candidates import Candidate
    from stretto.planner.plan_search import PlanResult

_SHARING = {
    "all": "all roles on all GPUs",
    "none": "learner, generators and scorers apart",
    "generators": "scorers with the generators",
    "learner": "scorers with the learner",
}


@takes(PlanOptions)
def command_plan(
    config: Config, recipe: Recipe, /, *, calibrate: File = "", write: File = "", **asked: Any
) -> None:
    """Search for the layout of a run's roles on GPUs, and for the schedule, with the highest
    throughput of responses. Plans are run in virtual time, without a GPU. Settings come from the
    recipe and from options after it: stretto plan my.toml --gpus 16 --gpu h100

    Args:
        calibrate: Measure this machine's performance to this file instead of planning.
        write: Write the best plan's settings, for 'stretto train --overrides'.
    """
    if calibrate:
        say = make_progress("auto")
        calibrating.calibrate(config, calibrate, command=command_line().line, say=say)
        print(f"wrote {calibrate}: stretto plan {recipe} --gpus N --hardware {calibrate}")
        return
    options = PlanOptions(**asked)
    if write:
        files.require_writable(Path(write))
        planning.check_trainable(config, options)
    plan = planning.plan(config, options, say=on_stderr)
    print(worded("\n".join(_lines(plan, options.gpus, recipes.name_of(recipe)))))
    if write:
        start = recipes.load(recipe, checked=False)
        also = changes.difference(start.model_dump(), config.model_dump())
        planning.write(write, plan, plan.found.best[0].candidate, also)
        print(f"wrote {write}: stretto train {recipe} --overrides {write}")


def run_plan(arguments: Sequence[str]) -> int:
    sections = ("threads", "model", "reward", "rollout", "algorithm", "schedule", "training")
    names = (n for n in recipes.setting_names() if n.partition(".")[0] in sections)
    return call_with_config(command_plan, "plan", arguments, ["task.name", *names])


def _lines(plan: Plan, gpus: int, name: str) -> Iterator[str]:
    plans, w = plan.found, plan.spec.workload
    yield (
        f"{name} on {gpus} {plan.spec.hardware.gpu.name}: {w.batch} responses a step of "
        f"{w.mean_tokens:.0f} tokens on average, prompts included, and up to {w.max_new_tokens}"
    )
    results = list(plans.best)
    if plans.baseline and plans.baseline not in results:
        results.append(plans.baseline)
    for number, result in enumerate(results, 1):
        yield from plan_lines(number, result, plan)
    if plans.baseline is None:
        yield "   No layout with all roles on all GPUs, one after another, fits."
    yield (
        f"{plans.candidates:,} candidates; {plans.simulated:,} simulated in {plans.seconds:.0f} s, "
        f"{plans.unfit:,} looked at that do not fit"
    )
    if plans.bound_s < results[0].step_s:
        yield (
            "   Not all were simulated: one that was left out might take "
            f"{_brief(plans.bound_s)} s a step (--minutes for a longer search)"
        )
    for assumption in plan.assumed:
        yield f"Assumed: {assumption}"


def plan_lines(number: int, result: PlanResult, plan: Plan) -> Iterator[str]:
    """Yield the lines that describe one of a search's plans."""
    from stretto.planner.candidates import memory_by_phase

    candidate = result.candidate
    layout = candidate.layout
    scored = plan.spec.models.scoring
    where = _SHARING[layout.sharing]
    if not scored and not layout.colocated:
        where = "learner and generators apart"
    sync = " (the baseline)" if result is plan.found.baseline else ""
    yield (
        f"{number}. {_brief(result.step_s)} s a step, {_brief(result.samples_per_s)} samples/s: "
        f"{candidate.variant}, {where}{sync}"
    )
    yield f"   {_roles(candidate, plan)}"
    memory = ", ".join(
        f"{phase} {_gb(sum(parts.values()))}"
        for phase, parts in memory_by_phase(plan.spec, candidate).items()
        if scored or phase != "scoring"
    )
    usable = format_size(round(plan.spec.hardware.usable_bytes))
    on_host = _gb(host_bytes(plan.spec.models, layout))
    host = f"; host {on_host} for each" if layout.offload else ""
    yield f"   GB of a GPU, of {usable} that can be filled: {memory}{host}"
    idle = ", ".join(
        f"{cause} {100 * share:.0f} %"
        for cause, share in sorted(result.idle.items(), key=lambda item: -item[1])
        if share >= 0.005
    )
    waits = f"; wait for {idle}" if idle else ""
    stale = f"staleness {result.staleness_mean:.2f}, at most {result.staleness_max:.0f}"
    yield f"   GPUs work {100 * result.busy:.0f} % of the time{waits}; {stale}"


def _roles(candidate: Candidate, plan: Plan) -> str:
    layout = candidate.layout
    again = ", layers computed again" if layout.checkpointing else ""
    offload = ", roles offloaded" if layout.offload else ""
    learner = f"learner {layout.learner}"
    if layout.learner.has_stages:
        learner += " (fused)" if layout.fused else " (serial)"
    parts = [f"{learner}, {layout.micro_tokens:,} tokens a micro-batch{again}{offload}"]
    parts.append(f"generators {layout.generator}")
    if plan.spec.models.scoring:
        parts.append(f"scorers {layout.scorer}")
    return "; ".join(parts)


def _brief(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.0f}" if size >= 10e9 else f"{size / 1e9:.1f}"
