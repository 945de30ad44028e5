"""A plan before a run: what a run's settings ask of GPUs, and where its roles best go."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from stretto.api.runs import REPLACED, VARIANTS, schedule_of
from stretto.api.settings import Settings, config_of
from stretto.config import Config, ModelConfig, ScheduleConfig, changes, recipes
from stretto.errors import ConfigError, StrettoError
from stretto.models.shapes import SHAPES, Shape, shape_of
from stretto.planner.hardware import Hardware
from stretto.planner.layout import ModelShapes
from stretto.saying import Say, silent, working
from stretto.types import short_name

if TYPE_CHECKING:
    from stretto.planner.candidates import Candidate
    from stretto.planner.clusters import PlanSpec
    from stretto.planner.search import Found

PLANNED = (
    "sync",
    "oppo",
    "oppo-no-intra",
    "oppo-no-inter",
    "async",
    "async-overcommit",
    "rlhfuse",
    "stretto",
)
"""Variants of the schedule among which a plan is searched."""
FUNCTION_S = 0.001
"""Seconds that a reward function takes for a response (assumed)."""
PROMPT = 256
"""Tokens of a prompt, on average (assumed)."""
MEDIAN, P95 = 0.15, 0.75
"""Median and 95th percentile of response lengths, as shares of the limit (assumed)."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a plan is asked for, besides a run's settings.

    Attributes:
        gpu: their kind, by name.
        hardware: their figures, if measured (``stretto plan --calibrate``); else the published
            ones of ``gpu``.
        model_shape: shape of the actor, by a known model's name; empty takes ``model.name``.
        reward_shape: the same of reward models; empty takes their own names, or the actor's.
        prompt_tokens: of a prompt, on average; 0 assumes some.
        response_tokens: median and 95th percentile of responses; empty takes shares of the limit.
        like: folder of a run whose lengths of prompts and responses are taken instead.
        on_paper: also plans that ``stretto train`` cannot run.
        keep: how many plans.
        limit_s: seconds after which no further plan is simulated.
        workers: processes that simulate; 0 takes one a core.
    """

    gpus: int
    gpu: str = "h100"
    hardware: Hardware | None = None
    model_shape: str = ""
    reward_shape: str = ""
    prompt_tokens: int = 0
    response_tokens: tuple[float, ...] = ()
    like: str = ""
    on_paper: bool = False
    keep: int = 5
    limit_s: float = inf
    workers: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The plans that were found for a run, as it was simulated, and what was assumed of it."""

    config: Config
    spec: PlanSpec
    found: Found
    assumed: tuple[str, ...] = ()


def plan(settings: Settings, options: PlanOptions, *, say: Say = silent) -> Plan:
    """Search for the layouts and schedules with the shortest steps; what ``stretto plan`` does.

    Raises ConfigError if nothing fits, or a model, a GPU or a length is unknown.

    Args:
        settings: see :mod:`stretto.api`.
    """
    if options.gpus < 1:
        raise ConfigError(f"a plan for {options.gpus} GPUs: give 1 or more", "greater_than")
    if options.hardware is None:
        Hardware.of(options.gpu)  # an unknown one is refused before the simulator is loaded
    with working(say, "loading the simulator"):
        from stretto.planner.candidates import Space
        from stretto.planner.search import search

    config = config_of(settings)
    spec, assumed = spec_of(config, options)
    space = Space(options.gpus, variants_of(config), options.on_paper)
    limits = {"keep": options.keep, "limit_s": options.limit_s, "workers": options.workers}
    return Plan(config, spec, search(spec, space, **limits, say=say), tuple(assumed))


def spec_of(config: Config, options: PlanOptions) -> tuple[PlanSpec, list[str]]:
    """Return what runs, and what was assumed of it, in sentences.

    Raises ConfigError if a model, a GPU or a length is unknown.
    """
    from stretto.planner.clusters import PlanSpec
    from stretto.runtime.sim.cluster import Workload
    from stretto.runtime.sim.costs import SampleCost

    assumed: list[str] = []
    if config.model.lora_rank:
        assumed.append("all weights are trained, not LoRA adapters alone")
    models, functions = _models(config, options, assumed)
    on = options.hardware or Hardware.of(options.gpu)
    if options.hardware is None:
        assumed.append(
            f"{on.gpu.name}s as published, of which software reaches the shares in "
            "planner/hardware.py; eight to a node, a 400 Gbit/s adapter each"
        )
    workload = Workload(
        batch=config.rollout.batch,
        samples_per_prompt=config.rollout.samples_per_prompt,
        group_at_least=config.algorithm.definition.group,
        max_new_tokens=config.rollout.max_new_tokens,
        **_lengths(config, options, assumed),
    )
    spec = PlanSpec(
        models,
        workload,
        on,
        epochs=config.training.epochs,
        updates=config.training.updates,
        functions={short_name(name): SampleCost(sample_s=FUNCTION_S) for name in functions},
    )
    return spec, assumed


def variants_of(config: Config) -> dict[str, ScheduleConfig]:
    """Return the schedules that are tried, with the settings' own for what they leave open."""
    own = {**VARIANTS, "async-overcommit": {"preset": "async", "overcommit": "auto"}}
    schedules = {name: schedule_of(config.schedule, name, own) for name in PLANNED}
    return {
        name: recipes.build(schedule, f"variant '{name}'", ScheduleConfig)
        for name, schedule in schedules.items()
    }


def settings_of(config: Config, candidate: Candidate, spec: PlanSpec) -> dict[str, Any]:
    """Return the settings by which ``stretto train`` runs a plan, as nested plain data.

    Raises ConfigError if it cannot run this one.
    """
    from stretto.config.cluster import generator_names
    from stretto.planner.clusters import slots_of
    from stretto.runtime.placement import model_scorers

    if candidate.on_paper:
        raise ConfigError(f"the plan is one on paper: {candidate.on_paper}", "plan-on-paper")
    layout, schedule = candidate.layout, candidate.schedule
    slots = slots_of(spec, layout, schedule)
    data: dict[str, Any] = {
        "model": {"gradient_checkpointing": layout.checkpointing},
        "training": {"microbatch_tokens": layout.micro_tokens},
        "schedule": {name: getattr(schedule, name) for name in REPLACED},
    }
    if config.pipeline.ranks:
        data["pipeline"] = {"ranks": 0}  # these are of one process
    if layout.gpus == 1:
        rollout = {"engines": 1, "slots": slots}
        return {"runtime": "inline", **data, "rollout": rollout, "cluster": {"processes": []}}
    scorers = model_scorers(config)
    generators = 1 if layout.colocated else layout.generator.data
    names = generator_names(generators)
    beside = {"all": [*names, *scorers], "learner": scorers}.get(layout.sharing, [])
    learner = {"roles": ["learner", *beside], "fsdp": layout.learner.data}
    processes: list[dict[str, Any]] = [{**learner, "tp": layout.learner.tensor}]
    if not layout.colocated:
        processes += [{"roles": [name], "tp": layout.generator.tensor} for name in names]
    if scorers and layout.sharing == "none":
        copies = layout.scorer.data
        for i in range(copies):
            roles = [f"{name} {i}" for name in scorers] if copies > 1 else scorers
            processes.append({"roles": roles, "tp": layout.scorer.tensor})
    hosted = scorers and layout.sharing == "generators"
    return {
        "runtime": "local" if layout.gpus <= spec.hardware.links.gpus_per_node else "ray",
        **data,
        "rollout": {"engines": generators, "slots": slots},
        "cluster": {"scorers": "generators" if hosted else "auto", "processes": processes},
    }


def check_writable(file: str | Path) -> None:
    """Raise ConfigError if a file cannot be written; asked before a search."""
    path = Path(file)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = f"'{file}' cannot be written; name a file in a folder that is there"
        raise ConfigError(problem, "file-not-writable")


def write(
    file: str | Path,
    config: Config,
    candidate: Candidate,
    spec: PlanSpec,
    start: Config | None = None,
) -> None:
    """Write the settings of a plan, for ``stretto train RECIPE --overrides FILE``.

    Raises ConfigError if ``stretto train`` cannot run the plan, or the file cannot be written.

    Args:
        config: that was planned for.
        start: the recipe's settings; what ``config`` has otherwise is written, too.
    """
    data = settings_of(config, candidate, spec)
    if start is not None:
        data = changes.merged(changes.difference(start, config), data)
    changes.changed(config, data, "the plan")  # it is one that train takes
    text = f"# {candidate.layout.gpus} GPUs, by 'stretto plan'\n{tomli_w.dumps(data)}"
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write '{file}': {error}", "file-not-writable") from error


def _models(
    config: Config, options: PlanOptions, assumed: list[str]
) -> tuple[ModelShapes, list[str]]:
    """The models of a run, and the names of its other sources of rewards."""
    actor = _shape(config.model, options.model_shape)
    sources = config.reward.sources
    named = [source.removeprefix("model:") for source in sources if source.startswith("model:")]
    functions = [source for source in sources if not source.startswith("model:")]
    reward = None
    if named:
        name = options.reward_shape or named[0]
        if options.reward_shape:
            reward = (actor if name == "actor" else shape_of(name)).valued()
        elif Path(name).is_dir():
            reward = _shape(ModelConfig(name=name), "").valued()
        else:  # looking for it on a hub would take minutes where there is no network
            reward = actor.valued()
            assumed.append(f"the reward model '{name}' has the actor's body (--reward-shape)")
        if len(named) > 1:
            assumed.append(f"of {len(named)} reward models only '{named[0]}' is planned for")
    critic = None
    if config.algorithm.definition.critic:
        others = {"actor": actor.valued(), "reward": reward or actor.valued()}
        init = config.critic.init
        critic = others.get(init) or _shape(ModelConfig(name=init), "").valued()
    reference = actor if config.algorithm.has_reference else None
    return ModelShapes(actor, critic, reference, reward), functions


def _shape(model: ModelConfig, name: str) -> Shape:
    """The shape of a model: a known one's, or read from its files."""
    try:
        return shape_of(name or model.name)
    except ConfigError as unknown:
        if name:
            raise
        from stretto.models.info import described

        try:
            return described(model.name).shape
        except StrettoError as error:
            raise ConfigError(
                f"the shape of '{model.name}' cannot be read ({error}); name a model of its shape "
                f"with --model-shape: {', '.join(SHAPES)}",
                "shape-unknown",
            ) from unknown


def _lengths(config: Config, options: PlanOptions, assumed: list[str]) -> Mapping[str, Any]:
    """Lengths of prompts and responses: a run's, those given, or assumed ones."""
    from stretto.runtime.sim.lengths import Lognormal, Uniform

    if options.like:
        from stretto.planner.replay import Recording

        recorded = Recording.read(options.like).cluster().workload
        return {name: getattr(recorded, name) for name in ("prompt_tokens", "response_tokens")}
    limit, mean = config.rollout.max_new_tokens, options.prompt_tokens or PROMPT
    if not options.prompt_tokens:
        assumed.append(f"prompts of {mean} tokens on average (--prompt-tokens, or --like RUN)")
    if mean < 1:
        problem = f"--prompt-tokens {mean}: must be 1 or more, or 0 to assume some"
        raise ConfigError(problem, "greater_than")
    if len(options.response_tokens) not in (0, 2):
        raise ConfigError(
            f"--response-tokens {' '.join(map(str, options.response_tokens))}: give two numbers, "
            "the median and the 95th percentile",
            "two-percentiles",
        )
    median, p95 = options.response_tokens or (MEDIAN * limit, P95 * limit)
    if not options.response_tokens:
        assumed.append(
            f"responses with a median of {median:.0f} tokens and a 95th percentile of {p95:.0f} "
            "(--response-tokens, or --like RUN)"
        )
    given, low = f"--response-tokens {median:g} {p95:g}", max(mean // 2, 1)
    return {
        "prompt_tokens": Uniform(low=low, high=max(2 * mean - low, low)),
        "response_tokens": recipes.build({"median": median, "p95": p95}, given, Lognormal),
    }
