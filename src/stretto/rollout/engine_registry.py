"""Engines by ``rollout.engine``. ``tests/contracts`` tests the contract of each."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.config import Config, RolloutConfig
from stretto.config.capabilities import EngineName
from stretto.config.cluster_config import LEARNER
from stretto.rollout.base import Engine
from stretto.rollout.engine import TorchEngine
from stretto.rollout.vllm.llm import OLDEST, installed
from stretto.rollout.vllm.vllm_engine import VllmEngine

ENGINES: Mapping[EngineName, type[Engine]] = {"torch": TorchEngine, "vllm": VllmEngine}


def engine_of(rollout: RolloutConfig) -> type[Engine]:
    return ENGINES[rollout.engine_name]


def choose(config: Config) -> tuple[EngineName, str]:
    """Return the engine that ``rollout.engine = "auto"`` selects on GPUs, and the reason."""
    version = installed()
    roles = [role for p in config.cluster.processes if LEARNER in p.roles for role in p.roles]
    if not config.runtime_kind.has_processes:
        return "torch", f"with runtime = '{config.runtime}' it reads the learner's own weights"
    if any(role.startswith("generator") for role in roles):
        return "torch", "generators in the learner's processes read its weights"
    if config.rollout.engine_args:
        return "torch", "rollout.engine_args are its own"
    if version is None or version < OLDEST:
        return "torch", f"vLLM {OLDEST} or newer is not installed"
    return "vllm", f"there are GPUs, and vLLM {version} is installed"
