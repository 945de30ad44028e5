"""``--dry-run``: describes a run without loading models or data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stretto.api.settings import settled
from stretto.checks import check_run, check_supervised, disk
from stretto.config import Config, ModelConfig, RewardModelConfig, SftConfig, TaskConfig
from stretto.config.sections import RewardSource
from stretto.config.training_config import PipelineConfig
from stretto.machine import usable_cores, usable_gpus
from stretto.models.resolve import is_known, resolve
from stretto.observe.progress import headline
from stretto.planner import fitting
from stretto.planner.fitting import MemoryPlan, format_plan, plan_for
from stretto.runtime.placement import places, remarks, table
from stretto.tasks.tables import is_local


def describe_run(config: Config) -> str:
    """Describe a reinforcement learning run. Raises the errors of ``check_run``."""
    check_run(config, ask_hub=False)
    choices: list[str] = []
    if _gpus(config.model) or any(p.ranks > 1 for p in config.cluster.processes):
        config = settled(config, choices.append)
    r, t = config.rollout, config.training
    updates = t.epochs * t.minibatches
    lines = [
        headline(config),
        f"in all: {config.steps * r.batch:,} responses, {config.steps * updates:,} updates",
        f"in flight: at most {config.most_in_flight} responses (delta at most "
        f"{config.schedule.largest_overcommit(r.batch)}), each of at most "
        f"{config.task.max_prompt_tokens:,} + {r.max_new_tokens:,} tokens",
        *_model(config.model),
        *choices,
        *_pipelines(config.pipeline),
        *map(_source, config.reward.parsed),
        *(
            f"{name}: {model} ({_place(model)})"
            for name, model in config.algorithm.teacher_models.items()
        ),
    ]
    if not config.task.is_procedural:
        lines.append(f"prompts: {config.task.name} ({_data(config.task.name)})")
    lines.append(f"evaluation: {_held_out(config.task)}")
    lines += filter(None, [disk.said(disk.written(config), Path(config.out))])
    plan = plan_for(config.model, config.algorithm, config.reward)
    return "\n".join([*lines, format_plan(plan), *_processes(config, plan)])


def describe_supervised(config: SftConfig | RewardModelConfig) -> str:
    """Describe supervised training. Raises the errors of ``check_supervised``."""
    check_supervised(config, ask_hub=False)
    rows, sides = ("sequences", 1) if isinstance(config, SftConfig) else ("pairs", 2)
    length = f"{config.steps} updates" if config.steps else f"{config.training.epochs} epoch(s)"
    name = config.data.name
    data = f"{name} ({_data(name)})" if name else "pairs that the gold reward labels"
    lines = [
        f"{length} of {config.batch} {rows}, at most "
        f"{config.batch * config.data.max_tokens * sides:,} tokens an update",
        *_model(config.model),
        f"data: {data}, {config.data.held_out:.0%} of it held out",
    ]
    return "\n".join([*lines, format_plan(plan_for(config.model))])


def _model(model: ModelConfig) -> Iterator[str]:
    yield f"model: {model.name} ({_place(model.name)})"
    if model.lora_rank:
        base = ", beside weights in 4 bits" if model.load_in_4bit else ""
        yield f"LoRA of rank {model.lora_rank} on {', '.join(model.lora_targets)}{base}"


def _pipelines(p: PipelineConfig) -> Iterator[str]:
    if not p.ranks:
        return
    for name in ("actor", "critic"):
        slices = f" in {p.slices_of(name)} slices each" if p.slices_of(name) > 1 else ""
        stages = f"{_many(p.stages_of(name), 'stage')}{slices}"
        yield f"{name}: {_many(p.replicas * p.pipelines(name), 'pipeline')} of {stages}"


def _processes(config: Config, plan: MemoryPlan) -> Iterator[str]:
    gpus = _gpus(config.model)
    if not (config.runtime_kind.has_processes or gpus):
        return
    placement = places(config, config.threads or usable_cores(), gpus)
    wide, sizes = fitting.width(config.model), plan.mixed
    frozen = dict.fromkeys(("actor", "critic", "reference"), wide * plan.parameters)
    trained = {"learner": sizes["actor"] + sizes["critic"], "reward": sizes["reward"]}
    trained |= {name: sizes[name] for name in config.algorithm.teacher_models}
    if config.runtime_kind.has_processes:
        yield f"Processes (runtime = '{config.runtime}'):"
        yield table(config.schedule.knobs, placement, frozen | trained)
    yield from remarks(
        config.schedule.knobs, config.rollout.engines, placement, usable_cores(), gpus
    )
    if loads := fitting.RunMemory(config).planned(placement, wide):
        yield "Memory of each device by phase, on paper (cpu: of all processes on this machine):"
        yield fitting.table(loads)
        yield from fitting.check(loads, fitting.capacity)


def _gpus(model: ModelConfig) -> int:
    return usable_gpus() if model.device != "cpu" else 0


def _held_out(task: TaskConfig) -> str:
    if task.held_out_rows:
        return task.held_out_rows
    if share := task.held_out_share:
        return f"{share:.0%} of all different prompts, which training leaves out"
    if task.is_procedural:
        return "rows of another seed, which may ask what training asks (task.held_out is 0)"
    return "on the rows of training (task.held_out is 0)"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _source(source: RewardSource) -> str:
    where = f" ({_place(source.model)})" if source.kind.is_model else ""
    return f"reward: {source.name}{where}"


def _place(name: str) -> str:
    if is_known(name):
        return "one of Stretto's own"
    return "local" if isinstance(resolve(name), Path) else "from the hub"


def _data(name: str) -> str:
    return "local" if is_local(name) else "from the hub"
