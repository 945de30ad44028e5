"""The checks of a run, most useful fault first."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from stretto import files, hub, outside, tasks
from stretto.assembly.teachers import check_teachers, reads_tokens
from stretto.checks import user_functions
from stretto.config import Config, ModelConfig, ObserveConfig, RewardModelConfig, SftConfig
from stretto.config.cluster_config import LEARNER
from stretto.config.sections import TRACKERS, RewardSource, TaskConfig, reward_source
from stretto.config.training_config import PipelineConfig
from stretto.errors import ConfigError, ModelError, TaskError, require
from stretto.layout import Layout
from stretto.machine import usable_cores, usable_gpus
from stretto.models.info import NOT_ON_HUB, TOKENIZERS, ModelInfo, model_info
from stretto.models.resolve import adapter_folder, cache_dir, cached, is_known, resolve
from stretto.observe.trackers import port_taken, require_libraries
from stretto.planner import fitting
from stretto.tasks import Task
from stretto.tasks.supervised_rows import read_demonstrations, read_pairs
from stretto.tasks.tables import is_local

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stretto.assembly.run_models import Overrides


def check_run(
    config: Config, overrides: Overrides | None = None, *, ask_hub: bool = True
) -> Task | None:
    """Refuse a reinforcement learning run that will fail, with a StrettoError. Checks
    settings, libraries, devices, models, data, rewards and memory, and, if ``ask_hub``, that the
    hub has all that must be fetched. Returns the opened task, or ``None`` if rows must be fetched.
    """
    _check_observation(config.observe)
    _check_libraries(config)
    user_functions.check_algorithm(config)
    for controller in config.schedule.controllers.values():
        user_functions.check_member(controller, "schedule.controllers")
    gpus = usable_gpus()
    if config.runtime_kind.has_processes and not config.runtime_kind.several_machines:
        from stretto.runtime.placement import places

        places(config, config.threads or usable_cores(), gpus)
    if config.is_elsewhere:
        from stretto.workers.ray_cluster import require_answer

        require_answer(config.cluster.address)
    else:  # other machines have their own GPUs
        _check_device(config.model)
    opened = overrides.task if overrides else None
    task = opened or _check_task(config.task, config.seed, ask_hub=ask_hub)
    objects = {*overrides.functions, *overrides.reward_models} if overrides else ()
    sources = [s for s in config.reward.parsed if s.name not in objects]
    if task and any(source.kind.verifies for source in sources):
        task.require_verifier()
    actor_by_name = overrides is None or overrides.actor is None
    if config.warmup_examples and actor_by_name and adapter_folder(config.model.name):
        raise ConfigError(
            f"warmup_examples = {config.warmup_examples} trains all weights before adapters are "
            f"put on, and '{config.model.name}' is an adapter of other weights; train it with "
            "`stretto sft`",
            "adapter-with-warmup",
        )
    if task and config.warmup_examples:
        task.first.demonstration(f"warmup_examples = {config.warmup_examples}")
    _check_sources(sources, config.model, task, ask_hub=ask_hub)
    environments = overrides.environment if overrides else ()
    user_functions.check_environments(
        n for n in config.environment.sources if n not in environments
    )
    _check_teachers(config, task, ask_hub=ask_hub)
    if overrides is None or overrides.actor is None:
        name, critic = config.model.name, config.critic.model
        tokenizer = overrides is None or overrides.tokenizer is None
        info = _check_model(name, config.model, tokenizer=tokenizer, ask_hub=ask_hub)
        if info:
            config.require_positions("the actor", info.positions)
            if config.model.lora_rank:
                info.adapter_parameters(config.model.lora_rank, config.model.lora_targets)
            layouts = config.generator_layouts
            layouts += chain(*map(config.cluster.layouts, (LEARNER, "reference")))
            layouts += [config.pipeline.layout_of("actor")] if config.pipeline.ranks else []
            _check_heads(info, layouts)
            _check_stages(info, config.pipeline, alike=config.critic.init == "actor")
        if critic and config.algorithm.definition.critic:
            _check_model(critic, config.model, ask_hub=ask_hub)
        _check_tokenizers(config, overrides)
        if ask_hub:
            fitting.RunMemory(config).check_here()
    return task


def check_supervised(config: SftConfig | RewardModelConfig, *, ask_hub: bool = True) -> None:
    """Refuse a supervised run that will fail, as :func:`check_run` does."""
    _check_observation(config.observe)
    _check_device(config.model)
    name = config.data.name
    if name and is_local(name):  # an alignment labels the pairs of an unnamed dataset first
        if isinstance(config, SftConfig):
            read_demonstrations(config.data)
        else:
            read_pairs(config.data)
    elif name:
        check_dataset(name, ask=ask_hub)
    _check_model(config.model.name, config.model, ask_hub=ask_hub)


def check_measured(
    config: Config, model: str, *, rows: bool = True, sources: Collection[str] = (), sft: str = ""
) -> None:
    """Refuse a measurement that will fail, as :func:`check_run` does."""
    _check_device(config.model)
    for name in filter(None, (model, sft)):
        _check_model(name, config.model)
    task = _check_task(config.task, config.seed) if rows else None
    with outside.named_by("win_rate_by"):
        _check_sources([*map(reward_source, sources)], config.model, task, tokenizer=False)


def _check_libraries(config: Config) -> None:
    if library := config.runtime_kind.library:
        require(library, library, f"runtime = '{config.runtime}'")
    library = config.rollout.capabilities.library
    if library and not any(p.python for p in config.cluster.processes):
        require(library, library, f"rollout.engine = '{config.rollout.engine}'")
    if config.model.use_liger_kernel:
        require("liger_kernel", "liger", "model.use_liger_kernel = true")
    if config.model.load_in_4bit:
        require("bitsandbytes", "bitsandbytes", "model.load_in_4bit = true")
    if config.training.optim != "adamw_torch_fused":
        require("bitsandbytes", "bitsandbytes", f"training.optim = '{config.training.optim}'")
    if config.pipeline.ranks:
        require("numba", "pipelines", f"pipeline.ranks = {config.pipeline.ranks}")


def _check_observation(observe: ObserveConfig) -> None:
    require_libraries(observe)
    for name in set(observe.trackers).difference(TRACKERS):
        user_functions.check_member(name, "observe.trackers")
    if port := observe.prometheus_port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise port_taken(port, error) from error


def _check_device(model: ModelConfig) -> None:
    if model.device == "cuda" and not usable_gpus():
        raise ConfigError(
            "model.device = 'cuda' needs a CUDA device, and torch would see none. "
            "Use `model.device = auto` or cpu, or install a torch build for your GPU",
            "no-cuda",
        )


def _check_task(task: TaskConfig, seed: int, *, ask_hub: bool = True) -> Task | None:
    """Open a task, or return ``None`` if its data must be fetched."""
    if not task.name:
        raise ConfigError(
            "task.name is empty: give a file or a hub dataset by `task.name = NAME`, and its "
            "column of prompts by `task.columns = prompt=COLUMN`",
            "task-unnamed",
        )
    if task.held_out_rows and is_local(task.held_out_rows) and not task.is_procedural:
        held_out = Path(task.held_out_rows).expanduser()
        if not held_out.exists():
            raise TaskError(
                f"task.held_out: there is no file '{held_out}' (looked for from {Path.cwd()})"
            )
    if task.kind == "reasoning-gym":
        require("reasoning_gym", "tasks", "task.kind = 'reasoning-gym'")
    elif not task.is_procedural and not is_local(task.name):
        check_dataset(task.name, ask=ask_hub)
        return None
    return tasks.load(task, seed)


def _check_sources(
    sources: Collection[RewardSource], model: ModelConfig, task: Task | None, **how: bool
) -> None:
    columns = task.first.data.keys() if task else None
    for source in sources:
        if source.kind.is_model:
            _check_model(source.model, model, **how)
        elif source.kind.is_code:
            user_functions.check(source, columns)


def _check_model(
    name: str, config: ModelConfig, *, tokenizer: bool = True, ask_hub: bool = True
) -> ModelInfo | None:
    if is_known(name) and not cached(name):
        folder = cache_dir()
        existing = files.existing(folder)
        if not os.access(existing, os.W_OK | os.X_OK) or not existing.is_dir():
            raise ModelError(
                f"cannot make the model '{name}' in {folder}: '{existing}' is no folder that can "
                "be written to; STRETTO_CACHE in the environment chooses another"
            )
    info = model_info(name)
    if info is None:
        if ask_hub and not is_known(name):
            hub.require(f"the model '{name}'", ModelError, NOT_ON_HUB)
        return None
    if info.folder is None:
        return info
    if "model_type" not in info.config and not config.trust_remote_code:
        raise ModelError(
            f"cannot load the config of '{name}': its config.json names no model_type. Give the "
            "folder of a transformers model"
        )
    if info.config.get("is_encoder_decoder"):
        raise ModelError(
            f"only decoder-only models can be trained; '{name}' is a {info.config['model_type']}, "
            "which has an encoder. Give a causal language model, such as a Llama, Qwen or GPT-NeoX"
        )
    if not info.weights:
        raise ModelError(
            f"cannot load the model of '{name}': the folder has no *.safetensors. Give a folder "
            "with config.json, *.safetensors and the tokenizer's files"
        )
    if tokenizer and not any((info.folder / file).is_file() for file in TOKENIZERS):
        raise ModelError(
            f"cannot load the tokenizer of '{name}': the folder has none of "
            f"{', '.join(TOKENIZERS)}. Copy them from the model that it was trained from"
        )
    return info


def _check_teachers(config: Config, task: Task | None, *, ask_hub: bool) -> None:
    if task:
        check_teachers(task, config.algorithm)
    for role, teacher in config.algorithm.teacher_models.items():
        if info := _check_model(teacher, config.model, ask_hub=ask_hub):
            config.require_positions(f"the {role}", info.positions)
            _check_heads(info, config.cluster.layouts(role))


def _check_tokenizers(config: Config, overrides: Overrides | None) -> None:
    """Check that teachers can read the actor's responses, if their tokenizers are here."""
    if not config.algorithm.teacher_models:
        return
    actor = overrides.tokenizer if overrides else None
    if actor := actor or _tokenizer(config.model.name, config.model):
        for name, model in config.algorithm.teacher_models.items():
            if tokenizer := _tokenizer(model, config.model):
                reads_tokens(config, name, tokenizer, actor)


def _tokenizer(name: str, config: ModelConfig) -> PreTrainedTokenizerBase | None:
    from stretto.models.load import load_tokenizer

    path = cached(name) if is_known(name) else resolve(name)
    return load_tokenizer(path, config.trust_remote_code) if isinstance(path, Path) else None


def _check_heads(info: ModelInfo, layouts: Iterable[Layout]) -> None:
    heads = info.number("num_attention_heads", "n_head") or 0
    kv_heads = info.number("num_key_value_heads") or heads
    for layout in layouts:
        layout.require_divisor(heads, f"attention heads of '{info.name}'")
        layout.require_divisor(kv_heads, f"key-value heads of '{info.name}'")


def _check_stages(info: ModelInfo, pipeline: PipelineConfig, *, alike: bool) -> None:
    if not pipeline.ranks:
        return
    for name in ("actor", "critic"):
        stages = pipeline.stages_of(name)
        if (name == "actor" or alike) and info.layers and info.layers < stages:
            raise ModelError(
                f"{pipeline.describe_stages(name)}: '{info.name}' has {info.layers} layers, "
                f"too few for {stages} stages; use at most {info.layers}"
            )


def check_dataset(name: str, *, ask: bool = True) -> None:
    """Refuse a hub dataset without its library, or, with ``ask``, neither cached nor online."""
    from huggingface_hub import constants

    require("datasets", "hub", f"'{name}', a dataset of the hub,")
    stem = name.partition(":")[0]
    root = Path(os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets"))
    in_cache = (root / stem.replace("/", "___").lower()).is_dir() or hub.is_cached("datasets", stem)
    if ask and not in_cache:
        remedy = (
            "Give a local file (.jsonl, .json or .parquet), or download it where there is a network"
        )
        hub.require(f"the dataset '{name}'", TaskError, remedy)
