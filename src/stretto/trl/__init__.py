"""Trainers for scripts that were written for TRL's.

A script changes ``from trl import GRPOConfig, GRPOTrainer`` to ``from stretto import GRPOConfig,
GRPOTrainer``, and has ``GRPOConfig(schedule="oppo")`` for overlap; so for RLOO, for Online DPO
(``trl.experimental.online_dpo``) and for PPO (``trl.experimental.ppo``, or ``trl`` until 0.25).
"""

from stretto.trl.config import GRPOConfig, OnlineDPOConfig, PPOConfig, RLOOConfig
from stretto.trl.ppo import PPOTrainer
from stretto.trl.trainer import GRPOTrainer, OnlineDPOTrainer, RLOOTrainer

__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
]
