"""A trainer for scripts that were written for TRL's PPO trainer.

A script changes ``from trl import PPOConfig, PPOTrainer`` to ``from stretto import PPOConfig,
PPOTrainer``, and has ``PPOConfig(schedule="oppo")`` for overlap.
"""

from stretto.trl.config import PPOConfig
from stretto.trl.trainer import PPOTrainer

__all__ = ["PPOConfig", "PPOTrainer"]
