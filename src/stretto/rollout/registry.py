"""Engines by ``rollout.engine``. ``tests/contracts`` tests the contract of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from stretto.config import Config, RolloutConfig
from stretto.config.cluster import LEARNER
from stretto.rollout.base import Engine
from stretto.rollout.engine import TorchEngine
from stretto.rollout.vllm.engine import VllmEngine
from stretto.rollout.vllm.llm import OLDEST, installed

ENGINES: Mapping[str, type[Engine]] = {"torch": TorchEngine, "vllm": VllmEngine}


def engine_of(rollout: RolloutConfig) -> type[Engine]:
    return ENGINES["torch" if rollout.engine == "auto" else rollout.engine]


def choose(config: Config) -> tuple[Literal["torch", "vllm"], str]:
    """Return the engine that ``rollout.engine = "auto"`` selects on GPUs, and the reason."""
    version = installed()
    beside = [role for p in config.cluster.processes if LEARNER in p.roles for role in p.roles]
    if config.runtime == "inline":
        return "torch", "with runtime = 'inline' it reads the learner's own weights"
    if any(role.startswith("generator") for role in beside):
        return "torch", "generators in the learner's processes read its weights"
    if config.rollout.engine_args:
        return "torch", "rollout.engine_args are its own"
    if version is None or version < OLDEST:
        return "torch", f"vLLM {OLDEST} or newer is not installed"
    return "vllm", f"there are GPUs, and vLLM {version} is installed"
