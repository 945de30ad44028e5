"""Plans before a run: its needs on GPUs, and the best layout of its roles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w
from pydantic import Field
from tyro.conf import arg

from stretto import files, tasks
from stretto.api.runs import REPLACED, VARIANTS, schedule_of
from stretto.api.settings import Settings, config_of
from stretto.assembly.teachers import teacher_shares
from stretto.bounds import ceil_div, checked, kinds
from stretto.checks.user_functions import check_algorithm
from stretto.config import Config, ScheduleConfig, changes, recipes
from stretto.config.capabilities import runtime_for
from stretto.config.cluster_config import GENERATOR, LEARNER
from stretto.config.sections import (
    Gpus,
    Minutes,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    WorkersOrAuto,
)
from stretto.errors import ConfigError, ModelError
from stretto.layout import Layout
from stretto.models.shapes import Shape
from stretto.planner.hardware import GPUS, Hardware, read_hardware
from stretto.planner.run_layout import ModelShapes, TeacherShape
from stretto.saying import Say, silent, working
from stretto.types import short_name

if TYPE_CHECKING:
    from stretto.planner.candidates import Candidate, PlanSpec
    from stretto.planner.plan_search import SearchOutcome
    from stretto.runtime.sim.turns import SimEpisodes

PLANNED = (
    *("sync", "oppo", "oppo-no-intra", "oppo-no-inter", "async", "async-overcommit"),
    *("rlhfuse", "stretto"),
)
"""Variants of the schedule among which a plan is searched."""
FUNCTION_S = 0.001
PROMPT = 256
MEDIAN = 0.15
P95 = 0.75
"""Assumed: seconds of a reward function per response, mean tokens of a prompt, and median and 95th
percentile of response lengths as shares of the limit.
"""
EPISODES: Mapping[str, tuple[float, float]] = {
    "turns": (2, 4),
    "wait": (0.5, 5.0),
    "answer_tokens": (40, 160),
}
"""Assumed values for episodes, by option."""
EPISODE_WORDS = {
    "turns": "{:g} to {:g} turns",
    "wait": "answers after a median of {:g} s and a 95th percentile of {:g} s",
    "answer_tokens": "answers with a median of {:g} tokens and a 95th percentile of {:g}",
}
MINUTES = (0.75, 8.0)
"""Time limit of a search in minutes, for up to 64 GPUs and for more."""


Tokens = Annotated[float, Field(gt=0, le=10**9)]
"""Mean number of tokens of a text."""


@dataclass
class PlanOptions:
    """Options of a plan, in addition to a run's settings.

    Attributes:
        gpus: Number of GPUs. A plan uses all of them.
        hardware: A file with the GPUs' performance, instead of --gpu.
        model_shape: Known model, folder or config.json with the actor's shape. Default: model.name.
        reward_shape: The same for the reward model. 'actor' for the actor's.
        prompt_tokens: Mean tokens of a prompt. 0 assumes some.
        response_tokens: Median and 95th percentile of response tokens, per turn in episodes.
            Default: shares of the limit.
        turns: Fewest and most turns of a response, in episodes.
        wait: Seconds until tools or an environment answer a turn.
        answer_tokens: Tokens of such an answer.
        like: A run whose lengths of prompts and responses are used.
        workers: Processes that simulate. 0: one per core.
        minutes: Longest search; 0: 0.75 up to 64 GPUs, 8 beyond.
    """

    gpus: Annotated[Gpus, Field(le=2**14)] = 0
    gpu: Annotated[str, arg(help=f"Kind of GPU: {', '.join(GPUS)}.", metavar="NAME")] = "h100"
    hardware: Annotated[str, arg(metavar="FILE")] = ""
    model_shape: Annotated[str, arg(metavar="NAME")] = ""
    reward_shape: Annotated[str, arg(metavar="NAME")] = ""
    prompt_tokens: NonNegativeInt = 0
    response_tokens: Annotated[tuple[Tokens, ...], arg(metavar="MEDIAN P95")] = ()
    turns: Annotated[tuple[PositiveInt, ...], arg(metavar="LOW HIGH")] = ()
    wait: Annotated[tuple[Seconds, ...], arg(metavar="MEDIAN P95")] = ()
    answer_tokens: Annotated[tuple[Tokens, ...], arg(metavar="MEDIAN P95")] = ()
    like: Annotated[str, arg(metavar="RUN_DIR")] = ""
    workers: WorkersOrAuto = 0
    minutes: Minutes = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The plans found for a run, its simulated specification, and the assumptions made."""

    config: Config
    spec: PlanSpec
    found: SearchOutcome
    assumed: tuple[str, ...] = ()


def plan(settings: Settings, options: PlanOptions, *, say: Say = silent) -> Plan:
    """Search for the plans with the shortest steps. Raises ConfigError if nothing fits."""
    _hardware(options)  # validate before loading the simulator
    checked(kinds(PlanOptions), vars(options))
    if options.gpus < 1:
        raise ConfigError(f"`gpus = {options.gpus}`: give 1 or more", "greater_than")
    with working(say, "loading the simulator"):
        from stretto.planner.plan_search import search

    config = config_of(settings)
    check_algorithm(config)
    spec, assumed = spec_of(config, options)
    limit_s = 60 * (options.minutes or MINUTES[options.gpus > 64])
    search_result = search(spec, limit_s=limit_s, workers=options.workers, say=say)
    return Plan(config, spec, search_result, tuple(assumed))


def _hardware(options: PlanOptions) -> Hardware:
    return read_hardware(options.hardware) if options.hardware else Hardware.of(options.gpu)


def spec_of(config: Config, options: PlanOptions) -> tuple[PlanSpec, list[str]]:
    """Return the simulated run and its assumptions. ConfigError for unknown models or GPUs."""
    from stretto.planner.candidates import PlanSpec
    from stretto.runtime.sim.cluster import Workload
    from stretto.runtime.sim.costs import SampleCost

    assumed: list[str] = []
    m = config.model
    if m.lora_rank:
        assumed.append("all weights are trained, not LoRA adapters alone")
    models = _models(config, options, assumed)
    functions = [source.name for source in config.reward.parsed if source.kind.is_code]
    on = _hardware(options)
    if not options.hardware:
        assumed.append(
            f"{on.gpu.name}s as published, of which software reaches the shares in "
            "planner/hardware.py; eight to a node, a 400 Gbit/s adapter each"
        )
    workload = Workload(
        batch=config.rollout.batch,
        samples_per_prompt=config.rollout.samples_per_prompt,
        group_at_least=config.algorithm.group,
        most_skipped=config.rollout.most_skipped,
        max_new_tokens=config.rollout.max_new_tokens,
        **_lengths(config, options, assumed),
    )
    spec = PlanSpec(
        models,
        workload,
        on,
        options.gpus,
        variants_of(config.schedule),
        sleeping=config.rollout.capabilities.own_weights,
        pipelines=not (m.trust_remote_code or m.use_liger_kernel or m.torch_compile),
        epochs=config.training.epochs,
        updates=config.training.updates,
        functions={short_name(name): SampleCost(sample_s=FUNCTION_S) for name in functions},
    )
    return spec, assumed


def variants_of(own: ScheduleConfig) -> dict[str, ScheduleConfig]:
    """Return the schedules to try. Open settings are taken from the run's own schedule."""
    variants = {**VARIANTS, "async-overcommit": {"preset": "async", "overcommit": "auto"}}
    schedules = {name: schedule_of(own, name, variants) for name in PLANNED}
    return {
        name: recipes.build(schedule, f"variant '{name}'", ScheduleConfig)
        for name, schedule in schedules.items()
    }


def settings_of(config: Config, candidate: Candidate, spec: PlanSpec) -> dict[str, Any]:
    """Return the settings with which ``stretto train`` runs a plan."""
    from stretto.config.cluster_config import generator_names
    from stretto.planner.candidates import slots_of
    from stretto.runtime.placement import model_scorers

    layout, learner = candidate.layout, candidate.layout.learner
    schedule = candidate.schedule
    engines = layout.generator.dp
    data: dict[str, Any] = {
        "model": {"gradient_checkpointing": layout.checkpointing},
        "training": {"microbatch_tokens": layout.micro_tokens},
        "schedule": {name: getattr(schedule, name) for name in REPLACED},
        "rollout": {"engines": engines, "slots": slots_of(spec, candidate)},
    }
    if learner.has_stages:
        stages = config.pipeline.settings_of(learner)
        data["pipeline"] = {**stages, "schedule": "fused" if layout.fused else "serial"}
    elif config.pipeline.ranks:
        data["pipeline"] = {"ranks": 0}
    if layout.gpus == 1 and not layout.sleeping:
        return {"runtime": "inline", **data, "cluster": {"processes": []}}
    scorers = model_scorers(config.algorithm, config.reward)
    roles = {LEARNER: learner}
    if layout.in_place:
        roles[GENERATOR] = layout.generator
    if layout.sharing in ("all", "learner"):
        roles |= {name: layout.critic if name == "critic" else layout.scorer for name in scorers}
    processes = [_process(learner.ranks, roles)]
    if layout.offload:
        processes[0]["offload"] = True
    engine = layout.generator.per_copy
    if not layout.in_place:
        processes += [_process(engine.ranks, {name: engine}) for name in generator_names(engines)]
    if layout.sharing == "none":
        copy, copies = layout.scorer.per_copy, layout.scorer.dp
        for i in range(copies if scorers else 0):
            names = [f"{name} {i}" for name in scorers] if copies > 1 else scorers
            processes.append(_process(copy.ranks, dict.fromkeys(names, copy)))
    hosted = scorers and layout.sharing == "generators"
    return {
        "runtime": runtime_for(ceil_div(layout.gpus, spec.hardware.links.gpus_per_node)),
        **data,
        "cluster": {"scorers": "generators" if hosted else "auto", "processes": processes},
    }


def _process(ranks: int, layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """Return the entry of ranks that hold roles by these layouts. Stages are in ``[pipeline]``."""
    divided = {role: on for role, on in layouts.items() if ranks > 1 and not on.has_stages}
    sizes = {role: layout.settings for role, layout in divided.items()}
    entry: dict[str, Any] = {"roles": list(layouts), "ranks": ranks}
    return {**entry, "layout": sizes} if sizes else entry


def check_trainable(config: Config, options: PlanOptions) -> None:
    """Raise ConfigError if ``stretto train`` would refuse every plan for these settings."""
    if not config.task.name:
        raise ConfigError(
            "task.name is empty, and a written plan is one to train by; name a file "
            "or a hub dataset by `task.name`",
            "task-unnamed",
        )
    shape = options.model_shape
    if shape and _shape(config.model.name) != _shape(shape):
        raise ConfigError(
            f"`model_shape = {shape}`: '{config.model.name}' would be trained by the "
            "written plan, which has another shape; name the model itself by `model.name`, and "
            "leave out `model_shape`",
            "shape-of-another-model",
        )


def write(file: str | Path, plan: Plan, candidate: Candidate, also: Mapping[str, Any]) -> None:
    """Write a candidate's settings for ``stretto train RECIPE --overrides FILE``, and ``also`` the
    recipe's changes. Raises ConfigError if ``stretto train`` refuses them, StorageError if the file
    cannot be written.
    """
    data = changes.merged(also, settings_of(plan.config, candidate, plan.spec))
    changes.changed(plan.config, data, "the plan")  # validates it for train
    text = f"# {candidate.layout.gpus} GPUs, by 'stretto plan'\n{tomli_w.dumps(data)}"
    with files.explained(Path(file)):
        Path(file).write_text(text, encoding="utf-8")


def _models(config: Config, options: PlanOptions, assumed: list[str]) -> ModelShapes:
    actor = _shape(options.model_shape or config.model.name)
    reward_models = [source.model for source in config.reward.models]
    reward = None
    if reward_models:
        name = options.reward_shape or reward_models[0]
        if options.reward_shape:
            reward = (actor if name == "actor" else _shape(name)).valued()
        elif Path(name).is_dir():
            reward = _shape(name).valued()
        else:  # without a network, looking on the hub would take minutes
            reward = actor.valued()
            assumed.append(f"the reward model '{name}' has the actor's body (`reward_shape`)")
        if len(reward_models) > 1:
            assumed.append(
                f"of {len(reward_models)} reward models only '{reward_models[0]}' is planned for"
            )
    critic = None
    if config.algorithm.definition.critic:
        init = config.critic.init
        init_shapes = {"actor": actor.valued(), "reward": reward or actor.valued()}
        critic = init_shapes.get(init) or _shape(init).valued()
    reference = actor if config.algorithm.has_reference else None
    teachers = tuple(_teachers(config, actor, assumed))
    return ModelShapes(actor, critic, reference, reward, teachers)


def _teachers(config: Config, actor: Shape, assumed: list[str]) -> Iterator[TeacherShape]:
    models, task = config.algorithm.teacher_models, config.task
    shares = dict.fromkeys(models, 1 / max(len(models), 1))
    if len(models) > 1 and task.kind == "dataset" and Path(task.name).expanduser().exists():
        shares = teacher_shares(tasks.load(task, config.seed), config.algorithm)
    elif len(models) > 1:
        assumed.append(f"each of {len(models)} teachers reads as many responses as the others")
    for name, model in models.items():
        shape = _shape(model) if Path(model).is_dir() else actor
        if shape is actor:
            assumed.append(f"the teacher '{model}' has the actor's size")
        yield TeacherShape(name, shape, shares[name])


def _shape(name: str) -> Shape:
    from stretto.models.info import described

    try:
        return described(name).shape
    except ModelError as error:
        problem = f"{error}. Or set `model_shape` to a model with the same layers"
        raise ConfigError(problem, "shape-unknown") from error


def _lengths(config: Config, options: PlanOptions, assumed: list[str]) -> Mapping[str, Any]:
    from stretto.runtime.sim.lengths import Lognormal, Uniform

    if options.like:
        from stretto.planner.replay import Recording

        recorded = Recording.read(options.like).cluster().workload
        names = ("prompt_tokens", "response_tokens", "episodes")
        return {name: getattr(recorded, name) for name in names}
    episodes, what = _episodes(config, options, assumed), "turns"
    turn_tokens = config.rollout.max_new_tokens // int(EPISODES["turns"][1])
    limit = config.environment.max_turn_tokens or max(turn_tokens, 1)
    if episodes is None:
        limit, what = config.rollout.max_new_tokens, "responses"
    mean = options.prompt_tokens or PROMPT
    if not options.prompt_tokens:
        assumed.append(f"prompts of {mean} tokens on average (`prompt_tokens`, or `like = RUN`)")
    shares = MEDIAN * limit, P95 * limit
    median, p95 = _two("response_tokens", options.response_tokens) or shares
    if not options.response_tokens:
        assumed.append(
            f"{what} with a median of {median:.0f} tokens and a 95th percentile of {p95:.0f} "
            "(`response_tokens`, or `like = RUN`)"
        )
    label, low = f"`response_tokens = {median:g} {p95:g}`", max(mean // 2, 1)
    return {
        "prompt_tokens": Uniform(low=low, high=max(2 * mean - low, low)),
        "response_tokens": recipes.build({"median": median, "p95": p95}, label, Lognormal),
        "episodes": episodes,
    }


def _episodes(config: Config, options: PlanOptions, assumed: list[str]) -> SimEpisodes | None:
    """Return the turns and waits to plan for, ``None`` if responses have one turn."""
    from stretto.runtime.sim.turns import SimEpisodes

    ranges = {
        "turns": _two("turns", options.turns, "the fewest and the most"),
        "wait": _two("wait", options.wait),
        "answer_tokens": _two("answer_tokens", options.answer_tokens),
    }
    environment = config.environment
    if not (environment.sources or any(ranges.values())):
        return None
    for name, numbers in ranges.items():
        if not numbers:
            first, second = (
                min(n, environment.max_turns) if name == "turns" else n for n in EPISODES[name]
            )
            ranges[name] = first, second
            assumed.append(
                f"{EPISODE_WORDS[name].format(first, second)} (`{name}`, or `like = RUN`)"
            )
    (low, high), (wait_s, long_s), (tokens, tokens_p95) = ranges.values()
    settings = {
        "turns": {"kind": "uniform", "low": low, "high": high},
        "wait_s": {"median": wait_s, "p95": long_s},
        "answer_tokens": {"kind": "lognormal", "median": tokens, "p95": tokens_p95},
        "max_turn_tokens": environment.max_turn_tokens,
    }
    label = ", ".join(
        f"`{name} = {first:g} {second:g}`" for name, (first, second) in ranges.items()
    )
    return recipes.build(settings, label, SimEpisodes)


def _two(
    name: str, given: tuple[float, ...], of: str = "the median and the 95th percentile"
) -> tuple[float, ...]:
    if len(given) not in (0, 2):
        problem = f"`{name} = {' '.join(map(str, given))}`: give two, {of}"
        raise ConfigError(problem, "two-percentiles")
    return given
