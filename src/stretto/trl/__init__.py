"""Drop-in replacements for TRL's trainers: GRPO, RLOO, Online DPO and PPO.

A script imports ``GRPOConfig`` and ``GRPOTrainer`` from ``stretto`` instead of ``trl``, and sets
``GRPOConfig(schedule="oppo")`` for overlap. The same holds for RLOO, Online DPO
(``trl.experimental.online_dpo``) and PPO (``trl.experimental.ppo``, ``trl`` until 0.25).
"""

from stretto.trl.config import GRPOConfig as GRPOConfig
from stretto.trl.config import OnlineDPOConfig as OnlineDPOConfig
from stretto.trl.config import PPOConfig as PPOConfig
from stretto.trl.config import RLOOConfig as RLOOConfig
from stretto.trl.ppo_trainer import PPOTrainer as PPOTrainer
from stretto.trl.trainer import GRPOTrainer as GRPOTrainer
from stretto.trl.trainer import OnlineDPOTrainer as OnlineDPOTrainer
from stretto.trl.trainer import RLOOTrainer as RLOOTrainer
