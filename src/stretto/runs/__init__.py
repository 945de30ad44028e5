"""The training loop, supervised training, checkpoints, and how a run ends."""

from stretto.observe.run_directory import Best, TrainResult
from stretto.runs.finetuning import RewardModelResult, SftResult, sft, train_reward_model
from stretto.runs.loop import train

__all__ = [
    "Best",
    "RewardModelResult",
    "SftResult",
    "TrainResult",
    "sft",
    "train",
    "train_reward_model",
]
