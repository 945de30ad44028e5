"""``stretto doctor``: reports hardware, installed packages, and what would not work and why."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

from stretto import files
from stretto.config.capabilities import ENGINES
from stretto.errors import PROJECT, extras, is_installed, plain, requirements
from stretto.machine import usable_cores
from stretto.observe.progress import on_stderr
from stretto.saying import working

DEFAULT_MODEL = "smollm2-135m"
_LOW_MEMORY_BYTES = 8 * 10**9
_LOW_DISK_BYTES = 5 * 10**9
_EXTRAS = {
    "bitsandbytes": "model.load_in_4bit, training.optim with 8bit or paged",
    "liger": "model.use_liger_kernel",
    "hub": "datasets of the hub",
    "parquet": "parquet files",
    "tasks": "task.kind = 'reasoning-gym'",
    "pipelines": "fused pipelines",
    "ray": "ranks on several machines",
    **{kind.library: f"rollout.engine = '{n}'" for n, kind in ENGINES.items() if kind.library},
    "tensorboard": "observe.trackers tensorboard",
    "wandb": "observe.trackers wandb",
    "prometheus": "observe.prometheus_port",
    "renderers": "episodes with a few families of models, such as gpt-oss,",
    "serve": "stretto serve",
    "judge": "LLM judges",
    "lm-eval": "eval --lm-eval",
    "plots": "pictures of pipeline schedules as PNG",
}
"""Features that need each extra."""
_MARKS = {"ok": "  ok  ", "note": " note ", "broken": "BROKEN"}


class Finding(NamedTuple):
    """One line of the report. A 'note' limits the features, 'broken' prevents training."""

    state: Literal["ok", "note", "broken"]
    topic: str
    text: str


def _found(good: bool, topic: str, text: str, note: str) -> Finding:
    return Finding("ok", topic, text) if good else Finding("note", topic, note)


def command_doctor(*, gpu: bool = False) -> int:
    """Report this machine's hardware and packages, and what would not work and why.

    Exit status 1 if something required is broken.

    Args:
        gpu: check instead, on the first GPU, that engines and scorers keep their contracts.
    """
    broken = 0
    verdict = "ready"
    with working(on_stderr, "checking the GPU" if gpu else "looking at this machine"):
        examined = check_gpu() if gpu else examine()
        for state, topic, text in examined:
            broken += state == "broken"
            if topic == "stretto":
                verdict = f"nothing broken was found, but Stretto is {text}"
            print(f"[{_MARKS[state]}] {topic:<13} {text}", flush=True)
    what = "trust no run on this GPU" if gpu else "nothing can be trained before that is repaired"
    print(f"{broken} broken; {what}" if broken else verdict)
    return 1 if broken else 0


def check_gpu() -> Iterator[Finding]:
    """Yield the first GPU, and whether engines and scorers keep their contracts on it."""
    import torch

    if not torch.cuda.is_available():
        yield Finding("broken", "cuda", "torch sees no GPU, so there is nothing to check")
        return
    from stretto.testing.contracts import checked

    device = torch.device("cuda", 0)
    yield Finding("ok", "cuda:0", torch.cuda.get_device_name(device))
    for name, holds, text in checked(device):
        yield Finding("ok" if holds else "broken", name, text)


def examine() -> Iterator[Finding]:
    """Yield all findings, in reading order."""
    import psutil

    python = platform.python_version()
    yield Finding("ok", "python", f"{python} on {platform.system()} {platform.machine()}")
    physical = psutil.cpu_count(logical=False)
    yield Finding("ok", "cores", f"{usable_cores()} usable, {physical} physical")
    memory = psutil.virtual_memory()
    text = f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB"
    more = f"; PPO on {DEFAULT_MODEL} wants 8 GB: close other programs, or train 'tiny'"
    yield _found(memory.available >= _LOW_MEMORY_BYTES, "memory", text, text + more)
    packages = list(_packages())
    yield from packages
    if all(finding.state != "broken" for finding in packages):
        yield from _accelerator()
        yield from _models()
    yield from _extras()


def _packages() -> Iterator[Finding]:
    required = requirements()
    try:
        metadata.version("stretto")
    except metadata.PackageNotFoundError:
        source = f"not installed: it runs from {PROJECT.parent / 'src'}"
        lists = f"{PROJECT} lists the packages that it needs"
        missing = "no list of the packages that it needs was found, so none was checked"
        yield Finding("note", "stretto", f"{source}; {lists if required else missing}")
    for requirement in required:
        yield _package(requirement, "broken")
    for name in ("torch", "transformers"):  # peft takes two seconds, and few runs need it
        try:
            importlib.import_module(name)
        except Exception as error:
            # Any failure of a package's import counts.
            yield Finding("broken", name, f"does not import: {error}; install it again")


def _package(requirement: Requirement, missing: Literal["note", "broken"]) -> Finding:
    name = requirement.name
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(missing, name, f"not installed; pip install {plain(requirement)}")
    if not requirement.specifier.contains(version, prereleases=True):
        text = f"{version}, but {requirement.specifier} is needed; "
        return Finding(missing, name, text + f"pip install {plain(requirement)}")
    return Finding("ok", name, version)


def _accelerator() -> Iterator[Finding]:
    import torch

    from stretto.models.backend import fastest_dtype

    devices = ["cpu"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            yield Finding("ok", f"cuda:{index}", f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB")
        devices.append("cuda")
    else:
        built = torch.version.cuda
        why = f"no device found (torch is built for CUDA {built})" if built else "torch is CPU-only"
        yield Finding("note", "cuda", f"{why}; models run on the CPU, without CUDA graphs")
    for device in devices:
        dtype, because = fastest_dtype(torch.device(device))
        text = f"model.dtype = auto takes {str(dtype).removeprefix('torch.')}: {because}"
        yield Finding("ok", f"{device} dtype", text)


def _models() -> Iterator[Finding]:
    from stretto.models import resolve

    cache = resolve.cache_dir()
    existing = files.existing(cache)
    text = f"{cache} cannot be written to, so no model can be fetched; check its permissions"
    yield _found(os.access(existing, os.W_OK), "cache", str(cache), text)
    text = f"{DEFAULT_MODEL} is not cached; the first use downloads it, and fails offline"
    is_cached = resolve.cached(DEFAULT_MODEL) is not None
    yield _found(is_cached, "model", f"{DEFAULT_MODEL} is cached", text)
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
        yield Finding("note", "hub", "HF_HUB_OFFLINE is set: only hub models on disk can be used")
    for topic, folder in (("disk (cache)", existing), ("disk (runs)", Path.cwd())):
        free = shutil.disk_usage(folder).free
        text = f"{free / 1e9:.1f} GB free"
        more = "; little for models and checkpoints"
        yield _found(free >= _LOW_DISK_BYTES, topic, text, text + more)


def _extras() -> Iterator[Finding]:
    engine_libraries = {kind.library for kind in ENGINES.values()}
    for extra in extras():
        if extra in engine_libraries and is_installed(extra):
            continue  # its build for CPUs may have another name
        specs = requirements(extra)
        packages = [_package(requirement, "note") for requirement in specs]
        if faults := [package for package in packages if package.state != "ok"]:
            facts = ", ".join(f"{name} {text.partition(';')[0]}" for _, name, text in faults)
            use, command = _EXTRAS.get(extra, extra), " ".join(map(plain, specs))
            text = f"{facts}: {use} would not work; pip install {command}"
            yield Finding("note", extra, text)
        elif packages:
            versions = ", ".join(f"{name} {version}" for _, name, version in packages)
            yield Finding("ok", extra, versions)
    if not is_installed("ray"):
        return
    from stretto.workers import ray_cluster

    if cluster := ray_cluster.find():
        has = f"nodes: {cluster.nodes}, CPUs: {cluster.cpus:g}, GPUs: {cluster.gpus:g}"
        yield Finding("ok", "ray cluster", f"{cluster.address}; {has}")
    elif address := os.environ.get("RAY_ADDRESS"):
        text = f"none answers at {address} (RAY_ADDRESS); start it, or unset the variable"
        yield Finding("note", "ray cluster", text)
    else:
        text = "none runs here, nor is RAY_ADDRESS set; 'ray start --head' would start one"
        yield Finding("note", "ray cluster", text)
