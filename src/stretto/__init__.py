"""Stretto: reinforcement learning from feedback on language models.

What the commands do is there as functions (:mod:`stretto.api`), and for scripts that were written
for TRL's PPO, GRPO, RLOO and Online DPO there are its trainers and configs (:mod:`stretto.trl`).

Importing this package loads nothing heavy; nor do ``stretto.config`` and
``stretto.config.recipes``. It sets how OpenMP's threads wait (:mod:`stretto.models.backend`), which
is read when torch is imported: import ``stretto`` before ``torch``.
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
    "report",
    "resume",
    "resume_alignment",
    "sft",
    "simulate",
    "train",
    "train_reward_model",
]


def __getattr__(name: str) -> Any:
    """Load what can be imported from here when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'stretto' has no attribute '{name}'")
    of_trl = name.startswith(("PPO", "GRPO", "RLOO", "OnlineDPO"))
    module = "trl" if of_trl else "config" if name.endswith("Config") else "api"
    return getattr(importlib.import_module(f"stretto.{module}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
