"""Stretto: reinforcement learning from feedback on language models.

:mod:`stretto.api` has the commands as functions. :mod:`stretto.trl` has trainers and configs for
scripts written for TRL's PPO, GRPO, RLOO and Online DPO.

Importing this package, ``stretto.config`` or ``stretto.config.recipes`` loads nothing heavy. Import
``stretto`` before ``torch``, because it sets how OpenMP's threads wait
(:mod:`stretto.models.backend`), which torch reads when it is imported.
"""

# ruff: noqa: F403, F405

import importlib
from typing import TYPE_CHECKING, Any

from stretto.models.backend import sleep_when_waiting

if TYPE_CHECKING:
    from stretto.api import *
    from stretto.config import Config, RewardModelConfig, SftConfig
    from stretto.trl import *

__version__ = "0.1.0"

sleep_when_waiting()

__all__ = [
    "Config",
    "GRPOConfig",
    "GRPOTrainer",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardModelConfig",
    "SftConfig",
    "__version__",
    "align",
    "benchmark",
    "compare",
    "evaluate",
    "generate",
    "label",
    "label_responses",
    "load_recipe",
    "measure",
    "replay",
    "report",
    "resume",
    "resume_alignment",
    "sft",
    "simulate",
    "train",
    "train_reward_model",
]


def __getattr__(name: str) -> Any:
    """Import exported names on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'stretto' has no attribute '{name}'")
    of_trl = name.startswith(("PPO", "GRPO", "RLOO", "OnlineDPO"))
    module = "trl" if of_trl else "config" if name.endswith("Config") else "api"
    return getattr(importlib.import_module(f"stretto.{module}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
