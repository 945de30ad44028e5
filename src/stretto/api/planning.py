"""A plan before a run: what a run's settings ask of GPUs, and where its roles best go."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from stretto.api.runs import REPLACED, VARIANTS, schedule_of
from stretto.api.settings import Settings, config_of
from stretto.config import Config, ModelConfig, ScheduleConfig, changes, recipes
from stretto.errors import ConfigError, StrettoError
from stretto.models.shapes import SHAPES, Shape, shape_of
from stretto.planner.hardware import Hardware, Links, gpu_of
from stretto.planner.layout import Models
from stretto.saying import Say, silent, working
from stretto.types import short_name

if TYPE_CHECKING:
    from stretto.planner.candidates import Candidate
    from stretto.planner.layouts import Setting
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
class Question:
    """What a plan is asked for, besides a run's settings.

    Attributes:
        gpus: how many there are.
        gpu: their kind, by name.
        hardware: their figures, if measured (``stretto plan --calibrate``); else the published
            ones of ``gpu``.
        model: shape of the actor, by a known model's name; empty takes ``model.name``.
        reward_model: the same of reward models; empty takes their own names, or the actor's.
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
    model: str = ""
    reward_model: str = ""
    prompt_tokens: int = 0
    response_tokens: tuple[float, ...] = ()
    like: str = ""
    on_paper: bool = False
    keep: int = 5
    limit_s: float = inf
    workers: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The plans that were found, and what they are for.

    Attributes:
        config: settings of the run.
        setting: models, work and GPUs, as they were simulated.
        found: the best plans.
        assumed: what was assumed, in sentences.
    """

    config: Config
    setting: Setting
    found: Found
    assumed: tuple[str, ...] = field(default=())


def plan(settings: Settings, question: Question, *, say: Say = silent) -> Plan:
    """Search for the layouts and schedules with the shortest steps; what ``stretto plan`` does.

    Args:
        settings: see :mod:`stretto.api`.
        question: the GPUs, and what settings do not say.

    Raises:
        ConfigError: nothing fits, or a model, a GPU or a length is unknown.
    """
    if question.gpus < 1:
        raise ConfigError(f"a plan for {question.gpus} GPUs: give 1 or more")
    if question.hardware is None:
        gpu_of(question.gpu)
    with working(say, "loading the simulator"):
        from stretto.planner.candidates import Space
        from stretto.planner.search import search

    config = config_of(settings)
    setting, assumed = setting_of(config, question)
    space = Space(question.gpus, variants_of(config), question.on_paper)
    found = search(
        setting,
        space,
        keep=question.keep,
        limit_s=question.limit_s,
        workers=question.workers,
        say=say,
    )
    return Plan(config, setting, found, tuple(assumed))


def setting_of(config: Config, question: Question) -> tuple[Setting, list[str]]:
    """Return what runs, and what was assumed of it.

    Raises:
        ConfigError: a model, a GPU or a length is unknown.
    """
    from stretto.planner.layouts import Setting
    from stretto.runtime.sim.cluster import Workload
    from stretto.runtime.sim.costs import SampleCost

    assumed: list[str] = []
    if config.model.lora_rank:
        assumed.append("all weights are trained, not LoRA adapters alone")
    models, functions = _models(config, question, assumed)
    on = question.hardware
    if on is None:
        gpu = gpu_of(question.gpu)
        on = Hardware(gpu, Links.of(gpu))
        assumed.append(
            f"{gpu.name}s as published, of which software reaches the shares in "
            "planner/hardware.py; eight to a node, a 400 Gbit/s adapter each"
        )
    workload = Workload(
        batch=config.rollout.batch,
        samples_per_prompt=config.rollout.samples_per_prompt,
        group_at_least=config.algorithm.definition.group,
        max_new_tokens=config.rollout.max_new_tokens,
        **_lengths(config, question, assumed),
    )
    setting = Setting(
        models,
        workload,
        on,
        epochs=config.training.epochs,
        updates=config.training.updates,
        functions={short_name(name): SampleCost(sample_s=FUNCTION_S) for name in functions},
    )
    return setting, assumed


def variants_of(config: Config) -> dict[str, ScheduleConfig]:
    """Return the schedules that are tried, with the settings' own for what they leave open."""
    own = {**VARIANTS, "async-overcommit": {"preset": "async", "overcommit": "auto"}}
    return {
        name: recipes.build(
            schedule_of(config.schedule, name, own), f"variant '{name}'", ScheduleConfig
        )
        for name in PLANNED
    }


def settings_of(config: Config, candidate: Candidate, setting: Setting) -> dict[str, Any]:
    """Return the settings by which ``stretto train`` runs a plan, as nested plain data.

    Raises:
        ConfigError: it cannot run this one; the message says why.
    """
    from stretto.config.cluster import generator_names
    from stretto.planner.layouts import slots_of
    from stretto.runtime.placement import model_scorers

    if candidate.on_paper:
        raise ConfigError(f"the plan is one on paper: {candidate.on_paper}")
    place, schedule = candidate.layout, candidate.schedule
    slots = slots_of(setting, place, schedule)
    data: dict[str, Any] = {
        "model": {"gradient_checkpointing": place.checkpointing},
        "training": {"microbatch_tokens": place.micro_tokens},
        "schedule": {name: getattr(schedule, name) for name in REPLACED},
    }
    if config.pipeline.ranks:
        data["pipeline"] = {"ranks": 0}  # these are of one process
    if place.gpus == 1:
        rollout = {"engines": 1, "slots": slots}
        return {"runtime": "inline", **data, "rollout": rollout, "cluster": {"processes": []}}
    scorers = model_scorers(config)
    generators = 1 if place.colocated else place.generator.data
    names = generator_names(generators)
    learner: dict[str, Any] = {"roles": ["learner"], "fsdp": place.learner.data}
    learner["tp"] = place.learner.tensor
    if place.colocated:
        learner["roles"] = ["learner", *names, *scorers]
        names, scorers = [], []
    elif place.sharing == "learner":
        learner["roles"] = ["learner", *scorers]
        scorers = []
    processes = [learner]
    processes += [{"roles": [name], "tp": place.generator.tensor} for name in names]
    if scorers and place.sharing == "none":
        for i in range(place.scorer.data):
            copies = [f"{name} {i}" for name in scorers] if place.scorer.data > 1 else scorers
            processes.append({"roles": copies, "tp": place.scorer.tensor})
    nodes = setting.hardware.links.gpus_per_node
    hosted = scorers and place.sharing == "generators"
    return {
        "runtime": "local" if place.gpus <= nodes else "ray",
        **data,
        "rollout": {"engines": generators, "slots": slots},
        "cluster": {"scorers": "generators" if hosted else "auto", "processes": processes},
    }


def check_writable(file: str | Path) -> None:
    """Check that a file can be written, before a search.

    Raises:
        ConfigError: it cannot.
    """
    path = Path(file)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"'{file}' cannot be written; name a file in a folder that is there")


def write(
    file: str | Path,
    config: Config,
    candidate: Candidate,
    setting: Setting,
    start: Config | None = None,
) -> None:
    """Write the settings of a plan, for ``stretto train RECIPE --overrides FILE``.

    Args:
        config: that was planned for.
        start: the recipe's settings; what ``config`` has otherwise is written, too.

    Raises:
        ConfigError: ``stretto train`` cannot run the plan, or the file cannot be written.
    """
    data = settings_of(config, candidate, setting)
    if start is not None:
        data = changes.merged(changes.difference(start, config), data)
    changes.changed(config, data, "the plan")  # it is one that train takes
    text = f"# {candidate.layout.gpus} GPUs, by 'stretto plan'\n{tomli_w.dumps(data)}"
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write '{file}': {error}") from error


def _models(config: Config, question: Question, assumed: list[str]) -> tuple[Models, list[str]]:
    """The models of a run, and the names of its other sources of rewards."""
    actor = _shape(config.model, question.model)
    sources = config.reward.sources
    named = [source.removeprefix("model:") for source in sources if source.startswith("model:")]
    functions = [source for source in sources if not source.startswith("model:")]
    reward = None
    if named:
        name = question.reward_model or named[0]
        if question.reward_model:
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
    return Models(actor, critic, reference, reward), functions


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
                f"with --model-shape: {', '.join(SHAPES)}"
            ) from unknown


def _lengths(config: Config, question: Question, assumed: list[str]) -> Mapping[str, Any]:
    """Lengths of prompts and responses: a run's, those given, or assumed ones."""
    from stretto.runtime.sim.lengths import Lognormal, Uniform

    if question.like:
        from stretto.planner.replay import Recording

        recorded = Recording.read(question.like).cluster().workload
        return {
            "prompt_tokens": recorded.prompt_tokens,
            "response_tokens": recorded.response_tokens,
        }
    limit, mean = config.rollout.max_new_tokens, question.prompt_tokens or PROMPT
    if not question.prompt_tokens:
        assumed.append(f"prompts of {mean} tokens on average (--prompt-tokens, or --like RUN)")
    if mean < 1:
        raise ConfigError(f"--prompt-tokens {mean}: must be 1 or more, or 0 to assume some")
    if len(question.response_tokens) not in (0, 2):
        raise ConfigError(
            f"--response-tokens {' '.join(map(str, question.response_tokens))}: give two numbers, "
            "the median and the 95th percentile"
        )
    median, p95 = question.response_tokens or (MEDIAN * limit, P95 * limit)
    if not question.response_tokens:
        assumed.append(
            f"responses with a median of {median:.0f} tokens and a 95th percentile of {p95:.0f} "
            "(--response-tokens, or --like RUN)"
        )
    given = f"--response-tokens {median:g} {p95:g}"
    response = recipes.build({"median": median, "p95": p95}, given, Lognormal)
    low = max(mean // 2, 1)
    return {
        "prompt_tokens": Uniform(low=low, high=max(2 * mean - low, low)),
        "response_tokens": response,
    }
