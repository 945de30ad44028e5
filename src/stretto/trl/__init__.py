"""Drop-in replacements for TRL's trainers: GRPO, RLOO, Online DPO and PPO.

A script imports ``GRPOConfig`` and ``GRPOTrainer`` from ``stretto`` instead of ``trl``, and sets
``GRPOConfig(schedule="oppo")`` for overlap. The same holds for RLOO, Online DPO
(``trl.experimental.online_dpo``) and PPO (``trl.experimental.ppo``, ``trl`` until 0.25).
"""

from stretto.trl.config import GRPOConfig, OnlineDPOConfig, PPOConfig, RLOOConfig
from stretto.trl.ppo_trainer import PPOTrainer
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
