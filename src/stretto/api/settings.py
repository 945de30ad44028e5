"""Settings from Python: recipes, changes, and settings that a resumed run may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from stretto.config import Config, RewardModelConfig, Section, SftConfig, TaskConfig, recipes
from stretto.config import changes as merge
from stretto.errors import ConfigError
from stretto.interfaces import in_python
from stretto.machine import usable_gpus
from stretto.saying import Say

S = TypeVar("S", bound=Section)
R = TypeVar("R", Config, SftConfig, RewardModelConfig)

Settings: TypeAlias = Config | str | Path

RESUMABLE = (
    *("steps", "minutes", "threads", "runtime", "cluster", "observe", "pipeline"),
    *("rollout.engines", "training.ratio_tolerance", "reward.on_failure", "reward.timeout_s"),
)
"""Settings and sections that a resumed run may change. Others would make it a different run."""

BRANCHABLE = (*RESUMABLE, "training", "algorithm", "reward.weights", "reward.missing_eos_penalty")
"""Settings and sections that a run may change that branches off from a replayed one: also those of
the update, which no state of the run depends on.
"""


@in_python
def load_recipe(name: str | Path, **changes: Any) -> Config:
    """Return the settings of a packaged recipe, a ``.toml`` file or a run's folder, changed as in
    :func:`train`. Raises ConfigError for unknown recipes or settings and invalid values.
    """
    return changed(recipes.load(name, checked=False), changes, start=str(name))


def changed(config: S, *changes: Mapping[str, Any], where: str = "settings", start: str = "") -> S:
    """Return changed settings. The keys are as in :mod:`stretto.api`, and later changes win. See
    :func:`stretto.config.changes.changed` for dependent settings, ``where`` and ``start``.
    """
    nested: dict[str, Any] = {}
    for key, value in (item for some in changes for item in some.items()):
        for part in reversed(key.split("__")):
            value = {part: value}
        nested = merge.merged(nested, value, type(config))
    return merge.changed(config, nested, where, start)


def check_resumable(before: Config, after: Config, may_change: Sequence[str] = RESUMABLE) -> None:
    """Raise ConfigError for changes that a checkpoint does not fit, or that would make a resumed
    run a different one. ``may_change`` names settings and sections.
    """
    for key in recipes.setting_names():
        old, new = attrgetter(key)(before), attrgetter(key)(after)
        if old != new and not {key, key.partition(".")[0]} & {*may_change}:
            raise ConfigError(
                f"{key} = {new!r}: the run to resume has {old!r}, and only "
                f"{', '.join(f'`{n}`' for n in may_change)} may change. Start a new run for other "
                "settings",
                "resumed-differs",
            )
    if _roles_of_losses(before) != _roles_of_losses(after):
        raise ConfigError(
            "the changes of algorithm would add or remove a model, or start the adaptation of "
            "algorithm.kl_coef again, and the checkpoint has neither; start a new run",
            "resumed-roles-differ",
        )
    schedule = after.training.lr_schedule
    if "training" not in may_change and schedule != "constant" and before.steps != after.steps:
        raise ConfigError(
            f"steps = {after.steps}: the run to resume has {before.steps}, which its "
            f"{schedule} learning-rate schedule depends on. Keep it, or start a new run",
            "resumed-schedule-differs",
        )


def _roles_of_losses(config: Config) -> tuple[object, ...]:
    a = config.algorithm
    adapted = a.kl_target and a.kl_coef
    return a.definition.critic, a.has_reference, a.teacher_models, adapted


def config_of(settings: Settings) -> Config:
    return settings if isinstance(settings, Config) else recipes.load(settings)


def settled(config: R, say: Say) -> R:
    """Return a run's settings with open ones resolved for this machine. Report the reasons.

    These are ``model.dtype``, and on GPUs ``rollout.engine`` and the choices of the memory plan.
    They are saved with the run, so that a resumed or repeated run has the same.
    """
    from stretto.models.backend import pick_device, with_dtype

    cluster_gpus = _cluster_gpus(config) if isinstance(config, Config) else None
    elsewhere = bool(cluster_gpus) and not usable_gpus()  # for example on a cluster's head node
    device = pick_device("cpu" if elsewhere else config.model.device)
    if elsewhere and config.model.dtype == "auto":
        say("model.dtype = auto takes bfloat16: the run works on GPUs of other machines")
        config = config.changed_in("model", dtype="bfloat16")
    if config.model.dtype == "auto":
        model = with_dtype(config.model, say, config.threads)
        config = config.model_copy(update={"model": model})
    if isinstance(config, Config) and any(p.ranks > 1 for p in config.cluster.processes):
        from stretto.planner.choices import with_layouts
        from stretto.planner.fitting import GPU_BYTES

        config = with_layouts(config, say, GPU_BYTES if elsewhere else 0, cluster_gpus)
    if device.type == "cpu" and not elsewhere:
        return config
    from stretto.planner.choices import fitted
    from stretto.planner.fitting import GPU_BYTES
    from stretto.rollout.engine_registry import choose

    if isinstance(config, Config) and config.rollout.engine == "auto":
        engine, because = choose(config)
        say(f"rollout.engine = auto takes {engine}: {because}")
        config = config.changed_in("rollout", engine=engine)
    return fitted(config, say, GPU_BYTES if elsewhere else 0, cluster_gpus)


def _cluster_gpus(config: Config) -> int | None:
    if not config.cluster.address or config.model.device == "cpu":
        return None
    from stretto.workers.ray_cluster import find

    cluster = find()
    return int(cluster.gpus) if cluster else None


def of_rows(task: TaskConfig, name: str) -> dict[str, Any]:
    kind = "dataset" if task.is_procedural else task.kind
    return {"task": {"name": name, "kind": kind}}


def model_of(model: str | Path, settings: Settings, own: str) -> str:
    """Return ``model``, or else the run's folder if ``settings`` is one, or else ``own``."""
    if model:
        return str(model)
    if isinstance(settings, Config) or str(settings) in recipes.names():
        return own
    return str(settings) if Path(settings).is_dir() else own


def trained_with(model: str | Path, settings: Settings, config: Config) -> Config:
    """Return the settings that an evaluated model was or will be trained with.

    For the model of a run these are the run's. Otherwise they are ``config``, but with the original
    rows if others were named for the evaluation.
    """
    folder = Path(model or settings if isinstance(settings, str | Path) else model).expanduser()
    if (folder / "config.toml").is_file():
        try:
            return recipes.load(folder)
        except ConfigError:  # a run of supervised training
            return config
    start = config_of(settings).task
    same = (config.task.name, config.task.split) == (start.name, start.split)
    return config if same else config.model_copy(update={"task": start})
